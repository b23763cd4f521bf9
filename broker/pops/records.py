"""The records of deliveries on the disk, and their replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from .deliveries import Delivery, JournalKey, KeptQueue, StoredDelivery

# ------------------------------------------------------------------------------
# The records of deliveries on the disk, many in one frame of the journal. A restart replays them.
#
# All integers are big-endian. `number` stands for a group, topic and queue, which a record D defines first.
#
#     D  number, size, identity of the topic \0 group \0 topic \0 queue id
#     P  number, next, pop ms, deadline ms, 0, -1, count, then offset and attempts of each: they are popped
#     A  number, count, then the offset of each: they are acknowledged
#     X  number, offset, deadline ms, attempts, -1: the invisible time ends then
#     C  number, size, text: not read. Earlier releases wrote client ids, and where -1 is, how often they had extended a
#        delivery; they extend no delivery with -1
#     N  number, next: the messages before `next` were read. Those without another record were not delivered, because a
#        filter skipped them or they cannot be read
#     B  number, next, floor ms: nothing is unfinished, and no pop time is below the floor
#     Y  number: the queue has left its pool, so the committed offset that was saved counts if it is higher. If messages are
#        unfinished, those between them are finished, and members that pull the queue do not get them
#     F  number: the deliveries of this number have ended
#
# A deadline of 0 means that the message is not in flight: it is visible, or behind another one. Times are of the wall
# clock, because the monotonic clock restarts at a reboot. Replaying a record twice, in order, gives the same state.


_TEXT: Final = Struct(">cIH")
_POP: Final = Struct(">cIQQQIbH")
_POPPED: Final = Struct(">QI")
_ACK: Final = Struct(">cIH")
_OFFSET: Final = Struct(">Q")
_CHANGE: Final = Struct(">cIQQIb")
_NEXT: Final = Struct(">cIQ")
_BASE: Final = Struct(">cIQQ")
_FORGET: Final = Struct(">cI")

MAX_COUNT: Final = 0xFFFF  # deliveries in one record
_NOT_RENEWED: Final = -1
_offset_of, _attempts_of = attrgetter("offset"), attrgetter("attempts")


def define(number: int, key: JournalKey) -> bytes:
    return _text(b"D", number, "\0".join((key.identity, key.group, key.topic, str(key.queue_id))))


def _text(kind: bytes, number: int, text: str) -> bytes:
    data = text.encode()[:0xFFFF]
    return _TEXT.pack(kind, number, len(data)) + data


def pop(number: int, next_offset: int, pop_ms: int, deadline_ms: int, popped: Sequence[Delivery]) -> bytes:
    """Return a record P of up to `MAX_COUNT` deliveries."""
    head = _POP.pack(b"P", number, next_offset, pop_ms, deadline_ms, 0, _NOT_RENEWED, len(popped))
    return head + b"".join(map(_POPPED.pack, map(_offset_of, popped), map(_attempts_of, popped)))


def ack(number: int, done: Sequence[Delivery]) -> bytes:
    """Return a record A of up to `MAX_COUNT` acknowledged deliveries."""
    return _ACK.pack(b"A", number, len(done)) + b"".join(map(_OFFSET.pack, map(_offset_of, done)))


def change(number: int, offset: int, deadline_ms: int, attempts: int) -> bytes:
    return _CHANGE.pack(b"X", number, offset, deadline_ms, attempts, _NOT_RENEWED)


def passed(number: int, next_offset: int) -> bytes:
    return _NEXT.pack(b"N", number, next_offset)


def base(number: int, next_offset: int, floor_ms: int) -> bytes:
    return _BASE.pack(b"B", number, next_offset, floor_ms)


def yielded(number: int) -> bytes:
    return _FORGET.pack(b"Y", number)


def nothing() -> bytes:
    """Return a record that `replay` skips, in earlier releases, too."""
    return _text(b"C", 0, "")


def end(number: int) -> bytes:
    return _FORGET.pack(b"F", number)


class Replayed(NamedTuple):
    """The queues of the journal, and what could not be read of it.

    Attributes:
        queues: the queues as the frames leave them, by number.
        unread: the frames with records of a queue that is not defined, and the first frame that does not contain records
            with those after it. The checksum of that frame is valid, so it is not damaged; another release may have
            written it.
        fault: why the last of them cannot be read; None without one.
    """

    queues: dict[int, KeptQueue]
    unread: list[bytes]
    fault: Exception | None


def replay(frames: Iterable[bytes]) -> Replayed:
    queues: dict[int, KeptQueue] = {}
    unread: list[bytes] = []
    fault: Exception | None = None
    rest = iter(frames)
    for frame in rest:
        at, undefined = 0, set[int]()
        try:
            while at < len(frame):
                at = _replay(queues, undefined, frame, at)
        except (StructError, ValueError) as error:
            return Replayed(queues, [*unread, frame, *rest], error)
        if undefined:
            unread.append(frame)
            fault = ValueError(f"records of the undefined queues {sorted(undefined)}")
    return Replayed(queues, unread, fault)


def _replay(queues: dict[int, KeptQueue], undefined: set[int], frame: bytes, at: int) -> int:
    """Apply a record to the queues, and return where the next one begins. Add the number of its queue to those that are
    undefined, if it is."""
    kind, (_, number) = frame[at : at + 1], _FORGET.unpack_from(frame, at)
    if kind in (b"D", b"C"):
        begin = at + _TEXT.size
        end = begin + int(_TEXT.unpack_from(frame, at)[2])
        if kind == b"D":
            identity, group, topic, queue_id = frame[begin:end].decode(errors="replace").split("\0")
            key = JournalKey(identity, group, topic, int(queue_id))
            if number not in queues or queues[number].key != key:
                queues[number] = KeptQueue(key)
        return end
    if kind == b"F":
        queues.pop(number, None)
        return at + _FORGET.size
    queue = queues.get(number)
    if queue is None:
        undefined.add(number)
        queue = KeptQueue(JournalKey("", "", "", 0))
    if kind == b"P":
        _, _, next_offset, pop_ms, deadline_ms, _, _, count = _POP.unpack_from(frame, at)
        begin = at + _POP.size
        end = begin + int(count) * _POPPED.size
        for offset, attempts in _POPPED.iter_unpack(frame[begin:end]):
            queue.unfinished[offset] = StoredDelivery(attempts, pop_ms, deadline_ms)
        queue.next = max(queue.next, next_offset)
        return end
    if kind == b"A":
        begin = at + _ACK.size
        end = begin + int(_ACK.unpack_from(frame, at)[2]) * _OFFSET.size
        for (offset,) in _OFFSET.iter_unpack(frame[begin:end]):
            queue.unfinished.pop(offset, None)
        return end
    if kind == b"X":
        _, _, offset, deadline_ms, attempts, _ = _CHANGE.unpack_from(frame, at)
        if offset in queue.unfinished:
            queue.unfinished[offset] = StoredDelivery(attempts, queue.unfinished[offset].pop_ms, deadline_ms)
        return at + _CHANGE.size
    if kind == b"N":
        queue.next = max(queue.next, _NEXT.unpack_from(frame, at)[2])
        return at + _NEXT.size
    if kind == b"B":
        _, _, queue.next, queue.floor_ms = _BASE.unpack_from(frame, at)
        queue.is_yielded = False
        queue.unfinished.clear()
        return at + _BASE.size
    if kind == b"Y":
        queue.is_yielded = True
        return at + _FORGET.size
    raise ValueError(f"unknown kind of record: {kind!r}")
