"""The sinks: rows become messages, for batch and streaming writes."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import uvloop
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from ..client.errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..client.message import Outgoing, SendResult
from ..client.producer import Producer
from ..client.sending.accumulator import (
    PROPERTY_BYTES,
    UniqueKeys,
    check_topic,
    checked_body,
    checked_id,
    properties_text,
)
from ..host.memory import keep_freed
from ..protocol import properties as props
from ..protocol.codes import ResponseCode
from ..protocol.config import MAX_BODY_BYTES
from ..protocol.frame import Frame
from ..protocol.names import Queue
from .config import FIRST_RETRY_S, LANES, LAST_RETRY_S, MAX_DELAY_LEVEL, PIECE_BYTES, SHOWN_BYTES, SHOWN_CHARS
from .options import WriteOptions
from .share import FailureTimeout
from .worker import plainly

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# Rows as messages, for `write`; `stream_sink.py` uses the same functions for `writeStream`.
#
# Each row of a write that succeeds is stored at least once, and possibly several times, because a task that Spark retries,
# or a batch that a restarted query runs again, sends its rows again. Rows with a messageId keep their id, so that readers
# can recognize duplicates.


T = TypeVar("T")
Target = tuple[str, Queue | None]
"""A topic, and the queue if the row chooses one."""
Work = Callable[[], Coroutine[Any, Any, None]]
_PASSING: Final = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)


@dataclass
class Sent(WriterCommitMessage):
    """Numbers of messages that one task has sent."""

    messages: int = 0
    body_bytes: int = 0
    illegal: int = 0
    """Number of rows among them that were sent to the topic of illegal rows."""


class RocketletWriter(DataSourceArrowWriter):
    """Writer of `write`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of a task, on an executor. Raises RocketletError; Spark then fails the task, and may retry it."""
        with plainly():
            return send_all(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        log.info("rows_written", **total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the failure. Messages that tasks have sent stay stored."""
        log.warning(
            "write_failed",
            **total(messages),
            hint="rows that were sent stay stored, and a further attempt sends them again",
        )


def total(messages: Sequence[WriterCommitMessage | None]) -> dict[str, int]:
    """Return the totals of all tasks, for the log."""
    sent = [message for message in messages if isinstance(message, Sent)]
    return {
        "tasks": len(sent),
        "messages": sum(item.messages for item in sent),
        "bytes": sum(item.body_bytes for item in sent),
        "illegal": sum(item.illegal for item in sent),
    }


def send_all(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Sent:
    """Send the rows of all batches, and return their numbers after brokers have stored them. Raises RocketletError."""
    keep_freed()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def start() -> Producer:
            """Start a new producer for each attempt, because a producer can be started only once."""
            return await Producer(
                options.connect.name_server,
                options.group,
                timeout_s=options.timeout_s,
                retries=options.retries,
                access=options.connect.access,
            ).__aenter__()

        producer = runner.run(_with_retries(start, options))
        sender = _Sender(options, producer)
        try:
            for batch in batches:  # read outside of the event loop, because Spark's iterator blocks
                runner.run(sender.send(batch))
            runner.run(sender.flush())
        finally:
            runner.run(sender.stop())
            runner.run(producer.__aexit__())
        return sender.sent


async def _with_retries(work: Callable[[], Awaitable[T]], options: WriteOptions) -> T:
    """Return the result of `work`, retried for `delivery_timeout_s` while brokers or name servers are unreachable or busy, or
    a topic is not found. Raises RocketletError."""
    failing, delay_s = FailureTimeout(options.delivery_timeout_s), FIRST_RETRY_S
    while True:
        try:
            return await work()
        except (ConnectionFailed, RequestTimeout, TopicNotFound, BrokerRefused) as error:
            if isinstance(error, BrokerRefused) and error.code not in _PASSING:
                raise
            if failing.is_over():
                raise RocketletError(
                    f"rows could not be sent, tried for {options.delivery_timeout_s:.0f} s (deliveryTimeoutMs): {error}"
                ) from error
            log.info("send_failed", reason=str(error), hint="the send is retried")
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, LAST_RETRY_S)


