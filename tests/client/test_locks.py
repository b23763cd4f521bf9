"""A lock is given back whatever becomes of who asked for it: Apache's broker would keep it for 60 s, and nobody reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from rocketlet.client import Consumer, Message
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.consuming.handling import MessageHandler
from rocketlet.client.member.membership import Share, Shares
from rocketlet.client.member.offsets import GroupOffsets
from rocketlet.client.wire.connection import Access
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue

from ..conftest import Connect, Node, Nodes, create_topic, eventually
from ..support.apache_locks import AS_APACHES, ApacheLocks, at_once
from ..support.handlers import Inbox, fill
from ..support.turns import passed
from .conftest import restart

LOCK, UNLOCK, QUERY = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ, RequestCode.QUERY_CONSUMER_OFFSET


@pytest.fixture
def locks() -> Iterator[ApacheLocks]:
    locks = ApacheLocks()
    with locks.installed():
        yield locks


@pytest.fixture
async def apache(locks: ApacheLocks, nodes: Nodes) -> Node:
    return await nodes.start()


IMPATIENT = ClientLimits(lock_timeout_s=0.2, deadline_sweep_s=0.01, lock_retry_s=0.01, route_interval_s=0.01)
"""A lock request is given up immediately."""
FORGETFUL = replace(IMPATIENT, hand_over_timeout_s=0.2)
"""An answer that is late does not count any more, either."""


class Held:
    """Requests of one code that wait until they are released."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.waiting: list[Callable[[], None]] = []

    def run(self, code: int, work: Callable[[], None]) -> None:
        if code == self.code:
            self.waiting.append(work)
        else:
            work()

    def let_go(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def member(
    node: Node, handler: MessageHandler | None = None, access: Access = AS_APACHES, limits: ClientLimits = CLIENT_LIMITS
) -> Consumer:
    return Consumer(node.address, "g", "t", handler or Inbox(), start="first", access=access, limits=limits)


def ids(*consumers: Consumer) -> set[str]:
    return {consumer.client_id for consumer in consumers}


async def has_left(consumer: Consumer) -> None:
    """Wait until a member that stops acquires no more queues."""
    await eventually(lambda: consumer.has_ended)
    await passed()


async def test_a_member_that_leaves_while_it_looks_up_where_to_begin_unlocks(locks: ApacheLocks, apache: Node) -> None:
    await fill(apache, 1)
    held = Held(QUERY)
    locks.run = held.run
    async with member(apache):
        await eventually(lambda: bool(held.waiting))
        assert locks.owners()
    assert locks.owners() == {}


async def test_an_unlock_does_not_overtake_a_lock_that_is_under_way(locks: ApacheLocks, apache: Node) -> None:
    await fill(apache, 1)
    held = Held(LOCK)
    locks.run = held.run
    async with member(apache):
        await eventually(lambda: bool(held.waiting))
        leaver = await member(apache, limits=ClientLimits(route_interval_s=0.01)).__aenter__()
        await eventually(lambda: len(held.waiting) > 1)
        leaving = asyncio.create_task(leaver.stop())
        await has_left(leaver)
        await apache.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2)
        locks.run = at_once
        held.let_go()
        await leaving
        assert leaver.client_id not in locks.owners().values()
        await eventually(lambda: ("t", 0) in locks.owners())
    assert locks.owners() == {}


async def test_an_unlock_does_not_overtake_a_lock_that_was_given_up(locks: ApacheLocks, apache: Node) -> None:
    await fill(apache, 1)
    held = Held(LOCK)
    locks.run = held.run
    leaver = await member(apache, limits=IMPATIENT).__aenter__()
    await eventually(lambda: len(held.waiting) > 1)  # it has asked again
    leaving = asyncio.create_task(leaver.stop())
    await has_left(leaver)
    await apache.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2)  # meanwhile its other requests arrive
    locks.run = at_once
    held.let_go()
    await leaving
    assert locks.owners() == {}


