"""Batches that wait for their size: what comes of a queue is kept until a batch is full, or its first message has waited long
enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..message import Message
from .process_queue import ProcessQueue, Run


class Filling:
    """`put(runs)` takes runs of one queue that are ready."""

    def __init__(self, size: int, wait_s: float, put: Callable[[Sequence[Run]], None]) -> None:
        self._size = size
        self._wait_s = wait_s
        self._put = put
        self._timers: dict[Run, asyncio.TimerHandle] = {}

    def take(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        """Messages that a pull has brought."""
        ready: list[Run] = []
        last = process_queue.runs[-1] if process_queue.runs else None
        if last is not None and last.is_filling:
            count = self._size - len(last.messages)
            process_queue.extend(last, messages[:count])
            messages = messages[count:]
            if len(last.messages) >= self._size:
                self._timers.pop(last).cancel()
                last.is_filling = False
                ready.append(last)
        runs = process_queue.add(messages, next_offset, self._size)
        if runs and len(runs[-1].messages) < self._size:
            last = runs.pop()
            last.is_filling = True
            self._timers[last] = asyncio.get_running_loop().call_later(self._wait_s, self._due, last)
        self._put([*ready, *runs])

    def _due(self, run: Run) -> None:
        del self._timers[run]
        run.is_filling = False
        if not run.is_done:  # else a seek has dropped it
            self._put([run])

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


__all__ = ["Filling"]
