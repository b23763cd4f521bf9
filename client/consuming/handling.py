"""From pulled messages to the application's handler: decoding, worker tasks, retries, and messages that are sent back."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from ...protocol import admin_bodies, bodies
from ...protocol.admin_bodies import RunningQueue, decode_groups
from ...protocol.bodies import BodyError, decode_group
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import GroupOnly, SendBack, write
from ...protocol.message import MessageError, decode_record
from ...protocol.names import Queue, Subscription
from ..config import (
    DEAD_LETTER_LEVEL,
    MAX_INT,
    MAX_REASON_CHARS,
    MAX_RECONSUME_TIMES,
    MAX_TRIED_AT_ONCE,
    OFFSET_TIMEOUT_S,
    REASON_CHARS,
    RETRY_DELAYS_S,
    ClientLimits,
    check_count,
    check_delay,
    takes_message,
)
from ..errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..message import Message, record_fault
from ..wire.cluster import ClusterView
from ..wire.connection import Connection, body_of
from .queues import ProcessQueue, Run

log = get_logger("rocketlet.handler")
questions_log = get_logger("rocketlet.questions")


# ------------------------------------------------------------------------------
# Hands messages to the user's handler: workers that take runs as they come, and act on a handler's outcome.
#
# A worker is a task that lives as long as the consumer; there is none per message. Concurrent handling takes any run;
# orderly handling takes a queue's runs one after the other, by one worker at a time.
#
# A handler may do anything. Only the outcomes that are documented count as success; everything else is a failure,
# which is logged and retried. Only a coroutine's KeyboardInterrupt is passed on to the runner of the loop. A worker
# that is cancelled ends, because a loop that is being closed cancels its tasks and waits for them. If the consumer
# has not been stopped, a new worker takes its place.


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

SendBackFunction = Callable[[Message, int, str], Awaitable[None]]


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


class RunDispatcher:
    """Gives the runs of process queues to the handler, and carries out its outcomes.

    Args:
        send_back: `send_back(message, delay_level, reason)` returns a message to the broker, which redelivers it.
        retry_limit: `retry_limit(broker_name)` returns how often a message is retried in order.
        on_acknowledged: called with the process queue when messages are acknowledged.
        on_failed: `on_failed(message, reason)` is called when the handler has raised, or rejected the message.
    """

    def __init__(
        self,
        call: Calling,
        handling: Handling,
        *,
        send_back: SendBackFunction,
        retry_limit: Callable[[str], Awaitable[int]],
        on_acknowledged: Callable[[ProcessQueue], None],
        on_failed: Callable[[Message, str], None],
        limits: ClientLimits,
    ) -> None:
        self._call = call
        self._judge = handling.judge or _tried_again
        self._takes_batches = handling.takes_batches
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
        self.pool = WorkerPool(call, self, handling.concurrency, limits, takes_batches=handling.takes_batches)
        self._loop = asyncio.get_running_loop()

    @property
    def is_closed(self) -> bool:
        return self.pool.is_stopping

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

    async def work(self) -> None:
        line, call = self._line, self._call.call
        task = asyncio.current_task()
        assert task is not None
        while (
            not task.cancelling()
        ):  # a handler that has ended may have cancelled it: that must not affect the next one
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
            if is_cancelled and not self.pool.is_stopping:
                self._loop.call_later(0, self._again, run)
            elif not is_handled and not self.pool.is_stopping:
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
        self.pool.add(task)

    async def _send_back_now(self, run: Run, outcome: Outcome) -> None:
        try:
            if outcome is not None:
                await self._returned(run, outcome)
        finally:
            run.process_queue.leave()

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
        """Return the handler's outcome for a run. Raises CancelledError if the worker itself is cancelled: it cannot send the
        messages back, so another worker does, by the run's outcome."""
        messages = [message for message in run.messages if not message.is_given_up] or run.messages
        outcome, error = self.pool.outcome(messages, ended, self._judge, by_level=True)
        if error is not None and not self.pool.is_stopping:
            self._report_failed(run, repr(error))
        if isinstance(outcome, Reject):
            self._report_failed(run, outcome.reason or "it was given up")
        # The handler has ended, and cancelled its worker on the way: its outcome counts, and another worker carries it out.
        if outcome is not None and _is_cancelled():
            run.outcome = outcome
            raise asyncio.CancelledError
        return outcome

    def _report_failed(self, run: Run, reason: str) -> None:
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
            if delay_s and not self.pool.is_stopping:
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


