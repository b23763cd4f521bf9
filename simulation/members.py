"""The members of a simulated group: a consumer of ours, and models of Apache's push consumer, of a client that pops, and of a
push consumer of 5.x."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rocketlet.broker.grpc import schema
from rocketlet.client import Consumer, Message, RocketletError
from rocketlet.client.member.membership import Membership
from rocketlet.client.message import NO_LEASE
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol import bodies, group_bodies, headers, names
from rocketlet.protocol.admin_bodies import RunningQueue, encode_running_info
from rocketlet.protocol.allocation import AVG, STICKY, subscribe_queues
from rocketlet.protocol.bodies import ConsumerData, Heartbeat
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, PULL_SUSPEND, RequestCode, ResponseCode
from rocketlet.protocol.frame import Ext, Frame
from rocketlet.protocol.group_bodies import LiteAction, LiteSubscription, LockRequest
from rocketlet.protocol.headers import FROM_FIRST, read, write
from rocketlet.protocol.message import POP_CK, Record, decode_records
from rocketlet.protocol.names import Queue, parse_subscription
from rocketlet.protocol.properties import LITE_OFFSET, LITE_TOPIC, find

from tests.support.grpc_client import GrpcClient, grpc_client, resource

from .loop import Process
from .patches import raise_later

if TYPE_CHECKING:
    from .world import Node, World

ANSWERED_S = 1.0  # how long a member takes to reconnect and to receive its leases


class AnyMember:
    """What the world knows of each member. A consumer of ours is blind while its broker has seen its connection end and it
    has not."""

    is_ours = False

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        self.name = name
        self.topics = topics
        self.process = Process(name)
        self.blind_until_s = 0.0
        self.has_left = False
        self._world = world
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_blind(self) -> bool:
        return self.is_ours and self._world.loop.time() <= self.blind_until_s

    @property
    def is_unanswered(self) -> bool:
        """True if no broker may have answered it since its connection ended: it begins nothing, and does not know yet who
        owns the queues of its running handlers."""
        return self.is_ours and self._world.loop.time() <= self.blind_until_s + ANSWERED_S

    @property
    def others_pull(self) -> bool:
        return not {"ours", "foreign"}.isdisjoint(self._world.plan.kinds)

    @property
    def is_awake(self) -> bool:
        """True if it learns immediately what happens to it, so that no second fault hides the first one."""
        return not (self.process.is_paused or self.process.is_silent or self.is_blind)

    def assignment(self) -> set[Queue]:
        return set()

    def believes_in(self, queue: Queue) -> bool:
        """True if it takes the queue for its own, by its own clock."""
        return queue in self.assignment()

    async def join(self) -> None: ...

    async def leave(self) -> None: ...

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await action()


class Member(AnyMember):
    """A consumer of ours."""

    is_ours = True

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, topics)
        self._running: Counter[object] = Counter()
        plan = world.plan
        self.consumer = Consumer(
            world.name_server,
            world.group,
            dict.fromkeys(topics, plan.expression),
            self._handle,
            start="first",
            orderly=plan.orderly,
            strategy=STICKY if plan.sticky else AVG,
            concurrency=4,
            commit_interval_s=1.0,
            drain_s=plan.drain_s,
            on_assigned=lambda queues: world.taken(self, queues),
            on_revoked=lambda queues: world.note(f"{name} gives {sorted(map(str, queues))}"),
        )

    def assignment(self) -> set[Queue]:
        return self.consumer.assignment()

    @property
    def is_rebalanced(self) -> bool:
        return self.consumer._membership.is_rebalanced

    @property
    def releases(self) -> bool:
        """True if it hands a queue over, or should have begun to."""
        membership = self.consumer._membership
        return isinstance(membership, Membership) and bool(membership._leases.releasing)

    async def join(self) -> None:
        await self.consumer.__aenter__()

    async def leave(self) -> None:
        await self.consumer.__aexit__()

    def believes_in(self, queue: Queue) -> bool:
        process_queue = self.consumer.queues.get(queue)
        return process_queue is not None and process_queue.may_begin

    async def _handle(self, message: Message) -> None:
        world = self._world
        world.handled(self, message)
        one_at_a_time = message.queue if world.plan.orderly else (message.queue, message.queue_offset)
        if self._running[one_at_a_time]:
            raise_later(f"{self.name} handles {one_at_a_time} twice at a time")
        self._running[one_at_a_time] += 1
        try:
            await asyncio.sleep(world.handler_s())
        finally:
            self._running[one_at_a_time] -= 1
            if not self._running[one_at_a_time]:
                del self._running[one_at_a_time]
        world.done(self, message)


class Model(AnyMember):
    """A client of others by the remoting protocol, on our connections."""

    host = "192.0.2.1"
    consume_type = "CONSUME_PASSIVELY"

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, topics)
        self.client_id = f"{self.host}@{name}"
        self._cluster = ClusterView(world.name_server)
        self._subscriptions = [parse_subscription(topic, world.plan.expression) for topic in topics]

    async def _look_up(self) -> None:
        with suppress(RocketletError):
            for subscription in self._subscriptions:
                await self._cluster.find_route(subscription.topic)

    async def _beat(self) -> None:
        data = ConsumerData(
            self._world.group, self.consume_type, "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", tuple(self._subscriptions)
        )
        body = bodies.encode_heartbeat(Heartbeat(self.client_id, (data,)))
        for broker_name in self._cluster.masters():
            await self._ask(broker_name, RequestCode.HEART_BEAT, {}, body)

    async def _ask(self, broker_name: str, code: int, ext: Any, body: bytes = b"") -> Frame | None:
        """Return the response, or None if there is none that says success."""
        with suppress(RocketletError):
            connection = await self._cluster.broker(broker_name)
            return await connection.request(code, ext, body, REMOTE_S)
        return None

    async def _unregister(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ext = write(headers.UnregisterClient(self.client_id, consumer_group=self._world.group))
        for broker_name in self._cluster.masters():
            await self._ask(broker_name, RequestCode.UNREGISTER_CLIENT, ext)
        await self._cluster.close()


# Apache's push consumer

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
CACHED = 1000  # unhandled messages of a queue, from which on no more are pulled (pullThresholdForQueue)
CACHE_POLL_INTERVAL_S = 0.05
REPORTED = {"messageModel": "CLUSTERING", "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"}
AWAIT_S = 3.0  # how long a leaving member continues to handle its messages (awaitTerminationMillisWhenShutdown)


class ProcessQueue:
    """The messages of a queue that were pulled and are not handled yet, by offset."""

    def __init__(self, offset: int) -> None:
        self.next_offset = offset
        self.unhandled: set[int] = set()
        self.is_dropped = False
        self.submitted = 0  # to the executor, and not handled yet
        self.is_handling = False  # in order: True while its messages are handled
        self.commit = offset  # in memory (RemoteBrokerOffsetStore.readOffset keeps the loaded offset)

    def handled(self, offset: int) -> None:
        self.unhandled.discard(offset)
        if not self.is_dropped:
            self.advance(min(self.unhandled, default=self.next_offset))

    def advance(self, offset: int) -> None:
        self.commit = max(offset, self.commit)


class ForeignMember(Model):
    """A model of Apache's Java push consumer, 4.9.

    It neither locks nor drains. It requests the member list every 20 s and after each notification, allocates the queues by
    AVG, and drops a queue immediately while its handlers still run; their messages do not count any more. It loads the
    committed offset of a new queue (RebalanceImpl), commits with each pull (DefaultMQPushConsumerImpl) and every 5 s
    (MQClientInstance), and drops a queue for 10 s when its offset is illegal. A broker that asks receives its subscriptions
    and queues, not its id (ConsumerRunningInfo).
    """

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, topics)
        self._cluster.answer(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, lambda connection, frame: self._wake.set())
        self._cluster.answer(RequestCode.GET_CONSUMER_RUNNING_INFO, self._report)
        self._subscriptions.append(parse_subscription(names.retry_topic(world.group), "*"))
        self._queues: dict[Queue, ProcessQueue] = {}
        self._wake = asyncio.Event()
        self._threads = asyncio.Semaphore(THREADS)
        self._submitted = 0
        self._running = 0
        self._is_stopping = self._is_over = False

    def assignment(self) -> set[Queue]:
        """Return the queues that it claims and need not wait for."""
        return {queue for queue in self._queues if not self._world.is_held_back(self, queue)}

    def will_handle(self, queue: Queue) -> bool:
        """True if it will handle messages that it has of the queue. A leaving member finishes those that it had."""
        return queue in self._queues and self._queues[queue].submitted > 0 and not self._is_over

    async def join(self) -> None:
        await self._look_up()
        await self._beat()
        self._spawn(self._rebalance_forever())
        self._spawn(self._every(PERSIST_S, self._persist))
        self._spawn(self._every(HEARTBEAT_S, self._beat))
        self._spawn(self._every(ROUTE_S, self._look_up))

    async def leave(self) -> None:
        """Stop as shutdown() with awaitTerminationMillisWhenShutdown: handlers end, offsets are persisted, then it
        unregisters."""
        self._is_stopping = True  # the executor takes nothing more, and finishes what it has
        end_s = asyncio.get_running_loop().time() + AWAIT_S
        while self._submitted and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        self._is_over = True
        while self._running:
            await asyncio.sleep(0.01)
        await self._persist()
        await self._unregister()

    def _report(self, connection: Connection, frame: Frame) -> None:
        queues = {
            queue: RunningQueue(item.commit, len(item.unhandled), 0, False, item.is_dropped, 0)
            for queue, item in self._queues.items()
        }
        subscriptions = map(bodies.encode_subscription, self._subscriptions)
        connection.respond(frame, body=encode_running_info(REPORTED, subscriptions, queues))

    async def _persist(self) -> None:
        for queue, process_queue in list(self._queues.items()):
            await self._persist_one(queue, process_queue)

    async def _persist_one(self, queue: Queue, process_queue: ProcessQueue) -> None:
        header = headers.UpdateOffset(self._world.group, queue.topic, queue.queue_id, process_queue.commit, None)
        with suppress(RocketletError):
            connection = await self._cluster.broker(queue.broker_name)
            connection.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, write(header))

    async def _rebalance_forever(self) -> None:
        while True:
            self._wake.clear()
            for topic in [subscription.topic for subscription in self._subscriptions]:
                await self._rebalance(topic)
            with suppress(TimeoutError):
                async with asyncio.timeout(REBALANCE_S):
                    await self._wake.wait()

    async def _rebalance(self, topic: str) -> None:
        route = self._cluster.route(topic)
        queues = subscribe_queues(topic, route) if route is not None else []
        brokers = sorted({queue.broker_name for queue in queues} & self._cluster.masters().keys())
        if not brokers:
            return
        header = write(headers.ConsumerGroupHeader(self._world.group))
        answer = await self._ask(self._world.rng.choice(brokers), RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        if answer is None:
            return
        ids = names.sorted_ids(group_bodies.decode_members(answer.body))
        mine = set(AVG.allocate(self.client_id, queues, ids))
        before = {queue for queue in self._queues if queue.topic == topic}
        for queue in sorted(before - mine):
            self._queues[queue].is_dropped = True
            self._world.note(f"{self.name} drops {queue}")
            await self._drop(queue, self._queues[queue])
        for queue in sorted(mine - self._queues.keys()):
            if await self._may_take(queue):
                await self._take(queue)
        if before != {queue for queue in self._queues if queue.topic == topic}:
            await self._beat()  # RebalancePushImpl.messageQueueChanged

    async def _drop(self, queue: Queue, process_queue: ProcessQueue) -> None:
        """Give up a queue that is another member's by the list."""
        del self._queues[queue]
        await self._persist_one(queue, process_queue)

    async def _may_take(self, queue: Queue) -> bool:
        """Return True if the member may read a queue that is its own by the list."""
        return True

    async def _take(self, queue: Queue) -> None:
        header = write(headers.QueueOffset(self._world.group, queue.topic, queue.queue_id))
        answer = await self._ask(queue.broker_name, RequestCode.QUERY_CONSUMER_OFFSET, header)
        if answer is not None:
            offset = read(headers.Offset, answer.ext).offset
            self._world.note(f"{self.name} reads {queue} from {offset}")
            process_queue = self._queues[queue] = ProcessQueue(offset)
            self._spawn(self._pull_forever(queue, process_queue))

    async def _pull_forever(self, queue: Queue, process_queue: ProcessQueue) -> None:
        wanted = (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)
        while not process_queue.is_dropped:
            if len(process_queue.unhandled) > CACHED:
                await asyncio.sleep(CACHE_POLL_INTERVAL_S)
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
                await self._move(queue, process_queue, read(headers.PullMessageResult, answer.ext).next_begin_offset)
            elif answer.code in wanted:
                self._take_in(queue, process_queue, answer)
            else:
                await asyncio.sleep(PULL_RETRY_S)

    async def _pull(self, connection: Connection, queue: Queue, process_queue: ProcessQueue) -> Frame:
        subscription = next(item for item in self._subscriptions if item.topic == queue.topic)
        flags = PULL_SUSPEND | (PULL_COMMIT_OFFSET if process_queue.commit else 0)  # no postSubscriptionWhenPull
        header = headers.PullMessage(
            self._world.group, queue.topic, queue.queue_id, process_queue.next_offset, PULL_BATCH, flags,
            process_queue.commit, PULL_HOLD_MS, subscription.version,
        )  # fmt: skip
        return await connection.request_unchecked(RequestCode.PULL_MESSAGE, write(header), timeout_s=PULL_TIMEOUT_S)

    def _take_in(self, queue: Queue, process_queue: ProcessQueue, answer: Frame) -> None:
        records = list(decode_records(answer.body)) if answer.code == ResponseCode.SUCCESS else []
        process_queue.next_offset = read(headers.PullMessageResult, answer.ext).next_begin_offset
        process_queue.unhandled |= {record.queue_offset for record in records}
        if not process_queue.unhandled:  # correctTagsOffset
            process_queue.advance(process_queue.next_offset)
        if not self._is_stopping:
            self._submitted += len(records)
            process_queue.submitted += len(records)
            self._submit(process_queue, [Message(record, queue, queue.topic, NO_LEASE) for record in records])

    def _submit(self, process_queue: ProcessQueue, messages: list[Message]) -> None:
        for message in messages:
            self._spawn(self._handle(process_queue, message))

    async def _move(self, queue: Queue, process_queue: ProcessQueue, offset: int) -> None:
        """Drop a queue after 10 s, as OFFSET_ILLEGAL makes it; the next rebalance takes it again."""
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


