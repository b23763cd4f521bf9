"""Messages of a consumer without a handler: returned when the application asks for them, and settled by it.

A run that is held counts as a running handler, so a hand-over of its queue waits for it. A message that is given back
unsettled is the next one of its queue. A wait that is cancelled loses nothing and ends nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from ..config import DEAD_LETTER_LEVEL
from ..errors import ConfigError
from ..message import Message
from ..wire.connection import Home
from .handling import DeliveryWatch, Outcome, Reject, RetryLater, SendBackFunction, Settled, check_has_level
from .queues import ProcessQueue, Run


class HeldRun:
    """A run that the application works on.

    Attributes:
        task: the task that took it.
        message: the message of it that is being worked on.
        is_received: True if that message was received alone, so that the rest of the run is given back when it is settled.
        watches: called with the outcome of the message.
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
    """Args:
    orderly: True if a queue has at most one held run, and a run that is to be retried suspends the queue.
    suspend_queue_s: for how long.
    send_back: `send_back(message, delay_level, reason)` returns a message to the broker, which redelivers it.
    retry_limit: `retry_limit(broker_name)` returns how often a message is retried in order.
    on_acknowledged: called with the process queue when messages are acknowledged.
    middleware: a layer that is a DeliveryWatch is notified of deliveries.
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
        self._suspended: set[ProcessQueue] = set()  # in order: suspended until the retry of their first run
        self._arrived = asyncio.Event()
        self._held_runs: set[HeldRun] = set()
        self._dropped: deque[HeldRun] = deque()
        self._holding: dict[Message, HeldRun] = {}
        self.is_closed = False
        self.home = Home()
        self.home.begin()

    # Handing out

    def put(self, runs: Sequence[Run]) -> None:
        """Add the new runs of one queue."""
        if runs:
            process_queue = runs[0].process_queue
            process_queue.waiting.extend(runs)
            self.resume(process_queue)

    def resume(self, process_queue: ProcessQueue) -> None:
        """Return messages of this queue again. Queues take turns."""
        if process_queue.waiting and process_queue not in self._lined_up:
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
        self._arrived.set()

    async def receive(self) -> Message | None:
        """Return the next message, which is held until it is settled; None once the consumer stops."""
        held = await self.take()
        return None if held is None else self.hold(held, is_received=True)

    async def take(self) -> HeldRun | None:
        """Return the next run, which is held from now on; None once the consumer stops."""
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
                continue  # it comes back into the line when that has changed
            run = process_queue.waiting.popleft()
            process_queue.enter()
            self.resume(process_queue)
            return run
        return None

    def give_back(self, held: HeldRun) -> None:
        """End the hold of a run. Its unacknowledged messages are returned again."""
        run = self._taken_from(held)
        if run is not None:
            self._put_back(run)

    def drop(self, held: HeldRun) -> None:
        """Give a run back soon. May be called from any thread and at any point, because the garbage collector does that."""
        self._dropped.append(held)
        self.home.call_soon(self._take_dropped)

    def _take_dropped(self) -> None:
        while self._dropped:
            self.give_back(self._dropped.popleft())

    def _taken_from(self, held: HeldRun) -> Run | None:
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
        """Give back this message, or all that are held."""
        self._take_dropped()
        for held in [held for held in self._held_runs if message is None or held.message is message]:
            self.give_back(held)

    def close(self) -> None:
        """The consumer stops: give back what the calling task holds. The hand-over waits for what other tasks hold."""
        self.is_closed = True
        self._arrived.set()
        self._take_dropped()
        for held in [held for held in self._held_runs if held.task is asyncio.current_task()]:
            self.give_back(held)

    # Settling

    def hold(self, held: HeldRun, *, is_received: bool = False) -> Message:
        """Return the next message of a held run, which is to be settled next."""
        assert held.run is not None
        held.message = message = held.run.messages[held.run.done]
        held.is_received = is_received
        self._holding[message] = held
        self.begin(held, [message])
        return message

    def begin(self, held: HeldRun, messages: Sequence[Message]) -> None:
        """Notify the watches that the application works on messages."""
        if self._watches:
            held.watches = [watch.begins(messages) for watch in self._watches]

    def is_held(self, message: Message) -> bool:
        self._take_dropped()
        return message in self._holding

    def acknowledge(self, message: Message) -> None:
        """Raises ConfigError for a message that is not in hand."""
        self._end(message, *self._held(message), None)

    def _held(self, message: Message) -> tuple[HeldRun, Run]:
        self.home.check()
        self._take_dropped()
        held = self._holding.get(message)
        if held is None or held.run is None:
            raise ConfigError(
                f"{message!r} is not in flight: it was settled before, or did not come from this consumer"
            )
        return held, held.run

    def _end(self, message: Message, held: HeldRun, run: Run, outcome: Outcome) -> None:
        if self._holding.pop(message, None) is not held:
            return  # it was settled while the broker was asked: the run is at another message by now
        held.message = None
        held.end(outcome)
        if not run.is_done:  # else its queue was lost meanwhile
            run.process_queue.acknowledge(run, run.done + 1)
        if held.is_received:
            self.give_back(held)

    async def retry(self, message: Message, outcome: RetryLater) -> None:
        """Redeliver a message later. Raises RocketletError if the broker does not take it; it is then still held."""
        check_has_level(outcome)
        held, run = self._held(message)
        if not self._orderly:
            await self._send_back(message, outcome.delay_level, outcome.reason)
            self._end(message, held, run, outcome)
            return
        limit = await self._retry_limit(message.queue.broker_name)
        held, run = self._held(message)  # again, because it may have been settled meanwhile
        run.tries += 1
        if run.tries > limit:
            await self.reject(message, Reject(outcome.reason))
            return
        self._taken_from(held)
        self._suspended.add(run.process_queue)  # the run is not held, but no other run of the queue may start
        self._put_back(run)
        asyncio.get_running_loop().call_later(self._suspend_queue_s, self._end_suspension, run.process_queue)

    def _end_suspension(self, process_queue: ProcessQueue) -> None:
        self._suspended.discard(process_queue)
        self.resume(process_queue)

    async def reject(self, message: Message, outcome: Reject) -> None:
        """Store a message in the group's dead-letter topic. Raises RocketletError as `retry` does."""
        held, run = self._held(message)
        await self._send_back(message, DEAD_LETTER_LEVEL, outcome.reason)
        self._end(message, held, run, outcome)


