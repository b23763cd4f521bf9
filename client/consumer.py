"""The push consumer: puts membership, pulls and handlers together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Unpack, overload

from ..protocol import names
from ..protocol.queue import Queue
from .arguments import (
    batch_limits,
    check_group,
    check_handler,
    check_place,
    chosen,
    parse_subscriptions,
    takes,
    with_retries,
)
from .config import At, PullLimits
from .consuming.assignment import Assignment
from .consuming.calling import Calling
from .consuming.commits import Commits
from .consuming.decoding import Decode, Decoding, Value, ValueHandler, ValuesHandler
from .consuming.deliveries import Deliveries
from .consuming.filling import Filling
from .consuming.handling import BatchHandler, Handler, Handling, MessageHandler, Reject, RetryLater, Workers
from .consuming.process_queue import ProcessQueue, Run
from .consuming.pulling import Puller, check_filters
from .consuming.questions import Questions
from .consuming.returning import RetryLimit, hand_back
from .errors import ConfigError
from .log import get_logger
from .member.broadcast import Broadcast
from .member.membership import Membership
from .member.offsets import GroupOffsets, Position, begin_offset
from .message import Message, record_fault
from .options import ConsumerOptions, SeekPosition, check_models, most_retries
from .receiving import Receiver
from .sending.requests import is_awaited, reply_failure

log = get_logger("rocketlet.consumer")


@takes(ConsumerOptions)
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
        super().__init__(name_server, group, subscribed, options)
        self._handler, self._decode = handler, decode
        self._has_handler, self._takes_batches = handler is not None, batch_size is not None
        self._run_size = batch_size or 1
        wait_s = options["batch_wait_s"]
        self._filling = Filling(self._run_size, wait_s, self._put) if wait_s else None
        self._orderly = options["orderly"]
        self._puller = self._make_puller(limits)
        self._assignment = Assignment(
            self._puller,
            drain_s=options["drain_s"],
            on_assigned=options["on_assigned"],
            on_revoked=options["on_revoked"],
            on_resumed=self._resumed,
        )
        self._membership = self._make_membership()
        self._commits = self._make_commits()
        self._retry_limit = RetryLimit(self._cluster, group, max_reconsume_times)
        self._questions = Questions(self._cluster, self, self._assignment.spawn)
        self._workers: Workers | None = None

    @property
    def client_id(self) -> str:
        return self._membership.client_id

    # Life

    async def _begin(self) -> None:
        if self._handler is not None:
            self._workers = self._make_workers(self._handler)
            self._workers.start()
        else:
            self._deliveries = self._make_deliveries()
        await check_filters(self._cluster, self.client_id, self.group, self.subscriptions)
        await self._membership.join()
        self._commits.start()

    async def _undo(self) -> None:
        if self._deliveries is not None:
            self._deliveries.close()  # tells those that wait for a message
            self._deliveries = None
        await self._cluster.close()
        if self._workers is not None:
            await self._workers.stop()

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

    def _make_membership(self) -> Membership | Broadcast:
        member = (self._cluster, self.group, self.subscriptions, self._assignment)
        start = self._options["start"]
        if self._broadcasting:
            return Broadcast(*member, start=start, offsets_file=self._options["offsets_file"])
        return Membership(*member, start=start, strategy=self._options["strategy"])

    def _make_commits(self) -> Commits:
        interval_s = self._options["commit_interval_s"]
        store, spawn = self._membership.commit, self._assignment.spawn
        return Commits(
            self.group,
            self._assignment.queues,
            interval_s=interval_s,
            store=store,
            spawn=spawn,
            limits=self._cluster.limits,
        )

    def _make_deliveries(self) -> Deliveries:
        return Deliveries(
            orderly=self._orderly,
            retry_limit=self._retry_limit.at,
            suspend_queue_s=self._options["suspend_queue_s"],
            send_back=self._send_back,
            on_acknowledged=self._acknowledged,
            middleware=self._options["middleware"],
        )

    def _make_workers(self, handler: Handler) -> Workers:
        decoding = Decoding(self._decode, handler, self._send_back) if self._decode is not None else None
        retry = self._options["retry"]
        inner = decoding.around if decoding is not None else None
        handling = Handling(
            self._takes_batches,
            self._concurrency,
            self._orderly,
            self._options["suspend_queue_s"],
            retry.outcome_by_level if retry is not None else None,
        )
        return Workers(
            Calling(handler, self._concurrency, self._options["middleware"], inner),
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
                after.push_async_callback(self._workers.stop)
            after.callback(self._commits.stop_idle)
            after.push_async_callback(self._membership.abandon)
            await self._commits.stop()
            await self._membership.leave()

    # Its queues, and how far it has come

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
