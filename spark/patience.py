"""How long nothing has worked."""

from __future__ import annotations

import time
from collections.abc import Callable

from .config import MAX_PATIENCE_STEP_S


class Patience:
    """Is over when failures have gone on for longer than a limit, counted from the first one.

    Only time in which something was tried counts: between two looks it is at most 10 s and half of the limit, so that
    neither a batch that runs for long nor a process that was stopped for a while uses it up.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._failing_s = 0.0
        self._looked_s: float | None = None

    def renew(self) -> None:
        """Something worked."""
        self._failing_s, self._looked_s = 0.0, None

    def is_over(self) -> bool:
        """Whether patience is over. Ask at each failure."""
        now_s = self._clock()
        if self._looked_s is not None:
            self._failing_s += min(now_s - self._looked_s, MAX_PATIENCE_STEP_S, self._limit_s / 2)
        self._looked_s = now_s
        return self._failing_s >= self._limit_s