def _fault_of(result: object, *, by_level: bool) -> BaseException | None:
    """Return why a handler's result is not an outcome; None if it is one."""
    try:
        outcome = checked_outcome(result)
        if by_level and isinstance(outcome, RetryLater):
            check_has_level(outcome)
    except BaseException as error:  # its `__repr__` may raise anything
        return error
    return None


def checked_outcome(outcome: Any) -> Outcome:
    """Return a handler's outcome. Raises TypeError for a result that is not one."""
    if outcome is not None and not isinstance(outcome, RetryLater | Reject):
        raise TypeError(
            f"the handler returned {outcome!r}, a {type(outcome).__name__}; "
            "allowed are None, RetryLater(...) and Reject()"
        )
    return outcome


def check_has_level(outcome: RetryLater) -> None:
    """Raises ConfigError for an outcome with a delay, which the retry topic does not support."""
    if outcome.delay is not None:
        raise ConfigError(
            "delay: a Consumer's messages are redelivered by delay_level, a SharedConsumer's after any time"
        )


def log_failure(messages: Sequence[Message], error: BaseException, outcome: Outcome) -> None:
    """Log that a handler has raised, and what becomes of its messages."""
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


# ------------------------------------------------------------------------------
# A handler as something that can be awaited, whatever it is, with its middleware around it.
#
# A handler that is a plain function runs in a thread, so that it cannot stop the heartbeats.


Called = Callable[[Any], Awaitable[Any]]
Inner = Callable[[Callable[..., Awaitable[Any]]], Called]


