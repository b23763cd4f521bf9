"""Offsets at brokers: the start offset of a queue, and the committed offsets of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ...protocol.allocation import subscribe_queues
from ...protocol.codes import EXT_UNKNOWN, RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import Offset, QueueOffset, TopicQueue, UpdateOffset, write
from ...protocol.names import RETRY_PREFIX, Queue, Subscription
from ..config import OFFSET_TIMEOUT_S, PULL_COMMIT_S, At, Start
from ..errors import BrokerRefused, ConnectionFailed, RocketletError, get_logger
from ..wire.cluster import ClusterView, by_broker, pull_header, stored_since
from ..wire.connection import Connection, header_of
from ..wire.late_queues import LateQueues

log = get_logger("rocketlet.offsets")


async def begin_offset(connection: Connection, queue: Queue, start: Start | At) -> int:
    """Return the offset that a start position means in a queue of this broker. Raises RocketletError."""
    if isinstance(start, At):
        return start.offset
    if isinstance(start, int):
        return await stored_since(connection, queue, start)
    code = RequestCode.GET_MIN_OFFSET if start == "first" else RequestCode.GET_MAX_OFFSET
    answer = await connection.request(code, write(TopicQueue(queue.topic, queue.queue_id)), timeout_s=OFFSET_TIMEOUT_S)
    return header_of(answer, Offset).offset


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a consumer in a queue.

    Attributes:
        committed: the group's committed offset on the broker; None if there is none.
        acknowledged: the offset of the first unacknowledged message, which the next commit stores.
        end: the offset that the next new message of the queue will get.
    """

    committed: int | None
    acknowledged: int
    end: int

    @property
    def lag(self) -> int:
        """The number of messages that are not acknowledged."""
        return max(self.end - self.acknowledged, 0)


