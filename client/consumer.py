"""The push consumer: puts membership, pulls and handlers together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, Unpack, overload

from ..protocol import names
from ..protocol.allocation import AVG, Strategy
from ..protocol.queue import Queue
from .arguments import (
    batch_limits,
    check_callable,
    check_count,
    check_group,
    check_handler,
    check_kind,
    check_layers,
    check_models,
    check_place,
    check_seconds,
    check_start,
    check_strategy,
    parse_subscriptions,
    with_retries,
)
from .config import (
    COMMIT_INTERVAL_S,
    MAX_HANDLER_CONCURRENCY,
    MAX_INT,
    SUSPEND_QUEUE_S,
    At,
    PullLimits,
    Start,
)
from .consuming.assignment import Assignment
from .consuming.commits import Commits
from .consuming.decoding import Decode, Decoding, Value, ValueHandler, ValuesHandler
from .consuming.deliveries import Deliveries, Receiver
from .consuming.filling import Filling
from .consuming.handling import BatchHandler, Handler, MessageHandler, Middleware, Outcome, Reject, RetryLater, Workers
from .consuming.listeners import Assigned, Listener
from .consuming.process_queue import ProcessQueue, Run
from .consuming.pulling import Puller, check_filters
from .consuming.questions import Questions
from .consuming.retrying import RetryPolicy
from .consuming.returning import hand_back
from .errors import ConfigError
from .log import get_logger
from .member.broadcast import Broadcast, offsets_path
from .member.membership import Membership
from .member.offsets import GroupOffsets, Position, begin_offset
from .message import Message
from .options import Options, SeekPosition
from .sending.requests import is_awaited, reply_failure
from .wire.access import Access
from .wire.cluster import Cluster

log = get_logger("rocketlet.consumer")


class Consumer(Receiver):
    """A member of a consumer group.

        async with Consumer("host:port", "group", {"topic": "TagA || TagB"}, handler=work) as consumer: ...

    With a handler, messages are handled as they come. Without one, iterate (`async for message in consumer`, `async for
    messages in consumer.batches()`), or `await consumer.receive()` and settle each message by `ack`, `retry` or `reject`.

    - `subscriptions`: a topic, or expressions by topic: `*`, tags such as `TagA || TagB`, or `Sql("price > 5")`.
    - `handler`: gets a `Message`, or with `batch_size` a list of them. Returning None acknowledges, raising or returning
      RetryLater delivers again later, Reject gives the message up. A plain function runs in a thread.
    - `decode`: makes the handler's argument of a body, as pydantic's `Order.model_validate_json` does. A handler with two
      parameters gets the `Message`, too. A message that cannot be decoded is rejected, with the reason.
    - `concurrency`: how many handlers run at once. `orderly`: one for each queue, in order; a failed message holds it up for
      `suspend_queue_s`, and is tried again.
    - `broadcasting`: every member gets every message. `offsets_file` keeps this member's offsets between runs.
    - `start`: where a group without offsets begins. `strategy`: how members share queues. `pull`: how far to read ahead.
    - `batch_wait_s`: a batch waits so long for `batch_size` messages of its queue. Default: it is what a pull brought.
    - `retry`: a RetryPolicy. `max_reconsume_times`: how often a message is tried again; default 16.
    - `drain_s`: how long a queue that is given up waits for running handlers. Messages still in handlers then are delivered
      again.
    - `commit_interval_s`: how often offsets are committed that neither a pull nor an idle queue has committed.
    - `on_assigned`, `on_revoked`: called with a set of queues that have come or gone. The first may return where to begin, an
      offset by queue.
    - `middleware`: around every call of the handler. `access`: TLS, and the account that signs.
    - `client_name`: what members are called everywhere, such as the pod's name; default: address and process.
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

    @overload
    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: ValueHandler[Value],
        *,
        decode: Decode[Value],
        batch_size: None = None,
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: ValuesHandler[Value],
        *,
        decode: Decode[Value],
        batch_size: int,
        **options: Unpack[Options],
    ) -> None: ...

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, str] | str,
        handler: Callable[..., Any] | None = None,
        *,
        decode: Decode[Any] | None = None,
        batch_size: int | None = None,
        concurrency: int = 20,
        orderly: bool = False,
        broadcasting: bool = False,
        offsets_file: Path | str | None = None,
        start: Start = "last",
        strategy: Strategy = AVG,
        pull: PullLimits | None = None,
        batch_wait_s: float | None = None,
        retry: RetryPolicy | None = None,
        max_reconsume_times: int | None = None,
        commit_interval_s: float = COMMIT_INTERVAL_S,
        suspend_queue_s: float = SUSPEND_QUEUE_S,
        drain_s: float = 30.0,
        on_assigned: Assigned | None = None,
        on_revoked: Listener | None = None,
        access: Access | None = None,
        client_name: str | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        check_group(group)
        check_layers(middleware)
        check_handler(handler, decode, middleware, takes_batches=batch_size is not None)
        check_callable("on_assigned", on_assigned, "a set of queues")
        check_callable("on_revoked", on_revoked, "a set of queues")
        check_count("concurrency", concurrency, 1, MAX_HANDLER_CONCURRENCY)
        check_count("max_reconsume_times", 0 if max_reconsume_times is None else max_reconsume_times, 0, MAX_INT)
        check_seconds("commit_interval_s", commit_interval_s)
        check_seconds("suspend_queue_s", suspend_queue_s)
        check_seconds("drain_s", drain_s, may_be_zero=True)
        check_start(start)
        check_strategy(strategy)
        limits = batch_limits(batch_size, pull, batch_wait_s)
        check_kind("retry", retry, RetryPolicy)
        if retry is not None and max_reconsume_times is None:
            max_reconsume_times = retry.attempts - 1
        check_models(orderly=orderly, broadcasting=broadcasting, offsets_file=offsets_file)
        check_kind("access", access, Access)
        super().__init__(takes_batches=batch_size is not None, has_handler=handler is not None)
        self.group = group
        self.subscriptions = with_retries(group, parse_subscriptions(subscriptions), broadcasting=broadcasting)
        self._name_server = name_server
        self._run_size = batch_size or 1
        self._filling = Filling(self._run_size, batch_wait_s, self._put) if batch_wait_s else None
        self._retry = retry
        self._handler, self._decode = handler, decode
        self._middleware = tuple(middleware)
        self._concurrency = concurrency
        self._orderly, self._broadcasting = orderly, broadcasting
        self._max_reconsume_times = max_reconsume_times
        self._suspend_queue_s = suspend_queue_s
        self._cluster = Cluster(name_server, access, client_name)
        self._puller = self._make_puller(limits)
        self._assignment = Assignment(
            self._puller, drain_s=drain_s, on_assigned=on_assigned, on_revoked=on_revoked, on_resumed=self._resumed
        )
        self._membership = self._make_membership(start, strategy, offsets_file)
        self._commits = self._make_commits(commit_interval_s)
        self._questions = Questions(self._cluster, self, self._assignment.spawn)
        self._workers: Workers | None = None
        self._began_ms = int(time.time() * 1000)
        self._is_started = self._is_stopped = False

    @property
    def client_id(self) -> str:
        return self._membership.client_id

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Joins the group and starts. Messages that are sent from now on are received.

        Raises ConnectionFailed if no name server can be reached, BrokerRefused for a filter that brokers do not take, and
        ConfigError the second time.
        """
        if self._is_started:
            raise ConfigError(f"this consumer {self._failure or 'has been started before; make another one'}")
        self._is_started = True
        if self._handler is not None:
            self._workers = self._make_workers(self._handler)
            self._workers.start()
        else:
            self._deliveries = Deliveries(
                orderly=self._orderly,
                max_tries=self._max_tries,
                suspend_queue_s=self._suspend_queue_s,
                send_back=self._send_back,
                on_acknowledged=self._acknowledged,
                middleware=self._middleware,
            )
        self._cluster.start()
        try:
            await check_filters(self._cluster, self.client_id, self.group, self.subscriptions)
            await self._membership.join()
        except BaseException as error:
            self._fail(f"could not be started ({error}); make another one")
            await self._cluster.close()
            if self._workers is not None:
                await self._workers.stop()
            raise
        self._commits.start()

    def _make_puller(self, limits: PullLimits) -> Puller:
        return Puller(
            self._cluster,
            self.group,
            self.subscriptions,
            limits,
            span_counts=not self._orderly,
            commits=not self._broadcasting,
            on_messages=self._take,
            on_moved=self._correct_offset,
        )

    def _make_membership(
        self, start: Start, strategy: Strategy, offsets_file: Path | str | None
    ) -> Membership | Broadcast:
        member = (self._cluster, self.group, self.subscriptions, self._assignment)
        if self._broadcasting:
            return Broadcast(*member, start=start, offsets_file=offsets_path(offsets_file))
        return Membership(*member, start=start, strategy=strategy)

    def _make_commits(self, interval_s: float) -> Commits:
        store, spawn = self._membership.commit, self._assignment.spawn
        return Commits(self.group, self._assignment.queues, interval_s=interval_s, store=store, spawn=spawn)

    def _make_workers(self, handler: Handler) -> Workers:
        decoding = Decoding(self._decode, handler, self._send_back) if self._decode is not None else None
        return Workers(
            handler,
            takes_batches=self._takes_batches,
            concurrency=self._concurrency,
            orderly=self._orderly,
            max_tries=self._max_tries,
            suspend_queue_s=self._suspend_queue_s,
            send_back=self._send_back,
            on_acknowledged=self._acknowledged,
            on_failed=self._failed,
            middleware=self._middleware,
            inner=decoding.around if decoding is not None else None,
            judge=self._retry.outcome if self._retry is not None else None,
        )

    def _failed(self, message: Message, reason: str) -> None:
        if is_awaited(message):
            self._assignment.spawn(reply_failure(self._cluster, self.group, message, reason))

    @property
    def _max_tries(self) -> int:
        """How often a message in order is tried. Its member counts, not the broker."""
        return MAX_INT if self._max_reconsume_times is None else self._max_reconsume_times

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Lets running handlers finish, commits, gives up its queues and leaves the group. Harmless if not running. Raises
        ConfigError in a handler, which cannot wait for its own end, and in another event loop."""
        if self._is_stopped or not self._is_started:
            return
        self.check_stop()
        self._cluster.check_home()
        self._is_stopped = True
        if self._deliveries is not None:
            self._deliveries.close()
        async with AsyncExitStack() as after:  # also if cancelled, because handlers take too long
            after.push_async_callback(self._cluster.close)
            after.push_async_callback(self._assignment.finished)
            if self._workers is not None:
                after.push_async_callback(self._workers.stop)
            after.callback(self._commits.stop_idle)
            after.push_async_callback(self._membership.abandon)
            await self._commits.stop()
            await self._membership.leave()

    def check_stop(self) -> None:
        """Raises ConfigError in a handler."""
        if self._workers is not None and self._workers.is_handling_here():
            raise ConfigError(
                "stop: a handler cannot wait for its own end; set an event for whoever opened the consumer, and return"
            )

    def _check_running(self) -> None:
        if not self._is_started or self._is_stopped:
            state = "has been stopped; make another one" if self._is_started else "has not been started"
            raise ConfigError(f"this consumer {self._failure or state}")
        self._cluster.check_home()

    # For whoever watches

    def assignment(self) -> set[Queue]:
        """The queues that this member owns now."""
        return set(self._membership.owned)

    async def assigned(self, timeout_s: float = 30.0) -> set[Queue]:
        """Waits until this member holds its share of the last rebalance. Returns its queues. Raises TimeoutError, saying
        why, and ConfigError for a consumer that does not run."""
        self._check_running()
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
        self._cluster.check_home()
        self._assignment.pause(queues)

    async def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """Continues where `pause` stopped. Raises as it does."""
        self._cluster.check_home()
        self._assignment.resume(queues)

    async def seek(self, to: SeekPosition, queues: Iterable[Queue] | None = None) -> None:
        """Continues from another place and commits it: "first", "last", a store time in ms since the epoch, or an offset for
        each queue. Concerns the queues named, or all of this member's except those of retries. Messages in memory are
        dropped; running handlers finish. Raises ConfigError for another place, for a queue that is not this member's and for
        a consumer that does not run, and RocketletError.
        """
        check_place(to)
        self._check_running()
        named = to.keys() if isinstance(to, Mapping) else queues
        retry = names.retry_topic(self.group)
        sought = [
            process_queue
            for process_queue in self._assignment.some(named)
            if named is not None or process_queue.queue.topic != retry
        ]
        await asyncio.gather(*(self._seek_one(process_queue, to) for process_queue in sought))

    async def _seek_one(self, process_queue: ProcessQueue, to: SeekPosition) -> None:
        connection = await self._cluster.broker(process_queue.queue.broker_name)
        place = At(to[process_queue.queue]) if isinstance(to, Mapping) else to
        offset = await begin_offset(connection, process_queue.queue, place)
        process_queue.seek(offset)
        await self._go_on_from(process_queue, offset, sought=not isinstance(to, Mapping))

    async def positions(self) -> dict[Queue, Position]:
        """How far this member has come in each of its queues. Raises RocketletError, and ConfigError for a consumer that does
        not run or has not got its queues yet: `assigned` waits for them."""
        self._check_running()
        if not self._membership.owned and not self._membership.is_settled:
            raise ConfigError(f"{self.group} has given this consumer no queues yet: {self._membership.unsettled()}")
        offsets = GroupOffsets(self._cluster, self.group)

        async def position(process_queue: ProcessQueue) -> Position:
            connection = await self._cluster.broker(process_queue.queue.broker_name)
            end = await begin_offset(connection, process_queue.queue, "last")
            return Position(await offsets.committed(process_queue.queue), process_queue.commit_offset, end)

        owned = dict(self.queues)
        positions = await asyncio.gather(*map(position, owned.values()))
        return dict(zip(owned, positions, strict=True))

    async def lag(self) -> int:
        """How many messages of this member's queues are not acknowledged yet. Raises as `positions` does."""
        return sum(position.lag for position in (await self.positions()).values())

    async def commit(self) -> None:
        """Commits acknowledged messages, and returns when the brokers have answered."""
        self._cluster.check_home()
        await self._commits.commit()

    # Brokers' questions (Asked)

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]:
        return self._assignment.queues

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that mqadmin shows of a consumer, by its names."""
        return {
            "PROP_NAMESERVER_ADDR": self._name_server,
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._began_ms),
        }

    def reset(self, offsets: Mapping[Queue, int]) -> None:
        """An administrator set other offsets: continue from there."""
        for queue, offset in offsets.items():
            process_queue = self.queues[queue]
            process_queue.seek(offset)
            self._assignment.spawn(self._go_on_from(process_queue, offset, sought=True))

    async def try_one(self, message: Message) -> Outcome:
        if self._workers is None:
            raise ConfigError("this consumer iterates; only one with a handler can try a message")
        return await self._workers.try_one(message)

    def _take(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        if self._filling is not None:
            self._filling.take(process_queue, messages, next_offset)
        else:
            self._put(process_queue.add(messages, next_offset, self._run_size))

    def _put(self, runs: Sequence[Run]) -> None:
        if self._workers is not None:
            self._workers.put(runs)
        elif self._deliveries is not None:
            self._deliveries.put(runs)

    def _resumed(self, process_queue: ProcessQueue) -> None:
        if self._workers is not None:
            self._workers.resume(process_queue)
        elif self._deliveries is not None:
            self._deliveries.resume(process_queue)

    def _acknowledged(self, process_queue: ProcessQueue) -> None:
        if not process_queue.messages and not self._broadcasting and not process_queue.is_dropped:
            self._commits.queue_is_idle(process_queue)
        if process_queue.pull.is_throttled:
            self._puller.resume(process_queue)

    def _correct_offset(self, process_queue: ProcessQueue, offset: int) -> None:
        """The broker does not have the offset: go on from the one that it names, and let the group know."""
        log.warning("offset_moved", queue=str(process_queue.queue), asked=process_queue.next_offset, corrected=offset)
        process_queue.move(offset)
        self._assignment.spawn(self._commit_and_pull(process_queue, process_queue.commit_offset))

    async def _commit_and_pull(self, process_queue: ProcessQueue, offset: int) -> None:
        try:
            await self._membership.commit({process_queue.queue: offset})
        finally:  # also when the file of a broadcasting consumer cannot be written
            self._puller.pull(process_queue)

    async def _go_on_from(self, process_queue: ProcessQueue, offset: int, *, sought: bool) -> None:
        await self._membership.commit_place(process_queue.queue, offset, sought=sought)
        self._puller.pull(process_queue)

    async def _send_back(self, message: Message, delay_level: int, reason: str) -> None:
        """Sends a message back to the broker, which delivers it again or keeps it as a dead letter. Raises
        RocketletError."""
        if self._broadcasting:
            log.warning("message_dropped", message=message.message_id, hint="broadcasting has no retries")
            return
        await hand_back(self._cluster, self.group, message, delay_level, reason, self._max_reconsume_times)


__all__ = ["Consumer", "Reject", "RetryLater"]
