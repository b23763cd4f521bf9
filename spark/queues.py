"""The interface between the planner and the queues of a query, and the progress of a query.

`QueryMember` and `Standalone` implement `OwnedQueues`:

View.open ──> open ──> apply_changes ──> free ──> take ──> finish ──┐
                             ^                                      │
                             └─────────── batch after batch ────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..protocol.names import RETRY_PREFIX, Queue
from .checkpoint import Fingerprint, MicroBatch, Part, QueryStart, Ranges, TopicSnapshot, part_of
from .config import FINGERPRINTS
from .extents import BrokerOffsets

if TYPE_CHECKING:
    from .view import View


@dataclass(slots=True)
class Course:
    """Progress of a query.

    Attributes:
        marks: the latest mark of each topic on each broker, which identifies the topic
        read_ends: the end of the last planned range of each queue in the last batch, and in batches of this run
        ends: the end of the last planned range of each queue that the query has read, in this run or before
        rewound: number of times that a queue was moved to another offset than the end of its last range
        messages: fingerprints of up to `FINGERPRINTS` messages of each topic and broker, oldest first
        start: the queues and brokers at the start of a query whose default start is `latest`; None for another start
    """

    marks: dict[Part, TopicSnapshot] = field(default_factory=dict)
    read_ends: dict[Queue, int] = field(default_factory=dict)
    ends: dict[Queue, int] = field(default_factory=dict)
    rewound: int = 0
    messages: dict[Queue, Fingerprint] = field(default_factory=dict)
    start: QueryStart | None = None

    @classmethod
    def after(cls, batch: MicroBatch) -> Course:
        """Return the progress of a query after a batch."""
        read_ends = {queue: end for queue, (_, end) in batch.ranges.items()}
        ends = {**batch.ends, **read_ends}
        return cls(dict(batch.marks), read_ends, ends, batch.rewound, dict(batch.messages), batch.start)

    def batch(self, ranges: Ranges, group: str, *, is_member: bool) -> MicroBatch:
        """Return a batch with these ranges, and record their ends."""
        planned = {queue: end for queue, (_, end) in ranges.items()}
        self.read_ends |= planned
        self.ends |= planned
        others = {queue: end for queue, end in self.ends.items() if queue not in ranges} if is_member else {}
        marks, messages = dict(self.marks), dict(self.messages)
        return MicroBatch(ranges, marks, is_member, group, self.rewound, messages, self.start, others)

    def unplan(self, queue: Queue, begin: int) -> None:
        """Take back the last planned range of a queue, which starts at `begin`, because Spark has not run its batch."""
        for ends in (self.read_ends, self.ends):
            if queue in ends:
                ends[queue] = begin

    def start_of(self, queue: Queue) -> int | Literal["first"]:
        """Return where a queue without an offset starts: at its first message, or at a store time in ms since the epoch if
        the queue may be older than a query that started at the latest messages."""
        is_new = self.start is None or queue.topic.startswith(RETRY_PREFIX) or self.start.is_later(queue)
        return "first" if is_new or self.start is None else self.start.time_ms

    def is_same_topic(self, queue: Queue, marks: Mapping[Part, TopicSnapshot]) -> bool:
        """Return True unless a queue's topic has another identity now than when the query last saw it."""
        mark, known = marks.get(part_of(queue)), self.marks.get(part_of(queue))
        return mark is None or known is None or not mark.is_of_another(known)

    def add_message(self, queue: Queue, message: Fingerprint) -> None:
        """Add the fingerprint of a message, and drop the oldest fingerprints of its topic and broker beyond
        `FINGERPRINTS`."""
        self.messages.pop(queue, None)
        self.messages[queue] = message
        for oldest in [each for each in self.messages if part_of(each) == part_of(queue)][:-FINGERPRINTS]:
            del self.messages[oldest]

    def rewind(self, queue: Queue) -> None:
        """Record that a queue moves to another offset, because messages are lost, the topic was recreated, or an
        administrator has reset the offset."""
        self.rewound += 1
        self.read_ends.pop(queue, None)
        self.ends.pop(queue, None)
        self.messages.pop(queue, None)


class OwnedQueues(Protocol):
    """Queues of a query. All methods are called in the planner's event loop."""

    is_member: bool

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        """Determine the queues that the query reads. Raises ConfigError, RocketletError."""

    async def close(self) -> None: ...

    async def wait_for_queues(self) -> None:
        """Wait until all queues of the query are assigned. Raises RocketletError if that takes longer than
        `share_timeout_s`."""

    async def discover(self) -> None:
        """Subscribe to new topics that match the pattern."""

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Apply what has changed since the last batch, such as new queues and, for a member, reset offsets."""

    async def finish(self, batch: MicroBatch) -> None:
        """Record that Spark has finished a batch, and commit its end for the group if the query is a member."""

    def queues(self) -> list[Queue]:
        """Return all queues that the query reads."""

    def free(self) -> Mapping[Queue, int]:
        """Return the next offset to plan of each queue that the next batch may contain."""

    def planned(self) -> Mapping[Queue, int]:
        """Return the offset after the last planned message of each queue."""

    async def place(self, queue: Queue) -> int:
        """Return the next offset to read of a queue that is in no route. Raises RocketletError."""

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        """Return the next offset to plan of each queue that cannot be planned now, because its broker is unreachable or
        its lease is suspended or has expired."""

    def take(self, cut: Ranges) -> Ranges:
        """Reserve ranges for the next batch and return them: those of `cut` that can still be read. An empty result
        means that there is no batch."""

    def move(self, queue: Queue, position: int) -> None:
        """Set the next offset to plan of a queue."""

    def forget(self, part: Part) -> None:
        """Forget the finished offsets of a topic on a broker, which was recreated, in queues that the query does not own."""
