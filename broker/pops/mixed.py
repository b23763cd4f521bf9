"""Groups in which clients pop a topic, and others read it that share its queues with nobody, or the other way round: the
second kind is refused. The log and the group's history say that every ten minutes for as long as it goes on."""

from __future__ import annotations

import structlog

from ..clock import Clock
from ..config import LIMITS, REPORT_AGAIN_S, Limits
from ..groups.history import History

log = structlog.get_logger("rocketlet.pops")


class Mixed:
    def __init__(self, clock: Clock, history: History, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._clock = clock
        self._history = history
        self._said_s: dict[tuple[str, str], float] = {}

    def note(self, group: str, topic: str, reason: str) -> None:
        key, now_s = (group, topic), self._clock.monotonic_s()
        if now_s - self._said_s.get(key, float("-inf")) < REPORT_AGAIN_S:
            return
        self._said_s.pop(key, None)
        self._said_s[key] = now_s
        if len(self._said_s) > self._limits.max_mixed:
            del self._said_s[next(iter(self._said_s))]
        hint = "consumers that broadcast, or that assign queues to themselves, need a group of their own"
        log.warning("group_pulls_and_pops", group=group, topic=topic, reason=reason, hint=hint)
        self._history.add(group, "refused", "", topic=topic, fault=reason)
