"""The thread that waits for the device: a slow disk stops nobody else."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .jobs import Call, Job, do, make_all

T = TypeVar("T")


class Device:
    """Does jobs one after the other, in the loop; their calls that wait are made in one thread."""

    def __init__(self) -> None:
        # not the loop's own executor: a handler in the same loop may have shut that down
        self._thread = ThreadPoolExecutor(1, "device")
        self._jobs = asyncio.Lock()

    async def do(self, job: Job[T]) -> T:
        """Does a job in turns, and waits for the device in the thread. Raises its exceptions."""
        async with self._jobs:
            return await do(job, self._make)

    async def _make(self, call: Call | None) -> None:
        await (asyncio.sleep(0) if call is None else self.make([call]))

    async def make(self, calls: list[Call]) -> None:
        """Makes the calls in the thread. Returns behind all that were asked for before, also without any: what those keep
        is then kept."""
        await asyncio.get_running_loop().run_in_executor(self._thread, make_all, calls)

    def end(self) -> None:
        """Makes no calls any more. One that hangs may still end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
