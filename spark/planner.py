"""Plans batches in the driver, in a thread of its Python process with a loop of its own.

Spark asks for offsets between batches and is silent while one runs. Work that must continue meanwhile runs here. Two kinds
of planner share this: `member.Member`, which gets its queues from the group, and `standalone.Standalone`, which reads all
queues.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import uvloop

from ..client.consuming.pulling import check_filters
from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError, TopicNotFound
from ..client.log import get_logger
from ..client.wire.answers import body_of, header_of
from ..client.wire.cluster import Cluster
from ..client.wire.identity import new_client_id
from ..client.wire.pull_header import pull_header
from ..protocol import names
from ..protocol.allocation import subscribe_queues
from ..protocol.bodies import decode_topic_list
from ..protocol.codes import RequestCode
from ..protocol.headers import PullMessageResult
from ..protocol.queue import Queue
from .checkpoint import EMPTY, Batch, Mark, Part, part_of
from .config import (
    CALL_TIMEOUT_S,
    DISCOVERY_INTERVAL_S,
    IDLE_INTERVAL_S,
    NEW_QUEUES_S,
    ROUTE_RETRY_S,
    SAMPLE_MESSAGES,
    TOPIC_PATIENCE_S,
)
from .extents import NOTHING, Extents, Seen
from .loss import made_anew, outside, retired
from .options import ReadOptions
from .patience import Patience
from .ranges import Range, Ranges, shared_out
from .starts import Starts

log = get_logger("rocketlet.spark")
T = TypeVar("T")


class Planner(ABC):
    """Opens at once. Raises RocketletError if no name server can be reached, or a topic does not exist.

    The public methods are called from Spark's thread and carried out in the planner's.
    """

    def __init__(
        self, options: ReadOptions, resumed: Batch, *, membership: bool, min_rows: int = 0, max_delay_s: float = 0.0
    ) -> None:
        """resumed: the newest batch in the checkpoint; empty for a new one. min_rows, max_delay_s: a batch waits for one of
        them."""
        self._min_rows = min_rows
        self._max_delay_s = max_delay_s
        self._planned_s: float | None = None
        self._options = options
        self._membership_wanted = membership
        self._resumed = resumed
        self._marks: dict[Part, Mark] = dict(resumed.marks)
        self._read_ends: dict[Queue, int] = {queue: end for queue, (_, end) in resumed.ranges.items()}
        self._is_first = (
            resumed.membership is None
        )  # written although it is empty, so that Spark keeps where the query began
        self._rewound = resumed.rewound
        self._served_last = max((queue for queue, (begin, end) in resumed.ranges.items() if begin < end), default=None)
        self._seen = Seen()
        self._batch = EMPTY
        self._done = EMPTY
        self._targets: dict[Queue, int] | None = None
        self._idle_until_s = 0.0
        self._discovered_s = 0.0
        self._patience = Patience(options.poll_timeout_s)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rocketlet planner", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which ends and closes the rest at the end
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

    # Calls of Spark's thread

    def finish(self, batch: Batch) -> None:
        """Spark has finished this batch."""
        self._call(self._finish(batch))
        self._done = batch

    def plan(self, max_rows: int | None = None, max_bytes: int | None = None) -> Batch | None:
        """The next batch; None if there is nothing new. A query that ends by itself waits for brokers that are away: for
        Spark, None is its end. Raises DataLossError, and ConnectionFailed if they stay away."""
        patience = Patience(self._options.poll_timeout_s)
        while True:
            time.sleep(max(0.0, self._idle_until_s - time.monotonic()))
            planned = self._call(self._next_batch(max_rows, max_bytes))
            self._idle_until_s = time.monotonic() + IDLE_INTERVAL_S if planned is None else 0.0
            if planned is not None or self._targets is None or not (owed := self._call(self._owed())):
                return planned
            if patience.is_over():
                raise ConnectionFailed(
                    f"the broker of {min(owed)} has not answered for {self._options.poll_timeout_s:.0f} s, and this query "
                    "ends only when it has read what is there: start it, or raise pollTimeoutMs. Nothing is lost: the query "
                    "goes on from its checkpoint"
                )

    @property
    def marks(self) -> Mapping[Part, Mark]:
        """How the topics are recognized."""
        return self._marks

    @property
    def planned(self) -> Batch | None:
        """The batch that was planned last, until it is finished."""
        return None if self._batch in (EMPTY, self._done) else self._batch

    @property
    def done(self) -> Batch:
        """The batch that Spark has finished last, as far as it was told."""
        return self._done

    @property
    def missing(self) -> set[Queue]:
        """Queues of the checkpoint that no route names."""
        return set()

    def readable(self, batch: Batch) -> Ranges:
        """The ranges of a batch, without those whose topics were created again since it was planned. Raises DataLossError."""
        return batch.ranges if batch == self._batch else self._call(self._readable(batch))

    def set_targets(self) -> None:
        """From now on, reads only messages that are there already (Trigger.AvailableNow). Raises ConnectionFailed if a
        broker cannot be asked: its messages would be skipped."""
        self._targets = self._call(self._all_ends())

    def progress(self) -> tuple[Mapping[Queue, int], Mapping[Queue, int]]:
        """The offsets after the newest message of the queues that this query reads, and after the last one planned."""
        return self._call(self._progress())

    def addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        """The addresses of the queues' brokers. Those of brokers that no name server knows are left out, or raise
        DataLossError."""
        return self._call(self._addresses(queues))

    def close(self) -> None:
        try:
            self._call(self._leave())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    # In the planner's thread

    @abstractmethod
    async def _open(self, topics: list[str]) -> None:
        """`topics`: those that the query reads, whose routes are known."""

    @abstractmethod
    async def _finish(self, batch: Batch) -> None: ...

    @abstractmethod
    async def _discover(self) -> None:
        """Takes up topics that the pattern matches and that are new."""

    @abstractmethod
    async def _settle(self, seen: Seen) -> None:
        """Applies the events since the last batch, before the next one is planned."""

    @abstractmethod
    def _planned_of(self, available: Ranges, cut: Ranges) -> Ranges:
        """The ranges of the batch: readable messages within the limits; empty if there are none."""

    @abstractmethod
    def _positions(self) -> Mapping[Queue, int]:
        """The next offsets to plan of the queues that may be planned."""

    @abstractmethod
    def _move(self, queue: Queue, position: int) -> None:
        """A queue goes on elsewhere."""

    @abstractmethod
    def _planned(self) -> Mapping[Queue, int]:
        """The offsets after the last planned message, of all queues that this query reads."""

    @abstractmethod
    def _queues(self) -> list[Queue]:
        """The queues that this query reads."""

    @abstractmethod
    async def _leave(self) -> None: ...

    async def _start(self) -> None:
        connect = self._options.connect
        self._cluster = Cluster(connect.name_server, connect.access, route_interval_s=NEW_QUEUES_S)
        self._extents = Extents(self._cluster, self._options.group)
        self._cluster.start()
        try:
            topics = await self._topics()
            filters = {topic: self._options.subscription(topic) for topic in topics}
            await check_filters(self._cluster, new_client_id(), self._options.group, filters)
            await self._open(topics)
        except BaseException:
            await self._cluster.close()
            raise

    async def _topics(self) -> list[str]:
        """The topics of the query. One that is named but does not exist yet is waited for. Raises TopicNotFound."""
        if self._options.pattern:
            return await self._matching()
        end_s = self._loop.time() + TOPIC_PATIENCE_S
        for topic in self._options.topics:
            while await self._cluster.find_route(topic) is None:
                if self._loop.time() > end_s:
                    raise TopicNotFound(
                        f"the topic {topic} does not exist on {self._options.connect.name_server}: create it, or "
                        f"correct the option topic"
                    )
                await asyncio.sleep(0.2)
        return list(self._options.topics)

    def _routed(self, topics: Iterable[str]) -> list[Queue]:
        """The queues of these topics that routes know."""
        queues: list[Queue] = []
        for topic in topics:
            route = self._cluster.route(topic)
            queues += subscribe_queues(topic, route) if route is not None else []
        return queues

    async def _check_start(self, queues: Iterable[Queue]) -> None:
        """Checks the start of a query, once. Raises ConfigError for a start that no queue has."""
        if self._resumed.membership is None:
            starts = Starts(self._options.start, self._extents, self._cluster)
            await starts.check(set(queues), needs_message=self._options.needs_message)

    async def _matching(self) -> list[str]:
        """The topics that the pattern matches now, with their routes."""
        self._discovered_s = self._loop.time()
        answer = await self._cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        matches = re.compile(self._options.pattern).fullmatch
        found = [
            topic
            for topic in body_of(answer, decode_topic_list)
            if matches(topic) and not names.is_made_by_brokers(topic)
        ]
        return [topic for topic in found if self._cluster.route(topic) or await self._cluster.find_route(topic)]

    async def _new_topics(self, known: Iterable[str]) -> list[str]:
        """Topics that match the pattern and are not yet known. Looked for every 10 s."""
        if not self._options.pattern or self._loop.time() < self._discovered_s + DISCOVERY_INTERVAL_S:
            return []
        try:
            return sorted(set(await self._matching()) - set(known))
        except RocketletError as error:
            log.warning("topic_lookup_failed", reason=str(error))
            return []

    async def _addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        known = {queue: await self._address(queue) for queue in queues}
        return {queue: address for queue, address in known.items() if address is not None}

    async def _address(self, queue: Queue) -> str | None:
        patience = Patience(self._options.poll_timeout_s)
        while (address := self._cluster.master(queue.broker_name)) is None:
            try:
                await self._cluster.find_route(queue.topic)
            except ConnectionFailed as error:
                log.warning("route_lookup_failed", topic=queue.topic, reason=str(error))
            if self._cluster.master(queue.broker_name) is None and patience.is_over():
                retired(queue, fail=self._options.fail_on_data_loss)
                return None
            await asyncio.sleep(ROUTE_RETRY_S)
        return address

    # Batches

    async def _next_batch(self, max_rows: int | None, max_bytes: int | None) -> Batch | None:
        await self._discover()
        self._seen = seen = await self._look()
        await self._settle(seen)
        for part in await self._made_anew(seen, self._positions()):
            self._begin_anew(part, seen)
        self._marks |= seen.marks
        available = {
            queue: (position, max(self._end(queue, seen), position)) for queue, position in self._within(seen).items()
        }
        cut = {} if self._waits(available) else await self._cut(available, max_rows, max_bytes)
        ranges = self._planned_of(available, cut)
        if not ranges and not self._is_first:
            return None
        self._is_first = False
        self._planned_s = time.monotonic()
        self._served_last = next(reversed(cut), self._served_last)
        self._read_ends |= {queue: end for queue, (_, end) in ranges.items()}
        self._batch = Batch(ranges, dict(self._marks), self._membership_wanted, self._options.group, self._rewound)
        return self._batch

    def _end(self, queue: Queue, seen: Seen) -> int:
        """Up to where a queue is read. A topic that was made anew may end before the target."""
        end = seen.extents[queue].end
        return end if self._targets is None else min(self._targets.get(queue, 0), end)

    def _waits(self, available: Ranges) -> bool:
        """Whether a batch waits for more rows. As with Kafka's source the first one does not, and what ends does not."""
        if not self._min_rows or self._targets is not None or self._planned_s is None:
            return False
        is_late = time.monotonic() >= self._planned_s + self._max_delay_s
        return not is_late and sum(end - begin for begin, end in available.values()) < self._min_rows

    def _within(self, seen: Seen) -> dict[Queue, int]:
        """The positions of queues whose brokers answered, moved into their queues."""
        fail = self._options.fail_on_data_loss
        within: dict[Queue, int] = {}
        for queue, position in self._positions().items():
            extent = seen.extents.get(queue)
            if extent is None:
                continue
            if not extent.begin <= position <= extent.end:
                is_same = bool(seen.marks.get(part_of(queue), Mark()).identity) and queue in self._read_ends
                position = outside(queue, position, extent, is_same=is_same, fail=fail)
                self._rewind(queue, position)
            within[queue] = position
        return within

    async def _made_anew(self, seen: Seen, positions: Mapping[Queue, int]) -> list[Part]:
        """The topics that are others than this query read: their identity differs, or a message that the query has read was
        stored after the newest one that it saw. An Apache broker tells no identity, and a Rocketlet broker that was restored
        from a backup tells the same one."""
        anew = [part for part, mark in seen.marks.items() if mark.is_of_another(self._marks.get(part, mark))]
        witnesses: dict[Part, Queue] = {}
        for queue, position in positions.items():
            begin, end = seen.extents.get(queue, NOTHING)
            if begin < position <= min(end, self._read_ends.get(queue, 0)):
                witnesses.setdefault(part_of(queue), queue)
        for part, queue in witnesses.items():
            before = self._marks.get(part, Mark())
            if part in anew or before.started_ms == seen.marks.get(part, before).started_ms != 0:
                continue  # the broker runs as it did then
            newest_ms = before.newest_ms
            stored_ms = await self._extents.stored_ms(queue, positions[queue] - 1) if newest_ms else None
            if stored_ms is not None and stored_ms > newest_ms:
                anew.append(part)
        return anew

    def _begin_anew(self, part: Part, seen: Seen) -> None:
        """Everything is new in a topic that was created again. Raises DataLossError if that is to end the query."""
        fail = self._options.fail_on_data_loss
        for queue, position in self._positions().items():
            if part_of(queue) == part and queue in seen.extents:
                wanted = max(position, self._read_ends.get(queue, 0))
                begin = made_anew(queue, wanted, seen.extents[queue], fail=fail)
                self._rewind(queue, begin)

    async def _readable(self, batch: Batch) -> Ranges:
        """The readable part of a batch that is run again: its messages may be gone."""
        queues = [queue for queue, (begin, end) in batch.ranges.items() if begin < end]
        seen = await self._extents.of(queues)
        anew = await self._made_anew(seen, {queue: batch.ranges[queue][1] for queue in queues})
        lost = [queue for queue in queues if part_of(queue) in anew]
        for queue in lost:
            made_anew(queue, batch.ranges[queue][0], seen.extents[queue], fail=self._options.fail_on_data_loss)
        return {queue: span for queue, span in batch.ranges.items() if queue not in lost}

    # Offsets

    async def _look(self) -> Seen:
        """The extents of this query's queues. Raises ConnectionFailed if no broker has answered for as long as an answer
        may take, from the first failure on."""
        queues = self._queues()
        seen = await self._extents.of(queues)
        if seen.extents or not (queues or self._is_cut_off()):
            self._patience.renew()
        elif self._patience.is_over():
            raise ConnectionFailed(
                f"no broker of {', '.join(sorted({queue.topic for queue in self._queues()}))} has answered for "
                f"{self._options.poll_timeout_s:.0f} s; start them, or raise pollTimeoutMs. Nothing is lost: the query goes "
                "on from its checkpoint"
            )
        return seen

    def _rewind(self, queue: Queue, position: int) -> None:
        """A queue continues elsewhere: messages are gone, or an administrator has reset it."""
        self._rewound += 1
        self._read_ends.pop(queue, None)
        self._move(queue, position)

    def _is_cut_off(self) -> bool:
        """Whether every queue waits for a broker that cannot be asked."""
        return False

    def _out_of_reach(self) -> Mapping[Queue, int]:
        """The next offsets to plan of the queues whose brokers cannot be asked."""
        return {queue: at for queue, at in self._positions().items() if queue not in self._seen.extents}

    async def _owed(self) -> set[Queue]:
        """The queues that a query which ends by itself has yet to read: it could not when the batch was planned. Perhaps it
        can now."""
        targets, seen = self._targets or {}, self._seen
        out_of_reach = {queue for queue, position in self._out_of_reach().items() if position < targets.get(queue, 0)}
        return out_of_reach | {
            queue
            for queue, position in self._positions().items()
            if queue in seen.extents and position < self._end(queue, seen)
        }

    async def _all(self) -> Seen:
        """The extents of all queues. Raises ConnectionFailed if a broker is away."""
        seen = await self._extents.of(self._queues())
        if self._extents.away:
            raise ConnectionFailed(
                f"the broker {min(self._extents.away)} does not answer: what it holds would be passed over; start it, or "
                "try later"
            )
        return seen

    async def _all_ends(self) -> dict[Queue, int]:
        return {queue: extent.end for queue, extent in (await self._all()).extents.items()}

    async def _progress(self) -> tuple[Mapping[Queue, int], Mapping[Queue, int]]:
        planned = self._planned()
        return {queue: self._seen.extents[queue].end for queue in planned if queue in self._seen.extents}, planned

    async def _cut(self, available: Ranges, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]:
        """The ranges within both limits."""
        cut = shared_out(available, max_rows, served_last=self._served_last)
        if max_bytes is None or not cut:
            return cut
        sizes = await asyncio.gather(*(self._message_bytes(queue, span[0]) for queue, span in cut.items()))
        known = {queue: size for queue, size in zip(cut, sizes, strict=True) if size is not None}
        return shared_out({queue: cut[queue] for queue in known}, max_bytes, known, self._served_last)

    async def _message_bytes(self, queue: Queue, offset: int) -> float | None:
        """The mean size of the next messages of a queue; None if its broker is away."""
        subscription = self._options.subscription(queue.topic)
        header = pull_header(self._options.group, queue, offset, SAMPLE_MESSAGES, subscription)
        try:
            connection = await self._cluster.broker(queue.broker_name)
            answer = await connection.ask(RequestCode.PULL_MESSAGE, header, timeout_s=self._options.poll_timeout_s)
        except (ConnectionFailed, RequestTimeout) as error:
            log.warning("message_size_unknown", queue=str(queue), reason=str(error), hint="the queue waits")
            return None
        messages = header_of(answer, PullMessageResult).next_begin_offset - offset if answer.body else 0
        return max(len(answer.body) / messages, 1.0) if messages > 0 else 1.0
