"""Connected clients as the state sees them, whether they connected by remoting or by gRPC.

A `Session` is the identity of a client: state charges memory to it, sends it events and requests, and refuses requests with a
`Refusal`. This module also holds the producers by group, the memory budget of all clients, and the generation number by
which cached checks are invalidated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, auto
from heapq import heapify, heappop, heapreplace
from sys import getsizeof
from typing import Final, NamedTuple, Protocol

import structlog

from ..protocol.admin_bodies import ConnectedClient
from ..protocol.bodies import SLICE, Work
from ..protocol.group_bodies import BrokerShare, Place
from ..protocol.headers import PushReply
from ..protocol.message import Record
from ..protocol.names import Queue, Subscription
from .config import (
    ADDRESS_SHARE,
    ASKED_BYTES,
    CLIENT_ANSWER_S,
    LARGE_HOLDING_BYTES,
    MAX_NAMED_CHARS,
    MAX_REFUSED,
    MAX_REPORTED_PEERS,
    MEMBER_BYTES,
    REFUSED_S,
    REPORT_AGAIN_S,
    ROOM_SHARE,
    SUBSCRIPTION_BYTES,
    TAG_BYTES,
    LimitExceeded,
)
from .runtime import MACHINE, Clock, Runtime, Timer

log = structlog.get_logger("rocketlet.memory")


# ------------------------------------------------------------------------------
# A client, whichever door it came in by.
#
# State keeps sessions as the identity of members, owners, readers and waiters. It charges them for its memory, and
# tells and asks them in values (`events`). A door writes those, and decides what a session is: a connection of the
# remoting protocol, or a client id over several HTTP/2 connections.


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


class Session(Protocol):
    """Hashable by identity. Its charges count against `--memory` until it is gone.

    `known` belongs to the check of accounts. `held_pulls` is how many of its pulls wait.
    """

    held_pulls: int

    @property
    def number(self) -> int:
        """Rises with each session."""
        ...

    @property
    def peer(self) -> str:
        """`host:port` of the client."""
        ...

    @property
    def born_host(self) -> bytes:
        """The peer's address in the form of a message's record."""
        ...

    @property
    def known(self) -> object: ...

    @known.setter
    def known(self, known: object) -> None: ...

    @property
    def is_left(self) -> bool:
        """Whether the client has ended the session itself; only counts once it is gone."""
        ...

    @property
    def is_external(self) -> bool:
        """Whether it came by the port for clients outside of the brokers' network."""
        ...

    @property
    def address(self) -> str:
        """The client's, without the port."""
        ...

    @property
    def reached(self) -> str:
        """The address of ours that the client has connected to, as `host:port`; empty once it is gone."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether it is gone, or will be at once: events for it are lost."""
        ...

    def tell(self, event: Event) -> None:
        """Tells it something that needs no answer; does nothing if it is closed."""
        ...

    def ask(self, number: int, question: Question) -> None:
        """Asks it something. The door gives the answer to `Clients.answer` under the same number."""
        ...

    def charge(self, size: int) -> None:
        """State keeps so many bytes more, or less, for this client."""
        ...

    def is_news(self, event: str) -> bool:
        """Whether the log does not have this event of the client's address yet; it counts as logged then."""
        ...

    def when_read(self, action: Callable[[], None]) -> None:
        """Calls `action`, which answers, as soon as the client reads."""
        ...

    def on_lost(self, action: Callable[[Session], None]) -> None:
        """Calls `action(session)` once when it is gone."""
        ...

    def close(self) -> None:
        """Ends it when all that was written is sent."""
        ...

    def abort(self) -> None:
        """Ends it at once."""
        ...


# ------------------------------------------------------------------------------
# The state's events for clients, and its questions. Each door writes them in its own protocol.


class GroupChanged(NamedTuple):
    """The group of a member is another than before, or `topic` has other queues. By topic: which of the members the
    receiver is, or its share where the broker shares out, so that it need not ask. Where there are none for it any more,
    its earlier shares are over."""

    group: str
    topic: str | None = None
    places: Mapping[str, Place] | None = None
    shares: Mapping[str, BrokerShare] | None = None


class OutcomeWanted(NamedTuple):
    """A half message whose outcome its producer has not said. checks: how often it was asked for, with this time."""

    half: Record
    checks: int


