"""How often a client opens a connection to a peer that takes it and hangs up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rocketlet.client import ConnectionFailed
from rocketlet.client.access import Access
from rocketlet.client.connection import Connections
from rocketlet.protocol.codes import RequestCode

from ..broker.certificates import Certificates
from ..conftest import PATIENCE_S, eventually


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


async def test_a_peer_that_hangs_up_is_not_called_again_at_once(
    hangs_up: tuple[HangsUp, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, address = hangs_up
    monkeypatch.setattr("rocketlet.client.connection.RECONNECT_S", 3600.0)
    lost: list[str] = []
    connections = Connections(Access(), lambda *_: None, lambda connection: lost.append(connection.address))
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


async def test_it_is_called_again_after_a_while(hangs_up: tuple[HangsUp, str], monkeypatch: pytest.MonkeyPatch) -> None:
    peer, address = hangs_up
    monkeypatch.setattr("rocketlet.client.connection.RECONNECT_S", 0.001)
    connections = Connections(Access(), lambda *_: None, lambda _: None)
    for _ in range(3):
        with pytest.raises(ConnectionFailed):
            await (await connections.get(address)).request(0, {})
    assert peer.taken == 3
    await connections.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_peer_that_reads_nothing_more_holds_up_no_close(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written to it never leaves, and over TLS it says no goodbye."""
    monkeypatch.setattr("rocketlet.client.connection.CLOSE_TIMEOUT_S", 0.01)
    certificates = Certificates.make(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.files.certificate, certificates.files.key)
    taken: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        taken.put_nowait(writer)

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context if encrypted else None)
    connections = Connections(Access(tls=encrypted, verify_tls=False), lambda *_: None, lambda _: None)
    connection = await connections.get(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    peer = await taken.get()
    failed: list[object] = []
    connection.call(RequestCode.SEND_MESSAGE_V2, {}, bytes(32 << 20), failed.append)
    await asyncio.wait_for(connections.close(), PATIENCE_S)
    assert isinstance(failed[0], ConnectionFailed)
    peer.transport.abort()
    server.close()
