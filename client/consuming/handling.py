"""From pulled messages to the application's handler: decoding, workers, retries, and messages returned to the broker."""

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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from ...protocol import admin_bodies, bodies
from ...protocol.admin_bodies import RunningHandler, RunningQueue, decode_groups
from ...protocol.bodies import BodyError, decode_group
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import GroupOnly, HeaderError, RunningInfoParts, SendBack, read, write
from ...protocol.message import MessageError, decode_record
from ...protocol.names import Queue, Subscription
from ..config import (
    DEAD_LETTER_LEVEL,
    DELAY_LEVELS_S,
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
from .running import RunningCalls, jstack_of

log = get_logger("rocketlet.handler")
questions_log = get_logger("rocketlet.questions")


# ------------------------------------------------------------------------------
# Passes messages to the user's handler: workers take runs from the queues, call the handler and carry out its outcome.
#
# A worker is a task that lives as long as the consumer, so a message needs no task of its own. In a concurrent consumer a
# worker takes any run. In an orderly consumer one worker at a time handles the runs of a queue, in order.
#
# A handler may do anything. Only None counts as success. RetryLater and Reject are carried out; any other result or
# exception is a failure, which is logged and, unless a retry policy decides otherwise, retried. Only KeyboardInterrupt
# from a coroutine, and GeneratorExit if the loop is closed, propagate. A cancelled worker ends, because a loop that is
# being closed cancels its tasks and waits for them. Unless the consumer is stopping, a new worker replaces it.


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLater:
    """Returned by a handler to have the message redelivered later. An orderly Consumer handles it again after its
    `suspend_queue_s`, whatever the delay level. A broadcasting Consumer drops it.

    Attributes:
        delay_level: 0 for a delay that grows with each retry; 1 to 18 for that delay level of the broker. A higher level
            means the highest one.
        reason: a text that Rocketlet's brokers store with a message that is sent back, as `message.failure` of the next
            delivery.
        delay: a timedelta or seconds, up to 12 hours. A Consumer supports only delays that are delay levels, such as 10 s.
        counts: False to suspend the message: the attempt does not count, so a message may be suspended any number of
            times. For messages of a SharedConsumer or LiteConsumer only. On Apache's brokers before 5.5, and in their
            lite topics, the attempt still counts.

    Raises ConfigError if `delay_level` is not an int from 0, `delay` is invalid, or both are given.
    """

    delay_level: int = 0
    reason: str = ""
    delay: timedelta | float | None = None
    counts: bool = True

    def __post_init__(self) -> None:
        if type(self.delay_level) is not int or not 0 <= self.delay_level <= MAX_INT:
            raise ConfigError(
                f"delay_level: expected an int from 0, got {self.delay_level!r}; return Reject() to stop retrying"
            )
        _check_reason(self.reason)
        check_delay(self.delay)
        if self.delay is not None and self.delay_level:
            raise ConfigError(
                f"delay: {self.delay!r} conflicts with delay_level={self.delay_level}; give only one of them"
            )


@dataclass(frozen=True, slots=True)
class Reject:
    """Returned by a handler to stop retrying the message and store it in the group's dead-letter topic, on Rocketlet's
    brokers with the reason. A broadcasting Consumer drops the message."""

    reason: str = ""

    def __post_init__(self) -> None:
        _check_reason(self.reason)


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str):
        raise ConfigError(f"reason: expected a str, got {reason!r}")


Outcome = RetryLater | Reject | None
Handler = Callable[[Any], Awaitable[Outcome] | Outcome]
MessageHandler = Callable[[Message], Awaitable[Outcome] | Outcome]
BatchHandler = Callable[[list[Message]], Awaitable[Outcome] | Outcome]
Middleware = Callable[[Any, Callable[[Any], Awaitable[Outcome]]], Awaitable[Outcome]]
"""A layer around the handler: `async def layer(message, call): return await call(message)`. It gets the handler's argument
and the next layer, and returns the outcome. It may replace the outcome, or not call the next layer."""

Settled = Callable[[Outcome], None]


@runtime_checkable
class DeliveryWatch(Protocol):
    """Middleware for a consumer without a handler, which is notified of deliveries and their outcomes."""

    def begins(self, messages: Sequence[Message]) -> Settled:
        """Called when messages are returned to the application. Return a callback for their outcome, which is RetryLater
        for messages that are released without being settled."""
        ...


Judge = Callable[[Sequence[Message], BaseException], Outcome]
"""A function that returns the outcome of messages whose handler raised."""

SendBackFunction = Callable[[Message, int, str, int], Awaitable[None]]
"""`send_back(message, delay_level, reason, tries)` returns a message to the broker. `tries` is the number of its attempts in
this member, which is logged; 0 if the broker counts them."""


