"""The clock of a broker under test: it runs like the machine's clock, and `advance` moves it forward.

The broker's state that waits or expires uses this clock: delay levels, retries, transaction checks, leases, members,
retention, held pulls and the times of messages. Clients use the machine's clock. An advance counts as contact with every
connected client, because the broker would otherwise drop it, except for clients that a fault has frozen.
"""

from __future__ import annotations

from collections.abc import Callable

from ..broker.runtime import MovableClock
from .config import COARSE_S, FINE_FOR_S, FINE_S, MAX_ADVANCE_S, MAX_COARSE_STEPS

Run = Callable[[Callable[[], None]], None]


def run_here(action: Callable[[], None]) -> None:
    """Run a function in the calling thread, which is the broker's."""
    action()


class BrokerClock(MovableClock):
    """Clock of a broker under test.

    Args:
        keep_alive: records contact with all connected clients
        next_due_s: returns the time until the first delayed message is due, in seconds, or None
        is_anyone_frozen: returns True if a fault has frozen a client
        run: calls a function in the broker's thread
    """

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
        """The broker's time, in ms since the epoch."""
        return self.time_ms()

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        """Advance the broker's time. The broker's timers that become due have run when this returns; for example, delayed
        messages are written to the connections of the consumers that wait for them.

        Raises ValueError for a negative time, and for more than 366 days.
        """
        total_s = seconds + 60 * minutes + 3600 * hours + 86_400 * days
        if total_s < 0:
            raise ValueError(f"the clock cannot be set back by {-total_s} s; expected 0 or more")
        if not total_s <= MAX_ADVANCE_S:
            raise ValueError(f"the clock cannot advance by {total_s} s; maximum {MAX_ADVANCE_S} (366 days)")
        self._run(lambda: self._advance(total_s))

    def reset(self) -> None:
        """Return to the machine's time, and cancel all timers."""
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
        """Advance to the next delayed message, but at most by `most_s`, in one step instead of one step per sweep."""
        due_s = self._next_due_s()
        step_s = most_s if due_s is None else min(most_s, max(due_s, 0.001))
        self._ahead_s += step_s
        self._keep_alive()
        super().advance(0.0)
