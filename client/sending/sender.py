"""Sends: the choice of a queue, retries on other brokers, and delivery times."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from math import isfinite
from typing import Final
from weakref import WeakSet

from ...protocol import bodies, names
from ...protocol import properties as props
from ...protocol.bodies import DEDUP_FLAG, Heartbeat
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.config import MAX_BODY_BYTES
from ...protocol.frame import ExtValue, Frame
from ...protocol.headers import TopicName, write
from ...protocol.message import HandleError, RecallHandle, compressed, decode_handle
from ...protocol.names import Queue, lite_name_fault
from ..config import BATCH_BYTES, MAX_INT, MAX_SEND_BACKOFF_S, ONEWAY_AT_ONCE, SEND_BACKOFF_S
from ..errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..message import Outgoing, SendResult
from ..wire.cluster import ClusterView, Lifecycle, new_client_id
from ..wire.connection import Connection, running_timeout
from .accumulator import (
    PLAIN_BYTES,
    STORED,
    Accumulator,
    Batch,
    Pending,
    UniqueKeys,
    check_topic,
    checked_body,
    checked_id,
    encoded,
    properties_text,
    sent_result,
)
from .options import ProducerOptions

log = get_logger("rocketlet.producer")


# ------------------------------------------------------------------------------
# Chooses the queues of a producer's messages, and retries failed sends.
#
# A failed send is retried, up to the producer's `retries`, if another queue or broker may succeed: in another queue, if
# possible at another broker, unless the caller gave a queue or a queue key. While no broker can be reached, the send is
# retried with growing pauses until its timeout, unless `retries` is 0. For a topic with `dedup`, all attempts go to the first
# queue, because only its broker knows whether it has the message.


# Response codes after which another queue or broker may succeed.
_WORTH_ANOTHER: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    )
)

# Response codes of a batch that a single one of its messages may have caused.
_OF_ONE_MESSAGE: Final = frozenset((ResponseCode.MESSAGE_ILLEGAL, ResponseCode.REQUEST_CODE_NOT_SUPPORTED))


class Sender(Lifecycle):
    """Base of a producer: routes, connections, batches and retries."""

    _noun = "producer"

    def __init__(self, name_server: str, group: str, options: ProducerOptions) -> None:
        super().__init__(ClusterView(name_server, options["access"], options["client_name"], options["limits"]))
        self.client_id = new_client_id(options["client_name"])
        self.group = group
        self._timeout_s = options["timeout_s"]
        self._retries = options["retries"]
        self._compress_over_bytes = options["compress_over_bytes"]
        self._join_below_bytes = min(self._compress_over_bytes, BATCH_BYTES)
        self._default_queues = options["default_queues"]
        self._fields: dict[str, ExtValue] = {
            "a": group,
            "b": "",  # topic
            "c": names.DEFAULT_TOPIC,
            "d": self._default_queues,
            "e": 0,  # queue
            "f": 0,  # system flag
            "g": 0,  # born time
            "h": 0,  # flag
            "i": "",  # properties
        }
        self._cluster.listen(on_change=self._forget_queues)
        self._queues: dict[str, list[Queue]] = {}
        self._with_dedup: set[str] = set()  # topics whose brokers recognize repeated sends
        self._greeted: dict[str, Connection] = {}
        self._greetings: dict[Connection, asyncio.Task[None]] = {}
        self._keep_times: WeakSet[Connection] = WeakSet()  # their brokers were found to support delivery times
        self._turn = time.time_ns() & 0xFFFF
        self._keys = UniqueKeys()
        self._accumulator: Accumulator | None = None
        if options["batching"]:
            self._accumulator = Accumulator(self._header, self._keys, self._failed, self._timeout_s)
        self._resending: set[asyncio.Task[None]] = set()

    def _brokers(self) -> list[Connection]:
        found = map(self._cluster.connected, {**self._cluster.masters(), **self._greeted})
        return [connection for connection in found if connection is not None]

    def _failed(self, batch: Batch, answer: Frame | Exception) -> None:
        """Retry the messages of a failed batch, each of them alone."""
        if isinstance(answer, Frame):
            answer = BrokerRefused(RequestCode.SEND_BATCH_MESSAGE, answer.code, answer.remark, batch.connection.address)
        for message, key, text in zip(batch.messages, batch.ids, batch.texts, strict=True):
            if message[0].done():  # the caller has cancelled the send
                continue
            task = asyncio.create_task(self._resend_alone(batch, message, key, text, answer), name="resend")
            self._resending.add(task)
            task.add_done_callback(partial(self._resent, message[0]))
            message[0].add_done_callback(partial(_give_up, task))

    async def _resend_alone(self, batch: Batch, message: Pending, key: str, text: str, error: Exception) -> None:
        """Send a message of a failed batch alone, or fail it if no attempts are left or a retry cannot succeed."""
        topic = batch.queue.topic
        future, _, body, _, queue_key, queue = message
        # One invalid message makes its whole batch fail, so send its messages alone: each then gets its own response.
        is_anothers = len(batch.messages) > 1 and isinstance(error, BrokerRefused) and error.code in _OF_ONE_MESSAGE
        tries = 1 if is_anothers else self._retries
        timeout_s = batch.left_s()
        try:
            if not tries or timeout_s <= 0 or not (is_anothers or _may_help(error)):
                raise error
            if not is_anothers:
                log.info("send_failed", queue=str(batch.queue), reason=str(error), hint="it is retried")
                await self._refresh_route(topic)
            ext = self._header(topic, text, int(time.time() * 1000))
            code, failed = RequestCode.SEND_MESSAGE_V2, None if is_anothers else batch.queue
            answer, target = await self._send(topic, code, ext, body, queue_key, queue, failed, tries, timeout_s)
            if not future.done():
                future.set_result(sent_result(answer, key, target))
        except Exception as failure:
            if not future.done():
                future.set_exception(failure)

    def _resent(self, future: asyncio.Future[SendResult], task: asyncio.Task[None]) -> None:
        self._resending.discard(task)
        if (
            task.cancelled() and not future.done()
        ):  # the producer is stopping, and without an exception a caller that awaits the result would wait forever
            future.set_exception(ConfigError(f"this producer {self._idle_reason or 'was cancelled while it sent'}"))

    def _joined(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        keys: str | Sequence[str],
        properties: Mapping[str, str] | None,
        queue_key: str | None,
        queue: Queue | None,
        message_id: str | None,
    ) -> asyncio.Future[SendResult] | None:
        """Add a message to a batch of this event-loop iteration, and return a future of its result. Return None if the
        message must be sent alone, for example because its body is empty, no bytes, or at least as long as the
        compression or batch limit, or because no connection to its broker is open. Raises MessageIllegal.

        `_joined` runs for each message, so it is a plain function with as little work as possible.
        """
        accumulator = self._accumulator
        if accumulator is None or type(body) is not bytes or not 0 < len(body) < self._join_below_bytes:
            return None
        batch = accumulator.batch_of_turn.get(topic) if queue_key is None and queue is None else None
        if batch is None and (batch := self._batch(accumulator, topic, queue_key, queue)) is None:
            return None
        if message_id is not None or tag or keys or properties:
            key = checked_id(message_id) if message_id is not None else self._keys.next()
            # If this raises, the batch may stay empty.
            text = properties_text(tag, keys, properties, key, "", is_again=message_id is not None)
            size_bytes = batch.size_bytes + len(body) + len(text)
        else:
            key = text = ""
            size_bytes = batch.size_bytes + len(body) + PLAIN_BYTES
        if batch.messages and (size_bytes > BATCH_BYTES or len(batch.messages) >= batch.limit):
            accumulator.close(batch)
            return self._joined(topic, body, tag, keys, properties, queue_key, queue, key or None)
        batch.size_bytes = size_bytes
        future: asyncio.Future[SendResult] = batch.connection.loop.create_future()
        batch.messages.append((future, key, body, text, queue_key, queue))
        return future

    def _batch(self, accumulator: Accumulator, topic: str, queue_key: str | None, queue: Queue | None) -> Batch | None:
        """Return the batch of this event-loop iteration for the queue of a message, or for all messages that may go to
        any queue. Return None without a known route or an open connection to the broker, and for retry topics."""
        queues = self._queues.get(topic)
        # brokers accept no batches for retry topics, and none of which they know some ids
        if not queues or topic[0] == "%" or topic in self._with_dedup:
            return None
        goes_anywhere = queue_key is None and queue is None
        next_one = queues[(self._turn + 1) % len(queues)]
        target = next_one if goes_anywhere else queue or self._choose(queues, queue_key, None)
        connection = self._greeted.get(target.broker_name)
        if connection is None or not connection.is_open:
            return None
        self._cluster.check_home()
        batch = accumulator.batch(connection, target)
        if goes_anywhere:
            self._turn += 1  # only here, because a message without a connection gets its queue later
            accumulator.batch_of_turn[topic] = batch
        return batch

    def _prepared(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        keys: str | Sequence[str],
        properties: Mapping[str, str] | None,
        later: str,
        message_id: str | None = None,
    ) -> tuple[dict[str, ExtValue], bytes, str]:
        """Return the header fields, whose queue the caller sets, the body, which may be compressed, and the message's id."""
        if topic not in self._queues:
            check_topic(topic)
        if type(body) is not bytes or not 0 < len(body) <= MAX_BODY_BYTES:
            checked_body(body)
        now_ms = int(time.time() * 1000)
        self._keys.stamp(now_ms)
        key = checked_id(message_id) if message_id is not None else self._keys.next()
        text = properties_text(tag, keys, properties, key, later, is_again=message_id is not None)
        return *self._packed(topic, body, text, now_ms), key

    def _packed(self, topic: str, body: bytes, text: str, now_ms: int = 0) -> tuple[dict[str, ExtValue], bytes]:
        """Return the header fields of a message with these encoded properties, whose queue the caller sets, and the body,
        which may be compressed."""
        sys_flag = 0
        if len(body) >= self._compress_over_bytes:
            packed, packed_flag = compressed(body)
            if len(packed) < len(body):  # a body that compression does not shrink is sent uncompressed
                body, sys_flag = packed, packed_flag
        ext = self._header(topic, text, now_ms or int(time.time() * 1000))
        ext["f"] = sys_flag
        return ext, body

    def _header(self, topic: str, text: str, now_ms: int, queue_id: int = 0) -> dict[str, ExtValue]:
        """Return the fields of SEND_MESSAGE_V2, as a copy of a template because that is fast."""
        ext = self._fields.copy()
        ext["b"] = topic
        ext["e"] = queue_id
        ext["g"] = now_ms
        ext["i"] = text
        return ext

    async def _send(
        self,
        topic: str,
        code: int,
        ext: dict[str, ExtValue],
        body: bytes,
        queue_key: str | None,
        queue: Queue | None,
        failed: Queue | None = None,
        tries: int = 0,
        timeout_s: float = 0.0,
        first: Queue | None = None,
        *,
        to_a_time: bool = False,
    ) -> tuple[Frame, Queue]:
        """Send a message with retries. Return the response and the queue.

        Args:
            failed: the queue of an earlier attempt that failed.
            tries: the number of attempts left after an earlier one; 0 for all.
            timeout_s: the time left after an earlier attempt; 0 for the full timeout.
            first: the queue of the first attempt, if it is chosen already.
            to_a_time: True if the broker must support any delivery time.
        """
        self._check_running()
        tries, timeout_s = tries or self._retries + 1, timeout_s or self._timeout_s
        end_s, pause_s, has_failed = time.monotonic() + timeout_s, SEND_BACKOFF_S, failed is not None
        while True:
            target = queue or failed
            try:
                target = queue or first or self._choose(await self._queues_now(topic, has_failed), queue_key, failed)
                return await self._try(target, code, ext, body, end_s - time.monotonic(), to_a_time), target
            except (ConnectionFailed, RequestTimeout, BrokerRefused) as error:
                is_away = isinstance(error, ConnectionFailed) and self._retries > 0
                tries -= not is_away
                if tries <= 0 or time.monotonic() >= end_s or not _may_help(error):
                    raise
                log.info("send_failed", topic=topic, queue=str(target), reason=str(error), hint="it is retried")
                if topic in self._with_dedup:
                    queue = target  # another broker would store the message again
                if failed is not None or self._has_one_broker(topic):
                    await asyncio.sleep(min(pause_s, max(end_s - time.monotonic(), 0.0)))
                    pause_s = min(pause_s * 2, MAX_SEND_BACKOFF_S)
                    if time.monotonic() >= end_s:
                        raise
                failed, first, has_failed = target, None, True
                await self._refresh_route(topic)

    async def _try(
        self, target: Queue, code: int, ext: dict[str, ExtValue], body: bytes, timeout_s: float, to_a_time: bool
    ) -> Frame:
        ext["e"] = target.queue_id
        connection = self._greeted.get(target.broker_name)
        if connection is None or not connection.is_open:
            connection = await self._connect(target)
        if to_a_time and connection not in self._keep_times:
            await check_keeps_time(connection, target.topic, timeout_s)
            self._keep_times.add(connection)
        if not connection.is_writable:
            await _writable(connection, timeout_s)
        if self._accumulator is not None:  # send earlier messages first
            self._accumulator.flush(connection)
        answer = await connection.request_unchecked(code, ext, body, timeout_s)
        if answer.code and answer.code not in STORED:
            raise BrokerRefused(code, answer.code, answer.remark, connection.address)
        return answer

    async def _send_away(self, topic: str, one: Outgoing, queue_key: str | None) -> tuple[str, Queue]:
        """Send a message without a response. Return its id and queue. Wait while the connection to the broker is not
        writable."""
        ext, wire_body, key = self._prepared(topic, one.body, one.tag, one.keys, one.properties, "", one.message_id)
        target = self._choose(await self.queues(topic), queue_key, None)
        connection = await self._connect(target)
        if not connection.is_writable:
            await _writable(connection, self._timeout_s)
        connection.oneway(RequestCode.SEND_MESSAGE_V2, {**ext, "e": target.queue_id}, wire_body)
        if connection.unwritten >= ONEWAY_AT_ONCE:
            connection.write_now()
            await asyncio.sleep(0)
        return key, target

    def _has_one_broker(self, topic: str) -> bool:
        return len({queue.broker_name for queue in self._queues.get(topic, ())}) <= 1

    async def queues(self, topic: str) -> list[Queue]:
        """Return the writable queues of a topic. Raises TopicNotFound."""
        self._check_running()
        queues = self._queues.get(topic)
        if queues is None:
            queues = await self._cluster.route_to_publish(topic, self._default_queues)
            route = self._cluster.route(topic)
            if route is not None:  # not cached before the topic exists
                self._queues[topic] = queues
                self._with_dedup.discard(topic)
                if any(data.sys_flag & DEDUP_FLAG for data in route.queues):
                    self._with_dedup.add(topic)
        return queues

    async def _queues_now(self, topic: str, has_failed: bool) -> list[Queue]:
        """Return what `queues` returns, but after a failed attempt raise ConnectionFailed instead of TopicNotFound,
        because a broker or name server that has just started does not know all topics yet."""
        try:
            return await self.queues(topic)
        except TopicNotFound as error:
            if not has_failed:
                raise
            raise ConnectionFailed(
                f"no name server knows a broker of the topic {topic}; it may be restarting"
            ) from error

    async def _refresh_route(self, topic: str) -> None:
        """After a failed send, query the route, which may have changed."""
        self._queues.pop(topic, None)
        try:
            await self._cluster.find_route(topic)
        except RocketletError as error:
            log.info("route_not_refreshed", topic=topic, reason=str(error))

    async def _connect(self, queue: Queue) -> Connection:
        """Return the connection to a queue's broker, at which this producer is registered by a heartbeat."""
        if self._cluster.master(queue.broker_name) is None:  # no route with this broker was queried before
            await self._cluster.find_route(queue.topic)
        return await self._greet(queue.broker_name)

    async def _greet(self, broker_name: str) -> Connection:
        """Open a connection and register with a heartbeat. All concurrent callers wait for the same heartbeat, so that
        their sends stay in order."""
        connection = await self._cluster.broker(broker_name)
        if self._greeted.get(broker_name) is not connection:
            await asyncio.shield(self._greeting(connection))
            self._greeted[broker_name] = connection
        return connection

    def _greeting(self, connection: Connection) -> asyncio.Task[None]:
        """Return the task of a heartbeat in flight, which continues if a caller is cancelled."""
        task = self._greetings.get(connection)
        if task is None:
            task = self._greetings[connection] = asyncio.create_task(self._say_hello(connection), name="greeting")
            task.add_done_callback(lambda done: self._has_greeted(connection, done))
        return task

    def _has_greeted(self, connection: Connection, task: asyncio.Task[None]) -> None:
        del self._greetings[connection]
        if not task.cancelled():
            task.exception()  # marked as retrieved, because nobody may be waiting for it any more

    async def _say_hello(self, connection: Connection) -> None:
        body = bodies.encode_heartbeat(Heartbeat(self.client_id, producer_groups=(self.group,)))
        await connection.request(RequestCode.HEART_BEAT, {}, body)

    def _choose(self, queues: list[Queue], queue_key: str | None, failed: Queue | None) -> Queue:
        """Choose a queue by the key; without a key round robin and, after a failure, if possible at another broker."""
        if queue_key is not None:
            if not isinstance(queue_key, str):
                raise MessageIllegal(f"the queue key {queue_key!r} is not a text; use str({queue_key!r})")
            return queues[zlib.crc32(encoded("queue key", queue_key)) % len(queues)]
        self._turn = turn = self._turn + 1
        if failed is not None:
            others = [queue for queue in queues if queue.broker_name != failed.broker_name]
            queues = others or queues
        return queues[turn % len(queues)]

    def _forget_queues(self, topic: str) -> None:
        self._queues.pop(topic, None)


