"""One member of a group that shares messages: its receives, messages in flight, outcomes, and calls of the handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...protocol.names import Subscription
from ..config import MAX_RECONSUME_TIMES, POP_STOP_S, ClientLimits
from ..consuming.handling import (
    Calling,
    DeliveryWatch,
    Judge,
    Outcome,
    Reject,
    RetryLater,
    Settled,
    WorkerPool,
)
from ..errors import ConfigError
from ..message import Message
from ..wire.cluster import ClusterView
from ..wire.connection import KeptTask, cancelled
from ..wire.late_queues import LateQueues
from .receiving import Register, SharedDelivery, SlotDispatcher, Source, Sources, Wanted
from .settling import Renewing, Settling

# ------------------------------------------------------------------------------
# The receives, the messages in flight, and their outcomes.


class Sharing:
    """One member of a group that shares messages.

    Args:
        max_reconsume_times: the maximum number of retries of a message; None for the broker's limit. Apache's
            brokers have none for popped messages, so the default counts there.
        register: `register(address)` sends a heartbeat, unless this member is registered at the broker on this connection.
        source: the class of its sources.
        notifies: True if middleware that is a DeliveryWatch is notified of deliveries, because there is no handler.
    """

    def __init__(
        self,
        cluster: ClusterView,
        wanted: Wanted,
        subscriptions: Mapping[str, Subscription],
        max_reconsume_times: int | None,
        register: Register,
        middleware: Sequence[object] = (),
        *,
        notifies: bool = False,
        source: type[Source] = Source,
    ) -> None:
        self._source_type = source
        self._cluster = cluster
        self._limits = cluster.limits
        self._wanted = wanted
        self._register = register
        self._late = LateQueues(cluster)
        self._max_reconsume_times = max_reconsume_times
        self._watches = [layer for layer in middleware if notifies and isinstance(layer, DeliveryWatch)]
        self._settled_callbacks: dict[Message, list[Settled]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = Settling(cluster, wanted.group, self.spawn)
        self.dispatcher = SlotDispatcher(self.give_back)
        self._renewing = Renewing(cluster, wanted.group, wanted.invisible_s, self._is_unwanted)
        self.sources = Sources(cluster, subscriptions, self._source, self.dispatcher)
        self._running: list[KeptTask] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _source(self, subscription: Subscription, broker_name: str, is_late: bool) -> Source:
        wanted = replace(self._wanted, from_first=True) if is_late else self._wanted
        is_new = self._wanted.from_first or self._late.was_there(broker_name)
        return self._source_type(
            self._cluster,
            wanted,
            subscription,
            broker_name,
            self.dispatcher,
            register=self._register,
            on_arrived=self._arrived,
            on_other=self._settling.ack,
            late=self._late if is_late and not is_new else None,
        )

    # Start and stop

    async def begin(self) -> None:
        """Start to receive. Raises what `Sources.begin` raises."""
        if not self._wanted.from_first:
            await self._late.join()
        await self.sources.begin()
        self._running = [
            KeptTask(self.sources.run, "sources", self._limits.restart_s),
            KeptTask(self._renewing.run, "renewals", self._limits.restart_s),
        ]

    async def stop(self, handled: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the deliveries are `handled` and, up to `hand_over_timeout_s`, until the brokers have confirmed
        their outcomes."""
        try:
            await handled()
            self.release(None)
            await self.sources.quiet(POP_STOP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.hand_over_timeout_s):
                    await self._settling.settled()
        finally:  # stop the remaining parts even if `stop` is cancelled
            await self.sources.stop()
            await cancelled(self._running)
            await cancelled(self._tasks)

    # Messages

    def _arrived(self, delivery: SharedDelivery) -> None:
        self._renewing.in_flight[delivery.message] = delivery

    def _is_unwanted(self, delivery: SharedDelivery) -> bool:
        if not self.dispatcher.drop(delivery):
            return False
        self.give_back(delivery)
        return True

    async def take(self) -> SharedDelivery | None:
        """Return the next message that may be handled; None once the consumer stops."""
        while True:
            delivery = await self.dispatcher.take()
            if delivery is None:
                return None
            if delivery.lease.is_over:  # this process was suspended, so another member may have received the message
                self.give_back(delivery)
            elif self._is_tried_too_often(delivery.message):
                self.settle(delivery, Reject(f"tried {delivery.message.reconsume_times} times"))
            else:
                return delivery

    def _is_tried_too_often(self, message: Message) -> bool:
        """Return True if a message was redelivered after its last retry, which Rocketlet's brokers do not do."""
        limit = self._max_reconsume_times
        if limit is None:
            connection = self._cluster.connected(message.queue.broker_name)
            if connection is None or connection.speaks_msgpack:
                return False
            limit = MAX_RECONSUME_TIMES
        return message.reconsume_times > limit

    # Messages of a consumer without a handler (HeldMessages)

    async def receive(self) -> Message | None:
        """Return the next message and hold it until it is settled. Return None once the consumer stops."""
        delivery = await self.take()
        if delivery is None:
            return None
        message = delivery.message
        if self._watches:
            self._settled_callbacks[message] = [watch.begins([message]) for watch in self._watches]
        return message

    def acknowledge(self, message: Message) -> None:
        self.settle(self._held(message), None)

    async def retry(self, message: Message, outcome: RetryLater) -> None:
        self.settle(self._held(message), outcome)

    async def reject(self, message: Message, outcome: Reject) -> None:
        self.settle(self._held(message), outcome)

    def _held(self, message: Message) -> SharedDelivery:
        """Return the delivery of a message. Raises ConfigError if it is not in flight."""
        delivery = self._renewing.in_flight.get(message)
        if delivery is None or delivery.is_settled:
            raise ConfigError(
                f"{message!r} is not in flight: it is settled already, was released, or another consumer returned it"
            )
        return delivery

    def is_held(self, message: Message) -> bool:
        delivery = self._renewing.in_flight.get(message)
        return delivery is not None and not delivery.is_settled

    def settle(self, delivery: SharedDelivery, outcome: Outcome) -> None:
        """Settle a message by its outcome."""
        message, delivery.is_settled = delivery.message, True
        limit = self._max_reconsume_times
        if (
            isinstance(outcome, RetryLater)
            and outcome.counts
            and limit is not None
            and message.reconsume_times >= limit
        ):
            outcome = Reject(outcome.reason or f"tried {message.attempt} times")
        if isinstance(outcome, Reject):
            self._settling.reject(delivery, outcome.reason, lambda: self._leaves(message, outcome))
            return
        self._leaves(message, outcome)
        if outcome is None:
            self._settling.ack(delivery)
        else:
            self._settling.retry(delivery, outcome)

    def _leaves(self, message: Message, outcome: Outcome) -> None:
        self._renewing.in_flight.pop(message, None)
        for settled in self._settled_callbacks.pop(message, ()):
            settled(outcome)

    def give_back(self, delivery: SharedDelivery) -> None:
        """Release a message, so that a member can receive it before its visibility timeout ends."""
        self._leaves(delivery.message, RetryLater())
        self._settling.give_back(delivery)

    def release(self, message: Message | None) -> None:
        """Release this message, or all messages in flight if None."""
        for item in list(self._renewing.in_flight) if message is None else [message]:
            delivery = self._renewing.in_flight.get(item)
            if delivery is not None and not delivery.is_settled:
                self.dispatcher.drop(delivery)
                self.give_back(delivery)


