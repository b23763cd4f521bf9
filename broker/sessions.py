"""Connected clients as the state sees them, whether they connected by remoting or by gRPC.

A `Session` is the identity of a client: state charges memory to it, and sends it events and requests. This module also has
the reasons of refusals, the producers by group, and limits by address."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, auto
from sys import getsizeof
from typing import Final, NamedTuple, Protocol

import structlog

from ..protocol.admin_bodies import ConnectedClient
from ..protocol.group_bodies import BrokerShare, Place
from ..protocol.headers import PushReply
from ..protocol.message import Record
from ..protocol.names import Queue, Subscription
from .config import (
    ADDRESS_SHARE,
    ASKED_BYTES,
    CLIENT_ANSWER_S,
    MAX_NAMED_CHARS,
    MAX_REFUSED,
    MAX_REPORTED_PEERS,
    MEMBER_BYTES,
    REFUSED_S,
    REPORT_AGAIN_S,
    SUBSCRIPTION_BYTES,
    TAG_BYTES,
    LimitExceeded,
)
from .runtime import MACHINE, Clock, Runtime, Timer

log = structlog.get_logger("rocketlet.memory")


# ------------------------------------------------------------------------------
# A connected client, by either protocol server.
#
# Groups, leases and waiting pulls keep a session as the identity of a member, owner or reader. These parts charge
# memory to the session, and send it events and requests as values, which the protocol servers encode. A session is a
# connection of the remoting protocol, a gRPC client id, which may have several HTTP/2 connections, or the broker's
# stand-in for clients that pop (`pops/division.py`).


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


class Session(Protocol):
    """A client, hashable by identity. The session's charges count against `--memory` until they are released or the session
    is gone.

    Attributes:
        known: The result of authentication, which `access` keeps here.
        held_pulls: The number of its pulls that wait for messages.
    """

    held_pulls: int

    @property
    def number(self) -> int:
        """The number of the session; later sessions have greater numbers."""
        ...

    @property
    def peer(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def born_host(self) -> bytes:
        """The peer's address as a record has it."""
        ...

    @property
    def known(self) -> object: ...

    @known.setter
    def known(self, known: object) -> None: ...

    @property
    def was_closed_by_client(self) -> bool:
        """True unless the broker has closed the connection or the client became unreachable; always True for gRPC
        clients. Only valid once the session is gone."""
        ...

    @property
    def is_external(self) -> bool:
        """True if the client connected to the port for clients outside of the brokers' network."""
        ...

    @property
    def address(self) -> str: ...

    @property
    def reached(self) -> str:
        """The broker's address that the client connected to, as `host:port`; empty if it is unknown, which it may be once the
        session is gone."""
        ...

    @property
    def is_closed(self) -> bool:
        """True if the session is gone or closing, so that events for it are lost."""
        ...

    def send_event(self, event: SessionEvent) -> None:
        """Send an event, which has no response. Ignored if the session is closed, or its protocol has no such event."""
        ...

    def send_request(self, number: int, request: ClientRequest) -> None:
        """Send a request. The protocol server passes the response, if there is one, to `Clients.answer` with this number."""
        ...

    def charge(self, size: int) -> None:
        """Add to the memory that the broker keeps for this client, in bytes; negative to release some."""
        ...

    def is_news(self, event: str) -> bool:
        """Return True if this event is to be logged for the client's address (`Reports`). The event then counts as logged."""
        ...

    def when_read(self, action: Callable[[], None]) -> None:
        """Call `action`, which writes a response: immediately, unless the client does not read its responses. Then call it
        once the client reads again, or never if the session is gone before."""
        ...

    def on_lost(self, action: Callable[[Session], None]) -> None:
        """Call `action(session)` once when the session is gone."""
        ...

    def close(self) -> None:
        """Close the client's connection when everything written has been sent."""
        ...

    def abort(self) -> None:
        """Close the client's connection immediately."""
        ...


# ------------------------------------------------------------------------------
# Events and requests that the broker sends to clients. Each protocol server encodes them in its own protocol.


