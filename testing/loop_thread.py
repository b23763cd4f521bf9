"""An event loop in a thread of its own, for tests without asyncio and for one broker in many tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from .config import ANSWER_S

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop. `wait` runs a coroutine in it, `do` a function."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rocketlet broker", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result. Raises TimeoutError if that takes longer than `ANSWER_S`."""
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            if answer.done():  # the coroutine itself raised it
                raise
            answer.cancel()
            raise TimeoutError(f"the broker has not responded for {ANSWER_S} s") from None

    def do(self, action: Callable[[], T]) -> T:
        """Run a function in the loop, and return its result."""
        if threading.current_thread() is self._thread:
            return action()

        async def run() -> T:
            found = action()
            await asyncio.sleep(0)  # lets tasks that the function has created start
            return found

        return self.wait(run())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    with suppress(ImportError):
        from .loop import CheckedLoop

        return CheckedLoop()
    return asyncio.new_event_loop()
