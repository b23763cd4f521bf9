"""Commits at Apache's brokers, which refuse none: a later one must not be followed by an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject
from rocketlet.client.config import At, ClientLimits
from rocketlet.client.consuming.queues import OffsetCommitter, ProcessQueue
from rocketlet.client.member.offsets import GroupOffsets, Position, begin_offset
from rocketlet.client.message import Lease
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.bodies import Work
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker

from ..conftest import PATIENCE_S, Node, Wire, create_topic, eventually
from ..support.requests import send
from ..support.turns import passed

QUEUES = [Queue("t", "broker-a", number) for number in range(3)]


class Line:
    """A connection to a broker that answers when the test allows it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # queue id, offset
        self.unanswered: list[asyncio.Future[None]] = []

    def request(self, code: int, ext: dict[str, Any], *, timeout_s: float) -> asyncio.Future[None]:
        self.sent.append((int(ext["queueId"]), int(ext["commitOffset"])))
        answer = asyncio.get_running_loop().create_future()
        self.unanswered.append(answer)
        return answer

    async def answer(self) -> None:
        for answer in self.unanswered:
            answer.set_result(None)
        self.unanswered.clear()
        await passed()


async def test_the_first_commit_goes_alone_and_a_later_one_overtakes_none_that_waits() -> None:
    line = Line()
    offsets = GroupOffsets(cast("ClusterView", SimpleNamespace(connected=lambda name: line)), "g")
    storing = [asyncio.create_task(offsets.store(queue, 1, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1)]
    await line.answer()
    storing += [asyncio.create_task(offsets.store(queue, 2, 0)) for queue in QUEUES]
    await passed()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2)], "a commit waits for the one before it of the same queue"
    await line.answer()
    assert line.sent == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    await line.answer()
    assert all(task.done() and task.exception() is None for task in storing)
    assert (len(offsets._turns), len(offsets._first)) == (0, 0), "nothing is kept of queues that nobody commits"


async def test_one_pull_shows_that_those_before_it_are_begun_with() -> None:
    asked: list[tuple[int, int]] = []

    async def ask(code: int, ext: dict[str, Any], *, timeout_s: float) -> None:
        asked.append((code, int(ext["sysFlag"])))

    offsets = GroupOffsets(
        cast("ClusterView", SimpleNamespace(connected=lambda name: SimpleNamespace(request_unchecked=ask))), "g"
    )
    await asyncio.gather(*(offsets.pulls_stored(queue, 1) for queue in QUEUES))
    assert asked == [(RequestCode.PULL_MESSAGE, PULL_SUBSCRIPTION)], "it neither commits nor waits"
    await offsets.pulls_stored(QUEUES[0], 1)
    assert len(asked) == 2, "pulls may have come between"


def test_queues_that_come_later_are_read_from_their_start_and_single_ones_from_where_was_said() -> None:
    starts = {QUEUES[1]: At(7)}
    offsets = GroupOffsets(cast("ClusterView", SimpleNamespace()), "g", "last", starts)
    assert offsets.late is not None
    offsets.late._brokers = frozenset(["broker-a"])
    retries = Queue("%RETRY%g", "broker-a", 0)
    offsets.record_first_queues("t", QUEUES[:2])
    offsets.record_first_queues("t", QUEUES)
    offsets.record_first_queues("%RETRY%g", [retries])
    assert [offsets._start_of(queue) for queue in (*QUEUES, retries)] == ["last", At(7), "first", "first"]
    offsets._latest[QUEUES[0]] = 9
    assert offsets._start_of(QUEUES[0]) == At(9)


STORED_S = (0, 0, 1, 1, 1, 3, 3, 3, 3, 3)
"""When each message of a queue is stored."""


@pytest.mark.parametrize("expired", [0, 3])
@pytest.mark.still
async def test_a_time_is_the_first_message_stored_then_or_later_whichever_the_broker_names(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, expired: int
) -> None:
    """Brokers name the nearest message: the one before, or any of those with the same time."""
    await create_topic(wire, "t", 1)
    began_ms = node.clock.time_ms()
    for number, stored_s in enumerate(STORED_S):
        node.clock.advance(stored_s - (node.clock.time_ms() - began_ms) / 1000)
        await send(wire, b"%d" % number)
    node.broker.store.queues["t", 0].begin = expired
    named = expired

    def name(queue: Any, time_ms: int) -> Work[int]:
        yield
        return named

    monkeypatch.setattr(node.broker.store, "offset_by_time", name)
    cluster = ClusterView(node.address)
    connection = await cluster.connection(node.address)
    for time_s in (-1, 0, 0.5, 1, 2, 3, 4):
        later = (number for number, stored_s in enumerate(STORED_S) if stored_s >= time_s and number >= expired)
        wanted = next(later, len(STORED_S))
        for named in range(expired, len(STORED_S)):
            time_ms = began_ms + round(1000 * time_s)
            assert await begin_offset(connection, Queue("t", "broker-a", 0), time_ms) == wanted, (time_s, named)
    await cluster.close()