class _Sender:
    """Sender of batches, one of which is in flight while Spark makes the next one."""

    def __init__(self, options: WriteOptions, producer: Producer) -> None:
        self._options = options
        self._producer = producer
        self._ids = MessageIds()
        self._sends: list[asyncio.Task[None]] = []
        self.sent = Sent()

    async def send(self, batch: pa.RecordBatch) -> None:
        """Wait until all earlier rows are stored, and start to send these, so that rows with the same queueKey stay in
        order.

        Raises:
            RocketletError: an earlier row could not be sent
            MessageIllegal: a row is illegal, and there is no topic for illegal rows
        """
        begins = range(0, batch.num_rows, max(PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1), 1))
        for begin in begins:
            works = await self._sends_of(batch.slice(begin, begins.step))
            await self.flush()
            self._sends = [asyncio.ensure_future(work()) for work in works]
            await asyncio.sleep(0)  # let the new tasks send their requests

    async def flush(self) -> None:
        """Wait until the rows of all sends that were started are stored. Raises RocketletError."""
        sends, self._sends = self._sends, []
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if failure is not None:
                raise failure

    async def stop(self) -> None:
        """Cancel sends that are in flight."""
        for send in self._sends:
            send.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)

    async def _sends_of(self, batch: pa.RecordBatch) -> list[Work]:
        """Return the sends that may run concurrently: one per queue for rows that choose a queue, up to `LANES` per topic for
        other rows, one for each delayed row, and one for all illegal rows. Raises MessageIllegal."""
        batch, unreadable = as_ours(batch)
        entries = to_entries(batch, self._ids)
        targets, codes = await self._targets(batch)
        is_wrong = np.array([isinstance(target, MessageIllegal) for target in targets])
        faulty = entries.faulty | unreadable | is_wrong[codes] | _has_wrong_delay(batch)
        sends: list[Work] = []
        if faulty.any():
            sends.append(partial(self._divert, self._illegal(batch, faulty, targets, codes)))
        order = np.argsort(np.where(faulty, len(targets), codes), kind="stable")
        bounds = np.searchsorted(codes[order[: len(order) - int(faulty.sum())]], np.arange(len(targets) + 1))
        late = _is_late(batch)
        for target, begin, end in zip(targets, bounds[:-1], bounds[1:], strict=True):
            if isinstance(target, MessageIllegal):
                continue
            chosen = order[begin:end]
            if late is not None:
                sends += [
                    partial(self._send_alone, *target, batch.slice(row, 1)) for row in chosen[late[chosen]].tolist()
                ]
                chosen = chosen[~late[chosen]]
            whole = len(chosen) == batch.num_rows
            sends += self._sends_to(
                *target,
                batch if whole else batch.take(pa.array(chosen)),
                entries if whole else entries.take(chosen),
            )
        return sends

    def _sends_to(self, topic: str, queue: Queue | None, batch: pa.RecordBatch, entries: Entries) -> list[Work]:
        bounds, octets = entries.bounds(), entries.octets()
        sends: list[Work] = []
        begin = 0
        while begin < len(bounds) - 1:
            end = int(np.searchsorted(bounds, bounds[begin] + self._options.batch_bytes, "right")) - 1
            if end <= begin + 1:  # a single message is sent by the producer, which may compress it
                end = begin + 1
                sends.append(partial(self._send_alone, topic, queue, batch.slice(begin, 1)))
            else:
                body = octets[bounds[begin] : bounds[end]]
                size = int(entries.body_sizes[begin:end].sum())
                sends.append(partial(self._send_together, topic, queue, body, end - begin, size))
            begin = end
        lanes = min(LANES, len(sends)) if queue is None else 1
        return [partial(_in_sequence, sends[lane::lanes]) for lane in range(lanes)]

    def _illegal(
        self, batch: pa.RecordBatch, faulty: Array, targets: list[Target | MessageIllegal], codes: Array
    ) -> list[Outgoing]:
        """Return messages for the topic of illegal rows, one for each faulty row. Raises MessageIllegal if there is no such
        topic."""
        diverted: list[Outgoing] = []
        for number in np.flatnonzero(faulty).tolist():
            target, row = targets[codes[number]], batch.slice(number, 1)
            fault = target if isinstance(target, MessageIllegal) else _fault(row)
            (values,) = row.to_pylist()
            if self._options.illegal_rows_topic is None:
                named = f"keys {values.get('keys')}, messageId {values.get('messageId')}"[:SHOWN_CHARS]
                raise MessageIllegal(f"{fault}; correct or filter such rows, or set illegalRowsTopic ({named})")
            diverted.append(illegal_row(values, str(fault)))
        return diverted

    async def _divert(self, rows: list[Outgoing]) -> None:
        topic = self._options.illegal_rows_topic or ""
        for row in rows:
            await self._send_one(topic, None, row)
        self.sent.illegal += len(rows)

    async def _targets(self, batch: pa.RecordBatch) -> tuple[list[Target | MessageIllegal], Array]:
        """Return the distinct targets of the rows, or errors in their place, and the index of each row's target. Raises
        RocketletError."""
        columns = [_distinct(batch, name) for name in ("topic", "queueKey", "queueId", "brokerName")]
        code = np.zeros(batch.num_rows, np.int64)
        for values, codes in columns:
            code = code * len(values) + codes
        _, rows, codes = np.unique(code, return_index=True, return_inverse=True)
        named = [[values[found[row]] for values, found in columns] for row in rows.tolist()]

        async def find_all() -> list[Target | MessageIllegal]:
            return [await self._target(*names) for names in named]

        found = await _with_retries(find_all, self._options)
        targets = {target: number for number, target in enumerate(dict.fromkeys(found))}
        return list(targets), np.array([targets[target] for target in found], np.int64)[codes]

    async def _target(
        self, topic: str | None, key: str | None, queue_id: int | None, broker_name: str | None
    ) -> Target | MessageIllegal:
        topic = topic or self._options.topic
        if not topic:
            return MessageIllegal("a row's topic is null; give the option topic")
        try:
            check_topic(topic)
        except MessageIllegal as error:
            return error
        if queue_id is None:
            return topic, None if key is None else await self._producer.queue_for(topic, key)
        found = [
            queue
            for queue in await self._producer.queues(topic)
            if queue.queue_id == queue_id and broker_name in (None, queue.broker_name)
        ]
        if len(found) == 1:
            return topic, found[0]
        where = f"queueId is {queue_id}" + (f", brokerName {broker_name}" if broker_name else "")
        fault = "several brokers have one: give brokerName" if found else f"{topic} has no such queue to send to"
        return MessageIllegal(f"a row's {where}; {fault}")

    async def _send_together(self, topic: str, queue: Queue | None, body: memoryview, count: int, size: int) -> None:
        octets = bytes(body)

        def send() -> Awaitable[tuple[Frame, Queue]]:
            return self._producer.send_entries(topic, octets, queue=queue, ids=False)

        await _with_retries(send, self._options)
        self._count(count, size)

    async def _send_alone(self, topic: str, queue: Queue | None, row: pa.RecordBatch) -> None:
        await self._send_one(topic, queue, _message(row))

    async def _send_one(self, topic: str, queue: Queue | None, message: Outgoing) -> None:
        def send() -> Awaitable[SendResult]:
            return self._producer.send(
                topic,
                message.body,
                tag=message.tag,
                keys=message.keys,
                properties=message.properties,
                delay_level=message.delay_level,
                queue=queue,
                message_id=message.message_id,
            )

        await _with_retries(send, self._options)
        self._count(1, len(message.body))

    def _count(self, messages: int, body_bytes: int) -> None:
        self.sent.messages += messages
        self.sent.body_bytes += body_bytes