async def test_a_slow_unlock_is_said_once(
    locks: ApacheLocks, apache: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(await connect(apache.address), "t", 2)
    passes: Counter[str] = Counter()
    share_of = Shares.of

    async def counted(self: Shares, topic: str, queues: list[Queue]) -> Share | None:
        passes[self.client_id] += topic == "t"
        return await share_of(self, topic, queues)

    monkeypatch.setattr(Shares, "of", counted)
    async with member(apache, limits=IMPATIENT) as first:
        await eventually(lambda: {("t", 0), ("t", 1)} <= owned(first))
        slow = Held(UNLOCK)
        locks.run = slow.run
        async with member(apache, limits=IMPATIENT):
            await eventually(lambda: bool(slow.waiting) and len(owned(first)) < 3)
            before, said = passes[first.client_id], len(slow.waiting)
            await eventually(lambda: passes[first.client_id] > before + 5)
            assert len(slow.waiting) == said == 1
            locks.run = at_once
            slow.let_go()
    assert locks.owners() == {}


async def test_an_unlock_that_is_not_answered_is_said_again(locks: ApacheLocks, apache: Node, connect: Connect) -> None:
    await create_topic(await connect(apache.address), "t", 2)
    async with member(apache, limits=FORGETFUL) as first:
        await eventually(lambda: list(locks.owners().values()).count(first.client_id) >= 2)
        lost = Held(UNLOCK)
        locks.run = lost.run
        async with member(apache, limits=FORGETFUL) as second:
            await eventually(lambda: bool(lost.waiting))
            locks.run = at_once
            await eventually(lambda: {locks.owners().get(("t", number)) for number in range(2)} == ids(first, second))


def owned(consumer: Consumer) -> set[tuple[str, int]]:
    return {(queue.topic, queue.queue_id) for queue in consumer.assignment()}


@pytest.mark.parametrize("is_cut", [False, True], ids=["late", "cut"])
async def test_an_unlock_that_was_given_up_does_not_undo_a_later_lock(
    locks: ApacheLocks, apache: Node, connect: Connect, is_cut: bool
) -> None:
    await create_topic(await connect(apache.address), "t", 2)
    both = {("t", 0), ("t", 1)}
    async with member(apache, limits=FORGETFUL) as first:
        await eventually(lambda: both <= owned(first))
        held = Held(UNLOCK)
        locks.run = held.run
        async with member(apache, limits=FORGETFUL):
            await eventually(lambda: bool(held.waiting))
        # From here on the first one wants the queue again that it gave up.
        if is_cut:
            for connection in list(apache.server.connections):
                connection.abort()
        said = len(held.waiting)
        await eventually(lambda: both <= owned(first) or len(held.waiting) > said + 2)
        locks.run = at_once
        held.let_go()
        assert owned(first) <= locks.owners().keys()
        if is_cut:
            await eventually(lambda: both <= owned(first))
            assert owned(first) <= locks.owners().keys()
    assert locks.owners() == {}


async def test_a_lock_that_was_granted_to_a_connection_that_broke_is_undone(locks: ApacheLocks, apache: Node) -> None:
    await fill(apache, 1)
    held = Held(LOCK)
    locks.run = held.run
    async with member(apache, limits=IMPATIENT) as leaver:
        await eventually(lambda: bool(held.waiting))
        former = apache.server.connections
        apache.break_connections()
        await eventually(lambda: not set(former) & set(apache.server.connections))
        held.let_go()
        assert leaver.client_id in locks.owners().values()  # and what it asks again waits
    assert locks.owners() == {}


async def stopped_in_vain(node: Node, access: Access) -> None:
    """A member whose handler never ends, and whose stop is cancelled."""
    begun = asyncio.Event()

    async def endless(message: Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    await fill(node, 1)
    others = asyncio.all_tasks()
    consumer = await member(node, endless, access).__aenter__()
    await begun.wait()
    stopping = asyncio.create_task(consumer.stop())
    await has_left(consumer)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await eventually(lambda: asyncio.all_tasks() <= others)  # some of which may have ended meanwhile


async def test_a_stop_that_is_cancelled_ends_the_member_at_apaches_broker(locks: ApacheLocks, apache: Node) -> None:
    await stopped_in_vain(apache, AS_APACHES)
    await eventually(lambda: not locks.owners())


async def test_a_stop_that_is_cancelled_while_locks_are_renewed_unlocks_all(locks: ApacheLocks, apache: Node) -> None:
    """Apache's broker would process an unlock before the renewal, so unlocks wait for its response."""
    await fill(apache, 1)
    held = Held(LOCK)
    async with AsyncExitStack() as stack:
        limits = replace(CLIENT_LIMITS, lock_interval_s=0.0, lease_tick_s=0.01)
        consumer = await stack.enter_async_context(member(apache, limits=limits))
        await consumer.assigned()
        locks.run = held.run
        await eventually(lambda: bool(held.waiting))
        stopping = asyncio.create_task(consumer.stop())
        await eventually(lambda: any(task.get_name().startswith("hand over") for task in asyncio.all_tasks()))
        await passed()
        assert locks.owners()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await eventually(lambda: not locks.owners())


async def test_a_stop_that_is_cancelled_ends_the_member(node: Node) -> None:
    await stopped_in_vain(node, Access())
    await eventually(lambda: not node.broker.groups.owners("g"))
    inbox = Inbox()
    async with member(node, inbox, Access()):
        await eventually(lambda: inbox.bodies == [b"0"])


async def test_a_lock_that_a_restarted_broker_remembers_is_undone(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_up, never = asyncio.Event(), asyncio.Event()

    async def begin(*about: object) -> int:
        looks_up.set()
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(GroupOffsets, "begin", begin)
    home = await nodes.start(name="home")
    guest = await nodes.start(name="guest", name_servers=(home.address,))
    await create_topic(await connect(guest.address), "t", 1)
    async with member(home, access=Access()) as leaver:
        await looks_up.wait()
        await guest.stop()
        guest = await restart(nodes, guest, stands=True)
        assert leaver.client_id in guest.broker.groups.owners("g").values()
    assert guest.broker.groups.owners("g") == {}
