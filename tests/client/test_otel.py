"""Spans and metrics of OpenTelemetry: one trace from the sender to the handler, also through a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from rocketlet import AdminClient, LiteConsumer, MessageTrace, Outgoing, Reject
from rocketlet.client import BrokerRefused, Consumer, Message, Producer, RetryLater, Sending, SendResult, SharedConsumer
from rocketlet.client.config import ClientLimits
from rocketlet.client.sending.requests import ProducerTransactions
from rocketlet.otel import RocketletInstrumentor, TracedHandlers, TracedSends
from rocketlet.protocol import admin_bodies as bodies
from rocketlet.protocol.admin_bodies import TOPIC, Kind
from rocketlet.testing import Broker, Fault

from ..conftest import PATIENCE_S, Node, Nodes, eventually

ROCKETLETS = {"rocketlet.message.delivery_attempt"}
CONVENTIONS = {value for name, value in vars(messaging_attributes).items() if name.isupper()}
CONVENTIONS |= {"server.address", "server.port"}


class Recorded:
    """The records, and the providers that made them."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meter_provider = MeterProvider([self._metrics])

    @property
    def providers(self) -> dict[str, Any]:
        return {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    def has(self, name: str, count: int = 1) -> bool:
        return len(self.spans(name)) == count

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self._metrics.get_metrics_data()
        assert data is not None
        found = [
            metric.data.data_points
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return [point for points in found for point in points]


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


async def test_a_handler_continues_the_trace_of_the_sender(rocketlet: Broker, recorded: Recorded) -> None:
    handled = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    async with (
        Consumer(
            rocketlet.address, "shop", "orders", handle, middleware=[TracedHandlers("shop", **recorded.providers)]
        ),
        Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer,
    ):
        with recorded.tracer_provider.get_tracer("test").start_as_current_span("checkout") as checkout:
            await producer.send("orders", b"order", tag="new", keys=("a", "b"), queue_key="k", properties={"mine": "1"})
        await handled.wait()
        await eventually(lambda: recorded.has("process orders"))
    (sent,), (processed,) = recorded.spans("send orders"), recorded.spans("process orders")
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.parent is not None
    assert sent.parent.span_id == checkout.get_span_context().span_id
    assert processed.parent is not None
    assert processed.parent.span_id == context(sent).span_id
    (message,) = rocketlet.messages("orders")
    assert message.user_properties.keys() == {"mine", "traceparent"}
    assert processed.attributes is not None
    assert sent.attributes is not None
    assert sent.attributes["messaging.rocketmq.message.group"] == "k"
    for span in (sent, processed):
        assert (span.attributes or {})["messaging.rocketmq.message.keys"] == ("a", "b")
        odd = {name for name in span.attributes or {} if name not in CONVENTIONS}
        assert odd <= ROCKETLETS, "others' names are theirs to give"
    assert processed.attributes["messaging.message.id"] == sent.attributes["messaging.message.id"] == message.message_id
    assert processed.attributes["messaging.consumer.group.name"] == "shop"
    assert (
        processed.attributes["messaging.destination.partition.id"]
        == sent.attributes["messaging.destination.partition.id"]
    )
    for name in ("messaging.client.operation.duration", "messaging.process.duration"):
        (point,) = recorded.points(name)
        assert (point.count, point.attributes["messaging.destination.name"]) == (1, "orders")
    assert [point.value for point in recorded.points("messaging.client.sent.messages")] == [1]


async def test_durations_have_the_boundaries_of_seconds(rocketlet: Broker, recorded: Recorded) -> None:
    rocketlet.create_topic("orders")
    handled = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    layers = [TracedHandlers("shop", **recorded.providers)]
    async with (
        Consumer(rocketlet.address, "shop", "orders", handle, start="first", middleware=layers),
        Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer,
    ):
        await producer.send("orders", b"order")
        await eventually(lambda: recorded.has("process orders"))
    for name in ("messaging.client.operation.duration", "messaging.process.duration"):
        (point,) = recorded.points(name)
        assert point.explicit_bounds[0] == 0.005
        assert point.explicit_bounds[-1] == 10
        host, _, port = rocketlet.address.rpartition(":")
        assert (point.attributes["server.address"], point.attributes["server.port"]) == (host, int(port))


async def test_spans_of_instrumented_clients_name_client_model_type_and_schema(
    rocketlet: Broker, recorded: Recorded
) -> None:
    rocketlet.create_topic("orders")
    seen: list[Message] = []
    instrumentor = RocketletInstrumentor()
    instrumentor.instrument(**recorded.providers)
    try:
        async with (
            Producer(rocketlet.address) as producer,
            Consumer(rocketlet.address, "all", "orders", seen.append, broadcasting=True) as consumer,
        ):
            await consumer.assigned()
            await producer.send("orders", b"now")
            await producer.send("orders", b"later", delay=0.01)
            await eventually(lambda: recorded.has("process orders", 2))
    finally:
        instrumentor.uninstrument()
    sends, handled = recorded.spans("send orders"), recorded.spans("process orders")
    assert {(span.attributes or {})["messaging.client.id"] for span in sends} == {producer.client_id}
    assert {(span.attributes or {})["messaging.client.id"] for span in handled} == {consumer.client_id}
    assert [(span.attributes or {})["messaging.rocketmq.message.type"] for span in handled] == ["normal", "delay"]
    for span in (*sends, *handled):
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"
        assert "messaging.message.body.size" not in (span.attributes or {})
        assert not {name for name in span.attributes or {} if name not in CONVENTIONS | ROCKETLETS}
    assert {(span.attributes or {})["messaging.rocketmq.consumption_model"] for span in handled} == {"broadcasting"}


async def test_traced_send_succeeds_when_the_offset_id_is_not_hexadecimal(
    rocketlet: Broker, recorded: Recorded
) -> None:
    async def replace_id(sending: Sending, call: Callable[[Sending], Awaitable[SendResult]]) -> SendResult:
        return (await call(sending))._replace(offset_id="z" * 32)

    traced = TracedSends(**recorded.providers)
    async with Producer(rocketlet.address, middleware=[traced, replace_id]) as producer:
        assert (await producer.send("orders", b"x")).offset_id == "z" * 32
    (span,) = recorded.spans("send orders")
    assert "server.address" not in (span.attributes or {})


async def test_body_size_is_recorded_when_it_is_wanted(rocketlet: Broker, recorded: Recorded) -> None:
    layer = TracedSends(body_size=True, **recorded.providers)
    async with Producer(rocketlet.address, middleware=[layer]) as producer:
        await producer.send("orders", b"12345")
    (span,) = recorded.spans("send orders")
    assert (span.attributes or {})["messaging.message.body.size"] == 5


@pytest.mark.parametrize("kind", [Consumer, SharedConsumer])
async def test_consumer_without_a_handler_records_receives_and_settlements(
    rocketlet: Broker, recorded: Recorded, kind: type[Consumer | SharedConsumer]
) -> None:
    rocketlet.create_topic("orders")
    layer = TracedHandlers("shop", **recorded.providers)
    async with (
        Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer,
        kind(rocketlet.address, "shop", "orders", start="first", middleware=[layer]) as consumer,
    ):
        await producer.send("orders", b"good")
        await consumer.ack(await consumer.receive(timeout_s=PATIENCE_S))
        await producer.send("orders", b"bad")
        await consumer.reject(await consumer.receive(timeout_s=PATIENCE_S), reason="bad")
        await eventually(lambda: recorded.has("ack orders") and recorded.has("reject orders"))
    sent = recorded.spans("send orders")
    received = recorded.spans("receive orders")
    settled = [*recorded.spans("ack orders"), *recorded.spans("reject orders")]
    for send, receive, settle in zip(sent, received, settled, strict=True):
        assert [link.context.span_id for link in receive.links] == [context(send).span_id]
        assert context(receive).span_id in [link.context.span_id for link in settle.links]
        assert (settle.attributes or {})["messaging.operation.type"] == "settle"
    assert [point.value for point in recorded.points("messaging.client.consumed.messages")] == [2]


async def test_shared_consumer_records_a_span_of_each_attempt(rocketlet: Broker, recorded: Recorded) -> None:
    attempts: list[int] = []
    rocketlet.create_topic("orders")

    def handle(message: Message) -> RetryLater | None:
        attempts.append(message.attempt)
        return RetryLater(delay=0.1) if len(attempts) == 1 else None

    instrumentor = RocketletInstrumentor()
    instrumentor.instrument(**recorded.providers)
    try:
        async with (
            Producer(rocketlet.address) as producer,
            SharedConsumer(rocketlet.address, "shop", "orders", handle, start="first"),
        ):
            await producer.send("orders", b"order")
            await eventually(lambda: recorded.has("process orders", 2))
    finally:
        instrumentor.uninstrument()
    (sent,) = recorded.spans("send orders")
    for attempt, span in enumerate(recorded.spans("process orders"), 1):
        assert span.parent is not None
        assert span.parent.span_id == context(sent).span_id
        assert (span.attributes or {})["rocketlet.message.delivery_attempt"] == attempt
        assert (span.attributes or {})["messaging.consumer.group.name"] == "shop"


@pytest.mark.parametrize("is_async", [True, False], ids=["coroutine", "plain function"])
async def test_handler_sees_the_baggage_and_the_span_of_its_sender(
    rocketlet: Broker, recorded: Recorded, is_async: bool
) -> None:
    seen: list[tuple[object, int]] = []

    def handle(message: Message) -> None:
        seen.append((baggage.get_baggage("tenant"), trace.get_current_span().get_span_context().span_id))

    async def handle_async(message: Message) -> None:
        handle(message)

    handler: Any = handle_async if is_async else handle
    async with (
        Consumer(
            rocketlet.address, "shop", "orders", handler, middleware=[TracedHandlers("shop", **recorded.providers)]
        ),
        Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer,
    ):
        token = attach(baggage.set_baggage("tenant", "north"))
        await producer.send("orders", b"order")
        detach(token)
        await producer.send("orders", b"order")
        await eventually(lambda: recorded.has("process orders", 2))
    assert {tenant for tenant, _ in seen} == {"north", None}
    assert {span for _, span in seen} == {context(span).span_id for span in recorded.spans("process orders")}


@pytest.mark.parametrize(
    ("delayed", "type_", "more"),
    [
        ({"delay": 60}, "delay", {}),
        ({"delay": timedelta(seconds=60)}, "delay", {}),
        ({"delay": 0}, "normal", {}),
        ({"at": datetime(2000, 1, 1, tzinfo=UTC)}, "delay", {"delivery_timestamp": 946_684_800_000}),
        ({"delay_level": 2}, "delay", {"delay_time_level": 2}),
    ],
)
async def test_delayed_send_has_the_type_delay(
    rocketlet: Broker, recorded: Recorded, delayed: dict[str, Any], type_: str, more: dict[str, int]
) -> None:
    async with Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer:
        await producer.send("orders", b"order", **delayed)
    (sent,) = recorded.spans("send orders")
    prefix = "messaging.rocketmq.message."
    found = {
        name.removeprefix(prefix): value for name, value in (sent.attributes or {}).items() if name.startswith(prefix)
    }
    assert found == {"type": type_, **more}


async def test_a_batch_is_linked_to_each_sender(rocketlet: Broker, recorded: Recorded) -> None:
    handled = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        handled.set()

    async with Producer(rocketlet.address, middleware=[TracedSends(**recorded.providers)]) as producer:
        for body in (b"1", b"2"):
            await producer.send("orders", body, queue_key="k")
        await producer.send_batch("orders", [b"3", b"4"], queue_key="k")
        async with Consumer(
            rocketlet.address,
            "shop",
            "orders",
            handle,
            start="first",
            batch_size=4,
            middleware=[TracedHandlers("shop", **recorded.providers)],
        ):
            await handled.wait()
            await eventually(lambda: recorded.has("process orders"))
    senders = [context(span).span_id for span in recorded.spans("send orders")]
    (processed,) = recorded.spans("process orders")
    assert processed.parent is None
    assert [link.context.span_id for link in processed.links] == [*senders, senders[-1]]
    ids = [message.message_id for message in rocketlet.messages("orders")]
    assert [(link.attributes or {})["messaging.message.id"] for link in processed.links] == ids
    assert processed.attributes is not None
    assert processed.attributes["messaging.batch.message_count"] == 4
    assert "messaging.message.id" not in (recorded.spans("send orders")[-1].attributes or {}), "it is one message's"


async def test_failures_and_retries_are_seen(rocketlet: Broker, recorded: Recorded) -> None:
    tries = 0
    done = asyncio.Event()
    rocketlet.create_topic("orders")

    async def handle(message: Message) -> RetryLater | None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("out of stock")
        if tries == 2:
            return RetryLater()
        done.set()
        return None

    async with (
        Consumer(
            rocketlet.address, "shop", "orders", handle, middleware=[TracedHandlers("shop", **recorded.providers)]
        ) as consumer,
        Producer(rocketlet.address, retries=0, middleware=[TracedSends(**recorded.providers)]) as producer,
    ):
        await consumer.assigned()
        await producer.send("orders", b"order")
        for wanted in (1, 2):
            await eventually(partial(recorded.has, "process orders", wanted))
            rocketlet.clock.advance(hours=2)
        await done.wait()
        await eventually(partial(recorded.has, "process orders", 3))
        rocketlet.faults.add(Fault.answer("SEND_MESSAGE_V2", response=1, times=10))
        with pytest.raises(BrokerRefused):
            await producer.send("orders", b"refused", delay_level=1)
    failed, late, last = recorded.spans("process orders")
    assert len({context(span).trace_id for span in (failed, late, last)}) == 1, "one trace through all tries"
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "ValueError"
    assert failed.events[0].name == "exception"
    assert late.attributes is not None
    assert late.attributes["rocketlet.outcome"] == "retry"
    attempts = [
        span.attributes["rocketlet.message.delivery_attempt"] for span in (failed, late, last) if span.attributes
    ]
    assert attempts == [1, 2, 3]
    refused = recorded.spans("send orders")[-1]
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes is not None
    assert refused.attributes["messaging.rocketmq.message.delay_time_level"] == 1


async def test_the_instrumentor_traces_producers_and_consumers_that_say_nothing_of_it(
    rocketlet: Broker, recorded: Recorded
) -> None:
    instrumentor = RocketletInstrumentor()
    instrumentor.instrument(**recorded.providers)
    try:
        async with (
            Consumer(rocketlet.address, "shop", "orders", lambda message: None),
            Producer(rocketlet.address) as producer,
        ):
            await producer.send("orders", b"order")
            await eventually(lambda: recorded.has("process orders"))
    finally:
        instrumentor.uninstrument()
    (sent,), (processed,) = recorded.spans("send orders"), recorded.spans("process orders")
    assert context(processed).trace_id == context(sent).trace_id
    async with Producer(rocketlet.address) as producer:
        await producer.send("orders", b"order")
    assert len(recorded.spans("send orders")) == 1


async def test_instrumentor_traces_handlers_of_lite_consumers(rocketlet: Broker, recorded: Recorded) -> None:
    async with AdminClient(rocketlet.address) as admin:
        await admin.create_topic("chats", message_type="LITE")
    instrumentor = RocketletInstrumentor()
    instrumentor.instrument(**recorded.providers)
    try:
        async with (
            LiteConsumer(rocketlet.address, "shop", "chats", lambda message: None, lite_topics=["a"]),
            Producer(rocketlet.address) as producer,
        ):
            await producer.send("chats", b"hello", lite_topic="a")
            await eventually(lambda: recorded.has("process chats"))
    finally:
        instrumentor.uninstrument()
    (sent,), (processed,) = recorded.spans("send chats"), recorded.spans("process chats")
    assert context(processed).trace_id == context(sent).trace_id
    assert (processed.attributes or {})["messaging.consumer.group.name"] == "shop"


# The message trace: what is written to its topic, and what goes wrong beside it.


async def records(node: Node) -> list[list[str]]:
    """All of the trace topic, each as its fields."""
    found: list[list[str]] = []
    async with AdminClient(node.address) as admin:
        for queue, extent in (await admin.topic(TOPIC)).ranges.items():
            async for messages in admin.read(queue, extent.begin, extent.end):
                for message in messages:
                    found += [text.split("\x01") for text in message.body.decode().split("\x02") if text]
    return found


async def test_a_message_is_followed_from_its_send_to_its_handler(node: Node) -> None:
    """Fields as TraceDataEncoder of Apache's client 4.9.7 prints them."""
    seen: list[Message] = []
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address, "shop", middleware=[message_trace.sends("shop")]) as producer,
        Consumer(node.address, "g", "t", seen.append, start="first", middleware=[message_trace.handlers("g")]),
    ):
        sent = await producer.send("t", b"12345", tag="A", keys=["k1", "k2"])
        await eventually(lambda: len(seen) == 1)
    by_kind = {record[0]: record for record in await records(node)}
    region, message_id = "DefaultRegion", sent.message_id
    time_ms, took_ms = by_kind["Pub"][1], by_kind["Pub"][10]
    assert by_kind["Pub"] == [
        "Pub", time_ms, region, "shop", "t", message_id, "A", "k1 k2", node.address, "5", took_ms, "0", sent.offset_id,
        "true",
    ]  # fmt: skip
    handling = by_kind["SubBefore"][4]
    assert by_kind["SubBefore"][2:] == [region, "g", handling, message_id, "0", "k1 k2"]
    assert by_kind["SubAfter"][1:3] == [handling, message_id]
    assert by_kind["SubAfter"][4:7] == ["true", "k1 k2", "0"]
    assert by_kind["SubAfter"][8] == "g"
    async with AdminClient(node.address) as admin:
        for key in ("k1", "k2", message_id):
            assert await admin.messages_with_key(TOPIC, key), key


