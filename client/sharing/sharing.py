"""One member of a group that shares messages: its receives, the messages in hand, and their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...protocol.subscription import Subscription
from ..config import MAX_RECONSUME_TIMES, POP_STOP_S
from ..consuming.handling import DeliveryWatch, Outcome, Reject, RetryLater, Settled
from ..errors import ConfigError
from ..message import Message
from ..tasks import cancelled
from ..wire.cluster import Cluster
from .deliveries import SharedDelivery
from .handout import Handout
from .popping import Register, Source, Wanted
from .renewing import Renewing
from .settling import Settling
from .sources import Sources


class Sharing:
    """`max_reconsume_times`: None leaves it to a broker that counts, which Apache's do not. `tells`: middleware that is a
    DeliveryWatch hears of what is handed out, because there is no handler."""

    def __init__(
        self,
        cluster: Cluster,
        wanted: Wanted,
        subscriptions: Mapping[str, Subscription],
        max_reconsume_times: int | None,
        register: Register,
        middleware: Sequence[object] = (),
        *,
        tells: bool = False,
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._wanted = wanted
        self._register = register
        self._max_reconsume_times = max_reconsume_times
        self._watches = [layer for layer in middleware if tells and isinstance(layer, DeliveryWatch)]
        self._told: dict[Message, list[Settled]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = Settling(cluster, wanted.group, self.spawn)
        self.handout = Handout(self.give_back)
        self._renewing = Renewing(cluster, wanted.group, wanted.invisible_s, self._is_unwanted)
        self.sources = Sources(cluster, subscriptions, self._source, self.handout)
        self._running: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _source(self, subscription: Subscription, broker_name: str, is_late: bool) -> Source:
        wanted = replace(self._wanted, from_first=True) if is_late else self._wanted
        return Source(
            self._cluster,
            wanted,
            subscription,
            broker_name,
            self.handout,
            register=self._register,
            on_arrived=self._arrived,
            on_other=self._settling.ack,
        )

    # Life

    async def begin(self) -> None:
        """Raises as `Sources.begin`."""
        await self.sources.begin()
        self._running = [
            asyncio.create_task(self.sources.run(), name="sources"),
            asyncio.create_task(self._renewing.run(), name="renewals"),
        ]

    async def stop(self, handled: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Hands nothing out any more, waits until what was handed out is `handled`, and for the brokers to hear of it."""
        try:
            await handled()
            for message in list(self._renewing.in_hand):
                self.forsake(message)
            await self.sources.quiet(POP_STOP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.hand_over_patience_s):
                    await self._settling.settled()
        finally:  # also if cancelled
            await self.sources.stop()
            await cancelled(self._running)
            await cancelled(self._tasks)

    # Messages

    def _arrived(self, delivery: SharedDelivery) -> None:
        self._renewing.in_hand[delivery.message] = delivery

    def _is_unwanted(self, delivery: SharedDelivery) -> bool:
        if not self.handout.drop(delivery):
            return False
        self.give_back(delivery)
        return True

    async def take(self) -> SharedDelivery | None:
        """The next message that may be tried; None behind the end."""
        while True:
            delivery = await self.handout.take()
            if delivery is None or not self._is_tried_too_often(delivery.message):
                return delivery
            self.settle(delivery, Reject(f"tried {delivery.message.reconsume_times} times"))

    def _is_tried_too_often(self, message: Message) -> bool:
        """Whether it was tried as often as it may be, and still came. Our own brokers count themselves."""
        limit = self._max_reconsume_times
        if limit is None:
            connection = self._cluster.connected(message.queue.broker_name)
            if connection is None or connection.speaks_msgpack:
                return False
            limit = MAX_RECONSUME_TIMES
        return message.reconsume_times > limit

    def begin_work(self, message: Message) -> None:
        """Somebody works on it from now on."""
        if self._watches:
            self._told[message] = [watch.begins([message]) for watch in self._watches]

    def held(self, message: Message) -> SharedDelivery:
        """Raises ConfigError for a message that is not in hand."""
        delivery = self._renewing.in_hand.get(message)
        if delivery is None or delivery.is_settled:
            raise ConfigError(f"{message!r} is not in hand: it was settled before, or did not come from this consumer")
        return delivery

    def is_held(self, message: Message) -> bool:
        delivery = self._renewing.in_hand.get(message)
        return delivery is not None and not delivery.is_settled

    def settle(self, delivery: SharedDelivery, outcome: Outcome) -> None:
        """Settles a message by the outcome of its holder."""
        message, delivery.is_settled = delivery.message, True
        limit = self._max_reconsume_times
        if isinstance(outcome, RetryLater) and limit is not None and message.reconsume_times >= limit:
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
        self._renewing.in_hand.pop(message, None)
        for settled in self._told.pop(message, ()):
            settled(outcome)

    def give_back(self, delivery: SharedDelivery) -> None:
        """Another member may have it at once."""
        self._leaves(delivery.message, RetryLater())
        self._settling.give_back(delivery)

    def forsake(self, message: Message) -> None:
        delivery = self._renewing.in_hand.get(message)
        if delivery is not None and not delivery.is_settled:
            self.handout.drop(delivery)
            self.give_back(delivery)
