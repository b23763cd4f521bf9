"""Middleware that records spans and metrics.

A `send` is one span of kind PRODUCER; its context is put into the message. If a message has such a context, its handler
runs in a span of kind CONSUMER that is a child of the sender's, with the sender's baggage. A handler for a batch has a span
with a link to each sender's. Names and attributes: OpenTelemetry's semantic conventions for messaging and for RocketMQ,
version 1.37.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.otel needs OpenTelemetry: pip install '.[otel]'") from missing

from rocketlet.client import Message, Outgoing, Reject, RetryLater, Sending, SendResult
from rocketlet.client.consuming.handling import Outcome

SCOPE = "rocketlet"

Attributes = dict[str, str | int]
SpanAttributes = dict[str, str | int | Sequence[str]]


class TracedSends:
    """Middleware of a `Producer`. Without providers the global ones are used."""

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._durations = meter.create_histogram(
            "messaging.client.operation.duration", "s", "How long a send took, with its retries"
        )
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
                attributes={**attributes, **_of_outgoing(sending)},
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
            _measured(span, attributes, self._durations.record),
        ):
            self._sent.add(len(sending.messages), attributes)
            carried: dict[str, str] = {}
            propagate.inject(carried)
            messages = tuple(replace(one, properties={**one.properties, **carried}) for one in sending.messages)
            result = await call(replace(sending, messages=messages))
            span.set_attribute(
                "messaging.destination.partition.id", f"{result.queue.broker_name}:{result.queue.queue_id}"
            )
            if result.message_id and not sending.is_batch:
                span.set_attribute("messaging.message.id", result.message_id)
            return result


class TracedHandlers:
    """Middleware of a consumer of this group, for handlers of messages and of batches."""

    def __init__(
        self,
        group: str,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._group = group
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._durations = meter.create_histogram("messaging.process.duration", "s", "How long a handler took")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were given to a handler"
        )

    async def __call__(self, given: Any, call: Callable[[Any], Awaitable[Outcome]]) -> Outcome:
        messages: Sequence[Message] = given if isinstance(given, list) else (given,)
        topic = messages[0].topic
        attributes = _about("process", topic) | {"messaging.consumer.group.name": self._group}
        senders = [propagate.extract(message.properties) for message in messages]
        links = [
            Link(sender, {"messaging.message.id": message.message_id})
            for message, sender in zip(messages, map(_sender, senders), strict=True)
            if sender.is_valid
        ]
        with (
            _attached(None if isinstance(given, list) else senders[0]),
            self._tracer.start_as_current_span(
                f"process {topic}",
                kind=SpanKind.CONSUMER,
                attributes={**attributes, **_of_received(given)},
                links=links if isinstance(given, list) else (),
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
) -> Iterator[None]:
    """Record the duration, and the type of an error in span and metric. CancelledError counts, because the work was not
    done."""
    began_s = time.perf_counter()
    failed: Attributes = {}
    try:
        yield
    except BaseException as error:
        failed = {"error.type": type(error).__qualname__}
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


def _of_outgoing(sending: Sending) -> SpanAttributes:
    if sending.is_batch:
        return {}
    (one,) = sending.messages
    found: SpanAttributes = {"messaging.message.body.size": len(one.body), "messaging.rocketmq.message.type": "normal"}
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


def _of_received(given: Any) -> SpanAttributes:
    if isinstance(given, list):
        return {"messaging.batch.message_count": len(given)}
    message: Message = given
    found: SpanAttributes = {
        "messaging.message.id": message.message_id,
        "messaging.message.body.size": len(message.record.body),
        "messaging.destination.partition.id": f"{message.queue.broker_name}:{message.queue.queue_id}",
        "rocketlet.message.delivery_attempt": message.reconsume_times + 1,
    }
    if message.tag:
        found["messaging.rocketmq.message.tag"] = message.tag
    if message.keys:
        found["messaging.rocketmq.message.keys"] = tuple(message.keys)
    return found
