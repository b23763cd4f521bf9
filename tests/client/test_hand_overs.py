"""A hand-over waits for its broker for as long as its member lives: what was handled is committed before anybody reads on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.client import (
    AdminClient,
    ConnectionFailed,
    Consumer,
    Message,
    Producer,
    Reject,
    RequestTimeout,
    RetryLater,
    RocketletError,
)
from rocketlet.client.config import CLIENT_LIMITS, LAST_COMMIT_CHECKS, ClientLimits, Start
from rocketlet.client.consuming.handling import hand_back, shown
from rocketlet.client.member.leases import gather_all
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.apache_locks import AS_APACHES, ApacheLocks, at_once
from ..support.handlers import Inbox, fill
from ..support.requests import value


@dataclass
class InboxHandOvers:
    """The messages that members handle; a handler ends when the gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[bytes] = field(default_factory=list)

    async def handle(self, message: Message) -> None:
        self.bodies.append(message.body)
        await self.gate.wait()


@dataclass
class Cluster:
    """A name server with a broker, and a broker beside it that comes and goes."""

    nodes: Nodes
    home: Node
    guest: Node
    limits: ClientLimits = CLIENT_LIMITS

    async def back(self) -> None:
        port = int(self.guest.address.rpartition(":")[2])
        self.guest = await self.nodes.start(name="guest", name_servers=(self.home.address,), port=port)

    def member(self, inbox: InboxHandOvers) -> Consumer:
        return Consumer(self.home.address, "g", "t", inbox.handle, start="first", limits=self.limits)


QUEUES = [Queue("t", "guest", number) for number in range(2)]


