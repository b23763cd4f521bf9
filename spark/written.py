"""Columns of rows that are written: their meaning, and those of Spark's Kafka connector as ours."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from ..client.errors import ConfigError
from ..client.message import Outgoing
from ..protocol import properties as props
from ..protocol.config import MAX_BODY_BYTES
from .config import SHOWN_BYTES, SHOWN_CHARS
from .entries import Array
from .options import WriteOptions

_TEXT: Final = (StringType,)
_OCTETS: Final = (BinaryType, StringType)
_NUMBER: Final = (IntegerType, LongType, ShortType)
COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "topic": ("STRING: where the row goes; or set the option topic", _TEXT),
    "body": ("BINARY or STRING, not empty", _OCTETS),
    "keys": ("ARRAY<STRING>, or STRING with spaces between the keys", (StringType, ArrayType)),
    "tags": ("STRING: the message's tag", _TEXT),
    "properties": ("MAP<STRING, STRING>; RocketMQ's own names in it are skipped", (MapType,)),
    "delayLevel": ("INT: 1 to 18, delivered later; 0 or null at once", _NUMBER),
    "queueKey": ("STRING: rows of a task with the same one go to the same queue, in order", _TEXT),
    "queueId": ("INT: the queue where the row goes; null leaves it open", _NUMBER),
    "brokerName": ("STRING: whose queue queueId is; needed where several brokers have the topic", _TEXT),
    "messageId": ("STRING: the message's unique key, kept when the row is sent again", _TEXT),
}
KAFKAS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "value": ("as body", _OCTETS),
    "key": ("as keys and queueKey", _OCTETS),
    "headers": ("as properties, ARRAY<STRUCT<key: STRING, value: BINARY>>", (ArrayType,)),
    "partition": ("as queueId", _NUMBER),
}
_OURS: Final = {"value": ("body",), "key": ("keys", "queueKey"), "headers": ("properties",), "partition": ("queueId",)}
_NO_TEXT: Final = object()


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raises ConfigError for rows that cannot become messages."""
    all_columns = COLUMNS | KAFKAS
    known = "; ".join(f"{name} ({meaning})" for name, (meaning, _) in all_columns.items())
    for column in schema.fields:
        meaning, types = all_columns.get(column.name, ("", ()))
        if not types:
            raise ConfigError(f"the column {column.name} is not a column of a message; drop it. Columns: {known}")
        if not isinstance(column.dataType, types):
            raise ConfigError(f"the column {column.name} is {column.dataType.simpleString()}; allowed: {meaning}")
    for kafkas, ours in _OURS.items():
        both = [name for name in ours if name in schema.names]
        if kafkas in schema.names and both:
            raise ConfigError(f"the columns {kafkas} and {both[0]} mean the same; drop one of them")
    if "body" not in schema.names and "value" not in schema.names:
        raise ConfigError(f"a column body is missing. Columns: {known}")
    if "topic" not in schema.names and options.topic is None:
        raise ConfigError("where do rows go? Give a column topic, or the option topic")


def as_ours(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Array]:
    """The rows with our columns, and which rows have a key or a header that is no text."""
    unreadable = np.zeros(batch.num_rows, bool)
    if not KAFKAS.keys() & set(batch.schema.names):
        return batch, unreadable
    columns: dict[str, Array] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        found = column
        if name == "key":
            found, wrong = _texts(column)
            unreadable |= wrong
        elif name == "headers":
            found, wrong = _properties(column)
            unreadable |= wrong
        columns |= dict.fromkeys(_OURS.get(name, (name,)), found)
    return pa.RecordBatch.from_pydict(columns), unreadable


def _texts(column: Array) -> tuple[Array, Array]:
    """Octets as text, and which are none: those are empty then."""
    try:
        return column.cast(pa.string()), np.zeros(len(column), bool)
    except pa.ArrowInvalid:
        texts = [None if octets is None else _text(octets) for octets in column.to_pylist()]
        wrong = np.array([text is _NO_TEXT for text in texts])
        return pa.array(["" if text is _NO_TEXT else text for text in texts], pa.string()), wrong


def _text(octets: bytes) -> str | object:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return _NO_TEXT


def _properties(headers: Array) -> tuple[Array, Array]:
    """Kafka's headers as a map, and which rows have one whose value is no text."""
    owners, items = pc.list_parent_indices(headers).to_numpy(), pc.list_flatten(headers)
    values, wrong = _texts(items.field(1))
    bounds = np.searchsorted(owners, np.arange(len(headers) + 1)).astype(np.int32)
    unreadable = np.zeros(len(headers), bool)
    unreadable[owners[wrong]] = True
    return pa.MapArray.from_arrays(pa.array(bounds), items.field(0), values), unreadable


def illegal_row(values: dict[str, Any], reason: str) -> Outgoing:
    """A row that cannot be sent, as JSON. Octets that are no text come as base64, and a long value is cut."""
    shown = orjson.dumps({name: _shown(value) for name, value in values.items()}, default=_shown)
    if len(shown) > MAX_BODY_BYTES:  # escapes and many properties take more than their values
        shown = orjson.dumps({name: str(value)[:SHOWN_CHARS] for name, value in values.items()})
    text = re.sub(f"[{props.NAME_END}{props.PAIR_END}]", " ", reason)[: SHOWN_CHARS * 5]
    return Outgoing(shown, "illegal", (), {"reason": text})


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        cut = value[:SHOWN_BYTES]
        text = _text(cut)
        return {"base64": b64encode(cut).decode()} if text is _NO_TEXT else text
    return value[:SHOWN_BYTES] if isinstance(value, str | list) else value
