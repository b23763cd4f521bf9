"""The data source that Spark finds by the name `rocketlet`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from ..client.errors import ConfigError
from .driver import Ledger
from .options import batch_options, chosen, columns, schema_of, write_options
from .worker import PUSHDOWN, plainly, version


class RocketletDataSource(DataSource):
    """The data source of `format("rocketlet")`, for `readStream`, `read`, `writeStream` and `write`. `options.py` has
    its options."""

    ledger: Ledger | None = None
    """The ledger of a driver that has called `register`."""

    @classmethod
    def name(cls) -> str:
        return "rocketlet"

    @plainly()
    def schema(self) -> StructType:
        """Return the columns of rows that are read. `.schema(...)` replaces them."""
        return schema_of(columns(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        lack = lacking()
        if lack:
            return _RejectingReader(lack)
        from .source import RocketletStreamReader

        return RocketletStreamReader(self.options, schema, self.ledger)

    @plainly()
    def reader(self, schema: StructType) -> DataSourceReader:
        from .batch import RocketletReader

        given = batch_options(self.options), chosen(self.options, schema)
        if not is_pushdown():
            return RocketletReader(*given)
        from .pushdown import NarrowedReader

        return NarrowedReader(*given)

    @plainly()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        _need(4, 1)
        from .encoding import check_columns
        from .stream_sink import RocketletStreamWriter

        options = write_options(self.options)
        check_columns(schema, options)
        return RocketletStreamWriter(options)

    @plainly()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from .encoding import check_columns
        from .sink import RocketletWriter

        if overwrite:
            raise ConfigError('a topic cannot be overwritten: use mode("append")')
        options = write_options(self.options)
        check_columns(schema, options)
        return RocketletWriter(options)


def with_ledger(ledger: Ledger) -> type[RocketletDataSource]:
    """Return the data source for queries of the driver that has this ledger. PySpark pickles the class with its
    attributes, because no module has it."""

    class RegisteredDataSource(RocketletDataSource): ...

    RegisteredDataSource.ledger = ledger
    return RegisteredDataSource


class _RejectingReader(DataSourceStreamReader):
    """The stream reader for a PySpark that cannot stream. Spark would replace an error that `streamReader` raises by
    one of its own."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @plainly()
    def initialOffset(self) -> dict[str, object]:  # noqa: N802 (Spark's names)
        raise ConfigError(self._reason)

    @plainly()
    def latestOffset(self, *given: object) -> dict[str, object]:  # noqa: N802
        raise ConfigError(self._reason)

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        raise ConfigError(self._reason)


def lacking() -> str | None:
    """Return the reason why this PySpark cannot stream; None if it can."""
    if version() >= (4, 2):
        return None
    return (
        f"PySpark {pyspark.__version__} can neither limit a Python stream nor end it: readStream needs pyspark 4.2 or later "
        "(maxRowsPerTrigger, Trigger.AvailableNow), writeStream 4.1; read and write work"
    )


def is_pushdown() -> bool:
    """Return True in the process in which Spark pushes filters down. In other processes Spark rejects a reader that
    accepts filters."""
    return PUSHDOWN in sys.modules


def _need(*oldest: int) -> None:
    if version() < oldest:
        raise ConfigError(str(lacking()))
