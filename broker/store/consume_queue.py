"""One queue's index: 20 bytes a message (commit log position, record size, tag code), as in Apache's consume queue.

The newest entries are in memory (`_tail`) until a checkpoint or 64 KiB; older ones are in files. After a crash the
missing ones are made again from the commit log.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import Final

from .files import OpenFiles, SegmentedFile

ENTRY: Final = Struct(">QIq")
ENTRY_BYTES: Final = ENTRY.size
SEGMENT_ENTRIES: Final = 300_000
TAIL_LIMIT_BYTES: Final = 65_536

_pack = ENTRY.pack


class ConsumeQueue:
    """Entries `begin` to `next`, the queue offsets of the messages."""

    __slots__ = ("_file", "_tail", "_tail_at", "begin", "next", "queue_id", "topic", "topic_record")

    def __init__(self, topic: str, queue_id: int, directory: Path, open_files: OpenFiles) -> None:
        self.topic = topic
        self.queue_id = queue_id
        name = topic.encode()
        self.topic_record = bytes((len(name),)) + name
        self._file = SegmentedFile(directory, SEGMENT_ENTRIES * ENTRY_BYTES, open_files)
        if self._file.end % ENTRY_BYTES:
            self._file.truncate(self._file.end - self._file.end % ENTRY_BYTES)
        self.begin = self._file.begin // ENTRY_BYTES
        self.next = self._tail_at = self._file.end // ENTRY_BYTES
        self._tail = bytearray()

    def append(self, position: int, size: int, tag_code: int) -> int:
        """The new message's queue offset."""
        self._tail += _pack(position, size, tag_code)
        offset = self.next
        self.next = offset + 1
        return offset

    def take_back(self) -> None:
        """Undoes the last append."""
        del self._tail[-ENTRY_BYTES:]
        self.next -= 1

    def entries(self, offset: int, count: int) -> bytes:
        """The raw entries of up to `count` messages from `offset`, which must lie in `begin` to `next`."""
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
        """Commit log position, size and tag code of one message."""
        position, size, tag_code = ENTRY.unpack(self.entries(offset, 1))
        return position, size, tag_code

    @property
    def tail_is_long(self) -> bool:
        return len(self._tail) >= TAIL_LIMIT_BYTES

    def flush(self) -> None:
        """Moves the tail into the file. Raises StoreFull; the tail is then still in memory."""
        if self._tail:
            self._file.append(self._tail)
            self._tail_at = self.next
            self._tail = bytearray()

    def sync(self) -> None:
        self._file.sync()

    def truncate_from(self, position: int) -> None:
        """Forgets the entries of messages at or beyond a commit log position. For recovery, when the tail is empty."""
        self.next = self._tail_at = self._first_from(position)
        self._file.truncate(self.next * ENTRY_BYTES)
        self.next = self._tail_at = self._file.end // ENTRY_BYTES

    def expire_before(self, position: int) -> None:
        """Forgets the messages below a commit log position."""
        self.begin = self._first_from(position)
        segment_bytes = SEGMENT_ENTRIES * ENTRY_BYTES
        while self._file.segments > 1 and self._file.begin + segment_bytes <= self.begin * ENTRY_BYTES:
            self._file.drop_first()

    def _first_from(self, position: int) -> int:
        low, high = self.begin, self.next
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[0] < position:
                low = middle + 1
            else:
                high = middle
        return low

    def restart(self, offset: int) -> None:
        """Makes the queue empty, its next message at `offset`."""
        self._tail.clear()
        self._file.restart(offset * ENTRY_BYTES)
        self.begin = self.next = self._tail_at = offset

    def delete(self) -> None:
        self._file.delete()
