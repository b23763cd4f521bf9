"""A row of append-only files, each named by the position of its first byte in 20 digits.

Positions never change when old segments are dropped. Nothing is written in place, so a reader sees acknowledged bytes. A
file that is gone or shorter than the next one's name says leaves a gap: reading there raises Damaged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from bisect import bisect_right
from functools import partial
from pathlib import Path
from typing import Final

from ..running.jobs import Call
from . import disk
from .files import Damaged, OpenFiles, StoreError, StoreFailed, StoreFull, Unreadable

# Earlier writes may be lost after such an error, too: the system forgets which pages it could not write (fsyncgate).
_DEVICE_FAILED: Final = (errno.EIO, errno.ENXIO, errno.ENODEV)
_UNREADABLE: Final = (errno.ENOENT, errno.EIO)
_SUM_BYTES: Final = 1024 * 1024


def refusal(what: str, error: OSError) -> StoreFull:
    """The error to raise for a write that the system refused."""
    kind = StoreFailed if error.errno in _DEVICE_FAILED else StoreFull
    return kind(f"{what}: {error.strerror}")


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.name.isascii() and entry.name.isdigit() and entry.is_file()


def _sync_and_close(descriptor: int) -> None:
    try:
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


class SegmentedFile:
    """Bytes from `begin` to `end`, appended at the end, dropped at the beginning, a segment at a time.

    stays_open: the segment that is written keeps its descriptor, so that an append never needs a new one. is_synced:
    somebody calls `syncs` and makes the calls; a segment that is done stays open until then. sums: keeps a CRC-32 of each
    segment's bytes.
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
        self._kept: tuple[int, int] | None = None  # start and descriptor of the segment that is written
        self._retired: list[int] = []  # descriptors of segments before, which are not synced yet
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
        """The positions at which segments begin."""
        return tuple(self._starts)

    @property
    def segments(self) -> int:
        return len(self._starts)

    def gaps(self) -> list[tuple[int, int]]:
        """Position and size of the gaps between segments, as they were when the file was opened."""
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
        """Writes all of `data` into one segment, or raises StoreFull and keeps nothing of it."""
        if self._is_torn:
            self._take_back()
        try:
            if not self._starts or self.end - self._starts[-1] >= self.segment_bytes:
                self._start_segment()
            descriptor = self._descriptor(self._starts[-1])
        except OSError as error:
            raise refusal(f"cannot open a file in {self.directory}", error) from error
        size = len(data)
        try:
            written = disk.write(descriptor, data)
            while written < size:
                written += disk.write(descriptor, memoryview(data)[written:])
        except BaseException as error:
            self._is_torn = True
            with contextlib.suppress(StoreFull):  # the next append tries again, and writes nothing before it succeeds
                self._take_back()
            if isinstance(error, OSError):
                raise refusal(f"cannot write to {self.directory}", error) from error
            raise
        self.end += size
        start = self._starts[-1]
        self._unsynced[start] = None
        if self.sums is not None:
            self.sums[start] = zlib.crc32(data, self.sums[start])

    def _take_back(self) -> None:
        """Cuts off bytes that a failed write left behind `end`."""
        try:
            disk.truncate(self._descriptor(self._starts[-1]), self.end - self._starts[-1])
        except OSError as error:
            raise refusal(f"cannot cut off a failed write in {self.directory}", error) from error
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
        """Closes the descriptors that are kept."""
        self._retire()
        while self._retired:
            disk.close(self._retired.pop())

    def sync(self) -> None:
        """Returns when everything written so far, names included, is on the device. Raises StoreFailed."""
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
        """The calls, in this order, after which everything written so far, names included, is on the device. They are for
        the one thread that waits for the device. Needs a file that `syncs` and whose last segment `stays_open`."""
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
        """Up to `size` bytes at `position`; fewer at the end. Raises StoreError below the beginning, Damaged in a gap."""
        data, fault = self._read(position, size)
        if fault is not None:
            raise fault
        return data

    def read_up_to_damage(self, position: int, size: int) -> bytes:
        """Like `read`, but where the file is damaged, returns the bytes before. Raises StoreError for other faults."""
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
                fault = Damaged(f"{self.path_of(start)} is shorter than it was: byte {position} is missing")
                break
            parts.append(part)
            position += len(part)
            size -= len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), fault

    def next_start(self, position: int) -> int:
        """The beginning of the segment after `position`; the end if there is none."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else self.end

    def has_sums(self, expected: dict[int, int]) -> bool:
        """Whether each segment's content has the CRC-32 that is expected, which is then kept."""
        if sorted(expected) != self._starts or any(self._sum(start) != expected[start] for start in self._starts):
            return False
        self.sums = dict(expected)
        return True

    def take_sums(self) -> None:
        """Computes the sums of the segments. Raises StoreError for a gap."""
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
        """Cuts off everything from `end` on. Bytes that the system refuses to cut are not read, and are cut before the next
        append."""
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
            self._take_back()
            self._unsynced[start] = None

    def drop_first(self) -> None:
        """Removes the oldest segment. The one that is being written stays."""
        if len(self._starts) > 1:
            self._remove(self._starts.pop(0))

    def restart(self, position: int) -> None:
        """Forgets everything; the next append is at `position`."""
        while self._starts:
            self._remove(self._starts.pop())
        self._is_torn = False
        self.end = position

    def modified_s(self, start: int) -> float:
        """When a segment was last written, seconds since the epoch; 0 if it is gone."""
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
        with contextlib.suppress(OSError):  # a segment that begins there later begins empty
            disk.remove(path)

    def forget(self) -> None:
        """Gives back the descriptors; the files are somebody else's now."""
        for start in self._starts:
            self._open_files.forget(self.path_of(start))

    def delete(self) -> None:
        """Removes the file with its folder."""
        self.restart(0)
        disk.remove_folder(self.directory)
