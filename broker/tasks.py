"""A broker's background tasks: what runs at intervals, and what answers a request later. One owner, one way to end them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("rocketlet.tasks")


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def every(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        """Calls `action` at this interval, whether it fails or not: no timer dies silently."""
        self.spawn(self._repeat(interval_s, name, action))

    async def _repeat(self, interval_s: float, name: str, action: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                action()
            except Exception:
                log.exception("timer_failed", action=name)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task_failed", exc_info=error)

    async def stop(self) -> None:
        """Cancels all, and returns when they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
