"""When each foreign member is told of a change, and which list of members it is given until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping

from ...clock import Clock
from ...config import DROPPED_AFTER_S, KNOWN_AFTER_S, TOLD_AGAIN
from ...sessions.session import Session
from ..members import ConsumerGroup, ConsumerGroups
from ..owning.watch import Watch
from .agreement import Agreement, GivenElsewhere
from .allotment import Allotment
from .drain import Drain, DrainEvent, DrainStage
from .given import ALONE, MemberList

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
        if not self._watch.reads(session, group.name):  # nobody would know which queues it took by this list
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
