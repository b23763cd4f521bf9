"""Rows of a small batch that Spark gets with its plan. Reading them takes less time than a task in Python.

PySpark does so for a `SimpleDataSourceStreamReader`: its loop around a reader asks after `partitions` whether the reader is
the class that wraps a simple one, and takes the rows from `getCache` (`python_streaming_source_runner.partitions_func`).
At other moments the reader must not be of that class: a simple one is not asked for its progress, for example. Spark keeps
the rows as a block. If an executor cannot get the block, it reads the partition like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from .config import PREFETCH_BYTES, PREFETCH_PATIENCE_S
from .failures import SAID

SimpleReader: Any = DataSourceStreamReader  # with a PySpark that has changed within, tasks read all batches
with suppress(ImportError):
    from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper

    SimpleReader = _SimpleStreamReaderWrapper

if TYPE_CHECKING:
    import pyarrow as pa

    from .reading import Task


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

    hurried = Task(tuple(replace(span, timeout_s=min(span.timeout_s, PREFETCH_PATIENCE_S)) for span in task.ranges))
    batches: list[pa.RecordBatch] = []
    for batch in read_task(hurried):
        batches.append(batch)
        if sum(batch.nbytes for batch in batches) > PREFETCH_BYTES:
            return None
    return batches
