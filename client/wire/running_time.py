"""A timeout that counts the time for which the event loop runs.

A loop runs its timers before it reads its sockets. When the process stood still (a handler blocked, the machine was
overloaded), a plain timeout would end requests whose answers wait in the socket.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from ..config import TIMEOUT_TICK_S

_LONGEST_S: Final = 1e9  # stands for an endless one


@asynccontextmanager
async def running_timeout(timeout_s: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but in ticks: one that comes late counts as one. At least two, with a look at the sockets
    between."""
    loop = asyncio.get_running_loop()
    timeout_s = min(timeout_s, _LONGEST_S)
    left = max(2, math.ceil(timeout_s / TIMEOUT_TICK_S))
    tick_s = timeout_s / left
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(tick_s, tick)
        else:
            timeout.reschedule(loop.time())

    timer = loop.call_later(tick_s, tick)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        timer.cancel()
