"""The parts that tests of a producer share: the sends it makes, the connection it has, and what the broker stores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.server import Listening, Server
from rocketlet.client import AdminClient, Message, Producer
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import RequestCode
from rocketlet.testing.clock import MovableClock

from ..conftest import Node, Nodes, Wire, create_topic


class Requests:
    """The sends of a producer, by request code. Heartbeats and routes come when they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        call = Connection.call

        def counted(connection: Connection, code: int, *rest: object) -> None:
            if code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
                self.codes.append(code)
            call(connection, code, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Connection, "call", counted)

    def taken(self) -> list[int]:
        codes, self.codes = self.codes, []
        return codes


@pytest.fixture
async def one_queue(wire: Wire) -> None:
    """The topic t with one queue."""
    await create_topic(wire, "t", 1)


@pytest.fixture
async def four_queues(wire: Wire) -> None:
    """The topic t with four queues."""
    await create_topic(wire, "t", 4)


@pytest.fixture
def clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends on its own."""
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    monkeypatch.setattr("rocketlet.client.message.clock_s", lambda: now_s)


async def stored(node: Node, topic: str = "t") -> list[Message]:
    async with AdminClient(node.address) as admin:
        ranges = (await admin.topic(topic)).ranges
        return [
            message
            for queue, span in ranges.items()
            async for part in admin.read(queue, span.begin, span.end)
            for message in part
        ]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def only_connection(producer: Producer) -> Connection:
    (connection,) = producer._greeted.values()
    return connection


def set_send_timeout(producer: Producer, timeout_s: float) -> None:
    """Give later sends this timeout. A producer that has it from its start may fail to connect on a busy machine."""
    producer._timeout_s = timeout_s
    if producer._accumulator is not None:
        producer._accumulator._timeout_s = timeout_s


@asynccontextmanager
async def connected(node: Node, limits: ClientLimits = CLIENT_LIMITS) -> AsyncIterator[Connection]:
    """A client's connection to the broker, without a client around it."""
    cluster = ClusterView(node.address, limits=limits)
    cluster.start()
    try:
        yield await cluster.connection(node.address)
    finally:
        await cluster.close()


def tasks_named(name: str) -> list[asyncio.Task[Any]]:
    """The tasks of this event loop whose names start so."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]


async def restart(nodes: Nodes, node: Node, *, stands: bool = False) -> Node:
    """The same broker on the same port and folder."""
    clock = MovableClock(stands=stands)
    broker = BrokerController(node.config, clock=clock)
    port = int(node.address.rpartition(":")[2])
    server = await Server(Listening("127.0.0.1", port), broker=broker, routes=None).__aenter__()
    again = Node(node.address, broker, server, node.config, clock)
    nodes.stack.push_async_callback(again.stop)
    return again
