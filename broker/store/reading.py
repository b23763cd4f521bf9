"""Messages out of the log: by queue and offset, by position, by time.

Records that this process has written are read many at a time, and checked by sums that it kept (`written`). Older ones, and
those where such a sum is wrong, are checked one by one. A damaged one is skipped, counted and logged; those behind it are
delivered.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, compress, count
from operator import add, ne
from typing import Final, NamedTuple

import structlog

from ...protocol.message import (
    FIXED_BYTES,
    MAX_RECORD_BYTES,
    MessageError,
    Record,
    is_certainly,
    places_in,
    store_time_at,
    stored_ms,
    without_checksum,
)
from ...protocol.subscription import Subscription
from ...protocol.work import Work
from ..config import (
    BULK_PULL_BYTES,
    BULK_PULL_MESSAGES,
    CHECKED_GAP_BYTES,
    DAMAGE_NEIGHBOURS,
    MAX_NOTED_DAMAGE,
    PULL_BYTES,
    PULL_MESSAGES,
    READ_GAP_BYTES,
    SCAN_BYTES,
    SCAN_ENTRIES,
    SHARED_READ_BYTES,
)
from .commit_log import Buffer, CommitLog
from .consume_queue import ENTRY_BYTES, ConsumeQueue
from .files import Damaged

log = structlog.get_logger("rocketlet.store")


@lru_cache(32)
def _unpacker(count: int) -> Callable[[bytes], tuple[int, ...]]:
    """Unpacks so many index entries. struct keeps formats itself, but needs the text of each to find it."""
    return struct.Struct(">" + "QIq" * count).unpack


MOST_READ_BYTES: Final = 2 * BULK_PULL_BYTES + MAX_RECORD_BYTES
Entry = tuple[int, int, int]  # queue offset, commit log position, size


class Fetched(NamedTuple):
    """The result of a read: the records' bytes in pieces, their number, and the offset after the last entry looked at."""

    pieces: list[Buffer]
    messages: int
    next_offset: int


