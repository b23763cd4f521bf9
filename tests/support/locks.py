"""Locks without a broker."""

from __future__ import annotations

from pathlib import Path

from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.groups.group import ConsumerGroups
from rocketlet.broker.groups.history import History
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.broker.sessions import Session


def make_groups(runtime: Runtime | None = None, history: History | None = None, queues: int = 8) -> ConsumerGroups:
    """Groups alone; each topic has this many queues."""
    runtime = runtime or Runtime(MovableClock(stands=True))
    return ConsumerGroups(runtime, history or History(runtime), "a", lambda topic: queues, lambda group: None)


def make_locks(
    folder: Path,
    clock: MovableClock,
    told: list[Session] | None = None,
    end: int = 0,
    limits: Limits = LIMITS,
    groups: ConsumerGroups | None = None,
) -> Locks:
    """Locks alone; who is notified of a free queue is in `told`. end: where each queue ends."""
    runtime = Runtime(clock, limits)
    history = History(runtime)
    return Locks(
        runtime,
        groups if groups is not None else make_groups(runtime, history),
        history,
        folder / "locks.json",
        on_free=lambda connection, group: told.append(connection) if told is not None else None,
        on_change=lambda: None,
        is_held_back=lambda group, topic, queue_id: False,
        is_anothers=lambda group, connection, topic, queue_id: False,
        queues_of=lambda topic: 8,
        end_of=lambda topic, queue_id: end,
    )


def record_reader(locks: Locks, group: str, topic: str, queue_id: int, client_id: str) -> None:
    """A foreign member reads a queue."""
    queue = locks.groups.obtain_queue(locks.groups.obtain(group), (topic, queue_id))
    locks.record_reader(queue, client_id)
