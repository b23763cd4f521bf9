"""The requests and results of POP, for both protocol servers, and receipt handles."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from ...protocol.names import Subscription
from ..config import FILTER_WORD_BYTES, MAX_POP_BYTES
from ..groups.members import subscription_bytes
from ..sessions.session import Session

if TYPE_CHECKING:
    from ..messages.filters import Filter


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
    REDELIVERED = "the message was redelivered since"
    FINISHED = "the message is finished, and not in flight any more"
    NOT_KEPT = "writing it to the disk failed"

    @property
    def is_done(self) -> bool:
        return self in (AckStatus.DONE, AckStatus.LATE)


class Changed(NamedTuple):
    """The result of a change of the invisible time. `handle` is that of the request. `invisible_ms` counts from `pop_ms`."""

    outcome: AckStatus
    handle: str
    pop_ms: int = 0
    invisible_ms: int = 0


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
