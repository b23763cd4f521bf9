"""`--flush sync`: answers wait until the data that they confirm is on the device. One sync at a time serves all that came
before.

That data is in the commit log and in the journals of topics and groups. After a failed sync nobody knows what the device
holds, and a second sync may still succeed ("fsyncgate"). So the store takes nothing more, and every sender that waits gets
an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import structlog

from ..running.jobs import Call
from .store import Store

Action = Callable[[], None]

log = structlog.get_logger("rocketlet.flusher")


class Source(Protocol):
    """A file that is appended to. `written` grows with each append."""

    @property
    def written(self) -> int: ...

    def syncs(self) -> list[Call]: ...


class Flusher:
    """apart: makes calls in the one thread that waits for the device, one after the other."""

    def __init__(self, store: Store, sources: Iterable[Source], apart: Callable[[list[Call]], Awaitable[None]]) -> None:
        self._store = store
        self._sources = tuple(sources)
        self._apart = apart
        self._waiting: list[tuple[Action, Action]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def written(self) -> int:
        """Grows with everything that must be synced before it may be acknowledged."""
        return self._store.end + sum(source.written for source in self._sources)

    def after_sync(self, action: Action, otherwise: Action) -> None:
        """Calls `action` when everything written until now is on the device, `otherwise` if the sync fails."""
        self._waiting.append((action, otherwise))
        if self._task is None:
            self._task = asyncio.create_task(self._sync_all(), name="flush")

    async def _sync_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                is_synced = await self._sync()
                for action, otherwise in waiting:
                    _call(action if is_synced else otherwise)
        finally:
            self._task = None

    async def _sync(self) -> bool:
        try:
            await self._apart(self._calls())
        except OSError as error:
            self._failed(error)
        return self._store.fault is None

    def _calls(self) -> list[Call]:
        """Journals first: the log may hold messages of a topic that is new in them."""
        if self._store.fault is not None:
            return []
        return [call for source in (*self._sources, self._store) for call in source.syncs()]

    def _failed(self, error: OSError) -> None:
        self._store.fail(f"what was written cannot be synced: {error.strerror}")

    def sync(self) -> bool:
        """Syncs at once, while everybody waits. False if it failed."""
        try:
            for call in self._calls():
                call()
        except OSError as error:
            self._failed(error)
        return self._store.fault is None

    async def drain(self) -> None:
        """Returns when nobody waits any more."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _call(action: Action) -> None:
    try:
        action()
    except Exception:  # a defect of ours: those behind it wait for the same sync
        log.exception("answer_failed")