class Calling:
    """Calls a handler that is called `at_once` times at the same time, at most. Raises its exceptions. `inner` is around
    the handler, inside of all middleware."""

    def __init__(
        self,
        handler: Callable[..., Any],
        at_once: int,
        middleware: Sequence[Callable[[Any, Called], Awaitable[Any]]],
        inner: Inner | None = None,
    ) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()
        coroutine = self._as_coroutine(handler, at_once)
        self.call: Called = coroutine if inner is None else inner(coroutine)
        for layer in reversed(middleware):
            self.call = _around(layer, self.call)

    def _as_coroutine(self, handler: Callable[..., Any], at_once: int) -> Callable[..., Awaitable[Any]]:
        is_async = inspect.iscoroutinefunction(handler)
        if is_async or inspect.iscoroutinefunction(type(handler).__call__):
            return cast("Callable[..., Awaitable[Any]]", handler)
        # As many threads as workers: a handler never waits for a thread, and the loop's own pool stays free for
        # others.
        self._executor = executor = ThreadPoolExecutor(
            at_once, "rocketlet-handler", initializer=lambda: self._threads.add(threading.get_ident())
        )
        loop = asyncio.get_running_loop()

        async def in_thread(*arguments: Any) -> Any:
            outcome, error = await loop.run_in_executor(executor, copy_context().run, caught, handler, *arguments)
            if error is not None:
                raise error
            return (
                await outcome if inspect.isawaitable(outcome) else outcome
            )  # as of a lambda around a coroutine function

        return in_thread

    def is_here(self) -> bool:
        """Whether this thread is one of the handler's."""
        return threading.get_ident() in self._threads

    def stop(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _around(layer: Callable[[Any, Called], Awaitable[Any]], call: Called) -> Called:
    return lambda argument: layer(argument, call)


def caught(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """A handler's result, or its exception, in its thread. A future cannot hold every exception: StopIteration leaves it
    without an end. Nobody has pressed Ctrl-C here: Python tells that the main thread alone."""
    try:
        return handler(*arguments), None
    except (StopIteration, KeyboardInterrupt) as error:
        failed = RuntimeError(f"the handler raised {type(error).__name__}")
        failed.__cause__ = error
        return None, failed
    except BaseException as error:
        return None, error


# ------------------------------------------------------------------------------
# The worker tasks that run the handler of either kind of consumer. A worker is a task that lives as long as the consumer:
# there is none for each message. One that is cancelled before the consumer stops is replaced.


class WorkSource(Protocol):
    """Gives messages to the handler, and carries out its outcomes."""

    @property
    def is_closed(self) -> bool:
        """True if a worker that ends is not replaced any more."""
        ...

    async def work(self) -> None:
        """Call the handler with message after message."""


class WorkerPool:
    """Runs the handler of a consumer, and judges its results.

    Attributes:
        is_stopping: True once the workers are cancelled: what still runs is not acknowledged.
    """

    def __init__(
        self,
        call: Calling,
        source: WorkSource,
        concurrency: int,
        limits: ClientLimits,
        *,
        takes_batches: bool = False,
    ) -> None:
        self._call = call
        self._source = source
        self._concurrency = concurrency
        self._limits = limits
        self._takes_batches = takes_batches
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.is_stopping = False

    def start(self) -> None:
        for number in range(self._concurrency):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        if not self._source.is_closed:
            task = asyncio.create_task(self._source.work(), name=f"handler {number}")
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._source.is_closed:
            log.warning("worker_cancelled", worker=number, hint="another one takes its place")
            self._loop.call_later(self._limits.restart_s, self._start_worker, number)

    def add(self, task: asyncio.Task[None]) -> None:
        """Add a task that ends with the workers and is not replaced."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def outcome(
        self, messages: Sequence[Message], ended: Ended, judge: Judge, *, by_level: bool
    ) -> tuple[Outcome, BaseException | None]:
        """Return the outcome of messages whose handler has ended, and its failure. A result that is not an outcome is a
        failure, too. Raises KeyboardInterrupt, and GeneratorExit if the loop is gone.

        Args:
            judge: returns the outcome after a failure.
            by_level: True if retries have delay levels, not any times.
        """
        error = ended.error or _fault_of(ended.result, by_level=by_level)
        if error is None:
            return cast("Outcome", ended.result), None
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise error
        outcome = judge(messages, error)
        if not self.is_stopping:
            log_failure(messages, error, outcome)
        return outcome, error

    async def try_one(self, message: Message) -> Outcome:
        """Return the handler's outcome for a message that is not settled by it. Raises whatever the handler raises."""
        return checked_outcome(await self._call.call([message] if self._takes_batches else message))

    async def drain(self, drain_s: float) -> None:
        """Wait up to `drain_s` for the workers to end."""
        if self._tasks and drain_s > 0:
            await asyncio.wait(self._tasks, timeout=drain_s)

    async def cancel(self) -> None:
        """Cancel the workers and wait for their end."""
        self.is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._call.stop()
        if self._tasks:  # no gather, which cancels them again: one of them may wait for the caller
            await asyncio.wait(self._tasks)

    def is_handling_here(self) -> bool:
        """Return True if the caller is a handler of this pool."""
        try:
            current = asyncio.current_task()
        except RuntimeError:  # in a thread without a loop
            current = None
        return self._call.is_here() or any(task is current for task in self._tasks)


# ------------------------------------------------------------------------------
# Handlers that get a body's content in place of the message.
#
# A body that cannot be decoded now cannot be decoded the next time, either: its message is rejected with the reason,
# and is not tried again. In a batch that message alone is rejected; the handler gets the others.


Value = TypeVar("Value")
Result = Awaitable[Outcome] | Outcome
Decode = Callable[[bytes], Value]
ValueHandler = Callable[[Value], Result] | Callable[[Value, Message], Result]
ValuesHandler = Callable[[list[Value]], Result] | Callable[[list[Value], list[Message]], Result]


class _Undecodable(Exception):
    """The text says why."""


class Decoding:
    """`send_back(message, delay_level, reason)` hands a message of a batch to the broker; one alone is its consumer's."""

    def __init__(
        self, decode: Decode[Any], handler: Callable[..., Any], send_back: SendBackFunction | None = None
    ) -> None:
        self._decode = decode
        self._with_message = takes_message(handler)
        self._send_back = send_back

    def around(self, call: Callable[..., Awaitable[Any]]) -> Called:
        """Calls `call` with the content of the bodies."""

        async def decoded(argument: Message | list[Message]) -> Any:
            if isinstance(argument, Message):
                try:
                    value: Any = self._decoded(argument)
                except _Undecodable as error:
                    return Reject(str(error))
            else:
                value, argument = await self._all_decoded(argument)
                if not argument:
                    return None
            return await (call(value, argument) if self._with_message else call(value))

        return decoded

    async def _all_decoded(self, messages: list[Message]) -> tuple[list[Any], list[Message]]:
        """Those that can be. Raises RocketletError if the broker does not take one of the others."""
        values: list[Any] = []
        kept: list[Message] = []
        for message in messages:
            if message.is_given_up:  # by a try before this one
                continue
            try:
                values.append(self._decoded(message))
            except _Undecodable as error:
                assert self._send_back is not None
                await self._send_back(message, DEAD_LETTER_LEVEL, str(error))
                message.is_given_up = True
            else:
                kept.append(message)
        return values, kept

    def _decoded(self, message: Message) -> Any:
        try:
            return self._decode(message.body)
        except Exception as error:
            reason = f"the body cannot be decoded: {reason_of(error)}"
            log.error(
                "message_undecodable", queue=str(message.queue), offset=message.queue_offset, reason=reason,
                hint="it is a dead letter",
            )  # fmt: skip
            raise _Undecodable(reason) from error


# ------------------------------------------------------------------------------
# A retry policy: which exceptions of a handler are tried again, how often, and after which times.


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`Consumer(..., retry=RetryPolicy(attempts=4, delays_s=(1, 30, 600), on=(ConnectionError, TimeoutError)))`

    - `attempts`: how often a message is handled at most, the first time included; then it is a dead letter.
    - `delays_s`: before the second try, the third, and so on; the last one is for all that follow. A SharedConsumer takes
      any times up to 12 hours, a Consumer the 18 that brokers know: 1, 5, 10, 30 s, 1 to 10, 20, 30 min, 1 and 2 h.
      Default: longer each time, from 10 s on.
    - `on`: the exceptions that are tried again; any other makes a dead letter at once, with its text. Default: all.
    - `never`: exceptions that are not, though `on` has them.

    A handler's return value goes before the policy. In order, `suspend_queue_s` is the time between two tries.
    """

    attempts: int = 17
    delays_s: Sequence[float] = ()
    on: tuple[type[Exception], ...] = (Exception,)
    never: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts, 1)
        if not isinstance(self.delays_s, Sequence) or isinstance(self.delays_s, str):
            raise ConfigError(f"delays_s: {self.delays_s!r} is not a tuple of seconds, such as (1, 30, 600)")
        for delay in self.delays_s:
            check_delay(delay, "delays_s")
        if len(self.delays_s) >= self.attempts:
            raise ConfigError(
                f"delays_s: {len(self.delays_s)} delays are more than {self.attempts} attempts have between them"
            )
        for name in ("on", "never"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(isinstance(item, type) for item in kinds):
                raise ConfigError(f"{name}: {kinds!r} is not a tuple of exceptions, such as (ConnectionError,)")

    def outcome_by_level(self, messages: Sequence[Message], error: BaseException) -> Outcome:
        """Decides about a Consumer's messages whose handler raised."""
        found = self.outcome(max(messages, key=lambda message: message.reconsume_times), error)
        if isinstance(found, RetryLater) and found.delay is not None:
            return RetryLater(delay_level=RETRY_DELAYS_S.index(found.delay) + 1, reason=found.reason)
        return found

    def outcome(self, message: Message, error: BaseException) -> Outcome:
        """Decides about a message whose handler raised."""
        reason = reason_of(error)
        if isinstance(error, Exception) and (not isinstance(error, self.on) or isinstance(error, self.never)):
            return Reject(reason)
        if not self.delays_s:
            return RetryLater(reason=reason)
        return RetryLater(reason=reason, delay=self.delays_s[min(message.reconsume_times, len(self.delays_s) - 1)])


def check_levels(name: str, policy: RetryPolicy) -> None:
    """Raises ConfigError for delays that only a SharedConsumer can keep."""
    odd = [delay for delay in policy.delays_s if delay not in RETRY_DELAYS_S]
    if odd:
        known = ", ".join(map(str, RETRY_DELAYS_S))
        raise ConfigError(f"{name}: delays_s: brokers do not know {odd[0]!r} s for a Consumer; there are {known}")


# ------------------------------------------------------------------------------
# Why a message was not handled: the text that travels with its retry and its dead letter.
#
# It is short and on one line. Text that looks like a password, a token or a key is left out: more people read dead
# letters than a service's log.


_LOOKED_AT_CHARS: Final = 4 * MAX_REASON_CHARS
_LEFT_OUT: Final = "***"
_IN_ADDRESS: Final = re.compile(r"(\w://)[^\s/@]{1,200}@")
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic)\s+[^\s,;]+")
_NAMED: Final = re.compile(
    r"""(?i)((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key|authorization|credentials?|signature)"""
    r"""[\w-]{0,20}["']?\s{0,3}[=:]\s{0,3})("[^"]*"?|'[^']*'?|[^\s,;&)}\]]+(?:\s\*\*\*)?)"""
)


def reason_of(error: BaseException) -> str:
    """An exception's type and text."""
    try:
        text = str(error)
    except Exception:  # the exception's class is the user's
        text = ""
    name = type(error).__qualname__
    return shown(f"{name}: {text}" if text else name)


def shown(text: str) -> str:
    """A text as it may be kept beside a message."""
    line = " ".join(text[:_LOOKED_AT_CHARS].split())
    line = "".join(char if char.isprintable() else " " for char in line)
    line = _IN_ADDRESS.sub(rf"\1{_LEFT_OUT}@", line)
    line = _SCHEME.sub(rf"\1 {_LEFT_OUT}", line)
    line = _NAMED.sub(rf"\1{_LEFT_OUT}", line)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 3]}..."


