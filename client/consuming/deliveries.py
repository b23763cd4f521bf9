"""Messages for a consumer without a handler: handed out when they are asked for, settled by the caller.

A run that is in hand counts as a running handler: a hand-over of its queue waits for it. A message that comes back
unsettled is handed out again, first. A wait that is cancelled loses nothing and ends nothing.
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


class Hand:
    """The holder of a run: the task that took it, and which message of it is being worked on. `is_received`: that message
    was asked for alone, so that the run goes back when it is settled. `told`: hears how it ends."""

    __slots__ = ("is_received", "message", "run", "task", "told")

    def __init__(self, run: Run) -> None:
        self.run: Run | None = run
        self.task = asyncio.current_task()
        self.message: Message | None = None
        self.is_received = False
        self.told: list[Settled] = []

    def ends(self, outcome: Outcome) -> None:
        told, self.told = self.told, []
        for settled in told:
            settled(outcome)


class Deliveries:
    """`send_back(message, delay_level, reason)` hands a message to the broker; `retry_limit(broker_name)`: how often one is
    retried in order; `on_acknowledged(process_queue)`. `orderly`:
    a queue has one run in hand at most, and one that is to be retried holds it. Middleware that is a DeliveryWatch is told
    of messages that are handed out."""

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
        self._resting: set[ProcessQueue] = set()  # in order: until their first run may be tried again
        self._arrived = asyncio.Event()
        self._hands: set[Hand] = set()
        self._dropped: deque[Hand] = deque()
        self._holding: dict[Message, Hand] = {}
        self.is_closed = False
        self.home = Home()
        self.home.begin()

    # Handing out

    def put(self, runs: Sequence[Run]) -> None:
        """The new runs of one queue."""
        if runs:
            process_queue = runs[0].process_queue
            process_queue.waiting.extend(runs)
            self.resume(process_queue)

    def resume(self, process_queue: ProcessQueue) -> None:
        """Something of this queue may be handed out again. Queues take turns."""
        if process_queue.waiting and process_queue not in self._lined_up:
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
        self._arrived.set()

    async def receive(self) -> Message | None:
        """Return the next message, which is held until it is settled; None once the consumer stops."""
        hand = await self.take()
        return None if hand is None else self.hold(hand, is_received=True)

    async def take(self) -> Hand | None:
        """The next run, in hand from now on; None when the consumer has been stopped."""
        self.home.check()
        while not self.is_closed:
            self._take_dropped()
            run = self._next()
            if run is not None:
                hand = Hand(run)
                self._hands.add(hand)
                return hand
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def _next(self) -> Run | None:
        for _ in range(len(self._line)):
            process_queue = self._line.popleft()
            self._lined_up.discard(process_queue)
            while process_queue.waiting and process_queue.waiting[0].is_done:
                process_queue.waiting.popleft()
            is_held = process_queue in self._resting or (self._orderly and process_queue.running)
            if not process_queue.waiting or not process_queue.may_begin or is_held:
                continue  # it comes back into the line when that has changed
            run = process_queue.waiting.popleft()
            process_queue.enter()
            self.resume(process_queue)
            return run
        return None

    def give_back(self, hand: Hand) -> None:
        """Takes a run out of hand; its unacknowledged messages are handed out again."""
        run = self._taken_from(hand)
        if run is not None:
            self._put_back(run)

    def drop(self, hand: Hand) -> None:
        """Like `give_back`, but soon, from any thread and in the midst of anything: Python collects garbage where it
        pleases."""
        self._dropped.append(hand)
        self.home.call_soon(self._take_dropped)

    def _take_dropped(self) -> None:
        while self._dropped:
            self.give_back(self._dropped.popleft())

    def _taken_from(self, hand: Hand) -> Run | None:
        run, hand.run = hand.run, None
        self._hands.discard(hand)
        if hand.message is not None:
            self._holding.pop(hand.message, None)
        hand.ends(RetryLater())
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
        for hand in [hand for hand in self._hands if message is None or hand.message is message]:
            self.give_back(hand)

    def close(self) -> None:
        """The consumer stops: what its own task still has is given back; for others the hand-over waits."""
        self.is_closed = True
        self._arrived.set()
        self._take_dropped()
        for hand in [hand for hand in self._hands if hand.task is asyncio.current_task()]:
            self.give_back(hand)

    # Settling

    def hold(self, hand: Hand, *, is_received: bool = False) -> Message:
        """The next message of the run in hand, which is to be settled now."""
        assert hand.run is not None
        hand.message = message = hand.run.messages[hand.run.done]
        hand.is_received = is_received
        self._holding[message] = hand
        self.begin(hand, [message])
        return message

    def begin(self, hand: Hand, messages: Sequence[Message]) -> None:
        """Somebody works on them from now on."""
        if self._watches:
            hand.told = [watch.begins(messages) for watch in self._watches]

    def is_held(self, message: Message) -> bool:
        self._take_dropped()
        return message in self._holding

    def acknowledge(self, message: Message) -> None:
        """Raises ConfigError for a message that is not in hand."""
        self._end(message, *self._held(message), None)

    def _held(self, message: Message) -> tuple[Hand, Run]:
        self.home.check()
        self._take_dropped()
        hand = self._holding.get(message)
        if hand is None or hand.run is None:
            raise ConfigError(f"{message!r} is not in hand: it was settled before, or did not come from this consumer")
        return hand, hand.run

    def _end(self, message: Message, hand: Hand, run: Run, outcome: Outcome) -> None:
        if self._holding.pop(message, None) is not hand:
            return  # settled otherwise while the broker was asked: the run is at another message by now
        hand.message = None
        hand.ends(outcome)
        if not run.is_done:  # else its queue was lost meanwhile
            run.process_queue.acknowledge(run, run.done + 1)
        if hand.is_received:
            self.give_back(hand)

    async def retry(self, message: Message, outcome: RetryLater) -> None:
        """Redeliver a message later. Raises RocketletError if the broker does not take it; it is then still held."""
        check_has_level(outcome)
        hand, run = self._held(message)
        if not self._orderly:
            await self._send_back(message, outcome.delay_level, outcome.reason)
            self._end(message, hand, run, outcome)
            return
        limit = await self._retry_limit(message.queue.broker_name)
        hand, run = self._held(message)  # else it was settled otherwise meanwhile
        run.tries += 1
        if run.tries > limit:
            await self.reject(message, Reject(outcome.reason))
            return
        self._taken_from(hand)
        self._resting.add(run.process_queue)  # nobody has it, and still nothing of the queue begins
        self._put_back(run)
        asyncio.get_running_loop().call_later(self._suspend_queue_s, self._rested, run.process_queue)

    def _rested(self, process_queue: ProcessQueue) -> None:
        self._resting.discard(process_queue)
        self.resume(process_queue)

    async def reject(self, message: Message, outcome: Reject) -> None:
        """Kept in the group's dead-letter topic. Raises RocketletError as `retry` does."""
        hand, run = self._held(message)
        await self._send_back(message, DEAD_LETTER_LEVEL, outcome.reason)
        self._end(message, hand, run, outcome)


