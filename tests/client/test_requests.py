"""Sends in an outage, requests and replies, messages that are sent again, middleware, a producer's life."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    Outgoing,
    Producer,
    Reject,
    RequestTimeout,
    Sending,
    TopicNotFound,
)
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import ResponseCode
from rocketlet.testing import Broker as KitBroker
from rocketlet.testing import Fault

from ..client.conftest import only_connection, set_send_timeout, tasks_named
from ..conftest import PATIENCE_S, Node, Nodes, Wire, create_topic, eventually
from ..support.handlers import Inbox


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


async def test_a_send_in_an_outage_ends_with_its_time_or_immediately_without_retries(nodes: Nodes) -> None:
    node = await nodes.start()
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


async def test_a_reply_needs_a_request_and_somebody_who_waits(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_a_dead_letter_can_be_sent_again_as_it_was(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_middleware_is_around_sends(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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


async def test_who_still_sends_when_a_producer_stops_is_notified_of_it(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
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
