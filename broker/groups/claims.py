"""Which foreign member claims which queue, by the member list it was given and its allocation strategy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ...protocol.allocation import AVG, TopicQueues
from ...protocol.bodies import Route, Work
from ...protocol.names import RETRY_PREFIX
from ..config import LIMITS, RELOOK_S, Limits
from ..runtime import Runtime
from ..sessions import Session
from .agreement import Agreement
from .group import ConsumerGroup, ConsumerGroups
from .members import ALONE, Given, MemberList
from .stages import NOBODY, Drain, Others, QueueKey

# ------------------------------------------------------------------------------
# The owner of each queue here by the last change of its group, in groups with foreign members, and the members bound
# by that.
#
# Apache's clients ask for one list of members, and share each of their topics out by it. Where members subscribe to
# different topics, no list gives each topic to its own subscribers. There a foreign member is told of itself alone,
# by which it claims all queues of its topics, whatever its strategy. Each topic is shared out among its real
# subscribers, and the broker answers a member's pulls of its share only; its other pulls wait until the queue is its
# own. So no member has to drop a queue before another one reads it, or to learn of a change at all.


Routes = dict[str, Route]  # by topic


class Allotment:
    """`find_route(topic)`: which queues a topic has on all brokers, because members share them all. `change_of(group)`: the
    number of its last change. `on_moved(group)`: queues of a group whose members are bound have other owners, though no
    member came or went."""

    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        find_route: Callable[[str], Awaitable[Route | None]],
        *,
        change_of: Callable[[str], int | None],
        on_moved: Callable[[ConsumerGroup], None],
    ) -> None:
        limits = runtime.limits
        self.drained_wait_s = limits.drained_wait_s
        self._owners_look_s = limits.owners_look_s
        self._broker_name = groups.broker_name
        self._groups = groups
        self._find_route = find_route
        self._tasks, self._turns, self._clock = runtime.tasks, runtime.turns, runtime.clock
        self._change_of = change_of
        self._on_moved = on_moved
        self.given = Given(limits)
        self.owners = Owners(limits)
        self.bound: set[str] = set()  # groups that have, or had, members who claim more than their own
        self._looked_s: dict[str, float] = {}  # when owners were looked for last
        self._bound_since_s: dict[str, dict[Session, float]] = {}  # members that were told of themselves alone before

    # Questions

    def is_bound(self, group: ConsumerGroup, connection: Session, topic: str) -> bool:
        """Whether a foreign member claims more queues of a topic than its own."""
        had = self.given.of(group.name, connection)
        if had is ALONE or (had is None and group.is_uneven):  # it may have asked a run before
            return True
        if group.is_uneven and topic.startswith(RETRY_PREFIX):  # which members share that know nothing of each other
            return True
        since_s = self._bound_since_s.get(group.name, {}).get(connection)
        if since_s is None:
            return False
        for_s = RELOOK_S if self.is_halfway(group, connection) else self.drained_wait_s
        return self._clock.monotonic_s() < since_s + for_s

    def is_halfway(self, group: ConsumerGroup, connection: Session) -> bool:
        """Whether a member may read queues of some topic by an earlier list. It asks once for each of its topics, one after
        the other, and drops queues of the topics that it has asked for since."""
        member = group.foreign.get(connection)
        if member is None:
            return False
        owners = self.owners.of_group(group.name)
        topics = sum(1 for topic in member.subscriptions if owners.get(topic))
        return self.given.times(group.name, connection) < topics

    def may_bind(self, name: str, connection: Session) -> bool:
        """Whether a pull of this member may be bound, now or when some time has passed."""
        group = self._groups.get(name) if name in self.bound else None
        if group is None:
            return False
        return group.is_uneven or self.is_alone(name, connection) or connection in self._bound_since_s.get(name, ())

    def is_alone(self, name: str, connection: Session) -> bool:
        """Whether a member was told of itself alone."""
        return self.given.of(name, connection) is ALONE

    def late(self, group: ConsumerGroup, losing: Iterable[set[Session]], reading: Container[Session]) -> list[Session]:
        """Members that lose queues and by the list that they have read them: they have not asked since. `reading`: those that
        pull what they lose, and may have asked for other topics only."""
        sessions = dict.fromkeys(session for those in losing for session in those if session in group.foreign)
        return [session for session in sessions if self._is_late(group, session, is_reading=session in reading)]

    def _is_late(self, group: ConsumerGroup, session: Session, *, is_reading: bool) -> bool:
        members = self.given.of(group.name, session)
        if members is None:
            return False
        return members is not group.list_for(session) or (is_reading and self.is_halfway(group, session))

    def is_anothers(self, name: str, connection: Session, topic: str, queue_id: int) -> bool:
        """Whether a foreign member claims a queue that is not its own."""
        group = self._groups.get(name) if name in self.bound else None
        member = group.foreign.get(connection) if group is not None else None
        if group is None or member is None or not self.is_bound(group, connection, topic):
            return False
        owner = self.owners.of(name, topic, queue_id)
        if owner is None and group.is_uneven:  # the topic has grown, or is new
            self.look(name)
            return True
        return owner not in (None, member.client_id)

    def is_bystander(self, name: str, connection: Session, topic: str, queue_id: int) -> bool:
        """Whether a foreign member claims a queue that is not its own, and has nothing of it in its handlers."""
        return self.is_anothers(name, connection, topic, queue_id) and (
            self._groups.queue(name, topic, queue_id).reader is not connection
        )

    def is_new_reader(self, name: str, connection: Session, topic: str, queue_id: int) -> bool:
        """Whether a foreign member begins to read a queue that it has claimed for long, from an offset of then."""
        group = self._groups.get(name) if name in self.bound else None
        if group is None or connection not in group.foreign or not self.is_bound(group, connection, topic):
            return False
        return group.queue(topic, queue_id).reader is not connection

    def is_read_by_its_owner(self, name: str, topic: str, queue_id: int) -> bool:
        """Whether a foreign member reads the queue, and it is its share: a Rocketlet member that asks for it has not heard of
        the last change yet."""
        owner = self.owners.of(name, topic, queue_id)
        group = self._groups.get(name)
        reader = group.queue(topic, queue_id).reader if group is not None else None
        member = group.foreign.get(reader) if group is not None and reader is not None else None
        return member is not None and member.client_id == owner

    # Changes

    def give(self, name: str, connection: Session, client_id: str, members: MemberList) -> None:
        """A member is given this list."""
        if self.given.of(name, connection) is ALONE and members is not ALONE:  # it drops the rest in a moment
            self._bound_since_s.setdefault(name, {})[connection] = self._clock.monotonic_s()
        elif members is ALONE:
            self.bound.add(name)
        if self.given.of(name, connection) is not members:
            self._groups.generation.increment()
        self.given.give(name, connection, client_id, members)

    def keep(self, name: str, members: Container[Session]) -> None:
        """Forgets those that are no members any more."""
        self.given.keep(name, members)
        now_s = self._clock.monotonic_s()
        bound = {
            connection: since_s
            for connection, since_s in self._bound_since_s.pop(name, {}).items()
            if connection in members and now_s < since_s + RELOOK_S
        }
        if bound:
            self._bound_since_s[name] = bound

    def forget(self, name: str) -> None:
        """The group has no foreign members any more."""
        self.given.forget_group(name)
        self.bound.discard(name)
        self._bound_since_s.pop(name, None)

    def forget_owners(self, name: str) -> None:
        """The group has no members any more."""
        self.owners.put(name, {})
        self._looked_s.pop(name, None)

    def put(self, group: ConsumerGroup, owners: OfTopics) -> None:
        """Stores the owners that a change has found."""
        if group.is_uneven:
            self.bound.add(group.name)
        self.owners.put(group.name, owners)
        self._looked_s[group.name] = self._clock.monotonic_s()
        self._groups.generation.increment()

    # Finding owners

    async def routes_of(self, group: ConsumerGroup, goes_on: Callable[[], bool]) -> Routes | None:
        """The known routes of the group's topics. `goes_on()` is asked after each that is found; None if it does not."""
        found: Routes = {}
        for topic in sorted(group.topics):
            route = await self._find_route(topic)
            if route is not None:
                found[topic] = route
                if not goes_on():
                    return None
        return found

    def look(self, name: str) -> None:
        """Somebody wants a queue that is another's by the owners of the last change. Topics grow and brokers come and go
        without one, so they are found anew, but not at every try."""
        group, now_s = self._groups.get(name), self._clock.monotonic_s()
        if group is not None and now_s - self._looked_s.get(name, now_s) >= self._owners_look_s:
            self._looked_s[name] = now_s
            self._tasks.spawn(self._find(group, self._change_of(name)))

    async def _find(self, group: ConsumerGroup, change: int | None) -> None:
        routes = await self.routes_of(group, lambda: self._change_of(group.name) == change)
        if routes is not None:
            self._turns.do(self._finding(group, change, routes))

    def _finding(self, group: ConsumerGroup, change: int | None, routes: Routes) -> Work[None]:
        """Finds the owners. Those of topics without a route stay as they are, and so do all if they are too many by now."""
        taken, former = 0, self.owners.of_group(group.name)
        found = dict(former)
        try:
            for topic, route in routes.items():
                yield
                queues = TopicQueues(topic, route)
                here = queues.of_broker(self._broker_name)
                if not self.owners.takes(here):
                    return
                taken += here
                found[topic] = owners_of(group.order(topic), queues, self._broker_name)
        finally:
            self.owners.give_back(taken)
        if self._change_of(group.name) != change:
            return
        if group.is_uneven and found != former:  # its readers are drained of what moves
            self._on_moved(group)
        else:
            self.owners.put(group.name, found)