# Apache's push consumer in order

LOCK_INTERVAL_S = 20.0
LOCK_LIVE_S = 30.0
UNLOCK_DELAY_S = 20.0
CONSUMING_S = 1.0  # how long a rebalance waits for the handler of a queue that it drops


class OrderlyForeignMember(ForeignMember):
    """A model of Apache's Java push consumer in order, 4.9.

    It locks a queue before it reads it (RebalanceImpl.lock), locks all of them again every 20 s (lockAll), and handles their
    messages one after the other while the last lock is younger than 30 s (ConsumeMessageOrderlyService). It drops a queue
    only if no handler of the queue runs, and unlocks it then, or 20 s later if it has messages of it (RebalancePushImpl).
    """

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, topics)
        self._locked_s: dict[Queue, float] = {}
        self._pending: dict[ProcessQueue, list[Message]] = {}

    async def join(self) -> None:
        await super().join()
        self._spawn(self._every(LOCK_INTERVAL_S, self._lock_all))

    async def _lock(self, code: int, *queues: Queue) -> set[Queue]:
        body = group_bodies.encode_lock_request(LockRequest(self.client_id, self._world.group, queues))
        answer = await self._ask(queues[0].broker_name, code, {}, body)
        if answer is None or code != RequestCode.LOCK_BATCH_MQ:
            return set()
        return set(group_bodies.decode_locked(answer.body))

    async def _lock_all(self) -> None:
        for broker_name in sorted({queue.broker_name for queue in self._queues}):
            mine = sorted(queue for queue in self._queues if queue.broker_name == broker_name)
            locked = await self._lock(RequestCode.LOCK_BATCH_MQ, *mine)
            for queue in mine:
                if queue in locked:
                    self._locked_s[queue] = self._world.loop.time()
                else:
                    self._locked_s.pop(queue, None)

    def _has_lock(self, queue: Queue) -> bool:
        return self._world.loop.time() - self._locked_s.get(queue, -math.inf) < LOCK_LIVE_S

    async def _may_take(self, queue: Queue) -> bool:
        if queue not in await self._lock(RequestCode.LOCK_BATCH_MQ, queue):
            return False
        self._locked_s[queue] = self._world.loop.time()
        return True

    async def _drop(self, queue: Queue, process_queue: ProcessQueue) -> None:
        await self._persist_one(queue, process_queue)
        end_s = self._world.loop.time() + CONSUMING_S
        while process_queue.is_handling:
            if self._world.loop.time() >= end_s:
                return  # it stays in the table, dropped, until the next rebalance
            await asyncio.sleep(0.01)
        del self._queues[queue]
        self._locked_s.pop(queue, None)
        if process_queue.unhandled:
            self._spawn(self._unlock_later(queue))
        else:
            await self._lock(RequestCode.UNLOCK_BATCH_MQ, queue)

    async def _unlock_later(self, queue: Queue) -> None:
        await asyncio.sleep(UNLOCK_DELAY_S)
        await self._lock(RequestCode.UNLOCK_BATCH_MQ, queue)

    async def _pull(self, connection: Connection, queue: Queue, process_queue: ProcessQueue) -> Frame:
        while not self._has_lock(queue) and not process_queue.is_dropped:
            await asyncio.sleep(PULL_RETRY_S)
        return await super()._pull(connection, queue, process_queue)

    def _submit(self, process_queue: ProcessQueue, messages: list[Message]) -> None:
        pending = self._pending.setdefault(process_queue, [])
        pending += messages
        if pending and not process_queue.is_handling:
            process_queue.is_handling = True
            self._spawn(self._handle_in_order(process_queue, pending))

    async def _handle_in_order(self, process_queue: ProcessQueue, pending: list[Message]) -> None:
        while pending and not process_queue.is_dropped and not self._is_over:
            if self._has_lock(pending[0].queue):
                await self._handle(process_queue, pending.pop(0))
            else:
                await asyncio.sleep(PULL_RETRY_S)
        process_queue.is_handling = False


