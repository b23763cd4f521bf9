"""Handler calls that are running: their messages, ages and stacks, for administrators who ask where a handler hangs."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from ...protocol.admin_bodies import RunningHandler
from ..config import MAX_REPORTED_HANDLERS, MAX_STACK_FRAMES
from ..message import Message, record_fault

_PACKAGE: Final = str(Path(__file__).parents[1])


Call = tuple[Sequence[Message], float]
"""A handler call: its messages, and the time of `time.monotonic` at which it began. Compare calls by identity. A plain tuple,
because workers create one for each message."""


class RunningCalls:
    """The handler calls of workers, by the worker's task.

    Attributes:
        of_task: the call of each worker's task. Workers write it directly, because they do so for each message.
    """

    def __init__(self) -> None:
        self.of_task: dict[asyncio.Task[Any], Call] = {}
        self._of_thread: dict[
            int, Call | None
        ] = {}  # by the thread's identifier, because a thread runs one call at a time

    def current(self) -> Call | None:
        """Return the call of the current task; None if the task is not a worker's."""
        task = asyncio.current_task()
        return None if task is None else self.of_task.get(task)

    def in_thread(self, call: Call | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function of a call in the current thread, whose stack is then reported for the call."""
        thread = threading.get_ident()
        self._of_thread[thread] = call
        try:
            return function(*arguments)
        finally:
            del self._of_thread[thread]

    def report(self, *, stacks: bool) -> list[RunningHandler]:
        """Return the calls that have been running for longest, and the newest, up to MAX_REPORTED_HANDLERS.

        Args:
            stacks: True to include their stacks.
        """
        now_s = time.monotonic()
        calls = sorted(self.of_task.items(), key=lambda item: item[1][1])
        if len(calls) > MAX_REPORTED_HANDLERS:
            del calls[MAX_REPORTED_HANDLERS - 1 : -1]
        threads = list(self._of_thread.items()) if stacks else []
        frames = sys._current_frames() if threads else {}
        return [
            RunningHandler(
                call[0][0].message_id,
                call[0][0].queue.topic,
                call[0][0].queue.broker_name,
                call[0][0].queue.queue_id,
                call[0][0].queue_offset,
                call[0][0].attempt,
                int((now_s - call[1]) * 1000),
                len(call[0]),
                # The newest thread: an earlier one of the call may still run after its middleware has timed out.
                _stack(task, next((frames.get(thread) for thread, of in reversed(threads) if of is call), None))
                if stacks
                else [],
            )
            for task, call in calls
            if record_fault(call[0][0]) is None  # a handler may get a message that cannot be read
        ]


def _stack(task: asyncio.Task[Any], frame: FrameType | None) -> list[str]:
    """Return the places in the code where a call is, the outermost first, from the application's first one on.

    Args:
        frame: the innermost frame of the call's thread; None if the call runs in its task.
    """
    places = _places_of_thread(frame) if frame is not None else list(_places(task.get_coro()))
    own = next((number for number, (code, _) in enumerate(places) if not _is_ours(code)), len(places))
    kept = places[own:][-MAX_STACK_FRAMES:] or places[-1:]
    return [f"{code.co_filename}:{line} {code.co_qualname}" for code, line in kept]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


def _places(awaited: object) -> Iterator[tuple[CodeType, int]]:
    """Yield the places at which a suspended coroutine, and each coroutine that it awaits, continues. The chain ends at a
    future, such as another task."""
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if isinstance(frame, FrameType):
                yield frame.f_code, frame.f_lineno or 0
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
                break
        else:
            return


def _places_of_thread(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return the places of a thread's stack after the last call of `in_thread`."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code is not RunningCalls.in_thread.__code__:
        found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]


def jstack_of(handlers: Sequence[RunningHandler]) -> str:
    """Return running handlers as the text that mqadmin prints for a Java member's threads."""
    return "\n".join(
        f"{handler.named()}\n" + "".join(f"    at {place}\n" for place in reversed(handler.stack))
        for handler in handlers
    )
