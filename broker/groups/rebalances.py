"""How long queues have no owner when they change hands, and how long groups take to come to rest, for metrics.

Both follow from what History is told: members that come and go, queues that are locked and unlocked. Foreign members do not
lock, so their groups are not in here.
"""

from __future__ import annotations

from ..clock import Clock
from ..config import HANDOVER_BOUNDS_S, LIMITS, REBALANCE_REST_S, Limits
from ..running.histogram import Histogram
from ..store.ledger import LeaseKey

_MEMBERS_CHANGED = frozenset(("joined", "left", "leaving", "subscribed"))


class Rebalances:
    def __init__(self, clock: Clock, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._clock = clock
        self.handovers = Histogram(HANDOVER_BOUNDS_S)
        self.settling = Histogram(HANDOVER_BOUNDS_S)
        self._freed_s: dict[LeaseKey, float] = {}
        self._running: dict[str, tuple[float, float]] = {}  # by group: when members changed, the last lock since then

    def note(self, group: str, event: str) -> None:
        """An event of the group's history that is no queue's."""
        if event in _MEMBERS_CHANGED:
            now_s = self._clock.monotonic_s()
            self._end_if_at_rest(group, now_s)
            self._running.setdefault(group, (now_s, now_s))

    def changed_hands(self, key: LeaseKey, *, is_free: bool) -> None:
        """A queue has no owner any more, or one."""
        now_s = self._clock.monotonic_s()
        if is_free:
            if len(self._freed_s) >= self._limits.max_free_queues:
                del self._freed_s[next(iter(self._freed_s))]
            self._freed_s[key] = now_s
        else:
            since_s = self._freed_s.pop(key, None)
            if since_s is not None:
                self.handovers.observe(now_s - since_s)
        running = self._running.get(key[0])
        if running is not None:
            self._running[key[0]] = (running[0], now_s)

    def look(self) -> None:
        """Counts the groups that have come to rest."""
        now_s = self._clock.monotonic_s()
        for group in list(self._running):
            self._end_if_at_rest(group, now_s)

    def _end_if_at_rest(self, group: str, now_s: float) -> None:
        began_s, last_s = self._running.get(group, (now_s, now_s))
        if now_s - last_s >= REBALANCE_REST_S:
            del self._running[group]
            if last_s > began_s:
                self.settling.observe(last_s - began_s)
