"""Rows that are written: their columns, the rules for their values, and their encoding as entries of message batches."""

from __future__ import annotations

import re
import time
from base64 import b64encode
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from ..client.config import MAX_INT
from ..client.errors import ConfigError
from ..client.message import Outgoing
from ..client.sending.accumulator import PROPERTY_BYTES, UniqueKeys
from ..protocol import properties as props
from ..protocol.config import MAX_BODY_BYTES, MAX_LITE_NAME_CHARS
from .config import MAX_DELAY_LEVEL, MAX_NUMBER, SHOWN_BYTES, SHOWN_CHARS
from .options import WriteOptions

Array = Any  # numpy and Arrow arrays; Arrow ships no type stubs


# ------------------------------------------------------------------------------
# Columns of rows that are written: their meaning, and the translation of the columns of Spark's Kafka connector.


_TEXT: Final = (StringType,)
_OCTETS: Final = (BinaryType, StringType)
_NUMBER: Final = (IntegerType, LongType, ShortType)
COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "topic": ("STRING: the topic to send to; or set the option topic", _TEXT),
    "body": ("BINARY or STRING, not empty", _OCTETS),
    "keys": ("ARRAY<STRING>, or STRING with blanks between the keys", (StringType, ArrayType)),
    "tags": ("STRING: the message's tag", _TEXT),
    "properties": ("MAP<STRING, STRING>; RocketMQ's own names in it are skipped", (MapType,)),
    "delayLevel": ("INT: 1 to 18, delivered later; 0 or null: immediately", _NUMBER),
    "delay": ("INTERVAL DAY TO SECOND, delivered later", (DayTimeIntervalType,)),
    "deliverAt": ("TIMESTAMP: the time of delivery; in the past: immediately", (TimestampType,)),
    "priority": ("INT: 0 or more, larger is more urgent, in topics of the type PRIORITY", _NUMBER),
    "liteTopic": ("STRING: the name of a lite topic, in topics of the type LITE", _TEXT),
    "messageGroup": (
        "STRING: the message group, for topics of the type FIFO; it chooses the queue like queueKey",
        _TEXT,
    ),
    "queueKey": ("STRING: rows of a task with the same topic and queueKey are sent to the same queue, in order", _TEXT),
    "queueId": ("INT: the id of the queue to send to; null for any queue", _NUMBER),
    "brokerName": ("STRING: the broker of the queue; required with queueId if several brokers have the topic", _TEXT),
    "messageId": ("STRING: the message's unique key, kept when the row is sent again", _TEXT),
}
KAFKA_SINK_COLUMNS: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "value": ("as body", _OCTETS),
    "key": ("as keys and queueKey", _OCTETS),
    "headers": ("as properties, ARRAY<STRUCT<key: STRING, value: BINARY>>", (ArrayType,)),
    "partition": ("as queueId", _NUMBER),
}
_OURS: Final = {"value": ("body",), "key": ("keys", "queueKey"), "headers": ("properties",), "partition": ("queueId",)}


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Check that rows with this schema can become messages. Raises ConfigError."""
    all_columns = COLUMNS | KAFKA_SINK_COLUMNS
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
        raise ConfigError("rows have no topic; add a column topic, or set the option topic")


class RowFault(NamedTuple):
    """The reason why a row cannot be sent: a column, and the values that it may have."""

    column: str
    expected: str


class WrittenRows:
    """Rows of a batch by RocketMQ's columns, and the first fault of each row.

    Attributes:
        count: number of rows
        faulty: True for each row that cannot be sent
    """

    def __init__(self, given: pa.RecordBatch) -> None:
        self._given = given
        self.count: int = given.num_rows
        self._faults: list[RowFault] = []
        self._codes = np.full(self.count, -1, np.int32)
        self._names: dict[str, str] = {}
        self._columns: dict[str, Array] = {}
        for name, column in zip(given.schema.names, given.columns, strict=True):
            found = column
            if name == "key":
                found, wrong = _utf8(column)
                self.mark(wrong, RowFault(name, "UTF-8, as RocketMQ's keys are"))
            elif name == "headers":
                found, wrong = _header_properties(column)
                self.mark(wrong, RowFault(name, "values in UTF-8, as RocketMQ's properties are"))
            for ours in _OURS.get(name, (name,)):
                self._columns[ours], self._names[ours] = found, name

    def column(self, name: str, kind: Any = None) -> Array | None:
        """Return a column; None if the rows do not have it."""
        found = self._columns.get(name)
        return found if found is None or kind is None else found.cast(kind)

    def queue_keys(self) -> Array | None:
        """Return the text by which each row's queue is chosen: its key, message group or lite topic; None if the rows have
        no such column."""
        found = [self.column(name, pa.string()) for name in ("queueKey", "messageGroup", "liteTopic")]
        texts = [found[0], *(None if column is None else _present(column) for column in found[1:])]
        present = [column for column in texts if column is not None]
        return pc.coalesce(*present) if present else None

    @property
    def faulty(self) -> Array:
        return self._codes >= 0

    def mark(self, wrong: Array, fault: RowFault) -> None:
        """Record the fault of the rows for which `wrong` is True, unless they have one already."""
        if wrong.any():
            self._codes[wrong & (self._codes < 0)] = len(self._faults)
            self._faults.append(fault)

    def fault_of(self, row: int) -> str:
        """Return the reason why a row cannot be sent."""
        fault = self._faults[self._codes[row]]
        name = self._names.get(fault.column, fault.column)
        return f"{name}: got {_got(self.values_of(row).get(name))}; expected {fault.expected}"

    def values_of(self, row: int) -> dict[str, Any]:
        """Return the values of a row by the names of its own columns."""
        (values,) = self._given.slice(row, 1).to_pylist()
        maps = {field.name for field in self._given.schema if pa.types.is_map(field.type)}
        return {name: dict(value) if value and name in maps else value for name, value in values.items()}


def _got(value: Any) -> str:
    if isinstance(value, bytes | str) and len(value) > SHOWN_CHARS:
        return f"{len(value)} {'bytes' if isinstance(value, bytes) else 'characters'}"
    return "null" if value is None else f"{value!r:.{SHOWN_CHARS}}"


def _utf8(octets: Array) -> tuple[Array, Array]:
    """Return bytes decoded as UTF-8, and which of them are not UTF-8; these become null."""
    try:
        return octets.cast(pa.string()), np.zeros(len(octets), bool)
    except pa.ArrowInvalid:
        texts = pa.array([None if value is None else _decoded(value) for value in octets.to_pylist()], pa.string())
        return texts, _true(pc.and_(octets.is_valid(), texts.is_null()))


def _decoded(octets: bytes) -> str | None:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return None


def _header_properties(headers: Array) -> tuple[Array, Array]:
    """Return Kafka's headers as a map, and which rows have a header whose value is not UTF-8."""
    owners, items = pc.list_parent_indices(headers).to_numpy(), pc.list_flatten(headers)
    values, wrong = _utf8(items.field(1))
    bounds = np.searchsorted(owners, np.arange(len(headers) + 1)).astype(np.int32)
    unreadable = np.zeros(len(headers), bool)
    unreadable[owners[wrong]] = True
    return pa.MapArray.from_arrays(pa.array(bounds), items.field(0), values), unreadable


