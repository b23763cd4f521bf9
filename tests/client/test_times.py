"""Messages that a producer sends to a time, and takes back."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rocketlet import sync
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.broker.runtime import MovableClock
from rocketlet.client import (
    Access,
    AdminClient,
    BrokerRefused,
    ConfigError,
    Consumer,
    MessageIllegal,
    Outgoing,
    Producer,
    SharedConsumer,
    Sql,
    TopicNotFound,
)
from rocketlet.client.config import MAX_INT, TOPIC_QUEUES, ClientLimits
from rocketlet.protocol import properties as props
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.names import TIMER_TOPIC
from rocketlet.protocol.properties import find
from rocketlet.testing import Broker, Fault

from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill
from ..support.requests import send
from ..support.topics import put, stored


def stored_times(node: Node, topic: str = "t") -> list[bytes]:
    store = node.broker.store
    queues = [queue for (name, _), queue in store.queues.items() if name == topic]
    return [store.message(queue, offset).body for queue in queues for offset in range(queue.begin, queue.next)]


@pytest.fixture
async def standing(nodes: Nodes) -> Node:
    return await nodes.start(clock=MovableClock(stands=True))


async def test_a_message_is_sent_after_a_time_or_to_one(standing: Node) -> None:
    now = datetime.fromtimestamp(standing.clock.time_s(), UTC)
    async with Producer(standing.address, default_queues=1) as producer:
        for body, times in {
            b"seconds": {"delay": 1.5},
            b"delta": {"delay": timedelta(seconds=3)},
            b"at": {"at": now + timedelta(seconds=5)},
        }.items():
            assert (await producer.send("t", body, **times)).recall_handle  # type: ignore[arg-type]
        assert not (await producer.send("t", b"now", delay=0)).recall_handle
        assert not (await producer.send("t", b"past", at=now - timedelta(days=1))).recall_handle
    assert stored_times(standing) == [b"now", b"past"]
    for seconds, body in ((1.501, b"seconds"), (1.5, b"delta"), (2, b"at")):
        standing.clock.advance(seconds)
        assert stored_times(standing)[-1] == body


async def test_a_message_is_taken_back_once(standing: Node) -> None:
    async with Producer(standing.address, default_queues=1) as producer:
        sent = await producer.send("t", b"x", delay=60)
        assert await producer.recall(sent)
        assert not await producer.recall(sent.recall_handle)
        late = await producer.send("t", b"y", delay=5)
        standing.clock.advance(70)
        assert not await producer.recall(late)
        with pytest.raises(MessageIllegal, match="delay or at"):
            await producer.recall(await producer.send("t", b"z"))
        for odd in (None, "", "of another make", 5):
            with pytest.raises(MessageIllegal, match=f"{odd!r} is not a recall handle"):
                await producer.recall(odd)  # type: ignore[arg-type]
    assert stored_times(standing) == [b"y", b"z"]


@pytest.mark.parametrize(
    ("times", "hint"),
    [
        ({"delay": -1}, "0 or more"),
        ({"delay": float("nan")}, "0 or more"),
        ({"delay": True}, "timedelta"),
        ({"delay": "5"}, "timedelta"),
        ({"at": datetime(2030, 1, 1)}, "time zone"),
        ({"at": 5}, "time zone"),
        ({"delay": 5, "delay_level": 3}, "one of"),
        ({"delay": 5, "at": datetime.now(UTC)}, "one of"),
        ({"delay_level": -1}, "delay level"),
    ],
)
async def test_what_is_no_time_is_refused(node: Node, times: dict[str, Any], hint: str) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=hint):
            await producer.send("t", b"x", **times)


async def test_a_time_too_far_ahead_is_refused_by_the_broker(node: Node) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(BrokerRefused, match="max delay"):
            await producer.send("t", b"x", delay=timedelta(days=41))


async def test_a_broker_that_would_deliver_immediately_gets_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = dict(BROKER_REQUESTS)
    del handlers[RequestCode.GET_TOPIC_CONFIG]
    monkeypatch.setattr("rocketlet.broker.remoting.dispatch.BROKER_REQUESTS", handlers)  # as 4.9's
    async with Broker() as broker:
        async with Producer(broker.address) as producer:
            with pytest.raises(MessageIllegal, match=r"broker of 4\.9"):
                await producer.send("t", b"x", delay=5)
            await producer.send("t", b"x", delay_level=1)
        assert broker.messages("t") == []


async def test_batches_have_no_time_and_middleware_sees_it(node: Node) -> None:
    seen: list[Outgoing] = []

    async def layer(sending: Any, call: Any) -> Any:
        seen.extend(sending.messages)
        return await call(sending)

    async with Producer(node.address, middleware=[layer]) as producer:
        assert (await producer.send("t", b"x", delay=5)).recall_handle
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", delay=5)])
    assert seen[0].delay == 5


def test_code_without_a_loop_sends_to_times_and_takes_back() -> None:
    with Broker() as broker, sync.Producer(broker.address) as producer:
        first = producer.send("t", b"first", delay=3600)
        producer.send("t", b"second", at=datetime.now(UTC) + timedelta(hours=2))
        assert producer.recall(first)
        broker.clock.advance(hours=3)
        [message] = broker.messages("t")
        assert (message.body, find(message.record.properties, "TIMER_OUT_MS") is not None) == (b"second", True)
        assert "TIMER_OUT_MS" not in message.user_properties


# Where a new group begins: "last" means from the moment when the consumer was entered.


@pytest.mark.parametrize("broadcasting", [False, True])
async def test_sends_that_create_the_topic_are_seen(node: Node, broadcasting: bool) -> None:
    inbox = Inbox()
    async with Consumer(node.address, "g", "new", inbox, broadcasting=broadcasting):
        await fill(node, 4, "new")
        await eventually(lambda: len(inbox.messages) >= 4)
    assert sorted(inbox.bodies) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("broadcasting", [False, True])
@pytest.mark.parametrize("queues", [1, 64])
async def test_a_send_right_after_the_consumer_was_entered_is_seen(
    node: Node, wire: Wire, queues: int, broadcasting: bool
) -> None:
    await create_topic(wire, "t", queues)
    async with Producer(node.address) as producer:
        await producer.send("t", b"old")
        for number in range(5):
            inbox = Inbox()
            async with Consumer(node.address, f"g{number}", "t", inbox, broadcasting=broadcasting):
                await producer.send("t", b"new")
                await producer.send("t", b"newer")
                await eventually(lambda inbox=inbox: len(inbox.messages) >= 2)  # type: ignore[misc]
            assert sorted(inbox.bodies) == [b"new", b"newer"]


async def test_a_group_that_has_read_nothing_yet_has_its_place_all_the_same(node: Node, wire: Wire) -> None:
    """Also in queues that never had a message, and though no member owned anything yet."""
    await create_topic(wire, "t", 4)
    await fill(node, 2)
    async with Consumer(node.address, "g", "t", Inbox()):
        pass
    await fill(node, 8)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox) as consumer:
        await consumer.assigned()
        await eventually(lambda: len(inbox.messages) >= 8)
    assert len(inbox.messages) == 8


async def test_on_a_broker_that_fixes_no_offsets_the_member_remembers_them(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Apache's, which also begins at 0 where the queue's start is still there; here it has expired."""
    monkeypatch.setattr("rocketlet.broker.remoting.groups.EXT_UNKNOWN", "no such field")
    await create_topic(wire, "t", 2)
    await fill(node, 6)
    for queue in node.broker.store.queues.values():
        queue.begin = min(queue.next, 1)
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, access=Access(encoding="json")):
        await fill(node, 4)
        await eventually(lambda: len(inbox.messages) >= 4)
    assert sorted(inbox.bodies) == [b"0", b"1", b"2", b"3"]


