"""Who is told of queues that come and go: functions of the user, plain or async, which may raise anything."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from ..protocol.bodies import Queue
from .log import get_logger

log = get_logger("rocketlet.consumer")

Listener = Callable[[set[Queue]], Awaitable[None] | None]
Starts = Mapping[Queue, int] | None
Assigned = Callable[[set[Queue]], Awaitable[Starts] | Starts]
"""Told of a queue that has come. It may return where to begin, by queue, instead of at the group's offset."""


def told(listener: Listener, queue: Queue) -> Coroutine[None, None, None] | None:
    """Calls the listener; what is still to be awaited of it, which raises nothing."""
    try:
        answer = listener({queue})
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
        return None
    return _awaited(answer, queue) if inspect.isawaitable(answer) else None


def placed(listener: Assigned, queue: Queue, begin: Callable[[int | None], None]) -> Coroutine[None, None, None] | None:
    """Calls the listener, then `begin` with the offset that it names, if any; what is still to be awaited until then. A
    listener that fails names none."""
    try:
        answer = listener({queue})
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
        begin(None)
        return None
    if inspect.isawaitable(answer):
        return _placed_later(answer, queue, begin)
    begin(_start(answer, queue))
    return None


async def _placed_later(answer: Awaitable[Starts], queue: Queue, begin: Callable[[int | None], None]) -> None:
    offset = None
    try:
        offset = _start(await answer, queue)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
    begin(offset)


def _start(starts: Starts, queue: Queue) -> int | None:
    """The offset for this queue. A listener may return anything: what is no mapping of numbers counts for nothing."""
    offset = starts.get(queue) if isinstance(starts, Mapping) else None
    return offset if type(offset) is int and offset >= 0 else None


async def _awaited(answer: Awaitable[None], queue: Queue) -> None:
    try:
        await answer
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