async def test_what_is_being_written_when_the_trace_is_closed_is_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_closing = asyncio.Event(), asyncio.Event()
    traced = MessageTrace(node.address)

    send = Producer.send

    async def send_later(producer: Producer, topic: str, *arguments: Any, **options: Any) -> Any:
        if topic != "t":  # a trace
            begun.set()
            await is_closing.wait()
        return await send(producer, topic, *arguments, **options)

    monkeypatch.setattr(Producer, "send", send_later)
    async with Producer(node.address, middleware=[traced.sends("shop")]) as producer, traced:
        await producer.send("t", b"x")
        await begun.wait()
        asyncio.get_running_loop().call_soon(is_closing.set)
    assert [record[0] for record in await records(node)] == ["Pub"]


def test_javas_split_finds_all_fields_of_a_message_without_keys_or_tag() -> None:
    """It drops empty fields at the end, and Apache's decoder asks for them by number."""
    about, outcome = bodies.About("id"), bodies.ConsumeReturnType.SUCCESS
    for record, fields in (
        (bodies.before_handling(about, time_ms=1, group="g", handling_id="h", retries=0), 8),
        (bodies.after_handling(about, time_ms=1, group="g", handling_id="h", took_ms=2, outcome=outcome), 9),
        (bodies.sent(about, time_ms=1, group="g", topic="t", tag="", store_host="h", size=0, took_ms=0, kind=Kind.NORMAL,
                    offset_id=""), 14),
        (bodies.transaction_ended(about, time_ms=1, group="g", topic="t", tag="", store_host="h", commits=None,
                                 is_check=False), 13),
    ):  # fmt: skip
        assert len(record.removesuffix("\x02").rstrip("\x01").split("\x01")) == fields


