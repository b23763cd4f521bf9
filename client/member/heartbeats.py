"""Tells every broker of the routes that this member is here, and knows which of them have heard it.

Apache's brokers forget a member after 120 s without a heartbeat; a Rocketlet broker gives no lock to a connection that has
sent none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from ...protocol import bodies
from ...protocol.bodies import Heartbeat
from ...protocol.codes import RequestCode
from ..errors import BrokerRefused, RocketletError
from ..log import get_logger
from ..tasks import cancelled
from ..wire.cluster import Cluster

log = get_logger("rocketlet.membership")


class Heartbeats:
    """`describe` makes the heartbeat as it is now; `addresses` names the brokers that are to get it."""

    def __init__(
        self, cluster: Cluster, describe: Callable[[], Heartbeat], addresses: Callable[[], Iterable[str]]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._describe = describe
        self._addresses = addresses
        self._registered: set[str] = set()
        self._failing: set[str] = set()
        self._beating: dict[str, asyncio.Task[None]] = {}  # at single brokers
        self.refusal: BrokerRefused | None = None
        self._said = b""
        self._news = asyncio.Event()

    @property
    def are_failing(self) -> bool:
        """Whether a broker has not answered the last heartbeat."""
        return bool(self._failing)

    def is_registered(self, address: str | None) -> bool:
        """Whether the broker at this address has heard this member on the connection that is open."""
        return address in self._registered

    def forget(self, address: str | None = None) -> None:
        """This broker, or all of them, must hear this member again."""
        if address is None:
            self._registered.clear()
        else:
            self._registered.discard(address)

    def tell_news(self) -> None:
        """`beat_forever` says it now, if it would say something else than the last time."""
        if bodies.encode_heartbeat(self._describe()) != self._said:
            self._news.set()

    async def beat(self) -> None:
        """Registers at every broker, and returns when each has answered or failed to."""
        self._said = body = bodies.encode_heartbeat(self._describe())
        addresses = set(self._addresses())
        self._failing &= addresses  # a broker that moved is not awaited where it was
        await asyncio.gather(*(self._beat_at(address, body) for address in addresses))

    async def register(self, addresses: Iterable[str] | None = None, patience_s: float | None = None) -> None:
        """Says it to those of all brokers, or of these, that have not heard it. Returns when each of them has answered or
        failed to, or after `patience_s`: a broker that stands still keeps nobody from the others. Its heartbeat goes on."""
        named = self._addresses() if addresses is None else addresses
        news = {address for address in named if address not in self._registered}
        for address in news - self._beating.keys():
            beating = asyncio.create_task(self._beat_at(address, bodies.encode_heartbeat(self._describe())))
            self._beating[address] = beating
            beating.add_done_callback(partial(self._has_beaten, address))
        if news:
            await asyncio.wait([self._beating[address] for address in news], timeout=patience_s)

    def _has_beaten(self, address: str, beating: asyncio.Task[None]) -> None:
        del self._beating[address]

    async def stop(self) -> None:
        """Ends what `register` has not waited for."""
        await cancelled(self._beating.values())

    async def _beat_at(self, address: str, body: bytes) -> None:
        try:
            connection = await self._cluster.connection(address)
            await connection.request(RequestCode.HEART_BEAT, {}, body)
        except RocketletError as error:
            self._registered.discard(address)
            self.refusal = error if isinstance(error, BrokerRefused) else None
            if address not in self._failing:
                log.warning("heartbeat_failed", broker=address, reason=str(error))
            self._failing.add(address)
        else:
            self._registered.add(address)
            if address in self._failing:
                self._failing.discard(address)
                log.info("broker_back", broker=address)

    async def beat_forever(self) -> None:
        while True:
            limits = self._limits
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.heartbeat_retry_s if self._failing else limits.heartbeat_interval_s):
                    await self._news.wait()
            self._news.clear()
            await self.beat()
