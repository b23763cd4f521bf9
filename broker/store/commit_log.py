"""The commit log: record after record, each with a checksum. Finds whole ones, and those behind damage.

Bytes of a client may look like records, places and checksums included. So nothing in a record is ever looked at as one.
A record begins where the one before it ends, where a segment begins, where an index says so, or where its own mark does
(`marks`). Behind damage only such a place is gone on from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ...protocol.checksum import crc32
from ...protocol.config import MAX_BODY_BYTES, MAX_FRAME_BYTES, MAX_PROPERTY_BYTES, MAX_TOPIC_CHARS
from ...protocol.message import (
    BEGIN_BYTES,
    CHECKSUM_BYTES,
    MAGIC,
    MAX_HEAD_BYTES,
    MAX_RECORD_BYTES,
    MessageError,
    Record,
    body_begin,
    decode_record,
    has_checksum,
    is_intact,
    record_size,
)
from ..config import RECOVERY_READ_BYTES
from .files import Damaged, OpenFiles
from .marks import NOWHERE, Marks
from .segments import SegmentedFile
from .written import Written

_MAGIC: Final = MAGIC.to_bytes(4, "big")
_HEAD_BYTES: Final = 36  # up to the position in the log
_LONGEST: Final = MAX_RECORD_BYTES - MAX_BODY_BYTES + MAX_FRAME_BYTES  # earlier releases had no limit on replies

_TAIL_BYTES: Final = 1 + MAX_TOPIC_CHARS + 2 + MAX_PROPERTY_BYTES

Buffer = bytes | memoryview
IsNamed = Callable[[str, int, int, int, int], bool]
"""Whether the index of a topic's queue has, at an offset, a record of that position and size."""


class Damage(NamedTuple):
    """A part of the log that holds no whole record."""

    position: int
    size: int


