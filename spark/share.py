"""The queues that a query reads, as a member of a group or standalone, and the offsets that these queues hold."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..client.config import OFFSET_TIMEOUT_S, At, ClientLimits
from ..client.consuming.queues import check_filters
from ..client.errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..client.member.membership import Membership
from ..client.member.offsets import GroupOffsets, begin_offset
from ..client.message import Lease
from ..client.wire.cluster import ClusterView, by_broker, new_client_id, pull_header, stored_since
from ..client.wire.connection import Connection, body_of, header_of
from ..client.wire.late_queues import time_before
from ..protocol import names
from ..protocol.admin_bodies import decode_offsets, decode_topic_stats
from ..protocol.allocation import subscribe_queues
from ..protocol.bodies import BodyError, decode_cluster, decode_topic_list
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.config import MAX_TOPICS_ASKED
from ..protocol.frame import Frame
from ..protocol.group_bodies import TopicExtent, decode_extents, encode_topics
from ..protocol.headers import BrokerTimes, Offset, OptionalGroup, PullMessageResult, TopicName, TopicQueue, write
from ..protocol.message import decode_records
from ..protocol.names import TOOLS_GROUP, Queue, Subscription, counted
from .checkpoint import EMPTY, UNMARKED, Fingerprint, MicroBatch, Part, Range, Ranges, TopicSnapshot, part_of
from .config import (
    DISCOVERY_INTERVAL_S,
    FINGERPRINTS,
    MAX_PATIENCE_STEP_S,
    NEW_QUEUES_S,
    ROUTE_RETRY_S,
    SAMPLE_MESSAGES,
    SETTLE_TIMEOUT_S,
    SHARE_TIMEOUT_S,
    TOPIC_TIMEOUT_S,
)
from .options import ReadOptions, StartingOffsets, StartPlace, StreamOptions
from .worker import DataLossError

log = get_logger("rocketlet.spark")


# ------------------------------------------------------------------------------
# The queues that a query reads, and the next offset of each. `QueryMember` and `Standalone` implement `OwnedQueues`.
#
# View.open ──> open ──> apply_changes ──> free ──> take ──> finish ──┐
#                              ^                                      │
#                              └─────────── batch after batch ────────┘


@dataclass(slots=True)
class Course:
    """Progress of a query.

    Attributes:
        marks: the latest mark of each topic on each broker, which identifies the topic
        read_ends: the end of the last planned range of each queue
        rewound: number of times that a queue was moved to another offset than the end of its last range
        messages: fingerprints of up to `FINGERPRINTS` messages of each topic and broker, oldest first
        began_ms: time at which the query started, in ms since the epoch, if its default start is `latest`; else 0
    """

    marks: dict[Part, TopicSnapshot] = field(default_factory=dict)
    read_ends: dict[Queue, int] = field(default_factory=dict)
    rewound: int = 0
    messages: dict[Queue, Fingerprint] = field(default_factory=dict)
    began_ms: int = 0

    @classmethod
    def after(cls, batch: MicroBatch) -> Course:
        """Return the progress of a query after a batch."""
        read_ends = {queue: end for queue, (_, end) in batch.ranges.items()}
        return cls(dict(batch.marks), read_ends, batch.rewound, dict(batch.messages), batch.began_ms)

    def begin_at_latest(self) -> None:
        """Record that the query starts now, and that its default start is `latest`."""
        self.began_ms = int(time.time() * 1000)

    def add_message(self, queue: Queue, message: Fingerprint) -> None:
        """Add the fingerprint of a message, and drop the oldest fingerprints of its topic and broker beyond
        `FINGERPRINTS`."""
        self.messages.pop(queue, None)
        self.messages[queue] = message
        for oldest in [each for each in self.messages if part_of(each) == part_of(queue)][:-FINGERPRINTS]:
            del self.messages[oldest]

    def rewind(self, queue: Queue) -> None:
        """Record that a queue moves to another offset, because messages are lost, the topic was recreated, or an
        administrator has reset the offset."""
        self.rewound += 1
        self.read_ends.pop(queue, None)
        self.messages.pop(queue, None)


class OwnedQueues(Protocol):
    """Queues of a query. All methods are called in the planner's event loop."""

    is_member: bool

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        """Determine the queues that the query reads. Raises ConfigError, RocketletError."""

    async def close(self) -> None: ...

    async def wait_for_queues(self) -> None:
        """Wait until all queues of the query are assigned. Raises RocketletError if that takes longer than
        `SHARE_TIMEOUT_S`."""

    async def discover(self) -> None:
        """Subscribe to new topics that match the pattern."""

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Apply what has changed since the last batch, such as new queues and, for a member, reset offsets."""

    async def finish(self, batch: MicroBatch) -> None:
        """Record that Spark has finished a batch, and commit its end for the group if the query is a member."""

    def queues(self) -> list[Queue]:
        """Return all queues that the query reads."""

    def free(self) -> Mapping[Queue, int]:
        """Return the next offset to plan of each queue that the next batch may contain."""

    def planned(self) -> Mapping[Queue, int]:
        """Return the offset after the last planned message of each queue."""

    async def place(self, queue: Queue) -> int:
        """Return the next offset to read of a queue that is in no route. Raises RocketletError."""

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        """Return the next offset to plan of each queue that cannot be planned now, because its broker is unreachable or
        its lease is suspended or has expired."""

    def take(self, cut: Ranges) -> Ranges:
        """Reserve ranges for the next batch and return them: those of `cut` that can still be read. An empty result
        means that there is no batch."""

    def move(self, queue: Queue, position: int) -> None:
        """Set the next offset to plan of a queue."""


# ------------------------------------------------------------------------------
# The query as a member of the consumer group. A queue whose range is in a running batch is released after Spark has
# finished the batch, or after `releaseTimeoutMs`. The query also subscribes to the group's retry topic, because messages
# that other members failed to handle may be redelivered to the query.


@dataclass(slots=True)
class _Reading:
    """A queue that the query owns as a member of the group.

    Attributes:
        position: the next offset to plan
        done: the offset that the group may commit
        committed: the offset that the group has committed
        is_fresh: True until the first batch after the queue was assigned is planned while its broker is reachable
        reset_to: the offset at which an administrator wants the queue to continue, once the running batch is finished
        planned: the range in the running batch
        leaving: True once the queue is being released
        suspended: True while the membership has suspended the queue
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
        self._rerun: Ranges = resumed.ranges if is_unfinished else {}
        self._release_timeout_s = options.release_timeout_s
        self._readings: dict[Queue, _Reading] = {}
        self._finished: dict[Queue, int] = {}
        # positions of queues whose leases have expired, for when they are assigned again
        self._cut_off: dict[Queue, int] = {}
        self._last = EMPTY

    async def open(self, view: View, course: Course, topics: list[str]) -> None:
        self._view, self._course = view, course
        options = self._options
        is_resumed = self._resumed.membership is not None
        if not is_resumed:
            await check_start(view, set(view.routed(topics)))
        if not is_resumed and options.start.default == "last":
            course.begin_at_latest()
        # The start options apply to a new query only. A resumed one reads new queues from their first message, or from
        # the time at which it started at the latest messages.
        start = (course.began_ms or "first") if is_resumed else options.start.default
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
                await self._membership.rebalanced()
        except TimeoutError:
            log.warning(
                "queues_missing",
                group=options.group,
                owned=len(self._readings),
                hint="the query continues without them",
            )

    def _subscriptions(self, topics: Iterable[str]) -> dict[str, Subscription]:
        return {topic: self._options.subscription(topic) for topic in topics}

    async def close(self) -> None:
        for reading in self._readings.values():
            reading.finished.set()  # the planned batch will not be finished any more
        try:
            await self._membership.leave()
        finally:
            await self._view.close()

    async def finish(self, batch: MicroBatch) -> None:
        fresh, self._last = batch != self._last, batch
        self._rerun = {}
        ranges = batch.ranges
        for queue, reading in self._readings.items():
            span = ranges.get(queue)
            is_rerun = reading.is_fresh and reading.planned is not None
            if reading.planned is not None and reading.planned != span:
                reading.position = reading.planned[0]  # Spark ran another batch than the planned one
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
                self._resume_at(queue, reading.reset_to)
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

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Set the start of newly assigned queues, and commit.

        A queue starts at the group's offset, unless this query has finished a later offset that it could not commit
        before its lease ended, and the group's offset was not reset since. Then it continues at the finished offset.
        """
        for queue, reading in self._readings.items():
            if reading.is_fresh and queue in seen.extents:
                reading.is_fresh = False
                reading.position = reading.done = self._resumed_at(queue, reading.position, seen)
        for part, mark in seen.marks.items():
            if mark.rewinds != self._course.marks.get(part, mark).rewinds:
                self._forget_finished(part)
        await self._commit()

    def _forget_finished(self, part: Part) -> None:
        """Forget the finished offsets of a topic on a broker, so that its queues start at the group's offset, which was
        reset."""
        for queue in [queue for queue in self._finished if part_of(queue) == part]:
            del self._finished[queue]

    def _resumed_at(self, queue: Queue, offset: int, seen: BrokerOffsets) -> int:
        finished = self._finished.get(queue)
        part = part_of(queue)
        before, now = self._course.marks.get(part, TopicSnapshot()), seen.marks.get(part, TopicSnapshot())
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

    def _resume_at(self, queue: Queue, position: int) -> None:
        """Continue at an offset that an administrator has set."""
        self._course.rewind(queue)
        self.move(queue, position)

    def free(self) -> Mapping[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items() if reading.is_free}

    def planned(self) -> Mapping[Queue, int]:
        return {queue: reading.position for queue, reading in self._readings.items()}

    def queues(self) -> list[Queue]:
        return list(self._readings)

    async def wait_for_queues(self) -> None:
        """Wait until the group has assigned all queues: a query that ends on its own would skip queues that are
        assigned later."""
        try:
            async with asyncio.timeout(SHARE_TIMEOUT_S):
                await self._membership.rebalanced()
        except TimeoutError:
            raise RocketletError(
                f"the group {self._options.group} has not assigned this query its queues within {SHARE_TIMEOUT_S:.0f} s: "
                f"{self._membership.rebalance_fault()}; try later"
            ) from None

    async def place(self, queue: Queue) -> int:
        """Return the group's committed offset, or the offset that this query has finished if that is higher."""
        connection = await self._view.cluster.broker(queue.broker_name)
        committed = await GroupOffsets(self._view.cluster, self._options.group).load(connection, queue, "first")
        return max(committed, self._finished.get(queue, 0))

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        if self._membership.is_rebalanced:
            self._cut_off.clear()  # the rebalance is complete, so these queues are assigned to other members
        return self._cut_off | {
            queue: reading.position
            for queue, reading in self._readings.items()
            if not reading.leaving and (reading.is_cut_off or queue not in seen.extents)
        }

    # Assigned and released queues (the QueueUser protocol of Membership)

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
        return False  # pulls of tasks carry no commit offset

    def lose_queue(self, queue: Queue) -> None:
        reading = self._readings.pop(queue, None)
        if reading is not None and reading.is_cut_off and not reading.leaving:
            self._cut_off[queue] = reading.position

    def is_running(self, queue: Queue) -> bool:
        return False  # the commit of a batch that still runs has the epoch of the old lease, which Rocketlet's brokers reject

    async def ended(self, queue: Queue) -> None: ...

    def suspend_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = True

    def resume_queue(self, queue: Queue) -> None:
        self._readings[queue].suspended = False

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
            reading = self._readings.get(queue)
            if reading is None:
                continue
            log.info("offset_reset", queue=str(queue), old=reading.position, new=offset)
            if reading.planned is None:
                self._resume_at(queue, offset)
            else:
                reading.reset_to = offset
        self._resetting = asyncio.get_running_loop().create_task(self._commit())


