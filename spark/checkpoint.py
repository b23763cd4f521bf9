"""Offsets as Spark logs them: the range of each queue in a batch, and marks that identify the topics."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2s
from itertools import pairwise
from typing import Any, Final, NamedTuple

import orjson

from ..client.errors import ConfigError
from ..protocol import names
from ..protocol import properties as props
from ..protocol.message import Record
from ..protocol.names import Queue
from .options import ReadOptions, StreamOptions

# ------------------------------------------------------------------------------
# A batch in Spark's checkpoint: its ranges, the group of the query, and marks by which the topics are recognized.
#
#     {"$": {"membership": true, "group": "g", "topics": {"flights": {"broker-a": {"identity": "5f0c"}}},
#            "messages": [["flights", "broker-a", 1, 259, "0f6c1d2e3a4b5c6d"]]},
#      "flights": {"broker-a": {"0": "100:250", "1": "90:260"}}}
#
# Each range has its start and its end, because queues are assigned and released between batches. The next range of a
# queue may therefore start elsewhere than at the end of its last range, and a replay must read the same messages as
# before, whoever owns the queue by then. No topic can be named `$`.


Part = tuple[str, str]
"""A topic on one broker: topic name and broker name."""
_ABOUT: Final = "$"


def part_of(queue: Queue) -> Part:
    return queue.topic, queue.broker_name


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """What a broker reported about a topic when a batch was planned.

    Attributes:
        identity: an id that changes when the topic is recreated; empty on an Apache broker
        newest_ms: store time of the newest message on an Apache broker, or the broker's time on a Rocketlet broker; the
            clock may be set back later
        rewinds: number of times that the group's offset was decreased
        started_ms: start time of the broker; 0 on an Apache broker
    """

    identity: str = ""
    newest_ms: int = 0
    rewinds: int = 0
    started_ms: int = 0

    @property
    def is_known(self) -> bool:
        """True if the broker has reported an identity or a store time."""
        return bool(self.identity or self.newest_ms)

    def is_of_another(self, before: TopicSnapshot) -> bool:
        """Return True if the topic's identity has changed, including from or to none, as after a change between an Apache
        broker, which reports none, and a Rocketlet broker; False if either snapshot has neither an identity nor a time.
        """
        return self.is_known and before.is_known and self.identity != before.identity


UNMARKED: Final = TopicSnapshot()


class Fingerprint(NamedTuple):
    """A message that a query has read: its offset, and a hash of its id and its store time.

    Another message at the same offset shows that the topic is another one, even if the topic's identity and the
    broker's name are the same. Topic identity and broker name can be the same after a backup was restored, in a copy of
    the data folder, or in another Apache cluster.
    """

    offset: int
    text: str

    @classmethod
    def of(cls, record: Record) -> Fingerprint:
        message_id = props.find(record.properties, props.UNIQUE_KEY) or record.offset_id
        text = blake2s(f"{record.store_ms} {message_id}".encode(errors="replace"), digest_size=8).hexdigest()
        return cls(record.queue_offset, text)


@dataclass(frozen=True, slots=True)
class QueryStart:
    """What a query found that started at the latest messages. A queue that did not exist then is read from its first
    message, and a queue of a broker that was away from the first message stored since.

    Attributes:
        time_ms: time of the start by the clock of a broker, in ms since the epoch; by the driver's clock if no broker
            has reported its own
        brokers: names of the brokers that were reachable
        queues: number of queues of each topic on each broker
    """

    time_ms: int
    brokers: frozenset[str] = frozenset()
    queues: Mapping[Part, int] = field(default_factory=dict)

    def is_later(self, queue: Queue) -> bool:
        """Return True if a queue was added after the start."""
        return queue.broker_name in self.brokers and queue.queue_id >= self.queues.get(part_of(queue), 0)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The ranges of one batch, and the state of the query.

    Attributes:
        ranges: the range of each queue
        marks: marks by which the topics are recognized
        membership: True if the query is a member of a group; None before the first batch, and in a checkpoint of an
            earlier release
        group: group of the query; may be empty without membership
        rewound: number of times that a queue was moved to another offset. Without it, the first batch after a reset
            could equal the batch before, and Spark would see nothing new.
        messages: fingerprints of messages that were read, oldest first
        start: the queues and brokers at the start of a query whose default start is `latest`; None for another start
        ends: the end of the last planned range of each queue that is not in `ranges`; empty without membership, because
            `ranges` then has all queues
    """

    ranges: Ranges = field(default_factory=dict)
    marks: Mapping[Part, TopicSnapshot] = field(default_factory=dict)
    membership: bool | None = None
    group: str = ""
    rewound: int = 0
    messages: Mapping[Queue, Fingerprint] = field(default_factory=dict)
    start: QueryStart | None = None
    ends: Mapping[Queue, int] = field(default_factory=dict)


