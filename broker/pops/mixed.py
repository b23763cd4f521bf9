"""Groups in which some want to pull a topic that others pop, or the other way round: the second kind is refused, and that is
said, in the log and in the group's history, every ten minutes for as long as it goes on."""

from __future__ import annotations

import structlog

from ..clock import Clock
from ..config import MAX_MIXED, REPORT_AGAIN_S
from ..groups.history import History

log = structlog.get_logger("rocketlet.pops")


class Mixed:
    def __init__(self, clock: Clock, history: History) -> None:
        self._clock = clock
        self._history = history
        self._said_s: dict[tuple[str, str], float] = {}

    def note(self, group: str, topic: str, reason: str) -> None:
        key, now_s = (group, topic), self._clock.monotonic_s()
        if now_s - self._said_s.get(key, float("-inf")) < REPORT_AGAIN_S:
            return
        self._said_s.pop(key, None)
        self._said_s[key] = now_s
        if len(self._said_s) > MAX_MIXED:
            del self._said_s[next(iter(self._said_s))]
        hint = "stop one kind, or give it a group of its own; 30 s behind the last receive the others may begin"
        log.warning("group_pulls_and_pops", group=group, topic=topic, reason=reason, hint=hint)
        self._history.add(group, "refused", "", topic=topic, fault=reason)
