"""Message records as Arrow columns.

The compiled module makes the columns from the bytes of a pull, without a Python object per message. It declines names that
occur twice in a message, more than 64 properties, texts that are not UTF-8, and records that cannot be read. For these, and
without a compiled module, each record is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from struct import Struct
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..protocol import fast, names
from ..protocol import properties as props
from ..protocol.codes import SYS_COMPRESSED
from ..protocol.message import FIXED_BYTES, MessageError, Record, decode_record, decompressed, offset_in
from ..protocol.names import Queue
from .config import PLAIN_BYTES
from .options import CREATE_TIME, canonical

Array = Any  # numpy and Arrow arrays; Arrow ships no type stubs

_SIZE: Final = Struct(">i")
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class TooLarge(MessageError):
    """The decompressed bodies of a batch are too large together. `offset`: the first message beyond the limit."""

    def __init__(self, queue: Queue, offset: int) -> None:
        super().__init__(f"{queue}: with the message at offset {offset}, the batch has more than {PLAIN_BYTES} bytes")
        self.offset = offset


class Rows:
    """Messages of a queue with offsets from `begin` up to `end` (exclusive).

    Attributes:
        offsets, born_ms, stored_ms, reconsume_times, sys_flags: fields of the records
        raw_bodies: the bodies as stored
        unreadable: offsets of records that cannot be read, which are left out
    """

    queue: Queue
    offsets: Array
    born_ms: Array
    stored_ms: Array
    reconsume_times: Array
    sys_flags: Array
    raw_bodies: Array
    unreadable: Sequence[int] = ()
    tags: Sequence[str] = ()
    """If not empty, only messages with one of these tags become rows."""
    is_strict = True
    """True if a body that cannot be decompressed raises MessageError; False if it becomes null."""

    def property(self, name: str) -> Array:
        """Return a property of every message; null if the message lacks it."""
        raise NotImplementedError

    def as_headers(self) -> Array:
        """Return the user's properties in the form of Kafka's headers; null for a message without any."""
        raise NotImplementedError

    def as_map(self) -> Array:
        """Return all properties as a map array."""
        raise NotImplementedError

    def record(self, row: int) -> Record:
        """Return the record of a row."""
        raise NotImplementedError

    def batch(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the columns as a batch. Raises MessageError, and TooLarge."""
        schema, makers = _made_of(tuple(columns))
        batch = pa.RecordBatch.from_arrays([make(self) for make in makers], schema=schema)
        if not self.tags:
            return batch
        return batch.filter(pc.is_in(self.property(props.TAGS), pa.array(self.tags, pa.string())))

    def repeated(self, value: Any) -> Array:
        return pa.repeat(value, len(self.offsets))

    def topics(self) -> Array:
        topics = self.repeated(self.queue.topic)
        if self.queue.topic.startswith(names.RETRY_PREFIX):
            topics = pc.coalesce(self.property(props.RETRY_TOPIC), topics)
        return topics

    def message_ids(self) -> Array:
        """Return the sender's unique keys, or the broker's offset ids of messages without one."""
        keys = self.property(props.UNIQUE_KEY)
        if not keys.null_count:
            return keys
        missing = keys.is_null()
        rows = np.flatnonzero(missing.to_numpy(zero_copy_only=False)).tolist()
        ids = [self.record(row).offset_id for row in rows]
        return pc.replace_with_mask(keys, missing, pa.array(ids, pa.string()))

    @cached_property
    def bodies(self) -> Array:
        packed = self.sys_flags & SYS_COMPRESSED != 0
        if not packed.any():
            return self.raw_bodies
        plain: list[bytes | None] = []
        left = PLAIN_BYTES
        for row in np.flatnonzero(packed).tolist():
            body = self._plain(row)
            left -= len(body or b"")
            if left < 0 and plain:
                raise TooLarge(self.queue, int(self.offsets[row]))
            plain.append(body)
        return pc.replace_with_mask(self.raw_bodies, pa.array(packed), pa.array(plain, pa.binary()))

    def _plain(self, row: int) -> bytes | None:
        try:
            return decompressed(self.raw_bodies[row].as_py(), int(self.sys_flags[row]))
        except MessageError as error:
            if self.is_strict:
                raise MessageError(
                    f"{self.queue}: the message at offset {self.offsets[row]} cannot be decoded: {error}; "
                    "set failOnDataLoss to false to get its row with a null body"
                ) from None
            return None