def _goes_on(run: Run | None) -> bool:
    return run is not None and not run.is_done and run.process_queue.may_begin


class Messages:
    """Messages one by one. One is acknowledged when the next is asked for, unless it was settled otherwise. An iteration that
    is dropped, as by `break`, gives the last one back."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._last: HeldRun | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        self._settle()
        if self._last is None:
            self._last = await self._deliveries.take()
            if self._last is None:
                raise StopAsyncIteration
        return self._deliveries.hold(self._last)

    def _settle(self) -> None:
        held = self._last
        if held is not None and held.message is not None and held.run is not None:
            self._deliveries.acknowledge(held.message)
        if held is not None and (self._deliveries.is_closed or not _goes_on(held.run)):
            self._last = None
            self._deliveries.give_back(held)

    def __del__(self) -> None:
        if self._last is not None:
            self._deliveries.drop(self._last)


class Batches:
    """Messages of one queue, up to `batch_size` at once; acknowledged together when the next are asked for."""

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
        self._last = await self._deliveries.take()
        if self._last is None or self._last.run is None:
            raise StopAsyncIteration
        messages = self._last.run.messages[self._last.run.done :]
        self._deliveries.begin(self._last, messages)
        return messages

    def release(self) -> None:
        """Give the last list back, to be redelivered."""
        held, self._last = self._last, None
        if held is not None:
            self._deliveries.give_back(held)

    def __del__(self) -> None:
        if self._last is not None:
            self._deliveries.drop(self._last)