class GroupOffsets:
    """One member's queries and commits of its group's offsets.

    Args:
        start: the start position of queues for which the group has no committed offset.
        starts: start positions of single queues, which take precedence over `start`.

    Attributes:
        late: the start offsets of queues that appear later; None unless `start` is "last".
    """

    def __init__(
        self, cluster: ClusterView, group: str, start: Start = "last", starts: Mapping[Queue, Start | At] | None = None
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._start = start
        self._starts = {} if starts is None else starts
        self.late = LateQueues(cluster) if start == "last" else None
        self._first_seen: dict[str, frozenset[Queue]] = {}
        self._latest: dict[Queue, int] = {}
        self._known: set[tuple[str, str]] = set()
        self._storing: dict[str, asyncio.Task[None]] = {}
        # Locks for commits to Apache's brokers. An entry exists only while a task holds the lock or waits for it.
        self._turns: WeakValueDictionary[Queue, asyncio.Lock] = WeakValueDictionary()
        self._first: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def record_first_queues(self, topic: str, queues: Iterable[Queue]) -> None:
        """Record the queues that a topic had when this member first saw it."""
        if topic not in self._first_seen:
            self._first_seen[topic] = frozenset(queues)

    async def fix_latest(self, topics: Iterable[str]) -> None:
        """Determine the start offsets at the reachable brokers when the member joins, so that a group with `start="last"`
        reads all messages that are stored from now on."""
        if self.late is not None:
            await self.late.join()
        for topic in topics:
            route = self._cluster.route(topic)
            queues = subscribe_queues(topic, route) if route is not None else []
            self.record_first_queues(topic, queues)
            if self._start == "last" and not any(queue.topic == topic for queue in self._starts):
                await asyncio.gather(*(self._fix_at(name, found) for name, found in by_broker(queues).items()))

    async def _fix_at(self, broker_name: str, queues: list[Queue]) -> None:
        """Determine the start offsets of queues at one broker. For a group without offsets, a Rocketlet broker stores the
        ends of all queues of the topic at a query for one of them. For another broker, this member remembers them."""
        if queues[0].topic.startswith(RETRY_PREFIX):
            return
        try:
            connection = await self._cluster.broker(broker_name)
            await self.load(connection, queues[0], "last")
            if not connection.speaks_msgpack:
                found = await asyncio.gather(*(self.load(connection, queue, "last") for queue in queues))
                self._latest |= zip(queues, found, strict=True)
        except RocketletError as error:
            log.warning("start_offset_unknown", broker=broker_name, topic=queues[0].topic, reason=str(error))
            if self.late is not None:
                self.late.miss(broker_name)

    async def begin(self, connection: Connection, queue: Queue, epoch: int) -> int:
        """Return the group's committed offset of a queue. If there is none, determine the start offset, commit it and
        return it.

        Without a committed offset and a start offset of its own, a queue of a retry topic is read from its first message,
        and so is a new queue unless `start` is a time. With `start="last"`, a queue whose broker was unreachable when this
        member joined is read from the first message that was stored since.

        The start offset is committed immediately, unless the broker refuses that. Otherwise a member that starts at the end
        of an empty queue, and stops before a message arrives, would skip that message the next time.

        Raises RocketletError.
        """
        start = self._start_of(queue)
        offset = await self._committed(connection, queue, start, alone=queue in self._starts)
        if offset is None:
            if start is not None:
                offset = await begin_offset(connection, queue, start)
            else:
                assert self.late is not None
                offset = await self.late.begin_offset(connection, queue)
            await self._keep_start(queue, offset, epoch)
        return offset

    def _start_of(self, queue: Queue) -> Start | At | None:
        """Return the start position of a queue; None for the first message that was stored since this member joined."""
        if queue in self._starts:
            return self._starts[queue]
        if queue.topic.startswith(RETRY_PREFIX):
            return "first"
        if self.late is not None and not self.late.was_there(queue.broker_name):
            return None
        if queue not in self._first_seen.get(queue.topic, ()):
            return self._start if isinstance(self._start, int) else "first"
        latest = self._latest.get(queue)
        return self._start if latest is None else At(latest)

    async def _keep_start(self, queue: Queue, offset: int, epoch: int) -> None:
        try:
            await self.store(queue, offset, epoch)
        except BrokerRefused as error:
            if error.code == ResponseCode.NO_PERMISSION:
                raise
            log.warning("start_not_committed", queue=str(queue), offset=offset, reason=str(error))

    async def load(self, connection: Connection, queue: Queue, start: Start | At) -> int:
        """Return the committed offset, or the offset of `start` if there is none. Raises RocketletError."""
        offset = await self._committed(connection, queue, start)
        return await begin_offset(connection, queue, start) if offset is None else offset

    async def _committed(
        self, connection: Connection, queue: Queue, start: Start | At | None, *, alone: bool = False
    ) -> int | None:
        """Return the group's committed offset, or None.

        If `start` is "last", a Rocketlet broker commits the ends of all queues of the topic for a group without offsets,
        unless `alone`.

        Args:
            alone: True if `start` applies only to this queue, so that the broker must not do that.
        """
        ext = {
            **write(QueueOffset(self._group, queue.topic, queue.queue_id)),
            EXT_UNKNOWN: "latest" if start == "last" and not alone else "error",
        }
        try:
            answer = await connection.request(RequestCode.QUERY_CONSUMER_OFFSET, ext, timeout_s=OFFSET_TIMEOUT_S)
            return header_of(answer, Offset).offset
        except BrokerRefused as error:
            if error.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return None

    async def committed(self, queue: Queue) -> int | None:
        """Return the group's committed offset at the broker; None if there is none. Raises RocketletError."""
        connection = await self._cluster.broker(queue.broker_name)
        ext = {**write(QueueOffset(self._group, queue.topic, queue.queue_id)), EXT_UNKNOWN: "error"}
        try:
            answer = await connection.request(RequestCode.QUERY_CONSUMER_OFFSET, ext, timeout_s=OFFSET_TIMEOUT_S)
        except BrokerRefused as error:
            if error.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return None
        return header_of(answer, Offset).offset

    async def store(self, queue: Queue, offset: int, epoch: int, *, sought: bool = False) -> None:
        """Commit an offset. Return when the broker has stored it. Raises RocketletError.

        If the first offsets of a group and topic arrive concurrently, an Apache broker (epoch 0) can lose some of them,
        because each request creates the table of that pair (ConsumerOffsetManager.commitOffset). The first commit is
        therefore sent alone. Besides, an Apache broker processes commits in several threads and accepts lower offsets,
        so a commit of a queue waits for the response to the previous one.

        Args:
            sought: True if the broker itself returned the offset, so that it is valid even if messages were lost since.
        """
        if epoch:
            await self._send(queue, offset, epoch, sought=sought)
            return
        table = (queue.broker_name, queue.topic)
        async with self._turns.setdefault(queue, asyncio.Lock()):
            async with self._first.setdefault(table, asyncio.Lock()):
                sent = self._send(queue, offset, epoch)
                if table not in self._known:
                    await sent
                    self._known.add(table)
            await sent

    async def pulls_stored(self, queue: Queue, offset: int) -> None:
        """Wait until an Apache broker has most likely stored the offsets of earlier pulls. Raise nothing.

        The broker's threads for pulls start to process pulls in order. The response to another pull, which is not held
        and commits nothing, therefore shows that the processing of the earlier ones has started. Commits are processed
        by other threads (BrokerController.registerProcessor).
        """
        storing = self._storing.get(queue.broker_name)
        if storing is None:
            storing = self._storing[queue.broker_name] = asyncio.create_task(self._pull_behind(queue, offset))
        await asyncio.shield(storing)

    async def _pull_behind(self, queue: Queue, offset: int) -> None:
        """Send one pull for all queues of the broker that are released in this event-loop iteration."""
        await asyncio.sleep(0)
        del self._storing[queue.broker_name]
        connection = self._cluster.connected(queue.broker_name)
        if connection is None:
            return
        pull = pull_header(self._group, queue, offset, 1, Subscription(queue.topic))
        with suppress(RocketletError):
            await connection.request_unchecked(RequestCode.PULL_MESSAGE, pull, timeout_s=OFFSET_TIMEOUT_S)
            await asyncio.sleep(PULL_COMMIT_S)

    def _send(self, queue: Queue, offset: int, epoch: int, *, sought: bool = False) -> asyncio.Future[Frame]:
        connection = self._cluster.connected(queue.broker_name)
        if connection is None:  # do not wait for one, because the commit could then arrive after that of a later pull
            raise ConnectionFailed(f"the broker {queue.broker_name} is not connected")
        header = UpdateOffset(self._group, queue.topic, queue.queue_id, offset, epoch or None, sought or None)
        return connection.request(RequestCode.UPDATE_CONSUMER_OFFSET, write(header), timeout_s=OFFSET_TIMEOUT_S)