class Ended(NamedTuple):
    """The end of a handler call: its result, or the exception that it raised."""

    result: object
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Handling:
    """How handlers are called.

    Attributes:
        takes_batches: True if the handler gets a list of messages instead of one message.
        concurrency: the maximum number of concurrent handler calls.
        orderly: True if the runs of a queue are handled in order, one at a time.
        suspend_queue_s: the time in seconds for which a failed message blocks its queue in an orderly consumer.
        judge: returns the outcome after a failure; None to retry always.
        attempts: the maximum number of attempts of a message; None if only the broker knows it.
        is_retried: False if failed messages are dropped, because the consumer is broadcasting.
    """

    takes_batches: bool
    concurrency: int
    orderly: bool
    suspend_queue_s: float
    judge: Judge | None = None
    attempts: int | None = None
    is_retried: bool = True

    def delay_of(self, outcome: RetryLater, message: Message) -> float | None:
        """Return the delay in seconds until a message is handled again; None if it is not."""
        if not self.is_retried:
            return None
        return self.suspend_queue_s if self.orderly else delay_of(outcome, message)


class RunDispatcher:
    """Passes the runs of process queues to the handler, and carries out its outcomes.

    Args:
        send_back: returns a message to the broker, which redelivers it.
        retry_limit: `retry_limit(broker_name)` returns the maximum number of retries of a message in an orderly consumer.
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
        self._judge = handling.judge or _retried
        self._takes_batches = handling.takes_batches
        self._orderly = handling.orderly
        self._suspend_queue_s = handling.suspend_queue_s
        self._on_failed = on_failed
        self._limits = limits
        self._send_back = send_back
        self._retry_limit = retry_limit
        self._on_acknowledged = on_acknowledged
        self._line: deque[ProcessQueue] = deque()  # queues with waiting runs, for a round robin
        self._lined_up: set[ProcessQueue] = (
            set()
        )  # the queues in `_line`; if orderly, also those in a worker or suspended
        self._idle: deque[asyncio.Future[None]] = deque()
        self.pool = WorkerPool(
            call, self, handling.concurrency, limits,
            takes_batches=handling.takes_batches, delay_of=handling.delay_of, attempts=handling.attempts,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()

    @property
    def is_closed(self) -> bool:
        return self.pool.is_stopping

    def put(self, runs: Sequence[Run]) -> None:
        """Make the new runs of one queue available to workers."""
        if not runs:
            return
        process_queue = runs[0].process_queue
        if self._orderly:
            self._offer(process_queue)
        else:
            process_queue.waiting.extend(runs)
            self._line_up(process_queue)

    def resume(self, process_queue: ProcessQueue) -> None:
        """Make the runs of a queue available again after a suspension or pause."""
        if self._orderly:
            self._offer(process_queue)
        else:
            self._line_up(process_queue)

    def _line_up(self, process_queue: ProcessQueue) -> None:
        """Add a queue to the round robin. In each round, workers take one run of each queue, so that a queue with a
        backlog does not starve the others."""
        if process_queue.waiting and not process_queue.is_suspended and process_queue not in self._lined_up:
            self._lined_up.add(process_queue)
            self._line.append(process_queue)
        self._wake(len(process_queue.waiting))

    def _next_of(self, process_queue: ProcessQueue) -> Run | None:
        """Return the queue's next run, or None if it may not be handled now. Move the queue to the end of the line."""
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
        """Add a queue of an orderly consumer to the line, unless it is there already, in a worker or suspended for a retry.

        Messages that arrive during such a suspension do not shorten it, as with Apache's ConsumeMessageOrderlyService.
        """
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
        calls, clock_s = self.pool.calls.of_task, time.monotonic
        task = asyncio.current_task()
        assert task is not None
        # A handler may have cancelled this task. The worker then ends, so that the next handler call is not affected.
        while not task.cancelling():
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
                # As `WorkerPool.call`, inline, because a coroutine around each call would cost more CPU time than the rest of
                # this loop.
                calls[task] = run.messages, clock_s()
                try:
                    outcome = await call(run.messages if self._takes_batches else run.messages[0])
                except BaseException as error:
                    del calls[task]
                    await self._carry_out(run, Ended(None, error))
                    continue
                del calls[task]
                if outcome is None:
                    process_queue.acknowledge(run)
                    process_queue.leave()
                    self._on_acknowledged(process_queue)
                else:
                    await self._carry_out(run, Ended(outcome))
                    outcome = None  # free its memory before waiting for the next message
            except Exception:
                log.exception("handling_failed", hint="the messages stay unacknowledged")

    async def _carry_out(self, run: Run, ended: Ended | None = None) -> None:
        """Carry out the outcome of a run's handler call. `ended` is None if `run.outcome` is set already."""
        process_queue = run.process_queue
        outcome: Outcome = None
        is_cancelled = is_handled = False
        try:
            outcome = run.outcome if ended is None else self._outcome(run, await self._without_unreadable(run, ended))
            is_handled = outcome is None or await self._returned(run, outcome)
            if is_handled:
                process_queue.acknowledge(run)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            if is_cancelled and not self.pool.is_stopping:
                self._loop.call_later(0, self._requeue, run)
            elif not is_handled and not self.pool.is_stopping:
                self._send_back_later(run, outcome)
            process_queue.leave()
        self._on_acknowledged(process_queue)

    def _requeue(self, run: Run) -> None:
        run.process_queue.waiting.append(run)
        self._line_up(run.process_queue)

    def _send_back_later(self, run: Run, outcome: Outcome) -> None:
        """Call the handler again after a delay, because the broker did not accept the run, as Apache's
        ConsumeMessageConcurrentlyService does.

        If the queue is released meanwhile, send the run back immediately instead: without that, the release would wait for
        the delay, or later messages that are already handled would be redelivered together with this run.
        """
        process_queue = run.process_queue
        process_queue.enter()
        timer = self._loop.call_later(self._limits.send_back_retry_s, self._handle_again, run)
        process_queue.unreturned[run] = partial(self._send_back_immediately, run, outcome, timer)
        if process_queue.is_stopped:
            process_queue.unreturned[run]()

    def _handle_again(self, run: Run) -> None:
        del run.process_queue.unreturned[run]
        run.process_queue.leave()
        self._requeue(run)

    def _send_back_immediately(self, run: Run, outcome: Outcome, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        del run.process_queue.unreturned[run]  # the run still counts as running, until the task calls `leave`
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
        return await self.pool.call(messages) if messages else Ended(None)

    async def _without_unreadable(self, run: Run, ended: Ended) -> Ended:
        """Return the end of a run's handler call. If the handler raised and the run has unreadable messages,
        dead-letter those, or skip them if the broker rejects them as dead letters, and call the handler again with the
        others. If the broker does not respond, change nothing."""
        if not isinstance(ended.error, Exception):
            return ended
        has_unreadable = False
        for message in run.messages[run.done :]:
            fault = None if message.is_given_up else record_fault(message)
            if fault is None:
                continue
            hint = "it is stored as a dead letter"
            try:
                await self._send_back(message, DEAD_LETTER_LEVEL, fault, run.tries)
            except BrokerRefused as error:
                hint = f"it is skipped, because the broker does not accept it as a dead letter: {error}"
            except RocketletError:
                return ended  # the broker is unreachable, so the whole run is retried later
            log.error(
                "message_unreadable", queue=str(message.queue), offset=message.queue_offset, reason=fault, hint=hint
            )
            message.is_given_up = has_unreadable = True
        return await self._called(run) if has_unreadable else ended

    def _outcome(self, run: Run, ended: Ended) -> Outcome:
        """Return the handler's outcome for a run.

        Raises CancelledError if the worker itself is cancelled and the messages must be sent back. A cancelled worker
        cannot send messages back, so `run.outcome` is set for another worker.
        """
        messages = [message for message in run.messages if not message.is_given_up] or run.messages
        outcome, error = self.pool.outcome(messages, ended, self._judge, by_level=True, tries=run.tries)
        if error is not None and not self.pool.is_stopping:
            self._report_failed(run, repr(error))
        if isinstance(outcome, Reject):
            self._report_failed(run, outcome.reason or "the handler rejected the message")
        # The handler cancelled its worker before it ended. The handler's outcome counts, but another worker must carry
        # it out.
        if outcome is not None and _is_cancelled():
            run.outcome = outcome
            raise asyncio.CancelledError
        return outcome

    def _report_failed(self, run: Run, reason: str) -> None:
        # an orderly consumer handles a failed run repeatedly; report only the first failure
        if run.tries <= 1:
            for message in run.messages[run.done :]:
                self._on_failed(message, reason)

    async def _returned(self, run: Run, outcome: RetryLater | Reject) -> bool:
        """Send the unacknowledged messages of a run back to the broker. Return False if it did not accept all of them."""
        level = DEAD_LETTER_LEVEL if isinstance(outcome, Reject) else with_level(outcome).delay_level
        process_queue = run.process_queue
        # Messages are sent back one by one, so that only the remaining ones are handled again if the broker accepts
        # some and then fails.
        while not run.is_done:  # a concurrent seek marks the run as done, which ends this loop
            count = run.done + 1
            try:
                message = run.messages[run.done]
                if not message.is_given_up:
                    await self._send_back(message, level, outcome.reason, run.tries)
            except RocketletError as error:
                if process_queue.is_stopped and isinstance(error, ConnectionFailed | RequestTimeout):
                    # Retry until the broker is reachable: the release of the queue waits for this, so that later messages
                    # that are already handled are not redelivered.
                    await asyncio.sleep(self._limits.reconnect_s)
                    continue
                log.warning("send_back_failed", reason=str(error), hint="retried while this member owns the queue")
                return False
            process_queue.acknowledge(run, count)
        return True

    async def _one_in_order(self, process_queue: ProcessQueue) -> None:
        """Handle the first run of a queue. Afterwards, offer the queue to the workers again, but only after
        `suspend_queue_s` if the run must be retried."""
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
        """Handle a run. Return True if the queue may continue, because the run is handled or its messages are dead
        letters."""
        broker_name = run.process_queue.queue.broker_name
        if not run.tries or run.tries <= await self._retry_limit(broker_name):
            run.tries += 1
            outcome = self._outcome(run, await self._without_unreadable(run, await self._called(run)))
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
            with_level(outcome)
    except BaseException as error:  # its `__repr__` may raise anything
        return error
    return None


def checked_outcome(outcome: Any) -> Outcome:
    """Return a handler's outcome. Raises TypeError for a result that is not one."""
    if outcome is not None and not isinstance(outcome, RetryLater | Reject):
        raise TypeError(
            f"the handler returned {outcome!r}, a {type(outcome).__name__}; expected None, RetryLater(...) or Reject()"
        )
    return outcome


def with_level(outcome: RetryLater) -> RetryLater:
    """Return an outcome with the delay level that has its delay. Raises ConfigError for an outcome that the retry topic does
    not support: one with another delay, or with `counts=False`."""
    if not outcome.counts:
        raise ConfigError("counts: a Consumer counts every attempt; use a SharedConsumer, which may suspend a message")
    if outcome.delay is None:
        return outcome
    delay_s = delay_of(outcome, None)
    if delay_s not in RETRY_DELAYS_S:
        levels = ", ".join(map(str, RETRY_DELAYS_S))
        raise ConfigError(
            f"delay: a Consumer does not support {delay_s:g} s; expected one of {levels}, or use a SharedConsumer, which "
            "supports any delay"
        )
    return replace(outcome, delay=None, delay_level=RETRY_DELAYS_S.index(delay_s) + 1)


def _named(message: Message, tries: int) -> dict[str, Any]:
    """Return the fields of a log entry that name a message; empty for a message that cannot be read. `tries` is the number of
    its attempts in this member; 0 if the broker counts them."""
    if record_fault(message) is not None:
        return {}
    keys = {"keys": " ".join(message.keys)} if message.keys else {}
    return {"message": message.message_id, **keys, "attempt": tries or message.attempt}


def log_failure(
    messages: Sequence[Message],
    error: BaseException,
    outcome: Outcome,
    delay_s: float | None,
    tries: int,
    attempts: int | None,
) -> None:
    """Log that a handler has failed, and what becomes of its messages. The arguments are those of `WorkerPool`."""
    first = messages[0]
    fields = _named(first, tries)
    attempt = fields.get("attempt", 1)
    if attempts is not None:
        fields["attempts"] = attempts
    if delay_s is None:
        hint = "dropped, because broadcasting has no retries"
    elif isinstance(outcome, Reject) or (attempts is not None and attempt >= attempts):
        hint = "stored as dead letters"
    else:
        fields["retry_s"], hint = delay_s, "retried while retries are left"
    log.error(
        "handler_failed",
        **fields, queue=str(first.queue), offset=first.queue_offset, messages=len(messages), error=repr(error),
        exc_info=error, hint=hint,
    )  # fmt: skip


def log_dead_letter(group: str, message: Message, reason: str, tries: int) -> None:
    """Log that a message was stored as a dead letter."""
    log.warning(
        "message_dead_lettered",
        group=group, **_named(message, tries), queue=str(message.queue), reason=shown(reason),
        hint="`rocketlet messages dead GROUP` lists dead letters, `rocketlet messages replay GROUP` resends them",
    )  # fmt: skip


def delay_of(outcome: RetryLater, message: Message | None) -> float:
    """Return the delay in seconds until a message is to be redelivered. `message` is needed for an outcome without a
    delay."""
    delay = outcome.delay
    if delay is not None:
        return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
    retries = message.reconsume_times if message is not None else 0
    level = outcome.delay_level or 3 + retries  # the same levels as brokers use for returned messages
    return float(DELAY_LEVELS_S[min(level, len(DELAY_LEVELS_S)) - 1])


def _retried(messages: Sequence[Message], error: BaseException) -> Outcome:
    return RetryLater(reason=reason_of(error))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# ------------------------------------------------------------------------------
# Calls a handler of any kind as a coroutine, with its middleware around it.
#
# A handler that is a plain function runs in a thread, so that it does not block the event loop.


Called = Callable[[Any], Awaitable[Any]]
Inner = Callable[[Callable[..., Awaitable[Any]]], Called]


class Calling:
    """Calls a handler, and raises its exceptions.

    Args:
        concurrency: the maximum number of concurrent calls.
        middleware: layers around the handler, the outermost first.
        inner: a layer around the handler, inside of all middleware.
    """

    def __init__(
        self,
        handler: Callable[..., Any],
        concurrency: int,
        middleware: Sequence[Callable[[Any, Called], Awaitable[Any]]],
        inner: Inner | None = None,
    ) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()
        self.running = RunningCalls()
        coroutine = self._as_coroutine(handler, concurrency)
        self.call: Called = coroutine if inner is None else inner(coroutine)
        for layer in reversed(middleware):
            self.call = _around(layer, self.call)

    def _as_coroutine(self, handler: Callable[..., Any], concurrency: int) -> Callable[..., Awaitable[Any]]:
        is_async = inspect.iscoroutinefunction(handler)
        if is_async or inspect.iscoroutinefunction(type(handler).__call__):
            return cast("Callable[..., Awaitable[Any]]", handler)
        # Not the loop's default executor, whose threads other code may occupy. With one thread per worker, a handler
        # does not wait for a thread.
        self._executor = executor = ThreadPoolExecutor(
            concurrency, "rocketlet-handler", initializer=lambda: self._threads.add(threading.get_ident())
        )
        loop = asyncio.get_running_loop()

        async def in_thread(*arguments: Any) -> Any:
            called = partial(self.running.in_thread, self.running.current(), caught, handler)
            outcome, error = await loop.run_in_executor(executor, copy_context().run, called, *arguments)
            if error is not None:
                raise error
            # A plain function may return a coroutine, for example a lambda that calls a coroutine function.
            return await outcome if inspect.isawaitable(outcome) else outcome

        return in_thread

    def is_here(self) -> bool:
        """Return True if the current thread is one in which the handler runs."""
        return threading.get_ident() in self._threads

    def stop(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _around(layer: Callable[[Any, Called], Awaitable[Any]], call: Called) -> Called:
    return lambda argument: layer(argument, call)


def caught(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Call a handler in its thread. Return its result, or its exception.

    StopIteration and KeyboardInterrupt are wrapped in a RuntimeError: older versions of Python never complete a future
    that gets StopIteration, and a KeyboardInterrupt outside of the main thread does not come from Ctrl-C.
    """
    try:
        return handler(*arguments), None
    except (StopIteration, KeyboardInterrupt) as error:
        failed = RuntimeError(f"the handler raised {type(error).__name__}")
        failed.__cause__ = error
        return None, failed
    except BaseException as error:
        return None, error


# ------------------------------------------------------------------------------
# The worker tasks that run the handler of either kind of consumer. A worker lives as long as the consumer. A worker that is
# cancelled before the consumer stops is replaced.


class WorkSource(Protocol):
    """Provides messages to the workers, and carries out the outcomes."""

    @property
    def is_closed(self) -> bool:
        """True if workers that end must not be replaced."""
        ...

    async def work(self) -> None:
        """Call the handler for one message after another until cancelled."""


class WorkerPool:
    """Runs the handler of a consumer in a fixed number of tasks.

    Args:
        delay_of: returns the delay in seconds until a message is retried; None if it is not.
        attempts: the maximum number of attempts of a message; None if only the broker knows it.

    Attributes:
        calls: the messages that the workers are handling.
        is_stopping: True once the workers are cancelled. Messages that are still being handled are then not acknowledged.
    """

    def __init__(
        self,
        call: Calling,
        source: WorkSource,
        concurrency: int,
        limits: ClientLimits,
        *,
        takes_batches: bool = False,
        delay_of: Callable[[RetryLater, Message], float | None] = delay_of,
        attempts: int | None = None,
    ) -> None:
        self._call = call
        self.calls = call.running
        self._delay_of = delay_of
        self._attempts = attempts
        self._ended_workers: list[int] = []  # the numbers of the workers that ended in this event-loop iteration
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
            if not self._ended_workers:
                self._loop.call_soon(self._replace)
            self._ended_workers.append(number)

    def _replace(self) -> None:
        """Replace the workers that have ended. If the event loop ends, because all its tasks are cancelled, log that the
        application has not stopped the consumer."""
        ended, self._ended_workers = self._ended_workers, []
        if all(task.cancelling() for task in asyncio.all_tasks(self._loop)):
            log.error(
                "consumer_not_stopped",
                hint="all its tasks were cancelled; leave its `async with` block, or await its `stop()`, before the "
                "event loop ends",
            )
        else:
            log.warning("worker_cancelled", workers=ended, hint="new workers replace them")
        for number in ended:
            self._loop.call_later(self._limits.restart_s, self._start_worker, number)

    def add(self, task: asyncio.Task[None]) -> None:
        """Add a task that is cancelled together with the workers and is not replaced."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, messages: list[Message]) -> Ended:
        """Call the handler in the current worker, and return the end of the call."""
        calls, task = self.calls.of_task, asyncio.current_task()
        assert task is not None
        calls[task] = messages, time.monotonic()
        try:
            return Ended(await self._call.call(messages if self._takes_batches else messages[0]))
        except BaseException as error:
            return Ended(None, error)
        finally:
            del calls[task]

    def outcome(
        self, messages: Sequence[Message], ended: Ended, judge: Judge, *, by_level: bool, tries: int = 0
    ) -> tuple[Outcome, BaseException | None]:
        """Return the outcome of messages whose handler has ended, and the exception if it failed.

        A result that is not an outcome counts as a failure. Raises KeyboardInterrupt, and GeneratorExit if the loop is
        closed.

        Args:
            judge: returns the outcome after a failure.
            by_level: True if retries support only delay levels, not arbitrary delays.
            tries: the number of attempts in this member; 0 if the broker counts them.
        """
        error = ended.error or _fault_of(ended.result, by_level=by_level)
        if error is None:
            return cast("Outcome", ended.result), None
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise error
        outcome = judge(messages, error)
        if not self.is_stopping:
            later = outcome if isinstance(outcome, RetryLater) else RetryLater()
            log_failure(messages, error, outcome, self._delay_of(later, messages[0]), tries, self._attempts)
        return outcome, error

    async def try_one(self, message: Message) -> Outcome:
        """Call the handler with a message, without settling the message. Return the outcome. Raises what the handler
        raises."""
        return checked_outcome(await self._call.call([message] if self._takes_batches else message))

    async def drain(self, drain_s: float) -> None:
        """Wait up to `drain_s` for the workers to end."""
        if self._tasks and drain_s > 0:
            await asyncio.wait(self._tasks, timeout=drain_s)

    async def cancel(self) -> None:
        """Cancel the workers and wait until they have ended."""
        self.is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._call.stop()
        if self._tasks:  # not gather, which would cancel them a second time if this is cancelled
            await asyncio.wait(self._tasks)

    def is_handling_here(self) -> bool:
        """Return True if the caller is a handler of this pool."""
        try:
            current = asyncio.current_task()
        except RuntimeError:  # the current thread has no event loop
            current = None
        return self._call.is_here() or any(task is current for task in self._tasks)


# ------------------------------------------------------------------------------
# Handlers that get a decoded body, and the message as well if they take two arguments.
#
# Decoding the same body again would fail again, so a message whose body cannot be decoded is rejected with the reason and
# not retried. In a batch only such messages are rejected, and the handler gets the others.


Value = TypeVar("Value")
Result = Awaitable[Outcome] | Outcome
Decode = Callable[[bytes], Value]
ValueHandler = Callable[[Value], Result] | Callable[[Value, Message], Result]
ValuesHandler = Callable[[list[Value]], Result] | Callable[[list[Value], list[Message]], Result]


class _Undecodable(Exception):
    """The exception for a body that cannot be decoded. Its text is the reason."""


class Decoding:
    """Decodes message bodies for a handler.

    Args:
        send_back: returns an undecodable message of a batch to the broker. For a single message it is not needed, because
            the outcome Reject is returned to the consumer.
    """

    def __init__(
        self, decode: Decode[Any], handler: Callable[..., Any], send_back: SendBackFunction | None = None
    ) -> None:
        self._decode = decode
        self._with_message = takes_message(handler)
        self._send_back = send_back

    def around(self, call: Callable[..., Awaitable[Any]]) -> Called:
        """Return a layer that decodes the bodies and calls `call` with the result."""

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
        """Return the decoded bodies and their messages. Dead-letter the messages that cannot be decoded.

        Raises RocketletError if the broker does not accept one of those.
        """
        values: list[Any] = []
        kept: list[Message] = []
        for message in messages:
            if message.is_given_up:  # an earlier attempt has dead-lettered or skipped this message
                continue
            try:
                values.append(self._decoded(message))
            except _Undecodable as error:
                assert self._send_back is not None
                await self._send_back(message, DEAD_LETTER_LEVEL, str(error), 0)
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
                hint="it is rejected, because it would fail again",
            )  # fmt: skip
            raise _Undecodable(reason) from error


# ------------------------------------------------------------------------------
# A retry policy: after which exceptions of a handler a message is retried, how often, and after which delays.


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`Consumer(..., retry=RetryPolicy(attempts=4, delays_s=(1, 30, 600), on=(ConnectionError, TimeoutError)))`

    - `attempts`: the maximum number of attempts to handle a message, including the first; then it becomes a dead letter.
    - `delays_s`: the delays in seconds before the second attempt, the third, and so on; the last delay is used for all
      further attempts. Other consumers support any delay up to 12 hours. A Consumer supports the 18 delay levels of
      brokers: 1, 5, 10, 30 s, 1 to 10, 20, 30 min, 1 and 2 h. Default: delays that grow from 10 s.
    - `on`: the exceptions after which a message is retried. After any other exception the message immediately becomes a
      dead letter with the exception's text. Default: all exceptions. A message whose handler is cancelled is retried in
      any case.
    - `never`: exceptions after which a message is not retried, even if `on` includes them.

    A handler's return value takes precedence over the policy. In an orderly Consumer, the delay between attempts is
    `suspend_queue_s`.
    """

    attempts: int = 17
    delays_s: Sequence[float] = ()
    on: tuple[type[Exception], ...] = (Exception,)
    never: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts, 1)
        if not isinstance(self.delays_s, Sequence) or isinstance(self.delays_s, str):
            raise ConfigError(f"delays_s: expected a tuple of seconds such as (1, 30, 600), got {self.delays_s!r}")
        for delay in self.delays_s:
            check_delay(delay, "delays_s")
        if len(self.delays_s) >= self.attempts:
            raise ConfigError(
                f"delays_s: expected at most {self.attempts - 1} delays, one between each two of the {self.attempts} "
                f"attempts, got {len(self.delays_s)}"
            )
        for name in ("on", "never"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(isinstance(item, type) for item in kinds):
                raise ConfigError(f"{name}: expected a tuple of exceptions such as (ConnectionError,), got {kinds!r}")

    def outcome_by_level(self, messages: Sequence[Message], error: BaseException) -> Outcome:
        """Return the outcome, with a delay level, of a Consumer's messages whose handler raised."""
        found = self.outcome(max(messages, key=lambda message: message.reconsume_times), error)
        if isinstance(found, RetryLater) and found.delay is not None:
            return RetryLater(delay_level=RETRY_DELAYS_S.index(found.delay) + 1, reason=found.reason)
        return found

    def outcome(self, message: Message, error: BaseException) -> Outcome:
        """Return the outcome of a message whose handler raised."""
        reason = reason_of(error)
        if isinstance(error, Exception) and (not isinstance(error, self.on) or isinstance(error, self.never)):
            return Reject(reason)
        if not self.delays_s:
            return RetryLater(reason=reason)
        return RetryLater(reason=reason, delay=self.delays_s[min(message.reconsume_times, len(self.delays_s) - 1)])


def check_levels(name: str, policy: RetryPolicy) -> None:
    """Raise ConfigError for delays that are not delay levels."""
    invalid = [delay for delay in policy.delays_s if delay not in RETRY_DELAYS_S]
    if invalid:
        levels = ", ".join(map(str, RETRY_DELAYS_S))
        raise ConfigError(f"{name}: delays_s: a Consumer does not support {invalid[0]!r} s; expected one of {levels}")


# ------------------------------------------------------------------------------
# The reason why a message was not handled: a text that is stored with its retries and its dead letter.
#
# The text is cut to one short line. Text that looks like a password, a token or a key is replaced, because more people
# can read dead letters than a service's log.


_SCANNED_CHARS: Final = 4 * MAX_REASON_CHARS
_LEFT_OUT: Final = "***"
_IN_ADDRESS: Final = re.compile(r"(\w://)[^\s/@]{1,200}@")
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic)\s+[^\s,;]+")
_NAMED: Final = re.compile(
    r"""(?i)((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key|authorization|credentials?|signature)"""
    r"""[\w-]{0,20}["']?\s{0,3}[=:]\s{0,3})("[^"]*"?|'[^']*'?|[^\s,;&)}\]]+(?:\s\*\*\*)?)"""
)


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text as one short line, without text that looks like a secret."""
    try:
        text = str(error)
    except Exception:  # a user's exception class may have any `__str__`
        text = ""
    name = type(error).__qualname__
    return shown(f"{name}: {text}" if text else name)


def shown(text: str) -> str:
    """Return a text as one short line, without text that looks like a secret, so that it may be stored with a
    message."""
    line = " ".join(text[:_SCANNED_CHARS].split())
    line = "".join(char if char.isprintable() else " " for char in line)
    line = _IN_ADDRESS.sub(rf"\1{_LEFT_OUT}@", line)
    line = _SCHEME.sub(rf"\1 {_LEFT_OUT}", line)
    line = _NAMED.sub(rf"\1{_LEFT_OUT}", line)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 3]}..."


# ------------------------------------------------------------------------------
# Returns a message to its broker, which redelivers it or stores it as a dead letter.


class RetryLimit:
    """The maximum number of retries of a message in an orderly consumer, whose retries the member itself counts.

    The maximum is `fixed`, or if that is None the group's setting at the message's broker.
    """

    def __init__(self, cluster: ClusterView, group: str, fixed: int | None) -> None:
        self._cluster = cluster
        self._group = group
        self._fixed = fixed
        self._known: dict[str, tuple[int, float]] = {}  # by broker name: the limit, and the loop's time of its query

    async def at(self, broker_name: str) -> int:
        """Return the limit at a broker. If the query fails, return the broker's last known limit, or 16. The
        result is used for `group_settings_s`."""
        if self._fixed is not None:
            return self._fixed
        known, now_s = self._known.get(broker_name), asyncio.get_running_loop().time()
        if known is not None and now_s - known[1] < self._cluster.limits.group_settings_s:
            return known[0]
        try:
            limit = max(await self._query(broker_name), 0)
        except RocketletError as error:
            limit = known[0] if known is not None else MAX_RECONSUME_TIMES
            log.warning(
                "group_settings_unknown", group=self._group, broker=broker_name, reason=str(error), retries=limit
            )
        self._known[broker_name] = limit, now_s
        return limit

    async def _query(self, broker_name: str) -> int:
        connection = await self._cluster.broker(broker_name)
        ext = write(GroupOnly(self._group))
        try:
            answer = await connection.request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, ext, timeout_s=OFFSET_TIMEOUT_S)
        except BrokerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return await self._query_all(connection)
        return body_of(answer, decode_group).retry_max_times

    async def _query_all(self, connection: Connection) -> int:
        """Return the limit from the settings of all groups, because brokers of 4.9 cannot return those of one group."""
        answer = await connection.request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, timeout_s=OFFSET_TIMEOUT_S)
        settings = body_of(answer, decode_groups).get(self._group)
        return settings.retry_max_times if settings is not None else MAX_RECONSUME_TIMES


async def hand_back(
    cluster: ClusterView, group: str, message: Message, delay_level: int, reason: str, tries: int, retries: int | None
) -> None:
    """Return a message to its broker, which redelivers it or stores it as a dead letter. Raises RocketletError.

    Args:
        tries: the number of attempts in this member, which is logged; 0 if the broker counts them.
        retries: the maximum number of retries; None for the group's setting.
    """
    connection = await cluster.broker(message.queue.broker_name)
    header = SendBack(
        message.physical_offset,
        group,
        delay_level,
        message.message_id,
        message.topic,
        False,
        retries,
        shown(reason) or None,
    )
    await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)
    if delay_level == DEAD_LETTER_LEVEL or (retries is not None and message.reconsume_times >= retries):
        log_dead_letter(group, message, reason, tries)


# ------------------------------------------------------------------------------
# Serves the requests that a broker forwards for an administrator: return the state or the offsets, reset offsets, consume a
# message directly.


CLIENT_VERSION: Final = "V4_9_8"  # printed by mqadmin, which knows only Apache's names
_TOPIC: Final = "topic"


class QueriedConsumer(Protocol):
    """The consumer that serves administrative requests."""

    group: str
    subscriptions: Mapping[str, Subscription]

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]: ...

    @property
    def settings(self) -> Mapping[str, str]: ...

    def running_handlers(self, *, stacks: bool) -> Sequence[RunningHandler]: ...

    def reset(self, offsets: Mapping[Queue, int]) -> None: ...

    async def try_one(self, message: Message) -> Outcome: ...


class AdminRequests:
    """Serves administrative requests, and rejects those for another group.

    Args:
        spawn: runs a coroutine in the background, and cancels it when the consumer stops.
    """

    def __init__(
        self,
        cluster: ClusterView,
        consumer: QueriedConsumer,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._consumer = consumer
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
        fault = None if group == self._consumer.group else f"this client is not a member of the group {group}"
        try:
            if fault is None:
                answer(connection, frame)
        except (BodyError, HeaderError, MessageError) as error:
            fault = str(error)
        if fault is not None:
            questions_log.warning("request_of_broker_refused", reason=fault)
            if not frame.is_oneway:
                connection.respond(frame, ResponseCode.SYSTEM_ERROR, remark=fault)

    def _reset(self, connection: Connection, frame: Frame) -> None:
        """Reset the offsets of queues that this consumer owns, and ignore those of other queues."""
        offsets = admin_bodies.decode_offsets(frame.body)
        mine = {queue: offset for queue, offset in offsets.items() if queue in self._consumer.queues}
        questions_log.info("offsets_reset", group=self._consumer.group, queues=len(mine))
        self._consumer.reset(mine)

    def _offsets(self, connection: Connection, frame: Frame) -> None:
        topic = frame.ext.get(_TOPIC)
        offsets = {
            queue: process_queue.commit_offset
            for queue, process_queue in self._consumer.queues.items()
            if topic in (None, queue.topic)
        }
        connection.respond(frame, body=admin_bodies.encode_client_status(offsets))

    def _running_info(self, connection: Connection, frame: Frame) -> None:
        consumer = self._consumer
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
            for queue, process_queue in consumer.queues.items()
        }
        properties = {
            "PROP_CLIENT_VERSION": CLIENT_VERSION,
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            **consumer.settings,
        }
        subscriptions = map(bodies.encode_subscription, consumer.subscriptions.values())
        parts = read(RunningInfoParts, frame.ext)
        handlers = consumer.running_handlers(stacks=parts.jstack_enable or parts.stacks)
        text = jstack_of(handlers) if parts.jstack_enable else None
        body = admin_bodies.encode_running_info(properties, subscriptions, queues, handlers, text)
        connection.respond(frame, body=body)

    def _try(self, connection: Connection, frame: Frame) -> None:
        if self._tried_now >= MAX_TRIED_AT_ONCE:
            connection.respond(
                frame,
                ResponseCode.SYSTEM_BUSY,
                remark=f"{MAX_TRIED_AT_ONCE} messages (the maximum) are being consumed directly; retry later",
            )
            return
        record = decode_record(frame.body, errors="replace")
        queue = Queue(record.topic, str(frame.ext.get("brokerName", "")), record.queue_id)
        self._tried_now += 1
        self._spawn(self._tried(connection, frame, Message(record, queue, record.topic)))

    async def _tried(self, connection: Connection, frame: Frame, message: Message) -> None:
        began_s = time.monotonic()
        remark = ""
        try:
            outcome = await self._consumer.try_one(message)
            result = "CR_SUCCESS" if outcome is None else "CR_LATER"
            if isinstance(outcome, Reject):
                remark = "the handler rejected the message; a delivered one would become a dead letter"
        except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit means that the loop is closed
            raise
        except BaseException as error:  # even if the handler cancels itself, the administrator needs a response
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        finally:
            self._tried_now -= 1
        spent_ms = int((time.monotonic() - began_s) * 1000)
        orderly = self._consumer.settings.get("PROP_CONSUMEORDERLY") == "true"
        connection.respond(frame, body=admin_bodies.encode_direct_result(result, remark, spent_ms, orderly=orderly))