class LiteTaken(NamedTuple):
    """Another client of an exclusive group has subscribed to a lite topic, which is no longer this client's."""

    group: str
    lite_topic: str
    client_id: str


class OffsetsReset(NamedTuple):
    """An administrator has set the offsets of a group in a topic. `is_for_cpp`: the one who asked reads a list of queues."""

    topic: str
    group: str
    timestamp_ms: int
    is_force: bool
    offsets: Mapping[Queue, int]
    is_for_cpp: bool = False


Event = GroupChanged | OutcomeWanted | LiteTaken | OffsetsReset


class ForwardedRequest(NamedTuple):
    """Fields of the request that a tool has sent, which are handed on with a question."""

    group: str
    client_id: str
    fields: Mapping[str, str | int | bool]


class RunningWanted(NamedTuple):
    """How the client is running: its subscriptions, queues and times."""

    asked: ForwardedRequest


class HandlingWanted(NamedTuple):
    """The client is to handle a message now, whatever its offset; the record as it lies in the log."""

    asked: ForwardedRequest
    record: bytes


class OffsetsWanted(NamedTuple):
    """The offsets of a topic that are in the hands of a member."""

    group: str
    topic: str


class ReplyWanted(NamedTuple):
    """The client is to take the reply to a request of its own."""

    push: PushReply
    body: bytes


Question = RunningWanted | HandlingWanted | OffsetsWanted | ReplyWanted


class Answer(NamedTuple):
    """A client's answer to a question. `detail` is for the door that passes it on: the answer as it came."""

    is_ok: bool
    body: bytes = b""
    detail: object = None


# ------------------------------------------------------------------------------
# The clients behind the sessions: producers by group, sessions by client id, and the broker's questions to clients.


_NONE: frozenset[str] = frozenset()
MAX_NUMBER = 0x7FFF_FFFF  # a question's number: as the remoting protocol numbers its requests
Answered = Callable[[Answer | None], None]


class Accounts(Protocol):
    """The accounts of sessions, where a broker has any."""

    def account_name(self, session: Session) -> str:
        """Return the access key of a session's account; empty without one."""
        ...

    def may_publish(self, session: Session, topic: str) -> bool:
        """Return True if a session's account may send to a topic."""
        ...


