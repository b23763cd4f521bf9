"""The members of consumer groups: heartbeats, subscriptions, and the member list that each member was given."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import structlog

from ...protocol.allocation import AVG, STICKY
from ...protocol.bodies import LOOKS, SLICE, ConsumerData, Work, finish
from ...protocol.group_bodies import BrokerShare
from ...protocol.names import RETRY_PREFIX, Queue, Subscription, sorted_ids
from ..config import (
    LIMITS,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    MEMBER_BYTES,
    PLACE_BYTES,
    REPORT_AGAIN_S,
    LimitExceeded,
    Limits,
)
from ..runtime import Runtime
from ..sessions import Reason, Refusal, Session, subscription_bytes
from .settings import History

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# The members of each consumer group, and their subscriptions.
#
# Apache's broker keeps one table of subscriptions per group, which every heartbeat overwrites, so that members with
# different topics erase each other's. Here each member has its own; the group's subscription is their union. A member
# is a session in a group (decision 24): pulls and commits say no client id, so one connection cannot be two members
# of a group. A client that reconnects is two members with one id until the old connection is closed.


_NOWHERE: Mapping[str, int] = {}
_NOBODY: Mapping[Session, Member] = {}


class ConsumerGroup:
    """A group with at least one member."""

    def __init__(self, name: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self.name = name
        self.members: dict[Session, Member] = {}
        self.foreign: dict[Session, Member] = {}  # those of the members
        self.topics: Counter[str] = Counter()  # how many members subscribe to each
        # already reported, so that each disagreement is logged once
        self.reported: frozenset[str] = frozenset()
        self._of_shape: dict[Shape, dict[Session, None]] = {}  # members by their subscriptions
        self._newest: dict[str, Subscription | None] = {}
        self._places: dict[str | None, dict[str, int]] = {}
        self._companions: dict[frozenset[str], MemberList] = {}
        self._seen_queues: dict[str, dict[str, int]] = {}
        self._seen_counts: dict[str, int] = {}
        self._strategies: frozenset[str] | None = None
        self._sticky: dict[str, StickyShares] = {}
        # Foreign members subscribe to different topics, and are bound by whose the queues are to be (`allotment`).
        self.is_uneven = False
        self._alone: set[frozenset[str]] = set()  # topics of those that are told of themselves only

    @property
    def message_model(self) -> str:
        return next(iter(self.members.values())).data.message_model

    @property
    def is_broadcasting(self) -> bool:
        """True if every member gets every message: members keep their own offsets, and the group has none."""
        return all(member.data.message_model == "BROADCASTING" for member in self.members.values())

    def subscription(self, connection: Session | None, topic: str) -> Subscription | None:
        """The subscription of this connection's member to a topic; for a stranger, the newest subscription of the group."""
        member = self.members.get(connection) if connection else None
        if member is not None and topic in member.subscriptions:
            return member.subscriptions[topic]
        if topic not in self.topics:
            return None
        if topic not in self._newest:  # found once per change: a stranger asks with each pull
            found = (item.subscriptions[topic] for item in self.members.values() if topic in item.subscriptions)
            self._newest[topic] = max(found, key=lambda item: item.version, default=None)
        return self._newest[topic]

    def subscriptions_of(self, connection: Session) -> Mapping[str, Subscription]:
        """The member's subscriptions by topic; none for a session that is no member."""
        return self.members[connection].subscriptions if connection in self.members else {}

    def take_shape(self, member: Member, shape: Shape | None) -> None:
        """A member subscribes to this now; None if it has left."""
        if member.shape != shape:
            connections = self._of_shape.get(member.shape, {})
            connections.pop(member.connection, None)
            if not connections:
                self._of_shape.pop(member.shape, None)
        if shape is not None:
            member.shape = shape
            self._of_shape.setdefault(shape, {})[member.connection] = None
        self._newest.clear()

    def take_version(self, member: Member, topic: str, version: int) -> None:
        """A member's subscription is as it was, under a later version."""
        known = member.subscriptions[topic]
        if version > known.version:
            member.subscriptions[topic] = replace(known, version=version)
            self._newest.pop(topic, None)

    def other_than(self, connection: Session, shape: Shape) -> Member | None:
        """A member that subscribes to something else; found without a look at all that subscribe to the same."""
        for other, connections in self._of_shape.items():
            if other != shape:
                found = next((item for item in connections if item is not connection), None)
                if found is not None:
                    return self.members[found]
        return None

    def client_ids(self, topic: str | None = None) -> list[str]:
        """The ids of the members that stay, each once; with a topic only those that subscribe to it."""
        staying = (member for member in self.members.values() if not member.data.leaving)
        # Each id once: a client that reconnects has two connections until the old one is closed.
        ids = (member.listed_id for member in staying if topic is None or topic in member.subscriptions)
        return list(dict.fromkeys(ids))

    def companions(self, connection: Session) -> MemberList:
        """The members that subscribe to a topic of the member's own. A foreign one does not say which topic it asks for,
        and takes everybody for a reader of all its topics."""
        asking = self.members.get(connection)
        return self._near(asking.topics if asking is not None else frozenset())

    def _near(self, topics: frozenset[str]) -> MemberList:
        """Found once per change for all that subscribe to the same, because every member asks after each."""
        found = self._companions.get(topics)
        if found is None:
            staying = (member for member in self.members.values() if not member.data.leaving)
            near = (member for member in staying if not topics or not topics.isdisjoint(member.topics))
            found = MemberList(list(dict.fromkeys(member.listed_id for member in near)))
            if len(self._companions) < self._limits.max_compared:
                self._companions[topics] = found
        return found

    def differs(self) -> bool:
        """Whether members subscribe to different topics. Each has the group's retry topic besides."""
        first = next(iter(self.members.values()), None)
        return first is not None and any(member.topics != first.topics for member in self.members.values())

    def binding(self, *, is_uneven: bool, retry_queues: int) -> Work[None]:
        """The future owners of the queues are known, so foreign members are told by them from now on. Members that share
        all their topics with the same others are told of those; of several queues of the retry topic they would leave some
        to nobody."""
        kinds = {member.topics for member in self.foreign.values()} if is_uneven else set()
        alone: set[frozenset[str]] = set()
        for topics in kinds:
            if retry_queues > 1 or len(kinds) > self._limits.max_compared:
                alone.add(topics)
                continue
            yield
            near = len(self._near(topics).ids)
            if any(len(self.order(topic)) != near for topic in topics):
                alone.add(topics)
        self.is_uneven, self._alone = is_uneven, alone

    def list_for(self, connection: Session) -> MemberList:
        """The list for a foreign member that may know of the last change."""
        member = self.foreign.get(connection)
        return ALONE if member is not None and member.topics in self._alone else self.companions(connection)

    def place(self, client_id: str, topic: str | None) -> tuple[int, int]:
        """A client's position among the members that subscribe to a topic, -1 if it is none of them, and how many they are.
        Sorted once per change, because every member asks after each."""
        places = self.order(topic)
        return places.get(client_id, -1), len(places)

    def order(self, topic: str | None) -> Mapping[str, int]:
        """The clients that subscribe to a topic, in Java's order, each with its place in it."""
        if topic is not None and topic not in self.topics:
            return _NOWHERE  # whatever strangers ask for is not kept
        places = self._places.get(topic)
        if places is None:
            places = {item: index for index, item in enumerate(sorted_ids(self.client_ids(topic)))}
            self._places[topic] = places
        return places

    def seen_queues(self, topic: str) -> dict[str, int]:
        """How many queues of a topic the members see, by broker: also of one that is away, which a newcomer cannot find."""
        if topic not in self.topics:
            return {}
        seen = self._seen_queues.get(topic)
        if seen is None:
            seen = {}
            for member in self.members.values():
                for broker_name, counts in member.data.queue_counts.items():
                    if topic in counts:
                        # The largest number: a member with an old route must not hide queues from the others.
                        seen[broker_name] = max(counts[topic], seen.get(broker_name, 0))
            self._seen_queues[topic] = seen = _as_many_as_may_be(seen, self._limits.max_seen_queues)
            self._seen_counts[topic] = sum(seen.values())
        return seen

    def seen_count(self, topic: str) -> int:
        """How many these are in all."""
        return self._seen_counts[topic] if self.seen_queues(topic) else 0

    def sees(self, member: Member, topic: str, counts: Mapping[str, int]) -> None:
        """A member that asks has looked up a route: it sees so many queues of a topic, by broker."""
        seen = {name: topics[topic] for name, topics in member.data.queue_counts.items() if topic in topics}
        if seen != counts:
            others = {
                name: {other: count for other, count in topics.items() if other != topic}
                for name, topics in member.data.queue_counts.items()
            }
            for name, count in counts.items():
                others.setdefault(name, {})[topic] = count
            member.data = replace(member.data, queue_counts=others)
            self.sees_others()

    def share(self, client_id: str, topic: str) -> BrokerShare | None:
        """A member's queues of a topic, where all members use STICKY; None where not, and for a session that is no
        member."""
        if topic not in self.topics or self.strategies() != {STICKY.name}:
            return None
        if self.seen_count(topic) > self._limits.max_shared_queues:
            return None
        shares = self._sticky.setdefault(topic, StickyShares(topic, self._limits))
        return shares.of(client_id, self.seen_queues(topic), lambda: list(self.order(topic)))

    def claimed(self, member: Member) -> None:
        """A member says which queues it owns."""
        for queue in member.data.assigned:
            if member.data.strategy == STICKY.name and queue.topic in member.subscriptions:
                self._sticky.setdefault(queue.topic, StickyShares(queue.topic, self._limits)).claim(
                    queue, member.client_id
                )

    def changed(self) -> None:
        """Members, their topics or strategies have changed."""
        for topic in [topic for topic in self._sticky if topic not in self.topics]:
            del self._sticky[topic]
        self._places.clear()
        self._companions.clear()
        self._strategies = None
        self.sees_others()
        for shares in self._sticky.values():
            shares.forget()

    def sees_others(self) -> None:
        """Members see other queues than before."""
        self._seen_queues.clear()
        self._seen_counts.clear()
        for shares in self._sticky.values():
            shares.doubt()

    def strategies(self) -> frozenset[str]:
        """How the members that pull allocate; a foreign one does not say."""
        if self._strategies is None:
            pulling = (member for member in self.members.values() if not member.pops)
            self._strategies = frozenset(member.data.strategy or "foreign" for member in pulling)
        return self._strategies

    def faults(self, broker_name: str, queues_of: Callable[[str], int]) -> frozenset[str]:
        """Texts that name members which disagree with each other or with the broker."""
        return finish(self.finding_faults(broker_name, queues_of))

    def finding_faults(self, broker_name: str, queues_of: Callable[[str], int]) -> Work[frozenset[str]]:
        return finding_faults(list(self.members.values()), broker_name, queues_of)


