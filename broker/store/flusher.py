"""`--flush sync`: answers wait until their messages are on the device. One sync at a time serves all that came before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from . import disk
from .store import Store

log = structlog.get_logger("rocketlet.flusher")


class Flusher:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    def after_sync(self, action: Callable[[], None]) -> None:
        """Calls `action` when everything committed until now is on the device; never if the sync fails."""
        self._waiting.append(action)
        if self._task is None:
            self._task = asyncio.create_task(self._sync_all(), name="flush")

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                actions, self._waiting = self._waiting, []
                descriptor = self._store.descriptor_to_sync()
                if descriptor is not None:
                    await loop.run_in_executor(None, disk.sync, descriptor)
                for action in actions:
                    action()
        except OSError:
            log.exception("sync failed; its messages stay unacknowledged")
        finally:
            self._task = None

    async def drain(self) -> None:
        if self._task is not None:
            await self._task
