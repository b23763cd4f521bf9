"""Names of topics, groups, clients and queues; subscriptions and tag hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from struct import unpack
from typing import Final, NamedTuple
from zlib import crc32

from . import properties as props
from .config import (
    MAX_EXPRESSION_CHARS,
    MAX_EXPRESSION_TAGS,
    MAX_GROUP_CHARS,
    MAX_KEPT_TAG_CHARS,
    MAX_LITE_NAME_CHARS,
    MAX_SUMMARY_CHARS,
    MAX_TOPIC_CHARS,
)

# ------------------------------------------------------------------------------
# Names of topics and groups: legal names, names of the system, and names that are derived from others.


RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%$"
DEFAULT_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
# Rocketlet's own: records which messages of SCHEDULE_TOPIC and TIMER_TOPIC were delivered
NOTES_TOPIC: Final = "rmq_sys_delivery_notes"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
# Rocketlet's own: records which dead letters were resent or discarded
MARKS_TOPIC: Final = "ROCKETLET_DEAD_LETTER_MARKS"
INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
TOOLS_GROUP: Final = "TOOLS_CONSUMER"  # a group of every Apache broker, for reads without a consumer group
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
# Groups that Apache's brokers create for themselves (SubscriptionGroupManager.init, MixAll).
SYSTEM_GROUPS: Final = frozenset(
    (
        TOOLS_GROUP,
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_RMQ_SYS_TRANS",
    )
)


# Clients may not send to these topics (response code 16).
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
# Apache's 5.5 stores the half messages of transactions of its RocksDB store in these.
_ROCKSDB_TOPICS: Final = frozenset(("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"))
SYSTEM_TOPICS: Final = UNSENDABLE_TOPICS | _ROCKSDB_TOPICS | {DEFAULT_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}
# Apache's clients use these if no group is set, so that unrelated programs would share a group.
RESERVED_GROUPS: Final = frozenset(("DEFAULT_PRODUCER", "DEFAULT_CONSUMER"))

_REPLY_END: Final = "_REPLY_TOPIC"
_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+\Z").match


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


_is_lite_name = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_LITE_NAME_CHARS}}}\Z").match


def lite_queue(parent: str, name: str) -> str:
    """Return the name under which the offset of a group in a lite topic is kept, as at Apache's broker. This name is
    not a topic's name."""
    return f"{LMQ_PREFIX}{parent}${name}"


def is_lite_queue(topic: str) -> bool:
    return topic.startswith(LMQ_PREFIX)


def parent_and_name(topic: str) -> tuple[str, str] | None:
    """Return the parent topic and the lite topic of a name that `lite_queue` returns; None for another name."""
    parent, _, name = topic.removeprefix(LMQ_PREFIX).rpartition("$")
    return (parent, name) if topic.startswith(LMQ_PREFIX) and parent and name else None


def lite_name_fault(name: str) -> str | None:
    """Return the reason why the name of a lite topic is illegal; None if it is legal."""
    if _is_lite_name(name):
        return None
    return f"lite topic: got {name[:100]!r}; expected 1 to {MAX_LITE_NAME_CHARS} of the characters A-Z a-z 0-9 _ -"


def with_namespace(name: str, namespace: str) -> str:
    """Return `teamA%name`: the name of a namespace's topic or group as clients of 4.9 and Apache's proxy send it
    (NamespaceUtil.wrapNamespace). A prefix of retry topics or dead-letter topics stays in front."""
    if not namespace or not name:
        return name
    prefix = next((prefix for prefix in (RETRY_PREFIX, DLQ_PREFIX) if name.startswith(prefix)), "")
    bare = name.removeprefix(prefix)
    return name if bare.startswith(f"{namespace}%") else f"{prefix}{namespace}%{bare}"


def without_namespace(name: str, namespace: str) -> str:
    """Return the name of a topic or group as clients of the namespace use it."""
    if not namespace:
        return name
    prefix = next((prefix for prefix in (RETRY_PREFIX, DLQ_PREFIX) if name.startswith(prefix)), "")
    return prefix + name.removeprefix(prefix).removeprefix(f"{namespace}%")


def sorted_ids(client_ids: Iterable[str]) -> list[str]:
    """Sort member ids in Java's order, by UTF-16 units."""
    ids = list(client_ids)
    if "".join(ids).isascii():
        return sorted(ids)
    return sorted(ids, key=lambda client_id: client_id.encode("utf-16-be", "surrogatepass"))


def reply_topic(cluster: str) -> str:
    """Return the topic in which a broker stores replies to requests."""
    return cluster + _REPLY_END


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith("rmq_sys_")


def is_reply_topic(topic: str) -> bool:
    """Return True if the topic may be a reply topic. Only its end is fixed, because the cluster may have any name."""
    return topic.endswith(_REPLY_END)


def is_inner_topic(topic: str) -> bool:
    """Return True for topics with messages that RocketMQ stores for its own use, such as delayed and half messages, replies
    and traces."""
    return topic in INNER_TOPICS or topic.startswith("rmq_sys_") or is_reply_topic(topic)


