"""The states of a member's queues, over random histories of a queue, a group and a query that is killed and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.client.message import Lease
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import EMPTY, MicroBatch, TopicSnapshot
from rocketlet.spark.extents import BrokerOffsets, Extent
from rocketlet.spark.member_queues import IN_BATCH, TRANSITIONS, MemberQueueEvent, MemberQueues, MemberQueueState
from rocketlet.spark.queues import Course

QUEUE = Queue("t", "b", 0)
PART = ("t", "b")


class History:
    """A queue of a group, whose messages are handled by a query, and by another member while the query does not own it.

    `handled` has the offsets that either has handled. A reset makes the offsets from its own on unhandled.
    """

    def __init__(self) -> None:
        self.end = self.group_offset = self.rewinds = 0
        self.identity = 1
        self.handled: set[int] = set()
        self.checkpoint, self.is_finished = EMPTY, True
        self.planned: list[tuple[int, int]] = []
        self.is_undisturbed = True
        self.start()

    # The query

    def start(self) -> None:
        """The query starts with its checkpoint: Spark runs a batch that is not finished again."""
        self.course = Course.after(self.checkpoint)
        self.queues = MemberQueues(self.checkpoint, self.course, is_unfinished=not self.is_finished)
        self.lease = Lease(1, math.inf)
        if self.is_finished:
            self.queues.finish(self.checkpoint)

    @property
    def state(self) -> MemberQueueState:
        owned = self.queues.owned()
        return owned[QUEUE].state if owned else MemberQueueState.AWAY

    def gain(self, _: int) -> None:
        if self.state is MemberQueueState.AWAY:
            self.lease = Lease(1, math.inf)
            self.queues.assign(QUEUE, self.group_offset, self.lease)

    def locate(self, _: int) -> None:
        seen = BrokerOffsets({QUEUE: Extent(0, self.end)})
        seen.marks[PART] = TopicSnapshot(str(self.identity), 1, self.rewinds)
        self.queues.locate(seen)
        if seen.marks[PART].is_of_another(self.course.marks.get(PART, TopicSnapshot())):  # as the planner does
            self.queues.forget(PART)
            for queue in self.queues.free():
                self.course.rewind(queue)
                self.queues[queue].move(0)
        self.course.marks |= seen.marks
        self.commit()

    def plan(self, rows: int) -> None:
        if not self.is_finished:
            return
        self.locate(0)
        free = self.queues.free()
        if not free or free[QUEUE] >= self.end:
            return
        begin = free[QUEUE]
        ranges = self.queues.take({QUEUE: (begin, min(begin + rows + 1, self.end))})
        assert ranges and self.state is MemberQueueState.RUNNING
        self.planned += ranges.values()
        self.checkpoint, self.is_finished = self.course.batch(ranges, "g", is_member=True), False

    def finish(self, _: int) -> None:
        """Spark has run the batch of the checkpoint, for the first time or again."""
        if self.is_finished:
            return
        ((begin, end),) = self.checkpoint.ranges.values()
        self.handled |= set(range(begin, end))
        self.is_finished = True
        self.queues.finish(self.checkpoint)
        assert self.state not in IN_BATCH
        self.commit()
        self.queues.apply_resets()
        self.commit()

    def commit(self) -> None:
        if not self.lease.is_over:
            for queue, offset in self.queues.to_commit().items():
                self.rewinds += offset < self.group_offset
                self.group_offset = self.queues[queue].committed = offset

    def kill(self, _: int) -> None:
        self.is_undisturbed = self.is_undisturbed and self.is_finished
        self.start()

    # The group

    def lose(self, rows: int) -> None:
        """The lease ends; another member handles some messages."""
        if self.state is not MemberQueueState.AWAY:
            self.is_undisturbed = False
            self.lease.end()
            self.queues.lose(QUEUE)
            self.handle_elsewhere(rows)

    def release(self, rows: int) -> None:
        """The queue is handed over, after its batch or after `releaseTimeoutMs`."""
        if self.state is MemberQueueState.AWAY:
            return
        item = self.queues[QUEUE]
        item.handle(MemberQueueEvent.RELEASE)
        if item.state in IN_BATCH and rows % 2:
            self.finish(0)
        self.is_undisturbed = self.is_undisturbed and item.state not in IN_BATCH
        done = item.done if item.reset_to is None else item.reset_to
        if done != item.committed:
            self.rewinds += done < self.group_offset
            self.group_offset = done
        if item.reset_to is not None:
            self.handled = set(range(item.reset_to))
        self.lease.end()
        self.queues.lose(QUEUE)
        self.handle_elsewhere(rows)

    def handle_elsewhere(self, rows: int) -> None:
        end = min(self.group_offset + rows, self.end)
        self.handled |= set(range(self.group_offset, end))
        self.group_offset = max(self.group_offset, end)

    def produce(self, rows: int) -> None:
        self.end += rows

    def reset(self, offset: int) -> None:
        """Only a reset that lowers the group's offset is known after a kill."""
        offset = min(offset, self.end)
        self.is_undisturbed = False
        is_running = self.state in IN_BATCH
        if self.state is not MemberQueueState.AWAY:
            self.queues.reset(QUEUE, offset)
            if is_running:
                self.finish(0)
        if is_running or offset < self.group_offset:
            self.handled = set()
        self.handled |= set(range(offset))
        if self.state is not MemberQueueState.AWAY:
            self.commit()
        else:
            self.rewinds += offset < self.group_offset
            self.group_offset = offset

    def recreate(self, _: int) -> None:
        """The topic is recreated while no batch runs; the planner finds that before it plans the next one."""
        if not self.is_finished or PART not in self.course.marks:  # a topic without a mark is not recognized
            return
        self.identity += 1
        self.end = self.group_offset = 0
        self.handled, self.planned = set(), []
        if self.state is not MemberQueueState.AWAY:
            self.locate(0)