async def raise_error(message: Any) -> None:
    raise ValueError("no")


async def reject(message: Any) -> Reject:
    return Reject()


@pytest.mark.parametrize(("handler", "code"), [(raise_error, "2"), (reject, "4")])
async def test_handlers_that_fail_are_noted_so(node: Node, handler: Callable[[Any], Any], code: str) -> None:
    tried = asyncio.Event()

    async def handle(message: Message) -> Any:
        tried.set()
        return await handler(message)

    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", handle, start="first", middleware=[message_trace.handlers("g")]),
    ):
        await producer.send("t", b"x")
        await tried.wait()
    (after,) = [record for record in await records(node) if record[0] == "SubAfter"]
    assert (after[4], after[6]) == ("false", code)


async def test_batches_have_a_record_for_each_message(node: Node) -> None:
    batches: list[list[Message]] = []

    async def handle(messages: list[Message]) -> None:
        batches.append(messages)

    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address, middleware=[message_trace.sends("rocketlet")]) as producer,
    ):
        sent = await producer.send_batch("t", [Outgoing(b"%d" % number, keys=f"k{number}") for number in range(50)])
        async with Consumer(
            node.address, "g", "t", handle, batch_size=50, start="first", middleware=[message_trace.handlers("g")]
        ):
            await eventually(lambda: sum(map(len, batches)) == 50)
    found = await records(node)
    ids = sent.message_id.split(",")
    assert [record[5] for record in found if record[0] == "Pub"] == ids
    assert [record[12] for record in found if record[0] == "Pub"] == sent.offset_id.split(",")
    assert {record[4] for record in found if record[0] == "SubBefore"} == {
        record[1] for record in found if record[0] == "SubAfter"
    }
    assert sorted(record[2] for record in found if record[0] == "SubAfter") == sorted(ids)


