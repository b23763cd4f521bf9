"""Lite topics (RIP-83) of parent topics: the index of their messages, rebuilt from the parents' queues at the start."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Final, NamedTuple
from zlib import crc32

import orjson
import structlog
from msgspec import Struct

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import SLICE, TopicConfig, Work, joined, shaped
from ...protocol.message import MessageError, born_host_in, decode_host, offset_in, properties_in, split_records
from ..config import BULK_PULL_BYTES, BULK_PULL_MESSAGES, LITE_READS
from ..runtime.adoption import Adoption
from ..runtime.runtime import Runtime
from ..sessions.refusal import Reason, Refusal
from ..sessions.shares import AddressShares
from ..store.files import read_state
from ..store.index import ConsumeQueue
from ..store.journals import Journal
from ..store.store import Store
from .topics import Topics

log = structlog.get_logger("rocketlet.lite")


# ------------------------------------------------------------------------------
# A lite topic is an index over records of its parent topic, all in one queue of it. Each record has the lite topic's
# name, which the producer sent, and the message's offset in the lite topic, which the broker sets, as properties
# (Apache's LMQ). So the index is not stored on the disk. At its start the broker builds the index from the records that
# retention has left, so the index agrees with the log after a crash, too. Only records count that were stored since the
# topic was made LITE (`Topics.lite_since`), because clients may have written the properties of earlier records. The broker
# stores which lite topics were deleted (`LiteFile`), because the log may still have their messages.
#
# An idle lite topic takes about 365 bytes. Up to 16 entries are packed in bytes, more are in an array.


_LITE_PROPERTY: Final = props.LITE_TOPIC + props.NAME_END
_ENTRY_BYTES: Final = 8
_PACKED_BYTES: Final = 16 * _ENTRY_BYTES


class LiteTopic:
    """The messages of a lite topic that retention has left, from the offset `begin` to before `next`. Some of them may be
    lost. Deliveries use the lite topic as a queue.

    Attributes:
        name: its name in the parent topic.
        queue: the queue of the parent topic that has its messages.
        groups: the groups with an offset in it, perhaps some that were deleted, and some twice.
        counted: the offset up to which groups have counted the messages that retention deleted unread.
        address: the address that sent its first message, of those that retention had left at the last start.
    """

    __slots__ = ("_begin", "_entries", "_gaps", "address", "counted", "groups", "name", "queue")

    queue_id = 0

    def __init__(self, name: str, queue: ConsumeQueue, address: str, begin: int = 0) -> None:
        self.name = name
        self.address = address
        self.queue = queue
        self.groups: tuple[str, ...] | list[str] = ()
        self._begin = self.counted = begin
        self._entries: bytes | array[int] = b""  # the offset in the parent's queue of each message that is not lost
        # Of each run of lost messages: the offset after it, and how many messages are lost from `_begin` to there.
        self._gaps: tuple[tuple[int, int], ...] | list[tuple[int, int]] = ()

    @property
    def topic(self) -> str:
        """The name under which offsets in this lite topic are kept."""
        return names.lite_queue(self.queue.topic, self.name)

    @property
    def _count(self) -> int:
        entries = self._entries
        return len(entries) // _ENTRY_BYTES if isinstance(entries, bytes) else len(entries)

    @property
    def next(self) -> int:
        return self._begin + self._count + (self._gaps[-1][1] if self._gaps else 0)

    @property
    def begin(self) -> int:
        """The offset of the first message that retention has not deleted."""
        if self._entries and self._entry(0) < self.queue.begin:
            self._trim()
        return self._begin

    def _entry(self, index: int) -> int:
        entries = self._entries
        if isinstance(entries, bytes):
            at = index * _ENTRY_BYTES
            return int.from_bytes(entries[at : at + _ENTRY_BYTES], "big")
        return entries[index]

    def _trim(self) -> None:
        """Remove entries of messages that retention has deleted."""
        count, end = self._count, self.next
        low = bisect_left(range(count), self.queue.begin, key=self._entry)
        begin = self._offset(low) if low < count else end
        lost = begin - self._begin - low
        self._gaps = [(after, total - lost) for after, total in self._gaps if after > begin] or ()
        self._entries = self._entries[low * (_ENTRY_BYTES if isinstance(self._entries, bytes) else 1) :]
        self._begin = begin

    def _offset(self, index: int) -> int:
        """Return the offset of the message of an entry."""
        # before the gap with `after`, there are `after - begin - total` entries
        number = bisect_right(self._gaps, index, key=lambda gap: gap[0] - self._begin - gap[1])
        return self._begin + index + (self._gaps[number - 1][1] if number else 0)

    def _index(self, offset: int) -> int:
        """Return the index of the first entry whose message has this offset or a higher one."""
        if not self._gaps:
            return offset - self._begin
        number = bisect_right(self._gaps, offset, key=itemgetter(0))
        index = offset - self._begin - (self._gaps[number - 1][1] if number else 0)
        if number < len(self._gaps):
            after, lost = self._gaps[number]
            index = min(index, after - self._begin - lost)
        return index

    def append(self, parent_offset: int) -> None:
        """Add a message, by its offset in the parent's queue."""
        entries = self._entries
        if isinstance(entries, bytes):
            if len(entries) < _PACKED_BYTES:
                self._entries = entries + parent_offset.to_bytes(_ENTRY_BYTES, "big")
                return
            entries = self._entries = array("q", map(self._entry, range(self._count)))
        entries.append(parent_offset)

    def lose_until(self, offset: int) -> None:
        """Count the messages from `next` to before an offset as lost. The message with this offset must be added next."""
        if offset > self.next:
            if isinstance(self._gaps, tuple):
                self._gaps = []
            self._gaps.append((offset, offset - self._begin - self._count))

    def readable_from(self, offset: int) -> int:
        """Return the offset of the first message from an offset on that is not lost; `next` if there is none."""
        index = self._index(max(offset, self.begin))
        return self._offset(index) if index < self._count else max(offset, self.next)

    def parent_offset(self, offset: int) -> int | None:
        """Return a message's offset in the parent's queue; None if the message is lost, deleted by retention, or unknown."""
        index = self._index(offset)
        if not 0 <= index < self._count or (self._gaps and self._offset(index) != offset):
            return None
        found = self._entry(index)
        return found if found >= self.queue.begin else None

    @property
    def first_parent_offset(self) -> int | None:
        """The offset of the first message in the parent's queue; None without one."""
        return self._entry(0) if self.begin < self.next else None

    @property
    def last_parent_offset(self) -> int | None:
        """The offset of the newest message in the parent's queue; None without one, or if it is lost."""
        return self.parent_offset(self.next - 1)


