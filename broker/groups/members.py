"""The members of consumer groups: subscriptions, shares, disagreements, the member lists they were given, their history."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from sys import getsizeof
from typing import Final, NamedTuple, Protocol

import structlog

from ...protocol.allocation import STICKY
from ...protocol.bodies import SLICE, ConsumerData, Work
from ...protocol.group_bodies import BrokerShare
from ...protocol.names import RETRY_PREFIX, Queue, Subscription, sorted_ids
from ..config import (
    HANDOVER_BOUNDS_S,
    HISTORY_EVENT_BYTES,
    HISTORY_TEXT_CHARS,
    LIMITS,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    MEMBER_BYTES,
    PLACE_BYTES,
    REBALANCE_REST_S,
    SUBSCRIPTION_BYTES,
    TAG_BYTES,
    Limits,
)
from ..runtime.clock import Clock
from ..runtime.histogram import Histogram
from ..runtime.runtime import Runtime
from ..sessions.reports import Recent
from ..sessions.session import Session
from ..store.journals import LeaseKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# One client's membership in one group: what its heartbeats report, and the memory that it takes.


POPS: Final = "CONSUME_POP"  # the kind of a member that pops messages and pulls no queue

Shape = frozenset[tuple[str, str]]  # topics and expressions, of long ones their summaries


def subscription_bytes(subscription: Subscription) -> int:
    """Return about how much memory a subscription takes, in bytes. Characters beyond Latin-1 take two or four."""
    text = getsizeof(subscription.expression)
    tags = len(subscription.tags)
    return SUBSCRIPTION_BYTES + text + (text + TAG_BYTES * tags if tags else 0)


@dataclass(slots=True, eq=False)
class Member:
    """The membership of one client in one group. Times are of the monotonic clock, in seconds.

    Attributes:
        topics: the topics to which it subscribes, without the retry topic.
        shape: its topics and expressions, to compare it with other members.
        has_new_claims: True if its last heartbeat reported other owned queues than the one before.
        has_new_counts: True if its last heartbeat reported other numbers of queues than the one before.
        has_pulled: True if it has pulled although the group's members are to pop.
        is_presumed: True if it has sent no heartbeat, and its id is that of the queue's last reader.
        listed_id: its id in the list by which members allocate queues. A member that stands for a client that pops is sorted
            to the end, because the first members get the queues of the retry topic, which such a client does not read.
    """

    client_id: str
    session: Session
    data: ConsumerData
    language: int
    version: int
    seen_s: float
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    shape: Shape = frozenset()
    charged_bytes: int = 0
    has_new_claims: bool = False
    has_new_counts: bool = False
    has_pulled: bool = False
    is_presumed: bool = False
    listed_id: str = field(init=False)

    @property
    def is_foreign(self) -> bool:
        """True for Apache's push consumers in a group that shares queues. They report no allocation strategy."""
        # Apache's pull consumers divide queues among themselves, and broadcasting ones share nothing.
        data = self.data
        return not data.strategy and data.message_model == "CLUSTERING" and data.consume_type == "CONSUME_PASSIVELY"

    @property
    def pops(self) -> bool:
        return self.data.consume_type == POPS

    @property
    def is_grpc_client(self) -> bool:
        """True if the member stands for a gRPC client, which cannot be notified over remoting."""
        return self.pops and not self.session.peer

    def __post_init__(self) -> None:
        self._set_listed_id()

    def _set_listed_id(self) -> None:
        self.listed_id = f"~{self.client_id}" if self.pops else self.client_id

    def update(self, data: ConsumerData, now_s: float) -> bool:
        """Apply the content of a heartbeat to the member. Return True if the member has gained or lost a topic, has
        another strategy, or begins or stops to leave. Another expression of a topic is no change, as at Apache's broker."""
        before = self.subscriptions.keys()
        fresh = {item.topic: item for item in data.subscriptions}
        for topic, old in self.subscriptions.items():
            new = fresh.get(topic)
            # The newer one stays, as in ConsumerGroupInfo.updateSubscription: versions are the times at which clients
            # subscribed.
            if new is not None and new.version <= old.version:
                fresh[topic] = old
        last = self.data
        changed = before != fresh.keys() or data.leaving != last.leaving or data.strategy != last.strategy
        self.has_new_claims = data.assigned != last.assigned
        self.has_new_counts = data.queue_counts != last.queue_counts
        if before != fresh.keys():
            self.topics = frozenset(topic for topic in fresh if not topic.startswith(RETRY_PREFIX))
        self.subscriptions = fresh
        self.data = data
        self._set_listed_id()
        self.seen_s = now_s
        return changed


