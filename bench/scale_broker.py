"""The broker of `bench.scale` as a process with raised limits, a clock that its parent advances, and a timer around each
event-loop iteration; and its clients, which are plain connections."""

from __future__ import annotations

import asyncio
import json
import math
import selectors
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import LIMITS, BrokerConfig
from rocketlet.broker.machine import Garbage, raise_limit, resident_bytes
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.broker.store.index import ENTRY
from rocketlet.command.plumbing import logs
from rocketlet.demo.processes import Child
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import Language, RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.group_bodies import LiteAction, LiteSubscription, encode_lite_subscription
from rocketlet.protocol.headers import CreateTopic, PullMessage, SendMessage, write
from rocketlet.protocol.names import parse_subscription
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.ports import free_port

from .runner import BODY

RAISED = replace(
    LIMITS,
    max_topics=200_000,
    max_queues=2_000_000,
    max_groups=20_000,
    max_lite_syncs_per_s=1_000_000,
    max_lite_topics=1_000_000,
    max_lite_subscriptions=1_000_000,
    max_answering=1000,
)
TICK_S = 0.1


class TimedSelector(selectors.DefaultSelector):
    """Measures what the event loop does between two polls of the sockets."""

    longest_s = 0.0
    began_s = math.inf

    def select(self, timeout: float | None = None) -> list[Any]:
        self.longest_s = max(self.longest_s, time.thread_time() - self.began_s)
        found: list[Any] = super().select(timeout)
        self.began_s = time.thread_time()
        return found


async def serve(port: int, folder: Path, selector: TimedSelector) -> None:
    """Run a broker until stdin ends. A line is a number of seconds to advance the clock by, or `index N` to add entries."""
    clock = MovableClock(stands=True)
    config = BrokerConfig(folder, f"127.0.0.1:{port}", vip_channel=False, memory_bytes=16 << 30, retain_hours=1e6)
    routes = Routes(clock, limits=RAISED)
    broker = BrokerController(config, routes, clock, limits=RAISED)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with Garbage(clock), Server(Listening(port=port), broker=broker, routes=routes):
        print("ready", flush=True)
        async for line in lines:
            if line.startswith(b"index"):
                await add_entries(broker, int(line.split()[1]))
            else:
                for _ in range(round(float(line) / TICK_S)):
                    clock.advance(TICK_S)
                    await asyncio.sleep(0)
                    await broker.turns.done()
            await broker.turns.done()
            print(json.dumps([time.process_time(), selector.longest_s * 1000, resident_bytes()]), flush=True)
            selector.longest_s = 0.0


async def add_entries(broker: BrokerController, count: int) -> None:
    """Simulate retained messages: entries in the index of a queue, all of the message that it has."""
    queue = broker.store.queue("t", 0)
    entry = ENTRY.pack(*queue.entry(0))
    for begin in range(0, count, 1000):
        queue.extend_packed(entry * min(1000, count - begin), min(1000, count - begin), 0)
        if queue.tail_is_long:
            broker.store.flush_index(queue)
            await asyncio.sleep(0)


