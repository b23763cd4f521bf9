"""Reading without membership, like Kafka's source: all queues, with offsets in the checkpoint only; and batch reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from ..client.config import At
from ..client.errors import ConfigError
from ..client.member.offsets import GroupOffsets, begin_offset
from ..protocol.queue import Queue
from .checkpoint import EMPTY, Batch
from .extents import Seen
from .given import Place, Position
from .loss import elsewhere, outside
from .options import ReadOptions
from .planner import Planner, log
from .ranges import Range, Ranges
from .starts import check_named


class Standalone(Planner):
    """Plans every queue of its topics. Each batch names all of them, so the checkpoint has the offset of each."""

    def __init__(
        self, options: ReadOptions, resumed: Batch = EMPTY, *, min_rows: int = 0, max_delay_s: float = 0.0
    ) -> None:
        super().__init__(options, resumed, membership=False, min_rows=min_rows, max_delay_s=max_delay_s)

    async def _open(self, topics: list[str]) -> None:
        self._known = set(topics)
        self._read_to: dict[Queue, int] = {}
        self._planned_to: dict[Queue, int] = {}
        self._last: Batch | None = None
        self._missing: set[Queue] = set()
        self._told_elsewhere: dict[str, set[Queue]] = {}
        queues = set(self._queues())
        absent = self._options.assigned - queues
        if absent and not self._resumed.ranges:
            raise ConfigError(f"assign names {min(absent)}, which does not exist")
        await self._check_start(queues)

    async def _leave(self) -> None:
        await self._cluster.close()

    def _queues(self) -> list[Queue]:
        queues = self._routed(sorted(self._known))
        return [queue for queue in queues if queue in self._options.assigned] if self._options.assigned else queues

    def _positions(self) -> Mapping[Queue, int]:
        return self._read_to

    def _planned(self) -> Mapping[Queue, int]:
        return self._read_to | self._planned_to

    def _move(self, queue: Queue, position: int) -> None:
        self._read_to[queue] = position

    async def _finish(self, batch: Batch) -> None:
        """Goes on where these ranges end. A query without a checkpoint begins where the options say, and reads later queues
        from their start."""
        if batch == self._last:
            return
        is_new = self._last is None and not batch.ranges
        self._read_to = {queue: end for queue, (_, end) in batch.ranges.items()}
        self._last = batch
        if is_new:
            self._read_to |= await self._at(self._queues(), self._options.start, await self._all())

    async def _discover(self) -> None:
        self._known.update(await self._new_topics(self._known))

    async def _settle(self, seen: Seen) -> None:
        """Queues that are new begin at their start. Those that the route lacks keep their place, for when they are back."""
        queues = self._queues()
        fresh = [queue for queue in queues if queue in seen.extents and queue not in self._read_to]
        missing = self._read_to.keys() - set(queues)
        if missing and fresh:
            self._check_cluster(missing, set(queues))
        self._read_to |= {queue: seen.extents[queue].begin for queue in fresh}
        for queue in sorted(missing - self._missing):
            log.warning(
                "queue_not_in_route",
                queue=str(queue),
                offset=self._read_to[queue],
                hint="it is read again when it is back",
            )
        self._missing = missing

    def _check_cluster(self, missing: set[Queue], queues: set[Queue]) -> None:
        """Raises DataLossError where no broker of a topic in the checkpoint is known, and others have the topic."""
        for topic in sorted({queue.topic for queue in queues}):
            known = {queue for queue in self._read_to if queue.topic == topic}
            if known and known <= missing and known != self._told_elsewhere.get(topic):
                self._told_elsewhere[topic] = known
                elsewhere({queue.broker_name for queue in known}, topic, fail=self._options.fail_on_data_loss)

    @property
    def missing(self) -> set[Queue]:
        return set(self._missing)

    async def _owed(self) -> set[Queue]:
        """Adds queues of the checkpoint that no route names: nobody knows how much they hold."""
        owed = await super()._owed()
        return owed | self._missing if self._options.fail_on_data_loss else owed

    def _planned_of(self, available: Ranges, cut: Ranges) -> Ranges:
        self._planned_to = {queue: end for queue, (_, end) in cut.items()}
        if not cut and self._last is not None and self._read_to.keys() == self._last.ranges.keys():
            return {}
        return {queue: cut.get(queue, (position, position)) for queue, position in self._read_to.items()}

    # Batch reads

    def ranges(self, start: Position, end: Position) -> dict[Queue, Range]:
        """All queues from one position to another. Raises ConfigError for a queue that does not exist, RocketletError."""
        return self._call(self._ranges(start, end))

    async def _ranges(self, start: Position, end: Position) -> dict[Queue, Range]:
        queues = self._queues()
        check_named(end, set(queues))
        seen = await self._all()
        self._marks |= seen.marks
        begins, ends = await self._at(queues, start, seen), await self._at(queues, end, seen)
        return {queue: self._span(queue, begins[queue], ends[queue], seen, start) for queue in queues}

    def _span(self, queue: Queue, begin: int, end: int, seen: Seen, start: Position) -> Range:
        extent = seen.extents[queue]
        if end > extent.end:
            raise ConfigError(f"endingOffsets names {queue} at {end}, which ends at {extent.end}")
        if begin > end and start.of(queue) != "first":  # the first message may be behind a group's offset
            raise ConfigError(
                f"{queue}: the start {begin} is behind the end {end}; correct the starting or ending option"
            )
        if begin < extent.begin:
            begin = outside(queue, begin, extent, is_same=True, fail=self._options.fail_on_data_loss)
        return begin, max(begin, end)

    async def _at(self, queues: Iterable[Queue], position: Position, seen: Seen) -> dict[Queue, int]:
        wanted = {queue: position.of(queue) for queue in queues}
        found = await asyncio.gather(*(self._offset(queue, place, seen) for queue, place in wanted.items()))
        return dict(zip(wanted, found, strict=True))

    async def _offset(self, queue: Queue, place: Place | At, seen: Seen) -> int:
        if place in ("first", "last"):
            return seen.extents[queue].begin if place == "first" else seen.extents[queue].end
        connection = await self._cluster.broker(queue.broker_name)
        if place == "committed":
            return await GroupOffsets(self._cluster, self._options.group).load(connection, queue, "first")
        return await begin_offset(connection, queue, place)
