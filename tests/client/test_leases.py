"""A lease is true at the member: nothing begins after it, what is given up is renewed, and nothing runs twice at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from rocketlet.broker.groups.owners import Claim
from rocketlet.client import Consumer, Message, Producer
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits, PullLimits
from rocketlet.client.consuming.handling import MessageHandler
from rocketlet.client.errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from rocketlet.client.member.leases import Leases, MemberLocks
from rocketlet.client.member.membership import Share, Shares
from rocketlet.client.message import Lease
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest, decode_lock_request, encode_locked
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue

from ..client.conftest import tasks_named
from ..conftest import Node, Wire, create_topic, eventually, peer
from ..support.handlers import Inbox, fill
from ..support.turns import passed

QUEUE = Queue("t", "broker-a", 0)
PLACE = ("t", 0)


def lease_of(node: Node, queue_id: int = 0) -> Claim:
    lease = node.broker.groups.queue("g", "t", queue_id).owner.holder
    assert lease is not None
    return lease


def drop_lease(node: Node) -> None:
    """As if the owner's connection was gone, of which it knows nothing."""
    connection = lease_of(node).session
    assert connection is not None
    node.broker.locks.connection_gone(connection)


class Gate:
    """A handler that counts what begins, and ends nothing until it is opened."""

    def __init__(self) -> None:
        self.begun: list[Message] = []
        self.at_once = 0
        self.most_at_once = 0
        self.open = asyncio.Event()

    async def handle(self, message: Message) -> None:
        self.begun.append(message)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.open.wait()
        self.at_once -= 1


QUICK = ClientLimits(lease_tick_s=0.01, lock_interval_s=0.01)
"""Leases are renewed all the time."""


async def send(node: Node, count: int) -> None:
    async with Producer(node.address) as producer:
        for number in range(count):
            await producer.send("t", b"%d" % number)


def of_topic(consumer: Consumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "t"}


def renewed_s(node: Node, queue_id: int = 0) -> float:
    return node.broker.groups.queue("g", "t", queue_id).renewed_s


async def seen_renewals(node: Node, count: int, queue_id: int = 0) -> None:
    for _ in range(count):
        before = renewed_s(node, queue_id)
        await eventually(lambda before=before: renewed_s(node, queue_id) > before)  # type: ignore[misc]


async def test_a_member_that_leaves_renews_its_leases_while_its_handlers_run(node: Node, one_queue: None) -> None:
    await send(node, 1)
    gate = Gate()
    other = Gate()
    other.open.set()
    leaver = await Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK).__aenter__()
    await eventually(lambda: bool(gate.begun))
    async with Consumer(node.address, "g", "t", other.handle, start="first", limits=QUICK) as stays:
        leaving = asyncio.create_task(leaver.__aexit__())
        await eventually(lambda: QUEUE not in leaver.assignment())
        await seen_renewals(node, 3)
        assert node.broker.groups.owners("g")[PLACE] == leaver.client_id
        gate.open.set()
        await leaving
        await eventually(lambda: QUEUE in stays.assignment())
        assert other.begun == []
    assert node.broker.offsets.get("g", "t", 0) == 1


async def test_what_stays_is_renewed_while_another_queue_is_handed_over_and_asked_for_all_the_time(
    node: Node, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pass of the rebalance renews what is handed over. That is no renewal of what stays."""
    await create_topic(wire, "t", 2)
    async with Producer(node.address) as producer:
        for queue_id in range(2):
            await producer.send("t", b"x", queue=Queue("t", "broker-a", queue_id))
    gate = Gate()
    limits = ClientLimits(lease_tick_s=0.01, lock_interval_s=0.5, rebalance_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits) as gives:
        await eventually(lambda: len(gate.begun) == 2)
        async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits):
            await eventually(lambda: len(of_topic(gives)) == 1)
            (stays,) = of_topic(gives)
            await seen_renewals(node, 2, stays.queue_id)
            gate.open.set()
    assert "lease_over" not in caplog.text


async def test_a_renewal_names_nothing_whose_unlock_is_under_way(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has unlocked it, and the answer is on its way: a renewal would get the answer that the lease had ended."""
    await create_topic(wire, "t", 2)
    send_batch = MemberLocks._send_hand_over
    is_done, is_heard = asyncio.Event(), asyncio.Event()

    async def heard_later(self: MemberLocks, broker_name: str, batch: Any) -> set[Queue]:
        done = await send_batch(self, broker_name, batch)
        is_done.set()
        await is_heard.wait()
        return done

    monkeypatch.setattr(MemberLocks, "_send_hand_over", heard_later)
    caplog.set_level("INFO", "rocketlet.membership")
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK) as stays:
        await eventually(lambda: len(stays.assignment()) > 1)
        async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=QUICK):
            await is_done.wait()
            await seen_renewals(node, 3)
            is_heard.set()
            await stays.assigned()
    assert "queue_lost_in_hand_over" not in caplog.text


