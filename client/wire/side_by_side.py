"""Many questions, some of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from ..config import ASKED_AT_ONCE

T = TypeVar("T")
R = TypeVar("R")


async def side_by_side(ask: Callable[[T], Awaitable[R]], items: Iterable[T], at_once: int = ASKED_AT_ONCE) -> list[R]:
    """The answers, in the order of the items. The first that fails ends the others."""
    places = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with places:
            return await ask(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