class GroupChanged(NamedTuple):
    """The members of a group have changed, or its queues of `topic`.

    `places` has, by topic, the receiver's position among the members; `shares` its queues where the broker allocates them.
    With them a Rocketlet member need not request the member list. If both are None, earlier ones are no longer valid.
    """

    group: str
    topic: str | None = None
    places: Mapping[str, Place] | None = None
    shares: Mapping[str, BrokerShare] | None = None


class OutcomeWanted(NamedTuple):
    """A check of a half message without an outcome. `checks` counts the checks of this message, including this one."""

    half: Record
    checks: int


class LiteTaken(NamedTuple):
    """Another client of an exclusive group has subscribed to a lite topic, which is no longer this client's."""

    group: str
    lite_topic: str
    client_id: str


class OffsetsReset(NamedTuple):
    """An administrator has reset the offsets of a group in a topic. `is_for_cpp`: True if the administrator's tool is a C++
    client; the queues are then encoded as C++ clients read them."""

    topic: str
    group: str
    timestamp_ms: int
    is_force: bool
    offsets: Mapping[Queue, int]
    is_for_cpp: bool = False


SessionEvent = GroupChanged | OutcomeWanted | LiteTaken | OffsetsReset


class ForwardedRequest(NamedTuple):
    """Fields of a tool's request that are forwarded to the client with the broker's request."""

    group: str
    client_id: str
    fields: Mapping[str, str | int | bool]


class RunningWanted(NamedTuple):
    """Requests the client's running info: subscriptions, queues and times."""

    asked: ForwardedRequest


class HandlingWanted(NamedTuple):
    """Requests that the client consume one message directly; `record` is its bytes in the log."""

    asked: ForwardedRequest
    record: bytes


class OffsetsWanted(NamedTuple):
    """Requests the offsets of a topic that a member has consumed, committed or not."""

    group: str
    topic: str


class ReplyWanted(NamedTuple):
    """Pushes the reply to a request of the client."""

    push: PushReply
    body: bytes


ClientRequest = RunningWanted | HandlingWanted | OffsetsWanted | ReplyWanted


class Answer(NamedTuple):
    """A client's response to a request. `detail` is the response as it arrived, for the protocol server that forwards it."""

    is_ok: bool
    body: bytes = b""
    detail: object = None


# ------------------------------------------------------------------------------
# The clients behind the sessions: producers by group, sessions by client id, and the broker's requests to clients.


_NONE: frozenset[str] = frozenset()
MAX_NUMBER = 0x7FFF_FFFF  # greatest number of a request to a client: a signed number of 32 bits
Answered = Callable[[Answer | None], None]


class Accounts(Protocol):
    """The accounts of a broker."""

    def account_name(self, session: Session) -> str:
        """Return the access key of a session's account; empty without one."""
        ...

    def may_publish(self, session: Session, topic: str) -> bool:
        """Return True if a session's account may send to a topic."""
        ...