async def test_a_transaction_has_its_half_message_and_its_outcome(node: Node) -> None:
    """Fields as TraceDataEncoder of Apache's client 4.9.7 writes them."""
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address, "shop", check=bool, middleware=[message_trace.sends("shop")]) as producer,
    ):
        async with producer.transaction("t", b"paid", tag="A", keys=["k1", "k2"]) as paid:
            pass
        with pytest.raises(ValueError, match="no money"):
            async with producer.transaction("t", b"unpaid") as unpaid:
                raise ValueError("no money")
    found = await records(node)
    halves = {record[5]: record for record in found if record[0] == "Pub"}
    assert {message_id: (record[6], record[7], record[11]) for message_id, record in halves.items()} == {
        paid.message_id: ("A", "k1 k2", "1"),
        unpaid.message_id: ("", "", "1"),
    }
    about = ["DefaultRegion", "shop", "t"]
    assert [record[2:] for record in found if record[0] == "EndTransaction"] == [
        [*about, paid.message_id, "A", "k1 k2", node.address, "2", paid.message_id, "COMMIT_MESSAGE", "false"],
        [*about, unpaid.message_id, "", "", node.address, "2", unpaid.message_id, "ROLLBACK_MESSAGE", "false"],
    ]


async def test_an_outcome_that_the_broker_asked_for_says_so(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await nodes.start(transaction_check_interval_s=0.02, transaction_timeout_s=0.0, transaction_check_max=10**6)
    answers = iter([None])

    async def unsent(*arguments: object, **options: object) -> None:
        """As if the process had died before it sent the outcome."""

    monkeypatch.setattr(ProducerTransactions, "end", unsent)
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(
            node.address, "shop", check=lambda message: next(answers, True), middleware=[message_trace.sends("shop")]
        ) as producer,
    ):
        async with producer.transaction("t", b"maybe", tag="A", keys="k1") as half:
            pass
        await eventually(lambda: node.broker.transactions.waiting == 0)
    asked = [record for record in await records(node) if record[0] == "EndTransaction" and record[12] == "true"]
    states = [record[11] for record in asked]
    assert (states[0], states[-1], set(states)) == ("UNKNOW", "COMMIT_MESSAGE", {"UNKNOW", "COMMIT_MESSAGE"})
    assert {tuple(record[4:8]) for record in asked} == {("t", half.message_id, "A", "k1")}


