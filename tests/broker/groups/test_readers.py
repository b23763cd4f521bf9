"""Queues that foreign members read, over a restart of the broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rocketlet.broker.config import HANDOVER_LEASE_S, LIMITS
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.runtime import MovableClock, run
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue

from ...conftest import peer
from ...support.locks import make_locks, record_reader


def locked(locks: Locks, *queues: int) -> set[int]:
    request = LockRequest("ours", "g", tuple(Queue("t", "broker-a", number) for number in queues), True)
    return {queue.queue_id for queue in locks.lock(request, peer())}


def advance(locks: Locks, clock: MovableClock, seconds: float) -> None:
    """The broker runs meanwhile: it does not stall."""
    for _ in range(10):
        clock.advance(seconds / 10)
        locks.renew(())


def test_a_queue_that_a_foreign_member_read_is_kept_for_as_long_as_a_lease(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    record_reader(make_locks(tmp_path, clock), "g", "t", 1, "c1")
    locks = make_locks(tmp_path, clock)
    assert locks.groups.obtain("g").awaited_readers
    assert locked(locks, 0, 1) == {0}
    advance(locks, clock, HANDOVER_LEASE_S)
    assert locked(locks, 1) == set()
    advance(locks, clock, 0.01)
    assert locked(locks, 1) == {1}
    assert not locks.groups.obtain("g").awaited_readers


def test_a_client_that_pulls_the_queue_keeps_it_and_others_do_not(tmp_path: Path) -> None:
    clock, reader, other = MovableClock(stands=True), peer(), peer()
    record_reader(make_locks(tmp_path, clock), "g", "t", 1, "c1")
    locks = make_locks(tmp_path, clock)
    advance(locks, clock, HANDOVER_LEASE_S)
    locks.renew_awaited(locks.groups.queue("g", "t", 1), reader)
    advance(locks, clock, HANDOVER_LEASE_S / 2)
    locks.renew_awaited(locks.groups.queue("g", "t", 1), other)
    assert locks.groups.obtain("g").queue(*("t", 1)).commit_fault(reader, ("t", 1), None) is None
    assert locks.groups.obtain("g").queue(*("t", 1)).commit_fault(other, ("t", 1), None) is not None
    advance(locks, clock, HANDOVER_LEASE_S / 2)
    assert locked(locks, 1) == set()
    advance(locks, clock, 0.01)
    assert locked(locks, 1) == {1}


def test_a_queue_whose_reader_closes_its_connection_is_free(tmp_path: Path) -> None:
    clock, reader = MovableClock(stands=True), peer()
    record_reader(make_locks(tmp_path, clock), "g", "t", 1, "c1")
    locks = make_locks(tmp_path, clock)
    locks.renew_awaited(locks.groups.queue("g", "t", 1), reader)
    reader.is_left = True
    locks.connection_gone(reader)
    assert locked(locks, 1) == {1}


def test_a_reader_that_is_back_is_kept_over_the_next_restart_too(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    record_reader(make_locks(tmp_path, clock), "g", "t", 1, "c1")
    locks = make_locks(tmp_path, clock)
    assert locks.readers_back(locks.groups.obtain("g"), "c2") == []
    assert [queue.place for queue in locks.readers_back(locks.groups.obtain("g"), "c1")] == [("g", "t", 1)]
    assert (locks.readers_back(locks.groups.obtain("g"), "c1"), locks.groups.owners("g")) == ([], {})
    assert not locks.groups.obtain("g").awaited_readers
    run(locks.saving(closes=True))
    again = make_locks(tmp_path, clock)
    assert again.groups.owners("g") == {("t", 1): "c1"}
    run(again.saving(closes=True))
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 1): "c1"}


def test_a_queue_with_another_reader_or_owner_or_none_is_not_kept_for_the_first(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock)
    for number in range(3):
        record_reader(locks, "g", "t", number, "c1")
    record_reader(locks, "g", "t", 0, "c2")
    assert locked(locks, 1) == {1}
    locks.clear_reader(locks.groups.queue("g", "t", 2))
    run(locks.saving())
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 0): "c2", ("t", 1): "ours"}


def test_no_more_readers_are_kept_than_locks(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock, limits=replace(LIMITS, max_locks=2))
    for number in range(3):
        record_reader(locks, "g", "t", number, "c1")
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 0): "c1", ("t", 1): "c1"}


def test_the_client_that_read_a_queue_last_is_known_until_somebody_else_reads_it(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True))
    for number in range(3):
        record_reader(locks, "g", "t", number, "c1")
        assert locks.groups.queue("g", "t", number).last_reader_id == "c1"
        locks.lose_reader(locks.groups.queue("g", "t", number))
    locks.lose_reader(locks.groups.queue("g", "t", 3))
    assert [locks.groups.queue("g", "t", number).last_reader_id for number in range(4)] == ["c1", "c1", "c1", None]
    assert locks.groups.obtain("g").misses_readers
    record_reader(locks, "g", "t", 0, "c2")
    assert locked(locks, 1) == {1}
    assert locks.groups.obtain("g").misses_readers
    locks.clear_reader(locks.groups.queue("g", "t", 2))
    assert [locks.groups.queue("g", "t", number).last_reader_id for number in range(3)] == ["c2", None, None]
    assert not locks.groups.obtain("g").misses_readers


def test_no_more_lost_readers_are_kept_than_locks(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True), limits=replace(LIMITS, max_locks=2))
    for number in range(3):
        record_reader(locks, "g", "t", number, "c1")
        locks.lose_reader(locks.groups.queue("g", "t", number))
    assert [locks.groups.queue("g", "t", number).last_reader_id for number in range(3)] == ["c1", "c1", None]
