"""One queue of a topic."""

from __future__ import annotations

from typing import NamedTuple


class Queue(NamedTuple):
    """A message queue. Sorts as RocketMQ sorts: by topic, broker name, queue id."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"
