"""The broker's source of time for state, so that tests can move it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

# State that expires, becomes due or gets a timestamp, such as messages, leases and members, uses the broker's `Clock`
# and its `call_later`. A test moves a `MovableClock` (`testing/clock.py`) forward, so that delayed messages, leases,
# transaction checks and retention become due immediately. The simulation replaces the time module and the event loop
# instead, which makes the same `Clock` virtual.
#
# Timeouts of requests to another process, such as a name server, use the event loop's own time, and time slices use
# `time.perf_counter`.


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """Return the time for durations, in seconds, which never goes back."""
        return time.monotonic()

    def time_s(self) -> float:
        """Return the seconds since the epoch, for times that are stored or shown."""
        return time.time()

    def time_ms(self) -> int:
        return int(self.time_s() * 1000)

    def call_later(self, delay_s: float, action: Callable[..., object], *arguments: object) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def call_soon(self, action: Callable[..., object], *arguments: object) -> None:
        """Call `action` in the next event-loop iteration."""
        asyncio.get_running_loop().call_soon(action, *arguments)


MACHINE: Final = Clock()


class SingleTimer:
    """A timer that calls an action once. To set it again replaces the time of the call."""

    __slots__ = ("_action", "_clock", "_timer")

    def __init__(self, clock: Clock, action: Callable[[], object]) -> None:
        self._clock = clock
        self._action = action
        self._timer: Timer | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, delay_s: float) -> None:
        self.cancel()
        self._timer = self._clock.call_later(delay_s, self._call)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self._action()
