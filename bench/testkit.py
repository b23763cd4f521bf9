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
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import nats
import redis.asyncio
from fakeredis import TcpFakeServer
from rocketlet.client import AdminClient, Consumer, Message, Producer
from rocketlet.command.plumbing.numbers import whole
from rocketlet.testing import Broker, RemoteBroker
from rocketlet.testing.ports import free_port

from . import peers, runner
from .runner import BODY

TESTS = 100
CLEANINGS = 10
PATIENCE_S = 120


class System(ABC):
    """A broker as a test suite has it. `stack` ends what was started."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def test(self, number: int, stays: AsyncExitStack | None = None) -> None:
        """Sends a message and consumes it, by clients of its own, which `stays` may keep connected."""

    @abstractmethod
    async def clean(self, number: int) -> None:
        """Cleans up after the test of this number."""


class Rocketlet(System):
    """In this process."""

    async def start(self) -> None:
        self.broker = await self.stack.enter_async_context(Broker())
        self.address = self.broker.address

    def names(self, number: int) -> tuple[str, str]:
        """Topic and group."""
        return "orders", "shipping"

    async def test(self, number: int, stays: AsyncExitStack | None = None) -> None:
        topic, group = self.names(number)
        seen = asyncio.Event()

        def handle(message: Message) -> None:
            seen.set()

        async with AsyncExitStack() as ends:
            clients = stays or ends
            producer = await clients.enter_async_context(Producer(self.address, timeout_s=20))
            await producer.send(topic, BODY)
            await clients.enter_async_context(Consumer(self.address, group, topic, handle, start="first"))
            await asyncio.wait_for(seen.wait(), PATIENCE_S)

    async def clean(self, number: int) -> None:
        await self.broker.aclear()


class RocketletProcess(Rocketlet):
    """A process with a control port."""

    async def start(self) -> None:
        control = free_port()
        peer = await self.stack.enter_async_context(
            peers.rocketlet(self.folder, "--control-port", str(control), "--no-vip")
        )
        await peers.listening(control)
        self.remote = self.stack.enter_context(RemoteBroker(f"127.0.0.1:{control}", address=peer.address))
        self.address = peer.address

    async def clean(self, number: int) -> None:
        await asyncio.to_thread(self.remote.clear)


class Apache(Rocketlet):
    """By the same clients as ours."""

    async def start(self) -> None:
        peer = await self.stack.enter_async_context(peers.apache(self.folder))
        self.address = peer.address
        self.admin = await self.stack.enter_async_context(AdminClient(self.address))

    def names(self, number: int) -> tuple[str, str]:
        return f"orders-{number}", f"shipping-{number}"

    async def test(self, number: int, stays: AsyncExitStack | None = None) -> None:
        await self.admin.create_topic(self.names(number)[0], queues=4)
        await super().test(number, stays)

    async def clean(self, number: int) -> None:
        topic, group = self.names(number)
        await self.admin.delete_topic(topic)
        await self.admin.delete_group(group)


class FakeRedis(System):
    """Its TCP server in a thread, and redis-py with streams."""

    async def start(self) -> None:
        self.port = free_port()
        server = TcpFakeServer(("127.0.0.1", self.port))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.stack.callback(server.server_close)
        self.stack.callback(server.shutdown)
        await peers.listening(self.port)

    def connect(self) -> Any:
        return redis.asyncio.Redis(host="127.0.0.1", port=self.port)

    async def test(self, number: int, stays: AsyncExitStack | None = None) -> None:
        async with AsyncExitStack() as ends:
            client = await (stays or ends).enter_async_context(self.connect())
            await client.xadd("orders", {"body": BODY})
            await client.xgroup_create("orders", "shipping", id="0")
            found = await client.xreadgroup("shipping", "one", {"orders": ">"}, count=1)
            ((_, ((place, _),)),) = found
            await client.xack("orders", "shipping", place)

    async def clean(self, number: int) -> None:
        async with self.connect() as client:
            await client.flushall()


class JetStream(System):
    """Debian's nats-server, by nats-py."""

    async def start(self) -> None:
        peer = await self.stack.enter_async_context(peers.jetstream(self.folder))
        self.url = f"nats://{peer.address}"
        self.connection = await nats.connect(self.url)
        self.stack.push_async_callback(self.connection.close)

    async def test(self, number: int, stays: AsyncExitStack | None = None) -> None:
        connection = await nats.connect(self.url)
        stream = connection.jetstream()
        await stream.add_stream(name="orders", subjects=["orders"])
        await stream.publish("orders", BODY)
        subscription = await stream.pull_subscribe("orders", "shipping", stream="orders")
        (message,) = await subscription.fetch(1, timeout=PATIENCE_S)
        await message.ack()
        if stays is None:
            await connection.close()
        else:
            stays.push_async_callback(connection.close)

    async def clean(self, number: int) -> None:
        await self.connection.jetstream().delete_stream("orders")


SYSTEMS: dict[str, Callable[[Path, AsyncExitStack], System]] = {
    "rocketlet": Rocketlet,
    "rocketlet-process": RocketletProcess,
    "fakeredis": FakeRedis,
    "jetstream": JetStream,
    "apache": Apache,
}


async def milliseconds(work: Awaitable[None]) -> float:
    began_s = time.perf_counter()
    await work
    return (time.perf_counter() - began_s) * 1000


async def measure(name: str, tests: int) -> runner.Values:
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with AsyncExitStack() as stack:
            system = SYSTEMS[name](Path(folder), stack)
            found = {
                "start_ms": await milliseconds(system.start()),
                "first_message_ms": await milliseconds(system.test(0)),
            }
            await system.clean(0)
            cleanings = []
            for number in range(1, CLEANINGS + 1):
                async with AsyncExitStack() as stays:
                    await system.test(number, stays)
                    cleanings.append(await milliseconds(system.clean(number)))
            found["clean_ms"] = runner.median(cleanings)
            began_s = time.perf_counter()
            for number in range(CLEANINGS + 1, CLEANINGS + 1 + tests):
                await system.test(number)
                await system.clean(number)
            found["hundred_tests_s"] = (time.perf_counter() - began_s) * TESTS / tests
            return found


def parser() -> argparse.ArgumentParser:
    made = runner.parser(__doc__, SYSTEMS)
    made.add_argument(
        "--tests", type=whole(1), default=TESTS, help="how many tests to run; the result is scaled to a hundred"
    )
    return made


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    names = runner.chosen(options.only, tuple(SYSTEMS))
    cases = {name: {"": partial(measure, name, options.tests)} for name in names}
    figures = await runner.alternate(options.rounds, cases)
    figures.show("A broker for tests", "hundred_tests_s", less_is_better=True)
    return figures.only_case()


if __name__ == "__main__":
    runner.main("testkit", parser(), run)
