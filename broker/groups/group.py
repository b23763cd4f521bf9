"""A consumer group and its queues: all state of a group is in one object, and of a queue in a group in another one."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import structlog

from ...protocol.allocation import STICKY
from ...protocol.bodies import LOOKS, ConsumerData, GroupConfig, Work, finish
from ...protocol.group_bodies import BrokerShare
from ...protocol.names import RETRY_PREFIX, Subscription, sorted_ids
from ..config import (
    HANDOVER_LEASE_S,
    LIMITS,
    LOCK_LEASE_S,
    MAX_NAMED_MEMBERS,
    RELOOK_S,
    REPORT_AGAIN_S,
    LimitExceeded,
    Limits,
)
from ..messages.held_pulls import HeldPull
from ..messages.topics import MessageChanges
from ..runtime.clock import Timer
from ..runtime.runtime import Runtime
from ..sessions.refusal import Reason, Refusal
from ..sessions.session import Session
from ..store.journals import LeaseKey
from .members import (
    ALONE,
    History,
    Issued,
    Member,
    MemberList,
    Readers,
    SeenQueues,
    Shape,
    StickyShares,
    SubscribedTopic,
    finding_faults,
    shape_of,
    size_of,
    stale_counts,
)
from .owners import NO_OWNER
from .stages import NO_PEERS, Drain, QueueKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# One queue of a topic in one group. A GroupQueue is created with the first lease or pull, and released when it has no
# state left.


# in place of a dict of its own in each of a million groups with an offset alone
_NONE: Final[Any] = MappingProxyType({})


@dataclass(slots=True)
class Contest:
    """A queue with a foreign reader that another client wants to read, too.

    Attributes:
        reader: the client that pulled the queue last.
        began_s: when another client pulled it first.
        active_s: when the reader last pulled or committed.
        returned_s: when the reader last pulled, or its held pull was returned.
        wanted_s: when another client last pulled.
        waiting: the pulls of other clients that wait.
    """

    reader: Session
    began_s: float
    active_s: float
    returned_s: float
    wanted_s: float
    waiting: list[HeldPull] = field(default_factory=list)
    timer: Timer | None = None


class FinishedAhead(NamedTuple):
    """Messages after the committed offset of a queue that clients which popped have finished. The members that pull the queue
    now do not get them.

    Attributes:
        end: the offset after the last message that was popped.
        unfinished: the messages before it that are not finished, by offset, with their attempts.
    """

    end: int
    unfinished: Mapping[int, int]

    def has(self, offset: int) -> bool:
        return offset < self.end and offset not in self.unfinished


class TopicOffsets:
    """The offsets that a group has committed in a topic.

    Attributes:
        offsets: the next message that the group reads, by queue id.
        ahead: messages after these offsets that are finished, by queue id.
        of_owners: the last commits of lease owners, by queue id.
        rewinds: how often an offset went back.
        encoded: the entry of the state file, until an offset changes.
        handed_over: queues whose offsets are to be written soon.
        lost: how many messages retention deleted before the group had finished them, since the start.
    """

    __slots__ = ("ahead", "encoded", "handed_over", "lost", "of_owners", "offsets", "rewinds")

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        self.ahead: dict[int, FinishedAhead] | None = None
        self.of_owners: dict[int, int] | None = None
        self.rewinds = 0
        self.encoded: bytes | None = None
        self.handed_over: set[int] | None = None
        self.lost = 0


class GroupQueue:
    """A queue of a topic in a group: its owner, and what stands beside the owner.

    Attributes:
        key: topic and queue id.
        lease_key: group, topic and queue id.
        owner: the owner; only `Locks` changes it.
        renewed_s: when the lease, lock or reservation was granted or renewed last.
        waiters: the members that are notified when the lease, lock or reservation has ended; None if no member ever waited.
        former_end: the highest offset that the owner may have reached, if its lease is from before a restart: the end of the
            queue when this run began; 0 if its topic was deleted. None once the owner has pulled. Messages that the owner
            read after this offset were lost, and new messages get their offsets, which the owner must not skip.
        is_pull_recorded: True if the history has the first pull of the lease's owner.
        is_commit_recorded: True if the history has the first commit of the lease's owner.
        reader: the connection that pulled last, even beside the owner.
        previous_reader: the connection that pulled before the reader.
        reader_since_s: when the reader pulled first.
        given_offset: up to which offset the reader, if it is foreign, was given messages.
        has_committed: True if the reader has committed an offset of the queue.
        passed: messages that matched no subscription while a pull of the reader was held: the first offset, and the offset
            after the last one. None without any.
        contest: another client wants to read the queue of its foreign reader.
        version: increases when the owner or the contest changes, so that pulls are checked again.
    """

    __slots__ = (
        "contest",
        "former_end",
        "given_offset",
        "group",
        "has_committed",
        "is_commit_recorded",
        "is_pull_recorded",
        "key",
        "lease_key",
        "owner",
        "passed",
        "previous_reader",
        "reader",
        "reader_since_s",
        "renewed_s",
        "version",
        "waiters",
    )

    def __init__(self, group: ConsumerGroup, key: QueueKey) -> None:
        self.group = group
        self.key = key
        self.lease_key: LeaseKey = (group.name, *key)
        self.owner = NO_OWNER
        self.renewed_s = 0.0
        self.waiters: dict[Session, None] | None = None
        self.former_end: int | None = None
        self.is_pull_recorded = self.is_commit_recorded = False
        self.reader: Session | None = None
        self.previous_reader: Session | None = None
        self.reader_since_s = 0.0
        self.given_offset = 0
        self.has_committed = False
        self.passed: tuple[int, int] | None = None
        self.contest: Contest | None = None
        self.version = 0

    def set_reader(self, session: Session | None) -> None:
        """Set the connection that pulled last. What an earlier one was given, committed or passed does not count any more."""
        self.reader = session
        self.given_offset, self.has_committed, self.passed = 0, False, None

    def is_over(self, now_s: float) -> bool:
        """Return True if the lease, lock or reservation was not renewed in time."""
        return now_s - self.renewed_s > (LOCK_LEASE_S if self.owner.is_locked else HANDOVER_LEASE_S)

    def commit_fault(self, session: Session, key: QueueKey, epoch: int | None) -> str | None:
        """Return why the lease forbids a commit; None if it allows it. Only leases fence commits."""
        owner, (topic, queue_id) = self.owner, key
        if owner.holder is None or not owner.is_leased:
            # Apache's clients send no epoch, and nothing fences them (ConsumerManageProcessor.updateConsumerOffset).
            return None if epoch is None else f"the queue {topic}:{queue_id} is not locked by this client"
        if owner.holder.session is not session or (epoch is not None and epoch != owner.holder.epoch):
            return f"the queue {topic}:{queue_id} is owned by {owner.holder.client_id} (epoch {owner.holder.epoch})"
        return None


# ------------------------------------------------------------------------------
# What a group knows of the clients that pop: `broker/pops` is above this package.


class GroupPool(Protocol):
    """The pool of a topic that clients of a group pop.

    Attributes:
        is_divided: True if members pull some of the topic's queues.
    """

    @property
    def is_divided(self) -> bool: ...

    def is_used(self, now_s: float) -> bool:
        """Return True if clients pop the topic now, or have unfinished messages of it."""
        ...


# ------------------------------------------------------------------------------
# The members of each consumer group, and their subscriptions.
#
# Apache's broker keeps one table of subscriptions per group, which every heartbeat overwrites, so that members with
# different topics erase each other's. Here each member has its own; the group's subscription is their union. A member
# is a session in a group (docs/decisions, 24): pulls and commits say no client id, so one connection cannot be two members
# of a group. A client that reconnects is two members with one id until the old connection is closed.


Owners = Mapping[str, list[str]]  # by topic, the owner of each of its queues here, in their order
_NOWHERE: Mapping[str, int] = {}
_NOBODY: Mapping[Session, Member] = {}


class ConsumerGroup:
    """The state of a group in the broker.

    Attributes:
        settings: the group's settings; None if it does not exist for administrators.
        offsets: the committed offsets, by topic.
        queues: the queues with an owner or a reader.
        missing_readers: how many queues have foreign readers that are not back yet, after a restart of the broker or a closed
            connection.
        change: the number of the last change of members or topics; 0 without members.
        drain: the change that not all foreign members know yet.
        sync: what peer brokers have said about that change.
        previous_ids: the client ids of the members when the last drain was over.
        owners: the owner of each queue here by the last change, if the group has foreign members.
        owners_found_s: when the owners were found last.
        issued: the member list that each foreign member was given last.
        issued_lists: the foreign members that were given each list.
        has_bound_members: True if the group has, or had, members that claim more queues than their own.
        bound_since_s: the members that were given a list of themselves alone before the last one.
        foreign: those of the members that are Apache's push consumers.
        topics: the topics to which members subscribe.
        reported: the disagreements of members that were reported, so that each is logged once.
        is_check_due: True if the members will be checked for disagreements soon.
        logged: an interval of time, and how many disagreements of the group were logged in it.
        pools: the pools of the clients that pop, by topic.
        version: increases when members, subscriptions, member lists, drains or pools change, so that pulls are checked again.
        unfinished: how many popped messages are not finished; only `QueueDeliveries` changes it.
        redelivered: how many popped messages were redeliveries, since the start.
        has_lost: True if retention has deleted messages before the group had committed them; not for those of lite topics.
        is_uneven: True if foreign members subscribe to different topics, so that they claim more queues than they own.
    """

    __slots__ = (
        "_alone",
        "_companions",
        "_limits",
        "_of_shape",
        "_places_of_all",
        "_strategies",
        "bound_since_s",
        "change",
        "drain",
        "foreign",
        "has_bound_members",
        "has_lost",
        "is_check_due",
        "is_uneven",
        "issued",
        "issued_lists",
        "logged",
        "members",
        "missing_readers",
        "name",
        "offsets",
        "owners",
        "owners_found_s",
        "pools",
        "previous_ids",
        "queues",
        "redelivered",
        "reported",
        "settings",
        "sync",
        "topics",
        "unfinished",
        "version",
    )

    def __init__(self, name: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self.name = name
        self.settings: GroupConfig | None = None
        self.offsets: dict[str, TopicOffsets] = _NONE
        self.queues: dict[QueueKey, GroupQueue] = _NONE
        self.missing_readers = 0
        self.change = 0
        self.drain: Drain | None = None
        self.sync = NO_PEERS
        self.previous_ids: frozenset[str] = frozenset()
        self.owners: Owners = _NONE
        self.owners_found_s: float | None = None
        self.issued: dict[Session, Issued] = _NONE
        self.issued_lists: dict[MemberList, Readers] = _NONE
        self.has_bound_members = False
        self.bound_since_s: dict[Session, float] = _NONE
        self.members: dict[Session, Member] = _NONE
        self.foreign: dict[Session, Member] = _NONE
        self.topics: dict[str, SubscribedTopic] = _NONE
        self.reported: frozenset[str] = frozenset()
        self.is_check_due = False
        self.logged = (0, 0)
        self.pools: dict[str, GroupPool] = _NONE
        self.version = 0
        self.unfinished = 0
        self.redelivered = 0
        self.has_lost = False
        self.is_uneven = False
        self._of_shape: dict[Shape, dict[Session, None]] = _NONE
        self._places_of_all: dict[str, int] | None = None
        self._companions: dict[frozenset[str], MemberList] = _NONE
        self._strategies: frozenset[str] | None = None
        self._alone: frozenset[frozenset[str]] = frozenset()  # the topics of members whose lists have them alone

    def begin_membership(self) -> None:
        """Create the state of a group with members, because the first one joins."""
        self.owners, self.issued, self.issued_lists, self.bound_since_s = {}, {}, {}, {}
        self.members, self.foreign, self.topics, self._of_shape, self._companions = {}, {}, {}, {}, {}

    def end_membership(self) -> None:
        """Drop what is known of the members, because the last one is gone."""
        self.members = self.foreign = self.topics = self._of_shape = self._companions = _NONE
        self._places_of_all = None
        self.reported = frozenset()
        self.is_uneven, self._alone = False, frozenset()

    @property
    def message_model(self) -> str:
        return next(iter(self.members.values())).data.message_model

    @property
    def is_broadcasting(self) -> bool:
        """True if every member gets every message: members keep their own offsets, and the group has none."""
        models = {member.data.message_model for member in self.members.values()}
        return models == {"BROADCASTING"}

    @property
    def is_unused(self) -> bool:
        """True if nothing is known of the group that a new object would not have."""
        return not (self.members or self.queues or self.offsets or self.settings or self.pools)

    def offset(self, topic: str, queue_id: int) -> int | None:
        """Return the committed offset of a queue."""
        item = self.offsets.get(topic)
        return item.offsets.get(queue_id) if item is not None else None

    def finished_ahead(self, topic: str, queue_id: int) -> FinishedAhead | None:
        """Return the messages after the committed offset that are finished; None without any."""
        item = self.offsets.get(topic)
        return item.ahead.get(queue_id) if item is not None and item.ahead is not None else None

    def is_behind_owner(self, topic: str, queue_id: int, offset: int) -> bool:
        """Return True if an offset is lower than the one that the last owner of a lease has committed."""
        item = self.offsets.get(topic)
        return item is not None and item.of_owners is not None and offset < item.of_owners.get(queue_id, 0)

    def issued_to(self, session: Session) -> MemberList | None:
        """Return the list that a member was given last; None if it was given none."""
        issued = self.issued.get(session)
        return issued.members if issued is not None else None

    def is_alone(self, session: Session) -> bool:
        """Return True if the last list of a member has the member alone."""
        issued = self.issued.get(session)
        return issued is not None and issued.members is ALONE

    # Foreign members that claim other queues than they own (`Allotment` in drains.py)

    def is_bound(self, session: Session, topic: str, now_s: float) -> bool:
        """Return True if a foreign member claims more queues of a topic than it owns."""
        issued = self.issued_to(session)
        # the member may have got a list of itself alone before a restart of the broker
        if issued is ALONE or (issued is None and self.is_uneven):
            return True
        # members get lists without the other subscribers of the retry topic
        if self.is_uneven and topic.startswith(RETRY_PREFIX):
            return True
        since_s = self.bound_since_s.get(session)
        if since_s is None:
            return False
        return now_s < since_s + (RELOOK_S if self.is_mid_rebalance(session) else self._limits.drained_wait_s)

    def is_mid_rebalance(self, session: Session) -> bool:
        """Return True if a member may read queues of some topic by an earlier list. Such a member requests the list
        once for each of its topics, one after the other, and then drops queues of that topic."""
        member = self.foreign.get(session)
        if member is None:
            return False
        topics = sum(1 for topic in member.subscriptions if self.owners.get(topic))
        issued = self.issued.get(session)
        return (issued.times if issued is not None else 0) < topics

    def may_bind(self, session: Session) -> bool:
        """Return True if a member claims more queues than it owns, now or after some time."""
        if not self.has_bound_members or not self.members:
            return False
        return self.is_uneven or self.is_alone(session) or session in self.bound_since_s

    def is_owned_by_other(self, session: Session, topic: str, queue_id: int, now_s: float) -> bool:
        """Return True if a foreign member claims a queue of another owner."""
        member = self.foreign.get(session) if self.has_bound_members else None
        if member is None or not self.is_bound(session, topic, now_s):
            return False
        owner = self.owner_of(topic, queue_id)
        return self.is_uneven if owner is None else owner != member.client_id

    def is_new_reader(self, session: Session, topic: str, queue_id: int, now_s: float) -> bool:
        """Return True if a foreign member begins to read a queue that it has claimed for long, from an offset of then."""
        if not self.has_bound_members or session not in self.foreign:
            return False
        return self.is_bound(session, topic, now_s) and self.queue(topic, queue_id).reader is not session

    def late(self, losing: Iterable[set[Session]], reading: Container[Session]) -> list[Session]:
        """Return the members that lose queues and by their list read them: they have not requested it since.

        Args:
            losing: the sessions that lose queues.
            reading: the sessions that pull what they lose, and may have requested the list for other topics only.
        """
        sessions = dict.fromkeys(session for those in losing for session in those if session in self.foreign)
        return [session for session in sessions if self._is_late(session, is_reading=session in reading)]

    def _is_late(self, session: Session, *, is_reading: bool) -> bool:
        members = self.issued_to(session)
        if members is None:
            return False
        return members is not self.list_for(session) or (is_reading and self.is_mid_rebalance(session))

    # Owners

    def owner_of(self, topic: str, queue_id: int) -> str | None:
        """Return the client id of a queue's owner by the last change."""
        owners = self.owners.get(topic, ())
        return owners[queue_id] if queue_id < len(owners) else None

    def is_read_by_its_owner(self, topic: str, queue_id: int) -> bool:
        """Return True if a foreign member reads the queue, and owns it by the last change: a Rocketlet member that requests
        the queue does not know of the last change yet."""
        reader = self.queue(topic, queue_id).reader
        member = self.foreign.get(reader) if reader is not None else None
        return member is not None and member.client_id == self.owner_of(topic, queue_id)

    def is_drained(self, topic: str, queue_id: int) -> bool:
        """Return True if no other member may have the queue yet, because a foreign one reads it or may read it."""
        drain = self.drain
        if drain is not None and (drain.is_finding or drain.has((topic, queue_id))):
            return True
        return self.is_read_by_its_owner(topic, queue_id)

    def is_apart(self, topic: str, now_s: float) -> bool:
        """Return True if clients pop the topic and no member pulls it."""
        pool = self.pools.get(topic)
        return pool is not None and not pool.is_divided and pool.is_used(now_s)

    def is_moving(self, session: Session) -> bool:
        """Return True if the session may not read the same queues for long, so that checks of its pulls must not be
        cached."""
        return self.drain is not None or self.may_bind(session)

    @property
    def is_draining(self) -> bool:
        """True if foreign members do not know of a change yet."""
        return self.drain is not None and not self.drain.is_over

    def queue(self, topic: str, queue_id: int) -> GroupQueue:
        """Return what the group has of a queue, for reading: `NO_QUEUE` if it has nothing."""
        return self.queues.get((topic, queue_id), NO_QUEUE)

    def subscription(self, session: Session | None, topic: str) -> Subscription | None:
        """Return the subscription of this connection's member to a topic; without one, the newest subscription of the
        group."""
        member = self.members.get(session) if session else None
        if member is not None and topic in member.subscriptions:
            return member.subscriptions[topic]
        subscribed = self.topics.get(topic)
        if subscribed is None:
            return None
        if subscribed.newest is None:  # found once per change, because a client without a heartbeat pulls by it
            found = (item.subscriptions[topic] for item in self.members.values() if topic in item.subscriptions)
            subscribed.newest = max(found, key=lambda item: item.version, default=None)
        return subscribed.newest

    def subscriptions_of(self, session: Session) -> Mapping[str, Subscription]:
        """Return the member's subscriptions by topic; none for a session that is no member."""
        return self.members[session].subscriptions if session in self.members else {}

    def record_shape(self, member: Member, shape: Shape | None) -> None:
        """Record the subscriptions of a member; None if it has left."""
        if member.shape != shape:
            connections = self._of_shape.get(member.shape, {})
            connections.pop(member.session, None)
            if not connections:
                self._of_shape.pop(member.shape, None)
        if shape is not None:
            member.shape = shape
            self._of_shape.setdefault(shape, {})[member.session] = None
        for subscribed in self.topics.values():
            subscribed.newest = None

    def record_version(self, member: Member, topic: str, version: int) -> None:
        """Record a later version of a member's subscription that is otherwise unchanged."""
        known = member.subscriptions[topic]
        if version > known.version:
            member.subscriptions[topic] = replace(known, version=version)
            self.topics[topic].newest = None

    def other_than(self, session: Session, shape: Shape) -> Member | None:
        """Return a member with other subscriptions, without reading all members that subscribe to the same topics."""
        for other, connections in self._of_shape.items():
            if other != shape:
                found = next((item for item in connections if item is not session), None)
                if found is not None:
                    return self.members[found]
        return None

    def client_ids(self, topic: str | None = None) -> list[str]:
        """Return the ids of the members that are not leaving, each once; with a topic, only of members that subscribe
        to it."""
        return finish(self.listing(topic))

    def listing(self, topic: str | None = None) -> Work[list[str]]:
        """Return the ids like `client_ids`, in pieces."""
        # Each id once: a client that reconnects has two connections until the old one is closed.
        ids: dict[str, None] = {}
        for number, member in enumerate(list(self.members.values()), 1):
            if not member.data.leaving and (topic is None or topic in member.subscriptions):
                ids[member.listed_id] = None
            if number % LOOKS == 0:
                yield
        return list(ids)

    def companions(self, session: Session) -> MemberList:
        """Return the members that share a topic with this member.

        GET_CONSUMER_LIST_BY_GROUP of an Apache push consumer names no topic, and the consumer allocates each of its topics
        among all client ids in the response.
        """
        asking = self.members.get(session)
        return self._near(asking.topics if asking is not None else frozenset())

    def _near(self, topics: frozenset[str]) -> MemberList:
        """Return the members that subscribe to one of these topics; without topics, all members. The result is cached
        until the members change, for up to `max_compared` sets of topics."""
        if not self.members:
            return MemberList([])
        found = self._companions.get(topics)
        if found is None:
            staying = (member for member in self.members.values() if not member.data.leaving)
            near = (member for member in staying if not topics or not topics.isdisjoint(member.topics))
            found = MemberList(list(dict.fromkeys(member.listed_id for member in near)))
            if len(self._companions) < self._limits.max_compared:
                self._companions[topics] = found
        return found

    def differs(self) -> bool:
        """Return True if members subscribe to different topics, besides the group's retry topic, which all have."""
        first = next(iter(self.members.values()), None)
        return first is not None and any(member.topics != first.topics for member in self.members.values())

    def binding(self, *, is_uneven: bool, retry_queues: int) -> Work[None]:
        """Choose the member lists of foreign members by the future owners of the queues.

        Members that share all their topics with the same others get a list of those, unless the retry topic has several
        queues, of which some would have no reader. Other members get a list of themselves alone.
        """
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
        self.is_uneven, self._alone = is_uneven, frozenset(alone)

    def list_for(self, session: Session) -> MemberList:
        """Return the list for a foreign member that may know of the last change."""
        member = self.foreign.get(session)
        return ALONE if member is not None and member.topics in self._alone else self.companions(session)

    def place(self, client_id: str, topic: str | None) -> tuple[int, int]:
        """Return a client's position among the members that subscribe to a topic, -1 if it is none of them, and the
        number of these members. They are sorted once per change, because members query their position after each
        change."""
        places = self.order(topic)
        return places.get(client_id, -1), len(places)

    def order(self, topic: str | None) -> Mapping[str, int]:
        """Return the ids of the clients that subscribe to a topic, in Java's sorting order, each with its position."""
        return finish(self.ordering(topic))

    def ordering(self, topic: str | None) -> Work[Mapping[str, int]]:
        """Return the ids like `order`, in pieces, because a group of 10,000 members is listed and sorted in 8 ms."""
        subscribed = self.topics.get(topic) if topic is not None else None
        if topic is not None and subscribed is None:
            return _NOWHERE  # topics that clients name in requests are not cached
        places = subscribed.places if subscribed is not None else self._places_of_all
        if places is None:
            version, ids = self.version, sorted_ids((yield from self.listing(topic)))
            places = {item: index for index, item in enumerate(ids)}
            if len(ids) > LOOKS:
                yield
            if self.version != version:  # members have joined or left meanwhile
                return places
            if subscribed is not None:
                subscribed.places = places
            else:
                self._places_of_all = places
        return places

    def seen_queues(self, topic: str) -> SeenQueues:
        """Return how many queues of a topic the members see, including those of a broker that is away, which a new member
        cannot find."""
        subscribed = self.topics.get(topic)
        if subscribed is None:
            return SeenQueues({}, 0)
        if subscribed.seen is None:
            subscribed.seen = SeenQueues.of(self.members.values(), topic, self._limits.max_seen_queues)
        return subscribed.seen

    def record_counts(self, member: Member, topic: str, counts: Mapping[str, int]) -> None:
        """Record the queue counts of a topic, by broker, that a member sees in its route."""
        seen = {name: topics[topic] for name, topics in member.data.queue_counts.items() if topic in topics}
        if seen != counts:
            others = {
                name: {other: count for other, count in topics.items() if other != topic}
                for name, topics in member.data.queue_counts.items()
            }
            for name, count in counts.items():
                others.setdefault(name, {})[topic] = count
            member.data = replace(member.data, queue_counts=others)
            self.drop_seen_queues()

    def share(self, client_id: str, topic: str) -> BrokerShare | None:
        """Return a member's queues of a topic if all members of the group use STICKY; otherwise None, and None for a
        client that is no member."""
        if topic not in self.topics or self.strategies() != {STICKY.name}:
            return None
        seen = self.seen_queues(topic)
        if seen.total > self._limits.max_shared_queues:
            return None
        return self._sticky(topic).of(client_id, seen.of_brokers, lambda: list(self.order(topic)))

    def _sticky(self, topic: str) -> StickyShares:
        """Return the allocation of a subscribed topic, created if there is none."""
        subscribed = self.topics[topic]
        if subscribed.sticky is None:
            subscribed.sticky = StickyShares(topic, self._limits)
        return subscribed.sticky

    def record_claims(self, member: Member) -> None:
        """Record the queues that a member reports as its own, if it uses STICKY."""
        for queue in member.data.assigned:
            if member.data.strategy == STICKY.name and queue.topic in member.subscriptions:
                self._sticky(queue.topic).claim(queue, member.client_id)

    def clear_computed(self) -> None:
        """Drop what was computed from the members, because members, their topics or strategies have changed."""
        self._places_of_all = None
        self._companions.clear()
        self._strategies = None
        for subscribed in self.topics.values():
            subscribed.places = subscribed.seen = None
            if subscribed.sticky is not None:
                subscribed.sticky.forget()

    def drop_seen_queues(self) -> None:
        """Drop what was computed from the queue counts that members report, because the counts have changed."""
        for subscribed in self.topics.values():
            subscribed.seen = None
            if subscribed.sticky is not None:
                subscribed.sticky.check_again()

    def strategies(self) -> frozenset[str]:
        """Return the allocation strategies of members that pull, with "foreign" for those that report none."""
        if self._strategies is None:
            pulling = (member for member in self.members.values() if not member.pops)
            self._strategies = frozenset(member.data.strategy or "foreign" for member in pulling)
        return self._strategies


