"""The hand-over: no message twice and none lost while members join and leave, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from rocketlet.broker.config import HANDOVER_LEASE_S, LEASE_SWEEP_S
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import ClientLimits
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import LockRequest
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


async def test_the_others_prepare_while_a_leaving_members_handlers_end(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
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
            group = node.broker.groups.get("g")
            assert group is not None
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
        leases = [node.broker.groups.queue("g", "t", number).lease for number in range(QUEUES)]
        (connection,) = {lease.connection for lease in leases if lease and lease.client_id == dies.client_id}
        assert connection is not None
        connection.abort()  # as when its process is killed
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