def illegal_row(values: dict[str, Any], reason: str) -> Outgoing:
    """Return a JSON message with the values of a row that cannot be sent. Bytes that are not UTF-8 become base64, and long
    texts are cut. If the message is still too large, each value becomes its first `SHOWN_CHARS` characters."""
    shown = orjson.dumps({name: _shown(value) for name, value in values.items()}, default=_shown)
    if len(shown) > MAX_BODY_BYTES:  # several long texts, escaped characters, or properties, which are not cut
        shown = orjson.dumps({name: str(value)[:SHOWN_CHARS] for name, value in values.items()})
    text = re.sub(f"[{props.NAME_END}{props.PAIR_END}]", " ", reason)[: SHOWN_CHARS * 5]
    return Outgoing(shown, "illegal", (), {"reason": text})


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        cut = value[:SHOWN_BYTES]
        text = _decoded(cut)
        return {"base64": b64encode(cut).decode()} if text is None else text
    return value[:SHOWN_BYTES] if isinstance(value, str | list) else value


# ------------------------------------------------------------------------------
# Rows as the entries of message batches, without a Python object per row.
#
# The body of SEND_BATCH_MESSAGE is a sequence of entries: a head, the message body, the length of the encoded
# properties, and the encoded properties (`encode_batch` in `protocol/message.py`). Each part of all rows is one Arrow
# column. Arrow joins the columns, and the data of the joined column are the concatenated entries of all rows. A row that
# needs a request of its own, such as a delayed one, has the same entry, and the same rules hold for it: those of
# `Producer.send`.


