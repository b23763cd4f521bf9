"""A model of Apache's Java push consumer, 4.9: what of it matters to who reads which queue.

It neither locks nor drains. It asks for the list of members every 20 s and when it is told of a change, shares the queues
out by AVG, and drops what is not its own at once, while its handlers run on; their messages do not count any more. It loads
the committed offset when it gets a queue (RebalanceImpl), says how far it is with each pull (DefaultMQPushConsumerImpl) and
every 5 s (MQClientInstance), and drops a queue for 10 s when it is told that an offset is illegal. A broker that asks is
told what it subscribes to and which queues it has, not its id (ConsumerRunningInfo).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rocketlet.client import RocketletError
from rocketlet.client.message import NO_LEASE, Message
from rocketlet.client.wire.cluster import Cluster
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol import bodies, group_bodies, names
from rocketlet.protocol.admin_bodies import RunningQueue, encode_running_info
from rocketlet.protocol.allocation import AVG, subscribe_queues
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, PULL_SUSPEND, RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.headers import (
    ConsumerGroup,
    Offset,
    PullMessage,
    PullMessageResult,
    QueueOffset,
    UnregisterClient,
    UpdateOffset,
    read,
    write,
)
from rocketlet.protocol.message import decode_records
from rocketlet.protocol.names import Queue, parse_subscription

from .loop import Process

if TYPE_CHECKING:
    from .world import World

REBALANCE_S = 20.0
PERSIST_S = 5.0
HEARTBEAT_S = 30.0
ROUTE_S = 30.0
PULL_RETRY_S = 3.0
ILLEGAL_OFFSET_S = 10.0
PULL_HOLD_MS = 15_000
PULL_TIMEOUT_S = 30.0
PULL_BATCH = 32
THREADS = 4
CACHED = 1000  # messages of a queue that are not handled yet; no more are pulled (pullThresholdForQueue)
CACHE_LOOK_S = 0.05
REPORTED = {"messageModel": "CLUSTERING", "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"}
AWAIT_S = 3.0  # how long a leaving member goes on with what it has (awaitTerminationMillisWhenShutdown)


class ProcessQueue:
    """The messages of a queue that were pulled and are not handled yet, by offset."""

    def __init__(self, offset: int) -> None:
        self.next_offset = offset
        self.unhandled: set[int] = set()
        self.is_dropped = False
        self.submitted = 0  # to the executor, and not handled yet
        self.commit: int | None = (
            offset  # in memory: how far it is (RemoteBrokerOffsetStore.readOffset keeps what it loads)
        )

    def handled(self, offset: int) -> None:
        self.unhandled.discard(offset)
        if not self.is_dropped:
            self.advance(min(self.unhandled, default=self.next_offset))

    def advance(self, offset: int) -> None:
        self.commit = max(offset, self.commit or 0)


class ForeignMember:
    """As `world.Member`, to those who look at members."""

    blind_until_s = 0.0
    is_blind = is_unanswered = False

    def __init__(self, world: World, name: str, topics: tuple[str, ...], name_server: str, group: str) -> None:
        self.name = name
        self.topics = topics
        self.process = Process(name)
        self.has_left = False
        self.client_id = f"192.0.2.1@{name}"
        self._world = world
        self._group = group
        self._cluster = Cluster(name_server)
        self._cluster.answer(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, lambda connection, frame: self._wake.set())
        self._cluster.answer(RequestCode.GET_CONSUMER_RUNNING_INFO, self._report)
        self._subscriptions = [parse_subscription(topic, "*") for topic in (*topics, names.retry_topic(group))]
        self._queues: dict[Queue, ProcessQueue] = {}
        self._wake = asyncio.Event()
        self._threads = asyncio.Semaphore(THREADS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted = 0
        self._running = 0
        self._is_stopping = self._is_over = False

    @property
    def is_awake(self) -> bool:
        return not (self.process.is_paused or self.process.is_silent)

    def believes_in(self, queue: Queue) -> bool:
        return queue in self.assignment()

    def assignment(self) -> set[Queue]:
        """The queues that it claims and need not wait for."""
        return {queue for queue in self._queues if not self._world.is_held_back(self, queue)}

    def has_in_hands(self, queue: Queue) -> bool:
        """Whether it will handle messages of the queue that it has. One that leaves goes on with those that it had before."""
        return queue in self._queues and self._queues[queue].submitted > 0 and not self._is_over

    # Life

    async def join(self) -> None:
        await self._look_up()
        await self._beat()
        for work in (
            self._rebalance_forever(),
            self._every(PERSIST_S, self._persist),
            self._every(HEARTBEAT_S, self._beat),
        ):
            self._spawn(work)
        self._spawn(self._every(ROUTE_S, self._look_up))

    async def leave(self) -> None:
        """shutdown() with awaitTerminationMillisWhenShutdown: handlers end, offsets are persisted, then it unregisters."""
        self._is_stopping = True  # the executor takes nothing more, and does what it has
        end_s = asyncio.get_running_loop().time() + AWAIT_S
        while self._submitted and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        self._is_over = True
        while self._running:
            await asyncio.sleep(0.01)
        await self._persist()
        for task in self._tasks:
            task.cancel()
        ext = write(UnregisterClient(self.client_id, consumer_group=self._group))
        for address in self._cluster.masters().values():
            await self._quietly(address, RequestCode.UNREGISTER_CLIENT, ext)
        await self._cluster.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _every(self, seconds: float, action: object) -> None:
        while True:
            await asyncio.sleep(seconds)
            await action()  # type: ignore[operator]

    async def _look_up(self) -> None:
        for subscription in self._subscriptions:
            try:
                await self._cluster.find_route(subscription.topic)
            except RocketletError:
                return  # later

    async def _beat(self) -> None:
        data = ConsumerData(
            self._group, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", tuple(self._subscriptions)
        )
        body = bodies.encode_heartbeat(Heartbeat(self.client_id, (data,)))
        for address in self._cluster.masters().values():
            await self._quietly(address, RequestCode.HEART_BEAT, {}, body)

    def _report(self, connection: Connection, frame: Frame) -> None:
        queues = {
            queue: RunningQueue(item.commit or 0, len(item.unhandled), 0, False, item.is_dropped, 0)
            for queue, item in self._queues.items()
        }
        subscriptions = map(bodies.encode_subscription, self._subscriptions)
        connection.respond(frame, body=encode_running_info(REPORTED, subscriptions, queues))

    async def _quietly(self, address: str, code: int, ext: object, body: bytes = b"") -> Frame | None:
        try:
            connection = await self._cluster.connection(address)
            return await connection.request(code, ext, body)  # type: ignore[arg-type]
        except RocketletError:
            return None

    async def _persist(self) -> None:
        for queue, process_queue in list(self._queues.items()):
            await self._persist_one(queue, process_queue)

    async def _persist_one(self, queue: Queue, process_queue: ProcessQueue) -> None:
        address = self._cluster.master(queue.broker_name)
        if process_queue.commit is not None and address is not None:
            header = UpdateOffset(self._group, queue.topic, queue.queue_id, process_queue.commit, None)
            try:
                connection = await self._cluster.connection(address)
                connection.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, write(header))
            except RocketletError:
                return

    # Rebalance

    async def _rebalance_forever(self) -> None:
        while True:
            self._wake.clear()
            for topic in [subscription.topic for subscription in self._subscriptions]:
                await self._rebalance(topic)
            try:
                async with asyncio.timeout(REBALANCE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _rebalance(self, topic: str) -> None:
        route = self._cluster.route(topic)
        queues = subscribe_queues(topic, route) if route is not None else []
        addresses = [
            address for name in {queue.broker_name for queue in queues} if (address := self._cluster.master(name))
        ]
        if not addresses:
            return
        asked = await self._quietly(
            self._world.rng.choice(sorted(addresses)),
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            write(ConsumerGroup(self._group)),
        )
        if asked is None:
            return
        ids = names.sorted_ids(group_bodies.decode_members(asked.body))
        mine = set(AVG.allocate(self.client_id, queues, ids))
        before = {queue for queue in self._queues if queue.topic == topic}
        for queue in sorted(before - mine):
            process_queue = self._queues.pop(queue)
            process_queue.is_dropped = True
            self._world.note(f"{self.name} drops {queue}")
            await self._persist_one(queue, process_queue)
        for queue in sorted(mine - self._queues.keys()):
            await self._take(queue)
        if before != {queue for queue in self._queues if queue.topic == topic}:
            await self._beat()  # RebalancePushImpl.messageQueueChanged

    async def _take(self, queue: Queue) -> None:
        offset = await self._committed(queue)
        if offset is not None:
            self._world.note(f"{self.name} reads {queue} from {offset}")
            process_queue = self._queues[queue] = ProcessQueue(offset)
            self._spawn(self._pull_forever(queue, process_queue))

    async def _committed(self, queue: Queue) -> int | None:
        address = self._cluster.master(queue.broker_name)
        if address is None:
            return None
        header = QueueOffset(self._group, queue.topic, queue.queue_id)
        answer = await self._quietly(address, RequestCode.QUERY_CONSUMER_OFFSET, write(header))
        return read(Offset, answer.ext).offset if answer is not None else None

    # Messages

    async def _pull_forever(self, queue: Queue, process_queue: ProcessQueue) -> None:
        while not process_queue.is_dropped:
            if len(process_queue.unhandled) > CACHED:
                await asyncio.sleep(CACHE_LOOK_S)
                continue
            try:
                connection = await self._cluster.broker(queue.broker_name)
                answer = await self._pull(connection, queue, process_queue)
            except RocketletError:
                await asyncio.sleep(PULL_RETRY_S)
                continue
            if process_queue.is_dropped:
                return
            if answer.code == ResponseCode.PULL_OFFSET_MOVED:
                await self._move(queue, process_queue, read(PullMessageResult, answer.ext).next_begin_offset)
            elif answer.code in (
                ResponseCode.SUCCESS,
                ResponseCode.PULL_NOT_FOUND,
                ResponseCode.PULL_RETRY_IMMEDIATELY,
            ):
                self._take_in(queue, process_queue, answer)
            else:
                await asyncio.sleep(PULL_RETRY_S)

    async def _pull(self, connection: Connection, queue: Queue, process_queue: ProcessQueue) -> Frame:
        subscription = next(item for item in self._subscriptions if item.topic == queue.topic)
        commits = process_queue.commit is not None and process_queue.commit > 0
        header = PullMessage(
            self._group,
            queue.topic,
            queue.queue_id,
            process_queue.next_offset,
            PULL_BATCH,
            PULL_SUSPEND | (PULL_COMMIT_OFFSET if commits else 0),  # postSubscriptionWhenPull is off by default
            process_queue.commit or 0,
            PULL_HOLD_MS,
            subscription.version,
        )
        return await connection.ask(RequestCode.PULL_MESSAGE, write(header), timeout_s=PULL_TIMEOUT_S)

    def _take_in(self, queue: Queue, process_queue: ProcessQueue, answer: Frame) -> None:
        records = list(decode_records(answer.body)) if answer.code == ResponseCode.SUCCESS else []
        process_queue.next_offset = read(PullMessageResult, answer.ext).next_begin_offset
        process_queue.unhandled |= {record.queue_offset for record in records}
        if not process_queue.unhandled:  # correctTagsOffset
            process_queue.advance(process_queue.next_offset)
        for record in () if self._is_stopping else records:
            self._submitted += 1
            process_queue.submitted += 1
            self._spawn(self._handle(process_queue, Message(record, queue, queue.topic, NO_LEASE)))

    async def _move(self, queue: Queue, process_queue: ProcessQueue, offset: int) -> None:
        """OFFSET_ILLEGAL: the queue is dropped after 10 s, and comes back with the next rebalance."""
        process_queue.commit = process_queue.next_offset = offset
        process_queue.is_dropped = True
        await asyncio.sleep(ILLEGAL_OFFSET_S)
        await self._persist_one(queue, process_queue)
        self._queues.pop(queue, None)

    async def _handle(self, process_queue: ProcessQueue, message: Message) -> None:
        async with self._threads:
            if not process_queue.is_dropped and not self._is_over:
                self._running += 1
                self._world.handled(self, message)
                await asyncio.sleep(self._world.handler_s())
                self._world.done(self, message)
                process_queue.handled(message.queue_offset)
                self._running -= 1
            self._submitted -= 1
            process_queue.submitted -= 1