async def test_a_oneway_send_is_noted_without_a_place(node: Node) -> None:
    seen: list[Message] = []
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address, "shop", middleware=[message_trace.sends("shop")]) as producer,
        Consumer(node.address, "g", "t", seen.append, start="first"),
    ):
        await producer.send_oneway("t", b"12345", tag="A", keys="k1")
        await eventually(lambda: len(seen) == 1)
    (record,) = [record for record in await records(node) if record[0] == "Pub"]
    place = (f"{node.broker.config.name}:0", "5")
    assert record[2:10] == ["DefaultRegion", "shop", "t", seen[0].message_id, "A", "k1", *place]
    assert record[11:] == ["0", "", "true"]


async def test_what_a_consumer_without_a_handler_hands_out_is_noted_with_its_end(node: Node) -> None:
    ends = {"acked": "0", "retried": "4", "rejected": "4", "iterated": "0", "given back": "4"}
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address) as producer,
        Consumer(node.address, "g", "t", start="first", middleware=[message_trace.handlers("g")]) as consumer,
    ):
        settle = {"acked": consumer.ack, "retried": consumer.retry, "rejected": consumer.reject}
        for body in ends:
            await producer.send("t", body.encode(), keys=body.replace(" ", "-"), queue_key="one")
        for body, end in settle.items():
            message = await consumer.receive()
            assert message.body == body.encode()
            await end(message)
        async for message in consumer:
            if message.body == b"given back":
                break
    found = await records(node)
    begun = {record[4]: record[7] for record in found if record[0] == "SubBefore"}
    after = [(begun[record[1]].replace("-", " "), record[6]) for record in found if record[0] == "SubAfter"]
    assert after == list(ends.items())


