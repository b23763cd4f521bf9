"""Changes of groups: the queues that foreign members lose, the drain of these queues, and NOTIFY_CONSUMER_IDS_CHANGED."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import structlog

from ...protocol.allocation import AVG, STICKY, TopicQueues
from ...protocol.bodies import LOOKS, SLICE, WRITES, Route, TopicConfig, Work
from ...protocol.group_bodies import AgreedMembers, Place
from ...protocol.headers import AgreeOnMembers, PullMessage
from ...protocol.names import RETRY_PREFIX, Queue
from ..config import (
    DROPPED_AFTER_S,
    KNOWN_AFTER_S,
    LIMITS,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    NOTIFY_DELAY_S,
    RELOOK_S,
    REPEATS_S,
    STANDSTILL_S,
    TOLD_AGAIN,
    LimitExceeded,
    Limits,
)
from ..messages.held_pulls import HeldPulls, Until
from ..runtime.clock import Clock
from ..runtime.runtime import Runtime
from ..sessions.events import GroupChanged
from ..sessions.reports import Recent
from ..sessions.session import Session
from .agreement import Agreement, PeerLinks
from .group import ConsumerGroup, ConsumerGroups, Owners
from .leases import Locks
from .members import ALONE, History, Issued, MemberList
from .rates import RouteFinder
from .settings import GroupConfigs
from .stages import NOBODY, Drain, DrainEvent, DrainStage, IssuedByPeer, Others, QueueKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# The owner of each queue on this broker since the last change of its group, in groups with foreign members.
#
# Apache's clients request one member list, and allocate the queues of each topic by it. If members subscribe to different
# topics, no single list allocates each topic among its own subscribers. Where members with the same topics cannot share a
# list either (`ConsumerGroup.binding`), the broker returns to each of them a list of that member alone, with which it claims
# all queues of its topics, whatever its strategy. The broker allocates each topic among its real subscribers, and serves only
# a member's pulls of its own queues; other pulls wait until the member owns the queue. With a list of itself alone, a member
# need not drop a queue before another member reads it, and need not be notified of changes.


Routes = dict[str, Route]  # by topic


class Allotment:
    """The owners of queues in groups with foreign members, and the members that claim other queues than they own.

    Args:
        routes: finds which queues a topic has on all brokers, because members divide them all.
    """

    def __init__(self, runtime: Runtime, groups: ConsumerGroups, routes: RouteFinder) -> None:
        self._limits = runtime.limits
        self._broker_name = groups.broker_name
        self._groups = groups
        self.routes = routes
        self._tasks, self._turns, self._clock = runtime.tasks, runtime.turns, runtime.clock
        self._lists: OrderedDict[MemberList, ConsumerGroup] = OrderedDict()  # oldest first
        self._id_count = 0  # in all lists
        self.queue_count = 0  # queues with owners, in all groups, including those that are being found

    # Questions

    def observe_claim(self, group: ConsumerGroup, session: Session, topic: str, queue_id: int) -> None:
        """Compute owners again after a claim of a queue without an owner, because its topic is new or has grown."""
        is_unowned = group.owner_of(topic, queue_id) is None
        if is_unowned and group.is_owned_by_other(session, topic, queue_id, self._clock.monotonic_s()):
            self.find_owners(group)

    def queue_refused(self, group: ConsumerGroup, topic: str, queue_id: int) -> None:
        """Compute the owners again after a member was refused a queue that no member owns, or that its reader owns."""
        drain = group.drain
        if drain is not None and (drain.is_finding or drain.has((topic, queue_id))):
            return  # while a drain runs, the drain computes the owners
        if group.owner_of(topic, queue_id) is None or group.is_read_by_its_owner(topic, queue_id):
            self.find_owners(group)

    # Member lists

    def issue(self, group: ConsumerGroup, session: Session, client_id: str, members: MemberList) -> None:
        """Record that a member gets this list. Beyond the limit on client ids in all lists, the oldest lists are dropped, and
        their members count as members without a list."""
        before = group.issued.get(session)
        if (
            before is not None and before.members is ALONE and members is not ALONE
        ):  # the member drops queues soon that its new list gives to others
            group.bound_since_s[session] = self._clock.monotonic_s()
        elif members is ALONE:
            group.has_bound_members = True
        times = before.times if before is not None and before.members is members else 0
        if not times:
            group.version += 1
        self._withdraw(group, session)
        if members not in group.issued_lists:
            group.issued_lists[members] = {}
            if members is not ALONE:  # ALONE is shared by all groups, and has no ids
                self._lists[members] = group
            self._id_count += len(members.ids)
        group.issued_lists[members].setdefault(client_id, {})[session] = None
        group.issued[session] = Issued(members, client_id, times + 1)
        while self._id_count > self._limits.max_given_ids and len(self._lists) > 1:
            oldest, owner = next(iter(self._lists.items()))
            self._withdraw_list(owner, oldest)

    def _withdraw(self, group: ConsumerGroup, session: Session) -> None:
        issued = group.issued.pop(session, None)
        if issued is None:
            return
        readers = group.issued_lists[issued.members]
        del readers[issued.client_id][session]
        if not readers[issued.client_id]:
            del readers[issued.client_id]
        if not readers:
            self._withdraw_list(group, issued.members)

    def _withdraw_list(self, group: ConsumerGroup, members: MemberList) -> None:
        for connections in group.issued_lists.pop(members).values():
            for session in connections:
                del group.issued[session]
        self._lists.pop(members, None)
        self._id_count -= len(members.ids)

    def keep_members(self, group: ConsumerGroup) -> None:
        """Drop the lists of sessions that are no longer members."""
        for session in [item for item in group.issued if item not in group.members]:
            self._withdraw(group, session)
        now_s = self._clock.monotonic_s()
        group.bound_since_s = {
            session: since_s
            for session, since_s in group.bound_since_s.items()
            if session in group.members and now_s < since_s + RELOOK_S
        }

    def end(self, group: ConsumerGroup) -> None:
        """Drop the state of a group whose last foreign member left."""
        for members in list(group.issued_lists):
            self._withdraw_list(group, members)
        group.has_bound_members = False
        group.bound_since_s = {}
        if not group.members:
            self._set_owners(group, {})
            group.owners_found_s = None

    # Owners

    def reserve(self, more: int) -> bool:
        """Reserve room for the owners of a group; False if the limit would be exceeded."""
        if self.queue_count + more > self._limits.max_drained_queues:
            return False
        self.queue_count += more
        return True

    def unreserve(self, count: int) -> None:
        self.queue_count -= count

    def put(self, group: ConsumerGroup, owners: Owners) -> None:
        """Store the owners after a change."""
        if group.is_uneven:
            group.has_bound_members = True
        self._set_owners(group, owners)
        group.owners_found_s = self._clock.monotonic_s()
        group.version += 1

    def _set_owners(self, group: ConsumerGroup, owners: Owners) -> None:
        self.queue_count += sum(map(len, owners.values())) - sum(map(len, group.owners.values()))
        group.owners = owners

    async def routes_of(self, group: ConsumerGroup, goes_on: Callable[[], bool]) -> Routes | None:
        """Return the known routes of the group's topics. `goes_on` is called after each route; None if it returns False."""
        found: Routes = {}
        for topic in sorted(group.topics):
            route = await self.routes.find_route(topic)
            if route is not None:
                found[topic] = route
                if not goes_on():
                    return None
        return found

    def find_owners(self, group: ConsumerGroup) -> None:
        """Compute the owners again after a member requested another member's queue, because topics may grow, and brokers
        come and go, without a change of the group. Done at intervals, not for each request."""
        now_s = self._clock.monotonic_s()
        if group.owners_found_s is not None and now_s - group.owners_found_s >= self._limits.owners_refresh_delay_s:
            group.owners_found_s = now_s
            self._tasks.spawn(self._find(group, group.change))

    async def _find(self, group: ConsumerGroup, change: int) -> None:
        routes = await self.routes_of(group, lambda: group.change == change)
        if routes is not None:
            self._turns.do(self._computing_owners(group, change, routes))

    def _computing_owners(self, group: ConsumerGroup, change: int, routes: Routes) -> Work[None]:
        """Compute the owners. Topics without a route keep their previous owners. All topics of the group keep theirs if
        the new owners would exceed `max_drained_queues`, which counts the queues of all groups here."""
        taken, former = 0, group.owners
        found = dict(former)
        try:
            for topic, route in routes.items():
                yield
                queues = TopicQueues(topic, route)
                here = queues.of_broker(self._broker_name)
                if not self.reserve(here):
                    return
                taken += here
                found[topic] = owners_of((yield from group.ordering(topic)), queues, self._broker_name)
        finally:
            self.unreserve(taken)
        if group.change != change:
            return
        moves = any(topic in former and former[topic] != owners for topic, owners in found.items())
        if found != former and (group.is_uneven or (group.foreign and moves)):
            # readers must be drained of the queues that move
            self._groups.changes.owners_moved(group)
        else:
            self._set_owners(group, found)