class CommitLog(SegmentedFile):
    """Records at and behind `summed_from` have a checksum over all of them; those of earlier releases may have none."""

    def __init__(
        self, folder: Path, segment_bytes: int, open_files: OpenFiles, marks: Marks, *, is_synced: bool = False
    ) -> None:
        super().__init__(folder / "commitlog", segment_bytes, open_files, stays_open=True, is_synced=is_synced)
        self.summed_from = NOWHERE
        self.written = Written(self.end)
        self._marks = marks

    def append(self, data: bytes | bytearray) -> None:
        super().append(data)
        try:
            self.written.add(data)
        except Exception:  # no memory: the bytes are there, and are checked record by record
            self.written = Written(self.end)

    def read_written(self, position: int, size: int) -> Buffer:
        """The bytes that were written at a position, which must be one that `written` has. Raises Damaged if they, or bytes
        nearby, have changed."""
        if not 0 < size <= self.end - position:
            raise Damaged(f"{self.directory} has no {size} bytes at {position}")
        begin, end, before, behind = self.written.part(position, position + size)
        data = self.read(begin, end - begin)
        if crc32(data, before) != behind:
            raise Damaged(f"{self.directory} is not as it was written between {begin} and {end}")
        return data if len(data) == size else memoryview(data)[position - begin : position - begin + size]

    def truncate(self, end: int) -> None:
        super().truncate(end)
        self.written = Written(self.end)

    def drop_first(self) -> None:
        super().drop_first()
        self.written.forget_before(self.begin)

    def record_in(self, data: bytes, at: int, position: int) -> Record | None:
        """The record that `data` holds at `at`, if it is intact and was written at that position of the log."""
        size = record_size(data, at)
        if not size or at + size > len(data):
            return None
        try:
            record = decode_record(data, at)
        except MessageError:
            return None
        is_summed = position >= self.summed_from
        is_whole = record.physical_offset == position and is_intact(data, at, record, is_summed=is_summed)
        return record if is_whole else None

    def record_at(self, position: int) -> Record | None:
        """The whole record at a position of the log, which must be one where a record begins; None if it is damaged."""
        size = self._size_at(position, MAX_RECORD_BYTES)
        return self.record_in(self.read_up_to_damage(position, size), 0, position) if size else None

    def without_body(self, position: int, size: int) -> bytes:
        """The bytes before and behind the body of the record that an index has there; as much as can be read."""
        head = self.read_up_to_damage(position, min(size, MAX_HEAD_BYTES))
        body_at = body_begin(head)
        tail_bytes = size - body_at - int.from_bytes(head[body_at - 4 : body_at], "big")
        if not 0 < tail_bytes <= _TAIL_BYTES:
            return b""
        return head[:body_at] + self.read_up_to_damage(position + size - tail_bytes, tail_bytes)

    def _size_at(self, position: int, most: int) -> int:
        """The size of the record at a position by its head; 0 if that is not there, or of another place."""
        head = self.read_up_to_damage(position, _HEAD_BYTES)
        size = record_size(head, 0, most)
        if not size or len(head) < _HEAD_BYTES or int.from_bytes(head[28:36], "big") != position:
            return 0
        return size if position + size <= self.end else 0

    def replay(
        self, position: int, take: Callable[[Record], None], is_named: IsNamed
    ) -> tuple[int, list[Damage], Damage]:
        """Calls `take` with the log's whole records from `position` on, where one must begin. How many, the damage
        between, the torn tail."""
        records = 0
        damage: list[Damage] = []
        while position < self.end:
            data = self.read_up_to_damage(position, RECOVERY_READ_BYTES)
            at = 0
            while (record := self.record_in(data, at, position + at)) is not None:
                take(record)
                at += record.size
                records += 1
            position += at
            if at == 0:
                found = self._behind(position, is_named)
                if found is None:
                    return records, damage, Damage(position, self.end - position)
                damage.append(Damage(position, found - position))
                position = found
        return records, damage, Damage(position, 0)

    # Behind damage

    def _behind(self, position: int, is_named: IsNamed) -> int | None:
        """Where a record begins behind a damaged one; None if nothing says so. The bytes that its head covers are searched
        only if the head must be wrong."""
        size = self._size_at(position, _LONGEST)
        if size and self._leads_on(position, size, is_named):
            return position + size if position + size < self.end else None
        return self.next_record(position + 1, is_named)

    def _leads_on(self, position: int, size: int, is_named: IsNamed) -> bool:
        """Whether the record at `position` ends where its head says: only its body is damaged, or a record begins there."""
        try:
            data = self.read_up_to_damage(position, size)
            if has_checksum(data, 0, decode_record(data)):
                return True
        except MessageError:
            pass
        end = position + size
        if end in self.starts or self._begins(end, is_named):
            return True
        return position < self._marks.begin and self.record_at(end) is not None

    def next_record(self, position: int, is_named: IsNamed) -> int | None:
        """Where a record begins at or behind a position; None if nothing says so."""
        segment_end = self.next_start(position)
        while position < segment_end:
            data = self.read_up_to_damage(position, min(RECOVERY_READ_BYTES, segment_end - position))
            at = data.find(_MAGIC, 4)
            while at >= 0:
                begin = position + at - 4
                claimed = data[at + 24 : at + 32]  # at the data's end, only a part of it, or nothing
                if begin.to_bytes(8, "big").startswith(claimed) and self._begins(begin, is_named):
                    return begin
                at = data.find(_MAGIC, at + 1)
            if len(data) < 8:
                break
            position += len(data) - 7
        return segment_end if segment_end < self.end else None

    def _begins(self, position: int, is_named: IsNamed) -> bool:
        """Whether a whole record begins there, by its mark or by an index. The checksums, which cost most, come last."""
        size = self._size_at(position, MAX_RECORD_BYTES)
        if not size:
            return False
        tail = BEGIN_BYTES + CHECKSUM_BYTES
        mark = self.read_up_to_damage(position + size - tail, tail)[:BEGIN_BYTES]
        return (self._marks.is_mark(mark, position) or self._is_named(position, size, is_named)) and self.record_at(
            position
        ) is not None

    def _is_named(self, position: int, size: int, is_named: IsNamed) -> bool:
        head = self.read_up_to_damage(position, MAX_HEAD_BYTES)
        body_at = body_begin(head)
        topic_at = body_at + int.from_bytes(head[body_at - 4 : body_at], "big")
        if len(head) < body_at or topic_at >= size:
            return False
        name = self.read_up_to_damage(position + topic_at, 1 + MAX_TOPIC_CHARS)
        topic = name[1 : 1 + int.from_bytes(name[:1], "big")].decode(errors="replace")
        queue_id, offset = int.from_bytes(head[12:16], "big"), int.from_bytes(head[20:28], "big")
        return is_named(topic, queue_id, offset, position, size)