class SliceRows(Rows):
    """Rows that the compiled module has decoded.

    Args:
        found: the columns of the records; with pairs of all properties if those are needed
        headers: the columns with pairs of the user's properties; None if those are not needed
        texts: names of the properties that `found` has as columns
    """

    def __init__(
        self, data: bytes, queue: Queue, texts: Sequence[str], found: fast.Slice, headers: fast.Slice | None
    ) -> None:
        self._data = data
        self._pairs = found.pairs
        self._headers = found.pairs if headers is None else headers.pairs
        self._columns = dict(zip(texts, found.columns, strict=True))
        self.queue = queue
        self.offsets = np.frombuffer(found.offsets, np.int64)
        self.born_ms = np.frombuffer(found.born_ms, np.int64)
        self.stored_ms = np.frombuffer(found.stored_ms, np.int64)
        self.reconsume_times = np.frombuffer(found.reconsume_times, np.int32)
        self.sys_flags = np.frombuffer(found.sys_flags, np.int32)
        self.raw_bodies = _array(pa.binary(), len(self.offsets), None, *found.bodies)

    def property(self, name: str) -> Array:
        count, valid, ends, data = self._columns[name]
        return _array(pa.string(), len(self.offsets), None if count == len(self.offsets) else valid, ends, data)

    def as_headers(self) -> Array:
        count, valid, at, *texts = self._headers
        if not count:
            return pa.nulls(len(self.offsets), HEADERS)
        found = _array(pa.string(), count, None, *texts[:2]), _array(pa.binary(), count, None, *texts[2:])
        pairs = pa.StructArray.from_arrays(found, ["key", "value"])
        return _array(HEADERS, len(self.offsets), valid, at, children=[pairs])

    def as_map(self) -> Array:
        count, _, at, *texts = self._pairs
        keys, values = (_array(pa.string(), count, None, *pair) for pair in (texts[:2], texts[2:]))
        return pa.MapArray.from_arrays(_array(pa.int32(), len(self.offsets) + 1, None, at), keys, values)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {offset_in(self._data[at : at + FIXED_BYTES]): at for at in _walked(self._data)}

    def record(self, row: int) -> Record:
        return decode_record(self._data, self._positions[int(self.offsets[row])], "replace")


class RecordRows(Rows):
    """Rows of records that are decoded one by one.

    Args:
        data: records of one or more pull responses
        queue: the queue
        begin: first offset
        end: offset after the last one
    Raises:
        MessageError: the bytes are not records
    """

    def __init__(self, data: bytes, queue: Queue, begin: int, end: int) -> None:
        self._records: list[Record] = []
        self.unreadable = unreadable = []
        for at in _walked(data):
            offset = offset_in(data[at : at + FIXED_BYTES])
            if begin <= offset < end:
                try:
                    self._records.append(decode_record(data, at, "replace"))
                except MessageError:
                    unreadable.append(offset)
        self.queue = queue
        self.offsets = np.array([record.queue_offset for record in self._records], np.int64)
        self.born_ms = np.array([record.born_ms for record in self._records], np.int64)
        self.stored_ms = np.array([record.store_ms for record in self._records], np.int64)
        self.reconsume_times = np.array([record.reconsume_times for record in self._records], np.int32)
        self.sys_flags = np.array([record.sys_flag for record in self._records], np.int32)
        self.raw_bodies = pa.array([record.body for record in self._records], pa.binary())

    @cached_property
    def _properties(self) -> list[dict[str, str]]:
        return [props.decode(record.properties) for record in self._records]

    def property(self, name: str) -> Array:
        return pa.array([found.get(name) for found in self._properties], pa.string())

    def as_headers(self) -> Array:
        users = [
            [(name, value.encode()) for name, value in found.items() if name not in props.RESERVED]
            for found in self._properties
        ]
        return pa.array([[{"key": name, "value": value} for name, value in pairs] or None for pairs in users], HEADERS)

    def as_map(self) -> Array:
        return pa.array([list(found.items()) for found in self._properties], pa.map_(pa.string(), pa.string()))

    def record(self, row: int) -> Record:
        return self._records[row]


def _walked(data: bytes) -> list[int]:
    """Return the positions of records by their sizes. Raises MessageError if these do not lead to the end."""
    begins: list[int] = []
    at, end = 0, len(data)
    while end - at >= FIXED_BYTES:
        begins.append(at)
        (size,) = _SIZE.unpack_from(data, at)
        if size < FIXED_BYTES:
            break
        at += size
    if at != end:
        raise MessageError(f"the bytes from {at} to {end} are no records")
    return begins


def _array(kind: Any, count: int, *buffers: Any, children: Sequence[Array] | None = None) -> Array:
    found = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(kind, count, found, children=children)