class Heartbeats:
    """Processes the heartbeats of brokers that start later, unless they are stalled at a broker."""

    def __init__(self) -> None:
        self.stalled_at: BrokerController | None = None
        self.is_stalled = asyncio.Event()
        self._process = BROKER_REQUESTS[RequestCode.HEART_BEAT][0]

    def process(self, broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Any:
        if broker is self.stalled_at:
            self.is_stalled.set()
            return None  # no response
        return self._process(broker, connection, frame)


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    heartbeats = Heartbeats()
    entry = (heartbeats.process, BROKER_REQUESTS[RequestCode.HEART_BEAT][1])
    with mock.patch.dict(BROKER_REQUESTS, {RequestCode.HEART_BEAT: entry}):
        yield heartbeats


@pytest.fixture
async def cluster(nodes: Nodes, connect: Connect) -> Cluster:
    home = await nodes.start(name="a-home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    await create_topic(await connect(guest.address), "t", len(QUEUES))
    async with Producer(home.address) as producer:
        for queue in QUEUES:
            await producer.send("t", b"%d" % queue.queue_id, queue=queue)
    return Cluster(nodes, home, guest)


async def handing_over(giver: Consumer) -> None:
    await eventually(lambda: not set(QUEUES) <= giver.assignment())


@asynccontextmanager
async def away_in_a_hand_over(
    cluster: Cluster, inbox: InboxHandOvers, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[Consumer, Consumer]]:
    """A member that has handled what it gives up to another one, after its broker has gone."""
    async with cluster.member(inbox) as giver:
        await eventually(lambda: len(inbox.bodies) == len(QUEUES))
        async with cluster.member(inbox) as taker:
            await handing_over(giver)
            await cluster.guest.stop()
            inbox.gate.set()
            await eventually(lambda: "commit_failed" in caplog.text)
            yield giver, taker


@pytest.fixture
def impatient(cluster: Cluster) -> None:
    """A process that ends waits for no broker that is away."""
    cluster.limits = ClientLimits(hand_over_timeout_s=0.0)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + seconds)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("away_s", [17.0, 40.0])
async def test_a_hand_over_waits_for_its_broker_also_past_the_lease(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    """The broker knows the lease when it is back, and nobody else has had the queue."""
    inbox = InboxHandOvers()
    async with away_in_a_hand_over(cluster, inbox, caplog) as (giver, taker):
        later(monkeypatch, away_s)
        await cluster.back()
        await eventually(lambda: any(queue in taker.assignment() for queue in QUEUES))
        await giver.assigned()
        await eventually(lambda: [cluster.guest.broker.offsets.get("g", "t", number) for number in (0, 1)] == [1, 1])
    assert sorted(inbox.bodies) == [b"0", b"1"]


@pytest.mark.usefixtures("impatient")
async def test_a_member_that_takes_again_what_it_gave_up_knows_how_far_it_had_come(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = InboxHandOvers()
    async with away_in_a_hand_over(cluster, inbox, caplog) as (giver, taker):
        await taker.stop()
        await cluster.back()
        await eventually(lambda: set(QUEUES) <= giver.assignment())
        async with Producer(cluster.home.address) as producer:
            for queue in QUEUES:
                await producer.send("t", b"last", queue=queue)
        await eventually(lambda: inbox.bodies.count(b"last") == len(QUEUES))
    assert sorted(inbox.bodies) == [b"0", b"1", b"last", b"last"]


@pytest.mark.usefixtures("impatient")
async def test_a_process_that_ends_gives_up_and_says_so(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    inbox = InboxHandOvers()
    caplog.set_level("INFO", "rocketlet.membership")
    async with away_in_a_hand_over(cluster, inbox, caplog) as (giver, _):
        async with asyncio.timeout(PATIENCE_S):
            await giver.stop()
    assert "hand_over_failed" in caplog.text
    assert "queue_handed_over" not in caplog.text.partition("hand_over_failed")[0]


async def test_a_stop_that_is_cancelled_leaves_no_hand_over_behind(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.limits = ClientLimits(hand_over_timeout_s=10 * PATIENCE_S)
    inbox = InboxHandOvers()
    async with away_in_a_hand_over(cluster, inbox, caplog) as (giver, _):
        ends = asyncio.create_task(giver.stop())
        await eventually(lambda: not giver.assignment())
        ends.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ends
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("hand over")]
        await cluster.back()


async def test_a_commit_that_is_refused_for_good_ends_the_hand_over_and_is_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue without a commit was not handed over as it should be."""
    caplog.set_level("INFO", "rocketlet.membership")
    inbox = InboxHandOvers()
    async with cluster.member(inbox) as giver:
        await eventually(lambda: len(inbox.bodies) == len(QUEUES))
        async with cluster.member(inbox) as taker:
            await handing_over(giver)
            refuse_commits(monkeypatch)
            inbox.gate.set()
            await eventually(lambda: "hand_over_failed" in caplog.text)
            assert "queue_handed_over" not in caplog.text
            monkeypatch.undo()
            await eventually(lambda: any(queue in taker.assignment() for queue in QUEUES))


def refuse_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No offset is stored, as if the queues ended before it."""
    monkeypatch.setattr("rocketlet.broker.groups.pulling.Commits.offset_fault", lambda *about: "it is not there")


async def test_a_hand_over_waits_for_no_heartbeat_of_another_broker(
    heartbeats: Heartbeats, cluster: Cluster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """That broker stalls: it sends no response, and its connection stays."""
    inbox = InboxHandOvers()
    cluster.limits = ClientLimits(heartbeat_interval_s=0.05)
    await create_topic(await connect(cluster.home.address), "t", 1)
    async with away_in_a_hand_over(cluster, inbox, caplog) as (giver, taker):
        heartbeats.stalled_at = cluster.home.broker
        await heartbeats.is_stalled.wait()
        try:
            await cluster.back()
            await eventually(lambda: any(queue in taker.assignment() for queue in QUEUES))
            await giver.assigned()
        finally:
            heartbeats.stalled_at = None


async def test_a_member_that_loses_a_queue_while_it_hands_it_over_notifies_its_handlers(cluster: Cluster) -> None:
    """The broker says so, long before the lease is over by the member's clock."""
    begun: list[Message] = []
    ends = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message)
        await ends.wait()

    limits = ClientLimits(lease_tick_s=0.01, lock_interval_s=0.01)
    member = partial(Consumer, cluster.home.address, "g", "t", handle, start="first", limits=limits)
    async with member() as giver:
        await eventually(lambda: len(begun) == len(QUEUES))
        async with member():
            await handing_over(giver)
            (moves,) = set(QUEUES) - giver.assignment()
            (message,) = (message for message in begun if message.queue == moves)
            assert not message.lease_lost
            cluster.guest.broker.locks.end("g", "t", moves.queue_id)
            await eventually(lambda: message.lease_lost)
            ends.set()


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("first", "CONSUME_FROM_FIRST_OFFSET"),
        ("last", "CONSUME_FROM_LAST_OFFSET"),
        (1_700_000_000_000, "CONSUME_FROM_TIMESTAMP"),
    ],
)
async def test_heartbeat_has_the_start_of_the_group(node: Node, wire: Wire, start: Start, said: str) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", InboxHandOvers().handle, start=start) as consumer:
        await consumer.assigned()
        answer = await wire.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "g"})
    assert value(answer)["consumeFromWhere"] == said


