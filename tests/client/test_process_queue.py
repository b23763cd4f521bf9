"""A member's record of one queue: how far it is handled, what is in memory, and when anything of it may begin."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import pytest
from rocketlet.client.config import PullLimits
from rocketlet.client.consuming.queues import ProcessQueue, Run, offsets_to_commit
from rocketlet.client.message import Lease, Message
from rocketlet.protocol.names import Queue

QUEUE = Queue("t", "broker-a", 0)


class Stored:
    """As much of a message as a queue reads."""

    def __init__(self, queue_offset: int) -> None:
        self.queue_offset = queue_offset
        self.size_bytes = 10 + queue_offset


def messages(begin: int, end: int) -> list[Message]:
    return cast("list[Message]", [Stored(offset) for offset in range(begin, end)])


@pytest.fixture
def queue() -> ProcessQueue:
    return ProcessQueue(QUEUE, 0, Lease(1))


def held(queue: ProcessQueue) -> tuple[int, int]:
    """How many messages, and their bytes."""
    return queue.messages, queue.size_bytes


def test_a_queue_is_committed_up_to_the_first_message_that_is_not_acknowledged(queue: ProcessQueue) -> None:
    first, second = queue.add(messages(0, 5), 5, 3)
    assert (len(first.messages), len(second.messages), held(queue)) == (3, 2, (5, 60))
    queue.acknowledge(second)
    assert (queue.commit_offset, held(queue), len(queue.runs)) == (0, (3, 33), 2)
    queue.acknowledge(first, 2)
    assert (queue.commit_offset, held(queue), first.size_bytes) == (2, (1, 12), 12)
    queue.acknowledge(first)
    queue.acknowledge(first)
    assert (queue.commit_offset, held(queue), len(queue.runs)) == (5, (0, 0), 0)


def test_messages_that_fill_a_run_count(queue: ProcessQueue) -> None:
    (run,) = queue.add(messages(0, 1), 1, 3)
    queue.extend(run, messages(1, 3))
    assert (len(run.messages), run.size_bytes, held(queue)) == (3, 33, (3, 33))


@pytest.mark.parametrize(
    ("limits", "exceeds"),
    [
        (PullLimits(messages=4), False),
        (PullLimits(messages=3), True),
        (PullLimits(size_bytes=46), False),
        (PullLimits(size_bytes=45), True),
        (PullLimits(span=4), False),
        (PullLimits(span=3), True),
    ],
)
def test_pulling_waits_beyond_each_limit(queue: ProcessQueue, limits: PullLimits, exceeds: bool) -> None:
    queue.move(1_000_000)
    queue.add(messages(0, 4), 1_000_004, 4)
    assert queue.exceeds(limits, 1_000_000) is exceeds


def test_a_span_that_does_not_count_is_no_limit(queue: ProcessQueue) -> None:
    queue.add(messages(0, 4), 4, 4)
    assert not queue.exceeds(PullLimits(span=3), None)


@pytest.mark.parametrize("acknowledged", [1, 2, 3])
def test_a_run_whose_end_is_lost_is_done_when_the_rest_is(queue: ProcessQueue, acknowledged: int) -> None:
    (run,) = queue.add(messages(0, 4), 4, 4)
    queue.acknowledge(run, acknowledged)
    queue.move(1)
    assert (run.is_done, held(queue), queue.commit_offset, len(queue.runs)) == (True, (0, 0), 1, 0)


def test_what_a_handler_does_with_a_queue_that_is_lost_counts_for_nothing(queue: ProcessQueue) -> None:
    (run,) = queue.add(messages(0, 4), 4, 4)
    queue.waiting.append(run)
    queue.drop()
    assert (run.is_done, len(queue.waiting), held(queue)) == (True, 0, (0, 0))
    queue.acknowledge(run)
    assert (held(queue), offsets_to_commit([queue])) == ((0, 0), {})


def test_only_what_has_moved_is_committed(queue: ProcessQueue) -> None:
    assert offsets_to_commit([queue]) == {QUEUE: 0}, "the broker may not know it"
    queue.committed = 0
    assert offsets_to_commit([queue]) == {}
    queue.next_offset = 1
    assert offsets_to_commit([queue]) == {QUEUE: 1}


def test_a_broker_that_is_back_is_notified_again(queue: ProcessQueue) -> None:
    queue.committed = 0
    queue.suspend()
    assert (queue.is_suspended, queue.is_held, queue.may_begin) == (True, True, False)
    queue.resume()
    assert (queue.is_suspended, queue.is_held, queue.may_begin) == (False, False, True)
    assert offsets_to_commit([queue]) == {QUEUE: 0}


def test_nothing_begins_while_it_is_paused_or_when_its_lease_is_over() -> None:
    queue = ProcessQueue(QUEUE, 0, Lease(1), paused=True)
    assert (queue.is_held, queue.may_begin) == (True, False)
    queue.pause(paused=False)
    assert (queue.is_held, queue.may_begin) == (False, True)
    queue.lease.end()
    assert (queue.is_held, queue.may_begin) == (False, False)


def test_the_first_commit_on_apaches_broker_goes_alone() -> None:
    apache = ProcessQueue(QUEUE, 0, Lease(0))
    assert not apache.pulls_may_commit
    apache.committed = 0
    assert apache.pulls_may_commit


@pytest.mark.parametrize("ending", [ProcessQueue.stop, ProcessQueue.drop])
def test_messages_that_wait_to_be_sent_back_are_sent_back_immediately_when_the_queue_ends(ending: object) -> None:
    queue = ProcessQueue(QUEUE, 0, Lease(1))
    (run,) = queue.add(messages(0, 1), 1, 1)
    sent: list[Run] = []
    queue.unreturned[run] = lambda: sent.append(run)
    ending(queue)  # type: ignore[operator]
    assert (sent, queue.is_stopped) == ([run], True)
    assert queue.is_dropped is (ending is ProcessQueue.drop)


@pytest.mark.parametrize("change", ["seek", "move"])
def test_a_pull_that_is_on_its_way_counts_no_more_when_the_queue_continues_elsewhere(
    queue: ProcessQueue, change: str
) -> None:
    queue.committed = 0
    queue.add(messages(0, 2), 2, 1)
    pull = queue.pull
    pull.is_pending, pull.began_ms = True, 7
    getattr(queue, change)(9)
    assert (queue.pull is pull, queue.pull.is_pending, queue.pull.began_ms) == (False, False, 7)
    assert queue.next_offset == 9
    assert held(queue) == ((0, 0) if change == "seek" else (2, 21))
    assert offsets_to_commit([queue]) == {QUEUE: 9 if change == "seek" else 0}


async def test_a_queue_is_idle_when_its_last_handler_has_ended(queue: ProcessQueue) -> None:
    await queue.idle()
    queue.enter()
    queue.enter()
    waiting = [asyncio.create_task(queue.idle()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.leave()
    assert [task.done() for task in waiting] == [False, False]
    queue.leave()
    await asyncio.gather(*waiting)
    queue.enter()
    again = asyncio.create_task(queue.idle())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not again.done()
    queue.leave()
    await again


def test_a_new_queue_has_brought_nothing_yet(queue: ProcessQueue) -> None:
    (run,) = queue.add(messages(0, 1), 1, 1)
    assert (queue.idle_s, queue.pull_commits, queue.begin_offset) == (-math.inf, False, 0)
    assert (queue.pull.is_pending, queue.pull.is_throttled) == (False, False)
    assert (run.tries, run.failure, run.is_filling, run.process_queue) == (0, "", False, queue)