STEPS: dict[str, Callable[[History, int], None]] = {
    name: getattr(History, name)
    for name in ("gain", "plan", "finish", "kill", "lose", "release", "produce", "reset", "recreate")
}


USUAL = ["gain", "plan", "finish", "produce"]


@given(st.lists(st.tuples(st.sampled_from(3 * USUAL + sorted(STEPS)), st.integers(0, 9)), min_size=8, max_size=40))
@example([("produce", 9), ("gain", 0), ("plan", 4), ("kill", 0), ("gain", 0), ("finish", 0), ("plan", 4)])
@example([("produce", 9), ("gain", 0), ("plan", 4), ("release", 0), ("finish", 0), ("gain", 0)])
@example([("produce", 9), ("gain", 0), ("plan", 4), ("lose", 0), ("finish", 0), ("gain", 0), ("plan", 9)])
@example([("produce", 9), ("gain", 0), ("plan", 4), ("finish", 0), ("lose", 0), ("reset", 0), ("gain", 0), ("plan", 9)])
def test_no_message_is_lost_and_none_is_planned_twice_without_a_cause(steps: list[tuple[str, int]]) -> None:
    history = History()
    for name, number in steps:
        STEPS[name](history, number)
        assert history.handled >= set(range(history.group_offset)), "the group has passed a message that nobody handled"
        if history.is_undisturbed:
            offsets = [offset for begin, end in history.planned for offset in range(begin, end)]
            assert len(offsets) == len(set(offsets))
    # Whatever has happened, the query reads the rest when it gets the queue.
    history.finish(0)
    history.gain(0)
    while history.state is not MemberQueueState.AWAY and history.queues.free()[QUEUE] < history.end:
        history.plan(9)
        history.finish(0)
    history.locate(0)
    assert history.handled >= set(range(history.end))


@given(st.sampled_from(MemberQueueState), st.sampled_from(MemberQueueEvent))
def test_each_transition_of_a_queue_is_in_the_table(state: MemberQueueState, event: MemberQueueEvent) -> None:
    after = TRANSITIONS.get((state, event))
    assert (event is MemberQueueEvent.LOSE) <= ((after is MemberQueueState.AWAY) or state is MemberQueueState.AWAY)
    assert (after in IN_BATCH) <= (event in (MemberQueueEvent.PLAN, MemberQueueEvent.REPEAT, MemberQueueEvent.RELEASE))


def test_the_batch_of_another_member_is_no_part_of_an_empty_checkpoint() -> None:
    assert Course.after(MicroBatch()).batch({}, "g", is_member=True).ends == {}


def test_end_of_a_batch_that_was_planned_and_not_run_is_not_in_the_checkpoint() -> None:
    course = Course()
    queues = MemberQueues(EMPTY, course, is_unfinished=False)
    queues.assign(QUEUE, 3, Lease(1, math.inf))
    queues.locate(BrokerOffsets({QUEUE: Extent(0, 9)}))
    ranges = queues.take({QUEUE: (3, 9)})
    assert course.batch(ranges, "g", is_member=True).ranges == {QUEUE: (3, 9)}
    queues.finish(EMPTY)
    assert queues.free() == {QUEUE: 3}
    assert course.batch({}, "g", is_member=True).ends == {QUEUE: 3}
