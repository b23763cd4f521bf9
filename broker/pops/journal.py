"""The journal of popped and acknowledged messages, from which a restarted broker continues.

The records and their replay, the events that are recorded, and the write once per event-loop iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

import structlog

from ..config import CLOCK_TOLERANCE_MS
from ..groups.group import FinishedAhead
from ..groups.offsets import Offsets
from ..messages.lite import LiteTopic
from ..messages.topics import Topics
from ..runtime.clock import Clock
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..store.files import StoreFull
from ..store.journals import Frames, framed
from ..store.store import Flusher
from .deliveries import Delivery, DeliveryState, JournalKey, KeptQueue, StoredDelivery
from .pool import QueueDeliveries
from .requests import AckStatus

log = structlog.get_logger("rocketlet.pops")

Answered = Callable[[Sequence[AckStatus]], object]
"""Takes an outcome for each handle of a request."""


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


def encode_definition(number: int, key: JournalKey) -> bytes:
    return _text(b"D", number, "\0".join((key.identity, key.group, key.topic, str(key.queue_id))))


def _text(kind: bytes, number: int, text: str) -> bytes:
    data = text.encode()[:0xFFFF]
    return _TEXT.pack(kind, number, len(data)) + data


def encode_pop(number: int, next_offset: int, pop_ms: int, deadline_ms: int, popped: Sequence[Delivery]) -> bytes:
    """Return a record P of up to `MAX_COUNT` deliveries."""
    head = _POP.pack(b"P", number, next_offset, pop_ms, deadline_ms, 0, _NOT_RENEWED, len(popped))
    return head + b"".join(map(_POPPED.pack, map(_offset_of, popped), map(_attempts_of, popped)))


def encode_ack(number: int, done: Sequence[Delivery]) -> bytes:
    """Return a record A of up to `MAX_COUNT` acknowledged deliveries."""
    return _ACK.pack(b"A", number, len(done)) + b"".join(map(_OFFSET.pack, map(_offset_of, done)))


def encode_change(number: int, offset: int, deadline_ms: int, attempts: int) -> bytes:
    return _CHANGE.pack(b"X", number, offset, deadline_ms, attempts, _NOT_RENEWED)


def encode_passed(number: int, next_offset: int) -> bytes:
    return _NEXT.pack(b"N", number, next_offset)


def encode_base(number: int, next_offset: int, floor_ms: int) -> bytes:
    return _BASE.pack(b"B", number, next_offset, floor_ms)


def encode_yielded(number: int) -> bytes:
    return _FORGET.pack(b"Y", number)


def encode_nothing() -> bytes:
    """Return a record that `replay` skips, in earlier releases, too."""
    return _text(b"C", 0, "")


def encode_end(number: int) -> bytes:
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


# ------------------------------------------------------------------------------
# The records of this run, until they are written; and the file with the state of all deliveries.


_AT_ONCE = 512  # records after which a rewrite of the file begins another frame


class PopJournal:
    """Collects records until `write`, and rewrites the file in `saving` if it has become long or lacks records.

    If the file exceeds `pop_journal_bytes` and twice its size after the last rewrite, it is rewritten.

    Args:
        flusher: syncs what was written before a response; None if responses do not wait for the device.
    """

    def __init__(
        self, runtime: Runtime, frames: Frames, topics: Topics, offsets: Offsets, flusher: Flusher | None
    ) -> None:
        self.frames = frames
        self.flusher = flusher
        self._adoption = runtime.adoption
        self._topics, self._offsets = topics, offsets
        self._clock = runtime.clock
        self._content: list[bytes] = []
        self._defined: set[int] = set()
        # number and records of queues that left their pools: since the last save of offsets began, and before that
        self._yielded: dict[JournalKey, tuple[int, bytes]] = {}
        self._saved: dict[JournalKey, tuple[int, bytes]] = {}
        # number and records of queues that members pull, with finished messages after their offsets
        self._ahead: dict[tuple[str, str, int], tuple[int, bytes]] = {}
        self.last_number = 0
        self._journal_bytes = runtime.limits.pop_journal_bytes
        self._ahead_ms = 0  # how far the clock of the last run was ahead of this run's clock at the start
        self._is_behind = False  # True if the file lacks records, so that nothing is appended until it is rewritten

    def read(self) -> dict[int, KeptQueue]:
        """Return the state that the last run left, by number. From a frame on that does not contain records, the file is kept
        aside: messages in flight, and acknowledged ones after them, are then delivered again. Raises StoreError if the file
        cannot be read."""
        queues, unread, fault = replay(self.frames.read())
        if fault is not None:
            self._adoption.set_aside("popped messages", len(unread), b"".join(map(framed, unread)), fault)
        self.last_number = max(queues, default=0)
        # A message that was popped in the future shows that the clock was set back. Without this correction the message would
        # stay invisible longer by the same time.
        newest_ms = max((found.pop_ms for kept in queues.values() for found in kept.unfinished.values()), default=0)
        self._ahead_ms = max(newest_ms - self._clock.time_ms(), 0)
        if self._ahead_ms > CLOCK_TOLERANCE_MS:
            hint = (
                "popped messages stay invisible for the rest of their timeouts; check the time service of the machine"
            )
            log.warning("clock_set_back", ahead_s=self._ahead_ms / 1000, hint=hint)
        self._is_behind = bool(queues or unread)  # this run has not defined their numbers, so it rewrites the file
        if self._offsets.has_pops and not self.frames.size:
            self._is_behind = True
            hint = "it was removed or emptied: messages acknowledged after an unfinished one are delivered again"
            log.error("pop_journal_lost", file=str(self.frames.path), hint=hint)
        return queues

    def keep_left(self, queues: Mapping[int, KeptQueue]) -> None:
        """Keep the records of adopted queues that left their pools, with the offsets that were adopted, until the offsets
        are saved."""
        for number, kept in queues.items():
            if kept.has_left and kept.is_adopted:
                self._yielded[kept.key] = number, _encode_left(number, kept.key, kept.next, kept.floor_ms)
            elif kept.is_ahead and kept.is_adopted:
                self._ahead[kept.key[1:]] = number, _encode_left_ahead(number, kept.key, kept.ahead)

    def wall_ms(self, monotonic_s: float) -> int:
        ahead_s = monotonic_s - self._clock.monotonic_s()
        return max(self._clock.time_ms() + round(ahead_s * 1000), 0)

    def monotonic_s(self, wall_ms: int) -> float:
        """Return the monotonic time of a wall time of the last run."""
        return self._clock.monotonic_s() + (wall_ms - self._ahead_ms - self._clock.time_ms()) / 1000

    # Events

    def popped(self, deliveries: QueueDeliveries, popped: Sequence[Delivery]) -> None:
        """Record deliveries that were popped together, and so have the times of the first one."""
        if deliveries.fresh_behind:
            self.kept_behind(deliveries)
        if deliveries.number not in self._defined:
            self._define(deliveries)
        if not self._offsets.has_pops:
            self._offsets.note_pops()
        first = popped[0]
        deadline_ms = self.wall_ms(first.deadline_s)
        self._content.append(encode_pop(deliveries.number, deliveries.next, first.pop_ms, deadline_ms, popped))
        deliveries.is_passed = False

    def kept_behind(self, deliveries: QueueDeliveries) -> None:
        """Record messages that were read, and are still BEHIND others of their message group."""
        fresh, deliveries.fresh_behind = deliveries.fresh_behind, []
        self._define(deliveries)
        behind = [item for item in fresh if item.state in (DeliveryState.BEHIND, DeliveryState.VISIBLE)]
        self._content.append(encode_pop(deliveries.number, deliveries.next, 0, 0, behind))

    def deadline_changed(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._define(deliveries)
        is_in_flight = delivery.state is DeliveryState.IN_FLIGHT
        deadline_ms = self.wall_ms(delivery.deadline_s) if is_in_flight else 0
        self._content.append(encode_change(deliveries.number, delivery.offset, deadline_ms, delivery.attempts))

    def acknowledged(self, deliveries: QueueDeliveries, done: Sequence[Delivery]) -> None:
        if deliveries.number not in self._defined:
            self._define(deliveries)
        for first in range(0, len(done), MAX_COUNT):
            self._content.append(encode_ack(deliveries.number, done[first : first + MAX_COUNT]))

    def passed(self, deliveries: QueueDeliveries) -> None:
        """Record that the messages before `next` were read; those without a record were not delivered."""
        deliveries.is_passed = False
        self._define(deliveries)
        self._content.append(encode_passed(deliveries.number, deliveries.next))

    def restarted(self, deliveries: QueueDeliveries) -> None:
        self._define(deliveries)
        self._content.append(encode_base(deliveries.number, deliveries.next, deliveries.floor_ms))

    def ended(self, deliveries: QueueDeliveries) -> None:
        """Record that the group, the topic or the lite topic is deleted."""
        if deliveries.number in self._defined:
            self._defined.discard(deliveries.number)
            self._content.append(encode_end(deliveries.number))

    def yielded(self, deliveries: QueueDeliveries, offset: int, ahead: FinishedAhead | None = None) -> None:
        """Record that the queue has left its pool, and where the group continues. Until the offsets are saved, only the
        journal has this offset. ahead: finished messages after the offset, which are kept until `ahead_ended`."""
        number = deliveries.number
        if ahead is not None:
            self._define(deliveries)
            key = self._key(deliveries)
            self._ahead[key[1:]] = number, _encode_left_ahead(number, key, ahead)
            self._content.append(self._ahead[key[1:]][1])
            return
        if number in self._defined:
            key = self._key(deliveries)
            self._end_left(key)
            left = _encode_left(number, key, offset, deliveries.floor_ms)
            self._yielded[key] = number, left
            self._content.append(left)

    def ahead_ended(self, group: str, topic: str, queue_id: int) -> None:
        """End the records of finished messages after the offset of a queue."""
        number, _ = self._ahead.pop((group, topic, queue_id), (0, b""))
        if number:
            self._defined.discard(number)
            self._content.append(encode_end(number))

    def group_deleted(self, group: str) -> None:
        """End the records of the queues that have left the pools of a deleted group."""
        for key in [key for key in (*self._yielded, *self._saved) if key.group == group]:
            self._end_left(key)

    def lite_deleted(self, group: str, lite: LiteTopic) -> bool:
        """End the records of a deleted lite topic that has left its pool. Return True if there were any."""
        return self._end_left(self._lite_key(group, lite)) is not None

    def lite_offset_set(self, group: str, lite: LiteTopic, offset: int, now_ms: int) -> bool:
        """Record the offset that was set for a lite topic that has left its pool. Return True if it has records."""
        key = self._lite_key(group, lite)
        number = self._end_left(key)
        if number is None:
            return False
        # not `_encode_left`, of which a start takes the higher one of this offset and a saved one
        self._yielded[key] = number, encode_definition(number, key) + encode_base(number, offset, now_ms + 1)
        self._defined.add(number)
        self._content.append(self._yielded[key][1])
        return True

    def _lite_key(self, group: str, lite: LiteTopic) -> JournalKey:
        return JournalKey(self._topics.identity(lite.queue.topic), group, lite.topic, lite.queue_id)

    def _end_left(self, key: JournalKey) -> int | None:
        """End the records of a queue that has left its pool, and return its number; None if it has none."""
        left = self._yielded if key in self._yielded else self._saved
        if key not in left:
            return None
        number, _ = left.pop(key)
        self._defined.discard(number)
        self._content.append(encode_end(number))
        return number

    def _define(self, deliveries: QueueDeliveries) -> None:
        if deliveries.number not in self._defined:
            self._defined.add(deliveries.number)
            self._content.append(encode_definition(deliveries.number, self._key(deliveries)))
            self._content.append(encode_base(deliveries.number, deliveries.reported, deliveries.floor_ms))
            self.ahead_ended(deliveries.group, deliveries.queue.topic, deliveries.queue.queue_id)  # popped again

    def _key(self, deliveries: QueueDeliveries) -> JournalKey:
        queue = deliveries.queue
        return JournalKey(self._topics.identity(deliveries.pool.topic), deliveries.group, queue.topic, queue.queue_id)

    # Writing

    def write(self) -> None:
        """Append the collected records. Raises StoreFull; after that, each call raises it until the file is rewritten."""
        content, self._content = self._content, []
        if self._is_behind:
            raise StoreFull(f"{self.frames.path} lacks earlier records, and cannot be extended until it is rewritten")
        if not content:
            return
        try:
            self.frames.append(b"".join(content))
        except StoreFull:
            self._is_behind = True
            raise

    def begin_saving(self) -> None:
        """Prepare a save of the offsets, followed by `saving`."""
        self._saved |= self._yielded
        self._yielded.clear()

    def saving(
        self, all_deliveries: Callable[[], Iterable[QueueDeliveries]], *, are_offsets_saved: bool = False
    ) -> Job[None]:
        """Rewrite the file if it is long or lacks records, else append the collected records. Raises StoreFull; the next
        call retries.

        Args:
            are_offsets_saved: True if the offsets were saved since `begin_saving`. The records of queues that left their
                pools before that are then ended.
        """
        if are_offsets_saved:
            saved = [number for number, _ in self._saved.values()]
            self._content += map(encode_end, saved)
            self._defined.difference_update(saved)
            self._saved.clear()
        is_short = self.frames.size <= self._journal_bytes + 2 * self.frames.base
        if is_short and self._content and not self._is_behind:
            self.write()
        if is_short and not self._is_behind:
            return
        if not self._is_behind:
            self.write()
        was_behind, self._is_behind = self._is_behind, False
        self._content.clear()
        left = (*self._saved.values(), *self._yielded.values(), *self._ahead.values())
        numbers = {deliveries.number for deliveries in all_deliveries()} | {number for number, _ in left}
        # Until the new file is whole, records are in the old one, too, which needs a definition of each number. Those of a
        # file that lacks records are unknown.
        self._defined = numbers if was_behind else numbers & self._defined
        try:
            yield from self.frames.renewing(self._contents(all_deliveries()))
        except BaseException:  # StoreFull, or a save that is cancelled
            self._is_behind = self._is_behind or was_behind
            raise

    def _contents(self, all_deliveries: Iterable[QueueDeliveries]) -> Iterator[bytes]:
        """Yield the state in frames. Records of events that happen meanwhile are appended after them. The file is never
        empty, because an empty one would count as lost."""
        yield encode_nothing()
        yield from [left for _, left in (*self._saved.values(), *self._yielded.values(), *self._ahead.values())]
        for deliveries in list(all_deliveries):
            frame = [encode_definition(deliveries.number, self._key(deliveries))]
            frame.append(encode_base(deliveries.number, deliveries.next, deliveries.floor_ms))
            for delivery in list(deliveries.unfinished.values()):
                if delivery.state is not DeliveryState.ACKNOWLEDGED:
                    frame.append(self._kept(deliveries, delivery))
                if len(frame) > _AT_ONCE:
                    yield b"".join(frame)
                    frame = []
            yield b"".join(frame)

    def _kept(self, deliveries: QueueDeliveries, delivery: Delivery) -> bytes:
        deadline_ms = self.wall_ms(delivery.deadline_s) if delivery.state is DeliveryState.IN_FLIGHT else 0
        return encode_pop(deliveries.number, deliveries.next, delivery.pop_ms, deadline_ms, (delivery,))


def _encode_left(number: int, key: JournalKey, offset: int, floor_ms: int) -> bytes:
    """Return the records of a queue that has left its pool."""
    return encode_definition(number, key) + encode_base(number, offset, floor_ms) + encode_yielded(number)


def _encode_left_ahead(number: int, key: JournalKey, ahead: FinishedAhead) -> bytes:
    """Return the records of a queue that has left its pool with finished messages after the offset of the group."""
    items: list[Delivery] = []
    for offset in sorted(ahead.unfinished):
        items.append(Delivery(offset))
        items[-1].attempts = ahead.unfinished[offset]
    parts = [items[first : first + MAX_COUNT] for first in range(0, len(items), MAX_COUNT)]
    popped = b"".join(encode_pop(number, ahead.end, 0, 0, part) for part in parts)
    return encode_definition(number, key) + encode_base(number, ahead.end, 0) + popped + encode_yielded(number)


# ------------------------------------------------------------------------------
# The acknowledgements and other records of one event-loop iteration: one write, and then the responses.


class JournalWriter:
    """Writes once per event-loop iteration. `finished` is called with the queues whose acknowledgements were written, or were
    refused by the disk."""

    def __init__(
        self, journal: PopJournal, clock: Clock, finished: Callable[[Iterable[QueueDeliveries]], None]
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._finished = finished
        self._acked: dict[QueueDeliveries, list[Delivery]] = {}
        self._waiting: list[tuple[list[AckStatus], Answered]] = []
        self._touched: dict[QueueDeliveries, None] = {}
        self._is_writing = False

    def acknowledge(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._acked.setdefault(deliveries, []).append(delivery)
        self.commit_soon(deliveries)

    def answer_when_written(self, outcomes: list[AckStatus], answer: Answered) -> None:
        """Call `answer` with the outcomes of one request when its acknowledgements are written, and synced if responses wait
        for that; with `NOT_KEPT` for them if that fails; immediately if no outcome is DONE or LATE."""
        for outcome in outcomes:
            if outcome is AckStatus.DONE or outcome is AckStatus.LATE:
                self._waiting.append((outcomes, answer))
                self.write_soon()
                return
        answer(outcomes)

    def commit_soon(self, deliveries: QueueDeliveries) -> None:
        """Commit the queue's offset with the next write, if it has moved."""
        self._touched[deliveries] = None
        self.write_soon()

    def write_soon(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._clock.call_soon(self.write)

    def write(self) -> None:
        """Write the records of this event-loop iteration, commit offsets, and respond to the acknowledgements."""
        self._is_writing = False
        acked, self._acked = self._acked, {}
        waiting, self._waiting = self._waiting, []
        touched, self._touched = self._touched, {}
        is_written = True
        try:
            for deliveries, done in acked.items():
                # The record of an acknowledgement would add a queue that has left its pool to the journal again
                if not deliveries.is_ended:
                    self._journal.acknowledged(deliveries, done)
            self._journal.write()
        except Exception as error:  # after any error, the acknowledgements get a response
            is_written = False
            is_full = isinstance(error, StoreFull)
            log.error(
                "acknowledgements_refused", reason=str(error), count=len(waiting), exc_info=None if is_full else error
            )
            for deliveries, done in acked.items():
                for delivery in done:
                    deliveries.refuse(delivery)
        else:
            for deliveries, done in acked.items():
                deliveries.finish(done)
        for deliveries in touched:
            try:
                self.commit(deliveries)
            except Exception:
                log.exception("offset_not_reported", group=deliveries.group, topic=deliveries.queue.topic)
        if waiting and is_written and (flusher := self._journal.flusher) is not None:
            flusher.after_sync(partial(_answer, waiting), partial(_answer, waiting, is_kept=False))
        elif waiting:
            _answer(waiting, is_kept=is_written)
        self._finished(acked)

    def commit(self, deliveries: QueueDeliveries) -> None:
        """Commit the queue's lowest unfinished offset, unless the queue has left its pool or its offset was reset."""
        committed = deliveries.committed
        if committed != deliveries.reported and not deliveries.is_ended and not self.follow_reset(deliveries):
            deliveries.messages.commit(committed)
            deliveries.reported = committed

    def follow_reset(self, deliveries: QueueDeliveries) -> bool:
        """Continue from the group's offset if it is not the one that was committed here last. Returns True if so."""
        offset = deliveries.messages.offset
        if offset is None or offset == deliveries.reported:
            return False
        deliveries.restart(offset, self._clock.time_ms())
        self._journal.restarted(deliveries)
        self.write_soon()
        return True


def _answer(waiting: Iterable[tuple[list[AckStatus], Answered]], *, is_kept: bool = True) -> None:
    """Respond to requests. An error of one response does not keep the others from theirs."""
    for outcomes, answer in waiting:
        if not is_kept:
            outcomes = [AckStatus.NOT_KEPT if outcome.is_done else outcome for outcome in outcomes]
        try:
            answer(outcomes)
        except Exception:
            log.exception("acknowledgement_not_answered")
