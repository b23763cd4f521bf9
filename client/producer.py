"""The producer: chooses a queue, sends, and tries another queue where that may help."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Self

from ..protocol import bodies, names
from ..protocol import properties as props
from ..protocol.bodies import Heartbeat, Queue
from ..protocol.codes import SYS_TRANSACTION_PREPARED, RequestCode, ResponseCode
from ..protocol.compression import compressed
from ..protocol.frame import ExtValue, Frame
from ..protocol.headers import UnregisterClient, write
from ..protocol.message import MAX_BODY_BYTES, BatchEntry, encode_batch
from .access import Access
from .accumulator import Accumulator, Batch, Pending
from .arguments import check_callable, check_count, check_group, check_seconds
from .cluster import Cluster
from .config import BATCH_BYTES, HEARTBEAT_INTERVAL_S, REQUEST_TIMEOUT_S
from .connection import Connection
from .errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
)
from .log import get_logger
from .message import Outgoing, SendResult, UniqueKeys, new_client_id
from .transactions import Check, Transactions, half_properties

log = get_logger("rocketlet.producer")

# a full success, or stored but not yet flushed or copied: never to be sent again
_STORED: Final[Mapping[int, Literal["ok", "flush timeout", "slave timeout", "no slave"]]] = {
    ResponseCode.SUCCESS: "ok",
    ResponseCode.FLUSH_DISK_TIMEOUT: "flush timeout",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "slave timeout",
    ResponseCode.SLAVE_NOT_AVAILABLE: "no slave",
}
# another queue or broker may do better
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
_PROPERTY_BYTES: Final = props.MAX_BYTES - 100  # the broker adds its own
# one message may be the reason that a batch is refused
_OF_ONE_MESSAGE: Final = frozenset((ResponseCode.MESSAGE_ILLEGAL, ResponseCode.REQUEST_CODE_NOT_SUPPORTED))


class Producer:
    """`async with Producer(name_server="host:port") as producer: await producer.send("topic", b"body")`

    - `timeout_s`: how long a send may take, with all its retries.
    - `retries`: how often a failed send is tried again, each time on another queue if there is one.
    - `compress_over_bytes`: compress bodies of this size and more.
    - `default_queues`: how many queues a topic gets that a send creates.
    - `batching`: send messages of one turn of the event loop to one queue in one request. Nothing waits for it, and each
      message has its own result. Delayed, compressed and transactional messages travel alone.
    - `check`: for transactions. Called with a `Message` whose outcome the broker has not heard. Return True to commit, False
      to roll back, None if it is not known yet. The broker may ask any producer of the group, also after a restart.
    """

    def __init__(
        self,
        name_server: str,
        group: str = "rocketlet",
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        retries: int = 2,
        compress_over_bytes: int = 4096,
        default_queues: int = 4,
        batching: bool = True,
        check: Check | None = None,
        access: Access | None = None,
    ) -> None:
        check_group(group)
        check_seconds("timeout_s", timeout_s)
        check_count("retries", retries, 0)
        check_count("compress_over_bytes", compress_over_bytes, 0)
        check_count("default_queues", default_queues, 1)
        check_callable("check", check)
        self.client_id = new_client_id()
        self.group = group
        self._timeout_s = timeout_s
        self._retries = retries
        self._compress_over_bytes = compress_over_bytes
        self._join_below_bytes = min(compress_over_bytes, BATCH_BYTES)
        self._default_queues = default_queues
        self._cluster = Cluster(name_server, access)
        self._cluster.on_change = self._forget_queues
        self._queues: dict[str, list[Queue]] = {}
        self._greeted: dict[str, Connection] = {}
        self._turn = time.time_ns() & 0xFFFF
        self._keys = UniqueKeys()
        self._transactions = Transactions(self._cluster, group, check) if check is not None else None
        self._heartbeats: asyncio.Task[None] | None = None
        self._accumulator = Accumulator(self._header, self._answered, timeout_s) if batching else None
        self._resending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Raises ConnectionFailed if no name server can be reached."""
        self._cluster.start()
        try:
            await self._cluster.find_route(names.DEFAULT_TOPIC)
        except BaseException:
            await self._cluster.close()
            raise
        self._heartbeats = asyncio.create_task(self._heartbeat(), name="producer heartbeat")
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        for task in self._resending:
            task.cancel()
        await asyncio.gather(*self._resending, return_exceptions=True)
        if self._transactions is not None:
            await self._transactions.close()
        ext = write(UnregisterClient(self.client_id, producer_group=self.group))
        for connection in self._brokers():
            try:
                await connection.request(RequestCode.UNREGISTER_CLIENT, ext)
            except RocketletError as error:
                log.info("unregister_failed", broker=connection.address, reason=str(error))
        await self._cluster.close()

    def _brokers(self) -> list[Connection]:
        found = (self._cluster.connected(name) for name in self._cluster.masters())
        return [connection for connection in found if connection is not None]

    async def _heartbeat(self) -> None:
        """To every broker that it has a connection to, of transactions also to those that it lost: they may ask."""
        body = bodies.encode_heartbeat(Heartbeat(self.client_id, producer_groups=(self.group,)))
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            if self._transactions is not None:
                await asyncio.gather(*map(self._cluster.broker, self._cluster.masters()), return_exceptions=True)
            for connection in self._brokers():
                try:
                    await connection.request(RequestCode.HEART_BEAT, {}, body)
                except RocketletError as error:
                    log.warning("heartbeat_failed", broker=connection.address, reason=str(error))

    # Sending

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        delay_level: int = 0,
        queue_key: str | None = None,
        queue: Queue | None = None,
        message_id: str | None = None,
    ) -> SendResult:
        """Sends one message and returns when the broker has it.

        - `queue_key`: messages with the same key go to the same queue, in order.
        - `queue`: send to this queue and no other.
        - `message_id`: how consumers recognize the message if it is sent twice. Default: a new one.

        Raises MessageIllegal, TopicNotFound, ConnectionFailed, RequestTimeout, BrokerRefused.
        """
        accumulator, queues = self._accumulator, self._queues.get(topic)
        if accumulator is not None and queues and not delay_level and self._may_join(topic, body):
            target = queue or self._of_turn(accumulator, topic, queues, queue_key)
            connection = self._greeted.get(target.broker_name)
            if connection is not None and connection.is_open:
                if not connection.is_writable:
                    await connection.writable()
                key = message_id or self._keys.next(int(time.time() * 1000))
                text = _properties(tag, keys, properties, key, 0)
                future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
                accumulator.add(connection, target, (future, key, body, text, queue_key, queue))
                return await future
        ext, wire_body, key = self._prepared(topic, body, tag, keys, properties, delay_level, message_id)
        answer, target = await self._send(topic, RequestCode.SEND_MESSAGE_V2, ext, wire_body, queue_key, queue)
        return _result(answer, key, target)

    def _answered(self, batch: Batch, answer: Frame | Exception) -> None:
        """Gives each message of a batch its result, or tries again, each message for itself."""
        if isinstance(answer, Frame) and answer.code in _STORED:
            offset_ids = str(answer.ext["msgId"]).split(",")
            first, status, queue = int(answer.ext["queueOffset"]), _STORED[answer.code], batch.queue
            for number, (future, key, *_) in enumerate(batch.messages):
                if not future.done():
                    future.set_result(SendResult(key, offset_ids[number], queue, first + number, status))
            return
        if isinstance(answer, Frame):
            answer = BrokerRefused(RequestCode.SEND_BATCH_MESSAGE, answer.code, answer.remark, batch.connection.address)
        for message in batch.messages:
            task = asyncio.create_task(self._settle(batch, message, answer))
            self._resending.add(task)
            task.add_done_callback(self._resending.discard)

    async def _settle(self, batch: Batch, message: Pending, error: Exception) -> None:
        """A message whose batch failed: the tries that are left, alone, or the error."""
        topic = batch.queue.topic
        future, key, body, text, queue_key, queue = message
        # a fault of one message refuses all: alone, each gets its own answer
        is_anothers = len(batch.messages) > 1 and isinstance(error, BrokerRefused) and error.code in _OF_ONE_MESSAGE
        tries = 1 if is_anothers else self._retries
        timeout_s = batch.sent_s + self._timeout_s - time.monotonic()
        try:
            if not tries or timeout_s <= 0 or not (is_anothers or _may_help(error)):
                raise error
            if not is_anothers:
                log.info("send_failed", queue=str(batch.queue), reason=str(error), hint="trying again")
                await self._look_again(topic)
            ext = self._header(topic, text, int(time.time() * 1000))
            code, failed = RequestCode.SEND_MESSAGE_V2, None if is_anothers else batch.queue
            answer, target = await self._send(topic, code, ext, body, queue_key, queue, failed, tries, timeout_s)
            if not future.done():
                future.set_result(_result(answer, key, target))
        except Exception as failure:
            if not future.done():
                future.set_exception(failure)

    def _may_join(self, topic: str, body: bytes) -> bool:
        """Whether a message may travel with others. A compressed one may not, and brokers take no batch for a retry topic."""
        if type(body) is not bytes or not body:
            _checked(body)
        return len(body) < self._join_below_bytes and topic[0] != "%"

    def _of_turn(self, accumulator: Accumulator, topic: str, queues: list[Queue], queue_key: str | None) -> Queue:
        """The queue of a key; without one that of all messages of this turn, so that they travel together."""
        if queue_key is not None:
            return self._choose(queues, queue_key, None)
        queue = accumulator.queue_of_turn.get(topic)
        if queue is None:
            queue = accumulator.queue_of_turn[topic] = self._choose(queues, None, None)
        return queue

    @asynccontextmanager
    async def transaction(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_key: str | None = None,
    ) -> AsyncIterator[SendResult]:
        """Sends a message that consumers see once the block has ended, and never if the block raises.

            async with producer.transaction("orders", body, keys=order_id):
                await database.commit_order(order_id)

        If the process dies inside the block, the broker asks a producer of the group, whose `check` must know the outcome.
        Before the block runs it raises what `send` raises, and ConfigError for a producer without `check`.
        """
        if self._transactions is None:
            raise ConfigError("check: a producer of transactions needs one, to answer what became of a message")
        ext, wire_body, key = self._prepared(topic, body, tag, keys, properties, 0)
        ext["i"] = half_properties(str(ext["i"]), self.group)
        ext["f"] = int(ext["f"]) | SYS_TRANSACTION_PREPARED
        answer, target = await self._send(topic, RequestCode.SEND_MESSAGE_V2, ext, wire_body, queue_key, None)
        half = _result(answer, key, target)
        commits = False
        try:
            yield half
            commits = True
        finally:
            await self._transactions.end(half.queue, half.queue_offset, half.offset_id, key, commits=commits)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[Outgoing | bytes],
        *,
        queue_key: str | None = None,
        queue: Queue | None = None,
    ) -> SendResult:
        """Sends messages to one queue in one request. Either all are stored, next to each other, or none is.

        Raises what `send` raises, and MessageIllegal for delayed messages and for more than 4 MiB in all.
        """
        fault = _topic_fault(topic)
        if fault:
            raise MessageIllegal(fault)
        now_ms = int(time.time() * 1000)
        ids: list[str] = []
        entries: list[BatchEntry] = []
        for item in messages:
            message = Outgoing(item) if isinstance(item, bytes) else item
            if message.delay_level:
                raise MessageIllegal("a batch cannot be delayed; send delayed messages one by one")
            ids.append(message.message_id or self._keys.next(now_ms))
            text = _properties(message.tag, message.keys, message.properties, ids[-1], 0)
            entries.append(BatchEntry(message.flag, _checked(message.body), text))
        if not entries:
            raise MessageIllegal("the batch is empty")
        body = encode_batch(entries)
        if len(body) > MAX_BODY_BYTES:
            raise MessageIllegal(f"the batch has {len(body)} bytes; {MAX_BODY_BYTES} are allowed, send several")
        ext = self._header(topic, "", now_ms, batch=True)
        answer, target = await self._send(topic, RequestCode.SEND_BATCH_MESSAGE, ext, body, queue_key, queue)
        return _result(answer, ",".join(ids), target)

    async def queue_for(self, topic: str, queue_key: str) -> Queue:
        """The queue for messages with this key, until the topic gets other queues. Raises TopicNotFound."""
        return self._choose(await self._find_queues(topic), queue_key, None)

    async def send_oneway(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_key: str | None = None,
    ) -> None:
        """Sends without an answer: fast, but perhaps lost. Raises MessageIllegal, TopicNotFound, ConnectionFailed."""
        ext, wire_body, _ = self._prepared(topic, body, tag, keys, properties, 0)
        target = self._choose(await self._find_queues(topic), queue_key, None)
        connection = await self._connect(target)
        connection.oneway(RequestCode.SEND_MESSAGE_V2, {**ext, "e": target.queue_id}, wire_body)

    def _prepared(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        keys: str | Sequence[str],
        properties: Mapping[str, str] | None,
        delay_level: int,
        message_id: str | None = None,
    ) -> tuple[dict[str, ExtValue], bytes, str]:
        """Header fields but the queue, the body as it travels, and the message's key."""
        if topic not in self._queues:
            fault = _topic_fault(topic)
            if fault:
                raise MessageIllegal(fault)
        if type(body) is not bytes or not 0 < len(body) <= MAX_BODY_BYTES:
            _checked(body)
        now_ms = int(time.time() * 1000)
        key = message_id or self._keys.next(now_ms)
        text = _properties(tag, keys, properties, key, delay_level)
        sys_flag = 0
        if len(body) >= self._compress_over_bytes:
            packed, packed_flag = compressed(body)
            if len(packed) < len(body):  # what does not shrink is sent as it is: compression would make it larger
                body, sys_flag = packed, packed_flag
        return self._header(topic, text, now_ms, sys_flag), body, key

    def _header(
        self, topic: str, text: str, now_ms: int, sys_flag: int = 0, flag: int = 0, *, batch: bool = False
    ) -> dict[str, ExtValue]:
        """SEND_MESSAGE_V2's fields but the queue; spelled out, because it is made per message."""
        return {
            "a": self.group,
            "b": topic,
            "c": names.DEFAULT_TOPIC,
            "d": self._default_queues,
            "f": sys_flag,
            "g": now_ms,
            "h": flag,
            "i": text,
            "j": 0,
            "k": False,
            "m": batch,
        }

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
    ) -> tuple[Frame, Queue]:
        """The answer, and the queue. `failed`, `tries`, `timeout_s`: what a first try has left."""
        tries, timeout_s = tries or self._retries + 1, timeout_s or self._timeout_s
        end_s = time.monotonic() + timeout_s
        for attempt in range(tries):
            queues = self._queues.get(topic) or await self._find_queues(topic)
            target = queue or self._choose(queues, queue_key, failed)
            ext["e"] = target.queue_id
            try:
                connection = self._greeted.get(target.broker_name)
                if connection is None or not connection.is_open:
                    connection = await self._connect(target)
                if not connection.is_writable:
                    await connection.writable()
                if self._accumulator is not None:  # what was sent before goes first
                    self._accumulator.flush()
                answer = await connection.ask(code, ext, body, timeout_s)
                if answer.code and answer.code not in _STORED:
                    raise BrokerRefused(code, answer.code, answer.remark, connection.address)
            except (ConnectionFailed, RequestTimeout, BrokerRefused) as error:
                timeout_s = end_s - time.monotonic()
                if attempt == tries - 1 or timeout_s <= 0 or not _may_help(error):
                    raise
                log.info("send_failed", queue=str(target), reason=str(error), hint="trying again")
                failed = target
                await self._look_again(topic)
                continue
            return answer, target
        raise AssertionError("the last attempt returns or raises")

    async def _find_queues(self, topic: str) -> list[Queue]:
        queues = self._queues.get(topic)
        if queues is None:
            queues = await self._cluster.route_to_publish(topic, self._default_queues)
            if self._cluster.route(topic) is not None:  # until the topic exists, ask again
                self._queues[topic] = queues
        return queues

    async def _look_again(self, topic: str) -> None:
        """A send failed: asks for the route, which may have changed."""
        self._queues.pop(topic, None)
        try:
            await self._cluster.find_route(topic)
        except RocketletError as error:
            log.info("route_not_refreshed", topic=topic, reason=str(error))

    async def _connect(self, queue: Queue) -> Connection:
        """The connection to a queue's broker, which the broker knows by a heartbeat as this producer's."""
        connection = await self._cluster.broker(queue.broker_name)
        if self._greeted.get(queue.broker_name) is not connection:
            self._greeted[queue.broker_name] = connection
            body = bodies.encode_heartbeat(Heartbeat(self.client_id, producer_groups=(self.group,)))
            await connection.request(RequestCode.HEART_BEAT, {}, body)
        return connection

    def _choose(self, queues: list[Queue], queue_key: str | None, failed: Queue | None) -> Queue:
        """By key, or in turn; after a failure on another broker if there is one."""
        if queue_key is not None:
            if not isinstance(queue_key, str):
                raise MessageIllegal(f"the queue key {queue_key!r} is not a text; use str({queue_key!r})")
            return queues[zlib.crc32(queue_key.encode()) % len(queues)]
        self._turn = turn = self._turn + 1
        if failed is not None:
            others = [queue for queue in queues if queue.broker_name != failed.broker_name]
            queues = others or queues
        return queues[turn % len(queues)]

    def _forget_queues(self, topic: str) -> None:
        self._queues.pop(topic, None)