# Clients that pop

POP_HEARTBEAT_S = 10.0
POLL_S = 5.0
INVISIBLE_S = 4.0
BATCH = 8
RETRY_S = 1.0
LAST_ATTEMPT = 4  # from this attempt on a message is handled well, so that a run ends
REMOTE_S = 3.0  # time for a request beyond its wait
LITE_TOPICS = ("a", "b", "c", "d", "e", "f")
LITE_SYNC_S = 10.0  # a broker that restarted knows the subscriptions after this
EXTENDED_S = 60.0  # visibility timeout of a delivery that the broker extends

Place = tuple[Queue, int]


@dataclass(eq=False)
class PoppedDelivery:
    """A message in flight, as its client knows it, since `since_s`, or extended then.

    Attributes:
        held_s: Until then no other client may get it. The broker extends that time of an `extended` one as long as nothing
            happens to it or to the client, unless its queue leaves the pool, which only happens where others pull.
        due_s: When it becomes visible after a negative acknowledgement.
        is_free: True if others may have it, for a reason that the broker may not know.
        is_sent: True if an acknowledgement was sent.
    """

    member: AnyMember
    queue: Queue
    offset: int
    body: bytes
    attempt: int
    handle: str
    popped_s: float
    is_extended: bool = False
    since_s: float = 0.0
    due_s: float | None = None
    is_free: bool = False
    is_sent: bool = False
    lite_topic: str = ""
    lite_offset: int = 0

    def __post_init__(self) -> None:
        self.place = self.queue, self.offset
        self.held_s = self.popped_s + (EXTENDED_S if self.is_extended else INVISIBLE_S)
        if self.is_extended and not self.member.others_pull:
            self.held_s = math.inf

    def renewed(self, held_s: float, now_s: float) -> None:
        self.held_s, self.since_s = max(self.held_s, held_s), now_s

    def interrupted(self) -> None:
        """The broker, the client or a connection was away: the broker extends the delivery no more, and frees it if its
        client is gone."""
        if self.is_extended:
            self.held_s = min(self.held_s, self.popped_s + EXTENDED_S)
            self.is_free = self.is_free or self.member.process.is_dead


