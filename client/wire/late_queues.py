"""The start offsets of queues that a member with `start="last"` did not see when it joined.

A queue that the member did not see is new, or its broker was unreachable. A new queue is read from offset 0. In a queue
of an unreachable broker, the group starts at the first message that was stored after the member joined.
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
    """The start offsets of queues that appear after a member has joined."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._joined_s = clock_s()
        self._brokers: frozenset[str] = frozenset()  # the names of brokers that were known when the member joined

    async def join(self) -> None:
        """Record the time at which the member joins, and the brokers that the name server knows then."""
        self._joined_s = clock_s()
        try:
            await self._cluster.find_masters()
        except RocketletError as error:
            log.info("brokers_unknown", reason=str(error), hint="queues that come later are read by their store times")
        self._brokers = frozenset(self._cluster.known_masters())

    def miss(self, broker_name: str) -> None:
        """Record that a broker did not respond when the member joined."""
        self._brokers -= {broker_name}

    def was_there(self, broker_name: str) -> bool:
        """Return True if the broker was available when the member joined, so that a queue which it did not have then is
        new."""
        return broker_name in self._brokers

    async def begin_offset(self, connection: Connection, queue: Queue) -> int:
        """Return the offset of the first message that was stored since the member joined. Raises RocketletError."""
        return await stored_since(connection, queue, await time_before(connection, clock_s() - self._joined_s))


async def time_before(connection: Connection, seconds: float) -> int:
    """Return the time that was `seconds` ago, in ms since the epoch.

    The time is measured by the clock with which a Rocketlet broker stores messages, or by this client's clock for an
    Apache broker. Raises RocketletError.
    """
    try:
        answer = await connection.request(
            RequestCode.GET_QUEUE_OFFSETS, write(OptionalGroup()), encode_topics(()), timeout_s=OFFSET_TIMEOUT_S
        )
        now_ms = header_of(answer, BrokerTimes).now_ms
    except BrokerRefused:  # Apache's brokers do not support this request
        now_ms = int(time.time() * 1000)
    return now_ms - int(seconds * 1000)


__all__ = ["LateQueues", "time_before"]