class Clients:
    """accounts: None if every client may do everything."""

    def __init__(self, runtime: Runtime, accounts: Accounts | None = None) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._accounts = accounts
        self._producers: dict[str, dict[Session, ConnectedClient]] = {}
        self._by_id: dict[str, Session] = {}
        self._ids: dict[Session, frozenset[str]] = {}
        self._groups: dict[Session, frozenset[str]] = {}
        self._asked: dict[Session, set[int]] = {}
        self._turn = itertools.count()
        self._numbers = itertools.count(1)
        self._asking: Counter[Session] = Counter()
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
        """Record a client and its producer groups. Unless `is_asked` is False, replies to that id go to the session from now
        on, unless a session of another account has the id. Raises LimitExceeded beyond 16 client ids or 256 producer groups
        of one session."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        if client_id not in ids or not known.issuperset(groups):
            self._take(session, client_id, groups)
        if is_asked and self._may_have(session, client_id):
            self._by_id[client_id] = session
        if groups:
            info = ConnectedClient(client_id, session.peer, language, version, self._clock.time_ms())
            for group in groups:
                self._producers.setdefault(group, {})[session] = info

    def _may_have(self, session: Session, client_id: str) -> bool:
        """A client that reconnects has another session. One of another account would get replies that are not its own."""
        former, accounts = self._by_id.get(client_id, session), self._accounts
        if former is session or former.is_closed or accounts is None:
            return True
        return accounts.account_name(former) == accounts.account_name(session)

    def _take(self, session: Session, client_id: str, groups: tuple[str, ...]) -> None:
        """A client id or a producer group that the session has not named before."""
        ids, known = self._ids.get(session, _NONE), self._groups.get(session, _NONE)
        fresh = known.union(groups)
        if client_id not in ids and len(ids) >= self._limits.max_client_ids:
            raise LimitExceeded(f"a connection goes by {self._limits.max_client_ids} client ids at most")
        if len(fresh) > max(self._limits.max_producer_groups, len(known)):
            raise LimitExceeded(f"a connection is in {self._limits.max_producer_groups} producer groups at most")
        session.charge(MEMBER_BYTES * (len(fresh) - len(known) + (client_id not in ids)))
        self._ids[session] = ids | {client_id}
        self._groups[session] = fresh

    def forget_producer(self, group: str, session: Session) -> None:
        """Forgets a producer group that a client has left."""
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
        """The session is gone; callers that wait for its answer get None."""
        for group in self._groups.pop(session, ()):
            self._drop_producer(group, session)
        for client_id in self._ids.pop(session, ()):
            # A client that has reconnected is known by its new session already.
            if self._by_id.get(client_id) is session:
                del self._by_id[client_id]
        for number in list(self._asked.get(session, ())):
            self._settle((session, number), None)

    def producers(self, group: str) -> list[ConnectedClient]:
        return list(self._producers.get(group, {}).values())

    def all_producers(self) -> Mapping[str, list[ConnectedClient]]:
        return {group: list(members.values()) for group, members in self._producers.items()}

    def any_producer(self, group: str, topic: str) -> Session | None:
        """A session of the group that may send to the topic, each in turn; None without one. Any client that knows a
        group's name can join it, and would otherwise see the messages of others."""
        accounts, sessions = self._accounts, list(self._producers.get(group, ()))
        if accounts is not None:
            sessions = [session for session in sessions if accounts.may_publish(session, topic)]
        return sessions[next(self._turn) % len(sessions)] if sessions else None

    def only_id(self, session: Session) -> str | None:
        """The id of the client at that session, if there is one alone."""
        ids = self._ids.get(session, _NONE)
        return next(iter(ids)) if len(ids) == 1 else None

    def session_of(self, client_id: str) -> Session | None:
        return self._by_id.get(client_id)

    # Questions to clients

    def ask(self, session: Session, question: Question, answered: Answered, *, by: Session) -> None:
        """Asks a client; `answered` gets the answer, or None after 10 s or when the client hangs up. by: the client because
        of which it is asked. Raises LimitExceeded if one of the two has too many questions: clients that never answer take
        nobody else's places."""
        if len(self._asked.get(session, ())) >= self._limits.max_asked:
            raise LimitExceeded(f"the client has not answered {self._limits.max_asked} requests yet; retry later")
        if self._asking[by] >= self._limits.max_asked:
            raise LimitExceeded(f"{self._limits.max_asked} requests of this client are waiting for others; retry later")
        number = next(self._numbers) & MAX_NUMBER
        key = (session, number)
        timer = self._clock.call_later(CLIENT_ANSWER_S, self._settle, key, None)
        self._waiting[key] = (answered, timer, by)
        self._asking[by] += 1
        by.charge(ASKED_BYTES)
        self._asked.setdefault(session, set()).add(number)
        session.ask(number, question)

    def is_asked(self, session: Session) -> bool:
        """Whether the client has an unanswered question."""
        return session in self._asked

    def answer(self, session: Session, number: int, answer: Answer) -> None:
        """A client's answer to the question of this number; one that nobody waits for is dropped."""
        self._settle((session, number), answer)

    def _settle(self, key: tuple[Session, int], answer: Answer | None) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            asked = self._asked[key[0]]
            asked.discard(key[1])
            if not asked:
                del self._asked[key[0]]
            answered, timer, by = waiting
            self._asking[by] -= 1
            if not self._asking[by]:
                del self._asking[by]
            by.charge(-ASKED_BYTES)
            timer.cancel()
            answered(answer)


# ------------------------------------------------------------------------------
# Why a client's request is refused. Each door has its own code for each reason.


class Reason(Enum):
    """Clients react to the reason; the text is for people."""

    NOT_PERMITTED = auto()
    """The topic, the group or the broker does not allow it."""
    NO_TOPIC = auto()
    """The topic does not exist, and is not created."""
    NO_GROUP = auto()
    """The group does not exist, and is not created."""
    ILLEGAL_MESSAGE = auto()
    """The message is too large, or says what cannot be."""
    ILLEGAL = auto()
    """The request says what cannot be."""
    BAD_EXPRESSION = auto()
    """The subscription's expression cannot be read."""
    NOT_SUBSCRIBED = auto()
    """No member of the group subscribes to the topic, or the group has none."""
    UNKNOWN_MEMBER = auto()
    """It reads a queue that a member of the group has read, and has sent no heartbeat."""
    SUBSCRIPTION_NOT_LATEST = auto()
    """The client names a later version of its subscription than its last heartbeat."""
    TOO_MANY_LITE_TOPICS = auto()
    """The broker has as many lite topics as it may."""
    BUSY = auto()
    """Too much is under way; the same request may be served later."""


