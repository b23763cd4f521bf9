"""Foreign members let go of a queue before the next one reads it, as far as an unmodified client can be made to.

A foreign member that learns of a change drops the queues that it loses at once, with messages of them in its handlers, which
are then delivered again. So the broker drains first: a queue that will move gets no new messages, and its reader's pulls,
which carry how far it has come, say when everything is handled. A change comes to the members in steps:

- a member that loses no queue here is told at once; what it pulls of a queue that still is drained waits
- a reader is told when all queues that it loses are drained, and is given the list of members that it had until then
- a drain takes what it needs as long as it progresses; a reader that stands for 2 s is told anyway. After 0.2 s each
  queue moves by itself, on one broker (`allotment`)

With several brokers a member is told when no broker waits for it any more (`agreement`).

Who reads a queue follows from the list of members that each foreign member was last given, because that is what it shares
the queues out by. Where nobody was given a list, or of itself only (`allotment`), it is who pulled last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from ....protocol.agreement import Members
from ....protocol.allocation import TopicQueues
from ....protocol.bodies import Route
from ....protocol.headers import AgreeOnMembers, PullMessage
from ....protocol.names import RETRY_PREFIX
from ....protocol.work import Work
from ...config import (
    BRIDGED_AFTER_S,
    DRAIN_LIMIT_S,
    DRAIN_MAX_S,
    DRAINED_WAIT_S,
    MAX_BRIDGED,
    MAX_GATED,
    MAX_REPORTED,
    TOLD_AGAIN,
    LimitExceeded,
)
from ...messages.held_pulls import HeldPulls, Until
from ...running.engine import Engine
from ...sessions.session import Session
from ..members import ConsumerGroup, ConsumerGroups
from ..owning.watch import Watch
from .agreement import Agreement, GivenElsewhere, Say
from .allotment import Allotment, Routes
from .claims import Claims
from .drain import Drain, Found, Place
from .given import ALONE, MemberList
from .owners import owners_of

log = structlog.get_logger("rocketlet.groups")

Tell = Callable[[ConsumerGroup, Iterable[Session]], None]


@dataclass(frozen=True, slots=True)
class Outside:
    """What draining asks and tells others.

    `find_route(topic)`: which queues a topic has on all brokers, because members share them all. `tell(group, connections)`
    tells members that their group is another than before. `say`: to other brokers. `on_drained(group, place, connection)`:
    its reader has handled all of a queue.
    """

    find_route: Callable[[str], Awaitable[Route | None]]
    tell: Tell
    say: Say
    on_drained: Callable[[str, Place, Session], None]


class Draining:
    def __init__(
        self,
        broker_name: str,
        groups: ConsumerGroups,
        watch: Watch,
        held_pulls: HeldPulls,
        engine: Engine,
        outside: Outside,
    ) -> None:
        self._broker_name = broker_name
        self._groups = groups
        self._watch = watch
        self._held_pulls = held_pulls
        self._tasks, self._turns, self._clock = engine
        self._on_drained = outside.on_drained
        self._tell = outside.tell
        self._drains: dict[str, Drain] = {}
        self._changes: dict[str, int] = {}
        self._change = 0  # of any group; a number never comes again, also if its group is forgotten
        self._is_finding = False
        self._settled: dict[str, frozenset[str]] = {}  # who the members were when the last drain was over
        self.allotment = Allotment(
            broker_name,
            groups,
            watch,
            outside.find_route,
            engine,
            change_of=self._changes.get,
            on_moved=self.changed,
        )
        self._given = self.allotment.given
        self._owners = self.allotment.owners
        self._claims = Claims(broker_name, self._given, watch)
        self.agreement = Agreement(broker_name, self._clock, outside.say, self._peers_changed)

    # What others ask

    def is_pending(self, group: str) -> bool:
        """Whether foreign members do not know of a change yet."""
        drain = self._drains.get(group)
        return drain is not None and not drain.is_over

    def is_kept_back(self, group: str, connection: Session) -> bool:
        """Whether this foreign member is to be told of the group's change later; it will be."""
        drain = self._drains.get(group)
        if drain is None or self._may_know(group, drain, connection, self.agreement.lets_tell):
            return False
        drain.kept[connection] = None
        return True

    def _may_know(self, name: str, drain: Drain, connection: Session, lets: Callable[[str, str], bool]) -> bool:
        """Whether nobody waits for a member: no reader of queues here, nor another broker, by what it `lets`."""
        if drain.is_open or connection in drain.waiting:
            return False
        group = self._groups.get(name)
        member = group.members.get(connection) if group is not None else None
        return drain.is_agreed or member is None or lets(name, member.client_id)

    def given(self, group: ConsumerGroup, connection: Session) -> list[str]:
        """The list of members that a member gets. A reader that is being drained gets the one that it had; it drops queues
        by what it is given here."""
        members = group.list_for(connection)
        member = group.foreign.get(connection)
        if member is None:
            return members.ids
        drain = self._drains.get(group.name)
        had = self._given.of(group.name, connection)
        if drain is not None and not self._may_know(group.name, drain, connection, self.agreement.lets_give):
            drain.kept[connection] = None  # whatever it was told before
            if drain.is_long and not drain.is_open:
                self._give(group.name, connection, member.client_id, ALONE)
                return ALONE.told(member.client_id)
            if had is not None:
                return had.told(member.client_id)
            settled = self._settled.get(group.name, frozenset())
            if not self._watch.reads(connection, group.name):  # what it took by this list nobody would know of
                settled -= {member.client_id}
            return [client_id for client_id in group.companions(connection).ids if client_id in settled]
        self._give(group.name, connection, member.client_id, members)
        if had is not members:
            self.agreement.gave(group.name, member.client_id)
        return members.told(member.client_id)

    def _give(self, name: str, connection: Session, client_id: str, members: MemberList) -> None:
        self.allotment.give(name, connection, client_id, members)
        drain = self._drains.get(name)
        if drain is not None:  # by this list it may read again what it has let go of
            drain.drained.pop(connection, None)
            drain.rounds.pop(connection, None)
            for place in drain.returning.pop(connection, ()):
                drain.moving[place].discard(connection)

    def is_draining(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether nobody else may have the queue yet."""
        drain = self._drains.get(group)
        if drain is not None and (drain.is_open or drain.has((topic, queue_id))):
            return True
        if self.allotment.is_read_by_its_owner(group, topic, queue_id):
            self.allotment.look(group)
            return True
        return False

    def holds_back(self, connection: Session, header: PullMessage) -> bool:
        """Whether this pull is to get nothing, because its queue moves away from who pulls; and notes how far it is."""
        drain = self._drains.get(header.consumer_group)
        if drain is None or connection not in drain.moving.get(place := (header.topic, header.queue_id), ()):
            return False
        if place in drain.waiting.get(connection, ()):
            if has_handled_all(header):
                self._drained(header.consumer_group, drain, connection, place)
            elif header.commit_offset > drain.commits.get(place, -1):
                drain.commits[place] = header.commit_offset
                self._progressed(header.consumer_group, drain)
                self.agreement.progressed(header.consumer_group)
        for dropped in drain.dropped(connection, place):
            self._drained(header.consumer_group, drain, connection, dropped)
        # One that was told of itself only comes back until it has handled all, and is parked then.
        return place in drain.waiting.get(connection, ()) or not self.allotment.is_alone(
            header.consumer_group, connection
        )

    def is_gated(self, connection: Session, header: PullMessage) -> bool:
        """Whether this pull is of a queue's next reader, who waits until the earlier one is done; or of a member that claims
        queues by a list of a run before, while it is not known whose they are."""
        name, place = header.consumer_group, (header.topic, header.queue_id)
        drain, group = self._drains.get(name), self._groups.get(name)
        if drain is None or group is None or connection not in group.foreign:
            return False
        is_unknown = drain.is_open and self._given.of(name, connection) is None
        return drain.has(place) or (is_unknown and self._watch.reader(name, *place) is not connection)

    def gate(self, header: PullMessage, go_on: Callable[[], None]) -> None:
        """A pull that `is_gated` waits; `go_on` is called when the earlier reader is done. Raises LimitExceeded."""
        place = (header.topic, header.queue_id)
        waiting = self._drains[header.consumer_group].gated.setdefault(place, [])
        if len(waiting) >= MAX_GATED:
            raise LimitExceeded(f"{MAX_GATED} pulls wait for the former reader of {place[0]}:{place[1]}; try again")
        waiting.append(go_on)

    def heard(self, header: AgreeOnMembers, members: Members) -> None:
        """Another broker says how far it is with a group, and whom it has given which list of members."""
        group = self._groups.get(header.consumer_group)
        given = self.agreement.heard(header, members)
        if group is None:
            return
        late = [item for item in given if self._take_given(group, item)]
        if late:  # they read other queues than was thought: what moves now is found again
            self.changed(group)
        drain = self._drains.get(group.name)
        if drain is not None and not drain.is_over and self.agreement.agrees(group.name, header.broker_name):
            self._progressed(group.name, drain)
        self._peers_changed(group.name)

    def _take_given(self, group: ConsumerGroup, given: GivenElsewhere) -> bool:
        """Notes whom another broker has given a list; whether it is news of a change before the last one."""
        ids, is_late = set(given.client_ids), False
        for connection, member in group.foreign.items():
            members = given.lists.get(member.topics) if member.client_id in ids else None
            if members is None or self._given.of(group.name, connection) is members:
                continue
            if given.is_current:
                self._give(group.name, connection, member.client_id, members)
            else:
                self.allotment.give(group.name, connection, member.client_id, members)
                is_late = True
        return is_late

    def _peers_changed(self, name: str) -> None:
        """Another broker has come further, or cannot be asked."""
        drain = self._drains.get(name)
        if drain is not None and not drain.is_over:
            self._tell_kept(name, drain)

    # A drain

    def changed(self, group: ConsumerGroup) -> None:
        """Members or their topics have changed: drains what will move from a foreign reader, if there is one."""
        self._change += 1
        self._changes[group.name] = change = self._change
        if group.foreign:
            drain = self._drains.setdefault(group.name, Drain(self._clock.monotonic_s()))
            if drain.is_over:
                drain.began_s = self._clock.monotonic_s()
            # Until `_start` knows what moves, nobody may take anything: members allocate as soon as they are told.
            drain.is_open = True
            drain.keep(group.members)
            self.agreement.opened(group.name)
            self._progressed(group.name, drain)
            self._tasks.spawn(self._start(group, drain, change))
            return
        self._forget(group.name)
        self.allotment.forget(group.name)
        self.agreement.forget(group.name)
        if not group.members:
            self._changes.pop(group.name, None)
            self._settled.pop(group.name, None)
            self.allotment.forget_owners(group.name)

    def _forget(self, name: str) -> None:
        drain = self._drains.pop(name, None)
        if drain is not None:
            if drain.timer is not None:
                drain.timer.cancel()
            drain.let_on(list(drain.gated))
            drain.release()

    async def _start(self, group: ConsumerGroup, drain: Drain, change: int) -> None:
        if self._changes.get(group.name) != change:  # of many changes at once, the last one counts
            return
        routes = await self.allotment.routes_of(group)
        self._turns.do(self._finding(group, drain, change, routes))

    def _finding(self, group: ConsumerGroup, drain: Drain, change: int, routes: Routes) -> Work[None]:
        """Finds what moves, in pieces; if another change comes meanwhile, that one counts. Of too many queues nobody is
        drained: the members are told at once, as by Apache's broker."""
        was_open = drain.is_open
        self.allotment.keep(group.name, group.members)
        found = Found()
        try:
            for topic, route in routes.items():
                yield
                while self._is_finding:  # of one group at a time: members may claim very much of one topic
                    yield
                if self._changes.get(group.name) != change:
                    return
                if not (yield from self._finding_of(group, drain, TopicQueues(topic, route), found)):
                    found.clear()
                    break
            is_uneven = bool(found.owners) and group.differs()
            yield from group.binding(is_uneven=is_uneven, retry_queues=found.retry_queues)
            others = yield from self.agreement.finding_others(group, routes if found.owners else {})
            if self._changes.get(group.name) != change:
                return
        finally:
            self._owners.give_back(found.taken)
        self.allotment.put(group, found.owners)
        if was_open and not drain.is_open:  # it took so long that all were told, and were given other lists
            yield from self._letting_turns(group)
            return
        drain.is_open = False
        self._move(group, drain, found)
        self.agreement.found(group.name, others, drain.waited_for(group.members))
        drain.is_agreed = self.agreement.is_reached(group.name)
        drain.let_on(list(drain.gated))  # those that still have to wait come back
        self._progressed(group.name, drain)
        self._tell_kept(group.name, drain)
        if drain.waiting and not others.brokers and found.taken * len(group.foreign) <= MAX_BRIDGED:
            self._clock.call_later(BRIDGED_AFTER_S, self._bridge, group.name, drain)
        for connection in list(drain.waiting):
            for pull in self._held_pulls.of(connection, group.name):
                place = (pull.queue.topic, pull.queue.queue_id)
                if connection in drain.moving.get(place, ()):
                    self._held_pulls.let_go(pull)  # its member comes back at once, and says how far it is
                    # It does not where another broker has told it already: it reads the queue no more.
                    if pull.is_done and place in drain.waiting.get(connection, ()):
                        self._drained(group.name, drain, connection, place)
        yield from self._letting_turns(group)

    def _bridge(self, name: str, drain: Drain) -> None:
        """A drain takes long. Members that may not have the new list yet are told of themselves alone, and claim all."""
        group = self._groups.get(name)
        if group is None or drain.is_open or not drain.waiting or self._drains.get(name) is not drain:
            return
        drain.is_long = True
        self._tell(
            group, [item for item in drain.kept if item in group.foreign and not self.allotment.is_alone(name, item)]
        )

    def _letting_turns(self, group: ConsumerGroup) -> Work[None]:
        """Pulls that waited because the queue was another's come back if it is their member's own now."""
        for connection in list(group.foreign):
            pulls = [pull for pull in self._held_pulls.of(connection, group.name) if pull.until is Until.TURN]
            if pulls:
                yield
            for pull in pulls:
                if not self.allotment.is_anothers(group.name, connection, pull.queue.topic, pull.queue.queue_id):
                    self._held_pulls.let_go(pull)

    def _finding_of(self, group: ConsumerGroup, drain: Drain, queues: TopicQueues, found: Found) -> Work[bool]:
        """What moves of one topic; whether that is not too much."""
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
        is_taken = self._owners.takes(more)
        found.taken += more if is_taken else 0
        return is_taken

    def _move(self, group: ConsumerGroup, drain: Drain, found: Found) -> None:
        """What a reader was drained of in this drain before, it need not be drained of again; but it gets nothing of it. Nor
        does who was told before and lets go just now, even if the queue is its own again: it learns that later."""
        former, drain.moving, drain.returning = drain.moving, {}, {}
        before, drain.waiting = drain.waiting, {}
        since_s: dict[tuple[Session, Place], float] = {}
        now_s = self._clock.monotonic_s()
        drain.refuses_ours = True
        held_by = {place for places in before.values() for place in places}
        for place, connection in found.losing:
            drain.moving.setdefault(place, set()).add(connection)
            has_nothing = place in held_by and place not in before.get(connection, ())  # it waited for who is drained
            if place not in drain.drained.get(connection, ()) and not has_nothing:
                drain.waiting.setdefault(connection, set()).add(place)
                since_s[connection, place] = drain.since_s.get((connection, place), now_s)
        for place, connections in former.items():
            for connection in connections:
                member = group.members.get(connection)
                if member is None or self.allotment.is_alone(group.name, connection):  # that one gets nothing anyhow
                    continue
                if member.client_id == self._owners.of(group.name, *place):
                    if (place, connection) not in found.letting_go:
                        continue
                    drain.returning.setdefault(connection, set()).add(place)
                drain.moving.setdefault(place, set()).add(connection)
        drain.since_s = since_s
        for connection, places in drain.drained.items():  # what it need not lose now, it reads on
            places -= {place for place in places if connection not in drain.moving.get(place, ())}
        for connection, rounds in drain.rounds.items():  # and comes back to it when messages are there
            for place in [place for place in rounds if connection not in drain.moving.get(place, ())]:
                del rounds[place]
        drain.charge()

    def _drained(self, name: str, drain: Drain, connection: Session, place: Place) -> None:
        """A reader has handled all of a queue: the next one goes on where it came, whatever offset it has loaded before."""
        places = drain.waiting[connection]
        places.discard(place)
        drain.since_s.pop((connection, place), None)
        drain.drained.setdefault(connection, set()).add(place)
        self._watch.let_go(connection, name, *place)
        self._on_drained(name, place, connection)
        if not places:
            del drain.waiting[connection]
        drain.let_on([place])
        self._progressed(name, drain)
        self._tell_kept(name, drain)

    def _progressed(self, name: str, drain: Drain) -> None:
        if drain.timer is not None:
            drain.timer.cancel()
        # A drain that progresses may go on, but not for ever: behind it the group's change waits.
        now_s = self._clock.monotonic_s()
        drain.stands_at_s = now_s + DRAIN_LIMIT_S
        limit_s = max(min(DRAIN_LIMIT_S, drain.oldest_s + DRAIN_MAX_S - now_s), 0.0)
        drain.timer = self._clock.call_later(limit_s, self._give_up, name, drain)

    def _give_up(self, name: str, drain: Drain) -> None:
        now_s = self._clock.monotonic_s()
        old = (
            drain.since(now_s - DRAIN_MAX_S)
            if drain.is_long and not drain.is_open and now_s < drain.stands_at_s
            else None
        )
        given_up = old or [(session, place) for session, places in drain.waiting.items() for place in places]
        left = sorted({place for _, place in given_up})
        if left:
            # Their messages are handled twice, as on Apache's broker. To wait longer would stop the whole group for
            # one handler.
            hint = "their handlers were still running"
            log.warning("queues_moved_undrained", group=name, queues=left[:MAX_REPORTED], count=len(left), hint=hint)
        if old:  # the others go on
            drain.give_up(old)
            drain.let_on(left)
            self._progressed(name, drain)
            self._tell_kept(name, drain)
            return
        drain.waiting.clear()
        drain.is_open = False
        self.agreement.give_up(name)
        drain.let_on(list(drain.gated))
        self._tell_kept(name, drain)

    def _tell_kept(self, name: str, drain: Drain) -> None:
        """Tells those that are not kept back any more; at the end also who was refused a lock of what was drained."""
        if drain.is_open:  # they would be given the lists that they had
            return
        group = self._groups.get(name)
        if group is not None:
            self.agreement.waits(name, drain.waited_for(group.members))
        drain.is_agreed = self.agreement.is_reached(name)
        lets_tell = self.agreement.lets_tell
        told = dict.fromkeys(item for item in drain.kept if self._may_know(name, drain, item, lets_tell))
        for connection in told:
            del drain.kept[connection]
        if group is not None:
            if drain.is_drained and drain.moving and drain.refuses_ours:
                drain.refuses_ours = False
                told |= dict.fromkeys(item for item in group.members if item not in group.foreign)
            self._tell(group, [item for item in told if item in group.members])
            if drain.is_over:
                drain.is_long = False
                self._settled[name] = frozenset(group.client_ids())
        if drain.is_over and self._drains.get(name) is drain:
            if drain.timer is not None:
                drain.timer.cancel()
            # a reader that was told drops its queues at once; one that allocates in another way reads on after this
            drain.timer = self._clock.call_later(DRAINED_WAIT_S, self._let_read_on, name, drain, TOLD_AGAIN)

    def _let_read_on(self, name: str, drain: Drain, times: int) -> None:
        """Members have dropped by now what they lose, unless they were not reached: those are told again."""
        group = self._groups.get(name)
        late = self.allotment.late(group, drain.moving.values()) if group is not None else []
        if group is None or not late or not times:
            self._forget(name)
            return
        drain.timer = self._clock.call_later(DRAINED_WAIT_S, self._let_read_on, name, drain, times - 1)
        self._tell(group, late)


def has_handled_all(header: PullMessage) -> bool:
    """Whether nothing of the queue is in the hands of who pulls: a pull carries what its member has committed."""
    return header.commit_offset >= header.queue_offset
