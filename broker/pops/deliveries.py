"""The deliveries of popped messages, from the pop to the acknowledgement: states and order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import structlog

from ...protocol.message import Record, offset_in, properties_in, split_records
from ...protocol.properties import SHARDING_KEY, TAGS, find
from ..config import MAX_POP_MESSAGES, POP_READS, SCAN_ENTRIES, SCAN_WORDS, Limits
from ..groups.group import ConsumerGroup, FinishedAhead
from ..groups.offsets import Offsets
from ..messages.lite import LiteTopic
from ..store.index import ConsumeQueue
from ..store.store import Store
from .requests import PopClient, PopRequest

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# The states of a delivery.
#
#     (never popped)  --pop--> IN_FLIGHT --acknowledged--> ACKNOWLEDGED --on the disk--> FINISHED
#                                 | time over, nack, not taken      | the disk refused it
#                                 v                                 v
#                              VISIBLE --pop--> IN_FLIGHT           VISIBLE
#
# `TRANSITIONS` has all of them, and `QueueDeliveries` makes them. In ordered groups, a message that is read while
# an earlier one of its message group is unfinished is BEHIND, unless one receive takes both. An acknowledged message there
# stays ACKNOWLEDGED until all earlier ones of its message group are acknowledged, and may be redelivered together with these.


class DeliveryState(Enum):
    BEHIND = "behind another message of its message group"
    VISIBLE = "to be redelivered"
    IN_FLIGHT = "delivered to a client"
    ACKNOWLEDGED = "not yet on the disk, or behind an unfinished message of its message group"
    FINISHED = "acknowledged, dead-lettered, sent back to the retry topic, or dropped (DeliveryEvent.FORGET)"

    __hash__ = object.__hash__  # that of Enum is a Python function, and takes longer than a transition


class DeliveryEvent(Enum):
    POP = "a client gets it"
    RELEASE = "its invisible time is over, or its client returned it, is gone or did not receive it"
    CHANGE = "its client sets an invisible time above 0"
    ACKNOWLEDGE = "its client acknowledges it, or the broker has copied it to the dead-letter or the retry topic"
    REFUSE = "writing the acknowledgement to the journal failed"
    FINISH = "the acknowledgement is written to the journal"
    FORGET = "the group's offset was reset, the queue left the pool, or the message cannot be read"

    __hash__ = object.__hash__


_S, _E = DeliveryState, DeliveryEvent
TRANSITIONS: Final = {
    (_S.BEHIND, _E.POP): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.POP): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.POP): _S.IN_FLIGHT,  # in ordered groups, popped again together with an earlier message
    (_S.ACKNOWLEDGED, _E.POP): _S.IN_FLIGHT,  # in ordered groups, popped again together with an earlier message
    (_S.IN_FLIGHT, _E.RELEASE): _S.VISIBLE,
    (_S.BEHIND, _E.RELEASE): _S.VISIBLE,  # the group has become unordered
    (_S.IN_FLIGHT, _E.CHANGE): _S.IN_FLIGHT,
    (_S.VISIBLE, _E.CHANGE): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.VISIBLE, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,
    (_S.BEHIND, _E.ACKNOWLEDGE): _S.ACKNOWLEDGED,  # the broker has sent it back to the retry topic
    (_S.ACKNOWLEDGED, _E.REFUSE): _S.VISIBLE,
    (_S.ACKNOWLEDGED, _E.FINISH): _S.FINISHED,
    **{(state, _E.FORGET): _S.FINISHED for state in DeliveryState},
}


class Delivery:
    """A message that a pool has read: popped, or BEHIND another one. Times in seconds are of the monotonic clock.

    Attributes:
        attempts: the number of its deliveries that count as attempts.
        entry: the number of its latest entry in the heap of deadlines; -1 before the first.
        renewals: how often the broker has extended its deadline; -1 before `Pools.extend` and after `stop_extending`.
        is_delayed: True if its client has changed the invisible time to get it again at the deadline. A Rocketlet client
            that still handles the message declares that in its request (`renews`), and does not delay it.
    """

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


# ------------------------------------------------------------------------------
# The unfinished messages of a queue by message group (`__SHARDINGKEY`), for groups in order. Messages without a message
# group count as one. A *run* has the unfinished messages of a message group that were read, in the queue's order. Only its
# first message can be popped, and those after it together with it. So an acknowledgement after an unfinished message is
# provisional: a receive to which the first message is redelivered gets the others again, too, up to its limits.


def message_group(record: bytes) -> str | None:
    return find(properties_in(record), SHARDING_KEY)


class Order:
    def __init__(self) -> None:
        self._runs: dict[str | None, deque[Delivery]] = {}

    def has(self, key: str | None) -> bool:
        """Return True if a message of the message group is unfinished."""
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
        """Return the run of a delivery, which starts with its first message."""
        return list(self._runs[delivery.key])

    def done(self, key: str | None) -> Iterator[Delivery]:
        """Remove and yield the acknowledged messages at the start of a run."""
        run = self._runs.get(key, ())
        while run and run[0].state is DeliveryState.ACKNOWLEDGED:
            yield run.popleft()
        if not run:
            self._runs.pop(key, None)

    def remove(self, delivery: Delivery) -> None:
        """Remove a message that can no longer be read."""
        run = self._runs[delivery.key]
        run.remove(delivery)
        if not run:
            del self._runs[delivery.key]

    def first(self, key: str | None) -> Delivery | None:
        run = self._runs.get(key)
        return run[0] if run else None


# ------------------------------------------------------------------------------
# The deliveries of one queue in a pool. The queue is one of the topic, or a lite topic of it.
#
# Offsets below `next` that are not in `unfinished` are finished or were skipped, and nothing is kept of them. A delivery
# keeps the position of its first pop: `unfinished` is in the order of offsets, and its first entry is the offset to commit.
#
# The messages of a lite topic are delivered one after the other: new messages when all earlier ones are finished, and a
# redelivered message before the visible messages after it. Acknowledged messages are not redelivered, unless the offset is
# reset.


class PopPart(Enum):
    """Which messages of a queue a receive takes."""

    ALL = "those to redeliver, then new ones"
    NEW = "new ones"
    RETRIED = "those to redeliver"


class ReadDelivery(NamedTuple):
    """A delivery that a receive may get, with its record."""

    delivery: Delivery
    record: bytes


class PopNumbers(NamedTuple):
    """The figures of one queue of a group that pops.

    Attributes:
        next: the first offset that was not read yet.
        committed: the lowest offset that is not finished.
        in_flight: how many messages are in flight, including those that their clients have delayed.
        waiting: how many messages are to be redelivered, or are BEHIND others of their message group.
    """

    next: int
    committed: int
    in_flight: int
    waiting: int
    end: int

    @property
    def lag(self) -> int:
        """Return the number of messages that are not acknowledged, popped or not."""
        return max(self.end - self.next, 0) + self.in_flight + self.waiting


class JournalKey(NamedTuple):
    identity: str
    group: str
    topic: str
    queue_id: int


class StoredDelivery(NamedTuple):
    attempts: int
    pop_ms: int
    deadline_ms: int


@dataclass(slots=True)
class KeptQueue:
    key: JournalKey
    next: int = 0
    floor_ms: int = 0
    is_yielded: bool = False
    unfinished: dict[int, StoredDelivery] = field(default_factory=dict)
    is_adopted: bool = False  # True if this run has the queue

    @property
    def has_left(self) -> bool:
        """True if the queue left its pool without unfinished messages, and only its offset counts."""
        return self.is_yielded and not self.unfinished

    @property
    def is_ahead(self) -> bool:
        """True if the queue left its pool with finished messages after the group's offset (`FinishedAhead`)."""
        return self.is_yielded and bool(self.unfinished)

    @property
    def ahead(self) -> FinishedAhead:
        return FinishedAhead(self.next, {offset: item.attempts for offset, item in self.unfinished.items()})

    def committed(self, begin: int, end: int) -> int:
        """Return the lowest offset that is not finished, in a queue from `begin` to `end`."""
        return min((offset for offset in self.unfinished if begin <= offset < end), default=min(self.next, end))


