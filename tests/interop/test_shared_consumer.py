"""Our client as a member that shares messages, on Apache's 5.5 and on our own broker: the same tests, the same code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rocketlet.client import BrokerRefused, Message, Producer, Reject, RetryLater, SharedConsumer
from rocketlet.client.consuming.handling import Outcome

from ..conftest import eventually
from ..support.handlers import Inbox
from ..support.pacing import pass_real_time, work_for
from .features import area
from .systems import System, of_five

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
feature = area("Our client on Apache's broker", client="Apache 5.5.0")


async def send(address: str, topic: str, count: int, **options: Any) -> None:
    async with Producer(address) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, **options)


@feature("messages shared by more members than queues, acknowledged in batches, extended, retried, dead-lettered")
async def test_members_share_messages(system: System) -> None:
    of_five(system)
    topic, group = await system.topic(2), await system.group()
    seen: list[tuple[bytes, int]] = []
    outcomes: dict[bytes, list[Outcome]] = {b"1": [RetryLater(delay=1)], b"2": [Reject("no such customer")]}

    async def work(message: Message) -> Outcome:
        seen.append((message.body, message.attempt))
        if message.body == b"3":
            await work_for(3)
            assert not message.lease_lost
        return outcomes.get(message.body, []).pop() if outcomes.get(message.body) else None

    members = [SharedConsumer(system.address, group, topic, work, start="first", invisible_s=2) for _ in range(3)]
    for member in members:
        await member.start()
    await send(system.address, topic, 40)
    await eventually(lambda: len({body for body, _ in seen}) == 40 and (b"1", 2) in seen)
    dead = Inbox()
    async with SharedConsumer(system.address, await system.group(), f"%DLQ%{group}", dead, start="first"):
        await eventually(lambda: bool(dead.messages))
    for member in members:
        await member.stop()
    assert Counter(body for body, _ in seen) == {b"%d" % number: 1 + (number == 1) for number in range(40)}
    assert dead.bodies == [b"2"]
    left = Inbox()
    async with SharedConsumer(system.address, group, topic, left, invisible_s=2):
        await send(system.address, topic, 1, tag="last")
        await eventually(lambda: bool(left.messages))
        await pass_real_time(3)
    assert [message.tag for message in left.messages] == ["last"], "all was acknowledged"


@feature("messages shared in order, filtered by tag, received and settled by hand")
async def test_members_share_in_order(system: System) -> None:
    of_five(system)
    topic, group = await system.topic(1), await system.group(consume_orderly=True)
    await send(system.address, topic, 6, tag="a", properties={"__SHARDINGKEY": "k"})
    await send(system.address, topic, 2, tag="b")
    seen: list[tuple[bytes, int]] = []
    async with SharedConsumer(system.address, group, {topic: "a"}, orderly=True, start="first") as consumer:
        while len(seen) < 7:
            message = await consumer.receive(timeout_s=30)
            seen.append((message.body, message.attempt))
            if message.body == b"2" and message.attempt == 1:
                await consumer.retry(message, RetryLater(delay=1))
            else:
                await consumer.ack(message)
    bodies = [body for body, _ in seen]
    assert bodies == [b"0", b"1", b"2", b"2", b"3", b"4", b"5"]


@feature("a broker that restarts under a member that shares messages")
async def test_a_restart_of_the_broker(system: System) -> None:
    of_five(system)
    topic, group = await system.topic(2), await system.group()
    inbox = Inbox()
    async with SharedConsumer(system.address, group, topic, inbox, start="first"):
        await send(system.address, topic, 5)
        await eventually(lambda: len(inbox.messages) == 5)
        await system.restart_broker()
        await send(system.address, topic, 5)
        await eventually(lambda: len({message.message_id for message in inbox.messages}) == 10)


async def test_a_broker_of_4_9_says_that_it_shares_no_messages(system: System) -> None:
    if not getattr(system._system, "version", "5").startswith("4."):
        pytest.skip("5.x shares messages")
    topic, group = await system.topic(1), await system.group()
    with pytest.raises(BrokerRefused, match="does not have the feature"):
        await SharedConsumer(system.address, group, topic, Inbox()).start()