async def test_who_waits_for_several_is_notified_of_the_first_fault_when_all_have_ended() -> None:
    ended: list[str] = []

    async def work(name: str, *, fails: bool) -> None:
        await asyncio.sleep(0)
        ended.append(name)
        if fails:
            raise LookupError(name)

    with pytest.raises(LookupError, match="one"):
        await gather_all([work("one", fails=True), work("two", fails=False)])
    assert ended == ["one", "two"]


# Apache's broker carries pulls and commits out in several threads: the last commit of a hand-over is the one that
# counts.


PULL, COMMIT, QUERY = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.QUERY_CONSUMER_OFFSET


@pytest.fixture
def threads() -> Iterator[ApacheLocks]:
    apache = ApacheLocks()
    with apache.installed(PULL, COMMIT):
        yield apache


@pytest.fixture
async def apache(threads: ApacheLocks, nodes: Nodes, connect: Connect) -> Node:
    node = await nodes.start()
    await create_topic(await connect(node.address), "t", 1)
    return node


class Undone:
    """The first pull is not carried out, until `times` commits of what is handled have been: each is undone by it."""

    def __init__(self, node: Node, times: float) -> None:
        self.node = node
        self.left = times
        self.pull: Callable[[], None] | None = None
        self.commits = 0

    def run(self, code: int, work: Callable[[], None]) -> None:
        if code == PULL and self.pull is None:
            self.pull = work
            return
        before = offset(self.node)
        work()
        if offset(self.node) != before:
            self.commits += 1
            if self.left > 0 and self.pull is not None:
                self.left -= 1
                self.pull()