async def test_batches_that_are_handed_out_are_noted(node: Node) -> None:
    async with (
        MessageTrace(node.address) as message_trace,
        Producer(node.address) as producer,
        Consumer(
            node.address, "g", "t", start="first", batch_size=2, middleware=[message_trace.handlers("g")]
        ) as consumer,
    ):
        await producer.send_batch("t", [b"1", b"2", b"3"])
        sizes: list[int] = []
        async for messages in consumer.batches():
            sizes.append(len(messages))
            if sum(sizes) == 3:
                break
    found = await records(node)
    begun = [record[4] for record in found if record[0] == "SubBefore"]
    assert len(set(begun[:2])) == 1
    after = [(record[1], record[6]) for record in found if record[0] == "SubAfter"]
    assert after == [(begun[0], "0"), (begun[0], "0"), (begun[2], "4")]
    assert sizes == [2, 1]


async def test_a_message_of_the_trace_stays_below_the_limits(node: Node) -> None:
    async with (
        MessageTrace(node.address, limits=ClientLimits(trace_bytes=600, trace_keys_bytes=100)) as message_trace,
        Producer(node.address, middleware=[message_trace.sends("p")]) as producer,
    ):
        await producer.send_batch("t", [Outgoing(b"x", keys=f"k{number}") for number in range(20)])
        await producer.send("t", b"x", keys="k" * 200)
    async with AdminClient(node.address) as admin:
        extents = (await admin.topic(TOPIC)).ranges
        messages = [
            message
            for queue, extent in extents.items()
            async for found in admin.read(queue, extent.begin, extent.end)
            for message in found
        ]
    assert sum(message.body.count(b"\x02") for message in messages) == 21
    alone = [message for message in messages if message.body.count(b"\x02") == 1]
    assert any("k" * 200 in message.keys for message in alone)
    for message in messages:
        if "k" * 200 not in message.keys:
            assert len(message.body) <= 600
            assert len(" ".join(message.keys)) < 100


async def test_what_cannot_be_written_is_counted_and_hurts_nobody(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    limits = ClientLimits(trace_waiting=5)
    async with (
        MessageTrace(node.address, limits=limits) as message_trace,
        Producer(node.address, middleware=[message_trace.sends("p")]) as producer,
    ):
        await producer.send_batch("t", [b"x"] * 8)
    assert "trace_dropped records=3" in caplog.text
    async with AdminClient(node.address) as admin:
        await admin.create_topic("readable", perm=4)
    async with (
        MessageTrace(node.address, topic="readable") as message_trace,
        Producer(node.address, middleware=[message_trace.sends("p")]) as producer,
    ):
        assert (await producer.send("t", b"x")).status == "ok"
    assert "trace_not_written" in caplog.text


async def test_without_middleware_there_is_no_trace(node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("t", b"x")
    async with AdminClient(node.address) as admin:
        assert (await admin.topic(TOPIC)).messages == 0
