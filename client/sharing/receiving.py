"""Receives of popped messages (POP), one in flight for each topic and broker, and free slots for the messages."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ...protocol import properties as props
from ...protocol.allocation import subscribe_queues
from ...protocol.codes import EXT_UNKNOWN, PERM_READ, RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import (
    FROM_END,
    FROM_FIRST,
    HeaderError,
    PopLiteMessage,
    PopLiteMessageResult,
    PopMessage,
    PopMessageResult,
    QueueOffset,
    UpdateOffset,
    read,
    write,
)
from ...protocol.message import (
    POP_CK,
    MessageError,
    Receipt,
    offset_in,
    properties_in,
    receipt_of,
    split_records,
    starts_of,
    tried_in,
)
from ...protocol.names import Queue, Subscription
from ..config import (
    POP_MESSAGES,
    POP_TIMEOUT_S,
    POP_TURN_S,
    POP_WAIT_S,
)
from ..errors import AnswerUnreadable, BrokerRefused, ConnectionFailed, RocketletError, get_logger
from ..message import Lease, Message, clock_s
from ..wire.cluster import ClusterView
from ..wire.connection import Connection, KeptTask, cancelled
from ..wire.late_queues import LateQueues

log = get_logger("rocketlet.sharing")
consumer_log = get_logger("rocketlet.consumer")


# ------------------------------------------------------------------------------
# A delivery of a popped message to this member.
#
# The member counts the visibility timeout of a delivery from the arrival of the response, minus the time for which this
# process was blocked meanwhile, because the response may have waited in the socket for that time.


_MARGIN: Final = (
    0.1  # the part of the visibility timeout by which the member's lease of a message ends before the broker's
)


class SharedDelivery:
    """A message and its receipt, which a renewal may replace.

    Attributes:
        since_s: the time of `clock_s` at which the message arrived.
        named_s: the time of `clock_s` at which a long-running handler was last logged; until then, when the
            message arrived.
        is_renewing: True while a renewal is in flight.
        settle: sends the outcome once the renewal in flight has a response.
        is_settled: True if the outcome is known.
        lite_topic: the lite topic from which the message was popped; None for a message of a topic's queue.
    """

    __slots__ = ("is_renewing", "is_settled", "lite_topic", "message", "named_s", "receipt", "settle", "since_s")

    def __init__(self, message: Message, receipt: Receipt, lite_topic: str | None = None) -> None:
        self.message = message
        self.receipt = receipt
        self.lite_topic = lite_topic
        self.since_s = self.named_s = clock_s()
        self.is_renewing = self.is_settled = False
        self.settle: Callable[[], None] | None = None

    @property
    def lease(self) -> Lease:
        return self.message.lease

    def renewed(self, receipt: Receipt, asked_s: float, invisible_s: float) -> bool:
        """Apply a renewal. Return False if the lease had expired before the response arrived. An expired lease stays
        expired, because user code may have read `lease_lost` and stopped working on the message."""
        self.receipt = receipt
        if self.lease.is_over:
            return False
        self.lease.ends_s = asked_s + invisible_s * (1 - _MARGIN)
        return True


class ReceiveStart:
    """The time at which a receive was sent, by `clock_s` and by the connection's `running_s`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began_s, self._running_s = clock_s(), connection.running_s()

    def ends_s(self, invisible_s: float) -> float:
        """Return the time of `clock_s` at which the lease of a message that arrived now expires."""
        now_s = clock_s()
        blocked_s = max(now_s - self._began_s - (self._connection.running_s() - self._running_s), 0.0)
        return now_s - blocked_s + invisible_s * (1 - _MARGIN)


def deliveries_of(answer: Frame, topic: str, broker_name: str, ends_s: float) -> tuple[list[SharedDelivery], int]:
    """Decode the response to a receive. Return its messages, and the approximate number of messages left at the broker.

    A record that cannot be decoded is skipped, so the broker redelivers it; only Rocketlet's brokers dead-letter it in
    the end. Raises MessageError if the body cannot be split into records, and HeaderError.
    """
    result = read(PopMessageResult, answer.ext)
    starts, tried = starts_of(result.start_offset_info or ""), tried_in(result.order_count_info or "")
    found = []
    for record in split_records(answer.body):
        properties = _properties(record, topic, broker_name)
        if properties is None:
            continue
        text = props.find(properties, POP_CK)
        message = _message(record, topic, broker_name, ends_s)
        if text is not None:
            receipt = receipt_of(text)
        else:  # computed as in Java's client: PopCallback's processPopResponse
            queue_id, offset = message.queue.queue_id, offset_in(record)
            times = result.pop_time, result.invisible_time, result.revive_qid
            receipt = Receipt(starts.get(queue_id, offset), *times, "0", broker_name, queue_id, offset)
            count = tried.get(f"qo{queue_id}%{offset}", tried.get(str(queue_id), 0))
            if count:  # in an orderly group the stored record does not have the current number of attempts
                message = _tried(message, count)
        found.append(SharedDelivery(message, receipt))
    return found, result.rest_num


