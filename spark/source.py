"""The format `rocketlet`: what Spark calls in the driver.

Traps that were measured, and how they are met:
- Spark makes a reader in two driver processes and pickles it to executors: joining in `__init__` would leave ghost
  members. The member is made when offsets are first asked for, and is not pickled.
- `commit` is called only when the next batch is built, on an idle topic never. `latestOffset` gets the end of the
  finished batch at every trigger: the group's offsets are committed there.
- `stop` may not be called: the broker sees the socket close when Spark ends the process.
- A queue that was lost and won back begins at the group's offset; a replay reads the ranges that the log holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from .member import Member
from .options import SourceOptions, parse
from .ranges import from_offset, to_offset
from .reading import SCHEMA, QueueRange, read_range


class RocketletDataSource(DataSource):
    """`spark.readStream.format("rocketlet")`; see `options` for what can be set."""

    @classmethod
    def name(cls) -> str:
        return "rocketlet"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return RocketletStreamReader(parse(self.options))


class RocketletStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._member: Member | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_member": None}

    @property
    def _joined(self) -> Member:
        if self._member is None:
            self._member = Member(self._options)
        return self._member

    # Offsets, in the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Nothing was read. Where a queue begins is known when it is assigned."""
        return {}

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The next batch; `start`, the last one, is finished. The same as `start` if there is nothing new."""
        self._joined.finish(from_offset(start))
        planned = self._joined.plan(limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        return to_offset(planned) if planned else dict(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_rows) if self._options.max_rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._joined.set_targets()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """What the owned queues hold, for Spark's progress."""
        if self._member is None:
            return None
        return to_offset({queue: (end, end) for queue, end in self._member.ends().items()})

    def commit(self, end: Mapping[str, Any]) -> None:
        """Comes after the next batch was planned, or never; `latestOffset` has committed `end` already."""

    def stop(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.leave()

    # Reading

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """One per queue. What is read is in `end` alone."""
        if start == end:
            return []
        options = self._options
        subscriptions = {item.topic: item for item in options.subscriptions}
        spans: list[QueueRange] = []
        for queue, (begin, stop) in from_offset(end).items():
            if queue.topic not in subscriptions:
                raise ValueError(
                    f"the checkpoint reads the topic {queue.topic}, the query does not; add it, or start anew"
                )
            address = self._joined.address(queue) or self._joined.find_address(queue)
            spans.append(
                QueueRange(
                    queue,
                    begin,
                    stop,
                    address,
                    options.group,
                    subscriptions[queue.topic],
                    options.fail_on_data_loss,
                    options.arrow_batch_size,
                )
            )
        return spans

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        assert isinstance(partition, QueueRange)
        return read_range(partition)
