"""The paths that `bench.cpu` measures: a broker that is given the bytes of requests, and clients whose broker is in the same
process, on the simulation's event loop. There are no sockets, and time passes only when nothing is left to do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Listening, Server, Taps
from rocketlet.client import Consumer, Message, Producer
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, TopicConfig, encode_heartbeat
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, FrameReader
from rocketlet.protocol.headers import UpdateOffset, write
from rocketlet.protocol.message import encode_batch
from rocketlet.protocol.names import Queue, parse_subscription

from simulation.loop import Process, SimLoop, virtual_time

from . import foreign
from .runner import BODY
from .steps import Meter

PORT = 9876
ADDRESS = f"127.0.0.1:{PORT}"
TOPIC = foreign.TOPIC
BATCH = 63  # as many messages of 1 KB as our producer puts into a request
IN_A_READ = 16
PULLED = 32

Run = Callable[[], Awaitable[None]]
Result = TypeVar("Result")


class CodePath(NamedTuple):
    """`run` does the work for this many messages; a pull, a commit and a heartbeat count as one."""

    name: str
    messages: int
    run: Run


class Client(asyncio.Transport):
    """A connection to the broker that is fed with bytes; the responses are kept until they are checked."""

    def __init__(self, server: Server, meter: Meter) -> None:
        super().__init__({"peername": ("127.0.0.1", 40_000), "sockname": ("127.0.0.1", PORT)})
        self._written: list[bytes] = []
        self._meter = meter
        self._connection = RemotingConnection(server)
        self._connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written.append(bytes(data))

    def writelines(self, list_of_data: Sequence[bytes | bytearray | memoryview]) -> None:  # type: ignore[override] # as asyncio calls it
        self._written.extend(map(bytes, list_of_data))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...

    def abort(self) -> None: ...

    async def ask(self, data: bytes, answers: int) -> None:
        """Raises RuntimeError for an answer that is no success."""
        self._connection.data_received(data)
        with self._meter.paused():
            written, self._written = self._written, []
            codes = [frame.code for frame in FrameReader().feed(b"".join(written))]
            if codes != [0] * answers:
                raise RuntimeError(f"{answers} successes were expected; the answers' codes are {codes}")


def of_broker(server: Server, meter: Meter) -> list[CodePath]:
    client = Client(server, meter)
    kinds = {"": MSGPACK, ", JSON": JSON, ", binary": ROCKETMQ}
    found = []
    for suffix, kind in kinds.items():
        data = b"".join(foreign.sends(kind)[:IN_A_READ])
        found.append(CodePath(f"broker: send{suffix}", IN_A_READ, partial(client.ask, data, IN_A_READ)))
    found.append(CodePath("broker: send in a batch", BATCH, partial(client.ask, batch(), 1)))
    for suffix, kind in kinds.items():
        data = foreign.pulls(kind)[0]
        found.append(CodePath(f"broker: pull of {PULLED}{suffix}", 1, partial(client.ask, data, 1)))
    offsets = itertools.cycle(commit(offset) for offset in range(100))
    found.append(CodePath("broker: commit", 1, lambda: client.ask(next(offsets), 1)))
    consumer = ConsumerData("beating", subscriptions=(parse_subscription(TOPIC, "*", version=1),))
    beat = foreign.frame(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat("c1", (consumer,))))
    found.append(CodePath("broker: heartbeat", 1, partial(client.ask, beat, 1)))
    return found


def commit(offset: int) -> bytes:
    return foreign.frame(RequestCode.UPDATE_CONSUMER_OFFSET, write(UpdateOffset("committing", TOPIC, 0, offset)))


def batch(topic: str = TOPIC, count: int = BATCH) -> bytes:
    body = encode_batch([(0, BODY, f"UNIQ_KEY\x01{number:032X}") for number in range(count)])
    return foreign.frame(RequestCode.SEND_BATCH_MESSAGE, foreign.send_fields(topic, batch=True), body)


async def of_producer(stack: AsyncExitStack) -> list[CodePath]:
    producer = await stack.enter_async_context(Producer(ADDRESS, "bench"))

    async def alone() -> None:
        for _ in range(IN_A_READ):
            await producer.send(TOPIC, BODY)

    async def together() -> None:
        await asyncio.gather(*(producer.send(TOPIC, BODY) for _ in range(2 * BATCH)))

    await alone()
    return [CodePath("producer: send", IN_A_READ, alone), CodePath("producer: sends of a turn", 2 * BATCH, together)]


async def of_consumer(server: Server, meter: Meter, stack: AsyncExitStack) -> list[CodePath]:
    """From the bytes of a pull's answer to the handler, with the next pull."""
    seen = 0

    async def handle(message: Message) -> None:
        nonlocal seen
        seen += 1

    async def handle_batch(messages: Sequence[Message]) -> None:
        nonlocal seen
        seen += len(messages)

    client = Client(server, meter)

    async def run(topic: str) -> None:
        nonlocal seen
        seen = 0
        with meter.paused():
            await client.ask(batch(topic, 4 * BATCH), 1)
        while seen < 4 * BATCH:
            await asyncio.sleep(0.001)

    await stack.enter_async_context(
        Consumer(ADDRESS, "batches", "batches", handle_batch, batch_size=256, start="first")
    )
    await stack.enter_async_context(Consumer(ADDRESS, "singly", "singly", handle, start="first"))
    return [
        CodePath("consumer: batch handler", 4 * BATCH, partial(run, "batches")),
        CodePath("consumer: handler per message", 4 * BATCH, partial(run, "singly")),
    ]


