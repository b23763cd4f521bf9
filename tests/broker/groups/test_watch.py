"""The watch over readers, without a broker: who read last, who else does, and which queues nobody reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.config import HANDOVER_LEASE_S, LIMITS, MAX_HOLD_S, ORPHAN_S, PLACE_BYTES, Limits
from rocketlet.broker.groups.group import GroupQueue
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.members import History, Unread
from rocketlet.broker.groups.offsets import Watch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.protocol.bodies import ConsumerData, finish
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue, Subscription
from rocketlet.testing.clock import MovableClock

from ...conftest import peer
from ...support.locks import Counts, make_groups, make_locks, record_reader

QUEUES = 3


class World:
    def __init__(self, folder: Path, **limits: Any) -> None:
        self.clock = clock = MovableClock(stands=True)
        runtime = Runtime(clock, Limits(**limits))
        self.history = History(runtime)
        self.groups = make_groups(runtime, self.history, QUEUES)
        self.locks = make_locks(folder, clock, groups=self.groups, runtime=runtime, history=self.history)
        self.watch = Watch(runtime, self.groups, self.history, Counts(QUEUES))

    def joins(self, *topics: str, strategy: str | None = None, model: str = "CLUSTERING") -> RemotingConnection:
        session = peer()
        data = ConsumerData(
            "g", message_model=model, subscriptions=tuple(map(Subscription, topics or ("t",))), strategy=strategy
        )
        self.groups.heartbeat(session, f"c{session.number}", data, 0, 0)
        session.charged_bytes = 0  # the membership is not counted here
        return session

    def pulls(self, session: RemotingConnection, *numbers: int, topic: str = "t") -> None:
        for number in numbers or (0,):
            self.locks.record_pull(session, self.groups.obtain("g"), (topic, number))

    def at(self, queue_id: int, topic: str = "t", group: str = "g") -> GroupQueue:
        return self.groups.queue(group, topic, queue_id)

    def looks(self, after_s: float = 0.0) -> int:
        self.clock.advance(after_s)
        finish(self.watch.reporting_orphans())
        return self.watch.orphaned().total()

    def events(self, kind: str) -> list[str]:
        return [str(event["fault"]) for event in self.history.of("g") if event["event"] == kind]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def read_again_and_again(world: World, one: RemotingConnection, two: RemotingConnection, pause_s: float = 0.0) -> int:
    for session in (one, two, one):
        world.clock.advance(pause_s)
        world.pulls(session)
    return world.locks.double_readers


def test_a_member_that_comes_back_soon_is_a_second_reader(world: World) -> None:
    one, two = world.joins(), world.joins()
    assert read_again_and_again(world, one, two, MAX_HOLD_S - 0.1) == 1
    assert world.events("two readers") == [f"t:0 is read by c{two.number} and c{one.number}"]


def test_a_member_that_comes_back_after_a_held_pull_is_none(world: World) -> None:
    assert read_again_and_again(world, world.joins(), world.joins(), MAX_HOLD_S) == 0


def test_a_third_member_is_none(world: World) -> None:
    for _ in range(3):
        world.pulls(world.joins())
    assert world.locks.double_readers == 0


def test_a_member_that_pulls_alone_is_none(world: World) -> None:
    one = world.joins()
    assert read_again_and_again(world, one, one) == 0


@pytest.mark.parametrize("who", ["stranger", "ours", "broadcasting"])
def test_a_reader_that_may_read_beside_another_is_none(world: World, who: str) -> None:
    one = world.joins(model="BROADCASTING") if who == "broadcasting" else world.joins()
    two = peer() if who == "stranger" else world.joins(strategy="AVG" if who == "ours" else None)
    assert read_again_and_again(world, one, two) == 0


def test_a_member_that_has_the_lock_has_got_the_queue_back(world: World) -> None:
    one, two = world.joins(), world.joins()
    world.pulls(one)
    world.pulls(two)
    world.locks.lock(LockRequest(f"c{one.number}", "g", (Queue("t", "a", 0),)), one)
    world.pulls(one)
    assert world.locks.double_readers == 0


def test_the_last_reader_is_known_until_it_is_gone(world: World) -> None:
    one, two = world.joins(), world.joins()
    assert world.at(0).reader is None
    world.pulls(one)
    world.pulls(two, 0, 1)
    assert world.at(0).reader is two
    world.locks.connection_gone(one)
    assert world.at(0).reader is two
    world.locks.connection_gone(two)
    assert world.at(0).reader is None
    assert {queue.previous_reader for queue in world.groups.queues()} == {None}
    assert (one.charged_bytes, two.charged_bytes) == (0, 0)


def test_a_reader_that_is_gone_is_no_second_one(world: World) -> None:
    one, two, three = world.joins(), world.joins(), world.joins()
    world.pulls(one)
    world.pulls(two)
    world.locks.connection_gone(two)
    assert (world.at(0).reader, world.at(0).previous_reader) == (None, one)
    world.pulls(three)
    world.pulls(one)
    assert world.locks.double_readers == 0


def test_queues_that_a_connection_reads_count_as_its_own_up_to_a_limit(tmp_path: Path) -> None:
    world = World(tmp_path, max_read_queues=2)
    one, two = world.joins(), world.joins()
    world.pulls(one, 0, 1, 2)
    world.pulls(two, 0)
    world.pulls(one, 0)
    assert one.charged_bytes == 2 * PLACE_BYTES
    assert world.at(2).reader is None
    assert world.at(0).reader is two, "it is full"


def test_what_a_connection_reads_is_found_by_its_group(world: World) -> None:
    one, two = world.joins(), world.joins()
    world.pulls(one, 0, 1)
    world.locks.record_pull(one, world.groups.obtain("h"), ("u", 5))
    world.pulls(two, 1)
    assert (world.locks.read_by(one, "g"), world.locks.read_by(one, "h")) == ([world.at(0)], [world.at(5, "u", "h")])
    assert world.locks.read_by(peer(), "g") == []
    g, i = world.groups.obtain("g"), world.groups.obtain("i")
    assert [world.locks.reads(one, g), world.locks.reads(one, i), world.locks.reads(peer(), g)] == [True, False, False]
    world.pulls(two, 0)
    assert not world.locks.reads(one, world.groups.obtain("g"))


def test_only_its_reader_lets_a_queue_go(world: World) -> None:
    one, two = world.joins(), world.joins()
    world.pulls(one, 0)
    world.locks.release(two, world.at(0))
    assert world.at(0).reader is one
    world.locks.release(one, world.at(0))
    assert world.at(0).reader is None
    world.pulls(one, 1)
    world.locks.record_pull(one, world.groups.obtain("g"), ("u", 0))
    world.locks.record_pull(one, world.groups.obtain("h"), ("t", 0))
    world.locks.release_topic(one, "g", "t")
    assert [world.groups.queue(*key).reader for key in (("g", "t", 1), ("g", "u", 0), ("h", "t", 0))] == [
        None,
        one,
        one,
    ]


def test_what_a_reader_was_given_and_committed_ends_with_the_reader(world: World) -> None:
    one, two = world.joins(), world.joins()
    for reader in (one, two):
        world.pulls(reader)
        assert (world.at(0).given_offset, world.at(0).has_committed) == (0, False)
        world.at(0).given_offset, world.at(0).has_committed = 7, True
    world.locks.connection_gone(two)
    assert (world.at(0).given_offset, world.at(0).has_committed) == (0, False)


class UsedPool:
    """The pool of clients that pop all queues of a topic now."""

    is_divided = False

    def is_used(self, now_s: float) -> bool:
        return True


def test_a_queue_that_nobody_reads_is_named_once_after_a_while(world: World) -> None:
    one = world.joins("t", "u", "v")
    pool: Any = UsedPool()
    world.groups.add_pool(world.groups.obtain("g"), "v", pool)
    world.pulls(one, 0)
    world.locks.lock(LockRequest("c", "g", (Queue("u", "a", 2),)), one)
    assert world.looks() == 0
    assert world.looks(ORPHAN_S - 0.1) == 0
    assert world.looks(0.1) == 4
    named = [f"{topic} has no reader" for topic in ("t:1", "t:2", "u:0", "u:1")]
    assert world.events("orphaned") == named
    assert world.looks(1) == 4
    assert world.events("orphaned") == named
    world.pulls(one, 1)
    assert world.looks(1) == 3
    world.locks.release(one, world.at(1))
    assert world.looks(1) == 3, "it has been read since"
    assert world.looks(ORPHAN_S) == 4
    assert world.events("orphaned") == [*named, named[0]]


def test_a_reader_that_is_no_member_is_nobody(world: World) -> None:
    world.joins()
    world.pulls(peer(), 0, 1, 2)
    world.looks()
    assert world.looks(ORPHAN_S) == QUEUES


def test_this_many_orphans_are_watched_and_reported_at_a_time(tmp_path: Path) -> None:
    world = World(tmp_path, max_read_queues=2, max_reported=1)
    world.joins()
    world.looks()
    assert world.looks(ORPHAN_S) == 2
    assert len(world.events("orphaned")) == 1
    assert world.looks(1) == 2
    assert len(world.events("orphaned")) == 2


def test_after_a_scan_of_very_many_queues_the_watch_rests(tmp_path: Path) -> None:
    world = World(tmp_path, watched_per_s=2)
    world.joins()
    world.looks()  # at a group and its three queues
    world.clock.advance(ORPHAN_S)
    rested_s = (QUEUES + 1) / 2
    assert world.looks() == QUEUES
    world.joins("u")
    assert world.looks(rested_s - 0.1) == QUEUES
    assert world.looks(0.1) == QUEUES, "the queues of u have been unread only from now on"
    assert world.looks(rested_s + ORPHAN_S) == 2 * QUEUES


def test_a_repeated_scan_makes_no_new_objects(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Unread] = []

    def make(*values: Any, **named: Any) -> Unread:
        made.append(Unread(*values, **named))
        return made[-1]

    monkeypatch.setattr("rocketlet.broker.groups.offsets.Unread", make)
    world.joins()
    for seconds, count in ((0.0, QUEUES), (1.0, QUEUES), (ORPHAN_S, 2 * QUEUES), (1.0, 2 * QUEUES)):
        world.looks(seconds)
        assert len(made) == count


def test_no_queue_of_a_broadcasting_group_is_called_unread(world: World) -> None:
    world.joins(model="BROADCASTING")
    for _ in range(2):
        finish(world.watch.reporting_orphans())
        world.clock.advance(ORPHAN_S)
    assert not world.watch.orphaned()


# Queues that foreign members read, over a restart of the broker.


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
    assert locks.groups.obtain("g").missing_readers
    assert locked(locks, 0, 1) == {0}
    advance(locks, clock, HANDOVER_LEASE_S)
    assert locked(locks, 1) == set()
    advance(locks, clock, 0.01)
    assert locked(locks, 1) == {1}
    assert not locks.groups.obtain("g").missing_readers


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
    reader.was_closed_by_client = True
    locks.connection_gone(reader)
    assert locked(locks, 1) == {1}


def test_a_reader_that_is_back_is_kept_over_the_next_restart_too(tmp_path: Path) -> None:
    clock, reader = MovableClock(stands=True), peer()
    record_reader(make_locks(tmp_path, clock), "g", "t", 1, "c1")
    locks = make_locks(tmp_path, clock)
    assert locks.readers_back(locks.groups.obtain("g"), "c2", peer()) == []
    assert [queue.lease_key for queue in locks.readers_back(locks.groups.obtain("g"), "c1", reader)] == [("g", "t", 1)]
    assert (locks.readers_back(locks.groups.obtain("g"), "c1", reader), locks.groups.owners("g")) == ([], {})
    assert not locks.groups.obtain("g").missing_readers
    run(locks.saving(closes=True))
    again = make_locks(tmp_path, clock)
    assert again.groups.owners("g") == {("t", 1): "c1"}
    run(again.saving(closes=True))
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 1): "c1"}


def test_a_queue_with_another_reader_or_owner_or_none_is_not_kept_for_the_first(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock)
    readers = [record_reader(locks, "g", "t", number, "c1") for number in range(3)]
    record_reader(locks, "g", "t", 0, "c2")
    assert locked(locks, 1) == {1}
    locks.release(readers[2], locks.groups.queue("g", "t", 2))
    run(locks.saving())
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 0): "c2", ("t", 1): "ours"}


def test_no_more_readers_are_kept_than_locks(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock, limits=replace(LIMITS, max_locks=2))
    for number in range(3):
        record_reader(locks, "g", "t", number, "c1")
    assert make_locks(tmp_path, clock).groups.owners("g") == {("t", 0): "c1", ("t", 1): "c1"}


def test_a_lost_reader_is_not_awaited_after_another_client_has_read_the_queue_and_left(tmp_path: Path) -> None:
    locks, other = make_locks(tmp_path, MovableClock(stands=True)), peer()
    locks.connection_gone(record_reader(locks, "g", "t", 0, "c1"))
    group = locks.groups.obtain("g")
    locks.record_pull(other, group, ("t", 0))
    assert group.missing_readers == 1
    locks.connection_gone(other)
    assert (group.missing_readers, group.queue("t", 0).owner.last_reader_id) == (0, None)


def test_the_client_that_read_a_queue_last_is_known_until_somebody_else_reads_it(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True))
    for number in range(3):
        reader = record_reader(locks, "g", "t", number, "c1")
        assert locks.groups.queue("g", "t", number).owner.last_reader_id == "c1"
        locks.connection_gone(reader)
    assert [locks.groups.queue("g", "t", number).owner.last_reader_id for number in range(4)] == [
        "c1",
        "c1",
        "c1",
        None,
    ]
    assert locks.groups.obtain("g").missing_readers
    record_reader(locks, "g", "t", 0, "c2")
    assert locked(locks, 1) == {1}
    assert locks.groups.obtain("g").missing_readers
    other = peer()
    locks.record_pull(other, locks.groups.obtain("g"), ("t", 2))
    locks.release(other, locks.groups.queue("g", "t", 2))
    assert [locks.groups.queue("g", "t", number).owner.last_reader_id for number in range(3)] == ["c2", None, None]
    assert not locks.groups.obtain("g").missing_readers


def test_no_more_lost_readers_are_kept_than_locks(tmp_path: Path) -> None:
    locks = make_locks(tmp_path, MovableClock(stands=True), limits=replace(LIMITS, max_locks=2))
    for number in range(3):
        locks.connection_gone(record_reader(locks, "g", "t", number, "c1"))
    assert [locks.groups.queue("g", "t", number).owner.last_reader_id for number in range(3)] == ["c1", "c1", None]
