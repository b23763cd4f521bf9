"""The owner of a queue: the table, any history of events, and what is left of a history after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.broker.config import LOCK_LEASE_S, PLACE_BYTES
from rocketlet.broker.groups.owners import MISSING, NO_OWNER, Claim, Owner, OwnerEvent, OwnerState, next_owner, replay
from rocketlet.broker.runtime.jobs import run
from rocketlet.broker.store.journals import LeaseChange, LeaseEntry
from rocketlet.protocol.bodies import finish
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.names import Queue
from rocketlet.testing.clock import MovableClock

from ...conftest import peer
from ...support.locks import join_foreign, make_locks

S, E = OwnerState, OwnerEvent
QUEUE = Queue("t", "a", 0)
HELD = {S.LEASED, S.LOCKED, S.LOCKED_FOREIGN, S.LOCKED_LOST, S.AWAITED}
READ = {S.FOREIGN, S.LOCKED_FOREIGN, S.LOST, S.LOCKED_LOST}
clients = st.sampled_from(["c1", "c2"])


@given(st.lists(st.tuples(st.sampled_from(OwnerEvent), clients)))
def test_any_history_of_events_leads_to_one_owner(events: list[tuple[OwnerEvent, str]]) -> None:
    owner, sessions = NO_OWNER, {"c1": peer(), "c2": peer()}
    for epoch, (event, client_id) in enumerate(events, 1):
        claim = Claim(client_id, epoch, sessions[client_id])
        if event is E.RECONNECT and owner.holder is not None:
            claim = owner.holder._replace(session=sessions[client_id])
        try:
            after = next_owner(owner, event, claim)
        except KeyError:
            continue  # the table of tests/test_architecture.py has each pair that is refused
        assert (after.holder is not None) is (after.state in HELD)
        assert (after.reader is not None) is (after.state in READ)
        assert (after is NO_OWNER) is (after.state is S.FREE)
        assert not (after.is_leased and after.reader), "a lease is alone"
        assert after.is_locked is (after.holder is not None and not after.is_leased)
        assert [after.awaits(item) for item in ("c1", "c2")].count(True) == (after.state in MISSING)
        asked = [(after.is_leased_to(item), after.is_leased_to_another(item)) for item in sessions.values()]
        assert sum(to for to, _ in asked) <= 1
        assert all(to + another == after.is_leased for to, another in asked)
        owner = after


@given(st.lists(st.tuples(st.sampled_from(LeaseEntry), st.integers(0, 5), clients, st.integers(0, 9))))
def test_any_lines_of_a_journal_give_an_owner_or_are_refused(lines: list[tuple[LeaseEntry, int, str, int]]) -> None:
    try:
        owner, end = replay(LeaseChange(*line) for line in lines)
    except ValueError as fault:
        assert str(fault).startswith("epoch: expected one above")
        return
    begun = [line for line in lines if line[0] in (LeaseEntry.LEASE, LeaseEntry.READER)]
    assert owner.state in (S.FREE, S.LEASED, S.AWAITED)
    assert end is None or owner.state is S.LEASED
    if owner.holder is not None:
        entry, epoch, client_id, _ = begun[-1]
        assert (owner.holder.client_id, owner.holder.epoch, owner.holder.session) == (client_id, epoch, None)
        assert owner.state is (S.LEASED if entry is LeaseEntry.LEASE else S.AWAITED)
    elif begun:
        assert (LeaseEntry.END, begun[-1][1]) in [line[:2] for line in lines]


class Step(NamedTuple):
    """What a client or the broker does with the queue."""

    action: str
    client_id: str = "c1"


steps = st.builds(
    Step,
    st.sampled_from("lock lease unlock read release back lost closed expire wait save kill restart stop".split()),
    clients,
)


class Run:
    """Locks over a folder, with two clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, MovableClock(stands=True)
        self.start()

    def start(self) -> None:
        self.was_unlocked = False
        self.locks = make_locks(self.folder, self.clock)
        self.sessions = {item: join_foreign(self.locks, "g", "t", item) for item in ("c1", "c2")}

    @property
    def owner(self) -> Owner:
        return self.locks.groups.queue("g", "t", 0).owner

    def does(self, step: Step) -> None:
        locks, session = self.locks, self.sessions[step.client_id]
        group = locks.groups.obtain("g")
        queue = locks.groups.obtain_queue(group, ("t", 0))
        was_held = self.owner.holder is not None
        match step.action:
            case "lock" | "lease":
                locks.lock(LockRequest(step.client_id, "g", (QUEUE,), step.action == "lease"), session)
            case "unlock":
                locks.unlock(LockRequest(step.client_id, "g", (QUEUE,)), session)
            case "read":
                locks.record_pull(session, group, ("t", 0))
            case "release":
                locks.release(session, queue)
            case "back":
                locks.readers_back(group, step.client_id, session)
            case "lost" | "closed":
                session.was_closed_by_client = step.action == "closed"
                locks.connection_gone(session)
                assert not self.owner.is_leased_to(session)
                self.sessions[step.client_id] = join_foreign(locks, "g", "t", step.client_id)
            case "expire":
                for _ in range(int(LOCK_LEASE_S)):
                    self.clock.advance(1.01)
                    finish(locks.expiring())
            case "wait":
                locks.renew_awaited(queue, session)
            case "save":
                run(locks.saving())
            case "kill" | "restart" | "stop":
                before, was_unlocked = self.owner, self.was_unlocked
                if step.action != "kill":
                    run(locks.saving(closes=step.action == "stop"))
                self.start()
                if step.action != "kill" or before.entry is not None or (before is NO_OWNER and was_unlocked):
                    self.has_kept(before)  # a kill may undo what ended without a request a moment before
        self.was_unlocked = self.owner is NO_OWNER and (self.was_unlocked or (was_held and step.action == "unlock"))

    def has_kept(self, before: Owner) -> None:
        """A restart keeps leases, and reserves the queue for its foreign reader or for the one that it was reserved for."""
        kept = {S.LEASED: (S.LEASED, before.holder), S.AWAITED: (S.AWAITED, before.holder)}
        kept |= dict.fromkeys((S.FOREIGN, S.LOCKED_FOREIGN), (S.AWAITED, before.reader))
        state, claim = kept.get(before.state, (S.FREE, None))
        assert self.owner == Owner(state, claim._replace(session=None) if claim is not None else None)


