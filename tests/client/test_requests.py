"""Sends in an outage, requests and replies, messages that are sent again, middleware, a producer's life."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from rocketlet import sync
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.broker.server import Listening, Server
from rocketlet.client import (
    Access,
    AdminClient,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    MessageIllegal,
    Outgoing,
    Producer,
    Reject,
    RequestTimeout,
    Sending,
    SendResult,
    SharedConsumer,
    Sql,
    TopicNotFound,
    TransactionContradicted,
)
from rocketlet.client.config import MAX_INT, TOPIC_QUEUES, ClientLimits
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol import properties as props
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import EndTransaction, write
from rocketlet.protocol.names import TIMER_TOPIC
from rocketlet.protocol.properties import find
from rocketlet.testing import Broker, Fault
from rocketlet.testing import Broker as KitBroker
from rocketlet.testing.clock import MovableClock

from ..client.conftest import only_connection, set_send_timeout, tasks_named
from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox, fill
from ..support.requests import COMMIT, ROLLBACK, send
from ..support.topics import put, stored


async def restarted(nodes: Nodes, node: Node) -> None:
    """The same broker and name server on the same port."""
    routes = Routes()
    broker = BrokerController(node.config, routes)
    server = Server(Listening("127.0.0.1", int(node.address.rpartition(":")[2])), broker=broker, routes=routes)
    nodes.stack.push_async_exit(await server.__aenter__())


async def test_a_send_in_an_outage_uses_the_time_it_has(nodes: Nodes) -> None:
    node = await nodes.start()
    async with Producer(node.address, timeout_s=PATIENCE_S, retries=1) as producer:
        await producer.send("t", b"before")
        await node.stop()
        sends = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(3)]
        sends.append(asyncio.create_task(producer.send_batch("t", [b"a", b"b"])))
        await asyncio.wait(sends, timeout=0.3)
        assert not any(task.done() for task in sends)
        await restarted(nodes, node)
        results = await asyncio.gather(*sends)
    assert [result.status for result in results] == ["ok"] * 4


async def test_a_broker_that_is_missing_in_the_route_for_a_moment_does_not_fail_a_send() -> None:
    async with KitBroker() as broker:
        broker.create_topic("t", 1)
        async with Producer(broker.address, timeout_s=PATIENCE_S) as producer:
            await producer.send("t", b"before")
            broker.faults.add(
                Fault.close("SEND_MESSAGE_V2"),
                Fault.route("t", lambda route: msgspec.structs.replace(route, brokers=()), times=1),
            )
            sent = await producer.send("t", b"after")
            assert [fault.fault.action for fault in broker.faults.injected] == ["close", "route"]
        assert sent.status == "ok"


async def test_a_name_server_that_has_just_restarted_and_knows_no_topic_does_not_fail_a_send() -> None:
    async with KitBroker() as broker:
        broker.create_topic("t", 1)
        async with Producer(broker.address, timeout_s=PATIENCE_S) as producer:
            asked = "GET_ROUTEINFO_BY_TOPIC"
            broker.faults.add(Fault.close(asked), Fault.answer(asked, response=ResponseCode.TOPIC_NOT_EXIST, times=3))
            assert (await producer.send("t", b"x")).status == "ok"


async def test_a_send_in_an_outage_ends_with_its_time_or_immediately_without_retries(node: Node) -> None:
    async with (
        Producer(node.address, timeout_s=PATIENCE_S) as patient,
        Producer(node.address, timeout_s=PATIENCE_S, retries=0) as hasty,
    ):
        for producer in (patient, hasty):
            await producer.send("t", b"before")
        await node.stop()
        set_send_timeout(patient, 0.5)  # not before: what it sent first may take its time
        began_s = time.monotonic()
        with pytest.raises(ConnectionFailed):
            await patient.send("t", b"x")
        assert time.monotonic() - began_s >= 0.45
        with pytest.raises(ConnectionFailed):
            await hasty.send("t", b"x")


async def test_a_request_gets_the_reply_of_who_consumed_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Producer(node.address, "askers") as asker, Producer(node.address, "repliers") as replier:

        async def handle(message: Message) -> None:
            if message.body != b"silence":
                await replier.reply(message, b"pong to " + message.body, properties={"mood": "good"})

        async with Consumer(node.address, "g", "t", handle, start="first"):
            replies = await asyncio.gather(
                *(asker.request("t", b"%d" % number, timeout_s=PATIENCE_S) for number in range(10))
            )
            assert [reply.body for reply in replies] == [b"pong to %d" % number for number in range(10)]
            assert replies[0].user_properties == {"mood": "good"}
            big = await asker.request("t", b"x" * 10_000, timeout_s=PATIENCE_S)
            assert len(big.body) == 10_008
            with pytest.raises(RequestTimeout, match="no consumer replied to the request"):
                await asker.request("t", b"silence", timeout_s=0.2)


async def test_a_reply_needs_a_request_and_somebody_who_waits(node: Node, one_queue: None) -> None:
    inbox = Inbox()
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", inbox, start="first"):
        await producer.send("t", b"plain")
        async with Producer(node.address, "gone") as gone:
            with pytest.raises(RequestTimeout):
                await gone.request("t", b"ping", timeout_s=0.05)
        await eventually(lambda: len(inbox.messages) == 2)
        with pytest.raises(ConfigError, match="is not a request"):
            await producer.reply(inbox.messages[0], b"x")
        with pytest.raises(BrokerRefused, match="not found"):
            await producer.reply(inbox.messages[1], b"x")


async def test_a_dead_letter_can_be_sent_again_as_it_was(node: Node, one_queue: None) -> None:
    seen: list[Message] = []
    dead: list[Message] = []

    async def handle(message: Message) -> Reject | None:
        seen.append(message)
        return Reject() if len(seen) == 1 else None

    async def bury(message: Message) -> None:
        dead.append(message)

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", handle, start="first"):
        sent = await producer.send("t", b"x" * 9000, tag="new", keys=["a", "b"], properties={"price": "5"})
        async with Consumer(node.address, "undertakers", "%DLQ%g", bury, start="first"):
            await eventually(lambda: len(dead) == 1)
        assert dead[0].user_properties == {"price": "5"}
        assert dead[0].properties.keys() > {"price", "UNIQ_KEY"}
        await producer.resend(dead[0])
        await eventually(lambda: len(seen) == 2)
        again = seen[1]
        assert (again.topic, again.body, again.tag, again.keys) == ("t", b"x" * 9000, "new", ["a", "b"])
        assert (again.user_properties, again.message_id, again.reconsume_times) == ({"price": "5"}, sent.message_id, 0)
        await producer.resend(again, "elsewhere")
    assert (
        node.broker.store.queue("elsewhere", 0).next
        + sum(node.broker.store.queue("elsewhere", number).next for number in range(1, 4))
        == 1
    )
    assert again.outgoing() == Outgoing(b"x" * 9000, "new", ["a", "b"], {"price": "5"}, message_id=sent.message_id)


async def test_middleware_is_around_sends(node: Node, one_queue: None) -> None:
    inbox = Inbox()
    trace: list[str] = []

    def layer(name: str) -> Any:
        async def around(sending: Sending, call: Any) -> Any:
            trace.append(f"{name}>{len(sending.messages)}")
            marked = tuple(
                replace(message, properties={**message.properties, name: "1"}) for message in sending.messages
            )
            result = await call(replace(sending, messages=marked))
            trace.append(f"<{name}")
            return result

        return around

    async with Producer(node.address, middleware=[layer("a"), layer("b")]) as producer:
        await producer.send("t", b"one", keys="k")
        await producer.send_batch("t", [b"two", b"three"])
    assert trace == ["a>1", "b>1", "<b", "<a", "a>2", "b>2", "<b", "<a"]
    async with Consumer(node.address, "g", "t", inbox, start="first"):
        await eventually(lambda: len(inbox.messages) == 3)
    assert all(message.user_properties == {"a": "1", "b": "1"} for message in inbox.messages)
    with pytest.raises(ConfigError, match="middleware"):
        Producer(node.address, middleware=["print"])  # type: ignore[list-item]


async def test_a_producer_is_started_once_and_stopped_at_any_time(node: Node) -> None:
    producer = Producer(node.address)
    await producer.stop()
    await producer.start()
    await producer.send("t", b"x")
    await producer.stop()
    await producer.stop()
    with pytest.raises(ConfigError, match="started before; create a new one"):
        await producer.start()


async def test_who_still_sends_when_a_producer_stops_is_notified_of_it(node: Node, four_queues: None) -> None:
    async with Producer(node.address, timeout_s=PATIENCE_S) as producer:
        await producer.send("t", b"first")
        connection = only_connection(producer)
        connection.pause_writing()
        sends = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0)
        await node.stop()
        await eventually(lambda: len(tasks_named("resend")) == 3)
    for sending in sends:
        with pytest.raises(ConfigError, match="has been stopped"):
            await asyncio.wait_for(sending, PATIENCE_S)


async def test_a_producer_whose_stop_is_cancelled_closes_its_sockets(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(node.address)
    await producer.start()
    await producer.send("t", b"x")
    monkeypatch.setattr(Connection, "request", lambda *_, **__: asyncio.get_running_loop().create_future())
    stopping = asyncio.create_task(producer.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await eventually(lambda: len(node.server.connections) == 1)  # only the wire's


async def test_a_topic_that_does_not_exist_is_named_once_and_where_its_queues_are_asked_for(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    node = await nodes.start(auto_create_topics=False)
    async with Consumer(node.address, "g", "nowhere", Inbox()) as consumer:
        with pytest.raises(ConfigError, match="no queues to this consumer yet: the first rebalance has not finished"):
            await consumer.lag()
        await eventually(lambda: "topic_missing" in caplog.text)
        with pytest.raises(ConfigError, match="no queues to this consumer yet: no name server knows the topic nowhere"):
            await consumer.lag()
        with pytest.raises(TopicNotFound, match="nowhere, and brokers do not create topics automatically; create it"):
            await consumer.assigned()
        named = [record for record in caplog.records if "topic_missing" in record.getMessage()]
        assert len(named) == 1
        assert "nowhere" in named[0].getMessage()
        assert "create it" in named[0].getMessage()


async def test_who_has_sent_nothing_replies_where_brokers_create_no_topics() -> None:
    async with KitBroker(auto_create_topics=False) as broker:
        broker.create_topic("t", 1)
        replier = Producer(broker.address, "replier")

        async def reply(message: Message) -> None:
            await replier.reply(message, b"to " + message.body)

        async with replier, Producer(broker.address, "asker") as producer, Consumer(broker.address, "g", "t", reply):
            answer = await producer.request("t", b"you", timeout_s=PATIENCE_S)
            assert answer.body == b"to you"
            async with Consumer(broker.address, "h", "t", start="first") as consumer:
                message = await consumer.receive(timeout_s=PATIENCE_S)
        with pytest.raises(ConfigError, match="has been stopped"):
            await replier.reply(message, b"late")


async def test_a_producer_that_has_just_begun_is_asked_about_transactions_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that died left one, and the next one of its group sends nothing for a while."""
    asked = asyncio.Event()

    def check(message: Message) -> bool:
        asked.set()
        return True

    async with KitBroker() as broker:
        broker.create_topic("t", 1)
        async with Producer(broker.address, "shop", check=check) as producer:

            async def silent(*arguments: object, **options: object) -> None: ...

            monkeypatch.setattr(ProducerTransactions, "end", silent)
            async with producer.transaction("t", b"order"):
                pass
        greeted = len(broker.requests_of("HEART_BEAT"))
        async with Producer(broker.address, "shop", check=check):
            await broker.until(lambda: len(broker.requests_of("HEART_BEAT")) > greeted)
            broker.clock.advance(minutes=1)
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            await broker.until(lambda: len(broker.messages("t")) == 1)


