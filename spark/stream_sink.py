"""The streaming sink. Separate from `sink.py`, because PySpark 4.0 lacks the class that it extends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ..client.errors import get_logger
from .options import WriteOptions
from .sink import Sent, send_all, total
from .worker import plainly

log = get_logger("rocketlet.spark")


class RocketletStreamWriter(DataSourceStreamArrowWriter):
    """Writer of `writeStream`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of a task, on an executor. Raises RocketletError; Spark then fails the task, and may retry it."""
        with plainly():
            return send_all(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        log.info("batch_written", batch=batchId, **total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log the failure. Messages that tasks have sent stay stored."""
        found = total(messages)
        log.warning(
            "batch_failed",
            batch=batchId,
            **found,
            hint="rows that were sent stay stored, and a further attempt sends them again",
        )
