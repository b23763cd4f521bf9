"""A topic is deleted and recreated while its queues have owners: offsets start over, and owners get all new messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rocketlet.client import AdminClient, Consumer, Producer
from rocketlet.client.config import ClientLimits
from rocketlet.testing import Broker

from ..conftest import PATIENCE_S

NEW = [b"new %d" % number for number in range(5)]


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(default_queues=1) as broker:
        yield broker


def member(broker: Broker, seen: list[bytes]) -> Consumer:
    patient = ClientLimits(hand_over_timeout_s=10 * PATIENCE_S)
    return Consumer(broker.address, "g", "t", lambda message: seen.append(message.body), limits=patient)


async def made_anew(broker: Broker, *, messages: list[bytes]) -> None:
    async with AdminClient(broker.address) as admin:
        await admin.delete_topic("t")
        await admin.create_topic("t", queues=1)
    async with Producer(broker.address) as producer:
        for body in messages:
            await producer.send("t", body)


@asynccontextmanager
async def paused_behind_three(broker: Broker) -> AsyncIterator[tuple[Consumer, list[bytes]]]:
    """A member that has handled three messages and is paused."""
    broker.create_topic("t", 1)
    seen: list[bytes] = []
    async with Producer(broker.address) as producer, member(broker, seen) as consumer:
        await consumer.assigned()
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: broker.committed("g", "t") == {0: 3})
        await consumer.pause()
        yield consumer, seen


async def test_an_owner_reads_the_new_topic_from_its_start(broker: Broker) -> None:
    async with paused_behind_three(broker) as (consumer, seen):
        await made_anew(broker, messages=NEW)
        await consumer.resume()
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
        assert seen[3:] == NEW


@pytest.mark.parametrize("piece", [1, 1024])
async def test_also_when_the_broker_restarts_before_the_owner_reads(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A deletion is written down before it is answered, in this many pieces as there are."""
    monkeypatch.setattr("rocketlet.broker.groups.leases.LOOKS", piece)
    async with paused_behind_three(broker) as (consumer, seen):
        await made_anew(broker, messages=NEW)
        await broker.akill()
        await consumer.resume()
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
        assert seen[3:] == NEW


async def test_who_gets_the_queue_from_its_owner_does_so_too(broker: Broker) -> None:
    async with paused_behind_three(broker) as (_, seen):
        await made_anew(broker, messages=NEW)
    async with member(broker, seen):
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
    assert seen[3:] == NEW


@pytest.mark.parametrize("again", [False, True])
async def test_a_queue_that_is_gone_is_given_up_immediately(broker: Broker, *, again: bool) -> None:
    """Its commit is refused, and would be refused for ever."""
    async with paused_behind_three(broker) as (consumer, _):
        if again:
            await made_anew(broker, messages=[])
        else:
            async with AdminClient(broker.address) as admin:
                await admin.delete_topic("t")
        async with asyncio.timeout(PATIENCE_S):
            await consumer.stop()
    assert not [queue for queue in broker.owners("g") if queue.topic == "t"]
