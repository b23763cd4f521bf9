"""Makes foreign members finish with a queue before it moves, as well as that works with an unmodified client.

A foreign member that hears of another one drops queues at once, while its handlers still work on their messages, which are
then delivered again. So the broker delays the news for a moment. Queues that will move get no new messages. The pulls of
their reader carry how far it has come, and so show when everything is handled. Then the members are told. Until then, a new
member gets a list without itself and reads nothing. Handlers get 2 s at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from ...protocol import names
from ...protocol.allocation import AVG, subscribe_queues
from ...protocol.bodies import Route
from ...protocol.headers import PullMessage
from ..config import DRAIN_LIMIT_S, DRAINED_WAIT_S
from ..messages.held_pulls import HeldPulls
from ..net.connection import Connection
from ..tasks import Tasks
from .members import ConsumerGroup, ConsumerGroups, Member
from .watch import Watch

log = structlog.get_logger("rocketlet.groups")

_Place = tuple[str, int]  # topic, queue id
Tell = Callable[[ConsumerGroup], None]
_NOT_KNOWN_YET: _Place = ("", -1)


@dataclass(slots=True)
class Drain:
    """A change that the group's foreign members do not know yet. `moving`: who reads the queues that will move."""

    moving: dict[_Place, Connection]
    tell: Tell
    left: set[_Place] = field(default_factory=set)
    was_kept_back: bool = False
    timer: asyncio.TimerHandle | None = None


def is_foreign(member: Member) -> bool:
    """Apache's push consumers in a group that shares queues: they do not say how they allocate."""
    data = member.data
    return not data.strategy and data.message_model == "CLUSTERING" and data.consume_type == "CONSUME_PASSIVELY"


class Draining:
    """`find_route(topic)`: which queues a topic has on all brokers, because members share them all."""

    def __init__(
        self,
        broker_name: str,
        groups: ConsumerGroups,
        watch: Watch,
        held_pulls: HeldPulls,
        find_route: Callable[[str], Awaitable[Route | None]],
        tasks: Tasks,
    ) -> None:
        self._broker_name = broker_name
        self._groups = groups
        self._watch = watch
        self._held_pulls = held_pulls
        self._find_route = find_route
        self._tasks = tasks
        self._told: dict[str, list[str]] = {}
        self._drains: dict[str, Drain] = {}
        self._changes: dict[str, int] = {}

    def is_pending(self, group: str) -> bool:
        """Whether foreign members do not know of a change yet."""
        drain = self._drains.get(group)
        return drain is not None and bool(drain.left)

    def keep_back(self, group: str) -> bool:
        """Whether the news for foreign members is delayed. If so, they will be told later."""
        drain = self._drains.get(group)
        if drain is None or not drain.left:
            return False
        drain.was_kept_back = True
        return True

    def known(self, group: str, client_ids: list[str]) -> list[str]:
        """Of these members, those that foreign ones may know of."""
        if not self.is_pending(group):
            return client_ids
        told = self._told.get(group, [])
        return [client_id for client_id in client_ids if client_id in told]

    def is_draining(self, group: str, topic: str, queue_id: int) -> bool:
        drain = self._drains.get(group)
        return drain is not None and (topic, queue_id) in drain.left

    def changed(self, group: ConsumerGroup, tell: Tell) -> None:
        """Members or their topics have changed: drains what will move from a foreign reader, if there is one. `tell(group)`
        is called when that is done, if it was kept back meanwhile."""
        self._changes[group.name] = change = self._changes.get(group.name, 0) + 1
        if any(map(is_foreign, group.members.values())):
            self._replace(group.name, Drain({}, tell, {_NOT_KNOWN_YET}))
            self._tasks.spawn(self._start(group, change, tell))
            return
        drain = self._drains.pop(group.name, None)
        if drain is not None and drain.timer is not None:
            drain.timer.cancel()
        if not group.members:
            self._told.pop(group.name, None)
            self._changes.pop(group.name, None)

    async def _start(self, group: ConsumerGroup, change: int, tell: Tell) -> None:
        moving: dict[_Place, Connection] = {}
        topics = {topic for member in group.members.values() for topic in member.subscriptions}
        for topic in sorted(topics):
            moving |= await self._moving(group, topic)
        if self._changes.get(group.name) != change:  # another change came meanwhile
            return
        self._replace(group.name, Drain(moving, tell, set(moving)))
        if not moving:
            self._finish(group.name)
            return
        for connection in dict.fromkeys(moving.values()):
            for pull in self._held_pulls.of(connection):
                if (pull.queue.topic, pull.queue.queue_id) in moving:
                    self._held_pulls.let_go(pull)  # its member comes back at once, and says how far it is

    def _replace(self, name: str, drain: Drain) -> None:
        before = self._drains.get(name)
        if before is not None:
            drain.was_kept_back = before.was_kept_back
            if before.timer is not None:
                before.timer.cancel()
        self._drains[name] = drain
        drain.timer = asyncio.get_running_loop().call_later(DRAIN_LIMIT_S, self._finish, name)

    async def _moving(self, group: ConsumerGroup, topic: str) -> dict[_Place, Connection]:
        """The queues here whose foreign reader will not be their owner any more."""
        route = await self._find_route(topic)
        if route is None:
            return {}
        queues = subscribe_queues(topic, route)
        ids = names.sorted_ids(group.client_ids(topic))
        owners = {queue: client_id for client_id in ids for queue in AVG.allocate(client_id, queues, ids)}
        moving: dict[_Place, Connection] = {}
        for queue, owner in owners.items():
            reader = self._watch.reader(group.name, topic, queue.queue_id)
            member = group.members.get(reader) if reader else None
            here = queue.broker_name == self._broker_name
            if here and member is not None and is_foreign(member) and member.client_id != owner:
                moving[topic, queue.queue_id] = member.connection
        return moving

    def holds_back(self, connection: Connection, header: PullMessage) -> bool:
        """Whether this pull is to get nothing, because its queue moves away from who pulls; and notes how far it is."""
        drain = self._drains.get(header.consumer_group)
        place = (header.topic, header.queue_id)
        if drain is None or drain.moving.get(place) is not connection:
            return False
        if header.commit_offset >= header.queue_offset and place in drain.left:
            drain.left.discard(place)
            if not drain.left:
                self._finish(header.consumer_group)
        return True

    def _finish(self, name: str) -> None:
        """Everything is handled, or has had its time: the foreign members learn of the change."""
        drain, group = self._drains.get(name), self._groups.get(name)
        if drain is not None:
            if drain.timer is not None:
                drain.timer.cancel()
            if drain.left - {_NOT_KNOWN_YET}:
                log.warning(
                    "queues_moved_undrained",
                    group=name,
                    queues=sorted(drain.left),
                    hint="their handlers were still running",
                )
            drain.left.clear()
            # its reader drops a queue at once; one that does not, because it allocates in another way, reads on after this
            asyncio.get_running_loop().call_later(DRAINED_WAIT_S, drain.moving.clear)
        if group is not None:
            self._told[name] = group.client_ids()
            if drain is not None and drain.was_kept_back:
                drain.was_kept_back = False
                drain.tell(group)
