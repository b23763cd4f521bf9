"""gRPC requests of producers: SendMessage, EndTransaction, RecallMessage."""

from __future__ import annotations

import random
import re
import zlib
from typing import Any, Final

import structlog

from ...protocol import names
from ...protocol.bodies import TopicConfig, Work
from ...protocol.codes import PERM_WRITE, SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK
from ...protocol.config import MAX_CALL_BYTES
from ...protocol.headers import EndTransaction, SendMessage
from ...protocol.message import Inflater, Record, SpentTooMuch
from ..config import MAX_SEND_MESSAGES, MAX_TIMER_DELAY_MS, LimitExceeded
from ..messages.appender import real_queue
from ..messages.recalls import RecallFault, recalling
from ..messages.sending import Placed
from ..store.files import StoreError, StoreFull
from .calls import GrpcCall, set_status
from .clients import HandlerContext
from .conversion import TRANSACTION, TYPE_NAMES, AcceptedMessage, checked, decompressing, filling, is_gzip
from .routes import accepted_types
from .schema import (
    Code,
    EndTransactionResponse,
    RecallMessageResponse,
    SendMessageResponse,
    StatusError,
    TelemetryCommand,
    full_name,
    topic_of,
)

log = structlog.get_logger("rocketlet.sending")


# ------------------------------------------------------------------------------
# SendMessage: the messages of consecutive calls of a socket read are staged one by one, and stored together.


_Answers = list[tuple[GrpcCall, Any]]


class GrpcSends:
    """The consecutive SendMessage calls whose messages are stored together. `staged` has the responses that are sent if the
    messages are stored."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._sending = context.broker.sending
        self.staged: _Answers = []

    def stage(self, call: GrpcCall, request: Any) -> Work[None] | None:
        """Stage the call's messages. If bodies must be decompressed first, return the work that does both.

        Raises:
            StatusError, Refusal: A message is refused, and nothing of the call is staged.
        """
        broker = self._context.broker
        if not request.messages or len(request.messages) > MAX_SEND_MESSAGES:
            raise StatusError(Code.MESSAGE_CORRUPTED, f"a call sends 1 to {MAX_SEND_MESSAGES} messages")
        name = topic_of(request.messages[0].topic)
        if any(full_name(message.topic) != name for message in request.messages):
            raise StatusError(Code.MESSAGE_CORRUPTED, "the messages are of different topics")
        now_ms = broker.clock.time_ms()
        max_delay_ms = min(int(broker.config.grpc_max_delay_hours * 3_600_000), MAX_TIMER_DELAY_MS)
        sent = [checked(message, name, now_ms, max_delay_ms) for message in request.messages]
        topic = self._topic(name, sent)
        if any(map(is_gzip, sent)):
            return self._decompressing(call, name, sent)
        self._stage(call, topic, sent)
        return None

    def _decompressing(self, call: GrpcCall, name: str, sent: list[AcceptedMessage]) -> Work[None]:
        """Decompress the bodies in pieces, then stage the messages.

        A body of 4 KB may inflate to 4 MiB. All bodies of a call together may therefore inflate to at most the size that an
        uncompressed call may have. Raises StatusError, Refusal.
        """
        inflater = Inflater(MAX_CALL_BYTES)
        yield from call.charging(_inflating(sent, inflater), lambda: inflater.spent_bytes)
        self._stage(call, self._topic(name, sent), sent)

    def _stage(self, call: GrpcCall, topic: TopicConfig, sent: list[AcceptedMessage]) -> None:
        response = SendMessageResponse()
        set_status(response.status)
        savepoint = self._sending.savepoint()
        try:
            for item in sent:
                header = _header(topic, _queue_of(topic, item, len(sent)), item)
                placed = self._sending.stage(header, item.body, call.session.born_host)
                _add_entry(response, item, placed)
        except BaseException:
            self._sending.roll_back(savepoint)
            raise
        self.staged.append((call, response))

    def _topic(self, name: str, sent: list[AcceptedMessage]) -> TopicConfig:
        """Return the topic. Raises StatusError if it does not exist, cannot be written, or has another message type."""
        topics = self._context.broker.topics
        topic = topics.get(name)
        if topic is None:
            raise StatusError(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
        if not topics.permits(topic, PERM_WRITE) or not topic.write_queues:
            raise StatusError(Code.FORBIDDEN, f"the topic {name} has no queue that may be written")
        if not name.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
            accepted = accepted_types(topic)
            for item in sent:
                if item.kind not in accepted:
                    reason = f"the topic {name} accepts {topic.message_type} messages; got {TYPE_NAMES[item.kind]}"
                    raise StatusError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, reason)
        return topic

    def commit(self) -> None:
        """Store the staged messages and send the responses, with `--flush sync` after the messages are on the device. If that
        fails, refuse the calls."""
        staged, self.staged = self.staged, []
        broker = self._context.broker
        try:
            self._sending.commit()
        except Exception as error:
            if not isinstance(error, StoreFull):
                log.exception("sends_refused_store_failed")
            _refuse_staged(staged, str(error) or type(error).__name__)
            return
        broker.when_kept(
            lambda: _answer_staged(staged),
            lambda: _refuse_staged(staged, str(broker.store.fault or "the disk does not keep it")),
        )


def _inflating(sent: list[AcceptedMessage], inflater: Inflater) -> Work[None]:
    """Decompress the bodies of messages in place. Raises StatusError."""
    for number, item in enumerate(sent):
        if is_gzip(item):
            try:
                sent[number] = yield from decompressing(item, inflater)
            except SpentTooMuch:
                reason = f"the bodies of one call inflate to more than {MAX_CALL_BYTES} bytes; send several calls"
                raise StatusError(Code.MESSAGE_BODY_TOO_LARGE, reason) from None


def _queue_of(topic: TopicConfig, sent: AcceptedMessage, count: int) -> int:
    """Return the queue of a message: by the hash of its message group if it has one and is the only message of its call, as
    at Apache's proxy, otherwise a random queue."""
    if sent.group_key and count == 1:
        return zlib.crc32(sent.group_key.encode()) % topic.write_queues
    return random.randrange(topic.write_queues)


