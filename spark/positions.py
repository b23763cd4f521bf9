"""Positions in options: check that the queues have them, and resolve them to offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from ..client.config import At
from ..client.errors import ConfigError, get_logger
from ..client.member.offsets import GroupOffsets, begin_offset
from ..protocol.names import Queue
from .extents import BrokerOffsets
from .options import StartingOffsets, StartPlace
from .view import View

log = get_logger("rocketlet.spark")


def check_named(position: StartingOffsets, queues: set[Queue]) -> None:
    """Check the queues that an option names, and log a warning if it does not name all. Raises ConfigError for an
    unknown queue."""
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


async def check_start(view: View, topics: Iterable[str]) -> None:
    """Check that a new query can read its topics, and start where its options say.

    Queues whose broker does not respond are not checked. Raises ConfigError if the query cannot start there, and
    RocketletError if a broker rejects a request or stops responding.
    """
    start, queues = view.options.start, set(view.routed(topics))
    for topic in set(view.options.topics) - {queue.topic for queue in queues}:
        raise ConfigError(
            f"the option topic: no queue of {topic} can be read; make some readable (rocketlet topics set {topic} "
            "--read-queues N)"
        )
    check_named(start, queues)
    exact = {queue: place for queue, place in start.queues.items() if isinstance(place, At)}
    seen = await view.extents.of(exact)
    for queue, extent in seen.extents.items():
        if exact[queue].offset > extent.end:
            raise ConfigError(f"{start.option} names {queue} at {exact[queue].offset}, which ends at {extent.end}")
    if view.options.needs_message:
        await _check_times(view, {queue: place for queue in queues if isinstance(place := start.of(queue), int)})


async def _check_times(view: View, places: Mapping[Queue, int]) -> None:
    seen = await view.extents.of(places)
    for queue, extent in sorted(seen.extents.items()):
        connection = await view.cluster.broker(queue.broker_name)
        if await begin_offset(connection, queue, places[queue]) >= extent.end:
            raise ConfigError(
                f"{queue} has no message since {places[queue]} ms, where it is to start; choose an earlier time, or set "
                "startingOffsetsByTimestampStrategy to latest"
            )


async def offsets_at(
    view: View, queues: Iterable[Queue], position: StartingOffsets, seen: BrokerOffsets
) -> dict[Queue, int]:
    """Resolve a position to an offset in each queue. Raises RocketletError."""
    wanted = {queue: position.of(queue) for queue in queues}
    found = await asyncio.gather(*(_offset(view, queue, place, seen) for queue, place in wanted.items()))
    return dict(zip(wanted, found, strict=True))


async def _offset(view: View, queue: Queue, place: StartPlace | At, seen: BrokerOffsets) -> int:
    if place in ("first", "last"):
        return seen.extents[queue].begin if place == "first" else seen.extents[queue].end
    connection = await view.cluster.broker(queue.broker_name)
    if place == "committed":
        return await GroupOffsets(view.cluster, view.options.group).load(connection, queue, "first")
    return await begin_offset(connection, queue, place)
