"""`Consumer`: a member of a group that pulls from its assigned queues, with a handler or by `receive`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, Unpack, overload

from ..protocol import names
from ..protocol.names import Queue, Subscription
from .config import (
    At,
    batch_limits,
    check_group,
    check_handler,
    check_place,
    chosen,
    parse_subscriptions,
    takes,
    with_retries,
)
from .consuming.deliveries import Batches, Deliveries, Messages
from .consuming.handling import (
    BatchHandler,
    Calling,
    Decode,
    Decoding,
    Handler,
    Handling,
    MessageHandler,
    Outcome,
    Questions,
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
from .consuming.queues import Assignment, Filling, OffsetCommitter, ProcessQueue, Puller, Run, check_filters
from .errors import ConfigError, get_logger
from .member.membership import Broadcast, Membership
from .member.offsets import GroupOffsets, Position, begin_offset
from .message import Message, record_fault
from .options import ConsumerOptions, MemberOptions, SeekPosition, check_models, most_retries
from .sending.requests import is_awaited, reply_failure
from .wire.cluster import ClusterView, Lifecycle, Stage

log = get_logger("rocketlet.consumer")


# ------------------------------------------------------------------------------
# The common part of Consumer and SharedConsumer: messages that are received and settled one by one, and what brokers ask.


class HeldMessages(Protocol):
    """The messages that a consumer without a handler has handed out, until they are settled."""

    async def receive(self) -> Message | None:
        """Return the next message, which is held until it is settled; None once the consumer stops."""

    def acknowledge(self, message: Message) -> None: ...

    async def retry(self, message: Message, outcome: RetryLater) -> None: ...

    async def reject(self, message: Message, outcome: Reject) -> None: ...

    def is_held(self, message: Message) -> bool: ...

    def release(self, message: Message | None) -> None:
        """Give back this message, or all that are held."""


class AnyConsumer(Lifecycle):
    """The methods that both kinds of consumers have.

    Attributes:
        _workers: the tasks that run the handler, once a consumer with one has started.
        _held: the held messages, once a consumer without a handler has started.
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
                "stop: a handler cannot wait for its own end; set an event for whoever opened the consumer, and return"
            )

    # Messages, without a handler

    async def receive(self, *, timeout_s: float | None = None) -> Message:
        """The next message. Settle it by `ack`, `retry` or `reject`. A `Consumer` receives no more of a queue while
        `PullLimits.messages` of it are unsettled; a `SharedConsumer` receives any number, and extends their visibility
        timeouts until they are settled.

        Raises TimeoutError, and ConfigError if the consumer has a handler or a batch_size, or does not run.
        """
        held = self._held_messages()
        if self._takes_batches:
            raise ConfigError("receive: this consumer has a batch_size; iterate over batches()")
        try:
            async with asyncio.timeout(timeout_s):
                message = await held.receive()
        except TimeoutError:
            raise TimeoutError(f"receive: no message came in {timeout_s} s") from None
        if message is None:
            raise ConfigError(f"receive: the consumer {self._idle_reason}")
        return message

    async def ack(self, message: Message) -> None:
        """Acknowledges a message that was received, or that an iteration is at. Raises ConfigError for any other."""
        self._held_messages().acknowledge(message)

    async def retry(self, message: Message, outcome: RetryLater = RetryLater()) -> None:  # noqa: B008 (it is frozen)
        """Delivers a message again later, as a handler's RetryLater: a `Consumer` by `RetryLater(delay_level=3)`, a
        `SharedConsumer` by `RetryLater(delay=2.5)`, too. Raises ConfigError, and for a `Consumer` RocketletError if the
        broker does not take it; you can then settle it once more."""
        await self._held_messages().retry(message, outcome)

    async def reject(self, message: Message, *, reason: str = "") -> None:
        """Gives a message up, as a handler's Reject. Raises as `retry` does."""
        await self._held_messages().reject(message, Reject(reason))

    def is_in_hand(self, message: Message) -> bool:
        """Whether a message was received or iterated to, and is not settled yet."""
        return self._held is not None and self._held.is_held(message)

    def release(self, message: Message | None = None) -> None:
        """Gives back this message, or all that are held, to be delivered again: nobody works on them any more."""
        if self._held is not None:
            self._held.release(message)

    def _held_messages(self) -> HeldMessages:
        """Raises ConfigError for a consumer that has a handler, or does not run."""
        if self._held is None:
            reason = self._idle_reason
            if self._has_handler and self._stage is not Stage.FAILED:
                reason = "has a handler, which gets its messages; make one without to ask for messages"
            raise ConfigError(f"this consumer {reason}")
        return self._held

    # Brokers' questions (Asked)

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that mqadmin shows of a consumer, by its names."""
        return {
            "PROP_NAMESERVER_ADDR": self._name_server,
            "PROP_CONSUMEORDERLY": str(self._orderly).lower(),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._made_ms),
        }

    async def try_one(self, message: Message) -> Outcome:
        if self._workers is None:
            raise ConfigError("this consumer iterates; only one with a handler can try a message")
        return await self._workers.try_one(message)


# ------------------------------------------------------------------------------
# The push consumer: puts membership, pulls and handlers together.


@takes(ConsumerOptions)
class Consumer(AnyConsumer):
    """A member of a consumer group.

        async with Consumer("host:port", "group", {"topic": "TagA || TagB"}, handler=work) as consumer: ...

    With a handler, messages are handled as they come. Without one, iterate (`async for message in consumer`, `async for
    messages in consumer.batches()`), or `await consumer.receive()` and settle each message by `ack`, `retry` or `reject`.

    - `subscriptions`: a topic, or expressions by topic: `*`, tags such as `TagA || TagB`, or `Sql("price > 5")`.
    - `handler`: gets a `Message`, or with `batch_size` a list of them. Returning None acknowledges, raising or returning
      RetryLater delivers again later, Reject gives the message up. A plain function runs in a thread.
    - `decode`: makes the handler's argument of a body, as pydantic's `Order.model_validate_json` does. A handler with two
      parameters gets the `Message`, too. A message that cannot be decoded is rejected, with the reason.
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
        self._filling = Filling(self._run_size, wait_s, self._put) if wait_s else None
        self._orderly = options["orderly"]
        self._puller = Puller(
            self._cluster,
            group,
            subscribed,
            limits,
            span_counts=not self._orderly,
            commits=not self._broadcasting,
            on_messages=self._take,
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
        self._questions = Questions(self._cluster, self, self._assignment.spawn)
        self._dispatcher: RunDispatcher | None = None
        self._deliveries: Deliveries | None = None
        self._messages: Messages | None = None  # of `anext(consumer)`

    @property
    def client_id(self) -> str:
        return self._membership.client_id

    # Life

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
            self._deliveries.close()  # ends waits for a message
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
        async with AsyncExitStack() as after:  # also if cancelled, because handlers take too long
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
        """Messages one by one. A message is acknowledged when you ask for the next, unless `retry` or `reject` was called for
        it. If you leave the loop by `break` or an exception, the last one is delivered again."""
        return Messages(self._handed_out())

    def __anext__(self) -> Awaitable[Message]:
        """The next message, as in an iteration that lasts as long as the consumer. A wait that is cancelled loses nothing."""
        if self._messages is None:
            self._messages = Messages(self._handed_out())
        return self._messages.__anext__()

    def batches(self) -> Batches:
        """Lists of up to `batch_size` messages of one queue. A list is acknowledged when you ask for the next."""
        return Batches(self._handed_out())

    def _handed_out(self) -> Deliveries:
        self._held_messages()
        assert self._deliveries is not None
        return self._deliveries

    # Its queues, and how far it has come

    def assignment(self) -> set[Queue]:
        """The queues that this member owns now."""
        return set(self._membership.owned)

    async def assigned(self, timeout_s: float = 30.0) -> set[Queue]:
        """Waits until this member holds its share of the last rebalance. Returns its queues. A topic that does not exist is
        created if brokers create topics automatically. Raises TopicNotFound if they do not, TimeoutError, saying why, and
        ConfigError for a consumer that does not run."""
        self._check_running()
        try:
            async with asyncio.timeout(timeout_s):
                for topic in self.subscriptions:
                    if not topic.startswith(names.RETRY_PREFIX):
                        await self._cluster.ensure_topic(topic)
                await self._membership.rebalanced()
        except TimeoutError:
            reason = self._membership.rebalance_fault()
            raise TimeoutError(f"{self.group} is not rebalanced here after {timeout_s} s: {reason}") from None
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
        if not self._membership.owned and not self._membership.is_rebalanced:
            raise ConfigError(
                f"{self.group} has given this consumer no queues yet: {self._membership.rebalance_fault()}"
            )
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

    def reset(self, offsets: Mapping[Queue, int]) -> None:
        """An administrator set other offsets: continue from there."""
        for queue, offset in offsets.items():
            process_queue = self.queues[queue]
            process_queue.seek(offset)
            self._assignment.spawn(self._go_on_from(process_queue, offset, sought=True))

    def _take(self, process_queue: ProcessQueue, messages: list[Message], next_offset: int) -> None:
        if self._filling is not None:
            self._filling.take(process_queue, messages, next_offset)
        else:
            self._put(process_queue.add(messages, next_offset, self._run_size))

    def _put(self, runs: Sequence[Run]) -> None:
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
