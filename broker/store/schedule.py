"""The messages of a queue that wait, in the order of their times.

The keys of the newest messages are a heap in memory. When they are many they become a run: sorted, and written to a file
with the next checkpoint (`runs`). Each file has one block in memory. Files of about one size are merged. Everything derives
from the queue's index, whose third field is the time, and a lost or damaged file is made again from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Final

import structlog

from ..config import LIMITS, Limits
from ..running.jobs import Job
from .consume_queue import ENTRY, ConsumeQueue
from .files import Damaged, StoreFull
from .runs import Run, key_of, merging, offset_of, open_runs

log = structlog.get_logger("rocketlet.store")

ENTRIES_AT_ONCE: Final = 1024
_BEYOND: Final = key_of(1 << 63, 0)  # all keys that can be


class Schedule:
    """is_done: whether a key's message is delivered, or lies somewhere else now. A key may come twice, the second one next
    to the first: the taker notes which one was the last."""

    def __init__(
        self, folder: Path, queue: ConsumeQueue, is_done: Callable[[int], bool], limits: Limits = LIMITS
    ) -> None:
        self._run_keys, self._runs_to_merge = limits.run_keys, limits.runs_to_merge
        self._folder = folder
        self._queue = queue
        self._is_done = is_done
        self._runs: list[Run] = []
        self._heads: list[tuple[int, int, Run]] = []
        self._heap: list[int] = []
        self._heap_begin = 0  # the first offset that is in no run

    def load(self, end: int, delivered: int, behind: Iterable[int]) -> None:
        """Loads the offsets below `end` that wait: those above the key that was delivered last, and the offsets
        `behind`."""
        at, runs = self._queue.begin, []
        for run in open_runs(self._folder, end):
            try:
                run.seek(delivered + 1)
            except Damaged as damage:
                log.error("timer_run_rebuilt", reason=str(damage))
                run.remove()
                continue
            runs += [*self._made(at, run.begin), run]
            at = max(at, run.end)
        self._runs = runs
        self.add_again(self._keys_of([run for run in runs if run.is_written], behind))
        rest = max(at, end - (end - at) % self._run_keys)
        self._runs += self._made(at, rest)
        self.add_again(self._keys(rest, end))
        self._heap_begin = rest
        self._order()

    def _made(self, begin: int, end: int) -> list[Run]:
        """Runs of a part of the index."""
        ranges = ((first, min(first + self._run_keys, end)) for first in range(begin, end, self._run_keys))
        return [Run(first, last, sorted(self._keys(first, last))) for first, last in ranges]

    def _keys(self, begin: int, end: int) -> Iterator[int]:
        """The keys of these offsets that wait."""
        while begin < end:
            data = self._queue.entries(begin, min(end - begin, ENTRIES_AT_ONCE))
            for _, size, due_ms in ENTRY.iter_unpack(data):
                if size and not self._is_done(key_of(due_ms, begin)):
                    yield key_of(due_ms, begin)
                begin += 1

    def _keys_of(self, runs: list[Run], offsets: Iterable[int]) -> list[int]:
        """Keys in runs behind the delivered ones, where nobody looks for them."""
        among = [offset for offset in offsets if any(run.begin <= offset < run.end for run in runs)]
        return [key_of(self._queue.entry(offset)[2], offset) for offset in among]

    def _order(self) -> None:
        self._heads = [(run.head, number, run) for number, run in enumerate(self._runs) if run.head is not None]
        heapify(self._heads)

    def add(self, key: int) -> None:
        """The key of the next offset."""
        heappush(self._heap, key)
        end = offset_of(key) + 1
        if end - self._heap_begin >= self._run_keys:
            self._seal(end)

    def _seal(self, end: int) -> None:
        """Keys that came back after a failure stay in the heap."""
        begin = self._heap_begin
        self._runs.append(Run(begin, end, sorted(key for key in self._heap if offset_of(key) >= begin)))
        self._heap = [key for key in self._heap if offset_of(key) < begin]
        heapify(self._heap)
        self._heap_begin = end
        self._order()

    def add_again(self, keys: Iterable[int]) -> None:
        """Keys that were taken, or that are before the delivered ones."""
        for key in keys:
            heappush(self._heap, key)

    @property
    def next(self) -> int | None:
        """The key of the message that is due first."""
        head = self._heads[0][0] if self._heads else None
        if self._heap and (head is None or self._heap[0] <= head):
            return self._heap[0]
        return head

    def take(self) -> None:
        """Takes `next` out."""
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

    def _rebuild(self, run: Run, key: int, reason: str) -> None:
        """Makes a run anew; the keys before this one were taken."""
        log.error("timer_run_rebuilt", reason=reason)
        made = self._made(max(run.begin, self._queue.begin), run.end)
        for each in made:
            each.seek(key)
        place = self._runs.index(run)
        self._runs[place : place + 1] = made
        run.remove()
        self._order()

    def between(self, begin: int, end: int) -> Iterator[int]:
        """The keys from `begin` up to `end`, some of them perhaps twice, or taken."""
        yield from [key for key in self._heap if begin <= key < end]
        for run in list(self._runs):
            try:
                yield from takewhile(lambda key: key < end, run.keys(run.find(begin)))
            except Damaged as damage:
                self._rebuild(run, _BEYOND if run.head is None else run.head, str(damage))
                first = max(run.begin, self._queue.begin)
                yield from [key for key in self._keys(first, run.end) if begin <= key < end]

    # Files

    def saving(self, delivered: Callable[[], int], behind: Callable[[], Iterable[int]]) -> Job[None]:
        """Writes the runs that are in memory only, and merges files. Runs that a full disk refuses stay in memory."""
        try:
            yield from self._writing()
            runs = self._mergeable()
            if runs:
                made = yield from merging(self._folder, runs, lambda key: not self._is_done(key))
                self._replace(runs, made, delivered() + 1, behind())
        except (StoreFull, Damaged) as error:  # delivery finds a damaged file, too
            log.error("timer_runs_not_written", reason=str(error), hint="it is tried again")

    def _writing(self) -> Job[None]:
        begin = self._queue.begin
        for run in list(self._runs):
            if run.end <= begin:  # these messages are stored once more behind
                self._runs.remove(run)
                run.remove()
                self._order()
            elif not run.is_written:
                yield from run.writing(self._folder)

    def _mergeable(self) -> list[Run]:
        """Runs of about one size that follow each other, if they are many; the newest."""
        for last in range(len(self._runs), self._runs_to_merge - 1, -1):
            some = self._runs[last - self._runs_to_merge : last]
            if all(run.is_written for run in some) and len({self._level(run) for run in some}) == 1:
                return some
        return []

    def _replace(self, runs: list[Run], made: Run, key: int, behind: Iterable[int]) -> None:
        made.seek(key)
        place = self._runs.index(runs[0]) if runs[0] in self._runs else 0
        if self._runs[place : place + len(runs)] != runs:  # one was damaged, and has been made anew
            made.remove()
            return
        self._runs[place : place + len(runs)] = [made]
        self.add_again(self._keys_of([made], behind))
        for run in runs:
            run.remove()
        self._order()

    def _level(self, run: Run) -> int:
        """How often runs of the smallest size were merged into one of this size."""
        level, size = 0, run.end - run.begin
        while size >= self._run_keys * self._runs_to_merge:
            size //= self._runs_to_merge
            level += 1
        return level
