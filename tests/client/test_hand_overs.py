"""A hand-over waits for its broker for as long as its member lives: what was handled is committed before anybody reads on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.remoting.dispatch import BROKER_REQUESTS
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits, Start
from rocketlet.client.member.leases import gather_all
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, Connect, Node, Nodes, Wire, create_topic, eventually
from ..support.requests import value


@dataclass
class Inbox:
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

    def member(self, inbox: Inbox) -> Consumer:
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
    cluster: Cluster, inbox: Inbox, caplog: pytest.LogCaptureFixture
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
    inbox = Inbox()
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
    inbox = Inbox()
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
    inbox = Inbox()
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
    inbox = Inbox()
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
    inbox = Inbox()
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
    inbox = Inbox()
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
    async with Consumer(node.address, "g", "t", Inbox().handle, start=start) as consumer:
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