def _as_many_as_may_be(counts: dict[str, int], left: int) -> dict[str, int]:
    """Cuts brokers and their numbers of queues, in order, to as many as are shared out: members may claim to see queues
    that do not exist."""
    if sum(counts.values()) <= left:
        return counts
    kept: dict[str, int] = {}
    for name in sorted(counts):
        if counts[name] <= left:
            kept[name] = counts[name]
            left -= counts[name]
    return kept


class ConsumerGroups:
    """All groups. `on_change(group)` is called when members or their topics changed, the group perhaps empty then;
    `queues_of(topic)` says how many queues may be read. `generation` rises with whatever changes here."""

    def __init__(
        self,
        runtime: Runtime,
        history: History,
        broker_name: str,
        queues_of: Callable[[str], int],
        on_change: Callable[[ConsumerGroup], None],
    ) -> None:
        self._limits = runtime.limits
        self.broker_name = broker_name
        self._queues_of = queues_of
        self._clock = clock = runtime.clock
        self._turns = runtime.turns
        self._to_check: set[str] = set()
        self._logged: Counter[str] = Counter()
        self._logged_since_s = clock.monotonic_s()
        self._groups: dict[str, ConsumerGroup] = {}
        self._names: dict[Session, set[str]] = {}
        self._of_topic: dict[str, dict[str, None]] = {}  # the groups that subscribe to a topic
        self._history = history
        self._on_change = on_change
        self.generation = runtime.generation
        self.get = self._groups.get

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(list(self._groups.values()))

    def members_of(self, name: str) -> Mapping[Session, Member]:
        """The members of a group by session; none if there is no such group."""
        group = self._groups.get(name)
        return group.members if group is not None else _NOBODY

    def admit(self, connection: Session, client_id: str, groups: Iterable[str]) -> None:
        """Raises LimitExceeded if a client may not be a member of all these groups: 256, each with 10,000 members; Refusal
        if the connection is the member of one by another id."""
        known: Collection[str] = self._names.get(connection, ())
        names = set(groups)
        for name in names.intersection(known):
            member = self._groups[name].members[connection]
            if member.client_id != client_id:
                member_text = f"this connection is the member {member.client_id} of the group {name}"
                raise Refusal(Reason.ILLEGAL, f"{member_text}; {client_id} needs a connection of its own")
        fresh = names.difference(known)
        if fresh and len(known) + len(fresh) > self._limits.max_memberships:
            raise LimitExceeded(f"a connection is a member of {self._limits.max_memberships} groups at most")
        for name in fresh:
            group = self._groups.get(name)
            if group is not None and len(group.members) >= self._limits.max_members:
                raise LimitExceeded(f"the group {name} has {self._limits.max_members} members; no more are taken")

    def heartbeat(self, connection: Session, client_id: str, data: ConsumerData, language: int, version: int) -> None:
        """Registers or refreshes a member that was admitted."""
        group = self._groups.get(data.group) or ConsumerGroup(data.group, self._limits)
        member = group.members.get(connection)
        now_s = self._clock.monotonic_s()
        if member is not None and member.data is data:  # its last heartbeat once more
            member.seen_s = now_s
            return
        self.generation.increment()
        if member is not None:
            before = member.subscriptions
            changed = member.update(data, now_s)
            self._note(group, member, before)
            if changed:
                self._changed(group, "leaving" if data.leaving else "subscribed", member)
            # Other queues of one member are no news to the rest: if they were, each rebalance would cause another.
            if member.has_news:
                group.claimed(member)
                queues = " ".join(map(str, data.assigned[:MAX_NAMED_MEMBERS]))
                self._history.add(group.name, "assigned", client_id, queues=queues, count=len(data.assigned))
            if member.sees_others:
                group.sees_others()
                self.check_soon(group, client_id)
            return
        member = Member(client_id, connection, data, language, version, now_s)
        member.update(data, now_s)
        group.members[connection] = member
        group.claimed(member)
        self._groups[group.name] = group
        self._names.setdefault(connection, set()).add(group.name)
        self._note(group, member, {})
        self._changed(group, "joined", member)

    def leave(self, connection: Session, name: str, event: str = "left") -> None:
        group = self._groups.get(name)
        member = group.members.pop(connection, None) if group else None
        if group is None or member is None:
            return
        self.generation.increment()
        names = self._names[connection]
        names.discard(name)
        if not names:
            del self._names[connection]
        group.foreign.pop(connection, None)
        group.take_shape(member, None)
        self._charge(member, 0)
        self._forget_topics(group, member.subscriptions)
        if not group.members:
            del self._groups[name]
        self._changed(group, event, member)

    def subscribing(self, topic: str) -> list[ConsumerGroup]:
        """The groups with a member that subscribes to the topic."""
        return [self._groups[name] for name in self._of_topic.get(topic, ())]

    def stale_topics(self, name: str, connection: Session) -> list[str]:
        """The topics of which one member sees another number of queues here than there are."""
        group = self._groups.get(name)
        member = group.members.get(connection) if group else None
        seen = [member] if member is not None and member.data.queue_counts else []
        return [topic for _, topic, _ in stale_counts(seen, self.broker_name, self._queues_of)]

    def stale(self) -> Iterator[tuple[str, Session, str]]:
        """Group, connection and topic of the members that see another number of queues here than there are."""
        for group in self:
            for member, topic, _ in stale_counts(group.members.values(), self.broker_name, self._queues_of):
                yield group.name, member.connection, topic

    def _note(self, group: ConsumerGroup, member: Member, before: Mapping[str, Subscription]) -> None:
        """A member's heartbeat has come; these were its subscriptions before."""
        self._charge(member, size_of(member.data))
        if before != member.subscriptions or not before:
            group.take_shape(member, shape_of(member.subscriptions.values()))
        if member.is_foreign:
            group.foreign[member.connection] = member
        else:
            group.foreign.pop(member.connection, None)
        if before.keys() == member.subscriptions.keys():
            return
        for topic in member.subscriptions:
            if topic not in before:
                group.topics[topic] += 1
                self._of_topic.setdefault(topic, {})[group.name] = None
        self._forget_topics(group, [topic for topic in before if topic not in member.subscriptions])

    def _charge(self, member: Member, size: int) -> None:
        """A membership takes so many bytes, which count as the connection's."""
        member.connection.charge(size - member.charged_bytes)
        member.charged_bytes = size

    def _forget_topics(self, group: ConsumerGroup, topics: Iterable[str]) -> None:
        """A member subscribes to these no more."""
        for topic in topics:
            group.topics[topic] -= 1
            if group.topics[topic]:
                continue
            del group.topics[topic]
            names = self._of_topic[topic]
            del names[group.name]
            if not names:
                del self._of_topic[topic]

    def drop(self, connection: Session, event: str = "closed") -> None:
        """The connection is gone, and with it its memberships."""
        for name in sorted(self._names.get(connection, ())):
            self.leave(connection, name, event)

    def heard_from(self, connections: Iterable[Session]) -> None:
        """Their members count as alive, as by a heartbeat that changes nothing."""
        now_s = self._clock.monotonic_s()
        for connection in connections:
            for name in self._names.get(connection, ()):
                self._groups[name].members[connection].seen_s = now_s

    def expired(self) -> Iterator[Session | None]:
        """Connections that sent no heartbeat for 120 s, to be dropped and closed; None after each piece of looking."""
        # ConsumerManager.CHANNEL_EXPIRED_TIMEOUT
        limit = self._clock.monotonic_s() - self._limits.heartbeat_limit_s
        looks = 0
        for group in self:
            for connection, member in list(group.members.items()):
                if member.seen_s < limit and group.members.get(connection) is member:
                    yield connection
                looks += 1
                if looks % LOOKS == 0:
                    yield None

    def _changed(self, group: ConsumerGroup, event: str, member: Member) -> None:
        self._history.add(group.name, event, member.client_id, members=len(group.members))
        log.info("member_changed", change=event, group=group.name, client=member.client_id, members=len(group.members))
        group.changed()
        self.check_soon(group, member.client_id)
        self._on_change(group)

    def check_soon(self, group: ConsumerGroup, client_id: str = "") -> None:
        """Checks the group at once; a large group, whose members may all join or leave, in turns and once for many
        changes."""
        if len(group.members) <= self._limits.checked_at_once:
            self.check(group, client_id)
        elif group.name not in self._to_check:
            self._to_check.add(group.name)
            self._turns.do(self._checking(group, client_id))

    def _checking(self, group: ConsumerGroup, client_id: str) -> Work[None]:
        yield
        self._to_check.discard(group.name)
        found = yield from group.finding_faults(self.broker_name, self._queues_of)
        self._report(group, client_id, found)

    def check(self, group: ConsumerGroup, client_id: str = "") -> None:
        """Reports where members disagree, each disagreement once."""
        self._report(group, client_id, group.faults(self.broker_name, self._queues_of))

    def _may_log(self, name: str) -> bool:
        """Whether the log does not have enough of a group: members that disagree in ever other ways do not fill it."""
        if self._clock.monotonic_s() - self._logged_since_s >= REPORT_AGAIN_S:
            self._logged.clear()
            self._logged_since_s = self._clock.monotonic_s()
        self._logged[name] += 1
        return self._logged[name] <= self._limits.max_logged_faults

    def _report(self, group: ConsumerGroup, client_id: str, faults: frozenset[str]) -> None:
        for fault in sorted(faults - group.reported):
            if self._may_log(group.name):
                log.warning("members_disagree", group=group.name, fault=fault)
            self._history.add(group.name, "disagreement", client_id, fault=fault)
        group.reported = faults