def rows_of(
    data: bytes,
    queue: Queue,
    begin: int,
    end: int,
    columns: Sequence[str],
    *,
    tags: Sequence[str] = (),
    strict: bool = True,
) -> Rows:
    """Return the rows for a batch of these columns, decoded by the compiled module unless it declines.

    Args:
        data: records of one or more pull responses
        queue: the queue
        begin: first offset
        end: offset after the last one
        columns: columns of the batch
        tags: if not empty, only messages with one of these tags become rows
        strict: True if a body that cannot be decompressed raises MessageError; False if it becomes null
    Raises:
        MessageError: the bytes are not records
    """
    rows = _decoded(data, queue, begin, end, columns, tags) or RecordRows(data, queue, begin, end)
    rows.tags, rows.is_strict = tags, strict
    return rows


def _decoded(
    data: bytes, queue: Queue, begin: int, end: int, columns: Sequence[str], tags: Sequence[str]
) -> SliceRows | None:
    needed = {canonical(name) for name in columns}  # Spark keeps the letter case of a user's schema
    if tags:
        needed.add("tags")
    is_retry = queue.topic.startswith(names.RETRY_PREFIX)
    wanted = {_PROPERTIES[name] for name in needed if name in _PROPERTIES and (name != "topic" or is_retry)}
    texts = tuple(name.encode() for name in wanted)
    skipped = () if "properties" in needed else _RESERVED if "headers" in needed else None
    found = fast.decode_slice(data, begin, end, texts, skipped)
    headers = None
    if found is not None and {"headers", "properties"} <= needed:
        headers = fast.decode_slice(data, begin, end, (), _RESERVED)
    return None if found is None else SliceRows(data, queue, tuple(wanted), found, headers)


def _words(texts: Array) -> Array:
    """Return the words of each text; an empty list for a null."""
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts.drop_null()))
    counts = np.zeros(len(texts), np.int32)
    counts[texts.is_valid().to_numpy(zero_copy_only=False)] = pc.list_value_length(words).to_numpy()
    bounds = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    return pa.ListArray.from_arrays(pa.array(bounds), words.flatten())


def _times(milliseconds: Array) -> Array:
    return pa.array(milliseconds.astype(np.int64) * 1000).cast(_TIME)


_INT: Final = pa.int32()
_TIME: Final = pa.timestamp("us", tz="UTC")
_COLUMNS: Final[dict[str, tuple[Any, Callable[[Rows], Array]]]] = {
    "topic": (pa.string(), Rows.topics),
    "brokerName": (pa.string(), lambda rows: rows.repeated(rows.queue.broker_name)),
    "queueId": (_INT, lambda rows: rows.repeated(pa.scalar(rows.queue.queue_id, _INT))),
    "queueOffset": (pa.int64(), lambda rows: pa.array(rows.offsets)),
    "messageId": (pa.string(), Rows.message_ids),
    "keys": (pa.list_(pa.string()), lambda rows: _words(rows.property(props.KEYS))),
    "tags": (pa.string(), lambda rows: rows.property(props.TAGS)),
    "body": (pa.binary(), lambda rows: rows.bodies),
    "bornTime": (_TIME, lambda rows: _times(rows.born_ms)),
    "storeTime": (_TIME, lambda rows: _times(rows.stored_ms)),
    "reconsumeTimes": (_INT, lambda rows: pa.array(rows.reconsume_times)),
    "properties": (pa.map_(pa.string(), pa.string()), lambda rows: rows.as_map()),
    "key": (pa.binary(), lambda rows: rows.property(props.KEYS).cast(pa.binary())),
    "value": (pa.binary(), lambda rows: rows.bodies),
    "partition": (_INT, lambda rows: rows.repeated(pa.scalar(rows.queue.queue_id, _INT))),
    "offset": (pa.int64(), lambda rows: pa.array(rows.offsets)),
    "timestamp": (_TIME, lambda rows: _times(rows.born_ms)),
    "timestampType": (_INT, lambda rows: rows.repeated(pa.scalar(CREATE_TIME, _INT))),
    "headers": (HEADERS, lambda rows: rows.as_headers()),
}
"""Arrow type of each column, and the function that makes the column."""
_PROPERTIES: Final = {
    "messageId": props.UNIQUE_KEY,
    "keys": props.KEYS,
    "key": props.KEYS,
    "tags": props.TAGS,
    "topic": props.RETRY_TOPIC,
}
"""The property that a column contains; the topic only in a retry topic."""
_RESERVED: Final = tuple(name.encode() for name in sorted(props.RESERVED))


@cache
def _made_of(columns: tuple[str, ...]) -> tuple[pa.Schema, list[Callable[[Rows], Array]]]:
    """Return the Arrow schema of columns, and the functions that make them."""
    found = [_COLUMNS[canonical(name)] for name in columns]
    return pa.schema([(name, kind) for name, (kind, _) in zip(columns, found, strict=True)]), [
        make for _, make in found
    ]
