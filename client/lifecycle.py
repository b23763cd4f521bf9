"""The life of a producer or consumer: it starts once and ends once.

    NEW -- start --> RUNNING -- stop --> STOPPED
                        |
                        +-- start raises --> FAILED

It can be used at once: it is RUNNING while it still joins its group.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from enum import Enum, auto
from typing import ClassVar, Self

from .errors import ConfigError
from .wire.cluster import Cluster


class Stage(Enum):
    NEW = auto()
    """Made, and not started."""
    RUNNING = auto()
    """Started, and not stopped."""
    FAILED = auto()
    """Could not be started."""
    STOPPED = auto()
    """Stopped, or stopping."""


class Lifecycle(ABC):
    """`_idle_reason`: why it does nothing; empty while it runs."""

    _noun: ClassVar[str] = "consumer"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stage = Stage.NEW
        self._undoing: asyncio.Task[None] | None = None
        self._idle_reason = f"has not been started; use `async with`, or `await {self._noun}.start()`"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts it. A consumer receives messages that are sent from now on.

        Raises ConnectionFailed if no name server can be reached, BrokerRefused if a broker refuses this member or its
        filters, and ConfigError the second time.
        """
        if self._stage is not Stage.NEW:
            reason = self._idle_reason if self._stage is Stage.FAILED else "has been started before; make another one"
            raise ConfigError(f"this {self._noun} {reason}")
        self._cluster.start()
        self._stage, self._idle_reason = Stage.RUNNING, ""
        try:
            await self._begin()
        except BaseException as error:
            self._stage, self._idle_reason = Stage.FAILED, f"could not be started ({error}); make another one"
            if isinstance(error, GeneratorExit):  # a coroutine that is thrown away can wait for nothing
                self._undo_later()
            else:
                await self._undo()
            raise

    def _undo_later(self) -> None:
        with suppress(RuntimeError):  # the loop is gone, and its tasks with it
            self._undoing = asyncio.get_running_loop().create_task(self._undo(), name="undo")

    async def stop(self) -> None:
        """Lets running handlers and checks finish, says what they did, and leaves. Harmless if it does not run. Raises
        ConfigError in another event loop, and in a handler, which cannot wait for its own end."""
        if self._stage is not Stage.RUNNING:
            return
        self.check_stop()
        self._cluster.check_home()
        self._stage, self._idle_reason = Stage.STOPPED, "has been stopped; make another one"
        await self._end()

    @abstractmethod
    async def _begin(self) -> None: ...

    @abstractmethod
    async def _undo(self) -> None:
        """Ends what a start that failed has begun."""

    @abstractmethod
    async def _end(self) -> None: ...

    @property
    def has_ended(self) -> bool:
        """Whether it does nothing any more: it was stopped, or could not be started."""
        return self._stage in (Stage.STOPPED, Stage.FAILED)

    def check_stop(self) -> None:
        """Raises ConfigError where `stop` would wait for its own caller, as in a handler."""
        return

    def _check_running(self) -> None:
        """Raises ConfigError. A client that nobody started would leave its connections open for ever."""
        if self._idle_reason:
            raise ConfigError(f"this {self._noun} {self._idle_reason}")
        self._cluster.check_home()
