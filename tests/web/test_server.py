"""Who connects to the console or the control port and asks nothing keeps nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from rocketlet.broker.config import BrokerConfig
from rocketlet.console.server import ConsoleServer
from rocketlet.testing.control import Control
from rocketlet.testing.rig import Listening, Rig
from rocketlet.web.config import MAX_CONNECTIONS
from rocketlet.web.server import WebServer

from ..conftest import PATIENCE_S, Node

HALF = b"GET / HTTP/1.1\r\nHost: local"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc"


@pytest.fixture(params=["console", "control"])
async def port(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[tuple[int, bytes]]:
    """Where a server listens, and what it answers."""
    if request.param == "console":
        async with ConsoleServer(node.address) as console:
            yield console.port, b"/static/console.css"
        return
    rig = Rig(BrokerConfig(Path(), "", vip_channel=False), Listening())
    async with Control(rig, "127.0.0.1", 0) as control:
        yield control.port, b"/openapi.json"


class Clients:
    """Of one port. Each is closed at the end."""

    def __init__(self, port: int, stack: AsyncExitStack) -> None:
        self._port = port
        self._stack = stack

    async def writing(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._stack.callback(writer.close)
        writer.write(data)
        return reader


def asking(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends, in whatever way."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_who_waits_longest_for_nothing_makes_room(port: tuple[int, bytes]) -> None:
    async with AsyncExitStack() as stack:
        clients = Clients(port[0], stack)
        halves = [await clients.writing(HALF) for _ in range(MAX_CONNECTIONS + 3)]
        answer = await rest(await clients.writing(asking(port[1])))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert [await rest(reader) for reader in halves[:4]] == [b""] * 4
        assert not any(reader.at_eof() for reader in halves[4:])


class Slow:
    """An application: `/wait` answers when it may, everything else at once and at length."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.begun = self.ended = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.begun += 1
        if scope["method"] == "POST":
            while (await receive()).get("more_body"):
                pass
        if scope["path"] == "/wait":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"x" if scope["path"] == "/wait" else bytes(64 * 1024 * 1024)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.ended += 1


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Slow, Clients]]:
    monkeypatch.setattr("rocketlet.web.server.CLIENT_S", 0.02)
    listening, application = socket.create_server(("127.0.0.1", 0)), Slow()
    server = WebServer(application, listening, stop_s=1)
    server.start()
    async with AsyncExitStack() as stack:
        yield application, Clients(listening.getsockname()[1], stack)
    await server.stop()


async def test_only_who_has_something_to_write_or_read_is_ended_for_silence(slow: tuple[Slow, Clients]) -> None:
    application, clients = slow
    waiting = await clients.writing(asking(b"/wait"))
    for half in (b"", HALF, HALF_BODY):
        assert await rest(await clients.writing(half)) == b""
    assert not waiting.at_eof(), "its answer is being made"
    application.may_answer.set()
    assert (await rest(waiting)).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_that_nobody_reads_ends(slow: tuple[Slow, Clients]) -> None:
    application, clients = slow
    reader = await clients.writing(asking(b"/long"))
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(PATIENCE_S):
        while not application.ended:
            await asyncio.sleep(0.002)


async def test_beyond_the_limit_requests_that_are_answered_go_on(slow: tuple[Slow, Clients]) -> None:
    application, clients = slow
    waiting = [await clients.writing(asking(b"/wait")) for _ in range(MAX_CONNECTIONS)]
    async with asyncio.timeout(PATIENCE_S):
        while application.begun < MAX_CONNECTIONS:
            await asyncio.sleep(0.002)
    assert await rest(await clients.writing(HALF)) == b""
    application.may_answer.set()
    answers = [await rest(reader) for reader in waiting]
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