# ------------------------------------------------------------------------------
# The query without membership, like Kafka's source: the query shares its queues with nobody, and only the checkpoint
# holds offsets.


class Standalone:
    """The queues of a query without membership: all queues of its topics, or those of the option `assign`. Each batch
    names every queue, so that the checkpoint has the offset of each."""

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
            await check_start(view, queues)

    async def close(self) -> None:
        await self._view.close()

    async def wait_for_queues(self) -> None: ...

    def queues(self) -> list[Queue]:
        queues = self._view.routed(sorted(self._known))
        return [queue for queue in queues if queue in self._options.assigned] if self._options.assigned else queues

    def free(self) -> Mapping[Queue, int]:
        return self._read_to

    def planned(self) -> Mapping[Queue, int]:
        return self._read_to | self._planned_to

    def move(self, queue: Queue, position: int) -> None:
        self._read_to[queue] = position

    async def finish(self, batch: MicroBatch) -> None:
        """Continue at the ends of the batch's ranges. Queues that the query does not read any more are dropped.

        A query without a checkpoint starts where its options say.
        """
        if batch == self._last:
            return
        is_new = self._last is None and not batch.ranges
        self._read_to = {queue: end for queue, (_, end) in batch.ranges.items() if self._options.reads(queue)}
        self._last = batch
        if is_new:
            if self._options.start.default == "last":
                self._course.begin_at_latest()
            queues = self.queues()
            self._read_to |= await offsets_at(self._view, queues, self._options.start, await self._view.all(queues))

    async def discover(self) -> None:
        self._known.update(await self._view.new_topics(self._known))

    async def apply_changes(self, seen: BrokerOffsets) -> None:
        """Set the start of new queues.

        A new queue starts at its first message; in a query that started at the latest messages, at the first message
        stored since then. Queues that are in no route keep their offset until they are back.
        """
        fresh = [queue for queue in self.queues() if queue in seen.extents and queue not in self._read_to]
        for queue in fresh:
            with suppress(ConnectionFailed, RequestTimeout):  # its broker is unreachable again; the next batch retries
                self._read_to[queue] = await self._begin_of(queue, seen.extents[queue])

    async def _begin_of(self, queue: Queue, extent: Extent) -> int:
        began_ms = self._course.began_ms
        if not began_ms or extent.begin == extent.end:
            return extent.begin
        connection = await self._view.cluster.broker(queue.broker_name)
        since_ms = await time_before(connection, time.time() - began_ms / 1000)
        return max(await stored_since(connection, queue, since_ms), extent.begin)

    async def place(self, queue: Queue) -> int:
        return self._read_to.get(queue, 0)

    def out_of_reach(self, seen: BrokerOffsets) -> Mapping[Queue, int]:
        return {queue: at for queue, at in self._read_to.items() if queue not in seen.extents}

    def take(self, cut: Ranges) -> Ranges:
        self._planned_to = {queue: end for queue, (_, end) in cut.items()}
        if not cut and self._last is not None and self._read_to.keys() == self._last.ranges.keys():
            return {}
        return {queue: cut.get(queue, (position, position)) for queue, position in self._read_to.items()}


