"""Messages of a topic that hold a text, newest first. There is no index of keys: a search reads the topic's records.

The indexes of the topic's queues alone say where a record begins. Its body, which a client wrote, may look like any number of
records, and costs one look all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from ...protocol.message import MessageError, Record, properties_in
from ..config import READ_GAP_BYTES, SEARCH_CHUNK_BYTES, SEARCH_ENTRIES, SEARCHED_ENTRIES
from .commit_log import CommitLog
from .consume_queue import ENTRY, ConsumeQueue
from .files import Damaged
from .reading import Reader


class Candidate(NamedTuple):
    """A message's place, by an index."""

    position: int
    size: int
    offset: int
    queue: ConsumeQueue


class Found(NamedTuple):
    """A message, and its bytes in the log."""

    record: Record
    data: bytes


class Search:
    """`looked` counts index entries; `is_cut`: there were more than one search may look at."""

    def __init__(
        self, log: CommitLog, reader: Reader, queues: Sequence[ConsumeQueue], is_there: Callable[[ConsumeQueue], bool]
    ) -> None:
        self._log = log
        self._reader = reader
        self._queues = queues
        self._is_there = is_there
        self.looked = 0
        self.is_cut = False

    def run(
        self, text: bytes, begin_ms: int, end_ms: int, is_wanted: Callable[[str], bool]
    ) -> Iterator[Sequence[Found]]:
        """The messages of these store times whose records hold the bytes, and whose properties `is_wanted` takes: those of
        each piece of the work, which may be none, newest first. Raises StoreError for what cannot be read."""
        piece: list[Candidate] = []
        piece_bytes = 0
        for place in self._newest_first(begin_ms, end_ms):
            if place is not None:
                piece.append(place)
                piece_bytes += place.size
                if len(piece) < SEARCH_ENTRIES and piece_bytes < SEARCH_CHUNK_BYTES:
                    continue
            yield self._look(piece, text, is_wanted)
            piece, piece_bytes = [], 0
        yield self._look(piece, text, is_wanted)

    def _newest_first(self, begin_ms: int, end_ms: int) -> Generator[Candidate | None, None, None]:
        """The places of all queues by their order in the log; None after some work that found none."""
        block = max(16, SEARCH_ENTRIES // max(len(self._queues), 1))
        heap: list[tuple[int, int, Candidate, Iterator[Candidate]]] = []
        for number, queue in enumerate(self._queues):
            first = yield from self._reader.first_not_before(queue, begin_ms)
            after = yield from self._reader.first_not_before(queue, end_ms + 1)
            places = self._of_queue(queue, first, after, block)
            newest = next(places, None)
            if newest is not None:
                heap.append((-newest.position, number, newest, places))
            yield None
        heapify(heap)
        while heap:
            _, number, place, places = heap[0]
            if self.looked >= SEARCHED_ENTRIES:
                self.is_cut = True
                return
            self.looked += 1
            yield place
            older = next(places, None)
            if older is None:
                heappop(heap)
            else:
                heapreplace(heap, (-older.position, number, older, places))

    def _of_queue(self, queue: ConsumeQueue, first: int, after: int, block: int) -> Iterator[Candidate]:
        while self._is_there(queue) and after > (first := max(first, queue.begin)):
            begin = max(after - block, first)
            entries = list(ENTRY.iter_unpack(queue.entries(begin, after - begin)))
            for index in range(after - begin - 1, -1, -1):
                position, size, _ = entries[index]
                if size:  # otherwise it stands for a message that was lost
                    yield Candidate(position, size, begin + index, queue)
            after = begin

    def _look(self, piece: list[Candidate], text: bytes, is_wanted: Callable[[str], bool]) -> list[Found]:
        found: list[Found] = []
        for run in _runs(piece):
            found += self._found_in(run, text, is_wanted)
        return found[::-1]

    def _found_in(self, run: list[Candidate], text: bytes, is_wanted: Callable[[str], bool]) -> Iterator[Found]:
        begin = run[0].position
        if begin < self._log.begin:  # expired meanwhile
            return
        data = self._log.read_up_to_damage(begin, run[-1].position + run[-1].size - begin)
        starts = [place.position - begin for place in run]
        at = data.find(text)
        while at >= 0:
            index = max(bisect_right(starts, at) - 1, 0)
            place = run[index]
            record = data[starts[index] : starts[index] + place.size]
            if _may_be(record, is_wanted) and (message := self._intact(place)):
                yield Found(message, record)
            if index + 1 == len(run):
                return
            at = data.find(text, starts[index + 1])

    def _intact(self, place: Candidate) -> Record | None:
        try:
            return self._reader.message(place.queue, place.offset)
        except Damaged:  # which the reader has named
            return None


def _runs(piece: list[Candidate]) -> Iterator[list[Candidate]]:
    """The places of a piece, oldest first, in runs that one read gets."""
    run: list[Candidate] = []
    end = 0
    for place in reversed(piece):
        if run and not 0 <= place.position - end <= READ_GAP_BYTES:
            yield run
            run = []
        run.append(place)
        end = place.position + place.size
    if run:
        yield run


def _may_be(data: bytes, is_wanted: Callable[[str], bool]) -> bool:
    try:
        return is_wanted(properties_in(data))
    except MessageError:
        return False
