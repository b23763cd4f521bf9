"""Clients that make the broker compute for TLS: many handshakes together, records without data, answers that are not read."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
from rocketlet.broker import tls as records_module
from rocketlet.broker.config import LIMITS, MAX_EMPTY_RECORDS, MAX_HELLO_BYTES, RECORD_BYTES, RECORDS_AT_ONCE
from rocketlet.broker.remoting import dispatch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import Turns
from rocketlet.broker.server import Handshakes
from rocketlet.broker.tls import Tls, TlsRecords
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Node, Nodes, eventually, peer
from ...support.certificates import Certificates

ASK = RequestCode.GET_BROKER_CLUSTER_INFO


@pytest.fixture
async def node(nodes: Nodes, certificates: Certificates) -> Node:
    return await nodes.start(tls=Tls("permissive", certificates.files))


# Handshakes


class Client:
    """One that asks for a handshake; its private-key operation is done when the test says so."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_gone = False
        self.has_begun = False
        self.reason = ""
        self.ended = asyncio.Event()

    async def shake_hands(self, first: bytes) -> None:
        self.has_begun = True
        await self.ended.wait()

    def abort(self) -> None:
        self.is_gone = True
        self.ended.set()

    def refuse(self, reason: str) -> None:
        self.reason = reason
        self.is_gone = True


async def test_few_handshakes_begin_at_a_time_and_each_address_has_one_in_turn() -> None:
    handshakes = Handshakes()
    greedy = [Client("greedy") for _ in range(LIMITS.opening_handshakes + 5)]
    honest = [Client("honest"), Client("also honest")]
    for client in (*greedy, *honest):
        handshakes.begin(client, b"")
    await asyncio.sleep(0)
    assert [client.has_begun for client in greedy] == [True] * LIMITS.opening_handshakes + [False] * 5
    order = []
    for client in greedy[:7]:
        waiting = [client for client in (*greedy, *honest) if not client.has_begun]
        handshakes.opened(client)
        await asyncio.sleep(0)
        order += [client.address for client in waiting if client.has_begun]
    assert order == ["greedy", "honest", "also honest", "greedy", "greedy", "greedy", "greedy"]
    assert (handshakes.waiting, handshakes.running) == (0, len(greedy) + len(honest))
    for client in (*greedy, *honest):
        client.abort()
    await eventually(lambda: handshakes.running == 0)


async def test_of_too_many_that_wait_the_address_with_most_loses_its_newest() -> None:
    handshakes = Handshakes()
    opening = [Client("greedy") for _ in range(LIMITS.opening_handshakes)]
    honest = Client("honest")
    waiting = [Client("greedy") for _ in range(LIMITS.max_waiting_handshakes)]
    for client in (*opening, honest, *waiting):
        handshakes.begin(client, b"")
    assert [client.reason for client in waiting[-2:]] == ["", "too many TLS handshakes wait"]
    assert (honest.is_gone, handshakes.waiting) == (False, LIMITS.max_waiting_handshakes)
    for client in (*opening, honest, *waiting):  # those that are gone when their turn comes do not begin
        client.abort()
    await eventually(lambda: (handshakes.running, handshakes.waiting) == (0, 0))
    assert not any(client.has_begun for client in waiting[:-1])


async def test_of_too_many_that_run_the_address_with_most_loses_its_oldest() -> None:
    handshakes = Handshakes()
    honest, greedy = Client("honest"), [Client("greedy") for _ in range(LIMITS.max_handshakes + 2)]
    for client in (honest, *greedy):  # all in the same moment: the tasks of those that are ended do not run meanwhile
        handshakes.begin(client, b"")
        handshakes.opened(client)
        assert handshakes.running <= LIMITS.max_handshakes
    assert [client.is_gone for client in (honest, *greedy[:4])] == [False, True, True, True, False]
    for client in (honest, *greedy):
        client.abort()
    await eventually(lambda: handshakes.running == 0)


def hello(context: ssl.SSLContext) -> bytes:
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


