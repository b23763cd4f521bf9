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
import uvloop
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from ..client.errors import (
    BrokerRefused,
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
from ..host.memory import keep_freed
from ..protocol import properties as props
from ..protocol.codes import ResponseCode
from ..protocol.frame import Frame
from ..protocol.queue import Queue
from .config import FIRST_RETRY_S, LANES, LAST_RETRY_S, MAX_DELAY_LEVEL, PIECE_BYTES, SHOWN_CHARS
from .entries import Array, Entries, MessageIds, to_entries
from .failures import plainly
from .options import WriteOptions
from .patience import Patience
from .written import as_ours, illegal_row

log = get_logger("rocketlet.spark")

T = TypeVar("T")
Target = tuple[str, Queue | None]
"""A topic, and the queue if the row chooses one."""
Work = Callable[[], Coroutine[Any, Any, None]]
_PASSING: Final = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)


@dataclass
class Sent(WriterCommitMessage):
    """The messages that one task has sent."""

    messages: int = 0
    body_bytes: int = 0
    illegal: int = 0
    """How many of the messages are rows that went to the topic of illegal ones."""


class RocketletWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Writes on an executor. Raises RocketletError; Spark then tries the task again."""
        with plainly():
            return send_all(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        log.info("rows_written", **total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Logs the failure: messages that tasks have sent cannot be taken back."""
        log.warning(
            "write_failed", **total(messages), hint="rows that were sent stay, and are sent again with the next try"
        )


def total(messages: Sequence[WriterCommitMessage | None]) -> dict[str, int]:
    """The totals of all tasks, for the log."""
    sent = [message for message in messages if isinstance(message, Sent)]
    return {
        "tasks": len(sent),
        "messages": sum(item.messages for item in sent),
        "bytes": sum(item.body_bytes for item in sent),
        "illegal": sum(item.illegal for item in sent),
    }


def send_all(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Sent:
    """Sends the rows of all batches and returns when brokers have them."""
    keep_freed()
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
            works = await self._sends_of(batch.slice(begin, begins.step))
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
        """Leaves sends that are still under way."""
        for send in self._sends:
            send.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)

    async def _sends_of(self, batch: pa.RecordBatch) -> list[Work]:
        """The sends that run at once: rows with keys queue by queue, others in a few lanes, delayed ones each alone. Raises
        MessageIllegal."""
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

    def _illegal(
        self, batch: pa.RecordBatch, faulty: Array, targets: list[Target | MessageIllegal], codes: Array
    ) -> list[Outgoing]:
        """The rows that cannot be sent, for the topic of such rows. Raises MessageIllegal, for the first, without one."""
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
        """Topics and queues, or why there is none, and which of them is each row's. Raises RocketletError."""
        columns = [_distinct(batch, name) for name in ("topic", "queueKey", "queueId", "brokerName")]
        code = np.zeros(batch.num_rows, np.int64)
        for values, codes in columns:
            code = code * len(values) + codes
        _, rows, codes = np.unique(code, return_index=True, return_inverse=True)
        named = [[values[found[row]] for values, found in columns] for row in rows.tolist()]

        async def look() -> list[Target | MessageIllegal]:
            return [await self._target(*names) for names in named]

        found = await _patiently(look, self._options)
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

        await _patiently(send, self._options)
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

        await _patiently(send, self._options)
        self._count(1, len(message.body))

    def _count(self, messages: int, body_bytes: int) -> None:
        self.sent.messages += messages
        self.sent.body_bytes += body_bytes


def _fault(row: pa.RecordBatch) -> MessageIllegal:
    """Why a row cannot be sent."""
    try:
        message = _message(row)
        checked_body(message.body)
        message_id = checked_id(message.message_id) if message.message_id else "-"
        properties_text(message.tag, message.keys, message.properties, message_id, "")
    except MessageIllegal as error:
        return error
    return MessageIllegal("a row's key or one of its headers is not UTF-8, as RocketMQ's keys and properties are")


def _message(row: pa.RecordBatch) -> Outgoing:
    """Raises MessageIllegal."""
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
    """Marks the rows with a delay; None if no row has one."""
    levels = _delay_levels(batch)
    return levels != 0 if levels is not None and levels.any() else None


def _has_wrong_delay(batch: pa.RecordBatch) -> Array:
    levels = _delay_levels(batch)
    return np.zeros(batch.num_rows, bool) if levels is None else (levels < 0) | (levels > MAX_DELAY_LEVEL)


def _delay_levels(batch: pa.RecordBatch) -> Array | None:
    """The delay levels of rows; None without such a column."""
    return None if "delayLevel" not in batch.schema.names else batch.column("delayLevel").fill_null(0).to_numpy()


def _distinct(batch: pa.RecordBatch, name: str) -> tuple[list[Any], Array]:
    """A column's values, and which of them is each row's."""
    if name not in batch.schema.names:
        return [None], np.zeros(batch.num_rows, np.int64)
    coded = batch.column(name).dictionary_encode("encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


async def _in_turn(works: Sequence[Work]) -> None:
    for work in works:
        await work()
