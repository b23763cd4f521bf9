"""The parts of SharedConsumer: receives (POP), distribution to handlers, renewals, acknowledgements."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from ..protocol import properties as props
from ..protocol.allocation import subscribe_queues
from ..protocol.codes import EXT_UNKNOWN, PERM_READ, RequestCode, ResponseCode, code_name
from ..protocol.frame import Frame
from ..protocol.group_bodies import encode_batch_acks
from ..protocol.headers import (
    FROM_END,
    FROM_FIRST,
    AckMessage,
    ChangedInvisibleTime,
    ChangeInvisibleTime,
    HeaderError,
    PopMessage,
    PopMessageResult,
    QueueOffset,
    SendBack,
    UpdateOffset,
    read,
    write,
)
from ..protocol.message import (
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
from ..protocol.names import Queue, Subscription
from .config import (
    ACK_MESSAGES,
    ACK_TIMEOUT_S,
    DEAD_LETTER_LEVEL,
    DELAY_LEVELS_S,
    INVISIBLE_S,
    MAX_RECONSUME_TIMES,
    OFFSET_TIMEOUT_S,
    POP_MESSAGES,
    POP_STOP_S,
    POP_TIMEOUT_S,
    POP_TURN_S,
    POP_WAIT_S,
    RENEWALS,
    ClientLimits,
)
from .consuming.handling import (
    Calling,
    DeliveryWatch,
    Ended,
    Judge,
    Outcome,
    Reject,
    RetryLater,
    Settled,
    WorkerPool,
    shown,
)
from .errors import AnswerUnreadable, BrokerRefused, ConfigError, ConnectionFailed, RocketletError, get_logger
from .message import Lease, Message, clock_s
from .wire.cluster import ClusterView
from .wire.connection import Connection, cancelled, header_of
from .wire.late_queues import LateQueues

log = get_logger("rocketlet.sharing")
consumer_log = get_logger("rocketlet.consumer")


# ------------------------------------------------------------------------------
# A delivery of a popped message to this member.
#
# Its visibility timeout counts from the arrival of the response, minus the time for which this process was blocked
# meanwhile, because the response may have waited in the socket for that time.


_MARGIN: Final = (
    0.1  # the part of the visibility timeout by which the member's lease of a message ends before the broker's
)


class SharedDelivery:
    """A message and its receipt, which a renewal may replace.

    Attributes:
        since_s: the time of `clock_s` at which the message arrived.
        named_s: the time of `clock_s` at which a long-running handler was last logged.
        is_renewing: True while a renewal is in flight.
        settle: sends the outcome once the renewal in flight has a response.
        is_settled: True if the outcome is known.
    """

    __slots__ = ("is_renewing", "is_settled", "message", "named_s", "receipt", "settle", "since_s")

    def __init__(self, message: Message, receipt: Receipt) -> None:
        self.message = message
        self.receipt = receipt
        self.since_s = self.named_s = clock_s()
        self.is_renewing = self.is_settled = False
        self.settle: Callable[[], None] | None = None

    @property
    def lease(self) -> Lease:
        return self.message.lease

    def renewed(self, receipt: Receipt, asked_s: float, invisible_s: float) -> bool:
        """Apply a renewal. Return False if the lease had expired before the response arrived. It stays expired, because
        user code may have read `lease_lost` and stopped working on the message."""
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

    A record that cannot be decoded is skipped, so the broker redelivers it until it is a dead letter. Raises
    MessageError if the body cannot be split into records, and HeaderError.
    """
    result = read(PopMessageResult, answer.ext)
    starts, tried = starts_of(result.start_offset_info or ""), tried_in(result.order_count_info or "")
    found = []
    for record in split_records(answer.body):
        try:
            text = props.find(properties_in(record), POP_CK)
        except MessageError as error:
            consumer_log.error(
                "message_unreadable", topic=topic, broker=broker_name, offset=offset_in(record), reason=str(error),
                hint="its broker redelivers it until it is a dead letter",
            )  # fmt: skip
            continue
        message = Message(
            record, Queue(topic, broker_name, int.from_bytes(record[12:16], "big")), topic, Lease(0, ends_s)
        )
        if text is not None:
            receipt = receipt_of(text)
        else:  # computed as in Java's client: PopCallback's processPopResponse
            queue_id, offset = message.queue.queue_id, offset_in(record)
            times = result.pop_time, result.invisible_time, result.revive_qid
            receipt = Receipt(starts.get(queue_id, offset), *times, "0", broker_name, queue_id, offset)
            count = tried.get(f"qo{queue_id}%{offset}", tried.get(str(queue_id), 0))
            if count:  # in an orderly group the stored record does not have the current number of attempts
                stored = message.record._replace(reconsume_times=count)
                message = Message(stored, message.queue, topic, message.lease)
        found.append(SharedDelivery(message, receipt))
    return found, result.rest_num