def lite_deliveries_of(answer: Frame, topic: str, broker_name: str, ends_s: float) -> tuple[list[SharedDelivery], int]:
    """Decode the response to POP_LITE_MESSAGE. Return its messages, and their number: brokers do not return how many are
    left, so after some messages there may be more. Logs and raises as `deliveries_of` does."""
    result = read(PopLiteMessageResult, answer.ext)
    tried = [text.rpartition(" ")[2] for text in (result.order_count_info or "").split(";")]
    found = []
    for number, record in enumerate(split_records(answer.body)):
        properties = _properties(record, topic, broker_name)
        if properties is None:
            continue
        name, text = props.find(properties, props.LITE_TOPIC), props.find(properties, POP_CK)
        message = _message(record, topic, broker_name, ends_s)
        if text is not None:
            receipt = receipt_of(text)
        else:  # an Apache broker, whose records have neither a receipt nor the number of attempts
            offset = int(props.find(properties, props.LITE_OFFSET) or 0)
            times = result.pop_time, result.invisible_time, result.revive_qid
            receipt = Receipt(0, *times, "0", broker_name, 0, offset)
            if number < len(tried) and tried[number].isdecimal():
                message = _tried(message, int(tried[number]))
        found.append(SharedDelivery(message, receipt, name or ""))
    return found, len(found)


def _properties(record: bytes, topic: str, broker_name: str) -> str | None:
    """Return the properties of a record; None, and log that, if they cannot be read."""
    try:
        return properties_in(record)
    except MessageError as error:
        consumer_log.error(
            "message_unreadable", topic=topic, broker=broker_name, offset=offset_in(record), reason=str(error),
            hint="its broker redelivers it; a Rocketlet broker stores it as a dead letter after its last retry",
        )  # fmt: skip
        return None


def _message(record: bytes, topic: str, broker_name: str, ends_s: float) -> Message:
    queue = Queue(topic, broker_name, int.from_bytes(record[12:16], "big"))
    return Message(record, queue, topic, Lease(0, ends_s))


def _tried(message: Message, count: int) -> Message:
    """Return a message with another number of earlier attempts than its record has."""
    stored = message.record._replace(reconsume_times=count)
    return Message(stored, message.queue, message.topic, message.lease)


# ------------------------------------------------------------------------------
# Free slots for messages: idle workers, or callers of `receive`.
#
# A receive requests no more messages than there are free slots, because another member could handle a message that
# waits in this process's memory. Each receive therefore reserves slots before it is sent. Only the first receive of
# each source is sent without a free slot.


