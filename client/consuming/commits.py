"""When a consumer commits. Most commits ride on pulls (`pulling`); these are the others.

- Every `interval_s` all that has moved, so that a member that is killed repeats little even if it pulls nothing.
- A queue of which everything is handled and nothing new comes: its pull, which does not say so yet, is held by the broker.
  Where messages go on coming, the pull behind each says it, and no request is spent, unless it is one that may not.
- When the user asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from ...protocol.queue import Queue
from ..config import CLIENT_LIMITS, ClientLimits
from ..log import get_logger
from ..tasks import cancelled
from .process_queue import ProcessQueue, offsets_to_commit
from .standing import Standing

log = get_logger("rocketlet.consumer")


class Commits:
    """`store(offsets)` tells the brokers and returns for which queues that was done; `spawn` runs work that nobody waits
    for."""

    def __init__(
        self,
        group: str,
        queues: Mapping[Queue, ProcessQueue],
        *,
        interval_s: float,
        store: Callable[[Mapping[Queue, int]], Awaitable[set[Queue]]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._limits = limits
        self._group = group
        self._queues = queues
        self._interval_s = interval_s
        self._store = store
        self._spawn = spawn
        self._idle_queues: dict[
            ProcessQueue, int
        ] = {}  # in the order in which they fell idle, and the look before that
        self._looks = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._standing = Standing(group, limits)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._commit_forever(), name="commit"),
            asyncio.create_task(self._standing.watch(), name="watch the loop"),
        ]

    async def stop(self) -> None:
        """Commits nothing more at intervals; queues that are still owned are committed when they are given up."""
        await cancelled(self._tasks)

    def stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def commit(self) -> None:
        """Commits acknowledged messages, and returns when the brokers have answered."""
        await self._commit(offsets_to_commit(self._queues.values()))

    async def _commit(self, offsets: Mapping[Queue, int]) -> None:
        for queue in await self._store(offsets):
            process_queue = self._queues.get(queue)
            if process_queue is not None:
                process_queue.committed = offsets[queue]

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._standing.look(self._queues.values())
            try:
                await self.commit()
            except Exception:
                log.exception("commit_failed", group=self._group)

    def queue_is_idle(self, process_queue: ProcessQueue) -> None:
        """Everything of it is handled. It is committed if nothing comes for a whole interval between two looks."""
        self._idle_queues[process_queue] = self._looks
        if self._idle_timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(self._limits.idle_commit_s, self._commit_idle)

    def _commit_idle(self) -> None:
        quiet = [
            process_queue
            for process_queue, look in self._idle_queues.items()
            if look < self._looks or not process_queue.pulls_may_commit
        ]
        for process_queue in quiet:
            del self._idle_queues[process_queue]
        self._looks += 1
        self._idle_timer = None
        if self._idle_queues:
            self._look_later()
        offsets = offsets_to_commit(
            process_queue for process_queue in quiet if not process_queue.messages and not process_queue.is_stopped
        )
        if offsets:
            self._spawn(self._commit(offsets))
