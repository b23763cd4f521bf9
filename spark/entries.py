"""Rows as the entries of batches, without a Python object per row.

SEND_BATCH_MESSAGE carries entry after entry: a head, the body, and the properties' text behind its length
(`protocol.batch.encode_batch`). Each part of all rows is one Arrow column. Arrow joins them; the data of the joined column
are the entries of all rows, one behind the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..client.sending.outgoing import PROPERTY_BYTES
from ..client.sending.unique_keys import UniqueKeys
from ..protocol import properties as props
from ..protocol.config import MAX_BODY_BYTES

Array = Any  # numpy's and Arrow's arrays: Arrow ships no types

_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">u4"), ("crc", ">u4"), ("flag", ">i4"), ("body_size", ">i4")])
_TEXT_SIZE: Final = np.dtype(">i2")
_HEX: Final = np.array([list(b"%02X" % octet) for octet in range(256)], np.uint8)
_RESERVED: Final = pa.array(sorted(props.RESERVED))
_JOINED: Final = pa.scalar(b"", pa.binary())
_ID_BYTES: Final = 32


class MessageIds:
    """Ids as the client's (`UniqueKeys`), many at once. Time and counter are one number here, so that a counter that has gone
    round does not meet its former self."""

    def __init__(self) -> None:
        keys = UniqueKeys()
        self._prefix = np.frombuffer(keys.prefix.encode(), np.uint8)
        self._began_ms = keys.month_began_ms
        self._next = 0

    def take(self, count: int) -> Array:
        """Takes ids in Arrow's binary array."""
        now_ms = int(time.time() * 1000) - self._began_ms & 0x7FFFFFFF
        first = max(self._next, now_ms << 16)
        self._next = first + count
        numbers = np.arange(first, first + count, dtype=">u8").view(np.uint8).reshape(count, 8)[:, 2:]
        ids = np.empty((count, _ID_BYTES), np.uint8)
        ids[:, : len(self._prefix)] = self._prefix
        ids[:, len(self._prefix) :] = _HEX[numbers].reshape(count, 12)
        return _fixed(ids, _ID_BYTES)


@dataclass(frozen=True, slots=True)
class Entries:
    """`data`: one entry of each row, in Arrow's binary array. `body_sizes`: bytes. `faulty`: the rows that cannot be sent."""

    data: Array
    body_sizes: Array
    faulty: Array

    def take(self, order: Array) -> Entries:
        return Entries(self.data.take(pa.array(order)), self.body_sizes[order], self.faulty[order])

    def bounds(self) -> Array:
        """The positions where entries begin in the bytes of all, and where the last one ends."""
        offsets = np.frombuffer(self.data.buffers()[1], np.int32)
        return offsets[self.data.offset : self.data.offset + len(self.data) + 1]

    def octets(self) -> memoryview:
        return memoryview(self.data.buffers()[2] or b"")


def to_entries(batch: pa.RecordBatch, ids: MessageIds) -> Entries:
    """The entries of rows whose columns `sink.check_columns` has accepted. The entry of a faulty row must not be sent."""
    count = batch.num_rows
    bodies = _column(batch, "body", pa.binary())
    body_sizes = _sizes(bodies)
    faulty = (body_sizes == 0) | (body_sizes > MAX_BODY_BYTES)
    texts = _texts(batch, ids, faulty)
    text_sizes = _sizes(texts)
    faulty |= text_sizes > PROPERTY_BYTES
    heads = np.zeros(count, _HEAD)
    heads["size"] = _HEAD.itemsize + _TEXT_SIZE.itemsize + body_sizes + text_sizes
    heads["body_size"] = body_sizes
    sizes = np.minimum(text_sizes, PROPERTY_BYTES).astype(_TEXT_SIZE)
    parts = [_fixed(heads, _HEAD.itemsize), _filled(bodies), _fixed(sizes, _TEXT_SIZE.itemsize), texts]
    return Entries(pc.binary_join_element_wise(*parts, _JOINED), body_sizes, faulty)


