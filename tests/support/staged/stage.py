"""A broker, and what a staged cluster puts around it: members, loads, ills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from rocketlet.client import (
    AdminClient,
    Consumer,
    Producer,
    SharedConsumer,
)
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import Language, RequestCode
from rocketlet.protocol.frame import Frame, encode
from rocketlet.protocol.names import Queue, parse_subscription

from ...conftest import Connect, Node, Wire
from ...support.pacing import pace
from .. import topics
from ..handlers import Inbox
from ..sick_cluster import answer_always, running_body

Findings = set[tuple[str, str]]
RATE_S: Final = 0.01
LOADED: Final = 10  # rounds of a load, after which it is checked


@dataclass
class Stage:
    """A broker and what a cluster puts around it; all of it ends with the test."""

    node: Node
    connect: Connect
    stack: AsyncExitStack
    producer: Producer
    folder: Path

    async def consumer(self, handler: Any, subscriptions: Any = "t", **options: Any) -> Consumer:
        """Comes back when it has its queues."""
        if self.node.broker.topics.get("t") is None:
            topics.put(self.node)
        consumer = Consumer(self.node.address, "g", subscriptions, handler, start="first", **options)
        await self.stack.enter_async_context(consumer)
        await consumer.assigned()
        return consumer

    async def sharing(self, handler: Any, **options: Any) -> SharedConsumer:
        consumer = SharedConsumer(self.node.address, "g", "t", handler, start="first", **options)
        return await self.stack.enter_async_context(consumer)

    async def admin(self) -> AdminClient:
        return await self.stack.enter_async_context(AdminClient(self.node.address))

    async def wire(self) -> Wire:
        return await self.connect(self.node.address)

    async def foreign(self, client_id: str, *queues: int, topic: str = "t", version: int | None = None) -> Wire:
        """A member as Java's, which says that it reads these queues."""
        wire = await self.wire()
        consumer = ConsumerData("g", subscriptions=(parse_subscription(topic, "*"),))
        frame = Frame(RequestCode.HEART_BEAT, 99_999, {}, encode_heartbeat(Heartbeat(client_id, (consumer,))))
        frame = frame._replace(language=Language.JAVA, version=frame.version if version is None else version)
        wire.write(encode(frame))
        assert (await wire.answer(99_999)).code == 0
        held = (Queue(topic, self.node.config.name, number) for number in queues)
        self.background(answer_always(wire, running_body(topic, *held)))
        return wire

    def background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.stack.push_async_callback(asyncio.wait, [task])
        self.stack.callback(task.cancel)

    async def load(self, pause_s: float = RATE_S, at_once: int = 1, **options: Any) -> None:
        """Comes back when it has begun."""
        begun = asyncio.Event()

        async def sending() -> None:
            for number in count():
                await asyncio.gather(
                    *(self.producer.send("t", b"%d" % number, **options) for _ in range(at_once)),
                )
                await pace(pause_s)
                if number == LOADED:
                    begun.set()

        self.background(sending())
        await begun.wait()


class Hanging(Inbox):
    async def __call__(self, message: Any) -> None:
        await super().__call__(message)
        await asyncio.Event().wait()


Cluster = Callable[[Stage], AbstractAsyncContextManager[None]]