EMPTY: Final = MicroBatch()


def to_offset(batch: MicroBatch) -> dict[str, Any]:
    """Return the offset that Spark logs for a batch."""
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker_name), mark in sorted(batch.marks.items()):
        reported = {name: value for name, value in asdict(mark).items() if value}
        topics.setdefault(topic, {})[broker_name] = reported
    messages = [[*queue, *message] for queue, message in batch.messages.items()]
    about: dict[str, Any] = {
        "membership": batch.membership,
        "group": batch.group,
        "rewound": batch.rewound,
        "topics": topics,
        "messages": messages,
    }
    if batch.start is not None:
        queues = [[*part, count] for part, count in sorted(batch.start.queues.items())]
        about["start"] = {"time_ms": batch.start.time_ms, "brokers": sorted(batch.start.brokers), "queues": queues}
    if batch.ends:
        about["ends"] = [[*queue, end] for queue, end in sorted(batch.ends.items())]
    return {_ABOUT: about, **ranges_by_topic(batch.ranges)}


def ranges_by_topic(ranges: Ranges) -> dict[str, Any]:
    """Return ranges as JSON: topic, broker name, queue id, and `begin:end`."""
    offset: dict[str, Any] = {}
    for queue, (begin, end) in sorted(ranges.items()):
        brokers = offset.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = f"{begin}:{end}"
    return offset


def from_offset(offset: Mapping[str, Any]) -> MicroBatch:
    """Return the batch of a logged offset. Raises ValueError if this is not an offset of this source."""
    try:
        about = offset.get(_ABOUT, {})
        marks = {
            (topic, broker_name): TopicSnapshot(**mark)
            for topic, brokers in about.get("topics", {}).items()
            for broker_name, mark in brokers.items()
        }
        messages = {Queue(*fields[:3]): Fingerprint(*fields[3:]) for fields in about.get("messages", ())}
        ends = {Queue(*fields[:3]): fields[3] for fields in about.get("ends", ())}
        kept = {name: value for name, value in about.items() if name in ("membership", "group", "rewound")}
        start = about.get("start")
        if start is not None:
            queues = {(topic, broker_name): count for topic, broker_name, count in start["queues"]}
            start = QueryStart(start["time_ms"], frozenset(start["brokers"]), queues)
        return MicroBatch(_ranges(offset), marks, messages=messages, start=start, ends=ends, **kept)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint holds no offset of this source: {offset!r} ({error})") from None


def logged_offset(text: str | None) -> dict[str, Any] | None:
    """Return the offset in a query's progress; None if this is not an offset of this source."""
    try:
        offset = orjson.loads(text or "null")
    except ValueError:  # of another source
        return None
    is_own = isinstance(offset, dict) and isinstance(offset.get(_ABOUT), dict) and "group" in offset[_ABOUT]
    return offset if is_own else None


def _ranges(offset: Mapping[str, Any]) -> dict[Queue, Range]:
    return {
        Queue(topic, broker_name, int(queue_id)): _range(text)
        for topic, brokers in offset.items()
        if topic != _ABOUT
        for broker_name, queues in brokers.items()
        for queue_id, text in queues.items()
    }


def _range(text: str) -> Range:
    begin, end = text.split(":")
    return int(begin), int(end)


