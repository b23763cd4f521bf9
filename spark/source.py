"""The streaming source: the reader from which Spark requests offsets, partitions and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ..client.errors import get_logger
from ..protocol.names import RETRY_PREFIX
from .checkpoint import MicroBatch, check_resumed, check_topics, from_offset, ranges_by_topic, to_offset
from .config import END_TIMEOUT_S, PREFETCH_BYTES, PREFETCH_TIMEOUT_S
from .driver import Ledger, fork_planner
from .options import StreamOptions, chosen, stream_options
from .worker import OWN_ERRORS, UPDATE, SimpleReader, plainly, warn_of_slow_start

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from .planner import Planner
    from .reading import Task

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# Prefetch: the driver reads the rows of a small batch while it plans the batch, and returns both to Spark together,
# because this takes less time than starting a Python task.
#
# PySpark supports this only for a `SimpleDataSourceStreamReader`. After each call of `partitions`, its loop
# (`python_streaming_source_runner.partitions_func`) checks whether the reader is an instance of the class that wraps a
# simple reader, and if so fetches the rows with `getCache`. At other moments the reader must not be an instance of that
# class, because Spark does not request the progress of a simple reader, for example. Spark stores the rows as a block.
# An executor that cannot fetch the block reads the partition like any other.


class Prefetch:
    """Reads the rows of a small batch in the driver if the batch has one task and PySpark supports this; otherwise
    tasks read the rows.

    Args:
        most_rows: maximum messages in a batch that is read while it is planned; 0 disables the prefetch. After a batch whose
            rows are too large, half of its number of messages is the maximum.
    """

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows

    def rows(self, tasks: Sequence[InputPartition]) -> list[pa.RecordBatch] | None:
        """Return the rows of a batch, or None if tasks are to read them.

        Only a batch with exactly one task is read here, because Spark accepts prefetched rows of one task only.
        """
        if len(tasks) != 1 or SimpleReader is object:
            return None
        (task,) = cast("Sequence[Task]", tasks)
        count = sum(span.end - span.begin for span in task.ranges)
        if count > self._most_rows:
            return None
        try:
            found = _read(task)
        except OWN_ERRORS:  # the task retries for longer, and reports the error if it lasts
            return None
        if found is None:
            self._most_rows = count // 2
        return found


def _read(task: Task) -> list[pa.RecordBatch] | None:
    """Return the rows of a task, or None if they exceed `PREFETCH_BYTES`."""
    from .reading import Task, read_task

    hurried = Task(tuple(replace(span, timeout_s=min(span.timeout_s, PREFETCH_TIMEOUT_S)) for span in task.ranges))
    batches: list[pa.RecordBatch] = []
    for batch in read_task(hurried):
        batches.append(batch)
        if sum(batch.nbytes for batch in batches) > PREFETCH_BYTES:
            return None
    return batches


# ------------------------------------------------------------------------------
# The streaming reader: the methods that Spark calls in the driver.
#
# Traps that were measured, and how the reader avoids them:
# - Spark creates a reader in two driver processes and pickles the reader to executors. Joining the group in `__init__`
#   would leave members behind that nobody serves. The planner is therefore created at the first request for offsets
#   or partitions, and is not pickled.
# - Spark calls `commit` only when it builds the next batch, which never happens on an idle topic. `latestOffset`
#   receives the end of the finished batch at every trigger, so the group's offsets are committed there, if the planner
#   has not found the batch in the ledger before.
# - `query.stop()` kills Spark's process for the reader. The planner therefore runs in a child of that process
#   (`driver.py`), which checks in the ledger whether Spark has finished the last batch, and then calls `stop`.
# - A queue that is released and assigned again starts at the group's offset, or at a later one that the query has
#   finished. A replay reads the ranges that the checkpoint holds.
# - Each query starts two processes, and the first process only checks which methods the reader has. Modules for
#   planning and reading are therefore imported where they are used.


class RocketletStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of `readStream`. The reader plans batches in the driver and reads rows on executors."""

    def __init__(self, given: Mapping[str, str], schema: StructType, ledger: Ledger | None = None) -> None:
        """Keep the options as they are.

        Options are parsed when Spark calls the first method, because Spark reports errors of the constructor with a
        stack trace.
        """
        self._given = dict(given)
        self._schema = schema
        self._planner: Planner | None = None
        self.ledger = ledger
        self._is_bounded = False
        self._rows: list[pa.RecordBatch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_planner": None}

    @cached_property
    def _prefetch(self) -> Prefetch:
        return Prefetch(self._options.prefetch_rows)

    @cached_property
    def _options(self) -> StreamOptions:
        return stream_options(self._given)

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        return chosen(self._given, self._schema)

    def _check(self) -> None:
        """Parse the options, so that an invalid option fails before any other work. Raises ConfigError."""
        _, _ = self._options, self._columns

    def _opened(self, resumed: MicroBatch, *, is_unfinished: bool = False) -> Planner:
        """Return the planner, and create it at the first call.

        Args:
            resumed: newest batch in the checkpoint; used only when the planner is created
            is_unfinished: True if Spark runs the resumed batch again
        """
        if self._planner is None:
            options = self._options
            check_resumed(resumed, options)
            fork_planner(self.ledger)
            warn_of_slow_start()
            if self.ledger is not None:
                self.ledger.forget(options.read.group)
            elif options.membership:
                effect = "finished batches are committed for the group only at the next trigger, and never after query.stop()"
                log.warning(
                    "driver_not_registered", effect=effect, hint="call rocketlet.spark.register(spark) in the driver"
                )
            from .planner import Planner

            self._planner = Planner(options, resumed, is_unfinished=is_unfinished, ledger=self.ledger)
            if self._is_bounded:
                self._planner.set_targets()
        return self._planner

    # Offsets, in the driver

    @plainly()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Return the offset of a query that has read nothing. The start of each queue is determined when the queue is
        assigned."""
        self._check()
        return {}

    @plainly()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Record that the batch `start` is finished, which a member then commits for its group. Return the offset of the next
        batch, or `start` if there is nothing new or the driver keeps the query from starting a batch (`Ledger.hold`)."""
        self._take_back_rows()
        finished = from_offset(start)
        planner = self._opened(finished)
        planner.finish(finished)
        if self.ledger is not None and self.ledger.is_held(self._options.read.group):
            return dict(start)
        if isinstance(limit, ReadAllAvailable):
            planned = planner.plan()
        else:
            planned = planner.plan(self._options.max_rows, self._options.max_bytes)
        return dict(start) if planned is None else to_offset(planned)

    def _take_back_rows(self) -> None:
        """Prefetch no more rows if Spark did not fetch those of the last batch, which its tasks have then read."""
        if self._rows is not None:
            self.__class__ = RocketletStreamReader
            self._rows, self._prefetch = None, Prefetch(0)
            log.warning("rows_not_fetched", effect="tasks read small batches, too (prefetchRows)", hint=UPDATE)

    @plainly()
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a batch.

        Spark passes the limit to `latestOffset`, or ReadAllAvailable if the trigger reads everything in one batch.
        """
        if self._options.max_rows:
            return ReadMaxRows(self._options.max_rows)
        return ReadMaxBytes(self._options.max_bytes) if self._options.max_bytes else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read only the messages that exist when the planner is created.

        Spark calls this before it has read the checkpoint, which the planner needs.
        """
        self._is_bounded = True

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the unplanned range of each queue, and the lag of the topics' queues, which Spark shows in a query's
        progress; None before the planner is created."""
        if self._planner is None:
            return None
        ends, positions = self._planner.progress()
        of_topics = {
            queue: position for queue, position in positions.items() if not queue.topic.startswith(RETRY_PREFIX)
        }
        behind = [max(ends[queue] - position, 0) for queue, position in of_topics.items() if queue in ends]
        return {
            "offsets": ranges_by_topic({queue: (positions.get(queue, end), end) for queue, end in ends.items()}),
            "metrics": {
                "queues": len(of_topics),
                "queuesMissing": len(self._planner.missing),
                "offsetsBehindLatest": sum(behind),
                "minOffsetsBehindLatest": min(behind, default=0),
                "maxOffsetsBehindLatest": max(behind, default=0),
                "avgOffsetsBehindLatest": sum(behind) / max(len(behind), 1),
            },
        }

    def commit(self, end: Mapping[str, Any]) -> None:
        """Do nothing, because `latestOffset` has already recorded that `end` is finished. Spark calls this after the next
        batch was planned, or never."""

    def stop(self) -> None:
        """Commit the last batch of a member if the ledger shows that Spark has finished it, and close the planner.

        Spark calls this at the end of the query, in the planner's process, after it has closed that process's socket.
        """
        planner, self._planner = self._planner, None
        if planner is None:
            return
        try:
            self._finish_last(planner)
        finally:
            planner.close()

    def _finish_last(self, planner: Planner) -> None:
        """Commit the last batch of a member if the ledger reports that Spark has finished it. No later trigger follows that
        could report this."""
        planned, ledger, options = planner.planned, self.ledger, self._options
        if planned is None or ledger is None or not options.membership:
            return
        if ledger.wait_finished(options.read.group, to_offset(planned), to_offset(planner.done), END_TIMEOUT_S):
            planner.finish(planned)
        else:
            rows = sum(end - begin for begin, end in planned.ranges.values())
            hint = (
                "other members get these messages again, and so does the query: rocketlet.spark.stop waits for a batch"
            )
            log.warning("query_stopped_within_batch", group=options.read.group, messages=rows, hint=hint)

    # Reading

    @plainly()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read the ranges of `end`. `start` is not needed, because `end` contains both bounds of
        each range."""
        if start == end:
            return []
        from .batch import to_partitions, to_read

        batch = from_offset(end)
        planner = self._opened(batch, is_unfinished=True)
        ranges = planner.readable(batch)
        check_topics(ranges, self._options.read)
        addresses = planner.addresses(to_read(ranges))
        tasks = to_partitions(addresses, self._options.read, ranges, batch.marks, batch.messages, self._columns)
        self._rows = self._prefetch.rows(tasks)
        if self._rows is not None:
            self.__class__ = _WithRows
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task, on an executor."""
        from .reading import read_task

        with plainly():
            yield from read_task(partition)


class _WithRows(RocketletStreamReader, SimpleReader):  # type: ignore[misc]
    """The reader's class while the reader holds prefetched rows: see the comment on prefetching above."""

    def getCache(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[Any] | None:  # noqa: N802 (Spark's name)
        self.__class__ = RocketletStreamReader  # type: ignore[assignment]
        rows, self._rows = self._rows, None
        return None if rows is None else iter(rows)
