"""`Consumer`: a group member that pulls messages from its assigned queues, for a handler or for `receive` and iteration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, Unpack, overload

from ..protocol import names
from ..protocol.admin_bodies import RunningHandler
from ..protocol.names import Queue, Subscription
from .config import (
    At,
    batch_limits,
    check_group,
    check_handler,
    check_position,
    chosen,
    parse_subscriptions,
    takes,
    with_retries,
)
from .consuming.deliveries import Batches, Deliveries, Messages
from .consuming.handling import (
    AdminRequests,
    BatchHandler,
    Calling,
    Decode,
    Decoding,
    Handler,
    Handling,
    MessageHandler,
    Outcome,
    Reject,
    RetryLater,
    RetryLimit,
    RunDispatcher,
    Value,
    ValueHandler,
    ValuesHandler,
    WorkerPool,
    hand_back,
)
from .consuming.queues import Assignment, BatchBuffer, OffsetCommitter, ProcessQueue, Puller, Run, check_filters
from .errors import ConfigError, get_logger
from .member.membership import Broadcast, Membership
from .member.offsets import GroupOffsets, Position, begin_offset
from .message import Message, record_fault
from .options import ConsumerOptions, MemberOptions, SeekPosition, check_models, layers_of, most_retries
from .sending.requests import is_awaited, reply_failure
from .wire.cluster import ClusterView, Lifecycle, Stage

log = get_logger("rocketlet.consumer")


# ------------------------------------------------------------------------------
# The common part of all consumers: receiving and settling single messages, and administrative requests that brokers
# forward.


class HeldMessages(Protocol):
    """The in-flight messages of a consumer without a handler: returned to the application and not settled yet."""

    async def receive(self) -> Message | None:
        """Return the next message and hold it until it is settled. Return None once the consumer stops."""

    def acknowledge(self, message: Message) -> None: ...

    async def retry(self, message: Message, outcome: RetryLater) -> None: ...

    async def reject(self, message: Message, outcome: Reject) -> None: ...

    def is_held(self, message: Message) -> bool: ...

    def release(self, message: Message | None) -> None:
        """Stop holding this message, or all held messages if None, so that they are redelivered."""


class AnyConsumer(Lifecycle):
    """Common base of Consumer, SharedConsumer and LiteConsumer.

    Attributes:
        _workers: the worker pool that runs the handler; None without a handler, and until the consumer has started.
        _held: the in-flight messages; None with a handler, and until the consumer has started.
    """

    def __init__(
        self,
        name_server: str,
        group: str,
        subscriptions: Mapping[str, Subscription],
        options: MemberOptions,
        *,
        has_handler: bool,
        takes_batches: bool = False,
    ) -> None:
        super().__init__(ClusterView(name_server, options["access"], options["client_name"], options["limits"]))
        self.group = group
        self.subscriptions = subscriptions
        self._name_server = name_server
        self._concurrency = options["concurrency"]
        self._orderly = False
        self._has_handler, self._takes_batches = has_handler, takes_batches
        self._workers: WorkerPool | None = None
        self._held: HeldMessages | None = None
        self._made_ms = int(time.time() * 1000)

    def check_stop(self) -> None:
        if self._workers is not None and self._workers.is_handling_here():
            raise ConfigError(
                "stop: a handler cannot stop its own consumer, because stopping waits for the handler; set an event on "
                "which the code that opened the consumer waits, and return"
            )

    # Messages, without a handler

    async def receive(self, *, timeout_s: float | None = None) -> Message:
        """Return the next message. Settle it with `ack`, `retry` or `reject`.

        A `Consumer` sends no further pull for a queue while its unsettled messages exceed the `PullLimits`. Other consumers
        do not limit unsettled messages. They extend the visibility timeout of each message until it is settled, its
        lease has expired or the consumer stops.

        Raises:
            TimeoutError: no message arrived within `timeout_s` seconds.
            ConfigError: the consumer has a handler or a batch_size, or is not running.
        """
        held = self._held_messages()
        if self._takes_batches:
            raise ConfigError("receive: this consumer has a batch_size; iterate over batches()")
        try:
            async with asyncio.timeout(timeout_s):
                message = await held.receive()
        except TimeoutError:
            raise TimeoutError(f"receive: no message arrived within {timeout_s} s") from None
        if message is None:
            raise ConfigError(f"receive: the consumer {self._idle_reason}")
        return message

    async def ack(self, message: Message) -> None:
        """Acknowledge an in-flight message, which `receive` or an iteration has returned.

        Raises ConfigError if the message is not in flight in this consumer, or the consumer has a handler or is not running.
        """
        self._held_messages().acknowledge(message)

    async def retry(self, message: Message, outcome: RetryLater = RetryLater()) -> None:  # noqa: B008 (it is frozen)
        """Settle an in-flight message so that it is redelivered later, as if a handler had returned `outcome`.

        A `Consumer` accepts `RetryLater(delay_level=3)`. Other consumers also accept `RetryLater(delay=2.5)`.

        Raises:
            ConfigError: the message is not in flight in this consumer, or the consumer does not support the delay, has a
                handler or is not running.
            RocketletError: the broker did not accept the message (`Consumer` only). The message stays in flight, so you can
                settle it again.
        """
        await self._held_messages().retry(message, outcome)

    async def reject(self, message: Message, *, reason: str = "") -> None:
        """Settle an in-flight message as a dead letter, as if a handler had returned Reject. Raises what `retry` raises."""
        await self._held_messages().reject(message, Reject(reason))

    def is_in_hand(self, message: Message) -> bool:
        """Return True if `receive` or an iteration over single messages has returned the message, and it is neither settled
        nor released yet."""
        return self._held is not None and self._held.is_held(message)

    def release(self, message: Message | None = None) -> None:
        """Release this in-flight message, or all of them if None, so that they are redelivered. Call it when the
        application has stopped working on them."""
        if self._held is not None:
            self._held.release(message)

    def _held_messages(self) -> HeldMessages:
        """Return the in-flight messages. Raises ConfigError if the consumer has a handler or is not running."""
        if self._held is None:
            reason = self._idle_reason
            if self._has_handler and self._stage is not Stage.FAILED:
                reason = "has a handler, which gets its messages; create a consumer without a handler to receive them"
            raise ConfigError(f"this consumer {reason}")
        return self._held

    # Administrative requests (QueriedConsumer)

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that mqadmin shows for a consumer, under the names that mqadmin uses."""
        return {
            "PROP_NAMESERVER_ADDR": self._name_server,
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._made_ms),
        }

    def running_handlers(self, *, stacks: bool) -> Sequence[RunningHandler]:
        """Return the handler calls that have been running for longest, and the newest."""
        return () if self._workers is None else self._workers.calls.report(stacks=stacks)

    async def try_one(self, message: Message) -> Outcome:
        if self._workers is None:
            raise ConfigError("this consumer has no handler, so it cannot consume a message directly")
        return await self._workers.try_one(message)


