"""A timeout for repeated failures."""

from __future__ import annotations

import time
from collections.abc import Callable

from .config import MAX_PATIENCE_STEP_S


class FailureTimeout:
    """A timeout that expires when operations have failed for longer than a limit, counted from the first failure.

    The time between two failures counts with at most 10 s and at most half of the limit, so that neither a long batch
    nor a suspended process uses up the limit.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._failing_s = 0.0
        self._failed_s: float | None = None

    def renew(self) -> None:
        """Reset the timeout after a success."""
        self._failing_s, self._failed_s = 0.0, None

    def is_over(self) -> bool:
        """Record a failure, and return True if the timeout has expired."""
        now_s = self._clock()
        if self._failed_s is not None:
            self._failing_s += min(now_s - self._failed_s, MAX_PATIENCE_STEP_S, self._limit_s / 2)
        self._failed_s = now_s
        return self._failing_s >= self._limit_s