async def test_hellos_that_come_together_are_answered_a_few_at_a_time(node: Node, certificates: Certificates) -> None:
    """The same hello again and again costs the clients nothing."""
    host, _, port = node.address.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(5 * LIMITS.opening_handshakes)]
    await eventually(lambda: len(node.server.connections) == len(streams))
    copied = hello(certificates.client_context())
    for _, writer in streams:
        writer.write(copied)
    answers = asyncio.gather(*(reader.readexactly(5) for reader, _ in streams))
    waited = 0
    async with asyncio.timeout(PATIENCE_S):
        while not answers.done():
            assert len(node.server.handshakes._opening) <= LIMITS.opening_handshakes
            waited = max(waited, node.server.handshakes.waiting)
            await asyncio.sleep(0)
    assert {answer[0] for answer in await answers} == {22}
    assert waited > 0
    for _, writer in streams:
        writer.close()


async def test_a_hello_of_more_bytes_than_any_client_sends_is_not_kept(node: Node) -> None:
    host, _, port = node.address.rpartition(":")
    with capture_logs() as logs:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16" + b"\0" * (8 * MAX_HELLO_BYTES))
        async with asyncio.timeout(PATIENCE_S):
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass
        writer.close()
    assert [entry["event"] for entry in logs] == ["tls_handshake_failed"]


# Records


class Decrypting(asyncio.BufferedProtocol):
    """Stands for asyncio's TLS: gets `data` bytes for the client's connection out of each record."""

    def __init__(self, connection: RemotingConnection, data: float) -> None:
        self.connection = connection
        self.data = data
        self.pieces: list[int] = []

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.pieces.append(nbytes // len(RECORD))
        self.connection.read_bytes += int(self.data * nbytes // len(RECORD))


class Socket(asyncio.Transport):
    is_closed = False
    is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def is_reading(self) -> bool:
        return not self.is_paused

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


RECORD = b"\x17\x03\x03\x00\x16" + b"u" * 22  # as long as a key update


class Owner:
    def __init__(self, raw: Socket) -> None:
        self._raw = raw
        self._turns = Turns()

    def call_in_turn(self, action: Callable[[], None]) -> None:
        self._turns.call_for("a", action)

    def end_flood(self) -> None:
        self._raw.is_closed = True


def reading(data: float) -> tuple[TlsRecords, Decrypting, Socket]:
    connection, raw = peer(), Socket()
    connection.is_encrypted = True
    tls = Decrypting(connection, data)
    return (
        TlsRecords(raw, tls, connection, Owner(raw)),
        tls,
        raw,
    )


async def until_done(records: TlsRecords, raw: Socket) -> None:
    for _ in range(1000):
        if raw.is_closed or not records.held_bytes:
            return
        await asyncio.sleep(0)
    raise AssertionError("records wait")


async def test_records_without_data_are_read_a_few_at_a_time_and_end_the_connection() -> None:
    records, tls, raw = reading(data=0)
    records.data_received(RECORD * 10_000)
    assert (len(tls.pieces), raw.is_paused) == (1, True)  # the rest waits until others were checked
    await until_done(records, raw)
    assert raw.is_closed
    assert max(tls.pieces) <= RECORDS_AT_ONCE
    assert sum(tls.pieces) <= MAX_EMPTY_RECORDS + RECORDS_AT_ONCE


async def test_records_with_enough_data_are_read_however_many_there_are() -> None:
    records, tls, raw = reading(data=RECORD_BYTES)
    for _ in range(10):
        records.data_received(RECORD * 1000)
        await until_done(records, raw)
    assert (sum(tls.pieces), raw.is_closed, raw.is_paused) == (10_000, False, False)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 6, 26, 28, 1000])
async def test_records_may_be_cut_anywhere(size: int) -> None:
    records, tls, raw = reading(data=RECORD_BYTES)
    sent = RECORD * 300
    tls.pieces = []
    given = 0

    def count(nbytes: int) -> None:
        nonlocal given
        given += nbytes
        tls.connection.read_bytes = given

    tls.buffer_updated = count  # type: ignore[method-assign]
    for begin in range(0, len(sent), size):
        records.data_received(sent[begin : begin + size])
        await until_done_or_cut(records, raw)
    assert (given, raw.is_closed) == (len(sent), False)


