"""Messages that wait for a delivery time, sorted by that time in files."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush, merge
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

import structlog

from ..config import LIMITS, RUN_BLOCK_KEYS, Limits
from ..runtime.jobs import Job
from . import disk
from .files import Damaged, StoreFull
from .index import ENTRY, ConsumeQueue

log = structlog.get_logger("rocketlet.store")


# ------------------------------------------------------------------------------
# Sorted runs of waiting messages: one file per run, as in an LSM tree.
#
# A key consists of a delivery time and an offset in the queue where the message waits. The queue's index contains both,
# so a run can be recreated from the index. A run contains the keys of a range of offsets, and never changes. The name
# of its file contains the range and the number of keys, and each block has a checksum. Nothing is synced, because a
# start recognizes a file that a crash left incomplete.


KEY_BYTES: Final = 16
_BLOCK_BYTES: Final = RUN_BLOCK_KEYS * KEY_BYTES + 4
_OFFSET_BITS: Final = 64
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1


def key_of(due_ms: int, offset: int) -> int:
    """Return the key of a delivery time in ms since the epoch, and an offset."""
    return due_ms << _OFFSET_BITS | offset


def due_of(key: int) -> int:
    return key >> _OFFSET_BITS


def offset_of(key: int) -> int:
    return key & _OFFSET_MASK


class SortedRun:
    """The keys of the offsets `begin` to `end` (exclusive). `head` is the next key, or None after the last one. The
    keys are in memory until the run is written."""

    __slots__ = ("_at", "_first", "_keys", "_path", "begin", "count", "end", "head")

    def __init__(self, begin: int, end: int, keys: Sequence[int], *, path: Path | None = None, count: int = 0) -> None:
        """Create a run from its sorted keys; or, with `path` and `count`, from a file that contains `count` keys."""
        self.begin, self.end = begin, end
        self.count = count if path is not None else len(keys)
        self._path = path
        self._keys = keys  # all keys, or those of one block of the file
        self._first = 0  # index of the first key in `_keys`
        self._at = 0
        self.head: int | None = None
        self._read_head()

    @property
    def is_written(self) -> bool:
        return self._path is not None

    @property
    def left(self) -> int:
        """The number of keys from `head` on."""
        return self.count - self._at

    def advance(self) -> None:
        """Move `head` to the next key. Raises Damaged, like every method that reads the file."""
        self._at += 1
        self._read_head()

    def seek(self, key: int) -> None:
        """Move `head` to the first key that is not less than `key`."""
        self._at = self.find(key)
        self._read_head()

    def find(self, key: int) -> int:
        """Return the index of the first key that is not less than `key`; `count` if all keys are less."""
        if self._path is None:
            return bisect_left(self._keys, key)
        blocks = range(-(-self.count // RUN_BLOCK_KEYS))
        block = bisect_left(blocks, key, key=lambda number: self._block(number)[-1])
        first = block * RUN_BLOCK_KEYS
        return first + bisect_left(self._block(block), key) if first < self.count else self.count

    def keys(self, number: int = 0) -> Iterator[int]:
        """Yield the keys from an index on."""
        if self._path is None:
            yield from islice(self._keys, number, None)
            return
        while number < self.count:
            block = self._block(number // RUN_BLOCK_KEYS)
            yield from block[number % RUN_BLOCK_KEYS :]
            number += len(block) - number % RUN_BLOCK_KEYS

    def _read_head(self) -> None:
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
        """Write a run that is in memory to a file, and read it from the file from then on. Raises StoreFull."""
        path, _ = yield from _writing(folder, self.begin, self.end, iter(self._keys))
        self._path, self._first, self._keys = path, 0, ()
        self._read_head()

    def remove(self) -> None:
        if self._path is not None:
            _remove(self._path)


def merging(folder: Path, runs: Sequence[SortedRun], is_waiting: Callable[[int], bool]) -> Job[SortedRun]:
    """Merge adjacent runs into one, without keys of finished messages. Raises StoreFull, Damaged."""
    keys = filter(is_waiting, merge(*(run.keys() for run in runs)))
    begin, end = runs[0].begin, runs[-1].end
    path, count = yield from _writing(folder, begin, end, keys)
    return SortedRun(begin, end, (), path=path, count=count)


def _writing(folder: Path, begin: int, end: int, keys: Iterator[int]) -> Job[tuple[Path, int]]:
    """Write keys to a file, and return its path and the number of keys. A file without keys means that no message of
    its range is waiting."""
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
        disk.close(disk.open_file(str(path), disk.REPLACE, disk.FILE_MODE))
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from error


def _append(path: Path, data: bytes, position: int) -> None:
    try:
        descriptor = disk.open_file(str(path), disk.APPEND)
        try:
            disk.write_all(descriptor, data)
        finally:
            disk.close(descriptor)
    except OSError as error:
        raise StoreFull(f"cannot write {path} at byte {position}: {error.strerror}") from error


def _remove(path: Path) -> None:
    with suppress(OSError):  # the next start removes it
        disk.remove(path)


def open_runs(folder: Path, end: int) -> list[SortedRun]:
    """Return the runs in a folder in the order of their offsets; there may be gaps between them.

    Unusable files are removed: leftovers of a crash, runs within a larger run, and runs beyond the queue's `end`.
    """
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
    runs: list[SortedRun] = []
    for begin, negative_end, count, name in sorted(found):
        path, run_end = folder / name, -negative_end
        size = count * KEY_BYTES + 4 * -(-count // RUN_BLOCK_KEYS)
        is_next = not runs or begin >= runs[-1].end
        if not is_next or run_end > end or disk.size_of(path) != size:
            _remove(path)
            continue
        try:
            runs.append(SortedRun(begin, run_end, (), path=path, count=count))
        except Damaged:
            _remove(path)
    return runs


# ------------------------------------------------------------------------------
# The waiting messages of a queue, in the order of their delivery times.
#
# The keys of the newest messages are in a heap in memory. When there are many, they become a run: they are sorted, and
# written to a file with the next checkpoint. Of each file, at most one block is in memory. Files of similar size are
# merged. Everything derives from the queue's index, whose third field is the delivery time, so a lost or damaged file
# is recreated from the index.


ENTRIES_AT_ONCE: Final = 1024
_BEYOND: Final = key_of(1 << 63, 0)  # greater than every possible key


class Schedule:
    """The waiting messages of one queue.

    A key may occur twice in succession; the caller of `take` must remember the last one.

    Args:
        folder: folder of the runs
        queue: the queue whose messages wait
        is_done: returns True if the message of a key was delivered, or is stored elsewhere now
        limits: limits of the broker
    """

    def __init__(
        self, folder: Path, queue: ConsumeQueue, is_done: Callable[[int], bool], limits: Limits = LIMITS
    ) -> None:
        self._run_keys, self._runs_to_merge = limits.run_keys, limits.runs_to_merge
        self._folder = folder
        self._queue = queue
        self._is_done = is_done
        self._runs: list[SortedRun] = []
        self._heads: list[tuple[int, int, SortedRun]] = []
        self._heap: list[int] = []
        self._heap_begin = 0  # first offset that is not in a run

    def load(self, end: int, delivered: int, behind: Iterable[int]) -> None:
        """Load the waiting messages below the offset `end`.

        Args:
            end: offset after the last one
            delivered: key of the last delivered message; messages with greater keys are waiting
            behind: offsets of waiting messages with lower keys
        """
        at, runs = self._queue.begin, []
        for run in open_runs(self._folder, end):
            try:
                run.seek(delivered + 1)
            except Damaged as damage:
                log.error("timer_run_rebuilt", reason=str(damage))
                run.remove()
                continue
            runs += [*self._new_runs(at, run.begin), run]
            at = max(at, run.end)
        self._runs = runs
        self.add_again(self._keys_of([run for run in runs if run.is_written], behind))
        rest = max(at, end - (end - at) % self._run_keys)
        self._runs += self._new_runs(at, rest)
        self.add_again(self._waiting_keys(rest, end))
        self._heap_begin = rest
        self._order()

    def _new_runs(self, begin: int, end: int) -> list[SortedRun]:
        ranges = ((first, min(first + self._run_keys, end)) for first in range(begin, end, self._run_keys))
        return [SortedRun(first, last, sorted(self._waiting_keys(first, last))) for first, last in ranges]

    def _waiting_keys(self, begin: int, end: int) -> Iterator[int]:
        """Yield the keys of waiting messages in a range of offsets."""
        while begin < end:
            data = self._queue.entries(begin, min(end - begin, ENTRIES_AT_ONCE))
            for _, size, due_ms in ENTRY.iter_unpack(data):
                if size and not self._is_done(key_of(due_ms, begin)):
                    yield key_of(due_ms, begin)
                begin += 1

    def _keys_of(self, runs: list[SortedRun], offsets: Iterable[int]) -> list[int]:
        """Return the schedule keys (delivery time and queue offset) of those `offsets` that lie within one of the runs. The
        runs skip them, because the keys precede their `head`."""
        among = [offset for offset in offsets if any(run.begin <= offset < run.end for run in runs)]
        return [key_of(self._queue.entry(offset)[2], offset) for offset in among]

    def _order(self) -> None:
        self._heads = [(run.head, number, run) for number, run in enumerate(self._runs) if run.head is not None]
        heapify(self._heads)

    def add(self, key: int) -> None:
        """Add the key of the next offset."""
        heappush(self._heap, key)
        end = offset_of(key) + 1
        if end - self._heap_begin >= self._run_keys:
            self._seal(end)

    def _seal(self, end: int) -> None:
        """Move the keys of the newest offsets from the heap into a run. Keys that were added again after a failure stay
        in the heap."""
        begin = self._heap_begin
        self._runs.append(SortedRun(begin, end, sorted(key for key in self._heap if offset_of(key) >= begin)))
        self._heap = [key for key in self._heap if offset_of(key) < begin]
        heapify(self._heap)
        self._heap_begin = end
        self._order()

    def add_again(self, keys: Iterable[int]) -> None:
        """Add keys that were taken before, or that precede the delivered ones."""
        for key in keys:
            heappush(self._heap, key)

    @property
    def next(self) -> int | None:
        """The key of the message that becomes due first; None if no message is waiting."""
        head = self._heads[0][0] if self._heads else None
        if self._heap and (head is None or self._heap[0] <= head):
            return self._heap[0]
        return head

    def remove_first(self) -> None:
        """Remove `next`."""
        if self._heap and (not self._heads or self._heap[0] <= self._heads[0][0]):
            heappop(self._heap)
            return
        key, number, run = heappop(self._heads)
        try:
            run.advance()
        except Damaged as damage:
            self._rebuild(run, key + 1, str(damage))
        else:
            if run.head is not None:
                heappush(self._heads, (run.head, number, run))

    def _rebuild(self, run: SortedRun, key: int, reason: str) -> None:
        """Recreate a damaged run from the index. Keys before `key` were taken already."""
        log.error("timer_run_rebuilt", reason=reason)
        made = self._new_runs(max(run.begin, self._queue.begin), run.end)
        for each in made:
            each.seek(key)
        index = self._runs.index(run)
        self._runs[index : index + 1] = made
        run.remove()
        self._order()

    def between(self, begin: int, end: int) -> Iterator[int]:
        """Yield the keys from `begin` to `end` (exclusive). Keys may occur twice, or may have been taken already."""
        yield from [key for key in self._heap if begin <= key < end]
        for run in list(self._runs):
            try:
                yield from takewhile(lambda key: key < end, run.keys(run.find(begin)))
            except Damaged as damage:
                self._rebuild(run, _BEYOND if run.head is None else run.head, str(damage))
                first = max(run.begin, self._queue.begin)
                yield from [key for key in self._waiting_keys(first, run.end) if begin <= key < end]

    # Files

    def saving(self, delivered: Callable[[], int], behind: Callable[[], Iterable[int]]) -> Job[None]:
        """Write runs that are only in memory, merge files, and remove runs whose messages were all stored again. Runs stay in
        memory if the disk refuses the write."""
        try:
            yield from self._writing()
            runs = self._mergeable()
            if runs:
                made = yield from merging(self._folder, runs, lambda key: not self._is_done(key))
                self._replace(runs, made, delivered() + 1, behind())
        except (StoreFull, Damaged) as error:  # delivery finds a damaged file as well, and rebuilds it
            log.error("timer_runs_not_written", reason=str(error), hint="the broker retries")

    def _writing(self) -> Job[None]:
        begin = self._queue.begin
        for run in list(self._runs):
            if run.end <= begin:  # these messages were stored again later in the log
                self._runs.remove(run)
                run.remove()
                self._order()
            elif not run.is_written:
                yield from run.writing(self._folder)

    def _mergeable(self) -> list[SortedRun]:
        """Return adjacent runs of similar size if there are enough to merge, preferring the newest; otherwise an empty
        list."""
        for last in range(len(self._runs), self._runs_to_merge - 1, -1):
            candidates = self._runs[last - self._runs_to_merge : last]
            if all(run.is_written for run in candidates) and len({self._level(run) for run in candidates}) == 1:
                return candidates
        return []

    def _replace(self, runs: list[SortedRun], made: SortedRun, key: int, behind: Iterable[int]) -> None:
        made.seek(key)
        index = self._runs.index(runs[0]) if runs[0] in self._runs else 0
        if self._runs[index : index + len(runs)] != runs:  # a damaged run was rebuilt meanwhile
            made.remove()
            return
        self._runs[index : index + len(runs)] = [made]
        self.add_again(self._keys_of([made], behind))
        for run in runs:
            run.remove()
        self._order()

    def _level(self, run: SortedRun) -> int:
        """Return the level of a run: how often runs of the smallest size were merged into one of this size."""
        level, size = 0, run.end - run.begin
        while size >= self._run_keys * self._runs_to_merge:
            size //= self._runs_to_merge
            level += 1
        return level
