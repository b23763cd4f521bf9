"""The time that a broker reads and waits by, once, so that it can be turned.

Whatever expires, is due or is stamped asks its broker's `Clock`, and waits with its `call_later`. `MovableClock` is one
that a test moves forward: delayed messages, leases, checks of transactions and retention come at once. The simulation
goes one level below: it replaces the time module and the event loop, so that the same `Clock` is virtual there.

Waiting for another process, such as a name server that does not answer, takes the event loop's own time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final, Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """The machine's."""

    def monotonic_s(self) -> float:
        """The time for durations: it never goes back."""
        return time.monotonic()

    def time_s(self) -> float:
        """Seconds since the epoch, for times that are stored or shown."""
        return time.time()

    def time_ms(self) -> int:
        return int(self.time_s() * 1000)

    def call_later(self, delay_s: float, action: Callable[..., object], *arguments: Any) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, action, *arguments)


MACHINE: Final = Clock()


class MovableClock(Clock):
    """The machine's time, and as much more as it was advanced by. `stands`: it moves by `advance` only."""

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

    def call_later(self, delay_s: float, action: Callable[..., object], *arguments: Any) -> Timer:
        timer = _MovableTimer(action, arguments)
        heappush(self._timers, (self.monotonic_s() + max(delay_s, 0.0), next(self._numbers), timer))
        self._wait()
        return timer

    def advance(self, seconds: float) -> None:
        """Moves on, and runs everything that falls due on the way, each at its time and in order."""
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
        """Forgets all timers."""
        self._timers.clear()
        self._wait()

    def _wait(self) -> None:
        """Lets the event loop wake us for the first timer."""
        if self._is_advancing:  # once is enough, at the end
            return
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._timers and not self._stands:
            wait_s = max(self._timers[0][0] - self.monotonic_s(), 0.0)
            self._next = asyncio.get_running_loop().call_later(wait_s, self.advance, 0.0)


class _MovableTimer:
    def __init__(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._action: Callable[..., object] | None = action
        self._arguments = arguments

    def cancel(self) -> None:
        self._action = None

    def run(self) -> None:
        """Runs like a timer of the event loop: an exception goes to the loop's handler, and ends nothing else."""
        if self._action is None:
            return
        try:
            self._action(*self._arguments)
        except Exception as error:
            context = {"message": f"timer failed: {self._action}", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