class LiteChanges:
    """Events that lite topics report to the parts above them. The broker overrides the methods that it needs."""

    def lite_appended(self, lites: list[LiteTopic]) -> None:
        """Handle messages that were stored in these lite topics."""


# ------------------------------------------------------------------------------
# The deletions of lite topics on the disk. The file has for each queue of a parent topic an offset, before which only
# lite topics that it lists have messages, each from an offset of its own. So these entries list lite topics that
# exist, and no deleted ones:
#
#     {parent: {"identity": id of the topic, "queues": {queue id: [offset, {lite topic: offset of its first message}]}}}
#
# Each line of the journal is a lite topic that was deleted since the file was written, with the offset after its last
# message:
#
#     [parent, id of the topic, lite topic, queue id, offset]
#
# The offsets of groups are in the same file (`LiteOffsets`), so that a deletion removes the messages and the offsets
# of a lite topic in one step.


class DeletedLite(NamedTuple):
    """A lite topic that was deleted since the state file was written, which is a line of the journal.

    Attributes:
        identity: the id of its parent topic.
        end: the offset after its last message in the parent's queue.
    """

    parent: str
    identity: str
    name: str
    queue_id: int
    end: int


class SavedDeletions(Struct):
    """The deletions that the state file has of a parent topic: of each queue the offset and the lite topics."""

    identity: str
    queues: dict[int, tuple[int, dict[str, int]]]


