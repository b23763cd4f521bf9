"""TLS for clients: certificates, including a self-signed one if none is configured, and the decryption of clients'
records."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import math
import re
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar, cast

import structlog

from ..host.files import check_file, read_file
from ..protocol.bodies import Work
from .config import (
    CERTIFICATE_WARNING_S,
    MAX_EMPTY_RECORDS,
    MAX_NAMED_CHARS,
    MAX_TLS_FILE_BYTES,
    PIECE_S,
    RECORD_BYTES,
    RECORDS_AT_ONCE,
    SELF_SIGNED_DAYS,
)
from .machine import BeingWritten, Watched
from .sessions.reports import Recent, Reports
from .sessions.session import Session

log = structlog.get_logger("rocketlet.tls")


# ------------------------------------------------------------------------------
# The connection of a client, as the TLS layer uses it. Each protocol server has its own class.


class Decryption(Protocol):
    """The layer between a client's socket and its TLS."""

    @property
    def held_bytes(self) -> int: ...

    def decrypt_more(self) -> None: ...


class Client(asyncio.Protocol):
    """A client's connection.

    Attributes:
        read_bytes: number of bytes received from the client; with TLS, of decrypted bytes
        records: decrypts the client's TLS records; None without TLS
    """

    __slots__ = ("is_encrypted", "peer", "read_bytes", "records")

    peer: str
    is_encrypted: bool
    read_bytes: int
    records: Decryption | None

    @property
    @abstractmethod
    def address(self) -> str:
        """The client's address without the port."""

    @property
    @abstractmethod
    def is_reading(self) -> bool:
        """True if requests are read; otherwise received requests wait."""

    @abstractmethod
    def encrypted(self, transport: asyncio.Transport) -> None:
        """Switch to TLS: from now on all bytes pass through `transport`."""

    @abstractmethod
    def plain_refusal(self, data: bytes, remark: str) -> bytes:
        """Return a refusal in the client's protocol, for plain data on a port that accepts only TLS; empty if the
        client has sent no request yet."""


# ------------------------------------------------------------------------------
# The transport of a client, which all protocol servers use: it is counted, charged and closed in the same way for all
# of them.


class ClientTransport(Session, Protocol):
    """Transport of a client.

    Attributes:
        active_s: monotonic time of the last read, or of the last write while the client read its responses
        heard_s: monotonic time of the last read
        read_bytes: number of bytes received from the client
        is_held: True while further requests wait for an earlier one
    """

    active_s: float
    heard_s: float
    read_bytes: int
    is_held: bool

    @property
    def may_serve(self) -> bool:
        """True if a larger read of the client may be served immediately; otherwise its requests are queued."""
        ...

    def note_served(self, used_s: float) -> None: ...

    def in_turn(self, work: Work[None]) -> None:
        """Do work for the client in pieces, which are scheduled fairly between client addresses."""
        ...

    def on_farewell(self, action: Callable[[], None]) -> None:
        """Call `action` before `close` closes the connection; `abort` does not call it."""
        ...

    @property
    def is_paused(self) -> bool:
        """True if the client does not read its responses."""
        ...

    def write(self, buffers: list[bytes | memoryview]) -> None: ...

    def pause_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """Pass received bytes to another protocol object from now on."""
        ...

    def resume(self) -> None:
        """Serve waiting requests, and resume reading unless something else prevents it."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


# ------------------------------------------------------------------------------
# TLS settings: mode, certificates and keys, which are reloaded when they change.


_DAY_S: Final = 86_400.0

TlsMode = Literal["permissive", "enforcing", "disabled"]
TLS_MODES: Final[tuple[TlsMode, ...]] = ("permissive", "enforcing", "disabled")


class TlsError(ValueError):
    """The files or the mode are invalid. The text names the files, or the remedy."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """TLS files.

    Attributes:
        certificate: PEM file with the server's certificate, followed by intermediate certificates
        key: PEM file with the private key; None if it is in the file of the certificate
        client_authority: PEM file; if set, every TLS client needs a certificate that one of its certificates has signed
    """

    certificate: Path
    key: Path | None = None
    client_authority: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.key, self.client_authority) if path)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a server. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # each renegotiation costs the server a private-key operation
    context.set_alpn_protocols(["h2"])  # for gRPC; clients without ALPN may use any protocol
    try:
        for path in files.paths:
            check_file(path, MAX_TLS_FILE_BYTES)
        context.load_cert_chain(files.certificate, files.key, _refuse_password)
        if files.client_authority:
            context.load_verify_locations(files.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:  # the text of SSLError does not name the files
        names = ", ".join(map(str, files.paths))
        raise TlsError(f"the TLS files {names} cannot be used: {error}") from None
    return context


def _context_of(pem: Path) -> ssl.SSLContext:
    return server_context(TlsFiles(pem))


def client_context(authority: Path, own: TlsFiles | None) -> ssl.SSLContext:
    """Return the TLS context of a broker that registers with name servers. The context verifies the name servers'
    certificates, and presents the broker's own on request. Raises TlsError."""
    try:
        check_file(authority, MAX_TLS_FILE_BYTES)
        context = ssl.create_default_context(cafile=authority)
        if own:
            context.load_cert_chain(own.certificate, own.key, _refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"the TLS file {authority} cannot be used for name servers: {error}") from None
    return context


