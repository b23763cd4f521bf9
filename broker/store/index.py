"""Consume queues (20 bytes per message), and reads of messages by queue offset, position, time and key."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, chain, compress, count
from operator import add, ne
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, TypeVar

import orjson
import structlog

from ...protocol import fast
from ...protocol.bodies import Work
from ...protocol.checksum import crc32
from ...protocol.config import MAX_REQUEST_HEADER_BYTES
from ...protocol.message import (
    FIXED_BYTES,
    MAX_RECORD_BYTES,
    MessageError,
    Record,
    is_certainly,
    places_in,
    properties_in,
    store_time_at,
    stored_ms,
    without_checksum,
)
from ...protocol.names import Subscription
from ..config import (
    BULK_PULL_BYTES,
    BULK_PULL_MESSAGES,
    CHECKED_GAP_BYTES,
    DAMAGE_NEIGHBOURS,
    INDEX_SEGMENT_ENTRIES,
    INDEX_TAIL_BYTES,
    MAX_NOTED_DAMAGE,
    PULL_BYTES,
    PULL_MESSAGES,
    READ_GAP_BYTES,
    SCAN_BYTES,
    SCAN_ENTRIES,
    SEARCH_CHUNK_BYTES,
    SEARCH_ENTRIES,
    SEARCHED_ENTRIES,
    SHARED_READ_BYTES,
)
from . import disk
from .files import Damaged, OpenFiles, StoreError
from .log import Buffer, CommitLog, SegmentedFile

Repeated = TypeVar("Repeated")
"""A checked pull that is repeated; the store does not look into it."""

log = structlog.get_logger("rocketlet.store")


# ------------------------------------------------------------------------------
# The index of one queue: 20 bytes per message (commit log position, record size, tag code), as in Apache's consume
# queue.
#
# The newest entries are in memory (`_tail`) until a checkpoint, or until they fill 64 KiB. Older ones are in files.
# After a crash, missing entries are recreated from the commit log. A lost message has an entry of size 0, so that the
# offsets of later messages do not change.


ENTRY: Final = Struct(">QIq")
ENTRY_BYTES: Final = ENTRY.size
TAIL_ENTRIES: Final = INDEX_TAIL_BYTES // ENTRY_BYTES

_pack = ENTRY.pack


@lru_cache(32)
def _packer(count: int) -> Callable[..., bytes]:
    """Return a function that packs this many entries in one call."""
    return Struct(">" + "QIq" * count).pack


class QueueCheckpoint(NamedTuple):
    """A queue in a checkpoint: its first offset, its next offset, and the sums of its segments by their starts."""

    begin: int
    next: int
    sums: dict[int, int]


class ConsumeQueue:
    """The index of one queue, with an entry for each queue offset from `begin` to `next` (exclusive)."""

    __slots__ = (
        "_entry",
        "_entry_of",
        "_file",
        "_tail",
        "_tail_at",
        "begin",
        "former_begin",
        "next",
        "put_bytes",
        "queue_id",
        "topic",
        "topic_record",
    )

    def __init__(self, topic: str, queue_id: int, directory: Path, open_files: OpenFiles) -> None:
        self.topic = topic
        self.queue_id = queue_id
        name = topic.encode()
        self.topic_record = bytes((len(name),)) + name
        self._file = SegmentedFile(directory, INDEX_SEGMENT_ENTRIES * ENTRY_BYTES, open_files, sums=True)
        self.begin = -(-self._file.begin // ENTRY_BYTES)
        self.next = self._tail_at = max(self._file.end // ENTRY_BYTES, self.begin)
        self._tail = bytearray()
        self.former_begin = self.begin  # `begin` before the last expiry
        self.put_bytes = 0  # record bytes that were appended since the start
        self._entry_of = (-1, -1)
        self._entry = b""

    def append(self, position: int, size: int, tag_code: int) -> int:
        """Append an entry, and return its queue offset."""
        self._tail += _pack(position, size, tag_code)
        self.put_bytes += size
        offset = self.next
        self.next = offset + 1
        return offset

    def extend(self, positions: Sequence[int], sizes: Sequence[int], tag_codes: Sequence[int]) -> int:
        """Append entries, and return the queue offset of the first one. If a number does not fit, nothing is appended."""
        entries = [0] * (3 * len(positions))
        entries[0::3], entries[1::3], entries[2::3] = positions, sizes, tag_codes
        self._tail += _packer(len(positions))(*entries)
        self.put_bytes += sum(sizes)
        offset = self.next
        self.next = offset + len(positions)
        return offset

    def extend_packed(self, entries: bytes, count: int, put_bytes: int) -> None:
        self._tail += entries
        self.put_bytes += put_bytes
        self.next += count

    def remove_last(self, count: int) -> None:
        del self._tail[len(self._tail) - count * ENTRY_BYTES :]
        self.next -= count

    def entries(self, offset: int, count: int) -> bytes:
        """Return the packed entries of up to `count` messages from `offset`, which must be within `begin` to `next`."""
        count = min(count, self.next - offset)
        tail_at = self._tail_at
        if offset >= tail_at:
            at = (offset - tail_at) * ENTRY_BYTES
            return bytes(self._tail[at : at + count * ENTRY_BYTES])
        stored = min(count, tail_at - offset)
        data = self._file.read(offset * ENTRY_BYTES, stored * ENTRY_BYTES)
        if stored < count:
            data += self._tail[: (count - stored) * ENTRY_BYTES]
        return data

    def entry(self, offset: int) -> tuple[int, int, int]:
        """Return commit log position, size and tag code of a message."""
        position, size, tag_code = ENTRY.unpack(self.entries(offset, 1))
        return position, size, tag_code

    def names(self, offset: int, position: int, size: int) -> bool:
        """Return True if the entry at an offset has this position and size."""
        return self.begin <= offset < self.next and self.entry(offset)[:2] == (position, size)

    @property
    def tail_is_long(self) -> bool:
        return len(self._tail) >= INDEX_TAIL_BYTES

    def flush(self) -> bool:
        """Write the tail to the file; return False if it is empty. Raises StoreFull; the tail is then still in memory."""
        if not self._tail:
            return False
        self._file.append(self._tail)
        self._tail_at = self.next
        self._tail = bytearray()
        return True

    def sync(self) -> None:
        """Sync everything flushed to the device. Raises StoreFailed."""
        self._file.sync()

    @property
    def checkpoint_entry(self) -> bytes:
        """The queue's entry in a checkpoint, after `flush`: `"topic@queue":[begin,next,start of a segment,its
        sum,...]`."""
        if self._entry_of != (self.begin, self._tail_at):
            values = [self.begin, self._tail_at]
            for start, found in (self._file.sums or {}).items():
                values += (start, found)
            self._entry = b"%b:%b" % (orjson.dumps(f"{self.topic}@{self.queue_id}"), orjson.dumps(values))
            self._entry_of = (self.begin, self._tail_at)
        return self._entry

    def close(self) -> None:
        self._file.forget()

    # Recovery

    def restore(self, state: QueueCheckpoint) -> bool:
        """Return to the state of a checkpoint; return False if the file does not contain it. The tail must be empty."""
        if state.begin >= state.next:
            self.restart(state.next)
            return True
        file = self._file
        if self.next < state.next or file.begin > state.begin * ENTRY_BYTES:
            return False
        file.truncate(state.next * ENTRY_BYTES)
        self.next = self._tail_at = state.next
        self.begin = state.begin
        return file.has_sums(state.sums)

    def least_log_end(self) -> int:
        """Return the minimum end of the log according to the last entry in the file; 0 without an entry."""
        try:
            position, size, _ = self.entry(self.next - 1)
        except StoreError:
            return 0
        return position + size if FIXED_BYTES <= size <= MAX_RECORD_BYTES else 0

    def lose_until(self, offset: int, position: int) -> None:
        """Append entries for lost messages up to `offset`. `position` is the position of the next message in the log."""
        if self.begin == self.next:
            self.restart(offset)
        while self.next < offset:
            self.append(position, 0, 0)
            if self.tail_is_long:
                self.flush()

    def truncate_from(self, position: int) -> None:
        """Remove the entries of messages at or after a commit log position. The tail must be empty."""
        first = self.first_from(position)
        if first < self.next:
            self._file.truncate(first * ENTRY_BYTES)
            self._file.compute_sums()
            self.next = self._tail_at = first

    def cut_from(self, position: int) -> int:
        """Remove the entries of messages that end after a commit log position, and return the position of the first
        one, or `position` if there is none."""
        self.truncate_from(position)
        if self.begin < self.next:
            at, size, _ = self.entry(self.next - 1)
            if at + size > position:
                self.truncate_from(at)
                return at
        return position

    def expire_before(self, position: int) -> None:
        """Remove the entries of messages before a commit log position. `drop_expired` then removes the files."""
        self.former_begin = self.begin
        self.begin = self.first_from(position)

    def drop_expired(self) -> None:
        """Remove the segments that contain only expired messages."""
        while self._file.segments > 1 and self._file.starts[1] <= self.begin * ENTRY_BYTES:
            self._file.drop_first()
            self._entry_of = (-1, -1)

    def first_from(self, position: int) -> int:
        """Return the offset of the first message from a commit log position on; `next` if there is none."""
        begin = self.begin
        if begin < self.next and self.entry(begin)[0] >= position:  # the usual case, which needs no search
            return begin
        return begin + bisect_left(range(begin, self.next), position, key=lambda offset: self.entry(offset)[0])

    def restart(self, offset: int) -> None:
        """Remove all entries. The next message gets `offset`."""
        self._tail.clear()
        self._entry_of = (-1, -1)
        self._file.restart(offset * ENTRY_BYTES)
        self.begin = self.next = self._tail_at = offset

    def delete(self) -> None:
        self._file.delete()


# ------------------------------------------------------------------------------
# Reads of messages from the log: by queue and offset, by position, by time.
#
# Records that this process has written are read in large pieces, and checked by sums (`Written` in `log.py`). Older
# records, records with a wrong sum, and records that a filter examines are checked one by one. A damaged record is skipped,
# and later records are delivered. The first `MAX_NOTED_DAMAGE` damaged records are counted and logged.


@lru_cache(32)
def _unpacker(count: int) -> Callable[[bytes], tuple[int, ...]]:
    """Return a function that unpacks this many index entries. Cached by number, because struct's own cache is keyed by
    the format's text."""
    return struct.Struct(">" + "QIq" * count).unpack


MOST_READ_BYTES: Final = 2 * BULK_PULL_BYTES + MAX_RECORD_BYTES
_PULLS_AHEAD: Final = 8
Entry = tuple[int, int, int]  # queue offset, commit log position, record size


def pull_limits(max_messages: int, max_bytes: int | None) -> tuple[int, int]:
    """Return the maximum number of records of a pull, and their maximum bytes."""
    if max_bytes is None:
        return min(max(max_messages, 1), PULL_MESSAGES), PULL_BYTES
    return min(max(max_messages, 1), BULK_PULL_MESSAGES), min(max(max_bytes, 1), BULK_PULL_BYTES)


class Fetched(NamedTuple):
    """Result of a read: the bytes of the records in pieces, the number of records, and the offset after the last
    examined entry."""

    pieces: list[Buffer]
    messages: int
    next_offset: int


class Reader:
    """Reader of the log. `queues` are the existing queues by topic and queue id."""

    def __init__(self, segments: CommitLog, queues: Mapping[tuple[str, int], ConsumeQueue]) -> None:
        self._log = segments
        self._queues = queues
        self._damaged: set[tuple[str, int, int]] = set()
        self._latest: tuple[int, int, Buffer] = (0, 0, b"")  # position, size and bytes of the last shared read
        self._ahead: tuple[ConsumeQueue | None, int, bytes] = (None, 0, b"")  # entries from an offset on

    @property
    def damaged(self) -> frozenset[tuple[str, int, int]]:
        """Damaged messages found so far, up to MAX_NOTED_DAMAGE: topic, queue id, offset."""
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
        """Return messages from `offset`, which must be within the queue, up to the limits of a pull.

        Args:
            queue: the queue
            offset: first offset
            max_messages: maximum number of messages
            subscription: filter by tag codes; None for all messages
            matches: filter by the encoded properties; None for all messages
            max_bytes: maximum record bytes of a bulk pull, which has higher limits; None for an ordinary pull
            max_looks: maximum number of records that `matches` examines
        """
        limit, room = pull_limits(max_messages, max_bytes)
        if matches is None and (subscription is None or subscription.expression == "*"):
            return self._fetch_all(queue, offset, limit, room)
        if matches is not None:
            return self._fetch_matching(queue, offset, limit, room, matches, max_looks)
        assert subscription is not None
        return self._fetch_tagged(queue, offset, limit, room, subscription)

    def entries_ahead(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """Return packed entries, like `ConsumeQueue.entries`, and read those of the next pulls with them, because a client
        reads a queue in order. Entries do not change after the start."""
        known, first, data = self._ahead
        at, size = (offset - first) * ENTRY_BYTES, min(count, queue.next - offset) * ENTRY_BYTES
        if known is not queue or not 0 <= at <= len(data) - size:
            data, at = queue.entries(offset, _PULLS_AHEAD * count), 0
            self._ahead = queue, offset, data
        return data[at : at + size]

    def take_pulls(
        self,
        data: bytes,
        at: int,
        checked: Mapping[bytes, Repeated],
        admit: Callable[[Repeated, int, int], fast.PullSource | None],
        max_bytes: int,
    ) -> fast.ServedPulls | None:
        """Serve up to 64 pulls from a position of the data on that repeat checked ones, with the compiled module, until
        their responses have more than `max_bytes`. Return None if the module declines the first pull."""
        log = self._log
        served = fast.take_pulls(
            data,
            at,
            MAX_REQUEST_HEADER_BYTES,
            checked,
            admit,
            log.segment_at,
            disk.read_at,
            crc32,
            log.written.sums,
            self._latest,
            (log.begin, MOST_READ_BYTES, max_bytes, SHARED_READ_BYTES),
        )
        if served is not None:
            self._latest = served.shared
        return served

    def _fetch_all(self, queue: ConsumeQueue, offset: int, limit: int, room: int) -> Fetched:
        data = queue.entries(offset, limit)
        count = len(data) // ENTRY_BYTES
        fields = _unpacker(count)(data)
        positions, sizes = fields[0::3], fields[1::3]
        if sum(sizes) > room:
            kept = max(bisect_right(list(accumulate(sizes)), room), 1)
            positions, sizes, count = positions[:kept], sizes[:kept], kept
        # An entry of size 0 stands for a lost message.
        if positions[0] >= self._log.written.begin and all(sizes):
            try:
                return Fetched(self._read_records(positions, sizes), count, offset + count)
            except (Damaged, MessageError):
                pass
        entries = list(zip(range(offset, offset + count), positions, sizes, strict=True))
        return Fetched(*self._intact_records(queue, entries), offset + count)

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
        return self._intact_records(queue, entries)

    def _fetch_matching(
        self, queue: ConsumeQueue, offset: int, limit: int, room: int, matches: Callable[[str], bool], max_looks: int
    ) -> Fetched:
        """Read records, and filter them by their properties, up to a limit of examined records. A client continues with
        its next pull."""
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

    # Runs of adjacent records

    def _read_records(self, positions: Sequence[int], sizes: Sequence[int]) -> list[Buffer]:
        """Return the bytes of records at these positions. Raises Damaged, including for impossible positions, because
        the index may be damaged as well."""
        begin, total = positions[0], sum(sizes)
        if positions[-1] + sizes[-1] - begin == total <= MOST_READ_BYTES:
            return [self._read_once(begin, total, sizes[-1])]
        if total > MOST_READ_BYTES:
            raise Damaged(f"an index has records of {total} bytes")
        return self._read_runs(positions, sizes)

    def _read_once(self, position: int, size: int, last_size: int) -> Buffer:
        """Return a run of records in one read.

        Groups without lag pull the same messages in succession, so they share one read; the log is never rewritten. A
        large read of a backlog is not kept, because it would evict the next one from the processor's cache.
        """
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
        """Return a piece for each run of adjacent records, such as those of a batch.

        Small gaps between runs are read as well, because one read is cheaper than two, and also verifies the bytes in
        the gaps.
        """
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
            expected = [(sizes[edge], positions[edge]) for edge in edges]
            if places_in(data, [at - begin for _, at in expected]) != expected:
                raise Damaged(f"the records from {begin} on are not those that their index has there")
            pieces += [data[positions[first] - begin : ends[last] - begin] for first, last in runs[near:number]]
            near = number
        return pieces

    # Records one by one

    def _intact_records(self, queue: ConsumeQueue, entries: list[Entry]) -> tuple[list[Buffer], int]:
        """Return the bytes of the intact records, and their number."""
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
        """Return the log's bytes at an index entry; empty for an impossible entry."""
        is_possible = 0 < size <= MAX_RECORD_BYTES and position >= self._log.begin
        return self._log.read_up_to_damage(position, size) if is_possible else b""

    def _record(self, queue: ConsumeQueue, offset: int, position: int, data: bytes) -> Record | None:
        """Return the queue's record at an offset; None if it is damaged, which is logged once for each of the first
        `MAX_NOTED_DAMAGE` damaged records."""
        record = self._log.record_in(data, 0, position)
        if record is not None and (record.size, record.queue_offset, record.queue_id, record.topic) == (
            len(data),
            offset,
            queue.queue_id,
            queue.topic,
        ):
            return without_checksum(record)
        self._record_damage(queue, offset, position)
        return None

    def _record_damage(self, queue: ConsumeQueue, offset: int, position: int) -> None:
        key = (queue.topic, queue.queue_id, offset)
        if key not in self._damaged and len(self._damaged) < MAX_NOTED_DAMAGE:
            self._damaged.add(key)
            log.error("damaged_message_skipped", topic=key[0], queue=key[1], offset=offset, position=position)

    def message(self, queue: ConsumeQueue, offset: int) -> Record:
        """Return the message at an offset. Raises Damaged if it cannot be read."""
        position, size, _ = queue.entry(offset)
        record = self._record(queue, offset, position, self._bytes(position, size))
        if record is None:
            raise Damaged(f"message {offset} of {queue.topic}:{queue.queue_id} is damaged or lost")
        return record

    # By position

    def is_indexed(self, record: Record) -> bool:
        """Return True if the index of the record's queue has an entry for it.

        Bytes of a body may look like a record, including position and checksums. The index is the proof that a message
        starts there.
        """
        queue = self._queues.get((record.topic, record.queue_id))
        return queue is not None and queue.names(record.queue_offset, record.physical_offset, record.size)

    def record_at(self, position: int) -> Record | None:
        """Return the message at a commit log position, which may come from a client; None if no queue has a message
        there."""
        record = self._at(position)
        return record if record is not None and self.is_indexed(record) else None

    def record_bytes_at(self, position: int) -> bytes | None:
        """Return the bytes of the message at a commit log position; None if no queue has a message there."""
        record = self.record_at(position)
        return self._log.read(position, record.size) if record else None

    def _at(self, position: int) -> Record | None:
        if not self._log.begin <= position < self._log.end:
            return None
        record = self._log.record_at(position)
        return without_checksum(record) if record is not None else None

    # By time

    def earliest_ms(self) -> int:
        """Return the store time of the oldest message in ms since the epoch; -1 if there is none, or if it is
        damaged."""
        record = self._at(self._log.begin)
        return record.store_ms if record else -1

    def store_time_ms(self, queue: ConsumeQueue, offset: int) -> int:
        """Return the store time of a message in ms since the epoch.

        For a lost message, return that of a readable message near it, preferably a later one; 0 if there is none.
        """
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
        if size > READ_GAP_BYTES and position >= self._log.begin:  # reading and checking a body of 4 MiB takes 5 ms
            parts = self._log.without_body(position, size)
            time_ms = stored_ms(parts, size, queue.topic_record, queue.queue_id, offset, position)
            if time_ms is not None:
                return time_ms
        record = self._record(queue, offset, position, self._bytes(position, size))
        return record.store_ms if record else None

    def offset_by_time(self, queue: ConsumeQueue, timestamp_ms: int) -> Work[int]:
        """Return the offset for SEARCH_OFFSET_BY_TIMESTAMP: the message at that time, or else the nearest one before or
        after it; `begin` for an empty queue."""
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
        """Return the offset of the first message stored at that time or later; the queue's end if there is none."""
        low, high = queue.begin, queue.next
        while (low := max(low, queue.begin)) < high:  # messages may have expired since the last iteration
            middle = (low + high) // 2
            if self.store_time_ms(queue, middle) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
            yield
        return low


# ------------------------------------------------------------------------------
# Search for messages of a topic that contain a text, newest first. There is no index of keys, so a search reads the
# records of the topic.
#
# Only the indexes of the topic's queues decide where a record starts. A body from a client may look like any number of
# records, but still counts as one message.


class Candidate(NamedTuple):
    """Position of a message, by an index entry."""

    position: int
    size: int
    offset: int
    queue: ConsumeQueue


class Found(NamedTuple):
    """A message, and its bytes in the log."""

    record: Record
    data: bytes


class Search:
    """A search in the records of a topic.

    Attributes:
        looked: number of index entries that were examined
        is_partial: True if the search ended at its limit
    """

    def __init__(
        self,
        log: CommitLog,
        reader: Reader,
        queues: Sequence[ConsumeQueue],
        all_queues: Mapping[tuple[str, int], ConsumeQueue],
    ) -> None:
        self._log = log
        self._reader = reader
        self._queues = queues
        self._all_queues = all_queues
        self.looked = 0
        self.is_partial = False

    def run(
        self, text: bytes, begin_ms: int, end_ms: int, is_wanted: Callable[[str], bool]
    ) -> Iterator[Sequence[Found]]:
        """Yield the matching messages of each piece of work, newest first; a piece may have none. Damaged messages are
        skipped. Stop after SEARCHED_ENTRIES index entries. Raises StoreError if the system refuses a read.

        Args:
            text: bytes that the record must contain
            begin_ms: first store time
            end_ms: last store time
            is_wanted: returns True for the encoded properties of matching messages
        """
        piece: list[Candidate] = []
        piece_bytes = 0
        for candidate in self._newest_first(begin_ms, end_ms):
            if candidate is not None:
                piece.append(candidate)
                piece_bytes += candidate.size
                if len(piece) < SEARCH_ENTRIES and piece_bytes < SEARCH_CHUNK_BYTES:
                    continue
            yield self._examine(piece, text, is_wanted)
            piece, piece_bytes = [], 0
        yield self._examine(piece, text, is_wanted)

    def _newest_first(self, begin_ms: int, end_ms: int) -> Generator[Candidate | None, None, None]:
        """Yield the messages of all queues, newest first by their positions; None after work that found no message."""
        block = max(16, SEARCH_ENTRIES // max(len(self._queues), 1))
        heap: list[tuple[int, int, Candidate, Iterator[Candidate]]] = []
        for number, queue in enumerate(self._queues):
            first = yield from self._reader.first_not_before(queue, begin_ms)
            after = yield from self._reader.first_not_before(queue, end_ms + 1)
            candidates = self._of_queue(queue, first, after, block)
            newest = next(candidates, None)
            if newest is not None:
                heap.append((-newest.position, number, newest, candidates))
            yield None
        heapify(heap)
        while heap:
            _, number, candidate, candidates = heap[0]
            if self.looked >= SEARCHED_ENTRIES:
                self.is_partial = True
                return
            self.looked += 1
            yield candidate
            older = next(candidates, None)
            if older is None:
                heappop(heap)
            else:
                heapreplace(heap, (-older.position, number, older, candidates))

    def _of_queue(self, queue: ConsumeQueue, first: int, after: int, block: int) -> Iterator[Candidate]:
        key = queue.topic, queue.queue_id
        while self._all_queues.get(key) is queue and after > (first := max(first, queue.begin)):
            begin = max(after - block, first)
            entries = list(ENTRY.iter_unpack(queue.entries(begin, after - begin)))
            for index in range(after - begin - 1, -1, -1):
                position, size, _ = entries[index]
                if size:  # an entry of size 0 stands for a lost message
                    yield Candidate(position, size, begin + index, queue)
            after = begin

    def _examine(self, piece: list[Candidate], text: bytes, is_wanted: Callable[[str], bool]) -> list[Found]:
        found: list[Found] = []
        for run in _runs(piece):
            found += self._found_in(run, text, is_wanted)
        return found[::-1]

    def _found_in(self, run: list[Candidate], text: bytes, is_wanted: Callable[[str], bool]) -> Iterator[Found]:
        begin = run[0].position
        if begin < self._log.begin:  # expired meanwhile
            return
        data = self._log.read_up_to_damage(begin, run[-1].position + run[-1].size - begin)
        starts = [candidate.position - begin for candidate in run]
        at = data.find(text)
        while at >= 0:
            index = max(bisect_right(starts, at) - 1, 0)
            candidate = run[index]
            record = data[starts[index] : starts[index] + candidate.size]
            if _is_candidate(record, is_wanted) and (message := self._intact(candidate)):
                yield Found(message, record)
            if index + 1 == len(run):
                return
            at = data.find(text, starts[index + 1])

    def _intact(self, candidate: Candidate) -> Record | None:
        try:
            return self._reader.message(candidate.queue, candidate.offset)
        except Damaged:  # the reader has logged the damaged record
            return None


def _runs(piece: list[Candidate]) -> Iterator[list[Candidate]]:
    """Yield the messages of a piece, oldest first, in groups that one read returns."""
    run: list[Candidate] = []
    end = 0
    for candidate in reversed(piece):
        if run and not 0 <= candidate.position - end <= READ_GAP_BYTES:
            yield run
            run = []
        run.append(candidate)
        end = candidate.position + candidate.size
    if run:
        yield run


def _is_candidate(data: bytes, is_wanted: Callable[[str], bool]) -> bool:
    try:
        return is_wanted(properties_in(data))
    except MessageError:
        return False
