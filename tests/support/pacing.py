"""Real time in tests. Only these functions sleep.

A test that waits for a result uses `eventually`, and a test of what happens later moves the broker's clock. Real time is left
for load, for handlers that take a while, for faults at a random moment, and for clocks of other programs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator


def poll_intervals() -> Iterator[float]:
    """Yield the pauses between polls: 2 ms, and up to 20 ms after 2 s, because dozens of programs share a core."""
    interval_s = 0.002
    while True:
        yield interval_s
        interval_s = min(interval_s * 1.01, 0.02)


async def pace(interval_s: float) -> None:
    """Wait between two rounds of a load generator, or between two polls."""
    await asyncio.sleep(interval_s)


async def work_for(seconds: float) -> None:
    """Take this long, in a handler."""
    await pace(seconds)


async def pass_real_time(seconds: float) -> None:
    """Wait until this much time has passed for another program, whose clock a test cannot move."""
    await pace(seconds)


async def pause_at_random(chance: random.Random, most_s: float) -> None:
    """Wait up to `most_s`, so that a fault comes at a random moment."""
    await pace(chance.uniform(0, most_s))
