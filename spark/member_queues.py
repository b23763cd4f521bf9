"""The queues of a query that is a member of a group: the state of each, without any request to a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ..client.errors import get_logger
from ..client.message import NO_LEASE, Lease
from ..protocol.names import Queue
from .checkpoint import EMPTY, MicroBatch, Part, Range, Ranges, TopicSnapshot, part_of
from .extents import BrokerOffsets
from .queues import Course

log = get_logger("rocketlet.spark")


class MemberQueueState(Enum):
    """What the query may do with a queue."""

    AWAY = "not assigned to this query"
    NEW = "assigned; its position is determined when its broker responds"
    READY = "the next batch may contain it"
    RUNNING = "in the running batch"
    REPEATED = "in a batch of the checkpoint that Spark runs again"
    DRAINING = "in a running batch, after which it is released"
    RELEASING = "released as soon as the group has its offset"


class MemberQueueEvent(Enum):
    """What happens to a queue."""

    ASSIGN = "the group assigns it"
    REPEAT = "the group assigns it while Spark runs a batch again that contains it"
    LOCATE = "its broker has returned its offsets"
    PLAN = "a batch contains it"
    FINISH = "the batch that contains it has ended"
    RELEASE = "another member is to get it"
    LOSE = "the query does not own it any more"


_STATE = MemberQueueState
_EVENT = MemberQueueEvent
TRANSITIONS: Final[Mapping[tuple[MemberQueueState, MemberQueueEvent], MemberQueueState]] = {
    (_STATE.AWAY, _EVENT.ASSIGN): _STATE.NEW,
    (_STATE.AWAY, _EVENT.REPEAT): _STATE.REPEATED,
    (_STATE.NEW, _EVENT.LOCATE): _STATE.READY,
    (_STATE.READY, _EVENT.PLAN): _STATE.RUNNING,
    (_STATE.RUNNING, _EVENT.FINISH): _STATE.READY,
    (_STATE.REPEATED, _EVENT.FINISH): _STATE.NEW,
    (_STATE.DRAINING, _EVENT.FINISH): _STATE.RELEASING,
    (_STATE.NEW, _EVENT.RELEASE): _STATE.RELEASING,
    (_STATE.READY, _EVENT.RELEASE): _STATE.RELEASING,
    (_STATE.RUNNING, _EVENT.RELEASE): _STATE.DRAINING,
    (_STATE.REPEATED, _EVENT.RELEASE): _STATE.DRAINING,
    **{(state, _EVENT.LOSE): _STATE.AWAY for state in MemberQueueState if state is not _STATE.AWAY},
}
IN_BATCH: Final = frozenset((_STATE.RUNNING, _STATE.REPEATED, _STATE.DRAINING))
_LEAVING: Final = frozenset((_STATE.DRAINING, _STATE.RELEASING))


@dataclass(slots=True)
class MemberQueue:
    """A queue that was assigned to the query at some time.

    Attributes:
        position: the next offset to plan
        done: the offset that the group may commit
        committed: the offset that the group has committed
        span: the range in the running batch
        reset_to: the offset at which an administrator wants the queue to continue, once the running batch has ended
        finished: end of the last finished range, until the group's offset is known to be reset
        is_suspended: True while the membership has suspended the queue
        is_cut_off: True if the query lost the queue because its lease ended, until another member may own it
        ended: set when the batch that contains the queue has ended
    """

    state: MemberQueueState = MemberQueueState.AWAY
    lease: Lease = NO_LEASE
    position: int = 0
    done: int = 0
    committed: int = 0
    span: Range | None = None
    reset_to: int | None = None
    finished: int | None = None
    is_suspended: bool = False
    is_cut_off: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def handle(self, event: MemberQueueEvent) -> None:
        """Change the state. Raises KeyError for an event that cannot happen in this state."""
        self.state = TRANSITIONS[self.state, event]

    @property
    def is_unreachable(self) -> bool:
        return self.is_suspended or self.lease.is_over

    def move(self, position: int) -> None:
        """Continue at another offset than the end of the last range."""
        self.position = self.done = position
        self.reset_to = self.finished = None


class MemberQueues:
    """The queues that the group has assigned to a query, now or earlier.

    Args:
        resumed: newest batch in the checkpoint
        is_unfinished: True if Spark runs the resumed batch again, so that its queues are in a running batch
    """

    def __init__(self, resumed: MicroBatch, course: Course, *, is_unfinished: bool) -> None:
        self._course = course
        self._repeated: Ranges = resumed.ranges if is_unfinished else {}
        self._queues: dict[Queue, MemberQueue] = {}
        self._last = EMPTY

    def __getitem__(self, queue: Queue) -> MemberQueue:
        return self._queues[queue]

    def owned(self) -> dict[Queue, MemberQueue]:
        return {queue: item for queue, item in self._queues.items() if item.state is not MemberQueueState.AWAY}

    def free(self) -> dict[Queue, int]:
        """Return the position of each queue that the next batch may contain."""
        return {
            queue: item.position
            for queue, item in self._queues.items()
            if item.state in (MemberQueueState.NEW, MemberQueueState.READY) and not item.is_unreachable
        }

    def positions(self) -> dict[Queue, int]:
        return {queue: item.position for queue, item in self.owned().items()}

    def finished(self, queue: Queue) -> int:
        """Return the end of the last finished range of a queue; 0 without any."""
        item = self._queues.get(queue)
        return item.finished or 0 if item else 0

    def out_of_reach(self, seen: BrokerOffsets) -> dict[Queue, int]:
        """Return the position of each queue whose lease or broker is missing, and that no other member may own."""
        return {
            queue: item.position
            for queue, item in self._queues.items()
            if item.is_cut_off
            or (
                item.state is not MemberQueueState.AWAY
                and item.state not in _LEAVING
                and (item.is_unreachable or queue not in seen.extents)
            )
        }

    def forget_cut_off(self) -> None:
        """Forget which leases have ended, because the queues are assigned to other members."""
        for item in self._queues.values():
            item.is_cut_off = False

    # Assigned and lost queues

    def assign(self, queue: Queue, offset: int, lease: Lease) -> None:
        """Record that the group has assigned a queue, which has the group's offset."""
        old = self._queues.get(queue, MemberQueue())
        item = self._queues[queue] = MemberQueue(old.state, lease, offset, offset, offset, finished=old.finished)
        span = self._repeated.get(queue)
        if span is None or not span[0] <= offset <= span[1]:
            item.handle(MemberQueueEvent.ASSIGN)
        else:
            item.span = span
            item.handle(MemberQueueEvent.REPEAT)

    def lose(self, queue: Queue) -> None:
        item = self._queues[queue]
        item.is_cut_off = item.is_unreachable and item.state not in _LEAVING
        item.span = None
        item.handle(MemberQueueEvent.LOSE)

    def locate(self, seen: BrokerOffsets) -> None:
        """Determine the positions of newly assigned queues.

        A queue starts at the group's offset, unless this query has finished a later offset that it could not commit
        before its lease ended, and the group's offset was not reset since. Then it continues at the finished offset.
        """
        for queue, item in self._queues.items():
            if item.state is MemberQueueState.NEW and queue in seen.extents:
                item.position = item.done = self._located(queue, item, seen)
                item.handle(MemberQueueEvent.LOCATE)
        for part, mark in seen.marks.items():
            if mark.rewinds != self._course.marks.get(part, mark).rewinds:
                self.forget(part)

    def _located(self, queue: Queue, item: MemberQueue, seen: BrokerOffsets) -> int:
        finished, offset = item.finished, item.position
        part = part_of(queue)
        before, now = self._course.marks.get(part, TopicSnapshot()), seen.marks.get(part, TopicSnapshot())
        if finished is None or offset >= finished or before.identity != now.identity:
            return offset
        begin = self._last.ranges.get(queue, (finished, finished))[0]
        is_reset = before.rewinds != now.rewinds if now.identity else offset < begin
        if is_reset:
            self._course.rewound += 1
            log.info("offset_reset_while_away", queue=str(queue), finished=finished, offset=offset)
        return offset if is_reset else finished

    def forget(self, part: Part) -> None:
        """Forget the finished offsets of a topic on a broker, so that its queues start at the group's offset, because that
        was reset or the topic was recreated."""
        for queue, item in self._queues.items():
            if part_of(queue) == part:
                item.finished = None

    # Batches

    def take(self, cut: Ranges) -> Ranges:
        """Reserve the ranges for the next batch that can still be read."""
        planned: dict[Queue, Range] = {}
        for queue, span in cut.items():
            item = self._queues[queue]
            if item.state is MemberQueueState.READY and not item.is_unreachable and item.position == span[0]:
                item.span, item.position = span, span[1]
                item.ended.clear()
                item.handle(MemberQueueEvent.PLAN)
                planned[queue] = span
        return planned

    def finish(self, batch: MicroBatch) -> None:
        """Record that Spark has finished a batch. Queues in another batch, which was planned and did not run, return to its
        start."""
        is_fresh, self._last = batch != self._last, batch
        self._repeated = {}
        for queue, item in self._queues.items():
            span = batch.ranges.get(queue)
            if item.span is not None and item.span != span:
                item.position = item.span[0]
                self._course.unplan(queue, item.position)
            elif span is not None and is_fresh and self._continues(item, span):
                item.position = span[1]
                item.done = max(item.done, span[1])
            if span is not None and is_fresh:
                item.finished = span[1]
            item.span = None
            item.ended.set()
            if item.state in IN_BATCH:
                item.handle(MemberQueueEvent.FINISH)
        for queue in batch.ranges.keys() - self._queues.keys() if is_fresh else ():
            self._queues[queue] = MemberQueue(finished=batch.ranges[queue][1])

    @staticmethod
    def _continues(item: MemberQueue, span: Range) -> bool:
        """Return True if the end of a finished range is the next position of a queue. A newly assigned queue starts at the
        group's offset."""
        is_located = item.state not in (MemberQueueState.AWAY, MemberQueueState.NEW)
        return is_located and span[0] <= item.position <= span[1]

    def reset(self, queue: Queue, offset: int) -> None:
        """Continue at an offset that an administrator has set; after the running batch if that contains the queue."""
        item = self._queues.get(queue)
        if item is None or item.state is MemberQueueState.AWAY:
            return
        log.info("offset_reset", queue=str(queue), old=item.position, new=offset)
        if item.state in IN_BATCH:
            item.reset_to = offset
        else:
            self._resume_at(queue, offset)

    def apply_resets(self) -> None:
        """Apply the resets that have waited for the running batch. Before, the end of the batch must be committed: a
        restarted query finds a reset by the group's offset that has decreased."""
        for queue, item in self.owned().items():
            if item.reset_to is not None and item.state not in IN_BATCH:
                self._resume_at(queue, item.reset_to)

    def _resume_at(self, queue: Queue, offset: int) -> None:
        self._course.rewind(queue)
        self._queues[queue].move(offset)

    # Commits

    def to_commit(self) -> dict[Queue, int]:
        """Return the offsets that the group has not committed yet."""
        return {queue: item.done for queue, item in self.owned().items() if item.done != item.committed}


__all__ = ["IN_BATCH", "TRANSITIONS", "MemberQueue", "MemberQueueEvent", "MemberQueueState", "MemberQueues"]
