"""Rows as messages: `write`, and what `stream_sink` does for `writeStream`.

A message is stored at least once: a task that Spark tries again, or a batch that a restarted query runs again, sends its
rows again. Rows with a column messageId keep it, so that readers can recognize them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa
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
from ..protocol import properties as props
from ..protocol.bodies import Queue
from ..protocol.codes import ResponseCode
from .failures import plainly
from .options import WriteOptions
from .patience import Patience

log = get_logger("rocketlet.spark")

T = TypeVar("T")
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 2.0
MAX_DELAY_LEVEL: Final = 18
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
    """What one task has sent."""

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
        """What tasks have sent cannot be taken back."""
        log.warning("write_failed", **total(messages), hint="what was sent stays, and is sent again with the next try")


def total(messages: Sequence[WriterCommitMessage | None]) -> dict[str, int]:
    """What all tasks have sent, for the log."""
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
        finally:
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
    def __init__(self, options: WriteOptions, producer: Producer) -> None:
        self._options = options
        self._producer = producer
        self.sent = Sent()

    async def send(self, batch: pa.RecordBatch) -> None:
        """Rows without a delay in batches, one at a time to each queue: so rows with the same key stay in order."""
        together: dict[tuple[str, Queue | None], list[Outgoing]] = {}
        alone: list[tuple[str, Queue | None, Outgoing]] = []
        for topic, key, message in self._messages(batch):
            queue = await self._queue_for(topic, key) if key is not None else None
            if message.delay_level:
                alone.append((topic, queue, message))
            else:
                together.setdefault((topic, queue), []).append(message)
        sends = [self._send_batches(topic, queue, messages) for (topic, queue), messages in together.items()]
        sends += [self._send_one(topic, queue, message) for topic, queue, message in alone]
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _queue_for(self, topic: str, key: str) -> Queue:
        return await _patiently(lambda: self._producer.queue_for(topic, key), self._options)

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

    async def _send_batches(self, topic: str, queue: Queue | None, messages: list[Outgoing]) -> None:
        chunk: list[Outgoing] = []
        size = 0
        for message in messages:
            cost = 200 + len(message.body) + sum(2 * len(k) + 2 * len(v) for k, v in message.properties.items())
            if chunk and size + cost > self._options.batch_bytes:
                await self._send_batch(topic, queue, chunk)
                chunk, size = [], 0
            chunk.append(message)
            size += cost
        await self._send_batch(topic, queue, chunk)

    async def _send_batch(self, topic: str, queue: Queue | None, messages: list[Outgoing]) -> None:
        if len(messages) == 1:  # which may be compressed, or as large as a message may be
            await self._send_one(topic, queue, messages[0])
            return
        await _patiently(lambda: self._producer.send_batch(topic, messages, queue=queue), self._options)
        self._count(messages)

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
        self._count([message])

    def _count(self, messages: Sequence[Outgoing]) -> None:
        self.sent.messages += len(messages)
        self.sent.body_bytes += sum(len(message.body) for message in messages)