# ------------------------------------------------------------------------------
# One client's membership in one group: its own word on itself, and the memory that it takes.


POPS: Final = "CONSUME_POP"  # the kind of a member that pops messages and pulls no queue

Shape = frozenset[tuple[str, str]]  # topics and expressions, of long ones their summaries


@dataclass(slots=True, eq=False)
class Member:
    """One client's membership in one group. Times are of the monotonic clock, in seconds. topics: its subscribed ones,
    without the retry topic that all members have. has_pulled: though the group's members are to pop. is_presumed: it has
    sent no heartbeat, and its id is that of the queue's last reader."""

    client_id: str
    connection: Session
    data: ConsumerData
    language: int
    version: int
    seen_s: float
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    shape: Shape = frozenset()
    charged_bytes: int = 0
    has_news: bool = False
    sees_others: bool = False  # other numbers of queues than before
    has_pulled: bool = False
    is_presumed: bool = False

    @property
    def is_foreign(self) -> bool:
        """Apache's push consumers in a group that shares queues: they do not say how they allocate."""
        # Apache's pull consumers divide queues among themselves, and broadcasting ones share nothing: both are left
        # alone.
        data = self.data
        return not data.strategy and data.message_model == "CLUSTERING" and data.consume_type == "CONSUME_PASSIVELY"

    @property
    def pops(self) -> bool:
        return self.data.consume_type == POPS

    @property
    def is_seat(self) -> bool:
        """Whether it only stands for a client, which cannot be told or asked anything here."""
        return self.pops and not self.connection.peer

    @property
    def listed_id(self) -> str:
        """Its name in the list by which members share queues out. One that pops is the last of all: the first ones are given
        the group's retry topic, which it does not read."""
        return f"~{self.client_id}" if self.pops else self.client_id

    def update(self, data: ConsumerData, now_s: float) -> bool:
        """Takes over a heartbeat. True if a topic came or went, or the member is about to leave."""
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
        self.has_news = data.assigned != last.assigned
        self.sees_others = data.queue_counts != last.queue_counts
        if before != fresh.keys():
            self.topics = frozenset(topic for topic in fresh if not topic.startswith(RETRY_PREFIX))
        self.subscriptions = fresh
        self.data = data
        self.seen_s = now_s
        return changed


