"""The messages of a queue that a group has popped and not finished.

Offsets below `next` that are not in `unfinished` are finished, so nothing is kept of them. Deliveries stay in the place at
which they were popped first: their order is that of their offsets, and the first one says how far the group has come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import structlog

from ...protocol.message import offset_in, properties_in, split_records
from ...protocol.properties import TAGS, find
from ..config import LIMITS, POP_LOOKS, SCAN_ENTRIES, SCAN_WORDS, Limits
from ..store.consume_queue import ConsumeQueue
from ..store.reading import Fetched
from .order import Order, message_group
from .records import KeptQueue
from .states import Delivery, DeliveryState, Event
from .values import Delivered, PopNumbers, PopRequest

log = structlog.get_logger("rocketlet.pops")

Fetch = Callable[..., Fetched]


class TakenDelivery(NamedTuple):
    delivery: Delivery
    record: bytes


class Tally:
    """How many deliveries a group has that are not finished, in all its queues. again: how many were no first ones."""

    __slots__ = ("again", "unfinished")

    def __init__(self) -> None:
        self.unfinished = 0
        self.again = 0


class QueueDeliveries:
    """The deliveries of one group and queue. number: stands for them on the disk. reported: the group's offset as they told
    it last; another one there means that somebody has sent the group elsewhere.

    fetch: `Store.fetch`. `take` raises its exceptions, and then takes nothing."""

    def __init__(
        self,
        number: int,
        group: str,
        queue: ConsumeQueue,
        begin: int,
        fetch: Fetch,
        tally: Tally,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self.number = number
        self.group = group
        self.queue = queue
        self.next = begin
        self.floor_ms = 0
        self.reported = begin
        self.unfinished: OrderedDict[int, Delivery] = OrderedDict()
        self.is_passed = False  # whether `next` has moved without the disk knowing
        self.gives_new = True  # not while its queue leaves those who pop
        self.gives_again = True  # not when that takes long
        self.fresh_behind: list[Delivery] = []  # not on the disk yet
        self._order: Order | None = None
        self._visible: list[int] = []  # a heap; also of some that are not visible any more
        self._fetch = fetch
        self._tally = tally

    @property
    def committed(self) -> int:
        """The lowest offset that is not finished."""
        return next(iter(self.unfinished), self.next)

    def before_finished(self) -> list[Delivery]:
        """The unfinished messages before a finished one: no offset alone says both."""
        end = self.next
        for offset in reversed(self.unfinished):
            if offset != end - 1:
                break
            end = offset
        return [delivery for delivery in self.unfinished.values() if delivery.offset < end]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to look at."""
        self._drop_stale()
        has_new = self.next < self.queue.next and len(self.unfinished) < self._limit
        return (self.gives_again and bool(self._visible)) or (self.gives_new and has_new)

    @property
    def _limit(self) -> int:
        return self._limits.max_unfinished if self._order is None else self._limits.max_unfinished_in_order

    def _drop_stale(self) -> None:
        visible = self._visible
        while visible:
            delivery = self.unfinished.get(visible[0])
            if delivery is not None and self._is_free(delivery):
                return
            heappop(visible)

    def _is_free(self, delivery: Delivery) -> bool:
        if self._order is None:
            return delivery.state is DeliveryState.VISIBLE
        return delivery.state in (DeliveryState.VISIBLE, DeliveryState.BEHIND) and self._order.is_first(delivery)

    # Popping

    def take(self, request: PopRequest, count: int, room: int, allowed: int) -> list[TakenDelivery]:
        """Up to `count` messages of `room` bytes together, of which `allowed` were never popped. The first of an answer, for
        which the room is all that the request has, may be larger. They count as popped when `hand_out` was called."""
        taken: list[TakenDelivery] = []
        if not self.gives_again:
            return taken
        try:
            room, whole = self._take_visible(taken, request, count, room)
            if room > 0 and self.gives_new:
                self._take_new(taken, request, count, room, allowed, whole)
        except BaseException:
            self.put_back(taken)
            raise
        return taken

    def put_back(self, taken: Iterable[TakenDelivery]) -> None:
        """Puts back messages that were taken and not handed out."""
        for delivery, _ in taken:
            if delivery.offset in self.unfinished:
                heappush(self._visible, delivery.offset)

    def _take_visible(
        self, taken: list[TakenDelivery], request: PopRequest, count: int, room: int
    ) -> tuple[int, set[str | None]]:
        """How many bytes are left, and the message groups of which all that is not finished was taken."""
        whole: set[str | None] = set()
        while len(taken) < count:
            self._drop_stale()
            if not self._visible:
                break
            first = self.unfinished[self._visible[0]]
            if first.key in whole and self._order is not None:  # it became the first because one before it is lost
                heappop(self._visible)
                continue
            for delivery in (first,) if self._order is None else self._order.run(first):
                record = self.record(delivery.offset) if len(taken) < count else b""
                if record is None:
                    self._lose(delivery)
                    continue
                if not record or (len(record) > room and (taken or room < request.max_bytes)):
                    self._drop_taken(first, taken)
                    return 0, whole  # newer ones do not overtake it
                taken.append(TakenDelivery(delivery, record))
                room -= len(record)
            self._drop_taken(first, taken)
            whole.add(first.key)
        return max(room, 0), whole

    def _drop_taken(self, first: Delivery, taken: list[TakenDelivery]) -> None:
        if any(item.delivery is first for item in taken):
            while self._visible and self._visible[0] == first.offset:
                heappop(self._visible)

    def record(self, offset: int) -> bytes | None:
        """The record at an offset; None if it is damaged or was dropped with the beginning of the queue."""
        if not self.queue.begin <= offset < self.queue.next:
            return None
        fetched = self._fetch(self.queue, offset, 1)
        return b"".join(fetched.pieces) if fetched.messages else None

    def _lose(self, delivery: Delivery) -> None:
        queue = self.queue
        log.error(
            "popped_message_gone",
            group=self.group, topic=queue.topic, queue=queue.queue_id, offset=delivery.offset, attempts=delivery.attempts,
        )  # fmt: skip
        delivery.turn(Event.FORGET)
        self._remove(delivery)
        if self._order is not None:
            self._order.remove(delivery)
            self._free_first(delivery.key)

    def _take_new(
        self,
        taken: list[TakenDelivery],
        request: PopRequest,
        count: int,
        room: int,
        allowed: int,
        whole: set[str | None],
    ) -> None:
        position = max(self.next, self.queue.begin)
        allowed = min(allowed, self._limit - len(self.unfinished))
        looked: list[Delivery] = []
        looks = SCAN_WORDS // request.matches.words if request.matches is not None else SCAN_ENTRIES
        for _ in range(POP_LOOKS if request.matches is None else 1):
            wanted = min(count - len(taken), allowed)
            if wanted <= 0 or room <= 0 or position >= self.queue.next:
                break
            fetched = self._fetch(self.queue, position, wanted, request.subscription, request.matches, room, looks)
            records = split_records(b"".join(fetched.pieces))
            size = sum(map(len, records))
            if size > room and (taken or room < request.max_bytes):
                break
            for record in records:
                if _matches(request, record):
                    self._look_at(record, looked, taken, whole)
            room -= size
            allowed -= len(records)
            position = fetched.next_offset
        self._keep_in_order(looked)
        if position > self.next:
            self.next = position
            self.is_passed = True

    def _look_at(
        self, record: bytes, looked: list[Delivery], taken: list[TakenDelivery], whole: set[str | None]
    ) -> None:
        delivery = Delivery(offset_in(record))
        if self._order is None:
            taken.append(TakenDelivery(delivery, record))
            return
        delivery.key = key = message_group(record)
        if key not in whole and (self._order.has(key) or any(item.key == key for item in looked)):
            delivery.state = DeliveryState.BEHIND
            self.fresh_behind.append(delivery)
        else:
            whole.add(key)
            taken.append(TakenDelivery(delivery, record))
        looked.append(delivery)

    def _keep_in_order(self, looked: Iterable[Delivery]) -> None:
        """Keeps deliveries of groups in order where they are in the queue, whether they can be popped now or not."""
        for delivery in looked:
            self.unfinished[delivery.offset] = delivery
            self._tally.unfinished += 1
            if self._order is not None:
                self._order.add(delivery)

    def peek(self, count: int) -> list[Delivered]:
        """The next messages, without handles."""
        position = max(self.next, self.queue.begin)
        if position >= self.queue.next:
            return []
        records = split_records(b"".join(self._fetch(self.queue, position, count).pieces))
        topic, queue_id = self.queue.topic, self.queue.queue_id
        return [Delivered(record, topic, queue_id, offset_in(record), 1, "", 0) for record in records]

    def hand_out(self, taken: Sequence[TakenDelivery], now_ms: int) -> int:
        """Adds new deliveries and makes all IN_FLIGHT. Returns the pop time, which no earlier delivery of these has."""
        unfinished = self.unfinished
        pop_ms = max(now_ms, self.floor_ms)
        before = len(unfinished)
        for delivery, _ in taken:
            if delivery.pop_ms >= pop_ms:
                pop_ms = delivery.pop_ms + 1
            unfinished[delivery.offset] = delivery  # one that is there stays in its place
        for delivery, _ in taken:
            if delivery.state is not DeliveryState.ACKNOWLEDGED:  # in order: it was done, and comes with another one
                delivery.attempts += 1
                self._tally.again += delivery.attempts > 1
            delivery.turn(Event.POP)
            delivery.pop_ms = pop_ms
        self._tally.unfinished += len(unfinished) - before
        return pop_ms

    # Outcomes

    def release(self, delivery: Delivery) -> None:
        """Lets the message come again."""
        delivery.turn(Event.RELEASE)
        self._free(delivery)

    def refuse(self, delivery: Delivery) -> None:
        """The disk refused that it is finished."""
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            delivery.turn(Event.REFUSE)
            self._free(delivery)

    def _free(self, delivery: Delivery) -> None:
        if self._is_free(delivery):
            heappush(self._visible, delivery.offset)

    def _free_first(self, key: str | None) -> None:
        first = self._order.first(key) if self._order is not None else None
        if first is not None:
            self._free(first)

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """Forgets deliveries that the disk has as finished, except one that was popped again since."""
        if self._order is None:
            for delivery in deliveries:
                self._finish(delivery)
            return
        for key in dict.fromkeys(delivery.key for delivery in deliveries):
            for delivery in self._order.done(key):
                self._finish(delivery)
            self._free_first(key)

    def _finish(self, delivery: Delivery) -> None:
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            delivery.turn(Event.FINISH)
            self._remove(delivery)

    def _remove(self, delivery: Delivery) -> None:
        del self.unfinished[delivery.offset]
        self._tally.unfinished -= 1

    def restart(self, offset: int, now_ms: int) -> None:
        """The group goes on from another offset: handles that clients hold are of before."""
        self.forget()
        self.next = self.reported = offset
        self.floor_ms = max(self.floor_ms, now_ms + 1)
        self.is_passed = False

    def forget(self) -> None:
        for delivery in self.unfinished.values():
            self.floor_ms = max(self.floor_ms, delivery.pop_ms + 1)
            delivery.turn(Event.FORGET)
        self._tally.unfinished -= len(self.unfinished)
        self.unfinished.clear()
        self._visible.clear()
        self.fresh_behind.clear()
        if self._order is not None:
            self._order = Order()

    # Order

    def set_order(self, is_in_order: bool) -> None:
        """The group's setting. Raises what reading raises; it is tried again with the next receive then."""
        if is_in_order == (self._order is not None):
            return
        self._order = self._order_of_all() if is_in_order else None
        for delivery in list(self.unfinished.values()):
            if not is_in_order and delivery.state is DeliveryState.BEHIND:
                delivery.turn(Event.RELEASE)
            elif not is_in_order:
                self._finish(delivery)
        self._visible = [delivery.offset for delivery in self.unfinished.values() if self._is_free(delivery)]

    def _order_of_all(self) -> Order:
        order = Order()
        for delivery in self.unfinished.values():
            record = self.record(delivery.offset)
            delivery.key = message_group(record) if record else None
            order.add(delivery)
        return order

    # A restart

    def adopt(self, kept: KeptQueue, to_monotonic_s: Callable[[int], float]) -> None:
        """Takes over the deliveries of the last run. Offsets beyond the end of the queue were lost, and are dropped."""
        end = self.queue.next
        self.next, self.floor_ms = min(kept.next, end), kept.floor_ms
        for offset in sorted(kept.unfinished):
            if not self.queue.begin <= offset < end:
                continue
            found = kept.unfinished[offset]
            delivery = self.unfinished[offset] = Delivery(
                offset, DeliveryState.IN_FLIGHT if found.deadline_ms else DeliveryState.VISIBLE
            )
            delivery.attempts, delivery.pop_ms = found.attempts, found.pop_ms
            delivery.deadline_s = to_monotonic_s(found.deadline_ms)
            delivery.since_s = to_monotonic_s(found.pop_ms)
            self._free(delivery)
        self._tally.unfinished += len(self.unfinished)

    # Looking

    @property
    def is_full(self) -> bool:
        """Whether new messages wait because too many are not finished."""
        return self.next < self.queue.next and len(self.unfinished) >= self._limit

    @property
    def lag_offset(self) -> int:
        """As many messages lie behind it as are not finished."""
        return self.next - len(self.unfinished)

    @property
    def in_hand(self) -> int:
        """How many are in clients' hands, or come again at a time that one of them has said."""
        return sum(item.state is DeliveryState.IN_FLIGHT for item in self.unfinished.values())

    def numbers(self) -> PopNumbers:
        in_flight = self.in_hand
        waiting = sum(item.state in (DeliveryState.VISIBLE, DeliveryState.BEHIND) for item in self.unfinished.values())
        return PopNumbers(self.next, self.committed, in_flight, waiting, self.queue.next)


def _matches(request: PopRequest, record: bytes) -> bool:
    """The index knows the hashes of tags only, and two tags may share one."""
    subscription = request.subscription
    if request.matches is not None or subscription is None or subscription.takes_all:
        return True
    return find(properties_in(record), TAGS) in subscription.tags
