"""Where a member that begins at the latest message reads queues that it did not see when it joined.

Such a queue is new, or its broker was away. A new one is read from its start. In the other one, messages that were stored
before the member joined are older than the place where its group begins.
"""

from __future__ import annotations

import time

from ...protocol.codes import RequestCode
from ...protocol.group_bodies import encode_topics
from ...protocol.headers import BrokerTimes, OptionalGroup, write
from ...protocol.names import Queue
from ..config import OFFSET_TIMEOUT_S
from ..errors import BrokerRefused, RocketletError, get_logger
from ..message import clock_s
from .cluster import ClusterView, stored_since
from .connection import Connection, header_of

log = get_logger("rocketlet.offsets")


class LateQueues:
    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._joined_s = clock_s()
        self._brokers: frozenset[str] = frozenset()  # that were there

    async def join(self) -> None:
        """The member joins: notes the time, and the brokers that are there."""
        self._joined_s = clock_s()
        try:
            await self._cluster.find_masters()
        except RocketletError as error:
            log.info("brokers_unknown", reason=str(error), hint="queues that come later are read by their store times")
        self._brokers = frozenset(self._cluster.known_masters())

    def miss(self, broker_name: str) -> None:
        """A broker that should be there does not answer."""
        self._brokers -= {broker_name}

    def was_there(self, broker_name: str) -> bool:
        """True if the broker was there when the member joined, so that a queue which it did not have is new."""
        return broker_name in self._brokers

    async def begin_offset(self, connection: Connection, queue: Queue) -> int:
        """Return the offset of the first message that was stored since the member joined. Raises RocketletError."""
        return await stored_since(connection, queue, await time_before(connection, clock_s() - self._joined_s))


async def time_before(connection: Connection, seconds: float) -> int:
    """Return the time of so many seconds ago, in ms since the epoch: by the clock by which a Rocketlet broker stores
    messages, or by ours where the broker does not tell. Raises RocketletError."""
    try:
        answer = await connection.request(
            RequestCode.GET_QUEUE_OFFSETS, write(OptionalGroup()), encode_topics(()), timeout_s=OFFSET_TIMEOUT_S
        )
        now_ms = header_of(answer, BrokerTimes).now_ms or _now_ms()
    except BrokerRefused:  # Apache's know no such request
        now_ms = _now_ms()
    return now_ms - int(seconds * 1000)


def _now_ms() -> int:
    return int(time.time() * 1000)


__all__ = ["LateQueues", "time_before"]
