"""The requests by which a member locks, unlocks and commits: what they name, what an answer means, what stays in doubt."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from rocketlet.client.member.leases import MemberLocks
from rocketlet.client.message import Lease
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import LockRequest, decode_lock_request, encode_locked
from rocketlet.protocol.names import Queue

from ..support.turns import passed

A, B, C = (Queue("t", "a", number) for number in range(3))
GONE = ConnectionFailed("gone")
REFUSED = BrokerRefused(RequestCode.LOCK_BATCH_MQ, 1, "no", "a:1")


class Line:
    """A cluster of one broker, and the connection to it. `asked`: the requests that wait for an answer."""

    address = "a:1"
    limits = CLIENT_LIMITS

    def __init__(self) -> None:
        self.is_open = self.speaks_msgpack = self.is_known = True
        self.asked: list[tuple[int, LockRequest, asyncio.Future[Frame]]] = []
        self.said: list[LockRequest] = []

    def connected(self, name: str) -> Line | None:
        return self if self.is_known else None

    async def broker(self, name: str) -> Line:
        if not self.is_known:
            raise GONE
        return self

    def request(self, code: int, ext: object, body: bytes, timeout_s: float) -> asyncio.Future[Frame]:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.asked.append((code, decode_lock_request(body), answer))
        return answer

    def oneway(self, code: int, ext: object, body: bytes) -> None:
        assert code == RequestCode.UNLOCK_BATCH_MQ
        self.said.append(decode_lock_request(body))

    async def next(self, code: int = RequestCode.LOCK_BATCH_MQ) -> LockRequest:
        await passed()
        assert [asked[0] for asked in self.asked] == [code]
        return self.asked[0][1]

    async def answer(self, answer: dict[Queue, int] | RocketletError, offsets: dict[Queue, int] | None = None) -> None:
        await passed()
        _, _, asking = self.asked.pop(0)
        if isinstance(answer, RocketletError):
            asking.set_exception(answer)
        else:
            asking.set_result(Frame(0, 0, {}, encode_locked(answer, offsets)))
        await passed()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("message", "member.leases"):
        monkeypatch.setattr(f"rocketlet.client.{module}.clock_s", clock)
    return clock


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def locks(line: Line) -> MemberLocks:
    return MemberLocks(cast("ClusterView", line), "g", "me")


def lock(locks: MemberLocks, line: Line, *queues: Queue) -> asyncio.Task[tuple[dict[Queue, Lease], dict[Queue, int]]]:
    return asyncio.create_task(locks.lock(cast("Connection", line), queues))


async def test_a_lease_is_counted_from_the_sending_of_its_request(line: Line, locks: MemberLocks, clock: Clock) -> None:
    asking = lock(locks, line, A, B, C)
    request = await line.next()
    assert request == LockRequest("me", "g", (A, B, C), handover=True)
    clock.now_s += 5
    stranger = Queue("u", "a", 0)
    await line.answer({A: 7, B: 0, stranger: 9}, {A: 3, stranger: 4})
    leases, offsets = await asking
    assert {queue: (lease.epoch, lease.ends_s, lease.asked_s, lease.address) for queue, lease in leases.items()} == {
        A: (7, 1019.0, 1000.0, "a:1"),
        B: (0, 1059.0, 1000.0, "a:1"),  # Apache's lasts for 60 s
    }
    assert offsets == {A: 3}
    assert locks.doubtful == {A, B}, "until they are taken"
    locks.end_doubt(A)
    assert locks.doubtful == {B}


@pytest.mark.parametrize("fault", [REFUSED, GONE])
async def test_only_a_refused_lock_leaves_no_doubt(
    line: Line, locks: MemberLocks, clock: Clock, fault: RocketletError
) -> None:
    asking = lock(locks, line, A)
    await line.next()
    assert locks.is_requested(A)
    assert not locks.is_requested(B)
    await line.answer(fault)
    with pytest.raises(type(fault)):
        await asking
    assert not locks.is_requested(A)
    assert locks.doubtful == (set() if fault is REFUSED else {A})
    clock.now_s += 61
    assert locks.doubtful == set(), "the lock has ended on its own"


async def test_a_queue_that_is_asked_for_twice_is_in_doubt_until_both_are_answered(
    line: Line, locks: MemberLocks
) -> None:
    first, second = lock(locks, line, A), lock(locks, line, A)
    await passed()
    line.asked.reverse()
    await line.answer({})
    assert locks.doubtful == {A}, "the other request may still be granted"
    await line.answer({})
    assert locks.doubtful == set()
    await asyncio.gather(first, second)


async def test_a_lock_that_is_not_answered_is_given_up_and_stays_in_doubt(
    line: Line,
) -> None:
    line.limits = ClientLimits(lock_timeout_s=0.0)
    locks = MemberLocks(cast("ClusterView", line), "g", "me")
    with pytest.raises(RequestTimeout):
        await lock(locks, line, A)
    assert (locks.doubtful, locks.is_requested(A)) == ({A}, True)
    unlocking = asyncio.create_task(locks.unlock(A))
    await passed()
    assert len(line.asked) == 1, "an unlock would overtake it"
    await line.answer({A: 7})
    await line.next(RequestCode.UNLOCK_BATCH_MQ)
    await line.answer({})
    await unlocking
    assert locks.doubtful == set()


async def test_a_renewal_names_epochs_and_is_no_lock(line: Line, locks: MemberLocks) -> None:
    renewing = asyncio.create_task(locks.renew(cast("Connection", line), [A, B], {A: 7}))
    assert await line.next() == LockRequest("me", "g", (A, B), handover=True, epochs={A: 7})
    assert (locks.is_requested(A), locks.is_requested(B)) == (False, True)
    await line.answer({A: 7})
    assert {queue: lease.epoch for queue, lease in (await renewing).items()} == {A: 7}
    assert locks.doubtful == set()


@pytest.mark.parametrize("epoch", [0, 7])
async def test_an_unlock_frees_the_epoch_that_is_known(line: Line, locks: MemberLocks, epoch: int) -> None:
    unlocking = asyncio.create_task(locks.unlock(A, epoch))
    request = await line.next(RequestCode.UNLOCK_BATCH_MQ)
    assert request == LockRequest("me", "g", (A,), handover=True, epochs={A: 7} if epoch else {})
    assert (locks.unlocking, locks.doubtful, unlocking.done()) == ({A}, {A}, False)
    await line.answer({})
    await unlocking
    assert (locks.unlocking, locks.doubtful) == (set(), set())


@pytest.mark.parametrize("fault", [REFUSED, GONE])
async def test_an_unlock_that_has_no_answer_may_still_be_carried_out(
    line: Line, locks: MemberLocks, clock: Clock, fault: RocketletError
) -> None:
    unlocking = asyncio.create_task(locks.unlock(A))
    await line.answer(fault)
    await unlocking
    assert (locks.unlocking, locks.doubtful) == ((set(), set()) if fault is REFUSED else ({A}, {A}))
    again = asyncio.create_task(locks.unlock(A))
    await line.answer({})
    await again
    assert (locks.unlocking, locks.doubtful) == (set(), set())


async def test_an_unlock_without_an_answer_is_over_with_the_longest_lease(
    line: Line, locks: MemberLocks, clock: Clock
) -> None:
    unlocking = asyncio.create_task(locks.unlock(A))
    await line.answer(GONE)
    await unlocking
    clock.now_s += 61
    assert (locks.unlocking, locks.doubtful) == (set(), set())


async def test_what_cannot_be_unlocked_stays_in_doubt(line: Line, locks: MemberLocks) -> None:
    line.is_known = False
    await locks.unlock(A)
    assert (locks.doubtful, locks.unlocking) == ({A}, set())


@pytest.mark.parametrize("is_open", [False, True])
async def test_the_end_unlocks_what_is_held_and_what_is_in_doubt_where_it_can(
    line: Line, locks: MemberLocks, *, is_open: bool
) -> None:
    line.is_open = is_open
    locks.doubt([A, B])
    locks.abandon({B: Lease(7), C: Lease(8)})
    said = [LockRequest("me", "g", (A, B, C), handover=True, epochs={B: 7, C: 8})]
    assert line.said == (said if is_open else [])
    assert locks.doubtful == set()


@pytest.fixture
def hand_overs(line: Line) -> MemberLocks:
    return MemberLocks(cast("ClusterView", line), "g", "me")


def hand_over(hand_overs: MemberLocks, queue: Queue, offset: int, lease: Lease | None = None) -> asyncio.Task[bool]:
    return asyncio.create_task(hand_overs.hand_over(queue, offset, lease or Lease(7)))


async def test_queues_that_are_handed_over_together_are_one_request(line: Line, hand_overs: MemberLocks) -> None:
    handing = [hand_over(hand_overs, queue, number) for number, queue in enumerate((A, B))]
    request = await line.next(RequestCode.UNLOCK_BATCH_MQ)
    assert request == LockRequest("me", "g", (A, B), handover=True, epochs={A: 7, B: 7}, offsets={A: 0, B: 1})
    later = hand_over(hand_overs, C, 2)
    await passed()
    assert [request.queues for _, request, _ in line.asked] == [(A, B), (C,)]
    await line.answer({A: 7})
    await line.answer({C: 7})
    assert [await task for task in (*handing, later)] == [True, False, True]


async def test_a_request_names_as_many_queues_as_it_may(line: Line) -> None:
    line.limits = ClientLimits(lock_queues=2)
    hand_overs = MemberLocks(cast("ClusterView", line), "g", "me")
    handing = [hand_over(hand_overs, queue, 0) for queue in (A, B, C)]
    await passed()
    assert [request.queues for _, request, _ in line.asked] == [(A, B), (C,)]
    await line.answer({A: 7, B: 7})
    await line.answer(GONE)
    assert [await task for task in handing] == [True, True, False]


@pytest.mark.parametrize("why", ["no connection", "apache", "no epoch", "over"])
async def test_what_cannot_be_handed_over_together_goes_alone(line: Line, hand_overs: MemberLocks, why: str) -> None:
    line.is_known = why != "no connection"
    line.speaks_msgpack = why != "apache"
    lease = Lease(0 if why == "no epoch" else 7)
    if why == "over":
        lease.end()
    assert not await hand_over(hand_overs, A, 0, lease)
    assert line.asked == []


async def test_a_hand_over_whose_connection_has_gone_meanwhile_goes_alone(line: Line, hand_overs: MemberLocks) -> None:
    handing = hand_over(hand_overs, A, 0)
    await asyncio.sleep(0)
    line.is_known = False
    assert not await handing
    assert line.asked == []


def commit(hand_overs: MemberLocks, offsets: dict[Queue, int], epoch: int = 7) -> asyncio.Task[Any]:
    leases = {queue: Lease(epoch) for queue in offsets}
    return asyncio.create_task(hand_overs.commit("a", offsets, leases))


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({A: 7, B: 7}, ({A}, {B})),  # B is not committed as far as was asked for
        (REFUSED, (set(), {A, B})),
        (GONE, (set(), set())),  # by now a pull may carry a later one
    ],
)
async def test_commits_of_several_queues_are_one_request(
    line: Line, hand_overs: MemberLocks, answer: Any, outcome: tuple[set[Queue], set[Queue]]
) -> None:
    committing = commit(hand_overs, {A: 1, B: 2})
    request = await line.next()
    assert request == LockRequest("me", "g", (A, B), handover=True, epochs={A: 7, B: 7}, offsets={A: 1, B: 2})
    await line.answer(answer, {A: 1, B: 1})
    assert await committing == outcome


@pytest.mark.parametrize("why", ["one", "no connection", "apache", "no epoch"])
async def test_commits_that_cannot_go_together_go_alone(line: Line, hand_overs: MemberLocks, why: str) -> None:
    line.is_known = why != "no connection"
    line.speaks_msgpack = why != "apache"
    offsets = {A: 1} if why == "one" else {A: 1, B: 2}
    assert await commit(hand_overs, offsets, 0 if why == "no epoch" else 7) == (set(), set(offsets))
    assert line.asked == []
