"""Several brokers for tests, with one name server."""

from __future__ import annotations

from typing import Any, Self

from ..client.admin.admin_client import AdminClient, rebalanced
from ..client.config import TOPIC_QUEUES
from .broker import Broker
from .config import WAIT_S


class Cluster:
    """A cluster for `async with Cluster(brokers=2) as cluster`: the first broker, which is also the name server, and
    further brokers.

    The brokers are named broker-a, broker-b and so on. Each has its own clock and faults. Clients connect to `address`.
    """

    def __init__(self, brokers: int = 2, **settings: Any) -> None:
        if not 1 <= brokers <= 26:
            raise ValueError(f"brokers is {brokers}; expected 1 to 26")
        self._count = brokers
        self._settings = settings
        self.brokers: list[Broker] = []

    @property
    def address(self) -> str:
        return self.brokers[0].address

    async def __aenter__(self) -> Self:
        try:
            for number in range(self._count):
                name_server = self.brokers[0].address if self.brokers else None
                name = f"broker-{chr(ord('a') + number)}"
                broker = Broker(name=name, name_server=name_server, **self._settings)
                self.brokers.append(await broker.__aenter__())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        while self.brokers:
            await self.brokers.pop().__aexit__()

    async def rebalanced(self, group: str, *, members: int | None = None, timeout_s: float = WAIT_S) -> dict[str, int]:
        return await rebalanced(self.address, group, members=members, timeout_s=timeout_s)

    async def create_topic(self, topic: str, queues: int = TOPIC_QUEUES, message_type: str = "") -> None:
        """Create a topic on each broker."""
        async with AdminClient(self.address) as admin:
            await admin.create_topic(topic, queues=queues, message_type=message_type)
