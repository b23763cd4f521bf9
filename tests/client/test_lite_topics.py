"""Messages of lite topics, sent and consumed by our own client."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from rocketlet import sync
from rocketlet.client import (
    Access,
    BrokerRefused,
    ClientLimits,
    ConfigError,
    Consumer,
    LiteConsumer,
    Message,
    MessageIllegal,
    Outgoing,
    Producer,
    Reject,
    RetryLater,
    SharedConsumer,
    TopicNotFound,
)
from rocketlet.client.consuming.handling import Outcome
from rocketlet.client.wire.connection import Encoding
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import LiteAction, LiteSubscription, encode_lite_subscription
from rocketlet.testing import Broker as KitBroker

from ..conftest import Node, Nodes, Wire, eventually
from ..support.handlers import Inbox
from ..support.topics import put, stored


async def test_message_reaches_its_lite_topic_and_shows_it(node: Node) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        for body in (b"1", b"2"):
            await producer.send("t", body, lite_topic="session-42", properties={"color": "blue"})
    assert [(name, lite.next) for name, lite in node.broker.lites.of("t").items()] == [("session-42", 2)]
    inbox = Inbox()
    async with Consumer(node.address, "plain", "t", inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 2)
    message = inbox.messages[0]
    assert (message.lite_topic, message.user_properties) == ("session-42", {"color": "blue"})
    assert message.outgoing().lite_topic == "session-42"


@pytest.mark.parametrize(
    ("encoding", "renewed"), [("auto", []), ("json", [("COMPLETE_ADD", {"b"}), ("COMPLETE_ADD", {"a", "b"})])]
)
async def test_repeated_subscription_with_an_offset_is_renewed_at_an_apache_broker(
    encoding: Encoding, renewed: list[tuple[str, set[str]]]
) -> None:
    """Only a broker that does not respond in MessagePack counts as one of Apache's, which delivers from a new offset only to
    a new subscription. A test on Apache's broker would wait for seconds."""
    inbox = Inbox()
    async with KitBroker() as broker:
        broker.create_topic("t", 1, message_type="LITE")
        async with (
            Producer(broker.address) as producer,
            LiteConsumer(
                broker.address, "g", "t", inbox, lite_topics=["a", "b"], access=Access(encoding=encoding)
            ) as consumer,
        ):
            await producer.send("t", b"1", lite_topic="a")
            await broker.until(lambda: inbox.bodies == [b"1"])
            before = len(broker.requests_of("LITE_SUBSCRIPTION_CTL"))
            await consumer.subscribe("a", start="first")
            await broker.until(lambda: inbox.bodies == [b"1", b"1"])
            assert consumer.lite_topics == {"a", "b"}
            bodies = [orjson.loads(item.body) for item in broker.requests_of("LITE_SUBSCRIPTION_CTL")[before:]]
    changes = [(item["action"], set(item["liteTopicSet"])) for body in bodies for item in body["subscriptionSet"]]
    assert changes == [("PARTIAL_ADD", {"a"}), *renewed]


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, 7])
async def test_illegal_name_of_a_lite_topic_is_refused(node: Node, name: Any) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="lite topic"):
            await producer.send("t", b"x", lite_topic=name)
    assert stored(node) == []


async def test_lite_topic_excludes_delays_priorities_and_batches(node: Node) -> None:
    put(node, message_type="LITE")
    async with Producer(node.address) as producer:
        for other in ({"delay": 5}, {"priority": 1}, {"delay_level": 1}):
            with pytest.raises(MessageIllegal, match="lite_topic"):
                await producer.send("t", b"x", lite_topic="a", **other)  # type: ignore[arg-type]
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", lite_topic="a")])
    assert stored(node) == []


async def test_refusal_says_how_a_topic_of_lite_topics_is_created(node: Node) -> None:
    put(node)
    async with Producer(node.address) as producer:
        with pytest.raises(BrokerRefused, match="rocketlet topics create t --lite"):
            await producer.send("t", b"x", lite_topic="a")


async def test_sync_producer_sends_to_lite_topics(node: Node) -> None:
    put(node, message_type="LITE")

    def run() -> None:
        with sync.Producer(node.address) as producer:
            producer.send("t", b"x", lite_topic="a")

    await asyncio.to_thread(run)
    assert list(node.broker.lites.of("t")) == ["a"]


# LiteConsumer


def ready(node: Node, **attributes: str) -> None:
    """The parent topic t, and its lite group g. Underscores in names of attributes stand for dots."""
    put(node, message_type="LITE")
    named = {name.replace("_", "."): value for name, value in attributes.items()}
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "t", **named}))


