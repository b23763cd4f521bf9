"""Messages to the user's handler. A worker is a task that lives as long as the consumer; there is none for each message.

A handler may do anything. Only the outcomes that are documented count as success; everything else is a failure, which is
logged and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..config import ClientLimits
from ..consuming.calling import Calling
from ..consuming.crew import Crew
from ..consuming.handling import Outcome, checked_outcome, log_failure
from ..message import Message
from .deliveries import SharedDelivery
from .sharing import Sharing

Settle = Callable[[SharedDelivery, Outcome], None]
Judge = Callable[[Message, BaseException], Outcome]


class Workers:
    """`settle(delivery, outcome)`; `judge(message, error)`: the outcome for a handler that raised. A message whose handler
    the end of the consumer cancelled is given back."""

    def __init__(
        self, call: Calling, concurrency: int, sharing: Sharing, settle: Settle, *, judge: Judge, limits: ClientLimits
    ) -> None:
        self._call = call
        self._concurrency = concurrency
        self._sharing = sharing
        handout = sharing.handout
        self._settle = settle
        self._judge = judge
        self._is_stopping = False
        self._crew = Crew(call, self._work, lambda: handout.is_closed, limits)

    def start(self) -> None:
        self._crew.start(self._concurrency)

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
        await self._crew.drain(drain_s)
        await self.cancel()

    async def cancel(self) -> None:
        """Handlers that still run count for nothing."""
        self._is_stopping = True
        await self._crew.cancel()

    def is_handling_here(self) -> bool:
        return self._crew.is_handling_here()
