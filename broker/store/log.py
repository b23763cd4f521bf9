"""The commit log: append-only segments of message records, and marks that show where records start after a damaged
part."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import zlib
from array import array
from binascii import b2a_base64
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from hashlib import blake2s
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from ...protocol.bodies import BodyError, shaped
from ...protocol.checksum import crc32
from ...protocol.config import MAX_PROPERTY_BYTES, MAX_TOPIC_CHARS
from ...protocol.message import (
    BEGIN_BYTES,
    BEGIN_MARK,
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
from ..config import MAX_SUMS, RECOVERY_READ_BYTES, SUMMED_AT_ONCE_BYTES, SUMMED_BYTES
from ..runtime.jobs import Call
from . import disk
from .files import Damaged, OpenFiles, StoreError, StoreFailed, StoreFull, Unreadable, write_state

# ------------------------------------------------------------------------------
# A sequence of append-only files, called segments. The name of each is the position of its first byte, in 20 digits.
#
# Positions do not change when old segments are dropped. Nothing is overwritten in place, so readers see acknowledged
# bytes. If a segment is missing, or ends before the start of the next one, there is a gap, in which `read` raises
# Damaged.


# After such an error, earlier writes may be lost as well, because the system forgets which pages it could not write
# (fsyncgate).
_DEVICE_FAILED: Final = (errno.EIO, errno.ENXIO, errno.ENODEV)
_UNREADABLE: Final = (errno.ENOENT, errno.EIO)
_NAME_DIGITS: Final = 20  # digits of a segment's name, which is the position of its first byte
_FAR: Final = 1 << 62  # maximum position: a position must fit into its field of a record, and no log becomes so long
_SUM_BYTES: Final = 1024 * 1024


def write_error(what: str, error: OSError) -> StoreFull:
    """Return the error to raise after the system has refused a write."""
    kind = StoreFailed if error.errno in _DEVICE_FAILED else StoreFull
    return kind(f"{what}: {error.strerror}")


def _is_ours(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return len(name) == _NAME_DIGITS and name.isascii() and name.isdigit() and int(name) < _FAR and entry.is_file()


def _sync_and_close(descriptor: int) -> None:
    try:
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


class SegmentedFile:
    """A file of segments, with bytes from `begin` to `end`. Bytes are appended at the end, and dropped from the start
    by whole segments.

    Args:
        directory: folder of the segments
        segment_bytes: size at which the next segment is started
        open_files: cache of file descriptors
        stays_open: True if the last segment keeps its own descriptor, so that an append to it needs no new one
        is_synced: True if the caller runs the calls of `syncs`; finished segments stay open until then
        sums: True if the CRC-32 of each segment's bytes is kept
    """

    def __init__(
        self,
        directory: Path,
        segment_bytes: int,
        open_files: OpenFiles,
        *,
        stays_open: bool = False,
        is_synced: bool = False,
        sums: bool = False,
    ) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.sums: dict[int, int] | None = {} if sums else None
        self._stays_open = stays_open
        self.is_synced_apart = is_synced
        self._open_files = open_files
        self._kept: tuple[int, int] | None = None  # start and descriptor of the last segment
        self._retired: list[int] = []  # descriptors of finished segments that are not synced yet
        self._has_new_name = False
        self._unsynced: dict[int, None] = {}
        self._is_torn = False
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self.end = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            self._sizes = {int(entry.name): entry.stat().st_size for entry in entries if _is_ours(entry)}
        if self._sizes:
            self._starts = sorted(self._sizes)
            self.end = self._starts[-1] + self._sizes[self._starts[-1]]

    @property
    def begin(self) -> int:
        return self._starts[0] if self._starts else 0

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions at which segments start."""
        return tuple(self._starts)

    @property
    def segments(self) -> int:
        return len(self._starts)

    def gaps(self) -> list[tuple[int, int]]:
        """Return position and size of each gap between segments, as found when the file was opened."""
        found: list[tuple[int, int]] = []
        for start, following in zip(self._starts, self._starts[1:], strict=False):
            end = start + self._sizes.get(start, following - start)
            if end < following:
                found.append((end, following - end))
        return found

    def path_of(self, start: int) -> str:
        return f"{self.directory}/{start:020d}"

    # Writing

    def append(self, data: bytes | bytearray) -> None:
        """Append `data` to one segment. Raises StoreFull; nothing of it is kept then."""
        if self._is_torn:
            self._truncate_failed_write()
        try:
            if not self._starts or self.end - self._starts[-1] >= self.segment_bytes:
                self._start_segment()
            descriptor = self._descriptor(self._starts[-1])
        except OSError as error:
            raise write_error(f"cannot open a file in {self.directory}", error) from error
        size = len(data)
        try:
            written = disk.write(descriptor, data)
            while written < size:
                written += disk.write(descriptor, memoryview(data)[written:])
        except BaseException as error:
            self._is_torn = True
            # the next append retries the truncation, and writes nothing before that succeeds
            with contextlib.suppress(StoreFull):
                self._truncate_failed_write()
            if isinstance(error, OSError):
                raise write_error(f"cannot write to {self.directory}", error) from error
            raise
        self.end += size
        start = self._starts[-1]
        self._unsynced[start] = None
        if self.sums is not None:
            self.sums[start] = zlib.crc32(data, self.sums[start])

    def _truncate_failed_write(self) -> None:
        """Truncate bytes after `end` that a failed write has left."""
        try:
            disk.truncate(self._descriptor(self._starts[-1]), self.end - self._starts[-1])
        except OSError as error:
            raise write_error(f"cannot truncate a failed write in {self.directory}", error) from error
        self._is_torn = False

    def _start_segment(self) -> None:
        disk.make_folder(self.directory)
        self._open(self.end, creates=True)
        self._has_new_name = True
        if self._starts:
            self._sizes[self._starts[-1]] = self.end - self._starts[-1]
        self._starts.append(self.end)
        if self.sums is not None:
            self.sums[self.end] = 0

    def _descriptor(self, start: int) -> int:
        if self._kept is not None and self._kept[0] == start:
            return self._kept[1]
        return self._open(start)

    def _open(self, start: int, *, creates: bool = False) -> int:
        path = self.path_of(start)
        if not self._stays_open or (self._starts and start < self._starts[-1]):
            return self._open_files.get(path, creates=creates)
        descriptor = self._open_files.open_apart(path, creates=creates)
        self._retire()
        self._kept = (start, descriptor)
        return descriptor

    def _retire(self) -> None:
        if self._kept is not None and self.is_synced_apart:
            self._retired.append(self._kept[1])
        elif self._kept is not None:
            disk.close(self._kept[1])
        self._kept = None

    def close(self) -> None:
        """Close the segments' own descriptors."""
        self._retire()
        while self._retired:
            disk.close(self._retired.pop())

    def sync(self) -> None:
        """Sync everything written so far, including the names of files, to the device. Raises StoreFailed."""
        if not self._unsynced:
            return
        try:
            for start in list(self._unsynced):
                disk.sync(self._descriptor(start))
            disk.sync_folder(self.directory)
            disk.sync_folder(self.directory.parent)
        except OSError as error:
            raise StoreFailed(f"cannot sync {self.directory}: {error.strerror}") from error
        self._unsynced.clear()
        self._has_new_name = False

    def syncs(self) -> list[Call]:
        """Return the calls that sync everything written so far, including the names of files, to the device, in this
        order.

        The calls must run in the one thread that waits for the device. The file must have been opened with `is_synced`
        and `stays_open`.
        """
        calls: list[Call] = [partial(_sync_and_close, descriptor) for descriptor in self._retired]
        self._retired.clear()
        if self._unsynced:
            calls.append(partial(disk.sync, self._descriptor(self._starts[-1])))
            self._unsynced.clear()
        if self._has_new_name:
            calls += [partial(disk.sync_folder, self.directory), partial(disk.sync_folder, self.directory.parent)]
            self._has_new_name = False
        return calls

    # Reading

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes at `position`; fewer at the end. Raises StoreError for a dropped position, Damaged in a
        gap, and Unreadable if the system refuses the read."""
        data, fault = self._read(position, size)
        if fault is not None:
            raise fault
        return data

    def read_up_to_damage(self, position: int, size: int) -> bytes:
        """Return what `read` returns, but only the bytes before a damaged part. Raises the other errors of `read`."""
        data, fault = self._read(position, size)
        if fault is not None and not isinstance(fault, Damaged):
            raise fault
        return data

    def _read(self, position: int, size: int) -> tuple[bytes, StoreError | None]:
        if position < self.begin:
            return b"", StoreError(f"position {position} of {self.directory} was dropped")
        parts: list[bytes] = []
        fault: StoreError | None = None
        while size > 0 and position < self.end:
            index = bisect_right(self._starts, position) - 1
            start = self._starts[index]
            segment_end = self._starts[index + 1] if index + 1 < len(self._starts) else self.end
            try:
                part = disk.read_at(self._descriptor(start), min(size, segment_end - position), position - start)
            except OSError as error:
                kind = Damaged if error.errno in _UNREADABLE else Unreadable
                fault = kind(f"cannot read {self.path_of(start)}: {error.strerror}")
                break
            if not part:
                fault = Damaged(f"{self.path_of(start)} is too short: byte {position} is missing")
                break
            parts.append(part)
            position += len(part)
            size -= len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), fault

    def segment_at(self, position: int) -> tuple[int, int, int]:
        """Return start, end and file descriptor of the segment that contains a position. Raises OSError."""
        index = bisect_right(self._starts, position) - 1
        start = self._starts[index]
        return start, self._starts[index + 1] if index + 1 < len(self._starts) else self.end, self._descriptor(start)

    def next_start(self, position: int) -> int:
        """Return the start of the segment after `position`, or the end of the file if there is none."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else self.end

    def has_sums(self, expected: dict[int, int]) -> bool:
        """Return True if the content of each segment has the expected CRC-32, and keep these sums."""
        if sorted(expected) != self._starts or any(self._sum(start) != expected[start] for start in self._starts):
            return False
        self.sums = dict(expected)
        return True

    def compute_sums(self) -> None:
        """Compute the sum of each segment; -1 for a segment with a gap. Raises StoreError if a segment cannot be read."""
        self.sums = {start: self._sum(start) for start in self._starts}

    def _sum(self, start: int) -> int:
        found, position, end = 0, start, self.next_start(start)
        while position < end:
            data = self.read_up_to_damage(position, min(_SUM_BYTES, end - position))
            if not data:
                return -1
            found = zlib.crc32(data, found)
            position += len(data)
        return found

    # Cutting

    def truncate(self, end: int) -> None:
        """Truncate the file at `end`. If the system refuses, the bytes beyond `end` are not read, and are truncated
        before the next append."""
        if not self._starts or end >= self.end:
            return
        self._sizes[self._starts[-1]] = self.end - self._starts[-1]
        while self._starts[-1] >= end and len(self._starts) > 1:
            self._remove(self._starts.pop())
        start = self._starts[-1]
        size = min(max(end - start, 0), self._sizes[start])
        self.end = start + size
        self._is_torn = True
        with contextlib.suppress(StoreFull):
            self._truncate_failed_write()
            self._unsynced[start] = None

    def drop_first(self) -> None:
        """Remove the oldest segment, unless it is the last one."""
        if len(self._starts) > 1:
            self._remove(self._starts.pop(0))

    def restart(self, position: int) -> None:
        """Remove all segments. The next append is at `position`."""
        while self._starts:
            self._remove(self._starts.pop())
        self._is_torn = False
        self.end = position

    def modified_s(self, start: int) -> float:
        """Return the time at which a segment was last written, in seconds since the epoch; 0 if it is missing."""
        try:
            return os.path.getmtime(self.path_of(start))
        except OSError:
            return 0.0

    def _remove(self, start: int) -> None:
        path = self.path_of(start)
        self._open_files.forget(path)
        if self._kept is not None and self._kept[0] == start:
            self._retire()
        self._unsynced.pop(start, None)
        self._sizes.pop(start, None)
        if self.sums is not None:
            self.sums.pop(start, None)
        with contextlib.suppress(OSError):  # a later segment of this name is created empty
            disk.remove(path)

    def forget(self) -> None:
        """Close the cached descriptors of the segments, whose files the caller has moved away."""
        for start in self._starts:
            self._open_files.forget(self.path_of(start))

    def delete(self) -> None:
        """Remove all segments and their folder."""
        self.restart(0)
        disk.remove_folder(self.directory)


