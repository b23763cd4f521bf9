"""Conversion between gRPC messages and stored records, which remoting clients read and write, too."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import Work
from ...protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.message import Inflater, MessageError, Record, decode_host
from ..config import (
    MAX_CONTEXT_CHARS,
    MAX_GROUP_KEY_BYTES,
    MAX_MESSAGE_ID_CHARS,
    MAX_PRIORITY,
    MAX_RECOVERY_S,
    MAX_TIMER_DELAY_MS,
    MAX_TIMESTAMP_MS,
    MAX_USER_PROPERTIES,
    MAX_USER_PROPERTY_BYTES,
)
from ..messages.transactions import CHECK_IMMUNITY
from .schema import Code, StatusError, has_control, set_resource

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
