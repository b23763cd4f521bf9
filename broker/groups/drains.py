"""Notifications of members (NOTIFY_CONSUMER_IDS_CHANGED), sent to foreign members once their queues are drained."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from functools import partial

import structlog

from ...protocol.allocation import STICKY
from ...protocol.bodies import SLICE, Route, TopicConfig, Work
from ...protocol.group_bodies import Members, Place
from ...protocol.headers import AgreeOnMembers, PullMessage
from ..config import (
    DROPPED_AFTER_S,
    KNOWN_AFTER_S,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    NOTIFY_DELAY_S,
    REPEATS_S,
    STANDSTILL_S,
    TOLD_AGAIN,
    LimitExceeded,
)
from ..messages.held_pulls import HeldPulls, Until
from ..runtime import Clock, Runtime
from ..sessions import GroupChanged, Recent, Session
from .agreement import Agreement, Say
from .claims import Allotment, Found, Moves, Routes
from .group import ConsumerGroup, ConsumerGroups
from .members import ALONE, MemberList
from .offsets import Watch
from .settings import GroupConfigs, History
from .stages import Drain, DrainEvent, DrainStage, GivenElsewhere, QueueKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# Foreign members let go of a queue before the next one reads it, as far as an unmodified client can be made to.
#
# A foreign member that learns of a change drops the queues that it loses at once, with messages of them in its
# handlers, which are then delivered again. So the broker drains first: a queue that will move gets no new messages,
# and its reader's pulls, which carry how far it has come, say when everything is handled. A change comes to the
# members in steps:
#
# - a member that loses no queue here is told at once; its pulls of a queue that is still drained wait
# - a reader is told when all queues that it loses are drained, and is given the list of members that it had until then
# - a drain takes what it needs as long as it progresses, for 30 s at most. A reader that has handled nothing for 1 s,
#     of any
#   queue, is asked: its held pulls come back, and say how far it is. A second later it is told anyway
# - after 0.2 s each queue moves by itself, on one broker (`allotment`)
#
# With several brokers a member is told when no broker waits for it any more (`agreement`).
#
# A queue's reader follows from the list that each foreign member was last given, because members share the queues out
# by that. Where nobody was given a list, or only of itself (`allotment`), the reader is the one that pulled last.


class Draining:
    """Finds the queues that foreign members will lose, and notifies these members when they are done with them.

    Args:
        find_route: returns which queues a topic has on all brokers, because members divide them all.
        tell: notifies members that their group has changed.
        say: sends a word to another broker.
        on_drained: called with a group, a queue and its reader when the reader has handled all of the queue.
        repeats: counts the drains that were given up.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        watch: Watch,
        held_pulls: HeldPulls,
        *,
        find_route: Callable[[str], Awaitable[Route | None]],
        tell: Tell,
        say: Say,
        on_drained: Callable[[str, QueueKey, Session], None],
        repeats: Repeats,
    ) -> None:
        limits = self._limits = runtime.limits
        self._groups = groups
        self._watch = watch
        self._held_pulls = held_pulls
        self._tasks, self._turns, self._clock = runtime.tasks, runtime.turns, runtime.clock
        self._on_drained = on_drained
        self._repeats = repeats
        self._drains: dict[str, Drain] = {}
        self._changes: dict[str, int] = {}
        self._change = 0  # the last number, in any group; none comes again, also if its group is forgotten
        self.allotment = Allotment(runtime, groups, find_route, change_of=self._changes.get, on_moved=self.changed)
        self.agreement = Agreement(groups.broker_name, self._clock, say, self._peers_changed, limits)
        self._moves = Moves(groups.broker_name, self.allotment, self.agreement, limits)
        self.notices = Notices(self._drains, groups, watch, self.allotment, self.agreement, self._clock, tell)

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
        if drain.has(place) or (is_unknown and group.queue(*place).reader is not connection):
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
        self._groups.generation.increment()
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
        self._groups.generation.increment()
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
        self._watch.release(session, self._groups.queue(name, *place))
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
        for session, place in given_up:
            self._watch.release(session, self._groups.queue(name, *place))
        drain.give_up(given_up)
        drain.let_on(sorted({place for _, place in given_up}))
        self.notices.tell(name, drain)

    def _give_up_all(self, name: str, drain: Drain) -> None:
        given_up = [(session, place) for session, places in drain.waiting.items() for place in places]
        self._note_given_up(name, given_up)
        for session, place in given_up:
            self._watch.release(session, self._groups.queue(name, *place))
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


# ------------------------------------------------------------------------------
# When each foreign member is told of a change, and which list of members it is given until then.