def _give_up(task: asyncio.Task[None], future: asyncio.Future[SendResult]) -> None:
    if future.cancelled():
        task.cancel()


async def _writable(connection: Connection, timeout_s: float) -> None:
    """Wait until the connection is writable. Raises RequestTimeout."""
    try:
        async with running_timeout(timeout_s):
            await connection.writable()
    except TimeoutError:
        raise RequestTimeout(f"{connection.address} did not read the message in time") from None


def _may_help(error: Exception) -> bool:
    """Return True if a retry may succeed."""
    if isinstance(error, BrokerRefused):
        return error.code in _WORTH_ANOTHER
    return isinstance(error, ConnectionFailed | RequestTimeout)


# ------------------------------------------------------------------------------
# The time of delivery of a message: as a delay level, as a delay, or as a time.


Delay = timedelta | float
"""A delay, as a timedelta or seconds."""


def later_text(delay_level: int, delay: Delay | None, at: datetime | None) -> str:
    """Return the encoded property for a delayed delivery; empty without a delay. Raises MessageIllegal."""
    if (delay_level != 0) + (delay is not None) + (at is not None) > 1:
        raise MessageIllegal("give one of delay_level, delay and at: each says when the message is delivered")
    if delay is not None:
        delay_ms = _milliseconds(delay)
        return f"{props.TIMER_DELAY_MS}\x01{delay_ms}" if delay_ms else ""
    if at is not None:
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise MessageIllegal(f"at is {at!r}; give a datetime with a time zone, such as datetime.now(UTC) + ...")
        return f"{props.TIMER_DELIVER_MS}\x01{int(at.timestamp() * 1000)}"
    if type(delay_level) is not int or not 0 <= delay_level <= MAX_INT:
        raise MessageIllegal(f"the delay level is {delay_level!r}; 1 to 18 delay, 0 does not")
    return f"{props.DELAY}\x01{delay_level}" if delay_level else ""


