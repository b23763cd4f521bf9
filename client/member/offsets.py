"""The offsets that a broker keeps: where a queue is read from, and how far a group has come."""

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
    """The offset of `start` in a queue of this broker. Raises RocketletError."""
    if isinstance(start, At):
        return start.offset
    if isinstance(start, int):
        return await stored_since(connection, queue, start)
    code = RequestCode.GET_MIN_OFFSET if start == "first" else RequestCode.GET_MAX_OFFSET
    answer = await connection.request(code, write(TopicQueue(queue.topic, queue.queue_id)), timeout_s=OFFSET_TIMEOUT_S)
    return header_of(answer, Offset).offset


@dataclass(frozen=True, slots=True)
class Position:
    """How far a consumer has come in a queue. `committed`: the group's offset on the broker, None if it has none.
    `acknowledged`: the first offset that is not acknowledged, which the next commit stores. `end`: the next new message's."""

    committed: int | None
    acknowledged: int
    end: int

    @property
    def lag(self) -> int:
        return max(self.end - self.acknowledged, 0)


class GroupOffsets:
    """One member's requests about its group's offsets.

    start, starts: where queues are read from that the group has no offset of, the latter for single queues. late: where it
    begins in queues that come later, if it begins at the latest message.
    """

    def __init__(
        self, cluster: ClusterView, group: str, start: Start = "last", starts: Mapping[Queue, Start | At] | None = None
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._start = start
        self._starts = starts or {}
        self.late = LateQueues(cluster) if start == "last" else None
        self._first_seen: dict[str, frozenset[Queue]] = {}
        self._latest: dict[Queue, int] = {}
        self._known: set[tuple[str, str]] = set()
        self._storing: dict[str, asyncio.Task[None]] = {}
        # each is there while somebody has it or waits for it
        self._turns: WeakValueDictionary[Queue, asyncio.Lock] = WeakValueDictionary()
        self._first: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def saw(self, topic: str, queues: Iterable[Queue]) -> None:
        """The queues that a topic had when this member first saw it."""
        if topic not in self._first_seen:
            self._first_seen[topic] = frozenset(queues)

    async def fix_latest(self, topics: Iterable[str]) -> None:
        """The member joins: a group that begins at the latest message reads messages stored from now on."""
        if self.late is not None:
            await self.late.join()
        for topic in topics:
            route = self._cluster.route(topic)
            queues = subscribe_queues(topic, route) if route is not None else []
            self.saw(topic, queues)
            if self._start == "last" and not any(queue.topic == topic for queue in self._starts):
                await asyncio.gather(*(self._fix_at(name, found) for name, found in by_broker(queues).items()))

    async def _fix_at(self, broker_name: str, queues: list[Queue]) -> None:
        """A Rocketlet broker fixes all queues of the topic when it is asked for one; else this member remembers them."""
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
        """The group's committed offset, or where a new group begins; all of a queue that is new or for retries; of one whose
        broker was away when this member joined, all that was stored since. Raises RocketletError.

        Where a new group begins is committed at once. A member that begins at the latest of an empty queue, and stops before
        a message comes, would otherwise begin behind that message the next time.
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
        """None: at the first message that was stored since this member joined."""
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
        """The committed offset, or where a group without one begins. Raises RocketletError if it cannot be known."""
        offset = await self._committed(connection, queue, start)
        return await begin_offset(connection, queue, start) if offset is None else offset

    async def _committed(
        self, connection: Connection, queue: Queue, start: Start | At | None, *, alone: bool = False
    ) -> int | None:
        """alone: `start` is said of this queue only. Otherwise a Rocketlet broker that is asked for the latest fixes it for
        all queues of the topic."""
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
        """The group's offset at the broker; None if it has none. Raises RocketletError."""
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
        """Returns when the broker has it. Raises RocketletError. sought: the broker itself has named the offset, which no
        message did that may be lost since.

        An Apache broker (epoch 0) loses offsets that reach it together while it has none of this group and topic: each
        makes the table of that pair anew (ConsumerOffsetManager.commitOffset). The first one therefore goes alone. It
        carries commits out in several threads, and refuses no offset that goes back: a commit waits until the one
        before it of the same queue is answered.
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
        """Returns when an Apache broker has most likely stored the offsets of earlier pulls. Raises nothing.

        Its threads for pulls begin with them in their order, so the answer to one more, which holds nothing and commits
        nothing, says that the others are begun. Commits have other threads (BrokerController.registerProcessor).
        """
        storing = self._storing.get(queue.broker_name)
        if storing is None:
            storing = self._storing[queue.broker_name] = asyncio.create_task(self._pull_behind(queue, offset))
        await asyncio.shield(storing)

    async def _pull_behind(self, queue: Queue, offset: int) -> None:
        """Sends one pull for all queues of the broker that are given up in this turn of the loop."""
        await asyncio.sleep(0)
        del self._storing[queue.broker_name]
        connection = self._cluster.connected(queue.broker_name)
        if connection is None:
            return
        pull = pull_header(self._group, queue, offset, 1, Subscription(queue.topic))
        with suppress(RocketletError):
            await connection.ask(RequestCode.PULL_MESSAGE, pull, timeout_s=OFFSET_TIMEOUT_S)
            await asyncio.sleep(PULL_COMMIT_S)

    def _send(self, queue: Queue, offset: int, epoch: int, *, sought: bool = False) -> asyncio.Future[Frame]:
        connection = self._cluster.connected(queue.broker_name)
        if connection is None:  # waiting for one, this commit would arrive after a later one that a pull carries
            raise ConnectionFailed(f"the broker {queue.broker_name} is not connected")
        header = UpdateOffset(self._group, queue.topic, queue.queue_id, offset, epoch or None, sought or None)
        return connection.request(RequestCode.UPDATE_CONSUMER_OFFSET, write(header), timeout_s=OFFSET_TIMEOUT_S)
