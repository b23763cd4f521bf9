"""What happened to a group's queues and members: the newest events of each group, for administrators."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from ..clock import Clock
from ..config import HISTORY_EVENTS, HISTORY_GROUPS
from .rebalances import Rebalances


class History:
    """Per group, at most 10,000 events: `{"ms", "event", "client", ...}`, oldest first; of the 1,000 youngest groups."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: dict[str, deque[dict[str, Any]]] = {}
        self.rebalances = Rebalances(clock)

    def add(self, group: str, event: str, client: str, **detail: Any) -> None:
        events = self._events.get(group)
        if events is None:
            events = self._events[group] = deque(maxlen=HISTORY_EVENTS)
            if len(self._events) > HISTORY_GROUPS:
                del self._events[next(iter(self._events))]
        events.append({"ms": self._clock.time_ms(), "event": event, "client": client, **detail})
        self.rebalances.note(group, event, detail.get("topic", ""), detail.get("queue", 0))

    def of(self, group: str, since_ms: int = 0) -> list[dict[str, Any]]:
        """The events from a time on. Who looks every second asks for what is new."""
        found = self._events.get(group, ())
        if not since_ms:
            return list(found)
        newest = list(itertools.takewhile(lambda event: event["ms"] >= since_ms, reversed(found)))
        return newest[::-1]
