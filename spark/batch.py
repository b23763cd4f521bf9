"""Batch reads (`read`): the messages between two positions; and the division of ranges into tasks, which streams use as
well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import uvloop
from pyspark.sql.datasource import DataSourceReader, InputPartition

from ..client.errors import ConfigError
from ..protocol.names import Queue
from .checkpoint import UNMARKED, Fingerprint, Part, Range, Ranges, TopicSnapshot, part_of, split
from .data_loss import outside
from .extents import BrokerOffsets
from .options import BatchOptions, ReadOptions
from .positions import check_named, offsets_at
from .queues import Course
from .reading import QueueRange, Task, read_task
from .standalone import Standalone
from .view import View
from .worker import plainly


class RocketletReader(DataSourceReader):
    """Reader of the messages between two positions. The reader joins no group and commits nothing."""

    def __init__(self, options: BatchOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    @plainly()
    def partitions(self) -> Sequence[InputPartition]:
        return uvloop.run(self._planned())

    async def _planned(self) -> list[InputPartition]:
        read, end = self._options.read, self._options.end
        view = View(read)
        share = Standalone(read)
        topics = await view.open()
        try:
            await share.open(view, Course(), topics)
            queues = share.queues()
            check_named(end, set(queues))
            seen = await view.all(queues)
            begins, ends = await offsets_at(view, queues, read.start, seen), await offsets_at(view, queues, end, seen)
            ranges = self._narrowed({queue: self._span(queue, begins[queue], ends[queue], seen) for queue in queues})
            addresses = await view.addresses(to_read(ranges))
            messages = await self._messages(view, ranges, seen)
        finally:
            await view.close()
        return to_partitions(addresses, read, ranges, seen.marks, messages, self._columns)

    async def _messages(self, view: View, ranges: Ranges, seen: BrokerOffsets) -> dict[Queue, Fingerprint]:
        """Return the fingerprint of one message for each topic and broker without an identity, if it can be read."""
        of_part = {part_of(queue): queue for queue in to_read(ranges)}
        queues = [queue for part, queue in of_part.items() if not seen.marks.get(part, UNMARKED).identity]
        found = await asyncio.gather(*(view.extents.fingerprint(queue, ranges[queue][1] - 1) for queue in queues))
        return {queue: message for queue, message in zip(queues, found, strict=True) if message is not None}

    def _span(self, queue: Queue, begin: int, end: int, seen: BrokerOffsets) -> Range:
        """Return the range of a queue.

        Raises:
            ConfigError: the end is beyond the queue's end, or is below a start that is not `earliest`
            DataLossError: the start has expired, and failOnDataLoss is set
        """
        read, extent = self._options.read, seen.extents[queue]
        if end > extent.end:
            raise ConfigError(f"endingOffsets names {queue} at {end}, which ends at {extent.end}")
        if (
            begin > end and read.start.of(queue) != "first"
        ):  # retention may have moved the first offset beyond the end that was chosen
            raise ConfigError(
                f"{queue}: the start {begin} is after the end {end}; correct the starting or ending option"
            )
        if begin < extent.begin:
            begin = outside(queue, begin, extent, is_same=True, fail=read.fail_on_data_loss)
        return begin, max(begin, end)

    def _narrowed(self, ranges: Ranges) -> Ranges:
        """Return the ranges that pushed-down filters leave. Without pushdown, all of them."""
        return ranges

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task, on an executor."""
        with plainly():
            yield from read_task(partition)


def to_read(ranges: Ranges) -> list[Queue]:
    """Return the queues whose range is not empty."""
    return [queue for queue, (begin, end) in ranges.items() if begin < end]


def to_partitions(
    addresses: Mapping[Queue, str],
    options: ReadOptions,
    ranges: Ranges,
    marks: Mapping[Part, TopicSnapshot],
    messages: Mapping[Queue, Fingerprint],
    columns: tuple[str, ...],
) -> list[InputPartition]:
    """Divide ranges into tasks. `marks` and `messages` identify the topics for which the ranges were planned. A queue
    without an address of its broker is left out."""
    newest = {part_of(queue): (queue, message) for queue, message in messages.items()}
    spans = [
        QueueRange(
            queue,
            begin,
            end,
            addresses[queue],
            options.connect.access,
            options.group,
            options.subscription(queue.topic),
            options.fail_on_data_loss,
            options.arrow_batch_size,
            options.poll_timeout_s,
            columns,
            marks.get(part_of(queue), UNMARKED),
            newest.get(part_of(queue)),
        )
        for queue, (begin, end) in split(ranges, options.min_partitions or 1, options.max_partition_rows)
        if queue in addresses
    ]
    if options.min_partitions or options.max_partition_rows:
        return [Task((span,)) for span in spans]
    return [Task(tuple(group)) for group in packed(spans)]


def packed(spans: Sequence[QueueRange]) -> list[list[QueueRange]]:
    """Combine short consecutive ranges into tasks of up to one Arrow batch, because a task costs more than reading a few
    messages. A longer range is a task of its own."""
    groups: list[list[QueueRange]] = []
    rows = 0
    for span in spans:
        size = span.end - span.begin
        if not groups or rows + size > span.batch_rows:
            groups.append([])
            rows = 0
        groups[-1].append(span)
        rows += size
    return groups
