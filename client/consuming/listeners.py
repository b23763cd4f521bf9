"""The user's functions that hear of queues that come and go: plain or async, and free to raise anything."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Final

from ...protocol.queue import Queue
from ..arguments import check_starts
from ..log import get_logger

log = get_logger("rocketlet.consumer")

_HINT: Final = "the queue begins at the group's offset"

Listener = Callable[[set[Queue]], Awaitable[None] | None]
Starts = Mapping[Queue, int] | None
Assigned = Callable[[set[Queue]], Awaitable[Starts] | Starts]
"""Told of a queue that has come. It may return where to begin, an offset by queue, instead of at the group's offset."""


def told(listener: Listener, queue: Queue) -> Coroutine[None, None, None] | None:
    """Calls the listener. Returns the rest of it to await, which raises nothing."""
    try:
        answer = listener({queue})
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
        return None
    return _awaited(answer, queue) if inspect.isawaitable(answer) else None


def placed(listener: Assigned, queue: Queue, begin: Callable[[int | None], None]) -> Coroutine[None, None, None] | None:
    """Calls the listener, then `begin` with the offset that it names, if any. Returns the rest to await until then. A
    listener that fails names none."""
    offset = None
    try:
        answer = listener({queue})
        if inspect.isawaitable(answer):
            return _placed_later(answer, queue, begin)
        offset = _start(answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)
    return None


async def _placed_later(answer: Awaitable[Starts], queue: Queue, begin: Callable[[int | None], None]) -> None:
    offset = None
    try:
        offset = _start(await answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue), hint=_HINT)
    begin(offset)


def _start(starts: Starts, queue: Queue) -> int | None:
    """The offset for this queue; None if none is named. Raises ConfigError for anything but a mapping of offsets by
    queue."""
    if starts is None:
        return None
    check_starts(starts)
    return starts.get(queue)


async def _awaited(answer: Awaitable[None], queue: Queue) -> None:
    try:
        await answer
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
