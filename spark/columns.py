"""Message records as Arrow columns: the bytes of a pull become columns without a Python object per message, except for
compressed bodies, ids of messages without a unique key, and pulls with unreadable records or properties that are no UTF-8."""

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
from ..protocol.codes import SYS_BORNHOST_V6, SYS_COMPRESSED, SYS_STOREHOST_V6
from ..protocol.message import (
    BEGIN_BYTES,
    BEGIN_MARK,
    CHECKSUM_BYTES,
    CHECKSUM_MARK,
    FIXED_BYTES,
    MAGIC,
    MessageError,
    decode_record,
    decompressed,
    offset_in,
)
from ..protocol.names import Queue
from .config import PLAIN_BYTES
from .options import CREATE_TIME, canonical

# ------------------------------------------------------------------------------
# The parts of message records: bodies, and names and values of properties.
#
# The body of a pull response is a sequence of records (`protocol/message.py`). The bytes of this body become one Arrow
# buffer. The positions of the parts are computed for all records together, and Arrow copies the bytes between two
# positions.


Array = Any  # numpy and Arrow arrays; Arrow ships no type stubs

_SIZE: Final = Struct(">i")
_HEAD: Final = np.dtype(  # the part whose layout does not depend on IPv4 or IPv6 addresses
    [
        ("size", ">i4"),
        ("magic", ">u4"),
        ("crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_ms", ">i8"),
    ]
)
_HEAD_BYTES: Final = np.dtype((np.void, _HEAD.itemsize))
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "big")
_INT32, _INT64 = np.dtype(">i4"), np.dtype(">i8")
_UINT16: Final = np.dtype(">u2")
_NAME_END, _PAIR_END = ord(props.NAME_END), ord(props.PAIR_END)
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_MARKS: Final = tuple(  # in the order from the end of the properties
    (int.from_bytes(mark, "big"), size) for mark, size in ((CHECKSUM_MARK, CHECKSUM_BYTES), (BEGIN_MARK, BEGIN_BYTES))
)


class RecordArrays:
    """Positions of the parts of records. `at` has the position of each record."""

    def __init__(self, data: bytes, at: Array = None) -> None:
        self.data = data
        self._bytes = np.frombuffer(data, np.uint8)
        try:
            self.at = _begins(data, self._bytes) if at is None else at
            # selected as bytes, because numpy would select each field separately
            self.heads = _read(data, self.at, _HEAD_BYTES).view(_HEAD)
            flags = self.heads["sys_flag"]
            born = np.where(flags & SYS_BORNHOST_V6, 20, 8)
            hosts = born + np.where(flags & SYS_STOREHOST_V6, 20, 8)
            self._body_at = self.at + 72 + hosts
            self._topic_at = self._body_at + _read(self.data, self._body_at - 4, _INT32)
            self._size_at = self._topic_at + 1 + self._bytes[self._topic_at]
            ends = self._size_at + 2 + _read(self.data, self._size_at, _UINT16)
            self.store_ms = _read(self.data, self.at + 48 + born, _INT64)
            self.reconsume_times = _read(self.data, self.at + 56 + hosts, _INT32).astype(np.int32)
        except IndexError:
            raise _malformed(data) from None
        whole = (ends == self.at + self.heads["size"]) & (self._topic_at >= self._body_at)
        if not ((self.heads["magic"] == MAGIC) & whole).all():
            raise _malformed(data)
        self._ends = ends

    def select(self, which: Array) -> RecordArrays:
        return RecordArrays(self.data, self.at[which])

    def bodies(self) -> Array:
        """Return the stored bodies as a binary array."""
        return _cut(self.data, [self._body_at, self._topic_at])

    def texts(self) -> Array:
        """Return the encoded properties, including the broker's marks at the end, as a binary array."""
        return _cut(self.data, [self._size_at + 2, self._ends])

    def properties(self) -> Array:
        """Return the encoded properties without the broker's marks, which have no name and are therefore no properties."""
        begins, ends = self._size_at + 2, self._ends.copy()
        for mark, size in _MARKS:
            at = ends - size
            marked = np.flatnonzero((_read(self.data, np.maximum(at, 0), _UINT16) == mark) & (at >= begins))
            behind = _read(self.data, at[marked] + 2, np.dtype((np.void, size - 2))).view(np.uint8)
            if not (behind > _PAIR_END).all():  # an ordinary property may end with the bytes of a mark
                marked = marked[(behind.reshape(-1, size - 2) > _PAIR_END).all(axis=1)]
            ends[marked] -= size
        return _cut(self.data, [begins, ends])


