"""Tells members that their group has changed: NOTIFY_CONSUMER_IDS_CHANGED.

Changes within 5 ms make one notification. Foreign members are told when the queues that move away from them are drained
(`draining`), Rocketlet members at once: they hand a queue over under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from ...protocol.allocation import STICKY
from ...protocol.bodies import TopicConfig
from ...protocol.group_bodies import Place
from ...protocol.work import SLICE, Work
from ..clock import Clock
from ..config import NOTIFY_DELAY_S
from ..running.turns import Turns
from ..sessions.events import GroupChanged
from ..sessions.session import Session
from .foreign.draining import Draining
from .history import History
from .members import ConsumerGroup, ConsumerGroups
from .settings import GroupConfigs

log = structlog.get_logger("rocketlet.groups")


class Notifications:
    def __init__(
        self,
        groups: ConsumerGroups,
        settings: GroupConfigs,
        history: History,
        draining: Draining,
        clock: Clock,
        turns: Turns,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._history = history
        self._draining = draining
        self._clock = clock
        self._turns = turns
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
            group = self._groups.get(name)
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
