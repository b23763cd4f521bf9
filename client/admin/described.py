"""A topic and a group as administration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...protocol.admin_answers import GroupConnections, MemberConnection
from ...protocol.admin_bodies import Progress, Range
from ...protocol.bodies import TopicConfig
from ...protocol.group_config import GroupConfig
from ...protocol.queue import Queue


def are_broadcasting(connections: Mapping[str, GroupConnections]) -> bool:
    """True if a group's members, by broker name, get every message each. They keep their own offsets. Offsets at a broker are
    those of a time before."""
    return bool(connections) and all(known.message_model == "BROADCASTING" for known in connections.values())


@dataclass(frozen=True, slots=True)
class Topic:
    """`config` by broker name; `ranges`: what each queue holds; `messages`: how many that are."""

    name: str
    config: Mapping[str, TopicConfig]
    ranges: Mapping[Queue, Range]

    @property
    def messages(self) -> int:
        return sum(item.end - item.begin for item in self.ranges.values())

    def unreadable(self, config: Mapping[str, TopicConfig]) -> dict[Queue, int]:
        """Return the number of stored messages of each queue that is readable now and would not be with `config`."""
        return {
            queue: span.end - span.begin
            for queue, span in self.ranges.items()
            if span.end > span.begin
            and queue.broker_name in config
            and config[queue.broker_name].read_queues <= queue.queue_id < self.config[queue.broker_name].read_queues
        }


@dataclass(frozen=True, slots=True)
class Group:
    """`members` and `subscriptions` as its brokers know them, none if nobody is connected; `progress` by queue of every topic
    in which the group has committed, empty for a broadcasting group; `owners`: client id by queue."""

    name: str
    config: Mapping[str, GroupConfig]
    connections: Mapping[str, GroupConnections]
    progress: Mapping[Queue, Progress]
    owners: Mapping[Queue, str]

    @property
    def members(self) -> tuple[MemberConnection, ...]:
        """Each member once, though each broker knows it."""
        found = {item.client_id: item for known in self.connections.values() for item in known.members}
        return tuple(found[name] for name in sorted(found))

    @property
    def lag(self) -> int:
        """Messages that are not yet consumed."""
        return sum(max(item.lag, 0) for item in self.progress.values())
