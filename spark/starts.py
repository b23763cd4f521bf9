"""Are the starting positions that options give ones that the queues have?"""

from __future__ import annotations

from collections.abc import Iterable

from ..client.config import At
from ..client.errors import ConfigError
from ..client.log import get_logger
from ..client.member.offsets import begin_offset
from ..client.wire.cluster import Cluster
from ..protocol.queue import Queue
from .extents import Extents
from .given import Position

log = get_logger("rocketlet.spark")


def check_named(position: Position, queues: set[Queue]) -> None:
    """Raises ConfigError for a queue that an option names and that is not there; says which it leaves out."""
    absent, left_out = set(position.queues) - queues, queues - set(position.queues)
    if absent:
        raise ConfigError(f"{position.option} names {min(absent)}, which does not exist")
    if position.queues and left_out:
        log.warning(
            "queues_not_named",
            option=position.option,
            queues=len(left_out),
            first=str(min(left_out)),
            place=position.default,
        )


class Starts:
    def __init__(self, position: Position, extents: Extents, cluster: Cluster) -> None:
        self._position = position
        self._extents = extents
        self._cluster = cluster

    async def check(self, queues: set[Queue], *, needs_message: bool) -> None:
        """needs_message: whether a queue must have a message since its starting time. Raises ConfigError, and RocketletError
        if a broker cannot be asked."""
        check_named(self._position, queues)
        exact = {queue: place for queue, place in self._position.queues.items() if isinstance(place, At)}
        seen = await self._extents.of(exact)
        for queue, extent in seen.extents.items():
            if exact[queue].offset > extent.end:
                raise ConfigError(
                    f"{self._position.option} names {queue} at {exact[queue].offset}, which ends at {extent.end}"
                )
        if needs_message:
            await self._check_times(queues)

    async def _check_times(self, queues: Iterable[Queue]) -> None:
        places = {queue: place for queue in queues if isinstance(place := self._position.of(queue), int)}
        seen = await self._extents.of(places)
        for queue, extent in sorted(seen.extents.items()):
            connection = await self._cluster.broker(queue.broker_name)
            if await begin_offset(connection, queue, places[queue]) >= extent.end:
                raise ConfigError(
                    f"{queue} has no message since {places[queue]} ms, where it is to start; choose an earlier time, or set "
                    "startingOffsetsByTimestampStrategy to latest"
                )