class SlotDispatcher:
    """Passes messages to waiting takers, each of which is a free slot.

    Args:
        unwanted: called with messages that arrive during a pause or after `close`.

    Attributes:
        sources: the number of sources (topics at brokers) that reserve slots.
    """

    def __init__(self, unwanted: Callable[[SharedDelivery], None]) -> None:
        self._unwanted = unwanted
        self._takers: deque[asyncio.Future[SharedDelivery | None]] = deque()
        self._waiting: deque[SharedDelivery] = deque()
        self._line: deque[tuple[asyncio.Future[int], int]] = deque()
        self._reserved = 0
        self._holders = 0
        self.sources = 0
        self.is_paused = False
        self.is_closed = False

    # Takers

    async def take(self) -> SharedDelivery | None:
        """Return the next message; None after `close`. Cancelling the wait loses no message."""
        while not self.is_closed:
            if self._waiting:
                return self._waiting.popleft()
            taker: asyncio.Future[SharedDelivery | None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            self._grant()
            try:
                delivery = await taker
            except asyncio.CancelledError:
                if taker.done() and not taker.cancelled() and (missed := taker.result()) is not None:
                    self._give(missed, first=True)
                elif taker in self._takers:
                    self._takers.remove(taker)
                raise
            if delivery is not None and not self.is_paused:
                return delivery
            if delivery is not None:  # the pause began before the taker ran
                self._unwanted(delivery)
        return None

    def drop(self, delivery: SharedDelivery) -> bool:
        """Remove a message that waits for a taker. Return True if it was waiting."""
        try:
            self._waiting.remove(delivery)
        except ValueError:
            return False
        return True

    # Sources

    @property
    def _free(self) -> int:
        return len(self._takers) - self._reserved - len(self._waiting)

    async def reserve(self, most: int) -> int:
        """Wait for free slots and reserve them. Return their number, from 1 to `most`. Waiting sources get slots in
        order."""
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append((granted, most))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.put((), granted.result())
            raise

    def _grant(self) -> None:
        while self._line and not self.is_paused and not self.is_closed and self._free > 0:
            granted, most = self._line.popleft()
            if not granted.done():
                count = max(min(most, self._free - len(self._line)), 1)
                self.reserve_now(count)
                granted.set_result(count)

    def reserve_now(self, count: int) -> None:
        """Reserve slots, even if they are not free."""
        self._reserved += count
        self._holders += 1

    @property
    def is_short(self) -> bool:
        """True if there are fewer free slots than sources without one; callers must then free theirs soon."""
        return self._free < self.sources - self._holders

    def put(self, deliveries: Iterable[SharedDelivery], places: int) -> None:
        """Pass on the messages that arrived for this many reserved slots, and end the reservation."""
        self._reserved -= places
        self._holders -= 1
        for delivery in deliveries:
            self._give(delivery)
        self._grant()

    def _give(self, delivery: SharedDelivery, *, first: bool = False) -> None:
        if self.is_paused or self.is_closed:
            self._unwanted(delivery)
            return
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(delivery)
                return
        if first:
            self._waiting.appendleft(delivery)
        else:
            self._waiting.append(delivery)

    # Pauses

    def pause(self) -> None:
        self.is_paused = True
        self._give_all_back()

    def resume(self) -> None:
        self.is_paused = False
        self._grant()

    def close(self) -> None:
        """End the waits of all takers, and release the waiting messages."""
        self.is_closed = True
        self._give_all_back()
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)

    def _give_all_back(self) -> None:
        while self._waiting:
            self._unwanted(self._waiting.popleft())


# ------------------------------------------------------------------------------
# Receives: one is in flight for each topic and broker while there are free slots.
#
# A receive that the broker may hold reserves one slot, for one message. After a response that reports remaining messages,
# and at the start, the next receive reserves up to 32 free slots, leaves one for each other waiting source, and has poll
# time 0, so that the broker does not hold it. In an orderly group each receive returns one
# message, because the broker delivers the next message of its message group only when that one is settled.


_EMPTY = frozenset((ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_TIMEOUT))