SENT_BEFORE, SENT_SINCE = [b"before-%d" % number for number in range(5)], [b"since-%d" % number for number in range(5)]
KINDS: list[tuple[Any, dict[str, Any]]] = [(Consumer, {}), (Consumer, {"broadcasting": True}), (SharedConsumer, {})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("was_there", [True, False])
async def test_history_of_a_broker_that_was_away_is_not_read_and_a_new_broker_is_read_from_its_start(
    nodes: Nodes, connect: Connect, kind: Any, options: dict[str, Any], was_there: bool
) -> None:
    """A group begins at the latest message while a broker is away that has the topic."""
    first = await nodes.start()
    await create_topic(await connect(first.address), "t", 2)
    if was_there:
        second = await nodes.start(name="broker-b", name_servers=(first.address,))
        wire = await connect(second.address)
        await create_topic(wire, "t", 2)
        for number, body in enumerate(SENT_BEFORE):
            await send(wire, body, queue=number % 2)
        await second.stop()
    inbox = Inbox()
    async with kind(first.address, "g", "t", inbox, limits=ClientLimits(route_interval_s=0.05), **options):
        second = await nodes.start(name="broker-b", name_servers=(first.address,))
        wire = await connect(second.address)
        if not was_there:
            await create_topic(wire, "t", 2)
        for number, body in enumerate(SENT_SINCE):
            await send(wire, body, queue=number % 2)
        await eventually(lambda: len(inbox.messages) >= 5)
    assert sorted(inbox.bodies) == SENT_SINCE


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_a_wrong_filter_of_a_topic_that_does_not_exist_is_refused_at_the_start(node: Node, kind: Any) -> None:
    with pytest.raises(BrokerRefused, match="SUBSCRIPTION_PARSE_FAILED"):
        await kind(node.address, "g", {"nowhere": Sql("price >")}, Inbox()).start()


@pytest.mark.parametrize("broadcasting", [False, True])
async def test_a_member_that_asks_for_its_queues_creates_a_topic_where_brokers_create_topics(
    node: Node, broadcasting: bool
) -> None:
    """As a service that starts on a new cluster. The first message would create the topic, too."""
    async with Consumer(node.address, "g", "new", Inbox(), broadcasting=broadcasting) as consumer:
        assert len([queue for queue in await consumer.assigned() if queue.topic == "new"]) == TOPIC_QUEUES
        assert await consumer.lag() == 0


async def test_a_topic_is_not_created_by_a_member_that_may_not(rocketlet: Broker) -> None:
    rocketlet.faults.add(Fault.answer("UPDATE_AND_CREATE_TOPIC", response="NO_PERMISSION"))
    async with Consumer(rocketlet.address, "g", "new", Inbox()) as consumer:
        with pytest.raises(TopicNotFound, match=r"this client may not create it: .*; create it, or send it a message"):
            await consumer.assigned()


# Messages with priorities, sent and handled by our own client.


async def test_urgent_messages_are_handled_first(node: Node) -> None:
    put(node, message_type="PRIORITY")
    async with Producer(node.address) as producer:
        for level in (0, 2, 1, 3, 0):
            await producer.send("t", b"%d" % level, priority=level, properties={"color": "blue"})
    inbox = Inbox()
    async with SharedConsumer(node.address, "g", "t", inbox, concurrency=1, start="first"):
        await eventually(lambda: len(inbox.messages) == 5)
    assert inbox.bodies == [b"3", b"2", b"1", b"0", b"0"]
    first = inbox.messages[0]
    assert (first.priority, first.user_properties, first.outgoing().priority) == (3, {"color": "blue"}, 3)


async def test_priority_counts_before_the_queue_that_a_sender_chose(node: Node) -> None:
    put(node, message_type="PRIORITY")
    async with Producer(node.address) as producer:
        sent = [await producer.send("t", b"x", priority=level, queue_key="same") for level in (1, 9)]
        plain = await producer.send("t", b"y")
    assert [result.queue.queue_id for result in sent] == [1, 3]
    assert {record.queue_id for record in stored(node)} == {1, 3, plain.queue.queue_id}


async def test_delayed_message_has_a_priority_too(node: Node) -> None:
    put(node)
    async with Producer(node.address) as producer:
        await producer.send("t", b"x", priority=2, delay=60)
    (record,) = stored(node, TIMER_TOPIC)
    assert props.find(record.properties, props.REAL_QUEUE_ID) == "2"


@pytest.mark.parametrize("priority", [-1, MAX_INT + 1, 1.5, True, "1"])
async def test_priority_that_brokers_cannot_take_is_refused(node: Node, priority: Any) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="priority"):
            await producer.send("t", b"x", priority=priority)


