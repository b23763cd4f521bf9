"""The queues that a consumer owns now: membership's news of them (`QueueUser`), the user's listeners, and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ...protocol.queue import Queue
from ..errors import ConfigError
from ..lease import Lease
from ..log import get_logger
from ..tasks import finished
from .listeners import Assigned, Listener, placed, told
from .process_queue import ProcessQueue
from .pulling import Puller

log = get_logger("rocketlet.consumer")


class Assignment:
    """`on_resumed(process_queue)`: cached messages of a queue may be handed out again. `drain_s`: how long a queue that is
    given up waits for running handlers."""

    def __init__(
        self,
        puller: Puller,
        *,
        drain_s: float,
        on_assigned: Assigned | None,
        on_revoked: Listener | None,
        on_resumed: Callable[[ProcessQueue], None],
    ) -> None:
        self._puller = puller
        self._drain_s = drain_s
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_resumed = on_resumed
        self._ending: dict[Queue, ProcessQueue] = {}  # no longer ours, but handlers of them still run
        self._is_paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.queues: dict[Queue, ProcessQueue] = {}

    def some(self, queues: Iterable[Queue] | None) -> list[ProcessQueue]:
        """The given queues, or all. Raises ConfigError for a queue that is not this member's."""
        if queues is None:
            return list(self.queues.values())
        wanted = list(queues)
        missing = [str(queue) for queue in wanted if queue not in self.queues]
        if missing:
            raise ConfigError(f"this member does not own {', '.join(missing)}")
        return [self.queues[queue] for queue in wanted]

    def pause(self, queues: Iterable[Queue] | None) -> None:
        """Pauses the given queues; without queues all, and those that come later."""
        self._is_paused = self._is_paused or queues is None
        for process_queue in self.some(queues):
            process_queue.pause()

    def resume(self, queues: Iterable[Queue] | None) -> None:
        self._is_paused = self._is_paused and queues is not None
        for process_queue in self.some(queues):
            process_queue.pause(paused=False)
            self._go_on(process_queue)

    def _go_on(self, process_queue: ProcessQueue) -> None:
        self._on_resumed(process_queue)
        self._puller.pull(process_queue)

    # Queues that come and go (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.queues[queue] = process_queue = ProcessQueue(queue, offset, lease, paused=self._is_paused)
        if self._on_assigned is None:
            self._puller.pull(process_queue)
            return
        later = placed(self._on_assigned, queue, self._puller.hold(process_queue))
        if later is not None:
            self.spawn(later)

    async def give_queue(self, queue: Queue) -> int | None:
        process_queue = self.queues.get(queue)
        if process_queue is None:
            return None
        process_queue.stop()
        try:
            async with asyncio.timeout(self._drain_s):
                await process_queue.idle()
        except TimeoutError:
            log.warning("handlers_still_running", queue=str(queue), hint="their messages will be delivered again")
        self._tell_revoked(queue)
        # A queue that was lost while its handlers ended is another's: their work is not ours to commit.
        return None if process_queue.is_dropped else process_queue.commit_offset

    def is_pull_committing(self, queue: Queue) -> bool:
        process_queue = self.queues.get(queue)
        return process_queue is not None and process_queue.pull_commits

    def lose_queue(self, queue: Queue) -> None:
        process_queue = self.queues.pop(queue, None)
        if process_queue is not None:
            if not process_queue.is_stopped:  # else it was told when the queue was given up
                self._tell_revoked(queue)
            process_queue.drop()
            if process_queue.running:
                self._ending[queue] = process_queue

    def is_running(self, queue: Queue) -> bool:
        return queue in self._ending

    async def ended(self, queue: Queue) -> None:
        await self._ending[queue].idle()
        del self._ending[queue]

    def suspend_queue(self, queue: Queue) -> None:
        process_queue = self.queues.get(queue)
        if process_queue is not None:
            process_queue.suspend()

    def resume_queue(self, queue: Queue) -> None:
        process_queue = self.queues.get(queue)
        if process_queue is not None:
            process_queue.resume()
            self._go_on(process_queue)

    def _tell_revoked(self, queue: Queue) -> None:
        answer = told(self._on_revoked, queue) if self._on_revoked is not None else None
        if answer is not None:
            self.spawn(answer)

    # Work that only the end waits for

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside; `finished` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Ends what takes longer than a drain: a listener of the user, which may even wait for the end of this."""
        await finished(self._tasks, self._drain_s)
