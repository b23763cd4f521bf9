"""The journal of popped and acknowledged messages, from which a restarted broker continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from ..config import POP_JOURNAL_BYTES
from ..runtime import Clock, Job
from ..store.files import StoreError, StoreFull
from ..store.journals import Frames
from . import deliveries as records
from .deliveries import Delivery, DeliveryState, KeptQueue, PoolPlace, QueueDeliveries, TakenDelivery

log = structlog.get_logger("rocketlet.pops")

_AT_ONCE = 512  # deliveries in one record of a file that is written anew


class Book:
    """identity_of: as of `Topics`."""

    def __init__(self, frames: Frames, identity_of: Callable[[str], str], clock: Clock) -> None:
        self.frames = frames
        self._identity_of = identity_of
        self._clock = clock
        self._content: list[bytes] = []
        self._defined: set[int] = set()
        self._yielded: list[int] = []  # since the offsets were saved last
        self._saved: list[int] = []  # before
        self._last = 0
        self.journal_bytes = POP_JOURNAL_BYTES  # beyond twice its size when it was written anew
        self._is_behind = False  # whether the file lacks something that was not acknowledged to anybody

    def read(self, *, is_expected: bool) -> list[KeptQueue]:
        """Return the state that the last run left. is_expected: True if groups have popped before.

        Raises:
            StoreError: The file cannot be read or understood.
        """
        try:
            queues = records.replay(self.frames.read())
        except records.RecordsUnreadable as fault:
            hint = "start the release that wrote it, or remove it: messages in flight are then given again"
            raise StoreError(f"{self.frames.path} cannot be understood ({fault}); {hint}") from fault
        self._last = max(queues, default=0)
        self._is_behind = bool(queues)  # numbers of before are not known: a file of this run is written
        if is_expected and not self.frames.size:
            self._is_behind = True
            hint = "it was removed or emptied: messages acknowledged behind an unfinished one are delivered again"
            log.error("pop_journal_lost", file=str(self.frames.path), hint=hint)
        return list(queues.values())

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def wall_ms(self, monotonic_s: float) -> int:
        ahead_s = monotonic_s - self._clock.monotonic_s()
        return max(self._clock.time_ms() + round(ahead_s * 1000), 0)

    def monotonic_s(self, wall_ms: int) -> float:
        return self._clock.monotonic_s() + (wall_ms - self._clock.time_ms()) / 1000

    # Events

    def popped(self, deliveries: QueueDeliveries, taken: Sequence[TakenDelivery]) -> None:
        """Notes deliveries as they are now, all with the same times."""
        if deliveries.fresh_behind:
            self.waiting(deliveries)
        first = taken[0].delivery
        self._define(deliveries)
        popped = [(delivery.offset, delivery.attempts) for delivery, _ in taken]
        deadline_ms = self.wall_ms(first.deadline_s)
        self._content.append(records.pop(deliveries.number, deliveries.next, first.pop_ms, deadline_ms, popped))
        deliveries.is_passed = False

    def waiting(self, deliveries: QueueDeliveries) -> None:
        """Messages were looked at and not handed out."""
        fresh, deliveries.fresh_behind = deliveries.fresh_behind, []
        self._define(deliveries)
        offsets = [(delivery.offset, 0) for delivery in fresh if delivery.state is DeliveryState.BEHIND]
        self._content.append(records.pop(deliveries.number, deliveries.next, 0, 0, offsets))

    def changed(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._define(deliveries)
        is_in_flight = delivery.state is DeliveryState.IN_FLIGHT
        deadline_ms = self.wall_ms(delivery.deadline_s) if is_in_flight else 0
        self._content.append(records.change(deliveries.number, delivery.offset, deadline_ms, delivery.attempts))

    def acknowledged(self, deliveries: QueueDeliveries, done: Iterable[Delivery]) -> None:
        self._define(deliveries)
        self._content.extend(records.ack(deliveries.number, [delivery.offset for delivery in done]))

    def passed(self, deliveries: QueueDeliveries) -> None:
        deliveries.is_passed = False
        self._define(deliveries)
        self._content.append(records.passed(deliveries.number, deliveries.next))

    def restarted(self, deliveries: QueueDeliveries) -> None:
        self._define(deliveries)
        self._content.append(records.base(deliveries.number, deliveries.next, deliveries.floor_ms))

    def forgotten(self, deliveries: QueueDeliveries) -> None:
        if deliveries.number in self._defined:
            self._defined.discard(deliveries.number)
            self._content.append(records.forget(deliveries.number))

    def yielded(self, deliveries: QueueDeliveries, offset: int) -> None:
        """Members pull now, from an offset on. Acknowledgements are known here alone until the offsets are saved."""
        if deliveries.number in self._defined:
            self._content.append(records.base(deliveries.number, offset, deliveries.floor_ms))
            self._content.append(records.yielded(deliveries.number))
            self._yielded.append(deliveries.number)

    def _define(self, deliveries: QueueDeliveries) -> None:
        if deliveries.number not in self._defined:
            self._defined.add(deliveries.number)
            self._content.append(self._definition(deliveries))
            self._content.append(records.base(deliveries.number, deliveries.reported, deliveries.floor_ms))

    def _definition(self, deliveries: QueueDeliveries) -> bytes:
        queue = deliveries.queue
        place = PoolPlace(self._identity_of(queue.topic), deliveries.group, queue.topic, queue.queue_id)
        return records.define(deliveries.number, place)

    # Writing

    def write(self) -> None:
        """Writes the events. Raises StoreFull; nothing is acknowledged then until the file was written anew."""
        content, self._content = self._content, []
        if self._is_behind:
            raise StoreFull(f"{self.frames.path} lacks what happened before; it is written anew within some seconds")
        if not content:
            return
        try:
            self.frames.append(b"".join(content))
        except StoreFull:
            self._is_behind = True
            raise

    def saving(self, all_deliveries: Callable[[], Iterable[QueueDeliveries]]) -> Job[None]:
        """Writes the file anew when it has become long, or lacks something. The offsets have just been saved. Raises
        StoreFull; it is tried again then."""
        self._content += map(records.forget, self._saved)
        self._defined.difference_update(self._saved)
        self._saved, self._yielded = self._yielded, []
        is_short = self.frames.size <= self.journal_bytes + 2 * self.frames.base or bool(self._saved)
        if is_short and self._content and not self._is_behind:
            self.write()
        if is_short and not self._is_behind:
            return
        if not self._is_behind:
            self.write()
        was_behind, self._is_behind = self._is_behind, False
        self._content.clear()
        self._defined = {deliveries.number for deliveries in all_deliveries()}
        try:
            yield from self.frames.renewing(self._contents(all_deliveries()))
        except StoreFull:
            self._is_behind = self._is_behind or was_behind
            raise

    def _contents(self, all_deliveries: Iterable[QueueDeliveries]) -> Iterator[bytes]:
        """The state in frames. Events that come while they are made are appended behind them. The file is never empty."""
        yield records.nothing()
        for deliveries in list(all_deliveries):
            frame = [self._definition(deliveries)]
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
        popped = [(delivery.offset, delivery.attempts)]
        return records.pop(deliveries.number, deliveries.next, delivery.pop_ms, deadline_ms, popped)
