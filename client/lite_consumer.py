"""`LiteConsumer`: a group member that receives the lite topics of a parent topic that it is subscribed to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, Unpack

from ..protocol.admin_bodies import decode_lite_lag
from ..protocol.codes import PERM_READ, RequestCode
from ..protocol.config import MAX_SYNCED_LITE_TOPICS
from ..protocol.frame import Frame
from ..protocol.group_bodies import (
    LiteAction,
    LiteOffset,
    LiteSubscription,
    OffsetPolicy,
    encode_lite_subscription,
)
from ..protocol.headers import HeaderError, LiteGroupOf, LiteTopicTaken, read, write
from ..protocol.names import lite_name_fault
from .config import MAX_LITE_CONCURRENCY, check_count, chosen, parse_subscriptions, takes
from .consuming.handling import Decode
from .errors import BrokerRefused, ConfigError, RocketletError, TopicNotFound, get_logger
from .options import LiteOptions
from .shared_consumer import PopConsumer
from .sharing.member import Sharing
from .sharing.receiving import LiteSource
from .wire.connection import Connection, KeptTask, body_of

log = get_logger("rocketlet.sharing")

LiteStart = Literal["first", "last"] | int
"""Where a group continues in a lite topic: the first message, the end, or a store time in ms since the epoch."""

_POLICIES = {"start": OffsetPolicy.TIMESTAMP, "offset": OffsetPolicy.OFFSET, "tail": OffsetPolicy.TAIL}
_STARTS = {"first": LiteOffset(OffsetPolicy.MIN), "last": LiteOffset(OffsetPolicy.MAX)}


@takes(LiteOptions)
class LiteConsumer(PopConsumer):
    """A member of a consumer group that receives single lite topics of a parent topic, such as one for each session.

        async with LiteConsumer("host:port", "group", "CHAT", work, lite_topics=["session-42"]) as consumer:
            await consumer.subscribe("session-43")

    A lite topic is a queue of its own: its messages are delivered in order, unless `orderly` is False, and a slow or
    failing one delays other lite topics only if all `concurrency` calls are occupied. It need not exist for a subscription. A
    group that is new to a lite topic gets it from its first message. Members that are subscribed to the same lite topic
    share its messages; in an exclusive group the member that subscribed last gets them. Members of a wildcard group get
    every lite topic without subscribing.

    With a handler, the consumer calls it for each message that arrives. Without one, iterate (`async for message in
    consumer`), or call `await consumer.receive()` and settle each message with `ack`, `retry` or `reject`.
    `message.lite_topic` is the name of the lite topic.

    - `topic`: the parent topic, as `rocketlet topics create NAME --lite` creates it.
    - `lite_topics`: the lite topics to which the consumer is subscribed when it starts.
    - `handler`: gets a `Message`. Returning None acknowledges the message, returning RetryLater or raising has it
      redelivered later while retries are left, unless the `retry` policy says otherwise, and returning Reject makes it a
      dead letter. `RetryLater(delay=2.5)` has a delay of up to 12 hours. A plain function runs in a thread.
    - `decode`: converts a message body to the handler's argument, as with a Consumer. A message whose body cannot be
      decoded is rejected with the reason.
    """

    _source = LiteSource

    def __init__(
        self,
        name_server: str,
        group: str,
        topic: str,
        handler: Callable[..., Any] | None = None,
        *,
        lite_topics: Iterable[str] = (),
        decode: Decode[Any] | None = None,
        **options: Unpack[LiteOptions],
    ) -> None:
        options = chosen(LiteOptions, options)
        subscriptions = parse_subscriptions(topic)
        check_count("concurrency", options["concurrency"], least=1, most=MAX_LITE_CONCURRENCY)
        self.topic = topic
        self._names = dict.fromkeys(_checked(lite_topics))
        self._on_taken = options["on_taken"]
        self._synced: set[str] = (
            set()
        )  # addresses of brokers that have this member's subscriptions, on open connections
        self._has_joined = False
        self._changing = asyncio.Lock()  # one change of the subscriptions at a time
        orderly = options["orderly"]
        super().__init__(name_server, group, subscriptions, handler, decode, options, orderly=orderly, from_first=True)
        self._cluster.listen(on_lost=self._synced.discard)
        self._cluster.answer(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, self._taken)

    @property
    def lite_topics(self) -> frozenset[str]:
        """The lite topics to which this member is subscribed."""
        return frozenset(self._names)

    # Start and stop

    async def _join(self, sharing: Sharing) -> None:
        if await self._cluster.find_route(self.topic) is None:
            hint = f"create it with `rocketlet topics create {self.topic} --lite`"
            raise TopicNotFound(f"no name server knows the topic {self.topic}; {hint}")
        await super()._join(sharing)
        await sharing.begin()
        self._has_joined = True
        restart_s = self._cluster.limits.restart_s
        self._running.append(KeptTask(self._synchronize_forever, "lite subscriptions", restart_s))

    async def _unregister(self, address: str) -> None:
        if address in self._synced:
            with suppress(RocketletError):
                await self._send(address, LiteAction.COMPLETE_REMOVE, ())
        await super()._unregister(address)

    # Subscriptions. A broker keeps the subscriptions of a connection. The member sends them before its first receive on
    # the connection, and repeats them every `lite_sync_interval_s`.

    async def subscribe(
        self,
        *lite_topics: str,
        start: LiteStart | None = None,
        offset: int | None = None,
        tail: int | None = None,
    ) -> None:
        """Subscribe to lite topics. When this returns, the member gets their messages from each broker that responded.
        The other brokers get the subscription when they are reachable.

        Without one of the arguments below, the group continues after its last acknowledged message, or starts at the first
        one. With one, the group's offset in these lite topics is set for all members, and messages in flight are
        redelivered from that offset.

        Args:
            start: "first", "last", or a store time in ms since the epoch.
            offset: an offset in each lite topic.
            tail: the number of messages before the group's offset.

        Raises:
            ConfigError: a name or an argument is invalid, or the consumer is not running.
            BrokerRefused: the group allows no more lite topics to a member, or the group's members get every lite topic.
            RocketletError: no broker of the topic responded, or not all of them, if an argument sets the offset.
        """
        option = _offset(start, offset, tail)
        wanted = _checked(lite_topics)
        self._check_running()
        if not wanted:
            return
        async with self._changing:
            fresh = [name for name in wanted if name not in self._names]
            is_repeated = len(fresh) < len(wanted)
            self._names.update(dict.fromkeys(fresh))
            try:
                await self._change(LiteAction.PARTIAL_ADD, wanted, option)
            except BaseException:
                for name in fresh:
                    self._names.pop(name, None)
                with suppress(RocketletError):
                    await self._change(LiteAction.COMPLETE_ADD, list(self._names))
                raise
            if is_repeated and option is not None:
                await self._renew(wanted)
            # A notification of an earlier eviction may have arrived meanwhile. The broker repeats the notification if it
            # still applies.
            self._names.update(dict.fromkeys(wanted))

    async def unsubscribe(self, *lite_topics: str) -> None:
        """Unsubscribe from lite topics. This member keeps their messages that are in flight. Raises what `subscribe`
        raises."""
        wanted = _checked(lite_topics)
        self._check_running()
        async with self._changing:
            removed = [name for name in wanted if name in self._names]
            for name in removed:
                del self._names[name]
            if removed:
                await self._change(LiteAction.PARTIAL_REMOVE, removed)

    async def _renew(self, wanted: list[str]) -> None:
        """Remove these subscriptions at Apache's brokers, and make them again. These brokers find the messages at an offset
        that was set only for a new subscription (LiteSubscriptionRegistryImpl.addTopicGroup)."""

        async def renew(address: str) -> None:
            connection = await self._cluster.connection(address)
            if connection.speaks_msgpack:  # as only Rocketlet's brokers do
                return
            try:
                await self._send(address, LiteAction.COMPLETE_ADD, [name for name in self._names if name not in wanted])
                await self._send(address, LiteAction.COMPLETE_ADD, dict.fromkeys([*self._names, *wanted]))
            except BaseException:
                self._synced.discard(address)  # the next receive repeats the subscriptions
                raise

        renewals = await asyncio.gather(*map(renew, self._addresses()), return_exceptions=True)
        for error in renewals:
            if error is not None:
                raise error

    async def lag(self) -> int:
        """Return the number of messages that the group has not acknowledged, in the lite topics that it has read or that its
        members are subscribed to. Raises RocketletError."""
        self._check_running()
        return sum(await asyncio.gather(*map(self._lag, self._addresses())))

    async def _lag(self, address: str) -> int:
        connection = await self._cluster.connection(address)
        answer = await connection.request(RequestCode.GET_LITE_GROUP_INFO, write(LiteGroupOf(self.group, top_k=1)))
        return body_of(answer, decode_lite_lag).messages

    async def _change(self, action: LiteAction, lite_topics: list[str], offset: LiteOffset | None = None) -> None:
        """Send a change to all brokers of the topic. A broker that does not respond gets the whole set when it is
        reachable again.

        Raises BrokerRefused if a broker rejects the change, and RocketletError if no broker responds or, with `offset`,
        if any broker does not respond.
        """
        sent = [self._send(address, action, lite_topics, offset) for address in self._addresses()]
        errors = [error for error in await asyncio.gather(*sent, return_exceptions=True) if error is not None]
        for error in errors:
            if isinstance(error, BrokerRefused) or not isinstance(error, RocketletError):
                raise error
        if errors and (offset is not None or len(errors) == len(sent)):
            raise errors[0]
        for error in errors:
            log.warning("lite_sync_failed", topic=self.topic, reason=str(error), hint="it is repeated")

    async def _send(
        self, address: str, action: LiteAction, lite_topics: Iterable[str], offset: LiteOffset | None = None
    ) -> None:
        change = LiteSubscription(action, self.client_id, self.group, self.topic, tuple(lite_topics), offset)
        try:
            connection = await self._cluster.connection(address)
            await connection.request(RequestCode.LITE_SUBSCRIPTION_CTL, {}, encode_lite_subscription(change))
        except RocketletError:
            self._synced.discard(address)
            raise

    async def _register(self, address: str) -> None:
        await super()._register(address)
        if address not in self._synced:
            self._synced.add(address)  # removed again if the connection, or this request, fails
            # at the start, take lite topics of an exclusive group from other members, as `subscribe` does; but not after a
            # lost connection, because others may have subscribed to them meanwhile
            is_start = bool(self._names) and not self._has_joined
            await self._send(address, LiteAction.PARTIAL_ADD if is_start else LiteAction.COMPLETE_ADD, self._names)

    async def _synchronize_forever(self) -> None:
        """Repeat the whole set at each broker, because brokers drop subscriptions that are not repeated."""
        while True:
            await asyncio.sleep(self._cluster.limits.lite_sync_interval_s)
            for address in sorted(self._synced):
                try:
                    async with self._changing:  # for one broker at a time, because each may be silent until the timeout
                        await self._send(address, LiteAction.COMPLETE_ADD, self._names)
                except RocketletError as error:
                    log.warning("lite_sync_failed", topic=self.topic, reason=str(error), hint="it is repeated")

    def _taken(self, connection: Connection, frame: Frame) -> None:
        """Remove a lite topic that another member of an exclusive group has subscribed to."""
        try:
            taken = read(LiteTopicTaken, frame.ext)
        except HeaderError as error:
            log.warning("request_of_broker_refused", reason=str(error))
            return
        if taken.consumer_group != self.group or taken.lite_topic not in self._names:
            return
        del self._names[taken.lite_topic]
        log.info("lite_topic_taken", group=self.group, topic=self.topic, lite_topic=taken.lite_topic)
        if self._on_taken is not None:
            try:
                self._on_taken(taken.lite_topic)
            except Exception:
                log.exception("listener_failed", lite_topic=taken.lite_topic)

    def _addresses(self) -> Iterator[str]:
        """Yield the addresses of the brokers that have the parent topic."""
        route = self._cluster.route(self.topic)
        masters = self._cluster.masters()
        for data in route.queues if route is not None else ():
            if data.perm & PERM_READ and data.broker_name in masters:
                yield masters[data.broker_name]


def _checked(lite_topics: Iterable[str]) -> list[str]:
    """Return names of lite topics, each once. Raises ConfigError."""
    if isinstance(lite_topics, str):
        raise ConfigError(f"lite_topics: expected names, got the text {lite_topics!r}; give [{lite_topics!r}]")
    found = list(dict.fromkeys(lite_topics))
    for name in found:
        fault = lite_name_fault(name) if isinstance(name, str) else f"lite topic: expected a str, got {name!r}"
        if fault is not None:
            raise ConfigError(fault)
    if len(found) > MAX_SYNCED_LITE_TOPICS:
        raise ConfigError(f"lite_topics: expected up to {MAX_SYNCED_LITE_TOPICS} names, got {len(found)}")
    return found


def _offset(start: LiteStart | None, offset: int | None, tail: int | None) -> LiteOffset | None:
    """Return the offset option of a subscription. Raises ConfigError."""
    given = {name: value for name, value in (("start", start), ("offset", offset), ("tail", tail)) if value is not None}
    if len(given) > 1:
        raise ConfigError(f"subscribe: {' and '.join(given)} conflict; give only one of them")
    if isinstance(start, str):
        if start not in _STARTS:
            raise ConfigError(f'start: expected "first", "last" or a time in ms since the epoch, got {start!r}')
        return _STARTS[start]
    for name, value in given.items():
        if type(value) is not int or value < 0:
            raise ConfigError(f"{name}: expected an int from 0, got {value!r}")
        return LiteOffset(_POLICIES[name], value)
    return None