# ------------------------------------------------------------------------------
# The owner of each queue here by the last change, in groups with foreign members.
#
# A queue takes 8 bytes, because there may be very many: a topic's owners are a list, in the order of its queues.


OfTopics = Mapping[str, list[str]]  # the owner of each of a topic's queues here, in order


class Owners:
    """`count` is the number of queues in all groups, with those that are being found."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._groups: dict[str, OfTopics] = {}
        self.count = 0

    def of(self, group: str, topic: str, queue_id: int) -> str | None:
        owners = self._groups.get(group, {}).get(topic, ())
        return owners[queue_id] if queue_id < len(owners) else None

    def of_group(self, group: str) -> OfTopics:
        return self._groups.get(group, {})

    def put(self, group: str, owners: OfTopics) -> None:
        """Instead of those of before. Without any, the group is forgotten."""
        self.count += _count(owners) - _count(self._groups.pop(group, {}))
        if owners:
            self._groups[group] = owners

    def takes(self, more: int) -> bool:
        """Counts the owners found for a group, until they are given back, unless they are too many."""
        if self.count + more > self._limits.max_drained_queues:
            return False
        self.count += more
        return True

    def give_back(self, count: int) -> None:
        self.count -= count


def _count(owners: OfTopics) -> int:
    return sum(map(len, owners.values()))


def owners_of(members: Mapping[str, int], queues: TopicQueues, broker_name: str) -> list[str]:
    """The future owners of one broker's queues, in their order, among members in these places; nothing if nobody stays."""
    owners: list[str] = []
    for index, client_id in enumerate(islice(members, len(queues))):  # those behind get nothing
        share = AVG.allocate_at(index, len(members), queues)
        owners += [client_id] * sum(queue.broker_name == broker_name for queue in share)
    return owners


