"""Reading without membership, like Kafka's source: all queues, with offsets in the checkpoint only."""

from __future__ import annotations

from collections.abc import Mapping

from ..client.errors import ConfigError
from ..client.log import get_logger
from ..protocol.queue import Queue
from .checkpoint import EMPTY, Batch
from .extents import Seen
from .loss import elsewhere
from .options import ReadOptions
from .ranges import Ranges
from .share import Course
from .starts import check_start, offsets_at
from .view import View

log = get_logger("rocketlet.spark")


class Standalone:
    """Every queue of its topics. Each batch names all of them, so the checkpoint has the offset of each."""

    is_member = False

    def __init__(self, options: ReadOptions, resumed: Batch = EMPTY) -> None:
        self._options = options
        self._resumed = resumed
        self._read_to: dict[Queue, int] = {}
        self._planned_to: dict[Queue, int] = {}
        self._last: Batch | None = None
        self._told_elsewhere: dict[str, set[Queue]] = {}
        self.missing: set[Queue] = set()

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        self._view = view
        self._known = set(topics)
        queues = set(self.queues())
        absent = self._options.assigned - queues
        if absent and not self._resumed.ranges:
            raise ConfigError(f"assign names {min(absent)}, which does not exist")
        if self._resumed.membership is None:
            await check_start(view, queues)

    async def close(self) -> None:
        await self._view.close()

    async def settle_all(self) -> None: ...

    def queues(self) -> list[Queue]:
        queues = self._view.routed(sorted(self._known))
        return [queue for queue in queues if queue in self._options.assigned] if self._options.assigned else queues

    def free(self) -> Mapping[Queue, int]:
        return self._read_to

    def planned(self) -> Mapping[Queue, int]:
        return self._read_to | self._planned_to

    def move(self, queue: Queue, position: int) -> None:
        self._read_to[queue] = position

    async def finish(self, batch: Batch) -> None:
        """Goes on where these ranges end. A query without a checkpoint begins where the options say, what comes later at its
        start."""
        if batch == self._last:
            return
        is_new = self._last is None and not batch.ranges
        self._read_to = {queue: end for queue, (_, end) in batch.ranges.items()}
        self._last = batch
        if is_new:
            queues = self.queues()
            self._read_to |= await offsets_at(self._view, queues, self._options.start, await self._view.all(queues))

    async def discover(self) -> None:
        self._known.update(await self._view.new_topics(self._known))

    async def settle(self, seen: Seen) -> None:
        """Queues that are new begin at their start. Those that the route lacks keep their place, for when they are back."""
        queues = self.queues()
        fresh = [queue for queue in queues if queue in seen.extents and queue not in self._read_to]
        missing = self._read_to.keys() - set(queues)
        if missing and fresh:
            self._check_cluster(missing, set(queues))
        self._read_to |= {queue: seen.extents[queue].begin for queue in fresh}
        for queue in sorted(missing - self.missing):
            log.warning(
                "queue_not_in_route",
                queue=str(queue),
                offset=self._read_to[queue],
                hint="it is read again when it is back",
            )
        self.missing = missing

    def _check_cluster(self, missing: set[Queue], queues: set[Queue]) -> None:
        """Raises DataLossError where no broker of a topic in the checkpoint is known, and others have the topic."""
        for topic in sorted({queue.topic for queue in queues}):
            known = {queue for queue in self._read_to if queue.topic == topic}
            if known and known <= missing and known != self._told_elsewhere.get(topic):
                self._told_elsewhere[topic] = known
                elsewhere({queue.broker_name for queue in known}, topic, fail=self._options.fail_on_data_loss)

    def out_of_reach(self, seen: Seen) -> Mapping[Queue, int]:
        return {queue: at for queue, at in self._read_to.items() if queue not in seen.extents}

    def take(self, cut: Ranges) -> Ranges:
        self._planned_to = {queue: end for queue, (_, end) in cut.items()}
        if not cut and self._last is not None and self._read_to.keys() == self._last.ranges.keys():
            return {}
        return {queue: cut.get(queue, (position, position)) for queue, position in self._read_to.items()}
