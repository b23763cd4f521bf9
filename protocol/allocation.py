"""How queues are shared: the allocation strategies. Each gives the same shares as Apache's strategy of the same name.

A strategy is called with a member's own id, all queues and all member ids of one topic, both sorted, and returns the
member's queues. All members must use the same strategy, because they do not talk to each other.

Queues that move when the n-th member joins or leaves a group of q queues (measured with 8 to 100 queues, 2 to 20 members):
AVG 31 to 46 %, because shares are consecutive; AVG_BY_CIRCLE 62 to 91 %; CONSISTENT_HASH about q / n, but shares differ;
STICKY the fewest possible, q / n at most, and shares differ by one at most. It needs Rocketlet's broker, which knows who
owns what.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar, overload, runtime_checkable

from .bodies import Route
from .codes import PERM_READ
from .names import Queue

T = TypeVar("T")


class Strategy(Protocol):
    """How the queues of a topic are shared among the members of a group. Heartbeats carry its name."""

    @property
    def name(self) -> str: ...

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        """The queues of the member `client_id`. Queues and ids are sorted; all members must come to the same shares."""
        ...


@runtime_checkable
class ByPosition(Protocol):
    """A strategy that needs only a member's position and how many members there are, not their ids."""

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]: ...


@dataclass(frozen=True, slots=True)
class Averagely:
    """The default: consecutive queues, in shares that differ by one at most."""

    name: str = "AVG"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        return self.allocate_at(client_ids.index(client_id), len(client_ids), queues)

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]:
        total = len(queues)
        # AllocateMessageQueueAveragely: what does not divide goes to the first members, one queue each.
        rest = total % members
        size = 1 if total <= members else total // members + (1 if index < rest else 0)
        start = index * size if index < rest else index * size + rest
        return list(queues[start : start + max(min(size, total - start), 0)])


@dataclass(frozen=True, slots=True)
class AveragelyByCircle:
    """Every n-th queue."""

    name: str = "AVG_BY_CIRCLE"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        return self.allocate_at(client_ids.index(client_id), len(client_ids), queues)

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]:
        return list(queues[index::members])


@dataclass(frozen=True, slots=True)
class Configured:
    """A fixed list of queues, whoever the members are."""

    queues: tuple[Queue, ...]
    name: str = "CONFIG"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        present = set(queues)
        return [queue for queue in self.queues if queue in present]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Applies `inner` within each room. Queues of rooms without members are shared by all."""

    inner: Strategy
    broker_room: Callable[[Queue], str]
    client_room: Callable[[str], str]

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        """Raises ValueError if a queue or a member has no room."""
        if client_id not in client_ids:
            return []
        queue_rooms = _grouped(queues, self.broker_room)
        client_rooms = _grouped(client_ids, self.client_room)
        own = self.client_room(client_id)
        mine = self.inner.allocate(client_id, queue_rooms.get(own, ()), client_rooms[own])
        for room in sorted(queue_rooms.keys() - client_rooms.keys()):
            mine += self.inner.allocate(client_id, queue_rooms[room], client_ids)
        return mine


class TopicQueues(Sequence[Queue]):
    """The queues of a topic that may be read, sorted as RocketMQ sorts them. Each is made when somebody asks for it: a list
    of them takes 100 bytes for each."""

    __slots__ = ("_ends", "_names", "topic")

    def __init__(self, topic: str, route: Route) -> None:
        counts: dict[str, int] = {}
        for data in route.queues:
            if data.perm & PERM_READ:
                counts[data.broker_name] = max(data.read_queues, counts.get(data.broker_name, 0))
        self.topic = topic
        self._names = sorted(counts)
        self._ends = list(accumulate(counts[name] for name in self._names))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Queue: ...

    @overload
    def __getitem__(self, index: slice) -> list[Queue]: ...

    def __getitem__(self, index: int | slice) -> Queue | list[Queue]:
        found = range(len(self))[index]
        return self._at(found) if isinstance(found, int) else list(map(self._at, found))

    def _at(self, index: int) -> Queue:
        broker = bisect_right(self._ends, index)
        return Queue(self.topic, self._names[broker], index - self._start(broker))

    def _start(self, broker: int) -> int:
        return self._ends[broker - 1] if broker else 0

    def of_broker(self, name: str) -> int:
        """How many of them a broker has: those from 0 on."""
        broker = bisect_left(self._names, name)
        is_there = broker < len(self._names) and self._names[broker] == name
        return self._ends[broker] - self._start(broker) if is_there else 0


def subscribe_queues(topic: str, route: Route) -> list[Queue]:
    """The queues that may be read, sorted as RocketMQ sorts them."""
    return list(TopicQueues(topic, route))


def _grouped(items: Sequence[T], room_of: Callable[[T], str]) -> dict[str, list[T]]:
    rooms: dict[str, list[T]] = {}
    for item in items:
        room = room_of(item)
        if not room:
            raise ValueError(f"{item} has no machine room")
        rooms.setdefault(room, []).append(item)
    return rooms


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Queues and members on a ring of hashes: few queues move when a member comes or goes."""

    virtual_nodes: int = 10
    name: str = "CONSISTENT_HASH"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        # ConsistentHashRouter: ten points for a member by default, at the first four bytes of an MD5.
        ring = {_ring_hash(f"{item}-{number}"): item for item in client_ids for number in range(self.virtual_nodes)}
        points = sorted(ring)
        return [queue for queue in queues if ring[_next(points, _ring_hash(_queue_text(queue)))] == client_id]


def _ring_hash(key: str) -> int:
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _queue_text(queue: Queue) -> str:
    # MessageQueue.toString: Java hashes this text, so ours must not differ by a space.
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _next(points: Sequence[int], point: int) -> int:
    # TreeMap.tailMap includes the point itself.
    index = bisect_left(points, point)
    return points[index] if index < len(points) else points[0]


@dataclass(frozen=True, slots=True)
class Sticky:
    """Shares that differ by one at most, with as few queues moved as possible. Works like AVG if a member uses another
    strategy, or if the broker does not say who owns what."""

    name: str = "STICKY"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        return AVG.allocate(client_id, queues, client_ids)

    @staticmethod
    def share_out(
        queues: Sequence[Queue], client_ids: Sequence[str], owners: Mapping[Queue, str]
    ) -> dict[str, list[Queue]]:
        """All shares, given who owns which queue now. A broker does this for all members, once per change."""
        held: dict[str, list[Queue]] = {member: [] for member in client_ids}
        free: list[Queue] = []
        for queue in queues:
            held.get(owners.get(queue, ""), free).append(queue)
        size, rest = divmod(len(queues), len(client_ids))
        # the members with most may have one more
        larger = set(sorted(client_ids, key=lambda member: -len(held[member]))[:rest])
        for member in client_ids:
            target = size + (member in larger)
            free += held[member][target:]
            del held[member][target:]
        free.sort(reverse=True)
        for member in client_ids:
            while free and len(held[member]) < size + (member in larger):
                held[member].append(free.pop())
        return held


AVG = Averagely()
AVG_BY_CIRCLE = AveragelyByCircle()
CONSISTENT_HASH = ConsistentHash()
STICKY = Sticky()
COMPUTED: Mapping[str, Strategy] = {strategy.name: strategy for strategy in (AVG, AVG_BY_CIRCLE, CONSISTENT_HASH)}
"""The strategies that a broker computes for members that ask it for their share."""