class _NoQueue(GroupQueue):
    """Stands for a queue of which its group has no state. Its fields cannot be set."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: the queue is a placeholder; use ConsumerGroups.obtain_queue")

    def __init__(self) -> None:
        for name in GroupQueue.__slots__:
            object.__setattr__(self, name, None)
        object.__setattr__(self, "given_offset", 0)
        object.__setattr__(self, "owner", NO_OWNER)


NO_QUEUE: Final[GroupQueue] = _NoQueue()


class GroupChanges(MessageChanges):
    """The facts that groups report to the parts above them, besides those of messages. The broker overrides what it
    needs."""

    def members_changed(self, group: ConsumerGroup) -> None:
        """Handle a change of a group's members, of their topics or strategies. The group may have no members left."""

    def lease_freed(self, group: ConsumerGroup, waiter: Session) -> None:
        """Handle a lease that ended while a member waited for its queue."""

    def queue_refused(self, group: ConsumerGroup, key: QueueKey) -> None:
        """Handle the refusal of a queue to a member, because a foreign member reads or owns it."""

    def owners_moved(self, group: ConsumerGroup) -> None:
        """Handle new owners of queues in a group whose members have not changed."""

    def peer_away(self, group: ConsumerGroup) -> None:
        """Handle a peer broker of the group that is not waited for any more."""

    def ahead_ended(self, group: ConsumerGroup, key: QueueKey) -> None:
        """Handle finished messages after a queue's committed offset that need not be kept any more (`FinishedAhead`)."""

    def leases_changed(self) -> None:
        """Save changed leases, and offsets of queues that were handed over, soon."""

    def queue_released(self, group: ConsumerGroup, key: QueueKey, reader: Session | None) -> None:
        """Handle a queue whose foreign reader has handled its messages, or, if `reader` is None, a queue that no
        longer waits for its reader from before a restart. The next reader continues at the committed offset."""