def own_text(one: Outgoing) -> str:
    """Return the encoded properties for a message's delay and priority, or for its lite topic; empty without any.
    Raises MessageIllegal."""
    later, priority = later_text(one.delay_level, one.delay, one.at), one.priority
    if one.lite_topic is not None:
        if later or priority is not None:
            raise MessageIllegal("lite_topic: a message of a lite topic has no delay and no priority; leave them out")
        fault = lite_name_fault(one.lite_topic) if isinstance(one.lite_topic, str) else "lite topic: expected a str"
        if fault:
            raise MessageIllegal(fault)
        return f"{props.LITE_TOPIC}\x01{one.lite_topic}"
    if priority is None:
        return later
    if type(priority) is not int or not 0 <= priority <= MAX_INT:
        raise MessageIllegal(f"priority: got {priority!r}; expected a number from 0 to {MAX_INT}")
    text = f"{props.PRIORITY}\x01{priority}"
    return f"{later}{props.PAIR_END}{text}" if later else text


def _milliseconds(delay: Delay) -> int:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds) or seconds < 0:
        raise MessageIllegal(f"delay is {delay!r}; give a timedelta or seconds, 0 or more")
    return round(seconds * 1000)


def checked_handle(text: object) -> RecallHandle:
    """Decode a recall handle. Raises MessageIllegal."""
    try:
        if not isinstance(text, str):
            raise HandleError("no text")
        return decode_handle(text)
    except HandleError:
        raise MessageIllegal(
            f"{text!r:.100} is not a recall handle; only messages that were sent with delay or at have one"
        ) from None