def is_answered(broker: Broker, checks: int) -> bool:
    return len(broker.requests_of("END_TRANSACTION")) == checks


async def test_a_block_that_outlasts_checks_commits_without_a_call_of_check() -> None:
    """Another process of the group, whose check does not find the order either, is connected, too."""
    called: list[str] = []

    def check(process: str, message: Message) -> bool:
        called.append(process)
        return False

    async with KitBroker() as broker:
        broker.create_topic("t", 1)
        async with (
            Producer(broker.address, "shop", check=partial(check, "other")),
            Producer(broker.address, "shop", check=partial(check, "sender")) as producer,
            producer.transaction("t", b"order"),
        ):
            for number in range(1, 5):
                broker.clock.advance(31)
                await broker.until(partial(is_answered, broker, number))
        assert [message.body for message in broker.messages("t")] == [b"order"]
        assert called == []


async def decide(wire: Wire, sent: SendResult, outcome: int) -> None:
    """End a transaction as a check by another process would. Its half message is the first one of the broker."""
    position = int(sent.offset_id[-16:], 16)
    header = EndTransaction("shop", 0, position, outcome, True, sent.message_id)
    assert (await wire.call(RequestCode.END_TRANSACTION, write(header))).code == 0


async def test_block_that_ends_normally_raises_when_its_message_was_rolled_back(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Producer(node.address, "shop", check=lambda message: None) as producer:
        with pytest.raises(TransactionContradicted, match="was rolled back before; resend the message") as caught:
            async with producer.transaction("t", b"order") as sent:
                await decide(wire, sent, ROLLBACK)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.message_id, error.commits, error.outcome) == (sent.message_id, True, "rolled back")
    assert str(error) == str(caught.value)


