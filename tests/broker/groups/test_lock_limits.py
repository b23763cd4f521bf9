"""Locks that clients hold and wait for are limited, each limit tested at its edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from rocketlet.broker.config import PLACE_BYTES, Limits
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.sessions import Reports
from rocketlet.protocol import group_bodies
from rocketlet.protocol.bodies import finish
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from ...conftest import Node, Wire, create_topic, peer
from ...support.locks import make_locks
from ...support.requests import beat


class Heard:
    """A server, as far as locks need one."""

    def __init__(self) -> None:
        self.reports = Reports()


def connection() -> RemotingConnection:
    return peer(Heard())


def queues(*numbers: int) -> tuple[Queue, ...]:
    return tuple(Queue("t", "broker-a", number) for number in numbers)


def test_locks_are_limited_at_their_edge_and_others_may_have_what_ends(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True), limits=Limits(max_locks=3))
    heard = Heard()
    one, two = peer(heard), peer(heard)
    with structlog.testing.capture_logs() as logged:
        assert len(locks.lock(LockRequest("c1", "g", queues(0, 1, 2, 3)), one)) == 3
        assert len(locks.lock(LockRequest("c2", "h", queues(0, 1)), two)) == 0
        assert len(locks.lock(LockRequest("c1", "g", queues(0, 1, 2)), one)) == 3, "what it has it may renew"
    assert [entry["limit"] for entry in logged if entry["event"] == "locks_refused"] == [3], "once for an address"
    assert locks.refused == 3
    locks.unlock(LockRequest("c1", "g", queues(0)), one)
    assert len(locks.lock(LockRequest("c2", "h", queues(0)), two)) == 1


def test_a_connection_has_or_waits_for_this_many_locks(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True), limits=Limits(max_locks_of_connection=2))
    one, two = connection(), connection()
    assert len(locks.lock(LockRequest("c1", "g", queues(0, 1, 2), True), one)) == 2
    assert len(locks.lock(LockRequest("c2", "g", queues(5, 6, 7), True), two)) == 2
    assert locks.lock(LockRequest("c2", "g", queues(0), True), two) == {}
    assert two.charged_bytes == 2 * PLACE_BYTES, "it does not wait, but may retry"
    locks.unlock(LockRequest("c2", "g", queues(5), True), two)
    locks.lock(LockRequest("c2", "g", queues(0), True), two)
    assert two.charged_bytes == 2 * PLACE_BYTES, "it has one queue and waits for another"


def test_who_waits_for_locks_is_limited_and_forgotten(tmp_path: Path) -> None:
    told: list[Any] = []
    locks = make_locks(tmp_path, MovableClock(stands=True), told, limits=Limits(max_lock_waiters=2))
    owner, others = connection(), [connection() for _ in range(3)]
    locks.lock(LockRequest("c0", "g", queues(0), True), owner)
    for number, other in enumerate(others):
        locks.lock(LockRequest(f"c{number + 1}", "g", queues(0), True), other)
        locks.lock(LockRequest(f"c{number + 1}", "g", queues(0), True), other)
    assert [item.charged_bytes for item in others] == [PLACE_BYTES, PLACE_BYTES, 0]
    locks.connection_gone(others[0])
    assert [item.charged_bytes for item in others] == [0, PLACE_BYTES, 0]
    locks.connection_gone(owner)
    assert told == [others[1]]
    assert [item.charged_bytes for item in (owner, *others)] == [0] * 4


def test_locks_of_a_connection_count_as_its_own_until_they_end(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks, one = make_locks(tmp_path, clock), connection()
    for _ in range(3):
        locks.lock(LockRequest("c1", "g", queues(0, 1, 2)), one)
    assert one.charged_bytes == 3 * PLACE_BYTES
    locks.unlock(LockRequest("c1", "g", queues(0)), one)
    assert one.charged_bytes == 2 * PLACE_BYTES
    for _ in range(61):
        clock.advance(1)
        finish(locks.expiring())
    assert (one.charged_bytes, len(locks)) == (0, 0)


async def test_queues_that_do_not_exist_are_not_locked(wire: Wire, node: Node) -> None:
    await create_topic(wire, "t", 4)
    asked = (*queues(-1, 0, 3, 4, 2**31 - 1), Queue("nowhere", "broker-a", 0))
    for is_ours in (False, True):
        if is_ours:
            assert (await beat(wire, "c1")).code == 0
        body = group_bodies.encode_lock_request(LockRequest("c1", "g", asked, is_ours))
        answer = await wire.call(Code.LOCK_BATCH_MQ, body=body)
        assert (answer.code, sorted(group_bodies.decode_locked(answer.body))) == (0, list(queues(0, 3)))
        await wire.call(Code.UNLOCK_BATCH_MQ, body=body)
    assert len(node.broker.locks) == 0
    bad = group_bodies.encode_lock_request(LockRequest("c1", "../x", queues(0)))
    assert (await wire.call(Code.LOCK_BATCH_MQ, body=bad)).code == 1


@pytest.mark.limits(max_locks=1)
async def test_who_is_refused_locks_gets_the_reason(wire: Wire) -> None:
    await create_topic(wire, "t", 4)
    body = group_bodies.encode_lock_request(LockRequest("c1", "g", queues(0, 1)))
    answer = await wire.call(Code.LOCK_BATCH_MQ, body=body)
    assert (answer.code, "no more locks" in (answer.remark or "")) == (0, True)
