"""The parts that tests of a producer share: the sends it makes, the connection it has, and what the broker stores."""

from __future__ import annotations

import time

import pytest
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.runtime import MovableClock
from rocketlet.broker.server import Listening, Server
from rocketlet.client import AdminClient, Message, Producer
from rocketlet.client.wire.connection import Connection
from rocketlet.protocol.codes import RequestCode

from ..conftest import Node, Nodes


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


async def restart(nodes: Nodes, node: Node, *, stands: bool = False) -> Node:
    """The same broker on the same port and folder."""
    clock = MovableClock(stands=stands)
    broker = BrokerController(node.config, clock=clock)
    port = int(node.address.rpartition(":")[2])
    server = await Server(Listening("127.0.0.1", port), broker=broker, routes=None).__aenter__()
    again = Node(node.address, broker, server, node.config, clock)
    nodes.stack.push_async_callback(again.stop)
    return again
