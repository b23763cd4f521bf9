"""`SharedConsumer`: a group member that pops single messages, whereas a `Consumer` owns queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self, Unpack

from ..host.version import own_version
from ..protocol.admin_bodies import decode_consume_stats
from ..protocol.bodies import ConsumerData, Heartbeat
from ..protocol.codes import RequestCode
from ..protocol.headers import ConsumeStats, write
from ..protocol.names import INNER_PRODUCER_GROUP, Queue, Subscription
from .config import check_group, check_handler, chosen, parse_subscriptions, takes
from .consumer import AnyConsumer, HeldMessages
from .consuming.handling import AdminRequests, Calling, Decode, Decoding, Outcome, RetryLater, reason_of
from .consuming.queues import ProcessQueue, StallDetector, check_filters
from .errors import ConfigError, get_logger
from .member.leases import Heartbeats
from .message import Message
from .options import PopOptions, SharedOptions, layers_of, most_retries
from .sending.requests import is_awaited, reply_failure
from .sharing.member import DeliveryDispatcher, Sharing
from .sharing.receiving import Source, Wanted
from .wire.cluster import new_client_id
from .wire.connection import KeptTask, body_of, cancelled

log = get_logger("rocketlet.sharing")


class PopConsumer(AnyConsumer):
    """Common base of SharedConsumer, which subscribes to topics, and LiteConsumer, which subscribes to lite topics."""

    _source: ClassVar[type[Source]] = Source

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, Subscription],
        handler: Callable[..., Any] | None,
        decode: Decode[Any] | None,
        options: PopOptions,
        *,
        orderly: bool,
        from_first: bool,
    ) -> None:
        self._options = options
        check_group(group)
        check_handler(handler, decode, options["middleware"])
        options["middleware"] = layers_of(options, handler)
        super().__init__(name_server, group, subscriptions, options, has_handler=handler is not None)
        self.client_id = new_client_id(options["client_name"])
        self._handler, self._decode = handler, decode
        self._max_reconsume_times = most_retries(options, handler)
        self._orderly = orderly
        self._wanted = Wanted(group, self.client_id, options["invisible_s"], orderly, from_first)
        self._cluster.keeps_brokers = True
        self._heartbeats = Heartbeats(self._cluster, self._described, self._addresses)
        self._cluster.listen(on_lost=self._heartbeats.lost)
        self._sharing: Sharing | None = None
        self._running: list[KeptTask] = []

    # Start and stop
    async def _begin(self) -> None:
        self._sharing = sharing = Sharing(
            self._cluster,
            self._wanted,
            self.subscriptions,
            self._max_reconsume_times,
            self._register,
            self._options["middleware"],
            notifies=self._handler is None,
            source=self._source,
        )
        if self._handler is not None:
            inner = None if self._decode is None else Decoding(self._decode, self._handler).around
            dispatcher = DeliveryDispatcher(
                Calling(self._handler, self._concurrency, self._options["middleware"], inner),
                self._concurrency,
                sharing,
                judge=self._judge,
                on_outcome=self._reply_failure,
                attempts=None if self._max_reconsume_times is None else self._max_reconsume_times + 1,
                limits=self._cluster.limits,
            )
            self._workers = dispatcher.pool
            self._workers.start()
        else:
            self._held = sharing
        AdminRequests(self._cluster, self, sharing.spawn)
        await self._join(sharing)
        limits = self._cluster.limits
        self._running += [
            KeptTask(self._heartbeats.beat_forever, "heartbeat", limits.restart_s),
            KeptTask(StallDetector(self.group, limits).watch, "standing", limits.restart_s),
        ]

    async def _join(self, sharing: Sharing) -> None:
        """Join the group at its brokers, and start to receive. Raises RocketletError."""
        await self._heartbeats.beat()
        if self._heartbeats.refusal is not None:
            raise self._heartbeats.refusal

    async def _register(self, address: str) -> None:
        """Send a heartbeat to a broker, unless this member is registered there on the open connection."""
        if not self._heartbeats.is_registered(address):
            await self._heartbeats.register((address,))

    def _judge(self, messages: Sequence[Message], error: BaseException) -> Outcome:
        retry = self._options["retry"]
        return RetryLater(reason=reason_of(error)) if retry is None else retry.outcome(messages[0], error)

    def _reply_failure(self, message: Message, outcome: Outcome) -> None:
        if outcome is not None and self._sharing is not None and is_awaited(message):
            reason = outcome.reason or "it was not handled"
            self._sharing.spawn(reply_failure(self._cluster, self.group, message, reason))

    async def _undo(self) -> None:
        await self._leave_within(0.0)

    async def _end(self) -> None:
        await self._leave_within(self._options["drain_s"])

    async def _leave_within(self, drain_s: float) -> None:
        sharing = self._sharing
        assert sharing is not None
        sharing.dispatcher.close()

        async def handled() -> None:
            await cancelled(self._running)
            await self._leave()
            if self._workers is not None:
                await self._workers.drain(drain_s)
                await self._workers.cancel()

        async with (
            AsyncExitStack() as after
        ):  # the callbacks run even if this is cancelled because handlers take too long
            after.push_async_callback(self._cluster.close)
            after.push_async_callback(self._heartbeats.stop)
            if self._workers is not None:
                after.push_async_callback(self._workers.cancel)
            await sharing.stop(handled)

    async def _leave(self) -> None:
        """Unregister from the brokers. Rocketlet's brokers then end this member's receives."""
        await asyncio.gather(*map(self._unregister, self._cluster.masters().values()))

    async def _unregister(self, address: str) -> None:
        await self._heartbeats.unregister(self.group, address)

    def _checked(self) -> Sharing:
        self._check_running()
        assert self._sharing is not None
        return self._sharing

    async def pause(self) -> None:
        """Pause the consumer. After this returns, no handler starts; running handlers finish. Messages that arrive
        during the pause are released to other members."""
        self._checked().dispatcher.pause()

    async def resume(self) -> None:
        """Resume the consumer after a pause."""
        self._checked().dispatcher.resume()

    # Messages, without a handler

    def _held_messages(self) -> HeldMessages:
        if self._held is not None:
            self._check_running()
        return super()._held_messages()

    def __aiter__(self) -> SharedMessages:
        """Return an iterator over single messages.

        Requesting the next message acknowledges the previous one, unless you have settled that with `retry` or `reject`.
        If `break` or an exception ends the loop, the last message is released to the group unless it is settled.
        """
        return SharedMessages(self)

    # Administrative requests (QueriedConsumer)

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]:
        """An empty mapping, because members own no queues."""
        return {}

    def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Do nothing, because brokers deliver from the new offsets on their own."""

    # Heartbeats

    def _described(self) -> Heartbeat:
        """Return the current heartbeat."""
        return Heartbeat(self.client_id, (), (INNER_PRODUCER_GROUP,))

    def _addresses(self) -> Iterator[str]:
        yield from self._cluster.masters().values()


