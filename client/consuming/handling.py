"""Hands messages to the user's handler: workers that take runs as they come, and act on a handler's outcome.

A worker is a task that lives as long as the consumer; there is none per message. Concurrent handling takes any run;
orderly handling takes a queue's runs one after the other, by one worker at a time.

A handler may do anything. Only the outcomes that are documented count as success; everything else is a failure, which is
logged and retried. Only a coroutine's KeyboardInterrupt is passed on to the runner of the loop. A worker that is cancelled
ends, because a loop that is being closed cancels its tasks and waits for them. If the consumer has not been stopped, a new
worker takes its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from ..arguments import check_delay
from ..config import DEAD_LETTER_LEVEL, MAX_INT, ClientLimits
from ..errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, RocketletError
from ..log import get_logger
from ..message import Message, record_fault
from .calling import Calling
from .crew import Crew
from .process_queue import ProcessQueue, Run
from .reasons import reason_of

log = get_logger("rocketlet.handler")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLater:
    """Returned by a handler: deliver the message again. `delay_level` 0 waits longer each time; 1 to 18 wait as long as the
    broker's levels say, and a higher one as the highest. `reason` is kept with the message: `message.failure` next time.
    `delay`, a time or seconds up to 12 hours, is for a SharedConsumer's messages. Raises ConfigError for a level that is not
    a number from 0, for a delay that is none, and for both together."""

    delay_level: int = 0
    reason: str = ""
    delay: timedelta | float | None = None

    def __post_init__(self) -> None:
        if type(self.delay_level) is not int or not 0 <= self.delay_level <= MAX_INT:
            raise ConfigError(f"delay_level: {self.delay_level!r} is not a number from 0; Reject() gives a message up")
        _check_reason(self.reason)
        check_delay(self.delay)
        if self.delay is not None and self.delay_level:
            raise ConfigError(
                f"delay: {self.delay!r} and delay_level={self.delay_level} are two times; give one of them"
            )


@dataclass(frozen=True, slots=True)
class Reject:
    """Returned by a handler: do not deliver the message again, and store it in the group's dead-letter topic, with the
    reason."""

    reason: str = ""

    def __post_init__(self) -> None:
        _check_reason(self.reason)


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str):
        raise ConfigError(f"reason: {reason!r} is not a text")


Outcome = RetryLater | Reject | None
Handler = Callable[[Any], Awaitable[Outcome] | Outcome]
MessageHandler = Callable[[Message], Awaitable[Outcome] | Outcome]
BatchHandler = Callable[[list[Message]], Awaitable[Outcome] | Outcome]
Middleware = Callable[[Any, Callable[[Any], Awaitable[Outcome]]], Awaitable[Outcome]]
"""Around a handler: `async def layer(message, call): return await call(message)`. It gets the handler's argument, and may
look at it, measure, wrap the call, replace the outcome, or not call at all."""

Settled = Callable[[Outcome], None]


@runtime_checkable
class DeliveryWatch(Protocol):
    """Middleware for a consumer without a handler. It is told when messages are handed out, and `begins` returns the
    callback for their outcome. A message that is given back has the outcome RetryLater: it will be delivered again."""

    def begins(self, messages: Sequence[Message]) -> Settled: ...


Judge = Callable[[Sequence[Message], BaseException], Outcome]
"""The outcome of messages whose handler raised."""

SendBack = Callable[[Message, int, str], Awaitable[None]]


class Ended(NamedTuple):
    """A handler's result, or what it raised."""

    result: object
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Handling:
    """How handlers are run: `concurrency` at once, with lists of messages or with one each, in order or not. In order a
    failed message holds up its queue for `suspend_queue_s` each time."""

    takes_batches: bool
    concurrency: int
    orderly: bool
    suspend_queue_s: float
    judge: Judge | None = None


