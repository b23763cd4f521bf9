"""The journal of popped and acknowledged messages, from which a restarted broker continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from ..config import CLOCK_TOLERANCE_MS
from ..groups.group import FinishedAhead
from ..groups.offsets import Offsets
from ..messages.lite import LiteTopic
from ..messages.topics import Topics
from ..runtime import Job, Runtime
from ..store.files import StoreFull
from ..store.journals import Frames, framed
from ..store.store import Flusher
from . import records
from .deliveries import Delivery, DeliveryState, JournalKey, KeptQueue
from .pool import QueueDeliveries
from .records import MAX_COUNT

log = structlog.get_logger("rocketlet.pops")

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
        queues, unread, fault = records.replay(self.frames.read())
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
                self._yielded[kept.key] = number, _left(number, kept.key, kept.next, kept.floor_ms)
            elif kept.is_ahead and kept.is_adopted:
                self._ahead[kept.key[1:]] = number, _left_ahead(number, kept.key, kept.ahead)

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
        self._content.append(records.pop(deliveries.number, deliveries.next, first.pop_ms, deadline_ms, popped))
        deliveries.is_passed = False

    def kept_behind(self, deliveries: QueueDeliveries) -> None:
        """Record messages that were read, and are still BEHIND others of their message group."""
        fresh, deliveries.fresh_behind = deliveries.fresh_behind, []
        self._define(deliveries)
        behind = [item for item in fresh if item.state in (DeliveryState.BEHIND, DeliveryState.VISIBLE)]
        self._content.append(records.pop(deliveries.number, deliveries.next, 0, 0, behind))

    def deadline_changed(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._define(deliveries)
        is_in_flight = delivery.state is DeliveryState.IN_FLIGHT
        deadline_ms = self.wall_ms(delivery.deadline_s) if is_in_flight else 0
        self._content.append(records.change(deliveries.number, delivery.offset, deadline_ms, delivery.attempts))

    def acknowledged(self, deliveries: QueueDeliveries, done: Sequence[Delivery]) -> None:
        if deliveries.number not in self._defined:
            self._define(deliveries)
        for first in range(0, len(done), MAX_COUNT):
            self._content.append(records.ack(deliveries.number, done[first : first + MAX_COUNT]))

    def passed(self, deliveries: QueueDeliveries) -> None:
        """Record that the messages before `next` were read; those without a record were not delivered."""
        deliveries.is_passed = False
        self._define(deliveries)
        self._content.append(records.passed(deliveries.number, deliveries.next))

    def restarted(self, deliveries: QueueDeliveries) -> None:
        self._define(deliveries)
        self._content.append(records.base(deliveries.number, deliveries.next, deliveries.floor_ms))

    def ended(self, deliveries: QueueDeliveries) -> None:
        """Record that the group, the topic or the lite topic is deleted."""
        if deliveries.number in self._defined:
            self._defined.discard(deliveries.number)
            self._content.append(records.end(deliveries.number))

    def yielded(self, deliveries: QueueDeliveries, offset: int, ahead: FinishedAhead | None = None) -> None:
        """Record that the queue has left its pool, and where the group continues. Until the offsets are saved, only the
        journal has this offset. ahead: finished messages after the offset, which are kept until `ahead_ended`."""
        number = deliveries.number
        if ahead is not None:
            self._define(deliveries)
            key = self._key(deliveries)
            self._ahead[key[1:]] = number, _left_ahead(number, key, ahead)
            self._content.append(self._ahead[key[1:]][1])
            return
        if number in self._defined:
            key = self._key(deliveries)
            self._end_left(key)
            left = _left(number, key, offset, deliveries.floor_ms)
            self._yielded[key] = number, left
            self._content.append(left)

    def ahead_ended(self, group: str, topic: str, queue_id: int) -> None:
        """End the records of finished messages after the offset of a queue."""
        number, _ = self._ahead.pop((group, topic, queue_id), (0, b""))
        if number:
            self._defined.discard(number)
            self._content.append(records.end(number))

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
        # not `_left`, of which a start takes the higher one of this offset and a saved one
        self._yielded[key] = number, records.define(number, key) + records.base(number, offset, now_ms + 1)
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
        self._content.append(records.end(number))
        return number

    def _define(self, deliveries: QueueDeliveries) -> None:
        if deliveries.number not in self._defined:
            self._defined.add(deliveries.number)
            self._content.append(records.define(deliveries.number, self._key(deliveries)))
            self._content.append(records.base(deliveries.number, deliveries.reported, deliveries.floor_ms))
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
            self._content += map(records.end, saved)
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
        yield records.nothing()
        yield from [left for _, left in (*self._saved.values(), *self._yielded.values(), *self._ahead.values())]
        for deliveries in list(all_deliveries):
            frame = [records.define(deliveries.number, self._key(deliveries))]
            frame.append(records.base(deliveries.number, deliveries.next, deliveries.floor_ms))
            for delivery in list(deliveries.unfinished.values()):
                if delivery.state is not DeliveryState.ACKNOWLEDGED:
                    frame.append(self._kept(deliveries, delivery))
                if len(frame) > _AT_ONCE:
                    yield b"".join(frame)
                    frame = []
            yield b"".join(frame)

    def _kept(self, deliveries: QueueDeliveries, delivery: Delivery) -> bytes:
        deadline_ms = self.wall_ms(delivery.deadline_s) if delivery.state is DeliveryState.IN_FLIGHT else 0
        return records.pop(deliveries.number, deliveries.next, delivery.pop_ms, deadline_ms, (delivery,))


def _left(number: int, key: JournalKey, offset: int, floor_ms: int) -> bytes:
    """Return the records of a queue that has left its pool."""
    return records.define(number, key) + records.base(number, offset, floor_ms) + records.yielded(number)


def _left_ahead(number: int, key: JournalKey, ahead: FinishedAhead) -> bytes:
    """Return the records of a queue that has left its pool with finished messages after the offset of the group."""
    items: list[Delivery] = []
    for offset in sorted(ahead.unfinished):
        items.append(Delivery(offset))
        items[-1].attempts = ahead.unfinished[offset]
    parts = [items[first : first + MAX_COUNT] for first in range(0, len(items), MAX_COUNT)]
    popped = b"".join(records.pop(number, ahead.end, 0, 0, part) for part in parts)
    return records.define(number, key) + records.base(number, ahead.end, 0) + popped + records.yielded(number)
