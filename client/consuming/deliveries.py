"""Messages of a consumer without a handler, which the application requests and settles.

A held run counts as a running handler, so the release of its queue waits for the run, up to `drain_s`. Messages that
are released without being settled are returned again before the other waiting messages of their queue, unless the queue
is being released. Cancelling a wait for a message loses no message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from ..config import DEAD_LETTER_LEVEL
from ..errors import ConfigError
from ..message import Message
from ..wire.connection import LoopAffinity
from .handling import DeliveryWatch, Outcome, Reject, RetryLater, SendBackFunction, Settled, with_level
from .queues import ProcessQueue, Run


class HeldRun:
    """A run whose messages were returned to the application.

    Attributes:
        run: the run; None once it is not held any more.
        task: the task that requested it.
        message: the message that is in flight; None between two messages, and for batches.
        is_received: True if `receive` returned the message, so that the rest of the run is released when it is settled.
        watches: callbacks for the outcome of the message.
    """

    __slots__ = ("is_received", "message", "run", "task", "watches")

    def __init__(self, run: Run) -> None:
        self.run: Run | None = run
        self.task = asyncio.current_task()
        self.message: Message | None = None
        self.is_received = False
        self.watches: list[Settled] = []

    def end(self, outcome: Outcome) -> None:
        watches, self.watches = self.watches, []
        for settled in watches:
            settled(outcome)


class Deliveries:
    """Returns runs of the process queues to the application, and settles their messages.

    Args:
        orderly: True if a queue has at most one held run, and a message that is to be retried suspends its queue.
        suspend_queue_s: the duration of such a suspension, in seconds.
        send_back: returns a message to the broker, which redelivers it.
        retry_limit: `retry_limit(broker_name)` returns the maximum number of retries of a message, if orderly.
        on_acknowledged: called with the process queue when messages are acknowledged.
        middleware: the consumer's middleware, of which each DeliveryWatch is notified of deliveries.
    """

    def __init__(
        self,
        *,
        orderly: bool,
        suspend_queue_s: float,
        send_back: SendBackFunction,
        retry_limit: Callable[[str], Awaitable[int]],
        on_acknowledged: Callable[[ProcessQueue], None],
        middleware: Sequence[object] = (),
    ) -> None:
        self._watches = [layer for layer in middleware if isinstance(layer, DeliveryWatch)]
        self._orderly = orderly
        self._suspend_queue_s = suspend_queue_s
        self._send_back = send_back
        self._retry_limit = retry_limit
        self._on_acknowledged = on_acknowledged
        self._line: deque[ProcessQueue] = deque()
        self._lined_up: set[ProcessQueue] = set()
        # queues of an orderly consumer that are suspended until the retry of their first run
        self._suspended: set[ProcessQueue] = set()
        self._arrived = asyncio.Event()
        self._held_runs: set[HeldRun] = set()
        self._dropped: deque[HeldRun] = deque()
        self._holding: dict[Message, HeldRun] = {}
        self.is_closed = False
        self.home = LoopAffinity()
        self.home.begin()

    # Returning messages to the application

    def put(self, runs: Sequence[Run]) -> None:
        """Add the new runs of one queue."""
        if runs:
            process_queue = runs[0].process_queue
            process_queue.waiting.extend(runs)
            self.resume(process_queue)

    def resume(self, process_queue: ProcessQueue) -> None:
        """Make the waiting runs of this queue available. Queues are served round robin."""
        if process_queue.waiting and process_queue not in self._lined_up:
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
        self._arrived.set()

    async def receive(self) -> Message | None:
        """Return the next message and hold it until it is settled. Return None once the consumer stops."""
        held = await self.next_run()
        return None if held is None else self.hold(held, is_received=True)

    async def next_run(self) -> HeldRun | None:
        """Return the next run and hold it. Return None once the consumer stops."""
        self.home.check()
        while not self.is_closed:
            self._take_dropped()
            run = self._next()
            if run is not None:
                held = HeldRun(run)
                self._held_runs.add(held)
                return held
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _next(self) -> Run | None:
        for _ in range(len(self._line)):
            process_queue = self._line.popleft()
            self._lined_up.discard(process_queue)
            while process_queue.waiting and process_queue.waiting[0].is_done:
                process_queue.waiting.popleft()
            is_held = process_queue in self._suspended or (self._orderly and process_queue.running)
            if not process_queue.waiting or not process_queue.may_begin or is_held:
                continue  # `resume` adds the queue to the line again when this has changed
            run = process_queue.waiting.popleft()
            process_queue.enter()
            self.resume(process_queue)
            return run
        return None

    def give_back(self, held: HeldRun) -> None:
        """Stop holding a run, so that its unacknowledged messages are returned to the application again, unless its queue is
        stopped."""
        run = self._detach(held)
        if run is not None:
            self._put_back(run)

    def drop(self, held: HeldRun) -> None:
        """Release a run soon. `drop` may be called from any thread at any time, because the garbage collector calls
        it."""
        self._dropped.append(held)
        self.home.call_soon(self._take_dropped)

    def _take_dropped(self) -> None:
        while self._dropped:
            self.give_back(self._dropped.popleft())

    def _detach(self, held: HeldRun) -> Run | None:
        """Stop holding a run and return it, or None if it was not held. The outcome of its message is RetryLater."""
        run, held.run = held.run, None
        self._held_runs.discard(held)
        if held.message is not None:
            self._holding.pop(held.message, None)
        held.end(RetryLater())
        return run

    def _put_back(self, run: Run) -> None:
        process_queue = run.process_queue
        process_queue.leave()
        if not run.is_done and not process_queue.is_stopped:
            process_queue.waiting.appendleft(run)
        if not self.is_closed:
            self.resume(process_queue)
            self._on_acknowledged(process_queue)

    def release(self, message: Message | None) -> None:
        """Release this message, or all in-flight messages if None, so that they are returned to the application again."""
        self._take_dropped()
        for held in [held for held in self._held_runs if message is None or held.message is message]:
            self.give_back(held)

    def close(self) -> None:
        """Return no more messages, and release the runs that the calling task holds. The release of queues waits for
        runs that other tasks hold, up to `drain_s`."""
        self.is_closed = True
        self._arrived.set()
        self._take_dropped()
        for held in [held for held in self._held_runs if held.task is asyncio.current_task()]:
            self.give_back(held)

    # Settling

    def hold(self, held: HeldRun, *, is_received: bool = False) -> Message:
        """Return the next message of a held run. The message is in flight until it is settled."""
        assert held.run is not None
        held.message = message = held.run.messages[held.run.done]
        held.is_received = is_received
        self._holding[message] = held
        self.begin(held, [message])
        return message

    def begin(self, held: HeldRun, messages: Sequence[Message]) -> None:
        """Notify the watches that messages are returned to the application."""
        if self._watches:
            held.watches = [watch.begins(messages) for watch in self._watches]

    def is_held(self, message: Message) -> bool:
        self._take_dropped()
        return message in self._holding

    def acknowledge(self, message: Message) -> None:
        """Acknowledge a message. Raises ConfigError if it is not in flight."""
        self._end(message, *self._held(message), None)

    def _held(self, message: Message) -> tuple[HeldRun, Run]:
        self.home.check()
        self._take_dropped()
        held = self._holding.get(message)
        if held is None or held.run is None:
            raise ConfigError(
                f"{message!r} is not in flight: it is settled already, was released, or another consumer returned it"
            )
        return held, held.run

    def _end(self, message: Message, held: HeldRun, run: Run, outcome: Outcome) -> None:
        if self._holding.pop(message, None) is not held:
            return  # it was settled otherwise during the request to the broker, so the run may be at another message
        held.message = None
        held.end(outcome)
        if not run.is_done:  # otherwise the run's queue was lost meanwhile
            run.process_queue.acknowledge(run, run.done + 1)
        if held.is_received:
            self.give_back(held)

    async def retry(self, message: Message, outcome: RetryLater) -> None:
        """Settle a message so that it is delivered again later: by the broker or, in an orderly consumer, by this
        member after its queue was suspended. After the last retry, an orderly consumer stores it as a dead letter.

        Raises RocketletError if the broker does not accept the message, which then stays in flight.
        """
        outcome = with_level(outcome)
        held, run = self._held(message)
        if not self._orderly:
            await self._send_back(message, outcome.delay_level, outcome.reason, 0)
            self._end(message, held, run, outcome)
            return
        limit = await self._retry_limit(message.queue.broker_name)
        held, run = self._held(message)  # checked a second time, because it may have been settled meanwhile
        if run.tries >= limit:
            await self.reject(message, Reject(outcome.reason))
            return
        run.tries += 1
        self._detach(held)
        self._suspended.add(run.process_queue)  # the run is not held any more, but no other run of the queue may start
        self._put_back(run)
        asyncio.get_running_loop().call_later(self._suspend_queue_s, self._end_suspension, run.process_queue)

    def _end_suspension(self, process_queue: ProcessQueue) -> None:
        self._suspended.discard(process_queue)
        self.resume(process_queue)

    async def reject(self, message: Message, outcome: Reject) -> None:
        """Settle a message by storing it in the group's dead-letter topic. Raises what `retry` raises."""
        held, run = self._held(message)
        await self._send_back(message, DEAD_LETTER_LEVEL, outcome.reason, run.tries + 1 if self._orderly else 0)
        self._end(message, held, run, outcome)