async def test_nothing_begins_when_the_lease_is_over_by_the_members_clock(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process, or the machine, was stopped: nothing has run meanwhile, no timer and no renewal."""
    await send(node, 3)
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", concurrency=1) as consumer:
        await eventually(lambda: bool(gate.begun))
        drop_lease(node)
        epoch = node.broker.locks.lock(LockRequest("thief", "g", (QUEUE,), True), peer())[QUEUE]
        (message,) = gate.begun
        assert not message.lease_lost
        real = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 30)
        assert message.lease_lost, "its handler can know before anything else runs"
        assert 0 < message.epoch < epoch
        gate.open.set()
        await eventually(lambda: QUEUE not in consumer.assignment())
        assert len(gate.begun) == 1, "the next one is the new owner's"
    assert node.broker.offsets.get("g", "t", 0) == 0, "where the group began, no more"


async def test_a_member_whose_broker_was_silent_continues_where_it_was(node: Node, one_queue: None) -> None:
    await send(node, 3)
    gate = Gate()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", concurrency=1, limits=QUICK) as consumer:
        await eventually(lambda: bool(gate.begun))
        lease = consumer.queues[QUEUE].lease
        lease.ends_s = 0.0
        assert gate.begun[0].lease_lost
        await eventually(lambda: not lease.is_over)
        gate.open.set()
        await eventually(lambda: len(gate.begun) == 3)
        assert consumer.queues[QUEUE].lease is lease
    assert [message.queue_offset for message in gate.begun] == [0, 1, 2]


@pytest.mark.usefixtures("clock_stands")
async def test_nothing_begins_when_its_connection_is_gone_also_if_the_broker_has_moved(
    node: Node, one_queue: None
) -> None:
    gate = Gate()
    limits = ClientLimits(route_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        node.broker.advertise("127.0.0.1:1", None)
        await node.served(RequestCode.GET_ROUTEINFO_BY_TOPIC, 2)
        assert consumer.queues[QUEUE].may_begin
        node.break_connections()
        await eventually(lambda: not consumer.queues[QUEUE].may_begin)
        node.broker.advertise(node.address, None)


async def test_a_queue_stays_its_owner_s_when_its_broker_gets_another_address(
    node: Node, one_queue: None, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    gate.open.set()
    limits = ClientLimits(route_interval_s=0.01)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", limits=limits):
        await send(node, 1)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 1)
        lock = lease_of(node)
        former, epoch = lock.session, lock.epoch
        port = node.address.rpartition(":")[2]
        node.broker.advertise(f"localhost:{port}", None)
        await eventually(lambda: lease_of(node).session is not former)
        await send(node, 2)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 3)
        assert former is not None
        former.abort()
        await eventually(lambda: former not in node.server.connections)
        await send(node, 1)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 4)
        assert [message.epoch for message in gate.begun] == [epoch] * 4
        assert "queue_lost" not in caplog.text


async def test_a_queue_is_taken_again_only_when_its_earlier_handlers_have_ended(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(node, 1)
    gate = Gate()
    passes: Counter[str] = Counter()
    share_of = Shares.of

    async def counted(self: Shares, topic: str, queues: list[Queue]) -> Share | None:
        passes[topic] += 1
        return await share_of(self, topic, queues)

    monkeypatch.setattr(Shares, "of", counted)
    async with Consumer(node.address, "g", "t", gate.handle, start="first", orderly=True, limits=QUICK) as consumer:
        await eventually(lambda: bool(gate.begun))
        drop_lease(node)
        await eventually(lambda: QUEUE not in consumer.assignment())
        before = passes["t"]
        await eventually(lambda: passes["t"] > before + 2)
        assert PLACE not in node.broker.groups.owners("g")
        gate.open.set()
        await eventually(lambda: len(gate.begun) == 2)
    assert gate.most_at_once == 1


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts a suspended machine"
)
def test_the_clock_continues_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert [Lease(1, ends_s).is_over for ends_s in (6.9, 7.0, 7.1)] == [True, True, False]


NEVER_S = 300.0  # the longest commit_interval_s


async def test_a_queue_that_falls_idle_is_committed_immediately(node: Node, one_queue: None) -> None:
    gate = Gate()
    gate.open.set()
    async with Consumer(node.address, "g", "t", gate.handle, start="first", commit_interval_s=NEVER_S):
        await send(node, 5)
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 5)


async def test_pulls_carry_how_far_a_queue_is_handled(node: Node, one_queue: None) -> None:
    """So a member that is killed repeats what was in its handlers, and what one pull brought."""
    await send(node, 40)
    release = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.queue_offset == 30:
            await release.wait()

    limits = PullLimits(batch_size=4, messages=4)
    member = Consumer(
        node.address, "g", "t", handle, pull=limits, start="first", commit_interval_s=NEVER_S, concurrency=1
    )
    async with member:
        await eventually(lambda: 30 - 8 <= (node.broker.offsets.get("g", "t", 0) or 0) <= 30)
        release.set()
        await eventually(lambda: node.broker.offsets.get("g", "t", 0) == 40)


async def test_several_queues_are_committed_in_one_request(node: Node, four_queues: None) -> None:
    """One of them is another's by now: it is lost, and the others are committed all the same."""
    queues = [Queue("t", "broker-a", number) for number in range(4)]
    async with Producer(node.address) as producer:
        for queue in queues:
            await producer.send("t", b"1", queue=queue)
    handled: list[int] = []
    revoked: list[set[Queue]] = []
    alone = node.broker.request_times[RequestCode.UPDATE_CONSUMER_OFFSET]
    member = Consumer(
        node.address,
        "g",
        "t",
        collect(handled),
        start="first",
        commit_interval_s=NEVER_S,
        on_revoked=revoked.append,
        limits=ClientLimits(idle_commit_s=NEVER_S),
    )
    async with member:
        await eventually(lambda: sorted(handled) == [0, 1, 2, 3])
        before = sum(alone.counts)
        await member.commit()
        assert sum(alone.counts) == before
        assert [node.broker.offsets.get("g", "t", number) for number in range(4)] == [1, 1, 1, 1]
        async with Producer(node.address) as producer:
            for queue in queues:
                await producer.send("t", b"2", queue=queue)
        await eventually(lambda: sorted(handled) == [0, 0, 1, 1, 2, 2, 3, 3])
        node.broker.locks.end("g", "t", 0)
        await member.commit()
        assert revoked == [{queues[0]}]
        assert [node.broker.offsets.get("g", "t", number) for number in range(1, 4)] == [2, 2, 2]
        assert sum(alone.counts) <= before + 1, "only the refused one is tried alone, to get the reason"


def collect(into: list[int]) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        into.append(message.queue_id)

    return handle


# Leases of a member on their own, at brokers that answer as the test orders: what a member requests, reports and
# keeps.


A, B = (Queue("t", "a", number) for number in range(2))
ELSEWHERE = Queue("t", "b", 0)
GONE = ConnectionFailed("gone")
NEVER_S_LEASES_ALONE = 3600.0
FENCED = BrokerRefused(Code.UPDATE_CONSUMER_OFFSET, ResponseCode.NO_PERMISSION, "another's", "a:1")
FINAL = BrokerRefused(Code.UPDATE_CONSUMER_OFFSET, ResponseCode.SYSTEM_ERROR, "the queue is gone", "a:1")


class World:
    """Brokers a and b, the heartbeats, the offsets and the user of one member's leases."""

    is_open = speaks_msgpack = True

    def __init__(self, **limits: Any) -> None:
        self.limits: ClientLimits = replace(CLIENT_LIMITS, **limits)
        self.address = "a:1"
        self.port = 1
        self.asked: list[tuple[int, tuple[Queue, ...]]] = []
        self.faults: dict[int, RocketletError] = {}
        self.refused: set[Queue] = set()
        self.registered = {"a:1", "b:1"}
        self.registering: list[str] = []
        self.stored: list[tuple[Queue, int, bool]] = []
        self.commit_fault: RocketletError | None = None
        self.stands: asyncio.Event | None = None  # a commit waits for it
        self.pulls: list[Queue] = []
        self.said: list[tuple[str, Queue]] = []
        self.pull_commits = False
        self.runs: asyncio.Event | None = None  # handlers wait for it
        self.wake, self.rebalanced = asyncio.Event(), asyncio.Event()
        fake: Any = self
        self.leases = Leases(fake, "g", "me", fake, fake, fake, wake=self.wake, rebalanced=self.rebalanced)

    def owns(self, *queues: Queue, epoch: int = 7, ends_s: float = math.inf) -> list[Lease]:
        for queue in queues:
            self.leases.owned[queue] = Lease(epoch, ends_s, f"{queue.broker_name}:1", asked_s=math.inf)
        return [self.leases.owned[queue] for queue in queues]

    # The brokers

    def master(self, name: str) -> str:
        return f"{name}:{self.port}"

    def masters(self) -> dict[str, str]:
        return {"a": "a:1", "b": "b:1"}

    def connected(self, name: str) -> World:
        return self

    async def broker(self, name: str) -> World:
        return self

    def request(self, code: int, ext: object, body: bytes, timeout_s: float) -> asyncio.Future[Frame]:
        asked: LockRequest = decode_lock_request(body)
        self.asked.append((code, asked.queues))
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if code in self.faults:
            answer.set_exception(self.faults[code])
        else:
            answer.set_result(Frame(0, 0, {}, encode_locked({q: 7 for q in asked.queues if q not in self.refused})))
        return answer

    def oneway(self, code: int, ext: object, body: bytes) -> None:
        self.asked.append((code, decode_lock_request(body).queues))

    def count(self, code: int) -> int:
        return sum(asked[0] == code for asked in self.asked)

    # Heartbeats

    def is_registered(self, address: str) -> bool:
        return address in self.registered

    async def register(self, addresses: Iterable[str], patience_s: float | None = None) -> None:
        self.registering += addresses

    # Offsets

    async def begin(self, connection: object, queue: Queue, epoch: int) -> int:
        return 5

    async def store(self, queue: Queue, offset: int, epoch: int, *, sought: bool = False) -> None:
        if self.stands is not None:
            await self.stands.wait()
        if self.commit_fault is not None:
            raise self.commit_fault
        self.stored.append((queue, offset, sought))

    async def committed(self, queue: Queue) -> int:
        return next(offset for stored, offset, _ in reversed(self.stored) if stored == queue)

    async def pulls_stored(self, queue: Queue, offset: int) -> None:
        self.pulls.append(queue)
        if self.stands is not None:
            await self.stands.wait()

    # The user

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.said.append(("take", queue))

    async def give_queue(self, queue: Queue) -> int | None:
        self.said.append(("give", queue))
        return 9

    def is_pull_committing(self, queue: Queue) -> bool:
        return self.pull_commits

    def lose_queue(self, queue: Queue) -> None:
        self.said.append(("lose", queue))

    def is_running(self, queue: Queue) -> bool:
        return self.runs is not None

    async def ended(self, queue: Queue) -> None:
        assert self.runs is not None
        await self.runs.wait()

    def suspend_queue(self, queue: Queue) -> None:
        self.said.append(("suspend", queue))

    def resume_queue(self, queue: Queue) -> None:
        self.said.append(("resume", queue))


async def while_it_ticks(world: World) -> None:
    ticking = asyncio.create_task(world.leases.renew_forever())
    await passed()
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking


@pytest.fixture
async def world() -> World:
    return World(lease_tick_s=0.0)


async def test_a_lease_that_is_not_due_is_not_renewed(world: World) -> None:
    world.owns(A, ELSEWHERE)
    await while_it_ticks(world)
    assert (world.asked, world.said) == ([], [])


async def test_with_a_lease_that_is_due_all_of_its_broker_are_renewed_and_no_others(world: World) -> None:
    world.owns(A, B, ELSEWHERE)
    world.leases.owned[A].asked_s = -math.inf
    await while_it_ticks(world)
    assert {code for code, _ in world.asked} == {Code.LOCK_BATCH_MQ}
    assert {queue for _, queues in world.asked for queue in queues} == {A, B}
    assert world.said == [], "it was never suspended, so nothing resumes"


async def test_a_lease_that_is_over_is_reported_once_and_continues_when_it_is_renewed(world: World) -> None:
    world.owns(A, ends_s=-math.inf)
    world.registered.clear()
    await while_it_ticks(world)
    assert world.said == [("suspend", A)]
    assert world.leases.are_suspended
    assert (world.asked, set(world.registering)) == ([], {"a:1"}), "its broker gets a heartbeat first"
    world.registered.add("a:1")
    await while_it_ticks(world)
    assert world.said == [("suspend", A), ("resume", A)]
    assert not world.leases.are_suspended
    assert world.wake.is_set()


async def test_a_queue_that_its_broker_does_not_renew_is_lost(world: World) -> None:
    [lease] = world.owns(A, ends_s=-math.inf)
    world.refused.add(A)
    world.rebalanced.set()
    await while_it_ticks(world)
    assert world.said == [("suspend", A), ("lose", A)]
    assert (world.leases.owned, world.leases.are_suspended, lease.is_over) == ({}, False, True)
    assert (world.rebalanced.is_set(), world.wake.is_set()) == (False, True)


async def test_a_lost_queue_is_taken_again_when_its_handlers_have_ended(world: World) -> None:
    world.owns(A)
    world.runs = asyncio.Event()
    world.refused.add(A)
    world.leases.suspend("a:1")
    await world.leases.reclaim()
    assert ("lose", A) in world.said
    world.refused.clear()
    world.asked.clear()
    await world.leases.acquire({A})
    assert world.asked == []
    world.wake.clear()
    world.runs.set()
    await passed()
    assert world.wake.is_set()
    await world.leases.acquire({A})
    assert ("take", A) in world.said


async def test_what_is_in_doubt_and_not_wanted_is_given_back_in_the_next_pass(world: World) -> None:
    world.faults[Code.LOCK_BATCH_MQ] = GONE
    await world.leases.acquire({A, B})
    assert world.leases.are_doubtful
    del world.faults[Code.LOCK_BATCH_MQ]
    world.asked.clear()
    await world.leases.acquire({B})
    assert (Code.UNLOCK_BATCH_MQ, (A,)) in world.asked
    assert (Code.LOCK_BATCH_MQ, (B,)) in world.asked
    assert not world.leases.are_doubtful
    assert world.leases.owned.keys() == {B}


async def test_a_lock_whose_connection_has_closed_is_not_taken(world: World) -> None:
    world.is_open = False
    await world.leases.acquire({A})
    assert (world.leases.owned, world.said, world.leases.are_doubtful) == ({}, [], True)


async def test_the_end_loses_every_queue_and_ends_its_lease(world: World) -> None:
    owned, releasing = world.owns(A, B)
    world.stands = asyncio.Event()
    world.faults[Code.UNLOCK_BATCH_MQ] = GONE
    world.leases.release(B)
    await passed()
    await world.leases.abandon()
    assert {queue for word, queue in world.said if word == "lose"} == {A, B}
    assert (owned.is_over, releasing.is_over) == (True, True)
    assert (world.leases.owned, world.leases.releasing) == ({}, set())


async def test_the_end_does_not_wait_for_handlers_of_what_was_lost(world: World) -> None:
    world.owns(A)
    world.runs = asyncio.Event()
    world.refused.add(A)
    world.leases.suspend("a:1")
    await world.leases.reclaim()
    await world.leases.abandon()
    world.wake.clear()
    await passed()
    assert world.wake.is_set(), "the task that waited has ended"


async def test_locks_in_doubt_are_given_back_again_after_a_rest() -> None:
    world = World(reconnect_s=NEVER_S_LEASES_ALONE, hand_over_timeout_s=NEVER_S_LEASES_ALONE)
    world.faults = {Code.LOCK_BATCH_MQ: GONE, Code.UNLOCK_BATCH_MQ: GONE}
    await world.leases.acquire({A})
    leaving = asyncio.create_task(world.leases.give_all())
    await passed()
    assert (world.count(Code.UNLOCK_BATCH_MQ), world.registering) == (1, ["a:1"])
    assert not leaving.done()
    leaving.cancel()


async def test_locks_in_doubt_hold_up_no_end_for_ever() -> None:
    world = World(hand_over_timeout_s=0.0)
    world.faults = {Code.LOCK_BATCH_MQ: GONE, Code.UNLOCK_BATCH_MQ: GONE}
    await world.leases.acquire({A})
    await world.leases.give_all()
    assert world.count(Code.UNLOCK_BATCH_MQ) == 1


async def handing_over(world: World) -> Lease:
    """A queue whose commit and unlock do not go together, so that each goes alone."""
    [lease] = world.owns(A)
    world.faults[Code.UNLOCK_BATCH_MQ] = GONE
    world.leases.release(A)
    await passed()
    return lease


async def test_a_commit_at_a_broker_that_is_away_is_retried_after_a_rest() -> None:
    world = World(reconnect_s=NEVER_S_LEASES_ALONE)
    world.commit_fault = GONE
    await handing_over(world)
    assert (world.leases.releasing, world.registering) == ({A}, [])
    await world.leases.abandon()


async def test_a_commit_is_retried_when_its_broker_has_a_heartbeat_and_renewed_the_lease() -> None:
    world = World(reconnect_s=0.0)
    world.commit_fault = GONE
    lease = await handing_over(world)
    assert world.leases.releasing == {A}
    assert set(world.registering) == {"a:1"}
    assert world.count(Code.LOCK_BATCH_MQ) > 0
    assert not lease.is_over
    world.commit_fault = None
    await passed()
    assert world.stored == [(A, 9, False)]
    assert world.leases.releasing == set()


async def test_a_refused_commit_is_final_or_given_up_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rocketlet.membership")
    for fault, limits in ((FINAL, {}), (FENCED, {"hand_over_timeout_s": 0.0})):
        world = World(reconnect_s=NEVER_S_LEASES_ALONE, **limits)
        world.commit_fault = fault
        lease = await handing_over(world)
        assert (world.leases.releasing, lease.is_over) == (set(), True)
        assert world.count(Code.UNLOCK_BATCH_MQ) == 2, "together, then alone"
        assert "queue_handed_over" not in caplog.text
        assert "hand_over_failed" in caplog.text
        caplog.clear()


async def test_a_hand_over_is_logged_and_asks_for_another_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rocketlet.membership")
    world = World()
    world.owns(A)
    world.leases.release(A)
    assert (world.leases.owned, world.leases.releasing, world.leases.are_releasing) == ({}, {A}, True)
    await passed()
    assert "queue_handed_over" in caplog.text
    assert world.asked == [(Code.UNLOCK_BATCH_MQ, (A,))]
    assert (world.stored, world.wake.is_set(), world.leases.are_releasing) == ([], True, False)
    assert world.said == [("give", A), ("lose", A)]


async def test_a_hand_over_that_is_cut_short_leaves_the_queue_in_doubt() -> None:
    world = World()
    world.stands = asyncio.Event()
    lease = await handing_over(world)
    (task,) = tasks_named("hand over")
    task.cancel()
    await passed()
    assert world.leases._locks.doubtful == {A}
    assert (lease.is_over, world.leases.releasing) == (True, set())


async def test_a_queue_that_is_lost_while_it_is_handed_over_is_not_unlocked() -> None:
    world = World()
    world.stands = asyncio.Event()
    lease = await handing_over(world)
    world.refused.add(A)
    await world.leases.reclaim()
    assert (lease.is_over, ("lose", A) in world.said) == (True, True)
    world.stands.set()
    await passed()
    assert world.count(Code.UNLOCK_BATCH_MQ) == 1, "the one with the commit"
    assert world.leases.releasing == set()


# Places


@pytest.mark.parametrize("sought", [False, True])
async def test_a_place_is_stored_as_it_was_named(*, sought: bool) -> None:
    world = World()
    world.owns(A)
    world.pull_commits = True
    await world.leases.commit_position(A, 4, sought=sought)
    assert (world.stored, world.pulls) == ([(A, 4, sought)], []), "only Apache's broker stores a pull's offset late"


async def test_a_place_on_apaches_broker_waits_for_pulls_that_carry_one() -> None:
    for is_committing in (False, True):
        world = World()
        world.owns(A, epoch=0)
        world.pull_commits = is_committing
        await world.leases.commit_position(A, 4, sought=False)
        assert (world.stored, world.pulls) == ([(A, 4, False)], [A] if is_committing else [])


async def test_a_place_of_what_is_not_ours_is_not_stored() -> None:
    world = World()
    await world.leases.commit_position(A, 4, sought=False)
    world.owns(A)
    world.leases.suspend("a:1")
    await world.leases.commit_position(A, 4, sought=False)
    assert world.stored == []


async def test_a_place_of_a_queue_that_was_lost_and_taken_again_meanwhile_is_not_stored() -> None:
    world = World()
    world.owns(A, epoch=0)
    world.pull_commits, world.stands = True, asyncio.Event()
    committing = asyncio.create_task(world.leases.commit_position(A, 4, sought=False))
    await passed()
    world.owns(A, epoch=0)
    world.stands.set()
    await committing
    assert world.stored == []


@pytest.mark.parametrize(
    ("fault", "is_lost"), [(FENCED, True), (FINAL, False), (GONE, False), (RequestTimeout("late"), False)]
)
async def test_only_a_fenced_commit_costs_the_queue(fault: RocketletError, *, is_lost: bool) -> None:
    world = World()
    world.owns(A)
    world.commit_fault = fault
    offsets: Mapping[Queue, int] = {A: 3, B: 4}
    assert await world.leases.commit(offsets) == set()
    assert (A in world.leases.owned) is not is_lost
    world.commit_fault = None
    assert await world.leases.commit(offsets) == ({A} if not is_lost else set())


async def test_offsets_are_committed_at_the_new_address_of_a_broker_only_after_the_lease_was_renewed_there() -> None:
    world = World()
    (lease,) = world.owns(A)
    world.port = 2
    assert await world.leases.commit({A: 3}) == set()
    assert world.stored == [], "the broker there does not know the connection yet"
    lease.address = "a:2"
    assert await world.leases.commit({A: 3}) == {A}
    assert world.stored == [(A, 3, False)]


# A member's steps follow from events. None of its timers goes off here, so nothing makes up later for a missing
# step.


NEVER_S_LEASE_EVENTS = 3600.0


BY_EVENTS = ClientLimits(
    rebalance_interval_s=NEVER_S_LEASE_EVENTS,
    lock_retry_s=NEVER_S_LEASE_EVENTS,
    lease_tick_s=NEVER_S_LEASE_EVENTS,
    heartbeat_interval_s=NEVER_S_LEASE_EVENTS,
)
"""Nothing happens by the clock."""


def another_has_it(node: Node) -> None:
    """The broker has given the queue to another member meanwhile, which has released it since."""
    node.broker.locks.end("g", "t", 0)


async def handle_two(node: Node, begun: list[Message], ends: asyncio.Event) -> MessageHandler:
    """Store two messages. Return a handler that returns for the first message, and waits for `ends` with the second."""
    await fill(node, 2)

    async def handle(message: Message) -> None:
        begun.append(message)
        if message.queue_offset:
            await ends.wait()

    return handle


async def test_a_lost_queue_is_asked_for_again_immediately_and_the_member_is_not_rebalanced_meanwhile(
    node: Node, one_queue: None
) -> None:
    assigned_after_the_loss: list[asyncio.Task[set[Queue]]] = []

    def revoked(queues: set[Queue]) -> None:
        if not assigned_after_the_loss:
            assigned_after_the_loss.append(asyncio.create_task(consumer.assigned()))

    async with Consumer(
        node.address, "g", "t", Inbox(), start="first", on_revoked=revoked, limits=BY_EVENTS
    ) as consumer:
        await consumer.assigned()
        before = consumer.queues[QUEUE].lease.epoch
        another_has_it(node)
        await consumer.seek("first", [QUEUE])
        (assigned,) = assigned_after_the_loss
        assert QUEUE in await assigned
        assert consumer.queues[QUEUE].lease.epoch > before


@pytest.mark.usefixtures("clock_stands")
async def test_the_messages_of_a_lost_queue_know_it(node: Node, one_queue: None) -> None:
    begun: list[Message] = []
    ends = asyncio.Event()
    handle = await handle_two(node, begun, ends)
    async with Consumer(node.address, "g", "t", handle, start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: len(begun) == 2)
        assert not begun[1].lease_lost
        another_has_it(node)
        await consumer.commit()
        assert begun[1].lease_lost
        ends.set()


async def test_a_connection_that_broke_is_opened_again_and_the_queue_continues(node: Node, one_queue: None) -> None:
    inbox = Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        former = node.server.connections
        node.break_connections()
        await eventually(lambda: not set(former) & set(node.server.connections))
        await fill(node, 1)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_a_queue_continues_though_the_rebalance_waits_for_another_broker(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t", 1)
    asked = asyncio.Event()

    async def stands(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    limits, inbox = replace(BY_EVENTS, lease_tick_s=0.01), Inbox()
    async with Consumer(node.address, "g", "t", inbox, start="first", limits=limits) as consumer:
        await consumer.assigned()
        monkeypatch.setattr(Shares, "of", stands)
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await asked.wait()
        former = node.server.connections
        node.break_connections()
        await eventually(lambda: not set(former) & set(node.server.connections))
        await fill(node, 1, queue=QUEUE)
        await eventually(lambda: len(inbox.messages) == 1)


async def test_a_topic_that_grows_is_divided_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await eventually(lambda: QUEUE in consumer.assignment())
        await wire.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic("t", 2, 2, 6)))
        await eventually(lambda: Queue("t", "broker-a", 1) in consumer.assignment())


async def test_a_queue_stays_its_owners_when_the_broker_rejects_an_offset(
    node: Node, one_queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(node, 1)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        mine = consumer.queues[QUEUE].lease
        rejected = asyncio.Event()

        def offset_fault(*about: object) -> str:
            rejected.set()
            return "it is not there"

        monkeypatch.setattr("rocketlet.broker.groups.pulling.Commits.offset_fault", offset_fault)
        await consumer.seek("first", [QUEUE])
        await rejected.wait()
        assert consumer.queues[QUEUE].lease is mine
        assert not mine.is_over


async def test_a_queue_that_was_handed_over_belongs_to_another_member_immediately(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as one:
        await one.assigned()
        async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as other:
            await eventually(lambda: all(len(_of_topic(member)) == 1 for member in (one, other)))
            await asyncio.gather(one.assigned(), other.assigned())
        await eventually(lambda: len(_of_topic(one)) == 2)
        await one.assigned()


async def test_a_hand_over_that_goes_alone_is_renewed_until_it_is_done(
    node: Node, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broker has refused the one request for all queues, and refuses this commit for a while."""

    async def refused(*about: object) -> bool:
        return False

    await create_topic(wire, "t", 2)
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as giver:
        await giver.assigned()
        monkeypatch.setattr(MemberLocks, "hand_over", refused)
        monkeypatch.setattr("rocketlet.broker.groups.group.GroupQueue.commit_fault", lambda *about: "not now")
        async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as taker:
            await eventually(lambda: len(_of_topic(giver)) == 1)
            (moves,) = {Queue("t", "broker-a", 0), Queue("t", "broker-a", 1)} - _of_topic(giver)
            before = renewed_s(node, moves.queue_id)
            await eventually(lambda: renewed_s(node, moves.queue_id) > before)
            assert lease_of(node, moves.queue_id).client_id == giver.client_id
            monkeypatch.undo()
            await eventually(lambda: _of_topic(taker) == {moves})


async def test_nothing_is_a_members_after_its_end(node: Node, one_queue: None) -> None:
    async with Consumer(node.address, "g", "t", Inbox(), start="first", limits=BY_EVENTS) as consumer:
        await consumer.assigned()
        lease = consumer.queues[QUEUE].lease
    assert (consumer.assignment(), lease.is_over) == (set(), True)
    assert node.broker.groups.owners("g") == {}


def _of_topic(consumer: Consumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "t"}
