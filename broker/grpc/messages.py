"""Messages as these clients write them, and as they are stored: both doors share the topics."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB
from ...protocol.compression import Inflater
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.message import MessageError, Record, decode_host
from ...protocol.work import Work
from ..config import (
    MAX_CONTEXT_CHARS,
    MAX_GROUP_KEY_BYTES,
    MAX_MESSAGE_ID_CHARS,
    MAX_RECOVERY_S,
    MAX_TIMER_DELAY_MS,
    MAX_TIMESTAMP_MS,
    MAX_USER_PROPERTIES,
    MAX_USER_PROPERTY_BYTES,
)
from .codes import Code, Fault
from .names import has_control

NORMAL, FIFO, DELAY, TRANSACTION = 1, 2, 3, 4
TYPE_NAMES: Final = {NORMAL: "NORMAL", FIFO: "FIFO", DELAY: "DELAY", TRANSACTION: "TRANSACTION"}

SHARDING_KEY: Final = "__SHARDINGKEY"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
CHECK_IMMUNITY: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
BORN_HOST: Final = "__BORNHOST"
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
DEAD_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DEAD_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"

_MD5, _IDENTITY, GZIP = 2, 1, 2
_GZIP_MAGIC: Final = b"\x1f\x8b"

# No user may set them. Apache's MessageConst.STRING_HASH_SET.
RESERVED: Final = frozenset(
    "TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET "
    "BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES "
    "CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO "
    "INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE "
    "INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS "
    "TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC "
    "DLQ_ORIGIN_MESSAGE_ID __CRC32#".split()
)
# Set by brokers, or shown in fields of their own
_HIDDEN: Final = RESERVED | {
    SHARDING_KEY,
    CHECK_IMMUNITY,
    TRACE_CONTEXT,
    "TRANSACTION_CHECK_TIMES",
    "__transactionId__",
    "INNER_NUM",
}


class Sent(NamedTuple):
    """A message that may be stored. `kind`: one of the four types; `group_key`: its message group, or empty. A body in
    gzip is still as it was sent."""

    message_id: str
    properties: str
    body: bytes
    sys_flag: int
    born_ms: int
    kind: int
    group_key: str


# To be stored


def checked(message: Any, topic: str, now_ms: int) -> Sent:
    """Checks a message in Apache's order. Raises Fault for the first check that fails."""
    system = message.system_properties
    body = message.body
    if len(body) > MAX_BODY_BYTES:
        raise Fault(Code.MESSAGE_BODY_TOO_LARGE, f"the body has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
    if not body:
        raise Fault(Code.MESSAGE_BODY_EMPTY, "the message has no body")
    found = _user_properties(message)
    _add_tag_and_keys(found, system)
    size = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    if size > MAX_USER_PROPERTY_BYTES:
        reason = f"the properties, tag and keys have {size} bytes; {MAX_USER_PROPERTY_BYTES} are allowed"
        raise Fault(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
    if not system.message_id.strip() or has_control(system.message_id) or len(system.message_id) > MAX_MESSAGE_ID_CHARS:
        reason = f"the message's id is blank, has control characters, or more than {MAX_MESSAGE_ID_CHARS} characters"
        raise Fault(Code.ILLEGAL_MESSAGE_ID, reason)
    found[props.UNIQUE_KEY] = system.message_id
    found[props.PRODUCER_GROUP] = topic
    is_half = system.message_type == TRANSACTION
    if is_half:
        _add_transaction(found, system)
    if system.HasField("delivery_timestamp"):
        found[TIMER_DELIVER_MS] = str(_delivery_ms(system, now_ms))
    group_key = _group_key(found, system)
    kind = TRANSACTION if is_half else DELAY if TIMER_DELIVER_MS in found else FIFO if group_key else NORMAL
    for name, value in ((TRACE_CONTEXT, system.trace_context), (BORN_HOST, system.born_host)):
        if value and len(value) <= MAX_CONTEXT_CHARS and not has_control(value):  # otherwise it is left out
            found[name] = value
    sys_flag = SYS_COMPRESSED | SYS_COMPRESSION_ZLIB if system.body_encoding == GZIP else 0
    born = system.born_timestamp
    born_ms = born.seconds * 1000 + born.nanos // 1_000_000
    if not 0 < born_ms <= MAX_TIMESTAMP_MS:
        born_ms = now_ms
    return Sent(system.message_id, props.encode(found), body, sys_flag, born_ms, kind, group_key)


def _user_properties(message: Any) -> dict[str, str]:
    found = dict(message.user_properties)
    if len(found) > MAX_USER_PROPERTIES:
        reason = f"the message has {len(found)} properties; {MAX_USER_PROPERTIES} are allowed"
        raise Fault(Code.MESSAGE_PROPERTIES_TOO_LARGE, reason)
    for name, value in found.items():
        if name in RESERVED:
            raise Fault(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property {name} is RocketMQ's own")
        if has_control(name) or has_control(value) or not name:
            reason = f"the property {name[:100]!r} is empty or has control characters"
            raise Fault(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, reason)
    return found


def _add_tag_and_keys(found: dict[str, str], system: Any) -> None:
    if system.HasField("tag"):
        tag = system.tag
        if not tag.strip() or "|" in tag or has_control(tag):
            raise Fault(Code.ILLEGAL_MESSAGE_TAG, "the tag is blank, or has `|` or control characters")
        found[props.TAGS] = tag
    for key in system.keys:
        if not key.strip() or has_control(key):
            raise Fault(Code.ILLEGAL_MESSAGE_KEY, "a key is blank or has control characters")
    if system.keys:
        found[props.KEYS] = " ".join(system.keys)


def _add_transaction(found: dict[str, str], system: Any) -> None:
    found[props.TRANSACTION] = "true"
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = system.orphaned_transaction_recovery_duration.seconds
        if not 0 <= seconds <= MAX_RECOVERY_S:
            reason = f"the transaction is to be recovered after {seconds} s; 0 to {MAX_RECOVERY_S} are allowed"
            raise Fault(Code.BAD_REQUEST, reason)
        found[CHECK_IMMUNITY] = str(seconds)


def _delivery_ms(system: Any, now_ms: int) -> int:
    time = system.delivery_timestamp
    due_ms: int = time.seconds * 1000 + time.nanos // 1_000_000
    if due_ms > now_ms + MAX_TIMER_DELAY_MS:
        reason = f"the message is to be delivered in more than {MAX_TIMER_DELAY_MS} ms"
        raise Fault(Code.ILLEGAL_DELIVERY_TIME, reason)
    return max(due_ms, 0)


def _group_key(found: dict[str, str], system: Any) -> str:
    """The key of a message group, which also becomes a user property, where 4.9's clients look for it."""
    if system.HasField("message_group"):
        key: str = system.message_group
        if not key.strip() or has_control(key) or len(key.encode()) > MAX_GROUP_KEY_BYTES:
            reason = f"the message group is blank, has control characters, or more than {MAX_GROUP_KEY_BYTES} bytes"
            raise Fault(Code.ILLEGAL_MESSAGE_GROUP, reason)
        found[SHARDING_KEY] = key
    return found.get(SHARDING_KEY, "")


def is_gzip(sent: Sent) -> bool:
    return sent.sys_flag & SYS_COMPRESSED != 0 and sent.body.startswith(_GZIP_MAGIC)


def decompressing(sent: Sent, inflater: Inflater) -> Work[Sent]:
    """Return the message with its body decompressed, because 4.9's consumers read zlib and not gzip. One that cannot be
    read stays as it is.

    Raises:
        SpentTooMuch: The messages of the call need too much work.
    """
    try:
        body = yield from inflater.inflating_gzip(sent.body, MAX_BODY_BYTES)
    except MessageError:
        return sent
    return sent._replace(body=body, sys_flag=0) if body else sent


# To be delivered


def filling(message: Any, record: Record, inflater: Inflater, attempt: int, handle: str = "") -> Work[None]:
    """Fill the message that a consumer gets from a record, which it acknowledges by `handle`. A compressed body takes
    several pieces."""
    found = props.decode(record.properties)
    topic = record.topic
    if topic.startswith(names.RETRY_PREFIX):
        topic = found.get(props.RETRY_TOPIC, topic)
    elif topic == names.HALF_TOPIC:
        topic = found.get(props.REAL_TOPIC, topic)
    message.topic.name = topic
    for name, value in found.items():
        if name not in _HIDDEN:
            message.user_properties[name] = value
    system = message.system_properties
    yield from _filling_body(message, system, record, inflater)
    _fill_properties(system, found, record)
    set_ms(system.born_timestamp, record.born_ms)
    set_ms(system.store_timestamp, record.store_ms)
    system.born_host = found.get(BORN_HOST) or _address(record.born_host)
    system.store_host = _address(record.store_host)
    system.queue_id, system.queue_offset = record.queue_id, record.queue_offset
    system.delivery_attempt = attempt
    if handle:
        system.receipt_handle = handle


def _filling_body(message: Any, system: Any, record: Record, inflater: Inflater) -> Work[None]:
    """Fills in the decompressed body: some clients can undo no compression, others only one kind."""
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


def _fill_properties(system: Any, found: dict[str, str], record: Record) -> None:
    system.message_id = found.get(props.UNIQUE_KEY) or record.offset_id
    if tag := found.get(props.TAGS):
        system.tag = tag
    if keys := found.get(props.KEYS):
        system.keys.extend(keys.split(" "))
    due = found.get(TIMER_DELIVER_MS, "")
    if due.isdecimal() and len(due) <= 19:
        set_ms(system.delivery_timestamp, int(due))
    if group_key := found.get(SHARDING_KEY):
        system.message_group = group_key
    if context := found.get(TRACE_CONTEXT):
        system.trace_context = context
    if origin := found.get(DEAD_TOPIC):
        system.dead_letter_queue.topic = origin
        system.dead_letter_queue.message_id = found.get(DEAD_MESSAGE_ID, "")
    is_half = found.get(props.TRANSACTION) == "true"
    is_timed = due != "" or props.DELAY in found
    system.message_type = TRANSACTION if is_half else DELAY if is_timed else FIFO if group_key else NORMAL


def set_ms(timestamp: Any, time_ms: int) -> None:
    """Any client may store any number as a time, and protobuf's libraries raise beyond the year 9999."""
    time_ms = min(max(time_ms, 0), MAX_TIMESTAMP_MS)
    timestamp.seconds, timestamp.nanos = time_ms // 1000, time_ms % 1000 * 1_000_000


def _address(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
