"""The arguments and results of `Pops`. Both doors speak these values; neither a socket nor a frame is among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ...protocol.subscription import Subscription
from ..config import FILTER_WORD_BYTES, MAX_POP_BYTES
from ..sessions.memory import subscription_bytes
from ..sessions.session import Session

if TYPE_CHECKING:
    from ..messages.sql_filter import Filter


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
    UNREADABLE = "the handle is none"
    UNKNOWN = "the handle is of another group, topic or broker"
    EXPIRED = "the message was given to somebody again since"
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
