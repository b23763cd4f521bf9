"""A message's properties: `name \\x01 value \\x02 name \\x01 value`, UTF-8, at most 32,767 bytes.

The names below belong to RocketMQ. `reserved_fault` refuses them in messages of users.
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
PRIORITY: Final = "_SYS_MSG_PRIORITY_"  # 5.4's: the larger, the more urgent
LITE_TOPIC: Final = "__LITE_TOPIC"  # 5.5's: the lite topic of a message in its parent topic
LITE_QUEUE: Final = "INNER_MULTI_DISPATCH"  # set by the broker: `%LMQ%$parent$name`
LITE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"  # set by the broker: the message's offset in its lite topic
TIMER_RECALL: Final = "TIMER_DEL_UNIQKEY"
PRODUCER_GROUP: Final = "PGROUP"
UNIQUE_KEY: Final = "UNIQ_KEY"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
CLUSTER: Final = "CLUSTER"
TRACE_ON: Final = "TRACE_ON"
DROPPED: Final = "DROPPED_PROPERTIES"  # ours: of a dead letter that had no room for all
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
DLQ_REASON: Final = "DLQ_REASON"  # ours: why a dead letter, or a message that is retried, was not handled
_DROPPED_NAMES_BYTES: Final = 200

RESERVED: Final = frozenset(
    [
        "KEYS",
        "TAGS",
        "WAIT",
        "DELAY",
        "RETRY_TOPIC",
        "REAL_TOPIC",
        "REAL_QID",
        "TRAN_MSG",
        "__transactionId__",
        "PGROUP",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "BUYER_ID",
        "ORIGIN_MESSAGE_ID",
        "TRANSFER_FLAG",
        "CORRECTION_FLAG",
        "MQ2_FLAG",
        "RECONSUME_TIME",
        "MSG_REGION",
        "TRACE_ON",
        "UNIQ_KEY",
        "MAX_RECONSUME_TIMES",
        "CONSUME_START_TIME",
        "INSTANCE_ID",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "TTL",
        "ARRIVE_TIME",
        "PUSH_REPLY_TIME",
        "CLUSTER",
        "MSG_TYPE",
        "INNER_MULTI_QUEUE_OFFSET",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_OUT_MS",
        "TIMER_DEL_UNIQKEY",
        "_SYS_MSG_PRIORITY_",
        "POP_CK",
        "1ST_POP_TIME",
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_REASON",
    ]
)


def encode(properties: Mapping[str, str]) -> str:
    """The text of the properties, without a trailing separator. Empty values vanish, as in Java."""
    return PAIR_END.join(f"{name}{NAME_END}{value}" for name, value in properties.items() if value)


def decode(text: str) -> dict[str, str]:
    """The properties of a text, by Java's rules: an item under 3 characters, or without a name or a value, is skipped. Of a
    name that occurs twice, the last value counts."""
    properties: dict[str, str] = {}
    for item in text.split(PAIR_END):
        name, _, value = item.partition(NAME_END)
        if name and value:
            properties[name] = value
    return properties


def find(text: str, name: str) -> str | None:
    """The value of one property as `decode` has it, without parsing the others."""
    wanted = name + NAME_END
    at = len(text)
    while (at := text.rfind(PAIR_END + wanted, 0, at)) >= 0:
        value = text[at + 1 + len(wanted) :].partition(PAIR_END)[0]
        if value:
            return value
    return text[len(wanted) :].partition(PAIR_END)[0] or None if text.startswith(wanted) else None


def without(text: str, name: str) -> str:
    """The text with one property taken out."""
    wanted = name + NAME_END
    if wanted not in text:
        return text
    before, mark, rest = text.partition(PAIR_END + wanted)
    if mark and wanted not in rest and not text.startswith(wanted):  # as nearly always: it is there once
        _, end, after = rest.partition(PAIR_END)
        return before + end + after
    return PAIR_END.join([item for item in text.split(PAIR_END) if item and not item.startswith(wanted)])


def appended(text: str, name: str, value: str) -> str:
    """The text with one property added at its end."""
    if not text or text.endswith(PAIR_END):
        return f"{text}{name}{NAME_END}{value}"
    return f"{text}{PAIR_END}{name}{NAME_END}{value}"


def shortened(text: str, size_bytes: int) -> tuple[str, list[str]]:
    """Return the text within this many bytes, and the names of the properties that were dropped for it.

    The longest properties of users are dropped first. Their names are kept as one more property."""
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
    """Why a user's properties cannot be sent; None if they can."""
    for name, value in properties.items():
        if name in RESERVED:
            return f"the property {name} is RocketMQ's own; choose another name"
        if not isinstance(name, str) or not isinstance(value, str):
            return f"the property {name!r} is {value!r}; names and values must be text"
        if not name.strip() or not value.strip():
            return f"the property {name!r} has the value {value!r}; neither may be blank"
        if NAME_END in name or PAIR_END in name or PAIR_END in value or NAME_END in value:
            return f"the property {name!r} holds a separator character (U+0001 or U+0002)"
    return None
