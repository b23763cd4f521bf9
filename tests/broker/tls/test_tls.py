"""TLS beside plain text on one port: the first byte shows what a client speaks; hostile handshakes end."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import trustme
from cryptography import x509
from rocketlet.broker import server as entrance_module
from rocketlet.broker import tls as records_module
from rocketlet.broker.config import (
    LIMITS,
    MAX_EMPTY_RECORDS,
    MAX_HELLO_BYTES,
    MAX_TLS_FILE_BYTES,
    RECORD_BYTES,
    RECORDS_AT_ONCE,
    RELOAD_INTERVAL_S,
)
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting import dispatch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.turns import Turns
from rocketlet.broker.server import Handshakes, Listening, Server, TlsDetector
from rocketlet.broker.tls import Tls, TlsError, TlsFiles, TlsRecords, expires_s
from rocketlet.client import Access, AdminClient, BrokerRefused, ConnectionFailed, Consumer, Producer
from rocketlet.client.admin.diagnosis import ObservationTimes, diagnose
from rocketlet.client.admin.findings import Harm
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Connect, Node, Nodes, Wire, eventually, peer
from ...support.accounts import reload
from ...support.certificates import Certificates, serial
from ...support.handlers import Inbox
from ...support.metrics import samples

ASK = RequestCode.GET_BROKER_CLUSTER_INFO


@pytest.fixture
async def both(nodes: Nodes, certificates: Certificates) -> Node:
    """A node that takes TLS and plain text."""
    return await nodes.start(tls=Tls("permissive", certificates.files))


def access(certificates: Certificates, **settings: Any) -> Access:
    return Access(tls=True, ca_file=str(certificates.folder / "ca.pem"), **settings)


async def secure_wire(node: Node, context: ssl.SSLContext) -> Wire:
    host, _, port = node.address.rpartition(":")
    return Wire(*await asyncio.open_connection(host, int(port), ssl=context))


async def shown_serial(node: Node, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new client is shown."""
    host, _, port = node.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return serial(ssl.DER_cert_to_PEM_cert(shown).encode())


