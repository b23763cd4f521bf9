"""Tells members that their group has changed: NOTIFY_CONSUMER_IDS_CHANGED.

Changes within 5 ms make one notification. Foreign members are told when the queues that move away from them are drained
(`draining`), Rocketlet members at once: they hand a queue over under its lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from ...protocol import group_bodies
from ...protocol.allocation import STICKY
from ...protocol.bodies import TopicConfig
from ...protocol.codes import EXT_PLACES, EXT_SHARES
from ...protocol.frame import Ext
from ..clock import Clock
from ..config import NOTIFY_DELAY_S, TURN_S
from ..net.clients import Clients
from ..net.connection import Connection
from .draining import Draining, is_foreign
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
        clients: Clients,
        draining: Draining,
        clock: Clock,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._history = history
        self._clients = clients
        self._draining = draining
        self._clock = clock
        self._waiting: dict[str, None] = {}

    def changed(self, group: ConsumerGroup) -> None:
        """Members or their topics have changed: the members will be told."""
        self._draining.changed(group)
        if not self._waiting:
            self._clock.call_later(NOTIFY_DELAY_S, self._tell_waiting)
        self._waiting[group.name] = None

    def _tell_waiting(self) -> None:
        """As many as a turn of the event loop allows; the others come right after what else is to do."""
        end_s = time.perf_counter() + TURN_S
        while self._waiting:
            name = next(iter(self._waiting))
            del self._waiting[name]
            group = self._groups.get(name)
            try:
                if group is not None:
                    self._tell(group)
            except Exception:
                log.exception("timer_failed", action="notify", group=name)
            if self._waiting and time.perf_counter() > end_s:
                asyncio.get_running_loop().call_soon(self._tell_waiting)
                return

    def _tell(self, group: ConsumerGroup) -> None:
        settings = self._settings.ensure(group.name)
        if settings is None or not settings.notify_enable:
            return
        keeps = self._draining.is_kept_back
        self.tell(
            group,
            [peer for peer, member in group.members.items() if not (is_foreign(member) and keeps(group.name, peer))],
        )

    def tell(self, group: ConsumerGroup, connections: Iterable[Connection]) -> None:
        """Tells these members that the group is another than before."""
        told = 0
        for told, connection in enumerate(connections, 1):  # noqa: B007
            self._clients.group_changed(connection, group.name, detail=_places(group, connection))
        if told:
            self._history.add(group.name, "notified", "", members=told)

    def topic_changed(self, topic: TopicConfig) -> None:
        """Tells the groups that read a topic that it has other queues; name servers know it by now."""
        for group in self._groups.subscribing(topic.name):
            for connection in group.members:
                self._clients.group_changed(connection, group.name, topic.name)
            self._groups.check(group)

    def topics_known(self) -> None:
        """Name servers know all topics. Members that see another number of queues look again: when they were told, no name
        server knew it, or none could be asked."""
        for group, connection, topic in self._groups.stale():
            self._clients.group_changed(connection, group, topic)


def _places(group: ConsumerGroup, connection: Connection) -> Ext:
    """Of a Rocketlet member, by topic: which of the members it is, or what its share is, where the broker shares out. A
    thousand members that are told need not ask a thousand times."""
    member = group.members.get(connection)
    if member is None or not member.data.strategy:
        return {}
    if member.data.strategy != STICKY.name:
        places = {topic: group.place(member.client_id, topic) for topic in member.subscriptions}
        return {EXT_PLACES: group_bodies.encode_places(places)}
    shares = {topic: group.share(member.client_id, topic) for topic in member.subscriptions}
    return {EXT_SHARES: group_bodies.encode_shares({topic: share for topic, share in shares.items() if share})}