class Refusal(Exception):
    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


# ------------------------------------------------------------------------------
# The memory of all connections together: half frames, requests that wait, answers that nobody reads, held pulls.
#
# A connection counts itself when it holds something large; a sweep counts the others that have read or written since,
# so that idle ones cost nothing. Beyond the budget, the address whose connections hold most together loses some of
# them, until another address holds more or there is room: first those that hold much, of these the one that was
# silent for longest first, then the others by what they hold. So nobody takes another address's share, neither by one
# large request nor by very many small ones.


def subscription_bytes(subscription: Subscription) -> int:
    """About how much memory a subscription takes. Characters beyond Latin-1 take two or four bytes."""
    text = getsizeof(subscription.expression)
    tags = len(subscription.tags)
    return SUBSCRIPTION_BYTES + text + (text + TAG_BYTES * tags if tags else 0)


class Holder(Protocol):
    """A connection. `counted_bytes` is its memory at the last count, `heard_s` when its client was last heard of."""

    counted_bytes: int
    heard_s: float

    @property
    def address(self) -> str:
        """The client's, without the port."""
        ...

    def held_bytes(self) -> int: ...

    def is_changing(self) -> bool:
        """Whether it will hold less by itself, as when its client reads."""
        ...

    def is_news(self, event: str) -> bool:
        """Whether the log does not have this event of the client's address yet; it counts as logged then."""
        ...

    def abort(self) -> None: ...


class Memory:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.closed = 0
        self._marked: dict[Holder, None] = {}
        # The holder may hold something else than it was counted with; the next sweep looks. A call for each read and each
        # answer, so it is the table's own.
        self.mark: Callable[[Holder], object] = self._marked.setdefault
        self._changing: dict[Holder, None] = {}  # those that this sweep has counted, and the next one will
        self._holding: dict[Holder, None] = {}

    def count(self, holder: Holder) -> None:
        """Counts a connection whose memory has changed."""
        self._marked[holder] = None
        self._recount(holder)
        if self.used_bytes > self.budget_bytes:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        """The connection is gone."""
        self.used_bytes -= holder.counted_bytes
        holder.counted_bytes = 0
        for table in (self._marked, self._changing, self._holding):
            table.pop(holder, None)

    def sweeping(self) -> Work[None]:
        """Counts those anew that may have changed, and makes room if that is too much."""
        for number in range(len(self._marked)):
            if number % SLICE == SLICE - 1:
                yield
            if not self._marked:  # they hung up meanwhile
                break
            holder, _ = self._marked.popitem()
            if holder.is_changing():
                self._changing[holder] = None
            self._recount(holder)
        self._marked |= self._changing
        self._changing.clear()
        if self.used_bytes > self.budget_bytes:
            self._make_room()

    def _recount(self, holder: Holder) -> None:
        held = holder.held_bytes()
        self.used_bytes += held - holder.counted_bytes
        holder.counted_bytes = held
        if held:
            self._holding[holder] = None
        else:
            self._holding.pop(holder, None)

    def _make_room(self) -> None:
        """When only small ones can be closed, some more than needed, so that it is not to be done again for each read."""
        victims: dict[str, list[Holder]] = {}
        sums: Counter[str] = Counter()
        for holder in self._holding:
            address = holder.address
            victims.setdefault(address, []).append(holder)
            sums[address] += holder.counted_bytes
        for holders in victims.values():
            holders.sort(key=_order)
        closed: dict[str, list[Holder]] = {}
        largest = [(-size, address) for address, size in sums.items()]
        heapify(largest)
        limit = self.budget_bytes
        while self.used_bytes > limit and largest:
            _, address = largest[0]
            if not victims[address]:
                heappop(largest)
                continue
            holder = victims[address].pop()
            before = holder.counted_bytes
            self._recount(holder)
            sums[address] += holder.counted_bytes - before
            if self.used_bytes > limit and holder.counted_bytes:
                if holder.counted_bytes <= LARGE_HOLDING_BYTES:
                    limit = self.budget_bytes - self.budget_bytes // ROOM_SHARE
                closed.setdefault(address, []).append(holder)
                sums[address] -= holder.counted_bytes
                holder.abort()
                self.forget(holder)
            heapreplace(largest, (-sums[address], address))
        for address, holders in closed.items():
            self.closed += len(holders)
            if holders[0].is_news("connection_closed_memory"):
                log.warning(
                    "connection_closed_memory",
                    address=address,
                    connections=len(holders),
                    used_bytes=self.used_bytes,
                    hint="connections hold more than --memory allows, and most of it is held for this address",
                )


