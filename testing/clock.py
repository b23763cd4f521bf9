"""Clocks that tests advance, such as that of a broker under test, which runs like the machine's clock otherwise.

The broker's state that waits or expires uses this clock: delay levels, retries, transaction checks, leases, members,
retention, held pulls and the times of messages. Clients use the machine's clock. An advance counts as contact with every
connected client, because the broker would otherwise drop it, except for clients that a fault has frozen.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from heapq import heappop, heappush

from ..broker.runtime.clock import Clock, Timer
from .config import COARSE_S, FINE_FOR_S, FINE_S, MAX_ADVANCE_S, MAX_COARSE_STEPS

Run = Callable[[Callable[[], None]], None]


def run_here(action: Callable[[], None]) -> None:
    """Run a function in the calling thread, which is the broker's."""
    action()


class MovableClock(Clock):
    """The machine's time plus the time that it was advanced by. If `stands`, only `advance` moves it."""

    def __init__(self, *, stands: bool = False) -> None:
        self._stands = stands
        self._began = (time.monotonic(), time.time())
        self._ahead_s = 0.0
        self._is_advancing = False
        self._timers: list[tuple[float, int, _MovableTimer]] = []
        self._numbers = itertools.count()
        self._next: asyncio.TimerHandle | None = None

    def monotonic_s(self) -> float:
        return (self._began[0] if self._stands else time.monotonic()) + self._ahead_s

    def time_s(self) -> float:
        return (self._began[1] if self._stands else time.time()) + self._ahead_s

    def call_later(self, delay_s: float, action: Callable[..., object], *arguments: object) -> Timer:
        timer = _MovableTimer(action, arguments)
        heappush(self._timers, (self.monotonic_s() + max(delay_s, 0.0), next(self._numbers), timer))
        self._wait()
        return timer

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and run all timers that become due, each at its time and in order."""
        end_s = self.monotonic_s() + seconds
        self._is_advancing = True
        try:
            while self._timers and self._timers[0][0] <= end_s:
                due_s, _, timer = heappop(self._timers)
                self._ahead_s += max(due_s - self.monotonic_s(), 0.0)
                timer.run()
        finally:
            self._is_advancing = False
        self._ahead_s += max(end_s - self.monotonic_s(), 0.0)
        self._wait()

    def stop(self) -> None:
        """Drop all timers."""
        self._timers.clear()
        self._wait()

    def _wait(self) -> None:
        """Schedule the first timer in the event loop, unless the clock stands."""
        if self._is_advancing:  # `advance` calls this once at its end
            return
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._timers and not self._stands:
            wait_s = max(self._timers[0][0] - self.monotonic_s(), 0.0)
            self._next = asyncio.get_running_loop().call_later(wait_s, self.advance, 0.0)


class _MovableTimer:
    def __init__(self, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._action: Callable[..., object] | None = action
        self._arguments = arguments

    def cancel(self) -> None:
        self._action = None

    def run(self) -> None:
        """Run the action. An exception goes to the loop's exception handler, as with timers of the loop."""
        if self._action is None:
            return
        try:
            self._action(*self._arguments)
        except Exception as error:
            context = {"message": f"timer failed: {self._action}", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


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
