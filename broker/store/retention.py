"""Which segments expire, and the time by which they do: the machine's, unless it has just jumped ahead.

A wall clock that is set ahead by mistake, by 30 days say, would have everything expire at once, and nothing brings that back.
The monotonic clock tells such a jump from time that went by. For as long as the jump is wide, a day at most, the time before
it counts on: then it was a machine that slept, or somebody had a day to see what the log says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import structlog

from ..clock import Clock
from ..config import MAX_CLOCK_DOUBT_S, RETENTION_JUMP_S, BrokerConfig
from .commit_log import CommitLog

log = structlog.get_logger("rocketlet.store")


@dataclass(frozen=True, slots=True)
class Retention:
    """A segment expires that was last written before a time, or that begins before the last `total_bytes` of the log."""

    older_than_s: float
    total_bytes: int | None

    @classmethod
    def of(cls, config: BrokerConfig, now_s: float, waiting_bytes: int) -> Self:
        """Messages that wait for their time are kept until then, on top of the retained bytes."""
        total_bytes = None if config.retain_bytes is None else config.retain_bytes + waiting_bytes
        return cls(now_s - config.retain_hours * 3600, total_bytes)

    def expires(self, log: CommitLog, start: int) -> bool:
        is_too_old = log.modified_s(start) < self.older_than_s
        return is_too_old or (self.total_bytes is not None and log.end - start > self.total_bytes)


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