class QueueCounts(Protocol):
    """The topics, as far as groups need them."""

    def queues_of(self, topic: str) -> int: ...


class TopicGroups:
    """The groups that have anything of a topic.

    Attributes:
        parts: how much each group has: its offsets, its subscription, its pool and each queue count as one.
        pools: the pools of clients that pop the topic.
    """

    __slots__ = ("parts", "pools")

    def __init__(self) -> None:
        self.parts: dict[ConsumerGroup, int] = {}
        self.pools: dict[GroupPool, None] = {}


class ConsumerGroups:
    """All groups.

    Args:
        topics: how many queues of a topic may be read.
        changes: receives the facts that groups report.
    """

    def __init__(
        self,
        runtime: Runtime,
        history: History,
        broker_name: str,
        topics: QueueCounts,
        changes: GroupChanges,
    ) -> None:
        self._limits = runtime.limits
        self.broker_name = broker_name
        self._queues_of = topics.queues_of
        self.changes = changes
        self._clock = clock = runtime.clock
        self._turns = runtime.turns
        self._log_window = 0  # the interval of REPORT_AGAIN_S in which logged disagreements are counted
        self._log_window_s = clock.monotonic_s()
        self._groups: dict[str, ConsumerGroup] = {}
        self._names: dict[Session, set[str]] = {}
        self._of_topic: dict[str, TopicGroups] = {}
        self._history = history
        self.generation = runtime.generation
        self.get = self._groups.get

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(list(self._groups.values()))

    @property
    def count(self) -> int:
        """Return the number of groups that have state in the broker."""
        return len(self._groups)

    def online(self, name: str) -> ConsumerGroup | None:
        """Return the group if it has members."""
        group = self._groups.get(name)
        return group if group is not None and group.members else None

    def obtain(self, name: str) -> ConsumerGroup:
        """Return the group, created if the broker has nothing of it. Call `release` if it may stay unused."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = ConsumerGroup(name, self._limits)
        return group

    def release(self, group: ConsumerGroup) -> None:
        """Delete the group if nothing is left of it."""
        if group.is_unused and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def queue(self, name: str, topic: str, queue_id: int) -> GroupQueue:
        """Return what a group has of a queue, for reading: `NO_QUEUE` if it has nothing."""
        group = self._groups.get(name)
        return group.queue(topic, queue_id) if group is not None else NO_QUEUE

    def obtain_queue(self, group: ConsumerGroup, key: QueueKey) -> GroupQueue:
        """Return the group's queue, created if the group has nothing of it."""
        queue = group.queues.get(key)
        if queue is None:
            if group.queues is _NONE:
                group.queues = {}
            queue = group.queues[key] = GroupQueue(group, key)
            found = self._of_topic.get(key[0])
            if found is not None and group in found.parts:  # without a call: a request may lock 8,192 queues
                found.parts[group] += 1
            else:
                self._add_part(group, key[0])
        return queue

    def release_queue(self, queue: GroupQueue) -> None:
        """Delete the queue if nothing is known of it that a new object would not have, and its group then."""
        if (
            queue.owner is not NO_OWNER
            or queue.reader is not None
            or queue.previous_reader is not None
            or queue.contest is not None
        ):
            return
        group, key = queue.group, queue.key
        if group is not None and group.queues.get(key) is queue:
            del group.queues[key]
            parts = self._of_topic[key[0]].parts
            if parts[group] > 1:
                parts[group] -= 1
            else:
                self._remove_part(group, key[0])
            if not group.queues:
                group.queues = _NONE
                self.release(group)

    def owners(self, name: str) -> dict[QueueKey, str]:
        """Return the client ids with the leases, locks and reservations of a group's queues."""
        group = self._groups.get(name)
        queues = group.queues if group is not None else {}
        holders = ((key, queue.owner.holder) for key, queue in queues.items())
        return {key: holder.client_id for key, holder in holders if holder is not None}

    def queues(self) -> list[GroupQueue]:
        return [queue for group in self._groups.values() for queue in group.queues.values()]

    def add_offsets(self, group: ConsumerGroup, topic: str) -> TopicOffsets:
        """Return a place for the first offset of a group in a topic."""
        if group.offsets is _NONE:
            group.offsets = {}
        item = group.offsets[topic] = TopicOffsets()
        self._add_part(group, topic)
        return item

    def remove_offsets(self, group: ConsumerGroup, topic: str) -> None:
        """Delete the offsets of a group in a topic, and the group if nothing is left of it."""
        del group.offsets[topic]
        self._remove_part(group, topic)
        self.release(group)

    def add_pool(self, group: ConsumerGroup, topic: str, pool: GroupPool) -> None:
        """Add the pool of a topic that clients of a group begin to pop."""
        if group.pools is _NONE:
            group.pools = {}
        group.pools[topic] = pool
        group.version += 1
        self._add_part(group, topic).pools[pool] = None

    def remove_pool(self, group: ConsumerGroup, topic: str, pool: GroupPool) -> None:
        """Delete the pool of a topic, and the group if nothing is left of it."""
        if group.pools.get(topic) is pool:
            del group.pools[topic]
        group.version += 1
        del self._of_topic[topic].pools[pool]
        self._remove_part(group, topic)
        self.release(group)

    def pools_of(self, topic: str) -> Collection[GroupPool]:
        """Return the pools of a topic, of all groups."""
        found = self._of_topic.get(topic)
        return found.pools if found is not None else ()

    def of_topic(self, topic: str) -> list[ConsumerGroup]:
        """Return the groups that have anything of a topic."""
        return list(self._parts_of(topic))

    def topics_with_offsets(self) -> list[str]:
        """Return the topics in which any group has an offset."""
        return [topic for topic, of in self._of_topic.items() if any(topic in group.offsets for group in of.parts)]

    def _parts_of(self, topic: str) -> Mapping[ConsumerGroup, int]:
        found = self._of_topic.get(topic)
        return found.parts if found is not None else {}

    def _add_part(self, group: ConsumerGroup, topic: str) -> TopicGroups:
        """Count one more thing that a group has of a topic."""
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = TopicGroups()
        found.parts[group] = found.parts.get(group, 0) + 1
        return found

    def _remove_part(self, group: ConsumerGroup, topic: str) -> None:
        """Count one thing less that a group has of a topic."""
        parts = self._of_topic[topic].parts
        parts[group] -= 1
        if not parts[group]:
            del parts[group]
            if not parts:
                del self._of_topic[topic]

    def members_of(self, name: str) -> Mapping[Session, Member]:
        """Return the members of a group by session; none if there is no such group."""
        group = self._groups.get(name)
        return group.members if group is not None else _NOBODY

    def admit(self, session: Session, client_id: str, groups: Iterable[str]) -> None:
        """Check that a client may be a member of all these groups. Raises LimitExceeded if it is a member of too many
        groups or a group is full; Refusal if the connection is the member of one by another id."""
        known: Collection[str] = self._names.get(session, ())
        names = set(groups)
        for name in names.intersection(known):
            member = self._groups[name].members[session]
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

    def heartbeat(
        self, session: Session, client_id: str, data: ConsumerData, language: int, version: int
    ) -> ConsumerGroup:
        """Register or refresh a member that was admitted, and return its group."""
        group = self._groups.get(data.group) or self.obtain(data.group)
        member = group.members.get(session)
        now_s = self._clock.monotonic_s()
        if member is not None and member.data is data:  # the heartbeat equals the member's last one
            member.seen_s = now_s
            return group
        group.version += 1
        if member is not None:
            before = member.subscriptions
            changed = member.update(data, now_s)
            self._record_heartbeat(group, member, before)
            if changed:
                self._report_change(group, "leaving" if data.leaving else "subscribed", member)
            # A change of a member's owned queues alone does not notify the other members, because otherwise each
            # rebalance would cause another one.
            if member.has_new_claims:
                group.record_claims(member)
                queues = " ".join(map(str, data.assigned[:MAX_NAMED_MEMBERS]))
                self._history.add(group.name, "assigned", client_id, queues=queues, count=len(data.assigned))
            if member.has_new_counts:
                group.drop_seen_queues()
                self.check_soon(group, client_id)
            return group
        if not group.members:
            group.begin_membership()
        member = Member(client_id, session, data, language, version, now_s)
        member.update(data, now_s)
        group.members[session] = member
        self._names.setdefault(session, set()).add(group.name)
        self._record_heartbeat(group, member, {})
        group.record_claims(member)
        self._report_change(group, "joined", member)
        return group

    def leave(self, session: Session, name: str, event: str = "left") -> None:
        group = self._groups.get(name)
        member = group.members.get(session) if group else None
        if group is None or member is None:
            return
        del group.members[session]
        group.version += 1
        names = self._names[session]
        names.discard(name)
        if not names:
            del self._names[session]
        group.foreign.pop(session, None)
        group.record_shape(member, None)
        self._charge(member, 0)
        self._forget_topics(group, member.subscriptions)
        self._report_change(group, event, member)
        if not group.members:
            group.end_membership()
            self.release(group)

    def subscribing(self, topic: str) -> list[ConsumerGroup]:
        """Return the groups with a member that subscribes to the topic."""
        return [group for group in self._parts_of(topic) if topic in group.topics]

    def stale_topics(self, group: ConsumerGroup, session: Session) -> list[str]:
        """Return the topics of which a member sees another number of queues here than there are."""
        member = group.members.get(session)
        if member is None or not member.data.queue_counts:
            return []
        return [topic for _, topic, _ in stale_counts([member], self.broker_name, self._queues_of)]

    def stale(self) -> Iterator[tuple[str, Session, str]]:
        """Yield group, connection and topic of members that see another number of queues here than there are."""
        for group in self:
            for member, topic, _ in stale_counts(group.members.values(), self.broker_name, self._queues_of):
                yield group.name, member.session, topic

    def _record_heartbeat(self, group: ConsumerGroup, member: Member, before: Mapping[str, Subscription]) -> None:
        """Record the heartbeat of a member whose subscriptions were `before`."""
        self._charge(member, size_of(member.data))
        if before != member.subscriptions or not before:
            group.record_shape(member, shape_of(member.subscriptions.values()))
        if member.is_foreign:
            group.foreign[member.session] = member
        else:
            group.foreign.pop(member.session, None)
        if before.keys() == member.subscriptions.keys():
            return
        for topic in member.subscriptions:
            if topic not in before:
                if topic not in group.topics:
                    self._add_part(group, topic)
                    group.topics[topic] = SubscribedTopic()
                group.topics[topic].members += 1
        self._forget_topics(group, [topic for topic in before if topic not in member.subscriptions])

    def _charge(self, member: Member, size: int) -> None:
        """Charge the memory of a membership to its connection, in bytes."""
        member.session.charge(size - member.charged_bytes)
        member.charged_bytes = size

    def _forget_topics(self, group: ConsumerGroup, topics: Iterable[str]) -> None:
        """Remove a member's subscriptions to these topics."""
        for topic in topics:
            group.topics[topic].members -= 1
            if group.topics[topic].members:
                continue
            del group.topics[topic]
            self._remove_part(group, topic)

    def drop(self, session: Session, event: str = "closed") -> None:
        """End the memberships of a closed connection."""
        for name in sorted(self._names.get(session, ())):
            self.leave(session, name, event)

    def record_contact(self, connections: Iterable[Session]) -> None:
        """Record that the members of these connections are alive, as a heartbeat without changes does."""
        now_s = self._clock.monotonic_s()
        for session in connections:
            for name in self._names.get(session, ()):
                self._groups[name].members[session].seen_s = now_s

    def expired(self) -> Iterator[Session | None]:
        """Yield connections without a heartbeat for `heartbeat_limit_s`, and None after each piece of work."""
        # ConsumerManager.CHANNEL_EXPIRED_TIMEOUT
        limit = self._clock.monotonic_s() - self._limits.heartbeat_limit_s
        looks = 0
        for group in self:
            for session, member in list(group.members.items()):
                if member.seen_s < limit and group.members.get(session) is member:
                    yield session
                looks += 1
                if looks % LOOKS == 0:
                    yield None

    def _report_change(self, group: ConsumerGroup, event: str, member: Member) -> None:
        self._history.record_member_change(group, event, member.client_id, len(group.members))
        log.info("member_changed", change=event, group=group.name, client=member.client_id, members=len(group.members))
        group.clear_computed()
        self.check_soon(group, member.client_id)
        self.changes.members_changed(group)

    def check_soon(self, group: ConsumerGroup, client_id: str = "") -> None:
        """Report conflicts between the group's members, each conflict once: immediately, and for a large group in pieces,
        once for many changes."""
        if len(group.members) <= self._limits.checked_at_once:
            found = finish(finding_faults(list(group.members.values()), self.broker_name, self._queues_of))
            self._report(group, client_id, found)
        elif not group.is_check_due:
            group.is_check_due = True
            self._turns.do(self._checking(group, client_id))

    def _checking(self, group: ConsumerGroup, client_id: str) -> Work[None]:
        yield
        group.is_check_due = False
        found = yield from finding_faults(list(group.members.values()), self.broker_name, self._queues_of)
        self._report(group, client_id, found)

    def _may_log(self, group: ConsumerGroup) -> bool:
        """Count a disagreement of a group. Return False beyond `max_logged_faults` in one interval, so that members
        that disagree in ever other ways do not fill the log."""
        if self._clock.monotonic_s() >= self._log_window_s + REPORT_AGAIN_S:
            self._log_window += 1
            self._log_window_s = self._clock.monotonic_s()
        window, count = group.logged
        group.logged = self._log_window, count + 1 if window == self._log_window else 1
        return group.logged[1] <= self._limits.max_logged_faults

    def _report(self, group: ConsumerGroup, client_id: str, faults: frozenset[str]) -> None:
        for fault in sorted(faults - group.reported):
            if self._may_log(group):
                log.warning("members_disagree", group=group.name, fault=fault)
            self._history.add(group.name, "disagreement", client_id, fault=fault)
        group.reported = faults
