"""Our consumers of shared messages and of lite topics, on Apache's 5.5 and on our own broker: the same tests and code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rocketlet.client import (
    AdminClient,
    BrokerRefused,
    LiteConsumer,
    Message,
    Producer,
    Reject,
    RetryLater,
    SharedConsumer,
)
from rocketlet.client.admin.dead_letters import dead_letters
from rocketlet.client.consuming.handling import Outcome
from rocketlet.protocol.bodies import GroupConfig

from bench.peers import Apache

from ..conftest import eventually
from ..support.handlers import Inbox
from ..support.pacing import pass_real_time, work_for
from .conftest import JAVA_NEWEST
from .features import area
from .systems import System, numbers, restarted
from .systems import feature as other_feature

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
feature = area("Our client on Apache's broker", client="Apache 5.5.0")
of_five = pytest.mark.parametrize("version", ["rocketlet", JAVA_NEWEST], indirect=True)


async def send(address: str, topic: str, count: int, **options: Any) -> None:
    async with Producer(address) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, **options)


@of_five
@feature("messages shared by more members than queues, acknowledged in batches, extended, retried, dead-lettered")
async def test_members_share_messages(system: System) -> None:
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


@of_five
@feature("messages shared in order, filtered by tag, received and settled by hand")
async def test_members_share_in_order(system: System) -> None:
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


@of_five
@other_feature("a broker that restarts")
@feature("a broker that restarts under a member that shares messages")
@feature("lite topics: a restart of the broker below a consumer")
async def test_members_of_each_kind_continue_after_a_restart_of_the_broker(system: System) -> None:
    topic, group = await system.topic(2), await system.group()
    parent, lite_group = await parent_of(system)
    inbox, lite_inbox = Inbox(), Inbox()
    async with (
        SharedConsumer(system.address, group, topic, inbox, start="first"),
        LiteConsumer(system.address, lite_group, parent, lite_inbox, lite_topics=["s1"]),
        restarted(system),
    ):
        await send(system.address, topic, 5)
        await send_lite(system, parent, "s1", b"a")
        await eventually(lambda: len(inbox.messages) == 5 and lite_inbox.bodies == [b"a"])
        await system.restart_broker()
        await send(system.address, topic, 5)
        await send_lite(system, parent, "s1", b"b")
        await eventually(lambda: len({message.message_id for message in inbox.messages}) == 10)
        await eventually(lambda: lite_inbox.bodies[-1] == b"b")


@pytest.mark.parametrize("version", ["4.9.7"], indirect=True)
async def test_a_broker_of_4_9_says_that_it_shares_no_messages(system: System) -> None:
    topic, group = await system.topic(1), await system.group()
    with pytest.raises(BrokerRefused, match="does not have the feature"):
        await SharedConsumer(system.address, group, topic, Inbox()).start()


# Lite topics


async def parent_of(system: System, **attributes: str) -> tuple[str, str]:
    """Create a parent topic, and a group that is bound to it. Return both names."""
    number = next(numbers)
    topic, group = f"CHAT{number}", f"chats{number}"
    async with AdminClient(system.address) as admin:
        await admin.create_topic(topic, message_type="LITE")
        bound = {"lite.bind.topic": topic, **attributes}
        await admin.create_group(GroupConfig(group, consume_orderly=True, attributes=bound))
    return topic, group


async def send_lite(system: System, topic: str, lite_topic: str, *bodies: bytes) -> None:
    async with Producer(system.address) as producer:
        for body in bodies:
            await producer.send(topic, body, lite_topic=lite_topic)


@of_five
@feature("lite topics: subscribed while the consumer runs, in order, retried, suspended, unsubscribed")
async def test_lite_topics_are_received_in_order(system: System) -> None:
    topic, group = await parent_of(system)
    seen: list[tuple[str | None, bytes, int]] = []
    outcomes: dict[bytes, list[Outcome]] = {
        b"b": [RetryLater(delay=1)],
        b"c": [RetryLater(delay=1, counts=False)],
    }

    async def work(message: Message) -> Outcome:
        seen.append((message.lite_topic, message.body, message.attempt))
        waiting = outcomes.get(message.body)
        return waiting.pop() if waiting else None

    async with LiteConsumer(system.address, group, topic, work, lite_topics=["s1"]) as consumer:
        await send_lite(system, topic, "s1", b"a", b"b", b"c", b"d")
        await eventually(lambda: ("s1", b"d", 1) in seen)
        await consumer.subscribe("s2")
        await send_lite(system, topic, "s2", b"x")
        await eventually(lambda: ("s2", b"x", 1) in seen)
        await consumer.unsubscribe("s1")
        await send_lite(system, topic, "s1", b"later")
        await send_lite(system, topic, "s2", b"y")
        await eventually(lambda: ("s2", b"y", 1) in seen)
    assert [body for name, body, _ in seen if name == "s1"] == [b"a", b"b", b"b", b"c", b"c", b"d"]
    assert ("s1", b"b", 2) in seen
    suspended = 1 if isinstance(system._system, Apache) else 2  # Apache counts a suspension by remoting as an attempt
    assert seen.count(("s1", b"c", 1)) == suspended
    inbox = Inbox()
    async with LiteConsumer(system.address, group, topic, inbox, lite_topics=["s1"]):
        await eventually(lambda: inbox.bodies == [b"later"])


@of_five
@feature("lite topics: offset options of a subscription")
async def test_a_subscription_sets_the_offset(system: System) -> None:
    topic, group = await parent_of(system)
    await send_lite(system, topic, "s1", b"a", b"b", b"c")
    inbox = Inbox()
    async with (
        LiteConsumer(system.address, group, topic, inbox) as consumer,
        AdminClient(system.address) as admin,
    ):
        expected: list[bytes] = []

        async def has_acknowledged() -> bool:
            found = await admin.lite_group(group)
            return inbox.bodies == expected and found is not None and found.messages == 0

        async def acknowledges(*bodies: bytes) -> None:
            """Wait for messages of s1, and then for one of s2, so that a receive after the last acknowledgement has found
            nothing in s1."""
            expected.extend(bodies)
            await eventually(has_acknowledged)
            expected.append(b"x")
            await send_lite(system, topic, "s2", b"x")
            await eventually(has_acknowledged)

        await consumer.subscribe("s2")
        await consumer.subscribe("s1", offset=2)
        await acknowledges(b"c")
        await consumer.subscribe("s1", start="first")  # to which the member is subscribed already
        await acknowledges(b"a", b"b", b"c")
        await consumer.subscribe("s1", tail=1)
        await acknowledges(b"c")


@of_five
@feature("lite topics: the last subscriber of an exclusive group takes over")
async def test_an_exclusive_member_takes_over(system: System) -> None:
    topic, group = await parent_of(system, **{"lite.sub.model": "Exclusive"})
    taken: list[str] = []
    first, second = Inbox(), Inbox()
    async with (
        LiteConsumer(system.address, group, topic, first, lite_topics=["s1"], on_taken=taken.append) as earlier,
        LiteConsumer(system.address, group, topic, second) as later,
    ):
        await send_lite(system, topic, "s1", b"a")
        await eventually(lambda: first.bodies == [b"a"])
        await later.subscribe("s1")
        await eventually(lambda: taken == ["s1"])
        await send_lite(system, topic, "s1", b"b")
        await eventually(lambda: second.bodies == [b"b"])
        assert (earlier.lite_topics, later.lite_topics) == (frozenset[str](), frozenset(["s1"]))


@of_five
@feature("lite topics: a rejected message becomes a dead letter")
async def test_a_rejected_message_is_dead_lettered(system: System) -> None:
    topic, group = await parent_of(system)
    seen: list[bytes] = []

    async def work(message: Message) -> Outcome:
        seen.append(message.body)
        return Reject("no such session") if message.body == b"a" else None

    async with LiteConsumer(system.address, group, topic, work, lite_topics=["s1"]):
        await send_lite(system, topic, "s1", b"a", b"b")
        await eventually(lambda: b"b" in seen)
    assert seen == [b"a", b"b"]
    async with AdminClient(system.address) as admin:
        assert (await dead_letters(admin, group)).stored == 1


@of_five
@feature("lite topics: reports about parent topics, groups and members")
async def test_reports(system: System) -> None:
    topic, group = await parent_of(system)
    await send_lite(system, topic, "s1", b"a", b"b")
    async with LiteConsumer(system.address, group, topic, lite_topics=["s1", "s2"]) as consumer:
        await consumer.ack(await consumer.receive(timeout_s=30))
        async with AdminClient(system.address) as admin:

            async def is_known() -> bool:
                found = await admin.lite_group(group)
                return found is not None and [(item.name, item.messages) for item in found.longest] == [("s1", 1)]

            await eventually(is_known)
            assert await consumer.lag() == 1
            parent = await admin.lite_parent(topic)
            assert parent is not None
            assert (parent.lite_topics, parent.groups) == (1, (group,))
            assert await admin.lite_subscriptions(group, topic, [consumer.client_id]) == {consumer.client_id: 2}
            assert "CID_ONS-HTTP-PROXY" not in await admin.groups()
            assert not [name for name in await admin.topics() if name.startswith("RMQ_SYS")]
            assert await admin.lite_subscribers(topic, "s1") == {(consumer.client_id, group)}