@takes(SharedOptions)
class SharedConsumer(PopConsumer):
    """A member of a consumer group whose members share messages instead of queues: any member can get any message.

        async with SharedConsumer("host:port", "group", "topic", work) as consumer: ...

    A group may have more members than queues, and there is no rebalance. A message whose handler is slow or fails
    occupies one of the member's `concurrency` calls, and delays later messages only in an orderly group, where those of
    its message group wait. With a handler, the consumer calls it for each message that arrives. Without one, iterate
    (`async for message in consumer`), or call `await consumer.receive()` and settle each message with `ack`, `retry` or
    `reject`.

    - `subscriptions`: a topic, or a mapping from topics to filters: `*`, tags such as `TagA || TagB`, or `Sql("price >
      5")`.
    - `handler`: gets a `Message`. Returning None acknowledges the message, returning RetryLater or raising has it
      redelivered later while retries are left, unless the `retry` policy says otherwise, and returning Reject makes it a
      dead letter. `RetryLater(delay=2.5)` has a delay of up to 12 hours. A plain function runs in a thread.
    - `decode`: converts a message body to the handler's argument, as with a Consumer. A message whose body cannot be
      decoded is rejected with the reason.
    """

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: Callable[..., Any] | None = None,
        *,
        decode: Decode[Any] | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_group(group)
        options = chosen(SharedOptions, options)
        check_handler(handler, decode, options["middleware"])
        super().__init__(
            name_server,
            group,
            parse_subscriptions(subscriptions),
            handler,
            decode,
            options,
            orderly=options["orderly"],
            from_first=options["start"] == "first",
        )
        self._has_begun = False

    async def _join(self, sharing: Sharing) -> None:
        await check_filters(self._cluster, self.client_id, self.group, self.subscriptions)
        for topic in self.subscriptions:
            await self._cluster.find_route(topic)
        await self._heartbeats.beat()  # without the group: the first receive creates it, as an orderly one if requested
        await sharing.begin()
        self._has_begun = True
        await super()._join(sharing)

    def _described(self) -> Heartbeat:
        start = "CONSUME_FROM_FIRST_OFFSET" if self._wanted.from_first else "CONSUME_FROM_LAST_OFFSET"
        subscribed = tuple(self.subscriptions.values())
        consumer = ConsumerData(self.group, "CONSUME_POP", "CLUSTERING", start, subscribed, own_version=own_version())
        return Heartbeat(self.client_id, (consumer,) if self._has_begun else (), (INNER_PRODUCER_GROUP,))

    async def lag(self) -> int:
        """Return the number of messages of the subscribed topics that the group has not acknowledged; on Apache's
        brokers, of those that no member has received yet. Raises RocketletError."""
        self._checked()
        places = {
            (topic, data.broker_name)
            for topic in self.subscriptions
            if (route := self._cluster.route(topic)) is not None
            for data in route.queues
            if data.read_queues
        }
        return sum(await asyncio.gather(*(self._lag(topic, broker_name) for topic, broker_name in places)))

    async def _lag(self, topic: str, broker_name: str) -> int:
        connection = await self._cluster.broker(broker_name)
        ext = write(ConsumeStats(self.group, topic, columns=True, times=False))
        found = body_of(await connection.request(RequestCode.GET_CONSUME_STATS, ext), decode_consume_stats)
        return sum(max(item.lag, 0) for item in found.values())


class SharedMessages:
    """An iterator over single messages. If it is garbage collected, for example after `break`, it releases its last
    message."""

    def __init__(self, consumer: PopConsumer) -> None:
        self._consumer = consumer
        self._last: Message | None = None
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        last, self._last = self._last, None
        if last is not None and self._consumer.is_in_hand(last):
            await self._consumer.ack(last)
        if self._consumer.has_ended:
            raise StopAsyncIteration
        try:
            self._last = await self._consumer.receive()
        except ConfigError:
            if self._consumer.has_ended:
                raise StopAsyncIteration from None
            raise
        return self._last

    def __del__(self) -> None:
        last: Any = self._last
        if last is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._consumer.release, last)