def of_spark(broker: BrokerController) -> list[CodePath]:
    from rocketlet.spark import options
    from rocketlet.spark.columns import rows_of

    queue = Queue(TOPIC, "broker-a", 0)
    stored = broker.store.queue(TOPIC, 0)
    fetched = broker.store.fetch(stored, 0, 256, None, None, None)
    data, count = b"".join(fetched.pieces), fetched.messages

    async def decode() -> None:
        columns = tuple(options.OURS)
        assert len(rows_of(data, queue, 0, count, columns).batch(columns)) == count

    return [CodePath("Spark: decode", count, decode)]


def on_virtual_time(loop: SimLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that runs alone on the loop, with the loop's clock."""
    asyncio.set_event_loop(loop)
    with virtual_time(loop):
        found = loop.run_until_complete(work)
    loop.close()
    return found


async def started(folder: Path, stack: AsyncExitStack, taps: Taps | None = None) -> tuple[Server, BrokerController]:
    config = BrokerConfig(data_dir=folder, address=ADDRESS, name="broker-a", vip_channel=False)
    routes = Routes()
    broker = BrokerController(config, routes)
    server = Server(Listening("127.0.0.1", PORT), broker=broker, routes=routes, taps=taps or Taps())
    with Process("broker").running():  # the simulated network knows servers by their processes
        await stack.enter_async_context(server)
    return server, broker


@asynccontextmanager
async def paths(folder: Path, meter: Meter) -> AsyncIterator[list[CodePath]]:
    """All of them, ready to run. A client's path does not count the broker's work."""

    class Unseen(RemotingConnection):
        def data_received(self, data: bytes) -> None:
            with meter.paused():
                super().data_received(data)

    async with AsyncExitStack() as stack:
        server, broker = await started(folder, stack, Taps(Unseen))
        for topic in (TOPIC, "batches", "singly"):
            broker.topics.put(TopicConfig(topic, 1, 1), 0)
        found = of_broker(server, meter)
        for path in found[:4]:
            for _ in range(20):  # something to pull
                await path.run()
        found += await of_producer(stack)
        found += await of_consumer(server, meter, stack)
        found += of_spark(broker)
        yield found