async def until_done_or_cut(records: TlsRecords, raw: Socket) -> None:
    """The rest is the beginning of a record's head at most."""
    for _ in range(1000):
        if records.held_bytes < 5:
            return
        await asyncio.sleep(0)
    raise AssertionError("records wait")


async def test_nothing_is_decrypted_while_requests_wait() -> None:
    records, tls, raw = reading(data=100)
    tls.connection.is_held = True
    records.data_received(RECORD * 500)
    await asyncio.sleep(0)
    assert (tls.pieces, raw.is_paused) == ([], True)
    assert records.held_bytes == 500 * len(RECORD)
    tls.connection.is_held = False
    records.go_on()
    await until_done(records, raw)
    assert (sum(tls.pieces), raw.is_paused) == (500, False)


class Secured:
    """A TLS client by hand, so that what goes into which record and which write is the test's choice."""

    def __init__(self, context: ssl.SSLContext, connected: socket.socket) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self._socket = connected
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, node: Node, context: ssl.SSLContext, receive_bytes: int = 0) -> Secured:
        host, _, port = node.address.rpartition(":")
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
        return cls(context, made)

    async def shake_hands(self, first: list[bytes] | None = None) -> None:
        """first: goes out with the end of the handshake, each in a record of its own."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._read()
        await self.write(first or [])

    async def write(self, records: list[bytes]) -> None:
        for record in records:
            self._tls.write(record)
        await self._flush()

    async def _flush(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, self._outgoing.read())

    async def _read(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            data = await asyncio.get_running_loop().sock_recv(self._socket, 65_536)
        self._incoming.write(data)
        return bool(data)

    async def answers(self, count: int) -> list[int]:
        reader, found = FrameReader(), list[int]()
        while len(found) < count:
            try:
                found += [frame.opaque for frame in reader.feed(self._tls.read(1 << 20))]
            except ssl.SSLWantReadError:
                assert await self._read(), f"cut off after {len(found)} answers"
        return found

    async def is_cut_off(self) -> bool:
        try:
            while await self._read():
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()


def asked(count: int, begin: int = 0) -> list[bytes]:
    return [encode(Frame(ASK, begin + number)) for number in range(count)]


@pytest.mark.parametrize("turn_s", [5.0, -1.0], ids=["quick", "each turn does one piece"])
async def test_an_honest_client_may_send_many_requests_at_the_same_time(
    node: Node, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    for module in (records_module, dispatch):
        monkeypatch.setattr(module, "PIECE_S", turn_s)
    client = await Secured.open(node, certificates.client_context())
    await client.shake_hands(asked(500))  # more than are read at a time, before the broker knows that it is encrypted
    assert await client.answers(500) == list(range(500))
    await client.write(asked(2000, 500))
    assert await client.answers(2000) == list(range(500, 2500))
    client.close()


async def test_a_client_that_writes_single_bytes_is_cut_off(node: Node, certificates: Certificates) -> None:
    client = await Secured.open(node, certificates.client_context())
    with capture_logs() as logs:
        await client.shake_hands([bytes((byte,)) for byte in b"".join(asked(20))])
        assert await client.is_cut_off()
        await eventually(lambda: not node.server.connections)
    reasons: list[Any] = [entry["reason"] for entry in logs]
    assert reasons == ["the client sent many TLS records without data"]
    client.close()


async def test_answers_that_a_tls_client_does_not_read_are_counted(node: Node, certificates: Certificates) -> None:
    """They lie in the socket's own buffer, behind the one of TLS."""
    client = await Secured.open(node, certificates.client_context(), receive_bytes=65_536)
    await client.shake_hands(asked(1))
    assert await client.answers(1) == [0]
    (connection,) = node.server.connections
    before_bytes = connection.held_bytes()
    connection.write([b"x" * (3 << 20)] * 4)
    await eventually(lambda: connection.held_bytes() > before_bytes + (4 << 20))
    assert node.server.memory.used_bytes > 4 << 20
    client.close()