class Clients:
    """The producers and client ids of all sessions, and requests to them. `accounts` is None if the broker has none."""

    def __init__(self, runtime: Runtime, accounts: Accounts | None = None) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._accounts = accounts
        self._producers: dict[str, dict[Session, ConnectedClient]] = {}
        self._by_id: dict[str, Session] = {}
        self._ids: dict[Session, frozenset[str]] = {}
        self._groups: dict[Session, frozenset[str]] = {}
        self._open: dict[Session, set[int]] = {}
        self._turn = itertools.count()
        self._numbers = itertools.count(1)
        self._open_by: Counter[Session] = Counter()
        self._waiting: dict[tuple[Session, int], tuple[Answered, Timer, Session]] = {}

    def heartbeat(
        self,
        session: Session,
        client_id: str,
        groups: tuple[str, ...],
        language: int,
        version: int,
        *,
        is_asked: bool = True,
    ) -> None:
        """Record a client and its producer groups.

        If `is_asked`, replies to the client id are sent to this session from now on, unless an open session of another
        account has the id. Raises LimitExceeded if the session has too many client ids or producer groups
        (`Limits.max_client_ids`, `max_producer_groups`).
        """
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        if client_id not in ids or not known.issuperset(groups):
            self._add_to_session(session, client_id, groups)
        if is_asked and self._by_id.get(client_id) is not session and self._may_have(session, client_id):
            self._by_id[client_id] = session
        if groups:
            info = ConnectedClient(client_id, session.peer, language, version, self._clock.time_ms())
            for group in groups:
                self._producers.setdefault(group, {})[session] = info

    def _may_have(self, session: Session, client_id: str) -> bool:
        """Return True if a session may take over a client id: the id is free, its session is closed, or both sessions are of
        one account. A session of another account would receive the first one's replies."""
        former = self._by_id.get(client_id, session)
        return former is session or former.is_closed or self.account_of(former) == self.account_of(session)

    def account_of(self, session: Session) -> str:
        """Return the access key of a session's account; empty without one, and for each session of a broker without
        accounts."""
        return self._accounts.account_name(session) if self._accounts is not None else ""

    def _add_to_session(self, session: Session, client_id: str, groups: tuple[str, ...]) -> None:
        """Register a client id or producer group that is new to the session. Raises LimitExceeded."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        fresh = known.union(groups)
        if client_id not in ids and len(ids) >= self._limits.max_client_ids:
            raise LimitExceeded(f"the connection has {len(ids)} client ids; maximum {self._limits.max_client_ids}")
        if len(fresh) > max(self._limits.max_producer_groups, len(known)):
            raise LimitExceeded(
                f"the connection would be in {len(fresh)} producer groups; maximum {self._limits.max_producer_groups}"
            )
        session.charge(MEMBER_BYTES * (len(fresh) - len(known) + (client_id not in ids)))
        self._ids[session] = ids | {client_id}
        self._groups[session] = fresh

    def forget_producer(self, group: str, session: Session) -> None:
        """Remove a client from a producer group that it left."""
        known = self._groups.get(session, _NONE)
        if group in known:
            self._groups[session] = known - {group}
            session.charge(-MEMBER_BYTES)
        self._drop_producer(group, session)

    def _drop_producer(self, group: str, session: Session) -> None:
        members = self._producers.get(group, {})
        members.pop(session, None)
        if not members:
            self._producers.pop(group, None)

    def drop(self, session: Session) -> None:
        """Remove a session that is gone. Callers that wait for its response get None."""
        for group in self._groups.pop(session, ()):
            self._drop_producer(group, session)
        for client_id in self._ids.pop(session, ()):
            # A client that has reconnected is already registered with its new session.
            if self._by_id.get(client_id) is session:
                del self._by_id[client_id]
        for number in list(self._open.get(session, ())):
            self._complete((session, number), None)

    def producers(self, group: str) -> list[ConnectedClient]:
        return list(self._producers.get(group, {}).values())

    def all_producers(self) -> Mapping[str, list[ConnectedClient]]:
        return {group: list(members.values()) for group, members in self._producers.items()}

    def producer_of(self, group: str, topic: str, born_host: bytes) -> Session | None:
        """Return the session at `born_host`, which sent a half message, if it is still in the producer group, because another
        process may not know a transaction that is running. Otherwise return a session of the group, round-robin; None if
        there is none.

        Sessions that may not publish to the topic are left out, because any client may join any producer group.
        """
        accounts, sessions = self._accounts, list(self._producers.get(group, ()))
        if accounts is not None:
            sessions = [session for session in sessions if accounts.may_publish(session, topic)]
        sender = next((session for session in sessions if session.born_host == born_host), None)
        if sender is not None:
            return sender
        return sessions[next(self._turn) % len(sessions)] if sessions else None

    def only_id(self, session: Session) -> str | None:
        """Return the session's client id; None if it has none or several."""
        ids = self._ids.get(session, _NONE)
        return next(iter(ids)) if len(ids) == 1 else None

    def session_of(self, client_id: str) -> Session | None:
        return self._by_id.get(client_id)

    # Requests to clients

    def request(self, session: Session, request: ClientRequest, answered: Answered, *, by: Session) -> None:
        """Send a request to a client.

        Args:
            answered: Called with the response; with None after CLIENT_ANSWER_S, or if the client disconnects.
            by: The client on whose behalf the request is sent.

        Raises LimitExceeded if either client has too many open requests, so that clients that never respond use up only
        their own limit.
        """
        if len(self._open.get(session, ())) >= self._limits.max_asked:
            raise LimitExceeded(f"the client has not answered {self._limits.max_asked} requests yet; retry later")
        if self._open_by[by] >= self._limits.max_asked:
            raise LimitExceeded(f"{self._limits.max_asked} requests of this client are waiting for others; retry later")
        number = next(self._numbers) & MAX_NUMBER
        key = (session, number)
        timer = self._clock.call_later(CLIENT_ANSWER_S, self._complete, key, None)
        self._waiting[key] = (answered, timer, by)
        self._open_by[by] += 1
        by.charge(ASKED_BYTES)
        self._open.setdefault(session, set()).add(number)
        session.send_request(number, request)

    def has_open_request(self, session: Session) -> bool:
        """Return True if a request to the client is open."""
        return session in self._open

    def answer(self, session: Session, number: int, answer: Answer) -> None:
        """Pass on a client's response to the request with this number; ignored if the request is not waited for any more."""
        self._complete((session, number), answer)

    def _complete(self, key: tuple[Session, int], answer: Answer | None) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            asked = self._open[key[0]]
            asked.discard(key[1])
            if not asked:
                del self._open[key[0]]
            answered, timer, by = waiting
            self._open_by[by] -= 1
            if not self._open_by[by]:
                del self._open_by[by]
            by.charge(-ASKED_BYTES)
            timer.cancel()
            answered(answer)


