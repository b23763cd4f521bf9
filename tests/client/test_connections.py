"""A client's connections to peers that hang up, stall, or are not reached any more."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from rocketlet.client import ConnectionFailed, RequestTimeout
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.wire.connection import Access, Connection, Connections
from rocketlet.protocol.codes import RESPONSE_FLAG, RequestCode
from rocketlet.protocol.frame import Frame, encode

from ..conftest import PATIENCE_S, eventually
from ..support.certificates import Certificates


class HangsUp:
    """As a load balancer does it whose server is away: it takes each connection and closes it."""

    def __init__(self) -> None:
        self.taken = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        writer.close()


@pytest.fixture
async def hangs_up() -> AsyncIterator[tuple[HangsUp, str]]:
    """And its address."""
    peer = HangsUp()
    server = await asyncio.start_server(peer.take, "127.0.0.1", 0)
    yield peer, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_peer_that_hangs_up_is_not_called_again_immediately(hangs_up: tuple[HangsUp, str]) -> None:
    peer, address = hangs_up
    lost: list[str] = []
    connections = Connections(
        Access(),
        lambda *_: None,
        lambda connection: lost.append(connection.address),
        limits=ClientLimits(reconnect_s=3600.0),
    )
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        connection = await connections.get(address)
        await connection.request(0, {})
    await eventually(lambda: lost == [address])
    again = asyncio.create_task(connections.get(address))
    for taken in range(2, 7):  # others come and go meanwhile
        reader, writer = await asyncio.open_connection(*address.split(":"))
        assert await reader.read() == b""
        writer.close()
        assert peer.taken == taken
    assert not again.done()
    await connections.close()
    with pytest.raises(asyncio.CancelledError):
        await again


async def test_it_is_called_again_after_a_while(hangs_up: tuple[HangsUp, str]) -> None:
    peer, address = hangs_up
    connections = Connections(Access(), lambda *_: None, lambda _: None, limits=ClientLimits(reconnect_s=0.001))
    for _ in range(3):
        with pytest.raises(ConnectionFailed):
            await (await connections.get(address)).request(0, {})
    assert peer.taken == 3
    await connections.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_peer_that_reads_nothing_more_holds_up_no_close(encrypted: bool, certificates: Certificates) -> None:
    """Its written bytes never leave, and over TLS it sends no close_notify."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.files.certificate, certificates.files.key)
    taken: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        taken.put_nowait(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context if encrypted else None)
    connections = Connections(
        Access(tls=encrypted, verify_tls=False),
        lambda *_: None,
        lambda _: None,
        limits=ClientLimits(close_timeout_s=0.01),
    )
    connection = await connections.get(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    peer = await taken.get()
    failed: list[object] = []
    due_s = connection.running_s() + PATIENCE_S
    connection.call(RequestCode.SEND_MESSAGE_V2, {}, bytes(32 << 20), failed.append, due_s)
    await asyncio.wait_for(connections.close(), PATIENCE_S)
    assert isinstance(failed[0], ConnectionFailed)
    peer.transport.abort()
    server.close()


class Time:
    """A loop whose time a test sets, for a connection without a socket."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_connection_whose_peer_answers_nothing_for_a_minute_is_given_up() -> None:
    connection, socket = Connection("127.0.0.1:1", Access(), lambda *_: None, lambda _: None), Socket()
    time = Time()
    connection.loop = cast("asyncio.AbstractEventLoop", time)
    connection.connection_made(socket)

    async def goes_unanswered(seconds: float) -> None:
        asked = connection.ask(RequestCode.HEART_BEAT, {}, timeout_s=0.1)
        while not asked.done():
            time.now_s += 0.2
            connection.sweep_deadlines()
        with pytest.raises(RequestTimeout):
            await asked
        time.now_s += seconds - 0.2

    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    answered = connection.ask(RequestCode.HEART_BEAT, {})
    connection.data_received(encode(Frame(0, connection._opaque, flag=RESPONSE_FLAG)))
    await answered
    connection.sweep_deadlines()
    time.now_s += CLIENT_LIMITS.silent_s * 10  # nothing is asked for
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert not socket.is_aborted, "it has answered, and was not asked for long"
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert not socket.is_aborted
    await goes_unanswered(CLIENT_LIMITS.silent_s * 0.75)
    assert socket.is_aborted
    connection.connection_lost(None)
