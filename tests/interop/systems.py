"""Brokers that the tests of several files share, because Apache's take seconds of the processor to start: 4.9 and 5.5, and
our own with the same settings."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import Consumer, Producer
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.bodies import GroupConfig, encode_group
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, QueueOffset, write
from rocketlet.testing.ports import free_port

from bench.peers import APACHE_START_S, APACHE_TRIES, Apache

from ..conftest import PATIENCE_S, eventually
from ..support.handlers import Inbox
from ..support.pacing import pace
from .features import area

T = TypeVar("T")
SMALL = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
"""Options of virtual machines that live for seconds."""
HEAP = ("-Xms512m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", *SMALL)
"""Options of Apache's brokers."""
LEVELS_S = (1, 1, 1, 2, *[3] * 14)
CALM: dict[str, Any] = {"transactionMetricFlushInterval": 200, "timerFlushIntervalMs": 10_000}
"""Settings of 5.5: after its start a broker checks in a busy loop whether the first interval is over, 3 s by default, and the
second setting is how often it writes its timers."""
SETTINGS: dict[str, Any] = {
    **CALM,
    "enablePropertyFilter": "true",
    "transactionCheckInterval": 1000,
    "transactionTimeOut": 500,
    "transactionOpBatchInterval": 100,  # 5.x notes outcomes every 3 s, and delivers twice what it asks for before that
    "messageDelayLevel": " ".join(f"{seconds}s" for seconds in LEVELS_S),
    "traceTopicEnable": "true",
    "recallMessageEnable": "true",  # of 5.x
    "mappedFileSizeCommitLog": 64 * 1024 * 1024,
}
LITE = {"enableLmq": "true", "enableMultiDispatch": "true"}
"""Settings of Apache's 5.5 broker for lite topics."""
numbers = count(1)
"""For the names of topics and groups."""
feature = area("Our client on Apache's broker", client="Apache 4.9.7, 5.5.0")


class Ours:
    """Our broker with the same settings. `name_server`: the address of one that runs; then only a broker is started."""

    def __init__(self, folder: Path, name: str = "apache", name_server: str | None = None) -> None:
        self.broker_address = f"127.0.0.1:{free_port()}"
        self.address = name_server or self.broker_address
        self._name_servers = (name_server,) if name_server else ()
        self._name = name
        self._folder = folder
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Ours:
        config = BrokerConfig(
            data_dir=self._folder / "ours",
            address=self.broker_address,
            name=self._name,
            name_servers=self._name_servers,
            delay_levels_ms=tuple(1000 * seconds for seconds in LEVELS_S),
            transaction_check_interval_s=1.0,
            transaction_timeout_s=0.5,
            transaction_check_max=10**6,
        )
        port = int(self.broker_address.rpartition(":")[2])
        self._stack = AsyncExitStack()
        routes = None if self._name_servers else Routes()
        await self._stack.enter_async_context(
            Server(Listening("127.0.0.1", port), broker=BrokerController(config, routes), routes=routes)
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def restart_broker(self) -> None:
        await self._stack.aclose()
        await self.__aenter__()


class System:
    """A running system; it lives in a thread with a loop of its own, for all tests of a module."""

    def __init__(self, system: Ours | Apache) -> None:
        self._system = system
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(system.__aenter__(), timeout_s=APACHE_TRIES * 3 * APACHE_START_S)
        self.address = system.address

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 3 * APACHE_START_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def restart_broker(self) -> None:
        await asyncio.to_thread(self.run, self._system.restart_broker())

    def stop(self) -> None:
        if isinstance(self._system, Apache):
            os.kill(
                self._system.pid, signal.SIGKILL
            )  # its data are not used any more, and an orderly end of 5.5 takes 20 s
        self.run(self._system.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def topic(self, queues: int = 4) -> str:
        """A new topic that the name server knows."""
        name = f"t{next(numbers)}"
        cluster = ClusterView(self.address)
        connection = await cluster.connection(self._system.broker_address)
        await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(name, queues, queues, 6)))

        async def has_route() -> bool:
            return await cluster.find_route(name) is not None

        await eventually(has_route)
        await cluster.close()
        return name

    async def group(self, **settings: Any) -> str:
        """A new group. Created, because Apache's broker makes one only at the first heartbeat, its retry topic late."""
        name = f"g{next(numbers)}"
        cluster = ClusterView(self.address)
        connection = await cluster.connection(self._system.broker_address)
        body = encode_group(GroupConfig(name, **settings))
        await connection.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
        await cluster.close()
        return name

    async def committed(self, group: str, topic: str, queues: int = 4) -> list[int]:
        cluster = ClusterView(self.address)
        connection = await cluster.connection(self._system.broker_address)
        offsets = [
            await connection.request(RequestCode.QUERY_CONSUMER_OFFSET, write(QueueOffset(group, topic, queue)))
            for queue in range(queues)
        ]
        await cluster.close()
        return [int(answer.ext["offset"]) for answer in offsets]


@asynccontextmanager
async def restarted(system: System) -> AsyncIterator[None]:
    """A producer and a consumer whose broker restarts within the context: all messages arrive, and committed ones once."""
    topic, group = await system.topic(), await system.group()
    inbox = Inbox()
    async with (
        Consumer(system.address, group, topic, inbox, start="first") as consumer,
        Producer(system.address, retries=20, timeout_s=60) as producer,
    ):
        for number in range(20):
            await producer.send(topic, b"%d" % number)
        await eventually(lambda: len(inbox.messages) == 20)
        await consumer.commit()
        yield
        for number in range(20, 40):
            async with asyncio.timeout(2 * PATIENCE_S):
                while True:
                    try:
                        await producer.send(topic, b"%d" % number)
                        break
                    except Exception:
                        await pace(0.2)
        await eventually(lambda: {*inbox.bodies} == {b"%d" % number for number in range(40)}, 90)
    assert all(times == 1 for body, times in Counter(inbox.bodies).items() if int(body) < 20)
