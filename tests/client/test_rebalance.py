"""The hand-over: no message twice and none lost while members join and leave, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rocketlet.broker.config import HANDOVER_LEASE_S, LEASE_SWEEP_S
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.consuming.queues import Assignment, ProcessQueue, Puller
from rocketlet.client.errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, RocketletError
from rocketlet.client.member.membership import Rebalance, Share, Shares
from rocketlet.client.message import Lease
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol import group_bodies
from rocketlet.protocol.allocation import AVG, CONSISTENT_HASH, STICKY, Strategy
from rocketlet.protocol.bodies import BrokerData, QueueData, Route, TopicConfig
from rocketlet.protocol.codes import EXT_DETAIL, EXT_PLACES, EXT_SEEN_QUEUES, EXT_SHARES, RequestCode, ResponseCode
from rocketlet.protocol.frame import Ext, Frame
from rocketlet.protocol.group_bodies import BrokerShare, LockRequest, Place
from rocketlet.protocol.names import RETRY_PREFIX, Queue

from ..conftest import Connect, Node, Nodes, Wire, create_topic, eventually, peer
from ..support.pacing import pace, work_for
from .conftest import restart

QUEUES = 8


class Watch:
    """Handlers of all members write here; it sees doubles and two owners at the same time."""

    def __init__(self, pause_s: float = 0.002) -> None:
        self.seen: Counter[bytes] = Counter()
        self.order: dict[Queue, list[int]] = {}
        self.owners: dict[Queue, str] = {}
        self.overlaps: list[tuple[Queue, str, str]] = []
        self._pause_s = pause_s

    def handler(self, name: str) -> Any:
        async def handle(message: Message) -> None:
            other = self.owners.get(message.queue)
            if other not in (None, name):
                self.overlaps.append((message.queue, str(other), name))
            self.owners[message.queue] = name
            await work_for(self._pause_s)
            self.seen[message.body] += 1
            self.order.setdefault(message.queue, []).append(message.queue_offset)
            self.owners.pop(message.queue, None)

        return handle


@asynccontextmanager
async def traffic(node: Node, topic: str) -> AsyncIterator[list[bytes]]:
    """Sends all the while; what was acknowledged is in the list."""
    sent: list[bytes] = []

    async def run(producer: Producer) -> None:
        while True:
            body = b"%d" % len(sent)
            await producer.send(topic, body)
            sent.append(body)
            await pace(0.0005)

    async with Producer(node.address) as producer:
        task = asyncio.create_task(run(producer))
        try:
            yield sent
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def has_route(node: Node) -> None:
    """Wait until the name server knows a broker of the topic."""

    async def is_known() -> bool:
        return await node.broker.name_servers.find_route("t") is not None

    await eventually(is_known)


async def settled(*consumers: Consumer) -> None:
    """Returns when the queues of the topic are shared out evenly among exactly these members."""
    expected = QUEUES // len(consumers)

    def even() -> bool:
        shares = [
            [queue for queue in item.assignment() if not queue.topic.startswith(RETRY_PREFIX)] for item in consumers
        ]
        whole = sum(map(len, shares)) == QUEUES
        return whole and all(expected <= len(share) <= expected + 1 for share in shares)

    await eventually(even)


@pytest.mark.parametrize("orderly", [False, True])
async def test_joins_and_leaves_deliver_nothing_twice_and_lose_nothing(node: Node, wire: Wire, orderly: bool) -> None:
    await create_topic(wire, "t", QUEUES)
    watch = Watch()
    options: dict[str, Any] = {"start": "first", "orderly": orderly, "concurrency": 16}
    async with traffic(node, "t") as sent, AsyncExitStack() as stack:
        members = {
            name: await stack.enter_async_context(Consumer(node.address, "g", "t", watch.handler(name), **options))
            for name in "ab"
        }
        await settled(*members.values())
        for round_ in range(4):
            async with Consumer(node.address, "g", "t", watch.handler(f"c{round_}"), **options) as joined:
                await settled(*members.values(), joined)
                count = len(sent)
                await eventually(lambda count=count: len(sent) > count + 20)  # type: ignore[misc]
            await settled(*members.values())
    async with Consumer(node.address, "g", "t", watch.handler("last"), **options):
        await eventually(lambda: len(watch.seen) >= len(sent))
    assert set(sent) <= watch.seen.keys()
    assert [body for body, times in watch.seen.items() if times > 1] == []
    if orderly:
        assert watch.overlaps == []
        assert all(offsets == sorted(offsets) for offsets in watch.order.values())


async def test_a_long_handler_is_waited_for_before_its_queue_moves(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", QUEUES)
    started, release = asyncio.Event(), asyncio.Event()
    handled: Counter[bytes] = Counter()

    async def slow(message: Message) -> None:
        started.set()
        await release.wait()
        handled[message.body] += 1

    async def quick(message: Message) -> None:
        handled[message.body] += 1

    queue = Queue("t", "broker-a", QUEUES - 1)
    async with Producer(node.address) as producer:
        await producer.send("t", b"long", queue=queue)
    async with Consumer(node.address, "g", "t", slow, start="first"):
        await started.wait()
        async with Consumer(node.address, "g", "t", quick, start="first") as second:
            await eventually(
                lambda: Queue("t", "broker-a", QUEUES - 2) in second.assignment() or bool(second.assignment())
            )
            owners = node.broker.groups.owners("g")
            stays = [number for (topic, number), owner in owners.items() if topic == "t" and owner != second.client_id]
            release.set()
            await settled_pair(second)
            assert len(stays) > QUEUES // 2, "the queue with the running handler had not moved yet"
    assert handled == {b"long": 1}


async def test_the_others_prepare_while_a_leaving_members_handlers_end(node: Node, one_queue: None) -> None:
    started, release = asyncio.Event(), asyncio.Event()
    seen: Counter[bytes] = Counter()

    async def slow(message: Message) -> None:
        started.set()
        await release.wait()
        seen[message.body] += 1

    async def quick(message: Message) -> None:
        seen[message.body] += 1

    queue = Queue("t", "broker-a", 0)
    leaver = await Consumer(node.address, "g", "t", slow, start="first").__aenter__()
    async with Producer(node.address) as producer:
        await producer.send("t", b"long")
        await started.wait()
        async with Consumer(node.address, "g", "t", quick, start="first") as stays:
            leaving = asyncio.create_task(leaver.__aexit__())
            group = node.broker.groups.obtain("g")
            await eventually(lambda: group.client_ids() == [stays.client_id])
            assert queue not in stays.assignment(), "the leaver still has it"
            release.set()
            await leaving
            await eventually(lambda: queue in stays.assignment())
            await producer.send("t", b"next")
            await eventually(lambda: seen[b"next"] == 1)
    assert seen == {b"long": 1, b"next": 1}


async def settled_pair(second: Consumer) -> None:
    await eventually(lambda: sum(queue.topic == "t" for queue in second.assignment()) == QUEUES // 2)


async def test_a_killed_members_queues_move_immediately_and_only_uncommitted_messages_are_redelivered(
    node: Node, wire: Wire
) -> None:
    await create_topic(wire, "t", QUEUES)
    watch = Watch(0)
    options: dict[str, Any] = {"start": "first", "drain_s": 0.01}
    options["limits"] = ClientLimits(idle_commit_s=3600.0)  # it dies before that
    async with Consumer(node.address, "g", "t", watch.handler("stays"), **options) as stays:
        options["limits"] = ClientLimits(idle_commit_s=3600.0, reconnect_s=3600.0)
        dies = await Consumer(node.address, "g", "t", watch.handler("dies"), **options).__aenter__()
        await settled(stays, dies)
        async with Producer(node.address) as producer:
            for number in range(80):
                await producer.send("t", b"%d" % number)
            await eventually(lambda: len(watch.seen) == 80)
            await dies.commit()
            for number in range(80, 96):
                await producer.send("t", b"%d" % number)
        await eventually(lambda: len(watch.seen) == 96)
        leases = [node.broker.groups.queue("g", "t", number).owner.holder for number in range(QUEUES)]
        (connection,) = {lease.session for lease in leases if lease and lease.client_id == dies.client_id}
        assert isinstance(connection, RemotingConnection)
        connection.abort()
        connection.was_closed_by_client = True  # as when its process is killed
        await settled(stays)
        await eventually(lambda: sum(watch.seen.values()) >= 96 + 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(0):  # it cannot hand over what it had
                await dies.stop()
    twice = {int(body) for body, times in watch.seen.items() if times > 1}
    assert twice
    assert min(twice) >= 80


async def test_different_subscriptions_in_one_group_lose_nothing(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    await create_topic(wire, "u", 4)
    watch = Watch(0)
    async with (
        Consumer(node.address, "g", "t", watch.handler("t"), start="first"),
        Consumer(node.address, "g", "u", watch.handler("u"), start="first"),
        Producer(node.address) as producer,
    ):
        for number in range(40):
            await producer.send("t", b"t%d" % number)
            await producer.send("u", b"u%d" % number)
        await eventually(lambda: len(watch.seen) == 80)
    assert set(watch.seen.values()) == {1}


async def test_a_topic_that_grows_is_read_from_the_start_of_its_new_queues(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    watch = Watch(0)
    limits = ClientLimits(route_interval_s=0.01)
    async with Consumer(node.address, "g", "t", watch.handler("a"), start="last", limits=limits) as consumer:
        await consumer.assigned()
        await create_topic(wire, "t", 4)
        async with Producer(node.address) as producer:
            await producer.send("t", b"grown", queue=Queue("t", "broker-a", 3))
        await eventually(lambda: watch.seen[b"grown"] == 1)


async def test_a_broker_that_restarts_keeps_its_members_and_nothing_comes_twice(nodes: Nodes, connect: Connect) -> None:
    home = await nodes.start(name="home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    await create_topic(await connect(guest.address), "t", QUEUES)
    watch = Watch(0)
    async with Producer(home.address, retries=5) as producer:
        await has_route(home)
        async with (
            Consumer(home.address, "g", "t", watch.handler("a"), start="first") as one,
            Consumer(home.address, "g", "t", watch.handler("b"), start="first") as two,
        ):
            await settled(one, two)
            before = one.assignment()
            for number in range(3):
                for part in range(20):
                    await producer.send("t", b"%d-%d" % (number, part))
                await eventually(lambda number=number: len(watch.seen) == 20 * (number + 1))  # type: ignore[misc]
                await guest.stop()  # with nothing of the last 20 committed
                await eventually(lambda: all(item.is_suspended for item in one.queues.values()))
                guest = await restart(nodes, guest)
                await eventually(
                    lambda: not any(item.is_suspended for item in [*one.queues.values(), *two.queues.values()])
                )
                await has_route(home)
            assert one.assignment() == before
    assert set(watch.seen.values()) == {1}
    assert len(watch.seen) == 60


async def test_a_lease_that_is_not_reclaimed_after_a_restart_ends(nodes: Nodes) -> None:
    home = await nodes.start(name="home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    guest.broker.topics.put(TopicConfig("t", 1, 1), 0)
    guest.broker.topics.ensure(TopicConfig("t", 1, 1), guest.broker.store.end)
    request = LockRequest("gone", "g", (Queue("t", "guest", 0),), True)
    guest.broker.locks.lock(request, peer())
    await guest.stop()
    again = await restart(nodes, guest, stands=True)
    assert again.broker.groups.owners("g") == {("t", 0): "gone"}
    again.clock.advance(HANDOVER_LEASE_S - LEASE_SWEEP_S)
    assert again.broker.groups.owners("g") == {("t", 0): "gone"}
    again.clock.advance(3 * LEASE_SWEEP_S)
    assert again.broker.groups.owners("g") == {}


@pytest.mark.parametrize("seed", range(int(os.environ.get("REBALANCE_SEEDS", "4"))))
async def test_members_and_brokers_that_come_and_go_at_random_lose_and_repeat_nothing(
    nodes: Nodes, connect: Connect, seed: int
) -> None:
    chance = random.Random(seed)
    home = await nodes.start(name="home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    for node in (home, guest):
        await create_topic(await connect(node.address), "t", 4)
    watch = Watch(0.001)
    members: list[Consumer] = []
    orderly = bool(seed % 2)

    async def join() -> None:
        name = f"m{chance.random()}"
        consumer = Consumer(home.address, "g", "t", watch.handler(name), start="first", orderly=orderly, concurrency=8)
        members.append(await consumer.__aenter__())

    async def leave() -> None:
        if len(members) > 1:
            await members.pop(chance.randrange(len(members))).__aexit__()

    async def restart_guest() -> None:
        nonlocal guest
        await guest.stop()
        guest = await restart(nodes, guest)

    await join()
    async with traffic(home, "t") as sent:
        for _ in range(12):
            actions = chance.choices([join, leave, restart_guest], weights=[4, 4, 2], k=chance.randint(1, 3))
            actions = [action for index, action in enumerate(actions) if action is not restart_guest or index == 0]
            await asyncio.gather(*(action() for action in actions))
            count = len(sent)
            await eventually(lambda count=count: len(sent) > count + chance.randint(0, 60))  # type: ignore[misc]
    await eventually(lambda: watch.seen.keys() >= set(sent))
    await asyncio.gather(*(member.__aexit__() for member in members))
    assert [body for body, times in watch.seen.items() if times > 1] == []
    assert watch.overlaps == [] or not orderly


async def test_members_that_are_refused_are_notified_when_the_queue_is_free(node: Node, connect: Connect) -> None:
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    watch = Watch(0)
    async with Consumer(node.address, "g", "t", watch.handler("a"), start="first") as first:
        await eventually(lambda: bool(first.assignment()))
    members = await wire.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert members.code == ResponseCode.SYSTEM_ERROR
    assert node.broker.groups.owners("g") == {}


# Passes of a rebalance alone: which queues are given up and asked for, and when the next pass comes.


T = [Queue("t", "a", number) for number in range(2)]
U = [Queue("u", "a", number) for number in range(2)]


def route(queues: int = 2) -> Route:
    return Route((QueueData("a", queues, queues, 6),), (BrokerData("a", {0: "a:1"}, "c"),))


class World:
    """The questions and words of a rebalance, by hand."""

    strategy_name, group, client_id = "AVG", "g", "me"
    limits = CLIENT_LIMITS

    def __init__(self) -> None:
        self.routes: dict[str, Route | None] = {"t": route(), "u": route()}
        self.known: dict[str, Route] = {}
        self.looked_up: list[str] = []
        self.shares: dict[str, Share | RocketletError | None] = {"t": Share(T, T, 1, []), "u": Share([], U, 2, [])}
        self.asked: list[tuple[str, list[Queue]]] = []
        self.registered = {"a:1"}
        self.told: list[str] = []
        self.owned: dict[Queue, Lease] = {}
        self.refused: set[Queue] = set()
        self.released: list[Queue] = []
        self.was_rebalanced = False  # when queues were asked for
        self.are_suspended = self.are_doubtful = self.are_releasing = False
        self.wake, self.rebalanced = asyncio.Event(), asyncio.Event()
        fake: Any = self
        self.rebalance = Rebalance(fake, ["t", "u"], fake, fake, fake, wake=self.wake, rebalanced=self.rebalanced)

    # The cluster

    def route(self, topic: str) -> Route | None:
        return self.known.get(topic)

    async def find_route(self, topic: str) -> Route | None:
        self.looked_up.append(topic)
        if topic not in self.routes:
            raise ConnectionFailed("no name server")
        found = self.routes[topic]
        if found is not None:
            self.known[topic] = found
        return found

    def masters(self) -> dict[str, str]:
        return {"a": "a:1"}

    # Shares

    async def of(self, topic: str, queues: list[Queue]) -> Share | None:
        self.asked.append((topic, queues))
        share = self.shares[topic]
        if isinstance(share, RocketletError):
            raise share
        return share

    # Heartbeats

    async def register(self, *, timeout_s: float) -> None:
        assert timeout_s == CLIENT_LIMITS.register_timeout_s
        self.told.append("register")

    def is_registered(self, address: str) -> bool:
        return address in self.registered

    def forget(self) -> None:
        self.told.append("forget")

    def send_if_changed(self) -> None:
        self.told.append("news")

    # Leases

    def release(self, queue: Queue) -> None:
        del self.owned[queue]
        self.released.append(queue)

    async def acquire(self, wanted: Iterable[Queue]) -> None:
        self.was_rebalanced = self.rebalanced.is_set()
        self.owned |= {queue: Lease(1) for queue in set(wanted) - self.owned.keys() - self.refused}

    async def reclaim(self) -> None:
        self.told.append("reclaim")

    # A pass

    async def passes(self, *, leaving: bool = False) -> float:
        """One pass; how long the next one waits for an event."""
        waits: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def wait() -> asyncio.Future[None]:
            if not waits.done():
                waits.set_result(self.rebalance._retry_s)
            return asyncio.get_running_loop().create_future()

        self.rebalance._wake = cast("asyncio.Event", SimpleNamespace(clear=lambda: None, wait=wait))
        running = asyncio.create_task(self.rebalance.run_forever(leaving=leaving))
        try:
            return await waits
        finally:
            running.cancel()


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_member_takes_its_share_and_is_rebalanced(world: World) -> None:
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert (set(world.owned), world.rebalanced.is_set()) == (set(T), True)
    assert world.asked == [("t", T), ("u", U)]
    assert world.told == ["register", "reclaim", "news"]


async def test_a_member_gives_up_what_is_no_more_its_share(world: World) -> None:
    await world.passes()
    world.shares["t"] = Share(T[:1], T, 2, [])
    world.are_releasing = True
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert (set(world.owned), world.released, world.rebalanced.is_set()) == ({T[0]}, [T[1]], False)
    world.are_releasing = False
    await world.passes()
    assert world.rebalanced.is_set()
    await world.passes()
    assert world.was_rebalanced, "nothing has changed"
    world.shares["t"] = Share(T, T, 1, [])
    await world.passes()
    assert not world.was_rebalanced


async def test_a_member_that_was_refused_a_queue_asks_again_soon(world: World) -> None:
    world.refused = {T[1]}
    world.rebalanced.set()
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert not world.rebalanced.is_set()


@pytest.mark.parametrize("why", ["are_suspended", "are_doubtful"])
async def test_a_member_in_doubt_asks_again_soon(world: World, why: str) -> None:
    setattr(world, why, True)
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert world.rebalanced.is_set() is (why == "are_doubtful")


async def test_a_broker_that_does_not_know_the_member_is_retried_immediately(world: World) -> None:
    world.registered.clear()
    assert await world.passes() == CLIENT_LIMITS.reconnect_s


async def test_what_is_not_known_stays_as_it_is(world: World) -> None:
    world.shares["u"] = Share(U[:1], U, 2, [])
    await world.passes()
    world.shares |= {"t": Share(T[:1], T, 2, []), "u": ConnectionFailed("gone")}
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert (set(world.owned), world.rebalanced.is_set()) == ({T[0], U[0]}, False)
    world.shares["u"] = None
    world.told.clear()
    await world.passes()
    assert "forget" in world.told, "the broker does not count it, so it must get another heartbeat"
    assert set(world.owned) == {T[0], U[0]}


async def test_a_missing_topic_is_named_once_and_a_retry_topic_never(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    retries = "%RETRY%g"
    world.routes |= {"u": None, retries: None}
    world.rebalance.add_topics(["u", retries])
    assert world.wake.is_set()
    for _ in range(2):
        assert await world.passes() == min(CLIENT_LIMITS.missing_route_interval_s, CLIENT_LIMITS.lock_retry_s)
    assert (world.rebalance.missing, caplog.text.count("topic_missing")) == ({"u"}, 1)
    assert set(world.owned) == set(T)
    world.routes["u"] = route()
    assert await world.passes() == CLIENT_LIMITS.missing_route_interval_s, "the retry topic comes with the first retry"
    assert (world.rebalance.missing, world.rebalanced.is_set()) == (set(), True)
    assert world.looked_up.count("u") == 3


async def test_a_topic_that_has_grown_is_looked_up_until_somebody_answers(world: World) -> None:
    await world.passes()
    world.looked_up.clear()
    world.rebalance.grown("strange")
    await world.passes()
    assert world.looked_up == []
    world.rebalance.grown("t")
    grown = world.routes.pop("t")
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert world.asked[-2:] == [("t", T), ("u", U)]
    world.routes["t"] = route(3)
    assert grown is not None
    assert await world.passes() == CLIENT_LIMITS.rebalance_interval_s
    assert world.asked[-2] == ("t", [*T, Queue("t", "a", 2)])
    assert world.looked_up == ["t", "t"]
    await world.passes()
    assert world.looked_up == ["t", "t"]


async def test_a_broker_that_only_others_know_is_looked_up_in_the_next_pass(world: World) -> None:
    strange = Queue("t", "b", 0)
    world.shares["t"] = Share([strange], [*T, strange], 2, [strange])
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    world.looked_up.clear()
    await world.passes()
    assert world.looked_up == ["t"]


async def test_a_result_is_logged_when_it_has_changed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rocketlet.membership")
    for _ in range(2):
        await world.passes()
    assert caplog.text.count("rebalanced") == 2, "for each topic one, also where nothing is its own"
    world.shares["t"] = Share(T[:1], T, 2, [])
    await world.passes()
    assert caplog.text.count("rebalanced") == 3


async def test_a_pass_that_fails_is_logged_and_retried_soon(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.shares["t"] = RocketletError("a fault")
    del world.shares["u"]
    assert await world.passes() == CLIENT_LIMITS.lock_retry_s
    assert caplog.text.count("rebalance_failed") == 1


async def test_a_member_that_leaves_takes_nothing_more(world: World) -> None:
    assert await world.passes(leaving=True) == CLIENT_LIMITS.rebalance_interval_s
    assert (world.told, world.owned) == (["register", "reclaim"], {})


async def test_an_event_starts_the_next_pass(world: World) -> None:
    running = asyncio.create_task(world.rebalance.run_forever())
    await asyncio.wait_for(world.rebalanced.wait(), 60)
    world.rebalanced.clear()
    world.wake.set()
    await asyncio.wait_for(world.rebalanced.wait(), 60)
    assert not world.wake.is_set()
    running.cancel()


# The queues of a consumer alone: pauses, and handlers that outlive an ownership.


ONE, TWO, THREE = (Queue("t", "a", number) for number in range(3))


class WorldAssignment:
    def __init__(self, **listeners: Any) -> None:
        self.pulled: list[Queue] = []
        self.resumed: list[Queue] = []
        listeners = {"on_assigned": None, "on_revoked": None} | listeners
        self.assignment = Assignment(
            cast("Puller", self), drain_s=60.0, on_resumed=lambda queue: self.resumed.append(queue.queue), **listeners
        )

    def pull(self, process_queue: ProcessQueue) -> None:
        self.pulled.append(process_queue.queue)

    def take(self, *queues: Queue) -> None:
        for queue in queues:
            self.assignment.take_queue(queue, 5, Lease(1))

    def paused(self) -> set[Queue]:
        return {queue for queue, found in self.assignment.queues.items() if found.is_paused}


@pytest.fixture
async def world_assignment() -> WorldAssignment:
    return WorldAssignment()


async def test_a_queue_is_pulled_as_soon_as_it_is_taken(world_assignment: WorldAssignment) -> None:
    world_assignment.take(ONE)
    assert (world_assignment.pulled, world_assignment.resumed) == ([ONE], [])
    assert (
        world_assignment.assignment.some(None)
        == world_assignment.assignment.some([ONE])
        == [world_assignment.assignment.queues[ONE]]
    )
    with pytest.raises(ConfigError, match="does not own t"):
        world_assignment.assignment.some([ONE, TWO])


async def test_a_pause_of_all_holds_for_those_that_come_and_one_of_some_does_not(
    world_assignment: WorldAssignment,
) -> None:
    world_assignment.take(ONE, TWO)
    world_assignment.assignment.pause([ONE])
    world_assignment.take(THREE)
    assert world_assignment.paused() == {ONE}
    world_assignment.assignment.pause(None)
    world_assignment.assignment.pause([ONE])
    assert world_assignment.paused() == {ONE, TWO, THREE}
    world_assignment.assignment.resume([ONE])
    assert world_assignment.paused() == {TWO, THREE}
    world_assignment.take(ONE)
    assert world_assignment.paused() == {ONE, TWO, THREE}, "all are paused, also those that come"
    world_assignment.pulled.clear()
    world_assignment.resumed.clear()
    world_assignment.assignment.resume(None)
    world_assignment.assignment.resume([ONE])
    assert (world_assignment.paused(), world_assignment.resumed) == (set(), [ONE, TWO, THREE, ONE])
    assert world_assignment.pulled == world_assignment.resumed
    world_assignment.take(ONE)
    assert world_assignment.paused() == set()


async def test_handlers_of_a_lost_queue_are_waited_for(world_assignment: WorldAssignment) -> None:
    world_assignment.take(ONE, TWO)
    lost = world_assignment.assignment.queues[ONE]
    lost.enter()
    for queue in (ONE, TWO, THREE):
        world_assignment.assignment.lose_queue(queue)
    assert [world_assignment.assignment.is_running(queue) for queue in (ONE, TWO)] == [True, False]
    assert (lost.is_dropped, world_assignment.assignment.queues) == (True, {})
    ending = asyncio.create_task(world_assignment.assignment.ended(ONE))
    await asyncio.sleep(0)
    assert not ending.done()
    lost.leave()
    await ending
    assert not world_assignment.assignment.is_running(ONE)


async def test_a_queue_is_given_up_when_its_handlers_have_ended(world_assignment: WorldAssignment) -> None:
    world_assignment.take(ONE)
    queue = world_assignment.assignment.queues[ONE]
    queue.enter()
    giving = asyncio.create_task(world_assignment.assignment.give_queue(ONE))
    await asyncio.sleep(0)
    assert (queue.is_stopped, giving.done()) == (True, False)
    queue.leave()
    assert await giving == 5
    assert await world_assignment.assignment.give_queue(TWO) is None
    world_assignment.assignment.lose_queue(ONE)


async def test_a_queue_that_is_lost_while_it_is_given_up_has_nothing_to_commit(
    world_assignment: WorldAssignment,
) -> None:
    world_assignment.take(ONE)
    queue = world_assignment.assignment.queues[ONE]
    queue.enter()
    giving = asyncio.create_task(world_assignment.assignment.give_queue(ONE))
    await asyncio.sleep(0)
    world_assignment.assignment.lose_queue(ONE)
    queue.leave()
    assert await giving is None


async def test_each_queue_is_revoked_once() -> None:
    revoked: list[set[Queue]] = []
    world_assignment = WorldAssignment(on_revoked=revoked.append)
    world_assignment.take(ONE, TWO)
    await world_assignment.assignment.give_queue(ONE)
    world_assignment.assignment.lose_queue(ONE)
    world_assignment.assignment.lose_queue(TWO)
    assert revoked == [{ONE}, {TWO}]


async def test_a_queue_is_suspended_until_its_broker_is_back(world_assignment: WorldAssignment) -> None:
    world_assignment.take(ONE)
    for change in (world_assignment.assignment.suspend_queue, world_assignment.assignment.resume_queue):
        change(TWO)
    world_assignment.assignment.suspend_queue(ONE)
    assert world_assignment.assignment.queues[ONE].is_suspended
    world_assignment.pulled.clear()
    world_assignment.assignment.resume_queue(ONE)
    assert (
        world_assignment.assignment.queues[ONE].is_suspended,
        world_assignment.pulled,
        world_assignment.resumed,
    ) == (False, [ONE], [ONE])


async def test_pulls_that_carry_offsets_are_known(world_assignment: WorldAssignment) -> None:
    world_assignment.take(ONE)
    assert [world_assignment.assignment.is_pull_committing(queue) for queue in (ONE, TWO)] == [False, False]
    world_assignment.assignment.queues[ONE].pull_commits = True
    assert world_assignment.assignment.is_pull_committing(ONE)


async def test_the_end_waits_for_what_runs_beside(world_assignment: WorldAssignment) -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append(1)

    world_assignment.assignment.spawn(work())
    await world_assignment.assignment.finished()
    assert done == [1]


# A member's share of a topic: what a broker sends unasked is used while it holds, and everything else is asked for.


A = [Queue("t", "a", number) for number in range(2)]
B = [Queue("t", "b", number) for number in range(2)]
MINE: Ext = {"index": "0", "count": "2"}


class Broker:
    """A connection whose answers are made beforehand. `asked`: the fields of what it was asked."""

    def __init__(self, ext: Ext, body: bytes = b"", error: RocketletError | None = None) -> None:
        self.answer = Frame(0, 0, ext, body)
        self.error = error
        self.asked: list[Ext] = []

    async def request(self, code: int, ext: Ext) -> Frame:
        self.asked.append(ext)
        if self.error is not None:
            raise self.error
        return self.answer


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rocketlet.client.member.membership.clock_s", clock)
    return clock


def shares_at(strategy: Strategy = AVG, **brokers: Broker) -> Shares:
    async def broker(name: str) -> Broker:
        return brokers[name]

    return Shares(cast("ClusterView", SimpleNamespace(connected=brokers.get, broker=broker)), "g", "me", strategy)


def tell(shares: Shares, broker: Broker, ext: dict[str, object]) -> None:
    shares.record_notification(cast("Connection", broker), ext)


def place(position: int, members: int, queues: int) -> dict[str, object]:
    return {EXT_PLACES: group_bodies.encode_places({"t": Place(position, members, queues)})}


def share(members: int, queues: int, **numbers: list[int]) -> dict[str, object]:
    return {EXT_SHARES: group_bodies.encode_shares({"t": BrokerShare(members, queues, numbers)})}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("position", "mine"), [(0, A[:1]), (1, A[1:])])
async def test_a_member_that_gets_its_place_asks_nobody(position: int, mine: list[Queue]) -> None:
    broker = Broker(MINE)
    shares = shares_at(a=broker)
    tell(shares, broker, place(position, 2, 2))
    assert await shares.of("t", A) == Share(mine, A, 2, [])
    assert broker.asked == []


@pytest.mark.usefixtures("clock")
async def test_a_member_that_gets_its_share_asks_nobody() -> None:
    broker = Broker(MINE)
    shares = shares_at(STICKY, a=broker)
    tell(shares, broker, share(2, 2, a=[1]))
    assert await shares.of("t", A) == Share(A[1:], A, 2, [])
    assert broker.asked == []


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (AVG, place(1, 2, 3)),  # the others see more queues
        (AVG, place(-1, 2, 2)),  # it does not count
        (STICKY, share(2, 3, a=[1])),
        (STICKY, place(1, 2, 2)),  # no strategy by position
    ],
)
async def test_news_that_do_not_fit_are_not_believed(strategy: Strategy, told: dict[str, object]) -> None:
    broker = Broker(MINE)
    shares = shares_at(strategy, a=broker)
    tell(shares, broker, told)
    assert await shares.of("t", A) == Share(A[:1], A, 2, [])
    assert len(broker.asked) == 1


async def test_news_are_believed_for_a_while_from_the_broker_that_would_be_asked(clock: Clock) -> None:
    one, other = Broker(MINE), Broker(MINE)
    shares = shares_at(a=one, b=other)
    tell(shares, one, place(1, 2, 4))
    await shares.of("t", A + B)
    clock.now_s += 9.9
    await shares.of("t", A + B)
    assert one.asked == []
    clock.now_s += 0.2
    await shares.of("t", A + B)
    assert len(one.asked) == 1, "it is old"
    tell(shares, other, place(1, 2, 4))
    await shares.of("t", A + B)
    assert len(one.asked) == 2, "it is another broker's"
    assert other.asked == []


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("strategy", "told"), [(AVG, place(1, 2, 2)), (STICKY, share(2, 2, a=[1]))])
async def test_the_next_news_of_a_broker_take_the_place_of_all_earlier_ones(
    strategy: Strategy, told: dict[str, object]
) -> None:
    broker, other = Broker(MINE), Broker(MINE)
    shares = shares_at(strategy, a=broker)
    tell(shares, broker, told)
    tell(shares, other, dict.fromkeys(told, "{}"))
    await shares.of("t", A)
    assert broker.asked == [], "another broker's news are no reason"
    tell(shares, broker, {})
    await shares.of("t", A)
    assert broker.asked == [], "it says nothing of places"
    tell(shares, broker, dict.fromkeys(told, "{}"))
    await shares.of("t", A)
    assert len(broker.asked) == 1, "it has none any more"


@pytest.mark.parametrize(("strategy", "detail"), [(AVG, "position"), (STICKY, "share"), (CONSISTENT_HASH, "members")])
async def test_a_member_asks_for_as_much_as_its_strategy_needs(strategy: Strategy, detail: str) -> None:
    body = group_bodies.encode_members(["you", "me"])
    broker = Broker({}, body)
    found = await shares_at(strategy, a=broker).of("t", A)
    assert found == Share(strategy.allocate("me", A, ["me", "you"]), A, 2, [])
    seen = {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues({"a": 2})} if strategy is STICKY else {}
    assert broker.asked == [{"consumerGroup": "g", "topic": "t", EXT_DETAIL: detail} | seen]


@pytest.mark.parametrize("answer", [({"index": "-1", "count": "2"}, b""), ({}, group_bodies.encode_members(["you"]))])
async def test_a_member_that_its_broker_does_not_count_has_no_share(answer: tuple[Ext, bytes]) -> None:
    assert await shares_at(a=Broker(*answer)).of("t", A) is None


@pytest.mark.parametrize("strategy", [AVG, STICKY])
async def test_a_place_is_as_good_as_a_list(strategy: Strategy) -> None:
    assert await shares_at(strategy, a=Broker({"index": "1", "count": "2"})).of("t", A) == Share(A[1:], A, 2, [])


async def test_a_share_that_the_broker_has_made_counts_before_a_place() -> None:
    answer = cast("Ext", {**MINE, **share(3, 2, a=[0, 1])})
    assert await shares_at(STICKY, a=Broker(answer)).of("t", A) == Share(A, A, 3, [])


async def test_queues_that_only_others_know_are_shared_out_too() -> None:
    seen = {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues({"a": 2, "b": 2})}
    share = await shares_at(a=Broker({"index": "1", "count": "2", **seen})).of("t", A)
    assert share == Share(B, A + B, 2, B)


@pytest.mark.parametrize("how", [ConnectionFailed("gone"), RequestTimeout("late"), BrokerRefused(1, 1, "no", "a")])
async def test_another_broker_is_asked_when_one_does_not_answer(clock: Clock, how: RocketletError) -> None:
    silent, other = Broker({}, error=how), Broker(MINE)
    shares = shares_at(a=silent, b=other)
    await shares.of("t", A + B)
    await shares.of("t", A + B)
    # Only a broker that is waited for is the last for a while.
    assert (len(silent.asked), len(other.asked)) == (1 if isinstance(how, RequestTimeout) else 2, 2)
    clock.now_s += 10.1
    await shares.of("t", A + B)
    assert len(silent.asked) == (2 if isinstance(how, RequestTimeout) else 3)


@pytest.mark.usefixtures("clock")
async def test_a_broker_that_speaks_again_is_asked_first_again() -> None:
    silent, other = Broker({}, error=RequestTimeout("late")), Broker(MINE)
    shares = shares_at(STICKY, a=silent, b=other)
    await shares.of("t", A + B)
    tell(shares, silent, share(2, 4, a=[1]))
    assert await shares.of("t", A + B) == Share(A[1:], A + B, 2, []), (
        "a newcomer asks it, and is notified of its shares"
    )
    assert len(other.asked) == 1


async def test_a_topic_without_brokers_has_no_share() -> None:
    with pytest.raises(ConnectionFailed, match="no broker of the topic t is known"):
        await shares_at().of("t", [])


async def test_the_last_fault_is_reported_when_nobody_answers() -> None:
    shares = shares_at(a=Broker({}, error=ConnectionFailed("first")), b=Broker({}, error=ConnectionFailed("second")))
    with pytest.raises(ConnectionFailed, match="second"):
        await asyncio.wait_for(shares.of("t", A + B), 60)
