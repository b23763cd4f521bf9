"""The sinks: rows become messages, for batch and streaming writes.

Each row of a write that succeeds is stored at least once, and possibly several times, because a task that Spark retries, or a
batch that a restarted query runs again, sends its rows again. Rows with a messageId keep their id, so that readers can
recognize duplicates.
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

from ..client.config import COMPRESS_OVER_BYTES
from ..client.errors import (
    BrokerRefused,
    ConnectionFailed,
    MessageIllegal,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..client.message import Outgoing
from ..client.producer import Producer
from ..host.memory import keep_freed
from ..protocol.codes import ResponseCode
from ..protocol.message import decode_batch
from ..protocol.names import Queue, topic_fault
from .config import FIRST_RETRY_S, LANES, LAST_RETRY_S, PIECE_BYTES, SHOWN_CHARS
from .encoding import Entries, MessageIds, RowFault, WrittenRows, illegal_row, to_entries
from .options import WriteOptions
from .patience import FailureTimeout
from .worker import plainly

log = get_logger("rocketlet.spark")


T = TypeVar("T")
Array = Any  # numpy arrays
Target = tuple[str, Queue | None]
"""A topic, and the queue if the row chooses one."""
Messages = Sequence[WriterCommitMessage | None]
RESENT: Final = "rows that were sent stay stored, and a further attempt sends them again"
Work = Callable[[], Coroutine[Any, Any, None]]
_PASSING: Final = (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)


@dataclass
class Sent(WriterCommitMessage):
    """Numbers of messages that one task has sent."""

    messages: int = 0
    body_bytes: int = 0
    illegal: int = 0
    """Number of rows among them that were sent to the topic of illegal rows."""


class RowWriter:
    """What the writers of `write` and `writeStream` share."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of a task, on an executor. Raises RocketletError; Spark then fails the task, and may retry it."""
        with plainly():
            return send_all(self._options, iterator)


class RocketletWriter(RowWriter, DataSourceArrowWriter):
    """Writer of `write`."""

    def commit(self, messages: Messages) -> None:
        log.info("rows_written", **total(messages))

    def abort(self, messages: Messages) -> None:
        log.warning("write_failed", **total(messages), hint=RESENT)