_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">u4"), ("crc", ">u4"), ("flag", ">i4"), ("body_size", ">i4")])
_TEXT_SIZE: Final = np.dtype(">i2")
_RESERVED: Final = pa.array(sorted(props.RESERVED))
_JOINED: Final = pa.scalar(b"", pa.binary())
_ID_BYTES: Final = 32
_DELAYS: Final = {
    "delayLevel": (props.DELAY, 1, MAX_DELAY_LEVEL, f"0 to {MAX_DELAY_LEVEL}, or null"),
    "delay": (props.TIMER_DELAY_MS, 1000, MAX_NUMBER, "an interval that is not negative, or null"),
    "deliverAt": (props.TIMER_DELIVER_MS, 1000, MAX_NUMBER, "a time since 1970, or null"),
}
"""The columns that delay a row: the property, the divisor of the values (Arrow has microseconds), the maximum, and the
text of a fault."""
_PLAIN: Final = "a text that is not blank and contains neither U+0001 nor U+0002"


class MessageIds:
    """Generator of message ids, in the form of the client's `UniqueKeys`, many at a time.

    Time and counter are one number, so that no id is repeated when the counter overflows.
    """

    def __init__(self) -> None:
        keys = UniqueKeys()
        self._prefix = np.frombuffer(keys.prefix.encode(), np.uint8)
        self._began_ms = keys.month_began_ms
        self._next = 0

    def generate(self, count: int) -> Array:
        """Return new ids as a binary array."""
        now_ms = int(time.time() * 1000) - self._began_ms & 0x7FFFFFFF
        first = max(self._next, now_ms << 16)
        self._next = first + count
        numbers = np.arange(first, first + count, dtype=">u8").tobytes().hex().upper().encode()
        ids = np.empty((count, _ID_BYTES), np.uint8)
        ids[:, : len(self._prefix)] = self._prefix
        ids[:, len(self._prefix) :] = np.frombuffer(numbers, np.uint8).reshape(count, 16)[:, 4:]
        return _fixed(ids, _ID_BYTES)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of rows.

    Attributes:
        data: the entry of each row, as a binary array
        body_sizes: size of each body in bytes
        alone: True for each row that no request with several messages may contain
    """

    data: Array
    body_sizes: Array
    alone: Array

    def take(self, order: Array) -> Entries:
        return Entries(self.data.take(pa.array(order)), self.body_sizes[order], self.alone[order])

    def bounds(self) -> Array:
        """Return the position of each entry in the bytes of all, and the end of the last one."""
        offsets = np.frombuffer(self.data.buffers()[1], np.int32)
        return offsets[self.data.offset : self.data.offset + len(self.data) + 1]

    def octets(self) -> memoryview:
        return memoryview(self.data.buffers()[2] or b"")


def to_entries(rows: WrittenRows, ids: MessageIds, compress_over_bytes: int | None = None) -> Entries:
    """Return the entries of rows whose columns `check_columns` has accepted, and mark the rows that cannot be sent. The
    entry of such a row must not be sent. Bodies from `compress_over_bytes` on get a request of their own, because a batch
    is not compressed."""
    bodies = rows.column("body", pa.binary())
    body_sizes = _sizes(bodies)
    rows.mark((body_sizes == 0) | (body_sizes > MAX_BODY_BYTES), RowFault("body", f"1 to {MAX_BODY_BYTES} bytes"))
    later = _later(rows)
    texts = _texts(rows, later, ids)
    text_sizes = _sizes(texts)
    rows.mark(
        text_sizes > PROPERTY_BYTES,
        RowFault("properties", f"up to {PROPERTY_BYTES} bytes with keys, tags and message id, encoded"),
    )
    heads = np.zeros(rows.count, _HEAD)
    heads["size"] = _HEAD.itemsize + _TEXT_SIZE.itemsize + body_sizes + text_sizes
    heads["body_size"] = body_sizes
    sizes = np.minimum(text_sizes, PROPERTY_BYTES).astype(_TEXT_SIZE)
    parts = [_fixed(heads, _HEAD.itemsize), _filled(bodies), _fixed(sizes, _TEXT_SIZE.itemsize), texts]
    alone = np.zeros(rows.count, bool) if later is None else _sizes(later) > 0
    if compress_over_bytes is not None:
        alone |= body_sizes >= compress_over_bytes
    return Entries(pc.binary_join_element_wise(*parts, _JOINED), body_sizes, alone)


def _later(rows: WrittenRows) -> Array | None:
    """Return the encoded properties of rows that need a request of their own, like `own_text` of the client, each with a
    separator at its end; None if no row has a column for them."""
    parts: list[Array] = []
    chosen = np.zeros(rows.count, np.int8)
    for name, (key, unit, most, expected) in _DELAYS.items():
        values = rows.column(name)
        if values is None:
            continue
        numbers = _filled(values.cast(pa.int64()), 0).to_numpy() // unit
        rows.mark((numbers < 0) | (numbers > most), RowFault(name, expected))
        chosen += _true(values.is_valid()) & ((numbers != 0) | (name != "delayLevel"))
        parts.append(_encoded(key, pc.if_else(pa.array(numbers > 0), pa.array(numbers), None)))
    rows.mark(chosen > 1, RowFault("delay", "null in two of the columns delayLevel, delay and deliverAt"))
    priorities = rows.column("priority", pa.int64())
    if priorities is not None:
        numbers = _filled(priorities, 0).to_numpy(zero_copy_only=False)
        rows.mark((numbers < 0) | (numbers > MAX_INT), RowFault("priority", f"a number from 0 to {MAX_INT}, or null"))
        chosen += _true(priorities.is_valid())
        parts.append(_encoded(props.PRIORITY, priorities))
    lite_topics = rows.column("liteTopic", pa.string())
    if lite_topics is not None:
        lite_topics = _present(lite_topics)
        is_lite = _true(lite_topics.is_valid())
        named = _true(pc.match_substring_regex(lite_topics, f"^[A-Za-z0-9_-]{{1,{MAX_LITE_NAME_CHARS}}}$"))
        rows.mark(
            is_lite & ~named, RowFault("liteTopic", f"1 to {MAX_LITE_NAME_CHARS} of the characters A-Z a-z 0-9 _ -")
        )
        rows.mark(is_lite & (chosen > 0), RowFault("liteTopic", "null in a row with a delay or a priority"))
        parts.append(_encoded(props.LITE_TOPIC, lite_topics))
    return pc.binary_join_element_wise(*parts, _JOINED) if parts else None


def _texts(rows: WrittenRows, later: Array | None, ids: MessageIds) -> Array:
    """Return the encoded properties, like `properties_text` of the client, as a binary array."""
    parts: list[Array] = [] if later is None else [later]
    given = _filled(_or_null(rows.column("messageId", pa.string()), rows.count), "")
    for name, column in (("keys", _keys(rows)), ("tags", rows.column("tags", pa.string()))):
        if column is not None and column.null_count < rows.count:
            rows.mark(_is_wrong(column), RowFault(name, _PLAIN))
            if name == "tags":
                several = _true(pc.match_substring(column, "||")) & (_sizes(given) == 0)
                rows.mark(several, RowFault(name, "one tag, without '||', which separates tags in filters"))
            parts.append(_encoded(props.KEYS if name == "keys" else props.TAGS, column))
    rows.mark(_is_wrong(given), RowFault("messageId", _PLAIN))
    key = pc.if_else(pc.equal(given, ""), ids.generate(rows.count), given.cast(pa.binary()))
    parts += [pa.scalar((props.UNIQUE_KEY + props.NAME_END).encode()), key]
    parts += [part for part in (_message_groups(rows), _properties(rows)) if part is not None]
    return pc.binary_join_element_wise(*parts, _JOINED)


def _keys(rows: WrittenRows) -> Array | None:
    """Return the keys, separated by blanks. A text is split at blanks, and an element of an array must not have any."""
    keys = rows.column("keys")
    if keys is None:
        return None
    if not pa.types.is_list(keys.type):
        return pc.binary_join(_words(keys.cast(pa.string())), " ")
    items = pc.list_flatten(keys).cast(pa.string())
    wrong = _true(items.is_null()) | _true(pc.greater(pc.list_value_length(_words(items)), 1))
    marked = np.zeros(rows.count, bool)
    marked[pc.list_parent_indices(keys).to_numpy()[wrong]] = True
    joined = _filled(pc.binary_join(keys.cast(pa.list_(pa.string())), " "), "")
    marked |= _true(pc.greater(pc.list_value_length(keys), 0)) & (_sizes(joined) == 0)  # only an empty key
    rows.mark(marked, RowFault("keys", "keys without blanks, at which brokers split them"))
    return joined


def _message_groups(rows: WrittenRows) -> Array | None:
    """Return the encoded message group of each row, with a separator before it."""
    groups = rows.column("messageGroup", pa.string())
    if groups is None:
        return None
    rows.mark(_is_wrong(groups), RowFault("messageGroup", _PLAIN))
    begin = pa.scalar((props.PAIR_END + props.SHARDING_KEY + props.NAME_END).encode())
    return _filled(pc.binary_join_element_wise(begin, _present(groups).cast(pa.binary()), _JOINED))


def _present(texts: Array) -> Array:
    """Return the texts, with null for an empty one."""
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, pa.string()), texts)


def _words(texts: Array) -> Array:
    return pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))


def _encoded(name: str, values: Array) -> Array:
    """Return the encoded property of each row, with a separator at its end; empty for a row without a value."""
    texts = _present(values.cast(pa.string()))
    begin, end = pa.scalar((name + props.NAME_END).encode()), pa.scalar(props.PAIR_END.encode())
    return _filled(pc.binary_join_element_wise(begin, texts.cast(pa.binary()), end, _JOINED))


def _is_wrong(texts: Array) -> Array:
    """Return which texts are blank but not empty, or contain a separator."""
    return _is_illegal(texts) & (_sizes(texts) > 0)


def _is_illegal(texts: Array) -> Array:
    """Return which texts are blank or contain a separator."""
    blank = _true(pc.equal(pc.binary_length(pc.utf8_trim_whitespace(texts)), 0))
    return blank | _true(pc.match_substring_regex(texts, f"[{props.NAME_END}{props.PAIR_END}]"))


def _properties(rows: WrittenRows) -> Array | None:
    """Return the encoded user properties. Each begins with the separator from the property before it."""
    maps = rows.column("properties")
    if maps is None:
        return None
    pairs = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    owners, items = pc.list_parent_indices(pairs).to_numpy(), pc.list_flatten(pairs)
    if not len(items):
        return None
    names, values = items.field(0), items.field(1)
    kept = ~_true(pc.is_in(names, _RESERVED))
    if rows.column("messageGroup") is not None:
        kept &= ~_true(pc.equal(names, props.SHARDING_KEY))
    wrong = kept & (_is_illegal(names) | _is_illegal(values) | _true(values.is_null()))
    marked = np.zeros(rows.count, bool)
    marked[owners[wrong]] = True
    rows.mark(marked, RowFault("properties", f"names and values, each {_PLAIN}"))
    joined = pc.binary_join_element_wise(
        pa.scalar(props.PAIR_END), names, pa.scalar(props.NAME_END), _filled(values, ""), pa.scalar("")
    )
    bounds = np.searchsorted(owners[kept], np.arange(rows.count + 1)).astype(np.int32)
    of_rows = pa.ListArray.from_arrays(pa.array(bounds), joined.filter(pa.array(kept)))
    return pc.binary_join(of_rows, "").cast(pa.binary())


def _fixed(values: Array, size: int) -> Array:
    """Return a binary array of values of `size` bytes each."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(size)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    )


def _or_null(values: Array | None, count: int) -> Array:
    return pa.nulls(count, pa.string()) if values is None else values


def _filled(values: Array, with_value: Any = b"") -> Array:
    return values.fill_null(with_value) if values.null_count else values


def _sizes(values: Array) -> Array:
    """Return the sizes in bytes; 0 for a null."""
    return _filled(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)


def _true(values: Array) -> Array:
    """Return booleans, with False for a null."""
    return _filled(values, False).to_numpy(zero_copy_only=False)