class Wire(asyncio.Protocol):
    """A connection that sends and receives plain frames, and ignores what the broker requests."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._waiting: list[asyncio.Future[Frame] | None] = []  # by the opaque of the request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            if frame.is_response and (future := self._waiting[frame.opaque]) and not future.done():
                self._waiting[frame.opaque] = None
                future.set_result(frame)

    def request(self, code: int, ext: Mapping[str, Any] | None = None, body: bytes = b"") -> asyncio.Future[Frame]:
        self.transport.write(encode(Frame(code, len(self._waiting), ext or {}, body, language=Language.JAVA)))
        self._waiting.append(future := asyncio.get_running_loop().create_future())
        return future

    async def call(self, code: int, ext: Mapping[str, Any] | None = None, body: bytes = b"") -> Frame:
        answer = await self.request(code, ext, body)
        if answer.code:
            raise RuntimeError(f"{RequestCode(code).name}: the broker returned {answer.code}: {answer.remark}")
        return answer

    def topic(self, name: str = "t", queues: int = 8, attributes: str = "") -> Awaitable[Frame]:
        header = CreateTopic(name, queues, queues, 6, attributes=attributes)
        return self.call(RequestCode.UPDATE_AND_CREATE_TOPIC, write(header))

    def send(self, queue: int = 0, properties: str = "") -> Awaitable[Frame]:
        header = SendMessage("p", "t", "TBW102", 4, queue, 0, int(time.time() * 1000), 0, properties)
        return self.call(RequestCode.SEND_MESSAGE, write(header), BODY[:100])

    def beat(self, client: int = 0, groups: Iterable[object] = ("g",)) -> Awaitable[Frame]:
        subscriptions = (parse_subscription("t", "*", version=1),)
        consumers = tuple(ConsumerData(str(group), subscriptions=subscriptions) for group in groups)
        return self.call(RequestCode.HEART_BEAT, body=encode_heartbeat(Heartbeat(f"c{client}", consumers)))

    def pull(self, group: int, queue: int, hold_ms: int = 0) -> asyncio.Future[Frame]:
        header = PullMessage(str(group), "t", queue, 0, 32, 2 if hold_ms else 0, 0, hold_ms)
        return self.request(RequestCode.PULL_MESSAGE, write(header))

    def pop(self, hold_ms: int = 0) -> asyncio.Future[Frame]:
        ext = {"queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": hold_ms, "initMode": 0}
        ext |= {"bornTime": int(time.time() * 1000)}
        return self.request(RequestCode.POP_MESSAGE, {"consumerGroup": "g", "topic": "t", **ext})

    def sync(self, client: int, names: Iterable[int]) -> Awaitable[Frame]:
        change = LiteSubscription(LiteAction.PARTIAL_ADD, f"c{client}", "lite", "t", tuple(map(str, names)))
        return self.call(RequestCode.LITE_SUBSCRIPTION_CTL, body=encode_lite_subscription(change))


class Row(NamedTuple):
    us: float
    step_ms: float
    bytes: float


@dataclass
class World:
    """A broker process and its clients. `step_ms` is the longest iteration since it was set to 0."""

    port: int
    child: Child
    wires: list[Wire] = field(default_factory=list)
    numbers: int = 0
    step_ms: float = 0.0

    @property
    def wire(self) -> Wire:
        return self.wires[0]

    def number(self) -> int:
        """A number that no other has."""
        self.numbers += 1
        return self.numbers

    async def connect(self) -> Wire:
        return (await asyncio.get_running_loop().create_connection(Wire, "127.0.0.1", self.port))[1]

    async def clients(self, count: int) -> None:
        while (missing := count - len(self.wires)) > 0:
            self.wires += await asyncio.gather(*(self.connect() for _ in range(min(missing, 8))))

    async def read(self, order: str = "0") -> tuple[float, float]:
        """CPU time in s and memory in bytes of the broker, after an order and all work that waits."""
        cpu_s, step_ms, memory_bytes = json.loads(await self.child.ask(order))
        self.step_ms = max(self.step_ms, step_ms)
        return cpu_s, memory_bytes

    async def measured(self, count: int, work: Callable[[], Awaitable[object]], times: int = 1) -> Row:
        """The cost of work that is done some times in turn, for each of `count`."""
        (before_s, before_bytes), self.step_ms = await self.read(), 0.0
        for _ in range(times):
            await work()
        now_s, now_bytes = await self.read()
        return Row((now_s - before_s) / count * 1e6, self.step_ms, (now_bytes - before_bytes) / count)


@asynccontextmanager
async def started() -> AsyncIterator[World]:
    """A new broker with the topic t, and one client."""
    with tempfile.TemporaryDirectory(prefix="rocketlet-scale-", ignore_cleanup_errors=True) as name:
        port = free_port()
        command = (sys.executable, "-m", "bench.scale_broker", str(port), name)
        world = World(port, await Child.start(command, Path(name, "log")))
        try:
            await world.child.wait_for("ready")
            await world.clients(1)
            await world.wire.topic()
            before_s = now_s = 0.0
            while not now_s or now_s - before_s > 0.005:  # the start continues, for example loads gRPC
                before_s, now_s = now_s, (await world.read("1"))[0]
                await asyncio.sleep(0.1)
            yield world
        finally:
            for wire in world.wires:
                wire.transport.abort()
            await world.child.stop()


if __name__ == "__main__":
    logs.configure("error")
    raise_limit()
    timed = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(timed)) as loops:
        loops.run(serve(int(sys.argv[1]), Path(sys.argv[2], "data"), timed))