def _read(data: bytes, at: Array, kind: np.dtype[Any]) -> Array:
    """Return the values at these positions, selected from a view in which a value starts at every byte."""
    count = max(len(data) - kind.itemsize + 1, 0)
    return np.ndarray((count,), kind, data, 0, (1,))[at]


def _begins(data: bytes, octets: Array) -> Array:
    """Return the positions of records. Raises MessageError.

    All magic numbers are found in one pass, and the size of each record must lead to the next magic number. If it does
    not, because a body contains the magic number as well, the sizes are followed one by one.
    """
    at = np.flatnonzero(octets[4:-3] == _MAGIC_BYTES[0])
    for number, octet in enumerate(_MAGIC_BYTES[1:], 5):
        at = at[octets[at + number] == octet]
    sizes = _read(data, at, _INT32)
    ends = at + sizes
    is_chain = len(at) and not at[0] and ends[-1] == len(data) and (ends[:-1] == at[1:]).all()
    return at if is_chain and sizes.min() >= FIXED_BYTES else np.array(_walked(data), np.int64)


def readable(data: bytes) -> tuple[Array, list[int]]:
    """Return the positions of readable records, and the queue offsets of unreadable ones.

    Raises MessageError if the sizes do not lead from record to record.
    """
    at: list[int] = []
    unreadable: list[int] = []
    for position in _walked(data):
        try:
            decode_record(data, position, "replace")
        except MessageError:
            unreadable.append(offset_in(data[position : position + FIXED_BYTES]))
        else:
            at.append(position)
    return np.array(at, np.int64), unreadable


def _walked(data: bytes) -> list[int]:
    begins: list[int] = []
    size_at, at, end = _SIZE.unpack_from, 0, len(data)
    while end - at >= FIXED_BYTES:
        begins.append(at)
        (size,) = size_at(data, at)
        if size < FIXED_BYTES:
            raise _malformed(data)
        at += size
    if at != end:
        raise _malformed(data)
    return begins


def _malformed(data: bytes) -> MessageError:
    """Return the decoder's error for bytes that are not records."""
    position = 0
    try:
        while position < len(data):
            position += decode_record(data, position, "replace").size
    except MessageError as error:
        return error
    return MessageError("the records cannot be read")


def _cut(data: Array, bounds: list[Array], kind: Any = None) -> Array:
    """Return the slices of `data` between pairs of bounds, in order. The slices are selected from an array that also
    contains the gaps between them."""
    count = len(bounds[0])
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2], offsets[1::2] = bounds
    offsets[-1] = offsets[-2] if count else 0
    with_gaps = pa.Array.from_buffers(
        kind or pa.binary(),
        2 * count,
        [None, pa.py_buffer(offsets), data if isinstance(data, pa.Buffer) else pa.py_buffer(data)],
    )
    return with_gaps.take(pa.array(np.arange(0, 2 * count, 2)))


