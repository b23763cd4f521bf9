"""A client that connects to the console or the control port and asks nothing keeps nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.server import Listening
from rocketlet.console.server import ConsoleServer
from rocketlet.testing.clock import MovableClock
from rocketlet.testing.control import Control
from rocketlet.testing.rig import Rig
from rocketlet.web.config import CLIENT_S, MAX_CONNECTIONS
from rocketlet.web.server import WebServer, _Connection
from uvicorn.server import ServerState

from ..conftest import PATIENCE_S, Node, eventually

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
    """The clients of one port. Each is closed at the end."""

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
    """The bytes that come until the connection ends, in whatever way."""
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
    """An application: `/wait` answers when it may, everything else immediately and at length."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.begun = self.ended = 0
        self.on_begun: Callable[[], object] = int

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.begun += 1
        self.on_begun()
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
async def slow() -> AsyncIterator[tuple[Slow, Clients]]:
    listening, application = socket.create_server(("127.0.0.1", 0)), Slow()
    server = WebServer(application, listening, stop_s=1)
    server.start()
    async with AsyncExitStack() as stack:
        yield application, Clients(listening.getsockname()[1], stack)
    await server.stop()


class Turned:
    """Timers, which fire when the test turns the clock."""

    def __init__(self) -> None:
        self._clock = MovableClock(stands=True)
        self.call_later = self._clock.call_later
        self.create_task = asyncio.get_running_loop().create_task

    def turn(self, seconds: float) -> None:
        self._clock.advance(seconds)


class Client:
    """A connection without a socket, and how many bytes of the answers its client has not read."""

    def __init__(self, application: Slow) -> None:
        self.time = Turned()
        self.unread = 0
        self.transport = Mock(spec=asyncio.Transport)
        self.transport.is_closing.return_value = False
        self.transport.get_extra_info.return_value = None
        self.transport.get_write_buffer_size.side_effect = lambda: self.unread
        config = uvicorn.Config(application, log_config=None, lifespan="off")
        self.server_side = _Connection({}, config=config, server_state=ServerState(), app_state={}, _loop=self.time)
        self.server_side.connection_made(self.transport)

    @property
    def is_ended(self) -> bool:
        return bool(self.transport.abort.called)


async def test_a_client_that_waited_long_for_an_answer_has_its_time_to_read_it() -> None:
    application = Slow()
    client = Client(application)
    client.server_side.data_received(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.time.turn(3 * CLIENT_S)
    assert not client.is_ended, "its answer is being made"
    client.time.turn(CLIENT_S - 0.1)
    application.may_answer.set()
    await eventually(lambda: application.ended == 1)
    client.time.turn(0.2)
    assert not client.is_ended
    client.time.turn(CLIENT_S)
    assert client.is_ended


async def test_a_client_that_reads_slowly_is_not_silent() -> None:
    application = Slow()
    client = Client(application)
    client.server_side.data_received(asking(b"/long"))
    await eventually(lambda: application.ended == 1)
    client.unread = 1_000_000
    client.server_side.pause_writing()
    for _ in range(5):
        client.unread -= 1000
        client.time.turn(CLIENT_S)
        assert not client.is_ended
    client.time.turn(CLIENT_S)
    assert client.is_ended


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("rocketlet.web.server.CLIENT_S", 0.02)


@pytest.mark.parametrize("half", [b"", HALF, HALF_BODY])
async def test_a_request_that_is_not_written_to_its_end_ends(
    slow: tuple[Slow, Clients], impatience: Callable[[], None], half: bytes
) -> None:
    impatience()
    assert await rest(await slow[1].writing(half)) == b""


async def test_an_answer_that_nobody_reads_ends(slow: tuple[Slow, Clients], impatience: Callable[[], None]) -> None:
    application, clients = slow
    application.on_begun = impatience  # before, a busy machine would be too slow to read the request
    await clients.writing(asking(b"/long"))  # the reader buffers a part, and then stops reading from its socket
    await eventually(lambda: application.ended == 1)


async def test_beyond_the_limit_requests_that_are_answered_continue(slow: tuple[Slow, Clients]) -> None:
    application, clients = slow
    waiting = [await clients.writing(asking(b"/wait")) for _ in range(MAX_CONNECTIONS)]
    await eventually(lambda: application.begun == MAX_CONNECTIONS)
    assert await rest(await clients.writing(HALF)) == b""
    application.may_answer.set()
    answers = [await rest(reader) for reader in waiting]
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
