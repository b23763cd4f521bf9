"""Counts the functions and files of the product that each path enters.

Broker and clients run in one process on the simulation's event loop, as in `bench.cpu`, with a new broker for each path. A
function is a distinct (file, qualified name, first line) that the interpreter enters between the beginning and the end of the
path: in `broker/`, and for `own_joins_client` in `client/`. A comprehension that has a frame of its own, a lambda and a
generator count as functions.

- send: the second SEND of a producer of ours
- pull: a PULL of a Java member that gets a message and commits an offset
- pop_ack: a SEND, the POP that it answers, and the acknowledgement, with our shared consumer
- grpc_receive_ack: ReceiveMessage and AckMessage of one message
- java_joins: a second Java member joins while the first one pulls, until both are notified
- own_joins_broker, own_joins_client: a second of our consumers joins, and queues are handed over to it"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.grpc import schema
from rocketlet.client import Consumer, Message, Producer, SharedConsumer
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, TopicConfig, encode_heartbeat
from rocketlet.protocol.codes import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, RequestCode
from rocketlet.protocol.headers import PullMessage, write
from rocketlet.protocol.names import parse_subscription

from simulation.loop import SimLoop, fix_hashes
from tests.conftest import Wire
from tests.support.grpc_client import GrpcClient, grpc_client, resource

from . import foreign, runner
from .cpu_paths import ADDRESS, PORT, on_virtual_time, started
from .steps import ROOT, Meter

QUIET_S = 0.5  # after this, of the virtual clock, a step of the preparation has no more effect
COMMITTED_S = 10.0  # after this a consumer has committed what it handled


class EvenLoop(SimLoop):
    """All bytes take equally long, so that a path does not change because another one writes more often."""

    def delay_s(self) -> float:
        return 0.001


class Bench(NamedTuple):
    """A new broker, what ends with it, and the meter of the path."""

    meter: Meter
    stack: AsyncExitStack
    broker: BrokerController


class JavaClient(Wire):
    """A member's connection with JSON headers, which answers nothing of itself."""

    async def send_message(self, queue: int) -> None:
        await self.call(RequestCode.SEND_MESSAGE_V2, foreign.send_fields("t", queue))

    def send_pull(self, queue: int, offset: int) -> int:
        """As a member that commits what it has handled, and waits up to 15 s for a message. Return the request's number."""
        flags = PULL_SUBSCRIPTION | PULL_SUSPEND | (PULL_COMMIT_OFFSET if offset else 0)
        header = PullMessage("g", "t", queue, offset, 32, flags, offset, 15_000, 0, "*", "TAG")
        return self.send(RequestCode.PULL_MESSAGE, write(header))

    async def pull(self, queue: int, offset: int) -> None:
        await self.answer(self.send_pull(queue, offset))

    async def beat(self, client_id: str) -> None:
        consumer = ConsumerData("g", subscriptions=(parse_subscription("t", "*", version=1),))
        await self.call(RequestCode.HEART_BEAT, {}, encode_heartbeat(Heartbeat(client_id, (consumer,))))


async def connect(bench: Bench) -> JavaClient:
    """Return a client of a broker with the topic `t` of two queues."""
    bench.broker.topics.put(TopicConfig("t", 2, 2), 0)
    client = JavaClient(*await asyncio.open_connection("127.0.0.1", PORT))
    bench.stack.push_async_callback(client.close)
    return client


async def receive(client: GrpcClient) -> list[str]:
    """Return the receipt handles of up to one message."""
    wanted = schema.ReceiveMessageRequest(batch_size=1)
    wanted.group.name, wanted.message_queue.topic.name, wanted.message_queue.id = "g", "t", -1
    wanted.long_polling_timeout.FromMilliseconds(0)
    wanted.invisible_duration.FromMilliseconds(30_000)
    call = client.begin("ReceiveMessage")
    call.send(wanted, end=True)
    messages = [answer.message for answer in await call.all() if answer.WhichOneof("content") == "message"]
    return [message.system_properties.receipt_handle for message in messages]


async def ack(client: GrpcClient, handle: str) -> None:
    asked = schema.AckMessageRequest(group=resource("g"), topic=resource("t"))
    asked.entries.add(message_id="id", receipt_handle=handle)
    await client.call("AckMessage", asked)


async def send(bench: Bench) -> None:
    producer = await bench.stack.enter_async_context(Producer(ADDRESS))
    await producer.send("t", b"x")
    await asyncio.sleep(QUIET_S)
    with bench.meter.counting():
        await producer.send("t", b"x")


async def pull(bench: Bench) -> None:
    client = await _java_member(bench)
    await client.send_message(0)
    with bench.meter.counting():
        await client.pull(0, 1)