# ------------------------------------------------------------------------------
# Why a client's request is refused. Each protocol server has its own code for each reason.


class Reason(Enum):
    """Clients react to the reason; the text is for people."""

    NOT_PERMITTED = auto()
    """The topic, the group or the broker does not allow it."""
    NO_TOPIC = auto()
    """The topic does not exist, and is not created."""
    NO_QUEUE = auto()
    """The topic does not have the queue."""
    NO_GROUP = auto()
    """The group does not exist, and is not created."""
    ILLEGAL_MESSAGE = auto()
    """The message is too large or invalid."""
    ILLEGAL = auto()
    """The request is invalid."""
    BAD_EXPRESSION = auto()
    """The subscription's expression cannot be parsed."""
    NOT_SUBSCRIBED = auto()
    """No member of the group subscribes to the topic, or the group has no members."""
    UNKNOWN_MEMBER = auto()
    """The client has sent no heartbeat, and pulls a queue that a member of the group reads."""
    SUBSCRIPTION_NOT_LATEST = auto()
    """The client names a later version of its subscription than its last heartbeat."""
    TOO_MANY_LITE_TOPICS = auto()
    """The broker has as many lite topics as it may."""
    LITE_GROUP = auto()
    """The group receives lite topics, and consumes nothing else."""
    NOT_LITE = auto()
    """The topic has no lite topics, or the group is not bound to it."""
    ILLEGAL_LITE_TOPIC = auto()
    """The name of a lite topic is invalid."""
    ILLEGAL_OFFSET = auto()
    """The offset is invalid."""
    TOO_MANY_LITE_SUBSCRIPTIONS = auto()
    """The client, or the broker, has as many subscriptions to lite topics as it may."""
    BUSY = auto()
    """The broker has too many such requests; the client may retry later."""


class Refusal(Exception):
    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


# ------------------------------------------------------------------------------
# The memory of a subscription.


def subscription_bytes(subscription: Subscription) -> int:
    """Return about how much memory a subscription takes, in bytes. Characters beyond Latin-1 take two or four."""
    text = getsizeof(subscription.expression)
    tags = len(subscription.tags)
    return SUBSCRIPTION_BYTES + text + (text + TAG_BYTES * tags if tags else 0)


# ------------------------------------------------------------------------------
# Recent events, such as refusals, which are reported for as long as clients repeat them.


