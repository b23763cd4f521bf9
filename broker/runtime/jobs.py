"""Work that also waits for the device, for example to save a state file, and the thread that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# A job is a generator. A job yields None after each piece of work, and yields calls that may wait for the device. `Device`
# makes these calls in a thread, so that a slow disk does not block the event loop. `run` makes them immediately.


T = TypeVar("T")

Call = Callable[[], object]
Job = Generator[Call | None, None, T]


def make_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


async def do(job: Job[T], make: Callable[[Call | None], Awaitable[object]]) -> T:
    """Do a job and return its result. `make` makes the calls that the job yields; for None, it may yield to the loop. An
    exception of `make` is raised in the job. Raises the job's exceptions."""
    fault: Exception | None = None
    while True:
        try:
            call = next(job) if fault is None else job.throw(fault)
        except StopIteration as end:
            result: T = end.value
            return result
        fault = None
        try:
            await make(call)
        except Exception as error:
            fault = error


def run(job: Job[T]) -> T:
    """Do a job and return its result, blocking until it is done. Raises the job's exceptions."""
    try:
        do(job, _make_at_once).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a job that runs synchronously waited for the loop")


async def _make_at_once(call: Call | None) -> None:
    if call is not None:
        call()


class Device:
    """Does jobs one after the other in the event loop, and makes their blocking calls in one thread."""

    def __init__(self) -> None:
        # Not the loop's default executor, because user code in the same loop may have shut that down
        self._thread = ThreadPoolExecutor(1, "device")
        self._jobs = asyncio.Lock()

    async def do(self, job: Job[T]) -> T:
        """Do a job after all earlier ones, and return its result. Raises the job's exceptions."""
        async with self._jobs:
            return await do(job, self._make)

    async def _make(self, call: Call | None) -> None:
        await (asyncio.sleep(0) if call is None else self.make([call]))

    async def make(self, calls: list[Call]) -> None:
        """Make the calls in the thread, after all earlier ones, and return when they are done. Raises the exception of the
        first call that fails; the calls after it are not made. An empty list waits for the earlier calls only."""
        await asyncio.get_running_loop().run_in_executor(self._thread, make_all, calls)

    def end(self) -> None:
        """Cancel the calls that wait for the device thread. A running call is neither interrupted nor awaited."""
        self._thread.shutdown(wait=False, cancel_futures=True)
