"""The collector of circular garbage, in a process that runs servers only.

Python frees an object when nothing refers to it any more. Its collector is for objects that refer to each other in a
circle, and looks at all objects there are, again and again while they become more: with the 10,000 members of a large group
it takes 130 ms, in which nobody is served. A server leaves no circles behind, however its clients leave. So the collector
looks at new objects only, and every second the survivors are set aside, which takes no time. Circles that a library leaves
are found when memory has doubled: then the collector looks at all objects once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import structlog

from ..clock import MACHINE, Clock
from ..config import GARBAGE_GROWTH, GARBAGE_MIN_BYTES, GARBAGE_SWEEP_S
from .machine import resident_bytes
from .tasks import Tasks

log = structlog.get_logger("rocketlet.garbage")

_YOUNG: Final = 1  # the oldest of the generations that are still collected
_NEVER: Final = 2**31 - 1


class Garbage:
    """`async with Garbage()`: for the whole process, until the block ends. Where the system does not say how much memory the
    process has (only Linux does), the collector stays as it is."""

    def __init__(self, clock: Clock = MACHINE, memory_bytes: Callable[[], int] = resident_bytes) -> None:
        self._memory_bytes = memory_bytes
        self._tasks = Tasks(clock)
        self._thresholds = gc.get_threshold()
        self._limit_bytes = 0

    async def __aenter__(self) -> Garbage:
        if self._memory_bytes():
            gc.set_threshold(*self._thresholds[:2], _NEVER)
            self._tasks.every(GARBAGE_SWEEP_S, "garbage", self._sweep)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.stop()
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _sweep(self) -> None:
        used_bytes = self._memory_bytes()
        is_grown = 0 < self._limit_bytes < used_bytes
        if is_grown:
            gc.unfreeze()
            found = gc.collect()
            log.info("garbage_collected", objects=found, used_bytes=used_bytes)
        else:
            gc.collect(_YOUNG)
        gc.freeze()
        if is_grown or not self._limit_bytes:
            self._limit_bytes = int(used_bytes * GARBAGE_GROWTH) + GARBAGE_MIN_BYTES