# ------------------------------------------------------------------------------
# Hands a message back to its broker, which delivers it again or keeps it as a dead letter.


class RetryLimit:
    """How often a message is retried in order, which its member counts: `fixed` times, or as often as the group's settings at
    the message's broker say."""

    def __init__(self, cluster: ClusterView, group: str, fixed: int | None) -> None:
        self._cluster = cluster
        self._group = group
        self._fixed = fixed
        self._known: dict[str, tuple[int, float]] = {}  # by broker name: the limit, and when it was asked for

    async def at(self, broker_name: str) -> int:
        """Return the limit at a broker. Without an answer, return the last one that is known, or 16."""
        if self._fixed is not None:
            return self._fixed
        known, now_s = self._known.get(broker_name), asyncio.get_running_loop().time()
        if known is not None and now_s - known[1] < self._cluster.limits.group_settings_s:
            return known[0]
        try:
            limit = max(await self._ask(broker_name), 0)
        except RocketletError as error:
            limit = known[0] if known is not None else MAX_RECONSUME_TIMES
            log.warning(
                "group_settings_unknown", group=self._group, broker=broker_name, reason=str(error), retries=limit
            )
        self._known[broker_name] = limit, now_s
        return limit

    async def _ask(self, broker_name: str) -> int:
        connection = await self._cluster.broker(broker_name)
        ext = write(GroupOnly(self._group))
        try:
            answer = await connection.request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, ext, timeout_s=OFFSET_TIMEOUT_S)
        except BrokerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return await self._ask_for_all(connection)
        return body_of(answer, decode_group).retry_max_times

    async def _ask_for_all(self, connection: Connection) -> int:
        """4.9 tells the settings of all groups, not of one."""
        answer = await connection.request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, timeout_s=OFFSET_TIMEOUT_S)
        settings = body_of(answer, decode_groups).get(self._group)
        return settings.retry_max_times if settings is not None else MAX_RECONSUME_TIMES