# ------------------------------------------------------------------------------
# Free slots for messages: idle workers, or callers of `receive`.
#
# A receive requests no more messages than there are free slots, because another member could handle a message that waits
# in this process's memory. So each receive reserves slots before it is sent.


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
            except Exception as error:  # any, because without this task no more messages would be received
                await asyncio.sleep(self._report(error))
            else:
                may_wait = not rest
                if self._is_failing:
                    self._is_failing = False
                    log.info("broker_back", broker=self.broker_name, topic=self.topic)

    def _report(self, error: Exception) -> float:
        """Log the first of consecutive failures. Return the number of seconds to wait before the next receive."""
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
        answer = await connection.ask(
            RequestCode.POP_MESSAGE, write(self._header(places, wait_s)), timeout_s=wait_s + POP_TIMEOUT_S
        )
        self._attempt = uuid.uuid4().hex
        if answer.code in _EMPTY:
            return [], 0
        if answer.code:
            raise BrokerRefused(RequestCode.POP_MESSAGE, answer.code, answer.remark, connection.address)
        ends_s = asked.ends_s(self._wanted.invisible_s)
        try:
            found, rest = deliveries_of(answer, self.topic, self.broker_name, ends_s)
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

    def _header(self, places: int, wait_s: float) -> PopMessage:
        """Return the header without a send time, because a broker whose clock differs would reject the request."""
        wanted, subscription = self._wanted, self._subscription
        return PopMessage(
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


# ------------------------------------------------------------------------------
# Extends the visibility timeouts of messages in flight, when about a quarter of it has passed since they arrived or were last
# extended: after a third of the time at which the client considers them as expired, which is earlier than at the broker.
#
# A message that is still waiting for a slot then is released, because another member may be free. Handlers that run for
# minutes are logged.


class Renewing:
    """Extends visibility timeouts.

    Args:
        is_unwanted: releases a delivery that waits for a slot and returns True; otherwise returns False.

    Attributes:
        in_flight: the deliveries by message.
    """

    def __init__(
        self, cluster: ClusterView, group: str, invisible_s: float, is_unwanted: Callable[[SharedDelivery], bool]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._invisible_s = invisible_s
        self._is_unwanted = is_unwanted
        self.in_flight: dict[Message, SharedDelivery] = {}

    async def run(self) -> None:
        step_s = self._invisible_s / RENEWALS
        while True:
            await asyncio.sleep(step_s / 4)
            due_s = clock_s() + self._invisible_s - step_s
            try:
                for delivery in list(self.in_flight.values()):
                    if -math.inf < delivery.lease.ends_s < due_s and not delivery.is_renewing:
                        self._renew_or_lose(delivery)
            except Exception:  # any, because without this task every message would be redelivered
                log.exception("renewals_failed", group=self._group)

    def _renew_or_lose(self, delivery: SharedDelivery) -> None:
        if self._is_unwanted(delivery):
            self.in_flight.pop(delivery.message, None)
        elif delivery.lease.is_over:
            self._lost(delivery, "it was not renewed in time")
        else:
            self._renew(delivery)
            self._name(delivery)

    def _renew(self, delivery: SharedDelivery) -> None:
        connection = self._cluster.connected(delivery.receipt.broker_name)
        if connection is None:
            return
        delivery.is_renewing = True
        connection.call(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            change_ext(self._group, delivery, self._invisible_s, renews=True),
            b"",
            partial(self._answered, delivery, clock_s()),
            connection.running_s() + OFFSET_TIMEOUT_S,
        )

    def _answered(self, delivery: SharedDelivery, asked_s: float, answer: Frame | Exception) -> None:
        delivery.is_renewing = False
        settle, delivery.settle = delivery.settle, None
        if isinstance(answer, Frame):
            self._apply(delivery, asked_s, answer)
        else:
            log.info("renewal_failed", message=delivery.message.message_id, reason=str(answer))
        if settle is not None:
            settle()

    def _apply(self, delivery: SharedDelivery, asked_s: float, answer: Frame) -> None:
        fault = f"{code_name(answer.code)}: {answer.remark}" if answer.code else ""
        if not answer.code:
            try:
                changed = read(ChangedInvisibleTime, answer.ext)
            except HeaderError as error:
                fault = str(error)
            else:
                if not delivery.renewed(_changed(delivery.receipt, changed), asked_s, self._invisible_s):
                    self._lost(delivery, "the response to its renewal came too late")
                return
        if answer.code == ResponseCode.NO_MESSAGE:  # another member has it, or it is settled
            self.in_flight.pop(delivery.message, None)
            self._lost(delivery, fault)
        else:
            log.warning("renewal_failed", message=delivery.message.message_id, reason=fault)

    def _lost(self, delivery: SharedDelivery, reason: str) -> None:
        """End the lease of a delivery. Its outcome is still sent, and counts if the message was not redelivered."""
        delivery.lease.end()
        hint = "another member may handle it, too, even at the same time"
        log.warning("message_lost", message=delivery.message.message_id, reason=reason, hint=hint)

    def _name(self, delivery: SharedDelivery) -> None:
        running_s = clock_s() - delivery.since_s
        if running_s >= self._limits.standing_s and running_s >= 2 * (delivery.named_s - delivery.since_s):
            delivery.named_s = clock_s()
            message = delivery.message
            log.warning(
                "handler_stands",
                group=self._group, message=message.message_id, queue=str(message.queue), seconds=round(running_s, 1),
                hint="it delays no other message",
            )  # fmt: skip


def _changed(receipt: Receipt, to: ChangedInvisibleTime) -> Receipt:
    """Return the receipt after a renewal. Apache's brokers invalidate the previous one."""
    return receipt._replace(
        start_offset=receipt.offset, pop_ms=to.pop_time, invisible_ms=to.invisible_time, revive_qid=to.revive_qid
    )


# ------------------------------------------------------------------------------
# The topics and brokers to receive from, according to the routes.


Make = Callable[[Subscription, str, bool], Source]
_NOT_YET: Final = frozenset((ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SERVICE_NOT_AVAILABLE))
"""Response codes that do not let the start fail."""


class Sources:
    """The sources of one member.

    Args:
        make: `make(subscription, broker_name, is_late)` creates a source. `is_late` is True if the topic or broker was
            added after the member joined, so that its queues are read from offset 0.
    """

    def __init__(
        self, cluster: ClusterView, subscriptions: Mapping[str, Subscription], make: Make, dispatcher: SlotDispatcher
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._subscriptions = subscriptions
        self._make = make
        self._dispatcher = dispatcher
        self._running: dict[tuple[str, str], tuple[Source, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        cluster.listen(on_change=lambda topic: self._changed.set())

    @property
    def missing(self) -> list[str]:
        """The topics that no name server knows."""
        return [topic for topic in self._subscriptions if self._cluster.route(topic) is None]

    async def begin(self) -> None:
        """Send the first receive to each broker. An unreachable broker gets it later. Raises BrokerRefused if a broker
        rejects this consumer."""
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
        task = asyncio.create_task(source.run(), name=f"receive {source.topic} at {source.broker_name}")
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
        asking = [task for source, task in self._running.values() if source.is_asking]
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


# ------------------------------------------------------------------------------
# One member of a group that shares messages: its receives, the messages in flight, and their outcomes.


class Sharing:
    """One member of a group that shares messages.

    Args:
        max_reconsume_times: the maximum number of retries of a message; None for the broker's limit, or on Apache's
            brokers, which have none for popped messages, the default.
        register: `register(address)` sends a heartbeat, unless this member is registered at the broker on this connection.
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
    ) -> None:
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
        self._running: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _source(self, subscription: Subscription, broker_name: str, is_late: bool) -> Source:
        wanted = replace(self._wanted, from_first=True) if is_late else self._wanted
        is_new = self._wanted.from_first or self._late.was_there(broker_name)
        return Source(
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
            asyncio.create_task(self.sources.run(), name="sources"),
            asyncio.create_task(self._renewing.run(), name="renewals"),
        ]

    async def stop(self, handled: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the deliveries are `handled` and the brokers have confirmed their outcomes."""
        try:
            await handled()
            self.release(None)
            await self.sources.quiet(POP_STOP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.hand_over_timeout_s):
                    await self._settling.settled()
        finally:  # even if cancelled
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
        self._renewing.in_flight.pop(message, None)
        for settled in self._settled_callbacks.pop(message, ()):
            settled(outcome)

    def give_back(self, delivery: SharedDelivery) -> None:
        """Release a message, so that another member can receive it immediately."""
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
    """

    def __init__(
        self,
        call: Calling,
        concurrency: int,
        sharing: Sharing,
        *,
        judge: Judge,
        on_outcome: Callable[[Message, Outcome], None],
        limits: ClientLimits,
    ) -> None:
        self._call = call
        self._sharing = sharing
        self._judge = judge
        self._on_outcome = on_outcome
        self.pool = WorkerPool(call, self, concurrency, limits)

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
        try:
            ended = Ended(await self._call.call(message))
        except BaseException as error:
            if self.pool.is_stopping and not isinstance(error, KeyboardInterrupt | GeneratorExit):
                self._sharing.give_back(delivery)
                raise
            ended = Ended(None, error)
        outcome, _ = self.pool.outcome((message,), ended, self._judge, by_level=False)
        self._on_outcome(message, outcome)
        self._sharing.settle(delivery, outcome)


# ------------------------------------------------------------------------------
# Sends brokers the outcomes of their messages.
#
# The acknowledgements that one event-loop iteration collects for a broker are sent together, up to 1,024 in one request. A
# message whose extension is in flight is acknowledged after the response to that. Acknowledgements without a response are
# resent until the receipt has expired; the broker then redelivers the message.


_OFFSETS_SPAN: Final = 4096  # offsets that one entry of a batch spans
_GONE: Final = frozenset(
    (
        ResponseCode.NO_MESSAGE,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.INVALID_PARAMETER,
    )
)
"""Response codes after which a retry is useless."""


class Settling:
    """Sends acknowledgements, retries and rejections.

    Args:
        spawn: runs a coroutine in the background.
    """

    def __init__(self, cluster: ClusterView, group: str, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._spawn = spawn
        self._acks: dict[str, list[SharedDelivery]] = {}
        self._open = 0
        self._settled = asyncio.Event()
        self._settled.set()

    # Acknowledgements

    def ack(self, delivery: SharedDelivery) -> None:
        """Acknowledge a message at the end of this event-loop iteration, and repeat that until the broker responds."""
        self._open += 1
        self._settled.clear()
        if delivery.is_renewing:  # wait, because the response may contain a new receipt that replaces the current one
            delivery.settle = partial(self._collect, delivery)
        else:
            self._collect(delivery)

    def _collect(self, delivery: SharedDelivery) -> None:
        name = delivery.receipt.broker_name
        waiting = self._acks.get(name)
        if waiting is None:
            waiting = self._acks[name] = []
            asyncio.get_running_loop().call_soon(self._send, name)
        waiting.append(delivery)

    def _send(self, broker_name: str) -> None:
        deliveries = self._acks.pop(broker_name, ())
        connection = self._cluster.connected(broker_name)
        if connection is None:
            self._again(deliveries)
            return
        for first in range(0, len(deliveries), ACK_MESSAGES):
            part = deliveries[first : first + ACK_MESSAGES]
            request = self._one(part[0]) if len(part) == 1 else self._batch(connection, broker_name, part)
            connection.call(
                *request, partial(self._answered, connection, part), connection.running_s() + OFFSET_TIMEOUT_S
            )

    def _one(self, delivery: SharedDelivery) -> tuple[int, dict[str, Any], bytes]:
        receipt = delivery.receipt
        topic = receipt.topic(self._group, delivery.message.topic)
        header = AckMessage(self._group, topic, receipt.queue_id, receipt.text, receipt.offset)
        return RequestCode.ACK_MESSAGE, write(header), b""

    def _batch(
        self, connection: Connection, broker_name: str, deliveries: Sequence[SharedDelivery]
    ) -> tuple[int, dict[str, Any], bytes]:
        acks = _by_pop(deliveries, is_ours=connection.speaks_msgpack)
        return RequestCode.BATCH_ACK_MESSAGE, {}, encode_batch_acks(broker_name, self._group, acks)

    def _answered(
        self, connection: Connection, deliveries: Sequence[SharedDelivery], answer: Frame | Exception
    ) -> None:
        fault: object = answer
        if isinstance(answer, Frame):
            if answer.code == ResponseCode.SUCCESS:
                self._close(len(deliveries))
                return
            fault = BrokerRefused(RequestCode.ACK_MESSAGE, answer.code, answer.remark, connection.address)
            if answer.code in _GONE:
                log.warning("ack_refused", messages=len(deliveries), reason=str(fault))
                self._close(len(deliveries))
                return
        log.info("ack_failed", messages=len(deliveries), reason=str(fault))
        self._again(deliveries)

    def _again(self, deliveries: Iterable[SharedDelivery]) -> None:
        now_s = clock_s()
        late = [delivery for delivery in deliveries if now_s > delivery.lease.ends_s + ACK_TIMEOUT_S]
        if late:
            log.warning(
                "acks_given_up", messages=len(late), hint="their broker does not respond; the messages are redelivered"
            )
            self._close(len(late))
        for delivery in deliveries:
            if delivery not in late:
                asyncio.get_running_loop().call_later(self._limits.reconnect_s, self._collect, delivery)

    def _close(self, count: int) -> None:
        self._open -= count
        if not self._open:
            self._settled.set()

    async def settled(self) -> None:
        """Wait until all outcomes are confirmed or given up."""
        await self._settled.wait()

    # Retries and rejections

    def retry(self, delivery: SharedDelivery, outcome: RetryLater) -> None:
        delay_s = delay_of(outcome, delivery.message)
        self._later(delivery, partial(self._retry_until_confirmed, delivery, partial(self.change, delivery, delay_s)))

    def give_back(self, delivery: SharedDelivery) -> None:
        """Release a message, so that another member can receive it immediately. The attempt does not count."""
        back = partial(self.change, delivery, 0.0, suspend=True)
        self._later(delivery, partial(self._retry_until_confirmed, delivery, back))

    def reject(self, delivery: SharedDelivery, reason: str, done: Callable[[], None]) -> None:
        """Dead-letter a message. `done` is called when the dead letter is stored. Until then its visibility timeout must be
        extended."""
        self._later(delivery, partial(self._reject, delivery, reason, done))

    def _later(self, delivery: SharedDelivery, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._open += 1
        self._settled.clear()

        def begin() -> None:
            self._spawn(self._counted(work()))

        if delivery.is_renewing:
            delivery.settle = begin
        else:
            begin()

    async def _counted(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._close(1)

    async def _reject(self, delivery: SharedDelivery, reason: str, done: Callable[[], None]) -> None:
        async def reject() -> None:
            if await self._reject_in_one_request(delivery, reason):
                return
            await self.dead_letter(delivery, reason)
            done()
            self.ack(delivery)

        await self._retry_until_confirmed(delivery, reject)
        done()

    async def _reject_in_one_request(self, delivery: SharedDelivery, reason: str) -> bool:
        """Have the broker store the dead letter and acknowledge the message in one request. Return False if the broker
        does not support that. Raises RocketletError."""
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        if not connection.speaks_msgpack:  # an Apache broker
            return False
        ext = change_ext(self._group, delivery, INVISIBLE_S, reject=shown(reason))
        answer = await connection.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext, timeout_s=OFFSET_TIMEOUT_S)
        return bool(header_of(answer, ChangedInvisibleTime).rejected)

    async def _retry_until_confirmed(
        self, delivery: SharedDelivery, send: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            try:
                await send()
                return
            except BrokerRefused as error:
                if error.code in _GONE:
                    log.info("message_elsewhere", message=delivery.message.message_id, reason=str(error))
                    return
                reason = str(error)
            except RocketletError as error:
                reason = str(error)
            if delivery.lease.is_over:
                log.warning("message_not_settled", message=delivery.message.message_id, reason=reason)
                return
            await asyncio.sleep(self._limits.reconnect_s)

    async def change(self, delivery: SharedDelivery, delay_s: float, *, suspend: bool = False) -> None:
        """Redeliver a message after `delay_s`. Raises RocketletError."""
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        ext = change_ext(self._group, delivery, delay_s, suspend=suspend)
        await connection.request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext, timeout_s=OFFSET_TIMEOUT_S)

    async def dead_letter(self, delivery: SharedDelivery, reason: str) -> None:
        """Have an Apache broker store a copy in the group's dead-letter topic. Raises RocketletError."""
        message = delivery.message
        connection = await self._cluster.broker(delivery.receipt.broker_name)
        header = SendBack(
            message.physical_offset,
            self._group,
            DEAD_LETTER_LEVEL,
            message.message_id,
            message.topic,
            False,
            MAX_RECONSUME_TIMES,
            shown(reason) or None,
        )
        await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


def change_ext(
    group: str,
    delivery: SharedDelivery,
    delay_s: float,
    *,
    suspend: bool = False,
    renews: bool = False,
    reject: str | None = None,
) -> dict[str, Any]:
    receipt = delivery.receipt
    topic = receipt.topic(group, delivery.message.topic)
    delay_ms = round(delay_s * 1000)
    place = topic, receipt.queue_id, receipt.text, receipt.offset
    return write(ChangeInvisibleTime(group, *place, delay_ms, suspend, renews, reject))


def _by_pop(deliveries: Sequence[SharedDelivery], *, is_ours: bool) -> Sequence[tuple[str, Receipt, Sequence[int]]]:
    """Group deliveries by receive: return topic, receipt and offsets of each.

    A Rocketlet broker identifies a delivery by its queue and pop time, so that all deliveries of one receive form one
    entry. Apache's brokers also use the offset at which the receive started.

    Args:
        is_ours: True for a Rocketlet broker.
    """
    entries: list[tuple[str, Receipt, list[int]]] = []
    newest: dict[object, tuple[str, Receipt, list[int]]] = {}
    for delivery in sorted(deliveries, key=lambda item: item.receipt.offset):
        receipt, topic = delivery.receipt, delivery.message.topic
        of = (topic, receipt.mark, receipt.queue_id, receipt.pop_ms, None if is_ours else receipt.start_offset)
        entry = newest.get(of)
        if entry is None or receipt.offset - entry[1].start_offset >= _OFFSETS_SPAN:
            first = receipt._replace(start_offset=receipt.offset) if is_ours else receipt
            entry = newest[of] = (topic, first, [])
            entries.append(entry)
        entry[2].append(receipt.offset)
    return entries


def delay_of(outcome: RetryLater, message: Message) -> float:
    """Return the delay in seconds until a message is to be redelivered."""
    delay = outcome.delay
    if delay is not None:
        return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
    level = outcome.delay_level or 3 + message.reconsume_times  # the same levels as brokers use for returned messages
    return float(DELAY_LEVELS_S[min(level, len(DELAY_LEVELS_S)) - 1])
