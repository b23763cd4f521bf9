"""The time of a broker under test: it runs as the machine's does, and `advance` moves it on.

Everything in the broker that waits or expires goes by it: delay levels, retries, transaction checks, leases, members,
retention, held pulls and the times of messages. Clients keep the machine's time. So that a jump does not look to the broker
like the death of all of them, connected members count as heard from, unless a fault has frozen them.
"""

from __future__ import annotations

from collections.abc import Callable

from ..broker.runtime import MovableClock
from .config import COARSE_S, FINE_FOR_S, FINE_S, MAX_ADVANCE_S, MAX_COARSE_STEPS

Run = Callable[[Callable[[], None]], None]


def run_here(action: Callable[[], None]) -> None:
    """Runs in the thread that calls, which is the broker's."""
    action()


class BrokerClock(MovableClock):
    """`now_ms` is the broker's time, `advance` moves it. keep_alive: connected clients count as heard from. next_due_s: how
    long the first delayed message has to wait. run: calls in the broker's thread."""

    def __init__(
        self,
        *,
        keep_alive: Callable[[], None],
        next_due_s: Callable[[], float | None],
        is_anyone_frozen: Callable[[], bool],
        run: Run = run_here,
    ) -> None:
        super().__init__()
        self._keep_alive = keep_alive
        self._next_due_s = next_due_s
        self._is_anyone_frozen = is_anyone_frozen
        self._run = run

    @property
    def now_ms(self) -> int:
        """ms since the epoch, as the broker stamps messages."""
        return self.time_ms()

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        """Moves the broker's time on. Everything that falls due on the way is done when this returns: delayed messages are
        written to the consumers that wait for them. Raises ValueError for a negative time, and for more than 366 days."""
        total_s = seconds + 60 * minutes + 3600 * hours + 86_400 * days
        if total_s < 0:
            raise ValueError(f"the clock cannot go back by {-total_s} s; give a time of 0 or more")
        if not total_s <= MAX_ADVANCE_S:
            raise ValueError(
                f"the clock cannot move on by {total_s} s; {MAX_ADVANCE_S} (366 days) at a time are allowed"
            )
        self._run(lambda: self._advance(total_s))

    def reset(self) -> None:
        """Back to the machine's time, without timers."""
        self.stop()
        self._ahead_s = 0.0

    def _advance(self, total_s: float) -> None:
        begin_s = self.monotonic_s()
        coarse_s = max(COARSE_S, total_s / MAX_COARSE_STEPS)
        while (left_s := begin_s + total_s - self.monotonic_s()) > 0:
            if self._is_anyone_frozen() and total_s - left_s < FINE_FOR_S:
                self._keep_alive()
                super().advance(min(left_s, FINE_S))
            else:
                self._leap(min(left_s, coarse_s))
        super().advance(0.0)

    def _leap(self, most_s: float) -> None:
        """Moves to the next delayed message, without a turn for each second of idle sweeps."""
        due_s = self._next_due_s()
        step_s = most_s if due_s is None else min(most_s, max(due_s, 0.001))
        self._ahead_s += step_s
        self._keep_alive()
        super().advance(0.0)
