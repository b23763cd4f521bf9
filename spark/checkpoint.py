"""Offsets as Spark logs them: the range of each queue in a batch, with a mark of the log that it was read from."""

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
# A batch in Spark's checkpoint: its whole ranges, whose they are, and how the topics are recognized.
#
#     {"$": {"membership": true, "group": "g", "topics": {"flights": {"broker-a": {"identity": "5f0c"}}},
#            "messages": [["flights", "broker-a", 1, 259, "0f6c1d2e3a4b5c6d"]]},
#      "flights": {"broker-a": {"0": "100:250", "1": "90:260"}}}
#
# Both begin and end are kept, because queues come and go between batches: the end of one batch does not say where the
# next one begins, and a replay must read what was read before, whoever owns the queue by then. No topic can be called
# `$`.


Part = tuple[str, str]
"""A topic on one broker: its name, and the broker's."""
_ABOUT: Final = "$"


def part_of(queue: Queue) -> Part:
    return queue.topic, queue.broker_name


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A broker's word on a topic when a batch was planned.

    identity: changes when the topic is created again; empty on an Apache broker. newest_ms: when the newest message was
    stored, by the broker's clock, which may be set back later. started_ms: when the broker started; 0 on an Apache broker.
    rewinds: how often the group's offset went back.
    """

    identity: str = ""
    newest_ms: int = 0
    rewinds: int = 0
    started_ms: int = 0

    @property
    def is_known(self) -> bool:
        """True if its broker has reported any identity."""
        return bool(self.identity or self.newest_ms)

    def is_of_another(self, before: TopicSnapshot) -> bool:
        """Whether this is another topic than before: a broker of another kind answers with an identity or without one."""
        return self.is_known and before.is_known and self.identity != before.identity


UNMARKED: Final = TopicSnapshot()


class Fingerprint(NamedTuple):
    """A message that a query has read: its offset, and a hash of its id and its store time.

    Another message at its place shows that the topic is another one, even if the topic's identity and the broker's name
    are the same: a restored backup, a copy of the data folder, or another Apache cluster."""

    offset: int
    text: str

    @classmethod
    def of(cls, record: Record) -> Fingerprint:
        message_id = props.find(record.properties, props.UNIQUE_KEY) or record.offset_id
        text = blake2s(f"{record.store_ms} {message_id}".encode(errors="replace"), digest_size=8).hexdigest()
        return cls(record.queue_offset, text)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The ranges of one batch. membership is None where nothing was read yet, or by a checkpoint of an earlier release.

    messages: some that were read, the last ones last. rewound: how often this query went back. Without it the first batch
    after a reset could equal the last one before, and Spark would see nothing new. began_ms: when the query began at the
    latest messages, ms since the epoch; 0 if it began elsewhere.
    """

    ranges: Ranges = field(default_factory=dict)
    marks: Mapping[Part, TopicSnapshot] = field(default_factory=dict)
    membership: bool | None = None
    group: str = ""
    rewound: int = 0
    messages: Mapping[Queue, Fingerprint] = field(default_factory=dict)
    began_ms: int = 0


EMPTY: Final = MicroBatch()


def to_offset(batch: MicroBatch) -> dict[str, Any]:
    """The offset that Spark logs for a batch."""
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker_name), mark in sorted(batch.marks.items()):
        told = {name: value for name, value in asdict(mark).items() if value}
        topics.setdefault(topic, {})[broker_name] = told
    messages = [[*queue, *message] for queue, message in batch.messages.items()]
    about = {
        "membership": batch.membership,
        "group": batch.group,
        "rewound": batch.rewound,
        "topics": topics,
        "messages": messages,
    }
    if batch.began_ms:
        about["began_ms"] = batch.began_ms
    return {_ABOUT: about, **ranges_by_topic(batch.ranges)}


def ranges_by_topic(ranges: Ranges) -> dict[str, Any]:
    """Ranges as JSON: topic, broker name, queue id, and `begin:end`."""
    offset: dict[str, Any] = {}
    for queue, (begin, end) in sorted(ranges.items()):
        brokers = offset.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = f"{begin}:{end}"
    return offset


def from_offset(offset: Mapping[str, Any]) -> MicroBatch:
    """The batch of a logged offset. Raises ValueError if it is not one of ours."""
    try:
        about = offset.get(_ABOUT, {})
        marks = {
            (topic, broker_name): TopicSnapshot(**mark)
            for topic, brokers in about.get("topics", {}).items()
            for broker_name, mark in brokers.items()
        }
        messages = {Queue(*fields[:3]): Fingerprint(*fields[3:]) for fields in about.get("messages", ())}
        kept = {name: value for name, value in about.items() if name not in ("topics", "messages")}
        return MicroBatch(_ranges(offset), marks, messages=messages, **kept)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint holds no offset of this source: {offset!r} ({error})") from None


def group_of(offset: Any) -> str | None:
    """Return the group of a logged offset, which may be empty; None if it is of another source."""
    about = offset.get(_ABOUT) if isinstance(offset, dict) else None
    group = about.get("group") if isinstance(about, dict) else None
    return group if isinstance(group, str) else None


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
    """Raises ConfigError for a checkpoint of another kind of query: its batches do not say where this one would begin."""
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
    """Raises ConfigError for ranges of a topic that the query does not read."""
    read = {queue.topic for queue, (begin, end) in ranges.items() if begin < end}
    foreign = sorted(read - {*options.topics, names.retry_topic(options.group)})
    if foreign and options.topics:
        raise ConfigError(
            f"the checkpoint reads the topic {foreign[0]}, the query does not; add it, or start with a new checkpoint"
        )


def _start_elsewhere(batch: MicroBatch) -> str:
    """The option with which a query continues where the batch ends."""
    if batch.membership:
        return f"group={batch.group} and startingOffsets=committed, which resumes at the group's offsets"
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, (_, end) in sorted(batch.ranges.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = end
    return f"a new group and startingOffsets={orjson.dumps(topics).decode()}, which resumes where this one ends"


# ------------------------------------------------------------------------------
# Ranges of offsets: a batch's part of each queue, cut to limits and split into tasks.


Range = tuple[int, int]
Ranges = Mapping[Queue, Range]


def shared_out(
    available: Ranges,
    limit: float | None,
    costs: Mapping[Queue, float] | None = None,
    served_last: Queue | None = None,
) -> dict[Queue, Range]:
    """The ranges, cut to a limit: each queue by the same share, and none to nothing while the limit allows.

    costs: the weight of a message of each queue, 1 by default. At least one message is read, whatever it costs. The queue
    behind `served_last` comes first, so that a limit below one message for each queue leaves none unread. The result is in
    the order of serving.
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
    """The ranges that are not empty. Long ones are split, so that there are about `least` parts of similar size, and none
    has more than `most_rows`."""
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