@pytest.fixture
async def raw() -> AsyncIterator[Any]:
    """`await raw(node)` gives a plain reader and writer."""
    writers: list[asyncio.StreamWriter] = []

    async def open_raw(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = node.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield open_raw
    for writer in writers:
        writer.close()


# Both on one port


async def test_clients_with_and_without_tls_share_a_topic(both: Node, certificates: Certificates) -> None:
    secured = access(certificates)
    large = b"x" * 1_000_000
    for sends, reads in ((secured, None), (None, secured), (secured, secured)):
        inbox = Inbox()
        topic = f"t-{'tls' if sends else 'plain'}-{'tls' if reads else 'plain'}"
        async with (
            Producer(both.address, access=sends) as producer,
            Consumer(both.address, f"g-{topic}", topic, inbox, start="first", access=reads),
        ):
            await asyncio.gather(*(producer.send(topic, large) for _ in range(5)))
            await eventually(lambda inbox=inbox: len(inbox.messages) == 5)  # type: ignore[misc]
        assert {message.body for message in inbox.messages} == {large}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_of_tls_are_spoken(both: Node, certificates: Certificates, version: ssl.TLSVersion) -> None:
    context = certificates.client_context()
    context.minimum_version = context.maximum_version = version
    wire = await secure_wire(both, context)
    assert (await wire.call(ASK)).code == 0
    await wire.close()


async def test_a_hello_may_come_byte_by_byte_and_a_request_with_the_end_of_the_handshake(
    both: Node, certificates: Certificates, raw: Any
) -> None:
    """As the slowest and the fastest clients do it."""
    reader, writer = await raw(both)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secured = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        secured.do_handshake()
    for byte in outgoing.read():
        writer.write(bytes((byte,)))
        await writer.drain()
        await asyncio.sleep(0)
    while True:
        incoming.write(await reader.read(65_536))
        try:
            secured.do_handshake()
            break
        except ssl.SSLWantReadError:
            pass
    requests = [encode(Frame(ASK, opaque)) for opaque in (1, 2, 3)]
    secured.write(b"".join(requests))
    writer.write(outgoing.read())  # the client's Finished and its requests in one write
    frames = FrameReader()
    answers: list[Frame] = []
    while len(answers) < 3:
        incoming.write(await reader.read(65_536))
        try:
            answers += frames.feed(secured.read(1 << 20))
        except ssl.SSLWantReadError:
            pass
    assert [answer.opaque for answer in answers] == [1, 2, 3]


async def test_enforced_tls_names_plain_clients_the_remedy(
    nodes: Nodes, certificates: Certificates, connect: Connect
) -> None:
    node = await nodes.start(tls=Tls("enforcing", certificates.files))
    with capture_logs() as logs:
        for _ in range(3):
            wire = await connect(node.address)
            refusal = await wire.call(ASK)
            assert (refusal.code, "turn TLS on" in (refusal.remark or "")) == (ResponseCode.NO_PERMISSION, True)
            assert await wire.closed()
    assert [entry["event"] for entry in logs].count("plain_client_refused") == 1
    with pytest.raises((BrokerRefused, ConnectionFailed)):
        async with Producer(node.address) as producer:
            await producer.send("t", b"x")
    async with Producer(node.address, access=access(certificates)) as producer:
        await producer.send("t", b"x")


async def test_a_tls_client_at_a_plain_port_gets_the_reason(node: Node, certificates: Certificates) -> None:
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(ConnectionFailed, match="check that the server supports TLS"):
                async with Producer(node.address, access=access(certificates)):
                    pass
    (entry,) = [entry for entry in logs if entry["event"] == "tls_client_refused"]
    assert "--tls-cert" in entry["reason"]


@pytest.mark.parametrize(
    ("host", "ca_file", "cure"),
    [
        ("broker.example", "ca.pem", "start it with --advertise and a name of its certificate"),
        ("127.0.0.1", None, "give the authority that signed it"),
    ],
)
async def test_a_certificate_that_does_not_fit_is_reported_with_its_cure(
    nodes: Nodes, certificates: Certificates, host: str, ca_file: str | None, cure: str
) -> None:
    certificates.write_server(host)
    node = await nodes.start(tls=Tls("permissive", certificates.files))
    trusted = str(certificates.folder / ca_file) if ca_file else None
    with pytest.raises(ConnectionFailed, match=cure):
        async with Producer(node.address, access=Access(tls=True, ca_file=trusted)):
            pass


async def test_registration_goes_over_tls(nodes: Nodes, certificates: Certificates) -> None:
    port = free_port()
    name_server = Server(
        Listening("127.0.0.1", port, tls=Tls("enforcing", certificates.files)), broker=None, routes=Routes()
    )
    await nodes.stack.enter_async_context(name_server)
    address = f"127.0.0.1:{port}"
    await nodes.start(name_servers=(address,), tls=Tls("enforcing", certificates.files, certificates.folder / "ca.pem"))
    async with Producer(address, access=access(certificates)) as producer:
        assert (await producer.send("t", b"x")).queue.broker_name == "broker-a"


# Certificates


async def test_a_changed_certificate_is_served_to_the_next_client(nodes: Nodes, certificates: Certificates) -> None:
    tls = Tls("permissive", certificates.files)
    node = await nodes.start(tls=tls)
    context = certificates.client_context()
    early = await secure_wire(node, context)
    fresh = certificates.write_server()
    reload(tls)
    assert await shown_serial(node, context) == fresh
    assert (await early.call(ASK)).code == 0  # open connections continue
    await early.close()


async def test_the_server_checks_the_files_on_its_own(nodes: Nodes, certificates: Certificates) -> None:
    tls = Tls("permissive", certificates.files)
    node = await nodes.start(tls=tls)
    before = tls.context
    certificates.write_server()
    node.clock.advance(2 * RELOAD_INTERVAL_S)
    await eventually(lambda: tls.context is not before)


async def test_files_that_do_not_fit_are_reported_and_the_former_stay(nodes: Nodes, certificates: Certificates) -> None:
    tls = Tls("permissive", certificates.files)
    node = await nodes.start(tls=tls)
    expires_s, key = tls.expires_s, (certificates.folder / "server.key").read_text()
    for damage in ("server.key", "server.pem", "another key"):
        if damage == "another key":
            certificates.write_server()
            (certificates.folder / "server.key").write_text(key)
        else:
            (certificates.folder / damage).write_text("nothing")
        with capture_logs() as logs:
            reload(tls)
            reload(tls)
        assert [entry["event"] for entry in logs] == ["certificate_not_reloaded"]
        assert tls.expires_s is expires_s, "those of the files that are served"
        wire = await secure_wire(node, certificates.client_context())
        assert (await wire.call(ASK)).code == 0
        await wire.close()
    fresh = certificates.write_server()
    reload(tls)
    assert await shown_serial(node, certificates.client_context()) == fresh


async def test_a_file_that_is_written_in_place_is_taken_when_it_is_whole(certificates: Certificates) -> None:
    """The first half of the authorities is a whole file, with which the clients of the others are refused."""
    authorities = certificates.folder / "ca.pem"
    one = authorities.read_text()
    tls = Tls("enforcing", certificates.mutual)
    before = tls.context
    for _ in range(3):
        with authorities.open("a") as writing:
            writing.write(one)
        assert not tls.poll()
        tls.load()
        assert tls.context is before
    assert tls.poll()
    tls.load()
    assert tls.context is not before


async def test_with_an_authority_every_tls_client_shows_its_certificate(
    nodes: Nodes, certificates: Certificates
) -> None:
    node = await nodes.start(tls=Tls("enforcing", certificates.mutual))
    async with Producer(
        node.address, access=access(certificates, cert_file=str(certificates.folder / "client.pem"))
    ) as producer:
        await producer.send("t", b"x")
    (certificates.folder / "strangers").mkdir()
    strangers = Certificates.make(certificates.folder / "strangers")
    for shown in (None, str(strangers.folder / "client.pem")):
        with capture_logs() as logs, pytest.raises(ConnectionFailed):
            async with Producer(node.address, access=access(certificates, cert_file=shown)) as producer:
                await producer.send("t", b"x")
        assert {entry["event"] for entry in logs} <= {"tls_handshake_failed"}


@pytest.mark.parametrize(
    ("mode", "kind", "reason"),
    [
        ("enforcing", "none", "give --tls-cert"),
        ("disabled", "good", "TLS is disabled"),
        ("permissive", "missing", "cannot be used"),
        ("permissive", "encrypted", "openssl pkey"),
        ("permissive", "other key", "cannot be used"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    certificates: Certificates, mode: Any, kind: str, reason: str
) -> None:
    folder = certificates.folder
    files: TlsFiles | None = certificates.files
    if kind == "none":
        files = None
    elif kind == "missing":
        files = TlsFiles(folder / "server.pem", folder / "no.key")
    elif kind == "other key":
        files = TlsFiles(folder / "server.pem", folder / "client.pem")
    elif kind == "encrypted":
        _encrypt(folder / "server.key")
    with pytest.raises(TlsError, match=reason):
        Tls(mode, files)


@pytest.mark.parametrize("name", ["server.pem", "server.key", "ca.pem"])
@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_pipe_or_a_huge_file_is_not_read(certificates: Certificates, name: str, is_pipe: bool) -> None:
    """From a pipe the broker would wait for ever, and a chain of 20,000 certificates takes half a minute."""
    path = certificates.folder / name
    tls = Tls("permissive", certificates.mutual)
    pem = path.read_bytes()
    fits = pem + b"\n" * (MAX_TLS_FILE_BYTES - len(pem))
    path.write_bytes(fits)
    reload(tls)
    before = tls.context
    path.unlink()
    os.mkfifo(path) if is_pipe else path.write_bytes(fits + b"\n")
    with capture_logs() as logs:
        reload(tls)
    assert [entry["event"] for entry in logs] == ["certificate_not_reloaded"]
    assert ("not a regular file" if is_pipe else "maximum") in logs[0]["reason"]
    assert tls.context is before


async def test_others_are_served_while_a_changed_file_is_read(
    nodes: Nodes, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, may_go_on, waited = Tls("permissive", certificates.files), Event(), list[bool]()
    node = await nodes.start(tls=tls)
    monkeypatch.setattr("rocketlet.broker.tls.check_file", lambda *_: waited.append(may_go_on.wait(PATIENCE_S)))
    before = tls.context
    certificates.write_server()
    node.clock.advance(2 * RELOAD_INTERVAL_S)
    wire = await secure_wire(node, certificates.client_context())
    assert (await wire.call(ASK)).code == 0
    may_go_on.set()
    await eventually(lambda: tls.context is not before)
    assert waited == [True, True]
    await wire.close()


def _encrypt(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as kinds

    key = kinds.load_pem_private_key(path.read_bytes(), None)
    encrypted = kinds.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, encrypted))


# Hostile handshakes

HELLO = bytes.fromhex("16030102000100 01fc0303")  # the beginning of one, whose rest never comes


@pytest.mark.parametrize(
    "first",
    [
        b"\x16",
        HELLO,
        b"\x16\x03\x01\xff\xff" + b"\xff" * 65_535,  # a record longer than allowed
        b"\x16\x03\x01\x00\x05hello",
        b"\x16" + b"\0" * 100_000,
    ],
    ids=["a byte", "half a hello", "a long record", "no hello", "zeros"],
)
async def test_a_handshake_that_does_not_end_is_ended(
    nodes: Nodes, certificates: Certificates, raw: Any, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(entrance_module, "TLS_HANDSHAKE_TIMEOUT_S", 0.2)
    tls = Tls("permissive", certificates.files)
    node = await nodes.start(tls=tls)
    reader, writer = await raw(node)
    with capture_logs() as logs:
        writer.write(first)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                while await reader.read(65_536):
                    pass
        await eventually(lambda: tls.failed_handshakes == 1 and not node.server.connections)
    assert [entry["event"] for entry in logs] == ["tls_handshake_failed"]
    monkeypatch.undo()  # a handshake that does end may take its time
    wire = await secure_wire(node, certificates.client_context())
    assert (await wire.call(ASK)).code == 0
    await wire.close()


@pytest.mark.limits(max_handshakes=3)
async def test_of_too_many_handshakes_the_oldest_ends(nodes: Nodes, certificates: Certificates, raw: Any) -> None:
    tls = Tls("permissive", certificates.files)
    node = await nodes.start(tls=tls)
    readers = []
    for count in (1, 2, 3):
        reader, writer = await raw(node)
        writer.write(HELLO)
        readers.append(reader)
        await eventually(lambda count=count: node.server.handshakes.running == count)  # type: ignore[misc]
    assert tls.failed_handshakes == 0
    wire = await secure_wire(node, certificates.client_context())  # an honest client gets in beside them
    assert (await wire.call(ASK)).code == 0
    with suppress(ConnectionResetError):
        assert await readers[0].read() == b""
    assert (tls.failed_handshakes, node.server.handshakes.running) == (1, 2)
    await wire.close()


async def test_a_handshake_does_not_begin_on_a_connection_that_ends(certificates: Certificates) -> None:
    """asyncio would wait for it until the timeout."""
    ends = Mock(spec=asyncio.Transport)
    ends.is_closing.return_value = True
    tls = Tls("permissive", certificates.files)
    entrance = TlsDetector(tls, Handshakes(), Turns(), Mock(peer="127.0.0.1:1"), Mock())
    entrance.connection_made(ends)
    await entrance.shake_hands(HELLO)
    assert tls.failed_handshakes == 1
    ends.set_protocol.assert_not_called()


async def test_a_client_that_leaves_amid_its_handshake_is_forgotten(
    both: Node, raw: Any, certificates: Certificates
) -> None:
    for hard in (False, True):
        _, writer = await raw(both)
        writer.write(HELLO)
        await eventually(lambda: len(both.server.connections) == 1)
        if hard:
            linger = socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(*linger)
        writer.close()
        await eventually(lambda: not both.server.connections)


async def test_a_node_stops_while_handshakes_hang(nodes: Nodes, certificates: Certificates, raw: Any) -> None:
    node = await nodes.start(tls=Tls("permissive", certificates.files))
    reader, writer = await raw(node)
    writer.write(HELLO)
    silent, _ = await raw(node)
    await eventually(lambda: len(node.server.connections) == 2)
    await node.stop()
    for end in (reader, silent):
        with suppress(ConnectionResetError):
            assert await end.read() == b""


# A certificate that expires is announced 14 days before, and named when clients refuse it.


DAY_S = 86_400


def certificate(folder: Path, days: float) -> TlsFiles:
    issued = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days))
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return TlsFiles(folder / "server.pem")


@pytest.mark.parametrize("year", [2049, 2050, 2200])
def test_the_first_of_a_files_certificates_to_expire_counts(tmp_path: Path, year: int) -> None:
    authority = trustme.CA()
    pems = [
        authority.issue_cert("a", not_after=datetime(then, 3, 4, 5, 6, 7, tzinfo=UTC)).cert_chain_pems[0].bytes()
        for then in (year + 1, year)
    ]
    file = tmp_path / "chain.pem"
    file.write_bytes(b"a comment\n" + b"".join(pems))
    assert expires_s(file) == x509.load_pem_x509_certificate(pems[1]).not_valid_after_utc.timestamp()


def test_what_is_no_certificate_has_no_end(tmp_path: Path) -> None:
    file = tmp_path / "odd.pem"
    for odd in (b"", b"MAA=", b"MIID", b"!", b"MIIDMIID" * 3):
        file.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + odd + b"\n-----END CERTIFICATE-----\n")
        assert expires_s(file) is None


async def test_it_is_announced_by_log_metric_and_doctor_until_it_is_renewed(nodes: Nodes, tmp_path: Path) -> None:
    tls = Tls("permissive", certificate(tmp_path, 13.5))
    node = await nodes.start(tls=tls, metrics_port=0)

    async def findings() -> list[tuple[Harm, str]]:
        async with AdminClient(node.address) as admin:
            return [
                (one.harm, one.subject)
                for one in await diagnose(admin, ObservationTimes(0, 0, 0))
                if one.kind == "certificate"
            ]

    (until_s,) = tls.expires_s.values()
    with capture_logs() as logs:
        for past_s in (0, 1, DAY_S + 1, 14 * DAY_S):
            tls.warn_of_expiry(until_s - 13.5 * DAY_S + past_s)
    assert [line["event"] for line in logs] == ["certificate_expires", "certificate_expires", "certificate_expired"]
    metric = "rocketlet_certificate_expires_timestamp_seconds", frozenset({("file", "server.pem")})
    assert (await samples(node))[metric] == until_s
    assert await findings() == [(Harm.RISK, "broker-a")]
    certificate(tmp_path, 15)
    reload(tls)
    assert await findings() == []
    certificate(tmp_path, -1)
    reload(tls)
    assert await findings() == [(Harm.STANDS, "broker-a")]
    with capture_logs() as logs:
        tls.failed("10.0.0.1:5", "the client did not finish in time")
    assert "server.pem expired on" in logs[0]["reason"]


# Clients that make the broker compute for TLS: many handshakes together, records without data, answers that are not read.


@pytest.fixture
async def secured(nodes: Nodes, certificates: Certificates) -> Node:
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


async def test_hellos_that_come_together_are_answered_a_few_at_a_time(
    secured: Node, certificates: Certificates
) -> None:
    """The same hello again and again costs the clients nothing."""
    host, _, port = secured.address.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(5 * LIMITS.opening_handshakes)]
    await eventually(lambda: len(secured.server.connections) == len(streams))
    copied = hello(certificates.client_context())
    for _, writer in streams:
        writer.write(copied)
    answers = asyncio.gather(*(reader.readexactly(5) for reader, _ in streams))
    waited = 0
    async with asyncio.timeout(PATIENCE_S):
        while not answers.done():
            assert len(secured.server.handshakes._opening) <= LIMITS.opening_handshakes
            waited = max(waited, secured.server.handshakes.waiting)
            await asyncio.sleep(0)
    assert {answer[0] for answer in await answers} == {22}
    assert waited > 0
    for _, writer in streams:
        writer.close()