# ------------------------------------------------------------------------------
# The commit log: a sequence of records with checksums; and the search for the next whole record after a damaged part.
#
# Bytes from a client may look like records, including positions and checksums. Bytes inside of a record must therefore
# not be read as a record. A record starts at one of four positions: at the end of the record before it, at the start of
# a segment, where an index has an entry, or where its own mark proves it (`Marks`). After a damaged record, reading
# resumes only at such a position.


_MAGIC: Final = MAGIC.to_bytes(4, "big")
_HEAD_BYTES: Final = 36  # the part of a record up to its position in the log
_TAIL_BYTES: Final = 1 + MAX_TOPIC_CHARS + 2 + MAX_PROPERTY_BYTES

Buffer = bytes | memoryview
IsNamed = Callable[[str, int, int, int, int], bool]
"""Function that returns True if a queue's index has an entry of this position and size. Arguments: topic, queue id,
offset, position, size."""


class Damage(NamedTuple):
    """A part of the log without a whole record."""

    position: int
    size: int


class CommitLog(SegmentedFile):
    """The commit log."""

    def __init__(
        self, folder: Path, segment_bytes: int, open_files: OpenFiles, marks: Marks, *, is_synced: bool = False
    ) -> None:
        super().__init__(folder / "commitlog", segment_bytes, open_files, stays_open=True, is_synced=is_synced)
        self.written = Written(self.end)
        self._marks = marks

    def append(self, data: bytes | bytearray) -> None:
        super().append(data)
        try:
            self.written.add(data)
        except Exception:  # out of memory: the bytes are written, and reads check each record
            self.written = Written(self.end)

    def read_written(self, position: int, size: int) -> Buffer:
        """Return bytes that this process has written, from a position that `written` covers.

        Raises Damaged if these bytes, or bytes that share a sum with them, have changed.
        """
        if not 0 < size <= self.end - position:
            raise Damaged(f"{self.directory} has no {size} bytes at {position}")
        begin, end, before, sum_after = self.written.part(position, position + size)
        data = self.read(begin, end - begin)
        if crc32(data, before) != sum_after:
            raise Damaged(f"{self.directory} has changed between the positions {begin} and {end} since it was written")
        return data if len(data) == size else memoryview(data)[position - begin : position - begin + size]

    def truncate(self, end: int) -> None:
        super().truncate(end)
        self.written = Written(self.end)

    def drop_first(self) -> None:
        super().drop_first()
        self.written.forget_before(self.begin)

    def record_in(self, data: bytes, at: int, position: int) -> Record | None:
        """Return the record at `at` in `data`, if it is intact and belongs to this position of the log; otherwise None."""
        size = record_size(data, at)
        if not size or at + size > len(data):
            return None
        try:
            record = decode_record(data, at)
        except MessageError:
            return None
        return record if record.physical_offset == position and is_intact(data, at, record) else None

    def record_at(self, position: int) -> Record | None:
        """Return the record at a position where a record starts; None if it is damaged."""
        size = self._size_at(position, MAX_RECORD_BYTES)
        return self.record_in(self.read_up_to_damage(position, size), 0, position) if size else None

    def without_body(self, position: int, size: int) -> bytes:
        """Return the bytes of a record before and after its body, as far as they can be read.

        Args:
            position: position of the record by an index
            size: size of the record by an index
        """
        head = self.read_up_to_damage(position, min(size, MAX_HEAD_BYTES))
        body_at = body_begin(head)
        tail_bytes = size - body_at - int.from_bytes(head[body_at - 4 : body_at], "big")
        if not 0 < tail_bytes <= _TAIL_BYTES:
            return b""
        return head[:body_at] + self.read_up_to_damage(position + size - tail_bytes, tail_bytes)

    def _size_at(self, position: int, most: int) -> int:
        """Return the record size from its header, or 0 if the header is missing or belongs to another position."""
        head = self.read_up_to_damage(position, _HEAD_BYTES)
        size = record_size(head, 0, most)
        if not size or len(head) < _HEAD_BYTES or int.from_bytes(head[28:36], "big") != position:
            return 0
        return size if position + size <= self.end else 0

    def replay(
        self, position: int, take: Callable[[Record], None], is_named: IsNamed
    ) -> tuple[int, list[Damage], Damage]:
        """Pass all whole records from a position on to `take`.

        Args:
            position: where a record must start
            take: called with each whole record
            is_named: checks the index entry of a record
        Returns:
            The number of records, the damaged parts between records, and the damaged part at the end.
        """
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
                found = self._next_after_damage(position, is_named)
                if found is None:
                    return records, damage, Damage(position, self.end - position)
                damage.append(Damage(position, found - position))
                position = found
        return records, damage, Damage(position, 0)

    # Search after damage

    def _next_after_damage(self, position: int, is_named: IsNamed) -> int | None:
        """Return the position of the next record after a damaged one; None if no record is known to start there.

        Bytes within the size that the damaged record's header states are searched unless that size is proven right.
        """
        size = self._size_at(position, MAX_RECORD_BYTES)
        if size and self._has_right_size(position, size, is_named):
            return position + size if position + size < self.end else None
        return self.next_record(position + 1, is_named)

    def _has_right_size(self, position: int, size: int, is_named: IsNamed) -> bool:
        """Return True if the size in the header at `position` is right: only the body is damaged, or another record
        starts at the stated end."""
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
        """Return the first position from `position` on where a record is known to start; None if there is none. After bytes
        that cannot be read, the search continues at the start of the next segment."""
        segment_end = self.next_start(position)
        while position < segment_end:
            data = self.read_up_to_damage(position, min(RECOVERY_READ_BYTES, segment_end - position))
            at = data.find(_MAGIC, 4)
            while at >= 0:
                begin = position + at - 4
                stated = data[at + 24 : at + 32]  # may be incomplete at the end of the data
                if begin.to_bytes(8, "big").startswith(stated) and self._begins(begin, is_named):
                    return begin
                at = data.find(_MAGIC, at + 1)
            if len(data) < 8:
                break
            position += len(data) - 7
        return segment_end if segment_end < self.end else None

    def _begins(self, position: int, is_named: IsNamed) -> bool:
        """Return True if a whole record starts at the position, by its mark or by an index. The expensive checksums are
        checked last."""
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


