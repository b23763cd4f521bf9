"""Message records as Arrow columns.

The compiled module makes the columns from the bytes of a pull, without a Python object per message. It declines names that
occur twice in a message, more than 64 properties, texts that are not UTF-8, and records that cannot be read. For these, and
without a compiled module, each record is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from struct import Struct
from typing import Any, Final, NamedTuple

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
_KINDS: Final = (np.int64, np.int64, np.int64, np.int32, np.int32)  # of the fields of `Rows`, from offsets on
MAP: Final = pa.map_(pa.string(), pa.string())
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class TooLarge(MessageError):
    """The decompressed bodies of a batch are too large together. `offset`: the first message beyond the limit."""

    def __init__(self, queue: Queue, offset: int) -> None:
        super().__init__(f"{queue}: with the message at offset {offset}, the batch has more than {PLAIN_BYTES} bytes")
        self.offset = offset


@dataclass
class Rows:
    """Decoded messages of a queue.

    Attributes:
        data: the records
        offsets, born_ms, stored_ms, reconsume_times, sys_flags: fields of the records
        raw_bodies: the bodies as stored
        texts: properties by name; null for a message that lacks it
        headers: the user's properties in the form of Kafka's headers, null for a message without any; None if not needed
        pairs: all properties as a map array; None if not needed
        unreadable: offsets of records that cannot be read, which are left out
        tags: if not empty, only messages with one of these tags become rows
        is_strict: True if a body that cannot be decompressed raises MessageError; False if it becomes null
    """

    data: bytes
    queue: Queue
    offsets: Array
    born_ms: Array
    stored_ms: Array
    reconsume_times: Array
    sys_flags: Array
    raw_bodies: Array
    texts: Mapping[str, Array]
    headers: Array | None
    pairs: Array | None
    unreadable: Sequence[int] = ()
    tags: Sequence[str] = ()
    is_strict: bool = True

    def batch(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the columns as a batch. Raises MessageError, and TooLarge."""
        schema, makers = _made_of(tuple(columns))
        batch = pa.RecordBatch.from_arrays([make(self) for make in makers], schema=schema)
        if not self.tags:
            return batch
        return batch.filter(pc.is_in(self.texts[props.TAGS], pa.array(self.tags, pa.string())))

    def repeated(self, value: Any) -> Array:
        return pa.repeat(value, len(self.offsets))

    def topics(self) -> Array:
        topics = self.repeated(self.queue.topic)
        if self.queue.topic.startswith(names.RETRY_PREFIX):
            topics = pc.coalesce(self.texts[props.RETRY_TOPIC], topics)
        return topics

    def message_ids(self) -> Array:
        """Return the sender's unique keys, or the broker's offset ids of messages without one."""
        keys = self.texts[props.UNIQUE_KEY]
        if not keys.null_count:
            return keys
        missing = keys.is_null()
        positions = {offset_in(self.data[at : at + FIXED_BYTES]): at for at in _walked(self.data)}
        found = self.offsets[missing.to_numpy(zero_copy_only=False)].tolist()
        ids = [decode_record(self.data, positions[offset], "replace").offset_id for offset in found]
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
    """Return the rows with offsets from `begin` to `end` (exclusive) for a batch of these columns, decoded by the compiled
    module unless it declines. Raises MessageError if the bytes are not records."""
    needed = needed_for(queue, columns, tags)
    rows = compiled_rows(data, queue, begin, end, needed) or record_rows(data, queue, begin, end, needed)
    rows.tags, rows.is_strict = tags, strict
    return rows


class Needed(NamedTuple):
    """What columns need of the properties: the texts of some names, and pairs of the user's or of all."""

    texts: tuple[str, ...]
    headers: bool
    pairs: bool


def needed_for(queue: Queue, columns: Sequence[str], tags: Sequence[str] = ()) -> Needed:
    """Return what a batch of these columns needs."""
    found = {canonical(name) for name in columns}  # Spark keeps the letter case of a user's schema
    if tags:
        found.add("tags")
    is_retry = queue.topic.startswith(names.RETRY_PREFIX)
    texts = {_PROPERTIES[name] for name in found if name in _PROPERTIES and (name != "topic" or is_retry)}
    return Needed(tuple(texts), "headers" in found, "properties" in found)