def _header(topic: TopicConfig, queue_id: int, sent: AcceptedMessage) -> SendMessage:
    return SendMessage(
        topic.name, topic.name, names.DEFAULT_TOPIC, 0, queue_id, sent.sys_flag, sent.born_ms, 0, sent.properties
    )


def _add_entry(response: Any, sent: AcceptedMessage, placed: Placed) -> None:
    entry = response.entries.add()
    set_status(entry.status)
    entry.message_id = sent.message_id
    entry.transaction_id = transaction_id(placed) if sent.kind == TRANSACTION else sent.message_id
    entry.offset = placed.queue_offset
    entry.recall_handle = placed.recall_handle or ""


def transaction_id(placed: Placed) -> str:
    """Return the id by which a half message is found. The id is opaque to clients."""
    return f"{placed.position:016X}{placed.queue_offset:016X}"


def _answer_staged(staged: _Answers) -> None:
    for call, response in staged:
        call.answer(response)


def _refuse_staged(staged: _Answers, reason: str) -> None:
    for call, _ in staged:
        call.refuse(Code.INTERNAL_SERVER_ERROR, f"the messages could not be stored: {reason}")


# ------------------------------------------------------------------------------
# EndTransaction, and the broker's check of half messages without one.


_UNKNOWN, _COMMIT, _ROLLBACK = 0, 1, 2
_OUTCOMES = {_COMMIT: SYS_TRANSACTION_COMMIT, _ROLLBACK: SYS_TRANSACTION_ROLLBACK}
_is_id = re.compile(r"[0-9A-Fa-f]{32}", re.ASCII).fullmatch