async def pop_ack(bench: Bench) -> None:
    handled = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    async def sent_and_settled() -> None:
        handled.clear()
        await producer.send("t", b"x")
        await handled.wait()
        await asyncio.sleep(0.1)

    producer = await bench.stack.enter_async_context(Producer(ADDRESS))
    await bench.stack.enter_async_context(SharedConsumer(ADDRESS, "g", "t", handle, start="first"))
    for _ in range(5):
        await sent_and_settled()
    await asyncio.sleep(QUIET_S)
    with bench.meter.counting():
        await sent_and_settled()


async def grpc_receive_ack(bench: Bench) -> None:
    java = await connect(bench)
    client = await grpc_client(ADDRESS)
    assert await receive(client) == []
    for _ in range(3):
        await java.send_message(0)
        for handle in await receive(client):
            await ack(client, handle)
    await java.send_message(0)
    await asyncio.sleep(QUIET_S)
    with bench.meter.counting():
        (handle,) = await receive(client)
        await ack(client, handle)


async def java_joins(bench: Bench) -> None:
    first = await _java_member(bench)
    for number in range(1, 3):
        await first.send_message(0)
        await first.pull(0, number)
    second = await connect(bench)
    await asyncio.sleep(QUIET_S)
    first.requests.clear()
    with bench.meter.counting():
        await second.beat("c2")
        await first.pull(1, 0)
        first.send_pull(1, 1)
        first.send_pull(0, 3)
        for client in (first, second):
            await client.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)


async def own_joins(bench: Bench) -> None:
    handled = 0

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1

    producer = await bench.stack.enter_async_context(Producer(ADDRESS))
    await producer.send("t", b"x")
    first = await bench.stack.enter_async_context(Consumer(ADDRESS, "g", "t", handle, start="first"))
    await first.assigned()
    for _ in range(8):
        await producer.send("t", b"x")
    while handled < 9:
        await asyncio.sleep(QUIET_S)
    await asyncio.sleep(COMMITTED_S)
    with bench.meter.counting():
        second = await bench.stack.enter_async_context(Consumer(ADDRESS, "g", "t", handle, start="first"))
        await second.assigned()
        await first.assigned()
        await asyncio.sleep(0.1)


async def _java_member(bench: Bench) -> JavaClient:
    """The only member, which has read its two queues."""
    client = await connect(bench)
    await client.beat("c1")
    await asyncio.sleep(QUIET_S)
    for queue in range(2):
        await client.send_message(queue)
        await client.pull(queue, 0)
    await asyncio.sleep(QUIET_S)
    return client


class Way(NamedTuple):
    """A path, and the packages whose functions count, by the name of the figure."""

    run: Callable[[Bench], Awaitable[None]]
    sides: Mapping[str, str]


WAYS = (
    Way(send, {"send": "broker"}),
    Way(pull, {"pull": "broker"}),
    Way(pop_ack, {"pop_ack": "broker"}),
    Way(grpc_receive_ack, {"grpc_receive_ack": "broker"}),
    Way(java_joins, {"java_joins": "broker"}),
    Way(own_joins, {"own_joins_broker": "broker", "own_joins_client": "client"}),
)


async def measure(way: Way) -> dict[str, list[str]]:
    """Return the functions of each side, in the order of their first calls."""
    async with AsyncExitStack() as stack:
        meter = Meter()
        _, broker = await started(runner.temporary_folder(stack), stack)
        await way.run(Bench(meter, stack, broker))
    entered = dict.fromkeys((code.co_filename, code.co_firstlineno, code.co_qualname) for code in meter.entered)
    return {
        key: [
            f"{Path(file).relative_to(ROOT)}:{line} {name}"
            for file, line, name in entered
            if file.startswith(f"{ROOT}/{side}/")
        ]
        for key, side in way.sides.items()
    }


def main() -> None:
    parser = runner.parser(__doc__, rounds=0)
    parser.add_argument("--list", action="store_true", help="print what was counted, too")
    options = parser.parse_args()
    result: dict[str, dict[str, int]] = {}
    for way in WAYS:
        for key, functions in on_virtual_time(EvenLoop(1), measure(way)).items():
            for line in functions if options.list else ():
                print(key, line)
            files = {function.partition(":")[0] for function in functions}
            result[key] = {"functions": len(functions), "files": len(files)}
    runner.show("By path", ("", "functions", "files"), [[key, *found.values()] for key, found in result.items()])
    runner.finish(options, "ways", result)


if __name__ == "__main__":
    fix_hashes("bench.ways")
    main()