class Recent:
    """The latest text of each of the `MAX_REFUSED` keys that were recorded last, for `keep_s`."""

    def __init__(self, clock: Clock = MACHINE, keep_s: float = REFUSED_S) -> None:
        self._now_s = clock.monotonic_s
        self._keep_s = keep_s
        self._latest: dict[Hashable, tuple[float, str]] = {}

    def record(self, key: Hashable, text: str) -> None:
        self._latest.pop(key, None)
        self._latest[key] = self._now_s(), text
        if len(self._latest) > MAX_REFUSED:
            del self._latest[next(iter(self._latest))]

    def texts(self) -> list[str]:
        """Return the texts that were recorded in the last `keep_s`, newest last."""
        since_s = self._now_s() - self._keep_s
        return [text for at_s, text in self._latest.values() if at_s >= since_s]


# ------------------------------------------------------------------------------
# Which errors of clients are logged, so that a client that keeps retrying does not fill the log.


class Reports:
    """Allows one report for each address and reason in an interval of REPORT_AGAIN_S, and up to MAX_REPORTED_PEERS of all."""

    def __init__(self, clock: Clock = MACHINE) -> None:
        self._now_s = clock.monotonic_s
        self._reported: set[tuple[str, str]] = set()
        self._since_s = clock.monotonic_s()

    def is_due(self, peer: str, reason: str) -> bool:
        """Return True if this address and reason were not reported yet in the current interval and the limit is not reached.
        A True result records them as reported."""
        if self._now_s() - self._since_s >= REPORT_AGAIN_S:
            self._reported.clear()
            self._since_s = self._now_s()
        key = peer.rpartition(":")[0], reason
        if key in self._reported or len(self._reported) >= MAX_REPORTED_PEERS:
            return False
        self._reported.add(key)
        return True


# ------------------------------------------------------------------------------
# Statistics of gRPC clients: connections, responses by code, and calls that failed lately.


_EXPECTED: Final = frozenset((20000, 30000, 40401, 40013, 40100))
"""Codes that are no failure: success, several results, no message, an expired receipt handle, and refused permissions, which
`access` reports."""


class GrpcClientStats:
    """The responses by method and code, the open connections, recent failures, and outdated clients."""

    def __init__(self, clock: Clock) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self._failed = Recent(clock)
        self.failed = self._failed.texts
        self._outdated = Recent(clock)
        self.outdated = self._outdated.texts

    def answered(self, method: str, code: int, reason: str, client: str) -> None:
        """Count a response, and record it if its code is a failure. `client` is the client's id and address."""
        self.answers[method, str(code)] += 1
        if code not in _EXPECTED:
            self._failed.record((method, code, client), f"{code} {method} of {client}: {reason[:MAX_NAMED_CHARS]}")

    def note_outdated(self, client: str, reason: str) -> None:
        """Record a client whose version has a defect that the broker cannot work around."""
        self._outdated.record(client, f"{client}: {reason}")

    def ended(self, method: str, status: int) -> None:
        """Count a call that ended with a gRPC status and without a message or headers before."""
        self.answers[method, f"gRPC {status}"] += 1


# ------------------------------------------------------------------------------
# A limit on all clients together, of which each address may use a share.


class AddressShares:
    """The use of a limit by address, which callers check with `has_room`. One address may use only ADDRESS_SHARE of the
    limit, so that it alone cannot lock other addresses out. Loopback may use all of it, because a proxy on this machine may
    serve many clients. If callers name an account, too, all addresses of the account together may use the same share."""

    __slots__ = ("_of_account", "_of_address", "count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._of_address: Counter[str] = Counter()
        self._of_account: Counter[str] = Counter()

    def has_room(self, address: str, wanted: int = 1, account: str = "") -> bool:
        if self.count + wanted > self.most:
            return False
        used = max(self._of_address[address], self._of_account[account])
        return used + wanted - 1 < self.most * ADDRESS_SHARE or is_loopback(address)

    def acquire(self, address: str, account: str = "", count: int = 1) -> None:
        self.count += count
        self._of_address[address] += count
        if account:
            self._of_account[account] += count

    def release(self, address: str, count: int = 1, account: str = "") -> None:
        self.count -= count
        _reduce(self._of_address, address, count)
        if account:
            _reduce(self._of_account, account, count)


def _reduce(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]
