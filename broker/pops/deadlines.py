"""When deliveries that nobody acknowledged come again: one heap and one timer for all of a broker.

An entry is a batch, so a receive of 32 messages costs one. A delivery that gets another time gets another entry, and the
former one loses it. Finished entries stay until they are half of the heap, so acknowledging costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import structlog

from ..clock import Clock, Timer
from ..config import DEAD_LETTER_RETRY_S, EXPIRED_AT_ONCE, STANDSTILL_S
from .deliveries import QueueDeliveries
from .states import Delivery, DeliveryState

log = structlog.get_logger("rocketlet.pops")

_MIN_ENTRIES = 1024
_Entry = tuple[float, int, QueueDeliveries, Sequence[Delivery]]


class Deadlines:
    """expire: takes deliveries of one queue whose time is over. Times are of the monotonic clock, s."""

    def __init__(self, clock: Clock, expire: Callable[[QueueDeliveries, list[Delivery]], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._compacted = 0
        self._timer: Timer | None = None
        self._due_s = 0.0
        self._is_stopped = False

    def put(self, deliveries: QueueDeliveries, batch: Sequence[Delivery], deadline_s: float) -> None:
        """The whole batch is due then."""
        heap = self._heap
        if len(heap) > 2 * self._compacted + _MIN_ENTRIES:
            self._compact()
        number = next(self._numbers)
        for delivery in batch:
            delivery.entry = number
        heappush(heap, (deadline_s, number, deliveries, batch))
        if self._timer is None or deadline_s < self._due_s:
            self._set_timer()

    def _compact(self) -> None:
        self._heap[:] = [entry for entry in self._heap if any(_is_of(item, entry[1]) for item in entry[3])]
        heapify(self._heap)
        self._compacted = len(self._heap)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap and not self._is_stopped:
            self._due_s = self._heap[0][0]
            self._timer = self._clock.call_later(max(self._due_s - self._clock.monotonic_s(), 0.0), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._due_s
        try:
            if late_s > STANDSTILL_S:  # acknowledgements that came meanwhile have not been read yet
                self._wait_longer(now_s, late_s)
            else:
                self._expire_until(now_s)
        finally:
            self._set_timer()

    def _wait_longer(self, now_s: float, late_s: float) -> None:
        while self._heap and self._heap[0][0] <= now_s:
            _, number, deliveries, batch = heappop(self._heap)
            until_s = now_s + min(late_s, STANDSTILL_S)
            for item in batch:
                if _is_of(item, number) and item.deadline_s <= now_s:
                    item.deadline_s = until_s
            heappush(self._heap, (until_s, number, deliveries, batch))

    def _expire_until(self, now_s: float) -> None:
        heap = self._heap
        for _ in range(EXPIRED_AT_ONCE):
            if not heap or heap[0][0] > now_s:
                return
            _, number, deliveries, batch = heappop(heap)
            due: list[Delivery] = []
            for item in batch:
                if _is_of(item, number):
                    if item.deadline_s <= now_s:
                        due.append(item)
                    else:
                        self.put(deliveries, (item,), item.deadline_s)
            if due:
                self._expire_all(deliveries, due, now_s)

    def _expire_all(self, deliveries: QueueDeliveries, due: list[Delivery], now_s: float) -> None:
        """Whatever raises, no delivery is without a deadline."""
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


def _is_of(delivery: Delivery, number: int) -> bool:
    """Whether that entry looks after it, and no later one does."""
    return delivery.entry == number and delivery.state is DeliveryState.IN_FLIGHT
