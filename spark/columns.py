"""Message records as Arrow columns, without a Python object per message. Only the columns that are wanted are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..protocol import names
from ..protocol import properties as props
from ..protocol.codes import SYS_COMPRESSED
from ..protocol.compression import decompressed
from ..protocol.message import MessageError, decode_record
from ..protocol.queue import Queue
from .config import PLAIN_BYTES
from .records import HEADERS, Array, Properties, RecordArrays, readable
from .schema import CREATE_TIME


class TooLarge(MessageError):
    """The bodies are too large together when they are decompressed. offset: of the first one that is too much."""

    def __init__(self, queue: Queue, offset: int) -> None:
        super().__init__(f"{queue}: with the message at offset {offset}, the batch has more than {PLAIN_BYTES} bytes")
        self.offset = offset


class Rows:
    """A queue's records with offsets from `begin` up to `end`.

    tags: rows have one of them, if any is given. strict: a body that cannot be decompressed raises MessageError, which
    names the offset; else it is null. `unreadable`: the offsets of records that cannot be read, which are left out. Raises
    MessageError for bytes that are not records.
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
            records, offsets = records.some(wanted), offsets[wanted]
        self.records = records
        self.queue = queue
        self.offsets = offsets
        self._tags = tags
        self._strict = strict

    def batch(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Raises MessageError, and TooLarge."""
        schema, makers = _made_of(tuple(columns))
        batch = pa.RecordBatch.from_arrays([make(self) for make in makers], schema=schema)
        if not self._tags:
            return batch
        return batch.filter(pc.is_in(self.property(props.TAGS), pa.array(self._tags, pa.string())))

    @cached_property
    def _texts(self) -> bytes:
        """The properties' texts of all records, one behind the other."""
        data = self.records.texts().buffers()[2]
        return b"" if data is None else data.to_pybytes()

    @cached_property
    def properties(self) -> Properties:
        return Properties(self.records.properties())

    def property(self, name: str) -> Array:
        """One property of every message, null where it has none. Reading the properties takes longer than all else; finding
        that no record has one of this name takes a tenth of that."""
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
        """The sender's unique key, or the broker's offset id."""
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
    """The words of each text; none for a null."""
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
    "storeTime": (_TIME, lambda rows: _times(rows.records.store_ms)),
    "reconsumeTimes": (_INT, lambda rows: pa.array(rows.records.reconsume_times)),
    "properties": (pa.map_(pa.string(), pa.string()), lambda rows: rows.properties.as_map()),
    "key": (pa.binary(), lambda rows: rows.property(props.KEYS).cast(pa.binary())),
    "value": (pa.binary(), lambda rows: rows.bodies),
    "partition": (_INT, lambda rows: rows.repeated(pa.scalar(rows.queue.queue_id, _INT))),
    "offset": (pa.int64(), lambda rows: pa.array(rows.offsets)),
    "timestamp": (_TIME, lambda rows: rows.born_times),
    "timestampType": (_INT, lambda rows: rows.repeated(pa.scalar(CREATE_TIME, _INT))),
    "headers": (HEADERS, lambda rows: rows.properties.as_headers()),
}
"""The columns of `schema`: Arrow's type, and how a column is made."""


@cache
def _made_of(columns: tuple[str, ...]) -> tuple[pa.Schema, list[Callable[[Rows], Array]]]:
    """Arrow's schema of some columns, and how each is made."""
    return pa.schema([(name, _COLUMNS[name][0]) for name in columns]), [_COLUMNS[name][1] for name in columns]