def end_transaction(context: HandlerContext, call: GrpcCall, request: Any) -> Any:
    topic = topic_of(request.topic)
    if not request.transaction_id.strip():
        raise StatusError(Code.INVALID_TRANSACTION_ID, "the transaction has no id")
    outcome = _OUTCOMES.get(request.resolution)
    response = EndTransactionResponse()
    set_status(response.status)
    if outcome is None:  # the producer does not know the outcome yet; the broker checks later
        return response
    position, offset = _half_position(request.transaction_id)
    half = context.broker.store.record_at(position)
    if half is not None and real_queue(half)[0] != topic:  # permissions are those of the named topic
        raise StatusError(Code.INVALID_TRANSACTION_ID, f"the transaction is not one of the topic {topic}")
    header = EndTransaction(topic, offset, position, outcome, msg_id=request.message_id or None)
    try:
        fault = context.broker.transactions.end(header, shown_id=request.transaction_id)
    except StoreFull as error:
        raise StatusError(Code.INTERNAL_SERVER_ERROR, str(error)) from None
    if fault:
        raise StatusError(Code.INVALID_TRANSACTION_ID, fault.reason)
    return response


def _half_position(transaction_id: str) -> tuple[int, int]:
    """Return the half message's position in the log and its offset in the half queue. Raises StatusError for an id that this
    broker cannot have made."""
    if not _is_id(transaction_id):  # int() accepts signs, blanks and underscores, too
        raise StatusError(Code.INVALID_TRANSACTION_ID, "the transaction's id was not given by this broker")
    position, offset = int(transaction_id[:16], 16), int(transaction_id[16:], 16)
    if max(position, offset) >= 1 << 63:
        raise StatusError(Code.INVALID_TRANSACTION_ID, "the transaction's id was not given by this broker")
    return position, offset


def asking(call: GrpcCall, half: Record) -> Work[None]:
    """Send a producer the command to check the outcome of a half message, on its Telemetry stream, if that is still open."""
    command = TelemetryCommand()
    asked = command.recover_orphaned_transaction_command
    yield from filling(asked.message, half, Inflater(), 1, call.namespace)
    asked.transaction_id = f"{half.physical_offset:016X}{half.queue_offset:016X}"
    if not call.is_over:
        call.send(command)


# ------------------------------------------------------------------------------
# RecallMessage: a producer cancels a timed message before its delivery.


_CODES: Final = {RecallFault.ILLEGAL_HANDLE: Code.BAD_REQUEST, RecallFault.NOT_WAITING: Code.MESSAGE_NOT_FOUND}


def recall_message(context: HandlerContext, call: GrpcCall, request: Any) -> None:
    """Recall a timed message. The response is sent when the recall is stored, with `--flush sync` when it is on the device,
    or when it is refused. Raises StatusError."""
    topic = topic_of(request.topic)
    if context.broker.topics.get(topic) is None:
        raise StatusError(Code.TOPIC_NOT_FOUND, f"No topic route info of {topic}")
    try:
        context.broker.recalls.join(call.session, _recall(context, call, topic, request.recall_handle))
    except LimitExceeded as error:
        raise StatusError(Code.TOO_MANY_REQUESTS, str(error)) from None


def _recall(context: HandlerContext, call: GrpcCall, topic: str, handle: str) -> Work[None]:
    broker = context.broker
    try:
        recall = yield from recalling(broker.timers, broker.config.name, topic, handle)
    except (StoreError, LimitExceeded) as error:
        call.refuse(Code.INTERNAL_SERVER_ERROR, str(error))
        return
    if recall.fault is not None:
        call.refuse(_CODES[recall.fault], recall.reason)
        return
    response = RecallMessageResponse(message_id=recall.unique_key)
    set_status(response.status)
    broker.when_kept(
        lambda: call.answer(response),
        lambda: call.refuse(Code.INTERNAL_SERVER_ERROR, "it is unknown whether the recall is on the disk"),
    )