def _fault(row: pa.RecordBatch) -> MessageIllegal:
    """Return the reason why a row cannot be sent."""
    try:
        message = _message(row)
        checked_body(message.body)
        message_id = checked_id(message.message_id) if message.message_id else "-"
        properties_text(message.tag, message.keys, message.properties, message_id, "")
    except MessageIllegal as error:
        return error
    return MessageIllegal("a row's key or one of its headers is not UTF-8, as RocketMQ's keys and properties are")


def _message(row: pa.RecordBatch) -> Outgoing:
    """Return a row as a message. Raises MessageIllegal."""
    (values,) = row.to_pylist()
    body, delay_level = values["body"], values.get("delayLevel") or 0
    if body is None:
        raise MessageIllegal("a row's body is null")
    if not 0 <= delay_level <= MAX_DELAY_LEVEL:
        raise MessageIllegal(f"a row's delayLevel is {delay_level}; allowed: 0 to {MAX_DELAY_LEVEL}, or null")
    return Outgoing(
        body.encode() if isinstance(body, str) else body,
        values.get("tags") or None,
        values.get("keys") or (),
        {name: value for name, value in values.get("properties") or () if name not in props.RESERVED},
        delay_level,
        message_id=values.get("messageId") or None,
    )


def _is_late(batch: pa.RecordBatch) -> Array | None:
    """Return which rows are delayed; None if no row is."""
    levels = _delay_levels(batch)
    return levels != 0 if levels is not None and levels.any() else None


