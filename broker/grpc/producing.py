"""gRPC requests of producers: SendMessage, EndTransaction, RecallMessage."""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from typing import Any, Final, NamedTuple

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import TopicConfig, Work
from ...protocol.codes import (
    PERM_WRITE,
    SYS_COMPRESSED,
    SYS_COMPRESSION_ZLIB,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_ROLLBACK,
)
from ...protocol.config import MAX_BODY_BYTES, MAX_CALL_BYTES
from ...protocol.headers import EndTransaction, SendMessage
from ...protocol.message import Inflater, MessageError, Record, SpentTooMuch, decode_host
from ..config import (
    MAX_CONTEXT_CHARS,
    MAX_GROUP_KEY_BYTES,
    MAX_MESSAGE_ID_CHARS,
    MAX_PRIORITY,
    MAX_RECOVERY_S,
    MAX_SEND_MESSAGES,
    MAX_TIMER_DELAY_MS,
    MAX_TIMESTAMP_MS,
    MAX_USER_PROPERTIES,
    MAX_USER_PROPERTY_BYTES,
    LimitExceeded,
)
from ..messages.appender import real_queue
from ..messages.recalls import RecallFault, recalling
from ..messages.sending import Placed
from ..messages.transactions import CHECK_IMMUNITY
from ..store.files import StoreError, StoreFull
from .clients import GrpcCall, HandlerContext, accepted_types, set_status
from .schema import (
    Code,
    EndTransactionResponse,
    RecallMessageResponse,
    SendMessageResponse,
    StatusError,
    TelemetryCommand,
    full_name,
    has_control,
    set_resource,
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
# Conversion between gRPC messages and stored records, which remoting clients read and write, too.


NORMAL, FIFO, DELAY, TRANSACTION, LITE, PRIORITY = 1, 2, 3, 4, 5, 6
TYPE_NAMES: Final = {
    NORMAL: "NORMAL",
    FIFO: "FIFO",
    DELAY: "DELAY",
    TRANSACTION: "TRANSACTION",
    LITE: "LITE",
    PRIORITY: "PRIORITY",
}

BORN_HOST: Final = "__BORNHOST"
TRACE_CONTEXT: Final = "TRACE_CONTEXT"

_MD5, _IDENTITY, GZIP = 2, 1, 2
_GZIP_MAGIC: Final = b"\x1f\x8b"

# Property names that users may not set: Apache's MessageConst.STRING_HASH_SET.
RESERVED: Final = frozenset(
    "TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET "
    "BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES "
    "CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO "
    "INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE "
    "INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS "
    "TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC "
    "DLQ_ORIGIN_MESSAGE_ID __CRC32# _SYS_MSG_PRIORITY_ __LITE_TOPIC ORIGIN_GROUP".split()
)
# Properties that are not returned as user properties. As with Apache's proxy, the message group and the transaction id are
# returned as user properties although they have fields of their own.
_HIDDEN: Final = RESERVED | {
    CHECK_IMMUNITY,
    TRACE_CONTEXT,
    "TRANSACTION_CHECK_TIMES",
    "INNER_NUM",
    "INNER_MULTI_DISPATCH",
}


class AcceptedMessage(NamedTuple):
    """A message that passed the checks. `kind` is its message type, `group_key` its message group or empty. A gzip body is
    not decompressed yet."""

    message_id: str
    properties: str
    body: bytes
    sys_flag: int
    born_ms: int
    kind: int
    group_key: str


# To be stored


def checked(message: Any, topic: str, now_ms: int, max_delay_ms: int = MAX_TIMER_DELAY_MS) -> AcceptedMessage:
    """Check a message in the order of Apache's proxy, and return what to store.

    Raises:
        StatusError: The first check that fails.
    """
    system = message.system_properties
    body = message.body
    if len(body) > MAX_BODY_BYTES:
        raise StatusError(Code.MESSAGE_BODY_TOO_LARGE, f"the body has {len(body)} bytes; maximum {MAX_BODY_BYTES}")
    if not body:
        raise StatusError(Code.MESSAGE_BODY_EMPTY, "the message has no body")
    found = _user_properties(message)
    size = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    _add_tag_and_keys(found, system)
    size += sum(len(found.get(name, "").encode()) for name in (props.TAGS, props.KEYS))
    if size > MAX_USER_PROPERTY_BYTES:
        reason = f"the properties, tag and keys have {size} bytes; expected at most {MAX_USER_PROPERTY_BYTES}"
        raise StatusError(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
    if not system.message_id.strip() or has_control(system.message_id) or len(system.message_id) > MAX_MESSAGE_ID_CHARS:
        reason = f"the message's id is blank, has control characters, or more than {MAX_MESSAGE_ID_CHARS} characters"
        raise StatusError(Code.ILLEGAL_MESSAGE_ID, reason)
    found[props.UNIQUE_KEY] = system.message_id
    found[props.PRODUCER_GROUP] = topic
    is_half = system.message_type == TRANSACTION
    if is_half:
        _add_transaction(found, system)
    if system.HasField("delivery_timestamp"):
        found[props.TIMER_DELIVER_MS] = str(_delivery_ms(system, now_ms, max_delay_ms))
    group_key = _group_key(found, system)
    kind = TRANSACTION if is_half else DELAY if props.TIMER_DELIVER_MS in found else FIFO if group_key else NORMAL
    if system.HasField("priority"):
        kind = _add_priority(found, system, kind)
    if system.lite_topic:  # an empty value counts as a missing one, as with Apache's proxy
        kind = _add_lite_topic(found, system.lite_topic, kind)
    for name, value in ((TRACE_CONTEXT, system.trace_context), (BORN_HOST, system.born_host)):
        if value and len(value) <= MAX_CONTEXT_CHARS and not has_control(value):  # otherwise the value is dropped
            found[name] = value
    sys_flag = SYS_COMPRESSED | SYS_COMPRESSION_ZLIB if system.body_encoding == GZIP else 0
    born = system.born_timestamp
    born_ms = born.seconds * 1000 + born.nanos // 1_000_000
    if not 0 < born_ms <= MAX_TIMESTAMP_MS:
        born_ms = now_ms
    return AcceptedMessage(system.message_id, props.encode(found), body, sys_flag, born_ms, kind, group_key)


def _user_properties(message: Any) -> dict[str, str]:
    found = dict(message.user_properties)
    if len(found) > MAX_USER_PROPERTIES:
        reason = f"the message has {len(found)} properties; maximum {MAX_USER_PROPERTIES}"
        raise StatusError(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
    for name, value in found.items():
        if name in RESERVED:
            raise StatusError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property {name} is RocketMQ's own")
        if has_control(name) or has_control(value) or not name:
            reason = f"the property {name[:100]!r} is empty or has control characters"
            raise StatusError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, reason)
    return found


def _add_tag_and_keys(found: dict[str, str], system: Any) -> None:
    if system.HasField("tag"):
        tag = system.tag
        if not tag.strip() or "|" in tag or has_control(tag):
            raise StatusError(Code.ILLEGAL_MESSAGE_TAG, "the tag is blank, or has `|` or control characters")
        found[props.TAGS] = tag
    for key in system.keys:
        if not key.strip() or has_control(key):
            raise StatusError(Code.ILLEGAL_MESSAGE_KEY, "a key is blank or has control characters")
    if system.keys:
        found[props.KEYS] = " ".join(system.keys)


def _add_transaction(found: dict[str, str], system: Any) -> None:
    found[props.TRANSACTION] = "true"
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = system.orphaned_transaction_recovery_duration.seconds
        if not 0 <= seconds <= MAX_RECOVERY_S:
            reason = f"orphaned_transaction_recovery_duration: got {seconds} s; expected 0 to {MAX_RECOVERY_S}"
            raise StatusError(Code.BAD_REQUEST, reason)
        found[CHECK_IMMUNITY] = str(seconds)


def _delivery_ms(system: Any, now_ms: int, max_delay_ms: int) -> int:
    time = system.delivery_timestamp
    due_ms: int = time.seconds * 1000 + time.nanos // 1_000_000
    if due_ms > now_ms + max_delay_ms:
        reason = (
            f"the message is to be delivered in {due_ms - now_ms} ms; expected at most {max_delay_ms} ms, "
            "which the broker's option --grpc-max-delay-hours sets"
        )
        raise StatusError(Code.ILLEGAL_DELIVERY_TIME, reason)
    return max(due_ms, 0)


def _add_priority(found: dict[str, str], system: Any, kind: int) -> int:
    """Add the priority; return the message type, which stays DELAY or TRANSACTION for messages of those types."""
    if system.priority < 0:
        raise StatusError(Code.BAD_REQUEST, f"priority: got {system.priority}; expected 0 or more")
    if kind == FIFO:
        reason = "a message has either a message group or a priority: the messages of a group keep their order"
        raise StatusError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, reason)
    found[props.PRIORITY] = str(system.priority)
    return PRIORITY if kind == NORMAL else kind


def _add_lite_topic(found: dict[str, str], name: str, kind: int) -> int:
    if kind != NORMAL:
        reason = f"a message has either a lite topic or is of the type {TYPE_NAMES[kind]}"
        raise StatusError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, reason)
    fault = names.lite_name_fault(name)
    if fault:
        raise StatusError(Code.ILLEGAL_LITE_TOPIC, fault)
    found[props.LITE_TOPIC] = name
    return LITE


