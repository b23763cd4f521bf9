"""A backlog in each queue, and how long each queue was in nobody's hands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rocketlet.client import Producer
from rocketlet.protocol.names import Queue

from .foreign import ForeignMember
from .violations import Violation, raise_later

if TYPE_CHECKING:
    from .world import World

LOOK_S = 0.05
WATCHED_S = 80.0


async def send_many(world: World, count: int) -> None:
    """So many messages, to all queues alike."""
    async with Producer(world.name_server) as producer:
        topics = [world.topics[number % len(world.topics)] for number in range(count)]
        bodies = [b"backlog-%d" % number for number in range(count)]
        await asyncio.gather(*map(producer.send, topics, bodies))
        world.acknowledged += zip(topics, bodies, strict=True)


async def watch(world: World) -> None:
    """The longest time in which no foreign member had messages in its hands, for each queue with a backlog."""
    since_s: dict[Queue, float] = {}
    end_s = world.loop.time() + WATCHED_S
    while (now_s := world.loop.time()) < end_s:
        members = [member for member in world.members if isinstance(member, ForeignMember)]
        idle = {
            queue
            for queue in world.queues_up()
            if _has_backlog(world, queue) and not any(member.has_in_hands(queue) for member in members)
        }
        since_s = {queue: since_s.get(queue, now_s) for queue in idle}
        for queue, began_s in since_s.items():
            world.unread_s[queue] = max(world.unread_s.get(queue, 0.0), now_s - began_s)
            if now_s - began_s > world.plan.backlog_limit_s:
                raise_later(Violation(f"{queue} has a backlog that is in nobody's hands since {began_s:.1f}"))
        await asyncio.sleep(LOOK_S)


def _has_backlog(world: World, queue: Queue) -> bool:
    """Whether its last message was not begun yet."""
    broker = next(node.broker for node in world.nodes if node.name == queue.broker_name)
    stored = broker.store.queues.get((queue.topic, queue.queue_id)) if broker is not None else None
    if stored is None or not stored.next:
        return False
    return (queue.topic, queue.broker_name, queue.queue_id, stored.next - 1) not in world.handlings