def _may_help(error: Exception) -> bool:
    """Whether another try may succeed."""
    if isinstance(error, BrokerRefused):
        return error.code in _WORTH_ANOTHER
    return isinstance(error, ConnectionFailed | RequestTimeout)


def _result(answer: Frame, key: str, queue: Queue) -> SendResult:
    ext = answer.ext
    queue_id = int(ext["queueId"])
    if queue_id != queue.queue_id:
        queue = queue._replace(queue_id=queue_id)
    return SendResult(key, str(ext["msgId"]), queue, int(ext["queueOffset"]), _STORED[answer.code])


def _checked(body: bytes) -> bytes:
    if not isinstance(body, bytes):
        raise MessageIllegal(f"the body is {type(body).__name__}; it must be bytes, such as text.encode()")
    if not body:
        raise MessageIllegal("the body is empty")
    if len(body) > MAX_BODY_BYTES:
        raise MessageIllegal(f"the body has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
    return body


def _properties(
    tag: str | None,
    keys: str | Sequence[str],
    properties: Mapping[str, str] | None,
    unique_key: str,
    delay_level: int,
) -> str:
    """The properties' text. Raises MessageIllegal."""
    text = f"UNIQ_KEY\x01{_plain('message id', unique_key)}"
    if tag:
        text = f"TAGS\x01{_plain('tag', tag)}\x02{text}"
    if keys:
        joined = keys if isinstance(keys, str) else _joined(keys)
        text = f"KEYS\x01{_plain('keys', joined)}\x02{text}"
    if delay_level:
        if not isinstance(delay_level, int) or delay_level < 0:
            raise MessageIllegal(f"the delay level is {delay_level!r}; 1 to 18 delay, 0 does not")
        text = f"DELAY\x01{delay_level}\x02{text}"
    if properties:
        if not isinstance(properties, Mapping):
            raise MessageIllegal(f"the properties {properties!r} are not a mapping of texts")
        fault = props.reserved_fault(properties)
        if fault:
            raise MessageIllegal(fault)
        text = f"{text}\x02{props.encode(properties)}"
    if len(text) * 4 > _PROPERTY_BYTES and len(text.encode()) > _PROPERTY_BYTES:
        raise MessageIllegal(f"the properties have {len(text.encode())} bytes; {_PROPERTY_BYTES} are allowed")
    return text


def _topic_fault(topic: str) -> str | None:
    return names.topic_fault(topic) if isinstance(topic, str) else f"the topic {topic!r} is not a text"


def _joined(keys: Sequence[str]) -> str:
    if not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in keys):
        raise MessageIllegal(f"the keys {keys!r} are neither a text nor texts; use str(...)")
    return " ".join(keys)


def _plain(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise MessageIllegal(f"the {name} {text!r} is not a text; use str({text!r})")
    if not text.strip() or "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"the {name} {text!r} may neither be blank nor hold U+0001 or U+0002")
    return text