@given(st.lists(steps, min_size=10, max_size=30))
@example([Step("lease"), Step("unlock"), Step("kill")])
@example([Step("lease"), Step("lost"), Step("kill")])
@example(
    [
        Step("read"),
        Step("restart"),
        Step("wait"),
        Step("lost"),
        Step("back"),
        Step("lock"),
        Step("closed"),
        Step("kill"),
    ]
)
def test_what_is_counted_listed_and_kept_is_that_of_the_owner_after_any_steps(
    tmp_path_factory: pytest.TempPathFactory, taken: list[Step]
) -> None:
    history = Run(tmp_path_factory.mktemp("locks"))
    for step in taken:
        version = history.locks.groups.queue("g", "t", 0).version or 0
        before = history.owner
        history.does(step)
        owner, queue = history.owner, history.locks.groups.queue("g", "t", 0)
        assert len(history.locks) == (owner.holder is not None)
        assert history.locks.groups.obtain("g").missing_readers == (owner.state in MISSING)
        for client_id, session in history.sessions.items():
            assert history.locks.owned_by(session, "g") == ([queue] if owner.is_held_by(session) else [])
            waits = bool(queue.waiters) and session in (queue.waiters or ())
            reads = session in (queue.reader, queue.previous_reader)
            places = (owner.is_held_by(session) or waits) + reads
            assert session.charged_bytes == places * PLACE_BYTES, client_id
        if owner != before and step.action not in ("kill", "restart", "stop") and owner is not NO_OWNER:
            assert queue.version > version
    history.does(Step("restart"))
    history.does(Step("expire"))
    assert (len(history.locks), history.owner) == (0, NO_OWNER), "nothing lasts without a renewal"
