"""`--flush sync`: answers wait until their messages are on the device. One sync at a time serves all that came before.

After a failed sync nobody knows what the device holds, and a second sync may still succeed ("fsyncgate"). So the store
takes nothing more, and every sender that waits gets an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from . import disk
from .store import Store

Action = Callable[[], None]


class Flusher:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[Action, Action]] = []
        self._task: asyncio.Task[None] | None = None

    def after_sync(self, action: Action, otherwise: Action) -> None:
        """Calls `action` when everything committed until now is on the device, `otherwise` if the sync fails."""
        self._waiting.append((action, otherwise))
        if self._task is None:
            self._task = asyncio.create_task(self._sync_all(), name="flush")

    async def _sync_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                is_synced = await self._sync()
                for action, otherwise in waiting:
                    (action if is_synced else otherwise)()
        finally:
            self._task = None

    async def _sync(self) -> bool:
        try:
            descriptor = self._store.descriptor_to_sync()
            if descriptor is not None and self._store.fault is None:
                await asyncio.get_running_loop().run_in_executor(None, disk.sync, descriptor)
        except OSError as error:
            self._store.fail(f"the commit log cannot be synced: {error.strerror}")
        return self._store.fault is None

    async def drain(self) -> None:
        """Returns when nobody waits any more."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