Register = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A member's settings for its receives.

    Attributes:
        from_first: True if a new group starts at the first message instead of after the last one.
    """

    group: str
    client_id: str
    invisible_s: float
    orderly: bool
    from_first: bool


class Source:
    """A topic at a broker.

    Args:
        register: `register(address)` sends a heartbeat, unless this member is registered at the broker on this connection.
        on_arrived: called with each message.
        on_other: called with a message whose tag does not match the filter, but has the hash of one that does.
        late: the start offsets at a broker that was unreachable when the member joined; None for another broker.
    """

    _code: ClassVar[RequestCode] = RequestCode.POP_MESSAGE

    def __init__(
        self,
        cluster: ClusterView,
        wanted: Wanted,
        subscription: Subscription,
        broker_name: str,
        dispatcher: SlotDispatcher,
        *,
        register: Register,
        on_arrived: Callable[[SharedDelivery], None],
        on_other: Callable[[SharedDelivery], None],
        late: LateQueues | None = None,
    ) -> None:
        self._late = late
        self._cluster = cluster
        self._limits = cluster.limits
        self._wanted = wanted
        self._subscription = subscription
        self.broker_name = broker_name
        self._dispatcher = dispatcher
        self._register = register
        self._on_arrived = on_arrived
        self._on_other = on_other
        self._attempt = uuid.uuid4().hex
        self._is_failing = False
        self.is_asking = False

    @property
    def topic(self) -> str:
        return self._subscription.topic

    async def begin(self) -> None:
        """Send the first receive, so that the group gets all messages that are sent from now on. Raises RocketletError."""
        self._dispatcher.reserve_now(1)
        await self._receive(1, 0.0)

    async def run(self) -> None:
        may_wait = False
        while not self._dispatcher.is_closed:
            many = not may_wait and not self._wanted.orderly
            places = await self._dispatcher.reserve(POP_MESSAGES if many else 1)
            wait_s = POP_TURN_S if self._dispatcher.is_short else POP_WAIT_S
            try:
                rest = await self._receive(places, 0.0 if many else wait_s)
            except Exception as error:  # any exception, because without this task no more messages would be received
                await asyncio.sleep(self._report(error))
            else:
                may_wait = not rest
                if self._is_failing:
                    self._is_failing = False
                    log.info("broker_back", broker=self.broker_name, topic=self.topic)

    def _report(self, error: Exception) -> float:
        """Log the first of consecutive RocketletErrors, and any other error. Return the number of seconds to wait before
        the next receive."""
        if not isinstance(error, RocketletError):
            log.exception("pop_failed", broker=self.broker_name, topic=self.topic)
        elif not self._is_failing:
            log.warning("pop_failed", broker=self.broker_name, topic=self.topic, reason=str(error))
        self._is_failing = True
        return self._limits.reconnect_s if isinstance(error, ConnectionFailed) else self._limits.pull_error_delay_s

    async def _receive(self, places: int, wait_s: float) -> int:
        """Send one receive for reserved slots. Return the approximate number of messages left at the broker. Raises
        RocketletError."""
        found: list[SharedDelivery] = []
        self.is_asking = True
        try:
            found, rest = await self._ask(places, wait_s)
            return rest
        finally:
            self.is_asking = False
            for delivery in found:
                self._on_arrived(delivery)
            self._dispatcher.put(found, places)

    async def _ask(self, places: int, wait_s: float) -> tuple[list[SharedDelivery], int]:
        connection = await self._cluster.broker(self.broker_name)
        if self._late is not None:
            await self._set_begins(connection, self._late)
            self._late = None
        await self._register(connection.address)
        asked = ReceiveStart(connection)
        answer = await connection.request_unchecked(
            self._code, self._ext(places, wait_s), timeout_s=wait_s + POP_TIMEOUT_S
        )
        self._attempt = uuid.uuid4().hex
        if answer.code in _EMPTY:
            return [], 0
        if answer.code:
            raise BrokerRefused(self._code, answer.code, answer.remark, connection.address)
        ends_s = asked.ends_s(self._wanted.invisible_s)
        try:
            found, rest = self._decode(answer, ends_s)
        except (MessageError, HeaderError) as error:
            raise AnswerUnreadable(str(error)) from error
        others = [delivery for delivery in found if not self._is_wanted(delivery)]
        for delivery in others:
            self._on_other(delivery)
        return [delivery for delivery in found if delivery not in others] if others else found, rest

    async def _set_begins(self, connection: Connection, late: LateQueues) -> None:
        """Commit the start offsets of queues for which the group has no offset. Raises RocketletError."""
        route = self._cluster.route(self.topic)
        for queue in subscribe_queues(self.topic, route) if route is not None else ():
            if queue.broker_name != self.broker_name:
                continue
            place = QueueOffset(self._wanted.group, self.topic, queue.queue_id)
            try:
                await connection.request(RequestCode.QUERY_CONSUMER_OFFSET, {**write(place), EXT_UNKNOWN: "error"})
            except BrokerRefused as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    raise
                begin = UpdateOffset(*place, await late.begin_offset(connection, queue))
                await connection.request(RequestCode.UPDATE_CONSUMER_OFFSET, write(begin))

    def _is_wanted(self, delivery: SharedDelivery) -> bool:
        tags = self._subscription.tags
        if not tags or self._subscription.takes_all:
            return True
        return props.find(delivery.message.record.properties, props.TAGS) in tags

    def _decode(self, answer: Frame, ends_s: float) -> tuple[list[SharedDelivery], int]:
        return deliveries_of(answer, self.topic, self.broker_name, ends_s)

    def _ext(self, places: int, wait_s: float) -> dict[str, Any]:
        """Return the header without a send time, because a broker whose clock differs would reject the request."""
        wanted, subscription = self._wanted, self._subscription
        header = PopMessage(
            wanted.group,
            subscription.topic,
            -1,
            places,
            int(wanted.invisible_s * 1000),
            int(wait_s * 1000),
            FROM_FIRST if wanted.from_first else FROM_END,
            0,
            subscription.kind,
            subscription.expression,
            self._attempt if wanted.orderly else None,
            wanted.orderly,
        )
        return write(header)


class LiteSource(Source):
    """A parent topic at a broker: the member's lite topics there."""

    _code = RequestCode.POP_LITE_MESSAGE

    def _decode(self, answer: Frame, ends_s: float) -> tuple[list[SharedDelivery], int]:
        return lite_deliveries_of(answer, self.topic, self.broker_name, ends_s)

    def _ext(self, places: int, wait_s: float) -> dict[str, Any]:
        wanted = self._wanted
        times_ms = int(wanted.invisible_s * 1000), int(wait_s * 1000)
        return write(
            PopLiteMessage(wanted.client_id, wanted.group, self.topic, places, *times_ms, attempt_id=self._attempt)
        )


