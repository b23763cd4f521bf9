"""Which foreign member claims which queue, by the member list it was given and its allocation strategy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ...protocol.allocation import AVG, TopicQueues
from ...protocol.bodies import Route, Work
from ...protocol.names import RETRY_PREFIX, Queue
from ..config import LIMITS, RELOOK_S, Limits
from ..runtime import Runtime
from ..sessions import Session
from .agreement import Agreement
from .group import ConsumerGroup, ConsumerGroups, Owners
from .members import ALONE, Issued, MemberList
from .stages import NOBODY, Drain, Others, QueueKey

# ------------------------------------------------------------------------------
# The owner of each queue on this broker since the last change of its group, in groups with foreign members.
#
# Apache's clients request one member list, and allocate the queues of each topic by it. If members subscribe to different
# topics, no single list allocates each topic among its own subscribers. The broker then returns to each foreign member a list
# of that member alone, with which it claims all queues of its topics, whatever its strategy. The broker allocates each topic
# among its real subscribers, and serves only a member's pulls of its own queues; other pulls wait until the member owns the
# queue. With a list of itself alone, a member need not drop a queue before another member reads it, and need not be
# notified of changes.


Routes = dict[str, Route]  # by topic


class RouteFinder(Protocol):
    """Finds the queues of a topic on all brokers."""

    async def find_route(self, topic: str) -> Route | None:
        """Return the route of a topic; None if no name server knows it."""
        ...


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

    def is_anothers(self, group: ConsumerGroup, connection: Session, topic: str, queue_id: int) -> bool:
        """Return True if another member owns the queue; compute owners again for a topic that is new or has grown."""
        if not group.is_anothers(connection, topic, queue_id, self._clock.monotonic_s()):
            return False
        if group.owner_of(topic, queue_id) is None:
            self.find_owners(group)
        return True

    def queue_refused(self, group: ConsumerGroup, topic: str, queue_id: int) -> None:
        """Compute the owners again after a member was refused a queue that no member owns, or that its reader owns."""
        drain = group.drain
        if drain is not None and (drain.is_finding or drain.has((topic, queue_id))):
            return  # while a drain runs, the drain computes the owners
        if group.owner_of(topic, queue_id) is None or group.is_read_by_its_owner(topic, queue_id):
            self.find_owners(group)

    # Member lists

    def issue(self, group: ConsumerGroup, connection: Session, client_id: str, members: MemberList) -> None:
        """Record that a member gets this list. Beyond the limit on client ids in all lists, the oldest lists are dropped, and
        their members count as members without a list."""
        before = group.issued.get(connection)
        if (
            before is not None and before.members is ALONE and members is not ALONE
        ):  # the member drops queues soon that its new list gives to others
            group.bound_since_s[connection] = self._clock.monotonic_s()
        elif members is ALONE:
            group.has_bound_members = True
        times = before.times if before is not None and before.members is members else 0
        if not times:
            self._groups.generation.increment()
        self._withdraw(group, connection)
        if members not in group.issued_lists:
            group.issued_lists[members] = {}
            if members is not ALONE:  # ALONE is shared by all groups, and has no ids
                self._lists[members] = group
            self._id_count += len(members.ids)
        group.issued_lists[members].setdefault(client_id, {})[connection] = None
        group.issued[connection] = Issued(members, client_id, times + 1)
        while self._id_count > self._limits.max_given_ids and len(self._lists) > 1:
            oldest, owner = next(iter(self._lists.items()))
            self._withdraw_list(owner, oldest)

    def _withdraw(self, group: ConsumerGroup, connection: Session) -> None:
        issued = group.issued.pop(connection, None)
        if issued is None:
            return
        readers = group.issued_lists[issued.members]
        del readers[issued.client_id][connection]
        if not readers[issued.client_id]:
            del readers[issued.client_id]
        if not readers:
            self._withdraw_list(group, issued.members)

    def _withdraw_list(self, group: ConsumerGroup, members: MemberList) -> None:
        for connections in group.issued_lists.pop(members).values():
            for connection in connections:
                del group.issued[connection]
        self._lists.pop(members, None)
        self._id_count -= len(members.ids)

    def keep_members(self, group: ConsumerGroup) -> None:
        """Drop the lists of sessions that are no longer members."""
        for connection in [item for item in group.issued if item not in group.members]:
            self._withdraw(group, connection)
        now_s = self._clock.monotonic_s()
        group.bound_since_s = {
            connection: since_s
            for connection, since_s in group.bound_since_s.items()
            if connection in group.members and now_s < since_s + RELOOK_S
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

    def takes(self, more: int) -> bool:
        """Reserve room for the owners of a group; False if the limit would be exceeded."""
        if self.queue_count + more > self._limits.max_drained_queues:
            return False
        self.queue_count += more
        return True

    def give_back(self, count: int) -> None:
        self.queue_count -= count

    def put(self, group: ConsumerGroup, owners: Owners) -> None:
        """Store the owners after a change."""
        if group.is_uneven:
            group.has_bound_members = True
        self._set_owners(group, owners)
        group.owners_found_s = self._clock.monotonic_s()
        self._groups.generation.increment()

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
            self._turns.do(self._finding(group, change, routes))

    def _finding(self, group: ConsumerGroup, change: int, routes: Routes) -> Work[None]:
        """Compute the owners. Topics without a route keep their previous owners, and all topics do if they have too
        many queues together."""
        taken, former = 0, group.owners
        found = dict(former)
        try:
            for topic, route in routes.items():
                yield
                queues = TopicQueues(topic, route)
                here = queues.of_broker(self._broker_name)
                if not self.takes(here):
                    return
                taken += here
                found[topic] = owners_of(group.order(topic), queues, self._broker_name)
        finally:
            self.give_back(taken)
        if group.change != change:
            return
        if group.is_uneven and found != former:  # readers must be drained of the queues that move
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
        """Return the queues on this broker that a foreign member claims and will no longer own."""
        for queue_id in range(here):
            place = topic, queue_id
            owner = owners[queue_id] if owners else None
            for session in (*claims.get(queue_id, ()), *self._last_reader(group, place)):
                member = group.members.get(session)
                if member is not None and member.client_id != owner:
                    yield place, session

    def letting_go(
        self, group: ConsumerGroup, drain: Drain, topic: str, here: int, claims: Claimants
    ) -> Iterator[tuple[QueueKey, Session]]:
        """Return drained queues with the members that, by their last list, no longer read them and drop them now or soon."""
        for queue_id in range(here):
            place = topic, queue_id
            for session in drain.moving.get(place, ()):
                has_list = group.issued_to(session) not in (None, ALONE)
                if has_list and session not in claims.get(queue_id, ()):
                    yield place, session

    def _last_reader(self, group: ConsumerGroup, place: QueueKey) -> Iterator[Session]:
        """Yield the session that pulled last, if it has no member list (it has read since before a restart) or one of itself
        alone."""
        reader = group.queue(*place).reader
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
    letting_go: set[tuple[QueueKey, Session]] = field(default_factory=set)
    retry_queues: int = 0
    taken: int = 0
    others: Others = NOBODY

    def clear(self) -> None:
        self.owners, self.losing, self.letting_go = {}, [], set()


class Moves:
    def __init__(
        self,
        broker_name: str,
        allotment: Allotment,
        agreement: Agreement,
        limits: Limits = LIMITS,
    ) -> None:
        self._broker_name = broker_name
        self._allotment = allotment
        self._agreement = agreement
        self._claims = Claims(broker_name, limits)
        self._is_finding = False  # one topic at a time, because its claims may take much memory

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
            is_uneven = bool(found.owners) and group.differs()
            yield from group.binding(is_uneven=is_uneven, retry_queues=found.retry_queues)
            found.others = yield from self._agreement.finding_others(group, routes if found.owners else {})
        finally:
            self._allotment.give_back(found.taken)
        return found if is_current() else None

    def _finding_of(self, group: ConsumerGroup, drain: Drain, queues: TopicQueues, found: QueueMoves) -> Work[bool]:
        """Compute the queues of one topic that move. Return False if the claims or the moves exceed their limits."""
        self._is_finding = True
        topic = queues.topic
        try:
            here = queues.of_broker(self._broker_name)
            claims = yield from self._claims.finding(group, queues)
            if claims is None or not self._takes(found, here):
                return False
            owners = found.owners[topic] = owners_of(group.order(topic), queues, self._broker_name)
            if topic.startswith(RETRY_PREFIX):
                found.retry_queues = len(queues)
            losing = list(self._claims.losing(group, topic, here, owners, claims))
            if not self._takes(found, len(losing)):
                return False
            found.losing += losing
            found.letting_go.update(self._claims.letting_go(group, drain, topic, here, claims))
            return True
        finally:
            self._is_finding = False

    def _takes(self, found: QueueMoves, more: int) -> bool:
        is_taken = self._allotment.takes(more)
        found.taken += more if is_taken else 0
        return is_taken

    def begin(self, group: ConsumerGroup, drain: Drain, found: QueueMoves, now_s: float, until_s: float) -> None:
        """Start the drain. A member that was notified before and is dropping a queue gets none of its messages, even if it
        will own the queue again, because it learns that only later."""
        former = drain.moving
        drain.lose(found.losing, now_s, until_s)
        for place, readers in former.items():
            for reader in readers:
                member = group.members.get(reader)
                if member is None or group.is_alone(reader):  # such a member is served only its own queues
                    continue
                if member.client_id == group.owner_of(*place):
                    if (place, reader) not in found.letting_go:
                        continue
                    drain.returning.setdefault(reader, set()).add(place)
                drain.moving.setdefault(place, set()).add(reader)
        drain.forget_kept()
        drain.charge()