def _has_wrong_delay(batch: pa.RecordBatch) -> Array:
    levels = _delay_levels(batch)
    return np.zeros(batch.num_rows, bool) if levels is None else (levels < 0) | (levels > MAX_DELAY_LEVEL)


def _delay_levels(batch: pa.RecordBatch) -> Array | None:
    """Return the delay levels of rows; None if there is no such column."""
    return None if "delayLevel" not in batch.schema.names else batch.column("delayLevel").fill_null(0).to_numpy()


def _distinct(batch: pa.RecordBatch, name: str) -> tuple[list[Any], Array]:
    """Return the distinct values of a column, and the index of each row's value."""
    if name not in batch.schema.names:
        return [None], np.zeros(batch.num_rows, np.int64)
    coded = batch.column(name).dictionary_encode("encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


async def _in_sequence(works: Sequence[Work]) -> None:
    for work in works:
        await work()


# ------------------------------------------------------------------------------
# Columns of rows that are written: their meaning, and the translation of the columns of Spark's Kafka connector.


_TEXT: Final = (StringType,)
_OCTETS: Final = (BinaryType, StringType)
_NUMBER: Final = (IntegerType, LongType, ShortType)
COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "topic": ("STRING: the topic to send to; or set the option topic", _TEXT),
    "body": ("BINARY or STRING, not empty", _OCTETS),
    "keys": ("ARRAY<STRING>, or STRING with spaces between the keys", (StringType, ArrayType)),
    "tags": ("STRING: the message's tag", _TEXT),
    "properties": ("MAP<STRING, STRING>; RocketMQ's own names in it are skipped", (MapType,)),
    "delayLevel": ("INT: 1 to 18, delivered later; 0 or null: immediately", _NUMBER),
    "queueKey": ("STRING: rows of a task with the same topic and queueKey are sent to the same queue, in order", _TEXT),
    "queueId": ("INT: the id of the queue to send to; null for any queue", _NUMBER),
    "brokerName": ("STRING: the broker of the queue; required with queueId if several brokers have the topic", _TEXT),
    "messageId": ("STRING: the message's unique key, kept when the row is sent again", _TEXT),
}
KAFKA_SINK_COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "value": ("as body", _OCTETS),
    "key": ("as keys and queueKey", _OCTETS),
    "headers": ("as properties, ARRAY<STRUCT<key: STRING, value: BINARY>>", (ArrayType,)),
    "partition": ("as queueId", _NUMBER),
}
_OURS: Final = {"value": ("body",), "key": ("keys", "queueKey"), "headers": ("properties",), "partition": ("queueId",)}
_NO_TEXT: Final = object()


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Check that rows with this schema can become messages. Raises ConfigError."""
    all_columns = COLUMNS | KAFKA_SINK_COLUMNS
    known = "; ".join(f"{name} ({meaning})" for name, (meaning, _) in all_columns.items())
    for column in schema.fields:
        meaning, types = all_columns.get(column.name, ("", ()))
        if not types:
            raise ConfigError(f"the column {column.name} is not a column of a message; drop it. Columns: {known}")
        if not isinstance(column.dataType, types):
            raise ConfigError(f"the column {column.name} is {column.dataType.simpleString()}; allowed: {meaning}")
    for kafkas, ours in _OURS.items():
        both = [name for name in ours if name in schema.names]
        if kafkas in schema.names and both:
            raise ConfigError(f"the columns {kafkas} and {both[0]} mean the same; drop one of them")
    if "body" not in schema.names and "value" not in schema.names:
        raise ConfigError(f"a column body is missing. Columns: {known}")
    if "topic" not in schema.names and options.topic is None:
        raise ConfigError("rows have no topic; add a column topic, or set the option topic")


def as_ours(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Array]:
    """Return the rows with RocketMQ's columns, and which rows have a key or a header that is not UTF-8."""
    unreadable = np.zeros(batch.num_rows, bool)
    if not KAFKA_SINK_COLUMNS.keys() & set(batch.schema.names):
        return batch, unreadable
    columns: dict[str, Array] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        found = column
        if name == "key":
            found, wrong = _header_texts(column)
            unreadable |= wrong
        elif name == "headers":
            found, wrong = _header_properties(column)
            unreadable |= wrong
        columns |= dict.fromkeys(_OURS.get(name, (name,)), found)
    return pa.RecordBatch.from_pydict(columns), unreadable