async def test_message_of_a_batch_has_no_priority(node: Node) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match="one by one"):
            await producer.send_batch("t", [Outgoing(b"x", priority=1)])


async def test_sync_producer_sends_priorities(node: Node) -> None:
    put(node, message_type="PRIORITY")

    def run() -> int:
        with sync.Producer(node.address) as producer:
            return producer.send("t", b"x", priority=2).queue.queue_id

    assert await asyncio.to_thread(run) == 2


@pytest.mark.parametrize(("value", "code"), [("7", 0), ("-1", 13), ("x", 13), ("2147483647", 0), ("2147483648", 13)])
async def test_broker_checks_the_priority_of_other_clients(node: Node, wire: Wire, value: str, code: int) -> None:
    put(node)
    answer = await send(wire, properties=f"{props.PRIORITY}\x01{value}")
    assert (answer.code, len(stored(node))) == (code, int(code == 0))
    assert code in (0, ResponseCode.MESSAGE_ILLEGAL)


async def test_topic_for_priorities_is_created_with_the_admin_client(node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("t", queues=2, message_type="PRIORITY")
        found = node.broker.topics.get("t")
        assert found is not None
        assert (found.write_queues, found.message_type) == (2, "PRIORITY")
        with pytest.raises(ConfigError, match="expected one of DELAY"):
            await admin.create_topic("u", message_type="URGENT")


def test_topic_for_priorities_is_created_with_the_test_kit() -> None:
    with Broker() as broker, sync.Producer(broker.address) as producer:
        broker.create_topic("t", 3, message_type="PRIORITY")
        assert [producer.send("t", b"x", priority=level).queue.queue_id for level in (0, 1, 7)] == [0, 1, 2]
        with pytest.raises(ValueError, match="URGENT"):
            broker.create_topic("u", message_type="URGENT")