class LiteFile:
    """The state file of lite topics and its journal, as they were at the start of the broker.

    Attributes:
        offsets: the entries with offsets of groups.
        saved: the deletions in the state file by parent topic.
        deleted: the deletions in the journal.
    """

    def __init__(self, adoption: Adoption, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)
        self.saved: dict[str, SavedDeletions] = {}
        self.deleted: list[DeletedLite] = []
        content = adoption.whole("lite topics", read_state(path), dict[str, object]) or {}
        self.offsets = {key: value for key, value in content.items() if "@" in key}
        deletions = ((key, value) for key, value in content.items() if "@" not in key)
        adoption.each("deleted lite topics", deletions, self._adopt_saved)
        adoption.each("deleted lite topics", self.journal.read(), self._adopt_line)

    def _adopt_saved(self, entry: tuple[str, object]) -> None:
        parent, kept = entry
        self.saved[parent] = shaped(kept, SavedDeletions)

    def _adopt_line(self, line: object) -> None:
        self.deleted.append(shaped(line, DeletedLite))

    def clear(self) -> None:
        """Free the memory of what was read."""
        self.offsets, self.saved, self.deleted = {}, {}, []


class _DeletedInQueue:
    """The messages of deleted lite topics in a queue of a parent topic."""

    def __init__(self) -> None:
        self.end = 0  # the offset after the last one
        self.is_truncated = False  # True if the log has lost messages of deleted lite topics, from `end` on
        self._before = 0
        self._firsts: Mapping[str, int] = {}
        self._ends: dict[str, int] = {}

    def read(self, before: int, firsts: Mapping[str, int]) -> None:
        """Add what the state file has of the queue."""
        self.end = self._before = before
        self._firsts = firsts

    def add(self, name: str, end: int) -> None:
        """Add a lite topic that was deleted since."""
        self.end = max(self.end, end)
        self._ends[name] = end

    def cut(self, end: int) -> None:
        """Limit the end to the end of the queue, which is lower if the log has lost messages."""
        self.is_truncated = end < self.end
        self.end = min(self.end, end)

    def has(self, name: str, offset: int) -> bool:
        """Return True if the lite topic of a message was deleted after the message was stored."""
        first = self._firsts.get(name, self._before)
        return offset < min(first, self._before) or offset < self._ends.get(name, 0)


class StagedLite(NamedTuple):
    """A message of a lite topic that is staged: where it goes, and its properties."""

    parent: str
    name: str
    queue_id: int
    offset: int
    text: str
    address: str