def is_over(error: BrokerRefused) -> bool:
    """Return True if a message cannot be recalled because it is delivered or recalled already."""
    is_late = error.code == ResponseCode.ILLEGAL_OPERATION and "timestamp invalid" in (error.remark or "")
    return error.code == ResponseCode.NO_MESSAGE or is_late  # codes of Rocketlet's and of Apache's brokers


def waits(own: str) -> bool:
    """Return True if the properties of `own_text` delay the message."""
    return own.startswith((props.DELAY, "TIMER"))


def needs_time(later: str) -> bool:
    """Return True if a delay property is supported only by Rocketlet's brokers and Apache's of 5.x."""
    return later.startswith("TIMER")


async def check_keeps_time(connection: Connection, topic: str, timeout_s: float) -> None:
    """Raise MessageIllegal for a broker of 4.9, which would deliver a message with a delivery time immediately.

    A broker of 4.9 is recognized because it does not support GET_TOPIC_CONFIG. A broker that rejects the request for
    another reason is newer.
    """
    answer = await connection.request_unchecked(RequestCode.GET_TOPIC_CONFIG, write(TopicName(topic)), b"", timeout_s)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise MessageIllegal(
            f"{connection.address} is a broker of 4.9, which would deliver the message immediately; it supports "
            "delay_level only. Rocketlet's brokers deliver up to 40 days later, Apache's of 5.x up to 3 days"
        )
