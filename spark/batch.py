"""`read`: what lies between two positions, once; and how ranges become tasks, for streams too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from ..client.errors import ConfigError
from ..protocol import names
from .checkpoint import UNMARKED, Mark, Part, part_of
from .failures import plainly
from .options import BatchOptions, ReadOptions
from .planner import Planner
from .ranges import Ranges, split
from .reading import QueueRange, Task, read_task
from .standalone import Standalone


class RocketletReader(DataSourceReader):
    """One read of what lies between two positions. It joins no group and commits nothing."""

    def __init__(self, options: BatchOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    @plainly()
    def partitions(self) -> Sequence[InputPartition]:
        read = self._options.read
        planner = Standalone(read)
        try:
            ranges = self._narrowed(planner.ranges(read.start, self._options.end))
            return to_partitions(planner, read, ranges, planner.marks, self._columns)
        finally:
            planner.close()

    def _narrowed(self, ranges: Ranges) -> Ranges:
        return ranges

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads on an executor."""
        with plainly():
            yield from read_task(partition)


def to_partitions(
    planner: Planner, options: ReadOptions, ranges: Ranges, marks: Mapping[Part, Mark], columns: tuple[str, ...]
) -> list[InputPartition]:
    """marks: the brokers' words on the topics when the ranges were planned."""
    retries = names.retry_topic(options.group)
    foreign = sorted({queue.topic for queue in ranges} - {*options.topics, retries})
    if foreign and options.topics:
        raise ConfigError(
            f"the checkpoint reads the topic {foreign[0]}, the query does not; add it, or start with a new checkpoint"
        )
    addresses = planner.addresses(queue for queue, (begin, end) in ranges.items() if begin < end)
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
        )
        for queue, (begin, end) in split(ranges, options.min_partitions or 1, options.max_partition_rows)
        if queue in addresses
    ]
    if options.min_partitions or options.max_partition_rows:
        return [Task((span,)) for span in spans]
    return [Task(tuple(group)) for group in packed(spans)]


def packed(spans: Sequence[QueueRange]) -> list[list[QueueRange]]:
    """Puts short ranges together, up to one Arrow batch: a task costs more than reading a few messages."""
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
