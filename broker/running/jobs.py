"""Work that also waits for the device, such as to save a state file.

A job is a generator. It yields None after each piece of work, and calls that may take as long as the device wants to. `run`
makes these at once. A broker makes them in a thread, and does something else meanwhile: a slow disk stops nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

Call = Callable[[], object]
Job = Generator[Call | None, None, T]


def make_all(calls: Iterable[Call]) -> None:
    """Makes the calls one after the other, with nothing between them."""
    for call in calls:
        call()


async def do(job: Job[T], make: Callable[[Call | None], Awaitable[object]]) -> T:
    """Does the job: `make` makes its calls, and is free where the job yields None. Raises the job's exceptions."""
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
    """Does the job without doing anything else meanwhile. Raises its exceptions."""
    try:
        do(job, _make_at_once).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a job waited that is done at once")


async def _make_at_once(call: Call | None) -> None:
    if call is not None:
        call()