def _refuse_password() -> str:
    """Raise TlsError for an encrypted key. Otherwise OpenSSL would prompt for the password on the terminal, and the
    broker would hang."""
    raise TlsError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")


def _expiries(paths: Iterable[Path]) -> dict[Path, float]:
    """Return the earliest expiry of the certificates in each file that has a readable one, in seconds since the epoch."""
    found: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # errors are reported where the file is used
            if (at_s := expires_s(path)) is not None:
                found[path] = at_s
    return found


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


class Tls:
    """The TLS settings of a server: mode, certificates, counters, and recently refused clients.

    Without files the mode must not be `enforcing`, and TLS is offered only with `signs_itself` in the mode `permissive`.

    Args:
        mode: permissive accepts TLS and plain connections, enforcing only TLS, disabled only plain connections
        files: certificate and key of the server
        name_server_authority: PEM file; if set, the broker connects to name servers with TLS, and accepts certificates
            that one of the file's certificates has signed
        signs_itself: True to create a self-signed certificate if there are no files
    Raises:
        TlsError: the files or the mode are invalid
    """

    def __init__(
        self,
        mode: TlsMode = "permissive",
        files: TlsFiles | None = None,
        name_server_authority: Path | None = None,
        *,
        signs_itself: bool = False,
    ) -> None:
        if mode == "enforcing" and files is None:
            raise TlsError("TLS is enforced, but there is no certificate; give --tls-cert and --tls-key")
        if mode == "disabled" and files is not None:
            raise TlsError("a certificate is given, but TLS is disabled; leave out one of them")
        self.takes_plain = mode != "enforcing"
        self._signs_itself = signs_itself and mode != "disabled"
        self.handshakes = self.failed_handshakes = self.refused = 0
        self._files = files
        self._authority = name_server_authority
        paths = files.paths if files else ()
        self._watched = Watched((*paths, name_server_authority) if name_server_authority else paths)
        self._warned_s = -math.inf
        try:
            self.expires_s, self.context, self.name_server_context = self._watched.read_unchanged(self._read)
        except BeingWritten:
            raise TlsError(f"{', '.join(map(str, paths))}: these TLS files are being written; start again") from None
        self.reports = Reports()
        self._turned_away = Recent()
        self.turned_away = self._turned_away.texts

    @property
    def is_offered(self) -> bool:
        return self.context is not None or self._signs_itself

    async def ready(self) -> ssl.SSLContext:
        """Return the TLS context for clients. Create a self-signed certificate at the first call if there are no files."""
        if self.context is None:
            made = await asyncio.to_thread(with_certificate, _context_of)
            if self.context is None:
                self.context = made
                log.info("certificate_self_signed", hint="clients that check certificates need --tls-cert")
        return self.context

    def poll(self) -> bool:
        """Return True if the files have changed and must be loaded, once they are no longer being written."""
        return self._watched.poll()

    def load(self) -> None:
        """Reload the files if they have changed. Open connections keep their settings.

        Inconsistent files, such as a certificate whose key is not written yet, are logged, and the previous settings
        stay in force.
        """
        if not self._watched.has_changed:
            return
        try:
            self.expires_s, self.context, self.name_server_context = self._watched.read_unchanged(self._read)
        except BeingWritten:  # a later check finds them complete
            pass
        except TlsError as error:
            log.error("certificate_not_reloaded", reason=str(error))
        else:
            self._warned_s = -math.inf
            log.info("certificate_reloaded")

    def _read(self) -> tuple[dict[Path, float], ssl.SSLContext | None, ssl.SSLContext | None]:
        """Return when the certificates of each file expire, and the contexts for clients and for name servers."""
        files, authority = self._files, self._authority
        expires_s = _expiries([*(files.paths if files else ()), *([authority] if authority else ())])
        of_clients = server_context(files) if files else None
        return expires_s, of_clients, client_context(authority, files) if authority else None

    def warn_of_expiry(self, now_s: float) -> None:
        """Log a warning on each of the last 14 days of a certificate, and an error on each day after that.

        Args:
            now_s: time in seconds since the epoch
        """
        if now_s - self._warned_s < _DAY_S:
            return
        self._warned_s = now_s
        for path, until_s in self.expires_s.items():
            if until_s <= now_s:
                log.error("certificate_expired", file=str(path), expired=_date(until_s), hint="clients refuse it")
            elif until_s - now_s < CERTIFICATE_WARNING_S:
                hint = "replace the file; the broker reloads it automatically"
                log.warning("certificate_expires", file=str(path), expires=_date(until_s), hint=hint)

    def note_turned_away(self, peer: str, reason: str) -> None:
        """Record a client whose connection was refused, for example after a failed TLS handshake, for the list of
        recent ones that `rocketlet doctor` shows."""
        address = peer.rpartition(":")[0]
        self._turned_away.record((address, reason), f"{address}: {reason[:MAX_NAMED_CHARS]}")

    def failed(self, peer: str, reason: str) -> None:
        """Count and record a failed handshake, or a TLS connection that was ended; log it unless it was logged recently."""
        self.failed_handshakes += 1
        expired = [f"{path} expired on {_date(at_s)}" for path, at_s in self.expires_s.items() if at_s <= time.time()]
        reason = "; ".join([reason, *expired])
        self.note_turned_away(peer, reason)
        if self.reports.is_due(peer, reason):
            log.warning("tls_handshake_failed", peer=peer, reason=reason)


