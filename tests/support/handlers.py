"""Helpers for tests of consumers: a handler that keeps its messages, and messages for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rocketlet.client import Message, Producer

from ..conftest import Node


class Inbox:
    """A handler that keeps what it gets, and then waits for its gate if it has one."""

    def __init__(self, outcome: Any = None, *, gate: asyncio.Event | None = None) -> None:
        self.messages: list[Message] = []
        self._outcome = outcome
        self._gate = gate

    async def __call__(self, message: Message | Sequence[Message]) -> Any:
        self.messages += [message] if isinstance(message, Message) else message
        if self._gate is not None:
            await self._gate.wait()
        return self._outcome

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]


async def fill(node: Node, count: int, topic: str = "t", **options: Any) -> None:
    async with Producer(node.address) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, **options)
