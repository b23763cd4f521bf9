"""ReceiveMessage: messages that a client gets into its hands for a time, at once or as soon as some come.

The answer is a stream: a status, the messages, the time. Messages of an answer that its client does not take go back at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import structlog

from ...protocol import properties as props
from ...protocol.codes import PERM_READ, SYS_COMPRESSED
from ...protocol.compression import Inflater
from ...protocol.message import MessageError, Record, decode_record
from ...protocol.subscription import SQL92, TAG, Subscription, SubscriptionError, parse_subscription
from ...protocol.work import Work, finish
from ..config import (
    DEADLINE_MARGIN_S,
    MAX_ATTEMPT_CHARS,
    MAX_INVISIBLE_MS,
    MAX_POLL_S,
    MAX_POP_BYTES,
    MIN_INVISIBLE_MS,
    RECEIVE_AGAIN_S,
    RENEWED_INVISIBLE_MS,
    SMALL_CLIENT_BYTES,
    LimitExceeded,
)
from ..pops.pool import Wait
from ..pops.values import Delivered, PopRequest, PopResult, Why
from ..sessions.refusal import Refusal
from ..store.files import StoreError
from .calls import Call, set_status
from .codes import Code, Fault, refused
from .hall import Hall
from .messages import filling, set_ms
from .names import group_of, topic_of
from .schema import ReceiveMessageResponse

log = structlog.get_logger("rocketlet.grpc")

_TAG, _SQL = 1, 2
_TEXT_BYTES: Final = 1024  # counted for a receive that waits for its filter, beside the expression
_CODES: Final = {
    Why.FOUND: Code.OK,
    Why.NOTHING_NEW: Code.MESSAGE_NOT_FOUND,
    Why.CLIENT_GONE: Code.MESSAGE_NOT_FOUND,
    Why.TOO_MANY_WAIT: Code.TOO_MANY_REQUESTS,
    Why.TOPIC_GONE: Code.TOPIC_NOT_FOUND,
    Why.GROUP_GONE: Code.CONSUMER_GROUP_NOT_FOUND,
    Why.PULLED: Code.FORBIDDEN,
    Why.STOPPED: Code.INTERNAL_SERVER_ERROR,
    Why.FAILED: Code.INTERNAL_SERVER_ERROR,
}
_SMALL_CLIENTS: Final = frozenset(("HTTP", "NODE_JS", "DOTNET", "DOT_NET", "RUST"))
"""Languages whose clients leave gRPC's own limit of 4 MiB as it is. Node's calls itself HTTP."""
_LATE: Final = frozenset((Why.TOO_MANY_WAIT, Why.PULLED, Why.FAILED))
"""Clients ask again at once, so they are answered after a while."""


@dataclass(slots=True)
class Receiving:
    """A receive that is under way."""

    hall: Hall
    call: Call
    request: PopRequest
    wait: Wait | None = None
    given: tuple[Delivered, ...] = ()
    kept_bytes: int = 0

    def begin(self) -> None:
        self.call.on_abort(self.aborted)
        self.wait = self.hall.broker.pops.receive(self.request, self.answer)
        if not self.wait.is_over:
            self.kept_bytes = self.request.kept_bytes
            self.call.session.charge(self.kept_bytes)

    def _leave(self) -> None:
        self.call.session.charge(-self.kept_bytes)
        self.kept_bytes = 0

    def aborted(self) -> None:
        """The call has ended: nobody takes the answer."""
        self._leave()
        if self.wait is not None:
            self.wait.cancel()
        if self.given:
            self.hall.broker.pops.put_back(self.request.group, self.request.topic, self.given)

    def answer(self, received: PopResult) -> None:
        self._leave()
        if self.call.is_over:
            self.given = received.messages
            self.aborted()
        elif received.why in _LATE:
            self.hall.broker.clock.call_later(RECEIVE_AGAIN_S, self._say, received)
        else:
            self._say(received)

    def _say(self, received: PopResult) -> None:
        code = _CODES[received.why]
        if not received.messages:
            end(self.hall, self.call, code, received.fault or received.why.value)
            return
        records = self._decoded(received.messages)
        wanted = [pair for pair in records if _is_wanted(self.request.subscription, pair[1])]
        if len(wanted) < len(records):
            self._pass([pair[0] for pair in records if pair not in wanted])
        self.given = tuple(pair[0] for pair in wanted)
        if not wanted:
            end(self.hall, self.call, Code.MESSAGE_NOT_FOUND, Why.NOTHING_NEW.value)
            return
        _send_status(self.call, code, "OK")
        sending = self._sending(wanted)
        if any(record.sys_flag & SYS_COMPRESSED for _, record in wanted):
            self.hall.broker.turns.do(sending)
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
        """Send the messages of an answer, decompressed in pieces. Beyond the bytes that an answer may have, decompressed
        or lost in the attempt, they go back."""
        size, takes, inflater = 0, self._takes_bytes(), Inflater()
        for number, (delivered, record) in enumerate(wanted):
            if self.call.is_over:  # all of them have gone back
                return
            if size > MAX_POP_BYTES:
                rest, self.given = self.given[number:], self.given[:number]
                self.hall.broker.pops.put_back(self.request.group, self.request.topic, rest)
                break
            response = ReceiveMessageResponse()
            spent = inflater.spent_bytes
            try:
                yield from filling(response.message, record, inflater, delivered.attempt, delivered.handle)
            except Exception as error:  # one message must not keep the others from their client
                log.exception("message_not_written", group=self.request.group, topic=self.request.topic)
                self._give_up(delivered, f"it cannot be written for clients of gRPC: {type(error).__name__}: {error}")
                continue
            size += max(len(response.message.body), inflater.spent_bytes - spent)
            if self.call.is_over:
                return
            if response.ByteSize() > takes:
                language = self.call.text(b"x-mq-language")
                self._give_up(
                    delivered, f"a client of {language} takes {takes} bytes with properties; send smaller bodies"
                )
                continue
            self.call.send(response)
        if not self.call.is_over:
            _send_time(self.hall, self.call)

    def _takes_bytes(self) -> float:
        """The largest message that the client takes. A larger one would end its call, with all others, again and again."""
        return SMALL_CLIENT_BYTES if self.call.text(b"x-mq-language").upper() in _SMALL_CLIENTS else math.inf

    def _give_up(self, delivered: Delivered, reason: str) -> None:
        """Dead-letter a message that the client cannot get. If that fails, the message is redelivered at its deadline."""
        request = self.request
        try:
            self.hall.broker.pops.to_dead_letters(
                request.group, request.topic, delivered.handle, reason, lambda outcomes: None
            )
        except (StoreError, LimitExceeded) as error:
            log.error("dead_letter_failed", group=request.group, topic=request.topic, reason=str(error))

    def _pass(self, passed: list[Delivered]) -> None:
        """Their tags have the hash of one that was asked for, and are others."""
        handles = [delivered.handle for delivered in passed]
        self.hall.broker.pops.ack(self.request.group, self.request.topic, handles, lambda outcomes: None)


def receive_message(hall: Hall, call: Call, request: Any) -> None:
    try:
        _receive(hall, call, request)
    except Fault as fault:
        end(hall, call, fault.code, str(fault))


def _receive(hall: Hall, call: Call, request: Any) -> None:
    wait_ms = _wait_ms(call, request)
    name, group = topic_of(request.message_queue.topic), group_of(request.group)
    invisible_ms = _invisible_ms(request)
    subscription = _subscription(name, request.filter_expression)
    broker = hall.broker
    topic = broker.topics.get(name)
    if topic is None:
        raise Fault(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
    settings = broker.group_configs.ensure(group)
    if settings is None:
        raise Fault(Code.CONSUMER_GROUP_NOT_FOUND, f"the group {group} does not exist: create it first")
    if not topic.perm & PERM_READ or not settings.consume_enable:
        raise Fault(Code.FORBIDDEN, f"the group {group} may not read {name} now")
    client = hall.clients.hear(call)
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
        settings.consume_orderly and queue_id is not None,
        request.auto_renew,
        subscription,
        attempt_id=request.attempt_id[:MAX_ATTEMPT_CHARS] or None,
        session=client,
    )
    if request.batch_size <= 0:
        end(hall, call, Code.MESSAGE_NOT_FOUND, "no messages were asked for")
    elif request.filter_expression.type == _SQL:
        _with_filter(hall, call, wanted, request.filter_expression.expression)
    else:
        _begin(hall, call, wanted)


def _begin(hall: Hall, call: Call, request: PopRequest) -> None:
    receiving = Receiving(hall, call, request)
    try:
        receiving.begin()
    except (StoreError, OSError) as error:
        receiving.answer(PopResult(Why.FAILED, fault=str(error)))


def _with_filter(hall: Hall, call: Call, request: PopRequest, expression: str) -> None:
    """Now, or when the expression is parsed. Raises Fault."""
    filters = hall.broker.filters
    try:
        matches = filters.find(expression)
        if matches is None:
            later = partial(_look_again, hall, call, request, expression)
            filters.when_parsed(call.session, expression, later, len(expression) + _TEXT_BYTES)
            return
    except Refusal as refusal:
        raise refused(refusal) from None
    subscription = Subscription(request.topic, expression, kind=SQL92)
    _begin(hall, call, replace(request, subscription=subscription, matches=matches))


def _look_again(hall: Hall, call: Call, request: PopRequest, expression: str) -> None:
    if not call.is_over:
        try:
            _with_filter(hall, call, request, expression)
        except Fault as fault:
            end(hall, call, fault.code, str(fault))


def _wait_ms(call: Call, request: Any) -> int:
    """Never longer than the client waits for the answer."""
    wait_s = MAX_POLL_S
    if request.HasField("long_polling_timeout"):
        wait_s = duration_ms(request.long_polling_timeout) / 1000
        if wait_s < 0:
            raise Fault(Code.ILLEGAL_POLLING_TIME, "the time to wait is negative")
    if call.due_s is not None:
        wait_s = min(wait_s, call.due_s - call.session.heard_s - DEADLINE_MARGIN_S)
    return int(max(min(wait_s, MAX_POLL_S), 0.0) * 1000)


def _invisible_ms(request: Any) -> int:
    if request.auto_renew:
        return RENEWED_INVISIBLE_MS
    found = duration_ms(request.invisible_duration)
    if not MIN_INVISIBLE_MS <= found <= MAX_INVISIBLE_MS:
        reason = f"the invisible time is {found} ms; {MIN_INVISIBLE_MS} to {MAX_INVISIBLE_MS} are allowed"
        raise Fault(Code.ILLEGAL_INVISIBLE_TIME, reason)
    return found


def duration_ms(duration: Any) -> int:
    found: int = duration.seconds * 1000 + duration.nanos // 1_000_000
    return found


def _subscription(topic: str, expression: Any) -> Subscription | None:
    """Raises Fault."""
    kind = TAG if expression.type in (0, _TAG) else SQL92
    try:
        found = parse_subscription(topic, expression.expression, kind=kind)
    except SubscriptionError as error:
        raise Fault(Code.ILLEGAL_FILTER_EXPRESSION, str(error)) from None
    return None if found.takes_all or kind == SQL92 else found


def _is_wanted(subscription: Subscription | None, record: Record) -> bool:
    if subscription is None or subscription.kind != TAG:
        return True
    return props.find(record.properties, props.TAGS) in subscription.tags


def end(hall: Hall, call: Call, code: int, reason: str) -> None:
    """An answer without messages."""
    if not call.is_over:
        _send_status(call, code, reason)
        _send_time(hall, call)


def _send_status(call: Call, code: int, reason: str) -> None:
    response = ReceiveMessageResponse()
    set_status(response.status, code, reason)
    call.send(response)


def _send_time(hall: Hall, call: Call) -> None:
    response = ReceiveMessageResponse()
    set_ms(response.delivery_timestamp, hall.broker.clock.time_ms())
    call.send(response)
    call.end()
