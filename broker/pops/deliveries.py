"""The delivery of a popped message: states and order, the requests and results of the protocol servers, receipt
handles, and records on the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Final, NamedTuple

from ...protocol.message import properties_in
from ...protocol.names import Subscription
from ...protocol.properties import find
from ..config import FILTER_WORD_BYTES, MAX_POP_BYTES
from ..groups.group import FinishedAhead
from ..sessions import Session, subscription_bytes

if TYPE_CHECKING:
    from ..messages.filters import Filter


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


SHARDING_KEY = "__SHARDINGKEY"


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
# The arguments and results of `Pops`, for both protocol servers.


@dataclass(frozen=True, slots=True)
class PopClient:
    """The identity of a client that pops, as its protocol server has checked it: the remoting connection, or the account and
    id of a gRPC client. `client_id` is not compared, because any remoting client may claim any id.

    Attributes:
        account: the access key of a remoting client's account; empty without accounts.
    """

    client_id: str = field(compare=False)
    session: Session | None = None
    account_id: tuple[str, str] | None = None
    account: str = field(default="", compare=False)

    @property
    def owner(self) -> str:
        """The access key of the client's account, by either protocol server; empty without accounts."""
        return self.account_id[0] if self.account_id is not None else self.account

    def is_reconnect_of(self, earlier: PopClient) -> bool:
        """Return True if both are remoting clients of one account with one id, and the connection of `earlier` is older. That
        connection may stay open for long after its client has lost it."""
        if self.session is None or earlier.session is None:
            return False
        is_same = (self.account, self.client_id) == (earlier.account, earlier.client_id)
        return is_same and self.session.number > earlier.session.number


class PopAttempt(NamedTuple):
    """A receive that its client may repeat with the same attempt id."""

    client: PopClient
    group: str
    topic: str
    attempt_id: str | None


@dataclass(frozen=True, slots=True)
class PopRequest:
    """The parameters of a receive. A protocol server passes it to `Pops.receive` after it has checked names and permissions,
    and that topic and group exist.

    Attributes:
        client: the client that pops.
        count: the maximum number of messages, 1 to 32. 0 only reports whether there is a message.
        invisible_ms: the visibility timeout of the messages.
        wait_ms: how long the receive may wait for a message.
        queue_id: the queue to try first; None if none is preferred. Without `is_strict` it is ignored if the topic has
            priorities. Lite groups ignore it.
        is_strict: True if no queue but `queue_id` may be tried.
        auto_renew: True if the broker extends the visibility timeout while the client has contact, up to MAX_RENEWED_S.
        subscription: the filter; None takes all messages.
        matches: the parsed filter of an SQL92 subscription, which `Pops.receive` sets.
        attempt_id: in ordered groups and lite groups, a receive that repeats the id of an earlier one, if this is one of the
            last `max_attempt_ids`, gets the messages of the earlier one that are still in flight.
        from_first: True if a group that is new to the topic starts at the first stored message of each queue, even if
            retention has deleted earlier ones.
        from_end: True if a group that is new to the topic starts after the last message of each queue.
        in_order: True if the group gets the topic in order until its pool ends, as if its settings said so. Lite groups
            ignore it.
        max_bytes: the maximum size of all records of a result together. The first record may be larger.
        session: the session that is charged for the client and for the receive while it waits; None charges nobody.
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
        """Return the subscription as it is kept for reports."""
        found = self.subscription
        return Subscription(self.topic) if found is None else Subscription(self.topic, found.summary, kind=found.kind)

    @property
    def attempt(self) -> PopAttempt:
        """Return the key of the receive and its repetitions."""
        return PopAttempt(self.client, self.group, self.topic, self.attempt_id)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that are charged for its texts and its filter while it waits."""
        subscription, matches = self.subscription, self.matches
        texts = len(self.group) + len(self.topic) + len(self.attempt_id or "")
        if subscription is not None:
            texts += subscription_bytes(subscription)
        return texts + (FILTER_WORD_BYTES * matches.words if matches is not None else 0)


