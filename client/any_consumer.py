"""The common part of Consumer and SharedConsumer: their life, and brokers' questions about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from ..protocol.subscription import Subscription
from .consuming.handling import Outcome
from .errors import ConfigError
from .lifecycle import Lifecycle
from .message import Message
from .options import MemberOptions
from .wire.cluster import Cluster

Taken = TypeVar("Taken")


class Handlers(Protocol):
    """The tasks that run a consumer's handler."""

    def is_handling_here(self) -> bool: ...

    async def try_one(self, message: Message) -> Outcome: ...


class AnyConsumer(Lifecycle):
    def __init__(
        self, name_server: str, group: str, subscriptions: Mapping[str, Subscription], options: MemberOptions
    ) -> None:
        super().__init__(Cluster(name_server, options["access"], options["client_name"], options["limits"]))
        self.group = group
        self.subscriptions = subscriptions
        self._name_server = name_server
        self._concurrency = options["concurrency"]
        self._orderly = False
        self._workers: Handlers | None = None
        self._made_ms = int(time.time() * 1000)

    def check_stop(self) -> None:
        if self._workers is not None and self._workers.is_handling_here():
            raise ConfigError(
                "stop: a handler cannot wait for its own end; set an event for whoever opened the consumer, and return"
            )

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that mqadmin shows of a consumer, by its names."""
        return {
            "PROP_NAMESERVER_ADDR": self._name_server,
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._made_ms),
        }

    async def try_one(self, message: Message) -> Outcome:
        if self._workers is None:
            raise ConfigError("this consumer iterates; only one with a handler can try a message")
        return await self._workers.try_one(message)

    async def _taken(self, taking: Coroutine[Any, Any, Taken | None], timeout_s: float | None) -> Taken:
        """The next delivery. Raises TimeoutError, and ConfigError if the consumer has stopped."""
        try:
            async with asyncio.timeout(timeout_s):
                taken = await taking
        except TimeoutError:
            raise TimeoutError(f"receive: no message came in {timeout_s} s") from None
        if taken is None:
            raise ConfigError(f"receive: the consumer {self._idle_reason}")
        return taken