def shape_of(subscriptions: Iterable[Subscription]) -> Shape:
    return frozenset((item.topic, item.summary) for item in subscriptions)


def size_of(data: ConsumerData) -> int:
    """About how many bytes a membership takes."""
    seen = len(data.queue_counts) + sum(map(len, data.queue_counts.values()))
    subscriptions = sum(map(subscription_bytes, data.subscriptions))
    return MEMBER_BYTES + subscriptions + PLACE_BYTES * (len(data.assigned) + seen)


# ------------------------------------------------------------------------------
# The shares of a topic whose readers all use STICKY: the broker shares the queues out, because it costs every member
# the list of all owners to do so itself, and that grows with the square of the members.
#
# The members ask the first broker of a topic, so that they are told parts of one whole. It starts from the shares of
# before, and from the queues that members say they own: after a restart, or when another broker is asked, that is all
# there is. Locks keep owners single whatever members are told.


class StickyShares:
    """Shares out one topic in one group. owners: the member that was to have each queue last, or that says it does."""

    def __init__(self, topic: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._topic = topic
        self._shares: dict[str, list[Queue]] = {}
        self._of: tuple[dict[str, int], list[str]] | None = None  # the queues and members that these are of
        self._is_doubtful = True
        self._count = 0  # queues
        self.owners: dict[Queue, str] = {}

    def claim(self, queue: Queue, client_id: str) -> None:
        """A member says that it owns a queue. There are no more owners than there may be queues."""
        if queue in self.owners or len(self.owners) < self._limits.max_shared_queues:
            self.owners[queue] = client_id

    def forget(self) -> None:
        """Members are others than before, and will all be told."""
        self._is_doubtful, self._of = True, None

    def doubt(self) -> None:
        """Some member sees other queues than before, all of them perhaps the same."""
        self._is_doubtful = True

    def of(
        self, client_id: str, seen_queues: Mapping[str, int], sorted_ids: Callable[[], list[str]]
    ) -> BrokerShare | None:
        """The member's share, computed for all members when the first of them asks; None for a client that is no member."""
        if self._is_doubtful:
            self._is_doubtful = False
            # For the same queues they stay: some members were told, and claims since then could divide them otherwise.
            now = dict(seen_queues), sorted_ids()
            if now != self._of:
                self._of, self._shares = now, self._share_out(*now)
        share = self._shares.get(client_id)
        return None if share is None else BrokerShare(len(self._shares), self._count, _numbers(share))

    def _share_out(self, seen_queues: dict[str, int], client_ids: list[str]) -> dict[str, list[Queue]]:
        queues = sorted(
            Queue(self._topic, name, number) for name, count in seen_queues.items() for number in range(count)
        )
        shares = STICKY.share_out(queues, client_ids, self.owners) if client_ids else {}
        self.owners = {queue: client_id for client_id, share in shares.items() for queue in share}
        self._count = len(queues)
        return shares


def _numbers(share: list[Queue]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for queue in share:
        numbers.setdefault(queue.broker_name, []).append(queue.queue_id)
    return numbers


# ------------------------------------------------------------------------------
# Finds where the members of a group disagree with each other or with the broker, in words that name them.


def finding_faults(members: list[Member], broker_name: str, queues_of: Callable[[str], int]) -> Work[frozenset[str]]:
    """Makes texts that name the members that disagree, in pieces."""
    topics, expressions = Counter[str](), dict[str, dict[str, list[str]]]()
    settings: dict[str, dict[str, list[str]]] = {"message models": {}, "allocation strategies": {}}
    ids = Counter[str]()
    stale: list[str] = []
    for number, member in enumerate(members, 1):
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
    doubled = [item for item in ids.most_common(MAX_NAMED_MEMBERS) if item[1] > 1]
    return frozenset(
        (
            *_differing_topics(members, topics, expressions),
            *_differing("message models", settings["message models"]),
            *_differing("allocation strategies", settings["allocation strategies"]),
            *(f"{count} live connections with the client id {name}" for name, count in doubled),
            *stale,
        )
    )


def _differing_topics(
    members: list[Member], topics: Counter[str], expressions: dict[str, dict[str, list[str]]]
) -> Iterator[str]:
    retrying = sum(not member.pops for member in members)
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
    """The members that see a wrong number of queues here, with the topic and that number."""
    for member in members:
        for topic, count in member.data.queue_counts.get(broker_name, {}).items():
            if topic in member.subscriptions and count != queues_of(topic):
                yield member, topic, count


def _named(names: list[str], between: str = ", ") -> str:
    """The first of very many."""
    more = len(names) - MAX_NAMED_MEMBERS
    first = (name[:MAX_NAMED_CHARS] for name in names[:MAX_NAMED_MEMBERS])
    return between.join(first) + (f" and {more} more" if more > 0 else "")


# ------------------------------------------------------------------------------
# Remembers the list of members that each foreign member was given last: by it the member shares the queues out.
#
# All who ask between two changes are given the same list. So memory grows with the changes, not with members times
# members, and the members that take a queue for their own are found without a look at most of them: the queues go to
# the first of a list.


class MemberList:
    """Client ids, as members are told them. The same object for all that are told the same."""

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

    def told(self, client_id: str) -> list[str]:
        """The list as this member is told it."""
        return self.ids or [client_id]


ALONE: Final = MemberList([])  # each is told of itself only, and claims all queues of its topics (`allotment`)

_Connections = dict[Session, None]
_Readers = dict[str, _Connections]  # the readers of one list, by client id


class _Had(NamedTuple):
    """times: how often the member was given this list, without another one between."""

    members: MemberList
    client_id: str
    times: int


class Given:
    """The lists that were given, in all groups. Beyond 1,000,000 client ids in all lists, the oldest are forgotten: their
    members count as given none."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._lists: dict[str, dict[MemberList, _Readers]] = {}
        self._of: dict[str, dict[Session, _Had]] = {}
        self._age: OrderedDict[MemberList, str] = OrderedDict()
        self._ids = 0

    def give(self, group: str, connection: Session, client_id: str, members: MemberList) -> None:
        times = self.times(group, connection) if self.of(group, connection) is members else 0
        self.forget(group, connection)
        lists = self._lists.setdefault(group, {})
        if members not in lists:
            lists[members] = {}
            if members is not ALONE:  # ALONE is shared by all groups, and has no ids
                self._age[members] = group
            self._ids += len(members.ids)
        lists[members].setdefault(client_id, {})[connection] = None
        self._of.setdefault(group, {})[connection] = _Had(members, client_id, times + 1)
        while self._ids > self._limits.max_given_ids and len(self._age) > 1:
            self._forget_oldest()

    def of(self, group: str, connection: Session) -> MemberList | None:
        """The list that a member was given last; None if it was given none."""
        found = self._of.get(group, {}).get(connection)
        return found.members if found else None

    def times(self, group: str, connection: Session) -> int:
        """How often a member was given the list that it was given last."""
        found = self._of.get(group, {}).get(connection)
        return found.times if found else 0

    def forget(self, group: str, connection: Session) -> None:
        had = self._of.get(group, {}).pop(connection, None)
        if had is None:
            return
        members, client_id, _ = had
        readers = self._lists[group][members]
        del readers[client_id][connection]
        if not readers[client_id]:
            del readers[client_id]
        if not readers:
            self._drop(group, members)

    def forget_group(self, group: str) -> None:
        for members in list(self._lists.get(group, ())):
            self._drop(group, members)
        self._of.pop(group, None)

    def keep(self, group: str, members: Container[Session]) -> None:
        """Forgets those that are no members any more."""
        for connection in [item for item in self._of.get(group, ()) if item not in members]:
            self.forget(group, connection)

    def _forget_oldest(self) -> None:
        members, group = next(iter(self._age.items()))
        for connections in self._lists[group][members].values():
            for connection in connections:
                del self._of[group][connection]
        self._drop(group, members)

    def _drop(self, group: str, members: MemberList) -> None:
        del self._lists[group][members]
        self._age.pop(members, None)
        self._ids -= len(members.ids)
        if not self._lists[group]:
            del self._lists[group]

    def claims(self, group: str, queues: Sequence[Queue]) -> Iterator[list[tuple[list[Queue], _Connections]]]:
        """The queues of a topic that members take for their own, one list after the other. Members with the same id take
        the same. Members that were told of themselves alone are left out: they claim all, and read what the broker lets
        them."""
        for members, readers in list(self._lists.get(group, {}).items()):
            if members is ALONE:
                continue
            count = len(members.ids)
            first = enumerate(members.order[: len(queues)])  # those behind get nothing
            yield [
                (AVG.allocate_at(index, count, queues), readers[client_id])
                for index, client_id in first
                if client_id in readers
            ]