# ------------------------------------------------------------------------------
# Throttled decryption of a TLS client's records.
#
# OpenSSL processes all bytes that it gets in one step while the event loop waits, and the client decides how expensive
# this is:
#
# 1. A message of a client in a handshake may require a private-key operation, 0.1 to 3 ms. Decryption during handshakes is
# therefore scheduled fairly between client addresses.
# 2. A record may contain no data. A key update (RFC 8446, 4.6.3) has 27 bytes and takes 27 us, and OpenSSL accepts any
# number of them: 1.9 MB of them blocked a broker for 1.1 s. Only a few records are therefore decrypted at a time, and
# a client that sends many records without data is disconnected, as in Go's crypto/tls (maxUselessRecords). Ordinary
# clients send millions of records between two key updates.
# 3. Nothing is decrypted while requests of this client wait, because it would then be decrypted in one step later.


_HEAD_BYTES = 5  # a record's type, version, and length (RFC 8446, 5.1)


class RecordsOwner(Protocol):
    """The part of the server that has a client's `TlsRecords`."""

    def call_in_turn(self, action: Callable[[], None]) -> None:
        """Call a function later, when the client's address has its turn."""
        ...

    def end_flood(self) -> None:
        """Close a connection whose client has sent too many records without data."""
        ...


class TlsRecords(asyncio.Protocol):
    """The protocol object of a socket whose client uses TLS.

    Args:
        raw: transport of the socket
        tls: asyncio's protocol object, which decrypts
        connection: the client's connection
        owner: the part of the server that has this object
    """

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: asyncio.BufferedProtocol,
        connection: Client,
        owner: RecordsOwner,
    ) -> None:
        self._raw = raw
        self._tls = tls
        self._connection = connection
        self._owner = owner
        self._rest = b""
        self._reach = 0  # bytes until the start of the next record
        self._empty = 0.0  # records without data, minus records that later data has made up for
        self._has_paused = self._is_decrypting = False

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be decrypted, plus encrypted bytes that wait to be written to the socket."""
        return len(self._rest) + self._raw.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self._connection.is_encrypted:
            self.decrypt_more()
        else:
            self._pause()
            self._owner.call_in_turn(self.decrypt_more)

    def decrypt_more(self) -> None:
        """Decrypt as much as fits into one piece of work, unless requests wait. The rest is decrypted in later pieces, or
        when requests no longer wait."""
        if self._is_decrypting:
            return
        self._is_decrypting = True
        try:
            self._decrypt()
        finally:
            self._is_decrypting = False

    def _decrypt(self) -> None:
        if self._has_paused:
            self._has_paused = False
            self._raw.resume_reading()
        end_s = time.perf_counter() + PIECE_S
        while self._connection.is_reading and not self._raw.is_closing():
            records, size = self._next()
            if not size:  # everything is decrypted, except for an incomplete record header
                return
            self._give(records, size)
            if self._empty or time.perf_counter() > end_s:
                break
        if self._raw.is_closing():
            self._rest = b""
        elif self._rest:
            self._pause()
            if self._connection.is_reading:
                self._owner.call_in_turn(self.decrypt_more)

    def _pause(self) -> None:
        if self._raw.is_reading():  # otherwise the TLS layer has paused it, and will resume it
            self._raw.pause_reading()
            self._has_paused = True

    def _next(self) -> tuple[int, int]:
        """Return the number of records that start in the next bytes to decrypt, and the number of these bytes."""
        rest, end, records = self._rest, self._reach, 0
        while records < RECORDS_AT_ONCE and end + _HEAD_BYTES <= len(rest):
            end += _HEAD_BYTES + (rest[end + 3] << 8 | rest[end + 4])
            records += 1
        size = min(end, len(rest))
        self._reach = end - size
        return records, size

    def _give(self, records: int, size: int) -> None:
        data, self._rest = self._rest[:size], self._rest[size:]
        before_bytes = self._connection.read_bytes
        _feed(self._tls, data, self._raw)
        found_bytes = self._connection.read_bytes - before_bytes
        self._empty = max(0.0, self._empty + records - found_bytes / RECORD_BYTES)
        if self._empty > MAX_EMPTY_RECORDS and not self._raw.is_closing():
            self._owner.end_flood()

    def eof_received(self) -> bool | None:
        return self._tls.eof_received()

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._rest = b""
        self._tls.connection_lost(error)


def _feed(tls: asyncio.BufferedProtocol, data: bytes, raw: asyncio.Transport) -> None:
    """Pass bytes to the TLS layer as if they had just been received."""
    while data and not raw.is_closing():
        room = cast("memoryview", tls.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        tls.buffer_updated(count)
        data = data[count:]


# ------------------------------------------------------------------------------
# Self-signed certificate for `signs_itself`, if none is configured: official 5.x clients in Java, Go, C# and C++ use TLS by
# default, and verify no certificate. The certificate is created when the first TLS client connects, and not kept on the disk.
# Clients cannot use it to verify the broker.


T = TypeVar("T")


def can_sign() -> bool:
    """Return True if the library that creates certificates is installed."""
    return importlib.util.find_spec("cryptography") is not None


def with_certificate(use: Callable[[Path], T]) -> T:
    """Call `use` with a temporary PEM file that contains a new key and its certificate, and return its result.

    OpenSSL reads only files. The temporary file is deleted afterwards. Takes about 50 ms, most of it for imports.
    """
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(_pem())
        file.flush()
        return use(Path(file.name))


def _pem() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)


# ------------------------------------------------------------------------------
# Expiry of certificates, which Python's `ssl` does not report. The parser skips the few fields of X.509's DER encoding
# before the validity (RFC 5280, 4.1).


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def expires_s(path: Path) -> float | None:
    """Return the earliest expiry of a file's certificates in seconds since the epoch; None if the file contains no
    readable certificate. Raises OSError."""
    found: list[float] = []
    for pem in _PEM.findall(read_file(path, MAX_TLS_FILE_BYTES)):
        try:
            found.append(_not_after_s(ssl.PEM_cert_to_DER_cert(pem.decode())))
        except (ValueError, IndexError):  # OpenSSL reports the error where the file is used
            continue
    return min(found, default=None)


def _not_after_s(der: bytes) -> float:
    """Return the end of a certificate's validity in seconds since the epoch. Raises ValueError or IndexError for
    invalid bytes."""
    _, fields, _ = _element(der, 0)  # the certificate
    _, fields, _ = _element(fields, 0)  # the signed part
    at = 0
    if fields[0] == _VERSION:
        _, _, at = _element(fields, at)
    for _ in ("serial number", "algorithm", "issuer"):
        _, _, at = _element(fields, at)
    _, validity, _ = _element(fields, at)
    _, _, at = _element(validity, 0)
    kind, text, _ = _element(validity, at)
    form = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and the content of the element at a position, and the position of the next element."""
    size, begin = data[at + 1], at + 2
    if size >= 0x80:
        octets = size & 0x7F
        size, begin = int.from_bytes(data[begin : begin + octets], "big"), begin + octets
    return data[at], data[begin : begin + size], begin + size
