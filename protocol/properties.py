"""A message's properties: `name \\x01 value \\x02 name \\x01 value`, encoded in UTF-8, at most 32,767 bytes.

The names below belong to RocketMQ or Rocketlet. `reserved_fault` rejects those of `RESERVED` in messages of users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NAME_END: Final = "\x01"
PAIR_END: Final = "\x02"

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
RETRY_TOPIC: Final = "RETRY_TOPIC"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE_ID: Final = "REAL_QID"
TRANSACTION: Final = "TRAN_MSG"
TRANSACTION_ID: Final = "__transactionId__"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
PRIORITY: Final = "_SYS_MSG_PRIORITY_"  # a property of 5.4: a higher number is a higher priority
LITE_TOPIC: Final = "__LITE_TOPIC"  # a property of 5.5: the lite topic of a message in its parent topic
SHARDING_KEY: Final = "__SHARDINGKEY"  # the message group of FIFO topics; users may set it, too
LITE_QUEUE: Final = "INNER_MULTI_DISPATCH"  # set by the broker: `%LMQ%$parent$name`
LITE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"  # set by the broker: the message's offset in its lite topic
TIMER_RECALL: Final = "TIMER_DEL_UNIQKEY"
PRODUCER_GROUP: Final = "PGROUP"
UNIQUE_KEY: Final = "UNIQ_KEY"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
CLUSTER: Final = "CLUSTER"
TRACE_ON: Final = "TRACE_ON"
# Rocketlet's own: names of properties that were dropped from a dead letter because of the size limit
DROPPED: Final = "DROPPED_PROPERTIES"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
# Rocketlet's own: the reason why a dead letter, or a message that is retried, was not handled
DLQ_REASON: Final = "DLQ_REASON"
_DROPPED_NAMES_BYTES: Final = 200

RESERVED: Final = frozenset(
    "KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG __transactionId__ PGROUP MIN_OFFSET MAX_OFFSET "
    "BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON "
    "UNIQ_KEY MAX_RECONSUME_TIMES CONSUME_START_TIME INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME "
    "PUSH_REPLY_TIME CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS "
    "TIMER_OUT_MS TIMER_DEL_UNIQKEY _SYS_MSG_PRIORITY_ __LITE_TOPIC INNER_MULTI_DISPATCH POP_CK 1ST_POP_TIME "
    "DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID DLQ_REASON".split()
)


def encode(properties: Mapping[str, str]) -> str:
    """Encode properties, without a separator at the end. Properties with empty values are left out, as in Java."""
    return PAIR_END.join(f"{name}{NAME_END}{value}" for name, value in properties.items() if value)


def decode(text: str) -> dict[str, str]:
    """Decode properties by Java's rules: an item without a name or a value is skipped. If a name occurs twice, the last
    value counts."""
    properties: dict[str, str] = {}
    for item in text.split(PAIR_END):
        name, _, value = item.partition(NAME_END)
        if name and value:
            properties[name] = value
    return properties


def find(text: str, name: str) -> str | None:
    """Return the value of one property, like `decode`, but without decoding the others."""
    wanted, rest = PAIR_END + name + NAME_END, PAIR_END + text
    rest, mark, after = rest.rpartition(wanted)
    while mark:
        if value := after.partition(PAIR_END)[0]:
            return value
        rest, mark, after = rest.rpartition(wanted)
    return None


def without(text: str, name: str) -> str:
    """Return the encoded properties without one property."""
    wanted = name + NAME_END
    if wanted not in text:
        return text
    before, mark, rest = text.partition(PAIR_END + wanted)
    if mark and wanted not in rest and not text.startswith(wanted):  # the usual case: the property occurs once
        _, end, after = rest.partition(PAIR_END)
        return before + end + after
    return PAIR_END.join([item for item in text.split(PAIR_END) if item and not item.startswith(wanted)])


def appended(text: str, name: str, value: str) -> str:
    """Return the encoded properties with one more property at the end."""
    if not text or text.endswith(PAIR_END):
        return f"{text}{name}{NAME_END}{value}"
    return f"{text}{PAIR_END}{name}{NAME_END}{value}"


def shortened(text: str, size_bytes: int) -> tuple[str, list[str]]:
    """Shorten encoded properties to this many bytes, and return them with the names of the dropped properties.

    The longest properties of users are dropped first, then reserved ones. Up to 200 bytes of the dropped names are stored
    in one more property.
    """
    items = [item for item in text.split(PAIR_END) if item]
    sizes = [len(item.encode()) + 1 for item in items]
    order = sorted(range(len(items)), key=lambda index: (_name_of(items[index]) in RESERVED, -sizes[index]))
    excess = sum(sizes) + len(DROPPED) + _DROPPED_NAMES_BYTES + 2 - size_bytes
    dropped: list[int] = []
    for index in order:
        if excess <= 0:
            break
        excess -= sizes[index]
        dropped.append(index)
    left = set(dropped)
    names = [_name_of(items[index]) for index in dropped]
    kept = PAIR_END.join(item for index, item in enumerate(items) if index not in left)
    shown = " ".join(names).encode()[:_DROPPED_NAMES_BYTES].decode(errors="ignore")
    return appended(kept, DROPPED, shown), names


def _name_of(item: str) -> str:
    return item.partition(NAME_END)[0]


def reserved_fault(properties: Mapping[str, str]) -> str | None:
    """Return the reason why a user's properties cannot be sent; None if they can."""
    for name, value in properties.items():
        if name in RESERVED:
            return f"the property {name} is RocketMQ's own; choose another name"
        if not isinstance(name, str) or not isinstance(value, str):
            return f"the property {name!r} is {value!r}; names and values must be text"
        if not name.strip() or not value.strip():
            return f"the property {name!r} has the value {value!r}; neither may be blank"
        if NAME_END in name or PAIR_END in name or PAIR_END in value or NAME_END in value:
            return f"the property {name!r} contains a separator character (U+0001 or U+0002)"
    return None