async def chat(node: Node, name: str, *bodies: bytes) -> None:
    async with Producer(node.address) as producer:
        for body in bodies:
            await producer.send("t", body, lite_topic=name)


def unfinished(node: Node) -> int:
    return node.broker.pops.pools.unfinished("g")


async def test_member_gets_the_lite_topics_that_it_is_subscribed_to_in_order(node: Node) -> None:
    put(node, message_type="LITE")
    inbox = Inbox()
    await chat(node, "a", *(b"a%d" % number for number in range(20)))
    await chat(node, "other", b"x")
    async with LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"]) as consumer:
        await eventually(lambda: len(inbox.messages) == 20)
        await consumer.subscribe("b", "c")
        await chat(node, "c", b"c0")
        await eventually(lambda: len(inbox.messages) == 21 and unfinished(node) == 0)
        assert consumer.lite_topics == {"a", "b", "c"}
    assert inbox.bodies == [*(b"a%d" % number for number in range(20)), b"c0"]
    assert {(message.lite_topic, message.topic) for message in inbox.messages} == {("a", "t"), ("c", "t")}
    assert node.broker.lite_offsets.of("g", "t") == {"a": 20, "c": 1}
    assert node.broker.pops.lite.count == 0


async def test_slow_message_delays_no_other_lite_topic(node: Node) -> None:
    ready(node)
    gate, seen = asyncio.Event(), list[bytes]()

    async def work(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"a0":
            await gate.wait()

    await chat(node, "a", b"a0", b"a1")
    async with LiteConsumer(node.address, "g", "t", work, lite_topics=["a", "b"]):
        await eventually(lambda: seen == [b"a0"])
        await chat(node, "b", b"b0", b"b1")
        await eventually(lambda: seen == [b"a0", b"b0", b"b1"])
        gate.set()
        await eventually(lambda: seen[3:] == [b"a1"])


async def test_failed_message_is_redelivered_before_those_after_it(node: Node) -> None:
    ready(node)
    attempts: list[tuple[bytes, int]] = []
    outcomes: list[Outcome] = [RetryLater(delay=0.01), RetryLater(delay=0.01, counts=False), None, Reject("bad"), None]

    async def work(message: Message) -> Outcome:
        attempts.append((message.body, message.attempt))
        return outcomes.pop(0)

    await chat(node, "a", b"1", b"2", b"3")
    async with LiteConsumer(node.address, "g", "t", work, lite_topics=["a"]):
        await eventually(lambda: not outcomes and unfinished(node) == 0)
    assert attempts == [(b"1", 1), (b"1", 2), (b"1", 2), (b"2", 1), (b"3", 1)]
    assert [record.body for record in stored(node, "%DLQ%g")] == [b"2"]


async def test_messages_that_arrive_together_are_handled_concurrently_without_an_order(node: Node) -> None:
    ready(node)
    gate, seen = asyncio.Event(), list[bytes]()

    async def work(message: Message) -> None:
        seen.append(message.body)
        if message.body != b"0":
            await gate.wait()

    await chat(node, "a", b"0", b"1", b"2", b"3")
    async with LiteConsumer(node.address, "g", "t", work, lite_topics=["a"], orderly=False):
        await eventually(lambda: seen == [b"0", b"1", b"2", b"3"])
        gate.set()
        await eventually(lambda: unfinished(node) == 0)


async def test_visibility_timeout_is_extended_while_the_handler_runs(node: Node) -> None:
    ready(node)
    inbox = Inbox(gate=(gate := asyncio.Event()))
    await chat(node, "a", b"1")
    async with LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"], invisible_s=1.0):
        await eventually(lambda: bool(inbox.messages))
        (delivery,) = next(node.broker.pops.pools.deliveries()).unfinished.values()
        first_s = delivery.deadline_s
        await eventually(lambda: delivery.deadline_s > first_s + 1.0)
        gate.set()
        await eventually(lambda: unfinished(node) == 0)
    assert len(inbox.messages) == 1


@pytest.mark.parametrize(
    ("option", "bodies"),
    [
        ({}, [b"0", b"1", b"2"]),
        ({"start": "first"}, [b"0", b"1", b"2"]),
        ({"start": "last"}, []),
        ({"start": 0}, [b"0", b"1", b"2"]),
        ({"offset": 1}, [b"1", b"2"]),
        ({"tail": 1}, [b"2"]),
    ],
)
async def test_subscription_starts_where_it_says(node: Node, option: dict[str, Any], bodies: list[bytes]) -> None:
    ready(node)
    inbox = Inbox()
    await chat(node, "a", b"0", b"1", b"2")
    async with LiteConsumer(node.address, "g", "t", inbox) as consumer:
        await consumer.subscribe("a", **option)
        await chat(node, "a", b"new")
        await eventually(lambda: b"new" in inbox.bodies)
    assert inbox.bodies == [*bodies, b"new"]


async def test_unsubscribed_lite_topic_goes_to_another_member(node: Node) -> None:
    ready(node)
    first, second = Inbox(), Inbox()
    async with (
        LiteConsumer(node.address, "g", "t", first, lite_topics=["a"]) as one,
        LiteConsumer(node.address, "g", "t", second, lite_topics=["b"]) as two,
    ):
        await chat(node, "a", b"1")
        await eventually(lambda: first.bodies == [b"1"])
        await one.unsubscribe("a")
        await two.subscribe("a")
        await chat(node, "a", b"2")
        await eventually(lambda: second.bodies == [b"2"])
        assert sorted(one.lite_topics) == []
        assert sorted(two.lite_topics) == ["a", "b"]
    assert first.bodies == [b"1"]


async def test_member_of_an_exclusive_group_learns_that_a_lite_topic_was_taken(node: Node) -> None:
    ready(node, lite_sub_model="Exclusive")
    taken: list[str] = []
    first, second = Inbox(), Inbox()
    async with (
        LiteConsumer(node.address, "g", "t", first, lite_topics=["a", "b"], on_taken=taken.append) as one,
        LiteConsumer(node.address, "g", "t", second) as two,
    ):
        await two.subscribe("a")
        await eventually(lambda: taken == ["a"])
        assert one.lite_topics == {"b"}
        await chat(node, "a", b"1")
        await eventually(lambda: second.bodies == [b"1"])
    assert first.bodies == []


async def test_lite_topic_stays_subscribed_when_an_earlier_eviction_is_reported_late(node: Node, wire: Wire) -> None:
    ready(node, lite_sub_model="Exclusive")
    add = LiteSubscription(LiteAction.PARTIAL_ADD, "other", "g", "t", ("a",))
    async with LiteConsumer(node.address, "g", "t", Inbox(), lite_topics=["a"]) as consumer:
        await eventually(lambda: node.broker.pops.lite.count == 1)
        opaque = wire.send(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(add))
        # The broker evicts this member and then the other; both notifications are under way.
        await consumer.subscribe("a")
        await wire.answer(opaque)
        assert consumer.lite_topics == {"a"}


async def test_member_that_starts_with_a_lite_topic_takes_it_from_the_one_that_has_it(node: Node) -> None:
    ready(node, lite_sub_model="Exclusive")
    taken: list[str] = []
    first, second = Inbox(), Inbox()
    async with (
        LiteConsumer(node.address, "g", "t", first, lite_topics=["a", "b"], on_taken=taken.append) as one,
        LiteConsumer(node.address, "g", "t", second, lite_topics=["a"], on_taken=taken.append) as two,
    ):
        await eventually(lambda: taken == ["a"])
        assert one.lite_topics == {"b"}
        assert two.lite_topics == {"a"}
        await chat(node, "a", b"1")
        await eventually(lambda: second.bodies == [b"1"])
    assert first.bodies == []


async def test_member_of_a_wildcard_group_gets_every_lite_topic(node: Node) -> None:
    ready(node, lite_sub_wildcard="")
    inbox = Inbox()
    await chat(node, "a", b"1")
    async with LiteConsumer(node.address, "g", "t", inbox) as consumer:
        await chat(node, "b", b"2")
        await eventually(lambda: sorted(inbox.bodies) == [b"1", b"2"])
        with pytest.raises(BrokerRefused, match="every lite topic"):
            await consumer.subscribe("c")
        assert consumer.lite_topics == frozenset()
    with pytest.raises(BrokerRefused, match="every lite topic"):
        await LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"]).start()


async def test_refused_subscription_changes_nothing(node: Node) -> None:
    ready(node, lite_sub_client_quota="2")
    async with LiteConsumer(node.address, "g", "t", Inbox(), lite_topics=["a"]) as consumer:
        with pytest.raises(BrokerRefused, match="allows 2"):
            await consumer.subscribe("b", "c")
        with pytest.raises(BrokerRefused, match="allows 2"):
            await consumer.subscribe("a", "b", "c", start="first")
        assert consumer.lite_topics == {"a"}
        assert node.broker.pops.lite.count == 1
        await consumer.subscribe("b")
        assert node.broker.pops.lite.count == 2


async def test_start_with_more_lite_topics_than_the_group_allows_is_refused(node: Node) -> None:
    ready(node, lite_sub_client_quota="1")
    with pytest.raises(BrokerRefused, match="allows 1"):
        await LiteConsumer(node.address, "g", "t", Inbox(), lite_topics=["a", "b"]).start()


async def test_subscriptions_are_restored_after_a_restart_of_the_broker(nodes: Nodes) -> None:
    node = await nodes.start()
    ready(node)
    inbox = Inbox()
    async with LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"]) as consumer:
        await consumer.subscribe("b")
        await chat(node, "a", b"1")
        await eventually(lambda: inbox.bodies == [b"1"] and unfinished(node) == 0)
        await node.stop()
        again = await nodes.start(port=int(node.address.rpartition(":")[2]))
        await chat(again, "b", b"2")
        await eventually(lambda: inbox.bodies == [b"1", b"2"])


@pytest.mark.still
async def test_subscriptions_are_repeated_before_the_broker_drops_them(node: Node) -> None:
    clock = node.clock
    ready(node)
    inbox = Inbox()
    limits = ClientLimits(lite_sync_interval_s=0.01)
    async with LiteConsumer(node.address, "g", "t", inbox, lite_topics=["a"], limits=limits):
        pool = node.broker.pops.pools.lite_pool("g", "t")
        for _ in range(4):
            clock.advance(100)
            await eventually(
                lambda: all(item.synced_s == clock.monotonic_s() for item in pool.queues.subscribers.values())
            )
        await chat(node, "a", b"1")
        await eventually(lambda: inbox.bodies == [b"1"])


async def test_messages_without_a_handler_are_settled_one_by_one(node: Node) -> None:
    ready(node)
    await chat(node, "a", b"1", b"2")
    async with LiteConsumer(node.address, "g", "t", lite_topics=["a"]) as consumer:
        bodies = []
        async for message in consumer:
            bodies.append(message.body)
            if len(bodies) == 2:
                await consumer.ack(message)
                break
        await eventually(lambda: unfinished(node) == 0)
    assert bodies == [b"1", b"2"]


async def test_member_needs_a_parent_topic_and_a_group_of_it(node: Node) -> None:
    put(node, "plain")
    with pytest.raises(TopicNotFound, match="rocketlet topics create t --lite"):
        await LiteConsumer(node.address, "g", "t", Inbox()).start()
    with pytest.raises(BrokerRefused, match="not of the type LITE"):
        await LiteConsumer(node.address, "g", "plain", Inbox()).start()
    put(node, message_type="LITE")
    node.broker.group_configs.put(GroupConfig("g", attributes={"lite.bind.topic": "other"}))
    with pytest.raises(BrokerRefused, match="bound to other, not bound to t"):
        await LiteConsumer(node.address, "g", "t", Inbox()).start()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"lite_topics": "a"}, "give \\['a'\\]"),
        ({"lite_topics": ["a b"]}, "lite topic"),
        ({"lite_topics": [7]}, "expected a str"),
        ({"concurrency": 101}, "concurrency"),
        ({"topic": ""}, "subscriptions"),
        ({"on_taken": 7}, "on_taken"),
    ],
)
def test_invalid_argument_of_a_lite_consumer_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LiteConsumer("127.0.0.1:1", "g", **{"topic": "t", "handler": Inbox(), **fields})


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"start": "first", "tail": 1}, "start and tail conflict"),
        ({"start": "begin"}, "start"),
        ({"offset": -1}, "offset"),
        ({"tail": True}, "tail"),
    ],
)
async def test_invalid_start_of_a_subscription_is_refused(node: Node, option: dict[str, Any], match: str) -> None:
    ready(node)
    async with LiteConsumer(node.address, "g", "t", Inbox()) as consumer:
        with pytest.raises(ConfigError, match=match):
            await consumer.subscribe("a", **option)


async def test_shared_consumer_suspends_a_message_without_counting_the_attempt(node: Node) -> None:
    put(node)
    attempts: list[int] = []

    async def work(message: Message) -> Outcome:
        attempts.append(message.attempt)
        return RetryLater(delay=0.01, counts=False) if len(attempts) < 3 else None

    async with SharedConsumer(node.address, "g", "t", work, max_reconsume_times=0), Producer(node.address) as producer:
        await producer.send("t", b"x")
        await eventually(lambda: len(attempts) == 3 and unfinished(node) == 0)
    assert attempts == [1, 1, 1]
