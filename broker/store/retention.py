"""The time by which segments expire: the machine's, unless it has just jumped ahead.

A wall clock that is set ahead by mistake, by 30 days say, would have everything expire at once, and nothing brings that back.
The monotonic clock tells such a jump from time that went by. For as long as the jump is wide, a day at most, the time before
it counts on: then it was a machine that slept, or somebody had a day to see what the log says.
"""

from __future__ import annotations

import structlog

from ..clock import Clock
from ..config import MAX_CLOCK_DOUBT_S, RETENTION_JUMP_S

log = structlog.get_logger("rocketlet.store")


class RetentionTime:
    """Seconds since the epoch, by a clock that is looked at every so often."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = self._wall_ahead_s()
        self._ahead_s = 0.0
        self._doubted_until_s = 0.0

    def _wall_ahead_s(self) -> float:
        return self._clock.time_s() - self._clock.monotonic_s()

    @property
    def ahead_s(self) -> float:
        """How far the wall clock jumped, while the time before counts on; else 0."""
        return self._ahead_s if self._clock.monotonic_s() < self._doubted_until_s else 0.0

    def now_s(self) -> float:
        offset_s, now_s = self._wall_ahead_s(), self._clock.monotonic_s()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if now_s >= self._doubted_until_s:
            self._ahead_s = 0.0
        if jump_s > RETENTION_JUMP_S:
            self._ahead_s += jump_s
            self._doubted_until_s = now_s + min(self._ahead_s, MAX_CLOCK_DOUBT_S)
            self._say(jump_s, self._doubted_until_s - now_s)
        elif jump_s < 0:  # it was set back, or is being
            self._ahead_s = max(self._ahead_s + jump_s, 0.0)
        return self._clock.time_s() - self._ahead_s

    def _say(self, jump_s: float, wait_s: float) -> None:
        hint = "segments expire by the time before for so long; if the machine's clock is wrong, set it back"
        log.error("clock_set_ahead", ahead_s=round(jump_s), wait_s=round(wait_s), hint=hint)