class Properties:
    """Names and values of the properties of all records, by the rules of `protocol.properties.decode`."""

    def __init__(self, texts: Array) -> None:
        self._count = len(texts)
        try:
            texts.cast(pa.string())
        except pa.ArrowInvalid:
            texts = pa.array([text.decode(errors="replace").encode() for text in texts.to_pylist()], pa.binary())
        _, offsets_buffer, data = texts.buffers()
        bounds = np.frombuffer(offsets_buffer, np.int32)[: self._count + 1].astype(np.int64)
        text = np.frombuffer(data, np.uint8)[: bounds[-1]] if data is not None else np.empty(0, np.uint8)
        pair_ends = np.flatnonzero(text == _PAIR_END)
        begins = np.sort(np.concatenate((bounds[:-1], pair_ends + 1)), kind="stable")
        ends = np.sort(np.concatenate((pair_ends, bounds[1:])), kind="stable")
        items_before = np.searchsorted(pair_ends, bounds)
        owners = np.repeat(np.arange(self._count), np.diff(items_before) + 1)
        name_ends = np.flatnonzero(text == _NAME_END)
        if not (len(name_ends) == len(begins) and (name_ends >= begins).all() and (name_ends < ends).all()):
            # some items have no separator or several, so search each item separately
            name_ends = np.append(name_ends, len(text))
            name_ends = name_ends[np.searchsorted(name_ends[:-1], begins)]
        complete = (name_ends > begins) & (ends > name_ends + 1)
        if not complete.all():
            begins, name_ends, ends, owners = (bounds[complete] for bounds in (begins, name_ends, ends, owners))
        self._fill(data, begins, name_ends, ends, owners)

    def _fill(self, data: Any, begins: Array, name_ends: Array, ends: Array, owners: Array) -> None:
        data = data if data is not None else pa.py_buffer(b"")
        coded = _cut(data, [begins, name_ends], pa.string()).dictionary_encode()
        codes = coded.indices.to_numpy()
        key = owners * (len(coded.dictionary) + 1) + codes
        ordered = np.sort(key)
        if (ordered[1:] == ordered[:-1]).any():  # a message has a name twice: the last value counts, as in Java
            _, from_end = np.unique(key[::-1], return_index=True)
            last = np.sort(len(key) - 1 - from_end)
            self._fill(data, begins[last], name_ends[last], ends[last], owners[last])
            return
        self._names = coded
        self._codes = codes
        self._value_bounds = data, [name_ends + 1, ends]
        self._owners = owners

    @cached_property
    def _values(self) -> Array:
        return _cut(*self._value_bounds, pa.string())

    def column(self, name: str) -> Array:
        """Return a property of every message; null if the message lacks it."""
        at = pc.index(self._names.dictionary, pa.scalar(name, pa.string())).as_py()
        items = np.flatnonzero(self._codes == at)
        where = np.full(self._count, -1, np.int64)
        where[self._owners[items]] = items
        return self._values.take(pa.array(where, mask=where < 0))

    def as_headers(self) -> Array:
        """Return the user's properties in the form of Kafka's headers; null for a message without any."""
        reserved = pc.is_in(self._names.dictionary, pa.array(sorted(props.RESERVED))).to_numpy(zero_copy_only=False)
        items = np.flatnonzero(~reserved[self._codes])
        if not len(items):
            return pa.nulls(self._count, HEADERS)
        bounds = np.searchsorted(self._owners[items], np.arange(self._count + 1)).astype(np.int32)
        chosen = pa.array(items)
        values = [self._names.take(chosen).dictionary_decode(), self._values.take(chosen).cast(pa.binary())]
        pairs = pa.StructArray.from_arrays(values, ["key", "value"])
        return pa.ListArray.from_arrays(pa.array(bounds), pairs, mask=pa.array(bounds[1:] == bounds[:-1]))

    def as_map(self) -> Array:
        """Return all properties as a map array."""
        bounds = np.searchsorted(self._owners, np.arange(self._count + 1)).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(bounds), self._names.dictionary_decode(), self._values)


# ------------------------------------------------------------------------------
# Message records as Arrow columns. Only the requested columns are made.


class TooLarge(MessageError):
    """The decompressed bodies of a batch are too large together. `offset`: the first message beyond the limit."""

    def __init__(self, queue: Queue, offset: int) -> None:
        super().__init__(f"{queue}: with the message at offset {offset}, the batch has more than {PLAIN_BYTES} bytes")
        self.offset = offset


