"""Spans and metrics of OpenTelemetry: one trace from the sender to the handler, also through a retry."""

from __future__ import annotations

import asyncio
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
from rocketlet.client import BrokerRefused, Consumer, Message, Producer, RetryLater, SharedConsumer
from rocketlet.otel import RocketletInstrumentor, TracedHandlers, TracedSends
from rocketlet.testing import Broker, Fault

from ..conftest import eventually

CONVENTIONS = {value for name, value in vars(messaging_attributes).items() if name.isupper()}


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
        assert odd <= {"rocketlet.message.delivery_attempt"}, "others' names are theirs to give"
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
