"""Which queues of a topic are a member's: asks brokers for the members, or only for a place among them, and lets the strategy
divide the queues.

A strategy that needs no ids is told a position and a count by Rocketlet's broker, so that the answers to all members
of a group grow with their number and not with its square.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..protocol import group_bodies, names
from ..protocol.allocation import ByPosition, Sticky, Strategy
from ..protocol.bodies import Queue
from ..protocol.codes import EXT_DETAIL, EXT_SEEN_QUEUES, RequestCode
from ..protocol.frame import Ext, Frame
from ..protocol.headers import ConsumerGroup, write
from .cluster import Cluster, by_broker
from .config import PLACE_S
from .connection import Connection
from .errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from .lease import clock_s


class Share(NamedTuple):
    """Of one topic: the queues that are `mine`, of `queues` in all, among so many members. `unknown`: those of all on brokers
    that only other members know."""

    mine: list[Queue]
    queues: list[Queue]
    members: int
    unknown: list[Queue]


class _Place(NamedTuple):
    """Which of the members of a topic this one is, and who has said so."""

    connection: Connection
    number: int
    members: int
    told_s: float


class Shares:
    """Of one member of one group."""

    def __init__(self, cluster: Cluster, group: str, client_id: str, strategy: Strategy) -> None:
        self._cluster = cluster
        self.group = group
        self.client_id = client_id
        self._strategy = strategy

        self._places: dict[str, _Place] = {}
        self._sees_all: frozenset[str] = (
            frozenset()
        )  # topics of which this member knows every queue that the others know

    @property
    def strategy_name(self) -> str:
        return self._strategy.name

    async def of(self, topic: str, queues: list[Queue]) -> Share | None:
        """The member's share of all queues of a topic; None if the broker does not count it among the members. Raises
        RocketletError and BodyError."""
        strategy = self._strategy
        place = self._places.get(topic)
        if place is not None and isinstance(strategy, ByPosition) and self._may_use(topic, queues, place):
            return Share(strategy.allocate_at(place.number, place.members, queues), queues, place.members, [])
        if isinstance(strategy, Sticky):
            return await self._sticky(strategy, topic, queues)
        detail = "position" if isinstance(strategy, ByPosition) else "members"
        answer = await self._members(topic, queues, detail)
        unknown = _unknown(topic, queues, answer)
        self._sees_all = self._sees_all - {topic} if unknown else self._sees_all | {topic}
        queues = sorted(queues + unknown)
        if isinstance(strategy, ByPosition) and "index" in answer.ext:
            index, count = int(answer.ext["index"]), int(answer.ext["count"])
            return None if index < 0 else Share(strategy.allocate_at(index, count, queues), queues, count, unknown)
        ids = names.sorted_ids(group_bodies.decode_members(answer.body).client_ids)
        if self.client_id not in ids:
            return None
        return Share(strategy.allocate(self.client_id, queues, ids), queues, len(ids), unknown)

    def told(self, connection: Connection, places: Mapping[str, tuple[int, int]]) -> None:
        """A broker has said which of how many members this one is, by topic: it need not be asked."""
        for topic, (number, members) in places.items():
            self._places[topic] = _Place(connection, number, members, clock_s())

    def _may_use(self, topic: str, queues: list[Queue], place: _Place) -> bool:
        """Whether a place is a fresh one of the broker that would be asked, and no queues are missing here."""
        first = self._cluster.connected(queues[0].broker_name) if queues else None
        is_fresh = clock_s() - place.told_s < PLACE_S
        return is_fresh and place.connection is first and place.number >= 0 and topic in self._sees_all

    async def _sticky(self, strategy: Sticky, topic: str, queues: list[Queue]) -> Share | None:
        """Asks every broker of the topic who owns its queues."""
        answers = [await self._members(topic, of_broker, "owners") for of_broker in by_broker(queues).values()]
        found = [group_bodies.decode_members(answer.body) for answer in answers]
        unknown = _unknown(topic, queues, *answers)
        queues = sorted(queues + unknown)
        ids = names.sorted_ids(found[0].client_ids)
        if self.client_id not in ids:
            return None
        if any(item.strategies != {strategy.name} for item in found):
            return Share(strategy.allocate(self.client_id, queues, ids), queues, len(ids), unknown)
        owners = {queue: owner for item in found for queue, owner in item.owners.items()}
        return Share(strategy.allocate_owned(self.client_id, queues, ids, owners), queues, len(ids), unknown)

    async def _members(self, topic: str, queues: list[Queue], detail: str | None) -> Frame:
        """What the first broker of the queues that answers says of the members that subscribe to a topic."""
        error: RocketletError = ConnectionFailed(f"no broker of the topic {topic} is known")
        ext: Ext = write(ConsumerGroup(self.group, topic)) | ({EXT_DETAIL: detail} if detail else {})
        for broker_name in dict.fromkeys(queue.broker_name for queue in queues):
            try:
                connection = await self._cluster.broker(broker_name)
                return await connection.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
            except (ConnectionFailed, RequestTimeout, BrokerRefused) as failed:
                error = failed
        raise error


def _unknown(topic: str, queues: list[Queue], *answers: Frame) -> list[Queue]:
    """The queues of brokers that are missing in this member's route only: a broker was away when it joined. The others share
    them out with it; without them it would take other queues than they leave to it."""
    seen: dict[str, int] = {}
    for answer in answers:
        seen |= group_bodies.decode_seen_queues(str(answer.ext.get(EXT_SEEN_QUEUES, "{}")).encode())
    missing = seen.keys() - {queue.broker_name for queue in queues}
    return [Queue(topic, broker_name, number) for broker_name in missing for number in range(seen[broker_name])]
