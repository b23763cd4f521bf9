"""The push consumer: puts membership, pulls and handlers together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack, overload

from ..protocol import group_bodies, names
from ..protocol.allocation import AVG, Strategy
from ..protocol.bodies import Queue
from ..protocol.codes import RequestCode
from ..protocol.headers import SendBack, write
from ..protocol.subscription import TAG, Subscription
from .access import Access
from .arguments import (
    check_callable,
    check_count,
    check_group,
    check_seconds,
    check_start,
    check_strategy,
    parse_subscriptions,
)
from .broadcast import Broadcast
from .cluster import Cluster
from .config import COMMIT_INTERVAL_S, IDLE_COMMIT_S, MAX_HANDLER_CONCURRENCY, OFFSET_TIMEOUT_S, At, PullLimits, Start
from .deliveries import Deliveries, Receiver
from .errors import ConfigError
from .handling import BatchHandler, Handler, MessageHandler, Middleware, Outcome, Reject, RetryLater, Workers
from .lease import Lease
from .listeners import Assigned, Listener, placed, told
from .log import get_logger
from .membership import Membership
from .message import Message
from .offsets import GroupOffsets, Position, begin_offset
from .options import Options, Place
from .process_queue import ProcessQueue, offsets_to_commit
from .pulling import Puller
from .questions import Questions
from .standing import Standing

log = get_logger("rocketlet.consumer")

MAX_RECONSUME_TIMES = 16


class Consumer(Receiver):
    """A member of a consumer group.

        async with Consumer("host:port", "group", {"topic": "TagA || TagB"}, handler=work) as consumer: ...

    With a handler, messages are handled as they come. Without one, iterate (`async for message in consumer`, `async for
    messages in consumer.batches()`), or `await consumer.receive()` and settle each message by `ack`, `retry` or `reject`.

    - `subscriptions`: a topic, or expressions by topic: `*`, tags such as `TagA || TagB`, or `Sql("price > 5")`.
    - `handler`: gets a `Message`, or with `batch_size` a list of them. Returning None acknowledges, raising or returning
      RetryLater delivers again later, Reject gives the message up. A plain function runs in a thread.
    - `concurrency`: how many handlers run at once. `orderly`: one for each queue, in order; a failed message holds it up.
    - `broadcasting`: every member gets every message. `offsets_file` keeps this member's offsets between runs.
    - `start`: where a group without offsets begins. `strategy`: how members share queues. `pull`: how far to read ahead.
    - `max_reconsume_times`: how often a message is tried again; default 16.
    - `drain_s`: how long a queue that is given up waits for running handlers. What still runs then is delivered again.
    """

    @overload
    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: MessageHandler | None = None,
        *,
        batch_size: None = None,
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: BatchHandler | None = None,
        *,
        batch_size: int,
        **options: Unpack[Options],
    ) -> None: ...

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: Handler | None = None,
        *,
        batch_size: int | None = None,
        concurrency: int = 20,
        orderly: bool = False,
        broadcasting: bool = False,
        offsets_file: Path | None = None,
        start: Start = "last",
        strategy: Strategy = AVG,
        pull: PullLimits | None = None,
        max_reconsume_times: int | None = None,
        commit_interval_s: float = COMMIT_INTERVAL_S,
        drain_s: float = 30.0,
        on_assigned: Assigned | None = None,
        on_revoked: Listener | None = None,
        access: Access | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        check_group(group)
        check_callable("handler", handler)
        check_callable("on_assigned", on_assigned)
        check_callable("on_revoked", on_revoked)
        check_count("concurrency", concurrency, 1, MAX_HANDLER_CONCURRENCY)
        if batch_size is not None:
            check_count("batch_size", batch_size, 1)
        if max_reconsume_times is not None:
            check_count("max_reconsume_times", max_reconsume_times, 0)
        check_seconds("commit_interval_s", commit_interval_s)
        check_seconds("drain_s", drain_s, may_be_zero=True)
        for layer in middleware:
            check_callable("middleware", layer)
        check_start(start)
        check_strategy(strategy)
        self.group = group
        self._name_server = name_server
        self._subscriptions = parse_subscriptions(subscriptions)
        if not broadcasting:
            retry = names.retry_topic(group)
            self._subscriptions[retry] = Subscription(retry, version=int(time.time() * 1000))
        self._run_size = batch_size or 1
        self._handler = handler
        self._middleware = tuple(middleware)
        self._concurrency = concurrency
        self._orderly = orderly
        self._broadcasting = broadcasting
        self._max_reconsume_times = max_reconsume_times
        self._commit_interval_s = commit_interval_s
        self._drain_s = drain_s
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._limits = pull or PullLimits()
        super().__init__(takes_batches=batch_size is not None)
        self._queues: dict[Queue, ProcessQueue] = {}
        self._ending: dict[Queue, ProcessQueue] = {}  # no longer ours, but handlers of them still run
        self._idle_queues: set[ProcessQueue] = set()
        self._idle_commit: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._cluster = Cluster(name_server, access)
        self._membership: Membership | Broadcast = (
            Broadcast(self._cluster, group, self._subscriptions, self, start=start, offsets_file=offsets_file)
            if broadcasting
            else Membership(self._cluster, group, self._subscriptions, self, start=start, strategy=strategy)
        )
        self._began_ms = int(time.time() * 1000)
        self._questions = Questions(self._cluster, self)
        self._workers: Workers | None = None
        self._puller: Puller | None = None
        self._committer: asyncio.Task[None] | None = None
        self._is_started = False
        self._is_stopped = False
        self._is_paused = False

    @property
    def client_id(self) -> str:
        return self._membership.client_id

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Joins the group and starts. What is sent from now on is received.

        Raises ConnectionFailed if no name server can be reached, BrokerRefused for a filter that brokers do not take, and
        ConfigError the second time.
        """
        if self._is_started:
            raise ConfigError("this consumer has been started before; make another one")
        self._is_started = True
        self._puller = Puller(
            self._cluster,
            self.group,
            self._subscriptions,
            self._limits,
            span_counts=not self._orderly,
            commits=not self._broadcasting,
            on_messages=self._take,
            on_moved=self._correct_offset,
        )
        if self._handler is not None:
            self._workers = self._make_workers(self._handler)
            self._workers.start()
        else:
            self._deliveries = Deliveries(
                orderly=self._orderly,
                max_tries=self._max_tries,
                send_back=self._send_back,
                on_acknowledged=self._acknowledged,
            )
        self._cluster.start()
        try:
            await self._check_filters()
            await self._membership.join()
        except BaseException:
            await self._cluster.close()
            if self._workers is not None:
                await self._workers.stop()
            raise
        self._committer = asyncio.create_task(self._commit_forever(), name="commit")

    async def _check_filters(self) -> None:
        """Asks a broker of each topic that is filtered by more than tags whether it takes the filter."""
        for topic, subscription in self._subscriptions.items():
            if subscription.kind == TAG:
                continue
            route = await self._cluster.find_route(topic)
            for broker in route.brokers if route else ():
                body = group_bodies.encode_client_check(self.client_id, self.group, subscription)
                connection = await self._cluster.broker(broker.name)
                await connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, body)

    def _make_workers(self, handler: Handler) -> Workers:
        return Workers(
            handler,
            takes_batches=self._takes_batches,
            concurrency=self._concurrency,
            orderly=self._orderly,
            max_tries=self._max_tries,
            send_back=self._send_back,
            on_acknowledged=self._acknowledged,
            middleware=self._middleware,
        )

    @property
    def _max_tries(self) -> int:
        """Of a message in order, which its member tries itself."""
        return 2**31 if self._max_reconsume_times is None else self._max_reconsume_times

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Lets running handlers finish, commits, gives up its queues and leaves the group. Harmless if not running."""
        if self._is_stopped or not self._is_started:
            return
        self._is_stopped = True
        if self._deliveries is not None:
            self._deliveries.close()
        if self._committer is not None:
            self._committer.cancel()
            await asyncio.gather(self._committer, return_exceptions=True)
        await self._membership.leave()
        if self._idle_commit is not None:
            self._idle_commit.cancel()
        if self._workers is not None:
            await self._workers.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cluster.close()

    # For whoever watches

    def assignment(self) -> set[Queue]:
        """The queues that this member owns now."""
        return set(self._membership.owned)

    async def assigned(self, timeout_s: float = 30.0) -> set[Queue]:
        """Waits until this member holds what the last rebalance gave it; its queues. Raises TimeoutError, saying why."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._membership.settled()
        except TimeoutError:
            reason = self._membership.unsettled()
            raise TimeoutError(f"{self.group} has not settled here in {timeout_s} s: {reason}") from None
        return self.assignment()

    async def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Stops these queues, or all, also those that come later. After it returns no handler begins; those that run finish.
        Raises ConfigError for a queue that is not this member's."""
        self._is_paused = self._is_paused or queues is None
        for process_queue in self._some(queues):
            process_queue.paused = True

    async def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """Continues where `pause` stopped. Raises as it does."""
        self._is_paused = self._is_paused and queues is not None
        for process_queue in self._some(queues):
            process_queue.paused = False
            self._go_on(process_queue)

    async def seek(self, to: Place, queues: Iterable[Queue] | None = None) -> None:
        """Continues from another place and commits it: "first", "last", a store time in ms since the epoch, or an offset for
        each queue. Concerns the queues named, or all of this member's except those of retries. Messages in memory are
        dropped; running handlers finish. Raises ConfigError for a queue that is not this member's, and RocketletError.
        """
        named = to.keys() if isinstance(to, Mapping) else queues
        retry = names.retry_topic(self.group)
        items = [
            process_queue
            for process_queue in self._some(named)
            if named is not None or process_queue.queue.topic != retry
        ]
        await asyncio.gather(*(self._seek_one(process_queue, to) for process_queue in items))

    async def _seek_one(self, process_queue: ProcessQueue, to: Place) -> None:
        connection = await self._cluster.broker(process_queue.queue.broker_name)
        place = At(to[process_queue.queue]) if isinstance(to, Mapping) else to
        offset = await begin_offset(connection, process_queue.queue, place)
        process_queue.seek(offset)
        await self._commit_and_pull(process_queue, offset)

    async def positions(self) -> dict[Queue, Position]:
        """How far this member has come in each of its queues. Raises RocketletError."""
        offsets = GroupOffsets(self._cluster, self.group)

        async def position(process_queue: ProcessQueue) -> Position:
            connection = await self._cluster.broker(process_queue.queue.broker_name)
            end = await begin_offset(connection, process_queue.queue, "last")
            return Position(await offsets.committed(process_queue.queue), process_queue.commit_offset, end)

        items = self._some(None)
        found = await asyncio.gather(*map(position, items))
        return {process_queue.queue: at for process_queue, at in zip(items, found, strict=True)}

    async def lag(self) -> int:
        """How many messages of this member's queues are not acknowledged yet. Raises RocketletError."""
        return sum(at.lag for at in (await self.positions()).values())

    def _some(self, queues: Iterable[Queue] | None) -> list[ProcessQueue]:
        if queues is None:
            return list(self._queues.values())
        missing = [str(queue) for queue in queues if queue not in self._queues]
        if missing:
            raise ConfigError(f"this member does not own {', '.join(missing)}")
        return [self._queues[queue] for queue in queues]

    async def commit(self) -> None:
        """Commits what was acknowledged, and returns when the brokers have answered."""
        await self._commit(offsets_to_commit(self._queues.values()))

    async def _commit(self, offsets: Mapping[Queue, int]) -> None:
        for queue in await self._membership.commit(offsets):
            process_queue = self._queues.get(queue)
            if process_queue is not None:
                process_queue.committed = offsets[queue]

    async def _commit_forever(self) -> None:
        standing = Standing(self.group)
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(self._commit_interval_s)
            standing.look(self._queues.values(), late_s=time.monotonic() - began_s - self._commit_interval_s)
            try:
                await self.commit()
            except Exception:
                log.exception("commit_failed", group=self.group)

    # What brokers ask (Asked)

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]:
        return self._queues

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        return self._subscriptions

    @property
    def settings(self) -> Mapping[str, str]:
        """What mqadmin shows of a consumer, by its names."""
        return {
            "PROP_NAMESERVER_ADDR": self._name_server,
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._began_ms),
        }

    def reset(self, offsets: Mapping[Queue, int]) -> None:
        """An administrator set other offsets: continue from there."""
        for queue, offset in offsets.items():
            process_queue = self._queues[queue]
            process_queue.seek(offset)
            self._spawn(self._commit_and_pull(process_queue, offset))

    async def try_one(self, message: Message) -> Outcome:
        if self._workers is None:
            raise ConfigError("this consumer iterates; only one with a handler can try a message")
        return await self._workers.try_one(message)

    # What membership tells (QueueUser)

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        process_queue = ProcessQueue(queue, offset, lease)
        process_queue.paused = self._is_paused
        self._queues[queue] = process_queue
        if self._on_assigned is None:
            self._pull(process_queue)
            return
        process_queue.pulling = True  # not before it is known where to begin
        later = placed(self._on_assigned, queue, partial(self._begin, process_queue, process_queue.generation))
        if later is not None:
            self._spawn(later)

    def _begin(self, process_queue: ProcessQueue, generation: int, offset: int | None) -> None:
        """The listener has been told, and may have said where to begin. A seek meanwhile counts for more."""
        if process_queue.generation == generation:
            process_queue.pulling = False
            if offset is not None:
                process_queue.next_offset = offset
            self._pull(process_queue)

    async def give_queue(self, queue: Queue) -> int | None:
        process_queue = self._queues.get(queue)
        if process_queue is None:
            return None
        process_queue.stop()
        try:
            async with asyncio.timeout(self._drain_s):
                await process_queue.idle()
        except TimeoutError:
            log.warning("handlers_still_running", queue=str(queue), hint="their messages will be delivered again")
        self._tell(self._on_revoked, queue)
        return None if process_queue.dropped else process_queue.commit_offset

    def lose_queue(self, queue: Queue) -> None:
        process_queue = self._queues.pop(queue, None)
        if process_queue is not None:
            if not process_queue.stopped:
                self._tell(self._on_revoked, queue)
            process_queue.drop()
            if process_queue.running:
                self._ending[queue] = process_queue

    def is_running(self, queue: Queue) -> bool:
        return queue in self._ending

    async def ended(self, queue: Queue) -> None:
        await self._ending[queue].idle()
        del self._ending[queue]

    def suspend_queue(self, queue: Queue) -> None:
        process_queue = self._queues.get(queue)
        if process_queue is not None:
            process_queue.suspended = True

    def resume_queue(self, queue: Queue) -> None:
        process_queue = self._queues.get(queue)
        if process_queue is None:
            return
        process_queue.suspended = False
        process_queue.committed = None  # a broker that was killed may have lost the last commits
        self._go_on(process_queue)

    def _go_on(self, process_queue: ProcessQueue) -> None:
        """What is cached may begin, and the queue is pulled again."""
        if self._workers is not None:
            self._workers.resume(process_queue)
        elif self._deliveries is not None:
            self._deliveries.resume(process_queue)
        self._pull(process_queue)

    def _tell(self, listener: Listener | None, queue: Queue) -> None:
        if listener is not None:
            answer = told(listener, queue)
            if answer is not None:
                self._spawn(answer)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Messages

    def _pull(self, process_queue: ProcessQueue) -> None:
        assert self._puller is not None
        self._puller.pull(process_queue)

    def _take(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        runs = process_queue.add(messages, next_offset, self._run_size)
        if self._workers is not None:
            self._workers.put(runs)
        elif self._deliveries is not None:
            self._deliveries.put(runs)

    def _acknowledged(self, process_queue: ProcessQueue) -> None:
        if not process_queue.messages and not self._broadcasting and not process_queue.dropped:
            self._idle_queues.add(process_queue)
            if self._idle_commit is None:
                self._idle_commit = asyncio.get_running_loop().call_later(IDLE_COMMIT_S, self._commit_idle)
        if process_queue.throttled and self._puller is not None:
            self._puller.resume(process_queue)

    def _commit_idle(self) -> None:
        """Commits queues of which everything is handled: their next pull, which would say so, is held by the broker."""
        self._idle_commit = None
        queues, self._idle_queues = self._idle_queues, set()
        offsets = offsets_to_commit(
            process_queue for process_queue in queues if not process_queue.messages and not process_queue.stopped
        )
        if offsets:
            self._spawn(self._commit(offsets))

    def _correct_offset(self, process_queue: ProcessQueue, offset: int) -> None:
        """The broker does not have the offset: go on from the one that it names, and let the group know."""
        log.warning("offset_moved", queue=str(process_queue.queue), asked=process_queue.next_offset, corrected=offset)
        process_queue.seek(offset)
        self._spawn(self._commit_and_pull(process_queue, offset))

    async def _commit_and_pull(self, process_queue: ProcessQueue, offset: int) -> None:
        await self._membership.commit({process_queue.queue: offset})
        self._pull(process_queue)

    async def _send_back(self, message: Message, delay_level: int) -> None:
        """To the broker, which delivers it again or keeps it as a dead letter. Raises RocketletError."""
        if self._broadcasting:
            log.warning("message_dropped", message=message.message_id, hint="broadcasting has no retries")
            return
        connection = await self._cluster.broker(message.queue.broker_name)
        header = SendBack(
            message.record.physical_offset,
            self.group,
            delay_level,
            message.message_id,
            message.topic,
            False,
            MAX_RECONSUME_TIMES if self._max_reconsume_times is None else self._max_reconsume_times,
        )
        await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header), timeout_s=OFFSET_TIMEOUT_S)


__all__ = ["Consumer", "Reject", "RetryLater"]