async def test_block_that_raises_names_the_contradiction_when_its_message_was_committed(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Producer(node.address, "shop", check=lambda message: None) as producer:
        with pytest.raises(TransactionContradicted, match="was committed before; undo its effects") as caught:
            async with producer.transaction("t", b"order") as sent:
                await decide(wire, sent, COMMIT)
                raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert (caught.value.commits, caught.value.outcome) == (False, "committed")


async def test_cancelled_block_stays_cancelled_when_its_message_was_committed(
    node: Node, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    await create_topic(wire, "t", 1)
    async with Producer(node.address, "shop", check=lambda message: None) as producer:
        with pytest.raises(asyncio.CancelledError):
            async with producer.transaction("t", b"order") as sent:
                await decide(wire, sent, COMMIT)
                raise asyncio.CancelledError
    assert "transaction_contradicted" in caplog.text


async def test_block_without_a_loop_raises_the_contradiction(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    loop = asyncio.get_running_loop()

    def script() -> None:
        with (
            sync.Producer(node.address, "shop", check=lambda message: None) as producer,
            pytest.raises(TransactionContradicted),
            producer.transaction("t", b"order") as sent,
        ):
            asyncio.run_coroutine_threadsafe(decide(wire, sent, ROLLBACK), loop).result(PATIENCE_S)

    await asyncio.to_thread(script)


# Messages that a producer sends to a time, and takes back.


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


NO_TIMES: list[tuple[dict[str, Any], str]] = [
    ({"delay": -1}, "0 or more"),
    ({"delay": float("nan")}, "0 or more"),
    ({"delay": True}, "timedelta"),
    ({"delay": "5"}, "timedelta"),
    ({"at": datetime(2030, 1, 1)}, "time zone"),
    ({"at": 5}, "time zone"),
    ({"delay": 5, "delay_level": 3}, "one of"),
    ({"delay": 5, "at": datetime.now(UTC)}, "one of"),
    ({"delay_level": -1}, "delay level"),
]


async def test_what_is_no_time_is_refused(node: Node) -> None:
    for times, hint in NO_TIMES:
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


async def test_a_group_that_has_read_nothing_yet_has_its_place_all_the_same(node: Node, four_queues: None) -> None:
    """Also in queues that never had a message, and though no member owned anything yet."""
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
