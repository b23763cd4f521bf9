"""The commit log and its indexes together: append, read, search, expire.

The way of a message: `stage` gives it its place and its bytes, `commit` writes everything staged at once. Whoever
stages commits before anything else looks at the store; the broker does so once per socket read.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ...protocol.codes import SYS_BORNHOST_V6, SYS_STOREHOST_V6
from ...protocol.message import Record, decode_record, encode_record, host_flags, record_size
from ...protocol.names import topic_fault
from ...protocol.subscription import Subscription
from .consume_queue import ENTRY_BYTES, ConsumeQueue
from .files import (
    OPEN_FILES,
    Folder,
    OpenFiles,
    SegmentedFile,
    StoreError,
    StoreFull,
    read_state,
    write_state,
)
from .recovery import Recovered, indexes_are_whole, replay

PULL_BYTES: Final = 262_144
PULL_MESSAGES: Final = 1024
SCAN_ENTRIES: Final = 800
READ_GAP_BYTES: Final = 4096  # a gap up to this is read through rather than read around
DELETE_LIMIT: Final = 10  # segments that one call of `expire` removes

Buffer = bytes | memoryview

_NO_HOST: Final = socket.inet_aton("0.0.0.0") + b"\0\0\0\0"


class Fetched(NamedTuple):
    """What a read found: the records' bytes in pieces, how many, and the offset after the last entry looked at."""

    pieces: list[Buffer]
    messages: int
    next_offset: int