def _texts(batch: pa.RecordBatch, ids: MessageIds, faulty: Array) -> Array:
    """The properties' texts (`client.outgoing.properties_text`), binary. Marks rows as faulty that it refuses."""
    parts: list[Array] = []
    for name, column in ((props.KEYS, _keys(batch, faulty)), (props.TAGS, _column(batch, "tags", pa.string()))):
        if column is not None and column.null_count < len(column):
            parts.append(_named(name, column, faulty, props.PAIR_END))
    made = ids.take(batch.num_rows)
    given = _column(batch, "messageId", pa.string())
    if given is not None:
        given = _checked(given, faulty).cast(pa.binary())
        made = pc.if_else(pc.greater(_filled(pc.binary_length(given), 0), 0), given, made)
    parts += [pa.scalar((props.UNIQUE_KEY + props.NAME_END).encode()), made]
    others = _properties(batch, faulty)
    if others is not None:
        parts.append(others)
    return pc.binary_join_element_wise(*parts, _JOINED)


def _column(batch: pa.RecordBatch, name: str, kind: Any) -> Array | None:
    return batch.column(name).cast(kind) if name in batch.schema.names else None


def _keys(batch: pa.RecordBatch, faulty: Array) -> Array | None:
    """The keys with spaces between them."""
    if "keys" not in batch.schema.names:
        return None
    keys = batch.column("keys")
    if not pa.types.is_list(keys.type):
        return keys.cast(pa.string())
    joined = pc.binary_join(keys.cast(pa.list_(pa.string())), " ")
    # a list with a null joins to null, one with an empty key to nothing: both are lists, and no keys
    faulty |= _true(pc.greater(pc.list_value_length(keys), 0)) & (_sizes(joined) == 0)
    return joined


def _named(name: str, texts: Array, faulty: Array, end: str) -> Array:
    """The properties of this name, binary, and nothing where there is none."""
    texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, pa.string()), _checked(texts, faulty))
    begin = pa.scalar((name + props.NAME_END).encode())
    return _filled(pc.binary_join_element_wise(begin, texts.cast(pa.binary()), pa.scalar(end.encode()), _JOINED))


def _checked(texts: Array, faulty: Array) -> Array:
    """Returns the texts, and marks rows as faulty whose text is blank, but not empty, or holds a separator."""
    faulty |= _is_illegal(texts) & (_sizes(texts) > 0)
    return texts


def _is_illegal(texts: Array) -> Array:
    """Whether texts are blank, or hold a separator."""
    blank = _true(pc.equal(pc.binary_length(pc.utf8_trim_whitespace(texts)), 0))
    return blank | _true(pc.match_substring_regex(texts, f"[{props.NAME_END}{props.PAIR_END}]"))


def _properties(batch: pa.RecordBatch, faulty: Array) -> Array | None:
    """The users' properties, binary; each begins with the separator from the one before."""
    if "properties" not in batch.schema.names:
        return None
    maps = batch.column("properties")
    pairs = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    owners, items = pc.list_parent_indices(pairs).to_numpy(), pc.list_flatten(pairs)
    if not len(items):
        return None
    names, values = items.field(0), items.field(1)
    kept = ~_true(pc.is_in(names, _RESERVED))
    wrong = kept & (_is_illegal(names) | _is_illegal(values) | _true(values.is_null()))
    faulty[owners[wrong]] = True
    joined = pc.binary_join_element_wise(
        pa.scalar(props.PAIR_END), names, pa.scalar(props.NAME_END), _filled(values, ""), pa.scalar("")
    )
    bounds = np.searchsorted(owners[kept], np.arange(len(maps) + 1)).astype(np.int32)
    of_rows = pa.ListArray.from_arrays(pa.array(bounds), joined.filter(pa.array(kept)))
    return pc.binary_join(of_rows, "").cast(pa.binary())


def _fixed(values: Array, size: int) -> Array:
    """Arrow's binary array of values that have `size` bytes each."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(size)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    )


def _filled(values: Array, with_value: Any = b"") -> Array:
    return values.fill_null(with_value) if values.null_count else values


def _sizes(values: Array) -> Array:
    """The sizes in bytes; 0 for a null."""
    return _filled(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)


def _true(values: Array) -> Array:
    """False for a null."""
    return _filled(values, False).to_numpy(zero_copy_only=False)