async def test_a_hello_of_more_bytes_than_any_client_sends_is_not_kept(secured: Node) -> None:
    host, _, port = secured.address.rpartition(":")
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
    records.decrypt_more()
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
    async def open(cls, secured: Node, context: ssl.SSLContext, receive_bytes: int = 0) -> Secured:
        host, _, port = secured.address.rpartition(":")
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
    secured: Node, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    for module in (records_module, dispatch):
        monkeypatch.setattr(module, "PIECE_S", turn_s)
    client = await Secured.open(secured, certificates.client_context())
    await client.shake_hands(asked(500))  # more than are read at a time, before the broker knows that it is encrypted
    assert await client.answers(500) == list(range(500))
    await client.write(asked(2000, 500))
    assert await client.answers(2000) == list(range(500, 2500))
    client.close()


async def test_a_client_that_writes_single_bytes_is_cut_off(secured: Node, certificates: Certificates) -> None:
    client = await Secured.open(secured, certificates.client_context())
    with capture_logs() as logs:
        await client.shake_hands([bytes((byte,)) for byte in b"".join(asked(20))])
        assert await client.is_cut_off()
        await eventually(lambda: not secured.server.connections)
    reasons: list[Any] = [entry["reason"] for entry in logs]
    assert reasons == ["the client sent many TLS records without data"]
    client.close()


async def test_answers_that_a_tls_client_does_not_read_are_counted(secured: Node, certificates: Certificates) -> None:
    """They lie in the socket's own buffer, behind the one of TLS."""
    client = await Secured.open(secured, certificates.client_context(), receive_bytes=65_536)
    await client.shake_hands(asked(1))
    assert await client.answers(1) == [0]
    (connection,) = secured.server.connections
    before_bytes = connection.held_bytes()
    connection.write([b"x" * (3 << 20)] * 4)
    await eventually(lambda: connection.held_bytes() > before_bytes + (4 << 20))
    assert secured.server.memory.used_bytes > 4 << 20
    client.close()
