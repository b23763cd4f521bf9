"""Middleware that records spans and metrics.

A `send` is one span of kind PRODUCER; its context is put into the message. If a message has such a context, its handler
runs in a span of kind CONSUMER that is a child of the sender's, with the sender's baggage. A handler for a batch has a span
with a link to each sender's. A consumer without a handler has a span for each receive, and one for each settlement. Names and
attributes: OpenTelemetry's semantic conventions for messaging and for RocketMQ, version 1.44.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.otel needs OpenTelemetry: pip install '.[otel]'") from missing

from rocketlet.client import Message, Outgoing, Reject, RetryLater, Sending, SendResult
from rocketlet.client.consuming.handling import Outcome, Settled
from rocketlet.protocol import properties as props
from rocketlet.protocol.message import decode_host

SCOPE: Final = "rocketlet"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
DURATION_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The boundaries that the conventions advise for durations; by default they are those of milliseconds."""
_MESSAGE_GROUP: Final = "__SHARDINGKEY"  # a property of messages from Apache's clients of 5.x

Attributes = dict[str, str | int]
SpanAttributes = dict[str, str | int | Sequence[str]]


class TracedSends:
    """Middleware of a `Producer`. Without providers the global ones are used.

    Args:
        body_size: True to record the size of bodies.

    Attributes:
        client_id: the producer's client id for spans; empty if it is unknown. `RocketletInstrumentor` sets it.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        body_size: bool = False,
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider, schema_url=SCHEMA_URL)
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider, schema_url=SCHEMA_URL)
        self._body_size = body_size
        self.client_id = ""
        self._durations = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Duration of a send, with its retries",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )  # fmt: skip
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were to be sent"
        )

    async def __call__(self, sending: Sending, call: Callable[[Sending], Awaitable[SendResult]]) -> SendResult:
        attributes = _about("send", sending.topic)
        if sending.is_batch:
            attributes["messaging.batch.message_count"] = len(sending.messages)
        with (
            self._tracer.start_as_current_span(
                f"send {sending.topic}",
                kind=SpanKind.PRODUCER,
                attributes={
                    **attributes,
                    **_of_client(self.client_id),
                    **_of_outgoing(sending, body_size=self._body_size),
                },
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _measured(span, attributes, self._durations.record) as found,
        ):
            self._sent.add(len(sending.messages), attributes)
            carried: dict[str, str] = {}
            propagate.inject(carried)
            messages = tuple(replace(one, properties={**one.properties, **carried}) for one in sending.messages)
            result = await call(replace(sending, messages=messages))
            found |= _server_of(_store_host(result))
            span.set_attributes(found)
            span.set_attribute(
                "messaging.destination.partition.id", f"{result.queue.broker_name}:{result.queue.queue_id}"
            )
            if result.message_id and not sending.is_batch:
                span.set_attribute("messaging.message.id", result.message_id)
            return result


class TracedHandlers:
    """Middleware of a consumer of this group, for handlers of messages and of batches, and for consumers without one.

    Args:
        broadcasting: True for a consumer that is broadcasting.
        body_size: True to record the size of bodies.

    Attributes:
        client_id: the consumer's client id for spans; empty if it is unknown. `RocketletInstrumentor` sets it.
    """

    def __init__(
        self,
        group: str,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        broadcasting: bool = False,
        body_size: bool = False,
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider, schema_url=SCHEMA_URL)
        self._group = group
        self._model = "broadcasting" if broadcasting else "clustering"
        self._body_size = body_size
        self.client_id = ""
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider, schema_url=SCHEMA_URL)
        self._durations = meter.create_histogram(
            "messaging.process.duration", "s", "Duration of a handler call",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )  # fmt: skip
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were given to a handler"
        )

    async def __call__(self, given: Any, call: Callable[[Any], Awaitable[Outcome]]) -> Outcome:
        messages: Sequence[Message] = given if isinstance(given, list) else (given,)
        topic = messages[0].topic
        attributes = self._attributes("process", "process", messages)
        with (
            _attached(None if isinstance(given, list) else propagate.extract(messages[0].properties)),
            self._tracer.start_as_current_span(
                f"process {topic}",
                kind=SpanKind.CONSUMER,
                attributes={**attributes, **self._of_span(given)},
                links=_links(messages) if isinstance(given, list) else (),
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _measured(span, attributes, self._durations.record),
        ):
            self._consumed.add(len(messages), attributes)
            outcome = await call(given)
            if isinstance(outcome, RetryLater | Reject):
                span.set_attribute("rocketlet.outcome", "retry" if isinstance(outcome, RetryLater) else "reject")
            return outcome

    def begins(self, messages: Sequence[Message]) -> Settled:
        """Record that a consumer without a handler has returned messages to the application (`DeliveryWatch`). The result
        records their settlement."""
        given = list(messages) if len(messages) > 1 else messages[0]
        topic, attributes = messages[0].topic, self._attributes("receive", "receive", messages)
        with self._tracer.start_as_current_span(
            f"receive {topic}", kind=SpanKind.CLIENT, attributes={**attributes, **self._of_span(given)},
            links=_links(messages),
        ) as span:  # fmt: skip
            received = span.get_span_context()
        self._consumed.add(len(messages), attributes)

        def settled(outcome: Outcome) -> None:
            name = "ack" if outcome is None else "nack" if isinstance(outcome, RetryLater) else "reject"
            attributes = self._attributes(name, "settle", messages)
            links = [Link(received), *_links(messages)]
            with self._tracer.start_as_current_span(
                f"{name} {topic}", kind=SpanKind.CLIENT, attributes={**attributes, **self._of_span(given)}, links=links
            ):
                pass

        return settled

    def _attributes(self, name: str, kind: str, messages: Sequence[Message]) -> Attributes:
        """Return the attributes that span and metrics of an operation of the consumer share."""
        return {
            **_about(name, messages[0].topic),
            "messaging.operation.type": kind,
            "messaging.consumer.group.name": self._group,
            **_server_of(messages[0].record.store_host),
        }

    def _of_span(self, given: Message | list[Message]) -> SpanAttributes:
        return {
            **_of_client(self.client_id),
            "messaging.rocketmq.consumption_model": self._model,
            **_of_received(given, body_size=self._body_size),
        }


def _links(messages: Sequence[Message]) -> list[Link]:
    """Return a link to the sender of each message that has a trace context."""
    senders = [_sender(propagate.extract(message.properties)) for message in messages]
    return [
        Link(sender, {"messaging.message.id": message.message_id})
        for message, sender in zip(messages, senders, strict=True)
        if sender.is_valid
    ]


@contextmanager
def _attached(sender: context.Context | None) -> Iterator[None]:
    """Make a sender's context the current one, including its baggage."""
    if sender is None:
        yield
        return
    token = context.attach(sender)
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def _measured(
    span: Span, attributes: Mapping[str, str | int], record: Callable[[float, Mapping[str, str | int]], None]
) -> Iterator[Attributes]:
    """Record the duration, and the type of an error in span and metric. CancelledError counts, because the work was not
    done. Attributes of the metric that are known only later are added to the mapping that is yielded."""
    began_s = time.perf_counter()
    failed: Attributes = {}
    try:
        yield failed
    except BaseException as error:
        failed["error.type"] = type(error).__qualname__
        span.set_attributes(failed)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        record(time.perf_counter() - began_s, {**attributes, **failed})


