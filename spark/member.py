"""The query as a member of the consumer group. A queue whose range is in a running batch is given up only when Spark has
finished the batch. The retry topic of the group belongs to it: what other members failed to handle may come here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..client.errors import RocketletError
from ..client.lease import Lease
from ..client.log import get_logger
from ..client.member.membership import Membership
from ..client.wire.connection import Connection
from ..protocol import names
from ..protocol.admin_bodies import decode_offsets
from ..protocol.codes import RequestCode
from ..protocol.frame import Frame
from ..protocol.queue import Queue
from ..protocol.schema import BodyError
from ..protocol.subscription import Subscription
from .checkpoint import EMPTY, Batch, Mark, Part, part_of
from .config import SETTLE_TIMEOUT_S, SHARE_TIMEOUT_S
from .extents import Seen
from .options import StreamOptions
from .ranges import Range, Ranges
from .share import Course
from .starts import check_start
from .view import View

log = get_logger("rocketlet.spark")


@dataclass(slots=True)
class _Reading:
    """One owned queue. `position`: the next offset to plan. `done`: up to where the group may commit; `committed`: up to
    where it has; `is_fresh`: not planned since it was taken; `reset_to`: where an administrator wants it to continue.
    """

    lease: Lease
    position: int
    done: int
    committed: int
    is_fresh: bool = True
    reset_to: int | None = None
    planned: Range | None = None
    leaving: bool = False
    suspended: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_cut_off(self) -> bool:
        return self.suspended or self.lease.is_over

    @property
    def is_free(self) -> bool:
        return self.planned is None and not self.leaving and not self.is_cut_off


class QueryMember:
    """The queues that the group has given to the query. Commits finished batches for the group."""

    is_member = True

    def __init__(self, options: StreamOptions, resumed: Batch = EMPTY, *, is_unfinished: bool = False) -> None:
        """is_unfinished: Spark runs the resumed batch again; its queues are given up only when it is finished."""
        self._options = options.read
        self._resumed = resumed
        self._rerun: Ranges = resumed.ranges if is_unfinished else {}
        self._release_timeout_s = options.release_timeout_s
        self._readings: dict[Queue, _Reading] = {}
        self._finished: dict[Queue, int] = {}
        self._cut_off: dict[Queue, int] = {}  # lost with their brokers: where they go on if they come back
        self._last = EMPTY
        self.missing: set[Queue] = set()

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        self._view, self._course = view, course
        options = self._options
        is_resumed = self._resumed.membership is not None
        if not is_resumed:
            await check_start(view, set(view.routed(topics)))
        start = "first" if is_resumed else options.start.default  # where a query begins is said only once
        self._membership = Membership(
            view.cluster,
            options.group,
            self._subscriptions([*topics, names.retry_topic(options.group)]),
            self,
            start="first" if start == "committed" else start,
            starts={} if is_resumed else options.start.queues,
            consume_type="CONSUME_PASSIVELY",
        )
        view.cluster.answer(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset)
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

    async def close(self) -> None:
        for reading in self._readings.values():
            reading.finished.set()  # the batch that is planned will not be finished any more
        try:
            await self._membership.leave()
        finally:
            await self._view.close()

    async def finish(self, batch: Batch) -> None:
        fresh, self._last = batch != self._last, batch
        self._rerun = {}
        ranges = batch.ranges
        for queue, reading in self._readings.items():
            span = ranges.get(queue)
            is_rerun = reading.is_fresh and reading.planned is not None
            if reading.planned is not None and reading.planned != span:
                reading.position = reading.planned[0]  # Spark did not run the planned batch
            elif (
                span is not None
                and fresh
                and (is_rerun or not reading.is_fresh)
                and span[0] <= reading.position <= span[1]
            ):
                reading.position = span[1]
                reading.done = max(reading.done, span[1])
            reading.planned = None
            reading.finished.set()
        if fresh:
            self._finished |= {queue: end for queue, (_, end) in ranges.items()}
        for queue, reading in self._readings.items():
            if reading.reset_to is not None:
                self._go_on_at(queue, reading.reset_to)
        await self._commit()

    async def _commit(self) -> None:
        commits = {
            queue: reading.done for queue, reading in self._readings.items() if reading.done != reading.committed
        }
        for queue in await self._membership.commit(commits) if commits else ():
            if queue in self._readings:
                self._readings[queue].committed = commits[queue]

    async def discover(self) -> None:
        new = await self._view.new_topics(self._known)
        if new:
            self._known.update(new)
            await self._membership.subscribe(self._subscriptions(new))

    async def settle(self, seen: Seen) -> None:
        """A queue that was taken begins at the group's offset. If that is older than what this query has finished because
        it was ended before it could commit, it begins where it finished."""
        for queue, reading in self._readings.items():
            if reading.is_fresh and queue in seen.extents:
                reading.is_fresh = False
                reading.position = reading.done = self._resumed_at(queue, reading.position, seen)
        for part, mark in seen.marks.items():
            if mark.rewinds != self._course.marks.get(part, mark).rewinds:
                self._forget_finished(part)
        await self._commit()

    def _forget_finished(self, part: Part) -> None:
        """After a reset, a queue that comes back continues at the group's offset."""
        for queue in [queue for queue in self._finished if part_of(queue) == part]:
            del self._finished[queue]

    def _resumed_at(self, queue: Queue, offset: int, seen: Seen) -> int:
        finished = self._finished.get(queue)
        part = part_of(queue)
        before, now = self._course.marks.get(part, Mark()), seen.marks.get(part, Mark())
        if finished is None or offset >= finished or before.identity != now.identity:
            return offset
        begin = self._last.ranges.get(queue, (finished, finished))[0]
        is_reset = before.rewinds != now.rewinds if now.identity else offset < begin
        if is_reset:
            self._course.rewound += 1
            log.info("offset_reset_while_away", queue=str(queue), finished=finished, offset=offset)
        return offset if is_reset else finished

    def take(self, cut: Ranges) -> Ranges:
        planned: dict[Queue, Range] = {}
        for queue, span in cut.items():
            reading = self._readings.get(queue)
            if reading is not None and reading.is_free and reading.position == span[0]:
                reading.planned, reading.position = span, span[1]
                reading.finished.clear()
                planned[queue] = span
        return planned

    def move(self, queue: Queue, position: int) -> None:
        reading = self._readings[queue]
        reading.position = reading.done = position
        reading.reset_to = None
        self._finished.pop(queue, None)

    def _go_on_at(self, queue: Queue, position: int) -> None:
        """An administrator has reset it."""
        self._course.rewind(queue)
        self.move(queue, position)

    def free(self) -> Mapping[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items() if reading.is_free}

    def planned(self) -> Mapping[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items()}

    def queues(self) -> list[Queue]:
        return list(self._readings)

    async def settle_all(self) -> None:
        """The query would skip queues that come later."""
        try:
            async with asyncio.timeout(SHARE_TIMEOUT_S):
                await self._membership.settled()
        except TimeoutError:
            raise RocketletError(
                f"the group {self._options.group} has not given this query its queues within {SHARE_TIMEOUT_S:.0f} s: "
                f"{self._membership.unsettled()}; try later"
            ) from None

    def out_of_reach(self, seen: Seen) -> Mapping[Queue, int]:
        if self._membership.is_settled:
            self._cut_off.clear()  # another member has them
        return self._cut_off | {
            queue: reading.position
            for queue, reading in self._readings.items()
            if not reading.leaving and (reading.is_cut_off or queue not in seen.extents)
        }

    # Queues that come and go (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self._cut_off.pop(queue, None)
        reading = self._readings[queue] = _Reading(lease, offset, offset, offset)
        span = self._rerun.get(queue)
        if span is not None and span[0] <= offset <= span[1]:
            reading.planned = span

    async def give_queue(self, queue: Queue) -> int | None:
        reading = self._readings[queue]
        reading.leaving = True
        if reading.planned is not None:
            try:
                async with asyncio.timeout(self._release_timeout_s):
                    await reading.finished.wait()
            except TimeoutError:
                hint = (
                    "its rows will be delivered again: raise releaseTimeoutMs above the time of a batch; without "
                    "rocketlet.spark.register, and with Spark Connect, also above the trigger interval"
                )
                log.warning("batch_still_running", queue=str(queue), hint=hint)
        done = reading.done if reading.reset_to is None else reading.reset_to
        return None if done == reading.committed else done

    def is_pull_committing(self, queue: Queue) -> bool:
        return False  # its pulls carry no offsets

    def lose_queue(self, queue: Queue) -> None:
        reading = self._readings.pop(queue, None)
        if reading is not None and reading.is_cut_off and not reading.leaving:
            self._cut_off[queue] = reading.position

    def is_running(self, queue: Queue) -> bool:
        return False  # a batch that still runs commits under an epoch that is over

    async def ended(self, queue: Queue) -> None: ...

    def suspend_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = True

    def resume_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = False

    # Requests of an administrator

    def _reset(self, connection: Connection, frame: Frame) -> None:
        """RESET_CONSUMER_CLIENT_OFFSET: our queues continue there; those in a running batch when it is finished."""
        try:
            offsets = decode_offsets(frame.body) if frame.ext.get("group") == self._options.group else {}
        except BodyError as error:
            log.warning("request_refused", reason=str(error))
            return
        for queue, offset in offsets.items():
            reading = self._readings.get(queue)
            if reading is None:
                continue
            log.info("offset_reset", queue=str(queue), old=reading.position, new=offset)
            if reading.planned is None:
                self._go_on_at(queue, offset)
            else:
                reading.reset_to = offset
        self._resetting = asyncio.get_running_loop().create_task(self._commit())