def _header_texts(column: Array) -> tuple[Array, Array]:
    """Return bytes decoded as UTF-8, and which of them are not UTF-8; these become empty."""
    try:
        return column.cast(pa.string()), np.zeros(len(column), bool)
    except pa.ArrowInvalid:
        texts = [None if octets is None else _text(octets) for octets in column.to_pylist()]
        wrong = np.array([text is _NO_TEXT for text in texts])
        return pa.array(["" if text is _NO_TEXT else text for text in texts], pa.string()), wrong


def _text(octets: bytes) -> str | object:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return _NO_TEXT


def _header_properties(headers: Array) -> tuple[Array, Array]:
    """Return Kafka's headers as a map, and which rows have a header whose value is not UTF-8."""
    owners, items = pc.list_parent_indices(headers).to_numpy(), pc.list_flatten(headers)
    values, wrong = _header_texts(items.field(1))
    bounds = np.searchsorted(owners, np.arange(len(headers) + 1)).astype(np.int32)
    unreadable = np.zeros(len(headers), bool)
    unreadable[owners[wrong]] = True
    return pa.MapArray.from_arrays(pa.array(bounds), items.field(0), values), unreadable


def illegal_row(values: dict[str, Any], reason: str) -> Outgoing:
    """Return a JSON message with the values of a row that cannot be sent. Bytes that are not UTF-8 become base64, and long
    texts are cut. If the message is still too large, each value becomes its first `SHOWN_CHARS` characters."""
    shown = orjson.dumps({name: _shown(value) for name, value in values.items()}, default=_shown)
    if len(shown) > MAX_BODY_BYTES:  # several long texts, escaped characters, or properties, which are not cut
        shown = orjson.dumps({name: str(value)[:SHOWN_CHARS] for name, value in values.items()})
    text = re.sub(f"[{props.NAME_END}{props.PAIR_END}]", " ", reason)[: SHOWN_CHARS * 5]
    return Outgoing(shown, "illegal", (), {"reason": text})


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        cut = value[:SHOWN_BYTES]
        text = _text(cut)
        return {"base64": b64encode(cut).decode()} if text is _NO_TEXT else text
    return value[:SHOWN_BYTES] if isinstance(value, str | list) else value


