"""A client's words that need no answer arrive, also when it closes right behind that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
from rocketlet.client.config import CLIENT_LIMITS, ClientLimits
from rocketlet.client.errors import ConnectionFailed
from rocketlet.client.wire.connection import Access, Connection, Connections
from rocketlet.protocol.codes import RESPONSE_FLAG, RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode

from ..conftest import PATIENCE_S

PULL, NOTIFY = RequestCode.PULL_MESSAGE, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


class Peer(asyncio.Protocol):
    """Reads when it is told to. hangs_up: as servers do, when the client has nothing more to say."""

    def __init__(self) -> None:
        self.address = ""
        self.taken = asyncio.Event()
        self.lost = asyncio.Event()
        self.hangs_up = True
        self.heard: list[tuple[int, int]] = []
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.taken.set()

    def data_received(self, data: bytes) -> None:
        self.heard += [(frame.code, len(frame.body)) for frame in self._reader.feed(data)]

    def eof_received(self) -> bool:
        return not self.hangs_up

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()

    def say(self, frame: Frame) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode(frame))


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0)
    peer.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield peer
    peer.transport.abort()
    server.close()


async def connected(
    peer: Peer, asked: list[Frame], limits: ClientLimits = CLIENT_LIMITS
) -> tuple[Connections, Connection]:
    connections = Connections(Access(), lambda _, frame: asked.append(frame), lambda _: None, limits)
    connection = await connections.get(peer.address)
    await asyncio.wait_for(peer.taken.wait(), PATIENCE_S)
    peer.transport.pause_reading()
    return connections, connection


@pytest.mark.parametrize("size", [0, 8 << 20], ids=["small", "large"])
@pytest.mark.parametrize("unread", [0, 1])
async def test_a_peer_that_still_writes_reads_all_that_was_said(peer: Peer, unread: int, size: int) -> None:
    """Closed with answers unread, a socket is reset: whoever writes to it then does not read on."""
    asked: list[Frame] = []
    connections, connection = await connected(peer, asked)
    pull = connection.ask(PULL, {})
    connection.write_now()
    for _ in range(unread):
        peer.say(Frame(0, 1, flag=RESPONSE_FLAG))
    connection.oneway(RequestCode.UNLOCK_BATCH_MQ, {})
    connection.oneway(RequestCode.SEND_MESSAGE_V2, {}, bytes(size))
    closing = asyncio.create_task(connections.close())
    await asyncio.sleep(0)
    for opaque in range(5):
        peer.say(Frame(NOTIFY, opaque))
        await asyncio.sleep(0)
    connection.respond(Frame(NOTIFY, 0))  # whose handler took until now
    peer.transport.resume_reading()
    await asyncio.wait_for(closing, PATIENCE_S)
    await asyncio.wait_for(peer.lost.wait(), PATIENCE_S)
    assert peer.heard == [(PULL, 0), (RequestCode.UNLOCK_BATCH_MQ, 0), (RequestCode.SEND_MESSAGE_V2, size)]
    assert asked == []
    await asyncio.wait({pull})
    assert isinstance(pull.exception(), ConnectionFailed) or unread  # an answer that came in time


async def test_a_peer_that_never_hangs_up_holds_up_no_close(peer: Peer) -> None:
    connections, connection = await connected(peer, [], ClientLimits(close_timeout_s=0.01))
    peer.hangs_up = False
    peer.transport.resume_reading()
    await asyncio.wait_for(connections.close(), PATIENCE_S)
    assert not connection.is_open
    assert connections.find(peer.address) is None
