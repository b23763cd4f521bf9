"""The owner of each queue here by the last change, in groups with foreign members.

A queue takes 8 bytes, because there may be very many: a topic's owners are a list, in the order of its queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from ....protocol.allocation import AVG, TopicQueues
from ...config import LIMITS, Limits

OfTopics = Mapping[str, list[str]]  # the owner of each of a topic's queues here, in order


class Owners:
    """`count` is the number of queues in all groups, with those that are being found."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._groups: dict[str, OfTopics] = {}
        self.count = 0

    def of(self, group: str, topic: str, queue_id: int) -> str | None:
        owners = self._groups.get(group, {}).get(topic, ())
        return owners[queue_id] if queue_id < len(owners) else None

    def of_group(self, group: str) -> OfTopics:
        return self._groups.get(group, {})

    def put(self, group: str, owners: OfTopics) -> None:
        """Instead of those of before. Without any, the group is forgotten."""
        self.count += _count(owners) - _count(self._groups.pop(group, {}))
        if owners:
            self._groups[group] = owners

    def takes(self, more: int) -> bool:
        """Counts the owners found for a group, until they are given back, unless they are too many."""
        if self.count + more > self._limits.max_drained_queues:
            return False
        self.count += more
        return True

    def give_back(self, count: int) -> None:
        self.count -= count


def _count(owners: OfTopics) -> int:
    return sum(map(len, owners.values()))


def owners_of(members: Mapping[str, int], queues: TopicQueues, broker_name: str) -> list[str]:
    """The future owners of one broker's queues, in their order, among members in these places; nothing if nobody stays."""
    owners: list[str] = []
    for index, client_id in enumerate(islice(members, len(queues))):  # those behind get nothing
        share = AVG.allocate_at(index, len(members), queues)
        owners += [client_id] * sum(queue.broker_name == broker_name for queue in share)
    return owners
