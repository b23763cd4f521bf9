"""TLS beside plain text on one port: the first byte shows what a client speaks; hostile handshakes end."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
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
from rocketlet.broker.config import MAX_TLS_FILE_BYTES, RELOAD_INTERVAL_S
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.runtime import Turns
from rocketlet.broker.server import Handshakes, Listening, Server, TlsDetector
from rocketlet.broker.tls import Tls, TlsError, TlsFiles, expires_s
from rocketlet.client import Access, AdminClient, BrokerRefused, ConnectionFailed, Consumer, Producer
from rocketlet.client.admin.diagnosis import Harm, ObservationTimes, diagnose
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.testing.ports import free_port
from structlog.testing import capture_logs

from ...conftest import PATIENCE_S, Connect, Node, Nodes, Wire, eventually
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
    for damage in ("server.key", "server.pem"):
        (certificates.folder / damage).write_text("nothing")
        with capture_logs() as logs:
            reload(tls)
            reload(tls)
        assert [entry["event"] for entry in logs] == ["certificate_not_reloaded"]
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
        assert not tls.look()
        tls.load()
        assert tls.context is before
    assert tls.look()
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