class Workers:
    """Runs the handler over the messages that are put in.

    `send_back(message, delay_level, reason)` hands a message to the broker to be retried; `retry_limit(broker_name)`: how
    often one is retried in order; `on_acknowledged(process_queue)`; `on_failed(message, reason)`: its handler raised, or gave
    it up.
    """

    def __init__(
        self,
        call: Calling,
        handling: Handling,
        *,
        send_back: SendBack,
        retry_limit: Callable[[str], Awaitable[int]],
        on_acknowledged: Callable[[ProcessQueue], None],
        on_failed: Callable[[Message, str], None],
        limits: ClientLimits,
    ) -> None:
        self._call = call
        self._judge = handling.judge or _tried_again
        self._takes_batches = handling.takes_batches
        self._concurrency = handling.concurrency
        self._orderly = handling.orderly
        self._suspend_queue_s = handling.suspend_queue_s
        self._on_failed = on_failed
        self._limits = limits
        self._send_back = send_back
        self._retry_limit = retry_limit
        self._on_acknowledged = on_acknowledged
        self._line: deque[ProcessQueue] = deque()  # those with something to hand out take turns
        self._lined_up: set[ProcessQueue] = set()  # in line; in order also with a worker, or waiting for another try
        self._idle: deque[asyncio.Future[None]] = deque()
        self._is_stopping = False
        self._crew = Crew(call, self._work, lambda: self._is_stopping, limits)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._crew.start(self._concurrency)

    def put(self, runs: Sequence[Run]) -> None:
        """Hands out the new runs of one queue."""
        if not runs:
            return
        process_queue = runs[0].process_queue
        if self._orderly:
            self._offer(process_queue)
        else:
            process_queue.waiting.extend(runs)
            self._line_up(process_queue)

    def resume(self, process_queue: ProcessQueue) -> None:
        """A queue is no longer suspended: its runs are handed out again."""
        if self._orderly:
            self._offer(process_queue)
        else:
            self._line_up(process_queue)

    def _line_up(self, process_queue: ProcessQueue) -> None:
        """Queues take turns, a run each: one that has just come does not wait behind the backlogs of others."""
        if process_queue.waiting and not process_queue.is_suspended and process_queue not in self._lined_up:
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
        self._wake(len(process_queue.waiting))

    def _next_of(self, process_queue: ProcessQueue) -> Run | None:
        """The queue's next run, if it may be handled now; the queue goes to the end of the line."""
        if not process_queue.waiting or not process_queue.may_begin:
            if process_queue.is_stopped:
                process_queue.waiting.clear()
            self._lined_up.discard(process_queue)
            return None
        run = process_queue.waiting.popleft()
        if process_queue.waiting:
            self._line.append(process_queue)
        else:
            self._lined_up.discard(process_queue)
        return run

    def _offer(self, process_queue: ProcessQueue) -> None:
        """Orderly: the queue waits for a worker, unless one has it. Messages that arrive while its first run waits for
        another try do not shorten that wait, as with Apache's ConsumeMessageOrderlyService."""
        if process_queue.runs and not (
            process_queue.runs[0].is_filling
            or process_queue in self._lined_up
            or process_queue.is_stopped
            or process_queue.is_suspended
        ):
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
            self._wake(1)

    def _offer_again(self, process_queue: ProcessQueue) -> None:
        self._lined_up.discard(process_queue)
        self._offer(process_queue)

    def _wake(self, count: int) -> None:
        idle = self._idle
        while count > 0 and idle:
            waiter = idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def _work(self) -> None:
        line, call = self._line, self._call.call
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # by a handler that has ended meanwhile: the next message is not to suffer from it
            while not line:
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
            process_queue = line.popleft()
            try:
                if self._orderly:
                    await self._one_in_order(process_queue)
                    continue
                run = self._next_of(process_queue)
                if run is None or run.done == len(run.messages):
                    continue
                process_queue.running += 1  # as `enter`
                if run.outcome is not None:
                    await self._carry_out(run)
                    continue
                # Called from here: a coroutine around each call takes longer than all else that a message needs.
                try:
                    outcome = await call(run.messages if self._takes_batches else run.messages[0])
                except BaseException as error:
                    await self._carry_out(run, Ended(None, error))
                    continue
                if outcome is None:
                    process_queue.acknowledge(run)
                    process_queue.leave()
                    self._on_acknowledged(process_queue)
                else:
                    await self._carry_out(run, Ended(outcome))
                    outcome = None  # nothing of it is kept until the next message comes
            except Exception:
                log.exception("handling_failed", hint="its messages stay unacknowledged")

    async def _carry_out(self, run: Run, ended: Ended | None = None) -> None:
        """Acts on the end of a run's handler; None if its outcome is known already."""
        process_queue = run.process_queue
        outcome: Outcome = None
        is_cancelled = is_handled = False
        try:
            outcome = run.outcome if ended is None else self._outcome(run, await self._of_readable(run, ended))
            is_handled = outcome is None or await self._returned(run, outcome)
            if is_handled:
                process_queue.acknowledge(run)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            if is_cancelled and not self._is_stopping:
                self._loop.call_later(0, self._again, run)
            elif not is_handled and not self._is_stopping:
                self._send_back_later(run, outcome)
            process_queue.leave()
        self._on_acknowledged(process_queue)

    def _again(self, run: Run) -> None:
        run.process_queue.waiting.append(run)
        self._line_up(run.process_queue)

    def _send_back_later(self, run: Run, outcome: Outcome) -> None:
        """The broker has not taken a run back: the handler is called again after a pause, as by Apache's
        ConsumeMessageConcurrentlyService. A hand-over does not wait so long, nor leave it: messages handled behind it would
        come again."""
        process_queue = run.process_queue
        process_queue.enter()
        timer = self._loop.call_later(self._limits.send_back_retry_s, self._handle_again, run)
        process_queue.untaken[run] = partial(self._send_back_at_once, run, outcome, timer)
        if process_queue.is_stopped:
            process_queue.untaken[run]()

    def _handle_again(self, run: Run) -> None:
        del run.process_queue.untaken[run]
        run.process_queue.leave()
        self._again(run)

    def _send_back_at_once(self, run: Run, outcome: Outcome, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        del run.process_queue.untaken[run]  # the queue is not left before the task leaves it
        task = asyncio.create_task(self._send_back_now(run, outcome), name="send back")
        self._crew.add(task)

    async def _send_back_now(self, run: Run, outcome: Outcome) -> None:
        try:
            if outcome is not None:
                await self._returned(run, outcome)
        finally:
            run.process_queue.leave()

    async def try_one(self, message: Message) -> Outcome:
        """The handler's outcome for a message that nobody counts. Raises whatever the handler raises."""
        return cast("Outcome", await self._call.call([message] if self._takes_batches else message))

    async def _called(self, run: Run) -> Ended:
        messages = [message for message in run.messages if not message.is_given_up]
        if not messages:
            return Ended(None)
        try:
            return Ended(await self._call.call(messages if self._takes_batches else messages[0]))
        except BaseException as error:
            return Ended(None, error)

    async def _of_readable(self, run: Run, ended: Ended) -> Ended:
        """The end of a run's handler. If it has raised, messages whose records cannot be read become dead letters, and the
        handler is called again with the others."""
        if not isinstance(ended.error, Exception):
            return ended
        has_unreadable = False
        for message in run.messages[run.done :]:
            fault = None if message.is_given_up else record_fault(message)
            if fault is None:
                continue
            hint = "it is a dead letter"
            try:
                await self._send_back(message, DEAD_LETTER_LEVEL, fault)
            except BrokerRefused as error:
                hint = f"it is skipped, because the broker does not take it back: {error}"
            except RocketletError:
                return ended  # the others cannot be sent back either: the run is tried again later
            log.error(
                "message_unreadable", queue=str(message.queue), offset=message.queue_offset, reason=fault, hint=hint
            )
            message.is_given_up = has_unreadable = True
        return await self._called(run) if has_unreadable else ended

    def _outcome(self, run: Run, ended: Ended) -> Outcome:
        """The handler's outcome for a run. A result that is none means: again, later. Raises CancelledError if the worker
        itself is cancelled: it cannot send the messages back, so another does, by the run's outcome."""
        error = ended.error or _fault_of(ended.result)
        if isinstance(error, KeyboardInterrupt | GeneratorExit):  # the latter: the loop is gone
            raise error
        messages = [message for message in run.messages if not message.is_given_up] or run.messages
        outcome = cast("Outcome", ended.result) if error is None else self._judge(messages, error)
        if error is not None and not self._is_stopping:
            log_failure(messages, error, outcome)
            self._tell_failed(run, repr(error))
        if isinstance(outcome, Reject):
            self._tell_failed(run, outcome.reason or "it was given up")
        # The handler has ended, and cancelled its worker on the way: its outcome counts, and another worker carries it out.
        if outcome is not None and _is_cancelled():
            run.outcome = outcome
            raise asyncio.CancelledError
        return outcome

    def _tell_failed(self, run: Run, reason: str) -> None:
        if run.tries <= 1:  # in order: the first time
            for message in run.messages[run.done :]:
                self._on_failed(message, reason)

    async def _returned(self, run: Run, outcome: RetryLater | Reject) -> bool:
        """Hands the run's messages back to the broker, those done before left out; False if it did not take all."""
        level = DEAD_LETTER_LEVEL if isinstance(outcome, Reject) else outcome.delay_level
        process_queue = run.process_queue
        # One by one: if the broker takes some and then fails, only the rest is handled again.
        while not run.is_done:  # also by a seek meanwhile
            count = run.done + 1
            try:
                if not run.messages[run.done].is_given_up:
                    await self._send_back(run.messages[run.done], level, outcome.reason)
            except RocketletError as error:
                if process_queue.is_stopped and isinstance(error, ConnectionFailed | RequestTimeout):
                    # A hand-over waits for its broker, and for this: else messages handled behind it come again.
                    await asyncio.sleep(self._limits.reconnect_s)
                    continue
                log.warning("send_back_failed", reason=str(error), hint="the handler will be called again")
                return False
            process_queue.acknowledge(run, count)
        return True

    async def _one_in_order(self, process_queue: ProcessQueue) -> None:
        """Handles the first run of a queue, and offers the queue again, later if the run has to wait."""
        if not process_queue.runs or process_queue.runs[0].is_filling or not process_queue.may_begin:
            self._lined_up.discard(process_queue)
            return
        run = process_queue.runs[0]
        delay_s = self._suspend_queue_s
        process_queue.enter()
        try:
            if await self._is_handled_in_order(run):
                process_queue.acknowledge(run)
                delay_s = 0.0
        finally:
            process_queue.leave()
            if delay_s and not self._is_stopping:
                self._loop.call_later(delay_s, self._offer_again, process_queue)
        self._on_acknowledged(process_queue)
        if not delay_s:
            self._offer_again(process_queue)

    async def _is_handled_in_order(self, run: Run) -> bool:
        """Whether the queue may go on: the run is handled, or given up and kept as dead letters."""
        broker_name = run.process_queue.queue.broker_name
        if not run.tries or run.tries <= await self._retry_limit(broker_name):
            run.tries += 1
            outcome = self._outcome(run, await self._of_readable(run, await self._called(run)))
            if outcome is None:
                return True
            run.failure = outcome.reason
            if isinstance(outcome, RetryLater) and run.tries <= await self._retry_limit(broker_name):
                return False
        return await self._returned(run, Reject(run.failure))

    async def stop(self) -> None:
        """Cancels what still runs; nothing of it is acknowledged."""
        self._is_stopping = True
        await self._crew.cancel()

    def is_handling_here(self) -> bool:
        return self._crew.is_handling_here()


def _fault_of(result: object) -> BaseException | None:
    """Why a handler's result is no outcome."""
    try:
        outcome = checked_outcome(result)
        if isinstance(outcome, RetryLater):
            check_has_level(outcome)
    except BaseException as error:  # its `__repr__` may raise anything
        return error
    return None


def checked_outcome(outcome: Any) -> Outcome:
    """A handler's outcome. Raises TypeError for a result that is none."""
    if outcome is not None and not isinstance(outcome, RetryLater | Reject):
        raise TypeError(
            f"the handler returned {outcome!r}, a {type(outcome).__name__}; "
            "allowed are None, RetryLater(...) and Reject()"
        )
    return outcome


def check_has_level(outcome: RetryLater) -> None:
    """Raises ConfigError for one that the retry topic cannot do."""
    if outcome.delay is not None:
        raise ConfigError("delay: a Consumer's messages come again by delay_level; a SharedConsumer's after any time")


def log_failure(messages: Sequence[Message], error: BaseException, outcome: Outcome) -> None:
    """`outcome`: of the messages, now that their handler has raised."""
    log.error(
        "handler_failed",
        queue=str(messages[0].queue),
        offset=messages[0].queue_offset,
        messages=len(messages),
        error=repr(error),
        exc_info=error,
        hint="to the dead letters" if isinstance(outcome, Reject) else "again later, while retries are left",
    )


def _tried_again(messages: Sequence[Message], error: BaseException) -> Outcome:
    return RetryLater(reason=reason_of(error))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
