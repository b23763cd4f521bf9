"""What was pulled of one queue and is not yet acknowledged, and how far the queue may be committed.

Messages are kept in runs, the units in which the handler gets them. A run is acknowledged whole, or message by
message from its front; the offset to commit is that of the first message not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..protocol.bodies import Queue
from .config import PullLimits
from .lease import Lease
from .message import Message


class Run:
    """Messages handed to a handler together. `done` of them, from the front, are acknowledged. `outcome`: what the handler
    said, where that is still to be carried out."""

    __slots__ = ("done", "messages", "outcome", "process_queue", "tries")

    def __init__(self, process_queue: ProcessQueue, messages: list[Message]) -> None:
        self.process_queue = process_queue
        self.messages = messages
        self.done = 0
        self.tries = 0
        self.outcome: Any = None

    @property
    def is_done(self) -> bool:
        return self.done == len(self.messages)


class ProcessQueue:
    """One assignment of one queue. After a revocation and a new assignment there is another one.

    `stopped`: nothing more is pulled or handed out. `dropped`: the queue is not ours; nothing may be committed.
    `suspended`: as stopped, until the broker is back. `waiting`: the runs that no worker has yet; `lined_up`: the queue
    stands in the workers' line.
    """

    def __init__(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.queue = queue
        self.lease = lease
        self.begin_offset = offset
        self.next_offset = offset
        self.committed: int | None = None
        self.stopped = False
        self.dropped = False
        self.suspended = False
        self.waiting: deque[Run] = deque()
        self.lined_up = False
        self.paused = False
        self.generation = 0
        self.pulled_ms = 0  # the time of the last pull
        self.pulling = False
        self.throttled = False
        self.consuming = False
        self.messages = 0
        self.size_bytes = 0
        self.running = 0
        self.runs: deque[Run] = deque()
        self._idle: asyncio.Event | None = None

    def add(self, messages: list[Message], next_offset: int, run_size: int) -> list[Run]:
        """Takes what a pull brought, in runs of up to `run_size`."""
        runs = [Run(self, messages[at : at + run_size]) for at in range(0, len(messages), run_size)]
        self.runs.extend(runs)
        self.messages += len(messages)
        self.size_bytes += sum(len(message.record.body) for message in messages)
        self.next_offset = next_offset
        return runs

    def acknowledge(self, run: Run, count: int | None = None) -> None:
        """The first `count` messages of a run, or all of it, need not be delivered again."""
        if self.dropped:
            return
        before = run.done
        run.done = len(run.messages) if count is None else count
        self.messages -= run.done - before
        self.size_bytes -= sum(len(message.record.body) for message in run.messages[before : run.done])
        runs = self.runs
        while runs and runs[0].is_done:
            runs.popleft()

    @property
    def commit_offset(self) -> int:
        """The first offset that is not acknowledged."""
        if not self.runs:
            return self.next_offset
        run = self.runs[0]
        return run.messages[run.done].record.queue_offset

    def exceeds(self, limits: PullLimits, *, span_counts: bool) -> bool:
        """Whether pulling must wait: too many messages, too many bytes, or too wide a span."""
        if self.messages > limits.messages or self.size_bytes > limits.size_bytes:
            return True
        return span_counts and self.next_offset - self.commit_offset > limits.span

    @property
    def may_begin(self) -> bool:
        """Whether something of this queue may be handed out now."""
        return not (self.stopped or self.suspended or self.paused or self.lease.is_over)

    # Running handlers

    def enter(self) -> None:
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
        if not self.running and self._idle is not None:
            self._idle.set()
            self._idle = None

    async def idle(self) -> None:
        """Returns when no handler runs on this queue."""
        while self.running:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def stop(self) -> None:
        """No message is handed out any more; what waits stays unacknowledged."""
        self.stopped = True

    def drop(self) -> None:
        """The queue is lost: nothing of it counts any more."""
        self.stopped = self.dropped = True
        self.clear()

    def clear(self) -> None:
        for run in self.runs:
            run.done = len(run.messages)  # whoever still has it need not handle it, and its end counts for nothing
        self.runs.clear()
        self.waiting.clear()
        self.messages = self.size_bytes = 0

    def seek(self, offset: int) -> None:
        """Goes on from another offset; what is cached is forgotten, and so is the answer to a pull in flight."""
        self.clear()
        self.generation += 1
        self.pulling = self.throttled = False
        self.next_offset = offset


def offsets_to_commit(process_queues: Iterable[ProcessQueue]) -> dict[Queue, int]:
    """Those whose offset has moved since the last commit."""
    return {
        item.queue: item.commit_offset
        for item in process_queues
        if not item.dropped and item.commit_offset != item.committed
    }
