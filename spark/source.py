"""The streaming source: a reader that Spark asks for offsets and partitions, and rows that it gets with a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from .checkpoint import MicroBatch, check_resumed, check_topics, from_offset, ranges_by_topic, to_offset
from .config import END_TIMEOUT_S, PREFETCH_BYTES, PREFETCH_TIMEOUT_S
from .driver import Ledger, go_on_in_child
from .options import StreamOptions, chosen, stream_options
from .worker import SAID, plainly

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from .planner import Planner
    from .reading import Task
    from .share import OwnedQueues

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# Rows of a small batch that Spark gets with its plan. Reading them takes less time than a task in Python.
#
# PySpark does so for a `SimpleDataSourceStreamReader`: its loop around a reader asks after `partitions` whether the
# reader is the class that wraps a simple one, and takes the rows from `getCache`
# (`python_streaming_source_runner.partitions_func`). At other moments the reader must not be of that class: a simple
# one is not asked for its progress, for example. Spark keeps the rows as a block. If an executor cannot get the
# block, it reads the partition like any other.


SimpleReader: Any = DataSourceStreamReader  # with a PySpark that has changed within, tasks read all batches
with suppress(ImportError):
    from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper

    SimpleReader = _SimpleStreamReaderWrapper


class Prefetch:
    """most_rows: of a batch that is read while it is planned; 0 for none."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows

    def rows(self, tasks: Sequence[InputPartition]) -> list[pa.RecordBatch] | None:
        """The rows of the batch, which then has one task at most, because Spark takes rows of one only; None if tasks are
        to read it."""
        if len(tasks) != 1 or SimpleReader is DataSourceStreamReader:
            return None
        (task,) = cast("Sequence[Task]", tasks)
        count = sum(span.end - span.begin for span in task.ranges)
        if count > self._most_rows:
            return None
        try:
            found = _read(task)
        except SAID:  # a task meets it, too: it waits longer, and reports it
            return None
        if found is None:
            self._most_rows = count // 2
        return found


def _read(task: Task) -> list[pa.RecordBatch] | None:
    """Reads the rows; None if they are too large."""
    from .reading import Task, read_task

    hurried = Task(tuple(replace(span, timeout_s=min(span.timeout_s, PREFETCH_TIMEOUT_S)) for span in task.ranges))
    batches: list[pa.RecordBatch] = []
    for batch in read_task(hurried):
        batches.append(batch)
        if sum(batch.nbytes for batch in batches) > PREFETCH_BYTES:
            return None
    return batches


# ------------------------------------------------------------------------------
# The format `rocketlet`: what Spark calls in the driver.
#
# Traps that were measured, and how they are avoided:
# - Spark makes a reader in two driver processes and pickles it to executors: joining in `__init__` would leave ghost
#   members. The planner is made when offsets are first asked for, and is not pickled.
# - `commit` is called only when the next batch is built, so never on an idle topic. `latestOffset` gets the end of the
#   finished batch at every trigger: the group's offsets are committed there.
# - `query.stop()` kills Spark's process for the reader; `stop` is called in a child of it (`driver_process`), which
#     looks
#   whether the last batch was finished (`ledger`).
# - A queue that was lost and comes back begins at the group's offset; a replay reads the ranges in the log.
# - A query starts two processes, and the first only looks which methods the reader has. So what plans and reads is
#     loaded
#   where it is used.


class RocketletStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        """given: the options, which are read when Spark asks for the first time: what fails here it reports with a trace."""
        self._given = dict(given)
        self._schema = schema
        self._planner: Planner | None = None
        self._ledger: Ledger | None = None
        self._is_bounded = False
        self._rows: list[pa.RecordBatch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_planner": None, "_ledger": None}

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
        """Names a wrong option before anything else is done."""
        _, _ = self._options, self._columns

    def _opened(self, resumed: MicroBatch, *, is_unfinished: bool = False) -> Planner:
        """The planner. resumed: the newest batch in the checkpoint, if the query has just been started; is_unfinished: Spark
        runs it again."""
        if self._planner is None:
            options = self._options
            check_resumed(resumed, options)
            go_on_in_child()
            self._ledger = Ledger.found()
            if self._ledger is not None:
                self._ledger.forget(options.read.group)
            self._planner = _planner(options, resumed, is_unfinished, self._ledger)
            if self._is_bounded:
                self._planner.set_targets()
        return self._planner

    # Offsets, in the driver

    @plainly()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Nothing was read yet. A queue's begin is known when it is assigned."""
        self._check()
        return {}

    @plainly()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The next batch; `start`, the last one, is finished. The same as `start` if there is nothing new."""
        finished = from_offset(start)
        planner = self._opened(finished)
        planner.finish(finished)
        if self._ledger is not None and self._ledger.is_held(self._options.read.group):
            return dict(start)
        if isinstance(limit, ReadAllAvailable):
            planned = planner.plan()
        else:
            planned = planner.plan(self._options.max_rows, self._options.max_bytes)
        return dict(start) if planned is None else to_offset(planned)

    @plainly()
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark gives it back, or ReadAllAvailable where a trigger ends everything in one batch."""
        if self._options.max_rows:
            return ReadMaxRows(self._options.max_rows)
        return ReadMaxBytes(self._options.max_bytes) if self._options.max_bytes else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Called before Spark has read its checkpoint, which is read when the planner is made."""
        self._is_bounded = True

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Reports the extents of the queues for Spark's progress, and how many messages are not planned yet."""
        if self._planner is None:
            return None
        ends, positions = self._planner.progress()
        behind = [max(end - positions[queue], 0) for queue, end in ends.items() if queue in positions]
        return {
            "offsets": ranges_by_topic({queue: (positions.get(queue, end), end) for queue, end in ends.items()}),
            "metrics": {
                "queues": len(positions),
                "queuesMissing": len(self._planner.missing),
                "offsetsBehindLatest": sum(behind),
                "minOffsetsBehindLatest": min(behind, default=0),
                "maxOffsetsBehindLatest": max(behind, default=0),
                "avgOffsetsBehindLatest": sum(behind) / max(len(behind), 1),
            },
        }

    def commit(self, end: Mapping[str, Any]) -> None:
        """Comes after the next batch was planned, or never; `latestOffset` has committed `end` already."""

    def stop(self) -> None:
        """Stops at the end of the query. Spark calls it in a process whose socket was closed."""
        planner, self._planner = self._planner, None
        if planner is None:
            return
        try:
            self._finish_last(planner)
        finally:
            planner.close()

    def _finish_last(self, planner: Planner) -> None:
        """Commits the last batch if Spark has finished it, because no later trigger has said so."""
        planned, ledger, options = planner.planned, self._ledger, self._options
        if planned is None or ledger is None or not options.membership:
            return
        if ledger.finished(options.read.group, to_offset(planned), to_offset(planner.done), END_TIMEOUT_S):
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
        """`end` alone has the ranges to read."""
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
        """Reads on an executor."""
        from .reading import read_task

        with plainly():
            yield from read_task(partition)


class _WithRows(RocketletStreamReader, SimpleReader):  # type: ignore[misc]
    """The reader while it holds the rows of the batch that Spark has just planned: see `prefetch`."""

    def getCache(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[Any] | None:  # noqa: N802 (Spark's name)
        self.__class__ = RocketletStreamReader  # type: ignore[assignment]
        rows, self._rows = self._rows, None
        return None if rows is None else iter(rows)


def _planner(
    options: StreamOptions, resumed: MicroBatch, is_unfinished: bool = False, ledger: Ledger | None = None
) -> Planner:
    from .planner import Planner

    share: OwnedQueues
    if options.membership:
        from .share import QueryMember

        share = QueryMember(options, resumed, is_unfinished=is_unfinished)
    else:
        from .share import Standalone

        share = Standalone(options.read, resumed)
    return Planner(
        share,
        options.read,
        resumed,
        is_unfinished=is_unfinished,
        ledger=ledger,
        min_rows=options.min_rows,
        max_delay_s=options.max_delay_s,
    )