class PoppingMember(Model):
    """A model of a client that pops: it handles, renews, returns, forgets and oversleeps messages by chance. It owns no
    queue, and handles messages in no order, of which `tests/broker/pops/test_model.py` has a model."""

    host = "192.0.2.2"
    consume_type = "CONSUME_POP"

    async def join(self) -> None:
        await self._look_up()
        await self._beat()
        self._spawn(self._every(POP_HEARTBEAT_S, self._beat))
        for topic in self.topics:
            for broker_name in sorted(self._cluster.masters()):
                self._spawn(self._pop_forever(topic, broker_name))

    async def leave(self) -> None:
        await self._unregister()

    async def _pop_forever(self, topic: str, broker_name: str) -> None:
        while True:
            header = headers.PopMessage(
                self._world.group, topic, -1, BATCH, int(INVISIBLE_S * 1000), int(POLL_S * 1000), FROM_FIRST,
                exp_type="TAG", exp=self._world.plan.expression, order=self._world.plan.orderly,
            )  # fmt: skip
            try:
                connection = await self._cluster.broker(broker_name)
                answer = await self._receive(connection, write(header))
            except RocketletError:
                await asyncio.sleep(RETRY_S)
                continue
            if answer.code == ResponseCode.SUCCESS:
                result = read(headers.PopMessageResult, answer.ext)
                popped_s = self._world.loop.time() - time.time() + result.pop_time / 1000
                self._take_in(topic, broker_name, list(decode_records(answer.body)), popped_s)
            elif answer.code != ResponseCode.POLLING_TIMEOUT:
                self._world.note(f"{self.name} is refused: {answer.code} {answer.remark}")
                await asyncio.sleep(RETRY_S)

    async def _receive(self, connection: Connection, ext: Ext) -> Frame:
        return await connection.request_unchecked(RequestCode.POP_MESSAGE, ext, timeout_s=POLL_S + REMOTE_S)

    def _take_in(self, topic: str, broker_name: str, records: list[Record], popped_s: float) -> None:
        found = [
            PoppedDelivery(
                self, Queue(topic, broker_name, record.queue_id), record.queue_offset, record.body,
                record.reconsume_times + 1,
                str(find(record.properties, POP_CK)), popped_s, lite_topic=find(record.properties, LITE_TOPIC) or "",
                lite_offset=int(find(record.properties, LITE_OFFSET) or 0),
            )
            for record in records
        ]  # fmt: skip
        self._world.popped(self, found)
        for delivery in found:
            self._spawn(self._handle(delivery))

    async def _handle(self, delivery: PoppedDelivery) -> None:
        rng, chance = self._world.rng, self._world.rng.random()
        if delivery.attempt >= LAST_ATTEMPT or chance < 0.6:
            await asyncio.sleep(rng.uniform(0, 1.5))
            await self._ack(delivery)
        elif chance < 0.72:
            await self._return(delivery, rng.choice((0.0, 0.3, 1.0, 3.0)))
        elif chance < 0.84:
            await self._handle_long(delivery)
        elif chance < 0.92:  # otherwise it is forgotten, and expires
            await asyncio.sleep(INVISIBLE_S + rng.uniform(0, 3))
            await self._ack(delivery)

    async def _handle_long(self, delivery: PoppedDelivery) -> None:
        """Renew it twice, early or just before it expires, and handle it for longer than its visibility timeout."""
        rng = self._world.rng
        for _ in range(2):
            await asyncio.sleep(INVISIBLE_S * 0.6 if rng.random() < 0.5 else INVISIBLE_S - rng.uniform(0.001, 0.1))
            sent_s = self._world.loop.time()
            if not await self._change(delivery, INVISIBLE_S):
                return
            if self._world.loop.time() < sent_s + INVISIBLE_S:
                self._world.renewed(delivery)
            delivery.renewed(sent_s + INVISIBLE_S, self._world.loop.time())
        await asyncio.sleep(INVISIBLE_S * 0.6)
        await self._ack(delivery)

    async def _return(self, delivery: PoppedDelivery, delay_s: float) -> None:
        sent_s = self._world.loop.time()
        delivery.held_s = min(delivery.held_s, sent_s + delay_s)
        if await self._change(delivery, delay_s):
            delivery.due_s = self._world.loop.time() + delay_s

    async def _change(self, delivery: PoppedDelivery, seconds: float) -> bool:
        lite_topic = delivery.lite_topic or None
        header = write(headers.ChangeInvisibleTime(*self._place(delivery), int(seconds * 1000), lite_topic=lite_topic))
        name = delivery.queue.broker_name
        return await self._ask(name, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header) is not None

    async def _ack(self, delivery: PoppedDelivery) -> None:
        self._world.acknowledging(delivery)
        header = write(headers.AckMessage(*self._place(delivery), delivery.lite_topic or None))
        answer = await self._ask(delivery.queue.broker_name, RequestCode.ACK_MESSAGE, header)
        if answer is not None:
            self._world.acknowledged_by(delivery)

    def _place(self, delivery: PoppedDelivery) -> tuple[str, str, int, str, int]:
        queue = delivery.queue
        if delivery.lite_topic:
            return self._world.group, queue.topic, 0, delivery.handle, delivery.lite_offset
        return self._world.group, queue.topic, queue.queue_id, delivery.handle, delivery.offset