class QueueMessages(Protocol):
    """The messages of one queue, and the group's progress there.

    Attributes:
        queue: the queue of the topic, or the lite topic.
        lite_topic: the name of the lite topic; empty for a queue of the topic.
        offset: the group's committed offset; None without one.
    """

    lite_topic: str

    @property
    def queue(self) -> ConsumeQueue | LiteTopic: ...

    @property
    def offset(self) -> int | None: ...

    def commit(self, offset: int) -> None:
        """Commit the group's offset."""

    def record(self, offset: int) -> bytes | None:
        """Return the record at an offset; None if it is damaged, deleted by retention, or not stored yet."""

    def message(self, offset: int) -> Record:
        """Return a message. Raises Damaged if it cannot be read."""

    def read(self, position: int, count: int, request: PopRequest, room: int) -> tuple[list[ReadDelivery], int, int]:
        """Return the messages from a position on that the filter of a receive matches, as new deliveries, their size, and the
        position after the last one that was read. The first record may be larger than `room`, the maximum number of bytes."""


class TopicMessages:
    """The messages of a queue of a topic, and the progress of a group there."""

    lite_topic = ""

    def __init__(self, group: ConsumerGroup, queue: ConsumeQueue, store: Store, offsets: Offsets) -> None:
        self.queue = queue
        self._group, self._store, self._offsets = group, store, offsets

    @property
    def offset(self) -> int | None:
        return self._group.offset(self.queue.topic, self.queue.queue_id)

    def commit(self, offset: int) -> None:
        self._offsets.commit(self._group, self.queue.topic, self.queue.queue_id, offset)

    def record(self, offset: int) -> bytes | None:
        if not self.queue.begin <= offset < self.queue.next:
            return None
        fetched = self._store.fetch(self.queue, offset, 1)
        return b"".join(fetched.pieces) if fetched.messages else None

    def message(self, offset: int) -> Record:
        return self._store.message(self.queue, offset)

    def read(self, position: int, count: int, request: PopRequest, room: int) -> tuple[list[ReadDelivery], int, int]:
        subscription, matches = request.subscription, request.matches
        looks = SCAN_ENTRIES if matches is None else SCAN_WORDS // matches.words
        fetched = self._store.fetch(self.queue, position, count, subscription, matches, room, looks)
        records = split_records(b"".join(fetched.pieces))
        if matches is None and subscription is not None and not subscription.takes_all:
            # The index has the hashes of tags only, and two tags may share one.
            records = [record for record in records if find(properties_in(record), TAGS) in subscription.tags]
        found = [ReadDelivery(Delivery(offset_in(record)), record) for record in records]
        return found, sum(map(len, records)), fetched.next_offset


