"""Foreign members let go of a queue before the next one reads it, as far as an unmodified client can be made to.

A foreign member that learns of a change drops the queues that it loses at once, with messages of them in its handlers, which
are then delivered again. So the broker drains first: a queue that will move gets no new messages, and its reader's pulls,
which carry how far it has come, say when everything is handled. A change comes to the members in steps:

- a member that loses no queue here is told at once; its pulls of a queue that is still drained wait
- a reader is told when all queues that it loses are drained, and is given the list of members that it had until then
- a drain takes what it needs as long as it progresses, for 30 s at most. A reader that has handled nothing for 1 s, of any
  queue, is asked: its held pulls come back, and say how far it is. A second later it is told anyway
- after 0.2 s each queue moves by itself, on one broker (`allotment`)

With several brokers a member is told when no broker waits for it any more (`agreement`).

A queue's reader follows from the list that each foreign member was last given, because members share the queues out by
that. Where nobody was given a list, or only of itself (`allotment`), the reader is the one that pulled last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ....protocol.agreement import Members
from ....protocol.bodies import Route
from ....protocol.headers import AgreeOnMembers, PullMessage
from ....protocol.work import Work
from ...config import LIMITS, STANDSTILL_S, LimitExceeded, Limits
from ...messages.held_pulls import HeldPulls, Until
from ...running.engine import Engine
from ...sessions.session import Session
from ..members import ConsumerGroup, ConsumerGroups
from ..owning.watch import Watch
from .agreement import Agreement, Say
from .allotment import Allotment, Routes
from .drain import Drain, QueueKey
from .moves import Found, Moves
from .notices import Notices, Tell
from .repeats import Repeats


@dataclass(frozen=True, slots=True)
class Outside:
    """The functions by which draining asks and tells others.

    `find_route(topic)`: which queues a topic has on all brokers, because members share them all. `tell(group, connections)`
    tells members that their group is another than before. `say`: to other brokers. `on_drained(group, place, connection)`:
    its reader has handled all of a queue. `repeats` notes what was given up.
    """

    find_route: Callable[[str], Awaitable[Route | None]]
    tell: Tell
    say: Say
    on_drained: Callable[[str, QueueKey, Session], None]
    repeats: Repeats


class Draining:
    def __init__(
        self,
        groups: ConsumerGroups,
        watch: Watch,
        held_pulls: HeldPulls,
        engine: Engine,
        outside: Outside,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._groups = groups
        self._watch = watch
        self._held_pulls = held_pulls
        self._tasks, self._turns, self._clock = engine
        self._on_drained = outside.on_drained
        self._repeats = outside.repeats
        self._drains: dict[str, Drain] = {}
        self._changes: dict[str, int] = {}
        self._change = 0  # the last number, in any group; none comes again, also if its group is forgotten
        self.allotment = Allotment(
            groups,
            watch,
            outside.find_route,
            engine,
            change_of=self._changes.get,
            on_moved=self.changed,
            limits=limits,
        )
        self.agreement = Agreement(groups.broker_name, self._clock, outside.say, self._peers_changed, limits)
        self._moves = Moves(groups.broker_name, watch, self.allotment, self.agreement, limits)
        self.notices = Notices(self._drains, groups, watch, self.allotment, self.agreement, self._clock, outside.tell)

    # Questions

    def is_moving(self, group: str, session: Session) -> bool:
        """Whether pulls of the group are judged by what moves now, which changes from one to the next."""
        return group in self._drains or self.allotment.may_bind(group, session)

    def is_pending(self, group: str) -> bool:
        """Whether foreign members do not know of a change yet."""
        drain = self._drains.get(group)
        return drain is not None and not drain.is_over

    def is_draining(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether nobody else may have the queue yet."""
        drain = self._drains.get(group)
        if drain is not None and (drain.is_finding or drain.has((topic, queue_id))):
            return True
        if self.allotment.is_read_by_its_owner(group, topic, queue_id):
            self.allotment.look(group)
            return True
        return False

    def holds_back(self, connection: Session, header: PullMessage) -> bool:
        """Whether this pull is to get nothing, because its queue moves away from its member. Notes how far it is."""
        drain = self._drains.get(header.consumer_group)
        if drain is None or connection not in drain.moving.get(place := (header.topic, header.queue_id), ()):
            return False
        drain.pulled_s[connection] = self._clock.monotonic_s()
        if place in drain.waiting.get(connection, ()) and has_handled_all(header):
            self._drained(header.consumer_group, drain, connection, place)
        for dropped in drain.dropped(connection, place):
            self._drained(header.consumer_group, drain, connection, dropped)
        # One that was told of itself only comes back until it has handled all, and is parked then.
        return place in drain.waiting.get(connection, ()) or not self.allotment.is_alone(
            header.consumer_group, connection
        )

    def advanced(self, name: str, session: Session) -> None:
        """Somebody has come further in a queue, whichever: its handlers run."""
        drain = self._drains.get(name)
        if drain is not None and session in drain.waiting:
            drain.come_further(self._until_s(), session)
            self.agreement.progressed(name)

    def is_gated(self, connection: Session, header: PullMessage) -> bool:
        """Whether this pull is of a queue's next reader, which waits until the earlier one is done; of a member that claims
        queues by a list from before a restart, while their owners are not known; or of one that claims what its owner reads,
        by a list of which another broker has not told this one yet."""
        name, place = header.consumer_group, (header.topic, header.queue_id)
        drain, group = self._drains.get(name), self._groups.get(name)
        if drain is None or group is None or connection not in group.foreign:
            return False
        is_unknown = drain.is_finding and self.allotment.given.of(name, connection) is None
        if drain.has(place) or (is_unknown and self._watch.reader(name, *place) is not connection):
            return True
        is_own = group.foreign[connection].client_id == self.allotment.owners.of(name, *place)
        return not is_own and self.allotment.is_read_by_its_owner(name, *place)

    def gate(self, header: PullMessage, go_on: Callable[[], None]) -> None:
        """A pull that `is_gated` waits; `go_on` is called when the earlier reader is done. Raises LimitExceeded."""
        place = (header.topic, header.queue_id)
        waiting = self._drains[header.consumer_group].gated.setdefault(place, [])
        if len(waiting) >= self._limits.max_gated:
            waiting_for = f"the former reader of {place[0]}:{place[1]}"
            raise LimitExceeded(f"{self._limits.max_gated} pulls wait for {waiting_for}; try again")
        waiting.append(go_on)

    def heard(self, header: AgreeOnMembers, members: Members) -> None:
        """Another broker says how far it is with a group, and whom it has given which list of members."""
        group = self._groups.get(header.consumer_group)
        given = self.agreement.heard(header, members)
        if group is None:
            return
        late = [item for item in given if self.notices.take(group, item)]
        if late:  # they read other queues than was thought: what moves now is found again
            self.changed(group)
        drain = self._drains.get(group.name)
        if drain is not None and not drain.is_over and self.agreement.agrees(group.name, header.broker_name):
            drain.come_further(self._until_s())
        self._peers_changed(group.name)

    def _peers_changed(self, name: str) -> None:
        """Another broker has come further, or cannot be asked."""
        drain = self._drains.get(name)
        if drain is not None and not drain.is_over:
            self.notices.tell(name, drain)
        if drain is not None:
            self.notices.answer(name, drain)

    # A drain

    def changed(self, group: ConsumerGroup) -> None:
        """Members or their topics have changed: drains what will move from a foreign reader, if there is one."""
        self._change += 1
        self._changes[group.name] = change = self._change
        self._groups.generation.rise()
        if group.foreign:
            now_s = self._clock.monotonic_s()
            # Until `_start` knows what moves, nobody may take anything: members allocate as soon as they are told.
            drain = self._drains.setdefault(group.name, Drain(now_s))
            drain.change(group.members, now_s)
            self.agreement.opened(group.name)
            drain.come_further(self._until_s())
            self._look_later(group.name, drain)
            self._tasks.spawn(self._start(group, drain, change))
            return
        if (former := self._drains.pop(group.name, None)) is not None:
            former.end()
        self.allotment.forget(group.name)
        self.agreement.forget(group.name)
        if not group.members:
            self._changes.pop(group.name, None)
            self.notices.forget(group.name)
            self.allotment.forget_owners(group.name)

    async def _start(self, group: ConsumerGroup, drain: Drain, change: int) -> None:
        def goes_on() -> bool:
            """Among many changes at once, the last one counts. A name server may be far, and the topics many."""
            is_current = self._is_current(group.name, change)
            if is_current and drain.is_finding:
                drain.come_further(self._until_s())
            return is_current

        routes = await self.allotment.routes_of(group, goes_on) if self._is_current(group.name, change) else None
        if routes is not None:
            self._turns.do(self._finding(group, drain, change, routes))

    def _finding(self, group: ConsumerGroup, drain: Drain, change: int, routes: Routes) -> Work[None]:
        """Finds what moves, in pieces."""
        stage = drain.stage
        self.allotment.keep(group.name, group.members)
        is_current = partial(self._is_current, group.name, change)
        found = yield from self._moves.finding(group, drain, routes, is_current)
        if found is None:
            return
        self.allotment.put(group, found.owners)
        self._groups.generation.rise()
        # Else it took so long that all were told meanwhile, and were given other lists.
        if drain.stage is stage and self._drains.get(group.name) is drain:
            self._begin(group, drain, found)
        yield from self._letting_turns(group)

    def _is_current(self, name: str, change: int) -> bool:
        return self._changes.get(name) == change

    def _begin(self, group: ConsumerGroup, drain: Drain, found: Found) -> None:
        self._moves.begin(group, drain, found, self._clock.monotonic_s(), self._until_s())
        self.agreement.found(group.name, found.others, drain.waited_for(group.members))
        drain.let_all_on()  # those that still have to wait come back
        drain.come_further(self._until_s())
        self._look_later(group.name, drain)
        self.notices.tell(group.name, drain)
        self.notices.answer(group.name, drain)
        if drain.waiting and not found.others.brokers and found.taken * len(group.foreign) <= self._limits.max_bridged:
            self._clock.call_later(self._limits.bridged_after_s, self.notices.bridge, group.name, drain)
        for session in list(drain.waiting):
            self._ask(group.name, drain, session)

    def _ask(self, name: str, drain: Drain, session: Session) -> None:
        """A reader comes back at once with its held pulls of the queues that it loses, and says how far it is."""
        for pull in self._held_pulls.of(session, name):
            place = (pull.queue.topic, pull.queue.queue_id)
            if session in drain.moving.get(place, ()):
                self._held_pulls.let_go(pull)
                # It does not where another broker has told it already: it reads the queue no more.
                if pull.is_done and place in drain.waiting.get(session, ()):
                    self._drained(name, drain, session, place)

    def _letting_turns(self, group: ConsumerGroup) -> Work[None]:
        """Pulls that waited because the queue was another's come back if it is their member's own now."""
        for session in list(group.foreign):
            pulls = [pull for pull in self._held_pulls.of(session, group.name) if pull.until is Until.TURN]
            if pulls:
                yield
            for pull in pulls:
                if not self.allotment.is_anothers(group.name, session, pull.queue.topic, pull.queue.queue_id):
                    self._held_pulls.let_go(pull)

    def _drained(self, name: str, drain: Drain, session: Session, place: QueueKey) -> None:
        """A reader has handled all of a queue: the next one goes on where it came, whatever offset it has loaded before."""
        drain.finish(session, place)
        self._watch.let_go(session, name, *place)
        self._on_drained(name, place, session)
        drain.let_on([place])
        drain.come_further(self._until_s(), session)
        self.notices.tell(name, drain)

    # Readers that stand

    def _until_s(self) -> float:
        """Until when a reader may stand that has just come further."""
        return self._clock.monotonic_s() + self._limits.drain_limit_s / 2

    def _look_later(self, name: str, drain: Drain) -> None:
        # A drain that goes on may do so, but not for ever: behind it the group's change waits.
        due_s = min(drain.due_s, drain.oldest_s + self._limits.drain_max_s)
        now_s = self._clock.monotonic_s()
        drain.set_timer(self._clock.call_later(max(due_s - now_s, 0.0), self._look, name, drain, max(due_s, now_s)))

    def _look(self, name: str, drain: Drain, due_s: float) -> None:
        """Asks who stands how far it is, and gives up who stands on. due_s: the time at which this was to be."""
        now_s = self._clock.monotonic_s()
        if now_s - due_s > STANDSTILL_S:  # the pulls that came meanwhile have not been read yet
            drain.prolong(now_s - due_s)
            self._look_later(name, drain)
            return
        for key in drain.standing(now_s, was_asked=False):
            drain.due[key] = self._until_s(), True
            for session in list(drain.waiting) if key is None else [key]:
                self._ask_of_others(name, session)
        stand = drain.standing(now_s, was_asked=True)
        is_old = drain.oldest_s + self._limits.drain_max_s <= now_s
        if drain.moves_singly:
            given_up = [(key, place) for key in stand if key is not None for place in drain.waiting[key]]
            given_up += drain.since(now_s, self._limits.drain_max_s) if is_old else []
            if given_up:
                self._give_up(name, drain, dict.fromkeys(given_up))
        elif stand or is_old:
            self._give_up_all(name, drain)
        if not drain.is_over:
            self._look_later(name, drain)

    def _ask_of_others(self, name: str, session: Session) -> None:
        """A reader may be busy with queues that it keeps. It comes back with those pulls, too, and says how far it is."""
        for pull in self._held_pulls.of(session, name):
            if pull.until is Until.MESSAGE and not pull.is_done:
                self._held_pulls.let_go(pull)

    def _give_up(self, name: str, drain: Drain, given_up: Iterable[tuple[Session, QueueKey]]) -> None:
        """The others go on."""
        self._note_given_up(name, given_up)
        drain.give_up(given_up)
        drain.let_on(sorted({place for _, place in given_up}))
        self.notices.tell(name, drain)

    def _give_up_all(self, name: str, drain: Drain) -> None:
        self._note_given_up(name, [(session, place) for session, places in drain.waiting.items() for place in places])
        drain.give_up_all()
        self.agreement.give_up(name)
        drain.let_all_on()
        self.notices.tell(name, drain)
        self.notices.answer(name, drain)

    def _note_given_up(self, name: str, given_up: Iterable[tuple[Session, QueueKey]]) -> None:
        left = sorted({place for _, place in given_up})
        if left:
            self._repeats.note_undrained(name, left)


def has_handled_all(header: PullMessage) -> bool:
    """Whether the member that pulls has nothing of the queue in its hands: a pull carries its commit."""
    return header.commit_offset >= header.queue_offset