class Rows:
    """Records of a queue with offsets from `begin` up to `end` (exclusive).

    Args:
        data: records of one or more pull responses
        queue: the queue
        begin: first offset
        end: offset after the last one
        tags: if not empty, only messages with one of these tags become rows
        strict: True if a body that cannot be decompressed raises MessageError; False if it becomes null
    Attributes:
        unreadable: offsets of records that cannot be read, which are left out
    Raises:
        MessageError: the bytes are not records
    """

    def __init__(
        self, data: bytes, queue: Queue, begin: int, end: int, *, tags: Sequence[str] = (), strict: bool = True
    ) -> None:
        self.unreadable: list[int] = []
        try:
            records = RecordArrays(data)
        except MessageError:
            at, unreadable = readable(data)
            records = RecordArrays(data, at)
            self.unreadable = [offset for offset in unreadable if begin <= offset < end]
        offsets = records.heads["queue_offset"].astype(np.int64)
        wanted = (offsets >= begin) & (offsets < end)
        if not wanted.all():
            records, offsets = records.select(wanted), offsets[wanted]
        self.records = records
        self.queue = queue
        self.offsets = offsets
        self._tags = tags
        self._strict = strict

    def batch(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the columns as a batch. Raises MessageError, and TooLarge."""
        schema, makers = _made_of(tuple(columns))
        batch = pa.RecordBatch.from_arrays([make(self) for make in makers], schema=schema)
        if not self._tags:
            return batch
        return batch.filter(pc.is_in(self.property(props.TAGS), pa.array(self._tags, pa.string())))

    @cached_property
    def _texts(self) -> bytes:
        """The encoded properties of all records, concatenated."""
        data = self.records.texts().buffers()[2]
        return b"" if data is None else data.to_pybytes()

    @cached_property
    def properties(self) -> Properties:
        return Properties(self.records.properties())

    def property(self, name: str) -> Array:
        """Return a property of every message; null if the message lacks it.

        Decoding the properties costs more than everything else. The check that no record has this name takes a tenth of
        the time.
        """
        if (name + props.NAME_END).encode() not in self._texts:
            return pa.nulls(len(self.offsets), pa.string())
        return self.properties.column(name)

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
        at = self.records.at[missing.to_numpy(zero_copy_only=False)].tolist()
        ids = [decode_record(self.records.data, position, "replace").offset_id for position in at]
        return pc.replace_with_mask(keys, missing, pa.array(ids, pa.string()))

    @cached_property
    def bodies(self) -> Array:
        records = self.records
        bodies = records.bodies()
        packed = records.heads["sys_flag"] & SYS_COMPRESSED != 0
        if not packed.any():
            return bodies
        plain: list[bytes | None] = []
        left = PLAIN_BYTES
        for position, offset in zip(records.at[packed].tolist(), self.offsets[packed].tolist(), strict=True):
            body = _plain(records.data, position, self.queue, self._strict)
            left -= len(body or b"")
            if left < 0 and plain:
                raise TooLarge(self.queue, offset)
            plain.append(body)
        return pc.replace_with_mask(bodies, pa.array(packed), pa.array(plain, pa.binary()))

    @cached_property
    def born_times(self) -> Array:
        return _times(self.records.heads["born_ms"])

    @cached_property
    def stored_ms(self) -> Array:
        return self.records.store_ms

    @cached_property
    def reconsume_times(self) -> Array:
        return self.records.reconsume_times

    def as_headers(self) -> Array:
        return self.properties.as_headers()

    def as_map(self) -> Array:
        return self.properties.as_map()


class DecodedRows(Rows):
    """Rows that the compiled module has decoded."""

    def __init__(self, found: fast.Slice, queue: Queue, names: Sequence[str], tags: Sequence[str]) -> None:
        self._found = found
        self.unreadable = []
        self.queue = queue
        self.offsets = np.frombuffer(found.offsets, np.int64)
        self._columns = dict(zip(names, found.columns, strict=True))
        self._tags = tags

    def property(self, name: str) -> Array:
        count, valid, ends, data = self._columns[name]
        return _array(pa.string(), len(self.offsets), None if count == len(self.offsets) else valid, ends, data)

    @cached_property
    def bodies(self) -> Array:
        return _array(pa.binary(), len(self.offsets), None, *self._found.bodies)

    @cached_property
    def born_times(self) -> Array:
        return _times(np.frombuffer(self._found.born_ms, np.int64))

    @cached_property
    def stored_ms(self) -> Array:
        return np.frombuffer(self._found.stored_ms, np.int64)

    @cached_property
    def reconsume_times(self) -> Array:
        return np.frombuffer(self._found.reconsume_times, np.int32)

    def as_headers(self) -> Array:
        count, valid, at, *texts = self._found.pairs
        if not count:
            return pa.nulls(len(self.offsets), HEADERS)
        names, values = _array(pa.string(), count, None, *texts[:2]), _array(pa.binary(), count, None, *texts[2:])
        pairs = pa.StructArray.from_arrays([names, values], ["key", "value"])
        return _array(HEADERS, len(self.offsets), valid, at, children=[pairs])

    def as_map(self) -> Array:
        count, _, at, *texts = self._found.pairs
        names, values = (_array(pa.string(), count, None, *pair) for pair in (texts[:2], texts[2:]))
        return pa.MapArray.from_arrays(_array(pa.int32(), len(self.offsets) + 1, None, at), names, values)


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
    """Return the rows for a batch of these columns, decoded by the compiled module unless it declines."""
    return _decoded(data, queue, begin, end, columns, tags) or Rows(data, queue, begin, end, tags=tags, strict=strict)


def _decoded(
    data: bytes, queue: Queue, begin: int, end: int, columns: Sequence[str], tags: Sequence[str]
) -> Rows | None:
    columns = [canonical(name) for name in columns]  # Spark keeps the letter case of a user's schema
    if fast.MODULE == "pure" or {"headers", "properties"} <= set(columns):
        return None
    if "topic" in columns and queue.topic.startswith(names.RETRY_PREFIX):
        return None  # the original topic is a property of each message
    needed = (*columns, "tags") if tags else columns
    wanted = list(dict.fromkeys(_PROPERTIES[name] for name in needed if name in _PROPERTIES))
    skipped = _RESERVED if "headers" in columns else () if "properties" in columns else None
    found = fast.decode_slice(data, begin, end, tuple(name.encode() for name in wanted), skipped)
    if found is None or ("messageId" in columns and found.columns[wanted.index(props.UNIQUE_KEY)][0] < found.rows):
        return None  # a message lacks the unique key, so its id must be computed from its record
    return DecodedRows(found, queue, wanted, tags)


def _plain(data: bytes, position: int, queue: Queue, strict: bool) -> bytes | None:
    record = decode_record(data, position, "replace")
    try:
        return decompressed(record.body, record.sys_flag)
    except MessageError as error:
        if strict:
            raise MessageError(
                f"{queue}: the message at offset {record.queue_offset} cannot be decoded: {error}; "
                "set failOnDataLoss to false to get its row with a null body"
            ) from None
        return None


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
    "bornTime": (_TIME, lambda rows: rows.born_times),
    "storeTime": (_TIME, lambda rows: _times(rows.stored_ms)),
    "reconsumeTimes": (_INT, lambda rows: pa.array(rows.reconsume_times)),
    "properties": (pa.map_(pa.string(), pa.string()), lambda rows: rows.as_map()),
    "key": (pa.binary(), lambda rows: rows.property(props.KEYS).cast(pa.binary())),
    "value": (pa.binary(), lambda rows: rows.bodies),
    "partition": (_INT, lambda rows: rows.repeated(pa.scalar(rows.queue.queue_id, _INT))),
    "offset": (pa.int64(), lambda rows: pa.array(rows.offsets)),
    "timestamp": (_TIME, lambda rows: rows.born_times),
    "timestampType": (_INT, lambda rows: rows.repeated(pa.scalar(CREATE_TIME, _INT))),
    "headers": (HEADERS, lambda rows: rows.as_headers()),
}
"""Arrow type of each column, and the function that makes the column."""
_PROPERTIES: Final = {"messageId": props.UNIQUE_KEY, "keys": props.KEYS, "key": props.KEYS, "tags": props.TAGS}
"""The property that a column contains."""
_RESERVED: Final = tuple(name.encode() for name in sorted(props.RESERVED))


@cache
def _made_of(columns: tuple[str, ...]) -> tuple[pa.Schema, list[Callable[[Rows], Array]]]:
    """Return the Arrow schema of columns, and the functions that make them."""
    found = [_COLUMNS[canonical(name)] for name in columns]
    return pa.schema([(name, kind) for name, (kind, _) in zip(columns, found, strict=True)]), [
        make for _, make in found
    ]