class LiteMember(PoppingMember):
    """A model of a client that receives lite topics: the first member all of them, the others some by chance. It repeats its
    set, so that it gets a lite topic of an exclusive group back when nobody else has it."""

    async def join(self) -> None:
        rng, plan = self._world.rng, self._world.plan
        is_first = len(self._world.members) == 1
        count = len(LITE_TOPICS) if is_first else rng.randint(1, len(LITE_TOPICS))
        self._names = () if plan.lite == "wildcard" else tuple(rng.sample(LITE_TOPICS, count))
        await self._look_up()
        action = LiteAction.COMPLETE_ADD if is_first or plan.lite == "wildcard" else LiteAction.PARTIAL_ADD
        await self._synchronize(action)
        self._spawn(self._every(LITE_SYNC_S, self._repeat))
        for topic in self.topics:
            for broker_name in sorted(self._cluster.masters()):
                self._spawn(self._pop_forever(topic, broker_name))

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._synchronize(LiteAction.COMPLETE_REMOVE)
        await self._cluster.close()

    async def _repeat(self) -> None:
        await self._synchronize(LiteAction.COMPLETE_ADD)

    async def _synchronize(self, action: LiteAction) -> None:
        names = () if action is LiteAction.COMPLETE_REMOVE else self._names
        for topic in self.topics:
            change = LiteSubscription(action, self.client_id, self._world.group, topic, names)
            body = group_bodies.encode_lite_subscription(change)
            for broker_name in sorted(self._cluster.masters()):
                await self._ask(broker_name, RequestCode.LITE_SUBSCRIPTION_CTL, {}, body)

    async def _receive(self, connection: Connection, ext: Ext) -> Frame:
        header = headers.PopLiteMessage(
            self.client_id, self._world.group, str(ext["topic"]), BATCH, int(INVISIBLE_S * 1000), int(POLL_S * 1000)
        )
        return await connection.request_unchecked(
            RequestCode.POP_LITE_MESSAGE, write(header), timeout_s=POLL_S + REMOTE_S
        )