# ------------------------------------------------------------------------------
# Marks: proofs that a record starts at a position, which no client can forge.
#
# The first record of each append has a mark at the end of its properties, if these leave space for it: a keyed hash of the
# record's position. The key is random, created at each start, stored in `marks.json`, and never sent. A client may read the
# mark of any record, but learns no mark of a position where no record starts. A client therefore cannot put a valid mark into
# a body. Records that are written where the end of the log was lost have another key.
#
# Records that are older than the first key have no marks. `begin` is the position from which on there are marks.


FILE: Final = "marks.json"
NOWHERE: Final = 1 << 63
# 12 characters in base64; the probability that a disk of 1 TB full of guesses contains a valid mark is 1 in 10^11
_HASH_BYTES: Final = 9
_KEY_BYTES: Final = 16


class _SavedMarks(Struct):
    """The content of `marks.json`."""

    epochs: list[tuple[int, str]]


class Marks:
    """The keys of marks, by the position from which on they are used.

    Args:
        state: content of `marks.json`; None, and anything unexpected, means no keys
    """

    def __init__(self, state: object = None) -> None:
        try:
            epochs = [(begin, bytes.fromhex(key)) for begin, key in shaped(state, _SavedMarks).epochs]
        except (BodyError, ValueError):
            epochs = []
        self._epochs = sorted(epochs)
        self._key = self._epochs[-1][1] if self._epochs else b""

    @property
    def begin(self) -> int:
        """Position from which on the first records of appends have marks; NOWHERE without a key."""
        return self._epochs[0][0] if self._epochs else NOWHERE

    def mark(self, position: int) -> bytes:
        """Return the mark for a record at a position; empty if there is no key."""
        return _mark(self._key, position) if self._key else b""

    def is_mark(self, data: bytes, position: int) -> bool:
        """Return True if these bytes are the mark of a record at this position."""
        number = bisect_right(self._epochs, position, key=_begin) - 1
        return number >= 0 and len(data) == BEGIN_BYTES and data == _mark(self._epochs[number][1], position)

    def renew(self, folder: Path, begin: int, end: int, *, sync: bool) -> None:
        """Create a key for records from the log's end on, and drop the keys of records before its start.

        Args:
            folder: folder of `marks.json`
            begin: start of the log
            end: end of the log
            sync: True to sync `marks.json` to the device
        Raises:
            StoreFull: the keys are then unchanged
        """
        first = max(bisect_right(self._epochs, begin, key=_begin) - 1, 0)
        key = secrets.token_bytes(_KEY_BYTES)
        epochs = [(at, old_key) for at, old_key in self._epochs[first:] if at < end] + [(end, key)]
        state = {"epochs": [(at, kept.hex()) for at, kept in epochs]}
        write_state(folder / FILE, state, sync=sync)
        self._epochs, self._key = epochs, key