def check_resumed(batch: MicroBatch, options: StreamOptions) -> None:
    """Check that a checkpoint belongs to a query with the same membership and, for a member, the same group, unless the
    checkpoint does not have the membership. Raises ConfigError.

    The batches of another kind of query do not contain where this query must start.
    """
    if batch.membership is None:
        return
    if batch.membership != options.membership:
        was, wanted = (str(value).lower() for value in (batch.membership, options.membership))
        raise ConfigError(
            f"the option membership is {wanted}; the checkpoint was written with {was}. Set it to {was}; or start a new "
            f"checkpoint with {_start_elsewhere(batch)}"
        )
    if options.membership and batch.group != options.read.group:
        raise ConfigError(
            f"the option group is {options.read.group!r}; the checkpoint belongs to the group {batch.group!r}. Set it to "
            "that, or start a new checkpoint"
        )


def check_topics(ranges: Ranges, options: ReadOptions) -> None:
    """Check that a query of named topics reads the topics of all ranges that are not empty. Raises ConfigError."""
    read = {queue.topic for queue, (begin, end) in ranges.items() if begin < end}
    foreign = sorted(read - {*options.topics, names.retry_topic(options.group)})
    if foreign and options.topics:
        raise ConfigError(
            f"the checkpoint reads the topic {foreign[0]}, the query does not; add it, or start with a new checkpoint"
        )


def _start_elsewhere(batch: MicroBatch) -> str:
    """Return the options with which a new query continues where the batch ends."""
    if batch.membership:
        return f"group={batch.group} and startingOffsets=committed, which resumes at the group's offsets"
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, (_, end) in sorted(batch.ranges.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = end
    return f"a new group and startingOffsets={orjson.dumps(topics).decode()}, which resumes where this one ends"


# ------------------------------------------------------------------------------
# Ranges of offsets: cut to the limits of a batch, and split into tasks.


Range = tuple[int, int]
Ranges = Mapping[Queue, Range]


def shared_out(
    available: Ranges, limit: float | None, costs: Mapping[Queue, float] | None = None, served_last: Queue | None = None
) -> dict[Queue, Range]:
    """Cut ranges to a limit. Each queue gets the same share of its range, and at least one message while the limit
    permits.

    Args:
        available: the range of each queue
        limit: maximum cost of all messages together; None for no limit. At least one message is returned, whatever it
            costs.
        costs: the cost of a message of each queue; 1 if missing
        served_last: the queue that was served last. The queue after that one comes first, so that a limit below one
            message per queue does not starve any queue.
    Returns:
        The ranges that are not empty, in the order of serving if they were cut.
    """
    costs = costs or {}
    total = sum((end - begin) * costs.get(queue, 1) for queue, (begin, end) in available.items())
    if limit is None or total <= limit:
        return {queue: span for queue, span in available.items() if span[0] < span[1]}
    cut: dict[Queue, Range] = {}
    left = limit
    queues = sorted(available)
    first = bisect_right(queues, served_last) if served_last is not None else 0
    for queue in queues[first:] + queues[:first]:
        begin, end = available[queue]
        cost = costs.get(queue, 1)
        if begin < end and (left >= cost or not cut):
            rows = max(min(int((end - begin) * limit / total), int(left / cost)), 1)
            cut[queue] = (begin, begin + rows)
            left -= rows * cost
    return cut


def split(ranges: Ranges, least: int, most_rows: int | None = None) -> list[tuple[Queue, Range]]:
    """Split long ranges, and drop empty ones.

    Args:
        ranges: the range of each queue
        least: approximate minimum number of parts, which get a similar size
        most_rows: maximum messages in a part; None for no limit
    """
    total = sum(end - begin for begin, end in ranges.values())
    parts: list[tuple[Queue, Range]] = []
    for queue, (begin, end) in sorted(ranges.items()):
        count = max(
            math.ceil((end - begin) * least / max(total, 1)), math.ceil((end - begin) / (most_rows or total or 1)), 1
        )
        count = min(count, end - begin)
        bounds = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
        parts += [(queue, span) for span in pairwise(bounds)]
    return parts
