"""`LiteConsumer` on Apache's 5.5 broker and on ours: the same tests, the same code."""

from __future__ import annotations

import pytest
from rocketlet.client import AdminClient, LiteConsumer, Message, Producer, Reject, RetryLater
from rocketlet.client.admin.dead_letters import dead_letters
from rocketlet.client.consuming.handling import Outcome
from rocketlet.protocol.bodies import GroupConfig

from bench.peers import Apache

from ..conftest import eventually
from ..support.handlers import Inbox
from .features import area
from .systems import System, numbers, of_five

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]
feature = area("Our client on Apache's broker", client="Apache 5.5.0")


async def parent_of(system: System, **attributes: str) -> tuple[str, str]:
    """Create a parent topic, and a group that is bound to it. Return both names."""
    number = next(numbers)
    topic, group = f"CHAT{number}", f"chats{number}"
    async with AdminClient(system.address) as admin:
        await admin.create_topic(topic, message_type="LITE")
        bound = {"lite.bind.topic": topic, **attributes}
        await admin.create_group(GroupConfig(group, consume_orderly=True, attributes=bound))
    return topic, group


async def send(system: System, topic: str, lite_topic: str, *bodies: bytes) -> None:
    async with Producer(system.address) as producer:
        for body in bodies:
            await producer.send(topic, body, lite_topic=lite_topic)


@feature("lite topics: subscribed while the consumer runs, in order, retried, suspended, unsubscribed")
async def test_lite_topics_are_received_in_order(system: System) -> None:
    of_five(system)
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
        await send(system, topic, "s1", b"a", b"b", b"c", b"d")
        await eventually(lambda: ("s1", b"d", 1) in seen)
        await consumer.subscribe("s2")
        await send(system, topic, "s2", b"x")
        await eventually(lambda: ("s2", b"x", 1) in seen)
        await consumer.unsubscribe("s1")
        await send(system, topic, "s1", b"later")
        await send(system, topic, "s2", b"y")
        await eventually(lambda: ("s2", b"y", 1) in seen)
    assert [body for name, body, _ in seen if name == "s1"] == [b"a", b"b", b"b", b"c", b"c", b"d"]
    assert ("s1", b"b", 2) in seen
    suspended = 1 if isinstance(system._system, Apache) else 2  # Apache counts a suspension by remoting as an attempt
    assert seen.count(("s1", b"c", 1)) == suspended
    inbox = Inbox()
    async with LiteConsumer(system.address, group, topic, inbox, lite_topics=["s1"]):
        await eventually(lambda: inbox.bodies == [b"later"])


@feature("lite topics: offset options of a subscription")
async def test_a_subscription_sets_the_offset(system: System) -> None:
    of_five(system)
    topic, group = await parent_of(system)
    await send(system, topic, "s1", b"a", b"b", b"c")
    inbox = Inbox()
    async with LiteConsumer(system.address, group, topic, inbox) as consumer:
        await consumer.subscribe("s1", offset=2)
        await eventually(lambda: inbox.bodies == [b"c"])
        await consumer.subscribe("s1", start="first")
        await eventually(lambda: inbox.bodies == [b"c", b"a", b"b", b"c"])
        await consumer.subscribe("s1", tail=1)
        await eventually(lambda: inbox.bodies == [b"c", b"a", b"b", b"c", b"c"])


@feature("lite topics: the last subscriber of an exclusive group takes over")
async def test_an_exclusive_member_takes_over(system: System) -> None:
    of_five(system)
    topic, group = await parent_of(system, **{"lite.sub.model": "Exclusive"})
    taken: list[str] = []
    first, second = Inbox(), Inbox()
    async with (
        LiteConsumer(system.address, group, topic, first, lite_topics=["s1"], on_taken=taken.append) as earlier,
        LiteConsumer(system.address, group, topic, second) as later,
    ):
        await send(system, topic, "s1", b"a")
        await eventually(lambda: first.bodies == [b"a"])
        await later.subscribe("s1")
        await eventually(lambda: taken == ["s1"])
        await send(system, topic, "s1", b"b")
        await eventually(lambda: second.bodies == [b"b"])
        assert (earlier.lite_topics, later.lite_topics) == (frozenset[str](), frozenset(["s1"]))


@feature("lite topics: a rejected message becomes a dead letter")
async def test_a_rejected_message_is_dead_lettered(system: System) -> None:
    of_five(system)
    topic, group = await parent_of(system)
    seen: list[bytes] = []

    async def work(message: Message) -> Outcome:
        seen.append(message.body)
        return Reject("no such session") if message.body == b"a" else None

    async with LiteConsumer(system.address, group, topic, work, lite_topics=["s1"]):
        await send(system, topic, "s1", b"a", b"b")
        await eventually(lambda: b"b" in seen)
    assert seen == [b"a", b"b"]
    async with AdminClient(system.address) as admin:
        assert (await dead_letters(admin, group)).stored == 1


@feature("lite topics: a restart of the broker below a consumer")
async def test_a_restart_of_the_broker(system: System) -> None:
    of_five(system)
    topic, group = await parent_of(system)
    inbox = Inbox()
    async with LiteConsumer(system.address, group, topic, inbox, lite_topics=["s1"]):
        await send(system, topic, "s1", b"a")
        await eventually(lambda: inbox.bodies == [b"a"])
        await system.restart_broker()
        await send(system, topic, "s1", b"b")
        await eventually(lambda: inbox.bodies[-1] == b"b")


@feature("lite topics: reports about parent topics, groups and members")
async def test_reports(system: System) -> None:
    of_five(system)
    topic, group = await parent_of(system)
    await send(system, topic, "s1", b"a", b"b")
    async with LiteConsumer(system.address, group, topic, lite_topics=["s1", "s2"]) as consumer:
        await consumer.ack(await consumer.receive(timeout_s=30))
        async with AdminClient(system.address) as admin:

            async def is_known() -> bool:
                found = await admin.lite_group(group)
                return found is not None and [(item.name, item.messages) for item in found.longest] == [("s1", 1)]

            await eventually(is_known)
            parent = await admin.lite_parent(topic)
            assert parent is not None
            assert (parent.lite_topics, parent.groups) == (1, (group,))
            assert await admin.lite_subscriptions(group, topic, [consumer.client_id]) == {consumer.client_id: 2}
            assert "CID_ONS-HTTP-PROXY" not in await admin.groups()
            assert not [name for name in await admin.topics() if name.startswith("RMQ_SYS")]
            assert await admin.lite_subscribers(topic, "s1") == {(consumer.client_id, group)}