class Store:
    """A data folder opened for this process. `now_ms` is the store time of what is staged."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        store_host: bytes = _NO_HOST,
        tag_code_of: Callable[[Record], int],
        open_files: int = OPEN_FILES,
    ) -> None:
        self.folder = Folder(folder)
        self.store_host = store_host
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._tag_code_of = tag_code_of
        self._open_files = OpenFiles(open_files)
        self._log = SegmentedFile(folder / "commitlog", segment_bytes, self._open_files, stays_open=True)
        self._staged: list[bytes] = []
        self._staged_queues: list[ConsumeQueue] = []
        self._next = self._log.end
        self.now_ms = 0
        self._checkpointed = (-1, -1)

    # Opening and closing

    def recover(self, topics: Iterable[tuple[str, int]]) -> Recovered:
        """Makes log and indexes agree. `topics` are the known names with the position since which each exists."""
        since = dict(topics)
        self._open_queues(since)
        checkpoint = read_state(self.folder.path / "checkpoint.json") or {}
        position = max(int(checkpoint.get("position", 0)), self._log.begin)
        whole = indexes_are_whole(self.queues, checkpoint.get("queues", {}))
        whole = whole and position <= self._log.end
        if not whole:
            position = self._log.begin
        for queue in self.queues.values():
            if whole:
                queue.truncate_from(position)
            else:
                queue.restart(0)
        found = replay(
            self._log,
            position,
            lambda topic, queue_id: self.queue(topic, queue_id) if topic in since else None,
            self._tag_code_of,
            lambda topic: since.get(topic, 0),
        )
        self._next = self._log.end
        for queue in self.queues.values():
            queue.expire_before(self._log.begin)
        self.checkpoint()
        return found._replace(rebuilt=not whole)

    def _open_queues(self, topics: Iterable[str]) -> None:
        known = set(topics)
        for topic in self.folder.subfolders("consumequeue"):
            for directory in self.folder.subfolders(f"consumequeue/{topic.name}"):
                if topic.name in known and directory.name.isdigit():
                    self.queue(topic.name, int(directory.name))

    def checkpoint(self, sync: bool = False) -> None:
        """Everything committed so far is in its index file, and said so. Raises StoreFull."""
        position = self._log.end
        if self._checkpointed == (position, len(self.queues)) and not sync:
            return
        for queue in self.queues.values():
            queue.flush()
        if sync:
            self._log.sync()
            for queue in self.queues.values():
                queue.sync()
        lengths = {f"{topic}@{number}": queue.next for (topic, number), queue in self.queues.items()}
        write_state(self.folder.path / "checkpoint.json", {"position": position, "queues": lengths}, sync=sync)
        self._checkpointed = (position, len(self.queues))

    def close(self) -> None:
        self._log.close()
        self._open_files.close()
        self.folder.unlock()

    # Queues

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if it is not there. Raises StoreError if its name or number can name no folder."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            fault = topic_fault(topic)
            if fault or queue_id < 0:
                raise StoreError(f"no queue {queue_id} of this topic: {fault or 'queues count from 0'}")
            directory = self.folder.path / "consumequeue" / topic / str(queue_id)
            queue = ConsumeQueue(topic, queue_id, directory, self._open_files)
            self.queues[topic, queue_id] = queue
        return queue

    def delete_topic(self, topic: str) -> None:
        for key in [key for key in self.queues if key[0] == topic]:
            self.queues.pop(key).delete()
        self.checkpoint()

    @property
    def end(self) -> int:
        """The commit log position after the last record, staged ones included."""
        return self._next

    @property
    def begin(self) -> int:
        return self._log.begin

    def synced_descriptor(self) -> int | None:
        return self._log.duplicate_descriptor()

    # Appending

    def begin_batch(self) -> int:
        """Sets the store time of what is staged next, ms."""
        self.now_ms = int(time.time() * 1000)
        return self.now_ms

    def stage(
        self,
        queue: ConsumeQueue,
        body: bytes,
        properties: bytes,
        tag_code: int,
        flag: int,
        sys_flag: int,
        born_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[int, int]:
        """Gives a message its place: commit log position and queue offset. It exists after `commit`.

        Whatever this raises, nothing is staged."""
        position = self._next
        store_host = self.store_host
        sys_flag &= ~(SYS_BORNHOST_V6 | SYS_STOREHOST_V6)  # a client does not know which hosts are stored
        if len(born_host) + len(store_host) > 16:
            sys_flag |= host_flags(born_host, store_host)
        record = encode_record(
            queue.queue_id,
            flag,
            queue.next,
            position,
            sys_flag,
            born_ms,
            born_host,
            self.now_ms,
            store_host,
            reconsume_times,
            prepared_offset,
            body,
            queue.topic_record,
            properties,
        )
        size = len(record)
        offset = queue.append(position, size, tag_code)  # first, because it refuses a tag code beyond 64 bits
        self._staged.append(record)
        self._staged_queues.append(queue)
        self._next = position + size
        return position, offset

    @property
    def staged(self) -> int:
        """How many messages are staged."""
        return len(self._staged)

    def roll_back(self, kept: int = 0) -> None:
        """Forgets what was staged after the first `kept` messages."""
        while len(self._staged) > kept:
            self._next -= len(self._staged.pop())
            self._staged_queues.pop().take_back()

    def commit(self) -> list[ConsumeQueue]:
        """Writes what is staged and returns its queues. Whatever this raises, such as StoreFull, nothing of it is kept."""
        try:
            self._log.append(b"".join(self._staged) if len(self._staged) > 1 else self._staged[0])
        except BaseException:
            self.roll_back()
            raise
        queues, self._staged, self._staged_queues = self._staged_queues, [], []
        for queue in queues:
            if queue.tail_is_long:
                with contextlib.suppress(StoreFull):  # the index stays in memory, and the next flush tries again
                    queue.flush()
        return queues

    # Reading

    def fetch(
        self,
        queue: ConsumeQueue,
        offset: int,
        max_messages: int,
        subscription: Subscription | None = None,
        matches: Callable[[str], bool] | None = None,
    ) -> Fetched:
        """Messages from `offset`, which must lie in the queue, as far as the limits of a pull go.

        `subscription` filters by tag code, `matches` by the properties' text; None takes all.
        """
        limit = min(max(max_messages, 1), PULL_MESSAGES)
        if matches is not None:
            return self._fetch_matching(queue, offset, limit, matches)
        if subscription is None or subscription.expression == "*":
            return self._fetch_all(queue, offset, limit)
        return self._fetch_tagged(queue, offset, limit, subscription)

    def _fetch_all(self, queue: ConsumeQueue, offset: int, limit: int) -> Fetched:
        data = queue.entries(offset, limit)
        count = len(data) // ENTRY_BYTES
        fields = struct.unpack(">" + "QIq" * count, data)
        positions, sizes = fields[0::3], fields[1::3]
        if sum(sizes) > PULL_BYTES:
            kept = max(bisect_right(list(itertools.accumulate(sizes)), PULL_BYTES), 1)
            positions, sizes, count = positions[:kept], sizes[:kept], kept
        return Fetched(self._read_records(positions, sizes), count, offset + count)

    def _fetch_tagged(self, queue: ConsumeQueue, offset: int, limit: int, subscription: Subscription) -> Fetched:
        data = queue.entries(offset, max(SCAN_ENTRIES, limit))
        positions: list[int] = []
        sizes: list[int] = []
        room = PULL_BYTES
        scanned = 0
        for position, size, code in struct.iter_unpack(">QIq", data):
            if code in subscription.codes or subscription.matches_code(code):
                if positions and (len(positions) >= limit or size > room):
                    break
                positions.append(position)
                sizes.append(size)
                room -= size
            scanned += 1
        pieces = self._read_records(positions, sizes) if positions else []
        return Fetched(pieces, len(positions), offset + scanned)

    def _fetch_matching(self, queue: ConsumeQueue, offset: int, limit: int, matches: Callable[[str], bool]) -> Fetched:
        entries = list(struct.iter_unpack(">QIq", queue.entries(offset, max(SCAN_ENTRIES, limit))))
        pieces: list[Buffer] = []
        scanned, room = 0, PULL_BYTES
        for position, size, _ in entries:
            data = self._log.read(position, size)
            if matches(decode_record(data).properties):
                if pieces and (len(pieces) >= limit or size > room):
                    break
                pieces.append(data)
                room -= size
            scanned += 1
        return Fetched(pieces, len(pieces), offset + scanned)

    def _read_records(self, positions: Iterable[int], sizes: Iterable[int]) -> list[Buffer]:
        positions, sizes = list(positions), list(sizes)
        begin, end = positions[0], positions[-1] + sizes[-1]
        total = sum(sizes)
        if end - begin == total:
            return [self._log.read(begin, total)]
        if end - begin <= 2 * total + READ_GAP_BYTES:
            data = memoryview(self._log.read(begin, end - begin))
            return [data[at - begin : at - begin + size] for at, size in zip(positions, sizes, strict=True)]
        return self._read_runs(positions, sizes)

    def _read_runs(self, positions: list[int], sizes: list[int]) -> list[Buffer]:
        pieces: list[Buffer] = []
        run_begin = run_end = positions[0]
        for position, size in zip(positions, sizes, strict=True):
            if position != run_end:
                pieces.append(self._log.read(run_begin, run_end - run_begin))
                run_begin = position
            run_end = position + size
        pieces.append(self._log.read(run_begin, run_end - run_begin))
        return pieces

    def earliest_ms(self) -> int:
        """The store time of the oldest message, ms; -1 if there is none."""
        if self.begin >= self._log.end:
            return -1
        record = self.record_at(self.begin)
        return record.store_ms if record else -1

    def record_at(self, position: int) -> Record | None:
        """The record at a commit log position; None if there is none."""
        if not self.begin <= position < self._log.end:
            return None
        size = record_size(self._log.read(position, 8), 0)  # 0 where a client's position is inside of a record
        try:
            record = decode_record(self._log.read(position, size))
        except ValueError:
            return None
        return record if record.physical_offset == position else None

    def record_bytes_at(self, position: int) -> bytes | None:
        """The bytes of the record at a commit log position; None if there is none."""
        record = self.record_at(position)
        return self._log.read(position, record.size) if record else None

    def read_log(self, position: int, size: int) -> bytes:
        """Bytes of the commit log as they are. Raises StoreError for what was dropped."""
        return self._log.read(position, size)

    def log_range(self, topic: str, begin_ms: int, end_ms: int) -> tuple[int, int]:
        """The part of the commit log that holds the topic's messages of these store times: from the first one's position
        to the end of the last one. Empty if there is none."""
        begin, end = self._log.end, 0
        for queue in [queue for queue in self.queues.values() if queue.topic == topic]:
            first, after = self._first_not_before(queue, begin_ms), self._first_not_before(queue, end_ms + 1)
            if first < after:
                begin = min(begin, queue.entry(first)[0])
                position, size, _ = queue.entry(after - 1)
                end = max(end, position + size)
        return begin, max(begin, end)

    def message(self, queue: ConsumeQueue, offset: int) -> Record:
        position, size, _ = queue.entry(offset)
        return decode_record(self._log.read(position, size))

    def store_time_ms(self, queue: ConsumeQueue, offset: int) -> int:
        position = queue.entry(offset)[0]
        # the store time stands behind the born host; only an IPv6 one moves it
        head = self._log.read(position + 36, 40)
        at = 32 if head[3] & 0x10 else 20
        return int.from_bytes(head[at : at + 8], "big")

    def offset_by_time(self, queue: ConsumeQueue, timestamp_ms: int) -> int:
        """The offset that SEARCH_OFFSET_BY_TIMESTAMP answers: exact, or the nearer neighbour, the last one at most."""
        if queue.begin == queue.next:
            return queue.begin
        low = self._first_not_before(queue, timestamp_ms)
        if low == queue.next:
            return low - 1
        if low == queue.begin:
            return low
        after = self.store_time_ms(queue, low) - timestamp_ms
        before = timestamp_ms - self.store_time_ms(queue, low - 1)
        return low if after == 0 or after < before else low - 1

    def _first_not_before(self, queue: ConsumeQueue, timestamp_ms: int) -> int:
        """The offset of the first message stored at that time or later; the queue's end if there is none."""
        low, high = queue.begin, queue.next
        while low < high:
            middle = (low + high) // 2
            if self.store_time_ms(queue, middle) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        return low

    # Expiring

    def expire(self, *, older_than_s: float, total_bytes: int | None) -> int:
        """Drops old segments: those last written before a time, and those beyond a total size. Returns how many."""
        dropped = 0
        while self._log.segments > 1 and dropped < DELETE_LIMIT:
            too_old = self._log.first_modified_s() < older_than_s
            too_much = total_bytes is not None and self._log.end - self._log.begin > total_bytes
            if not too_old and not too_much:
                break
            self._log.drop_first()
            dropped += 1
        if dropped:
            for queue in self.queues.values():
                queue.expire_before(self._log.begin)
        return dropped


__all__ = ["Fetched", "Store", "StoreError", "StoreFull"]
