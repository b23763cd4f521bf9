"""The format `rocketlet`: what Spark calls in the driver.

Traps that were measured, and how they are met:
- Spark makes a reader in two driver processes and pickles it to executors: joining in `__init__` would leave ghost
  members. The planner is made when offsets are first asked for, and is not pickled.
- `commit` is called only when the next batch is built, on an idle topic never. `latestOffset` gets the end of the
  finished batch at every trigger: the group's offsets are committed there.
- `stop` may not be called: the broker sees the socket close when Spark ends the process.
- A queue that was lost and won back begins at the group's offset; a replay reads the ranges that the log holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from .batch import to_partitions
from .member import Member
from .options import StreamOptions
from .planner import Planner
from .ranges import from_offset, to_offset
from .reading import read_task
from .standalone import Standalone


class RocketletStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None}

    @property
    def _opened(self) -> Planner:
        if self._planner is None:
            self._planner = Member(self._options) if self._options.membership else Standalone(self._options.read)
        return self._planner

    # Offsets, in the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Nothing was read. Where a queue begins is known when it is assigned."""
        return {}

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The next batch; `start`, the last one, is finished. The same as `start` if there is nothing new."""
        self._opened.finish(from_offset(start))
        if isinstance(limit, ReadAllAvailable):
            planned = self._opened.plan()
        else:
            planned = self._opened.plan(self._options.max_rows, self._options.max_bytes)
        return to_offset(planned) if planned else dict(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark gives it back, or ReadAllAvailable where a trigger ends everything in one batch."""
        if self._options.max_rows:
            return ReadMaxRows(self._options.max_rows)
        return ReadMaxBytes(self._options.max_bytes) if self._options.max_bytes else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._opened.set_targets()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """For Spark's progress: what the queues hold, and how many messages are not planned yet."""
        if self._planner is None:
            return None
        ends, positions = self._planner.progress()
        behind = [max(end - positions[queue], 0) for queue, end in ends.items() if queue in positions]
        return {
            "offsets": to_offset({queue: (positions.get(queue, end), end) for queue, end in ends.items()}),
            "metrics": {
                "queues": len(positions),
                "offsetsBehindLatest": sum(behind),
                "minOffsetsBehindLatest": min(behind, default=0),
                "maxOffsetsBehindLatest": max(behind, default=0),
                "avgOffsetsBehindLatest": sum(behind) / max(len(behind), 1),
            },
        }

    def commit(self, end: Mapping[str, Any]) -> None:
        """Comes after the next batch was planned, or never; `latestOffset` has committed `end` already."""

    def stop(self) -> None:
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.close()

    # Reading

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """What is read is in `end` alone."""
        return [] if start == end else to_partitions(self._opened, self._options.read, from_offset(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        return read_task(partition)
