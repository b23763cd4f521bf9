"""The messages of one queue that were pulled and are not yet acknowledged, and how far the queue may be committed.

Messages are kept in runs, the units in which the handler gets them. A run is acknowledged whole, or message by
message from its front; the offset to commit is that of the first message not acknowledged.

    RUNNING <--resume, suspend--> SUSPENDED
       `------- stop ---------------'---------> STOPPED --drop--> DROPPED

The lease of a queue may be lost in each state: it is dropped then. A pause by the user is apart from this.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, Final

from ...protocol.frame import ExtValue
from ...protocol.queue import Queue
from ..config import PullLimits
from ..lease import Lease
from ..message import Message

_size_bytes = attrgetter("size_bytes")


class QueueState(Enum):
    RUNNING = "messages are pulled and handed out"
    SUSPENDED = "its broker is away: nothing is pulled or handed out until it is back"
    STOPPED = "it is given up: nothing is pulled or handed out; what handlers did is committed"
    DROPPED = "it is not ours: nothing may be committed"


class QueueEvent(Enum):
    SUSPEND = "its broker is away"
    RESUME = "its broker is back"
    STOP = "it goes to another member"
    DROP = "its lease is lost or given back"


_S, _E = QueueState, QueueEvent
TRANSITIONS: Final = {
    (_S.RUNNING, _E.SUSPEND): _S.SUSPENDED,
    (_S.SUSPENDED, _E.SUSPEND): _S.SUSPENDED,
    (_S.STOPPED, _E.SUSPEND): _S.STOPPED,
    (_S.RUNNING, _E.RESUME): _S.RUNNING,
    (_S.SUSPENDED, _E.RESUME): _S.RUNNING,
    (_S.STOPPED, _E.RESUME): _S.STOPPED,
    (_S.RUNNING, _E.STOP): _S.STOPPED,
    (_S.SUSPENDED, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,  # tried again
    **{(state, _E.DROP): _S.DROPPED for state in (_S.RUNNING, _S.SUSPENDED, _S.STOPPED)},
}
_RUNNING: Final = QueueState.RUNNING
_DROPPED: Final = QueueState.DROPPED


class Run:
    """Messages handed to a handler together. `done` of them, from the front, are acknowledged. `outcome`: the handler's, if
    it is still to be carried out. `failure`: why it was not handled the last time. `is_filling`: it waits for more
    messages. `size_bytes`: of those that are not acknowledged."""

    __slots__ = ("done", "failure", "is_filling", "messages", "outcome", "process_queue", "size_bytes", "tries")

    def __init__(self, process_queue: ProcessQueue, messages: list[Message], size_bytes: int) -> None:
        self.process_queue = process_queue
        self.messages = messages
        self.size_bytes = size_bytes
        self.done = self.tries = 0
        self.failure = ""
        self.is_filling = False
        self.outcome: Any = None

    @property
    def is_done(self) -> bool:
        return self.done == len(self.messages)

    def lose_from(self, offset: int) -> tuple[int, int]:
        """The messages from an offset on are gone; how many of them were not acknowledged, and their bytes."""
        kept = sum(message.queue_offset < offset for message in self.messages)
        lost = self.messages[max(kept, self.done) :]
        lost_bytes = sum(map(_size_bytes, lost))
        self.size_bytes -= lost_bytes
        if kept:
            self.messages = self.messages[:kept]  # a new list: the handler may have the other
            self.done = min(self.done, kept)
        else:
            self.done = len(self.messages)
        return len(lost), lost_bytes


class Pull:
    """The pull that fills a queue; the puller's own. A seek puts another in its place, so that an answer which is still on
    its way finds that nobody waits for it. `request`: the fields that are sent again and again, with another offset."""

    __slots__ = ("began_ms", "is_pending", "is_throttled", "request")

    def __init__(self, began_ms: int = 0) -> None:
        self.began_ms = began_ms
        self.request: dict[str, ExtValue] | None = None
        self.is_pending = False
        self.is_throttled = False


class ProcessQueue:
    """One assignment of one queue. After a revocation and a new assignment there is another one.

    `untaken`: runs that the broker has not taken back yet, with what to call when the queue stops.
    `is_paused`: nothing is pulled or handed out until the user resumes it. `waiting`: the runs that no worker has yet.
    `committed`: the offset that the broker was last told, None if that is not known.
    `pull_commits`: whether a pull that is not answered carries an offset. `moved_to`: where the broker said last that the
    queue goes on. `idle_s`: when a pull brought nothing last, in the loop's time.
    """

    def __init__(self, queue: Queue, offset: int, lease: Lease, *, paused: bool = False) -> None:
        self.queue = queue
        self.lease = lease
        self.begin_offset = offset
        self.next_offset = offset
        self.committed: int | None = None
        self.pull_commits = False
        self.pull = Pull()
        self.moved_to: int | None = None
        self.idle_s = -math.inf
        self.state = QueueState.RUNNING
        self.is_paused = paused
        self.messages = 0
        self.size_bytes = 0
        self.running = 0
        self.runs: deque[Run] = deque()
        self.waiting: deque[Run] = deque()
        self.untaken: dict[Run, Callable[[], None]] = {}
        self._idle: asyncio.Event | None = None

    def add(self, messages: list[Message], next_offset: int, run_size: int) -> list[Run]:
        """Takes the messages of a pull, in runs of up to `run_size`."""
        if run_size == 1:
            runs = [Run(self, [message], message.size_bytes) for message in messages]
        else:
            parts = [messages[begin : begin + run_size] for begin in range(0, len(messages), run_size)]
            runs = [Run(self, part, sum(map(_size_bytes, part))) for part in parts]
        self.runs.extend(runs)
        self.messages += len(messages)
        self.size_bytes += sum(map(_size_bytes, runs))
        self.next_offset = next_offset
        return runs

    def extend(self, run: Run, messages: list[Message]) -> None:
        """More messages for a run that nobody has yet."""
        size_bytes = sum(map(_size_bytes, messages))
        run.messages += messages
        run.size_bytes += size_bytes
        self.messages += len(messages)
        self.size_bytes += size_bytes

    def acknowledge(self, run: Run, count: int | None = None) -> None:
        """The first `count` messages of a run, or all of it, need not be delivered again."""
        before, end = run.done, len(run.messages)
        if self.state is _DROPPED or before == end:
            return
        size_bytes = run.size_bytes
        if count is not None and count < end:
            end, size_bytes = count, sum(map(_size_bytes, run.messages[before:count]))
        run.done = end
        run.size_bytes -= size_bytes
        self.size_bytes -= size_bytes
        self.messages -= end - before
        runs = self.runs
        while runs and (first := runs[0]).done and first.done == len(first.messages):
            runs.popleft()

    @property
    def commit_offset(self) -> int:
        """The first offset that is not acknowledged."""
        if not self.runs:
            return self.next_offset
        run = self.runs[0]
        return run.messages[run.done].queue_offset

    def exceeds(self, limits: PullLimits, unhandled: int | None) -> bool:
        """Whether pulling must wait: too many messages, too many bytes, or too wide a span. unhandled: `commit_offset`, where
        the span begins; None if it does not count."""
        if self.messages > limits.messages or self.size_bytes > limits.size_bytes:
            return True
        return unhandled is not None and self.next_offset - unhandled > limits.span

    @property
    def pulls_may_commit(self) -> bool:
        """Whether its pulls may carry how far it is handled. On Apache's broker the first commit of a queue goes alone
        (`GroupOffsets.store`): offsets of a group that are the first of their topic can be lost if they arrive together
        (decision 16)."""
        return self.lease.epoch > 0 or self.committed is not None

    # Permissions

    def turn(self, event: QueueEvent) -> None:
        """Raises KeyError for what cannot happen."""
        self.state = TRANSITIONS[self.state, event]

    @property
    def is_suspended(self) -> bool:
        return self.state is QueueState.SUSPENDED

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is pulled or handed out any more."""
        return self.state in (QueueState.STOPPED, _DROPPED)

    @property
    def is_dropped(self) -> bool:
        return self.state is _DROPPED

    @property
    def is_held(self) -> bool:
        """Whether nothing of it may be pulled or handed out now."""
        return self.state is not _RUNNING or self.is_paused

    @property
    def may_begin(self) -> bool:
        """Whether something of this queue may be handed out now. The clock is asked each time: a member whose process was
        frozen must not begin a message with a lease that another has had meanwhile."""
        return self.state is _RUNNING and not (self.is_paused or self.lease.is_over)

    def suspend(self) -> None:
        self.turn(QueueEvent.SUSPEND)

    def resume(self) -> None:
        """The broker is back. If it was killed it may have lost the last commits, so that they are said again."""
        self.turn(QueueEvent.RESUME)
        self.committed = None

    def pause(self, *, paused: bool = True) -> None:
        self.is_paused = paused

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
        """Hands out no more messages; those that wait stay unacknowledged. Messages that the broker has not taken back are
        sent back again at once."""
        self.turn(QueueEvent.STOP)
        self._send_back_at_once()

    def _send_back_at_once(self) -> None:
        for send_back in list(self.untaken.values()):
            send_back()

    def drop(self) -> None:
        """The queue is lost: nothing of it counts any more."""
        self.turn(QueueEvent.DROP)
        self.clear()
        self._send_back_at_once()

    def clear(self) -> None:
        for run in self.runs:
            run.done = len(run.messages)  # its holder need not handle it, and its end counts for nothing
        self.runs.clear()
        self.waiting.clear()
        self.messages = self.size_bytes = 0

    def seek(self, offset: int) -> None:
        """Goes on from another offset. Forgets cached messages, and the answer to a pull in flight."""
        self.clear()
        self.pull = Pull(self.pull.began_ms)
        self.next_offset = offset

    def move(self, offset: int) -> None:
        """The broker does not have the next offset: goes on from another one. Messages cached from before it stay. Those
        behind it are gone, and others have their offsets, so they are neither handed out nor counted."""
        for run in self.runs:
            messages, size_bytes = run.lose_from(offset)
            self.messages -= messages
            self.size_bytes -= size_bytes
        self.runs = deque(run for run in self.runs if not run.is_done)
        self.pull = Pull(self.pull.began_ms)
        self.next_offset = offset
        self.committed = None


def offsets_to_commit(process_queues: Iterable[ProcessQueue]) -> dict[Queue, int]:
    """The offsets that have moved since the last commit, by queue."""
    return {
        process_queue.queue: process_queue.commit_offset
        for process_queue in process_queues
        if not process_queue.is_dropped and process_queue.commit_offset != process_queue.committed
    }
