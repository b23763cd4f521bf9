"""The only module that touches the file system: segmented append-only files, state files, the folder's lock.

A segmented file is a row of files, each named by the position of its first byte in 20 digits. Positions never change
when old segments are dropped. Nothing is written in place, so what a reader sees is what was acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import orjson

OPEN_FILES: Final = 256
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class StoreError(Exception):
    """The data folder cannot be used as it is. The text says what to do."""


class StoreFull(StoreError):
    """The operating system took no more bytes; nothing of the write was kept."""


class OpenFiles:
    """File descriptors by path, least recently used closed first, so that thousands of queues need few.

    `limit` is never exceeded. When the process has no descriptor left, those held here make room.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str, *, creates: bool = False) -> int:
        """A descriptor for reading and appending. Raises OSError, also if there is no such file and none is created."""
        descriptor = self._open.get(path)
        if descriptor is None:
            while len(self._open) >= self._limit:
                self._close_oldest()
            descriptor = self._open[path] = self.open_apart(path, creates=creates)
        else:
            self._open.move_to_end(path)
        return descriptor

    def open_apart(self, path: str, *, creates: bool = False) -> int:
        """A descriptor that is the caller's to close, and that never makes room for another."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if creates else 0)
        while True:
            try:
                return os.open(path, flags, 0o644)
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR or not self._open:
                    raise
                self._close_oldest()

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])

    def forget(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class SegmentedFile:
    """Bytes from `begin` to `end`, appended at the end, dropped at the beginning, a segment at a time.

    stays_open: the segment that is written keeps its descriptor, so that an append never needs a new one.
    """

    def __init__(self, directory: Path, segment_bytes: int, open_files: OpenFiles, *, stays_open: bool = False) -> None:
        self.directory = directory
        self._stays_open = stays_open
        self._kept: tuple[int, int] | None = None  # start and descriptor of the segment that is written
        self._is_torn = False
        self.segment_bytes = segment_bytes
        self._open_files = open_files
        self._starts: list[int] = []
        self.end = 0
        if directory.is_dir():
            self._starts = sorted(int(name) for name in os.listdir(directory) if name.isdigit())
        if self._starts:
            self.end = self._starts[-1] + os.path.getsize(self._path(self._starts[-1]))

    @property
    def begin(self) -> int:
        return self._starts[0] if self._starts else 0

    @property
    def last_segment(self) -> int:
        """The position at which the segment that is being written begins."""
        return self._starts[-1] if self._starts else 0

    @property
    def segments(self) -> int:
        return len(self._starts)

    def _path(self, start: int) -> str:
        return f"{self.directory}/{start:020d}"

    def append(self, data: bytes | bytearray) -> None:
        """Writes all of `data` into one segment, or raises StoreFull and keeps nothing of it."""
        if self._is_torn:
            self._take_back()
        try:
            if not self._starts or self.end - self._starts[-1] >= self.segment_bytes:
                self._start_segment()
            descriptor = self._descriptor(self._starts[-1])
        except OSError as error:
            raise StoreFull(f"cannot open a file in {self.directory}: {error.strerror}") from error
        size = len(data)
        try:
            written = os.write(descriptor, data)
            while written < size:
                written += os.write(descriptor, memoryview(data)[written:])
        except BaseException as error:
            self._is_torn = True
            with contextlib.suppress(StoreFull):  # the next append tries again, and writes nothing before it succeeds
                self._take_back()
            if isinstance(error, OSError):
                raise StoreFull(f"cannot write to {self.directory}: {error.strerror}") from error
            raise
        self.end += size

    def _take_back(self) -> None:
        """Cuts off what a failed write left behind `end`."""
        try:
            os.ftruncate(self._descriptor(self._starts[-1]), self.end - self._starts[-1])
        except OSError as error:
            raise StoreFull(f"cannot cut off a failed write in {self.directory}: {error.strerror}") from error
        self._is_torn = False

    def _start_segment(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._open(self.end, creates=True)
        self._starts.append(self.end)

    def _descriptor(self, start: int) -> int:
        if self._kept is not None and self._kept[0] == start:
            return self._kept[1]
        return self._open(start)

    def _open(self, start: int, *, creates: bool = False) -> int:
        path = self._path(start)
        if not self._stays_open or (self._starts and start < self._starts[-1]):
            return self._open_files.get(path, creates=creates)
        descriptor = self._open_files.open_apart(path, creates=creates)
        self.close()
        self._kept = (start, descriptor)
        return descriptor

    def close(self) -> None:
        """Closes the descriptor that is kept."""
        if self._kept is not None:
            os.close(self._kept[1])
            self._kept = None

    def read(self, position: int, size: int) -> bytes:
        """Up to `size` bytes at `position`; fewer at the end. Raises StoreError below the beginning."""
        if position < self.begin:
            raise StoreError(f"position {position} of {self.directory} was dropped")
        parts: list[bytes] = []
        while size > 0 and position < self.end:
            index = bisect_right(self._starts, position) - 1
            start = self._starts[index]
            segment_end = self._starts[index + 1] if index + 1 < len(self._starts) else self.end
            try:
                part = os.pread(self._descriptor(start), min(size, segment_end - position), position - start)
            except OSError as error:
                raise StoreError(f"cannot read {self._path(start)}: {error.strerror}") from error
            if not part:
                raise StoreError(f"{self._path(start)} is shorter than it was; restore it or remove it")
            parts.append(part)
            position += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def truncate(self, end: int) -> None:
        """Cuts off everything from `end` on."""
        while self._starts and self._starts[-1] >= end and len(self._starts) > 1:
            self._remove(self._starts.pop())
        if self._starts:
            start = self._starts[-1]
            os.ftruncate(self._descriptor(start), max(end - start, 0))
            self.end = max(end, start)

    def drop_first(self) -> None:
        """Removes the oldest segment. The one that is being written stays."""
        if len(self._starts) > 1:
            self._remove(self._starts.pop(0))

    def restart(self, position: int) -> None:
        """Forgets everything; the next append is at `position`."""
        while self._starts:
            self._remove(self._starts.pop())
        self.end = position

    def first_modified_s(self) -> float:
        """When the oldest segment was last written, seconds since the epoch."""
        return os.path.getmtime(self._path(self._starts[0])) if self._starts else 0.0

    def sync(self) -> None:
        """Returns when everything written so far is on the device."""
        if self._starts:
            os.fdatasync(self._descriptor(self._starts[-1]))

    def duplicate_descriptor(self) -> int | None:
        """A descriptor of the segment being written, the caller's to sync and to close."""
        return os.dup(self._descriptor(self._starts[-1])) if self._starts else None

    def _remove(self, start: int) -> None:
        path = self._path(start)
        self._open_files.forget(path)
        if self._kept is not None and self._kept[0] == start:
            self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def delete(self) -> None:
        """Removes the file with its folder."""
        self.restart(0)
        shutil.rmtree(self.directory, ignore_errors=True)


def sync_descriptor(descriptor: int) -> None:
    """Syncs and closes a descriptor; safe to run in a thread."""
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path) -> Any:
    """The JSON value of a state file; None if there is none. Raises StoreError if it is damaged."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, or remove it to lose that state") from None


def write_state(path: Path, value: Any, *, sync: bool = True) -> None:
    """Replaces a state file whole: a reader sees the old value or the new one. Raises StoreFull.

    sync: it is on the device, too. What is written every few seconds while clients wait is not synced.
    """
    temporary = path.with_suffix(".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            data = memoryview(orjson.dumps(value))
            while data:
                data = data[os.write(descriptor, data) :]
            if sync:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from error


class Folder:
    """The data folder, locked for this process. Raises StoreError if another broker has it."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot use the data folder {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StoreError(f"another broker uses the data folder {path}; stop it or choose another") from None
        self.path = path

    def subfolders(self, name: str) -> list[Path]:
        parent = self.path / name
        return sorted(entry for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []

    def unlock(self) -> None:
        os.close(self._lock)
