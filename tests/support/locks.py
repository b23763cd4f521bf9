"""Locks without a broker."""

from __future__ import annotations

from pathlib import Path

from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.settings import History
from rocketlet.broker.runtime import MovableClock, Runtime
from rocketlet.broker.sessions import Session


def make_locks(
    folder: Path, clock: MovableClock, told: list[Session] | None = None, end: int = 0, limits: Limits = LIMITS
) -> Locks:
    """Locks alone; who is told of a free queue is in `told`. end: where each queue ends."""
    runtime = Runtime(clock, limits)
    return Locks(
        runtime,
        History(runtime),
        folder / "locks.json",
        on_free=lambda connection, group: told.append(connection) if told is not None else None,
        on_change=lambda: None,
        is_held_back=lambda group, topic, queue_id: False,
        is_anothers=lambda group, connection, topic, queue_id: False,
        queues_of=lambda topic: 8,
        end_of=lambda topic, queue_id: end,
    )