def _sender(context: Any) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _about(operation: str, topic: str) -> Attributes:
    """Return the attributes that span and metrics of an operation share, which have few values each."""
    return {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _of_client(client_id: str) -> Attributes:
    """Return the attributes of spans that depend on the client. Rocketlet's clients have no namespace."""
    found: Attributes = {"messaging.rocketmq.namespace": ""}
    return found | {"messaging.client.id": client_id} if client_id else found


def _server_of(store_host: bytes) -> Attributes:
    """Return the attributes of the broker that stored a message; empty if its address is unknown."""
    if len(store_host) not in (8, 20):
        return {}
    address, port = decode_host(store_host)
    return {"server.address": address, "server.port": port}


def _store_host(result: SendResult) -> bytes:
    """Return the broker's address, with which the offset id of a stored message begins; empty for a one-way send, or if the
    broker's offset id has another format."""
    first = result.offset_id.partition(",")[0]
    try:
        return bytes.fromhex(first[:-16]) if len(first) in (32, 56) else b""
    except ValueError:
        return b""


def _of_outgoing(sending: Sending, *, body_size: bool) -> SpanAttributes:
    if sending.is_batch:
        return {}
    (one,) = sending.messages
    found: SpanAttributes = {"messaging.rocketmq.message.type": "normal"}
    if body_size:
        found["messaging.message.body.size"] = len(one.body)
    if one.tag:
        found["messaging.rocketmq.message.tag"] = one.tag
    if keys := one.keys:
        found["messaging.rocketmq.message.keys"] = tuple(keys.split() if isinstance(keys, str) else keys)
    if sending.queue_key is not None:
        found |= {"messaging.rocketmq.message.type": "fifo", "messaging.rocketmq.message.group": sending.queue_key}
    if sending.kind == "half":
        found["messaging.rocketmq.message.type"] = "transaction"
    else:
        found |= _delay_of(one)
    return found


def _delay_of(message: Outgoing) -> SpanAttributes:
    """Return the attribute for a message's delay; empty for one that is delivered immediately."""
    found: SpanAttributes = {}
    if message.delay_level or message.delay or message.at is not None:
        found["messaging.rocketmq.message.type"] = "delay"
    if message.delay_level:
        found["messaging.rocketmq.message.delay_time_level"] = message.delay_level
    if isinstance(message.at, datetime):  # the producer has not checked the arguments yet
        found["messaging.rocketmq.message.delivery_timestamp"] = int(message.at.timestamp() * 1000)
    return found


def _of_received(given: Message | list[Message], *, body_size: bool) -> SpanAttributes:
    if isinstance(given, list):
        return {"messaging.batch.message_count": len(given)}
    message = given
    found: SpanAttributes = {
        "messaging.message.id": message.message_id,
        **_type_of(message.properties),
        "messaging.destination.partition.id": f"{message.queue.broker_name}:{message.queue.queue_id}",
        "rocketlet.message.delivery_attempt": message.reconsume_times + 1,
    }
    if message.tag:
        found["messaging.rocketmq.message.tag"] = message.tag
    if message.keys:
        found["messaging.rocketmq.message.keys"] = tuple(message.keys)
    if body_size:
        found["messaging.message.body.size"] = len(message.record.body)
    return found


def _type_of(properties: Mapping[str, str]) -> Attributes:
    """Return the attributes for a received message's type, and its message group if it has one."""
    if properties.get(props.TRANSACTION) == "true":
        return {"messaging.rocketmq.message.type": "transaction"}
    if group := properties.get(_MESSAGE_GROUP):
        return {"messaging.rocketmq.message.type": "fifo", "messaging.rocketmq.message.group": group}
    delays = (props.DELAY, props.TIMER_DELIVER_MS, props.TIMER_DELAY_MS, props.TIMER_DELAY_SEC, props.TIMER_OUT_MS)
    return {"messaging.rocketmq.message.type": "delay" if not properties.keys().isdisjoint(delays) else "normal"}