def _group_key(found: dict[str, str], system: Any) -> str:
    """Return the message group, and store it as the property where clients of 4.9 look for it. Without a group, return that
    property if the client has set it, or an empty text."""
    if system.HasField("message_group"):
        key: str = system.message_group
        if not key.strip() or has_control(key) or len(key.encode()) > MAX_GROUP_KEY_BYTES:
            reason = f"the message group is blank, has control characters, or more than {MAX_GROUP_KEY_BYTES} bytes"
            raise StatusError(Code.ILLEGAL_MESSAGE_GROUP, reason)
        found[props.SHARDING_KEY] = key
    return found.get(props.SHARDING_KEY, "")


def is_gzip(sent: AcceptedMessage) -> bool:
    return sent.sys_flag & SYS_COMPRESSED != 0 and sent.body.startswith(_GZIP_MAGIC)


def decompressing(sent: AcceptedMessage, inflater: Inflater) -> Work[AcceptedMessage]:
    """Return the message with its body decompressed, because consumers of 4.9 read zlib but not gzip. A body that cannot be
    decompressed is kept as it was sent.

    Raises:
        SpentTooMuch: The bodies of the call inflate to more than the limit.
    """
    try:
        body = yield from inflater.inflating_gzip(sent.body, MAX_BODY_BYTES)
    except MessageError:
        return sent
    return sent._replace(body=body, sys_flag=0) if body else sent