class DeliveriesPool(Protocol):
    """The pool of deliveries, as far as these change it (`PoolOf`)."""

    of: ConsumerGroup
    group: str
    counts: dict[DeliveryState, int]
    is_partial: bool

    def stop_extending(self, delivery: Delivery) -> None: ...


PoolT = TypeVar("PoolT", bound=DeliveriesPool)


class DeliveriesOf(Generic[PoolT]):
    """The deliveries of one queue in one group, from the pop to the acknowledgement. Makes all their transitions.

    Args:
        number: stands for this queue and group in the journal.
        begin: the offset from which the group pops.

    Attributes:
        reported: the offset that these deliveries committed last. Any other committed offset was set by a reset.
        limit: how many deliveries may be unfinished before no new message is popped.
        counts: how many unfinished deliveries there are of each state.
        is_passed: True if `next` has moved since the journal last recorded it.
        gives_new: False while the queue leaves the pool, so that no further message is read.
        gives_again: False once leaving takes long, so that no message is redelivered either.
        is_ended: True once the queue has left the pool, or the pool has ended.
        fresh_behind: deliveries that were put BEHIND others, and that the journal does not have yet.
        is_lite: True for a lite topic, whose messages are delivered one after the other.
    """

    def __init__(self, number: int, pool: PoolT, messages: QueueMessages, begin: int, limits: Limits) -> None:
        self._limits = limits
        self.number = number
        self.pool = pool
        self.group = pool.group
        self.messages = messages
        self.queue = messages.queue
        self.is_lite = bool(messages.lite_topic)
        self.next = begin
        self.floor_ms = 0
        self.reported = begin
        self.limit = limits.max_unfinished
        self.unfinished: OrderedDict[int, Delivery] = OrderedDict()
        self.counts = dict.fromkeys(DeliveryState, 0)
        self.is_passed = False
        self.gives_new = True
        self.gives_again = True
        self.is_ended = False
        self.is_in_order = False
        self.fresh_behind: list[Delivery] = []
        self._order = Order()  # used only in ordered groups (`is_in_order`)
        # a heap of offsets of visible messages; entries of messages that are not visible any more are removed later; not used
        # in a lite topic
        self._visible: list[int] = []

    @property
    def committed(self) -> int:
        """The lowest offset that is not finished."""
        return next(iter(self.unfinished), self.next)

    def before_finished(self) -> list[Delivery]:
        """Return the unfinished deliveries before a message that is finished or was skipped. A single offset cannot
        express them."""
        end = self.next
        for offset in reversed(self.unfinished):
            if offset != end - 1:
                break
            end = offset
        return [delivery for delivery in self.unfinished.values() if delivery.offset < end]

    def finished_ahead(self) -> FinishedAhead | None:
        """Return the messages after the lowest unfinished one that are acknowledged; None without any."""
        done = DeliveryState.ACKNOWLEDGED
        left = {item.offset: item.attempts for item in self.unfinished.values() if item.state is not done}
        first = next(iter(left), self.next)
        return FinishedAhead(self.next, left) if self.next - first > len(left) else None

    @property
    def is_ready(self) -> bool:
        """True if a receive may find a message here."""
        if not self.is_lite:
            return self.has_retried or self.has_new
        first = next(iter(self.unfinished.values()), None)
        if first is not None:
            return first.state is DeliveryState.VISIBLE
        return max(self.next, self.queue.begin) < self.queue.next

    @property
    def has_retried(self) -> bool:
        """True if a receive may find a message to redeliver."""
        if self._visible:
            self._skip_stale()
        return self.gives_again and bool(self._visible)

    @property
    def has_new(self) -> bool:
        """True if a receive may find a message that was not read yet."""
        return self.gives_new and self.next < self.queue.next and len(self.unfinished) < self.limit

    def _skip_stale(self) -> None:
        """Remove offsets from the top of the heap that are not visible any more."""
        visible = self._visible
        while visible:
            delivery = self.unfinished.get(visible[0])
            if delivery is not None and self._is_free(delivery):
                return
            heappop(visible)

    def _is_free(self, delivery: Delivery) -> bool:
        if not self.is_in_order:
            return delivery.state is DeliveryState.VISIBLE
        return delivery.state in (DeliveryState.VISIBLE, DeliveryState.BEHIND) and self._order.is_first(delivery)

    # Popping

    def select(
        self, request: PopRequest, wanted: int, room: int, allowed: int, part: PopPart = PopPart.ALL
    ) -> list[ReadDelivery]:
        """Return messages for a receive. They count as popped once `deliver` is called.

        Args:
            wanted: the maximum number of messages.
            room: the maximum number of bytes. If it is all of `request.max_bytes`, the first message may be larger.
            allowed: how many of them may be popped for the first time.
        """
        selected: list[ReadDelivery] = []
        if not self.gives_again:
            return selected
        if self.is_lite and self.unfinished:
            room = self._select_firsts(selected, request, wanted, room)
            if selected or self.unfinished:  # what is left of them is taken next
                return selected
        whole: set[str | None] = set()  # message groups of which everything unfinished is selected
        try:
            if self._visible and part is not PopPart.NEW:
                room = self._select_visible(selected, request, wanted, room, whole)
            if room > 0 and self.gives_new and part is not PopPart.RETRIED:
                self._select_new(selected, request, wanted, room, allowed, whole)
        except BaseException:
            for delivery, _ in selected:
                if delivery.offset in self.unfinished:
                    heappush(self._visible, delivery.offset)
            raise
        return selected

    def _select_firsts(self, selected: list[ReadDelivery], request: PopRequest, wanted: int, room: int) -> int:
        """Take messages to redeliver of a lite topic, up to the first one that is not visible. Returns how many bytes are
        left."""
        for delivery in list(islice(self.unfinished.values(), MAX_POP_MESSAGES)):
            if delivery.state is not DeliveryState.VISIBLE or len(selected) == wanted:
                return room
            record = self.messages.record(delivery.offset)
            if record is None:
                self._lose(delivery)
            elif len(record) > room and (selected or room < request.max_bytes):
                return room
            else:
                selected.append(ReadDelivery(delivery, record))
                room -= len(record)
        self.pool.is_partial = self.pool.is_partial or (not selected and bool(self.unfinished))
        return room

    def _select_visible(
        self, selected: list[ReadDelivery], request: PopRequest, wanted: int, room: int, whole: set[str | None]
    ) -> int:
        """Take messages to redeliver. Returns how many bytes are left; 0 if no new message may be taken after them."""
        while len(selected) < wanted:
            self._skip_stale()
            if not self._visible:
                break
            first = self.unfinished[self._visible[0]]
            if first.key in whole and self.is_in_order:  # taken above, and visible because an earlier one was lost
                heappop(self._visible)
                continue
            for delivery in self._order.run(first) if self.is_in_order else (first,):
                record = self.messages.record(delivery.offset) if len(selected) < wanted else b""
                if record is None:
                    self._lose(delivery)
                    continue
                if not record or (len(record) > room and (selected or room < request.max_bytes)):
                    self._pop_visible(first, selected)
                    return 0  # newer messages must not overtake this one
                selected.append(ReadDelivery(delivery, record))
                room -= len(record)
            self._pop_visible(first, selected)
            whole.add(first.key)
        return max(room, 0)

    def _pop_visible(self, first: Delivery, selected: list[ReadDelivery]) -> None:
        if any(item.delivery is first for item in selected):
            while self._visible and self._visible[0] == first.offset:
                heappop(self._visible)

    def _lose(self, delivery: Delivery) -> None:
        queue = self.queue
        log.error(
            "popped_message_gone",
            group=self.group, topic=queue.topic, queue=queue.queue_id, offset=delivery.offset, attempts=delivery.attempts,
        )  # fmt: skip
        self._transition(delivery, DeliveryEvent.FORGET)
        if self.is_in_order:
            self._order.remove(delivery)
            self._free_first(delivery.key)

    def _select_new(
        self,
        selected: list[ReadDelivery],
        request: PopRequest,
        wanted: int,
        room: int,
        allowed: int,
        whole: set[str | None],
    ) -> None:
        position = max(self.next, self.queue.begin)
        allowed = min(allowed, self.limit - len(self.unfinished))
        looked: list[Delivery] = []
        for _ in range(POP_READS if request.matches is None and not self.is_lite else 1):
            count = min(wanted - len(selected), allowed)
            if count <= 0 or room <= 0 or position >= self.queue.next:
                break
            found, size, end = self.messages.read(position, count, request, room)
            if size > room and (selected or room < request.max_bytes):
                break
            if self.is_in_order:
                for item in found:
                    self._select_in_order(item, looked, selected, whole)
            else:
                selected += found
            room -= size
            allowed -= len(found)
            position = end
        if looked:
            self._keep_in_order(looked)
        if position > self.next:
            self.next = position
            self.is_passed = True

    def _select_in_order(
        self, item: ReadDelivery, looked: list[Delivery], selected: list[ReadDelivery], whole: set[str | None]
    ) -> None:
        """Take a message, or leave it BEHIND an unfinished one of its message group."""
        delivery, key = item.delivery, message_group(item.record)
        delivery.key = key
        if key not in whole and (self._order.has(key) or any(other.key == key for other in looked)):
            delivery.state = DeliveryState.BEHIND
            self.fresh_behind.append(delivery)
        else:
            whole.add(key)
            selected.append(item)
        looked.append(delivery)

    def _keep_in_order(self, looked: Iterable[Delivery]) -> None:
        """Keep deliveries of a group in order at their positions, including those that cannot be popped now."""
        for delivery in looked:
            self._add(delivery)
            self._order.add(delivery)

    def deliver(
        self, selected: Sequence[ReadDelivery], request: PopRequest, now_s: float, now_ms: int
    ) -> list[Delivery]:
        """Put selected messages in flight, and return their deliveries. All get one pop time, which none of them had
        before."""
        unfinished, fresh = self.unfinished, 0
        pop_ms = max(now_ms, self.floor_ms)
        for delivery, _ in selected:
            if delivery.pop_ms >= pop_ms:
                pop_ms = delivery.pop_ms + 1
            if delivery.offset not in unfinished:  # a redelivered one keeps its position
                unfinished[delivery.offset] = delivery
                fresh += 1
        self._count(DeliveryState.VISIBLE, fresh)
        client, deadline_s = request.client, now_s + request.invisible_ms / 1000
        delivered: list[Delivery] = []
        for delivery, _ in selected:
            if delivery.state is DeliveryState.ACKNOWLEDGED:  # in order: popped again with an unfinished one before it
                delivery.attempts = max(delivery.attempts, 1)
            else:
                delivery.attempts += 1
                self.pool.of.redelivered += delivery.attempts > 1
            self._transition(delivery, DeliveryEvent.POP)
            delivery.pop_ms = pop_ms
            delivery.client, delivery.deadline_s, delivery.since_s = client, deadline_s, now_s
            delivery.is_delayed = False
            delivered.append(delivery)
        return delivered

    # Outcomes

    def _transition(self, delivery: Delivery, event: DeliveryEvent) -> None:
        """Change the state of an unfinished delivery, whose visibility timeout the broker then extends no longer. Raises
        KeyError for an event that cannot happen in its state."""
        if delivery.renewals >= 0:
            self.pool.stop_extending(delivery)
        counts, of_pool, before = self.counts, self.pool.counts, delivery.state
        state = delivery.state = TRANSITIONS[before, event]
        counts[before] -= 1
        of_pool[before] -= 1
        if state is DeliveryState.FINISHED:
            del self.unfinished[delivery.offset]
            self.pool.of.unfinished -= 1
        else:
            counts[state] += 1
            of_pool[state] += 1

    def _add(self, delivery: Delivery) -> None:
        """Keep a delivery, after those of lower offsets."""
        self.unfinished[delivery.offset] = delivery
        self._count(delivery.state, 1)

    def _count(self, state: DeliveryState, more: int) -> None:
        """Count deliveries that are unfinished now."""
        self.counts[state] += more
        self.pool.counts[state] += more
        self.pool.of.unfinished += more

    def acknowledge(self, delivery: Delivery) -> bool:
        """Acknowledge a delivery. Returns False if that was done before, so that nothing needs to be written."""
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            return False
        self._transition(delivery, DeliveryEvent.ACKNOWLEDGE)
        return True

    def uncount(self, delivery: Delivery) -> None:
        """Let a delivery not count as an attempt."""
        delivery.attempts = max(delivery.attempts - 1, 0)

    def change(self, delivery: Delivery, *, is_delayed: bool) -> None:
        """Let a delivery be in flight until a deadline that its client sets."""
        self._transition(delivery, DeliveryEvent.CHANGE)
        delivery.is_delayed = is_delayed

    def popped_with(self, delivery: Delivery) -> list[Delivery]:
        """Return the other deliveries in flight that were popped together with one."""
        return [
            item
            for item in self.unfinished.values()
            if item.state is DeliveryState.IN_FLIGHT and item.pop_ms == delivery.pop_ms and item is not delivery
        ]

    def release(self, delivery: Delivery) -> None:
        """Make a message in flight visible again."""
        self._transition(delivery, DeliveryEvent.RELEASE)
        self._free(delivery)

    def refuse(self, delivery: Delivery) -> None:
        """Make a message visible again whose acknowledgement could not be written, unless it was popped again since."""
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            self._transition(delivery, DeliveryEvent.REFUSE)
            self._free(delivery)

    def _free(self, delivery: Delivery) -> None:
        if not self.is_lite and self._is_free(delivery):
            heappush(self._visible, delivery.offset)

    def _free_first(self, key: str | None) -> None:
        first = self._order.first(key)
        if first is not None:
            self._free(first)

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """Finish deliveries whose acknowledgement is written, except those that were popped again since. In an ordered
        group, a delivery stays until all earlier ones of its message group are acknowledged."""
        if not self.is_in_order:
            for delivery in deliveries:
                if delivery.state is DeliveryState.ACKNOWLEDGED:
                    self._transition(delivery, DeliveryEvent.FINISH)
            return
        for key in dict.fromkeys(delivery.key for delivery in deliveries):
            for delivery in self._order.done(key):
                self._transition(delivery, DeliveryEvent.FINISH)
            self._free_first(key)

    def restart(self, offset: int, now_ms: int) -> None:
        """Continue from another offset. Receipt handles from before no longer acknowledge anything."""
        self.clear()
        self.next = self.reported = offset
        self.floor_ms = max(self.floor_ms, now_ms + 1)
        self.is_passed = False

    def clear(self) -> None:
        """End all deliveries without finishing their messages."""
        for delivery in list(self.unfinished.values()):
            self.floor_ms = max(self.floor_ms, delivery.pop_ms + 1)
            self._transition(delivery, DeliveryEvent.FORGET)
        self._visible.clear()
        self.fresh_behind.clear()
        self._order = Order()

    def end(self) -> None:
        """End the deliveries of a queue that leaves its pool. Acknowledgements then have no effect."""
        self.clear()
        self.is_ended = True

    # Order

    def set_order(self, is_in_order: bool) -> None:
        """Start or stop keeping messages in order. Raises the errors of reading; the next receive then retries."""
        if is_in_order:
            self._order = self._order_of_all()
        self.is_in_order = is_in_order
        self.limit = self._limits.max_unfinished_in_order if is_in_order else self._limits.max_unfinished
        for delivery in [] if is_in_order else list(self.unfinished.values()):
            if delivery.state is DeliveryState.BEHIND:
                self._transition(delivery, DeliveryEvent.RELEASE)
            elif delivery.state is DeliveryState.ACKNOWLEDGED:
                self._transition(delivery, DeliveryEvent.FINISH)
        self._visible = [delivery.offset for delivery in self.unfinished.values() if self._is_free(delivery)]

    def _order_of_all(self) -> Order:
        order = Order()
        for delivery in self.unfinished.values():
            record = self.messages.record(delivery.offset)
            delivery.key = message_group(record) if record else None
            order.add(delivery)
        return order

    # Earlier deliveries

    def resume(self, ahead: FinishedAhead) -> None:
        """Continue with what clients have finished before members pulled the queue."""
        begin, self.next = self.next, max(ahead.end, self.next)
        for offset in sorted(ahead.unfinished):
            if offset >= begin:
                delivery = Delivery(offset)
                delivery.attempts = ahead.unfinished[offset]
                self._add(delivery)
                self.fresh_behind.append(delivery)
                self._free(delivery)
        self.is_passed = True

    def adopt(self, kept: KeptQueue, to_monotonic_s: Callable[[int], float]) -> None:
        """Continue the deliveries of the last run. Drop deliveries before the start of the queue, whose messages
        retention has deleted, and at or after its end, whose messages were lost."""
        end = self.queue.next
        self.next, self.floor_ms = min(kept.next, end), kept.floor_ms
        for offset in sorted(kept.unfinished):
            if not self.queue.begin <= offset < end:
                continue
            found = kept.unfinished[offset]
            delivery = Delivery(offset, DeliveryState.IN_FLIGHT if found.deadline_ms else DeliveryState.VISIBLE)
            delivery.attempts, delivery.pop_ms = found.attempts, found.pop_ms
            delivery.deadline_s = to_monotonic_s(found.deadline_ms)
            delivery.since_s = to_monotonic_s(found.pop_ms)
            self._add(delivery)
            self._free(delivery)

    # Reports

    @property
    def label(self) -> str:
        """The queue's id or the lite topic's name, as reports have it."""
        return self.messages.lite_topic or str(self.queue.queue_id)

    @property
    def lag_offset(self) -> int:
        """An offset as far before the end of the queue as the group's lag."""
        return self.next - len(self.unfinished)

    def unfinished_before(self, offset: int) -> int:
        """Return how many messages before an offset are not finished, including those that were never popped."""
        popped = sum(1 for _ in takewhile(offset.__gt__, self.unfinished))
        return popped + max(offset - self.next, 0)

    @property
    def in_flight(self) -> int:
        """How many deliveries are in flight, including those that a client has delayed."""
        return self.counts[DeliveryState.IN_FLIGHT]

    def numbers(self) -> PopNumbers:
        waiting = self.counts[DeliveryState.VISIBLE] + self.counts[DeliveryState.BEHIND]
        return PopNumbers(self.next, self.committed, self.in_flight, waiting, self.queue.next)
