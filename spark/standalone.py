"""Reading without membership, like Kafka's source: all queues, from offsets that only the checkpoint keeps; batch reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..client.config import At
from ..client.errors import ConfigError
from ..client.offsets import GroupOffsets, begin_offset
from ..protocol.allocation import subscribe_queues
from ..protocol.bodies import Queue
from .options import Place, Position
from .planner import Planner
from .ranges import Range, Ranges


class Standalone(Planner):
    """Plans every queue of its topics; each batch names all of them, so that the checkpoint knows where each one stands."""

    async def _open(self, topics: list[str]) -> None:
        self._known = set(topics)
        self._read_to: dict[Queue, int] = {}
        self._planned_to: dict[Queue, int] = {}
        self._last: Ranges | None = None
        unknown = sorted(map(str, self._options.start.queues.keys() - set(self._queues())))
        if unknown:
            raise ConfigError(f"startingOffsets names {unknown[0]}, which does not exist")

    async def _leave(self) -> None:
        await self._cluster.close()

    def _queues(self) -> list[Queue]:
        queues: list[Queue] = []
        for topic in sorted(self._known):
            route = self._cluster.route(topic)
            queues += subscribe_queues(topic, route) if route is not None else []
        return queues

    def _positions(self) -> dict[Queue, int]:
        return dict(self._read_to)

    def _planned(self) -> dict[Queue, int]:
        return self._read_to | self._planned_to

    async def _finish(self, ranges: Ranges) -> None:
        """Goes on where these ranges end. A query without a checkpoint begins where the options say, what comes later at its
        start."""
        is_new = self._last is None and not ranges
        if self._last is None or ranges:
            self._read_to = {queue: end for queue, (_, end) in ranges.items()}
        fresh = [queue for queue in self._queues() if queue not in self._read_to]
        self._read_to |= await self._at(fresh, self._options.start if is_new else Position("first"))
        self._last = dict(ranges)

    async def _plan(self, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]:
        self._known.update(await self._new_topics(self._known))
        ends = await self._ends(self._read_to)
        available = {
            queue: (position, max(ends.get(queue, position), position)) for queue, position in self._read_to.items()
        }
        cut = await self._cut(available, max_rows, max_bytes)
        self._planned_to = {queue: end for queue, (_, end) in cut.items()}
        is_news = bool(cut) or self._read_to.keys() != (self._last or {}).keys()
        return {queue: cut.get(queue, (begin, begin)) for queue, (begin, _) in available.items()} if is_news else {}

    # Batch reads

    def ranges(self, start: Position, end: Position) -> dict[Queue, Range]:
        """All queues from one position to another. Raises ConfigError for a queue that does not exist, RocketletError."""
        return self._call(self._ranges(start, end))

    async def _ranges(self, start: Position, end: Position) -> dict[Queue, Range]:
        queues = self._queues()
        unknown = sorted(map(str, end.queues.keys() - set(queues)))
        if unknown:
            raise ConfigError(f"endingOffsets names {unknown[0]}, which does not exist")
        begins, ends = await self._at(queues, start), await self._at(queues, end)
        return {queue: (begins[queue], max(begins[queue], ends[queue])) for queue in queues}

    async def _at(self, queues: Iterable[Queue], position: Position) -> dict[Queue, int]:
        queues = list(queues)
        found = await asyncio.gather(*(self._offset(queue, position.of(queue)) for queue in queues))
        return dict(zip(queues, found, strict=True))

    async def _offset(self, queue: Queue, start: Place | At) -> int:
        connection = await self._cluster.broker(queue.broker_name)
        if start == "committed":
            return await GroupOffsets(self._cluster, self._options.group).load(connection, queue, "first")
        return await begin_offset(connection, queue, start)
