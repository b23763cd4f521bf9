"""gRPC requests of consumers: ReceiveMessage, AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import structlog

from ...protocol import properties as props
from ...protocol.bodies import Work, finish
from ...protocol.codes import SYS_COMPRESSED
from ...protocol.message import Inflater, MessageError, Record, decode_record
from ...protocol.names import SQL92, TAG, Subscription, SubscriptionError, is_lite_queue, lite_queue, parse_subscription
from ..config import (
    DEADLINE_MARGIN_S,
    MAX_ACKS,
    MAX_ATTEMPT_CHARS,
    MAX_INVISIBLE_MS,
    MAX_POLL_S,
    MAX_POP_BYTES,
    MIN_INVISIBLE_MS,
    RECEIVE_AGAIN_S,
    RENEWED_INVISIBLE_MS,
    REQUEST_TIMEOUT_S,
    SMALL_CLIENT_BYTES,
    LimitExceeded,
)
from ..pops.pool import Receive
from ..pops.requests import AckStatus, Delivered, PopRequest, PopResult, Why
from ..sessions.refusal import Refusal
from ..store.files import StoreError
from .calls import GrpcCall, set_status
from .clients import HandlerContext
from .conversion import filling, set_ms
from .schema import (
    AckMessageResponse,
    ChangeInvisibleDurationResponse,
    Code,
    ForwardMessageToDeadLetterQueueResponse,
    ReceiveMessageResponse,
    StatusError,
    group_of,
    status_code,
    topic_of,
)

log = structlog.get_logger("rocketlet.grpc")


# ------------------------------------------------------------------------------
# ReceiveMessage. The response is a stream: a status, the messages, the delivery time. If the client cancels the call before
# the response has ended, its messages become visible again.


_TAG = 1
_RECEIVE_CODES: Final = {
    Why.FOUND: Code.OK,
    Why.NOTHING_NEW: Code.MESSAGE_NOT_FOUND,
    Why.CLIENT_GONE: Code.MESSAGE_NOT_FOUND,
    Why.TOO_MANY_WAIT: Code.TOO_MANY_REQUESTS,
    Why.TOPIC_GONE: Code.TOPIC_NOT_FOUND,
    Why.GROUP_GONE: Code.CONSUMER_GROUP_NOT_FOUND,
    Why.PULLED: Code.FORBIDDEN,
    Why.STOPPED: Code.INTERNAL_SERVER_ERROR,
    Why.FAILED: Code.INTERNAL_SERVER_ERROR,
    Why.TOO_MANY_UNFINISHED: Code.FORBIDDEN,
}
_SMALL_CLIENTS: Final = frozenset(("HTTP", "NODE_JS", "DOTNET", "DOT_NET", "RUST"))
"""Languages whose clients keep gRPC's default limit of 4 MiB for a message. Node's client calls itself HTTP."""
_LATE: Final = frozenset((Why.TOO_MANY_WAIT, Why.PULLED, Why.FAILED, Why.TOO_MANY_UNFINISHED))
"""Results after which clients retry immediately, so the response is delayed."""


class GrpcReceive(Receive):
    """A ReceiveMessage call. `given` has the messages of the response, which are put back if the client cancels the call
    before the response has ended."""

    __slots__ = ("_call", "_context", "given")

    def __init__(self, context: HandlerContext, call: GrpcCall, request: PopRequest) -> None:
        super().__init__(request)
        self._context = context
        self._call = call
        self.given: tuple[Delivered, ...] = ()

    def begin(self) -> None:
        """Pop messages and respond, or wait for some. Raises Refusal, for example for a filter that cannot be parsed."""
        self._call.on_abort(self.abort)
        try:
            result = self._context.broker.pops.receive(self)
        except (StoreError, OSError) as error:
            result = PopResult(Why.FAILED, fault=str(error))
        if result is not None:
            self.respond(result)

    def abort(self) -> None:
        """Stop waiting, and put messages back that the client did not get before it cancelled the call."""
        self.cancel()
        if self.given:
            self._put_back(self.given)

    def _put_back(self, messages: tuple[Delivered, ...]) -> None:
        self._context.broker.pops.put_back(self.request.group, messages)

    def respond(self, result: PopResult) -> None:
        if self._call.is_over:
            self._put_back(result.messages)
        elif self._call.is_late(self._context.broker.clock.monotonic_s()):
            self._put_back(result.messages)
            end(self._context, self._call, Code.MESSAGE_NOT_FOUND, "the client's deadline has passed")
        elif result.why in _LATE:
            self._context.broker.clock.call_later(RECEIVE_AGAIN_S, self._send, result)
        else:
            self._send(result)

    def _send(self, result: PopResult) -> None:
        call, code = self._call, _RECEIVE_CODES[result.why]
        if not result.messages:
            end(self._context, call, code, result.fault or result.why.value)
            return
        wanted: list[tuple[Delivered, Record]] = []
        passed: list[Delivered] = []
        is_compressed = False
        for delivered, record in self._decoded(result.messages):
            if _is_wanted(self.request.subscription, record):
                wanted.append((delivered, record))
                is_compressed = is_compressed or bool(record.sys_flag & SYS_COMPRESSED)
            else:
                passed.append(delivered)
        if passed:
            self._ack_unwanted(passed)
        self.given = tuple(delivered for delivered, _ in wanted)
        if not wanted:
            end(self._context, call, Code.MESSAGE_NOT_FOUND, Why.NOTHING_NEW.value)
            return
        _send_status(call, code, "OK")
        sending = self._sending(wanted)
        if is_compressed:
            self._context.broker.turns.do(sending)
        else:
            finish(sending)

    def _decoded(self, messages: tuple[Delivered, ...]) -> list[tuple[Delivered, Record]]:
        found: list[tuple[Delivered, Record]] = []
        for delivered in messages:
            try:
                found.append((delivered, decode_record(delivered.record)))
            except MessageError as error:
                self._give_up(delivered, f"it cannot be decoded: {error}")
        return found

    def _sending(self, wanted: list[tuple[Delivered, Record]]) -> Work[None]:
        """Send the messages of a response, decompressed in pieces. Messages beyond the size limit of a response, which counts
        failed decompressions, too, are put back."""
        size, max_message_bytes, inflater = 0, self._max_message_bytes(), Inflater()
        for number, (delivered, record) in enumerate(wanted):
            if self._call.is_over:  # `abort` has put all messages back
                return
            if size > MAX_POP_BYTES:
                rest, self.given = self.given[number:], self.given[:number]
                self._context.broker.pops.put_back(self.request.group, rest)
                break
            response = ReceiveMessageResponse()
            spent = inflater.spent_bytes
            try:
                attempt, namespace = delivered.attempt, self._call.namespace
                handle, is_lite = delivered.handle, is_lite_queue(delivered.topic)
                yield from filling(response.message, record, inflater, attempt, namespace, handle, is_lite=is_lite)
            except Exception as error:  # the other messages of the response are still sent
                log.exception("message_not_written", group=self.request.group, topic=self.request.topic)
                self._give_up(delivered, f"it cannot be written for clients of gRPC: {type(error).__name__}: {error}")
                continue
            size += max(len(response.message.body), inflater.spent_bytes - spent)
            if self._call.is_over:
                return
            if response.ByteSize() > max_message_bytes:
                language = self._call.text(b"x-mq-language")
                self._give_up(
                    delivered,
                    f"a client of {language} receives at most {max_message_bytes} bytes with properties; send smaller bodies",
                )
                continue
            self._call.send(response)
        if not self._call.is_over:
            _send_time(self._context, self._call)
            if self.request.auto_renew and self.given:
                times_ms = frozenset(delivered.pop_ms for delivered in self.given)
                pops = self._context.broker.pops
                self._call.on_given_up(partial(pops.response_lost, self.request.client, times_ms))

    def _max_message_bytes(self) -> float:
        """Return the size of the largest message that the client accepts; infinity for a client without this limit. A larger
        message would fail each of its receives."""
        return SMALL_CLIENT_BYTES if self._call.text(b"x-mq-language").upper() in _SMALL_CLIENTS else math.inf

    def _give_up(self, delivered: Delivered, reason: str) -> None:
        """Dead-letter a message that the client cannot receive. If that fails, the message is redelivered when its visibility
        timeout expires."""
        request = self.request
        try:
            self._context.broker.pops.to_dead_letters(
                request.group, delivered.topic, delivered.handle, reason, lambda outcomes: None
            )
        except (StoreError, LimitExceeded) as error:
            log.error("dead_letter_failed", group=request.group, topic=request.topic, reason=str(error))

    def _ack_unwanted(self, passed: list[Delivered]) -> None:
        """Acknowledge messages whose tag only has the same hash as a subscribed tag."""
        handles = [delivered.handle for delivered in passed]
        self._context.broker.pops.ack(self.request.group, self.request.topic, handles, lambda outcomes: None)


def receive_message(context: HandlerContext, call: GrpcCall, request: Any) -> None:
    try:
        _receive(context, call, request)
    except (StatusError, Refusal) as error:
        end(context, call, status_code(error), str(error))


def _receive(context: HandlerContext, call: GrpcCall, request: Any) -> None:
    known = context.clients.get(call.account, call.client_id)
    wait_ms = _wait_ms(call, request, known.request_timeout_s if known is not None else REQUEST_TIMEOUT_S)
    name, group = topic_of(request.message_queue.topic), group_of(request.group)
    call.namespace = request.message_queue.topic.resource_namespace
    invisible_ms = _invisible_ms(request)
    subscription = _subscription(name, request.filter_expression)
    topic, _ = context.broker.check_receive(name, group)
    client = context.clients.record_call(call)
    client.group = group
    asked_id = request.message_queue.id
    queue_id = asked_id if 0 <= asked_id < topic.read_queues else None
    wanted = PopRequest(
        group,
        name,
        call.client,
        request.batch_size,
        invisible_ms,
        wait_ms,
        queue_id,
        False,  # not strict, like Apache's proxy, even in ordered groups
        request.auto_renew,
        subscription,
        attempt_id=request.attempt_id[:MAX_ATTEMPT_CHARS] or None,
        session=client,
    )
    if request.batch_size <= 0:
        end(context, call, Code.MESSAGE_NOT_FOUND, f"batch_size: got {request.batch_size}; expected 1 or more")
    else:
        GrpcReceive(context, call, wanted).begin()


def _wait_ms(call: GrpcCall, request: Any, request_timeout_s: float) -> int:
    """Return how long the receive may wait for messages, up to MAX_POLL_S. A deadline of the call limits that time, with a
    margin. Without `long_polling_timeout`, the margin is half of the client's request timeout, as at Apache's proxy.
    Raises StatusError for a negative timeout."""
    wait_s, margin_s = MAX_POLL_S, request_timeout_s / 2
    if request.HasField("long_polling_timeout"):
        wait_s, margin_s = duration_ms(request.long_polling_timeout) / 1000, DEADLINE_MARGIN_S
        if wait_s < 0:
            raise StatusError(Code.ILLEGAL_POLLING_TIME, f"long_polling_timeout: got {wait_s} s; expected 0 s or more")
    if call.due_s is not None:
        wait_s = min(wait_s, call.due_s - call.session.heard_s - margin_s)
    return int(max(min(wait_s, MAX_POLL_S), 0.0) * 1000)


def _invisible_ms(request: Any) -> int:
    if request.auto_renew:
        return RENEWED_INVISIBLE_MS
    return _checked_invisible_ms(request, MIN_INVISIBLE_MS)


def _checked_invisible_ms(request: Any, minimum_ms: int) -> int:
    """Return the visibility timeout. Raises StatusError with the text of Apache's proxy, which clients search for."""
    found = duration_ms(request.invisible_duration)
    if found < minimum_ms:
        raise StatusError(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too small. min is {minimum_ms}")
    if found > MAX_INVISIBLE_MS:
        raise StatusError(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too large. max is {MAX_INVISIBLE_MS}")
    return found


def duration_ms(duration: Any) -> int:
    found: int = duration.seconds * 1000 + duration.nanos // 1_000_000
    return found


def _subscription(topic: str, expression: Any) -> Subscription | None:
    """Return the filter; None for all messages. Raises StatusError for an invalid expression."""
    kind = TAG if expression.type in (0, _TAG) else SQL92
    try:
        found = parse_subscription(topic, expression.expression, kind=kind)
    except SubscriptionError as error:
        raise StatusError(Code.ILLEGAL_FILTER_EXPRESSION, str(error)) from None
    if kind == SQL92:
        return Subscription(topic, expression.expression, kind=SQL92)
    return None if found.takes_all else found


def _is_wanted(subscription: Subscription | None, record: Record) -> bool:
    if subscription is None or subscription.kind != TAG:
        return True
    return props.find(record.properties, props.TAGS) in subscription.tags


def end(context: HandlerContext, call: GrpcCall, code: int, reason: str) -> None:
    """End a receive without messages, unless it has ended."""
    if not call.is_over:
        _send_status(call, code, reason)
        _send_time(context, call)


def _send_status(call: GrpcCall, code: int, reason: str) -> None:
    response = ReceiveMessageResponse()
    set_status(response.status, code, reason)
    call.send(response)


def _send_time(context: HandlerContext, call: GrpcCall) -> None:
    response = ReceiveMessageResponse()
    set_ms(response.delivery_timestamp, context.broker.clock.time_ms())
    call.send(response)
    call.end()


# ------------------------------------------------------------------------------
# What clients do with messages in flight: acknowledge, change the visibility timeout, or dead-letter them.


_ACK_CODES: Final = {
    AckStatus.DONE: Code.OK,
    AckStatus.LATE: Code.OK,
    AckStatus.TOO_LATE: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.UNREADABLE: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.UNKNOWN: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.REDELIVERED: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.FINISHED: Code.INVALID_RECEIPT_HANDLE,
    AckStatus.NOT_KEPT: Code.INTERNAL_SERVER_ERROR,
}


def ack_message(context: HandlerContext, call: GrpcCall, request: Any) -> None:
    """Acknowledge messages. The response is sent when the acknowledgements are written to the disk, or the write failed."""
    group, topic = group_of(request.group), topic_of(request.topic)
    if not 0 < len(request.entries) <= MAX_ACKS:
        raise StatusError(Code.BAD_REQUEST, f"a call acknowledges 1 to {MAX_ACKS} messages, not {len(request.entries)}")
    _record_contact(context, call)

    def answer(outcomes: Sequence[AckStatus]) -> None:
        response = AckMessageResponse()
        codes = [_ACK_CODES[outcome] for outcome in outcomes]
        for entry, outcome, code in zip(request.entries, outcomes, codes, strict=True):
            result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
            set_status(result.status, code, _text_of(outcome))
        code = codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS
        # Apache's proxy sends the name of the code as its text, which clients look for
        set_status(
            response.status,
            code,
            _text_of(outcomes[0]) if code == Code.OK else f"{code.name}: {_text_of(outcomes[0])}",
        )
        call.answer(response)

    handles = [entry.receipt_handle for entry in request.entries]
    topics = [_settled_topic(topic, entry) for entry in request.entries]
    context.broker.pops.ack(group, topic, handles, answer, takes_late=False, topics=topics)


def _settled_topic(topic: str, request: Any) -> str:
    """Return the topic in which a message is settled: the name of its lite topic's offsets, or the topic itself."""
    return lite_queue(topic, request.lite_topic) if request.lite_topic else topic


def _record_contact(context: HandlerContext, call: GrpcCall) -> None:
    if context.clients.is_registered(call):
        context.broker.pops.pools.clients.record_contact(call.client)


def change_invisible_duration(context: HandlerContext, call: GrpcCall, request: Any) -> Any:
    group, topic = group_of(request.group), topic_of(request.topic)
    invisible_ms = _checked_invisible_ms(request, 0)
    _record_contact(context, call)
    changed = context.broker.pops.change(
        group,
        _settled_topic(topic, request),
        request.receipt_handle,
        invisible_ms,
        is_counted=not request.suspend,
        takes_late=False,
    )
    response = ChangeInvisibleDurationResponse(receipt_handle=changed.handle)
    set_status(response.status, _ACK_CODES[changed.outcome], _text_of(changed.outcome))
    return response


def forward_to_dead_letters(context: HandlerContext, call: GrpcCall, request: Any) -> None:
    group, topic = group_of(request.group), topic_of(request.topic)
    reason = f"its consumer {call.client_id[:100]} gave up after {request.delivery_attempt} attempts"

    def answer(outcomes: Sequence[AckStatus]) -> None:
        response = ForwardMessageToDeadLetterQueueResponse()
        set_status(response.status, _ACK_CODES[outcomes[0]], _text_of(outcomes[0]))
        call.answer(response)

    try:
        context.broker.pops.to_dead_letters(
            group, _settled_topic(topic, request), request.receipt_handle, reason, answer
        )
    except StoreError as error:
        raise StatusError(Code.INTERNAL_SERVER_ERROR, str(error)) from None


def _text_of(outcome: AckStatus) -> str:
    return "OK" if outcome.is_done else outcome.value