async def test_a_time_in_an_empty_queue_is_its_end(node: Node, one_queue: None) -> None:
    cluster = ClusterView(node.address)
    connection = await cluster.connection(node.address)
    assert await begin_offset(connection, Queue("t", "broker-a", 0), 1) == 0
    await cluster.close()


async def test_the_start_of_a_group_is_asked_for() -> None:
    asked: list[int] = []

    class Broker:
        async def request(self, code: int, ext: dict[str, Any], *, timeout_s: float) -> Frame:
            asked.append(code)
            return Frame(0, 0, {"offset": "5"})

    connection = cast("Connection", Broker())
    assert await begin_offset(connection, QUEUES[0], At(3)) == 3
    assert [await begin_offset(connection, QUEUES[0], start) for start in ("first", "last")] == [5, 5]
    assert asked == [RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET]


def test_a_lag_is_never_below_zero() -> None:
    assert [Position(None, 5, end).lag for end in (4, 5, 7)] == [0, 0, 2]


# A queue of which everything is handled is committed when nothing more comes: else the next pull says it.


QUEUES_IDLE_COMMITS = [Queue("t", "broker-a", number) for number in range(2)]


class Looks:
    """A member's commits, whose looks for idle queues are made by hand."""

    def __init__(self, epoch: int = 1, idle_commit_s: float = 3600.0) -> None:
        self.stored: list[Mapping[Queue, int]] = []
        self.queues = {queue: ProcessQueue(queue, 0, Lease(epoch)) for queue in QUEUES_IDLE_COMMITS}
        self._spawned: list[Coroutine[Any, Any, None]] = []
        self._commits = OffsetCommitter(
            "g",
            self.queues,
            interval_s=3600.0,
            store=self._store,
            spawn=self._spawned.append,
            limits=ClientLimits(idle_commit_s=idle_commit_s),
        )  # never on its own

    async def _store(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        self.stored.append(offsets)
        return set(offsets)

    def handled(self, number: int, offset: int) -> None:
        process_queue = self.queues[QUEUES_IDLE_COMMITS[number]]
        process_queue.next_offset = offset
        self._commits.queue_is_idle(process_queue)

    async def look(self) -> None:
        self._commits.stop_idle()
        self._commits._commit_idle()
        for work in self._spawned:
            await work
        self._spawned.clear()

    def stop(self) -> None:
        self._commits.stop_idle()


@pytest.fixture
def looks() -> Looks:
    return Looks()


async def test_what_falls_idle_between_two_checks_is_committed_in_one_request_by_the_next_one(looks: Looks) -> None:
    looks.handled(0, 1)
    looks.handled(1, 5)
    await looks.look()
    assert looks.stored == []
    await looks.look()
    assert looks.stored == [{QUEUES_IDLE_COMMITS[0]: 1, QUEUES_IDLE_COMMITS[1]: 5}]
    await looks.look()
    assert len(looks.stored) == 1
    looks.stop()


async def test_a_queue_that_gets_messages_again_and_again_is_left_to_its_pulls(looks: Looks) -> None:
    for offset in range(1, 10):
        looks.handled(0, offset)
        await looks.look()
    assert looks.stored == []
    await looks.look()
    assert looks.stored == [{QUEUES_IDLE_COMMITS[0]: 9}], "then nothing came"
    looks.stop()


async def test_the_first_commit_of_a_queue_on_apaches_broker_which_no_pull_carries_does_not_wait(looks: Looks) -> None:
    apache = Looks(epoch=0)
    apache.handled(0, 1)
    await apache.look()
    assert apache.stored == [{QUEUES_IDLE_COMMITS[0]: 1}]
    apache.handled(0, 2)
    await apache.look()
    assert len(apache.stored) == 1, "the pulls behind the next messages carry it"
    apache.stop()


async def test_nothing_is_committed_after_the_end() -> None:
    looks = Looks(epoch=0, idle_commit_s=0.0)
    looks.stop()  # nothing has fallen idle yet
    looks.handled(0, 1)
    looks.stop()
    await passed()
    assert looks._spawned == []


async def test_commits_continue_at_their_interval_also_when_one_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Mapping[Queue, int]] = []

    async def store(offsets: Mapping[Queue, int]) -> set[Queue]:
        told.append(offsets)
        if len(told) == 1:
            raise OSError("a fault")
        return {QUEUES_IDLE_COMMITS[0]} if QUEUES_IDLE_COMMITS[0] in offsets else set()

    queues = {queue: ProcessQueue(queue, 0, Lease(1)) for queue in QUEUES_IDLE_COMMITS}
    commits = OffsetCommitter("g", queues, interval_s=0.001, store=store, spawn=lambda work: None)
    commits.start()
    await eventually(lambda: len(told) >= 3)
    await commits.stop()
    assert told[:3] == [dict.fromkeys(QUEUES_IDLE_COMMITS, 0)] * 2 + [{QUEUES_IDLE_COMMITS[1]: 0}], (
        "one of them is stored since"
    )
    assert caplog.text.count("commit_failed") == 1


