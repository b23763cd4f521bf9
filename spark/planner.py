"""What plans batches in the driver: a thread of its Python process with a loop of its own.

Spark asks for offsets between batches and is silent while one runs; what must go on meanwhile goes on here. Two kinds of
planner share this: `member.Member`, whose queues are what the group gives it, and `standalone.Standalone`, which reads
all queues.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

import uvloop

from ..client.cluster import Cluster
from ..client.config import OFFSET_TIMEOUT_S
from ..client.connection import Connection
from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError, TopicNotFound
from ..client.log import get_logger
from ..client.pulling import pull_header
from ..protocol import names
from ..protocol.bodies import Queue, decode_topic_list
from ..protocol.codes import RequestCode
from ..protocol.headers import Offset, TopicQueue, read, write
from .options import ReadOptions
from .ranges import Range, Ranges, shared_out

log = get_logger("rocketlet.spark")
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0
TOPIC_PATIENCE_S: Final = 15.0
DISCOVERY_INTERVAL_S: Final = 10.0
IDLE_INTERVAL_S: Final = 0.03  # Spark asks every 10 ms while there is nothing new; brokers need not be asked as often
SAMPLE_MESSAGES: Final = 32


class Planner(ABC):
    """Opens at once. Raises RocketletError if no name server can be reached, or a topic does not exist.

    The public methods are called from Spark's thread and carried out in the planner's.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._targets: dict[Queue, int] | None = None
        self._idle_until_s = 0.0
        self._discovered_s = 0.0
        self._answered_s = time.monotonic()
        self._away: set[str] = set()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rocketlet planner", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError:
            if future.done():
                raise  # what the work itself raised
            future.cancel()
            raise RocketletError(f"brokers have not answered within {CALL_TIMEOUT_S:.0f} s; see the log") from None

    # What Spark's thread asks

    def finish(self, ranges: Ranges) -> None:
        """Spark has finished the batch of these ranges."""
        self._call(self._finish(ranges))

    def plan(self, max_rows: int | None = None, max_bytes: int | None = None) -> dict[Queue, Range]:
        """The ranges of the next batch; empty if there is nothing new."""
        time.sleep(max(0.0, self._idle_until_s - time.monotonic()))
        planned = self._call(self._plan(max_rows, max_bytes))
        self._idle_until_s = 0.0 if planned else time.monotonic() + IDLE_INTERVAL_S
        return planned

    def set_targets(self) -> None:
        """From now on nothing that arrives is read: what is there is the end (Trigger.AvailableNow). Raises ConnectionFailed
        if a broker cannot be asked: its messages would be passed over."""
        self._targets = self._call(self._all_ends())

    def progress(self) -> tuple[dict[Queue, int], dict[Queue, int]]:
        """The offsets after the newest message of the queues that this query reads, and after the last one planned."""
        return self._call(self._progress())

    def addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        """The addresses of the queues' brokers. Raises ConnectionFailed."""
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
    async def _finish(self, ranges: Ranges) -> None: ...

    @abstractmethod
    async def _plan(self, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]: ...

    @abstractmethod
    def _positions(self) -> dict[Queue, int]:
        """The next offsets to plan of the queues that may be planned."""

    @abstractmethod
    def _planned(self) -> dict[Queue, int]:
        """The offsets after the last planned message, of all queues that this query reads."""

    @abstractmethod
    def _queues(self) -> list[Queue]:
        """The queues that this query reads."""

    @abstractmethod
    async def _leave(self) -> None: ...

    async def _start(self) -> None:
        self._cluster = Cluster(self._options.connect.name_server, self._options.connect.access)
        self._cluster.start()
        try:
            await self._open(await self._topics())
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

    async def _matching(self) -> list[str]:
        """The topics that the pattern matches now, with their routes."""
        self._discovered_s = self._loop.time()
        answer = await self._cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        hidden = (names.RETRY_PREFIX, names.DLQ_PREFIX)
        matches = re.compile(self._options.pattern).fullmatch
        found = [
            topic
            for topic in decode_topic_list(answer.body)
            if matches(topic) and not names.is_system_topic(topic) and not topic.startswith(hidden)
        ]
        return [topic for topic in found if self._cluster.route(topic) or await self._cluster.find_route(topic)]

    async def _new_topics(self, known: Iterable[str]) -> list[str]:
        """Topics that the pattern matches and that are not yet known; looked for every 10 s."""
        if not self._options.pattern or self._loop.time() < self._discovered_s + DISCOVERY_INTERVAL_S:
            return []
        try:
            return sorted(set(await self._matching()) - set(known))
        except RocketletError as error:
            log.warning("topic_lookup_failed", reason=str(error))
            return []

    async def _addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        return {queue: await self._address(queue) for queue in queues}

    async def _address(self, queue: Queue) -> str:
        if self._cluster.master(queue.broker_name) is None:
            await self._cluster.find_route(queue.topic)
        address = self._cluster.master(queue.broker_name)
        if address is None:
            raise ConnectionFailed(f"no name server knows the broker {queue.broker_name}, which {queue} lies on")
        return address

    # Offsets

    async def _ends(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        """How far batches may go: the targets, or the offsets after the newest messages."""
        return self._targets if self._targets is not None else await self._newest(queues)

    async def _newest(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        """The offsets after the newest messages; queues of brokers that are away are left out. Raises ConnectionFailed if
        no broker has answered for as long as an answer may take."""
        found = await asyncio.gather(*(self._end(queue) for queue in queues))
        ends = {queue: end for queue, end in found if end is not None}
        now_s = time.monotonic()
        if ends or not (found or self._is_cut_off()):
            self._answered_s = now_s
        elif now_s - self._answered_s > self._options.poll_timeout_s:
            raise ConnectionFailed(
                f"no broker of {', '.join(sorted({queue.topic for queue in self._queues()}))} has answered for "
                f"{self._options.poll_timeout_s:.0f} s; start them, or raise pollTimeoutMs. Nothing is lost: the query goes "
                "on from its checkpoint"
            )
        return ends

    def _is_cut_off(self) -> bool:
        """Whether every queue waits for its broker, though none can be asked."""
        return False

    async def _end(self, queue: Queue) -> tuple[Queue, int | None]:
        name = queue.broker_name
        try:
            connection = await self._cluster.broker(name)
            ext = write(TopicQueue(queue.topic, queue.queue_id))
            answer = await connection.request(RequestCode.GET_MAX_OFFSET, ext, timeout_s=OFFSET_TIMEOUT_S)
        except (ConnectionFailed, RequestTimeout) as error:
            if name not in self._away:
                log.warning(
                    "broker_away", broker=name, reason=str(error), hint="its queues are skipped until it is back"
                )
            self._away.add(name)
            return queue, None
        self._away.discard(name)
        return queue, read(Offset, answer.ext).offset

    async def _all_ends(self) -> dict[Queue, int]:
        """Raises ConnectionFailed if one cannot be known."""
        queues = self._queues()
        ends = await self._ends(queues)
        missing = sorted({queue.broker_name for queue in queues if queue not in ends})
        if missing:
            raise ConnectionFailed(
                f"the broker {missing[0]} cannot be asked how far its queues go; start it, and the query again"
            )
        return ends

    async def _progress(self) -> tuple[dict[Queue, int], dict[Queue, int]]:
        planned = self._planned()
        return await self._newest(planned), planned

    async def _cut(self, available: Ranges, max_rows: int | None, max_bytes: int | None) -> dict[Queue, Range]:
        """The ranges within both limits."""
        cut = shared_out(available, max_rows)
        if max_bytes is None or not cut:
            return cut
        sizes = await asyncio.gather(*(self._message_bytes(queue, span[0]) for queue, span in cut.items()))
        return shared_out(cut, max_bytes, dict(zip(cut, sizes, strict=True)))

    async def _message_bytes(self, queue: Queue, offset: int) -> float:
        """The mean size of the next messages of a queue."""
        connection: Connection = await self._cluster.broker(queue.broker_name)
        subscription = self._options.subscription(queue.topic)
        header = pull_header(self._options.group, queue, offset, SAMPLE_MESSAGES, subscription)
        timeout_s = self._options.poll_timeout_s
        answer = await connection.ask(RequestCode.PULL_MESSAGE, header, timeout_s=timeout_s)
        messages = int(answer.ext.get("nextBeginOffset", 0)) - offset
        return max(len(answer.body) / messages, 1.0) if messages > 0 and answer.body else 1.0
