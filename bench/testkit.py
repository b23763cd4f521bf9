"""The price of a broker for a test suite: the start, the first message, cleaning between tests, and a hundred tests.

start_ms         until the broker can be asked
first_message_ms from there until a message was sent and consumed by clients that connect for it
clean_ms         until nothing of a test is left, while its clients are still connected; the median of ten
hundred_tests_s  a hundred tests in turn: connect, send one message, consume it, hang up, clean

Rocketlet in the test's process and by the control port of another, fakeredis with its TCP server (streams), Debian's
nats-server (JetStream), and Apache's broker, which has nothing to clean with: topics and groups are deleted, and each test
takes new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nats
import redis.asyncio
from fakeredis import TcpFakeServer
from rocketlet.client import AdminClient
from rocketlet.command.plumbing.numbers import whole
from rocketlet.testing import Broker, RemoteBroker
from rocketlet.testing.ports import free_port

from . import peers, runner
from .runner import BODY
from .start import ARRIVAL_S, send_and_consume

TESTS = 100
CLEANINGS = 10


class System(NamedTuple):
    """How a test suite uses a running broker.

    test: Sends a message and consumes it in the test of a number, by clients that stay connected until the stack closes.
    clean: Cleans up after the test of a number.
    """

    test: Callable[[int, AsyncExitStack], Awaitable[object]]
    clean: Callable[[int], Awaitable[object]]


async def rocketlet(folder: Path, stack: AsyncExitStack) -> System:
    broker = await stack.enter_async_context(Broker())
    return System(partial(send_order, broker.address), lambda number: broker.aclear())


async def rocketlet_process(folder: Path, stack: AsyncExitStack) -> System:
    control = free_port()
    options = ("--control-port", str(control), "--no-vip")
    peer = await stack.enter_async_context(peers.rocketlet(folder, *options))
    await peers.listening(control)
    remote = stack.enter_context(RemoteBroker(f"127.0.0.1:{control}", address=peer.address))
    return System(partial(send_order, peer.address), lambda number: asyncio.to_thread(remote.clear))


async def send_order(address: str, number: int, clients: AsyncExitStack) -> None:
    await send_and_consume(address, "orders", "shipping", clients)


async def apache(folder: Path, stack: AsyncExitStack) -> System:
    peer = await stack.enter_async_context(peers.apache(folder))
    admin = await stack.enter_async_context(AdminClient(peer.address))

    async def test(number: int, clients: AsyncExitStack) -> None:
        await admin.create_topic(f"orders-{number}", queues=4)
        await send_and_consume(peer.address, f"orders-{number}", f"shipping-{number}", clients)

    async def clean(number: int) -> None:
        await admin.delete_topic(f"orders-{number}")
        await admin.delete_group(f"shipping-{number}")

    return System(test, clean)


async def fake_redis(folder: Path, stack: AsyncExitStack) -> System:
    port = free_port()
    server = TcpFakeServer(("127.0.0.1", port))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    await peers.listening(port)
    connect: Callable[[], Any] = partial(redis.asyncio.Redis, host="127.0.0.1", port=port)

    async def test(number: int, clients: AsyncExitStack) -> None:
        client = await clients.enter_async_context(connect())
        await client.xadd("orders", {"body": BODY})
        await client.xgroup_create("orders", "shipping", id="0")
        ((_, ((place, _),)),) = await client.xreadgroup("shipping", "one", {"orders": ">"}, count=1)
        await client.xack("orders", "shipping", place)

    async def clean(number: int) -> None:
        async with connect() as client:
            await client.flushall()

    return System(test, clean)


async def jetstream(folder: Path, stack: AsyncExitStack) -> System:
    url = f"nats://{(await stack.enter_async_context(peers.jetstream(folder))).address}"
    cleaner = await nats.connect(url)
    stack.push_async_callback(cleaner.close)

    async def test(number: int, clients: AsyncExitStack) -> None:
        connection = await nats.connect(url)
        clients.push_async_callback(connection.close)
        stream = connection.jetstream()
        await stream.add_stream(name="orders", subjects=["orders"])
        await stream.publish("orders", BODY)
        subscription = await stream.pull_subscribe("orders", "shipping", stream="orders")
        (message,) = await subscription.fetch(1, timeout=ARRIVAL_S)
        await message.ack()

    return System(test, lambda number: cleaner.jetstream().delete_stream("orders"))


SYSTEMS: dict[str, Callable[[Path, AsyncExitStack], Awaitable[System]]] = {
    "rocketlet": rocketlet,
    "rocketlet-process": rocketlet_process,
    "fakeredis": fake_redis,
    "jetstream": jetstream,
    "apache": apache,
}


async def measure(name: str, tests: int) -> runner.Values:
    async with AsyncExitStack() as stack:
        watch = runner.Stopwatch()
        system = await SYSTEMS[name](runner.temporary_folder(stack), stack)
        start_ms = watch.read_s()[0] * 1000
        watch = runner.Stopwatch()
        async with AsyncExitStack() as clients:
            await system.test(0, clients)
        first_message_ms = watch.read_s()[0] * 1000
        await system.clean(0)
        cleanings_ms = []
        for number in range(1, CLEANINGS + 1):
            async with AsyncExitStack() as clients:
                await system.test(number, clients)
                watch = runner.Stopwatch()
                await system.clean(number)
                cleanings_ms.append(watch.read_s()[0] * 1000)
        watch = runner.Stopwatch()
        for number in range(CLEANINGS + 1, CLEANINGS + 1 + tests):
            async with AsyncExitStack() as clients:
                await system.test(number, clients)
            await system.clean(number)
        return {
            "start_ms": start_ms,
            "first_message_ms": first_message_ms,
            "clean_ms": runner.median(cleanings_ms),
            "hundred_tests_s": watch.read_s()[0] * TESTS / tests,
        }


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    names = runner.chosen(options.only, tuple(SYSTEMS))
    cases = {name: {"": partial(measure, name, options.tests)} for name in names}
    figures = await runner.alternate(options.rounds, cases)
    figures.show("A broker for tests", "hundred_tests_s", less_is_better=True)
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, SYSTEMS)
    made.add_argument(
        "--tests", type=whole(1), default=TESTS, help="how many tests to run; the result is scaled to a hundred"
    )
    runner.main("testkit", made, run)