async def test_what_was_lost_while_it_was_stored_is_not_noted(looks: Looks) -> None:
    async def store(offsets: Mapping[Queue, int]) -> set[Queue]:
        del looks.queues[QUEUES_IDLE_COMMITS[0]]
        return set(offsets)

    looks._commits._store = store
    await looks._commits.commit()
    assert looks.queues[QUEUES_IDLE_COMMITS[1]].committed == 0


async def test_a_queue_that_is_given_up_or_has_messages_again_is_not_committed_as_idle(looks: Looks) -> None:
    for number in range(2):
        looks.handled(number, 1)
    await looks.look()
    looks.queues[QUEUES_IDLE_COMMITS[0]].stop()
    looks.queues[QUEUES_IDLE_COMMITS[1]].messages = 1
    await looks.look()
    assert looks.stored == []


# A broker loses the end of a queue, as in a power cut, while a member that keeps its lease has read it. The offsets
# of what was lost are given to other messages, which the member must get.


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(default_queues=1) as broker:
        yield broker


def reader(broker: Broker, handler: Callable[[Message], Any], *, concurrency: int = 20) -> Consumer:
    return Consumer(broker.address, "g", "t", handler, start="first", concurrency=concurrency)


def queue_of(consumer: Consumer) -> ProcessQueue | None:
    return next((queue for key, queue in consumer.queues.items() if key.topic == "t"), None)


async def holds(broker: Broker, consumer: Consumer, messages: int, end: int) -> None:
    """Until the member holds this many messages and will read on from `end`."""
    await broker.until(
        lambda: (queue := queue_of(consumer)) is not None and (queue.messages, queue.next_offset) == (messages, end)
    )


async def back(broker: Broker, consumer: Consumer) -> None:
    """Until the member has its queue again, as before."""
    await broker.until(lambda: (queue := queue_of(consumer)) is not None and not queue.is_suspended)


@asynccontextmanager
async def paused_behind_three(broker: Broker) -> AsyncIterator[tuple[Producer, Consumer, list[bytes]]]:
    """A member that has handled three messages and is paused."""
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: len(seen) == 3)
        await consumer.pause()
        yield producer, consumer, seen


