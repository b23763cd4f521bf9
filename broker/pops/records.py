"""The records of deliveries on the disk, many in one frame of the journal. A restart replays them.

All integers are big-endian. `number` stands for a group, topic and queue, which are told first.

    D  number, size, identity of the topic \\0 group \\0 topic \\0 queue id
    P  number, next, pop ms, deadline ms, 0, -1, count, then offset and attempts of each: they are popped
    A  number, count, then the offset of each: they are finished
    X  number, offset, deadline ms, attempts, -1: it comes again then
    C  number, size, text: not read. Earlier releases wrote client ids, and where -1 is, how often they had renewed a
       delivery; they renew none of which these records say -1
    N  number, next: what lies before was looked at, and not wanted
    B  number, next, floor ms: nothing is unfinished, and no pop time is below the floor
    Y  number: members pull now, so the offset that was saved counts if it is higher
    F  number: all of it is forgotten

A deadline of 0 is that of a message that nobody has: it waits, perhaps behind another one. Times are of the wall clock: a
restart has another monotonic one. A record may be replayed twice, in the order of all, and the last word on an offset counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

_TEXT: Final = Struct(">cIH")
_POP: Final = Struct(">cIQQQIbH")
_POPPED: Final = Struct(">QI")
_ACK: Final = Struct(">cIH")
_OFFSET: Final = Struct(">Q")
_CHANGE: Final = Struct(">cIQQIb")
_NEXT: Final = Struct(">cIQ")
_BASE: Final = Struct(">cIQQ")
_FORGET: Final = Struct(">cI")

MAX_COUNT: Final = 0xFFFF  # in one record
_NOT_RENEWED: Final = -1


class PoolPlace(NamedTuple):
    identity: str
    group: str
    topic: str
    queue_id: int


class StoredDelivery(NamedTuple):
    """A delivery as it is on the disk."""

    attempts: int
    pop_ms: int
    deadline_ms: int


@dataclass(slots=True)
class KeptQueue:
    place: PoolPlace
    next: int = 0
    floor_ms: int = 0
    is_yielded: bool = False
    unfinished: dict[int, StoredDelivery] = field(default_factory=dict)


def define(number: int, place: PoolPlace) -> bytes:
    return _text(b"D", number, "\0".join((place.identity, place.group, place.topic, str(place.queue_id))))


def _text(kind: bytes, number: int, text: str) -> bytes:
    data = text.encode()[:0xFFFF]
    return _TEXT.pack(kind, number, len(data)) + data


def pop(number: int, next_offset: int, pop_ms: int, deadline_ms: int, popped: Sequence[tuple[int, int]]) -> bytes:
    """popped: offsets and attempts, at most `MAX_COUNT`."""
    head = _POP.pack(b"P", number, next_offset, pop_ms, deadline_ms, 0, _NOT_RENEWED, len(popped))
    return head + b"".join([_POPPED.pack(offset, attempts) for offset, attempts in popped])


def ack(number: int, offsets: Sequence[int]) -> Iterator[bytes]:
    for first in range(0, len(offsets), MAX_COUNT):
        part = offsets[first : first + MAX_COUNT]
        yield _ACK.pack(b"A", number, len(part)) + b"".join(map(_OFFSET.pack, part))


def change(number: int, offset: int, deadline_ms: int, attempts: int) -> bytes:
    return _CHANGE.pack(b"X", number, offset, deadline_ms, attempts, _NOT_RENEWED)


def passed(number: int, next_offset: int) -> bytes:
    return _NEXT.pack(b"N", number, next_offset)


def base(number: int, next_offset: int, floor_ms: int) -> bytes:
    return _BASE.pack(b"B", number, next_offset, floor_ms)


def yielded(number: int) -> bytes:
    return _FORGET.pack(b"Y", number)


def forget(number: int) -> bytes:
    return _FORGET.pack(b"F", number)


class RecordsUnreadable(ValueError):
    """A frame holds something else than records. Its checksum is right, so another release has written it."""


def replay(frames: Iterable[bytes]) -> dict[int, KeptQueue]:
    """The state that the frames lead to, by number. Raises RecordsUnreadable."""
    reader = _Replay()
    for frame in frames:
        try:
            reader.read(frame)
        except (StructError, KeyError, IndexError, ValueError) as error:
            raise RecordsUnreadable(f"{type(error).__name__}: {error}") from error
    return reader.queues


class _Replay:
    def __init__(self) -> None:
        self.queues: dict[int, KeptQueue] = {}
        self._kinds = {
            ord("D"): self._define,
            ord("C"): self._client,
            ord("P"): self._pop,
            ord("A"): self._ack,
            ord("X"): self._change,
            ord("N"): self._next,
            ord("B"): self._base,
            ord("Y"): self._yield,
            ord("F"): self._forget,
        }

    def read(self, frame: bytes) -> None:
        position = 0
        while position < len(frame):
            position = self._kinds[frame[position]](frame, position)

    def _text(self, frame: bytes, position: int) -> tuple[int, str, int]:
        _, number, size = _TEXT.unpack_from(frame, position)
        begin = position + _TEXT.size
        return number, frame[begin : begin + size].decode(errors="replace"), begin + size

    def _define(self, frame: bytes, position: int) -> int:
        number, text, end = self._text(frame, position)
        identity, group, topic, queue_id = text.split("\0")
        place = PoolPlace(identity, group, topic, int(queue_id))
        if number not in self.queues or self.queues[number].place != place:
            self.queues[number] = KeptQueue(place)
        return end

    def _client(self, frame: bytes, position: int) -> int:
        _, _, end = self._text(frame, position)
        return end

    def _pop(self, frame: bytes, position: int) -> int:
        _, number, next_offset, pop_ms, deadline_ms, _, _, count = _POP.unpack_from(frame, position)
        queue = self.queues[number]
        begin = position + _POP.size
        end = begin + count * _POPPED.size
        for offset, attempts in _POPPED.iter_unpack(frame[begin:end]):
            queue.unfinished[offset] = StoredDelivery(attempts, pop_ms, deadline_ms)
        queue.next = max(queue.next, next_offset)
        return int(end)

    def _ack(self, frame: bytes, position: int) -> int:
        _, number, count = _ACK.unpack_from(frame, position)
        begin = position + _ACK.size
        end = begin + count * _OFFSET.size
        unfinished = self.queues[number].unfinished
        for (offset,) in _OFFSET.iter_unpack(frame[begin:end]):
            unfinished.pop(offset, None)
        return int(end)

    def _change(self, frame: bytes, position: int) -> int:
        _, number, offset, deadline_ms, attempts, _ = _CHANGE.unpack_from(frame, position)
        unfinished = self.queues[number].unfinished
        kept = unfinished.get(offset)
        if kept is not None:
            unfinished[offset] = kept._replace(deadline_ms=deadline_ms, attempts=attempts)
        return position + _CHANGE.size

    def _next(self, frame: bytes, position: int) -> int:
        _, number, next_offset = _NEXT.unpack_from(frame, position)
        self.queues[number].next = max(self.queues[number].next, next_offset)
        return position + _NEXT.size

    def _base(self, frame: bytes, position: int) -> int:
        _, number, next_offset, floor_ms = _BASE.unpack_from(frame, position)
        queue = self.queues[number]
        queue.next, queue.floor_ms, queue.is_yielded = next_offset, floor_ms, False
        queue.unfinished.clear()
        return position + _BASE.size

    def _yield(self, frame: bytes, position: int) -> int:
        _, number = _FORGET.unpack_from(frame, position)
        self.queues[number].is_yielded = True
        return position + _FORGET.size

    def _forget(self, frame: bytes, position: int) -> int:
        _, number = _FORGET.unpack_from(frame, position)
        self.queues.pop(number, None)
        return position + _FORGET.size