class Waiting:
    """Requests of one code wait."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.works: list[Callable[[], None]] = []

    def run(self, code: int, work: Callable[[], None]) -> None:
        if code == self.code:
            self.works.append(work)
        else:
            work()

    async def begin(self, threads: ApacheLocks, node: Node) -> None:
        """Until one waits."""
        threads.run = self.run
        await fill(node, 1)
        await eventually(lambda: bool(self.works))

    async def carried_out_before(self, task: asyncio.Task[None], threads: ApacheLocks) -> None:
        """Those that wait are carried out when the task has asked for one as well, and it ends."""
        await eventually(lambda: len(self.works) > 1 or task.done())
        threads.run = at_once
        for work in self.works:
            work()
        await task


def offset(node: Node) -> int | None:
    return node.broker.offsets.get("g", "t", 0)


@asynccontextmanager
async def two_handled(node: Node) -> AsyncIterator[tuple[Consumer, Inbox]]:
    """A member that has handled two messages and committed the first: its next pull carries the offset 2."""
    inbox = Inbox()
    await fill(node, 1)
    async with Consumer(
        node.address,
        "g",
        "t",
        inbox,
        start="first",
        access=AS_APACHES,
        limits=ClientLimits(idle_commit_s=3600.0, route_interval_s=0.01),
    ) as consumer:
        await handled(inbox, 1)
        await consumer.commit()
        await fill(node, 1)
        await handled(inbox, 2)
        yield consumer, inbox


async def handled(inbox: Inbox, count: int) -> None:
    await eventually(lambda: len(inbox.messages) == count)


async def test_the_last_commit_waits_for_pulls_that_are_carried_out_late(threads: ApacheLocks, apache: Node) -> None:
    pulls = Waiting(PULL)
    async with two_handled(apache) as (consumer, inbox):
        await pulls.begin(threads, apache)
        await handled(inbox, 3)
        leaving = asyncio.create_task(consumer.stop())
        await pulls.carried_out_before(leaving, threads)
    assert offset(apache) == 3


@pytest.mark.parametrize(
    ("times", "commits", "stored"),
    [(1, 2, 3), (LAST_COMMIT_CHECKS, LAST_COMMIT_CHECKS + 1, 3), (math.inf, LAST_COMMIT_CHECKS + 1, 2)],
)
async def test_a_last_commit_that_was_undone_is_repeated(
    threads: ApacheLocks, apache: Node, times: float, commits: int, stored: int
) -> None:
    undone = Undone(apache, times)
    async with two_handled(apache) as (_, inbox):
        threads.run = undone.run
        await fill(apache, 1)
        await handled(inbox, 3)
    assert undone.commits == commits
    assert offset(apache) == stored
    assert threads.owners() == {}


async def test_a_place_that_is_sought_is_committed_behind_pulls_that_are_carried_out_late(
    threads: ApacheLocks, apache: Node
) -> None:
    pulls = Waiting(PULL)
    async with two_handled(apache) as (consumer, inbox):
        await pulls.begin(threads, apache)
        await handled(inbox, 3)
        await consumer.pause()
        seeking = asyncio.create_task(consumer.seek("first"))
        await pulls.carried_out_before(seeking, threads)
        assert offset(apache) == 0


async def test_a_commit_waits_for_the_one_before_it(threads: ApacheLocks, apache: Node) -> None:
    commits = Waiting(COMMIT)
    async with two_handled(apache) as (consumer, inbox):
        threads.run = commits.run
        committing = asyncio.create_task(consumer.commit())
        await eventually(lambda: bool(commits.works))
        await fill(apache, 1)
        await handled(inbox, 3)
        leaving = asyncio.create_task(consumer.stop())
        await eventually(lambda: not consumer.assignment())
        await apache.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2)  # meanwhile its other requests arrive
        threads.run = at_once
        for work in reversed(commits.works):
            work()
        await asyncio.gather(committing, leaving)
    assert offset(apache) == 3


async def test_nothing_is_looked_up_where_no_pull_commits(threads: ApacheLocks, apache: Node) -> None:
    asked: list[int] = []

    def note(code: int, work: Callable[[], None]) -> None:
        asked.append(code)
        work()

    async with two_handled(apache):
        threads.run = note
    assert offset(apache) == 2
    assert QUERY not in asked and PULL not in asked


# A hand-over and what a handler sends back: the offset says how far everything is handled, so what was handled
# behind a message that nobody took back would be redelivered.


def refuse_first(monkeypatch: pytest.MonkeyPatch, away: list[RocketletError]) -> None:
    """Each hand-back fails with one of these, the last one first; then it arrives."""

    async def handed_back(*given: Any) -> None:
        if away:
            raise away.pop()
        await hand_back(*given)

    monkeypatch.setattr("rocketlet.client.consumer.hand_back", handed_back)


@pytest.mark.parametrize("outcome", [RetryLater(delay_level=1), Reject()])
async def test_a_hand_over_waits_for_what_is_sent_back_while_its_broker_is_away(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The offset says how far everything is handled: what was handled behind it would be redelivered."""
    await fill(node, 3)
    seen: list[bytes] = []
    may_end = asyncio.Event()
    away: list[RocketletError] = [ConnectionFailed("away"), RequestTimeout("away")]

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append(message.body)
        if message.body != b"0":
            return None
        await may_end.wait()
        return outcome

    refuse_first(monkeypatch, away)
    async with Consumer(
        node.address, "g", "t", handle, start="first", limits=ClientLimits(reconnect_s=0.001)
    ) as consumer:
        await eventually(lambda: len(seen) == 3)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: process_queue.running == 1)
        leaving = asyncio.create_task(consumer.stop())
        await eventually(lambda: process_queue.is_stopped)
        may_end.set()
        await leaving
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3