def shape_of(subscriptions: Iterable[Subscription]) -> Shape:
    return frozenset((item.topic, item.summary) for item in subscriptions)


def size_of(data: ConsumerData) -> int:
    """Return about how many bytes a membership takes."""
    seen = len(data.queue_counts) + sum(map(len, data.queue_counts.values()))
    subscriptions = sum(map(subscription_bytes, data.subscriptions))
    return MEMBER_BYTES + subscriptions + PLACE_BYTES * (len(data.assigned) + seen)


# ------------------------------------------------------------------------------
# The shares of a topic whose readers all use STICKY: the broker shares the queues out, because it costs every member
# the list of all owners to do so itself, and that grows with the square of the members.
#
# All members request their shares from the first broker of a topic, so that the shares are parts of one allocation.
# That broker starts from the previous shares and from the queues that members report as owned; after a restart, or when
# another broker takes over, only from the latter. Leases keep owners single even if shares overlap.


class StickyAllocation(NamedTuple):
    """The queues that are allocated to each member, and the queue counts by broker and the members that this is for."""

    of_members: dict[str, list[Queue]]
    seen_queues: dict[str, int]
    client_ids: list[str]


class StickyShares:
    """The allocation of one topic in one group. `owners` has, by queue, the member that it was last allocated to, or that
    reports it."""

    def __init__(self, topic: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._topic = topic
        self._shares: StickyAllocation | None = None
        self._is_doubtful = True
        self.owners: dict[Queue, str] = {}

    def claim(self, queue: Queue, client_id: str) -> None:
        """Record that a member reports a queue as owned, up to the limit on queues."""
        if queue in self.owners or len(self.owners) < self._limits.max_shared_queues:
            self.owners[queue] = client_id

    def forget(self) -> None:
        """Drop the shares, because members have changed and will all be notified."""
        self._is_doubtful, self._shares = True, None

    def check_again(self) -> None:
        """Compare the queues before the next share is returned, because a member reports other queues."""
        self._is_doubtful = True

    def of(
        self, client_id: str, seen_queues: Mapping[str, int], sorted_ids: Callable[[], list[str]]
    ) -> BrokerShare | None:
        """Return the member's share; None for a client that is no member. The first request after a change of the members
        or their queues computes all shares."""
        shares = self._shares
        if shares is None or self._is_doubtful:
            self._is_doubtful = False
            # For the same queues the shares stay, because some members have theirs, and later claims could change them
            seen, client_ids = dict(seen_queues), sorted_ids()
            if shares is None or (seen, client_ids) != (shares.seen_queues, shares.client_ids):
                shares = self._shares = StickyAllocation(self._share_out(seen, client_ids), seen, client_ids)
        share = shares.of_members.get(client_id)
        if share is None:
            return None
        return BrokerShare(len(shares.of_members), sum(shares.seen_queues.values()), _numbers(share))

    def _share_out(self, seen_queues: Mapping[str, int], client_ids: list[str]) -> dict[str, list[Queue]]:
        queues = sorted(
            Queue(self._topic, name, number) for name, count in seen_queues.items() for number in range(count)
        )
        shares = STICKY.share_out(queues, client_ids, self.owners) if client_ids else {}
        self.owners = {queue: client_id for client_id, share in shares.items() for queue in share}
        return shares


def _numbers(share: list[Queue]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for queue in share:
        numbers.setdefault(queue.broker_name, []).append(queue.queue_id)
    return numbers


class Unread(NamedTuple):
    """A subscribed queue that no member reads, and since when.

    Attributes:
        is_named: True if it was reported.
    """

    since_s: float
    is_named: bool


class SeenQueues(NamedTuple):
    """How many queues of a topic the members of a group see, by broker, and the sum."""

    of_brokers: Mapping[str, int]
    total: int

    @classmethod
    def of(cls, members: Iterable[Member], topic: str, most: int) -> SeenQueues:
        """Return the queues that the members see, up to `most`, because members may claim to see queues that do not
        exist. Brokers whose queues exceed the rest are left out, in the order of their names."""
        counts: dict[str, int] = {}
        for member in members:
            for broker_name, seen in member.data.queue_counts.items():
                if topic in seen:
                    # The largest number: a member with an old route must not hide queues from the others.
                    counts[broker_name] = max(seen[topic], counts.get(broker_name, 0))
        total = sum(counts.values())
        if total <= most:
            return cls(counts, total)
        kept: dict[str, int] = {}
        for name in sorted(counts):
            if counts[name] <= most:
                kept[name] = counts[name]
                most -= counts[name]
        return cls(kept, sum(kept.values()))


@dataclass(slots=True)
class SubscribedTopic:
    """A topic to which members of a group subscribe, and what was computed of it since the members last changed.

    Attributes:
        members: how many members subscribe to the topic.
        newest: the newest subscription; None until it is needed.
        places: the position of each client among the subscribers, in Java's order; None until it is needed.
        seen: how many queues of the topic the members see; None until it is needed.
        sticky: the allocation of members that use STICKY.
        unread: the queues that no member reads, by queue id.
        orphaned: how many of the unread queues have had no reader for some seconds.
    """

    members: int = 0
    newest: Subscription | None = None
    places: dict[str, int] | None = None
    seen: SeenQueues | None = None
    sticky: StickyShares | None = None
    unread: dict[int, Unread] = field(default_factory=dict)
    orphaned: int = 0


# ------------------------------------------------------------------------------
# Finds conflicts of members with each other or with the broker, and describes them with the members' names.


def finding_faults(members: list[Member], broker_name: str, queues_of: Callable[[str], int]) -> Work[frozenset[str]]:
    """Return texts about conflicts between members, with the members' names. The work is done in pieces."""
    topics, expressions = Counter[str](), dict[str, dict[str, list[str]]]()
    settings: dict[str, dict[str, list[str]]] = {"message models": {}, "allocation strategies": {}}
    ids = Counter[str]()
    stale: list[str] = []
    retrying = 0
    for number, member in enumerate(members, 1):
        retrying += not member.pops
        for topic, subscription in member.subscriptions.items():
            topics[topic] += 1
            expressions.setdefault(topic, {}).setdefault(subscription.summary, []).append(member.client_id)
        settings["message models"].setdefault(member.data.message_model, []).append(member.client_id)
        if member.data.strategy:
            settings["allocation strategies"].setdefault(member.data.strategy, []).append(member.client_id)
        ids[member.client_id] += 1
        if len(stale) < MAX_NAMED_MEMBERS:
            stale += (
                f"{member.client_id} sees {count} queues of {topic} at {broker_name}, there are {queues_of(topic)}"
                for _, topic, count in stale_counts([member], broker_name, queues_of)
            )
        if number % SLICE == 0:
            yield
    yield
    doubled = sorted((item for item in ids.items() if item[1] > 1), key=itemgetter(1), reverse=True)
    return frozenset(
        (
            *_differing_topics(members, retrying, topics, expressions),
            *_differing("message models", settings["message models"]),
            *_differing("allocation strategies", settings["allocation strategies"]),
            *(f"{count} live connections with the client id {name}" for name, count in doubled[:MAX_NAMED_MEMBERS]),
            *stale,
        )
    )


def _differing_topics(
    members: list[Member], retrying: int, topics: Counter[str], expressions: dict[str, dict[str, list[str]]]
) -> Iterator[str]:
    wanted = {topic: retrying if topic.startswith(RETRY_PREFIX) else len(members) for topic in topics}
    differing = [topic for topic, count in topics.items() if count < wanted[topic] or len(expressions[topic]) > 1]
    for topic in sorted(differing)[:MAX_NAMED_MEMBERS]:
        count = topics[topic]
        if count < wanted[topic]:
            without = [member.client_id for member in members if topic not in member.subscriptions]
            subscribed = [name for names in expressions[topic].values() for name in names]
            yield f"{_named(without)} not subscribed to {topic}, while {_named(subscribed)} are"
        if len(expressions[topic]) > 1:
            kinds = [f"{name}: {text}" for text, names in expressions[topic].items() for name in names]
            yield f"different tag expressions for {topic}: {_named(kinds, '; ')}"


def _differing(what: str, values: dict[str, list[str]]) -> Iterator[str]:
    if len(values) > 1:
        yield f"different {what}: " + _named(
            [f"{name}: {value}" for value, ids in values.items() for name in ids], "; "
        )


def stale_counts(
    members: Iterable[Member], broker_name: str, queues_of: Callable[[str], int]
) -> Iterator[tuple[Member, str, int]]:
    """Yield the members that see a wrong number of queues here, with the topic and that number."""
    for member in members:
        for topic, count in member.data.queue_counts.get(broker_name, {}).items():
            if topic in member.subscriptions and count != queues_of(topic):
                yield member, topic, count


def _named(names: list[str], between: str = ", ") -> str:
    """Return names as one text, of very many only the first."""
    more = len(names) - MAX_NAMED_MEMBERS
    first = (name[:MAX_NAMED_CHARS] for name in names[:MAX_NAMED_MEMBERS])
    return between.join(first) + (f" and {more} more" if more > 0 else "")


# ------------------------------------------------------------------------------
# The member list that a foreign member was given last: by it the member allocates the queues.
#
# All members that request it between two changes are given the same list. So memory grows with the changes, not with
# the square of the members, and the members that claim a queue are found without reading most of them, because the queues go
# to the first ids of a list.


class MemberList:
    """The client ids in a member list. Members with the same list share one object."""

    __slots__ = ("_order", "ids")

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        self._order: list[str] | None = None

    @property
    def order(self) -> list[str]:
        """The ids in Java's order, as all members sort them."""
        if self._order is None:
            self._order = sorted_ids(self.ids)
        return self._order

    def ids_for(self, client_id: str) -> list[str]:
        """Return the client ids as this member gets them."""
        return self.ids or [client_id]


ALONE: Final = MemberList([])  # each member gets only itself, and claims all queues of its topics (`Allotment`)

Readers = dict[str, dict[Session, None]]  # the members that were given one list, by client id


class Issued(NamedTuple):
    """The list that a member got last.

    Attributes:
        times: how often the member got it, without another list between.
    """

    members: MemberList
    client_id: str
    times: int


# ------------------------------------------------------------------------------
# Heartbeats that were refused: the client reads nothing, and most clients do not report it.
#
# A client sends a heartbeat every 30 s, so a refusal that was not repeated for longer is over.


class RefusedHeartbeats:
    """`count`: of all heartbeats that were refused."""

    def __init__(self, clock: Clock) -> None:
        self._recent = Recent(clock)
        self.recent = self._recent.texts
        self.count = 0

    def record(self, peer: str, client_id: str, groups: Sequence[str], reason: str, *, is_news: bool) -> None:
        """Record a refused heartbeat. `is_news` is True if the log does not have it of this client's address yet."""
        self.count += 1
        named = " ".join(groups[:MAX_NAMED_MEMBERS])[:MAX_NAMED_CHARS]
        text = f"{client_id[:MAX_NAMED_CHARS]} ({peer}) of {named or 'a group'}: {reason[:MAX_NAMED_CHARS]}"
        self._recent.record((peer, named), text)
        if is_news:
            log.warning("heartbeat_refused", client=client_id, peer=peer, groups=named, reason=reason)


# ------------------------------------------------------------------------------
# The newest events of each group's queues and members, for administrators.


LOCKED: Final = "locked"


# Of a lease there are the most events. A tuple takes half of a dictionary's memory; the names of the details are one
# object for all events of a kind.
Detail = str | int
HistoryEvent = tuple[tuple[str, ...], int, str, str, *tuple[Detail, ...]]
"""The names of the details, time in ms, event, client id, details."""
_OF_LEASE: Final = ("topic", "queue", "epoch")


def shown(event: HistoryEvent) -> dict[str, Detail]:
    """Return an event as it is reported: `{"ms", "event", "client", ...}`."""
    names, ms, kind, client, *details = event
    return {"ms": ms, "event": kind, "client": client, **dict(zip(names, details, strict=True))}


def _bytes_of(event: HistoryEvent) -> int:
    if event[0] is _OF_LEASE:  # the texts of lease events are shared with other objects, so they are not counted
        return HISTORY_EVENT_BYTES
    return HISTORY_EVENT_BYTES + sum(getsizeof(detail) for detail in event[4:] if isinstance(detail, str))


class History:
    """At most 10,000 events of a group, oldest first; of the 1,000 groups whose first event is newest. When 200,000
    events were recorded since the oldest one, or they take 40 MiB, old events are removed."""

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._order: deque[deque[HistoryEvent]] = deque()  # the events of each group, that with the oldest event first
        self._bytes = 0
        self.rebalances = Rebalances(runtime)

    def add(self, group: str, event: str, client: str, **detail: Detail) -> None:
        made: HistoryEvent = (
            _shared(tuple(detail)),
            self._clock.time_ms(),
            event,
            client,
            *map(_short, detail.values()),
        )
        self._put(group, made, _bytes_of(made))

    def record_member_change(self, group: TimedGroup, event: str, client: str, members: int) -> None:
        """Record that a member of a group has joined or left, or has other subscriptions."""
        self.add(group.name, event, client, members=members)
        self.rebalances.begin_rebalance(group, event)

    def report_misread(self, event: str, group: str, client: str, fault: str) -> None:
        """Record and log a queue that two members read, or none."""
        log.warning("queue_misread", kind=event, group=group, fault=fault)
        self.add(group, event, client, fault=fault)

    def changed_hands(self, event: str, group: TimedGroup, key: LeaseKey, client: str, epoch: int) -> None:
        """Record a lease that began or ended. One request may contain 8,192 queues, so this method does as little as
        possible."""
        name, topic, queue_id = key
        self._put(name, (_OF_LEASE, self._clock.time_ms(), event, client, topic, queue_id, epoch), HISTORY_EVENT_BYTES)
        self.rebalances.changed_hands(group, key, is_free=event != LOCKED)

    def _put(self, group: str, event: HistoryEvent, size: int) -> None:
        events = self._events.get(group)
        if events is None:
            events = self._events[group] = deque()
            if len(self._events) > self._limits.history_groups:
                forgotten = self._events.pop(next(iter(self._events)))
                while forgotten:
                    self._drop_oldest(forgotten)
        events.append(event)
        self._bytes += size
        self._order.append(events)
        if len(events) > self._limits.history_events:
            self._drop_oldest(events)
        while len(self._order) > self._limits.history_all_events or self._bytes > self._limits.history_bytes:
            self._drop_oldest(self._order.popleft())

    def _drop_oldest(self, events: deque[HistoryEvent]) -> None:
        if events:
            self._bytes -= _bytes_of(events.popleft())

    def of(self, group: str) -> list[dict[str, Detail]]:
        """Return the events of a group that are still kept, as they are reported."""
        return list(map(shown, self.since(group)))

    def since(self, group: str, since_ms: int = 0) -> list[HistoryEvent]:
        """Return the events from a time on, so that a command that polls every second gets only new ones."""
        found = self._events.get(group, ())
        if not since_ms:
            return list(found)
        newest = list(itertools.takewhile(lambda event: event[1] >= since_ms, reversed(found)))
        return newest[::-1]


@cache
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return one object for all equal names of details. There are as many as kinds of events."""
    return names


def _short(detail: Detail) -> Detail:
    return detail[:HISTORY_TEXT_CHARS] if isinstance(detail, str) else detail


# ------------------------------------------------------------------------------
# For metrics: how long a queue has no owner when its owner changes, and how long a group takes until its rebalance is
# finished.
#
# Both durations are computed from the events of `History`: members that join and leave, queues that are locked and
# unlocked. Locks of Apache's clients are not measured.


_MEMBERS_CHANGED = frozenset(("joined", "left", "leaving", "subscribed"))


class TimedGroup(Protocol):
    """A group whose rebalances are timed. One that is recreated by the same name is another group."""

    name: str


class Rebalances:
    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self.handovers = Histogram(HANDOVER_BOUNDS_S)
        self.settling = Histogram(HANDOVER_BOUNDS_S)
        self._freed_s: dict[LeaseKey, float] = {}
        self._running: dict[TimedGroup, tuple[float, float]] = {}  # when members changed, the last lock since then

    def begin_rebalance(self, group: TimedGroup, event: str) -> None:
        """Begin a rebalance of the group at this change of members, unless one is running."""
        if event in _MEMBERS_CHANGED:
            now_s = self._clock.monotonic_s()
            self._end_if_at_rest(group, now_s)
            self._running.setdefault(group, (now_s, now_s))

    def changed_hands(self, group: TimedGroup, key: LeaseKey, *, is_free: bool) -> None:
        """Record that a queue has no owner any more, or has one."""
        now_s = self._clock.monotonic_s()
        if is_free:
            if len(self._freed_s) >= self._limits.max_free_queues:
                del self._freed_s[next(iter(self._freed_s))]
            self._freed_s[key] = now_s
        else:
            since_s = self._freed_s.pop(key, None)
            if since_s is not None:
                self.handovers.observe(now_s - since_s)
        running = self._running.get(group)
        if running is not None:
            self._running[group] = (running[0], now_s)

    def end_finished(self) -> None:
        """Record how long the rebalances took that have come to rest."""
        now_s = self._clock.monotonic_s()
        for group in list(self._running):
            self._end_if_at_rest(group, now_s)

    def _end_if_at_rest(self, group: TimedGroup, now_s: float) -> None:
        began_s, last_s = self._running.get(group, (now_s, now_s))
        if now_s - last_s >= REBALANCE_REST_S:
            del self._running[group]
            if last_s > began_s:
                self.settling.observe(last_s - began_s)
