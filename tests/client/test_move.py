"""The users of a cluster continue at another one, and back: nothing is lost, nothing is handed out twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    Producer,
    Reject,
    RetryLater,
    RocketletError,
)
from rocketlet.client.config import ClientLimits
from rocketlet.migration.move import Move
from rocketlet.protocol.names import dlq_topic, retry_topic
from rocketlet.testing import Broker

from ..conftest import eventually
from ..support.handlers import Inbox

SOON = ClientLimits(move_poll_interval_s=0.05, move_quiet_s=0.2)


@pytest.fixture
async def there() -> AsyncIterator[Broker]:
    async with Broker() as broker:
        yield broker


async def handled(address: str, count: int, group: str = "shop") -> list[str]:
    """The bodies that a member gets, which acknowledges this many and stops."""
    inbox = Inbox()
    async with Consumer(address, group, "orders", inbox, start="first") as consumer:
        await eventually(lambda: len(inbox.messages) >= count)
        await consumer.commit()
    return [message.body.decode() for message in inbox.messages]


async def test_a_group_goes_to_another_cluster_and_back(rocketlet: Broker, there: Broker) -> None:
    here = rocketlet
    tries: list[Message] = []

    def fails(message: Message) -> Reject | RetryLater | None:
        tries.append(message)
        return Reject("no") if message.body == b"bad" else RetryLater() if message.body == b"later" else None

    async with AdminClient(here.address) as admin:
        await admin.create_topic("orders", queues=1)
    async with Producer(here.address) as producer:
        for body in (b"bad", b"later", *(b"a%d" % number for number in range(5))):
            await producer.send("orders", body)
        async with Consumer(here.address, "shop", "orders", fails, start="first") as consumer:
            await eventually(lambda: len(tries) >= 7)
            await consumer.commit()
        for number in range(5, 10):
            await producer.send("orders", b"a%d" % number)
    async with Move(here.address, there.address, limits=SOON) as move:
        plan = await move.plan()
        assert plan.topics == {"orders": 12}
        assert [(one.name, one.members, one.lag, one.retries, one.dead) for one in plan.groups] == [
            ("shop", 0, 5, 1, 1)
        ]
        assert plan.blocks == []
        assert await move.copy() == 13, "and the dead letter"
        with pytest.raises(ConfigError, match="--producers"):
            await move.take("shop")
        assert await move.close() == 0
        async with Producer(there.address) as producer:
            await producer.send("orders", b"early")  # before the group has its offsets there
        taking = asyncio.create_task(move.take("shop"))

        def is_taken() -> bool:
            here.clock.advance(0.2)  # the retry is due in 10 s
            return taking.done()

        await eventually(is_taken)
        taken = await taking
    assert (taken.lag, taken.retries, taken.dead) == (6, 1, 1)
    with pytest.raises(RocketletError):
        async with Producer(here.address, retries=0) as producer:
            await producer.send("orders", b"too late")
    async with AdminClient(there.address) as admin:
        assert (await admin.topic(dlq_topic("shop"))).messages == 1
    assert sorted(await handled(there.address, 7)) == sorted(
        ["later", "early", *(f"a{number}" for number in range(5, 10))]
    )
    async with Producer(there.address) as producer:
        for number in range(10, 15):
            await producer.send("orders", b"a%d" % number)
    assert await handled(there.address, 3) == [f"a{number}" for number in range(10, 15)]
    async with Producer(there.address) as producer:
        await producer.send("orders", b"last")
    async with Move(there.address, here.address, returns=True, limits=SOON) as back:
        assert await back.copy() == 7, "without what came from there"
        await back.close()
        assert (await back.take("shop")).lag == 1
        assert await back.copy() == 0
    assert await handled(here.address, 1) == ["last"]
    async with Producer(here.address) as producer:
        await producer.send("orders", b"again here")
    assert await handled(here.address, 1) == ["again here"]


async def test_a_group_with_members_over_there_is_not_taken(rocketlet: Broker, there: Broker) -> None:
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    await handled(rocketlet.address, 1)
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
        async with Consumer(there.address, "shop", "orders", Inbox()) as consumer:
            await consumer.assigned()
            assert "has members at the target already" in (await move.plan()).blocks[0]
            with pytest.raises(ConfigError, match="members at the target"):
                await move.take("shop")


async def test_members_at_the_source_are_waited_for(rocketlet: Broker, there: Broker) -> None:
    said: list[str] = []
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    async with Move(rocketlet.address, there.address, say=said.append, limits=SOON) as move:
        async with Consumer(rocketlet.address, "shop", "orders", Inbox(), start="first") as consumer:
            await consumer.assigned()
            await move.close()
            taking = asyncio.create_task(move.take("shop"))
            await eventually(lambda: said[-1:] == ["shop has 1 member at the source: stop all"])
            assert not taking.done()
        await taking


async def test_a_retry_is_moved_once_though_the_move_ends_before_it_is_noted(
    rocketlet: Broker, there: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Message] = []

    def fails(message: Message) -> RetryLater:
        tries.append(message)
        return RetryLater()

    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"x")
    async with Consumer(rocketlet.address, "shop", "orders", fails, start="first") as consumer:
        await eventually(lambda: bool(tries))
        await consumer.commit()
    rocketlet.clock.advance(60)
    reset, ended = AdminClient.reset, False

    async def ends(admin: AdminClient, group: str, topic: str, to: Any) -> Any:
        nonlocal ended
        if topic == retry_topic("shop") and not ended:
            ended = True
            raise ConnectionFailed("killed")
        return await reset(admin, group, topic, to)

    monkeypatch.setattr(AdminClient, "reset", ends)
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
        with pytest.raises(ConnectionFailed):
            await move.take("shop")
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        assert (await move.take("shop")).retries == 1
    async with AdminClient(there.address) as admin:
        assert (await admin.topic(retry_topic("shop"))).messages == 1


async def test_a_dead_letter_of_a_moved_message_comes_back_and_may_be_replayed_over_there(
    rocketlet: Broker, there: Broker
) -> None:
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_topic("orders", queues=1)
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"bad")
    async with Move(rocketlet.address, there.address, limits=SOON) as move:
        await move.close()
    refused: list[Message] = []

    def refuses(message: Message) -> Reject:
        refused.append(message)
        return Reject("no")

    async with Consumer(there.address, "shop", "orders", refuses, start="first"):
        await eventually(lambda: bool(refused))
    async with AdminClient(there.address) as admin:
        ((queue, span),) = (await admin.topic(dlq_topic("shop"))).ranges.items()
        async for (dead,) in admin.read(queue, span.begin, span.end):
            await admin.send_again(dead)
    async with Move(there.address, rocketlet.address, returns=True, limits=SOON) as back:
        assert await back.copy() == 2, "the dead letter, and the message that was sent again"
    assert [message.body for message in rocketlet.messages("orders")] == [b"bad", b"bad"]
    assert len(rocketlet.messages(dlq_topic("shop"))) == 1
