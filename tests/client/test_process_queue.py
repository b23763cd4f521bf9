"""A member's record of one queue: how far it is handled, what is in memory, and when anything of it may begin."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from rocketlet.client import Access, Producer, RequestTimeout, SendResult
from rocketlet.client.config import BATCH_MESSAGES, MAX_OVERLAP_PAUSE, OVERLAP_BATCHES, OVERLAP_MESSAGES, PullLimits
from rocketlet.client.consuming.queues import ProcessQueue, Run, offsets_to_commit
from rocketlet.client.message import Lease, Message
from rocketlet.client.sending.accumulator import Overlap
from rocketlet.client.wire.connection import Encoding
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from ..client.conftest import set_send_timeout
from ..conftest import PATIENCE_S, Node
from .conftest import Requests, only_connection, stored

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


# When the messages of a turn leave: the first ones before the turn ends, so that client and broker work at the same
# time.


async def test_a_full_batch_leaves_before_the_turn_ends(node: Node, four_queues: None, requests: Requests) -> None:
    """So that the broker has something to do while the next one is made."""
    async with Producer(node.address) as producer:
        await producer.send("t", b"first")
        requests.taken()
        seen: list[list[int]] = []

        async def send(number: int) -> SendResult:
            seen.append(list(requests.codes))
            return await producer.send("t", b"%d" % number)

        results = await asyncio.gather(*(send(number) for number in range(BATCH_MESSAGES + 2)))
    assert seen[BATCH_MESSAGES] == []
    assert seen[BATCH_MESSAGES + 1] == [RequestCode.SEND_BATCH_MESSAGE]
    assert len({result.message_id for result in results}) == len(results)


async def test_after_a_complete_answer_the_first_half_leaves_before_the_turn_ends(
    node: Node, four_queues: None, requests: Requests
) -> None:
    """So that client and broker work at the same time instead of waiting for each other."""
    batch = RequestCode.SEND_BATCH_MESSAGE
    seen: list[list[int]] = []

    async def send(number: int) -> SendResult:
        seen.append(list(requests.codes))
        return await producer.send("t", b"%d" % number, queue_key="same")

    async with Producer(node.address) as producer:
        await producer.send("t", b"first")

        async def taken(count: int) -> list[int]:
            seen.clear()
            requests.taken()
            results = await asyncio.gather(*map(send, range(count)))
            offsets = [result.queue_offset for result in results]
            assert offsets == list(range(offsets[0], offsets[0] + count)), "order holds"
            return requests.taken()

        assert await taken(OVERLAP_MESSAGES) == [batch], "nothing was answered before"
        assert await taken(OVERLAP_MESSAGES) == [batch, batch]
        half = OVERLAP_MESSAGES // 2
        assert seen[half] == []
        assert seen[half + 1] == [batch]
        for _ in range(OVERLAP_BATCHES):
            assert await taken(OVERLAP_MESSAGES) == [batch], "nothing was gained: both answers were waited for"
        assert await taken(OVERLAP_MESSAGES - 1) == [batch, batch], "it is retried"


@pytest.mark.parametrize(("encoding", "count"), [("auto", OVERLAP_MESSAGES - 1), ("json", OVERLAP_MESSAGES)])
async def test_few_messages_and_those_for_apaches_brokers_go_in_one_piece(
    node: Node, four_queues: None, requests: Requests, encoding: Encoding, count: int
) -> None:
    async with Producer(node.address, access=Access(encoding=encoding)) as producer:
        await producer.send("t", b"first")
        requests.taken()
        for _ in range(3):
            await asyncio.gather(*(producer.send("t", b"x") for _ in range(count)))
            assert requests.taken() == [RequestCode.SEND_BATCH_MESSAGE]


def test_halves_that_come_back_together_are_tried_ever_more_seldom() -> None:
    overlap, sent, pauses = Overlap(), 0, []
    assert overlap.limit(20, sent) == 10
    for _ in range(10):
        together = sent = sent + 2
        while overlap.limit(20, sent) == BATCH_MESSAGES:
            sent += 1
        pauses.append(sent - together)
    assert pauses == [min(OVERLAP_BATCHES << number, MAX_OVERLAP_PAUSE) for number in range(10)]


def test_halves_that_stay_apart_are_halved_again_immediately() -> None:
    overlap = Overlap()
    assert overlap.limit(20, 0) == 10
    assert overlap.limit(20, 2) == BATCH_MESSAGES
    assert overlap.limit(20, 2 + OVERLAP_BATCHES) == 10
    assert overlap.limit(20, 2 + OVERLAP_BATCHES * 2) == 10
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 2) == BATCH_MESSAGES
    assert overlap.limit(20, 4 + OVERLAP_BATCHES * 3) == 10, "it waits no longer than at first"


async def turns_until_written(producer: Producer, requests: Requests) -> int:
    """Turns of the event loop from a `send` to the write of its request."""
    connection, turns = only_connection(producer), 0
    requests.taken()
    send = asyncio.create_task(producer.send("t", b"x", queue_key="k"))
    while not requests.codes or connection.unwritten:
        await asyncio.sleep(0)
        turns += 1
    await send
    return turns


async def test_a_message_alone_in_its_turn_leaves_as_early_as_without_batches(
    node: Node, four_queues: None, requests: Requests
) -> None:
    async with Producer(node.address) as batching, Producer(node.address, batching=False) as plain:
        for producer in (batching, plain):
            await producer.send("t", b"first")
        assert await turns_until_written(batching, requests) == await turns_until_written(plain, requests) <= 2


# Messages that wait for a broker that reads nothing for a while: each leaves in its order, or its sender gets an error in
# time.


@asynccontextmanager
async def unread(node: Node, *, timeout_s: float | None = None, **options: Any) -> AsyncIterator[Producer]:
    """A producer whose broker has read one message and now reads nothing. timeout_s: of the sends from now on."""
    async with Producer(node.address, **options) as producer:
        await producer.send("t", b"first")
        only_connection(producer).pause_writing()
        if timeout_s is not None:
            set_send_timeout(producer, timeout_s)
        yield producer


async def test_messages_that_wait_for_a_slow_broker_travel_in_batches_too_in_order(
    node: Node, four_queues: None, requests: Requests
) -> None:
    """Each turn's on its own. When all senders woke together, most did so in vain, and then went alone."""
    async with unread(node) as producer:
        connection = only_connection(producer)
        requests.taken()
        sends = []
        for turn in range(5):
            sends += [asyncio.create_task(producer.send("t", b"%d" % turn, queue_key="k")) for _ in range(20)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert requests.taken() == []
        sends[1].cancel()
        await asyncio.sleep(0)
        connection.resume_writing()
        results = await asyncio.gather(*sends[:1], *sends[2:])
        assert set(requests.taken()) == {RequestCode.SEND_BATCH_MESSAGE}
    offsets = [result.queue_offset for result in results]
    assert offsets == sorted(offsets)
    assert len(await stored(node)) == 1 + 99, "whoever gave up meanwhile sent nothing"


async def test_who_sends_alone_sends_what_waits_before(node: Node, four_queues: None) -> None:
    async with unread(node, compress_over_bytes=1000) as producer:
        connection = only_connection(producer)
        before = asyncio.create_task(producer.send("t", b"small", queue_key="k"))
        await asyncio.sleep(0)
        behind = asyncio.create_task(producer.send("t", b"x" * 2000, queue_key="k"))
        await asyncio.sleep(0)
        connection.resume_writing()
        first, second = await asyncio.gather(before, behind)
    assert first.queue_offset < second.queue_offset


async def test_who_waits_for_a_broker_that_reads_nothing_is_notified_of_it_in_time(
    node: Node, four_queues: None, requests: Requests
) -> None:
    async with unread(node, timeout_s=0.05, compress_over_bytes=1000) as producer:
        requests.taken()
        bodies = (b"a", b"b", b"goes alone" * 200)
        outcomes = await asyncio.gather(*(producer.send("t", body) for body in bodies), return_exceptions=True)
        assert requests.taken() == []
        only_connection(producer).resume_writing()
    assert [type(outcome) for outcome in outcomes] == [RequestTimeout] * 3


async def test_whoever_comes_after_them_is_notified_of_it_in_time_too(node: Node, four_queues: None) -> None:
    async with unread(node, timeout_s=0.02) as producer:
        for body in (b"a", b"b", b"c"):
            with pytest.raises(RequestTimeout, match="did not read the message in time"):
                await asyncio.wait_for(producer.send("t", body), PATIENCE_S)
        only_connection(producer).resume_writing()


async def test_what_waits_for_a_broker_that_hangs_up_is_sent_again(node: Node, four_queues: None) -> None:
    async with unread(node) as producer:
        connection = only_connection(producer)
        sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(3)]
        await asyncio.sleep(0)
        connection.close()
        assert len(await asyncio.gather(*sends)) == 3


async def test_who_gives_up_while_a_broker_reads_nothing_leaves_nothing_behind(node: Node, four_queues: None) -> None:
    async with unread(node) as producer:
        set_send_timeout(producer, 0.05)
        given_up = asyncio.create_task(producer.send("t", b"a"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout):
            await producer.send("t", b"b")
        only_connection(producer).resume_writing()
        await producer.send("t", b"c")
    assert sorted(message.body for message in await stored(node)) == [b"c", b"first"]