@pytest.mark.parametrize("lost", [1, 3])
async def test_what_takes_the_offset_of_a_lost_message_is_delivered(
    broker: Broker, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with paused_behind_three(broker) as (producer, consumer, seen):
        await broker.akill(lose=lost)
        after = [b"new %d" % number for number in range(lost + 1)]
        for body in after:
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.resume()
        await broker.until(lambda: len(seen) == 3 + lost + 1)
        assert sorted(seen[3:]) == sorted(after)
        assert "queue_lost" not in caplog.text, "it has kept its lease: the case is the one of this test"
        assert "offset_moved" in caplog.text
        await consumer.commit()
        assert (await consumer.lag(), len(broker.messages("t"))) == (0, 4)


@pytest.mark.parametrize("lost_again", [0, 1, 2])
async def test_the_broker_restarts_again_before_the_member_has_pulled(
    broker: Broker, lost_again: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with paused_behind_three(broker) as (producer, consumer, seen):
        await broker.akill(lose=1)
        for body in (b"new", b"newer"):
            await producer.send("t", body)
        await back(broker, consumer)
        await broker.akill(lose=lost_again)
        await producer.send("t", b"last")
        await back(broker, consumer)
        await consumer.resume()
        expected = [*[b"new", b"newer"][: 2 - lost_again], b"last"]
        await broker.until(lambda: len(seen) == 3 + len(expected))
        assert sorted(seen[3:]) == sorted(expected)
        assert "queue_lost" not in caplog.text, "it has kept its lease: the case is the one of this test"


async def test_a_restart_after_the_member_has_pulled_sets_nothing_back(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: len(seen) == 1)
        await broker.akill()
        await producer.send("t", b"2")
        await broker.until(lambda: len(seen) == 2)
        await consumer.pause()
        await broker.akill()
        await producer.send("t", b"3")
        await back(broker, consumer)
        await consumer.resume()
        await broker.until(lambda: len(seen) == 3)
        await consumer.commit()
        assert await consumer.lag() == 0
        assert "set_back" not in caplog.text and "offset_moved" not in caplog.text


@pytest.mark.parametrize("by", ["the member", "an administrator"])
async def test_a_place_that_is_sought_after_the_loss_counts(broker: Broker, by: str) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
        AdminClient(broker.address) as admin,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: seen == [b"1"])
        await consumer.pause()
        await broker.akill()
        for body in (b"skipped", b"skipped, too"):
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.commit()
        if by == "the member":
            await consumer.seek("last")
        else:
            await admin.reset("g", "t", to="last")
            await broker.until(lambda: (queue := queue_of(consumer)) is not None and queue.next_offset == 3)
        await consumer.commit()
        assert (await consumer.positions())[Queue("t", "broker-a", 0)].committed == 3
        await consumer.resume()
        await producer.send("t", b"2")
        await broker.until(lambda: seen[-1] == b"2")
        assert seen == [b"1", b"2"]


async def test_a_lost_message_that_is_given_up_does_not_take_the_one_in_its_place_along(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Message] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> Reject | None:
        seen.append(message)
        if message.body != b"lost":
            return None
        await may_end.wait()
        return Reject()

    async with Producer(broker.address) as producer, reader(broker, handle) as consumer:
        for body in (b"kept", b"lost"):
            await producer.send("t", body)
        await broker.until(lambda: len(seen) == 2)
        await consumer.pause()
        await broker.akill(lose=1)
        await producer.send("t", b"next")
        await back(broker, consumer)
        may_end.set()
        await broker.until(lambda: "send_back_failed" in caplog.text or bool(broker.messages("%DLQ%g")))
        await consumer.resume()
        await broker.until(lambda: [message.body for message in seen[:3]] == [b"kept", b"lost", b"next"])
    assert seen[1].record.physical_offset == seen[2].record.physical_offset, "the case is the one of this test"
    assert broker.messages("%DLQ%g") == []


async def test_what_was_read_before_the_loss_and_is_still_there_is_handled(broker: Broker) -> None:
    begun: list[bytes] = []
    may_end = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message.body)
        await may_end.wait()

    async with Producer(broker.address) as producer, reader(broker, handle, concurrency=1) as consumer:
        for body in (b"1", b"2", b"lost", b"lost, too"):
            await producer.send("t", body)
        await broker.until(lambda: begun == [b"1"])
        await holds(broker, consumer, 4, 4)
        await consumer.pause()
        await broker.akill(lose=2)
        for body in (b"3", b"4", b"5"):
            await producer.send("t", body)
        await back(broker, consumer)
        await consumer.resume()
        await holds(broker, consumer, 5, 5)
        may_end.set()
        await broker.until(lambda: len(begun) == 5)
        assert begun == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_member_that_is_ahead_does_not_take_its_group_along(broker: Broker) -> None:
    seen: list[bytes] = []
    async with Producer(broker.address) as producer:
        async with reader(broker, lambda message: None) as consumer:
            for body in (b"1", b"2", b"3"):
                await producer.send("t", body)
            await holds(broker, consumer, 0, 3)
            await consumer.pause()
            await broker.akill(lose=1)
            await producer.send("t", b"new")
            await back(broker, consumer)
            await consumer.commit()
            assert (await consumer.positions())[Queue("t", "broker-a", 0)].committed == 2
        async with reader(broker, lambda message: seen.append(message.body)):
            await broker.until(lambda: seen == [b"new"])


