"""Finds the queues that a change of a group moves away from their foreign readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ....protocol.allocation import TopicQueues
from ....protocol.names import RETRY_PREFIX
from ....protocol.work import Work
from ...config import LIMITS, Limits
from ...sessions.session import Session
from ..members import ConsumerGroup
from ..owning.watch import Watch
from .agreement import NOBODY, Agreement, Others
from .allotment import Allotment, Routes
from .claims import Claims
from .drain import Drain, QueueKey
from .owners import owners_of


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
        watch: Watch,
        allotment: Allotment,
        agreement: Agreement,
        limits: Limits = LIMITS,
    ) -> None:
        self._broker_name = broker_name
        self._allotment = allotment
        self._agreement = agreement
        self._claims = Claims(broker_name, allotment.given, watch, limits)
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