# ------------------------------------------------------------------------------
# Positions in options: check that the queues have them, and resolve them to offsets.


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


async def check_start(view: View, queues: set[Queue]) -> None:
    """Check that a new query can start where its options say.

    Queues whose broker does not respond are not checked. Raises ConfigError if the query cannot start there, and
    RocketletError if a broker rejects a request or stops responding.
    """
    start = view.options.start
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


# ------------------------------------------------------------------------------
# Requests for the first and last offsets of queues and for the identities of their topics (GET_QUEUE_OFFSETS): one request
# for up to `MAX_TOPICS_ASKED` topics of a broker.
#
# An Apache broker, which does not support this request, gets one request for the statistics of each topic, all
# concurrently. Where the statistics leave out a queue, the offsets of this queue are requested separately.


class Extent(NamedTuple):
    """The offsets that a queue holds: `begin` inclusive, `end` exclusive."""

    begin: int
    end: int


NOTHING = Extent(0, 0)


@dataclass(slots=True)
class BrokerOffsets:
    """Extents and marks that brokers returned. Queues of unreachable brokers are missing.

    Attributes:
        extents: the offsets that each queue holds
        absent: queues that their broker does not have
        marks: identity of each topic on each broker
    """

    extents: dict[Queue, Extent] = field(default_factory=dict)
    absent: set[Queue] = field(default_factory=set)
    marks: dict[Part, TopicSnapshot] = field(default_factory=dict)


