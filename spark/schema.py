"""The columns of rows: ours, and those of Spark's Kafka connector, with which a job moves to RocketMQ as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..client.errors import ConfigError

CREATE_TIME: Final = 0  # Kafka's timestampType of a time that the sender gave
PROPERTIES: Final = "properties"
HEADERS: Final = "headers"
OURS: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "brokerName": StringType(),
    "queueId": IntegerType(),
    "queueOffset": LongType(),
    "messageId": StringType(),
    "keys": ArrayType(StringType()),
    "tags": StringType(),
    "body": BinaryType(),
    "bornTime": TimestampType(),
    "storeTime": TimestampType(),
    "reconsumeTimes": IntegerType(),
    PROPERTIES: MapType(StringType(), StringType()),
}
KAFKAS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    HEADERS: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}
_ALL: Final = {**OURS, **KAFKAS}


def schema_of(columns: Iterable[str]) -> StructType:
    """Raises ConfigError for a name that no column has."""
    return StructType([StructField(name, _type(name)) for name in columns])


def checked(schema: StructType) -> tuple[str, ...]:
    """The names of the columns that `.schema(...)` asks for. Raises ConfigError."""
    for column in schema.fields:
        wanted = _type(column.name)
        if column.dataType != wanted or not column.nullable:
            found = column.dataType.simpleString() + ("" if column.nullable else " not null")
            raise ConfigError(
                f"the schema's column {column.name} is {found}; rows have {wanted.simpleString()}: cast it in a select"
            )
    return tuple(schema.names)


def _type(name: str) -> DataType:
    found = _ALL.get(name)
    if found is None:
        raise ConfigError(f"rows have no column {name!r}; columns: {', '.join(_ALL)}")
    return found
