"""The table of locks, without a broker: who is notified, what counts as a change, and what is kept of whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from rocketlet.broker.config import (
    HANDOVER_LEASE_S,
    LEASE_SWEEP_S,
    LIMITS,
    LOCK_LEASE_S,
    PLACE_BYTES,
    STANDSTILL_S,
    Limits,
)
from rocketlet.broker.groups.drains import Allotment, owners_of
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.members import History
from rocketlet.broker.groups.stages import Drain, DrainStage
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.sessions.reports import Reports
from rocketlet.broker.sessions.session import Session
from rocketlet.protocol import group_bodies
from rocketlet.protocol.allocation import TopicQueues
from rocketlet.protocol.bodies import LOOKS, BrokerData, ConsumerData, GroupConfig, QueueData, Route, finish
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue, Subscription
from rocketlet.testing.clock import MovableClock

from ...conftest import Node, Wire, create_topic, peer
from ...support.locks import Changes, Counts, Routes, make_groups, make_locks, queues_until
from ...support.requests import beat

QUEUES = [Queue("t", "a", number) for number in range(3)]
FIRST = QUEUES[0]
QUEUE_COUNT = 2 * LOOKS


class Table:
    def __init__(self, folder: Path, clock: MovableClock | None = None, limits: Limits = LIMITS, end: int = 0) -> None:
        self.clock = clock or MovableClock(stands=True)
        runtime = Runtime(self.clock, limits)
        self.history = History(runtime)
        self.told: list[Session] = []
        self.told_groups: set[str] = set()
        self.changes = 0
        self.locks = Locks(
            runtime,
            make_groups(runtime, self.history, changes=Changes(freed=self._freed, leases=self._changed)),
            self.history,
            folder / "locks.json",
            Counts(QUEUE_COUNT),
            queues_until(end),
        )

    def drain(self, queue_id: int) -> None:
        """A foreign member loses the queue, and still handles messages of it."""
        group = self.locks.groups.obtain("g")
        group.settings = GroupConfig("g")
        group.drain = Drain(0.0, waiting={peer(): {("t", queue_id)}}, stage=DrainStage.DRAINING)

    def reader_without_owned_queues(self) -> Session:
        """A foreign member that claims all queues; the first one belongs to another member."""
        session = peer()
        data = ConsumerData("g", subscriptions=(Subscription("t"),))
        self.locks.groups.heartbeat(session, "c1", data, 0, 0)
        group = self.locks.groups.obtain("g")
        group.has_bound_members = group.is_uneven = True
        group.owners = {"t": ["c2"]}
        return session

    def _freed(self, session: Session, group: str) -> None:
        self.told.append(session)
        self.told_groups.add(group)

    def _changed(self) -> None:
        self.changes += 1

    def lock(
        self,
        client_id: str,
        session: Session,
        *queues: Queue,
        epoch: int = 0,
        handover: bool = True,
        has_had: bool = False,
    ) -> dict[Queue, int]:
        wanted = queues or (FIRST,)
        epochs = dict.fromkeys(wanted, epoch) if epoch else {}
        return self.locks.lock(LockRequest(client_id, "g", wanted, handover, epochs), session, has_had=has_had)

    def unlock(self, client_id: str, session: Session, epoch: int = 0) -> list[str]:
        epochs = {FIRST: epoch} if epoch else {}
        return self.locks.unlock(LockRequest(client_id, "g", (FIRST,), True, epochs), session)

    def sweeps(self, seconds: float) -> None:
        """Time passes, and leases are checked all the time."""
        while seconds > 0:
            self.clock.advance(min(seconds, LEASE_SWEEP_S))
            seconds -= LEASE_SWEEP_S
            finish(self.locks.expiring())

    def is_awake_for(self, seconds: float) -> None:
        """Time passes, and nobody has checked leases yet."""
        self.clock.advance(seconds)
        self.locks.renew(())

    def events(self) -> list[str]:
        return [str(event["event"]) for event in self.history.of("g")]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


@pytest.mark.parametrize(("handover", "lasts_s"), [(True, HANDOVER_LEASE_S), (False, LOCK_LEASE_S)])
def test_a_lock_lasts_its_time_and_no_longer(table: Table, *, handover: bool, lasts_s: float) -> None:
    table.lock("c1", peer(), handover=handover)
    table.sweeps(lasts_s)
    assert table.locks.groups.queue("g", "t", 0).owner.holder is not None
    table.sweeps(0.5)
    assert table.locks.groups.queue("g", "t", 0).owner.holder is None


def test_what_others_see_of_locks_is_new_with_each_owner_and_connection(table: Table) -> None:
    one, two = peer(), peer()
    (epoch,) = table.lock("c1", one).values()
    queue = table.locks.groups.queue("g", "t", 0)
    before = queue.version
    assert before > 0
    table.lock("c1", one)
    assert queue.version == before, "a renewal"
    assert table.lock("c1", two, epoch=epoch)
    assert queue.version > before
    before = queue.version
    two.was_closed_by_client = False
    table.locks.connection_gone(two)
    assert queue.version > before
    before = queue.version
    table.locks.end("g", "t", 0)
    assert queue.version > before


def test_members_in_line_wait_for_the_next_owner_too(table: Table) -> None:
    one, two, three = peer(), peer(), peer()
    table.lock("c1", one)
    assert table.lock("c2", two) == table.lock("c3", three) == {}
    table.is_awake_for(HANDOVER_LEASE_S + 0.5)
    assert table.lock("c2", two), "before anybody has swept"
    assert table.told == []
    assert table.events() == ["locked", "lock expired", "locked"]
    table.unlock("c2", two)
    assert (table.told, table.told_groups) == ([three], {"g"})
    assert [session.charged_bytes for session in (one, two, three)] == [0, 0, 0]


def test_a_renewal_waits_in_no_line(table: Table) -> None:
    one, two = peer(), peer()
    (epoch,) = table.lock("c1", one).values()
    assert table.lock("c2", two, epoch=epoch + 1) == {}
    table.unlock("c1", one)
    assert table.told == []


def test_a_copy_of_a_client_waits_until_the_other_one_is_gone(table: Table) -> None:
    one, copy = peer(), peer()
    table.lock("c1", one)
    assert table.lock("c1", copy) == {}
    table.unlock("c1", one)
    assert table.told == [copy]


def test_what_is_held_back_only_its_reader_gets(table: Table) -> None:
    one = peer()
    table.drain(0)
    assert table.lock("c1", one) == {}
    assert table.lock("c2", peer(), handover=False)
    table.locks.end("g", "t", 0)
    assert table.lock("c1", one, has_had=True)


def test_a_foreign_member_gets_nothing_that_is_another_s(table: Table) -> None:
    one = table.reader_without_owned_queues()
    assert table.lock("c1", one, handover=False) == {}
    assert table.lock("c2", peer())


def test_queues_at_the_edge_of_a_topic(table: Table) -> None:
    edges = [Queue("t", "a", number) for number in (-1, 0, QUEUE_COUNT - 1, QUEUE_COUNT)]
    assert list(table.lock("c1", peer(), *edges)) == edges[1:3]


def test_a_foreign_member_that_has_left_locks_nothing_until_it_joins(table: Table) -> None:
    one = peer()
    table.locks.join(one, "g")
    table.lock("c1", one, handover=False)
    table.lock("c2", peer(), QUEUES[1], handover=False)
    table.locks.leave(one, "g", is_foreign=True)
    assert table.locks.groups.owners("g") == {("t", 1): "c2"}
    assert one.charged_bytes == PLACE_BYTES
    assert table.lock("c1", one, handover=False) == {}
    assert table.lock("c1", one), "ours may"
    table.locks.end("g", "t", 0)
    table.locks.join(one, "other")
    assert table.lock("c1", one, handover=False) == {}
    table.locks.join(one, "g")
    assert one.charged_bytes == 0
    assert table.lock("c1", one, handover=False)


def test_this_many_groups_are_kept_that_a_member_has_left(tmp_path: Path) -> None:
    table = Table(tmp_path, limits=Limits(max_memberships=2))
    one = peer()
    for name in ("g", "h", "i"):
        table.locks.leave(one, name, is_foreign=True)
    assert one.charged_bytes == 2 * PLACE_BYTES
    assert table.lock("c1", one, handover=False), "the first is forgotten"
    table.locks.connection_gone(one)
    assert one.charged_bytes == 0


def test_a_member_that_leaves_frees_its_queues_of_that_group(table: Table) -> None:
    one, two = peer(), peer()
    table.lock("c1", one, *QUEUES[:2])
    table.locks.lock(LockRequest("c1", "h", (FIRST,), True), one)
    table.lock("c2", two, QUEUES[0], QUEUES[2])
    table.locks.leave(one, "g", is_foreign=False)
    assert table.locks.groups.owners("g") == {("t", 2): "c2"}
    assert table.locks.groups.owners("h") == {("t", 0): "c1"}
    assert table.told == [two]


def test_what_a_member_freed_as_it_left_is_free_after_a_kill(tmp_path: Path) -> None:
    table, one = Table(tmp_path), peer()
    table.lock("c1", one)
    table.locks.leave(one, "g", is_foreign=False)
    assert Table(tmp_path, table.clock).lock("c2", peer())


@pytest.mark.parametrize("is_by_client", [False, True])
def test_a_connection_that_is_gone_frees_what_its_client_has_ended(table: Table, *, is_by_client: bool) -> None:
    one, two = peer(), peer()
    table.lock("c1", one)
    table.lock("c2", two, QUEUES[1])
    table.lock("c1", one, QUEUES[1])  # it waits
    table.lock("c3", two)  # waits, too
    one.was_closed_by_client = is_by_client
    table.locks.connection_gone(one)
    assert (table.locks.groups.queue("g", "t", 0).owner.holder is None) is is_by_client
    assert table.told == ([two] if is_by_client else [])
    assert two.charged_bytes == PLACE_BYTES * (1 if is_by_client else 2), (
        "it has a queue, and waits until the other is free"
    )
    table.locks.connection_gone(one)
    table.unlock("c2", two)
    assert one.charged_bytes == 0


def test_only_its_foreign_reader_lets_a_queue_go(table: Table) -> None:
    one = peer()
    table.lock("c1", one, handover=False)
    table.locks.drained(table.locks.groups.queue("g", "t", 0), peer())
    table.locks.drained(table.locks.groups.queue("g", "t", 1), one)
    assert table.locks.groups.queue("g", "t", 0).owner.holder is not None
    table.locks.drained(table.locks.groups.queue("g", "t", 0), one)
    assert table.locks.groups.queue("g", "t", 0).owner.holder is None
    table.lock("c1", one)
    table.locks.drained(table.locks.groups.queue("g", "t", 0), one)
    assert table.locks.groups.queue("g", "t", 0).owner.holder is not None, "ours unlocks it"


def test_leases_of_members_that_renew_last_as_long_again(table: Table) -> None:
    one, two = peer(), peer()
    table.lock("c1", one)
    table.lock("c2", two, QUEUES[1])
    table.sweeps(HANDOVER_LEASE_S - 1)
    table.locks.renew([one])
    table.sweeps(2)
    assert table.locks.groups.owners("g") == {("t", 0): "c1"}
    table.sweeps(HANDOVER_LEASE_S)
    assert table.locks.groups.owners("g") == {}


def test_expired_leases_are_ended_in_pieces(table: Table) -> None:
    one = peer()
    table.lock("c1", one, *(Queue("t", "a", number) for number in range(LOOKS + 1)))
    table.is_awake_for(HANDOVER_LEASE_S + 0.5)
    work = table.locks.expiring()
    next(work)
    assert len(table.locks) == 1
    finish(work)
    assert (len(table.locks), one.charged_bytes) == (0, 0)


def test_a_short_stall_extends_nothing(table: Table) -> None:
    table.lock("c1", peer())
    table.sweeps(HANDOVER_LEASE_S - 1)
    table.clock.advance(LEASE_SWEEP_S + STANDSTILL_S)
    finish(table.locks.expiring())
    assert table.locks.groups.queue("g", "t", 0).owner.holder is None


def test_commits_are_fenced_by_the_owner_and_its_epoch(table: Table) -> None:
    one, two = peer(), peer()

    def faults(session: Session, epoch: int | None) -> bool:
        return table.locks.groups.queue("g", "t", 0).commit_fault(session, ("t", 0), epoch) is not None

    assert (faults(one, None), faults(one, 1)) == (False, True)
    (epoch,) = table.lock("c1", one).values()
    assert [faults(one, item) for item in (None, epoch, epoch - 1)] == [False, False, True]
    assert [faults(two, item) for item in (None, epoch)] == [True, True]
    table.unlock("c1", one)
    table.lock("c1", one, handover=False)
    assert (faults(two, None), faults(two, epoch)) == (False, True)


def test_who_has_a_lease_of_a_queue_is_known(table: Table) -> None:
    one, two = peer(), peer()
    locks, place = table.locks, ("g", "t", 0)
    queue = locks.groups.queue(*place)
    assert not any(
        ask(one) for ask in (queue.owner.is_leased_to_another, queue.owner.is_leased_to, queue.owner.is_held_by)
    )
    (epoch,) = table.lock("c1", one).values()
    queue = locks.groups.queue(*place)
    assert [queue.owner.is_leased_to_another(item) for item in (one, two)] == [False, True]
    assert [queue.owner.is_leased_to(item) for item in (one, two)] == [True, False]
    assert [queue.owner.is_held_by(item) for item in (one, two)] == [True, False]
    assert (locks.leases_of("c1"), locks.leases_of("c2")) == ({place: epoch}, {})
    table.unlock("c1", one)
    table.lock("c1", one, handover=False)
    queue = locks.groups.queue(*place)
    owner = locks.groups.queue(*place).owner
    assert (owner.is_leased_to_another(two), owner.is_leased_to(one), owner.is_held_by(one)) == (False, False, True)
    assert locks.leases_of("c1") == {}


def test_the_first_pull_and_commit_of_each_owner_are_history(table: Table) -> None:
    one, locks, key = peer(), table.locks, ("t", 0)
    group = locks.groups.obtain("g")
    assert locks.record_commit(group.queue(*key), 7) == 7
    table.lock("c1", one)
    for _ in range(2):
        queue = locks.record_pull(one, group, key)
        assert locks.record_commit(queue, 7) == 7
    assert table.events() == ["locked", "first pull", "first commit"]
    table.unlock("c1", one)
    table.lock("c1", one, handover=False)
    locks.record_commit(locks.record_pull(peer(), group, key), 7)
    assert table.events() == ["locked", "first pull", "first commit", "unlocked"]


def test_what_changes_hands_is_saved_and_what_apaches_clients_lock_is_not(table: Table) -> None:
    one = peer()
    table.lock("c1", one, handover=False)
    table.locks.end("g", "t", 0)
    assert (table.changes, table.events()) == (0, [])
    table.lock("c1", one)
    assert table.changes == 1
    table.lock("c1", one)
    assert table.changes == 1
    table.unlock("c1", one)
    table.lock("c1", one)
    table.locks.end("g", "t", 0)
    assert table.changes == 4
    assert table.events() == ["locked", "unlocked", "locked", "lock expired"]


def test_an_owner_from_before_a_restart_commits_no_further_than_its_queue_went(tmp_path: Path) -> None:
    before, place = Table(tmp_path), ("g", "t", 0)
    (epoch,) = before.lock("c1", peer()).values()
    table, one = Table(tmp_path, before.clock, end=5), peer()
    assert table.lock("c1", one, epoch=epoch) == {FIRST: epoch}
    assert [table.locks.record_commit(table.locks.groups.queue(*place), offset) for offset in (4, 5, 6)] == [4, 5, 5]
    changes = table.changes
    table.locks.clear_former_end(table.locks.groups.queue(*place))
    assert table.changes == changes + 1
    table.locks.clear_former_end(table.locks.groups.queue(*place))
    assert table.changes == changes + 1
    assert (
        table.locks.groups.queue(*place).former_end,
        table.locks.record_commit(table.locks.groups.queue(*place), 6),
    ) == (None, 6)


def test_owners_of_a_topic_that_was_deleted_begin_again(tmp_path: Path) -> None:
    table = Table(tmp_path)
    one = peer()
    table.lock("c1", one, *QUEUES[:2])
    table.locks.lock(LockRequest("c1", "g", (Queue("u", "a", 0),), True), one)
    table.lock("c2", peer(), QUEUES[2], handover=False)
    changes = table.changes
    noting = table.locks.topic_deleted("t")
    assert table.changes == changes + 1
    assert [table.locks.groups.queue("g", topic, 0).former_end for topic in ("t", "u", "v")] == [0, None, None]
    assert table.locks.groups.queue("g", "t", 2).former_end is None
    table.locks.clear_former_end(table.locks.groups.queue("g", "t", 1))
    run(noting)
    again = Table(tmp_path, table.clock, end=9)
    assert [again.locks.groups.queue("g", "t", number).former_end for number in range(2)] == [0, 9]


@pytest.mark.parametrize("closes", [False, True])
def test_a_broker_that_stops_grants_nothing_more(table: Table, *, closes: bool) -> None:
    one = peer()
    (epoch,) = table.lock("c1", one).values()
    run(table.locks.saving(closes=closes))
    assert bool(table.lock("c2", peer(), QUEUES[1])) is not closes
    assert table.lock("c1", one) == {FIRST: epoch}


def test_an_unlock_frees_only_its_sender_s_own_lock(table: Table) -> None:
    one, two = peer(), peer()
    assert table.unlock("c1", one) == ["t:0 is not locked"]
    (epoch,) = table.lock("c1", one).values()
    assert "is locked by c1" in table.unlock("c2", two)[0]
    assert "is locked by c1" in table.unlock("c1", two)[0]
    assert "by now" in table.unlock("c1", one, epoch - 1)[0]
    assert table.unlock("c1", one, epoch) == []
    table.lock("c1", one, handover=False)
    assert table.unlock("c1", two) == [], "Apache's are of an id"


# Locks that clients hold and wait for are limited, each limit tested at its edge.


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


# Owners of queues by the last change: kept for as many queues as a broker may keep them for.


class World:
    def __init__(self, limits: Limits = LIMITS) -> None:
        runtime = Runtime(MovableClock(stands=True), limits)
        groups = make_groups(runtime, History(runtime))
        self.group = groups.obtain("g")
        self.allotment = Allotment(runtime, groups, Routes())


def test_owners_are_known_by_topic_and_queue() -> None:
    world = World()
    world.allotment.put(world.group, {"t": ["c1", "c2"]})
    assert [world.group.owner_of("t", number) for number in range(3)] == ["c1", "c2", None]
    assert world.group.owner_of("u", 0) is None
    world.allotment.put(world.group, {"u": ["c3"]})
    assert (world.group.owners, world.allotment.queue_count) == ({"u": ["c3"]}, 1)
    world.allotment.end(world.group)
    assert (world.group.owners, world.allotment.queue_count) == ({}, 0)


def test_this_many_owners_are_kept_with_those_that_are_being_found() -> None:
    world = World(Limits(max_drained_queues=3))
    allotment = world.allotment
    assert allotment.reserve(2)
    assert not allotment.reserve(2)
    assert allotment.reserve(1)
    allotment.unreserve(3)
    allotment.put(world.group, {"t": ["c1", "c1"]})
    assert allotment.reserve(1)
    assert not allotment.reserve(1)


def route(**queues: int) -> TopicQueues:
    of_brokers = tuple(QueueData(name, count, count, 6) for name, count in queues.items())
    return TopicQueues("t", Route(of_brokers, tuple(BrokerData(name, {0: "127.0.0.1:1"}, "c") for name in queues)))


def test_members_share_the_queues_of_all_brokers_and_one_of_them_knows_its_own() -> None:
    members = {"c1": 0, "c2": 1}
    assert owners_of(members, route(a=2, b=1), "a") == ["c1", "c1"]
    assert owners_of(members, route(a=2, b=1), "b") == ["c2"]
    assert owners_of({"c1": 0, "c2": 1, "c3": 2}, route(a=2), "a") == ["c1", "c2"]
    assert owners_of({}, route(a=2), "a") == []
