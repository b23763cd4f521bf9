"""The ends of waits, of which very many may be due together: those of clients that began to wait together."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Final

import structlog

from ...protocol.bodies import Work
from .clock import Clock, Timer
from .turns import Turns

log = structlog.get_logger("rocketlet.turns")


_TICK_S: Final = 0.01


class Timeouts:
    """Calls of actions after a time. One timer is for all calls that are due within 10 ms, and the calls are work in turns,
    one per piece."""

    def __init__(self, clock: Clock, turns: Turns) -> None:
        self._clock = clock
        self._turns = turns
        self._began_s = clock.monotonic_s()
        self._ticks: dict[int, _Tick] = {}

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Timer:
        """Call `action` after this time, up to 10 ms later, unless the result is cancelled before."""
        now_s = self._clock.monotonic_s() - self._began_s
        number = ceil((now_s + delay_s) / _TICK_S - 1e-6)
        tick = self._ticks.get(number)
        if tick is None:
            timer = self._clock.call_later(max(number * _TICK_S - now_s, 0.0), self._fire, number)
            tick = self._ticks[number] = _Tick(timer)
        timeout = _Timeout(tick)
        tick.actions[timeout] = action
        return timeout

    def _fire(self, number: int) -> None:
        self._turns.do(self._ticks.pop(number).calling())


class _Tick:
    """The calls that are due together, and their timer. It keeps no action that is cancelled or called: an action usually
    refers to the object that has the timeout, and such a circle would live until the next full garbage collection."""

    __slots__ = ("actions", "timer")

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.actions: dict[_Timeout, Callable[[], object]] = {}

    def calling(self) -> Work[None]:
        for timeout in list(self.actions):
            action = self.actions.pop(timeout, None)
            if action is not None:  # else cancelled meanwhile
                try:
                    action()
                except Exception:  # the others must not miss their calls
                    log.exception("work_failed")
            yield


class _Timeout:
    __slots__ = ("_tick",)

    def __init__(self, tick: _Tick) -> None:
        self._tick = tick

    def cancel(self) -> None:
        self._tick.actions.pop(self, None)