# ------------------------------------------------------------------------------
# The push consumer: connects group membership, pulls and handlers.


@takes(ConsumerOptions)
class Consumer(AnyConsumer):
    """A member of a consumer group.

        async with Consumer("host:port", "group", {"topic": "TagA || TagB"}, handler=work) as consumer: ...

    With a handler, the consumer calls the handler for the messages that arrive. Without one, iterate (`async for
    message in consumer`, `async for messages in consumer.batches()`), or call `await consumer.receive()` and settle
    each message with `ack`, `retry` or `reject`.

    - `subscriptions`: a topic, or a mapping from topics to filters: `*`, tags such as `TagA || TagB`, or `Sql("price >
      5")`.
    - `handler`: gets a `Message`, or with `batch_size` a list of messages. Returning None acknowledges the message,
      returning RetryLater or raising has it redelivered later while retries are left, unless the `retry` policy says
      otherwise, and returning Reject makes it a dead letter. A broadcasting consumer drops such messages instead. A plain
      function runs in a thread.
    - `decode`: converts a message body to the handler's argument, for example pydantic's `Order.model_validate_json`. A
      handler with two parameters also gets the `Message`. A message whose body cannot be decoded is rejected with the
      reason.
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
        **options: Unpack[ConsumerOptions],
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
        **options: Unpack[ConsumerOptions],
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
        **options: Unpack[ConsumerOptions],
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
        **options: Unpack[ConsumerOptions],
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
        **options: Unpack[ConsumerOptions],
    ) -> None:
        check_group(group)
        self._options = options = chosen(ConsumerOptions, options)
        check_handler(handler, decode, options["middleware"], takes_batches=batch_size is not None)
        check_models(options)
        options["middleware"] = layers_of(options, handler, takes_batches=batch_size is not None)
        self._max_reconsume_times = max_reconsume_times = most_retries(options, handler)
        limits = batch_limits(batch_size, options["pull"], options["batch_wait_s"])
        self._broadcasting = options["broadcasting"]
        subscribed = with_retries(group, parse_subscriptions(subscriptions), broadcasting=self._broadcasting)
        super().__init__(
            name_server,
            group,
            subscribed,
            options,
            has_handler=handler is not None,
            takes_batches=batch_size is not None,
        )
        self._handler, self._decode = handler, decode
        self._run_size = batch_size or 1
        wait_s = options["batch_wait_s"]
        self._batch_buffer = BatchBuffer(self._run_size, wait_s, self._dispatch) if wait_s else None
        self._orderly = options["orderly"]
        self._puller = Puller(
            self._cluster,
            group,
            subscribed,
            limits,
            span_counts=not self._orderly,
            commits=not self._broadcasting,
            on_messages=self._on_messages,
            on_moved=self._correct_offset,
        )
        self._assignment = Assignment(
            self._puller,
            drain_s=options["drain_s"],
            on_assigned=options["on_assigned"],
            on_revoked=options["on_revoked"],
            on_resumed=self._resumed,
        )
        self._membership = self._make_membership()
        self._commits = OffsetCommitter(
            group,
            self._assignment.queues,
            interval_s=options["commit_interval_s"],
            store=self._membership.commit,
            spawn=self._assignment.spawn,
            limits=self._cluster.limits,
        )
        self._retry_limit = RetryLimit(self._cluster, group, max_reconsume_times)
        self._admin_requests = AdminRequests(self._cluster, self, self._assignment.spawn)
        self._dispatcher: RunDispatcher | None = None
        self._deliveries: Deliveries | None = None
        self._messages: Messages | None = None  # the iterator that `anext(consumer)` uses

    @property
    def client_id(self) -> str:
        return self._membership.client_id

    # Start and stop

    async def _begin(self) -> None:
        if self._handler is not None:
            self._dispatcher = self._make_dispatcher(self._handler)
            self._workers = self._dispatcher.pool
            self._workers.start()
        else:
            self._held = self._deliveries = Deliveries(
                orderly=self._orderly,
                retry_limit=self._retry_limit.at,
                suspend_queue_s=self._options["suspend_queue_s"],
                send_back=self._send_back,
                on_acknowledged=self._acknowledged,
                middleware=self._options["middleware"],
            )
        await check_filters(self._cluster, self.client_id, self.group, self.subscriptions)
        await self._membership.join()
        self._commits.start()

    async def _undo(self) -> None:
        if self._deliveries is not None:
            self._deliveries.close()  # so that tasks waiting in `receive` return
            self._held = self._deliveries = None
        await self._cluster.close()
        if self._workers is not None:
            await self._workers.cancel()

    def _make_membership(self) -> Membership | Broadcast:
        member = (self._cluster, self.group, self.subscriptions, self._assignment)
        start = self._options["start"]
        if self._broadcasting:
            return Broadcast(*member, start=start, offsets_file=self._options["offsets_file"])
        return Membership(*member, start=start, strategy=self._options["strategy"])

    def _make_dispatcher(self, handler: Handler) -> RunDispatcher:
        options, retry = self._options, self._options["retry"]
        decoding = Decoding(self._decode, handler, self._send_back) if self._decode is not None else None
        handling = Handling(
            self._takes_batches,
            self._concurrency,
            self._orderly,
            options["suspend_queue_s"],
            retry.outcome_by_level if retry is not None else None,
            None if self._max_reconsume_times is None else self._max_reconsume_times + 1,
            not self._broadcasting,
        )
        inner = decoding.around if decoding is not None else None
        return RunDispatcher(
            Calling(handler, self._concurrency, options["middleware"], inner),
            handling,
            send_back=self._send_back,
            retry_limit=self._retry_limit.at,
            on_acknowledged=self._acknowledged,
            on_failed=self._failed,
            limits=self._cluster.limits,
        )

    def _failed(self, message: Message, reason: str) -> None:
        if record_fault(message) is None and is_awaited(message):
            self._assignment.spawn(reply_failure(self._cluster, self.group, message, reason))

    async def _end(self) -> None:
        if self._deliveries is not None:
            self._deliveries.close()
        async with (
            AsyncExitStack() as after
        ):  # the callbacks run even if this is cancelled because handlers take too long
            after.push_async_callback(self._cluster.close)
            after.push_async_callback(self._assignment.finished)
            if self._workers is not None:
                after.push_async_callback(self._workers.cancel)
            after.callback(self._commits.stop_idle)
            after.push_async_callback(self._membership.abandon)
            await self._commits.stop()
            await self._membership.leave()

    # Messages, without a handler

    def __aiter__(self) -> Messages:
        """Return an iterator over single messages.

        Requesting the next message acknowledges the previous one, unless you have settled that with `retry` or `reject`. If
        `break` or an exception ends the loop, the last message is redelivered unless it is settled.
        """
        return Messages(self._checked_deliveries())

    def __anext__(self) -> Awaitable[Message]:
        """Return the next message of one iteration that lasts as long as the consumer. Cancelling the wait loses no
        message."""
        if self._messages is None:
            self._messages = Messages(self._checked_deliveries())
        return self._messages.__anext__()

    def batches(self) -> Batches:
        """Return an iterator over lists of up to `batch_size` messages of one queue. Requesting the next list
        acknowledges the previous one, unless it was released."""
        return Batches(self._checked_deliveries())

    def _checked_deliveries(self) -> Deliveries:
        self._held_messages()
        assert self._deliveries is not None
        return self._deliveries

    # Assigned queues and progress

    def assignment(self) -> set[Queue]:
        """Return the queues that this member owns now."""
        return set(self._membership.owned)

    async def assigned(self, timeout_s: float = 30.0) -> set[Queue]:
        """Wait until this member owns all queues that the last rebalance assigned to it, and return them.

        Create subscribed topics that do not exist, if brokers create topics automatically.

        Raises:
            TopicNotFound: a topic does not exist, and brokers do not create topics automatically or reject its
                creation.
            TimeoutError: the rebalance did not finish within `timeout_s` seconds; the text has the reason.
            ConfigError: the consumer is not running.
        """
        self._check_running()
        try:
            async with asyncio.timeout(timeout_s):
                for topic in self.subscriptions:
                    if not topic.startswith(names.RETRY_PREFIX):
                        await self._cluster.ensure_topic(topic)
                await self._membership.rebalanced()
        except TimeoutError:
            reason = self._membership.rebalance_fault()
            raise TimeoutError(f"the group {self.group} did not rebalance within {timeout_s} s: {reason}") from None
        return self.assignment()

    async def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Pause these queues, or if None all queues, including those that are assigned later.

        After this returns, no handler starts for them; running handlers finish.

        Raises ConfigError if this member does not own one of the queues.
        """
        self._cluster.check_home()
        self._assignment.pause(queues)

    async def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """Resume these paused queues, or all queues if None. Raises what `pause` raises."""
        self._cluster.check_home()
        self._assignment.resume(queues)

    async def seek(self, to: SeekPosition, queues: Iterable[Queue] | None = None) -> None:
        """Move the position of queues, and commit the new position. If that fails, the next commit includes it.

        Pulled messages that wait for a handler are dropped. Running handlers finish, but their results have no effect.

        Args:
            to: "first", "last", a store time in ms since the epoch, or a mapping from queues to offsets.
            queues: the queues to move; ignored if `to` is a mapping. Default: all assigned queues except those of the
                group's retry topic.

        Raises:
            ConfigError: `to` is invalid, this member does not own one of the queues, or the consumer is not running.
            RocketletError: a broker did not return the new offset.
        """
        check_position(to)
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
        await self._commit_and_continue(process_queue, offset, sought=not isinstance(to, Mapping))

    async def positions(self) -> dict[Queue, Position]:
        """Return the progress of this member in each of its queues.

        Raises:
            ConfigError: the consumer is not running, or no queue is assigned to it yet (`assigned` waits for that).
            RocketletError: a broker did not return its offsets.
        """
        self._check_running()
        if not self._membership.owned and not self._membership.is_rebalanced:
            raise ConfigError(
                f"the group {self.group} has assigned no queues to this consumer yet: "
                f"{self._membership.rebalance_fault()}; await assigned() first"
            )
        offsets = GroupOffsets(self._cluster, self.group)

        async def position(process_queue: ProcessQueue) -> Position:
            connection = await self._cluster.broker(process_queue.queue.broker_name)
            end = await begin_offset(connection, process_queue.queue, "last")
            committed = await offsets.committed(process_queue.queue)
            return Position(committed, process_queue.acknowledged(committed), end)

        owned = dict(self.queues)
        positions = await asyncio.gather(*map(position, owned.values()))
        return dict(zip(owned, positions, strict=True))

    async def lag(self) -> int:
        """Return the number of messages in this member's queues that are not acknowledged yet. Raises what `positions`
        raises."""
        return sum(position.lag for position in (await self.positions()).values())

    async def commit(self) -> None:
        """Commit the offsets of acknowledged messages. Return when the brokers have responded, or their requests have
        failed. Failures are logged, and the next commit includes the offsets.

        Raises ConfigError if the `offsets_file` of a broadcasting consumer cannot be written.
        """
        self._cluster.check_home()
        await self._commits.commit()

    # Administrative requests (QueriedConsumer)

    @property
    def queues(self) -> Mapping[Queue, ProcessQueue]:
        return self._assignment.queues

    def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Continue from offsets that an administrator has set, and commit them."""
        for queue, offset in offsets.items():
            process_queue = self.queues[queue]
            process_queue.seek(offset)
            self._assignment.spawn(self._commit_and_continue(process_queue, offset, sought=True))

    def _on_messages(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        if self._batch_buffer is not None:
            self._batch_buffer.add(process_queue, messages, next_offset)
        else:
            self._dispatch(process_queue.add(messages, next_offset, self._run_size))

    def _dispatch(self, runs: Sequence[Run]) -> None:
        if self._dispatcher is not None:
            self._dispatcher.put(runs)
        elif self._deliveries is not None:
            self._deliveries.put(runs)

    def _resumed(self, process_queue: ProcessQueue) -> None:
        if self._dispatcher is not None:
            self._dispatcher.resume(process_queue)
        elif self._deliveries is not None:
            self._deliveries.resume(process_queue)

    def _acknowledged(self, process_queue: ProcessQueue) -> None:
        if not process_queue.messages and not self._broadcasting and not process_queue.is_dropped:
            self._commits.queue_is_idle(process_queue)
        if process_queue.pull.is_throttled:
            self._puller.resume(process_queue)

    def _correct_offset(self, process_queue: ProcessQueue, offset: int) -> None:
        """Continue from the offset that the broker named, because it does not have the requested one, and commit it."""
        log.warning("offset_moved", queue=str(process_queue.queue), asked=process_queue.next_offset, corrected=offset)
        process_queue.move(offset)
        self._assignment.spawn(self._commit_and_pull(process_queue, process_queue.commit_offset))

    async def _commit_and_pull(self, process_queue: ProcessQueue, offset: int) -> None:
        try:
            await self._membership.commit({process_queue.queue: offset})
        finally:  # pulling continues even if the offsets file of a broadcasting consumer cannot be written
            self._puller.pull(process_queue)

    async def _commit_and_continue(self, process_queue: ProcessQueue, offset: int, *, sought: bool) -> None:
        await self._membership.commit_position(process_queue.queue, offset, sought=sought)
        self._puller.pull(process_queue)

    async def _send_back(self, message: Message, delay_level: int, reason: str, tries: int) -> None:
        """Send a message back to the broker, which redelivers it or stores it as a dead letter.

        Raises RocketletError if the broker does not accept the message.
        """
        if self._broadcasting:
            log.warning("message_dropped", message=message.message_id, hint="broadcasting has no retries")
            return
        await hand_back(self._cluster, self.group, message, delay_level, reason, tries, self._max_reconsume_times)
