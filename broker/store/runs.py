"""The messages that wait for their time, sorted by it: a file per run, as in an LSM tree.

A key is a due time and an offset in the queue where the message waits; the queue's index has both, so a run can always be
made again from it. A run holds the keys of a range of offsets and never changes. Its file's name says the range and how
many keys it has; each block has a checksum. Nothing of it needs a sync: a start recognizes a file that a crash left
unfinished.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Final

from ..config import RUN_BLOCK_KEYS
from ..running.jobs import Job
from . import disk
from .files import Damaged, StoreFull

KEY_BYTES: Final = 16
_BLOCK_BYTES: Final = RUN_BLOCK_KEYS * KEY_BYTES + 4
_OFFSET_BITS: Final = 64
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1


def key_of(due_ms: int, offset: int) -> int:
    return due_ms << _OFFSET_BITS | offset


def due_of(key: int) -> int:
    return key >> _OFFSET_BITS


def offset_of(key: int) -> int:
    return key & _OFFSET_MASK


class Run:
    """The keys of the offsets `begin` to `end`. `head`: the next one; None behind the last. In memory until it is written."""

    __slots__ = ("_at", "_first", "_keys", "_path", "begin", "count", "end", "head")

    def __init__(self, begin: int, end: int, keys: Sequence[int], *, path: Path | None = None, count: int = 0) -> None:
        """`keys` are all of them, sorted; or none, with the file that has them and how many those are."""
        self.begin, self.end = begin, end
        self.count = count if path is not None else len(keys)
        self._path = path
        self._keys = keys  # all, or a block of the file
        self._first = 0  # the number of the first of those
        self._at = 0
        self.head: int | None = None
        self._look()

    @property
    def is_written(self) -> bool:
        return self._path is not None

    @property
    def left(self) -> int:
        """How many keys are from `head` on."""
        return self.count - self._at

    def advance(self) -> None:
        """Raises Damaged, as all that reads here."""
        self._at += 1
        self._look()

    def seek(self, key: int) -> None:
        """Goes to the first key that is not below this one."""
        self._at = self.find(key)
        self._look()

    def find(self, key: int) -> int:
        """The number of the first key that is not below this one; `count` if all are."""
        if self._path is None:
            return bisect_left(self._keys, key)
        low, high = 0, -(-self.count // RUN_BLOCK_KEYS)  # blocks
        while low < high:
            middle = (low + high) // 2
            if self._block(middle)[-1] < key:
                low = middle + 1
            else:
                high = middle
        first = low * RUN_BLOCK_KEYS
        return first + bisect_left(self._block(low), key) if first < self.count else self.count

    def keys(self, number: int = 0) -> Iterator[int]:
        """The keys from the one with this number on."""
        if self._path is None:
            yield from islice(self._keys, number, None)
            return
        while number < self.count:
            block = self._block(number // RUN_BLOCK_KEYS)
            yield from block[number % RUN_BLOCK_KEYS :]
            number += len(block) - number % RUN_BLOCK_KEYS

    def _look(self) -> None:
        number = self._at
        if number >= self.count:
            self.head = None
            if self._path is not None:
                self._keys = ()
            return
        if not self._first <= number < self._first + len(self._keys):
            self._first = number - number % RUN_BLOCK_KEYS
            self._keys = self._block(number // RUN_BLOCK_KEYS)
        self.head = self._keys[number - self._first]

    def _block(self, number: int) -> list[int]:
        count = min(RUN_BLOCK_KEYS, self.count - number * RUN_BLOCK_KEYS)
        size = count * KEY_BYTES
        try:
            descriptor = disk.open_file(str(self._path), disk.READ)
            try:
                data = disk.read_at(descriptor, size + 4, number * _BLOCK_BYTES)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise Damaged(f"cannot read {self._path}: {error.strerror}") from error
        if len(data) != size + 4 or data[size:] != zlib.crc32(data[:size]).to_bytes(4, "big"):
            raise Damaged(f"block {number} of {self._path} is damaged")
        return [int.from_bytes(data[at : at + KEY_BYTES], "big") for at in range(0, size, KEY_BYTES)]

    def writing(self, folder: Path) -> Job[None]:
        """Writes a run that is in memory; it is read from its file from then on. Raises StoreFull."""
        path, _ = yield from _writing(folder, self.begin, self.end, iter(self._keys))
        self._path, self._first, self._keys = path, 0, ()
        self._look()

    def remove(self) -> None:
        if self._path is not None:
            _remove(self._path)


def merging(folder: Path, runs: Sequence[Run], is_waiting: Callable[[int], bool]) -> Job[Run]:
    """One run of several that follow each other, without the keys that are done. Raises StoreFull, Damaged."""
    keys = filter(is_waiting, merge(*(run.keys() for run in runs)))
    begin, end = runs[0].begin, runs[-1].end
    path, count = yield from _writing(folder, begin, end, keys)
    return Run(begin, end, (), path=path, count=count)


def _writing(folder: Path, begin: int, end: int, keys: Iterator[int]) -> Job[tuple[Path, int]]:
    """The file, and how many keys it has. One without any says that nobody of its range waits."""
    temporary = folder / "run.new"
    count, position = 0, 0
    yield partial(_start, folder, temporary)
    while block := list(islice(keys, RUN_BLOCK_KEYS)):
        yield None
        data = b"".join([key.to_bytes(KEY_BYTES, "big") for key in block])
        yield partial(_append, temporary, data + zlib.crc32(data).to_bytes(4, "big"), position)
        count += len(block)
        position += len(data) + 4
    path = folder / f"{begin:020d}-{end:020d}-{count}"
    try:
        disk.replace(temporary, path)
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from error
    return path, count


def _start(folder: Path, path: Path) -> None:
    try:
        disk.make_folder(folder)
        disk.close(disk.open_file(str(path), disk.REPLACE, 0o644))
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from error


def _append(path: Path, data: bytes, position: int) -> None:
    try:
        descriptor = disk.open_file(str(path), disk.APPEND)
        try:
            written = 0
            while written < len(data):
                written += disk.write(descriptor, data[written:])
        finally:
            disk.close(descriptor)
    except OSError as error:
        raise StoreFull(f"cannot write {path} at byte {position}: {error.strerror}") from error


def _remove(path: Path) -> None:
    with suppress(OSError):  # the next start removes it
        disk.remove(path)


def open_runs(folder: Path, end: int) -> list[Run]:
    """The runs in a folder, by offsets, without gaps from the first on. Runs that cannot be used are removed: leftovers of
    a crash, runs that a larger one holds, and runs that point behind the queue's `end`."""
    found: list[tuple[int, int, int, str]] = []
    try:
        names = disk.names_in(folder)
    except FileNotFoundError:
        return []
    for name in names:
        parts = name.split("-")
        if len(parts) == 3 and all(part.isdecimal() for part in parts):
            found.append((int(parts[0]), -int(parts[1]), int(parts[2]), name))
        else:
            _remove(folder / name)
    runs: list[Run] = []
    for begin, negative_end, count, name in sorted(found):
        path, run_end = folder / name, -negative_end
        size = count * KEY_BYTES + 4 * -(-count // RUN_BLOCK_KEYS)
        is_next = not runs or begin >= runs[-1].end
        if not is_next or run_end > end or disk.size_of(path) != size:
            _remove(path)
            continue
        try:
            runs.append(Run(begin, run_end, (), path=path, count=count))
        except Damaged:
            _remove(path)
    return runs