@pytest.mark.parametrize("outcome", [RetryLater(delay_level=1), Reject()])
async def test_a_hand_over_sends_back_what_its_broker_had_not_taken(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch, outcome: RetryLater | Reject
) -> None:
    """The handler would be called again after a pause, in which the queue is given up."""
    await fill(node, 3)
    seen: list[bytes] = []
    away: list[RocketletError] = [ConnectionFailed("away"), ConnectionFailed("away"), RequestTimeout("away")]

    async def handle(message: Message) -> RetryLater | Reject | None:
        seen.append(message.body)
        return outcome if message.body == b"0" else None

    refuse_first(monkeypatch, away)
    async with Consumer(
        node.address, "g", "t", handle, start="first", limits=ClientLimits(reconnect_s=0.001, send_back_retry_s=3600.0)
    ) as consumer:
        await eventually(lambda: len(seen) == 3 and len(away) == 2)
        (process_queue,) = (item for item in consumer.queues.values() if item.queue.topic == "t")
        await eventually(lambda: not process_queue.waiting and process_queue.messages == 1)
    assert (sorted(seen), away) == ([b"0", b"1", b"2"], [])
    assert node.broker.offsets.get("g", "t", 0) == 3


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_the_reason_travels_with_the_retry_and_the_dead_letter(node: Node, one_queue: None) -> None:
    await fill(node, 3, keys="k")
    seen: list[tuple[bytes, str]] = []

    async def handle(message: Message) -> Reject | None:
        seen.append((message.body, message.failure))
        if message.body == b"0":
            return Reject("no such customer")
        if message.body == b"1":
            raise ValueError("http://bob:pw@shop/ said\n401")
        raise Unsayable

    async with Consumer(node.address, "g", "t", handle, start="first", max_reconsume_times=1):
        await eventually(lambda: node.broker.store.queue("SCHEDULE_TOPIC_XXXX", 2).next == 2)
        node.clock.advance(11)
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 3)
    said = "ValueError: http://***@shop/ said 401"
    assert sorted(seen)[1:] == [(b"1", ""), (b"1", said), (b"2", ""), (b"2", "Unsayable")]
    async with AdminClient(node.address) as admin:
        dead = [message async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 3) for message in part]
    assert {message.body: message.failure for message in dead} == {
        b"0": "no such customer",
        b"1": f"tried 2 times; {said}",
        b"2": "tried 2 times; Unsayable",
    }
    assert all(message.user_properties == {} for message in dead), "what is sent again has no reason of before"


async def test_in_order_the_last_reason_stays_with_the_dead_letter(node: Node, one_queue: None) -> None:
    await fill(node, 1)
    tries: list[int] = []

    async def handle(message: Message) -> None:
        tries.append(1)
        raise KeyError(len(tries))

    options: dict[str, Any] = {"orderly": True, "max_reconsume_times": 1, "suspend_queue_s": 0.001}
    async with Consumer(node.address, "g", "t", handle, start="first", **options):
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
    async with AdminClient(node.address) as admin:
        (found,) = [part async for part in admin.read(Queue("%DLQ%g", "broker-a", 0), 0, 1)]
    assert found[0].failure == "KeyError: 2"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("password=hunter2 for bob", "password=*** for bob"),
        ('{"api_key": "a b", "id": 4}', '{"api_key": ***, "id": 4}'),
        ("Authorization: Bearer abc.def, retry", "Authorization: ***, retry"),
        ("postgresql://u:p@h/db refused\n\tat line 3", "postgresql://***@h/db refused at line 3"),
        ("x" * 400, "x" * 297 + "..."),
        ("a\x01b\x02c", "a b c"),
    ],
)
def test_what_is_kept_of_a_reason_is_short_and_holds_no_secret(text: str, kept: str) -> None:
    assert shown(text) == kept