def _order(holder: Holder) -> tuple[bool, float]:
    """The first to be closed is the last one."""
    size = holder.counted_bytes
    return (True, -holder.heard_s) if size > LARGE_HOLDING_BYTES else (False, size)


# ------------------------------------------------------------------------------
# Remembers recent refusals, to report them while they go on: a client that is refused comes again.


class Recent:
    """A text for each key, for as long as it comes again within `keep_s`."""

    def __init__(self, clock: Clock = MACHINE, keep_s: float = REFUSED_S) -> None:
        self._now_s = clock.monotonic_s
        self._keep_s = keep_s
        self._latest: dict[Hashable, tuple[float, str]] = {}

    def note(self, key: Hashable, text: str) -> None:
        self._latest.pop(key, None)
        self._latest[key] = self._now_s(), text
        if len(self._latest) > MAX_REFUSED:
            del self._latest[next(iter(self._latest))]

    def texts(self) -> list[str]:
        """Newest last."""
        since_s = self._now_s() - self._keep_s
        return [text for at_s, text in self._latest.values() if at_s >= since_s]


# ------------------------------------------------------------------------------
# Logs clients' faults. A client that keeps trying does not fill the log.


class Reports:
    """One report for an address and reason in ten minutes, and a limited number in all."""

    def __init__(self, clock: Clock = MACHINE) -> None:
        self._now_s = clock.monotonic_s
        self._reported: set[tuple[str, str]] = set()
        self._since_s = clock.monotonic_s()

    def is_due(self, peer: str, reason: str) -> bool:
        """Whether this is to be reported; it then counts as reported."""
        if self._now_s() - self._since_s >= REPORT_AGAIN_S:
            self._reported.clear()
            self._since_s = self._now_s()
        key = peer.rpartition(":")[0], reason
        if key in self._reported or len(self._reported) >= MAX_REPORTED_PEERS:
            return False
        self._reported.add(key)
        return True


# ------------------------------------------------------------------------------
# Clients of 5.x: how many connections they have, what they were answered, and which of their calls failed lately.


_EXPECTED: Final = frozenset((20000, 30000, 40401, 40013, 40100))
"""Well, nothing to receive, a handle whose time is over; and what an account may not do, of which accounts tell."""


class GrpcClientStats:
    """`answers`: by method and code."""

    def __init__(self, clock: Clock) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self._failed = Recent(clock)
        self.failed = self._failed.texts
        self._outdated = Recent(clock)
        self.outdated = self._outdated.texts

    def answered(self, method: str, code: int, reason: str, client: str) -> None:
        """`client`: its id and address."""
        self.answers[method, str(code)] += 1
        if code not in _EXPECTED:
            self._failed.note((method, code, client), f"{code} {method} of {client}: {reason[:MAX_NAMED_CHARS]}")

    def note_outdated(self, client: str, reason: str) -> None:
        """Record a client whose release has a defect that this broker cannot make up for."""
        self._outdated.note(client, f"{client}: {reason}")

    def ended(self, method: str, status: int) -> None:
        """Without a message: with a status of gRPC alone."""
        self.answers[method, f"gRPC {status}"] += 1


# ------------------------------------------------------------------------------
# Limits of all clients together, of which each address has a share.


class AddressShares:
    """How much of a limit is used, and by which address. One address may use a part of it only, so that it never refuses
    everybody else; the machine's own may use all, because a proxy there speaks for many."""

    __slots__ = ("_of_address", "count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._of_address: Counter[str] = Counter()

    def has_room(self, address: str) -> bool:
        if self.count >= self.most:
            return False
        return self._of_address[address] < self.most * ADDRESS_SHARE or is_loopback(address)

    def take(self, address: str) -> None:
        self.count += 1
        self._of_address[address] += 1

    def give_back(self, address: str) -> None:
        self.count -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]