def compiled_rows(data: bytes, queue: Queue, begin: int, end: int, needed: Needed) -> Rows | None:
    """Return the rows as the compiled module decodes them; None if it declines."""
    skipped = () if needed.pairs else _RESERVED if needed.headers else None
    found = fast.decode_slice(data, begin, end, tuple(name.encode() for name in needed.texts), skipped)
    users = fast.decode_slice(data, begin, end, (), _RESERVED) if needed.headers and needed.pairs else found
    if found is None or users is None:
        return None
    numbers = (found.offsets, found.born_ms, found.stored_ms, found.reconsume_times, found.sys_flags)
    texts = {
        name: _array(pa.string(), found.rows, None if count == found.rows else valid, *text)
        for name, (count, valid, *text) in zip(needed.texts, found.columns, strict=True)
    }
    offsets, born, stored, times, flags = (np.frombuffer(*each) for each in zip(numbers, _KINDS, strict=True))
    return Rows(
        data,
        queue,
        offsets,
        born,
        stored,
        times,
        flags,
        _array(pa.binary(), found.rows, None, *found.bodies),
        texts,
        _header_column(users) if needed.headers else None,
        _map_column(found) if needed.pairs else None,
    )


def _header_column(found: fast.Slice) -> Array:
    count, valid, at, *texts = found.pairs
    if not count:
        return pa.nulls(found.rows, HEADERS)
    pairs = _array(pa.string(), count, None, *texts[:2]), _array(pa.binary(), count, None, *texts[2:])
    return _array(HEADERS, found.rows, valid, at, children=[pa.StructArray.from_arrays(pairs, ["key", "value"])])


def _map_column(found: fast.Slice) -> Array:
    count, _, at, *texts = found.pairs
    keys, values = (_array(pa.string(), count, None, *pair) for pair in (texts[:2], texts[2:]))
    return pa.MapArray.from_arrays(_array(pa.int32(), found.rows + 1, None, at), keys, values)


def record_rows(data: bytes, queue: Queue, begin: int, end: int, needed: Needed) -> Rows:
    """Return the rows, decoded record by record. Raises MessageError if the bytes are not records."""
    records: list[Record] = []
    unreadable: list[int] = []
    for at in _walked(data):
        offset = offset_in(data[at : at + FIXED_BYTES])
        if begin <= offset < end:
            try:
                records.append(decode_record(data, at, "replace"))
            except MessageError:
                unreadable.append(offset)
    numbers = [(r.queue_offset, r.born_ms, r.store_ms, r.reconsume_times, r.sys_flag) for r in records]
    properties = [props.decode(record.properties) for record in records] if any(needed) else []
    users = [
        [{"key": name, "value": value.encode()} for name, value in found.items() if name not in props.RESERVED] or None
        for found in (properties if needed.headers else ())
    ]
    columns = ([fields[at] for fields in numbers] for at in range(len(_KINDS)))
    offsets, born, stored, times, flags = (np.array(*each) for each in zip(columns, _KINDS, strict=True))
    return Rows(
        data,
        queue,
        offsets,
        born,
        stored,
        times,
        flags,
        pa.array([record.body for record in records], pa.binary()),
        {name: pa.array([found.get(name) for found in properties], pa.string()) for name in needed.texts},
        pa.array(users, HEADERS) if needed.headers else None,
        pa.array([list(found.items()) for found in properties], MAP) if needed.pairs else None,
        unreadable,
    )


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
    "keys": (pa.list_(pa.string()), lambda rows: _words(rows.texts[props.KEYS])),
    "tags": (pa.string(), lambda rows: rows.texts[props.TAGS]),
    "body": (pa.binary(), lambda rows: rows.bodies),
    "bornTime": (_TIME, lambda rows: _times(rows.born_ms)),
    "storeTime": (_TIME, lambda rows: _times(rows.stored_ms)),
    "reconsumeTimes": (_INT, lambda rows: pa.array(rows.reconsume_times)),
    "properties": (MAP, lambda rows: rows.pairs),
    "key": (pa.binary(), lambda rows: rows.texts[props.KEYS].cast(pa.binary())),
    "value": (pa.binary(), lambda rows: rows.bodies),
    "partition": (_INT, lambda rows: rows.repeated(pa.scalar(rows.queue.queue_id, _INT))),
    "offset": (pa.int64(), lambda rows: pa.array(rows.offsets)),
    "timestamp": (_TIME, lambda rows: _times(rows.born_ms)),
    "timestampType": (_INT, lambda rows: rows.repeated(pa.scalar(CREATE_TIME, _INT))),
    "headers": (HEADERS, lambda rows: rows.headers),
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
