"""Who is told of queues that come and go: functions of the user, plain or async, which may raise anything."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine

from ..protocol.bodies import Queue
from .log import get_logger

log = get_logger("rocketlet.consumer")

Listener = Callable[[set[Queue]], Awaitable[None] | None]


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


async def _awaited(answer: Awaitable[None], queue: Queue) -> None:
    try:
        await answer
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("listener_failed", queue=str(queue))
