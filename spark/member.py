"""The query as a member of the consumer group. A queue whose range is in a running batch is given up only when Spark has
finished the batch. The retry topic of the group belongs to it: what other members failed to handle may come here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..client.lease import Lease
from ..client.membership import Membership
from ..protocol import names
from ..protocol.bodies import Queue
from ..protocol.subscription import Subscription
from .options import StreamOptions
from .planner import Planner, log
from .ranges import Range, Ranges

SETTLE_TIMEOUT_S = 15.0


@dataclass(slots=True)
class _Reading:
    """One owned queue. `position`: the next offset to plan. `done`: what the group may commit; `committed`: what it has."""

    lease: Lease
    position: int
    done: int
    committed: int
    planned: Range | None = None
    leaving: bool = False
    suspended: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_free(self) -> bool:
        return self.planned is None and not self.leaving and not self.suspended and not self.lease.is_over


class Member(Planner):
    """Plans the queues that the group has given to it; what is finished is committed for the group."""

    def __init__(self, options: StreamOptions) -> None:
        self._release_timeout_s = options.release_timeout_s
        self._readings: dict[Queue, _Reading] = {}
        self._last_finished: Ranges = {}
        super().__init__(options.read)

    async def _open(self, topics: list[str]) -> None:
        options = self._options
        start = options.start.default
        self._membership = Membership(
            self._cluster,
            options.group,
            self._subscriptions([*topics, names.retry_topic(options.group)]),
            self,
            start="first" if start == "committed" else start,
            starts=options.start.queues,
            consume_type="CONSUME_PASSIVELY",
        )
        self._known = set(topics)
        await self._membership.join()
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._membership.settled()
        except TimeoutError:
            log.warning(
                "queues_missing", group=options.group, owned=len(self._readings), hint="the query goes on without them"
            )

    def _subscriptions(self, topics: Iterable[str]) -> dict[str, Subscription]:
        return {topic: self._options.subscription(topic) for topic in topics}

    async def _leave(self) -> None:
        for reading in self._readings.values():
            reading.finished.set()  # the batch that is planned will not be finished any more
        await self._membership.leave()
        await self._cluster.close()

    async def _finish(self, ranges: Ranges) -> None:
        fresh = ranges != self._last_finished
        self._last_finished = dict(ranges)
        commits: dict[Queue, int] = {}
        for queue, reading in self._readings.items():
            span = ranges.get(queue)
            if reading.planned is not None and reading.planned != span:
                reading.position = reading.planned[0]  # Spark did not run what was planned
            elif span is not None and fresh and span[0] <= reading.position <= span[1]:
                reading.position = span[1]
                reading.done = max(reading.done, span[1])
            reading.planned = None
            reading.finished.set()
            if reading.done > reading.committed:
                commits[queue] = reading.done
        for queue in await self._membership.commit(commits):
            if queue in self._readings:
                self._readings[queue].committed = commits[queue]

    async def _plan(self, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]:
        new = await self._new_topics(self._known)
        if new:
            self._known.update(new)
            await self._membership.subscribe(self._subscriptions(new))
        ends = await self._ends(self._positions())
        available = {
            queue: (position, max(ends[queue], position))
            for queue, position in self._positions().items()
            if queue in ends
        }
        cut = await self._cut(available, max_rows, max_bytes)
        planned: dict[Queue, Range] = {}
        for queue, span in cut.items():
            reading = self._readings.get(queue)
            if reading is not None and reading.is_free and reading.position == span[0]:
                reading.planned, reading.position = span, span[1]
                reading.finished.clear()
                planned[queue] = span
        return planned

    def _positions(self) -> dict[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items() if reading.is_free}

    def _planned(self) -> dict[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items()}

    def _queues(self) -> list[Queue]:
        return list(self._readings)

    def _is_cut_off(self) -> bool:
        return bool(self._readings) and all(reading.suspended for reading in self._readings.values())

    # What membership tells (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        position = offset
        span = self._last_finished.get(queue)
        if span is not None and span[0] <= offset <= span[1]:
            position = span[1]  # the group's offset is older than what this query has finished
        self._readings[queue] = _Reading(lease, position, offset, offset)

    async def give_queue(self, queue: Queue) -> int | None:
        reading = self._readings[queue]
        reading.leaving = True
        if reading.planned is not None:
            try:
                async with asyncio.timeout(self._release_timeout_s):
                    await reading.finished.wait()
            except TimeoutError:
                log.warning("batch_still_running", queue=str(queue), hint="its rows will be delivered again")
        return reading.done

    def lose_queue(self, queue: Queue) -> None:
        self._readings.pop(queue, None)

    def is_running(self, queue: Queue) -> bool:
        return False  # a batch that still runs commits under an epoch that is over

    async def ended(self, queue: Queue) -> None: ...

    def suspend_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = True

    def resume_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = False