class Extents:
    """Requests extents from the brokers of one cluster, on behalf of a group, which may be empty.

    `away` has the names of the brokers that did not answer the last request.
    """

    def __init__(self, cluster: ClusterView, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._foreign: set[str] = set()
        self.away: set[str] = set()

    async def of(self, queues: Iterable[Queue]) -> BrokerOffsets:
        """Return the extents of queues. Raises BrokerRefused; unreachable brokers are logged and left out."""
        seen = BrokerOffsets()
        asked = by_broker(queues)
        await asyncio.gather(*(self._ask(name, wanted, seen) for name, wanted in asked.items()))
        self.away &= asked.keys()
        return seen

    async def _ask(self, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
        try:
            connection = await self._cluster.broker(name)
            if name not in self._foreign:
                await self._ask_ours(connection, name, queues, seen)
            if name in self._foreign:
                await self._ask_apache(connection, name, queues, seen)
        except (ConnectionFailed, RequestTimeout) as error:
            if name not in self.away:
                log.warning(
                    "broker_away", broker=name, reason=str(error), hint="its queues are skipped until it is back"
                )
            self.away.add(name)
        else:
            self.away.discard(name)

    async def _ask_ours(self, connection: Connection, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
        topics = list(dict.fromkeys(queue.topic for queue in queues))
        ext = write(OptionalGroup(self._group or None))
        parts = [topics[at : at + MAX_TOPICS_ASKED] for at in range(0, len(topics), MAX_TOPICS_ASKED)]
        answers = await asyncio.gather(
            *(
                connection.request_unchecked(RequestCode.GET_QUEUE_OFFSETS, ext, encode_topics(part), OFFSET_TIMEOUT_S)
                for part in parts
            )
        )
        reported: dict[str, TopicExtent] = {}
        times = BrokerTimes(0, 0)
        for answer in answers:
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                self._foreign.add(name)
                return
            if answer.code:
                raise BrokerRefused(RequestCode.GET_QUEUE_OFFSETS, answer.code, answer.remark, connection.address)
            reported |= body_of(answer, decode_extents)
            times = header_of(answer, BrokerTimes)
        for queue in queues:  # not all reported queues, because a topic may have many more than are requested
            topic = reported.get(queue.topic)
            if topic is None or queue.queue_id >= len(topic.begins):
                seen.absent.add(queue)
            else:
                seen.extents[queue] = Extent(topic.begins[queue.queue_id], topic.ends[queue.queue_id])
        seen.marks |= {
            (name_of, name): TopicSnapshot(
                reported[name_of].identity, times.now_ms, reported[name_of].rewinds, times.started_ms
            )
            for name_of in topics
            if name_of in reported
        }

    async def _ask_apache(self, connection: Connection, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
        topics = dict.fromkeys(queue.topic for queue in queues)
        reported = await asyncio.gather(*(self._ask_statistics(connection, name, topic, seen) for topic in topics))
        unknown = {topic for topic, is_known in zip(topics, reported, strict=True) if not is_known}
        seen.absent |= {queue for queue in queues if queue.topic in unknown}
        missing = [queue for queue in queues if queue not in seen.extents and queue not in seen.absent]
        await asyncio.gather(*(self._ask_one(connection, queue, seen) for queue in missing))
        # the statistics lack this queue, so the newest store time of the topic is unknown
        seen.marks |= {part_of(queue): UNMARKED for queue in missing}

    async def _ask_statistics(self, connection: Connection, name: str, topic: str, seen: BrokerOffsets) -> bool:
        """Store the extents and mark of a topic, and return True; False if the broker does not have the topic."""
        code = RequestCode.GET_TOPIC_STATS_INFO
        answer = await connection.request_unchecked(code, write(TopicName(topic)), timeout_s=OFFSET_TIMEOUT_S)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return False
        if answer.code:
            raise BrokerRefused(code, answer.code, answer.remark, connection.address)
        ranges = body_of(answer, decode_topic_stats)
        for queue, reported in ranges.items():
            seen.extents[Queue(topic, name, queue.queue_id)] = Extent(max(reported.begin, 0), max(reported.end, 0))
        seen.marks[topic, name] = TopicSnapshot(
            newest_ms=max((reported.last_ms for reported in ranges.values()), default=0)
        )
        return True

    async def end_of(self, queue: Queue) -> int:
        """Return the end of a queue, even if its topic no longer has the queue. Raises RocketletError."""
        seen = BrokerOffsets()
        await self._ask_one(await self._cluster.broker(queue.broker_name), queue, seen)
        return seen.extents[queue].end

    async def _ask_one(self, connection: Connection, queue: Queue, seen: BrokerOffsets) -> None:
        ext = write(TopicQueue(queue.topic, queue.queue_id))
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        answers = await asyncio.gather(*(connection.request(code, ext, timeout_s=OFFSET_TIMEOUT_S) for code in codes))
        seen.extents[queue] = Extent(*(max(header_of(answer, Offset).offset, 0) for answer in answers))

    async def fingerprint(self, queue: Queue, offset: int) -> Fingerprint | None:
        """Return the fingerprint of the message at an offset, or None if there is no message or the broker does not
        answer."""
        try:
            connection = await self._cluster.broker(queue.broker_name)
            answer = await self._pull(connection, queue, offset, TOOLS_GROUP)
            if answer.code == ResponseCode.NO_PERMISSION and self._group:
                answer = await self._pull(connection, queue, offset, self._group)
        except (ConnectionFailed, RequestTimeout):
            return None
        return found_at(answer, offset)

    def _pull(self, connection: Connection, queue: Queue, offset: int, group: str) -> asyncio.Future[Frame]:
        header = pull_header(group, queue, offset, 1, Subscription(queue.topic))
        return connection.request_unchecked(RequestCode.PULL_MESSAGE, header, timeout_s=OFFSET_TIMEOUT_S)


def found_at(answer: Frame, offset: int) -> Fingerprint | None:
    """Return the fingerprint of the message at an offset in a pull response, or None if the response does not contain
    it."""
    records = body_of(answer, decode_records)
    return next((Fingerprint.of(record) for record in records if record.queue_offset == offset), None)


# ------------------------------------------------------------------------------
# The topics of a query, their queues and brokers, and the offsets that the queues hold.


class View:
    """Connections of a query to the name server and brokers, with the topics that the query reads."""

    def __init__(self, options: ReadOptions) -> None:
        connect = options.connect
        self.options = options
        self.cluster = ClusterView(
            connect.name_server, connect.access, connect.client_name, limits=ClientLimits(route_interval_s=NEW_QUEUES_S)
        )
        self.extents = Extents(self.cluster, options.group)
        self._discovered_s = 0.0
        self._gone: set[str] = set()

    async def open(self) -> list[str]:
        """Connect, and return the query's topics, whose routes are then known.

        Raises:
            RocketletError: no name server is reachable, or a topic does not exist
            ConfigError: a broker rejects the filter
        """
        self.cluster.start()
        try:
            topics = await self._topics()
            filters = {topic: self.options.subscription(topic) for topic in topics}
            try:
                await check_filters(self.cluster, new_client_id(), self.options.group, filters)
            except BrokerRefused as error:
                if error.code != ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                    raise
                raise ConfigError(f"the option sql: {error.remark}") from None
        except BaseException:
            await self.close()
            raise
        return topics

    async def close(self) -> None:
        await self.cluster.close()

    async def _topics(self) -> list[str]:
        """Return the topics of the query. Wait up to 15 s in total for named topics that do not exist yet. Raises
        TopicNotFound."""
        if self.options.pattern:
            return await self._matching()
        end_s = _now_s() + TOPIC_TIMEOUT_S
        for topic in self.options.topics:
            while await self.cluster.find_route(topic) is None:
                if _now_s() > end_s:
                    raise TopicNotFound(
                        f"the topic {topic} does not exist on {self.options.connect.name_server}: create it, or "
                        f"correct the option topic"
                    )
                await asyncio.sleep(0.2)
        return list(self.options.topics)

    def routed(self, topics: Iterable[str]) -> list[Queue]:
        """Return the queues of these topics that are in the known routes."""
        queues: list[Queue] = []
        for topic in topics:
            route = None if topic in self._gone else self.cluster.route(topic)
            queues += subscribe_queues(topic, route) if route is not None else []
        return queues

    async def refresh(self, topics: Iterable[str]) -> None:
        """Request the routes of these topics again, and of topics that had no route at the last request."""
        for topic in {*topics, *self._gone}:
            try:
                is_known = await self.cluster.find_route(topic) is not None
            except RocketletError as error:  # the known routes stay in use
                log.warning("route_lookup_failed", topic=topic, reason=str(error))
                continue
            self._gone.discard(topic) if is_known else self._gone.add(topic)

    async def _matching(self) -> list[str]:
        """Return the topics that match the pattern and have a route, except topics that brokers create. Request the
        routes that are not known yet."""
        self._discovered_s = _now_s()
        answer = await self.cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        brokers = await self.cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        made_by_brokers = {
            text
            for broker in body_of(brokers, decode_cluster)
            for text in (broker.cluster, broker.name, names.reply_topic(broker.cluster))
        }
        matches = re.compile(self.options.pattern).fullmatch
        found = [
            topic
            for topic in body_of(answer, decode_topic_list)
            if matches(topic) and not names.is_made_by_brokers(topic) and topic not in made_by_brokers
        ]
        return [topic for topic in found if self.cluster.route(topic) or await self.cluster.find_route(topic)]

    async def new_topics(self, known: Iterable[str]) -> list[str]:
        """Return topics that match the pattern and are not in `known`; none within 10 s of the last request of the list
        of topics, and none if that request fails."""
        if not self.options.pattern or _now_s() < self._discovered_s + DISCOVERY_INTERVAL_S:
            return []
        try:
            return sorted(set(await self._matching()) - set(known))
        except RocketletError as error:
            log.warning("topic_lookup_failed", reason=str(error))
            return []

    async def addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        known = {queue: await self._address(queue) for queue in queues}
        return {queue: address for queue, address in known.items() if address is not None}

    async def _address(self, queue: Queue) -> str | None:
        failing = FailureTimeout(self.options.poll_timeout_s)
        while (address := self.cluster.master(queue.broker_name)) is None:
            try:
                await self.cluster.find_route(queue.topic)
            except ConnectionFailed as error:
                log.warning("route_lookup_failed", topic=queue.topic, reason=str(error))
            if self.cluster.master(queue.broker_name) is None and failing.is_over():
                retired(queue, fail=self.options.fail_on_data_loss)
                return None
            await asyncio.sleep(ROUTE_RETRY_S)
        return address

    async def all(self, queues: Iterable[Queue]) -> BrokerOffsets:
        """Return the extents of all queues; `NOTHING` for queues that their broker does not have. Raises
        ConnectionFailed if a broker is unreachable."""
        seen = await self.extents.of(queues)
        if self.extents.away:
            raise ConnectionFailed(
                f"the broker {min(self.extents.away)} does not answer: its messages would be skipped; start it, or "
                "try later"
            )
        seen.extents |= dict.fromkeys(seen.absent, NOTHING)
        return seen

    async def message_bytes(self, queue: Queue, offset: int) -> float | None:
        """Return the mean size in bytes of the next messages of a queue; 1 if the response has no messages, or None if
        the broker is unreachable."""
        subscription = self.options.subscription(queue.topic)
        header = pull_header(self.options.group, queue, offset, SAMPLE_MESSAGES, subscription)
        try:
            connection = await self.cluster.broker(queue.broker_name)
            answer = await connection.request_unchecked(
                RequestCode.PULL_MESSAGE, header, timeout_s=self.options.poll_timeout_s
            )
        except (ConnectionFailed, RequestTimeout) as error:
            log.warning("message_size_unknown", queue=str(queue), reason=str(error), hint="the queue waits")
            return None
        messages = header_of(answer, PullMessageResult).next_begin_offset - offset if answer.body else 0
        return max(len(answer.body) / messages, 1.0) if messages > 0 else 1.0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------
# Data loss: an offset that is no longer in its queue, or a queue that has no route any more.


MOVED = (
    "A checkpoint is valid for its own cluster. In another one, start with a new checkpoint and startingTimestamp; or, "
    "where `rocketlet mirror` has copied the group, with startingOffsets=committed"
)
FROM_FIRST = "failOnDataLoss=false reads this topic from its first message on"
WITHOUT = "failOnDataLoss=false continues without them"


def shown(queue: Queue) -> str:
    """Return the name of a queue for users, who know their group but perhaps not its retry topic."""
    if queue.topic.startswith(names.RETRY_PREFIX):
        group = queue.topic.removeprefix(names.RETRY_PREFIX)
        return f"the retries of the group {group} on {queue.broker_name}, queue {queue.queue_id}"
    return str(queue)


def outside(queue: Queue, wanted: int, extent: Extent, *, is_same: bool, fail: bool) -> int:
    """Return the offset at which to continue, for a position that is not in its queue.

    Args:
        wanted: the position
        extent: offsets that the queue holds now
        is_same: True if the topic is known to be the same as when the position was recorded. The end of such a queue
            decreases only if its broker has lost messages that were not written to disk; all messages of another topic
            are new.
        fail: True if the option failOnDataLoss is set
    Raises:
        DataLossError: `fail` is True
    """
    if wanted < extent.begin:
        reason = f"the messages {wanted} to {extent.begin} have expired. {WITHOUT}"
        return _lost(queue, wanted, extent, reason, extent.begin, fail)
    if is_same:
        reason = f"its broker has lost messages. failOnDataLoss=false continues at its end, {extent.end}"
        return _lost(queue, wanted, extent, reason, extent.end, fail)
    reason = f"the topic or its broker was recreated. {FROM_FIRST}"
    return _lost(queue, wanted, extent, reason, extent.begin, fail)


def recreated(queue: Queue, wanted: int, extent: Extent, *, fail: bool) -> int:
    """Return the offset at which to continue after a topic was recreated. Raises DataLossError if `fail` is True."""
    reason = (
        f"these are other messages: the topic {queue.topic} on {queue.broker_name} was recreated, or this is another "
        f"cluster. {MOVED}; {FROM_FIRST}"
    )
    return _lost(queue, wanted, extent, reason, extent.begin, fail)


def other_cluster(brokers: Iterable[str], topic: str, *, fail: bool) -> None:
    """Log that none of the brokers in the checkpoint has a topic, while other brokers have it. Raises DataLossError if
    `fail` is True."""
    missing = ", ".join(sorted(brokers))
    text = f"the topic {topic} is on none of the brokers {missing} of the checkpoint: this is another cluster"
    if fail:
        raise DataLossError(f"{text}. {MOVED}; {FROM_FIRST}")
    hint = "everything is read from the first message on"
    log.warning("checkpoint_of_another_cluster", topic=topic, reason=text, hint=hint)


def gone(queue: Queue) -> RocketletError:
    """Return the error for a query that ends on its own and has a queue whose topic does not exist any more."""
    return RocketletError(
        f"{shown(queue)}: no name server has a route for the topic {queue.topic}, "
        f"so the number of its unread messages is unknown; {WITHOUT}"
    )


def unrouted(queue: Queue, readable: int, unread: int) -> RocketletError:
    """Return the error for a query that ends on its own and has unread messages in a queue that its topic no longer
    has."""
    return RocketletError(
        f"{shown(queue)}: the topic {queue.topic} has {counted(readable, 'readable queue')} on {queue.broker_name} now, and "
        f"{counted(unread, 'message')} in this one are unread. Make it readable (rocketlet topics set {queue.topic} "
        f"--read-queues {queue.queue_id + 1}); {WITHOUT}"
    )


def retired(queue: Queue, *, fail: bool) -> None:
    """Log that a range cannot be read because its broker is not registered. Raises DataLossError if `fail` is True."""
    text = (
        f"{shown(queue)}: no name server has a route to {queue.broker_name}, which holds messages of the planned batch"
    )
    if fail:
        raise DataLossError(f"{text}. Start the broker; {WITHOUT}")
    log.warning("messages_lost", queue=str(queue), reason=text)


def _lost(queue: Queue, wanted: int, extent: Extent, reason: str, resumed_at: int, fail: bool) -> int:
    text = f"{shown(queue)}: the query wants offset {wanted}, the broker holds {extent.begin} to {extent.end}; {reason}"
    if fail:
        raise DataLossError(text)
    log.warning("messages_lost", queue=str(queue), wanted=wanted, begin=extent.begin, end=extent.end, reason=reason,
                resumed_at=resumed_at)  # fmt: skip
    return resumed_at


# ------------------------------------------------------------------------------
# A timeout for repeated failures.


class FailureTimeout:
    """A timeout that expires when operations have failed for longer than a limit, counted from the first failure.

    The time between two failures counts with at most 10 s and at most half of the limit, so that neither a long batch
    nor a suspended process uses up the limit.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._failing_s = 0.0
        self._failed_s: float | None = None

    def renew(self) -> None:
        """Reset the timeout after a success."""
        self._failing_s, self._failed_s = 0.0, None

    def is_over(self) -> bool:
        """Record a failure, and return True if the timeout has expired."""
        now_s = self._clock()
        if self._failed_s is not None:
            self._failing_s += min(now_s - self._failed_s, MAX_PATIENCE_STEP_S, self._limit_s / 2)
        self._failed_s = now_s
        return self._failing_s >= self._limit_s