Tell = Callable[[ConsumerGroup, Iterable[Session]], None]


class Notices:
    """`drains`: of all groups, by name. `tell(group, sessions)` tells members that their group is another than before."""

    def __init__(
        self,
        drains: MutableMapping[str, Drain],
        groups: ConsumerGroups,
        watch: Watch,
        allotment: Allotment,
        agreement: Agreement,
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._drains = drains
        self._groups = groups
        self._watch = watch
        self._allotment = allotment
        self._agreement = agreement
        self._clock = clock
        self._tell = tell
        self._knows_all_s = clock.monotonic_s() + KNOWN_AFTER_S
        self._settled: dict[str, frozenset[str]] = {}  # the members when the last drain was over

    def is_kept_back(self, group: str, session: Session) -> bool:
        """Whether this foreign member is to be told of the group's change later; it will be."""
        drain = self._drains.get(group)
        if drain is None or self._may_know(group, drain, session, self._agreement.lets_tell):
            return False
        drain.kept[session] = None
        return True

    def _may_know(self, name: str, drain: Drain, session: Session, lets: Callable[[str, str], bool]) -> bool:
        """Whether nobody waits for a member: no reader of queues here, nor another broker, by what it `lets`."""
        if drain.is_finding or session in drain.waiting:
            return False
        group = self._groups.get(name)
        member = group.members.get(session) if group is not None else None
        return member is None or lets(name, member.client_id)

    # Which list a member is given

    def given(self, group: ConsumerGroup, session: Session) -> list[str]:
        """The list of members that a member gets. A reader that is being drained gets the one that it had; it drops queues
        by the list that it gets here. None after a restart, as long as other brokers may know more members: by a list without
        those it would take queues that they read."""
        members = group.list_for(session)
        member = group.foreign.get(session)
        if member is None:
            return members.ids
        drain = self._drains.get(group.name)
        if self._may_miss_members() and self._agreement.differs(group.name):
            return []
        had = self._allotment.given.of(group.name, session)
        if drain is not None and not self._may_know(group.name, drain, session, self._agreement.lets_tell):
            drain.kept[session] = None  # whatever it was told before
            if drain.is_long and not drain.is_finding:
                self._give(group.name, session, member.client_id, ALONE)
                had = ALONE
            return had.told(member.client_id) if had is not None else self._settled_list(group, session)
        self._give(group.name, session, member.client_id, members)
        if had is not members:
            self._agreement.gave(group.name, member.client_id)
        return members.told(member.client_id)

    def _may_miss_members(self) -> bool:
        """Whether there may be members from before a restart that have not been heard of yet."""
        return self._watch.is_restarted and self._clock.monotonic_s() < self._knows_all_s

    def when_sure(self, name: str, session: Session, go_on: Callable[[], None]) -> bool:
        """Whether a member's question for the list waits, because another broker may have given it a newer one than is known
        here: by the older one it would take queues back that others read. `go_on` is called when that is known, and at
        the latest after `list_wait_s`."""
        drain = self._drains.get(name)
        if drain is None or session in drain.asking or not self._is_unsure(name, drain, session):
            return False
        drain.asking[session] = go_on
        self._clock.call_later(self._agreement.list_wait_s, drain.answer, session)
        return True

    def _is_unsure(self, name: str, drain: Drain, session: Session) -> bool:
        group = self._groups.get(name)
        member = group.foreign.get(session) if group is not None else None
        if member is None:
            return False
        if self._agreement.gives_earlier(name):
            return True
        return self._may_know(name, drain, session, self._agreement.lets_give) and not self._agreement.lets_tell(
            name, member.client_id
        )

    def answer(self, name: str, drain: Drain) -> None:
        """Other brokers have said more: answers the members of which it is known by now what they were given."""
        for session in [session for session in drain.asking if not self._is_unsure(name, drain, session)]:
            drain.answer(session)

    def _settled_list(self, group: ConsumerGroup, session: Session) -> list[str]:
        """The members before the change, for one that was given no list yet."""
        settled = self._settled.get(group.name, frozenset())
        if not self._watch.reads(session, group):  # nobody would know which queues it took by this list
            settled -= {group.foreign[session].client_id}
        return [client_id for client_id in group.companions(session).ids if client_id in settled]

    def _give(self, name: str, session: Session, client_id: str, members: MemberList) -> None:
        self._allotment.give(name, session, client_id, members)
        drain = self._drains.get(name)
        if drain is not None:
            drain.read_again(session)

    def take(self, group: ConsumerGroup, given: GivenElsewhere) -> bool:
        """Notes whom another broker has given a list; whether it is news of a change before the last one."""
        ids, is_late = set(given.client_ids), False
        for session, member in group.foreign.items():
            members = given.lists.get(member.topics) if member.client_id in ids else None
            if members is None or self._allotment.given.of(group.name, session) is members:
                continue
            if given.is_current:
                self._give(group.name, session, member.client_id, members)
            else:
                self._allotment.give(group.name, session, member.client_id, members)
                is_late = True
        return is_late

    def forget(self, name: str) -> None:
        """The group has no members any more."""
        self._settled.pop(name, None)

    # When members are told

    def tell(self, name: str, drain: Drain) -> None:
        """Tells members that are no longer kept back; at the end also those that were refused a lock of a drained queue."""
        if drain.is_finding:  # they would be given the lists that they had
            return
        group = self._groups.get(name)
        if group is not None:
            self._agreement.waits(name, drain.waited_for(group.members))
        is_agreed = self._agreement.is_reached(name)
        if is_agreed and drain.stage is DrainStage.AGREEING:
            drain.turn(DrainEvent.AGREE)
        lets_tell = self._agreement.lets_tell
        told = dict.fromkeys(item for item in drain.kept if self._may_know(name, drain, item, lets_tell))
        for session in told:
            del drain.kept[session]
        if group is not None:
            if not drain.waiting and drain.moving and drain.refuses_ours:
                drain.refuses_ours = False
                told |= dict.fromkeys(item for item in group.members if item not in group.foreign)
            self._tell(group, [item for item in told if item in group.members])
        if drain.is_over:
            self._all_told(name, drain, group)

    def _all_told(self, name: str, drain: Drain, group: ConsumerGroup | None) -> None:
        """A reader that was told drops its queues at once; one that allocates in another way reads on a moment later."""
        drain.is_long = False
        if group is not None:
            self._settled[name] = frozenset(group.client_ids())
        wait_s = self._allotment.drained_wait_s
        drain.set_timer(self._clock.call_later(wait_s, self._let_read_on, name, drain, TOLD_AGAIN))

    def _let_read_on(self, name: str, drain: Drain, times: int) -> None:
        """Members have dropped the queues that they lose by now, unless they were not reached, or only in the midst of their
        rebalance: those are told again."""
        group = self._groups.get(name)
        reading = drain.reading(self._clock.monotonic_s() - self._allotment.drained_wait_s + DROPPED_AFTER_S)
        late = self._allotment.late(group, drain.moving.values(), reading) if group is not None else []
        if group is None or not late or not times:
            del self._drains[name]
            drain.end()
            return
        wait_s = self._allotment.drained_wait_s
        drain.set_timer(self._clock.call_later(wait_s, self._let_read_on, name, drain, times - 1))
        self._tell(group, late)

    def bridge(self, name: str, drain: Drain) -> None:
        """A drain takes long. Members that may not have the new list yet are told of themselves alone, and claim all."""
        group = self._groups.get(name)
        if group is None or drain.stage is not DrainStage.DRAINING or self._drains.get(name) is not drain:
            return
        drain.is_long = True
        is_alone = self._allotment.is_alone
        self._tell(group, [item for item in drain.kept if item in group.foreign and not is_alone(name, item)])


# ------------------------------------------------------------------------------
# Why messages of foreign members may be handled again: what draining cannot avoid, for metrics and administrators.


class Repeats:
    """undrained: queues that moved while a reader handled messages of them. left: messages that members had been given and
    had not committed when they left."""

    def __init__(self, clock: Clock) -> None:
        self._undrained = Recent(clock.monotonic_s, REPEATS_S)
        self._left = Recent(clock.monotonic_s, REPEATS_S)
        self.undrained = 0
        self.left = 0

    def note_undrained(self, group: str, places: Sequence[QueueKey]) -> None:
        """To wait longer would keep the next readers out for one handler."""
        self.undrained += len(places)
        queues = ", ".join(f"{topic}:{queue_id}" for topic, queue_id in places[:3])
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        self._undrained.note(group, f"{group}: {queues}{more}"[:MAX_NAMED_CHARS])
        hint = "their handlers were still running"
        log.warning(
            "queues_moved_undrained", group=group, queues=places[:MAX_NAMED_MEMBERS], count=len(places), hint=hint
        )

    def note_left(self, group: str, client_id: str, messages: int) -> None:
        self.left += messages
        self._left.note(group, f"{group} ({client_id}) with {messages} messages"[:MAX_NAMED_CHARS])

    def recent(self) -> dict[str, list[str]]:
        """The latest of each group, by kind."""
        return {"undrained": self._undrained.texts(), "left": self._left.texts()}


# ------------------------------------------------------------------------------
# Tells members that their group has changed: NOTIFY_CONSUMER_IDS_CHANGED.
#
# Changes within 5 ms make one notification. Foreign members are told when the queues that move away from them are
# drained (`draining`), Rocketlet members at once: they hand a queue over under its lock.


class Notifications:
    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        settings: GroupConfigs,
        history: History,
        draining: Draining,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._history = history
        self._draining = draining
        self._clock = runtime.clock
        self._turns = runtime.turns
        self._is_telling = False
        self._waiting: dict[str, None] = {}

    def changed(self, group: ConsumerGroup) -> None:
        """Members or their topics have changed: the members will be told."""
        self._draining.changed(group)
        if not self._waiting and not self._is_telling:
            self._clock.call_later(NOTIFY_DELAY_S, self._tell_waiting)
        self._waiting[group.name] = None

    def _tell_waiting(self) -> None:
        self._turns.do(self._telling())

    def _telling(self) -> Work[None]:
        """Members of large groups are told in turns; what changes meanwhile is told afterwards."""
        self._is_telling = True
        while self._waiting:
            name = next(iter(self._waiting))
            del self._waiting[name]
            group = self._groups.online(name)
            try:
                if group is not None:
                    yield from self._telling_members(group)
            except Exception:
                log.exception("timer_failed", action="notify", group=name)
            yield
        self._is_telling = False

    def _telling_members(self, group: ConsumerGroup) -> Work[None]:
        if not self._may_tell(group):
            return
        keeps = self._draining.notices.is_kept_back
        told = 0
        for number, (at, member) in enumerate(list(group.members.items()), 1):
            if at in group.members and not (member.is_foreign and keeps(group.name, at)):
                at.tell(_change_for(group, at))
                told += 1
            if number % SLICE == 0:
                yield
        self._note_told(group, told)

    def _may_tell(self, group: ConsumerGroup) -> bool:
        settings = self._settings.ensure(group.name)
        return settings is not None and settings.notify_enable

    def tell(self, group: ConsumerGroup, connections: Iterable[Session]) -> None:
        """Tells these members that the group is another than before; very many in turns."""
        if not self._may_tell(group):
            return
        told = list(connections)
        for connection in told[:SLICE]:
            connection.tell(_change_for(group, connection))
        if len(told) > SLICE:
            self._turns.do(self._telling_these(group, told[SLICE:]))
        self._note_told(group, len(told))

    def _telling_these(self, group: ConsumerGroup, connections: list[Session]) -> Work[None]:
        for number, connection in enumerate(connections):
            if number % SLICE == 0:
                yield
            if connection in group.members:
                connection.tell(_change_for(group, connection))

    def _note_told(self, group: ConsumerGroup, told: int) -> None:
        if told:
            self._history.add(group.name, "notified", "", members=told)

    def topic_changed(self, topic: TopicConfig) -> None:
        """Tells the groups that read a topic that it has other queues; name servers know it by now."""
        self._turns.do(self._telling_of_topic(topic.name))

    def _telling_of_topic(self, topic: str) -> Work[None]:
        for group in self._groups.subscribing(topic):
            for number, connection in enumerate(list(group.members), 1):
                connection.tell(GroupChanged(group.name, topic))
                if number % SLICE == 0:
                    yield
            self._groups.check_soon(group)

    def heard(self, connection: Session, name: str) -> None:
        """A member has said which queues it sees. It looked before a topic grew, and was not here yet to be told."""
        for topic in self._groups.stale_topics(name, connection):
            connection.tell(GroupChanged(name, topic))

    def topics_known(self) -> None:
        """Name servers know all topics. Members that see another number of queues look again: when they were told, no name
        server knew it, or none could be asked."""
        for group, connection, topic in self._groups.stale():
            connection.tell(GroupChanged(group, topic))


def _change_for(group: ConsumerGroup, connection: Session) -> GroupChanged:
    """A Rocketlet member hears which of the members it is, or what its share is, where the broker shares out. A thousand
    members that are told need not ask a thousand times."""
    member = group.members.get(connection)
    if member is None or not member.data.strategy:
        return GroupChanged(group.name)
    topics = member.subscriptions
    if member.data.strategy != STICKY.name:
        return GroupChanged(group.name, places={topic: _place(group, member.client_id, topic) for topic in topics})
    shares = {topic: group.share(member.client_id, topic) for topic in topics}
    return GroupChanged(group.name, shares={topic: share for topic, share in shares.items() if share})


def _place(group: ConsumerGroup, client_id: str, topic: str) -> Place:
    return Place(*group.place(client_id, topic), group.seen_count(topic))
