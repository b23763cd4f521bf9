"""The worker tasks that run a handler. A worker that is cancelled before the consumer stops is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ..config import ClientLimits
from ..log import get_logger
from .calling import Calling

log = get_logger("rocketlet.handler")


class Crew:
    """`work` is one worker's loop; `is_closed()`: whether a worker that ends has to be replaced no more."""

    def __init__(
        self,
        call: Calling,
        work: Callable[[], Coroutine[Any, Any, None]],
        is_closed: Callable[[], bool],
        limits: ClientLimits,
    ) -> None:
        self._call = call
        self._work = work
        self._is_closed = is_closed
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def start(self, count: int) -> None:
        for number in range(count):
            self._hire(number)

    def _hire(self, number: int) -> None:
        if not self._is_closed():
            task = asyncio.create_task(self._work(), name=f"handler {number}")
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._is_closed():
            log.warning("worker_cancelled", worker=number, hint="another one takes its place")
            self._loop.call_later(self._limits.restart_s, self._hire, number)

    def add(self, task: asyncio.Task[None]) -> None:
        """Adds a task that ends with the workers, and that nobody replaces."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, drain_s: float) -> None:
        """Waits up to `drain_s` for the workers to end."""
        if self._tasks and drain_s > 0:
            await asyncio.wait(self._tasks, timeout=drain_s)

    async def cancel(self) -> None:
        """Cancels the workers and waits for their end; the caller has closed the consumer before."""
        for task in self._tasks:
            task.cancel()
        self._call.stop()
        if self._tasks:  # no gather, which cancels them again: one of them may wait for the caller
            await asyncio.wait(self._tasks)

    def is_handling_here(self) -> bool:
        """Whether a handler of this crew is the caller."""
        try:
            current = asyncio.current_task()
        except RuntimeError:  # in a thread without a loop
            current = None
        return self._call.is_here() or any(task is current for task in self._tasks)
