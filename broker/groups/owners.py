"""Whose each queue here is by the last change, in groups with foreign members.

A queue takes 8 bytes, because there may be very many: a topic's owners are a list, in the order of its queues.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config import MAX_DRAINED_QUEUES

OfTopics = Mapping[str, list[str]]  # of each topic's queues here, in order, whose each is


class Owners:
    """`count` is of the queues in all groups, and of what is being found."""

    def __init__(self) -> None:
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
        """Counts what is found for a group, until it is given back, unless that is too much."""
        if self.count + more > MAX_DRAINED_QUEUES:
            return False
        self.count += more
        return True

    def give_back(self, count: int) -> None:
        self.count -= count


def _count(owners: OfTopics) -> int:
    return sum(map(len, owners.values()))