async def hand_back(
    cluster: ClusterView, group: str, message: Message, delay_level: int, reason: str, tries: int | None
) -> None:
    """`tries`: how often it may be retried; None: as often as the group's settings say. Raises RocketletError."""
    connection = await cluster.broker(message.queue.broker_name)
    header = SendBack(
        message.physical_offset,
        group,
        delay_level,
        message.message_id,
        message.topic,
        False,
        tries,
        shown(reason) or None,
    )
    await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


# ------------------------------------------------------------------------------
# Answers a broker's questions on behalf of an administrator: state, offsets, new offsets, a trial of a message.


CLIENT_VERSION: Final = "V4_9_8"  # printed by mqadmin, which knows only Apache's names
_TOPIC: Final = "topic"


class QueriedConsumer(Protocol):
    """The consumer that answers."""

    group: str
    subscriptions: Mapping[str, Subscription]

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]: ...

    @property
    def settings(self) -> Mapping[str, str]: ...

    def reset(self, offsets: Mapping[Queue, int]) -> None: ...

    async def try_one(self, message: Message) -> Outcome: ...


class Questions:
    """Registers itself for the requests; one for another group is answered with an error. spawn: runs what answers later, and
    ends it when the consumer stops."""

    def __init__(
        self, cluster: ClusterView, asked: QueriedConsumer, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._asked = asked
        self._spawn = spawn
        self._tried_now = 0
        answers: Mapping[int, Callable[[Connection, Frame], None]] = {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._offsets,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._try,
        }
        for code, answer in answers.items():
            cluster.answer(code, partial(self._checked, answer))

    def _checked(self, answer: Callable[[Connection, Frame], None], connection: Connection, frame: Frame) -> None:
        group = frame.ext.get("group") or frame.ext.get("consumerGroup")
        fault = None if group == self._asked.group else f"this client is not a member of the group {group}"
        try:
            if fault is None:
                answer(connection, frame)
        except (BodyError, MessageError) as error:
            fault = str(error)
        if fault is not None:
            questions_log.warning("request_of_broker_refused", reason=fault)
            if not frame.is_oneway:
                connection.respond(frame, ResponseCode.SYSTEM_ERROR, remark=fault)

    def _reset(self, connection: Connection, frame: Frame) -> None:
        """A queue of ours goes on from the offset that is given; the others are their owners' business."""
        offsets = admin_bodies.decode_offsets(frame.body)
        mine = {queue: offset for queue, offset in offsets.items() if queue in self._asked.queues}
        questions_log.info("offsets_reset", group=self._asked.group, queues=len(mine))
        self._asked.reset(mine)

    def _offsets(self, connection: Connection, frame: Frame) -> None:
        topic = frame.ext.get(_TOPIC)
        offsets = {
            queue: process_queue.commit_offset
            for queue, process_queue in self._asked.queues.items()
            if topic in (None, queue.topic)
        }
        connection.respond(frame, body=admin_bodies.encode_client_status(offsets))

    def _running_info(self, connection: Connection, frame: Frame) -> None:
        asked = self._asked
        queues = {
            queue: RunningQueue(
                process_queue.commit_offset,
                process_queue.messages,
                process_queue.size_bytes >> 20,
                process_queue.lease.epoch > 0,
                process_queue.is_dropped,
                process_queue.pull.began_ms,
                process_queue.pull.began_ms,
                attempt=process_queue.runs[0].tries if process_queue.runs else 0,
                failure=process_queue.runs[0].failure[:REASON_CHARS] if process_queue.runs else "",
            )
            for queue, process_queue in asked.queues.items()
        }
        properties = {"PROP_CLIENT_VERSION": CLIENT_VERSION, "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY", **asked.settings}
        subscriptions = map(bodies.encode_subscription, asked.subscriptions.values())
        connection.respond(frame, body=admin_bodies.encode_running_info(properties, subscriptions, queues))

    def _try(self, connection: Connection, frame: Frame) -> None:
        if self._tried_now >= MAX_TRIED_AT_ONCE:
            connection.respond(frame, ResponseCode.SYSTEM_BUSY, remark=f"{MAX_TRIED_AT_ONCE} messages are being tried")
            return
        record = decode_record(frame.body, errors="replace")
        queue = Queue(record.topic, str(frame.ext.get("brokerName", "")), record.queue_id)
        self._tried_now += 1
        self._spawn(self._tried(connection, frame, Message(record, queue, record.topic)))

    async def _tried(self, connection: Connection, frame: Frame, message: Message) -> None:
        began_s = time.monotonic()
        remark = ""
        try:
            outcome = await self._asked.try_one(message)
            result = "CR_SUCCESS" if outcome is None else "CR_LATER"
            if isinstance(outcome, Reject):
                remark = "rejected: it would go to the dead-letter topic"
        except (KeyboardInterrupt, GeneratorExit):  # the latter: the loop is gone
            raise
        except BaseException as error:  # a handler may cancel itself; the administrator waits for the answer
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        finally:
            self._tried_now -= 1
        spent_ms = int((time.monotonic() - began_s) * 1000)
        orderly = self._asked.settings.get("PROP_CONSUMEORDERLY") == "true"
        connection.respond(frame, body=admin_bodies.encode_direct_result(result, remark, spent_ms, orderly=orderly))
