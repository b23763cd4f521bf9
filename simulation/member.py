"""A consumer of ours in a simulated run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from rocketlet.client import Consumer, Message
from rocketlet.client.member.membership import Membership
from rocketlet.protocol.allocation import AVG, STICKY
from rocketlet.protocol.names import Queue

from tests.support.apache_locks import AS_APACHES

from .loop import Process
from .violations import Violation, raise_later

if TYPE_CHECKING:
    from .world import World

ANSWERED_S = 1.0  # how long a member takes to connect again and to be told of its leases


class Member:
    """A consumer of the group that notes what it owns and handles."""

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        self.name = name
        self.topics = topics
        self.process = Process(name)
        self.blind_until_s = 0.0
        self.has_left = False
        self._world = world
        self._running: Counter[object] = Counter()
        plan = world.plan
        self.consumer = Consumer(
            world.name_server,
            world.group,
            dict.fromkeys(topics, "*"),
            self._handle,
            start="first",
            orderly=plan.orderly,
            strategy=STICKY if plan.sticky else AVG,
            concurrency=4,
            commit_interval_s=1.0,
            drain_s=plan.drain_s,
            access=AS_APACHES if plan.apache else None,
            on_assigned=lambda queues: world.taken(self, queues),
            on_revoked=lambda queues: world.note(f"{name} gives {sorted(map(str, queues))}"),
        )

    @property
    def is_blind(self) -> bool:
        """Whether its broker has seen its connection end, and it has not yet."""
        return asyncio.get_running_loop().time() <= self.blind_until_s

    @property
    def is_unanswered(self) -> bool:
        """Whether no broker may have answered it since its connection ended: it begins nothing, and does not know yet whose
        the queues are of which handlers run."""
        return asyncio.get_running_loop().time() <= self.blind_until_s + ANSWERED_S

    @property
    def is_awake(self) -> bool:
        """Whether it learns at once what happens to it: no second fault hides the first from it."""
        return not (self.process.is_paused or self.process.is_silent or self.is_blind)

    def assignment(self) -> set[Queue]:
        return self.consumer.assignment()

    @property
    def is_settled(self) -> bool:
        return self.consumer._membership.is_settled

    @property
    def releases(self) -> bool:
        """Whether it hands a queue over, or should have begun to."""
        membership = self.consumer._membership
        return isinstance(membership, Membership) and bool(membership._leases.releasing)

    async def join(self) -> None:
        await self.consumer.__aenter__()

    async def leave(self) -> None:
        await self.consumer.__aexit__()

    def believes_in(self, queue: Queue) -> bool:
        """Whether it takes the queue for its own, by its own clock."""
        process_queue = self.consumer.queues.get(queue)
        return process_queue is not None and process_queue.may_begin

    async def _handle(self, message: Message) -> None:
        world = self._world
        world.handled(self, message)
        one_at_a_time = message.queue if world.plan.orderly else (message.queue, message.queue_offset)
        if self._running[one_at_a_time]:
            raise_later(Violation(f"{self.name} handles {one_at_a_time} twice at a time"))
        self._running[one_at_a_time] += 1
        try:
            await asyncio.sleep(world.handler_s())
        finally:
            self._running[one_at_a_time] -= 1
            if not self._running[one_at_a_time]:
                del self._running[one_at_a_time]
        world.done(self, message)
