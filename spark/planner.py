"""The planner of batches: it runs in a thread of Spark's Python process in the driver, with an event loop of its own.

Spark requests offsets between batches, and calls nothing while a batch runs. Work that must continue meanwhile, such as
heartbeats, runs here. An `OwnedQueues` object decides which queues are planned: a `QueryMember` gets its queues from
the group, a `Standalone` query reads all queues of its topics, or those of the option `assign`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import uvloop

from ..client.errors import ConnectionFailed, RocketletError, get_logger
from ..protocol.names import RETRY_PREFIX, Queue
from .checkpoint import EMPTY, MicroBatch, Part, Range, Ranges, TopicSnapshot, part_of, shared_out, to_offset
from .config import CALL_TIMEOUT_S, IDLE_INTERVAL_S, LEDGER_SILENCE_S, LEDGER_WATCH_S, MAX_NUMBER, ROUTE_RETRY_S
from .data_loss import gone, other_cluster, outside, recreated, unrouted
from .driver import Ledger
from .extents import BrokerOffsets
from .member import QueryMember
from .options import StreamOptions
from .patience import FailureTimeout
from .queues import Course, OwnedQueues
from .standalone import Standalone
from .view import View
from .worker import UPDATE

log = get_logger("rocketlet.spark")
T = TypeVar("T")


class Planner:
    """Planner of a query's batches.

    The constructor connects, but does not wait for messages. The public methods are called from Spark's thread, and wait
    for what they start in the planner's thread.

    Raises:
        RocketletError: no name server is reachable, or a topic does not exist
        ConfigError: the query cannot start where its options say, or a broker rejects the filter
        DataLossError: the topics are in another cluster than the checkpoint's, and failOnDataLoss is set
    """

    def __init__(
        self,
        options: StreamOptions,
        resumed: MicroBatch = EMPTY,
        *,
        is_unfinished: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        """Start the planner's thread, and connect.

        Args:
            options: options of the query
            resumed: newest batch in the checkpoint; empty in a new query
            is_unfinished: True if Spark runs the resumed batch again
            ledger: where the driver records finished batches; None if the driver records none
        """
        self.share: OwnedQueues = (
            QueryMember(options, resumed, is_unfinished=is_unfinished)
            if options.membership
            else Standalone(options.read, resumed)
        )
        """The queues that the query reads."""
        self._options = options.read
        self._min_rows = options.min_rows
        self._max_delay_s = options.max_delay_s
        self._planned_s: float | None = None
        self._course = Course.after(resumed)
        # The first batch is planned even if it is empty, so that the checkpoint holds the start of the query.
        self._is_first = resumed.membership is None
        self._served_last = max((queue for queue, (begin, end) in resumed.ranges.items() if begin < end), default=None)
        self._seen = BrokerOffsets()
        self._compared: set[Part] = set()
        self._missing: set[Queue] = set()
        self._routes_seen_s = 0.0
        self._batch = EMPTY
        self._running = resumed if is_unfinished else EMPTY
        self._done = EMPTY
        self._ledger = ledger if options.membership else None
        self._first_finished_s = 0.0
        self._has_warned = False
        self._watching: asyncio.Task[None] | None = None
        self._targets: dict[Queue, int] | None = None
        self._idle_until_s = 0.0
        self._failing = FailureTimeout(options.read.poll_timeout_s)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rocketlet planner", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels tasks and closes the loop at the end
            runner.get_loop().run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        timeout_s = CALL_TIMEOUT_S + self._options.poll_timeout_s
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise  # the work itself raised it
            future.cancel()
            raise RocketletError(f"brokers have not answered within {timeout_s:.0f} s; see the log") from None

    # Methods for Spark's thread

    def finish(self, batch: MicroBatch) -> None:
        """Record that Spark has finished a batch, and commit its end for the group if the query is a member."""
        if self._ledger is not None and batch == self.planned:
            self._check_records(self._ledger)
        self._call(self._finish(batch))

    def _check_records(self, ledger: Ledger) -> None:
        """Log a warning if Spark has finished batches for a while, and the driver has recorded none."""
        now_s = time.monotonic()
        self._first_finished_s = self._first_finished_s or now_s
        if not self._has_warned and now_s > self._first_finished_s + LEDGER_SILENCE_S:
            if not ledger.has_records(self._options.group):
                effect = "finished batches are committed for the group only at the next trigger, and never after query.stop()"
                log.warning("batches_not_recorded", folder=str(ledger.folder), effect=effect, hint=UPDATE)
            self._has_warned = True

    def plan(self, max_rows: int | None = None, max_bytes: int | None = None) -> MicroBatch | None:
        """Return the next batch, or None if there is nothing new.

        A query that ends on its own (Trigger.AvailableNow) waits for unreachable brokers, because Spark ends it at the
        first None.

        Args:
            max_rows: maximum messages in the batch
            max_bytes: maximum bytes of messages in the batch, by the mean size of a sample
        Raises:
            DataLossError: messages are lost, and failOnDataLoss is set
            ConnectionFailed: no broker answers for `pollTimeoutMs`
            RocketletError: a query that ends on its own cannot read a queue
        """
        failing = FailureTimeout(self._options.poll_timeout_s)
        while True:
            time.sleep(max(0.0, self._idle_until_s - time.monotonic()))
            planned = self._call(self._next_batch(max_rows, max_bytes))
            self._idle_until_s = time.monotonic() + IDLE_INTERVAL_S if planned is None else 0.0
            if planned is not None or self._targets is None or not (unread := self._call(self._unread())):
                return planned
            if failing.is_over():
                raise unread[min(unread)]

    @property
    def planned(self) -> MicroBatch | None:
        """The last planned batch, which Spark may still run; None before the first, and once it is reported as finished."""
        return None if self._running in (EMPTY, self._done) else self._running

    @property
    def done(self) -> MicroBatch:
        """The last batch that Spark or the ledger has reported as finished; empty before the first."""
        return self._done

    @property
    def missing(self) -> set[Queue]:
        """Queues that the query should read, and that are in no route."""
        return set(self._missing)

    def readable(self, batch: MicroBatch) -> Ranges:
        """Return the ranges of a batch, without ranges of topics that were recreated since an earlier run planned the batch.
        With failOnDataLoss, such a topic raises DataLossError."""
        return batch.ranges if batch == self._batch else self._call(self._readable(batch))

    def set_targets(self) -> None:
        """Read only messages up to the present end of each queue (Trigger.AvailableNow).

        Raises:
            ConnectionFailed: a broker is unreachable, so that its messages would be skipped
        """
        self._targets = self._call(self._ends())

    def progress(self) -> tuple[Mapping[Queue, int], Mapping[Queue, int]]:
        """Return the end of each queue whose broker responded to the last poll, and the offset after the last planned
        message of each queue that this query reads."""
        return self._call(self._progress())

    def addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        """Return the addresses of the queues' brokers.

        Queues whose broker no name server has a route to are left out, or raise DataLossError with failOnDataLoss.
        """
        return self._call(self._view.addresses(queues))

    def close(self) -> None:
        try:
            self._call(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    # In the planner's thread

    async def _start(self) -> None:
        self._view = View(self._options)
        topics = await self._view.open()
        try:
            self._check_cluster(topics)
            await self.share.open(self._view, self._course, topics)
        except BaseException:
            await self._view.close()
            raise
        if self._ledger is not None:
            self._watching = asyncio.create_task(self._watch(self._ledger))

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.share.close()

    async def _finish(self, batch: MicroBatch) -> None:
        self._done = batch
        await self.share.finish(batch)

    async def _watch(self, ledger: Ledger) -> None:
        """Finish a batch within about `LEDGER_WATCH_S` after the driver has recorded its end.

        `latestOffset` reports the same only at the next trigger. Until then, the group's committed offsets would be
        stale, and a release of the batch's queues would wait.
        """
        while True:
            await asyncio.sleep(LEDGER_WATCH_S)
            batch = self.planned
            if batch is not None and ledger.is_finished(self._options.group, to_offset(batch)):
                try:
                    await self._finish(batch)
                except RocketletError as error:  # `latestOffset` repeats the commit, or fails
                    log.warning("commit_failed", group=self._options.group, reason=str(error))

    # Batches

    async def _next_batch(self, max_rows: int | None, max_bytes: int | None) -> MicroBatch | None:
        await self.share.discover()
        self._seen = seen = await self._poll_extents()
        if time.monotonic() >= self._routes_seen_s + ROUTE_RETRY_S:
            await self._check_routes(seen)
        await self.share.apply_changes(seen)
        for part in await self._recreated(seen):
            self._restart_topic(part, seen)
        self._course.marks |= seen.marks
        available = {
            queue: (position, max(self._end(queue, seen), position)) for queue, position in self._within(seen).items()
        }
        cut = {} if self._waits(available) else await self._cut(available, max_rows, max_bytes)
        ranges = self.share.take(cut)
        if not ranges and not self._is_first:
            return None
        self._is_first = False
        self._planned_s = time.monotonic()
        self._served_last = next(reversed(cut), self._served_last)
        await self._store_fingerprints(ranges)
        self._batch = self._course.batch(ranges, self._options.group, is_member=self.share.is_member)
        self._running = self._batch
        return self._batch

    def _end(self, queue: Queue, seen: BrokerOffsets) -> int:
        """Return the offset up to which a queue is read. The end of a recreated topic may be below the target."""
        end = seen.extents[queue].end
        return end if self._targets is None else min(self._targets.get(queue, 0), end)

    def _waits(self, available: Ranges) -> bool:
        """Return True if the batch should wait for more rows.

        As with Kafka's source, the first batch after a start does not wait, and neither does a query that ends on its own.
        """
        if not self._min_rows or self._targets is not None or self._planned_s is None:
            return False
        is_late = time.monotonic() >= self._planned_s + self._max_delay_s
        return not is_late and sum(end - begin for begin, end in available.values()) < self._min_rows

    def _within(self, seen: BrokerOffsets) -> dict[Queue, int]:
        """Return the next offset of each free queue whose broker answered. An offset outside of its queue is moved into the
        queue, or raises DataLossError if `_is_loss_fatal`."""
        within: dict[Queue, int] = {}
        for queue, position in self.share.free().items():
            extent = seen.extents.get(queue)
            if extent is None:
                continue
            if not extent.begin <= position <= extent.end:
                is_same = (
                    bool(seen.marks.get(part_of(queue), TopicSnapshot()).identity) and queue in self._course.read_ends
                )
                position = outside(queue, position, extent, is_same=is_same, fail=self._is_loss_fatal(queue.topic))
                self._rewind(queue, position)
            within[queue] = position
        return within

    async def _recreated(self, seen: BrokerOffsets) -> list[Part]:
        """Return the topics that are found to be recreated since this query has read them.

        A topic was recreated if its identity differs, or if another message is at the offset of a message that the
        query has read. Store times are not compared, because clocks may be set back.
        """
        recreated_parts = [
            part for part, mark in seen.marks.items() if mark.is_of_another(self._course.marks.get(part, mark))
        ]
        to_compare = [queue for queue in self._to_compare(seen) if part_of(queue) not in recreated_parts]
        messages = self._course.messages
        found = await asyncio.gather(
            *(self._view.extents.fingerprint(queue, messages[queue].offset) for queue in to_compare)
        )
        for queue, message in zip(to_compare, found, strict=True):
            if message is not None and message != messages[queue] and part_of(queue) not in recreated_parts:
                recreated_parts.append(part_of(queue))
        return recreated_parts

    def _to_compare(self, seen: BrokerOffsets) -> list[Queue]:
        """Return the queues whose fingerprints must be compared.

        Topics of a Rocketlet broker are compared only after the broker was restarted. An Apache broker does not report
        its start time, so all fingerprints of its topics are compared once, and later the newest fingerprint of each
        topic that has unread messages.
        """
        positions = self.share.free()
        has_more = {
            part_of(queue) for queue, extent in seen.extents.items() if extent.end > positions.get(queue, extent.end)
        }
        to_compare: list[Queue] = []
        newest = {part_of(queue): queue for queue in self._course.messages}
        for queue in self._course.messages:
            part = part_of(queue)
            mark = seen.marks.get(part)
            if mark is None:
                continue
            if mark.started_ms:
                is_compared = mark.started_ms != self._course.marks.get(part, mark).started_ms
            else:
                is_compared = part not in self._compared or (part in has_more and queue == newest[part])
            if is_compared:
                to_compare.append(queue)
        self._compared.update(seen.marks)
        return to_compare

    async def _store_fingerprints(self, ranges: Ranges) -> None:
        """Store the fingerprint of the last message of one queue for each topic and broker, preferring queues without a
        fingerprint."""
        chosen: dict[Part, Queue] = {}
        for queue, (begin, end) in ranges.items():
            if begin < end and (part_of(queue) not in chosen or queue not in self._course.messages):
                chosen[part_of(queue)] = queue
        found = await asyncio.gather(
            *(self._view.extents.fingerprint(queue, ranges[queue][1] - 1) for queue in chosen.values())
        )
        for queue, message in zip(chosen.values(), found, strict=True):
            if message is not None:
                self._course.add_message(queue, message)

    def _is_loss_fatal(self, topic: str) -> bool:
        """Return True if the loss of messages of a topic ends the query: with failOnDataLoss, except for the group's retry
        topic, which is deleted with the group."""
        return self._options.fail_on_data_loss and not topic.startswith(RETRY_PREFIX)

    def _restart_topic(self, part: Part, seen: BrokerOffsets) -> None:
        """Move the free queues of a recreated topic to its start. Raises DataLossError if `_is_loss_fatal`."""
        fail = self._is_loss_fatal(part[0])
        self.share.forget(part)
        for queue, position in self.share.free().items():
            if part_of(queue) == part and queue in seen.extents:
                wanted = max(position, self._course.read_ends.get(queue, 0))
                begin = recreated(queue, wanted, seen.extents[queue], fail=fail)
                self._rewind(queue, begin)

    async def _readable(self, batch: MicroBatch) -> Ranges:
        """Return the ranges of a batch that is run again, without ranges of topics that were recreated. Such a topic raises
        DataLossError if `_is_loss_fatal`."""
        queues = [queue for queue, (begin, end) in batch.ranges.items() if begin < end]
        seen = await self._view.extents.of(queues)
        recreated_parts = await self._recreated(seen)
        lost = [queue for queue in queues if part_of(queue) in recreated_parts]
        for queue in lost:
            begin = batch.ranges[queue][0]
            recreated(queue, begin, seen.extents[queue], fail=self._is_loss_fatal(queue.topic))
        return {queue: span for queue, span in batch.ranges.items() if queue not in lost}

    # Offsets

    async def _poll_extents(self) -> BrokerOffsets:
        """Return the extents of this query's queues.

        Raises:
            ConnectionFailed: no broker has answered for `pollTimeoutMs`, counted from the first failure
        """
        queues = self.share.queues()
        seen = await self._view.extents.of(queues)
        if seen.extents or seen.absent or not queues:
            self._failing.renew()
        elif self._failing.is_over():
            raise ConnectionFailed(
                f"no broker of {', '.join(sorted({queue.topic for queue in self.share.queues()}))} has answered for "
                f"{self._options.poll_timeout_s:.0f} s; start them, or raise pollTimeoutMs. Nothing is lost: the query "
                "resumes from its checkpoint"
            )
        return seen

    def _rewind(self, queue: Queue, position: int) -> None:
        """Continue a queue at another offset, because messages are lost or the topic was recreated."""
        self._course.rewind(queue)
        self.share.move(queue, position)

    # Queues that are in no route

    def _check_cluster(self, topics: list[str]) -> None:
        """Check that a broker in the checkpoint still has each topic. If only other brokers have it, log that, or raise
        DataLossError with failOnDataLoss."""
        for topic in topics:
            known = {broker_name for of, broker_name in self._course.marks if of == topic}
            there = {queue.broker_name for queue in self._view.routed([topic])}
            if known and there and not known & there:
                other_cluster(known, topic, fail=self._options.fail_on_data_loss)

    async def _check_routes(self, seen: BrokerOffsets) -> None:
        """Find the queues that this query should read and that are in no route. Such queues keep their offsets."""
        self._routes_seen_s = time.monotonic()
        await self._view.refresh({queue.topic for queue in seen.absent})
        known = {*self._course.read_ends, *self._course.messages, *self.share.planned(), *(self._targets or ())}
        wanted = {queue for queue in known if self._options.reads(queue)}
        missing = wanted - set(self._view.routed(sorted({queue.topic for queue in wanted})))
        for queue in sorted(missing - self._missing):
            log.warning(
                "queue_not_in_route",
                queue=str(queue),
                readable=self._readable_queues(queue),
                hint="the query reads the queue again when a route has it",
            )
        self._missing = missing

    def _readable_queues(self, queue: Queue) -> int:
        """Return the number of readable queues that the topic has on the queue's broker."""
        return sum(routed.broker_name == queue.broker_name for routed in self._view.routed([queue.topic]))

    async def _unread(self) -> dict[Queue, RocketletError]:
        """Return the queues that a query which ends on its own must still read, each with the reason why it cannot be
        read.

        The routes are requested first, because the queues may be reachable again.
        """
        await self._check_routes(self._seen)
        targets, seen, free = self._targets or {}, self._seen, self.share.free()
        away = {queue for queue, at in self.share.out_of_reach(seen).items() if at < targets.get(queue, 0)}
        away |= {queue for queue, at in free.items() if queue in seen.extents and at < self._end(queue, seen)}
        unread = {queue: self._away(queue) for queue in away - self._missing}
        if self._options.fail_on_data_loss:
            read_ends = self._course.read_ends
            missing = [queue for queue in self._missing if read_ends.get(queue, 0) < targets.get(queue, MAX_NUMBER)]
            found = await asyncio.gather(*map(self._unrouted, missing))
            unread |= {queue: error for queue, error in zip(missing, found, strict=True) if error is not None}
        return unread

    def _away(self, queue: Queue) -> RocketletError:
        return ConnectionFailed(
            f"the broker of {queue} has not answered for {self._options.poll_timeout_s:.0f} s, and this query ends only when "
            "it has read what is there: start it, or raise pollTimeoutMs. Nothing is lost: the query resumes from its "
            "checkpoint"
        )

    async def _unrouted(self, queue: Queue) -> RocketletError | None:
        """Return the reason why a query must not end although a queue is in no route; None if the query has read the
        whole queue.

        A queue whose broker is unreachable counts as unread, because its end is unknown.
        """
        if not self._view.routed([queue.topic]):
            return gone(queue)
        readable = self._readable_queues(queue)
        if not readable:
            return self._away(queue)
        try:
            unread = await self._view.extents.end_of(queue) - await self.share.place(queue)
        except RocketletError:
            return self._away(queue)
        return unrouted(queue, readable, unread) if unread > 0 else None

    async def _ends(self) -> dict[Queue, int]:
        await self.share.wait_for_queues()
        seen = await self._view.all(self.share.queues())
        return {queue: extent.end for queue, extent in seen.extents.items()}

    async def _progress(self) -> tuple[Mapping[Queue, int], Mapping[Queue, int]]:
        planned = self.share.planned()
        return {queue: self._seen.extents[queue].end for queue in planned if queue in self._seen.extents}, planned

    async def _cut(self, available: Ranges, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]:
        """Return the ranges, cut to both limits. With a limit in bytes, queues whose broker is unreachable are left
        out."""
        cut = shared_out(available, max_rows, served_last=self._served_last)
        if max_bytes is None or not cut:
            return cut
        sizes = await asyncio.gather(*(self._view.message_bytes(queue, span[0]) for queue, span in cut.items()))
        known = {queue: size for queue, size in zip(cut, sizes, strict=True) if size is not None}
        return shared_out({queue: cut[queue] for queue in known}, max_bytes, known, self._served_last)
