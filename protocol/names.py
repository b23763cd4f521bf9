"""Names of topics and groups: which are legal, which the system uses, and which are derived from others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from .config import MAX_GROUP_CHARS, MAX_TOPIC_CHARS

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
DEFAULT_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
NOTES_TOPIC: Final = "rmq_sys_delivery_notes"  # ours: what was delivered of the messages in the two before
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
MARKS_TOPIC: Final = "ROCKETLET_DEAD_LETTER_MARKS"  # ours: which dead letters were sent again or discarded
INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
TOOLS_GROUP: Final = "TOOLS_CONSUMER"  # every Apache broker has it: for reading without a group
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
# Groups that Apache's brokers make for themselves (SubscriptionGroupManager.init, MixAll).
SYSTEM_GROUPS: Final = frozenset(
    (
        TOOLS_GROUP,
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "ONS_HTTP_PROXY_GROUP",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_RMQ_SYS_TRANS",
    )
)


# Messages may not be sent to these by clients (code 16).
UNSENDABLE_TOPICS: Final = frozenset(
    (
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        NOTES_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    )
)
INNER_TOPICS: Final = UNSENDABLE_TOPICS | {TRACE_TOPIC}
SYSTEM_TOPICS: Final = UNSENDABLE_TOPICS | {DEFAULT_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}
# Apache's clients send these if nobody has set a group; two such programs would share one.
RESERVED_GROUPS: Final = frozenset(("DEFAULT_PRODUCER", "DEFAULT_CONSUMER"))

_REPLY_END: Final = "_REPLY_TOPIC"
_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+\Z").match


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


def sorted_ids(client_ids: Iterable[str]) -> list[str]:
    """Member ids in Java's order, by UTF-16 units."""
    return sorted(client_ids, key=lambda client_id: client_id.encode("utf-16-be", "surrogatepass"))


def reply_topic(cluster: str) -> str:
    """Where replies to requests are kept."""
    return cluster + _REPLY_END


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith("rmq_sys_")


def is_reply_topic(topic: str) -> bool:
    """Whether a broker may keep replies there; a cluster is called as its operator wants."""
    return topic.endswith(_REPLY_END)


def is_inner_topic(topic: str) -> bool:
    """Whether brokers keep in it what belongs to other topics: their delayed and half messages, replies, traces."""
    return topic in INNER_TOPICS or topic.startswith("rmq_sys_") or is_reply_topic(topic)


def is_made_by_brokers(topic: str) -> bool:
    """Whether no user made the topic: a system topic, or one that holds a group's retries or dead letters, or their marks."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) or topic == MARKS_TOPIC


def is_system_group(group: str) -> bool:
    """Whether RocketMQ made the group for itself."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def topic_fault(topic: str) -> str | None:
    """Why a topic's name is not legal; None if it is."""
    return _fault("topic", topic, MAX_TOPIC_CHARS)


def group_fault(group: str) -> str | None:
    """Why a group's name is not legal; None if it is."""
    if group in RESERVED_GROUPS:
        return f"the group name {group} is reserved; choose another one"
    return _fault("group", group, MAX_GROUP_CHARS)


class IllegalName(ValueError):
    """A name that a topic or group may not have. The text says why."""


def _fault(kind: str, name: str, limit_chars: int) -> str | None:
    if not name.strip():
        return f"the {kind} name is blank"
    if not _LEGAL(name):
        return f"the {kind} name {name[:limit_chars]!r} has characters other than letters, digits, and % | _ -"
    if len(name) > limit_chars:
        return f"the {kind} name has {len(name)} characters; {limit_chars} are allowed"
    return None
