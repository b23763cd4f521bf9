"""The topics and brokers that we receive from, by their routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from ...protocol.codes import PERM_READ, ResponseCode
from ...protocol.subscription import Subscription
from ..errors import BrokerRefused, RocketletError
from ..log import get_logger
from ..tasks import cancelled
from ..wire.cluster import Cluster
from .handout import Handout
from .popping import Source

log = get_logger("rocketlet.sharing")

Make = Callable[[Subscription, str, bool], Source]
_NOT_YET: Final = frozenset((ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SERVICE_NOT_AVAILABLE))
"""Refusals that a start does not end with."""


class Sources:
    """`make(subscription, broker_name, is_late)`: of a place that has come into being while we were here; it is read from its
    start."""

    def __init__(
        self, cluster: Cluster, subscriptions: Mapping[str, Subscription], make: Make, handout: Handout
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._subscriptions = subscriptions
        self._make = make
        self._handout = handout
        self._running: dict[tuple[str, str], tuple[Source, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        cluster.listen(on_change=lambda topic: self._changed.set())

    @property
    def missing(self) -> list[str]:
        """Topics that no name server knows."""
        return [topic for topic in self._subscriptions if self._cluster.route(topic) is None]

    async def begin(self) -> None:
        """Asks each broker for the first time. One that is away is asked later. Raises BrokerRefused if a broker
        refuses this consumer."""
        sources = [self._make(self._subscriptions[topic], name, False) for topic, name in self._places()]
        self._handout.sources = len(sources)
        for outcome in await asyncio.gather(*(source.begin() for source in sources), return_exceptions=True):
            if isinstance(outcome, BrokerRefused) and outcome.code in _NOT_YET:
                continue
            if isinstance(outcome, BaseException) and not _is_away(outcome):
                raise outcome
        for source in sources:
            self._run(source)

    async def run(self) -> None:
        """Follows the routes."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.missing_route_interval_s if self.missing else None):
                    await self._changed.wait()
            self._changed.clear()
            for topic in self.missing:
                with suppress(RocketletError):
                    await self._cluster.find_route(topic)
            await self._follow()

    async def _follow(self) -> None:
        places = self._places()
        gone = [self._running.pop(place)[1] for place in self._running.keys() - places]
        for topic, broker_name in places - self._running.keys():
            self._run(self._make(self._subscriptions[topic], broker_name, True))
        self._handout.sources = len(self._running)
        await cancelled(gone)

    def _run(self, source: Source) -> None:
        task = asyncio.create_task(source.run(), name=f"receive {source.topic} at {source.broker_name}")
        self._running[source.topic, source.broker_name] = source, task

    def _places(self) -> set[tuple[str, str]]:
        return {
            (topic, data.broker_name)
            for topic in self._subscriptions
            if (route := self._cluster.route(topic)) is not None
            for data in route.queues
            if data.perm & PERM_READ and data.read_queues and self._cluster.master(data.broker_name) is not None
        }

    async def quiet(self, patience_s: float) -> None:
        """Returns when no receive is under way any more, or after that time: a broker may hold one for long."""
        asking = [task for source, task in self._running.values() if source.is_asking]
        idle = [task for source, task in self._running.values() if not source.is_asking]
        await cancelled(idle)
        if asking:
            await asyncio.wait(asking, timeout=patience_s)

    async def stop(self) -> None:
        await cancelled([task for _, task in self._running.values()])


def _is_away(error: BaseException) -> bool:
    if isinstance(error, RocketletError) and not isinstance(error, BrokerRefused):
        log.warning("pop_failed", reason=str(error), hint="it is asked again and again")
        return True
    return False