def _begin(epoch: tuple[int, bytes]) -> int:
    return epoch[0]


def _mark(key: bytes, position: int) -> bytes:
    found = blake2s(b"%b%d" % (key, position), digest_size=_HASH_BYTES).digest()
    return BEGIN_MARK + b2a_base64(found, newline=False)


# ------------------------------------------------------------------------------
# Running sums of this process's writes to the commit log, by which any part can be verified in one step.
#
# The sum at a position is the CRC-32 of everything written up to this position. The CRC-32 of a part, continued from
# the sum before it, must be equal to the sum after it. Verifying a part by its sums takes one call for any number of
# records, while verifying each record's own checksums takes about forty operations per record.


class Written:
    """Sums at some positions of the log, from `begin` on: at first the log's end when this object was created, later a
    position after it, because the oldest sums are dropped."""

    __slots__ = ("_end", "_positions", "_sum", "_sums", "begin")

    def __init__(self, end: int) -> None:
        self.begin = self._end = end
        self._sum = 0
        self._positions = array("Q", (end,))
        self._sums = array("I", (0,))

    def __len__(self) -> int:
        """Return the number of positions with a sum."""
        return len(self._positions)

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that were appended to the log."""
        size = len(data)
        if size > SUMMED_AT_ONCE_BYTES:
            data = self._add_large(data, size)
            size = len(data)
        self._sum = crc32(data, self._sum)
        self._end += size
        if self._end - self._positions[-1] >= SUMMED_BYTES:
            self._positions.append(self._end)
            self._sums.append(self._sum)
            if len(self._positions) > MAX_SUMS:
                self._forget(MAX_SUMS // 2)

    def _add_large(self, data: bytes | bytearray | memoryview, size: int) -> memoryview:
        """Add all pieces but the last one, and return the last one."""
        view = memoryview(data)
        ends = range(SUMMED_AT_ONCE_BYTES, size, SUMMED_AT_ONCE_BYTES)
        self._positions.extend([self._end + end for end in ends])
        self._end += ends[-1]
        for end in ends:
            self._sum = crc32(view[end - SUMMED_AT_ONCE_BYTES : end], self._sum)
            self._sums.append(self._sum)
        return view[ends[-1] :]

    @property
    def sums(self) -> tuple[array[int], array[int], int, int]:
        """The positions with a sum, the sums there, the end, and the sum at the end."""
        return self._positions, self._sums, self._end, self._sum

    def part(self, begin: int, end: int) -> tuple[int, int, int, int]:
        """Return the smallest part between two known sums that contains `begin` to `end`: its start and end, and the
        sums there.

        `begin` must not be before the first sum.
        """
        positions, sums = self._positions, self._sums
        first, last = bisect_right(positions, begin) - 1, bisect_left(positions, end)
        if last == len(positions):
            return positions[first], self._end, sums[first], self._sum
        return positions[first], positions[last], sums[first], sums[last]

    def forget_before(self, position: int) -> None:
        """Drop the sums before a position, after the log's oldest segments were dropped."""
        first = bisect_left(self._positions, position)
        if first == len(self._positions):  # no sum is known from the position on
            self._positions.append(self._end)
            self._sums.append(self._sum)
        if first:
            self._forget(first)

    def _forget(self, count: int) -> None:
        del self._positions[:count], self._sums[:count]
        self.begin = self._positions[0]