def _has_next(run: Run | None) -> bool:
    return run is not None and not run.is_done and run.process_queue.may_begin


class Messages:
    """An iterator over single messages.

    Requesting the next message acknowledges the previous one, unless that is settled already. If the iterator is garbage
    collected, for example after `break`, it releases its last message.
    """

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._last: HeldRun | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        self._settle()
        if self._last is None:
            self._last = await self._deliveries.next_run()
            if self._last is None:
                raise StopAsyncIteration
        return self._deliveries.hold(self._last)

    def _settle(self) -> None:
        held = self._last
        if held is not None and held.message is not None and held.run is not None:
            self._deliveries.acknowledge(held.message)
        if held is not None and (self._deliveries.is_closed or not _has_next(held.run)):
            self._last = None
            self._deliveries.give_back(held)

    def __del__(self) -> None:
        if self._last is not None:
            self._deliveries.drop(self._last)


class Batches:
    """An iterator over lists of up to `batch_size` messages of one queue. Requesting the next list acknowledges the previous
    one, unless it was released."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._last: HeldRun | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Message]:
        self._deliveries.home.check()
        held, self._last = self._last, None
        if held is not None and held.run is not None:
            held.run.process_queue.acknowledge(held.run)
            held.end(None)
            self._deliveries.give_back(held)
        self._last = await self._deliveries.next_run()
        if self._last is None or self._last.run is None:
            raise StopAsyncIteration
        messages = self._last.run.messages[self._last.run.done :]
        self._deliveries.begin(self._last, messages)
        return messages

    def release(self) -> None:
        """Release the last list, so that its messages are redelivered."""
        held, self._last = self._last, None
        if held is not None:
            self._deliveries.give_back(held)

    def __del__(self) -> None:
        if self._last is not None:
            self._deliveries.drop(self._last)
