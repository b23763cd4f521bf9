"""A query without membership, as with Kafka's source: the query shares its queues with nobody, and only the checkpoint
holds offsets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..client.errors import ConfigError, ConnectionFailed, RequestTimeout
from ..client.wire.cluster import stored_since
from ..protocol.names import Queue
from .checkpoint import EMPTY, MicroBatch, Part, Ranges
from .extents import BrokerOffsets, Extent
from .options import ReadOptions
from .positions import check_start, offsets_at
from .queues import Course
from .view import View


class Standalone:
    """The queues of a query without membership: all queues of its topics, or those of the option `assign`. Each batch
    names every queue, so that the checkpoint has the offset of each, even of queues that the options do not name any more."""

    is_member = False

    def __init__(self, options: ReadOptions, resumed: MicroBatch = EMPTY) -> None:
        self._options = options
        self._resumed = resumed
        self._read_to: dict[Queue, int] = {}
        self._planned_to: dict[Queue, int] = {}
        self._last: MicroBatch | None = None

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        self._view, self._course = view, course
        self._known = set(topics)
        queues = set(self.queues())
        absent = self._options.assigned - queues
        if absent and not self._resumed.ranges:
            raise ConfigError(f"assign names {min(absent)}, which does not exist")
        if self._resumed.membership is None:
            await check_start(view, topics)

    async def close(self) -> None:
        await self._view.close()

    async def wait_for_queues(self) -> None: ...

    def queues(self) -> list[Queue]:
        queues = self._view.routed(sorted(self._known))
        return [queue for queue in queues if queue in self._options.assigned] if self._options.assigned else queues

    def free(self) -> Mapping[Queue, int]:
        return {queue: position for queue, position in self._read_to.items() if self._options.reads(queue)}

    def planned(self) -> Mapping[Queue, int]:
        return {**self.free(), **self._planned_to}

    def move(self, queue: Queue, position: int) -> None:
        self._read_to[queue] = position

    def forget(self, part: Part) -> None: ...

    async def finish(self, batch: MicroBatch) -> None:
        """Continue at the ends of the batch's ranges. A query without a checkpoint starts where its options say."""
        if batch == self._last:
            return
        is_new = self._last is None and batch.membership is None and not batch.ranges
        self._read_to = {queue: end for queue, (_, end) in batch.ranges.items()}
        self._last = batch
        if is_new:
            queues = self.queues()
            if self._options.start.default == "last":
                self._course.start = await self._view.start(self._known)
            self._read_to |= await offsets_at(self._view, queues, self._options.start, await self._view.all(queues))

    async def discover(self) -> None:
        self._known.update(await self._view.new_topics(self._known))

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Set the start of new queues. Queues that are in no route keep their offset until they are back."""
        for queue in self.queues():
            if queue in seen.extents and queue not in self._read_to:
                with suppress(
                    ConnectionFailed, RequestTimeout
                ):  # its broker is unreachable again; the next batch retries
                    self._read_to[queue] = await self._begin_of(queue, seen.extents[queue])

    async def _begin_of(self, queue: Queue, extent: Extent) -> int:
        start = self._course.start_of(queue)
        if start == "first" or extent.begin == extent.end:
            return extent.begin
        connection = await self._view.cluster.broker(queue.broker_name)
        return max(await stored_since(connection, queue, start), extent.begin)

    async def place(self, queue: Queue) -> int:
        return self._read_to.get(queue, 0)

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        return {queue: at for queue, at in self.free().items() if queue not in seen.extents}

    def take(self, cut: Ranges) -> Ranges:
        self._planned_to = {queue: end for queue, (_, end) in cut.items()}
        if not cut and self._last is not None and self._read_to.keys() == self._last.ranges.keys():
            return {}
        return {queue: cut.get(queue, (position, position)) for queue, position in self._read_to.items()}