def is_made_by_brokers(topic: str) -> bool:
    """Return True if users do not create the topic: a system topic, a retry topic, a dead-letter topic, or the topic
    with marks of dead letters."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) or topic == MARKS_TOPIC


def is_system_group(group: str) -> bool:
    """Return True if the group is one of RocketMQ's own groups."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def topic_fault(topic: str) -> str | None:
    """Return the reason why a topic name is illegal; None if it is legal."""
    return _fault("topic", topic, MAX_TOPIC_CHARS)


def group_fault(group: str) -> str | None:
    """Return the reason why a group name is illegal; None if it is legal."""
    if group in RESERVED_GROUPS:
        return f"the group name {group} is reserved; choose another one"
    return _fault("group", group, MAX_GROUP_CHARS)


class IllegalName(ValueError):
    """An illegal name of a topic or group. The text has the reason."""


def _fault(kind: str, name: str, limit_chars: int) -> str | None:
    if not name.strip():
        return f"the {kind} name is blank"
    if not _LEGAL(name):
        return f"the {kind} name {name[:limit_chars]!r} has characters other than letters, digits, and % | _ -"
    if len(name) > limit_chars:
        return f"the {kind} name has {len(name)} characters; maximum {limit_chars}"
    return None


# ------------------------------------------------------------------------------
# One queue of a topic.


class Queue(NamedTuple):
    """A message queue. The order is RocketMQ's: by topic, broker name, queue id."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


# ------------------------------------------------------------------------------
# Tag expressions: `*` or `TagA || TagB`. The broker filters by Java's hash of a tag, the client by the tag itself.


ALL: Final = "*"
TAG: Final = "TAG"
SQL92: Final = "SQL92"
_HASHED: Final = 256  # UTF-16 units that are summed in one step
_POWERS: Final = tuple(pow(31, exponent, 1 << 32) for exponent in range(_HASHED + 1))


class Sql(str):
    """A filter by message properties, evaluated by the broker: `Sql("price > 5 AND kind IN ('a', 'b')")`."""

    __slots__ = ()


def java_hash(text: str) -> int:
    """Return Java's `String.hashCode`: computed over UTF-16 units, wrapped to a signed 32-bit number."""
    data = text.encode("utf-16-be", "surrogatepass")
    units = unpack(f">{len(data) // 2}H", data)
    value = 0
    for at in range(0, len(units), _HASHED):
        piece = units[at : at + _HASHED]
        value = value * _POWERS[len(piece)] + sum(map(mul, reversed(piece), _POWERS)) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


_known_hash = lru_cache(maxsize=4096)(java_hash)


def tag_code(properties: str) -> int:
    """Return the hash of a message's tag, by which brokers filter; 0 without a tag."""
    tag = props.find(properties, props.TAGS)
    if not tag:
        return 0
    return _known_hash(tag) if len(tag) <= MAX_KEPT_TAG_CHARS else java_hash(tag)


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription of one member to one topic. `version` is the time of the subscription, in ms, or in ns from Go
    clients."""

    topic: str
    expression: str = ALL
    tags: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    version: int = 0
    kind: str = TAG

    @property
    def takes_all(self) -> bool:
        return self.kind == TAG and self.expression == ALL

    @property
    def summary(self) -> str:
        """The expression. A long expression is cut, and ends with its length and a checksum, because members' expressions
        are compared by it."""
        text = self.expression
        if len(text) <= MAX_SUMMARY_CHARS:
            return text
        tail = f"... ({len(text)} characters, {crc32(text.encode('utf-8', 'surrogatepass')):08x})"
        return text[: MAX_SUMMARY_CHARS - len(tail)] + tail

    def matches_code(self, code: int) -> bool:
        """Return True if a message whose tag has this hash may match, which with an SQL92 filter each message may."""
        return self.expression == ALL or self.kind != TAG or code in self.codes


class SubscriptionError(ValueError):
    """The error for an invalid expression of a subscription."""


def parse_subscription(
    topic: str, expression: str | None, *, version: int = 0, kind: str | None = None
) -> Subscription:
    """Parse a subscription. Raises SubscriptionError if the expression contains no tag or too many tags, or is too
    long.

    Args:
        kind: the expression type; by default SQL92 for `Sql`, and TAG for any other text.
    """
    text = expression or ALL
    if len(text) > MAX_EXPRESSION_CHARS:
        raise SubscriptionError(f"the expression has {len(text)} characters; maximum {MAX_EXPRESSION_CHARS}")
    kind = kind or (SQL92 if isinstance(expression, Sql) else TAG)
    if kind != TAG:
        return Subscription(topic, text, version=version, kind=kind)
    if text.strip() == ALL:
        return Subscription(topic, version=version)
    tags = frozenset(part.strip() for part in text.split("||") if part.strip())
    if not tags:
        raise SubscriptionError(f"the tag expression {text!r} names no tag; use `*` or `TagA || TagB`")
    if len(tags) > MAX_EXPRESSION_TAGS:
        raise SubscriptionError(f"the tag expression names {len(tags)} tags; maximum {MAX_EXPRESSION_TAGS}")
    return Subscription(topic, text, tags, frozenset(map(java_hash, tags)), version)


# ------------------------------------------------------------------------------
# A number with its noun, for texts.


def counted(count: int, one: str, many: str = "") -> str:
    """Return a text such as `1 message waits` or `2,500 messages wait`. `many` is needed if the plural is not `one`
    with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