# ------------------------------------------------------------------------------
# The topics and brokers to receive from, according to the routes.


Make = Callable[[Subscription, str, bool], Source]
_NOT_YET: Final = frozenset((ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SERVICE_NOT_AVAILABLE))
"""Response codes to the first receive after which the consumer starts nevertheless, because its run retries them."""


class Sources:
    """The sources of one member.

    Args:
        make: `make(subscription, broker_name, is_late)` creates a source. `is_late` is True if the topic or broker was
            added after the member joined, so that its new queues are read from their first message.
    """

    def __init__(
        self, cluster: ClusterView, subscriptions: Mapping[str, Subscription], make: Make, dispatcher: SlotDispatcher
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._subscriptions = subscriptions
        self._make = make
        self._dispatcher = dispatcher
        self._running: dict[tuple[str, str], tuple[Source, KeptTask]] = {}
        self._changed = asyncio.Event()
        cluster.listen(on_change=lambda topic: self._changed.set())

    @property
    def missing(self) -> list[str]:
        """The topics that no name server knows."""
        return [topic for topic in self._subscriptions if self._cluster.route(topic) is None]

    async def begin(self) -> None:
        """Send the first receive to each broker. A broker that is unreachable, or does not have the topic yet, gets it later.
        Raises BrokerRefused if a broker rejects this consumer."""
        sources = [self._make(self._subscriptions[topic], name, False) for topic, name in self._places()]
        self._dispatcher.sources = len(sources)
        for outcome in await asyncio.gather(*(source.begin() for source in sources), return_exceptions=True):
            if isinstance(outcome, BrokerRefused) and outcome.code in _NOT_YET:
                continue
            if isinstance(outcome, BaseException) and not _is_away(outcome):
                raise outcome
        for source in sources:
            self._run(source)

    async def run(self) -> None:
        """Start and stop sources as the routes change, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.missing_route_interval_s if self.missing else None):
                    await self._changed.wait()
            self._changed.clear()
            for topic in self.missing:
                with suppress(RocketletError):
                    await self._cluster.find_route(topic)
            await self._follow()

    async def _follow(self) -> None:
        places = self._places()
        gone = [self._running.pop(place)[1] for place in self._running.keys() - places]
        for topic, broker_name in places - self._running.keys():
            self._run(self._make(self._subscriptions[topic], broker_name, True))
        self._dispatcher.sources = len(self._running)
        await cancelled(gone)

    def _run(self, source: Source) -> None:
        name = f"receive {source.topic} at {source.broker_name}"
        task = KeptTask(source.run, name, self._limits.restart_s)
        self._running[source.topic, source.broker_name] = source, task

    def _places(self) -> set[tuple[str, str]]:
        return {
            (topic, data.broker_name)
            for topic in self._subscriptions
            if (route := self._cluster.route(topic)) is not None
            for data in route.queues
            if data.perm & PERM_READ and data.read_queues and self._cluster.master(data.broker_name) is not None
        }

    async def quiet(self, timeout_s: float) -> None:
        """Stop sending receives and wait for those in flight, up to `timeout_s`, because a broker may hold one for long."""
        asking = [kept.task for source, kept in self._running.values() if source.is_asking]
        idle = [task for source, task in self._running.values() if not source.is_asking]
        await cancelled(idle)
        if asking:
            await asyncio.wait(asking, timeout=timeout_s)

    async def stop(self) -> None:
        await cancelled([task for _, task in self._running.values()])


def _is_away(error: BaseException) -> bool:
    if isinstance(error, RocketletError) and not isinstance(error, BrokerRefused):
        log.warning("pop_failed", reason=str(error), hint="the receive is retried")
        return True
    return False