class Reader:
    """Reads the log. `queues` are those that there are, by topic and number."""

    def __init__(self, segments: CommitLog, queues: Mapping[tuple[str, int], ConsumeQueue]) -> None:
        self._log = segments
        self._queues = queues
        self._damaged: set[tuple[str, int, int]] = set()
        self._latest: tuple[int, int, Buffer] = (0, 0, b"")  # position, size and the bytes read there

    @property
    def damaged(self) -> frozenset[tuple[str, int, int]]:
        """The damaged messages that were met so far: topic, queue, offset."""
        return frozenset(self._damaged)

    def fetch(
        self,
        queue: ConsumeQueue,
        offset: int,
        max_messages: int,
        subscription: Subscription | None = None,
        matches: Callable[[str], bool] | None = None,
        max_bytes: int | None = None,
        max_looks: int = SCAN_ENTRIES,
    ) -> Fetched:
        """Messages from `offset`, which must lie in the queue, as far as the limits of a pull go; those of a bulk pull if
        `max_bytes` is given.

        `subscription` filters by tag code, `matches` by the properties' text, `max_looks` times at most; None takes all.
        """
        limit = min(max(max_messages, 1), PULL_MESSAGES if max_bytes is None else BULK_PULL_MESSAGES)
        room = PULL_BYTES if max_bytes is None else min(max(max_bytes, 1), BULK_PULL_BYTES)
        if matches is not None:
            return self._fetch_matching(queue, offset, limit, room, matches, max_looks)
        if subscription is None or subscription.expression == "*":
            return self._fetch_all(queue, offset, limit, room)
        return self._fetch_tagged(queue, offset, limit, room, subscription)

    def _fetch_all(self, queue: ConsumeQueue, offset: int, limit: int, room: int) -> Fetched:
        data = queue.entries(offset, limit)
        count = len(data) // ENTRY_BYTES
        fields = _unpacker(count)(data)
        positions, sizes = fields[0::3], fields[1::3]
        if sum(sizes) > room:
            kept = max(bisect_right(list(accumulate(sizes)), room), 1)
            positions, sizes, count = positions[:kept], sizes[:kept], kept
        # An index entry without a size stands for a message that was lost.
        if positions[0] >= self._log.written.begin and all(sizes):
            try:
                return Fetched(self._read_records(positions, sizes), count, offset + count)
            except (Damaged, MessageError):
                pass
        entries = list(zip(range(offset, offset + count), positions, sizes, strict=True))
        return Fetched(*self._checked(queue, entries), offset + count)

    def _fetch_tagged(
        self, queue: ConsumeQueue, offset: int, limit: int, room: int, subscription: Subscription
    ) -> Fetched:
        data = queue.entries(offset, max(SCAN_ENTRIES, limit))
        found: list[Entry] = []
        scanned = 0
        for position, size, code in struct.iter_unpack(">QIq", data):
            if code in subscription.codes or subscription.matches_code(code):
                if found and (len(found) >= limit or size > room):
                    break
                found.append((offset + scanned, position, size))
                room -= size
            scanned += 1
        pieces, count = self._read_some(queue, found) if found else ([], 0)
        return Fetched(pieces, count, offset + scanned)

    def _read_some(self, queue: ConsumeQueue, entries: list[Entry]) -> tuple[list[Buffer], int]:
        if entries[0][1] >= self._log.written.begin:
            _, positions, sizes = zip(*entries, strict=True)
            if all(sizes):
                try:
                    return self._read_records(positions, sizes), len(entries)
                except (Damaged, MessageError):
                    pass
        return self._checked(queue, entries)

    def _fetch_matching(
        self, queue: ConsumeQueue, offset: int, limit: int, room: int, matches: Callable[[str], bool], max_looks: int
    ) -> Fetched:
        """Reads each record and looks at its properties: as many as a turn has time for. The client asks again at once."""
        entries = struct.iter_unpack(">QIq", queue.entries(offset, min(max(max_looks, 1), SCAN_ENTRIES)))
        pieces: list[Buffer] = []
        scanned = scanned_bytes = 0
        for position, size, _ in entries:
            scanned_bytes += size
            if scanned and scanned_bytes > SCAN_BYTES:
                break
            data = self._bytes(position, size)
            record = self._record(queue, offset + scanned, position, data)
            if record is not None and matches(record.properties):
                if pieces and (len(pieces) >= limit or size > room):
                    break
                pieces.append(data)
                room -= size
            scanned += 1
        return Fetched(pieces, len(pieces), offset + scanned)

    # Runs of records as they lie there

    def _read_records(self, positions: Sequence[int], sizes: Sequence[int]) -> list[Buffer]:
        """Raises Damaged, also for what cannot be where the index says: its files may be damaged as the log may be."""
        begin, end = positions[0], positions[-1] + sizes[-1]
        total = sum(sizes)
        if total > MOST_READ_BYTES:
            raise Damaged(f"an index has records of {total} bytes")
        if end - begin == total:
            return [self._read_once(begin, total, sizes[-1])]
        return self._read_runs(positions, sizes)

    def _read_once(self, position: int, size: int, last_size: int) -> Buffer:
        """Groups that keep up pull the same messages one after the other, so they share a read: the log is never rewritten.
        A large read of a backlog is not kept; it would only push the next one out of the processor's cache."""
        latest = self._latest
        if latest[0] == position and latest[1] == size and position >= self._log.begin:
            return latest[2]
        data = self._log.read_written(position, size)
        (_, first_at), (found_size, _) = places_in(data, (0, size - last_size))
        if first_at != position or found_size != last_size:
            raise Damaged(f"the records at {position} are not those that their index has there")
        if size <= SHARED_READ_BYTES:
            self._latest = (position, size, data)
        return data

    def _read_runs(self, positions: Sequence[int], sizes: Sequence[int]) -> list[Buffer]:
        """A piece for each run of records that lie side by side, as those of a batch do. Reads over small gaps: one read is
        cheaper than two, and checks the bytes between, too."""
        ends = list(map(add, positions, sizes))
        firsts = [0, *compress(count(1), map(ne, positions[1:], ends))]
        runs = list(zip(firsts, [*(first - 1 for first in firsts[1:]), len(ends) - 1], strict=True))
        pieces: list[Buffer] = []
        near = 0
        for number in range(1, len(runs) + 1):
            if number < len(runs) and positions[runs[number][0]] - ends[runs[number - 1][1]] <= CHECKED_GAP_BYTES:
                continue
            begin = positions[runs[near][0]]
            data = memoryview(self._log.read_written(begin, ends[runs[number - 1][1]] - begin))
            edges = list(dict.fromkeys(chain.from_iterable(runs[near:number])))
            places = [(sizes[edge], positions[edge]) for edge in edges]
            if places_in(data, [at - begin for _, at in places]) != places:
                raise Damaged(f"the records from {begin} on are not those that their index has there")
            pieces += [data[positions[first] - begin : ends[last] - begin] for first, last in runs[near:number]]
            near = number
        return pieces

    # One by one

    def _checked(self, queue: ConsumeQueue, entries: list[Entry]) -> tuple[list[Buffer], int]:
        """The bytes of the records that are whole, and how many those are."""
        begin, total = entries[0][1], sum(size for _, _, size in entries)
        span = entries[-1][1] + entries[-1][2] - begin
        is_near = self._log.begin <= begin and 0 < span <= min(2 * total + READ_GAP_BYTES, MOST_READ_BYTES)
        block = self._log.read_up_to_damage(begin, span) if is_near else b""
        pieces: list[Buffer] = []
        for offset, position, size in entries:
            at = position - begin
            data = block[at : at + size] if 0 <= at <= len(block) - size else self._bytes(position, size)
            if is_certainly(data, queue.topic_record, queue.queue_id, offset, position) or self._record(
                queue, offset, position, data
            ):
                pieces.append(data)
        count = len(pieces)
        return ([block] if count == len(entries) and span == total else pieces), count

    def _bytes(self, position: int, size: int) -> bytes:
        """The log's bytes where the index has a record."""
        is_possible = 0 < size <= MAX_RECORD_BYTES and position >= self._log.begin
        return self._log.read_up_to_damage(position, size) if is_possible else b""

    def _record(self, queue: ConsumeQueue, offset: int, position: int, data: bytes) -> Record | None:
        """The queue's record at an offset; None if it is damaged, which is logged once."""
        record = self._log.record_in(data, 0, position)
        if record is not None and (record.size, record.queue_offset, record.queue_id, record.topic) == (
            len(data),
            offset,
            queue.queue_id,
            queue.topic,
        ):
            return without_checksum(record)
        self._note(queue, offset, position)
        return None

    def _note(self, queue: ConsumeQueue, offset: int, position: int) -> None:
        key = (queue.topic, queue.queue_id, offset)
        if key not in self._damaged and len(self._damaged) < MAX_NOTED_DAMAGE:
            self._damaged.add(key)
            log.error("damaged_message_skipped", topic=key[0], queue=key[1], offset=offset, position=position)

    def message(self, queue: ConsumeQueue, offset: int) -> Record:
        """Raises Damaged if it cannot be read."""
        position, size, _ = queue.entry(offset)
        record = self._record(queue, offset, position, self._bytes(position, size))
        if record is None:
            raise Damaged(f"message {offset} of {queue.topic}:{queue.queue_id} is damaged or lost")
        return record

    # By position

    def is_indexed(self, record: Record) -> bool:
        """Whether the record is a message of the queue that it names. Bytes in a body may look like a record, its place and
        checksums included; only an index says where a message begins."""
        queue = self._queues.get((record.topic, record.queue_id))
        return queue is not None and queue.names(record.queue_offset, record.physical_offset, record.size)

    def record_at(self, position: int) -> Record | None:
        """The message at a commit log position, which may be a client's; None if no queue has one there."""
        record = self._at(position)
        return record if record is not None and self.is_indexed(record) else None

    def record_bytes_at(self, position: int) -> bytes | None:
        """The bytes of the message at a commit log position; None if no queue has one there."""
        record = self.record_at(position)
        return self._log.read(position, record.size) if record else None

    def _at(self, position: int) -> Record | None:
        if not self._log.begin <= position < self._log.end:
            return None
        record = self._log.record_at(position)
        return without_checksum(record) if record is not None else None

    # By time

    def earliest_ms(self) -> int:
        """The store time of the oldest message, ms; -1 if there is none."""
        record = self._at(self._log.begin)
        return record.store_ms if record else -1

    def store_time_ms(self, queue: ConsumeQueue, offset: int) -> int:
        """When a message was stored; one that is lost counts as its neighbour. 0 if none near it can be read."""
        time_ms = self._time_ms(queue, offset)
        if time_ms is not None:
            return time_ms
        behind = range(offset + 1, min(offset + DAMAGE_NEIGHBOURS, queue.next))
        before = range(offset - 1, max(offset - DAMAGE_NEIGHBOURS, queue.begin - 1), -1)
        for near in chain(behind, before):
            time_ms = self._time_ms(queue, near)
            if time_ms is not None:
                return time_ms
        return 0

    def _time_ms(self, queue: ConsumeQueue, offset: int) -> int | None:
        position, size, _ = queue.entry(offset)
        if position >= self._log.written.begin and size:
            try:
                head = self._log.read_written(position, FIXED_BYTES)
                if places_in(head, (0,)) == [(size, position)]:
                    at = store_time_at(head)
                    return int.from_bytes(head[at : at + 8], "big")
            except Damaged:
                pass
        if size > READ_GAP_BYTES and position >= self._log.begin:  # a body of 4 MiB takes 5 ms to read and check
            parts = self._log.without_body(position, size)
            time_ms = stored_ms(parts, size, queue.topic_record, queue.queue_id, offset, position)
            if time_ms is not None:
                return time_ms
        record = self._record(queue, offset, position, self._bytes(position, size))
        return record.store_ms if record else None

    def offset_by_time(self, queue: ConsumeQueue, timestamp_ms: int) -> Work[int]:
        """The offset that SEARCH_OFFSET_BY_TIMESTAMP answers: exact, or the nearer neighbour, the last one at most."""
        if queue.begin == queue.next:
            return queue.begin
        low = yield from self.first_not_before(queue, timestamp_ms)
        if low == queue.next:
            return low - 1
        if low == queue.begin:
            return low
        after = self.store_time_ms(queue, low) - timestamp_ms
        before = timestamp_ms - self.store_time_ms(queue, low - 1)
        return low if after == 0 or after < before else low - 1

    def first_not_before(self, queue: ConsumeQueue, timestamp_ms: int) -> Work[int]:
        """The offset of the first message stored at that time or later; the queue's end if there is none."""
        low, high = queue.begin, queue.next
        while (low := max(low, queue.begin)) < high:  # some may have expired since the last look
            middle = (low + high) // 2
            if self.store_time_ms(queue, middle) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
            yield
        return low
