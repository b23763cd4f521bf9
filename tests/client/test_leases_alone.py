"""Leases of a member on their own, at brokers that answer as the test orders: what a member requests, reports and keeps."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from rocketlet.client.member.leases import Leases
from rocketlet.client.message import Lease
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest, decode_lock_request, encode_locked
from rocketlet.protocol.names import Queue

from ..support.turns import passed

A, B = (Queue("t", "a", number) for number in range(2))
ELSEWHERE = Queue("t", "b", 0)
GONE = ConnectionFailed("gone")
NEVER_S = 3600.0
FENCED = BrokerRefused(Code.UPDATE_CONSUMER_OFFSET, ResponseCode.NO_PERMISSION, "another's", "a:1")
FINAL = BrokerRefused(Code.UPDATE_CONSUMER_OFFSET, ResponseCode.SYSTEM_ERROR, "the queue is gone", "a:1")


class World:
    """Brokers a and b, the heartbeats, the offsets and the user of one member's leases."""

    is_open = speaks_msgpack = True

    def __init__(self, **limits: Any) -> None:
        self.limits: ClientLimits = replace(CLIENT_LIMITS, **limits)
        self.address = "a:1"
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
        return f"{name}:1"

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
    world = World(reconnect_s=NEVER_S, hand_over_timeout_s=NEVER_S)
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
    world = World(reconnect_s=NEVER_S)
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
        world = World(reconnect_s=NEVER_S, **limits)
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
    world.leases._handing_over[A].cancel()
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
    await world.leases.commit_place(A, 4, sought=sought)
    assert (world.stored, world.pulls) == ([(A, 4, sought)], []), "only Apache's broker stores a pull's offset late"


async def test_a_place_on_apaches_broker_waits_for_pulls_that_carry_one() -> None:
    for is_committing in (False, True):
        world = World()
        world.owns(A, epoch=0)
        world.pull_commits = is_committing
        await world.leases.commit_place(A, 4, sought=False)
        assert (world.stored, world.pulls) == ([(A, 4, False)], [A] if is_committing else [])


async def test_a_place_of_what_is_not_ours_is_not_stored() -> None:
    world = World()
    await world.leases.commit_place(A, 4, sought=False)
    world.owns(A)
    world.leases.suspend("a:1")
    await world.leases.commit_place(A, 4, sought=False)
    assert world.stored == []


async def test_a_place_of_a_queue_that_was_lost_and_taken_again_meanwhile_is_not_stored() -> None:
    world = World()
    world.owns(A, epoch=0)
    world.pull_commits, world.stands = True, asyncio.Event()
    committing = asyncio.create_task(world.leases.commit_place(A, 4, sought=False))
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
