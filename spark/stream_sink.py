"""Rows of a stream as messages. Apart from `sink`, because PySpark 4.0 has no such writer."""

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
    """The sink of a query."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Writes on an executor. Raises RocketletError; Spark then tries the task again."""
        with plainly():
            return send_all(self._options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        log.info("batch_written", batch=batchId, **total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Logs the failure: messages that tasks have sent cannot be taken back."""
        found = total(messages)
        log.warning(
            "batch_failed",
            batch=batchId,
            **found,
            hint="rows that were sent stay, and are sent again with the next try",
        )