async def test_a_member_that_was_not_ahead_continues_where_it_was(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    async with (
        Producer(broker.address) as producer,
        reader(broker, lambda message: seen.append(message.body)) as consumer,
    ):
        await producer.send("t", b"1")
        await broker.until(lambda: seen == [b"1"])
        await producer.send("other", b"lost")
        await broker.akill(lose=1)
        for body in (b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: seen == [b"1", b"2", b"3"])
        await consumer.commit()
        assert await consumer.lag() == 0
        assert "offset_moved" not in caplog.text


def test_a_run_of_which_only_the_end_was_lost_is_handled_up_to_there() -> None:
    queue = Queue("t", "b", 0)
    process_queue = ProcessQueue(queue, 0, Lease(1))
    messages = [_Stored(offset) for offset in range(6)]
    first, second, third = process_queue.add(messages, 6, 2)  # type: ignore[arg-type]
    process_queue.acknowledge(second, 1)
    process_queue.move(3)
    assert (process_queue.messages, process_queue.size_bytes) == (2, 20)
    assert (process_queue.next_offset, process_queue.commit_offset) == (3, 0)
    assert (second.is_done, third.is_done, len(third.messages)) == (True, True, 2)
    process_queue.acknowledge(third)
    process_queue.acknowledge(first)
    assert (process_queue.messages, process_queue.size_bytes, process_queue.commit_offset) == (0, 0, 3)
    process_queue.move(9)
    assert process_queue.commit_offset == 9, "retention: nothing is cached that could be lost"


class _Stored:
    """As much of a message as a queue reads."""

    size_bytes = 10

    def __init__(self, queue_offset: int) -> None:
        self.queue_offset = queue_offset


# A topic is deleted and recreated while its queues have owners: offsets start over, and owners get all new
# messages.


NEW = [b"new %d" % number for number in range(5)]


def member(broker: Broker, seen: list[bytes]) -> Consumer:
    patient = ClientLimits(hand_over_timeout_s=10 * PATIENCE_S)
    return Consumer(broker.address, "g", "t", lambda message: seen.append(message.body), limits=patient)


async def made_anew(broker: Broker, *, messages: list[bytes]) -> None:
    async with AdminClient(broker.address) as admin:
        await admin.delete_topic("t")
        await admin.create_topic("t", queues=1)
    async with Producer(broker.address) as producer:
        for body in messages:
            await producer.send("t", body)


@asynccontextmanager
async def paused_behind_three_topics_made_anew(broker: Broker) -> AsyncIterator[tuple[Consumer, list[bytes]]]:
    """A member that has handled three messages and is paused."""
    broker.create_topic("t", 1)
    seen: list[bytes] = []
    async with Producer(broker.address) as producer, member(broker, seen) as consumer:
        await consumer.assigned()
        for body in (b"1", b"2", b"3"):
            await producer.send("t", body)
        await broker.until(lambda: broker.committed("g", "t") == {0: 3})
        await consumer.pause()
        yield consumer, seen


async def test_an_owner_reads_the_new_topic_from_its_start(broker: Broker) -> None:
    async with paused_behind_three_topics_made_anew(broker) as (consumer, seen):
        await made_anew(broker, messages=NEW)
        await consumer.resume()
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
        assert sorted(seen[3:]) == sorted(NEW)


@pytest.mark.parametrize("piece", [1, 1024])
async def test_also_when_the_broker_restarts_before_the_owner_reads(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A deletion is written down before it is answered, in this many pieces as there are."""
    monkeypatch.setattr("rocketlet.broker.groups.leases.LOOKS", piece)
    async with paused_behind_three_topics_made_anew(broker) as (consumer, seen):
        await made_anew(broker, messages=NEW)
        await broker.akill()
        await consumer.resume()
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
        assert sorted(seen[3:]) == sorted(NEW)


async def test_who_gets_the_queue_from_its_owner_does_so_too(broker: Broker) -> None:
    async with paused_behind_three_topics_made_anew(broker) as (_, seen):
        await made_anew(broker, messages=NEW)
    async with member(broker, seen):
        await broker.until(lambda: len(seen) >= 8 or broker.committed("g", "t") == {0: 5})
    assert sorted(seen[3:]) == sorted(NEW)


@pytest.mark.parametrize("again", [False, True])
async def test_a_queue_that_is_gone_is_given_up_immediately(broker: Broker, *, again: bool) -> None:
    """Its commit is refused, and would be refused for ever."""
    async with paused_behind_three_topics_made_anew(broker) as (consumer, _):
        if again:
            await made_anew(broker, messages=[])
        else:
            async with AdminClient(broker.address) as admin:
                await admin.delete_topic("t")
        async with asyncio.timeout(PATIENCE_S):
            await consumer.stop()
    assert not [queue for queue in broker.owners("g") if queue.topic == "t"]
