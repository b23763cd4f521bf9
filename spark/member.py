"""The query as a member of the consumer group: a thread of the driver's Python process with a loop of its own.

Spark asks for offsets between batches and is silent while one runs; heartbeats, lock renewals and hand-overs go on
meanwhile. A queue whose range is in a running batch is given up only when Spark has finished the batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from ..client.cluster import Cluster
from ..client.config import OFFSET_TIMEOUT_S
from ..client.errors import ConnectionFailed, RequestTimeout
from ..client.log import get_logger
from ..client.membership import Membership
from ..protocol.bodies import Queue
from ..protocol.codes import RequestCode
from ..protocol.headers import Offset, TopicQueue, read, write
from .options import SourceOptions
from .ranges import Range, Ranges, shared_out

log = get_logger("rocketlet.spark")
T = TypeVar("T")

SETTLE_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Reading:
    """One owned queue. `position`: the next offset to plan. `done`: what the group may commit; `committed`: what it has."""

    position: int
    done: int
    committed: int
    planned: Range | None = None
    leaving: bool = False
    suspended: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Member:
    """Joins at once. Raises RocketletError if no name server can be reached.

    Every method is called from Spark's thread, and carried out in the member's.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._readings: dict[Queue, _Reading] = {}
        self._last_finished: Ranges = {}
        self._targets: dict[Queue, int] | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rocketlet member", daemon=True)
        self._thread.start()
        try:
            self._call(self._join())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    # What Spark's thread asks

    def finish(self, ranges: Ranges) -> None:
        """Spark has finished the batch of these ranges: commits them for the group."""
        self._call(self._finish(ranges))

    def plan(self, max_rows: int | None) -> dict[Queue, Range]:
        """The ranges of the next batch; empty if there is nothing new."""
        return self._call(self._plan(max_rows))

    def set_targets(self) -> None:
        """From now on nothing that arrives is read: what is there is the end (Trigger.AvailableNow)."""
        self._targets = self._call(self._ends())

    def ends(self) -> dict[Queue, int]:
        """The offset after the newest message of each owned queue."""
        return self._call(self._ends())

    def address(self, queue: Queue) -> str | None:
        return self._cluster.master(queue.broker_name)

    def find_address(self, queue: Queue) -> str:
        """The address of a queue's broker, asked for if it is not known. Raises ConnectionFailed."""
        self._call(self._cluster.find_route(queue.topic))
        address = self.address(queue)
        if address is None:
            raise ConnectionFailed(f"no name server knows the broker {queue.broker_name}, which {queue} lies on")
        return address

    def leave(self) -> None:
        """Gives up the queues and leaves the group."""
        try:
            self._call(self._leave())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    # In the member's thread

    async def _join(self) -> None:
        options = self._options
        self._cluster = Cluster(options.name_server)
        subscriptions = {item.topic: item for item in options.subscriptions}
        self._membership = Membership(
            self._cluster, options.group, subscriptions, self, start=options.start, consume_type="CONSUME_PASSIVELY"
        )
        self._cluster.start()
        try:
            await self._membership.join()
        except BaseException:
            await self._cluster.close()
            raise
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._membership.settled()
        except TimeoutError:
            log.warning("not all queues are ours yet; going on", group=options.group, owned=len(self._readings))

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

    async def _plan(self, max_rows: int | None) -> dict[Queue, Range]:
        ends = await self._ends() if self._targets is None else self._targets
        available: dict[Queue, Range] = {}
        for queue, reading in self._readings.items():
            free = not reading.leaving and not reading.suspended and reading.planned is None
            if free and queue in ends:
                available[queue] = (reading.position, max(ends[queue], reading.position))
        planned = shared_out(available, max_rows)
        for queue, span in planned.items():
            reading = self._readings[queue]
            reading.planned, reading.position = span, span[1]
            reading.finished.clear()
        return planned

    async def _ends(self) -> dict[Queue, int]:
        found = await asyncio.gather(*(self._end(queue) for queue in list(self._readings)))
        return {queue: end for queue, end in found if end is not None}

    async def _end(self, queue: Queue) -> tuple[Queue, int | None]:
        try:
            connection = await self._cluster.broker(queue.broker_name)
            ext = write(TopicQueue(queue.topic, queue.queue_id))
            answer = await connection.request(RequestCode.GET_MAX_OFFSET, ext, timeout_s=OFFSET_TIMEOUT_S)
        except (ConnectionFailed, RequestTimeout) as error:
            log.warning("queue skipped in this batch", queue=str(queue), reason=str(error))
            return queue, None
        return queue, read(Offset, answer.ext).offset

    # What membership tells (QueueUser)

    def take_queue(self, queue: Queue, offset: int, epoch: int) -> None:
        position = offset
        span = self._last_finished.get(queue)
        if span is not None and span[0] <= offset <= span[1]:
            position = span[1]  # the group's offset is older than what this query has finished
        self._readings[queue] = _Reading(position, offset, offset)

    async def give_queue(self, queue: Queue) -> int | None:
        reading = self._readings[queue]
        reading.leaving = True
        if reading.planned is not None:
            try:
                async with asyncio.timeout(self._options.release_timeout_s):
                    await reading.finished.wait()
            except TimeoutError:
                log.warning("batch still runs; its rows will be delivered again", queue=str(queue))
        return reading.done

    def lose_queue(self, queue: Queue) -> None:
        self._readings.pop(queue, None)

    def suspend_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = True

    def resume_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = False