def claims_by_list(
    group: ConsumerGroup, queues: Sequence[Queue]
) -> Iterator[list[tuple[list[Queue], dict[Session, None]]]]:
    """Yield the queues of a topic that members claim by their member lists. Members with the same id claim the same queues.
    Members with a list of themselves alone are left out, because they claim all queues and read those that the broker
    serves."""
    for members, readers in list(group.issued_lists.items()):
        if members is ALONE:
            continue
        count = len(members.ids)
        first = enumerate(members.order[: len(queues)])  # ids beyond the number of queues get no queue
        yield [
            (AVG.allocate_at(index, count, queues), readers[client_id])
            for index, client_id in first
            if client_id in readers
        ]


def owners_of(members: Mapping[str, int], queues: TopicQueues, broker_name: str) -> list[str]:
    """Return the future owners of one broker's queues, in order of the queues, for members with these positions; empty
    without members."""
    owners: list[str] = []
    for index, client_id in enumerate(islice(members, len(queues))):  # members beyond the number of queues get no queue
        share = AVG.allocate_at(index, len(members), queues)
        owners += [client_id] * sum(queue.broker_name == broker_name for queue in share)
    return owners


# ------------------------------------------------------------------------------
# The foreign members that claim a queue: by their last member list, or because they read it.


Claimants = dict[int, list[Session]]  # the members that claim each of a topic's queues here


