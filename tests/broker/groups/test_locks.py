"""The owners of queues: locks, leases, epochs, and the commits that they fence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
from rocketlet.broker.sessions.session import Session
from rocketlet.protocol import group_bodies
from rocketlet.protocol.bodies import finish
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import UnregisterClient, UpdateOffset, write
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Wire, create_topic, eventually, peer
from ...support.locks import make_locks
from ...support.requests import QUEUE, SUBSCRIBED, SUSPEND, beat, join, lock, pull, send


async def free(node: Node) -> None:
    """Returns when nobody owns a queue, and it is known what the change of the members moves: until then nobody gets one."""
    await eventually(lambda: not node.broker.groups.owners("g") and not node.broker.draining.is_pending("g"))


async def test_a_queue_has_one_owner_and_the_next_is_notified_when_it_is_free(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    await beat(one, "c1")
    await beat(two, "c2")
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    first = group_bodies.decode_locked((await lock(one, "c1")).body)
    assert group_bodies.decode_locked((await lock(two, "c2")).body) == {}
    assert group_bodies.decode_locked((await lock(one, "c1")).body) == first, "renewing keeps the epoch"
    two.requests.clear()
    await lock(one, "c1", code=RequestCode.UNLOCK_BATCH_MQ)
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    second = group_bodies.decode_locked((await lock(two, "c2")).body)
    assert second[QUEUE] > first[QUEUE]


async def test_a_killed_owner_frees_its_queues_immediately(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    await beat(one, "c1")
    await beat(two, "c2")
    await lock(one, "c1")
    await lock(two, "c2")
    await one.close()
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    await free(node)
    assert QUEUE in group_bodies.decode_locked((await lock(two, "c2")).body)


async def test_an_owner_whom_the_broker_hangs_up_keeps_its_queues_until_it_can_know(
    node: Node, connect: Connect
) -> None:
    """As a member that reads nothing, when memory is needed: it may be cut off, and believes in its leases."""
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    await beat(one, "c1")
    (connection,) = (found for found in node.server.connections if node.broker.groups.get("g").members.get(found))  # type: ignore[union-attr]
    await beat(two, "c2")
    first = group_bodies.decode_locked((await lock(one, "c1")).body)
    connection.abort()
    await eventually(lambda: connection not in node.server.connections)
    assert group_bodies.decode_locked((await lock(two, "c2")).body) == {}
    back = await connect(node.address)
    await beat(back, "c1")
    renewal = LockRequest("c1", "g", (QUEUE,), True, first)
    answer = await back.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(renewal))
    assert group_bodies.decode_locked(answer.body) == first
    await back.close()
    await free(node)
    assert QUEUE in group_bodies.decode_locked((await lock(two, "c2")).body)


def test_an_owner_that_comes_by_another_connection_proves_itself_by_its_epoch(tmp_path: Path) -> None:
    """As when its broker got another address, or when its former connection hangs."""
    locks = make_locks(tmp_path, MovableClock())
    one, another, latest = peer(), peer(), peer()
    ask = LockRequest("c1", "g", (QUEUE,), True)
    first = locks.lock(ask, one)[QUEUE]
    renewal = LockRequest("c1", "g", (QUEUE,), True, {QUEUE: first})
    assert locks.lock(ask, another) == {}, "the client id alone may be a copy"
    assert locks.lock(LockRequest("c1", "g", (QUEUE,), True, {QUEUE: first - 1}), another) == {}
    assert locks.lock(LockRequest("c2", "g", (QUEUE,), True, {QUEUE: first}), another) == {}
    assert locks.lock(renewal, another) == {QUEUE: first}
    assert locks.groups.obtain("g").queue(*("t", 0)).commit_fault(another, ("t", 0), first) is None
    assert locks.lock(renewal, one) == {}, (
        "what comes late on the former connection does not bring the lease back to it"
    )
    locks.connection_gone(one)
    assert locks.lock(LockRequest("c2", "g", (QUEUE,), True), latest) == {}
    locks.connection_gone(another)
    assert locks.lock(LockRequest("c2", "g", (QUEUE,), True), latest)[QUEUE] > first


def test_after_a_restart_who_does_not_know_its_epoch_gets_another(tmp_path: Path) -> None:
    """It starts over: with the old epoch it would be below what the queue has seen, if the folder is a copy."""
    clock = MovableClock()
    ask = LockRequest("c1", "g", (QUEUE,), True)
    first = make_locks(tmp_path, clock).lock(ask, peer())[QUEUE]
    again = make_locks(tmp_path, clock)
    assert again.lock(LockRequest("c2", "g", (QUEUE,), True), peer()) == {}
    one = peer()
    second = again.lock(ask, one)[QUEUE]
    assert second > first
    assert again.lock(ask, one) == {QUEUE: second}
    assert again.lock(LockRequest("c1", "g", (QUEUE,), True, {QUEUE: first}), one) == {}
    renewal = LockRequest("c1", "g", (QUEUE,), True, {QUEUE: second})
    assert make_locks(tmp_path, clock).lock(renewal, peer()) == {QUEUE: second}


async def test_a_foreign_client_id_locks_and_unlocks_nothing(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    stranger = await connect(node.address)
    await beat(one, "c1")
    await beat(two, "c2")
    await lock(one, "c1")
    for wire, code in (
        (two, RequestCode.LOCK_BATCH_MQ),
        (two, RequestCode.UNLOCK_BATCH_MQ),
        (stranger, RequestCode.UNLOCK_BATCH_MQ),
    ):
        assert (await lock(wire, "c1", code=code)).code == ResponseCode.SYSTEM_ERROR
    assert node.broker.groups.owners("g") == {("t", 0): "c1"}


async def test_a_late_commit_is_refused_and_moves_nothing(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await beat(one, "c1")
    await beat(two, "c2")
    await create_topic(one, "t", 1)
    for _ in range(9):
        await send(one)
    old = group_bodies.decode_locked((await lock(one, "c1")).body)[QUEUE]

    async def commit(wire: Wire, offset: int, epoch: int | None) -> int:
        return (
            await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("g", "t", 0, offset, epoch)))
        ).code

    assert await commit(one, 5, old) == 0
    await lock(one, "c1", code=RequestCode.UNLOCK_BATCH_MQ)
    assert await commit(one, 6, old) == 16, "nobody owns it"
    new = group_bodies.decode_locked((await lock(two, "c2")).body)[QUEUE]
    assert await commit(one, 7, old) == 16
    assert await commit(one, 7, None) == 16
    assert await commit(two, 8, old) == 16
    assert node.broker.offsets.get("g", "t", 0) == 5
    assert await commit(two, 9, new) == 0


@pytest.mark.parametrize("offset", [-1, 2, 4])
async def test_a_commit_outside_of_the_queue_is_refused(node: Node, wire: Wire, offset: int) -> None:
    await create_topic(wire, "t", 1)
    for _ in range(4):
        await send(wire)
    node.broker.store.queue("t", 0).begin = 3
    answer = await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("g", "t", 0, offset)))
    assert answer.code == (0 if offset == 4 else 1)
    if offset != 4:
        assert "the start 3 and the end 4" in (answer.remark or "")
    assert node.broker.offsets.get("g", "t", 0) == (4 if offset == 4 else None)


async def test_a_member_that_lies_about_locks_changes_nothing(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    await beat(one, "c1")
    await beat(two, "c2")
    epoch = group_bodies.decode_locked((await lock(one, "c1")).body)[QUEUE]

    async def unlock(wire: Wire, client: str, queue: Queue = QUEUE, epochs: int | None = None) -> str:
        request = LockRequest(client, "g", (queue,), True, {queue: epochs} if epochs else {})
        answer = await wire.call(RequestCode.UNLOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        return answer.remark or ""

    assert "locked by c1" in await unlock(two, "c2"), "another's"
    assert "not c1" in await unlock(two, "c1"), "with a foreign client id"
    assert "is not locked" in await unlock(one, "c1", Queue("t", "broker-a", 7)), "what it never had"
    assert "by now" in await unlock(one, "c1", epochs=epoch - 1), "an old epoch"
    assert group_bodies.decode_locked((await lock(one, "c1")).body)[QUEUE] == epoch


def test_a_queue_that_is_locked_and_unlocked_takes_few_calls(tmp_path: Path) -> None:
    """One request may have 8,192 queues, and nobody else is served meanwhile."""
    locks, one, calls = make_locks(tmp_path, MovableClock(stands=True)), peer(), 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and "/broker/" in frame.f_code.co_filename

    def calls_for(queues: int) -> int:
        nonlocal calls
        request = LockRequest("c1", "g", tuple(Queue("t", "broker-a", number) for number in range(queues)), True)
        calls, former = 0, sys.getprofile()
        sys.setprofile(count)
        epochs, faults = locks.lock(request, one), locks.unlock(request, one)
        sys.setprofile(former)
        assert (len(epochs), faults) == (queues, [])
        return calls

    calls_for(8)  # the first time costs more
    assert calls_for(8) - calls_for(4) <= 4 * 33


def test_a_lease_that_is_not_renewed_ends(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    told: list[Session] = []
    locks = make_locks(tmp_path, clock, told)
    one, two = peer(), peer()
    request = LockRequest("c1", "g", (QUEUE,), True)
    other = LockRequest("c2", "g", (QUEUE,), True)
    locks.lock(request, one)
    assert locks.lock(other, two) == {}
    for _ in range(20):
        clock.advance(1)
        finish(locks.expiring())
    assert told == []
    clock.advance(1)
    finish(locks.expiring())
    assert told == [two]
    assert QUEUE in locks.lock(other, two)
    assert locks.groups.obtain("g").queue(*("t", 0)).commit_fault(one, ("t", 0), 1)


def test_a_broker_that_was_suspended_gives_its_members_time_to_renew(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock)
    one, two = peer(), peer()
    mine, other = LockRequest("c1", "g", (QUEUE,), True), LockRequest("c2", "g", (QUEUE,), True)
    epoch = locks.lock(mine, one)[QUEUE]
    clock.advance(30)  # renewals wait in the sockets
    assert locks.lock(other, two) == {}, "asked for before the renewal is read"
    finish(locks.expiring())
    assert locks.lock(mine, one) == {QUEUE: epoch}
    clock.advance(30)
    finish(locks.expiring())
    for _ in range(20):
        clock.advance(1)
        finish(locks.expiring())
    assert QUEUE in locks.lock(other, two), "time to renew, not for ever"


def test_a_broker_that_was_suspended_while_no_lease_is_known_keeps_all_out_for_longer(tmp_path: Path) -> None:
    """Members that renew in vain believe in their leases for 20 s of what they could have been answered."""
    clock = MovableClock(stands=True)
    make_locks(tmp_path, clock)
    (tmp_path / "locks.json").write_bytes(b"damaged")
    locks = make_locks(tmp_path, clock)
    asked, one = LockRequest("c1", "g", (QUEUE,), True), peer()
    for _ in range(15):
        clock.advance(1)
        assert locks.lock(asked, one) == {}
    clock.advance(30)
    assert locks.lock(asked, one) == {}, "of the 20 s some were left"
    for _ in range(6):
        clock.advance(1)
        locks.lock(asked, one)
    assert QUEUE in locks.lock(asked, one)


def test_a_renewal_takes_nothing_again(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock())
    one, again = peer(), peer()
    ask = LockRequest("c1", "g", (QUEUE,), True)
    first = locks.lock(ask, one)[QUEUE]
    renewal = LockRequest("c1", "g", (QUEUE,), True, {QUEUE: first})
    assert locks.lock(renewal, one) == {QUEUE: first}
    locks.connection_gone(one)
    assert locks.lock(renewal, again) == {}, "it was free meanwhile"
    second = locks.lock(ask, again)[QUEUE]
    assert second > first
    assert locks.lock(renewal, again) == {}
    assert locks.lock(ask, again) == {QUEUE: second}


def test_after_a_restart_an_owner_may_release(tmp_path: Path) -> None:
    clock = MovableClock()
    request = LockRequest("c1", "g", (QUEUE,), True)
    make_locks(tmp_path, clock).lock(request, peer())
    again = make_locks(tmp_path, clock)
    assert again.unlock(LockRequest("c2", "g", (QUEUE,), True), peer()), "another client may not"
    assert again.unlock(request, peer()) == []
    assert len(again) == 0


async def test_apaches_locks_last_and_survive_a_closed_socket(node: Node, connect: Connect) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t")
    assert QUEUE in group_bodies.decode_locked((await lock(one, "c1", handover=False)).body)
    await one.close()
    assert group_bodies.decode_locked((await lock(two, "c2", handover=False)).body) == {}


async def test_apaches_locks_end_when_their_member_leaves_its_group(node: Node, connect: Connect) -> None:
    """A Java member that leaves unlocks its queues, then unregisters. Its rebalance runs until the socket closes, and may
    lock what was given to it just then. Nobody would read that for 60 s."""
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 2)
    await beat(one, "c1")
    await beat(two, "c2")
    await lock(two, "c2")
    assert QUEUE not in group_bodies.decode_locked((await lock(one, "c1", handover=False)).body)
    await lock(two, "c2", code=RequestCode.UNLOCK_BATCH_MQ)
    assert QUEUE in group_bodies.decode_locked((await lock(one, "c1", handover=False)).body)
    await lock(two, "c2")
    two.requests.clear()
    await one.call(RequestCode.UNREGISTER_CLIENT, write(UnregisterClient("c1", consumer_group="g")))
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    late = await lock(one, "c1", handover=False)
    assert group_bodies.decode_locked(late.body) == {}, "it has left"
    assert QUEUE in group_bodies.decode_locked((await lock(two, "c2")).body)
    await lock(two, "c2", code=RequestCode.UNLOCK_BATCH_MQ)
    await beat(one, "c1")
    assert QUEUE in group_bodies.decode_locked((await lock(one, "c1", handover=False)).body), "it has joined again"


async def test_what_is_handed_over_together_is_committed_and_unlocked_by_one_request(
    node: Node, connect: Connect
) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 3)
    for number in range(3):
        await send(one, queue=number)
    for wire, name in ((one, "c1"), (two, "c2")):
        await beat(wire, name)
    queues = tuple(Queue("t", "broker-a", number) for number in range(3))
    ask = group_bodies.encode_lock_request(LockRequest("c1", "g", queues[:2], True))
    first = await one.call(RequestCode.LOCK_BATCH_MQ, body=ask)
    epochs = group_bodies.decode_locked(first.body)
    assert group_bodies.decode_committed(first.body) == {}, "the group has committed nothing"
    others = group_bodies.encode_lock_request(LockRequest("c2", "g", queues[2:], True))
    epochs |= group_bodies.decode_locked((await two.call(RequestCode.LOCK_BATCH_MQ, body=others)).body)
    beyond_its_end = {queues[0]: 1, queues[1]: 5, queues[2]: 1}
    give = LockRequest("c1", "g", queues, True, epochs, beyond_its_end)
    done = await one.call(RequestCode.UNLOCK_BATCH_MQ, body=group_bodies.encode_lock_request(give))
    assert set(group_bodies.decode_locked(done.body)) == {queues[0]}, "5 is beyond the end, and the third is another's"
    assert node.broker.groups.owners("g") == {("t", 1): "c1", ("t", 2): "c2"}
    assert [node.broker.offsets.get("g", "t", number) for number in range(3)] == [1, None, None]
    again = group_bodies.encode_lock_request(LockRequest("c2", "g", queues[:1], True))
    taken = await two.call(RequestCode.LOCK_BATCH_MQ, body=again)
    assert group_bodies.decode_committed(taken.body) == {queues[0]: 1}


async def test_a_member_commits_several_queues_at_the_same_time_and_only_those_that_are_its_own(
    node: Node, connect: Connect
) -> None:
    one, two = await connect(node.address), await connect(node.address)
    await create_topic(one, "t", 4)
    for number in range(4):
        await send(one, queue=number)
    for wire, name in ((one, "c1"), (two, "c2")):
        await beat(wire, name)
    queues = tuple(Queue("t", "broker-a", number) for number in range(4))
    epochs: dict[Queue, int] = {}
    for wire, name, some in ((one, "c1", queues[:3]), (two, "c2", queues[3:])):
        ask = group_bodies.encode_lock_request(LockRequest(name, "g", some, True))
        epochs |= group_bodies.decode_locked((await wire.call(RequestCode.LOCK_BATCH_MQ, body=ask)).body)
    told = {**epochs, queues[2]: epochs[queues[2]] - 1}  # an earlier owner's
    offsets = {queues[0]: 1, queues[1]: 5, queues[2]: 1, queues[3]: 1}
    request = group_bodies.encode_lock_request(LockRequest("c1", "g", queues, True, told, offsets))
    answer = await one.call(RequestCode.LOCK_BATCH_MQ, body=request)
    assert group_bodies.decode_committed(answer.body) == {queues[0]: 1}, "5 is beyond the end"
    assert set(group_bodies.decode_locked(answer.body)) == set(queues[:2])
    assert [node.broker.offsets.get("g", "t", number) for number in range(4)] == [1, None, None, None]
    assert node.broker.groups.owners("g") == {("t", number): "c1" if number < 3 else "c2" for number in range(4)}


@pytest.mark.limits(drain_limit_s=3600.0)
async def test_a_foreign_reader_in_order_that_unlocks_nothing_keeps_nobody_out(
    node: Node, wire: Wire, connect: Connect
) -> None:
    """As Apache's Go client: it drops what moves, its locks last for 60 s, and it asks 20 s after a refusal."""
    flags = SUBSCRIBED | SUSPEND
    await create_topic(wire, "t", 2)
    await join(wire, "c1")
    for queue in range(2):
        await send(wire, queue=queue)
        assert (await wire.call(RequestCode.PULL_MESSAGE, pull(queue=queue, flags=flags))).code == 0
    await wire.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)  # because it joined itself
    two = await connect(node.address)

    async def locked(asks: Wire, client_id: str, queue: int) -> bool:
        request = LockRequest(client_id, "g", (Queue("t", "broker-a", queue),))
        answer = await asks.call(RequestCode.LOCK_BATCH_MQ, body=group_bodies.encode_lock_request(request))
        return bool(group_bodies.decode_locked(answer.body))

    assert await locked(wire, "c1", 0)
    assert await locked(wire, "c1", 1)
    await join(two, "c2")
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert not await locked(two, "c2", 1), "c1 still handles a message of it"
    await wire.call(RequestCode.PULL_MESSAGE, pull(queue=1, offset=1, flags=flags | 0x1, commit_offset=1))
    await two.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert await locked(two, "c2", 1)
    assert not await locked(two, "c2", 0), "what stays c1's"