def _goes_on(run: Run | None) -> bool:
    return run is not None and not run.is_done and run.process_queue.may_begin


class Messages:
    """Messages one by one. One is acknowledged when the next is asked for, unless it was settled otherwise. An iteration that
    is dropped, as by `break`, gives the last one back."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._hand: Hand | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        self._settle()
        if self._hand is None:
            self._hand = await self._deliveries.take()
            if self._hand is None:
                raise StopAsyncIteration
        return self._deliveries.hold(self._hand)

    def _settle(self) -> None:
        hand = self._hand
        if hand is not None and hand.message is not None and hand.run is not None:
            self._deliveries.acknowledge(hand.message)
        if hand is not None and (self._deliveries.is_closed or not _goes_on(hand.run)):
            self._hand = None
            self._deliveries.give_back(hand)

    def __del__(self) -> None:
        if self._hand is not None:
            self._deliveries.drop(self._hand)


class Batches:
    """Messages of one queue, up to `batch_size` at once; acknowledged together when the next are asked for."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._hand: Hand | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Message]:
        self._deliveries.home.check()
        hand, self._hand = self._hand, None
        if hand is not None and hand.run is not None:
            hand.run.process_queue.acknowledge(hand.run)
            hand.ends(None)
            self._deliveries.give_back(hand)
        self._hand = await self._deliveries.take()
        if self._hand is None or self._hand.run is None:
            raise StopAsyncIteration
        messages = self._hand.run.messages[self._hand.run.done :]
        self._deliveries.begin(self._hand, messages)
        return messages

    def release(self) -> None:
        """Give the last list back, to be redelivered."""
        hand, self._hand = self._hand, None
        if hand is not None:
            self._deliveries.give_back(hand)

    def __del__(self) -> None:
        if self._hand is not None:
            self._deliveries.drop(self._hand)
