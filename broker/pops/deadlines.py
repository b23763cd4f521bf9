"""The deadlines of all deliveries of a broker: one heap and one timer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

import structlog

from ..config import DEAD_LETTER_RETRY_S, EXPIRED_AT_ONCE, POSTPONED_AT_ONCE, STANDSTILL_S
from ..runtime.clock import Clock, SingleTimer
from .deliveries import Delivery, DeliveryState
from .pool import QueueDeliveries

log = structlog.get_logger("rocketlet.pops")


# An entry is a batch, so 32 messages that a receive pops from one queue cost one entry. A delivery that gets another
# deadline gets another entry, and its earlier entry does not count for it any more. Entries of finished deliveries are
# removed when they are due or the heap has doubled, so acknowledging costs nothing. For their removal a heap that has doubled
# is set aside, and each further entry moves some of its entries to a new heap.


_MIN_ENTRIES: Final = 1024
_MOVED_AT_ONCE: Final = 4
_Entry = tuple[float, int, QueueDeliveries, Sequence[Delivery]]


class Deadlines:
    """Passes deliveries of one queue to `expire` when their deadline has passed. Times are seconds of the monotonic clock."""

    def __init__(self, clock: Clock, expire: Callable[[QueueDeliveries, list[Delivery]], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._heap: list[_Entry] = []
        self._former: list[_Entry] = []  # a heap that had doubled, with entries that are not moved yet
        self._numbers = count()
        self._compacted = 0
        self._timer = SingleTimer(clock, self._fire)
        self._due_s = 0.0
        self._resumed_s = self._late_s = float(
            "-inf"
        )  # after a suspension: when it ended, and how late deadlines then were
        self._is_stopped = False

    def put(self, deliveries: QueueDeliveries, batch: Sequence[Delivery], deadline_s: float) -> None:
        """Give a batch of deliveries of one queue a deadline."""
        if not self._former and len(self._heap) > 2 * self._compacted + _MIN_ENTRIES:
            self._former, self._heap = self._heap, []
        if self._former:
            self._move_some()
        number = next(self._numbers)
        for delivery in batch:
            delivery.entry = number
        heappush(self._heap, (deadline_s, number, deliveries, batch))
        if not self._timer.is_set or deadline_s < self._due_s:
            self._set_timer()

    def _move_some(self) -> None:
        for _ in range(min(_MOVED_AT_ONCE, len(self._former))):
            entry = self._former.pop()  # a heap without its last entry is a heap
            if any(_counts_for(item, entry[1]) for item in entry[3]):
                heappush(self._heap, entry)
        if not self._former:
            self._compacted = len(self._heap)

    def _first(self) -> list[_Entry]:
        """Return the heap whose first entry is due first; an empty one without entries."""
        heap, former = self._heap, self._former
        return former if former and (not heap or former[0] < heap[0]) else heap

    def _set_timer(self) -> None:
        self._timer.cancel()
        if (heap := self._first()) and not self._is_stopped:
            self._due_s = heap[0][0]
            self._timer.set(max(self._due_s - self._clock.monotonic_s(), 0.0))

    def _fire(self) -> None:
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._due_s
        try:
            if late_s > STANDSTILL_S and self._due_s > self._resumed_s:
                # The process was suspended: acknowledgements that arrived are not read yet.
                self._resumed_s, self._late_s = now_s, min(late_s, STANDSTILL_S)
            if self._due_s <= self._resumed_s:
                self._postpone(now_s + self._late_s)
            else:
                self._expire_until(now_s)
        finally:
            self._set_timer()

    def _postpone(self, until_s: float) -> None:
        """Postpone deadlines that had passed when a suspension ended, some per event-loop iteration."""
        for _ in range(POSTPONED_AT_ONCE):
            heap = self._first()
            if not heap or heap[0][0] > self._resumed_s:
                return
            _, number, deliveries, batch = heappop(heap)
            for item in batch:
                if _counts_for(item, number) and item.deadline_s <= self._resumed_s:
                    item.deadline_s = until_s
            heappush(self._heap, (until_s, number, deliveries, batch))

    def _expire_until(self, now_s: float) -> None:
        for _ in range(EXPIRED_AT_ONCE):
            heap = self._first()
            if not heap or heap[0][0] > now_s:
                return
            _, number, deliveries, batch = heappop(heap)
            due: list[Delivery] = []
            for item in batch:
                if _counts_for(item, number):
                    if item.deadline_s <= now_s:
                        due.append(item)
                    else:
                        self.put(deliveries, (item,), item.deadline_s)
            if due:
                self._expire_all(deliveries, due, now_s)

    def _expire_all(self, deliveries: QueueDeliveries, due: list[Delivery], now_s: float) -> None:
        """Expire deliveries. If this fails, set another deadline for those that are left in flight without one."""
        try:
            self._expire(deliveries, due)
        except Exception:
            log.exception(
                "deliveries_not_expired", group=deliveries.group, topic=deliveries.queue.topic, count=len(due)
            )
            left = [item for item in due if item.state is DeliveryState.IN_FLIGHT and item.deadline_s <= now_s]
            for item in left:
                item.deadline_s = now_s + DEAD_LETTER_RETRY_S
            if left:
                self.put(deliveries, left, now_s + DEAD_LETTER_RETRY_S)

    def stop(self) -> None:
        self._is_stopped = True
        self._set_timer()


def _counts_for(delivery: Delivery, number: int) -> bool:
    """Return True if a delivery is in flight, and the entry of this number is its latest."""
    return delivery.entry == number and delivery.state is DeliveryState.IN_FLIGHT
