"""One queue's index: 20 bytes a message (commit log position, record size, tag code), as in Apache's consume queue.

The newest entries are in memory (`_tail`) until a checkpoint or 64 KiB; older ones are in files. After a crash the
missing ones are made again from the commit log. A message that was lost has an entry of size 0, so that the offsets of
those behind it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import orjson

from ...protocol.message import FIXED_BYTES, MAX_RECORD_BYTES
from ..config import INDEX_SEGMENT_ENTRIES, INDEX_TAIL_BYTES
from .files import OpenFiles, StoreError
from .segments import SegmentedFile

ENTRY: Final = Struct(">QIq")
ENTRY_BYTES: Final = ENTRY.size
TAIL_ENTRIES: Final = INDEX_TAIL_BYTES // ENTRY_BYTES

_pack = ENTRY.pack


@lru_cache(32)
def _packer(count: int) -> Callable[..., bytes]:
    """Packs so many entries at once."""
    return Struct(">" + "QIq" * count).pack


class QueueState(NamedTuple):
    """A queue in a checkpoint: its first and its next offset, and its segments' sums by start.

    `sums` is None in checkpoints of earlier releases, which have the next offset alone.
    """

    begin: int
    next: int
    sums: dict[int, int] | None


class ConsumeQueue:
    """Entries `begin` to `next`, the queue offsets of the messages."""

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
        self.former_begin = self.begin  # before messages expired the last time
        self.put_bytes = 0  # bytes of records appended since the start
        self._entry_of = (-1, -1)
        self._entry = b""

    def append(self, position: int, size: int, tag_code: int) -> int:
        """The new message's queue offset."""
        self._tail += _pack(position, size, tag_code)
        self.put_bytes += size
        offset = self.next
        self.next = offset + 1
        return offset

    def extend(self, positions: Sequence[int], sizes: Sequence[int], tag_codes: Sequence[int]) -> int:
        """The first new message's queue offset. If a number does not fit, nothing is appended."""
        entries = [0] * (3 * len(positions))
        entries[0::3], entries[1::3], entries[2::3] = positions, sizes, tag_codes
        self._tail += _packer(len(positions))(*entries)
        self.put_bytes += sum(sizes)
        offset = self.next
        self.next = offset + len(positions)
        return offset

    def take_back(self, count: int) -> None:
        """Undoes the last appends."""
        del self._tail[len(self._tail) - count * ENTRY_BYTES :]
        self.next -= count

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

    def names(self, offset: int, position: int, size: int) -> bool:
        """Whether the entry at an offset is that of a record of that position and size."""
        return self.begin <= offset < self.next and self.entry(offset)[:2] == (position, size)

    @property
    def tail_is_long(self) -> bool:
        return len(self._tail) >= INDEX_TAIL_BYTES

    def flush(self) -> bool:
        """Moves the tail into the file; False if there is none. Raises StoreFull; the tail is then still in memory."""
        if not self._tail:
            return False
        self._file.append(self._tail)
        self._tail_at = self.next
        self._tail = bytearray()
        return True

    def sync(self) -> None:
        """Returns when everything flushed is on the device. Raises StoreFailed."""
        self._file.sync()

    @property
    def checkpoint_entry(self) -> bytes:
        """The queue's entry in a checkpoint, after `flush`: `"topic@queue":[begin,next,start of a segment,its sum,...]`."""
        if self._entry_of != (self.begin, self._tail_at):
            values = [self.begin, self._tail_at]
            for start, found in (self._file.sums or {}).items():
                values += (start, found)
            self._entry = b"%b:%b" % (orjson.dumps(f"{self.topic}@{self.queue_id}"), orjson.dumps(values))
            self._entry_of = (self.begin, self._tail_at)
        return self._entry

    def close(self) -> None:
        """Gives back the descriptors."""
        self._file.forget()

    # Recovery

    def restore(self, state: QueueState) -> bool:
        """Goes back to a checkpoint's state; False if the file does not hold that. The tail must be empty."""
        if state.begin >= state.next:
            self.restart(state.next)
            return True
        file = self._file
        if self.next < state.next or file.begin > state.begin * ENTRY_BYTES:
            return False
        file.truncate(state.next * ENTRY_BYTES)
        self.next = self._tail_at = state.next
        if state.sums is None:
            return self._is_plausible() and self._take_sums()
        self.begin = state.begin
        return file.has_sums(state.sums)

    def known_end(self) -> int:
        """The least end of the log, by the last entry in the file; 0 without one."""
        try:
            position, size, _ = self.entry(self.next - 1)
        except StoreError:
            return 0
        return position + size if FIXED_BYTES <= size <= MAX_RECORD_BYTES else 0

    def _take_sums(self) -> bool:
        self._file.take_sums()
        return True

    def _is_plausible(self) -> bool:
        """Whether the entries can be those of messages, one behind the other in the log."""
        if self._file.gaps():
            return False
        for offset in range(self.begin, self.next, INDEX_SEGMENT_ENTRIES):
            entries = list(ENTRY.iter_unpack(self.entries(offset, INDEX_SEGMENT_ENTRIES + 1)))
            if any(not size for _, size, _ in entries) or any(a[0] + a[1] > b[0] for a, b in pairwise(entries)):
                return False
        return True

    def lose_until(self, offset: int, position: int) -> None:
        """The messages from `next` to `offset` are lost; `position` is where the one behind them begins in the log."""
        if self.begin == self.next:
            self.restart(offset)
        while self.next < offset:
            self.append(position, 0, 0)
            if self.tail_is_long:
                self.flush()

    def truncate_from(self, position: int) -> None:
        """Forgets the entries of messages at or beyond a commit log position. For recovery, when the tail is empty."""
        first = self._first_from(position)
        if first < self.next:
            self._file.truncate(first * ENTRY_BYTES)
            self._file.take_sums()
            self.next = self._tail_at = first

    def cut_from(self, position: int) -> int:
        """Forgets the entries of messages that do not end before a commit log position; the position of the first."""
        self.truncate_from(position)
        if self.begin < self.next:
            at, size, _ = self.entry(self.next - 1)
            if at + size > position:
                self.truncate_from(at)
                return at
        return position

    def expire_before(self, position: int) -> None:
        """Forgets the messages below a commit log position; `drop_expired` then removes the files."""
        self.former_begin = self.begin
        self.begin = self._first_from(position)

    def drop_expired(self) -> None:
        """Removes the files that hold expired messages only."""
        while self._file.segments > 1 and self._file.starts[1] <= self.begin * ENTRY_BYTES:
            self._file.drop_first()
            self._entry_of = (-1, -1)

    def _first_from(self, position: int) -> int:
        low, high = self.begin, self.next
        if low < high and self.entry(low)[0] >= position:  # as ever after a restart, without a search
            return low
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
        self._entry_of = (-1, -1)
        self._file.restart(offset * ENTRY_BYTES)
        self.begin = self.next = self._tail_at = offset

    def delete(self) -> None:
        self._file.delete()
