"""Allocation strategies: which member of a group gets which queues. Except for STICKY, which only Rocketlet has, and
queues of CONFIG that do not exist, a strategy returns the same shares as Apache's strategy of the same name.

A strategy is called with a member's id, and all queues and all member ids of one topic, both sorted. The strategy
returns the member's queues. All members must use the same strategy, because each of them only gets its own share.

Fraction of the queues that move when the n-th member joins or leaves a group of q queues, measured with 8 to 100 queues
and 2 to 20 members: AVG 31 to 46 %, because shares are consecutive; AVG_BY_CIRCLE 62 to 91 %; CONSISTENT_HASH about 1 /
n, but the sizes of the shares differ; STICKY the minimum, at most 1 / n, with sizes that differ by at most one. STICKY
needs a Rocketlet broker, which knows the owners of the queues.
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
    """An allocation strategy. Heartbeats carry its name."""

    @property
    def name(self) -> str: ...

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        """Return the queues of the member `client_id`. The arguments are sorted as in Java. The result must depend on the
        arguments only, so that the shares of all members are consistent."""
        ...


@runtime_checkable
class ByPosition(Protocol):
    """A strategy that needs only a member's index and the number of members, not their ids."""

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]:
        """Return the queues of the member at an index."""


@dataclass(frozen=True, slots=True)
class Averagely:
    """The default strategy: consecutive queues, in shares whose sizes differ by at most one."""

    name: str = "AVG"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        return self.allocate_at(client_ids.index(client_id), len(client_ids), queues)

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]:
        total = len(queues)
        # AllocateMessageQueueAveragely: each of the first members gets one queue of the remainder.
        rest = total % members
        size = 1 if total <= members else total // members + (1 if index < rest else 0)
        start = index * size if index < rest else index * size + rest
        return list(queues[start : start + max(min(size, total - start), 0)])


@dataclass(frozen=True, slots=True)
class AveragelyByCircle:
    """Every n-th queue, where n is the number of members."""

    name: str = "AVG_BY_CIRCLE"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        return self.allocate_at(client_ids.index(client_id), len(client_ids), queues)

    def allocate_at(self, index: int, members: int, queues: Sequence[Queue]) -> list[Queue]:
        return list(queues[index::members])


@dataclass(frozen=True, slots=True)
class Configured:
    """A fixed list of queues, independent of the members. Queues that do not exist are left out."""

    queues: tuple[Queue, ...]
    name: str = "CONFIG"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        present = set(queues)
        return [queue for queue in self.queues if queue in present]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Applies the strategy `inner` within each machine room. Queues in rooms without members are shared by all members."""

    inner: Strategy
    broker_room: Callable[[Queue], str]
    client_room: Callable[[str], str]

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        """Return the member's queues. Raises ValueError if a queue or a member has no room."""
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
    """The readable queues of a topic, in RocketMQ's order. Each queue is created on access, because a list takes 100
    bytes per queue."""

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
        """Return the number of readable queues of a broker; their ids start at 0."""
        broker = bisect_left(self._names, name)
        is_there = broker < len(self._names) and self._names[broker] == name
        return self._ends[broker] - self._start(broker) if is_there else 0


def subscribe_queues(topic: str, route: Route) -> list[Queue]:
    """Return the readable queues of a topic in RocketMQ's order."""
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
    """Queues and members on a ring of hashes, so that few queues move when a member joins or leaves."""

    virtual_nodes: int = 10
    name: str = "CONSISTENT_HASH"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        if client_id not in client_ids:
            return []
        # ConsistentHashRouter: ten points per member by default, each at the first four bytes of an MD5 hash.
        ring = {_ring_hash(f"{item}-{number}"): item for item in client_ids for number in range(self.virtual_nodes)}
        points = sorted(ring)
        return [queue for queue in queues if ring[_next(points, _ring_hash(_queue_text(queue)))] == client_id]


def _ring_hash(key: str) -> int:
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _queue_text(queue: Queue) -> str:
    # Java hashes MessageQueue.toString, so this text must be identical.
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _next(points: Sequence[int], point: int) -> int:
    # TreeMap.tailMap includes the point itself.
    index = bisect_left(points, point)
    return points[index] if index < len(points) else points[0]


@dataclass(frozen=True, slots=True)
class Sticky:
    """Shares whose sizes differ by at most one, with the fewest possible moves of queues. Falls back to AVG if a member
    uses another strategy, or if the broker does not report the owners of queues."""

    name: str = "STICKY"

    def allocate(self, client_id: str, queues: Sequence[Queue], client_ids: Sequence[str]) -> list[Queue]:
        return AVG.allocate(client_id, queues, client_ids)

    @staticmethod
    def share_out(
        queues: Sequence[Queue], client_ids: Sequence[str], owners: Mapping[Queue, str]
    ) -> dict[str, list[Queue]]:
        """Return the shares of all members. A broker computes them once per change.

        Args:
            queues: all queues, sorted
            client_ids: ids of all members, sorted
            owners: the present owner of each queue
        """
        held: dict[str, list[Queue]] = {member: [] for member in client_ids}
        free: list[Queue] = []
        for queue in queues:
            held.get(owners.get(queue, ""), free).append(queue)
        size, rest = divmod(len(queues), len(client_ids))
        # the members with the most queues get one queue of the remainder each
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
"""Strategies that a broker can compute for members that request their share."""
