"""Clocks that tests set."""

from __future__ import annotations

from rocketlet.testing.clock import MovableClock


class WallClock(MovableClock):
    """Its wall clock can be set apart from the monotonic one."""

    set_s = 0.0

    def time_s(self) -> float:
        return super().time_s() + self.set_s
