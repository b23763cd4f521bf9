"""A query as a member of a consumer group.

A queue whose range is in a running batch is released after Spark has finished the batch, or after `releaseTimeoutMs`.
The query also subscribes to the group's retry topic, because messages that other members failed to handle may be
redelivered to the query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ..client.config import At, Start
from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..client.member.membership import Membership
from ..client.member.offsets import GroupOffsets
from ..client.message import Lease
from ..client.wire.connection import Connection
from ..protocol import names
from ..protocol.admin_bodies import decode_offsets
from ..protocol.bodies import BodyError
from ..protocol.codes import RequestCode
from ..protocol.frame import Frame
from ..protocol.names import Queue, Subscription
from .checkpoint import EMPTY, MicroBatch, Part, Ranges
from .config import AWAY_POLL_S
from .extents import BrokerOffsets
from .member_queues import IN_BATCH, MemberQueueEvent, MemberQueues, MemberQueueState
from .options import StreamOptions
from .patience import FailureTimeout
from .positions import check_start
from .queues import Course
from .view import View

log = get_logger("rocketlet.spark")


class QueryMember:
    """Queues that the group has assigned to the query. Finished batches are committed for the group."""

    is_member = True

    def __init__(self, options: StreamOptions, resumed: MicroBatch = EMPTY, *, is_unfinished: bool = False) -> None:
        """Args:
        options: options of the query
        resumed: newest batch in the checkpoint
        is_unfinished: True if Spark runs the resumed batch again, so that its queues are in a running batch
        """
        self._options = options.read
        self._resumed = resumed
        self._is_unfinished = is_unfinished
        self._release_timeout_s = options.release_timeout_s

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        self._view, self._course = view, course
        self.table = MemberQueues(self._resumed, course, is_unfinished=self._is_unfinished)
        options = self._options
        self._offsets = GroupOffsets(view.cluster, options.group)
        start: Start = "first"
        starts: Mapping[Queue, Start | At]
        if self._resumed.membership is None:
            await check_start(view, topics)
            if options.start.default == "last":
                course.start = await view.start(topics)
            starts = options.start.queues
            start = "first" if options.start.default == "committed" else options.start.default
        else:  # the start options apply to a new query only
            starts = _ResumedStarts(course, await self._without_group_offset())
        self._membership = Membership(
            view.cluster,
            options.group,
            self._subscriptions([*topics, names.retry_topic(options.group)]),
            self,
            start=start,
            starts=starts,
            consume_type="CONSUME_PASSIVELY",
        )
        view.cluster.answer(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._reset)
        self._known = set(topics)
        await self._membership.join()
        try:
            async with asyncio.timeout(options.limits.assignment_timeout_s):
                await self._membership.rebalanced()
        except TimeoutError:
            log.warning(
                "queues_missing",
                group=options.group,
                owned=len(self.queues()),
                reason=await self._rebalance_fault(),
                hint="the query continues without them",
            )

    async def _without_group_offset(self) -> dict[Queue, At]:
        """Return the offsets of the checkpoint in queues that have no offset of the group, which was deleted. A topic that
        was recreated, or that holds fewer messages now, does not count."""
        ends = dict(self._course.ends)
        if self._is_unfinished:  # Spark runs its ranges again
            ends |= {queue: begin for queue, (begin, _) in self._resumed.ranges.items()}
        routed = set(self._view.routed(sorted({queue.topic for queue in ends})))
        seen = await self._view.extents.of(ends.keys() & routed)
        same = [
            queue
            for queue, extent in seen.extents.items()
            if queue in ends
            and extent.begin <= ends[queue] <= extent.end
            and self._course.is_same_topic(queue, seen.marks)
        ]
        found = await asyncio.gather(*(self._has_group_offset(queue) for queue in same))
        lost = {queue: At(ends[queue]) for queue, is_there in zip(same, found, strict=True) if not is_there}
        if lost:
            log.warning(
                "group_offsets_missing",
                group=self._options.group,
                queues=len(lost),
                first=str(min(lost)),
                hint="the group was deleted; the query continues where its checkpoint ends, and commits that for the group",
            )
        return lost

    async def _has_group_offset(self, queue: Queue) -> bool:
        try:
            return await self._offsets.committed(queue) is not None
        except (ConnectionFailed, RequestTimeout):
            return True  # the membership asks the broker again

    def _subscriptions(self, topics: Iterable[str]) -> dict[str, Subscription]:
        return {topic: self._options.subscription(topic) for topic in topics}

    async def close(self) -> None:
        for item in self.table.owned().values():
            item.ended.set()  # the planned batch will not be finished any more
        try:
            await self._membership.leave()
        finally:
            await self._view.close()

    async def finish(self, batch: MicroBatch) -> None:
        self.table.finish(batch)
        await self._commit()
        self.table.apply_resets()
        await self._commit()

    async def _commit(self) -> None:
        commits = self.table.to_commit()
        for queue in await self._membership.commit(commits) if commits else ():
            self.table[queue].committed = commits[queue]

    async def discover(self) -> None:
        new = await self._view.new_topics(self._known)
        if new:
            self._known.update(new)
            await self._membership.subscribe(self._subscriptions(new))

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Set the positions of newly assigned queues, and commit."""
        self.table.locate(seen)
        await self._commit()

    def take(self, cut: Ranges) -> Ranges:
        return self.table.take(cut)

    def move(self, queue: Queue, position: int) -> None:
        self.table[queue].move(position)

    def forget(self, part: Part) -> None:
        self.table.forget(part)

    def free(self) -> Mapping[Queue, int]:
        return self.table.free()

    def planned(self) -> Mapping[Queue, int]:
        return self.table.positions()

    def queues(self) -> list[Queue]:
        return list(self.table.owned())

    async def wait_for_queues(self) -> None:
        """Wait until the group has assigned all queues: a query that ends on its own would skip queues that are
        assigned later. Do not wait longer than `pollTimeoutMs` for a broker."""
        failing = FailureTimeout(self._options.poll_timeout_s)
        try:
            async with asyncio.timeout(self._options.limits.share_timeout_s):
                while not self._membership.is_rebalanced:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(AWAY_POLL_S):
                            await self._membership.rebalanced()
                            return
                    if not await self._away():
                        failing.renew()
                    elif failing.is_over():
                        break
                else:
                    return
        except TimeoutError:
            pass
        raise RocketletError(
            f"the group {self._options.group} has not assigned this query its queues: {await self._rebalance_fault()}; try "
            "later"
        )

    async def _rebalance_fault(self) -> str:
        away = await self._away()
        if away:
            return f"the broker {min(away)} does not respond; start it"
        return self._membership.rebalance_fault()

    async def _away(self) -> set[str]:
        """Return the names of the brokers in the routes that do not respond."""
        extents = self._view.extents
        await extents.of(self._view.routed(sorted(self._known)))
        return extents.away

    async def place(self, queue: Queue) -> int:
        """Return the group's committed offset, or the offset that this query has finished if that is higher."""
        connection = await self._view.cluster.broker(queue.broker_name)
        return max(await self._offsets.load(connection, queue, "first"), self.table.finished(queue))

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        if self._membership.is_rebalanced:
            self.table.forget_cut_off()
        return self.table.out_of_reach(seen)

    # Assigned and released queues (the QueueUser protocol of Membership)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        self.table.assign(queue, offset, lease)

    async def give_queue(self, queue: Queue) -> int | None:
        item = self.table[queue]
        item.handle(MemberQueueEvent.RELEASE)
        if item.state in IN_BATCH:
            try:
                async with asyncio.timeout(self._release_timeout_s):
                    await item.ended.wait()
            except TimeoutError:
                hint = (
                    "its rows will be delivered again: raise releaseTimeoutMs above the time of a batch; without "
                    "rocketlet.spark.register, and with Spark Connect, also above the trigger interval"
                )
                log.warning("batch_still_running", queue=str(queue), hint=hint)
        done = item.done if item.reset_to is None else item.reset_to
        return None if done == item.committed else done

    def is_pull_committing(self, queue: Queue) -> bool:
        return False  # pulls of tasks carry no commit offset

    def lose_queue(self, queue: Queue) -> None:
        if self.table[queue].state is not MemberQueueState.AWAY:
            self.table.lose(queue)

    def is_running(self, queue: Queue) -> bool:
        return False  # the commit of a batch that still runs has the epoch of the old lease, which Rocketlet's brokers reject

    async def ended(self, queue: Queue) -> None: ...

    def suspend_queue(self, queue: Queue) -> None:
        self.table[queue].is_suspended = True

    def resume_queue(self, queue: Queue) -> None:
        self.table[queue].is_suspended = False

    # Requests of an administrator

    def _reset(self, connection: Connection, frame: Frame) -> None:
        """RESET_CONSUMER_CLIENT_OFFSET: continue at these offsets; queues in a running batch do so after it is
        finished."""
        try:
            offsets = decode_offsets(frame.body) if frame.ext.get("group") == self._options.group else {}
        except BodyError as error:
            log.warning("request_refused", reason=str(error))
            return
        for queue, offset in offsets.items():
            self.table.reset(queue, offset)
        if offsets:
            self._resetting = asyncio.get_running_loop().create_task(self._commit())


class _ResumedStarts(Mapping[Queue, Start | At]):
    """The start of each queue for which the group has no offset, in a query that continues from a checkpoint."""

    def __init__(self, course: Course, ends: Mapping[Queue, At]) -> None:
        self._course = course
        self._ends = ends

    def __getitem__(self, queue: Queue) -> Start | At:
        return self._ends.get(queue) or self._course.start_of(queue)

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)
