"""Topics of a node in this process: made without a client, and what they hold."""

from __future__ import annotations

from typing import Any

from rocketlet.protocol.bodies import TopicConfig
from rocketlet.protocol.message import Record

from ..conftest import Node


def put(node: Node, name: str = "t", *, queues: int = 4, **settings: Any) -> None:
    node.broker.topics.put(TopicConfig(name, queues, queues, **settings), node.broker.store.end)


def stored(node: Node, topic: str = "t") -> list[Record]:
    store = node.broker.store
    return [
        store.message(queue, offset)
        for (name, _), queue in sorted(store.queues.items())
        if name == topic
        for offset in range(queue.begin, queue.next)
    ]
