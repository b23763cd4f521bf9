"""The queues that a query reads, and how far it has read them; `member` and `standalone` are the two kinds.

topics ──> open ──> settle ──> free ──> take ──> finish ──┐
                      ^                                   │
                      └───────────── batch after batch ───┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..protocol.queue import Queue
from .checkpoint import Batch, Fingerprint, Mark, Part, part_of
from .config import FINGERPRINTS
from .extents import Seen
from .ranges import Ranges
from .view import View


@dataclass(slots=True)
class Course:
    """How far a query has come. `marks`: how its topics are recognized; `read_ends`: where the ranges that were read end;
    `rewound`: how often a queue went on elsewhere. `messages`: a few that were read of each topic and broker, the last ones
    last."""

    marks: dict[Part, Mark] = field(default_factory=dict)
    read_ends: dict[Queue, int] = field(default_factory=dict)
    rewound: int = 0
    messages: dict[Queue, Fingerprint] = field(default_factory=dict)

    @classmethod
    def after(cls, batch: Batch) -> Course:
        read_ends = {queue: end for queue, (_, end) in batch.ranges.items()}
        return cls(dict(batch.marks), read_ends, batch.rewound, dict(batch.messages))

    def note(self, queue: Queue, message: Fingerprint) -> None:
        """Keep a message that is read, and no more than some of its topic and broker."""
        self.messages.pop(queue, None)
        self.messages[queue] = message
        for former in [each for each in self.messages if part_of(each) == part_of(queue)][:-FINGERPRINTS]:
            del self.messages[former]

    def rewind(self, queue: Queue) -> None:
        """Messages of a queue are gone, or an administrator has reset it."""
        self.rewound += 1
        self.read_ends.pop(queue, None)
        self.messages.pop(queue, None)


class Share(Protocol):
    """Called in the planner's loop."""

    is_member: bool
    missing: set[Queue]
    """Queues of the checkpoint that no route names."""

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        """Raises ConfigError, RocketletError."""

    async def close(self) -> None: ...

    async def settle_all(self) -> None:
        """Returns when no further queue is to come. Raises RocketletError if that takes too long."""

    async def discover(self) -> None:
        """Takes up topics that the pattern matches and that are new."""

    async def settle(self, seen: Seen) -> None:
        """Applies the events since the last batch, before the next one is planned."""

    async def finish(self, batch: Batch) -> None:
        """Spark has finished this batch."""

    def queues(self) -> list[Queue]:
        """All that the query reads."""

    def free(self) -> Mapping[Queue, int]:
        """The next offsets to plan of the queues that may be planned."""

    def planned(self) -> Mapping[Queue, int]:
        """The offsets after the last planned message, of all queues."""

    def out_of_reach(self, seen: Seen) -> Mapping[Queue, int]:
        """The next offsets to plan of the queues whose brokers cannot be asked."""

    def take(self, cut: Ranges) -> Ranges:
        """The ranges of the next batch, of those within the limits; empty if there is none."""

    def move(self, queue: Queue, position: int) -> None:
        """A queue goes on elsewhere."""