# ------------------------------------------------------------------------------
# Finds the foreign members that take themselves for the reader of a queue: by the list that each was given last, or
# because it reads.


Readers = dict[int, list[Session]]  # the readers of a topic's queues here


class Claims:
    def __init__(self, broker_name: str, given: Given, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._broker_name = broker_name
        self._given = given

    def finding(self, group: ConsumerGroup, queues: TopicQueues) -> Work[Readers | None]:
        """Finds the foreign members that take themselves for the reader of each queue here; None if they are too many.
        Several may do so for one queue: one that has let go of it but not of others, and one that was told first that it is
        its own."""
        claims: Readers = {}
        left = self._limits.max_claims
        for number, of_list in enumerate(self._given.claims(group.name, queues)):
            if number:
                yield
            for share, sessions in of_list:
                # The list is one for all topics, also for those that its reader does not subscribe to.
                readers = [item for item in sessions if queues.topic in group.subscriptions_of(item)]
                left -= len(share) * len(readers)
                if left < 0:
                    return None
                for queue in share:
                    if queue.broker_name == self._broker_name:
                        claims.setdefault(queue.queue_id, []).extend(readers)
        return claims

    def losing(
        self, group: ConsumerGroup, topic: str, here: int, owners: list[str], claims: Readers
    ) -> Iterator[tuple[QueueKey, Session]]:
        """The queues here of which a foreign member takes itself for the reader, and will not be the owner any more."""
        for queue_id in range(here):
            place = topic, queue_id
            owner = owners[queue_id] if owners else None
            for session in (*claims.get(queue_id, ()), *self._last_reader(group, place)):
                member = group.members.get(session)
                if member is not None and member.client_id != owner:
                    yield place, session

    def letting_go(
        self, group: ConsumerGroup, drain: Drain, topic: str, here: int, claims: Readers
    ) -> Iterator[tuple[QueueKey, Session]]:
        """Queues with members that are drained of them and, by their last list, do not read them any more: these drop the
        queue, now or soon."""
        for queue_id in range(here):
            place = topic, queue_id
            for session in drain.moving.get(place, ()):
                has_list = self._given.of(group.name, session) not in (None, ALONE)
                if has_list and session not in claims.get(queue_id, ()):
                    yield place, session

    def _last_reader(self, group: ConsumerGroup, place: QueueKey) -> Iterator[Session]:
        """The session that pulled last, unless it was given a list by which the queue is its own or another's. One that was
        given none has read since before a restart."""
        reader = group.queue(*place).reader
        if reader is not None and reader in group.foreign and self._given.of(group.name, reader) in (ALONE, None):
            yield reader


# ------------------------------------------------------------------------------
# Finds the queues that a change of a group moves away from their foreign readers.


@dataclass(slots=True)
class Found:
    """The queues that a change of a group moves: the readers that lose them, those that let go of drained ones, and the
    owners afterwards. retry_queues: the group's, on all brokers. taken: how much of it is counted. others: the brokers that
    have to agree."""

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
        self._claims = Claims(broker_name, allotment.given, limits)
        self._is_finding = False  # one topic at a time: members may claim very much of it

    def finding(
        self, group: ConsumerGroup, drain: Drain, routes: Routes, is_current: Callable[[], bool]
    ) -> Work[Found | None]:
        """Finds the queues that move; None if another change came meanwhile: that one counts. If there are too many, nobody
        is drained: the members are told at once, as by Apache's broker."""
        found = Found()
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
            self._allotment.owners.give_back(found.taken)
        return found if is_current() else None

    def _finding_of(self, group: ConsumerGroup, drain: Drain, queues: TopicQueues, found: Found) -> Work[bool]:
        """Finds the queues of one topic that move. Returns whether they are not too many."""
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

    def _takes(self, found: Found, more: int) -> bool:
        is_taken = self._allotment.owners.takes(more)
        found.taken += more if is_taken else 0
        return is_taken

    def begin(self, group: ConsumerGroup, drain: Drain, found: Found, now_s: float, until_s: float) -> None:
        """A member that was told before and lets go just now gets nothing of a queue, even if that is its own again: it
        learns that later."""
        former = drain.moving
        drain.lose(found.losing, now_s, until_s)
        for place, readers in former.items():
            for reader in readers:
                member = group.members.get(reader)
                if member is None or self._allotment.is_alone(group.name, reader):  # that one gets nothing anyhow
                    continue
                if member.client_id == self._allotment.owners.of(group.name, *place):
                    if (place, reader) not in found.letting_go:
                        continue
                    drain.returning.setdefault(reader, set()).add(place)
                drain.moving.setdefault(place, set()).add(reader)
        drain.forget_kept()
        drain.charge()
