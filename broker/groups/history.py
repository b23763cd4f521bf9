"""The newest events of each group's queues and members, for administrators."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Final

from ..clock import Clock
from ..config import HISTORY_TEXT_CHARS, LIMITS, Limits
from ..store.ledger import LeaseKey
from .rebalances import Rebalances

LOCKED: Final = "locked"


class History:
    """Per group, at most 10,000 events: `{"ms", "event", "client", ...}`, oldest first; of the 1,000 youngest groups, and
    200,000 in all."""

    def __init__(self, clock: Clock, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._clock = clock
        self._events: dict[str, deque[dict[str, Any]]] = {}
        self._order: deque[deque[dict[str, Any]]] = deque()  # whose event is the oldest of all
        self.rebalances = Rebalances(clock, limits)

    def add(self, group: str, event: str, client: str, **detail: Any) -> None:
        self._put(group, {"ms": self._clock.time_ms(), "event": event, "client": client, **_short(detail)})
        self.rebalances.note(group, event)

    def changed_hands(self, event: str, key: LeaseKey, client: str, epoch: int) -> None:
        """A lease that began or ended. One request may have 8,192 of them, so this does as little as it can."""
        group, topic, queue_id = key
        ms = self._clock.time_ms()
        self._put(
            group, {"ms": ms, "event": event, "client": client, "topic": topic, "queue": queue_id, "epoch": epoch}
        )
        self.rebalances.changed_hands(key, is_free=event != LOCKED)

    def _put(self, group: str, event: dict[str, Any]) -> None:
        events = self._events.get(group)
        if events is None:
            events = self._events[group] = deque()
            if len(self._events) > self._limits.history_groups:
                self._events.pop(next(iter(self._events))).clear()
        events.append(event)
        self._order.append(events)
        if len(events) > self._limits.history_events:
            events.popleft()
        if len(self._order) > self._limits.history_all_events:
            oldest = self._order.popleft()
            if oldest:
                oldest.popleft()

    def of(self, group: str, since_ms: int = 0) -> list[dict[str, Any]]:
        """The events from a time on, so that a command that looks every second gets only new ones."""
        found = self._events.get(group, ())
        if not since_ms:
            return list(found)
        newest = list(itertools.takewhile(lambda event: event["ms"] >= since_ms, reversed(found)))
        return newest[::-1]


def _short(detail: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:HISTORY_TEXT_CHARS] if isinstance(value, str) else value for name, value in detail.items()}