# ------------------------------------------------------------------------------
# Passes messages to the user's handler.


class DeliveryDispatcher:
    """Passes deliveries to the handler, and settles them by its outcomes. A message whose handler is cancelled because
    the consumer stops is released.

    Args:
        judge: returns the outcome after a failure.
        on_outcome: `on_outcome(message, outcome)` is called before a message is settled.
        attempts: the maximum number of attempts of a message; None if only the broker knows it.
    """

    def __init__(
        self,
        call: Calling,
        concurrency: int,
        sharing: Sharing,
        *,
        judge: Judge,
        on_outcome: Callable[[Message, Outcome], None],
        attempts: int | None,
        limits: ClientLimits,
    ) -> None:
        self._sharing = sharing
        self._judge = judge
        self._on_outcome = on_outcome
        self.pool = WorkerPool(call, self, concurrency, limits, attempts=attempts)

    @property
    def is_closed(self) -> bool:
        return self._sharing.dispatcher.is_closed

    async def work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        # A handler may have cancelled this task. The worker then ends, so that the next handler call is not affected.
        while not task.cancelling():
            delivery = await self._sharing.take()
            if delivery is None:
                return
            await self._handle(delivery)

    async def _handle(self, delivery: SharedDelivery) -> None:
        message = delivery.message
        ended = await self.pool.call([message])
        error = ended.error
        if error is not None and self.pool.is_stopping and not isinstance(error, KeyboardInterrupt | GeneratorExit):
            self._sharing.give_back(delivery)
            raise error
        outcome, _ = self.pool.outcome((message,), ended, self._judge, by_level=False)
        self._on_outcome(message, outcome)
        self._sharing.settle(delivery, outcome)
