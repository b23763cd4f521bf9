"""Rows as messages: `write`, and what `stream_sink` does for `writeStream`.

A message is stored at least once: a task that Spark tries again, or a batch that a restarted query runs again, sends its
rows again. Rows with a column messageId keep it, so that readers can recognize them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
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
)
from ..client.log import get_logger
from ..client.message import Outgoing, SendResult
from ..client.producer import Producer
from ..client.sending.outgoing import check_topic, checked_body, checked_id, properties_text
from ..protocol import properties as props
from ..protocol.codes import ResponseCode
from ..protocol.queue import Queue
from .config import FIRST_RETRY_S, LANES, LAST_RETRY_S, MAX_DELAY_LEVEL, PIECE_BYTES, SHOWN_CHARS
from .entries import Array, Entries, MessageIds, to_entries
from .failures import plainly
from .options import WriteOptions
from .patience import Patience

log = get_logger("rocketlet.spark")

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]
_PASSING: Final = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)
_TEXT: Final = (StringType,)
COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "topic": ("STRING: where the row goes; or set the option topic", _TEXT),
    "body": ("BINARY or STRING, not empty", (BinaryType, StringType)),
    "keys": ("ARRAY<STRING>, or STRING with spaces between the keys", (StringType, ArrayType)),
    "tags": ("STRING: the message's tag", _TEXT),
    "properties": ("MAP<STRING, STRING>; RocketMQ's own names in it are skipped", (MapType,)),
    "delayLevel": ("INT: 1 to 18, delivered later; 0 or null at once", (IntegerType, LongType, ShortType)),
    "queueKey": ("STRING: rows of a task with the same one go to the same queue, in order", _TEXT),
    "messageId": ("STRING: the message's unique key, kept when the row is sent again", _TEXT),
}


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raises ConfigError for rows that cannot become messages."""
    known = "; ".join(f"{name} ({meaning})" for name, (meaning, _) in COLUMNS.items())
    for column in schema.fields:
        meaning, types = COLUMNS.get(column.name, ("", ()))
        if not types:
            raise ConfigError(f"the column {column.name} is not a column of a message; drop it. Columns: {known}")
        if not isinstance(column.dataType, types):
            raise ConfigError(f"the column {column.name} is {column.dataType.simpleString()}; allowed: {meaning}")
    if "body" not in schema.names:
        raise ConfigError(f"a column body is missing. Columns: {known}")
    if "topic" not in schema.names and options.topic is None:
        raise ConfigError("where do rows go? Give a column topic, or the option topic")


@dataclass
class Sent(WriterCommitMessage):
    """The messages that one task has sent."""

    messages: int = 0
    body_bytes: int = 0


class RocketletWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """On an executor. Raises RocketletError; Spark then tries the task again."""
        with plainly():
            return send_all(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        log.info("rows_written", **total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Logs the failure: messages that tasks have sent cannot be taken back."""
        log.warning("write_failed", **total(messages), hint="what was sent stays, and is sent again with the next try")


def total(messages: Sequence[WriterCommitMessage | None]) -> dict[str, int]:
    """The totals of all tasks, for the log."""
    sent = [message for message in messages if isinstance(message, Sent)]
    return {
        "tasks": len(sent),
        "messages": sum(item.messages for item in sent),
        "bytes": sum(item.body_bytes for item in sent),
    }


def send_all(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Sent:
    """Sends the rows of all batches and returns when brokers have them."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def start() -> Producer:
            """A new one for each try: a producer is started once."""
            return await Producer(
                options.connect.name_server,
                options.group,
                timeout_s=options.timeout_s,
                retries=options.retries,
                access=options.connect.access,
            ).__aenter__()

        producer = runner.run(_patiently(start, options))
        sender = _Sender(options, producer)
        try:
            for batch in batches:  # taken outside of the loop: Spark's iterator blocks
                runner.run(sender.send(batch))
            runner.run(sender.settle())
        finally:
            runner.run(sender.stop())
            runner.run(producer.__aexit__())
        return sender.sent


async def _patiently(work: Callable[[], Awaitable[T]], options: WriteOptions) -> T:
    """The result of `work`, tried again while brokers or name servers are away. Raises RocketletError."""
    patience, delay_s = Patience(options.delivery_timeout_s), FIRST_RETRY_S
    while True:
        try:
            return await work()
        except (ConnectionFailed, RequestTimeout, TopicNotFound, BrokerRefused) as error:
            if isinstance(error, BrokerRefused) and error.code not in _PASSING:
                raise
            if patience.is_over():
                raise RocketletError(
                    f"rows could not be sent, tried for {options.delivery_timeout_s:.0f} s (deliveryTimeoutMs): {error}"
                ) from error
            log.info("send_failed", reason=str(error), hint="it is tried again")
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, LAST_RETRY_S)


class _Sender:
    """Sends a batch of rows while Spark makes the next one."""

    def __init__(self, options: WriteOptions, producer: Producer) -> None:
        self._options = options
        self._producer = producer
        self._ids = MessageIds()
        self._sends: list[asyncio.Task[None]] = []
        self.sent = Sent()

    async def send(self, batch: pa.RecordBatch) -> None:
        """Starts to send these rows, when those before are stored: so rows with the same key stay in order. Raises what those
        before have met, and MessageIllegal."""
        begins = range(0, batch.num_rows, max(PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1), 1))
        for begin in begins:
            piece = batch.slice(begin, begins.step)
            is_late = _is_late(piece)
            works: list[Work] = []
            if is_late is not None:
                late = list(self._messages(piece.filter(is_late)))
                works.append(partial(self._send_late, late))
                piece = piece.filter(pc.invert(is_late))
            works += await self._sends_of(piece)
            await self.settle()
            self._sends = [asyncio.ensure_future(work()) for work in works]
            await asyncio.sleep(0)  # so that they leave

    async def settle(self) -> None:
        """Waits until everything is stored. Raises RocketletError."""
        sends, self._sends = self._sends, []
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if failure is not None:
                raise failure

    async def stop(self) -> None:
        """Leaves what is still under way."""
        for send in self._sends:
            send.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)

    async def _sends_of(self, batch: pa.RecordBatch) -> list[Work]:
        """The sends that run at once: rows with keys queue by queue, others in a few lanes."""
        if not batch.num_rows:
            return []
        entries = to_entries(batch, self._ids)
        self._check(batch, entries.faulty)
        targets, codes = await self._targets(batch)
        if len(targets) == 1:
            return self._sends_to(*targets[0], batch, entries)
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(targets) + 1))
        sends: list[Work] = []
        for target, begin, end in zip(targets, bounds[:-1], bounds[1:], strict=True):
            chosen = order[begin:end]
            sends += self._sends_to(*target, batch.take(pa.array(chosen)), entries.take(chosen))
        return sends

    def _sends_to(self, topic: str, queue: Queue | None, batch: pa.RecordBatch, entries: Entries) -> list[Work]:
        bounds, octets = entries.bounds(), entries.octets()
        sends: list[Work] = []
        begin = 0
        while begin < len(bounds) - 1:
            end = int(np.searchsorted(bounds, bounds[begin] + self._options.batch_bytes, "right")) - 1
            if end <= begin + 1:  # which may be compressed, or as large as a message may be
                end = begin + 1
                sends.append(partial(self._send_alone, topic, queue, batch.slice(begin, 1)))
            else:
                body = octets[bounds[begin] : bounds[end]]
                size = int(entries.body_sizes[begin:end].sum())
                sends.append(partial(self._send_together, topic, queue, body, end - begin, size))
            begin = end
        lanes = min(LANES, len(sends)) if queue is None else 1
        return [partial(_in_turn, sends[lane::lanes]) for lane in range(lanes)]

    def _check(self, batch: pa.RecordBatch, faulty: Array) -> None:
        """Raises MessageIllegal for the first row that cannot be sent."""
        if not faulty.any():
            return
        row = batch.slice(int(faulty.argmax()), 1)
        for _, _, message in self._messages(row):
            try:
                checked_body(message.body)
                message_id = checked_id(message.message_id) if message.message_id else "-"
                properties_text(message.tag, message.keys, message.properties, message_id, "")
            except MessageIllegal as error:
                named = f"keys {message.keys}, messageId {message.message_id}"
                raise MessageIllegal(f"{error}; correct or filter such rows ({named[:SHOWN_CHARS]})") from None
        raise MessageIllegal(f"a row cannot be sent: {str(row.to_pylist())[:1000]}")

    async def _targets(self, batch: pa.RecordBatch) -> tuple[list[tuple[str, Queue | None]], Array]:
        """Topics and queues, and which of them is each row's. Raises MessageIllegal, RocketletError."""
        topics, topic_codes = _distinct(batch, "topic")
        keys, key_codes = _distinct(batch, "queueKey")
        pairs, codes = np.unique(topic_codes * len(keys) + key_codes, return_inverse=True)
        named = [(self._topic(topics[pair // len(keys)]), keys[pair % len(keys)]) for pair in pairs.tolist()]

        async def look() -> list[tuple[str, Queue | None]]:
            find = self._producer.queue_for
            return [(topic, None if key is None else await find(topic, key)) for topic, key in named]

        found = await _patiently(look, self._options)
        targets = {target: number for number, target in enumerate(dict.fromkeys(found))}
        return list(targets), np.array([targets[target] for target in found], np.int64)[codes]

    def _topic(self, topic: str | None) -> str:
        found = topic or self._options.topic
        if not found:
            raise MessageIllegal("a row's topic is null; give the option topic")
        check_topic(found)
        return found

    async def _send_together(self, topic: str, queue: Queue | None, body: memoryview, count: int, size: int) -> None:
        octets = bytes(body)
        await _patiently(lambda: self._producer.send_entries(topic, octets, queue=queue), self._options)
        self._count(count, size)

    async def _send_late(self, rows: list[tuple[str, str | None, Outgoing]]) -> None:
        """Rows with a delay, each for itself."""
        sends = []
        for topic, key, message in rows:
            queue = await self._queue_for(topic, key) if key is not None else None
            sends.append(self._send_one(topic, queue, message))
        await asyncio.gather(*sends)

    async def _queue_for(self, topic: str, key: str) -> Queue:
        return await _patiently(lambda: self._producer.queue_for(topic, key), self._options)

    async def _send_alone(self, topic: str, queue: Queue | None, row: pa.RecordBatch) -> None:
        for _, _, message in self._messages(row):
            await self._send_one(topic, queue, message)

    def _messages(self, batch: pa.RecordBatch) -> Iterator[tuple[str, str | None, Outgoing]]:
        """Topic, queue key and message of each row. Raises MessageIllegal."""
        empty = [None] * batch.num_rows
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        rows = zip(*(columns.get(name, empty) for name in COLUMNS), strict=True)
        for topic, body, keys, tags, properties, delay_level, queue_key, message_id in rows:
            if body is None:
                raise MessageIllegal(
                    f"a row's body is null (keys {keys}, messageId {message_id}); filter such rows out"
                )
            if delay_level and not 0 <= delay_level <= MAX_DELAY_LEVEL:
                raise MessageIllegal(
                    f"a row's delayLevel is {delay_level} (keys {keys}, messageId {message_id}); allowed: 0 to "
                    f"{MAX_DELAY_LEVEL}, or null"
                )
            topic = topic or self._options.topic
            if not topic:
                raise MessageIllegal(
                    f"a row's topic is null (keys {keys}, messageId {message_id}); give the option topic"
                )
            message = Outgoing(
                body.encode() if isinstance(body, str) else body,
                tags or None,
                keys or (),
                {name: value for name, value in properties or () if name not in props.RESERVED},
                delay_level or 0,
                message_id=message_id or None,
            )
            yield topic, queue_key, message

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

        await _patiently(send, self._options)
        self._count(1, len(message.body))

    def _count(self, messages: int, body_bytes: int) -> None:
        self.sent.messages += messages
        self.sent.body_bytes += body_bytes


def _is_late(batch: pa.RecordBatch) -> Array | None:
    """Which rows have a delay; None if no row has one."""
    if "delayLevel" not in batch.schema.names:
        return None
    found = pc.fill_null(pc.not_equal(batch.column("delayLevel"), 0), False)
    return found if pc.any(found).as_py() else None


def _distinct(batch: pa.RecordBatch, name: str) -> tuple[list[str | None], Array]:
    """A column's values, and which of them is each row's."""
    if name not in batch.schema.names:
        return [None], np.zeros(batch.num_rows, np.int64)
    coded = batch.column(name).dictionary_encode("encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


async def _in_turn(works: Sequence[Work]) -> None:
    for work in works:
        await work()
