"""Finds the queues of a topic that are a member's: asks brokers for the members, or only for a place among them, and lets
the strategy divide the queues.

A strategy that needs no ids is told a position and a count by Rocketlet's broker, so that the answers to all members
of a group grow with their number and not with its square. STICKY's shares come from the broker for the same reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ...protocol import group_bodies, names
from ...protocol.allocation import AVG, ByPosition, Sticky, Strategy
from ...protocol.codes import EXT_DETAIL, EXT_PLACES, EXT_SEEN_QUEUES, EXT_SHARES, RequestCode
from ...protocol.frame import Ext, Frame
from ...protocol.group_bodies import BrokerShare, Place
from ...protocol.headers import ConsumerGroup, write
from ...protocol.queue import Queue
from ..config import PLACE_S
from ..errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from ..lease import clock_s
from ..wire.cluster import Cluster
from ..wire.connection import Connection


class Share(NamedTuple):
    """A member's share of one topic: the queues that are `mine`, of `queues` in all, among so many members. `unknown` are
    the ones on brokers that only other members know."""

    mine: list[Queue]
    queues: list[Queue]
    members: int
    unknown: list[Queue]


class _Told(NamedTuple):
    """A broker's unasked news about a topic: this member's position among so many (`place`), or its share. Both hold for
    the queues that the members saw then."""

    connection: Connection
    told_s: float
    place: Place | None = None
    share: BrokerShare | None = None


class Shares:
    """The shares of one member of one group."""

    def __init__(self, cluster: Cluster, group: str, client_id: str, strategy: Strategy) -> None:
        self._cluster = cluster
        self.group = group
        self.client_id = client_id
        self._strategy = strategy
        self._by_position = strategy if isinstance(strategy, ByPosition) else None
        self._detail = "share" if isinstance(strategy, Sticky) else "position" if self._by_position else "members"
        self._told: dict[str, _Told] = {}
        self._silent_s: dict[str, float] = {}  # when a broker last left a question unanswered

    @property
    def strategy_name(self) -> str:
        return self._strategy.name

    async def of(self, topic: str, queues: list[Queue]) -> Share | None:
        """The member's share of all queues of a topic; None if the broker does not count it among the members. Raises
        RocketletError and BodyError."""
        told = self._told.get(topic)
        if told is not None and self._may_use(queues, told):
            if told.share is not None and told.share.queues == len(queues):
                return Share(told.share.of(topic), queues, told.share.members, [])
            place = told.place
            # Where others see more, they share more out: a member that takes its part of less leaves queues to nobody.
            if (
                place is not None
                and place.position >= 0
                and place.queues == len(queues)
                and self._by_position is not None
            ):
                mine = self._by_position.allocate_at(place.position, place.members, queues)
                return Share(mine, queues, place.members, [])
        return await self._ask(topic, queues)

    async def _ask(self, topic: str, queues: list[Queue]) -> Share | None:
        answer = await self._members(topic, queues, self._detail)
        unknown = _unknown(topic, queues, answer)
        queues = sorted(queues + unknown)
        found = group_bodies.decode_shares(str(answer.ext.get(EXT_SHARES, "{}")).encode()).get(topic)
        if found is not None:
            return Share(found.of(topic), queues, found.members, unknown)
        if "index" in answer.ext:
            index, count = int(answer.ext["index"]), int(answer.ext["count"])
            strategy = self._by_position or AVG
            return None if index < 0 else Share(strategy.allocate_at(index, count, queues), queues, count, unknown)
        ids = names.sorted_ids(group_bodies.decode_members(answer.body))
        if self.client_id not in ids:
            return None
        return Share(self._strategy.allocate(self.client_id, queues, ids), queues, len(ids), unknown)

    def told(self, connection: Connection, ext: Mapping[str, object]) -> None:
        """A broker has said that the group has changed, and perhaps what this member would ask. Raises BodyError."""
        places = group_bodies.decode_places(str(ext.get(EXT_PLACES, "{}")).encode())
        shares = group_bodies.decode_shares(str(ext.get(EXT_SHARES, "{}")).encode())
        now_s = clock_s()
        # Else this member is told its share by another broker than newcomers, which take other shares then.
        self._silent_s = {
            name: s for name, s in self._silent_s.items() if self._cluster.connected(name) is not connection
        }
        if EXT_PLACES in ext or EXT_SHARES in ext:
            # its earlier news is over, also where it has none now: a member with another strategy has joined
            self._told = {topic: told for topic, told in self._told.items() if told.connection is not connection}
        self._told |= {topic: _Told(connection, now_s, place=place) for topic, place in places.items()}
        self._told |= {topic: _Told(connection, now_s, share=share) for topic, share in shares.items()}

    def _may_use(self, queues: list[Queue], told: _Told) -> bool:
        """Whether it is fresh, and of the broker that would be asked."""
        brokers = self._asked(queues)
        first = self._cluster.connected(brokers[0]) if brokers else None
        is_fresh = clock_s() - told.told_s < PLACE_S
        return is_fresh and told.connection is first

    async def _members(self, topic: str, queues: list[Queue], detail: str | None) -> Frame:
        """The members that subscribe to a topic, by the first broker of its queues that answers."""
        error: RocketletError = ConnectionFailed(f"no broker of the topic {topic} is known")
        ext: Ext = write(ConsumerGroup(self.group, topic)) | ({EXT_DETAIL: detail} if detail else {})
        if detail == "share":
            counts = Counter(queue.broker_name for queue in queues)
            ext = {**ext, EXT_SEEN_QUEUES: group_bodies.encode_seen_queues(counts)}
        for broker_name in self._asked(queues):
            try:
                connection = await self._cluster.broker(broker_name)
                return await connection.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
            except (ConnectionFailed, RequestTimeout, BrokerRefused) as failed:
                error = failed
                if isinstance(failed, RequestTimeout):
                    self._silent_s[broker_name] = clock_s()
        raise error

    def _asked(self, queues: list[Queue]) -> list[str]:
        """The brokers of the queues in the order in which they are asked: one that did not answer is the last for a while."""
        since_s = clock_s() - PLACE_S
        brokers = dict.fromkeys(queue.broker_name for queue in queues)
        return sorted(brokers, key=lambda name: self._silent_s.get(name, since_s) > since_s)


def _unknown(topic: str, queues: list[Queue], answer: Frame) -> list[Queue]:
    """The queues of brokers that are missing in this member's route only: a broker was away when it joined. The others share
    them out with it; without them it would take other queues than they leave to it."""
    seen = group_bodies.decode_seen_queues(str(answer.ext.get(EXT_SEEN_QUEUES, "{}")).encode())
    missing = seen.keys() - {queue.broker_name for queue in queues}
    return [Queue(topic, broker_name, number) for broker_name in missing for number in range(seen[broker_name])]