class Claims:
    def __init__(self, broker_name: str, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._broker_name = broker_name

    def finding(self, group: ConsumerGroup, queues: TopicQueues) -> Work[Claimants | None]:
        """Compute the foreign members that claim each queue on this broker; None if they are too many.

        Several may claim one queue: a member whose list is older, and one that was notified first that it owns the queue.
        """
        claims: Claimants = {}
        left = self._limits.max_claims
        for number, of_list in enumerate(claims_by_list(group, queues)):
            if number:
                yield
            for share, sessions in of_list:
                # A list covers all topics, even those that its member does not subscribe to
                readers = [item for item in sessions if queues.topic in group.subscriptions_of(item)]
                left -= len(share) * len(readers)
                if left < 0:
                    return None
                for queue in share:
                    if queue.broker_name == self._broker_name:
                        claims.setdefault(queue.queue_id, []).extend(readers)
        return claims

    def losing(
        self, group: ConsumerGroup, topic: str, here: int, owners: list[str], claims: Claimants
    ) -> Iterator[tuple[QueueKey, Session]]:
        """Yield the queues on this broker that a foreign member claims and will no longer own, each with that member."""
        for queue_id in range(here):
            key = topic, queue_id
            owner = owners[queue_id] if owners else None
            for session in (*claims.get(queue_id, ()), *self._last_reader(group, key)):
                member = group.members.get(session)
                if member is not None and member.client_id != owner:
                    yield key, session

    def releasing(
        self, group: ConsumerGroup, drain: Drain, topic: str, here: int, claims: Claimants
    ) -> Iterator[tuple[QueueKey, Session]]:
        """Yield drained queues with the members that, by their last list, no longer read them and drop them now or soon."""
        for queue_id in range(here):
            key = topic, queue_id
            for session in drain.moving.get(key, ()):
                has_list = group.issued_to(session) not in (None, ALONE)
                if has_list and session not in claims.get(queue_id, ()):
                    yield key, session

    def _last_reader(self, group: ConsumerGroup, key: QueueKey) -> Iterator[Session]:
        """Yield the session that pulled last, if it has no member list, such as after a restart, or one of itself alone."""
        reader = group.queue(*key).reader
        if reader is not None and reader in group.foreign and group.issued_to(reader) in (ALONE, None):
            yield reader


# ------------------------------------------------------------------------------
# The queues that a change of a group moves away from their foreign readers.


@dataclass(slots=True)
class QueueMoves:
    """The result of the search: the readers that lose queues, those that release drained ones, and the owners afterwards.

    Attributes:
        retry_queues: The queues of the group's retry topic, on all brokers.
        taken: The reserved share of the limit on owners.
        others: The peers that must agree.
    """

    owners: dict[str, list[str]] = field(default_factory=dict)
    losing: list[tuple[QueueKey, Session]] = field(default_factory=list)
    releasing: set[tuple[QueueKey, Session]] = field(default_factory=set)
    retry_queues: int = 0
    taken: int = 0
    others: Others = NOBODY

    def clear(self) -> None:
        self.owners, self.losing, self.releasing = {}, [], set()


class Moves:
    def __init__(
        self,
        broker_name: str,
        allotment: Allotment,
        agreement: Agreement,
        held_pulls: HeldPulls,
        limits: Limits = LIMITS,
    ) -> None:
        self._broker_name = broker_name
        self._allotment = allotment
        self._held_pulls = held_pulls
        self._agreement = agreement
        self._claims = Claims(broker_name, limits)
        self._is_finding = False  # one topic of all groups at a time, because its claims may take much memory

    def finding(
        self, group: ConsumerGroup, drain: Drain, routes: Routes, is_current: Callable[[], bool]
    ) -> Work[QueueMoves | None]:
        """Compute the queues that move; None after a further change, which is then computed instead. If there are too many,
        nothing is drained, and members are notified immediately, as by Apache's broker."""
        found = QueueMoves()
        try:
            for topic, route in routes.items():
                yield
                while self._is_finding:
                    yield
                if not is_current():
                    return None
                if not (yield from self._finding_of(group, drain, TopicQueues(topic, route), found)):
                    found.clear()
                    break
            yield
            is_uneven = bool(found.owners) and group.differs()
            yield from group.binding(is_uneven=is_uneven, retry_queues=found.retry_queues)
            found.others = yield from self._agreement.finding_others(group, routes if found.owners else {})
            yield
        finally:
            self._allotment.unreserve(found.taken)
        return found if is_current() else None

    def _finding_of(self, group: ConsumerGroup, drain: Drain, queues: TopicQueues, found: QueueMoves) -> Work[bool]:
        """Compute the queues of one topic that move. Return False if the claims or the moves exceed their limits."""
        self._is_finding = True
        topic = queues.topic
        try:
            here = queues.of_broker(self._broker_name)
            claims = yield from self._claims.finding(group, queues)
            if claims is None or not self._reserve(found, here):
                return False
            yield from self._adding_waiting(group, topic, claims)
            order = yield from group.ordering(topic)
            owners = found.owners[topic] = owners_of(order, queues, self._broker_name)
            if topic.startswith(RETRY_PREFIX):
                found.retry_queues = len(queues)
            losing = list(self._claims.losing(group, topic, here, owners, claims))
            if not self._reserve(found, len(losing)):
                return False
            found.losing += losing
            found.releasing.update(self._claims.releasing(group, drain, topic, here, claims))
            return True
        finally:
            self._is_finding = False

    def _adding_waiting(self, group: ConsumerGroup, topic: str, claims: Claimants) -> Work[None]:
        """Add the members whose pulls wait for messages. Apache's clients allocate by the route that they know, and query it
        every 30 s, so after a topic has grown they may read other queues than those of their share by the present route."""
        for number, session in enumerate(list(group.foreign), 1):
            pulls = [] if group.is_alone(session) else self._held_pulls.of(session, group.name)
            for pull in pulls:
                claimants = claims.setdefault(pull.queue.queue_id, []) if pull.queue.topic == topic else [session]
                if pull.until is Until.MESSAGE and session not in claimants:
                    claimants.append(session)
            if pulls or number % SLICE == 0:
                yield

    def _reserve(self, found: QueueMoves, more: int) -> bool:
        is_taken = self._allotment.reserve(more)
        found.taken += more if is_taken else 0
        return is_taken

    def begin(self, group: ConsumerGroup, drain: Drain, found: QueueMoves, now_s: float, until_s: float) -> None:
        """Start the drain. A member that was notified before and is dropping a queue gets none of its messages, even if it
        will own the queue again, because it learns that only later."""
        former = drain.moving
        drain.lose(found.losing, now_s, until_s)
        for key, readers in former.items():
            for reader in readers:
                member = group.members.get(reader)
                if member is None or group.is_alone(reader):  # such a member is served only its own queues
                    continue
                if member.client_id == group.owner_of(*key):
                    if (key, reader) not in found.releasing:
                        continue
                    drain.returning.setdefault(reader, set()).add(key)
                drain.moving.setdefault(key, set()).add(reader)
        drain.forget_kept()
        drain.charge()


# ------------------------------------------------------------------------------
# Draining: foreign members release a queue before the next member reads it, as far as unmodified clients allow.
#
# A foreign member that is notified of a change immediately drops the queues that it loses. Messages of them that its handlers
# still process are then redelivered. So the broker drains these queues first: it returns no new messages of them, and waits
# until the reader's pulls, which carry its commit offset, show that everything is handled. Members are notified in steps:
#
# - a member that loses no queue on this broker is notified once the broker knows which queues move; its pulls of a queue
#   that is still drained wait
# - a reader is notified when all queues that it loses are drained; until then it gets its previous member list, or in a long
#   drain a list of itself alone
# - a drain may take up to 30 s while it makes progress. If a reader has handled nothing for 1 s, its held pulls return, so
#   that its next pulls show its progress. One second later it is notified anyway
# - after 0.2 s each queue moves separately, if the group's topics are on one broker and it is not too large (`bridge`)
#
# With several brokers, a member is notified when no broker waits for it (`Agreement`).
#
# The broker computes the reader of a queue from the last member list of each foreign member, because members allocate
# queues by their lists. If no member has a list, or only a list of itself (`Allotment`), the reader is the session that
# pulled last.


class Draining:
    """Finds the queues that foreign members will lose, and notifies these members when they are done with them, or when the
    broker stops waiting.

    Args:
        routes: finds which queues a topic has on all brokers, because members divide them all.
        peers: the connections to peer brokers.
        repeats: counts the drains that were given up.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        locks: Locks,
        held_pulls: HeldPulls,
        notifications: Notifications,
        *,
        routes: RouteFinder,
        peers: PeerLinks,
        repeats: RedeliveryCauses,
    ) -> None:
        limits = self._limits = runtime.limits
        self._groups = groups
        self._locks = locks
        self._held_pulls = held_pulls
        self._tasks, self._turns, self._clock = runtime.tasks, runtime.turns, runtime.clock
        self._repeats = repeats
        self._change = 0  # the last number of a change in any group; numbers are not reused
        self.allotment = Allotment(runtime, groups, routes)
        self.agreement = Agreement(groups.broker_name, self._clock, peers, groups.changes, limits)
        self._moves = Moves(groups.broker_name, self.allotment, self.agreement, held_pulls, limits)
        self.lists = ForeignMemberLists(runtime, locks, notifications, self.allotment, self.agreement)

    # Questions

    def is_pending(self, name: str) -> bool:
        """Return True if foreign members of a group do not know of a change yet."""
        group = self._groups.get(name)
        return group is not None and group.is_draining

    def observe_pull(self, group: ConsumerGroup, session: Session, header: PullMessage) -> None:
        """Record what a pull shows about the progress of a member whose queue moves away."""
        drain = group.drain
        if drain is None or session not in drain.moving.get(key := (header.topic, header.queue_id), ()):
            return
        drain.pulled_s[session] = self._clock.monotonic_s()
        if key in drain.waiting.get(session, ()) and has_handled_all(header):
            self._drained(group, drain, session, key)
        for dropped in drain.dropped(session, key):
            self._drained(group, drain, session, dropped)

    def record_progress(self, group: ConsumerGroup, session: Session) -> None:
        """Record that a session has committed progress in some queue, which shows that its handlers are running."""
        drain = group.drain
        if drain is not None and session in drain.waiting:
            drain.record_progress(self._until_s(), session)
            self.agreement.report_progress(group)

    def gate(self, group: ConsumerGroup, key: QueueKey, go_on: Callable[[], None]) -> None:
        """Hold a pull that waits for a drain, and call `go_on` when the earlier reader is done. Raises LimitExceeded."""
        assert group.drain is not None, "the pull waits for a drain"
        waiting = group.drain.gated.setdefault(key, [])
        if len(waiting) >= self._limits.max_gated:
            waiting_for = f"the former reader of {key[0]}:{key[1]}"
            raise LimitExceeded(f"{self._limits.max_gated} pulls wait for {waiting_for}; retry")
        waiting.append(go_on)

    def on_peer_update(self, header: AgreeOnMembers, members: AgreedMembers) -> None:
        """Handle a peer's progress with a group, and the member lists that it returned to members."""
        group = self._groups.get(header.consumer_group)
        given = self.agreement.on_message(group, header, members)
        if group is None:
            return
        late = [item for item in given if self.lists.record_issued_by_peer(group, item)]
        if late:  # these members read other queues than this broker assumed, so the moves are computed again
            self.begin_change(group)
        drain = group.drain
        if drain is not None and not drain.is_over and group.sync.agrees(header.broker_name):
            drain.record_progress(self._until_s())
        self.peers_changed(group)

    def peers_changed(self, group: ConsumerGroup) -> None:
        """Continue after a peer made progress or became unreachable."""
        drain = group.drain
        if drain is not None and not drain.is_over:
            self.lists.notify_released(group, drain)
        if drain is not None:
            self.lists.answer(group, drain)

    # A drain

    def begin_change(self, group: ConsumerGroup) -> None:
        """Handle a change of members, their topics or owners. If the group has foreign members, compute in the background
        which queues move away from them, and drain these; otherwise drop the state of an earlier drain."""
        self._change += 1
        group.change = change = self._change
        group.version += 1
        if group.foreign:
            now_s = self._clock.monotonic_s()
            # Members allocate as soon as they are notified, so none may start a queue until `_start` has found the moves
            drain = group.drain
            if drain is None:
                drain = group.drain = Drain(now_s)
            drain.change(group.members, now_s)
            self.agreement.begin_change(group)
            drain.record_progress(self._until_s())
            self._poll_later(group, drain)
            self._tasks.spawn(self._start(group, drain, change))
            return
        former, group.drain = group.drain, None
        if former is not None:
            former.end()
        self.allotment.end(group)
        self.agreement.end(group)
        if not group.members:
            group.change = 0
            group.previous_ids = frozenset()

    async def _start(self, group: ConsumerGroup, drain: Drain, change: int) -> None:
        def goes_on() -> bool:
            """Return False after a further change, because only the last of several changes is drained."""
            is_current = group.change == change
            if is_current and drain.is_finding:
                drain.record_progress(self._until_s())
            return is_current

        routes = await self.allotment.routes_of(group, goes_on) if group.change == change else None
        if routes is not None:
            self._turns.do(self._starting_drain(group, drain, change, routes))

    def _starting_drain(self, group: ConsumerGroup, drain: Drain, change: int, routes: Routes) -> Work[None]:
        """Compute the moves in pieces."""
        stage = drain.stage
        self.allotment.keep_members(group)
        found = yield from self._moves.finding(group, drain, routes, lambda: group.change == change)
        if found is None:
            return
        self.allotment.put(group, found.owners)
        group.version += 1
        # Otherwise the search took so long that all members were notified meanwhile, and have other lists
        if drain.stage is stage and group.drain is drain:
            self._begin(group, drain, found)
        yield from self._releasing_pulls(group)

    def _begin(self, group: ConsumerGroup, drain: Drain, found: QueueMoves) -> None:
        self._moves.begin(group, drain, found, self._clock.monotonic_s(), self._until_s())
        self.agreement.announce(group, found.others, drain.waited_for(group.members))
        drain.release_all_pulls()  # pulls are checked again, and held again if they must still wait
        drain.record_progress(self._until_s())
        self._poll_later(group, drain)
        self.lists.notify_released(group, drain)
        self.lists.answer(group, drain)
        if drain.waiting and not found.others.brokers and found.taken * len(group.foreign) <= self._limits.max_bridged:
            self._clock.call_later(self._limits.bridged_after_s, self.lists.bridge, group, drain)
        for session in list(drain.waiting):
            self._return_moving(group, drain, session)

    def _return_moving(self, group: ConsumerGroup, drain: Drain, session: Session) -> None:
        """Return a reader's held pulls of the queues that it loses, because its next pulls carry its commit offsets."""
        for pull in self._held_pulls.of(session, group.name):
            key = (pull.queue.topic, pull.queue.queue_id)
            if session in drain.moving.get(key, ()):
                self._held_pulls.release(pull)
                # If a peer has already notified it, the reader has dropped the queue and does not pull again
                if pull.is_done and key in drain.waiting.get(session, ()):
                    self._drained(group, drain, session, key)

    def _releasing_pulls(self, group: ConsumerGroup) -> Work[None]:
        """Release pulls that waited for a queue which their member now owns."""
        for number, session in enumerate(list(group.foreign), 1):
            pulls = [pull for pull in self._held_pulls.of(session, group.name) if pull.until is Until.TURN]
            if pulls or number % SLICE == 0:
                yield
            for pull in pulls:
                key = pull.queue.topic, pull.queue.queue_id
                if not group.is_owned_by_other(session, *key, self._clock.monotonic_s()):
                    self._held_pulls.release(pull)

    def _drained(self, group: ConsumerGroup, drain: Drain, session: Session, key: QueueKey) -> None:
        """Record the end of a queue's drain. The next reader continues at that offset, even if it has loaded another one."""
        drain.finish(session, key)
        self._locks.release(session, group.queue(*key))
        self._groups.changes.queue_released(group, key, session)
        drain.release_pulls([key])
        drain.record_progress(self._until_s(), session)
        self.lists.notify_released(group, drain)

    # Readers without progress

    def _until_s(self) -> float:
        """Return the time until which a reader that just made progress may make none."""
        return self._clock.monotonic_s() + self._limits.drain_limit_s / 2

    def _poll_later(self, group: ConsumerGroup, drain: Drain) -> None:
        # A drain may continue while it makes progress, up to a limit, because the group's change waits for it
        due_s = min(drain.due_s, drain.oldest_s + self._limits.drain_max_s)
        now_s = self._clock.monotonic_s()
        drain.set_timer(self._clock.call_later(max(due_s - now_s, 0.0), self._poll, group, drain, max(due_s, now_s)))

    def _poll(self, group: ConsumerGroup, drain: Drain, due_s: float) -> None:
        """Poll readers that made no progress, and stop waiting for those that still make none, or that drain for longer than
        `drain_max_s`; for all readers if queues do not move singly. `due_s` is when this poll was due."""
        now_s = self._clock.monotonic_s()
        if now_s - due_s > STANDSTILL_S:  # the loop was blocked, so pulls that arrived meanwhile have not been read yet
            drain.prolong(now_s - due_s)
            self._poll_later(group, drain)
            return
        for reader in drain.stalled(now_s, was_polled=False):
            drain.due[reader] = self._until_s(), True
            for session in list(drain.waiting) if reader is None else [reader]:
                self._return_kept(group, session)
        stalled = drain.stalled(now_s, was_polled=True)
        is_old = drain.oldest_s + self._limits.drain_max_s <= now_s
        if drain.moves_singly:
            given_up = [(reader, key) for reader in stalled if reader is not None for key in drain.waiting[reader]]
            given_up += drain.since(now_s, self._limits.drain_max_s) if is_old else []
            if given_up:
                self._give_up(group, drain, dict.fromkeys(given_up))
        elif stalled or is_old:
            self._give_up_all(group, drain)
        if not drain.is_over:
            self._poll_later(group, drain)

    def _return_kept(self, group: ConsumerGroup, session: Session) -> None:
        """Return a reader's held pulls of queues that it keeps, whose next pulls then show its progress."""
        for pull in self._held_pulls.of(session, group.name):
            if pull.until is Until.MESSAGE and not pull.is_done:
                self._held_pulls.release(pull)

    def _give_up(self, group: ConsumerGroup, drain: Drain, given_up: Iterable[tuple[Session, QueueKey]]) -> None:
        """Stop waiting for these readers and queues. The others continue."""
        self._release_undrained(group, given_up)
        drain.give_up(given_up)
        drain.release_pulls(sorted({key for _, key in given_up}))
        self.lists.notify_released(group, drain)

    def _give_up_all(self, group: ConsumerGroup, drain: Drain) -> None:
        self._release_undrained(group, [(session, key) for session, keys in drain.waiting.items() for key in keys])
        drain.give_up_all()
        self.agreement.give_up(group)
        drain.release_all_pulls()
        self.lists.notify_released(group, drain)
        self.lists.answer(group, drain)

    def _release_undrained(self, group: ConsumerGroup, given_up: Iterable[tuple[Session, QueueKey]]) -> None:
        left = sorted({key for _, key in given_up})
        if left:
            self._repeats.note_undrained(group.name, left)
        for session, key in given_up:
            self._locks.release(session, group.queue(*key))
            if group.is_alone(session):  # it does not drop the queue, so it would keep its lock
                self._groups.changes.queue_released(group, key, session)


def has_handled_all(header: PullMessage) -> bool:
    """Return True if the pulling member has handled all messages that it got: its commit offset is its pull offset."""
    return header.commit_offset >= header.queue_offset


# ------------------------------------------------------------------------------
# When each foreign member is notified of a change, and which member list it gets until then.


def defer_notification(group: ConsumerGroup, session: Session) -> bool:
    """Return True if a foreign member must not be notified of the group's change yet; it is then notified later."""
    drain = group.drain
    if drain is None or _may_have_list(group, drain, session, group.sync.allows_notification):
        return False
    drain.kept[session] = None
    return True


def _may_have_list(group: ConsumerGroup, drain: Drain, session: Session, allows: Callable[[str], bool]) -> bool:
    """Return True if neither this broker nor, according to `allows`, a peer waits for the member."""
    if drain.is_finding or session in drain.waiting:
        return False
    member = group.members.get(session)
    return member is None or allows(member.client_id)


class ForeignMemberLists:
    """Decides which member list a foreign member gets during a change, and when it is notified of the change."""

    def __init__(
        self,
        runtime: Runtime,
        locks: Locks,
        notifications: Notifications,
        allotment: Allotment,
        agreement: Agreement,
    ) -> None:
        self._drained_wait_s = runtime.limits.drained_wait_s
        self._locks = locks
        self._notify = notifications.notify
        self._turns = runtime.turns
        self._allotment = allotment
        self._agreement = agreement
        self._clock = clock = runtime.clock
        # until then, members from before a restart may not have sent a heartbeat yet
        self._knows_all_s = clock.monotonic_s() + KNOWN_AFTER_S if locks.is_restarted else -math.inf

    # Which list a member is given

    def current_list(self, group: ConsumerGroup, session: Session) -> list[str]:
        """Return the member list for a member, and record that the member has it.

        A reader that is being drained gets its previous list, or in a long drain a list of itself alone, because a member
        drops queues by the list that it gets. After a restart the list is empty as long as peers may know further members,
        whose queues the member would otherwise take.
        """
        members = group.list_for(session)
        member = group.foreign.get(session)
        if member is None:
            return members.ids
        drain = group.drain
        if self._clock.monotonic_s() < self._knows_all_s and group.sync.differs:
            return []
        had = group.issued_to(session)
        if drain is not None and not _may_have_list(group, drain, session, group.sync.allows_notification):
            drain.kept[session] = None  # notify the member later, even if it was notified before
            if drain.is_long and not drain.is_finding:
                self._issue(group, session, member.client_id, ALONE)
                had = ALONE
            return had.ids_for(member.client_id) if had is not None else self._previous_list(group, session)
        self._issue(group, session, member.client_id, members)
        if had is not members:
            self._agreement.record_issued(group, member.client_id)
        return members.ids_for(member.client_id)

    def wait_until_sure(self, group: ConsumerGroup, session: Session, go_on: Callable[[], None]) -> bool:
        """Return True if a member's request for the list must wait; `go_on` is called after `list_wait_s` at the latest.

        The request waits if a peer may have returned a newer list to the member than this broker knows. With the older
        list the member would take queues back that others read.
        """
        drain = group.drain
        if drain is None or session in drain.asking or not self._is_unsure(group, drain, session):
            return False
        drain.asking[session] = go_on
        self._clock.call_later(self._agreement.list_wait_s, drain.answer, session)
        return True

    def _is_unsure(self, group: ConsumerGroup, drain: Drain, session: Session) -> bool:
        member = group.foreign.get(session)
        if member is None:
            return False
        sync = group.sync
        if sync.may_issue_earlier:
            return True
        is_awaited = not sync.allows_notification(member.client_id)
        return is_awaited and _may_have_list(group, drain, session, sync.allows_list)

    def answer(self, group: ConsumerGroup, drain: Drain) -> None:
        """Respond to waiting members whose current lists are known now."""
        for session in [session for session in drain.asking if not self._is_unsure(group, drain, session)]:
            drain.answer(session)

    def _previous_list(self, group: ConsumerGroup, session: Session) -> list[str]:
        """Return the members before the change, for a member without a list."""
        previous = group.previous_ids
        # the client reads no queue now, so leave it out of its own previous list
        if not self._locks.reads(session, group):
            previous -= {group.foreign[session].client_id}
        return [client_id for client_id in group.companions(session).ids if client_id in previous]

    def _issue(self, group: ConsumerGroup, session: Session, client_id: str, members: MemberList) -> None:
        self._allotment.issue(group, session, client_id, members)
        if group.drain is not None:
            group.drain.read_again(session)

    def record_issued_by_peer(self, group: ConsumerGroup, given: IssuedByPeer) -> bool:
        """Record the members to which a peer returned a list. Return True if that is new for a change before the last one."""
        ids, is_late = set(given.client_ids), False
        for session, member in group.foreign.items():
            members = given.lists.get(member.topics) if member.client_id in ids else None
            if members is None or group.issued_to(session) is members:
                continue
            if given.is_current:
                self._issue(group, session, member.client_id, members)
            else:
                self._allotment.issue(group, session, member.client_id, members)
                is_late = True
        return is_late

    # When members are notified

    def notify_released(self, group: ConsumerGroup, drain: Drain) -> None:
        """Notify the foreign members for whose queues no broker waits any more. Once this broker waits for none, also notify
        Rocketlet members, if one of them was refused a lock of a drained queue."""
        if drain.is_finding:  # members that are notified now would get their previous lists
            return
        self._agreement.set_waiting(group, drain.waited_for(group.members))
        if group.sync.reach() and drain.stage is DrainStage.AGREEING:
            drain.transition(DrainEvent.AGREE)
        if not drain.waiting and drain.moving and drain.refuses_ours:
            drain.refuses_ours = False
            self._notify(group, [item for item in group.members if item not in group.foreign])
        self._turns.do_some(self._notifying_kept(group, drain), 1)

    def _notifying_kept(self, group: ConsumerGroup, drain: Drain) -> Work[None]:
        """Notify the members for which nobody waits any more, those of a large group in pieces."""
        allows_notification, notified = group.sync.allows_notification, list[Session]()
        for number, session in enumerate(list(drain.kept), 1):
            if _may_have_list(group, drain, session, allows_notification):
                notified.append(session)
            if number % LOOKS == 0:
                yield
                if group.drain is not drain or drain.is_finding:  # a further change, after which they are notified
                    return
        for session in notified:
            drain.kept.pop(session, None)
        self._notify(group, [item for item in notified if item in group.members])
        if group.drain is not drain or not drain.is_over:
            return
        ids = yield from group.listing()
        if group.drain is drain and drain.is_over:
            self._all_notified(group, drain, ids)

    def _all_notified(self, group: ConsumerGroup, drain: Drain, ids: Iterable[str]) -> None:
        """Give notified readers `drained_wait_s` to drop their queues, before the drain ends."""
        drain.is_long = False
        group.previous_ids = frozenset(ids)
        wait_s = self._drained_wait_s
        drain.set_timer(self._clock.call_later(wait_s, self._end_drain, group, drain, TOLD_AGAIN))

    def _end_drain(self, group: ConsumerGroup, drain: Drain, times: int) -> None:
        """End the drain, unless members still read queues that they lose: the notification was lost, or came during their
        rebalance. Such members are notified again, up to `times` times."""
        reading = drain.reading(self._clock.monotonic_s() - self._drained_wait_s + DROPPED_AFTER_S)
        late = group.late(drain.moving.values(), reading)
        if not late or not times:
            group.drain = None
            drain.end()
            return
        wait_s = self._drained_wait_s
        drain.set_timer(self._clock.call_later(wait_s, self._end_drain, group, drain, times - 1))
        self._notify(group, late)

    def bridge(self, group: ConsumerGroup, drain: Drain) -> None:
        """Move queues one by one in a drain that takes long. Members that may not have the new list yet get a list of
        themselves alone, with which they claim all queues, and the broker decides which pulls it serves."""
        if drain.stage is not DrainStage.DRAINING or group.drain is not drain:
            return
        drain.is_long = True
        self._notify(group, [item for item in drain.kept if item in group.foreign and not group.is_alone(item)])


# ------------------------------------------------------------------------------
# Why messages of foreign members may be redelivered in spite of draining, for metrics and administrators.


class RedeliveryCauses:
    """Counts redeliveries: `undrained` queues moved while a reader still handled their messages; `left` messages were
    delivered to members that left without committing them."""

    def __init__(self, clock: Clock) -> None:
        self._undrained = Recent(clock, REPEATS_S)
        self._left = Recent(clock, REPEATS_S)
        self.undrained = 0
        self.left = 0

    def note_undrained(self, group: str, keys: Sequence[QueueKey]) -> None:
        """Record queues that moved although their reader had not finished."""
        self.undrained += len(keys)
        queues = ", ".join(f"{topic}:{queue_id}" for topic, queue_id in keys[:3])
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        self._undrained.record(group, f"{group}: {queues}{more}"[:MAX_NAMED_CHARS])
        hint = "their handlers were still running"
        log.warning("queues_moved_undrained", group=group, queues=keys[:MAX_NAMED_MEMBERS], count=len(keys), hint=hint)

    def note_left(self, group: str, client_id: str, messages: int) -> None:
        self.left += messages
        self._left.record(group, f"{group} ({client_id}) with {messages} messages"[:MAX_NAMED_CHARS])

    def recent(self) -> dict[str, list[str]]:
        """Return recent texts of each group, by kind."""
        return {"undrained": self._undrained.texts(), "left": self._left.texts()}


# ------------------------------------------------------------------------------
# Notifications of members that their group has changed: NOTIFY_CONSUMER_IDS_CHANGED.
#
# Changes within 5 ms make one notification. Foreign members are notified when the queues that move away from them are drained
# (`Draining`). Rocketlet members need not wait for that, because they hand a queue over under its lease. If `notify_enable`
# of a group is off, its members are only notified of changed queues of their topics.


class Notifications:
    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        settings: GroupConfigs,
        history: History,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._history = history
        self._clock = runtime.clock
        self._turns = runtime.turns
        self._is_notifying = False
        self._waiting: dict[ConsumerGroup, None] = {}

    def schedule(self, group: ConsumerGroup) -> None:
        """Notify the group's members after 5 ms, or after notifications that are in progress, together with further
        changes until then."""
        if not self._waiting and not self._is_notifying:
            self._clock.call_later(NOTIFY_DELAY_S, self._turns.do, self._notifying())
        self._waiting[group] = None

    def _notifying(self) -> Work[None]:
        """Notify the members of changed groups in pieces. Changes meanwhile are announced afterwards."""
        self._is_notifying = True
        while self._waiting:
            group = next(iter(self._waiting))
            del self._waiting[group]
            try:
                if group.members:
                    yield from self._notifying_members(group)
            except Exception:
                log.exception("timer_failed", action="notify", group=group.name)
            yield
        self._is_notifying = False

    def _notifying_members(self, group: ConsumerGroup) -> Work[None]:
        if not self._may_notify(group):
            return
        for topic in list(group.topics):  # before the first member gets its place among the others
            yield from group.ordering(topic)
        notified = 0
        for number, (at, member) in enumerate(list(group.members.items()), 1):
            if at in group.members and not (member.is_foreign and defer_notification(group, at)):
                at.send_event(_change_for(group, at))
                notified += 1
            if number % WRITES == 0:
                yield
        self._record_notified(group, notified)

    def _may_notify(self, group: ConsumerGroup) -> bool:
        settings = self._settings.ensure(group.name)
        return settings is not None and settings.notify_enable

    def notify(self, group: ConsumerGroup, connections: Iterable[Session]) -> None:
        """Notify these members of a change of the group, very many of them in pieces."""
        if not self._may_notify(group):
            return
        sessions = list(connections)
        for session in sessions[:SLICE]:
            session.send_event(_change_for(group, session))
        if len(sessions) > SLICE:
            self._turns.do(self._notifying_these(group, sessions[SLICE:]))
        self._record_notified(group, len(sessions))

    def _notifying_these(self, group: ConsumerGroup, connections: list[Session]) -> Work[None]:
        for number, session in enumerate(connections):
            if number % WRITES == 0:
                yield
            if session in group.members:
                session.send_event(_change_for(group, session))

    def _record_notified(self, group: ConsumerGroup, members: int) -> None:
        if members:
            self._history.add(group.name, "notified", "", members=members)

    def topic_changed(self, topic: TopicConfig) -> None:
        """Notify the groups that read a topic of its changed queues, which the name servers know by now."""
        self._turns.do(self._notifying_of_topic(topic.name))

    def _notifying_of_topic(self, topic: str) -> Work[None]:
        for group in self._groups.subscribing(topic):
            for number, session in enumerate(list(group.members), 1):
                session.send_event(GroupChanged(group.name, topic))
                if number % WRITES == 0:
                    yield
            self._groups.check_soon(group)

    def notify_outdated(self, session: Session, group: ConsumerGroup) -> None:
        """Notify a member whose heartbeat shows an outdated number of queues, for example because it read the route before
        the topic grew, and joined after the notification."""
        for topic in self._groups.stale_topics(group, session):
            session.send_event(GroupChanged(group.name, topic))

    def topics_registered(self) -> None:
        """Notify members that see another number of queues, because all name servers know all topics now. At an earlier
        notification, some name server may not have known the change."""
        for group, session, topic in self._groups.stale():
            session.send_event(GroupChanged(group, topic))


def _change_for(group: ConsumerGroup, session: Session) -> GroupChanged:
    """Return the event for a member. A Rocketlet member gets its position among the members, or its queues where the broker
    allocates them, so that a thousand notified members need not send a thousand requests."""
    member = group.members.get(session)
    if member is None or not member.data.strategy:
        return GroupChanged(group.name)
    topics = member.subscriptions
    if member.data.strategy != STICKY.name:
        return GroupChanged(group.name, places={topic: _place(group, member.client_id, topic) for topic in topics})
    shares = {topic: group.share(member.client_id, topic) for topic in topics}
    return GroupChanged(group.name, shares={topic: share for topic, share in shares.items() if share})


def _place(group: ConsumerGroup, client_id: str, topic: str) -> Place:
    return Place(*group.place(client_id, topic), group.seen_queues(topic).total)