# ------------------------------------------------------------------------------
# Rows as the entries of message batches, without a Python object per row.
#
# The body of SEND_BATCH_MESSAGE is a sequence of entries: a head, the message body, the length of the encoded
# properties, and the encoded properties (`encode_batch` in `protocol/message.py`). Each part of all rows is one Arrow
# column. Arrow joins the columns, and the data of the joined column are the concatenated entries of all rows.


Array = Any  # numpy and Arrow arrays; Arrow ships no type stubs

_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">u4"), ("crc", ">u4"), ("flag", ">i4"), ("body_size", ">i4")])
_TEXT_SIZE: Final = np.dtype(">i2")
_RESERVED: Final = pa.array(sorted(props.RESERVED))
_JOINED: Final = pa.scalar(b"", pa.binary())
_ID_BYTES: Final = 32


class MessageIds:
    """Generator of message ids, in the form of the client's `UniqueKeys`, many at a time.

    Time and counter are one number, so that no id is repeated when the counter overflows.
    """

    def __init__(self) -> None:
        keys = UniqueKeys()
        self._prefix = np.frombuffer(keys.prefix.encode(), np.uint8)
        self._began_ms = keys.month_began_ms
        self._next = 0

    def generate(self, count: int) -> Array:
        """Return new ids as a binary array."""
        now_ms = int(time.time() * 1000) - self._began_ms & 0x7FFFFFFF
        first = max(self._next, now_ms << 16)
        self._next = first + count
        numbers = np.arange(first, first + count, dtype=">u8").tobytes().hex().upper().encode()
        ids = np.empty((count, _ID_BYTES), np.uint8)
        ids[:, : len(self._prefix)] = self._prefix
        ids[:, len(self._prefix) :] = np.frombuffer(numbers, np.uint8).reshape(count, 16)[:, 4:]
        return _fixed(ids, _ID_BYTES)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of rows.

    Attributes:
        data: the entry of each row, as a binary array
        body_sizes: size of each body in bytes
        faulty: True for each row that cannot be sent
    """

    data: Array
    body_sizes: Array
    faulty: Array

    def take(self, order: Array) -> Entries:
        return Entries(self.data.take(pa.array(order)), self.body_sizes[order], self.faulty[order])

    def bounds(self) -> Array:
        """Return the position of each entry in the bytes of all, and the end of the last one."""
        offsets = np.frombuffer(self.data.buffers()[1], np.int32)
        return offsets[self.data.offset : self.data.offset + len(self.data) + 1]

    def octets(self) -> memoryview:
        return memoryview(self.data.buffers()[2] or b"")


def to_entries(batch: pa.RecordBatch, ids: MessageIds) -> Entries:
    """Return the entries of rows whose columns `check_columns` has accepted. The entry of a faulty row must not be
    sent."""
    count = batch.num_rows
    bodies = _column(batch, "body", pa.binary())
    body_sizes = _sizes(bodies)
    faulty = (body_sizes == 0) | (body_sizes > MAX_BODY_BYTES)
    texts = _texts(batch, ids, faulty)
    text_sizes = _sizes(texts)
    faulty |= text_sizes > PROPERTY_BYTES
    heads = np.zeros(count, _HEAD)
    heads["size"] = _HEAD.itemsize + _TEXT_SIZE.itemsize + body_sizes + text_sizes
    heads["body_size"] = body_sizes
    sizes = np.minimum(text_sizes, PROPERTY_BYTES).astype(_TEXT_SIZE)
    parts = [_fixed(heads, _HEAD.itemsize), _filled(bodies), _fixed(sizes, _TEXT_SIZE.itemsize), texts]
    return Entries(pc.binary_join_element_wise(*parts, _JOINED), body_sizes, faulty)


def _texts(batch: pa.RecordBatch, ids: MessageIds, faulty: Array) -> Array:
    """Return the encoded properties, like `properties_text` of the client, as a binary array. Mark rows as faulty that
    `properties_text` rejects."""
    parts: list[Array] = []
    for name, column in ((props.KEYS, _keys(batch, faulty)), (props.TAGS, _column(batch, "tags", pa.string()))):
        if column is not None and column.null_count < len(column):
            parts.append(_named(name, column, faulty, props.PAIR_END))
    made = ids.generate(batch.num_rows)
    given = _column(batch, "messageId", pa.string())
    if given is not None:
        given = _checked(given, faulty).cast(pa.binary())
        made = pc.if_else(pc.greater(_filled(pc.binary_length(given), 0), 0), given, made)
    parts += [pa.scalar((props.UNIQUE_KEY + props.NAME_END).encode()), made]
    others = _properties(batch, faulty)
    if others is not None:
        parts.append(others)
    return pc.binary_join_element_wise(*parts, _JOINED)


def _column(batch: pa.RecordBatch, name: str, kind: Any) -> Array | None:
    return batch.column(name).cast(kind) if name in batch.schema.names else None


def _keys(batch: pa.RecordBatch, faulty: Array) -> Array | None:
    """Return the keys, separated by spaces."""
    if "keys" not in batch.schema.names:
        return None
    keys = batch.column("keys")
    if not pa.types.is_list(keys.type):
        return keys.cast(pa.string())
    joined = pc.binary_join(keys.cast(pa.list_(pa.string())), " ")
    # A list with a null key joins to null, and a list with an empty key to an empty text. Rows with either list have
    # keys, but no valid ones.
    faulty |= _true(pc.greater(pc.list_value_length(keys), 0)) & (_sizes(joined) == 0)
    return joined


def _named(name: str, texts: Array, faulty: Array, end: str) -> Array:
    """Return the encoded property of each row; empty for a row without a text."""
    texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, pa.string()), _checked(texts, faulty))
    begin = pa.scalar((name + props.NAME_END).encode())
    return _filled(pc.binary_join_element_wise(begin, texts.cast(pa.binary()), pa.scalar(end.encode()), _JOINED))


def _checked(texts: Array, faulty: Array) -> Array:
    """Return the texts, and mark rows as faulty whose text is blank but not empty, or contains a separator."""
    faulty |= _is_illegal(texts) & (_sizes(texts) > 0)
    return texts


def _is_illegal(texts: Array) -> Array:
    """Return which texts are blank or contain a separator."""
    blank = _true(pc.equal(pc.binary_length(pc.utf8_trim_whitespace(texts)), 0))
    return blank | _true(pc.match_substring_regex(texts, f"[{props.NAME_END}{props.PAIR_END}]"))


def _properties(batch: pa.RecordBatch, faulty: Array) -> Array | None:
    """Return the encoded user properties. Each begins with the separator from the property before it."""
    if "properties" not in batch.schema.names:
        return None
    maps = batch.column("properties")
    pairs = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    owners, items = pc.list_parent_indices(pairs).to_numpy(), pc.list_flatten(pairs)
    if not len(items):
        return None
    names, values = items.field(0), items.field(1)
    kept = ~_true(pc.is_in(names, _RESERVED))
    wrong = kept & (_is_illegal(names) | _is_illegal(values) | _true(values.is_null()))
    faulty[owners[wrong]] = True
    joined = pc.binary_join_element_wise(
        pa.scalar(props.PAIR_END), names, pa.scalar(props.NAME_END), _filled(values, ""), pa.scalar("")
    )
    bounds = np.searchsorted(owners[kept], np.arange(len(maps) + 1)).astype(np.int32)
    of_rows = pa.ListArray.from_arrays(pa.array(bounds), joined.filter(pa.array(kept)))
    return pc.binary_join(of_rows, "").cast(pa.binary())


def _fixed(values: Array, size: int) -> Array:
    """Return a binary array of values of `size` bytes each."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(size)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    )


def _filled(values: Array, with_value: Any = b"") -> Array:
    return values.fill_null(with_value) if values.null_count else values


def _sizes(values: Array) -> Array:
    """Return the sizes in bytes; 0 for a null."""
    return _filled(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)


def _true(values: Array) -> Array:
    """Return booleans, with False for a null."""
    return _filled(values, False).to_numpy(zero_copy_only=False)
