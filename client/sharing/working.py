"""Messages to the user's handler. A worker is a task that lives as long as the consumer; there is none for each message.

A handler may do anything. Only the outcomes that are documented count as success; everything else is a failure, which is
logged and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ..config import ClientLimits
from ..consuming.calling import Calling
from ..consuming.handling import Outcome, checked_outcome, log_failure
from ..log import get_logger
from ..message import Message
from .deliveries import SharedDelivery
from .sharing import Sharing

Settle = Callable[[SharedDelivery, Outcome], None]
Judge = Callable[[Message, BaseException], Outcome]

log = get_logger("rocketlet.handler")


class Workers:
    """`settle(delivery, outcome)`; `judge(message, error)`: the outcome for a handler that raised. A message whose handler
    the end of the consumer cancelled is given back."""

    def __init__(
        self, call: Calling, concurrency: int, sharing: Sharing, settle: Settle, *, judge: Judge, limits: ClientLimits
    ) -> None:
        self._limits = limits
        self._call = call
        self._concurrency = concurrency
        self._sharing = sharing
        self._handout = sharing.handout
        self._settle = settle
        self._judge = judge
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        for number in range(self._concurrency):
            self._hire(number)

    def _hire(self, number: int) -> None:
        if not self._handout.is_closed:
            task = asyncio.create_task(self._work(), name=f"handler {number}")
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._handout.is_closed:
            log.warning("worker_cancelled", worker=number, hint="another one takes its place")
            self._loop.call_later(self._limits.restart_s, self._hire, number)

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # by a handler that has ended meanwhile: the next message is not to suffer from it
            delivery = await self._sharing.take()
            if delivery is None:
                return
            await self._handle(delivery)

    async def _handle(self, delivery: SharedDelivery) -> None:
        try:
            outcome: Outcome = checked_outcome(await self._call.call(delivery.message))
        except (KeyboardInterrupt, GeneratorExit):  # the latter: the loop is gone
            raise
        except BaseException as error:
            if self._is_stopping:
                self._sharing.give_back(delivery)
                raise
            outcome = self._judge(delivery.message, error)
            log_failure((delivery.message,), error, outcome)
        self._settle(delivery, outcome)

    async def try_one(self, message: Message) -> Outcome:
        """The handler's outcome for a message that nobody counts. Raises whatever the handler raises."""
        return checked_outcome(await self._call.call(message))

    async def stop(self, drain_s: float) -> None:
        """Waits for handlers that run, and cancels those that take longer."""
        if self._tasks and drain_s > 0:
            await asyncio.wait(self._tasks, timeout=drain_s)
        await self.cancel()

    async def cancel(self) -> None:
        """Handlers that still run count for nothing."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._call.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def is_handling_here(self) -> bool:
        """Whether it is a handler who asks."""
        try:
            current = asyncio.current_task()
        except RuntimeError:  # in a thread without a loop
            current = None
        return self._call.is_here() or any(task is current for task in self._tasks)