class FiveMember(AnyMember):
    """A model of a push consumer of 5.x, with a gRPC connection to each broker: brokers extend what it handles."""

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, topics)
        self._clients: dict[str, GrpcClient] = {}
        self._handling: set[asyncio.Task[None]] = set()
        self._group = resource(world.group)

    async def join(self) -> None:
        for node in self._world.nodes:
            self._spawn(self._serve(node))

    async def leave(self) -> None:
        """Stop receiving, end the handlers, and say so: what is left is redelivered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handling:
            await asyncio.wait(self._handling, timeout=5)
        self._world.freed(self)
        for task in self._handling:
            task.cancel()
        for name in self._clients:
            termination = schema.NotifyClientTerminationRequest(group=self._group)
            await self._call(name, "NotifyClientTermination", termination)
            self._clients[name].transport.close()

    async def _serve(self, node: Node) -> None:
        """Connect again and again; receive from each topic, and send heartbeats."""
        while True:
            try:
                async with asyncio.timeout(REMOTE_S):
                    address = f"127.0.0.1:{node.port}"
                    self._clients[node.name] = client = await grpc_client(address, client_id=f"five@{self.name}")
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            beat = partial(
                self._call, node.name, "Heartbeat", schema.HeartbeatRequest(client_type=2, group=self._group)
            )
            await beat()
            work = [asyncio.create_task(self._receive_forever(node.name, topic)) for topic in self.topics]
            work.append(asyncio.create_task(self._every(POP_HEARTBEAT_S, beat)))
            try:
                await client.is_lost.wait()
            finally:
                for task in work:
                    task.cancel()
            self._world.interrupted()
            self._world.freed(self)

    async def _call(self, broker_name: str, method: str, request: Any, wait_s: float = 0.0) -> list[Any]:
        """Return the parts of the response; none if the connection or the call failed."""
        client = self._clients.get(broker_name)
        if client is None or client.is_lost.is_set():
            return []
        call = client.begin(method, grpc_timeout=f"{int((wait_s + REMOTE_S) * 1000)}m")
        call.send(request, end=True)
        try:
            async with asyncio.timeout(wait_s + REMOTE_S):
                answers = await call.all()
                return answers if call.status == 0 else []
        except (TimeoutError, asyncio.CancelledError) as error:
            call.cancel()  # as gRPC's clients do at their deadline
            if isinstance(error, TimeoutError):
                return []
            raise

    async def _receive_forever(self, broker_name: str, topic: str) -> None:
        while True:
            request = schema.ReceiveMessageRequest(group=self._group, batch_size=BATCH, auto_renew=True)
            request.message_queue.topic.name, request.message_queue.id = topic, -1
            request.filter_expression.type, request.filter_expression.expression = 1, self._world.plan.expression
            request.long_polling_timeout.FromMilliseconds(int(POLL_S * 1000))
            answers = await self._call(broker_name, "ReceiveMessage", request, POLL_S)
            if not answers:
                await asyncio.sleep(RETRY_S)
                continue
            messages = [answer.message for answer in answers if answer.HasField("message")]
            self._take_in(topic, broker_name, messages)
            if not messages and answers[0].status.code != 40404:
                await asyncio.sleep(RETRY_S * 0.1)

    def _take_in(self, topic: str, broker_name: str, messages: list[Any]) -> None:
        found = []
        ahead_s = self._world.loop.time() - time.time()
        for message in messages:
            system = message.system_properties
            queue, handle = Queue(topic, broker_name, system.queue_id), system.receipt_handle
            popped_s = ahead_s + int(handle.split()[1]) / 1000  # the broker's time
            delivery = PoppedDelivery(
                self, queue, system.queue_offset, message.body, system.delivery_attempt, handle, popped_s, is_extended=True
            )  # fmt: skip
            found.append(delivery)
        self._world.popped(self, found)
        for delivery in found:
            task = asyncio.create_task(self._handle(delivery))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

    async def _handle(self, delivery: PoppedDelivery) -> None:
        rng = self._world.rng
        chance = rng.random()
        if chance < 0.1:
            await asyncio.sleep(rng.uniform(EXTENDED_S, EXTENDED_S + 40))  # the broker has to extend it
        else:
            await asyncio.sleep(rng.uniform(0, 1.5))
        self._world.acknowledging(delivery)
        request = schema.AckMessageRequest(group=self._group, topic=resource(delivery.queue.topic))
        request.entries.add(message_id="id", receipt_handle=delivery.handle)
        while not (answers := await self._call(delivery.queue.broker_name, "AckMessage", request)):
            await asyncio.sleep(RETRY_S)  # official clients retry an acknowledgement until there is a response
        if answers[0].status.code == 20000:
            self._world.acknowledged_by(delivery)