class Delivered(NamedTuple):
    """A message for a client.

    Attributes:
        record: the record as it is stored (`protocol.message.decode_record`); its reconsume times do not count pops.
        topic: the topic of its queue: the group's retry topic for a message that a member which pulls has sent back,
            and `names.lite_queue` for a message of a lite topic.
        attempt: the number of this delivery, from 1 on. Attempts of members that pulled the message count.
        handle: the receipt handle, which stays the same until the message is redelivered; empty for a peeked message.
        pop_ms: the pop time in the handle, by the broker's clock; 0 for a peeked message. It may be some ms later than the
            pop, so that no earlier delivery of the message has it.
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
    TOO_MANY_WAIT = "too many receives wait on this broker, of all clients or of this address"
    TOPIC_GONE = "the topic was deleted"
    GROUP_GONE = "the group was deleted"
    CLIENT_GONE = "the client has terminated or lost contact"
    STOPPED = "the broker stops"
    PULLED = "members of the group pull this topic"
    FAILED = "the broker cannot read its messages now"
    TOO_MANY_UNFINISHED = "the client has as many unacknowledged messages of lite topics as it may"


class PopResult(NamedTuple):
    """The result of a receive. Times are of the broker's clock.

    Attributes:
        rest: how many messages the group has not read yet of the queues that it has popped; 0 for a lite group, and if the
            receive repeats an attempt id.
        fault: details of `why`, for people.
    """

    why: Why
    messages: tuple[Delivered, ...] = ()
    pop_ms: int = 0
    invisible_ms: int = 0
    rest: int = 0
    fault: str = ""


class AckStatus(Enum):
    """How an acknowledgement, a change of the invisible time, or a rejection ended."""

    DONE = "done, now or before"
    LATE = "done after the visibility timeout had expired, and before the message was redelivered"
    TOO_LATE = "the visibility timeout has expired, and the message will be redelivered"
    UNREADABLE = "the text is no receipt handle"
    UNKNOWN = "the group has no delivery of this handle on this broker"
    EXPIRED = "the message was redelivered since"
    FINISHED = "the message is finished, and not in flight any more"
    NOT_KEPT = "writing it to the disk failed"

    @property
    def is_done(self) -> bool:
        return self in (AckStatus.DONE, AckStatus.LATE)


class PopPart(Enum):
    """Which messages of a queue a receive takes."""

    ALL = "those to redeliver, then new ones"
    NEW = "new ones"
    RETRIED = "those to redeliver"


class TakenDelivery(NamedTuple):
    """A delivery that a receive may get, with its record."""

    delivery: Delivery
    record: bytes


class Changed(NamedTuple):
    """The result of a change of the invisible time. `handle` is that of the request. `invisible_ms` counts from `pop_ms`."""

    outcome: AckStatus
    handle: str
    pop_ms: int = 0
    invisible_ms: int = 0


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


# ------------------------------------------------------------------------------
# A receipt handle: a text in Apache's format, which gRPC clients return unchanged and remoting clients parse
# (ExtraInfoUtil).
#
#     start offset, pop time ms, invisible ms, revive queue, mark, broker name, queue id, offset, lite topic
#
# joined by spaces. Queue, offset and pop time identify a delivery. A change of its invisible time leaves them as they are,
# so the handle stays valid. mark: 0 for the topic itself; this broker makes no handle with 1, which is Apache's mark of the
# group's retry topic. For a message of a lite topic the revive queue is 999, as Apache's, and the lite topic's name comes
# last, where Apache's brokers have an offset that clients do not read.


TOPIC_MARK: Final = 0
_LITE_REVIVE: Final = "999"

_MAX_DIGITS: Final = 19  # decimal digits of the largest signed 64-bit integer


class Handle(NamedTuple):
    queue_id: int
    offset: int
    pop_ms: int
    mark: int
    broker_name: str
    lite_topic: str = ""


def encode_handle(
    broker_name: str,
    queue_id: int,
    offset: int,
    pop_ms: int,
    invisible_ms: int,
    mark: int = TOPIC_MARK,
    lite_topic: str = "",
) -> str:
    revive = _LITE_REVIVE if lite_topic else "0"
    handle = f"{offset} {pop_ms} {invisible_ms} {revive} {mark} {broker_name} {queue_id} {offset}"
    return f"{handle} {lite_topic}" if lite_topic else handle


def decode_handle(text: str) -> Handle | None:
    """Return the handle, or None if the text is not one. Fields that Apache's brokers append are ignored."""
    fields = text.split(" ", 9)
    if len(fields) < 8:
        return None
    numbers = fields[1], fields[4], fields[6], fields[7]
    for number in numbers:
        # int() also accepts signs, blanks, underscores and digits of other scripts
        if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
            return None
    pop_ms, mark, queue_id, offset = map(int, numbers)
    lite_topic = fields[8] if len(fields) > 8 and fields[3] == _LITE_REVIVE else ""
    return Handle(queue_id, offset, pop_ms, mark, fields[5], lite_topic)


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
