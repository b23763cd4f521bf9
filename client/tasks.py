"""How tasks in the background end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Set
from typing import Any


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks; returns when they have ended, whatever they raised."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def finished(tasks: Set[asyncio.Task[Any]], timeout_s: float) -> None:
    """Waits for tasks, and cancels what takes longer. They run code of the user, which may call this and wait for it: so not
    for the task that calls this."""
    others = tasks - {asyncio.current_task()}
    if not others:
        return
    try:
        await asyncio.wait(others, timeout=timeout_s)
    finally:  # also when this is cancelled
        for task in others:
            task.cancel()
