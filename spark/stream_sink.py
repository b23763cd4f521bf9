"""The streaming sink. Separate from `sink.py`, because PySpark 4.0 lacks the class that it extends."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from .sink import RESENT, Messages, RowWriter, log, total


class RocketletStreamWriter(RowWriter, DataSourceStreamArrowWriter):
    """Writer of `writeStream`."""

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 (Spark's name)
        log.info("batch_written", batch=batchId, **total(messages))

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        log.warning("batch_failed", batch=batchId, **total(messages), hint=RESENT)