# To be delivered


def filling(
    message: Any,
    record: Record,
    inflater: Inflater,
    attempt: int,
    namespace: str,
    handle: str = "",
    *,
    is_lite: bool = False,
) -> Work[None]:
    """Fill in the message that a client receives from a record. A compressed body is decompressed in pieces.

    Args:
        attempt: The delivery attempt, from 1.
        namespace: The client's namespace, which topic names are returned without.
        handle: The receipt handle with which the client acknowledges the message.
        is_lite: True if the message is delivered from a lite topic. Otherwise its lite topic is only a property, without
            meaning: clients would return it with the acknowledgement.
    """
    found = props.decode(record.properties)
    topic = record.topic
    if topic.startswith(names.RETRY_PREFIX):
        topic = found.get(props.RETRY_TOPIC, topic)
    elif topic == names.HALF_TOPIC:
        topic = found.get(props.REAL_TOPIC, topic)
    set_resource(message.topic, topic, namespace)
    for name, value in found.items():
        if name not in _HIDDEN:
            message.user_properties[name] = value
    system = message.system_properties
    yield from _filling_body(message, system, record, inflater)
    _fill_properties(system, found, record, namespace)
    set_ms(system.born_timestamp, record.born_ms)
    set_ms(system.store_timestamp, record.store_ms)
    system.born_host = found.get(BORN_HOST) or _address(record.born_host)
    system.store_host = _address(record.store_host)
    system.queue_id, system.queue_offset = record.queue_id, record.queue_offset
    if is_lite:
        _fill_lite(system, found)
    system.delivery_attempt = attempt
    if handle:
        system.receipt_handle = handle


def _filling_body(message: Any, system: Any, record: Record, inflater: Inflater) -> Work[None]:
    """Fill in the body, decompressed because no compression is supported by all clients. A body that cannot be decompressed
    is returned as it is, and marked as gzip."""
    body, encoding = record.body, _IDENTITY
    if record.sys_flag & SYS_COMPRESSED:
        try:
            body = yield from inflater.inflating(body, record.sys_flag, MAX_BODY_BYTES)
        except MessageError:
            encoding = GZIP
    message.body = body
    system.body_encoding = encoding
    system.body_digest.type = _MD5
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def _fill_properties(system: Any, found: dict[str, str], record: Record, namespace: str) -> None:
    system.message_id = found.get(props.UNIQUE_KEY) or record.offset_id
    if tag := found.get(props.TAGS):
        system.tag = tag
    if keys := found.get(props.KEYS):
        system.keys.extend(keys.split(" "))
    due = found.get(props.TIMER_DELIVER_MS, "")
    if due.isdecimal() and len(due) <= 19:
        set_ms(system.delivery_timestamp, int(due))
    if group_key := found.get(props.SHARDING_KEY):
        system.message_group = group_key
    if trace_context := found.get(TRACE_CONTEXT):
        system.trace_context = trace_context
    if origin := found.get(props.DLQ_ORIGIN_TOPIC):
        system.dead_letter_queue.topic = names.without_namespace(origin, namespace)
        system.dead_letter_queue.message_id = found.get(props.DLQ_ORIGIN_MESSAGE_ID, "")
    is_half = found.get(props.TRANSACTION) == "true"
    is_timed = due != "" or props.DELAY in found
    priority = found.get(props.PRIORITY, "")
    is_urgent = priority.isdecimal() and len(priority) <= 10 and int(priority) <= MAX_PRIORITY
    if is_urgent:
        system.priority = int(priority)
    kind = TRANSACTION if is_half else DELAY if is_timed else FIFO if group_key else NORMAL
    system.message_type = PRIORITY if kind == NORMAL and is_urgent else kind


def _fill_lite(system: Any, found: dict[str, str]) -> None:
    system.lite_topic = found[props.LITE_TOPIC]
    system.queue_offset = int(found[props.LITE_OFFSET])
    if system.message_type == NORMAL:
        system.message_type = LITE


def set_ms(timestamp: Any, time_ms: int) -> None:
    """Set a timestamp from milliseconds, clamped: clients may store any number, and protobuf fails beyond the year 9999."""
    time_ms = min(max(time_ms, 0), MAX_TIMESTAMP_MS)
    timestamp.seconds, timestamp.nanos = time_ms // 1000, time_ms % 1000 * 1_000_000


def _address(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


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