def total(messages: Messages) -> dict[str, int]:
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
                compress_over_bytes=options.compress_over_bytes or COMPRESS_OVER_BYTES,
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
        other rows, and one for all illegal rows. Raises MessageIllegal."""
        rows = WrittenRows(batch)
        entries = to_entries(rows, self._ids, self._options.compress_over_bytes)
        targets, codes = await self._targets(rows)
        for number, target in enumerate(targets):
            if isinstance(target, RowFault):
                rows.mark(codes == number, target)
        sends: list[Work] = []
        if rows.faulty.any():
            sends.append(partial(self._divert, self._illegal(rows)))
        order = np.argsort(np.where(rows.faulty, len(targets), codes), kind="stable")
        bounds = np.searchsorted(codes[order[: len(order) - int(rows.faulty.sum())]], np.arange(len(targets) + 1))
        for target, begin, end in zip(targets, bounds[:-1], bounds[1:], strict=True):
            if not isinstance(target, RowFault):
                chosen = entries if end - begin == rows.count else entries.take(order[begin:end])
                sends += self._sends_to(*target, chosen)
        return sends

    def _sends_to(self, topic: str, queue: Queue | None, entries: Entries) -> list[Work]:
        bounds, octets = entries.bounds(), entries.octets()
        alone = np.append(np.flatnonzero(entries.alone), len(entries.alone))
        sends: list[Work] = []
        begin = 0
        while begin < len(bounds) - 1:
            end = int(np.searchsorted(bounds, bounds[begin] + self._options.batch_bytes, "right")) - 1
            end = max(min(end, int(alone[np.searchsorted(alone, begin)])), begin + 1)
            body = octets[bounds[begin] : bounds[end]]
            size = int(entries.body_sizes[begin:end].sum())
            sends.append(partial(self._send, topic, queue, body, end - begin, size))
            begin = end
        lanes = min(LANES, len(sends)) if queue is None else 1
        return [partial(_in_sequence, sends[lane::lanes]) for lane in range(lanes)]

    def _illegal(self, rows: WrittenRows) -> list[Outgoing]:
        """Return messages for the topic of illegal rows, one for each faulty row. Raises MessageIllegal if there is no such
        topic."""
        diverted: list[Outgoing] = []
        for row in np.flatnonzero(rows.faulty).tolist():
            fault, values = rows.fault_of(row), rows.values_of(row)
            if self._options.illegal_rows_topic is None:
                named = f"keys {values.get('keys')}, messageId {values.get('messageId')}"[:SHOWN_CHARS]
                raise MessageIllegal(f"{fault}; correct or filter such rows, or set illegalRowsTopic ({named})")
            diverted.append(illegal_row(values, fault))
        return diverted

    async def _divert(self, rows: list[Outgoing]) -> None:
        topic = self._options.illegal_rows_topic or ""
        for row in rows:
            send = partial(self._producer.send, topic, row.body, tag=row.tag, properties=row.properties)
            await _with_retries(send, self._options)
            self._count(1, len(row.body))
        self.sent.illegal += len(rows)

    async def _targets(self, rows: WrittenRows) -> tuple[list[Target | RowFault], Array]:
        """Return the distinct targets of the rows, or faults in their place, and the index of each row's target. Raises
        RocketletError."""
        named_by = (rows.column("topic"), rows.queue_keys(), rows.column("queueId"), rows.column("brokerName"))
        columns = [_distinct(column, rows.count) for column in named_by]
        code = np.zeros(rows.count, np.int64)
        for values, codes in columns:
            code = code * len(values) + codes
        _, firsts, codes = np.unique(code, return_index=True, return_inverse=True)
        named = [[values[found[row]] for values, found in columns] for row in firsts.tolist()]

        async def find_all() -> list[Target | RowFault]:
            return [await self._target(*names) for names in named]

        found = await _with_retries(find_all, self._options)
        targets = {target: number for number, target in enumerate(dict.fromkeys(found))}
        return list(targets), np.array([targets[target] for target in found], np.int64)[codes]

    async def _target(
        self, topic: str | None, key: str | None, queue_id: int | None, broker_name: str | None
    ) -> Target | RowFault:
        topic = topic or self._options.topic
        if not topic:
            return RowFault("topic", "a topic, or the option topic")
        fault = topic_fault(topic)
        if fault:
            return RowFault("topic", f"the name of a topic: {fault}")
        if queue_id is None:
            return topic, None if key is None else await self._producer.queue_for(topic, key)
        found = [
            queue
            for queue in await self._producer.queues(topic)
            if queue.queue_id == queue_id and broker_name in (None, queue.broker_name)
        ]
        if len(found) == 1:
            return topic, found[0]
        if found:
            return RowFault(
                "brokerName", f"a broker's name, because several brokers have the queue {queue_id} of {topic}"
            )
        return RowFault("queueId", f"a queue of {topic} to send to{f' on {broker_name}' if broker_name else ''}")

    async def _send(self, topic: str, queue: Queue | None, entries: memoryview, count: int, size: int) -> None:
        """Send the entries of some rows in one request. A single row is sent like a message of `Producer.send`."""
        octets = bytes(entries)
        if count == 1:
            send = partial(self._producer.send_entry, topic, *decode_batch(octets), queue=queue)
        else:
            send = partial(self._producer.send_entries, topic, octets, queue=queue, ids=False)
        await _with_retries(send, self._options)
        self._count(count, size)

    def _count(self, messages: int, body_bytes: int) -> None:
        self.sent.messages += messages
        self.sent.body_bytes += body_bytes


def _distinct(column: Array | None, count: int) -> tuple[list[Any], Array]:
    """Return the distinct values of a column, and the index of each row's value."""
    if column is None:
        return [None], np.zeros(count, np.int64)
    coded = column.dictionary_encode("encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


async def _in_sequence(works: Sequence[Work]) -> None:
    for work in works:
        await work()
