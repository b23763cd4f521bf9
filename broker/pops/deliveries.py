"""Deliveries: popped messages of one queue in one group, from the pop to the acknowledgement or the next pop."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from ...protocol.message import offset_in, properties_in, split_records
from ...protocol.names import Subscription
from ...protocol.properties import TAGS, find
from ..config import (
    DEAD_LETTER_RETRY_S,
    EXPIRED_AT_ONCE,
    FILTER_WORD_BYTES,
    LIMITS,
    MAX_POP_BYTES,
    POP_LOOKS,
    SCAN_ENTRIES,
    SCAN_WORDS,
    STANDSTILL_S,
    Limits,
)
from ..runtime import Clock, Timer
from ..sessions import Session, subscription_bytes
from ..store.index import ConsumeQueue, Fetched

if TYPE_CHECKING:
    from ..messages.filters import Filter

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# The messages of a queue that a group has popped and not finished.
#
# Offsets below `next` that are not in `unfinished` are finished, so nothing is kept of them. Deliveries stay in the
# place at which they were popped first: their order is that of their offsets, and the first one says how far the
# group has come.


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
        self.is_late = False  # whether its queue leaves only when its messages are finished in their order
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
    def is_in_order(self) -> bool:
        return self._order is not None

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
            if delivery.state is DeliveryState.ACKNOWLEDGED:  # in order: it was done, and comes with another one
                delivery.attempts = max(delivery.attempts, 1)
            else:
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


# ------------------------------------------------------------------------------
# The states of a delivery.
#
#     (not looked at) --pop--> IN_FLIGHT --acknowledged--> ACKNOWLEDGED --on the disk--> FINISHED
#                                 | time over, nack, not taken      | the disk refused it
#                                 v                                 v
#                              VISIBLE --pop--> IN_FLIGHT           VISIBLE
#
# In groups in order, a message behind another one of its message group is BEHIND, looked at and never popped. There,
# one that is acknowledged stays ACKNOWLEDGED while one before it is not, and is popped again together with that.


class DeliveryState(Enum):
    BEHIND = "behind another message of its message group"
    VISIBLE = "to be popped again"
    IN_FLIGHT = "in a client's hands"
    ACKNOWLEDGED = "not yet on the disk, or behind one that is not"
    FINISHED = "acknowledged, or given up"


class Event(Enum):
    POP = "a client gets it"
    RELEASE = "its time is over, or somebody gave it back"
    CHANGE = "its client wants another time"
    ACKNOWLEDGE = "its client, or the broker, is done with it"
    REFUSE = "the disk refused the acknowledgement"
    FINISH = "that is on the disk"
    FORGET = "the group goes elsewhere, or the queue is gone"


_S, _E = DeliveryState, Event
TRANSITIONS: Final = {
    (_S.BEHIND, _E.POP): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.POP): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.POP): _S.IN_FLIGHT,  # in order: with the one before it
    (_S.ACKNOWLEDGED, _E.POP): _S.IN_FLIGHT,  # the same
    (_S.IN_FLIGHT, _E.RELEASE): _S.VISIBLE,
    (_S.BEHIND, _E.RELEASE): _S.VISIBLE,  # the group is not in order any more
    (_S.IN_FLIGHT, _E.CHANGE): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.CHANGE): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.VISIBLE, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.BEHIND, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,  # by the broker, for one that can be read no more
    (_S.ACKNOWLEDGED, _E.REFUSE): _S.VISIBLE,
    (_S.ACKNOWLEDGED, _E.FINISH): _S.FINISHED,
    **{(state, _E.FORGET): _S.FINISHED for state in DeliveryState},
}


class Delivery:
    """A message that was popped. Times in seconds are of the monotonic clock. entry: of the heap of deadlines, that looks
    after it. renewals: how often the broker has prolonged it; -1: that is not wanted. is_delayed: its client has said when
    it comes again. attempts: 0 for one that only waits."""

    __slots__ = (
        "attempts",
        "client",
        "deadline_s",
        "entry",
        "is_delayed",
        "key",
        "offset",
        "pop_ms",
        "renewals",
        "since_s",
        "state",
    )

    def __init__(self, offset: int, state: DeliveryState = DeliveryState.VISIBLE, key: str | None = None) -> None:
        self.offset = offset
        self.state = state
        self.key = key
        self.attempts = 0
        self.pop_ms = 0
        self.deadline_s = 0.0
        self.since_s = 0.0
        self.entry = -1
        self.renewals = -1
        self.client: PopClient | None = None
        self.is_delayed = False

    def turn(self, event: Event) -> None:
        """Raises KeyError for what cannot happen."""
        self.state = TRANSITIONS[self.state, event]


# ------------------------------------------------------------------------------
# Knows which messages of a queue wait for an earlier one: in groups in order, those of the same message group
# (`__SHARDINGKEY`).
#
# Messages without one count as one message group. A *run* has the unfinished messages of a message group, in the
# queue's order. Its first message alone can be popped, and those behind it together with it. So an acknowledgement
# behind one that is missing is provisional: if the first one comes again, all of them do.


SHARDING_KEY = "__SHARDINGKEY"


def message_group(record: bytes) -> str | None:
    return find(properties_in(record), SHARDING_KEY)


class Order:
    def __init__(self) -> None:
        self._runs: dict[str | None, deque[Delivery]] = {}

    def has(self, key: str | None) -> bool:
        """Whether something of the message group is not finished."""
        return key in self._runs

    def add(self, delivery: Delivery) -> None:
        run = self._runs.get(delivery.key)
        if run is None:
            self._runs[delivery.key] = deque((delivery,))
        else:
            run.append(delivery)

    def is_first(self, delivery: Delivery) -> bool:
        run = self._runs.get(delivery.key)
        return run is not None and run[0] is delivery

    def run(self, delivery: Delivery) -> list[Delivery]:
        """The run of a delivery, from its first message on."""
        return list(self._runs[delivery.key])

    def done(self, key: str | None) -> Iterator[Delivery]:
        """Takes out the acknowledged messages at the beginning of a run."""
        run = self._runs.get(key, ())
        while run and run[0].state is DeliveryState.ACKNOWLEDGED:
            yield run.popleft()
        if not run:
            self._runs.pop(key, None)

    def remove(self, delivery: Delivery) -> None:
        """Removes a message that can no longer be read."""
        run = self._runs[delivery.key]
        run.remove(delivery)
        if not run:
            del self._runs[delivery.key]

    def first(self, key: str | None) -> Delivery | None:
        run = self._runs.get(key)
        return run[0] if run else None


# ------------------------------------------------------------------------------
# When deliveries that nobody acknowledged come again: one heap and one timer for all of a broker.
#
# An entry is a batch, so a receive of 32 messages costs one. A delivery that gets another time gets another entry,
# and the former one loses it. Finished entries stay until they are half of the heap, so acknowledging costs nothing.


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


# ------------------------------------------------------------------------------
# The arguments and results of `Pops`. Both doors speak these values; neither a socket nor a frame is among them.


@dataclass(frozen=True, slots=True)
class PopClient:
    """A client that pops, by what its server has checked: the remoting connection, or the account and id of a gRPC client.

    `client_id` is for people only. Any client may claim any id, so nothing is found by that text alone."""

    client_id: str = field(compare=False)
    session: Session | None = None
    account_id: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PopRequest:
    """One receive. The door has checked names, permissions, and that topic and group exist.

    client: the client that pops; its messages in flight are known by it. count: 1 to 32; more is cut. 0: it is only told
    that there is something. invisible_ms: how long its messages are nobody else's. wait_ms: how long it waits for a
    message; 0: not at all. queue_id: the queue that is looked at first; None: none is preferred. is_strict: no other is
    looked at. auto_renew: the broker prolongs the time as long as it hears the client. subscription: None takes all.
    matches: the filter of an SQL92 subscription (`messages.filters`). attempt_id: in order, the messages of an earlier
    receive with this id that are in flight are given again. from_first: a group that is new to the topic begins at its
    first message, not with the last one. from_end: it begins behind the last one. in_order: the group gets the topic in
    order from now on, as it does where its settings say so. max_bytes: of all records of an answer together; the first one
    is always given. session: it pays for what is kept of the client.
    """

    group: str
    topic: str
    client: PopClient
    count: int
    invisible_ms: int
    wait_ms: int = 0
    queue_id: int | None = None
    is_strict: bool = False
    auto_renew: bool = False
    subscription: Subscription | None = None
    matches: Filter | None = None
    attempt_id: str | None = None
    from_first: bool = False
    from_end: bool = False
    in_order: bool = False
    max_bytes: int = MAX_POP_BYTES
    session: Session | None = None

    @property
    def wanted(self) -> Subscription:
        """The subscription as it is kept for reports."""
        found = self.subscription
        return Subscription(self.topic) if found is None else Subscription(self.topic, found.summary, kind=found.kind)

    @property
    def kept_bytes(self) -> int:
        """The memory of its texts and its filter while it waits."""
        subscription, matches = self.subscription, self.matches
        texts = len(self.group) + len(self.topic) + len(self.attempt_id or "")
        if subscription is not None:
            texts += subscription_bytes(subscription)
        return texts + (FILTER_WORD_BYTES * matches.words if matches is not None else 0)


class Delivered(NamedTuple):
    """A message in a client's hands.

    record: as it is stored (`protocol.message.decode_record`), the reconsume times of before included.
    topic, queue_id, offset: where it lies; the topic is the group's retry topic for what 4.9 members sent back.
    attempt: 1 the first time. handle: what to acknowledge it with, the same for as long as it is in these hands.
    pop_ms: when it was popped, by the broker's clock.
    """

    record: bytes
    topic: str
    queue_id: int
    offset: int
    attempt: int
    handle: str
    pop_ms: int


class Why(Enum):
    """How a receive ended."""

    FOUND = "found"
    NOTHING_NEW = "nothing came in time"
    TOO_MANY_WAIT = "too many receives wait on this broker"
    TOPIC_GONE = "the topic was deleted"
    GROUP_GONE = "the group was deleted"
    CLIENT_GONE = "the client has said good-bye"
    STOPPED = "the broker stops"
    PULLED = "members of the group pull this topic"
    FAILED = "the broker cannot read its messages now"


class PopResult(NamedTuple):
    """The answer of a receive. Times are of the broker's clock, ms. rest: messages of the topic that the group has not
    popped yet, about. fault: more about `why`, for people."""

    why: Why
    messages: tuple[Delivered, ...] = ()
    pop_ms: int = 0
    invisible_ms: int = 0
    rest: int = 0
    fault: str = ""


class AckStatus(Enum):
    """How an acknowledgement, a change or a forward ended."""

    DONE = "done, now or before"
    LATE = "done, though its time was over: nobody had been given the message again"
    TOO_LATE = "the visibility timeout has expired, and the message will be redelivered"
    UNREADABLE = "the handle is none"
    UNKNOWN = "the handle is of another group, topic or broker"
    EXPIRED = "the message was given to somebody again since"
    FINISHED = "the message is finished, and nobody has it any more"
    NOT_KEPT = "the disk refused it, and nothing has changed"

    @property
    def is_done(self) -> bool:
        return self in (AckStatus.DONE, AckStatus.LATE)


class Changed(NamedTuple):
    """The answer of a change. The old handle stays valid; `handle` is the same one. invisible_ms counts from pop_ms."""

    outcome: AckStatus
    handle: str
    pop_ms: int = 0
    invisible_ms: int = 0


class PopNumbers(NamedTuple):
    """The numbers of one queue of a group that pops. next: the first offset that nobody was given yet; committed: the
    lowest that is not finished. in_flight: in the hands of clients. waiting: to be given again, or behind others of their
    message group."""

    next: int
    committed: int
    in_flight: int
    waiting: int
    end: int

    @property
    def lag(self) -> int:
        """Messages that are not finished, popped or not."""
        return max(self.end - self.next, 0) + self.in_flight + self.waiting


# ------------------------------------------------------------------------------
# A receipt handle: Apache's text, which gRPC clients take as it is and remoting ones read (ExtraInfoUtil).
#
#     start offset, pop time ms, invisible ms, revive queue, mark, broker name, queue id, offset
#
# joined by blanks. A delivery is known by queue, offset and pop time. Nothing else of it changes while it lives, so a
# handle never has to be replaced. mark: 0 for the topic itself, 1 for the group's retry topic.


TOPIC_MARK: Final = 0
RETRY_MARK: Final = 1

_MAX_DIGITS: Final = 19  # a long's


class Handle(NamedTuple):
    queue_id: int
    offset: int
    pop_ms: int
    mark: int
    broker_name: str


def encode_handle(
    broker_name: str, queue_id: int, offset: int, pop_ms: int, invisible_ms: int, mark: int = TOPIC_MARK
) -> str:
    return f"{offset} {pop_ms} {invisible_ms} 0 {mark} {broker_name} {queue_id} {offset}"


def decode_handle(text: str) -> Handle | None:
    """None if the text is no handle. Fields that Apache's brokers append are ignored."""
    fields = text.split(" ", 9)
    if len(fields) < 8:
        return None
    numbers = fields[1], fields[4], fields[6], fields[7]
    # int() would take signs, blanks, underscores and digits of other scripts, too
    if not all(field.isascii() and field.isdigit() and len(field) <= _MAX_DIGITS for field in numbers):
        return None
    pop_ms, mark, queue_id, offset = map(int, numbers)
    return Handle(queue_id, offset, pop_ms, mark, fields[5])


# ------------------------------------------------------------------------------
# The records of deliveries on the disk, many in one frame of the journal. A restart replays them.
#
# All integers are big-endian. `number` stands for a group, topic and queue, which are told first.
#
#     D  number, size, identity of the topic \0 group \0 topic \0 queue id
#     P  number, next, pop ms, deadline ms, 0, -1, count, then offset and attempts of each: they are popped
#     A  number, count, then the offset of each: they are finished
#     X  number, offset, deadline ms, attempts, -1: it comes again then
#     C  number, size, text: not read. Earlier releases wrote client ids, and where -1 is, how often they had renewed a
#        delivery; they renew none of which these records say -1
#     N  number, next: what lies before was looked at, and not wanted
#     B  number, next, floor ms: nothing is unfinished, and no pop time is below the floor
#     Y  number: members pull now, so the offset that was saved counts if it is higher
#     F  number: all of it is forgotten
#
# A deadline of 0 is that of a message that nobody has: it waits, perhaps behind another one. Times are of the wall
# clock: a restart has another monotonic one. A record may be replayed twice, in the order of all, and the last word
# on an offset counts.


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


def nothing() -> bytes:
    """A record that says nothing, to any release."""
    return _text(b"C", 0, "")


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
