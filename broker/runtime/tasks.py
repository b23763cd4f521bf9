"""A broker's background tasks: periodic work, and coroutines. `Tasks` owns them and ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from .clock import Clock, Timer

log = structlog.get_logger("rocketlet.tasks")


class Tasks:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: set[asyncio.Task[None]] = set()
        self._timers: dict[str, Timer] = {}

    def every(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        """Call `action` at this interval, even after it raised, so that no timer stops silently."""
        self._timers[name] = self._clock.call_later(interval_s, self._tick, interval_s, name, action)

    def _tick(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        self.every(interval_s, name, action)
        try:
            action()
        except Exception:
            log.exception("timer_failed", action=name)

    def spawn(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task_failed", exc_info=error)

    async def stop(self) -> None:
        """Stop the timers, cancel the tasks, and return when they have ended."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