class LiteTopics:
    """Every lite topic of the broker.

    Args:
        file: the state file.
        changes: is notified of lite topics that got messages.

    Attributes:
        is_truncated: True if the log has lost messages of deleted lite topics. The deletions must then be saved before
            new messages get the same offsets.
    """

    def __init__(self, runtime: Runtime, topics: Topics, store: Store, file: LiteFile, changes: LiteChanges) -> None:
        self._limits = runtime.limits
        self._topics = topics
        self._store = store
        self._changes = changes
        # By parent topic and name. Of a parent topic, the lite topic that got a message longest ago is the first.
        self._parents: dict[str, dict[str, LiteTopic]] = {}
        self._staged: dict[tuple[str, str], int] = {}  # the next offset of lite topics with staged messages
        self.file = file
        self._deleted_ends: dict[str, dict[int, int]] = {}  # the end of deleted messages, by parent topic and queue id
        self.is_truncated = False
        self._shares = AddressShares(runtime.limits.max_lite_topics)
        self._of_addresses: dict[str, Counter[str]] = {}  # how many lite topics each address has, by parent topic
        lines: dict[str, list[DeletedLite]] = {}
        for line in file.deleted:
            lines.setdefault(line.parent, []).append(line)
        for topic in topics:
            deleted = self._read_deleted(topic.name, lines.get(topic.name, ()))
            if topics.lite_since(topic.name) is not None:
                found = self._parents[topic.name] = {item.name: item for item in self._indexed(topic.name, deleted)}
                for item in found.values():
                    self._count(item)

    @property
    def count(self) -> int:
        """The number of lite topics."""
        return self._shares.count

    def _count(self, lite: LiteTopic) -> None:
        self._shares.acquire(lite.address)
        self._of_addresses.setdefault(lite.queue.topic, Counter())[lite.address] += 1

    # Finding

    def of(self, parent: str) -> dict[str, LiteTopic]:
        """Return the lite topics of a parent topic by name."""
        found = self._parents.get(parent)
        if found is None:  # the topic was made LITE after the start of the broker
            found = self._parents[parent] = {}
        return found

    def _read_deleted(self, parent: str, lines: Iterable[DeletedLite]) -> dict[int, _DeletedInQueue]:
        """Return the messages of deleted lite topics of a parent topic by queue id.

        Args:
            lines: what the journal has of the parent topic.
        """
        found: dict[int, _DeletedInQueue] = {}
        identity, saved = self._topics.identity(parent), self.file.saved.get(parent)
        if saved is not None and saved.identity == identity:
            for queue_id, (before, firsts) in saved.queues.items():
                found.setdefault(queue_id, _DeletedInQueue()).read(before, firsts)
        for line in lines:
            if line.identity == identity:
                found.setdefault(line.queue_id, _DeletedInQueue()).add(line.name, line.end)
        for queue_id, item in found.items():
            queue = self._store.queues.get((parent, queue_id))
            item.cut(queue.next if queue is not None else 0)
            self.is_truncated |= item.is_truncated
            self._deleted_ends.setdefault(parent, {})[queue_id] = item.end
        return found

    def by_parent(self) -> list[dict[str, LiteTopic]]:
        """Return the lite topics of each parent topic that may have some, by name."""
        return list(self._parents.values())

    def get(self, parent: str, name: str) -> LiteTopic | None:
        return self.of(parent).get(name) if self.is_parent(parent) else None

    def find(self, topic: str) -> LiteTopic | None:
        """Return the lite topic by the name under which its offsets are kept."""
        found = names.parent_and_name(topic)
        return self.get(*found) if found is not None else None

    def is_parent(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is not None and topic.is_lite

    @property
    def parents(self) -> list[str]:
        return [topic.name for topic in self._topics if topic.is_lite]

    # Building

    def _indexed(self, parent: str, deleted: Mapping[int, _DeletedInQueue]) -> list[LiteTopic]:
        """Build the index of a parent topic from its records. Return the lite topics, ordered by the position of their last
        message."""
        found: dict[str, LiteTopic] = {}
        for queue in self._store.queues_of(parent):
            of_queue: dict[str, LiteTopic] = {}
            deleted_there = deleted.get(queue.queue_id)
            for name, offset, parent_offset, address in self._records(parent, queue):
                if deleted_there is None or not deleted_there.has(name, parent_offset):
                    _add(of_queue, name, queue, offset, parent_offset, address)
            for name, item in of_queue.items():
                former = found.get(name)
                if former is None or _last_position(former) < _last_position(item):
                    found[name] = item
        return sorted(found.values(), key=_last_position)

    def _records(self, parent: str, queue: ConsumeQueue) -> Iterator[tuple[str, int, int, str]]:
        """Yield the name, the offset in the lite topic, the offset in the queue and the sender's address of each readable
        lite message of a queue that was stored since the topic was made LITE."""
        position, wanted = queue.first_from(self._topics.lite_since(parent) or 0), _LITE_PROPERTY.encode()
        while position < queue.next:
            fetched = self._store.fetch(queue, position, BULK_PULL_MESSAGES, max_bytes=BULK_PULL_BYTES)
            position = fetched.next_offset
            for record in split_records(b"".join(fetched.pieces)):
                if wanted not in record:
                    continue
                try:
                    text = properties_in(record)
                except MessageError:
                    continue
                name, offset = props.find(text, props.LITE_TOPIC) or "", props.find(text, props.LITE_OFFSET) or ""
                is_own = props.find(text, props.LITE_QUEUE) == names.lite_queue(parent, name)
                if is_own and names.lite_name_fault(name) is None and offset.isdecimal() and len(offset) < 19:
                    yield name, int(offset), offset_in(record), _address(born_host_in(record))

    # Sending

    def refuse_other(self, topic: TopicConfig, text: str) -> None:
        """Raises Refusal for a message without a lite topic in a parent topic, because no lite group would receive it."""
        if _LITE_PROPERTY not in text:
            reason = f"the topic {topic.name} accepts LITE messages only; give the message a lite topic"
            raise Refusal(Reason.ILLEGAL_MESSAGE, reason)

    def prepare(self, parent: str, text: str, born_host: bytes, *, is_first: bool) -> StagedLite:
        """Return the place of a message in its lite topic. The lite topic is created when its first message is committed.

        Args:
            parent: the topic to which the message is sent.
            text: the properties of the message.
            born_host: the address and port of its sender.
            is_first: True if nothing else is staged.

        Raises:
            Refusal: The topic is not a parent topic, the name is illegal, the message is delayed, urgent or transactional,
                or there are too many lite topics.
        """
        name = props.find(text, props.LITE_TOPIC) or ""
        topic = self._topics.get(parent)
        if topic is None or not topic.is_lite:
            hint = f"create one with `rocketlet topics create {parent[:100]} --lite`"
            raise Refusal(Reason.ILLEGAL_MESSAGE, f"the topic {parent} has no lite topics; {hint}")
        fault = names.lite_name_fault(name)
        if fault:
            raise Refusal(Reason.ILLEGAL_MESSAGE, fault)
        for other in (props.DELAY, props.TIMER_DELIVER_MS, props.TIMER_DELAY_MS, props.TIMER_DELAY_SEC, props.PRIORITY):
            if other + props.NAME_END in text and props.find(text, other):
                raise Refusal(Reason.ILLEGAL_MESSAGE, f"a message of a lite topic cannot have the property {other}")
        if props.find(text, props.TRANSACTION) == "true":
            raise Refusal(Reason.ILLEGAL_MESSAGE, "a message of a lite topic cannot be transactional")
        if is_first:
            self._staged.clear()
        key = parent, name
        known = self.of(parent).get(name)
        address = known.address if known is not None else _address(born_host)
        if known is None and key not in self._staged and not self._shares.has_room(address, len(self._staged) + 1):
            reason = f"this broker has up to {self._shares.most} lite topics, half of them of one address"
            raise Refusal(Reason.TOO_MANY_LITE_TOPICS, f"{reason}; set an expiration for their parent topics")
        offset = self._staged.get(key)
        if offset is None:
            offset = known.next if known is not None else 0
        self._staged[key] = offset + 1
        for own, value in ((props.LITE_QUEUE, names.lite_queue(parent, name)), (props.LITE_OFFSET, str(offset))):
            text = props.appended(props.without(text, own), own, value)
        queue_id = known.queue.queue_id if known is not None else crc32(name.encode()) % max(topic.write_queues, 1)
        return StagedLite(parent, name, queue_id, offset, text, address)

    def restage(self, staged: Iterable[StagedLite | None]) -> None:
        """Compute the next offsets again after some staged messages were discarded. `staged` are the remaining ones."""
        self._staged.clear()
        for item in staged:
            if item is not None:
                self._staged[item.parent, item.name] = item.offset + 1

    def append(self, committed: Iterable[tuple[StagedLite, int]]) -> None:
        """Add messages that are in the log, each with its offset in the parent's queue, and report their lite topics."""
        touched: dict[LiteTopic, None] = {}
        for staged, parent_offset in committed:
            of_parent = self.of(staged.parent)
            found = of_parent.pop(staged.name, None)
            if found is None:
                found = LiteTopic(staged.name, self._store.queue(staged.parent, staged.queue_id), staged.address)
                self._count(found)
            found.append(parent_offset)
            of_parent[staged.name] = found  # now the last one
            touched[found] = None
        self._staged.clear()
        self._changes.lite_appended(list(touched))

    # Reading

    def record(self, lite: LiteTopic, offset: int) -> bytes | None:
        """Return a message's record; None if it is lost, damaged or unknown, or if retention has deleted it."""
        parent_offset = lite.parent_offset(offset)
        if parent_offset is None or parent_offset >= lite.queue.next:
            return None
        fetched = self._store.fetch(lite.queue, parent_offset, 1)
        return b"".join(fetched.pieces) if fetched.messages else None

    def stored_ms(self, lite: LiteTopic, offset: int) -> int:
        """Return when a message was stored, or 0 if it is lost."""
        parent_offset = lite.parent_offset(offset)
        return 0 if parent_offset is None else self._store.store_time_ms(lite.queue, parent_offset)

    def earliest_ms(self, offsets: Mapping[ConsumeQueue, int]) -> Work[int]:
        """Return when the first of some messages of parent topics was stored, each by its queue and offset; 0 for none."""
        times: list[int] = []
        for number, (queue, offset) in enumerate(offsets.items(), 1):
            times.append(self._store.store_time_ms(queue, offset))
            if number % LITE_READS == 0:
                yield
        return min(filter(None, times), default=0)

    def last_ms(self, lite: LiteTopic) -> int:
        """Return when the newest message was stored, or 0 if none is left."""
        return self.stored_ms(lite, lite.next - 1)

    def first_not_before(self, lite: LiteTopic, time_ms: int) -> int:
        """Return the offset of the first message that was stored at that time or later; `next` if there is none."""
        begin = lite.begin
        return begin + bisect_left(range(begin, lite.next), time_ms, key=partial(self.stored_ms, lite))

    # The end

    def delete(self, lite: LiteTopic) -> None:
        """Delete a lite topic, first on the disk. The next message of the lite topic, if any, has offset 0. Raises StoreFull;
        nothing is deleted then."""
        parent, queue_id, last = lite.queue.topic, lite.queue.queue_id, lite.last_parent_offset
        end = last + 1 if last is not None else 0
        if end or lite.groups:
            self.file.journal.append([parent, self._topics.identity(parent), lite.name, queue_id, end])
            ends = self._deleted_ends.setdefault(parent, {})
            ends[queue_id] = max(ends.get(queue_id, 0), end)
        of_parent = self._parents.get(parent, {})
        if of_parent.get(lite.name) is lite:
            del of_parent[lite.name]
            self._shares.release(lite.address)
            of_addresses = self._of_addresses[parent]
            of_addresses[lite.address] -= 1
            if not of_addresses[lite.address]:
                del of_addresses[lite.address]

    def deletions(self) -> Work[list[bytes]]:
        """Return the entries of the state file, one for each parent topic with deleted lite topics."""
        # Read before the first pause, because a topic that is recreated meanwhile has another identity.
        kept = [(parent, self._topics.identity(parent), dict(ends)) for parent, ends in self._deleted_ends.items()]
        found: list[bytes] = []
        for parent, identity, ends in kept:
            found.append((yield from self._deletions(parent, identity, ends)))
        return found

    def _deletions(self, parent: str, identity: str, ends: Mapping[int, int]) -> Work[bytes]:
        firsts: dict[int, list[bytes]] = {queue_id: [] for queue_id in ends}
        for number, lite in enumerate(list(self._parents.get(parent, {}).values()), 1):
            first, queue_id = lite.first_parent_offset, lite.queue.queue_id
            if first is not None and first < ends.get(queue_id, 0):
                firsts[queue_id].append(orjson.dumps(lite.name) + b":%d" % first)
            if number % SLICE == 0:
                yield
        queues: list[bytes] = []
        for queue_id, end in ends.items():
            queues.append(b'"%d":[%d,{%b}]' % (queue_id, end, (yield from joined(firsts.pop(queue_id)))))
        return b'%b:{"identity":%b,"queues":{%b}}' % (orjson.dumps(parent), orjson.dumps(identity), b",".join(queues))

    def topic_deleted(self, parent: str) -> None:
        self._deleted_ends.pop(parent, None)
        self._parents.pop(parent, None)
        for address, count in self._of_addresses.pop(parent, Counter()).items():
            self._shares.release(address, count)

    def shortened(self, parent: str) -> Work[list[LiteTopic]]:
        """Return the lite topics of which retention has deleted messages that are not counted yet."""
        found: list[LiteTopic] = []
        for number, item in enumerate(list(self.of(parent).values()), 1):
            if item.begin > item.counted:
                found.append(item)
            if number % SLICE == 0:
                yield
        return found


def _address(born_host: bytes) -> str:
    """Return the address of a sender, as one object for all lite topics of the address."""
    return intern(decode_host(born_host)[0])


def _add(
    found: dict[str, LiteTopic], name: str, queue: ConsumeQueue, offset: int, parent_offset: int, address: str
) -> None:
    item = found.get(name)
    # A lite topic that was deleted and sent to again starts at 0 again.
    if item is None or offset < item.next:
        item = found[name] = LiteTopic(name, queue, address, offset)
    item.lose_until(offset)
    item.append(parent_offset)


def _last_position(item: LiteTopic) -> int:
    """Return the commit log position of the newest message."""
    last = item.last_parent_offset
    return item.queue.entry(last)[0] if last is not None else -1
