"""TLS for clients: certificates, a self-signed one where none is given, and the decryption of a client's records."""

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
from .machine import Unsettled, Watched
from .sessions import Recent, Reports, Session

log = structlog.get_logger("rocketlet.tls")


# ------------------------------------------------------------------------------
# A client's socket, as far as TLS deals with it. Each protocol server has its own kind.


class Decryption(Protocol):
    """Stands between a client's socket and its TLS."""

    @property
    def held_bytes(self) -> int: ...

    def go_on(self) -> None: ...


class Client(asyncio.Protocol):
    """`read_bytes` have come from the client, of TLS those that were decrypted; `records` has them decrypted."""

    __slots__ = ("is_encrypted", "peer", "read_bytes", "records")

    peer: str
    is_encrypted: bool
    read_bytes: int
    records: Decryption | None

    @property
    @abstractmethod
    def address(self) -> str:
        """The client's, without the port."""

    @property
    @abstractmethod
    def is_reading(self) -> bool:
        """Whether requests are read; otherwise those that were read wait."""

    @abstractmethod
    def encrypted(self, transport: asyncio.Transport) -> None:
        """The client has set up TLS; from now on everything goes through there."""

    @abstractmethod
    def plain_refusal(self, data: bytes, remark: str) -> bytes:
        """A refusal in the client's own protocol, for plain data at a port that takes TLS only; empty if it has asked
        nothing yet."""


# ------------------------------------------------------------------------------
# A client's socket as any protocol server may use it, whichever made it: counted, charged and closed as all others.


class ClientTransport(Session, Protocol):
    """`active_s` is when it was last read from or written to, `heard_s` when its client last sent something. `read_bytes`
    have come from the client. `is_held`: its requests wait."""

    active_s: float
    heard_s: float
    read_bytes: int
    is_held: bool

    @property
    def may_serve(self) -> bool:
        """True if its requests may be served immediately; otherwise they are queued."""
        ...

    def note_served(self, used_s: float) -> None:
        """Record for how long its requests were served."""
        ...

    def in_turn(self, work: Work[None]) -> None:
        """Does work for the client in pieces, each in its address's turn."""
        ...

    def on_farewell(self, action: Callable[[], None]) -> None:
        """Calls `action` before the broker closes the socket."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read."""
        ...

    def write(self, buffers: list[bytes | memoryview]) -> None: ...

    def pause_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """The socket's bytes go there from now on."""
        ...

    def go_on(self) -> None:
        """Reads again."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


# ------------------------------------------------------------------------------
# How TLS is set up: its mode, certificates and keys, read again when they change.


_DAY_S: Final = 86_400.0

TlsMode = Literal["permissive", "enforcing", "disabled"]
TLS_MODES: Final[tuple[TlsMode, ...]] = ("permissive", "enforcing", "disabled")


class TlsError(ValueError):
    """The files or the mode cannot be used. The text says what to do."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`certificate`: PEM, the server's first, then those that lead to the authority; `key`: PEM, may stand in the same
    file; `client_authority`: PEM, with it every client must show a certificate that one of these signed."""

    certificate: Path
    key: Path | None = None
    client_authority: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.key, self.client_authority) if path)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # each costs this side a private-key operation
    context.set_alpn_protocols(["h2"])  # for gRPC; a client that offers nothing speaks as it likes
    try:
        for path in files.paths:
            check_file(path, MAX_TLS_FILE_BYTES)
        context.load_cert_chain(files.certificate, files.key, _refuse_password)
        if files.client_authority:
            context.load_verify_locations(files.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:  # SSLError has no text for a key that does not fit
        names = ", ".join(map(str, files.paths))
        raise TlsError(f"the TLS files {names} cannot be used: {error}") from None
    return context


def _context_of(pem: Path) -> ssl.SSLContext:
    return server_context(TlsFiles(pem))


def client_context(authority: Path, own: TlsFiles | None) -> ssl.SSLContext:
    """For a broker that registers: checks the name server's certificate, and shows the broker's own if asked for. Raises
    TlsError."""
    try:
        check_file(authority, MAX_TLS_FILE_BYTES)
        context = ssl.create_default_context(cafile=authority)
        if own:
            context.load_cert_chain(own.certificate, own.key, _refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"the TLS file {authority} cannot be used for name servers: {error}") from None
    return context


def _refuse_password() -> str:
    """OpenSSL would ask for it on the terminal, and the broker would stand."""
    raise TlsError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")


def _expiries(paths: Iterable[Path]) -> dict[Path, float]:
    """When the files' certificates expire, in seconds since the epoch."""
    found: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # its user says why it cannot be read
            if (at_s := expires_s(path)) is not None:
                found[path] = at_s
    return found


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


class Tls:
    """The TLS settings that all connections of a server share: mode, certificate, and the faults already reported.

    Without files the mode must not be `enforcing`, and TLS is offered only if `signs_itself`: with a certificate that nobody
    can check. name_server_authority: PEM; with it the
    broker speaks TLS to its name servers, whose certificates one of these signed. Raises TlsError.
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
        self.expires_s: dict[Path, float] = {}
        self._warned_s = -math.inf
        try:
            self.context, self.name_server_context = self._watched.take(self._contexts)
        except Unsettled:
            raise TlsError(f"{', '.join(map(str, paths))}: these TLS files are being written; start again") from None
        self.reports = Reports()
        self._turned_away = Recent()
        self.turned_away = self._turned_away.texts

    @property
    def is_offered(self) -> bool:
        return self.context is not None or self._signs_itself

    async def ready(self) -> ssl.SSLContext:
        """The certificate's, which is made now if there is none yet."""
        if self.context is None:
            made = await asyncio.to_thread(with_certificate, _context_of)
            if self.context is None:
                self.context = made
                log.info("certificate_self_signed", hint="clients that check certificates need --tls-cert")
        return self.context

    def look(self) -> bool:
        """Whether the files are to be loaded: they have changed, and nobody writes them any more."""
        return self._watched.look()

    def load(self) -> None:
        """Reload the files if they have changed; connections that are open keep what they have. Files that do not
        fit together, such as a certificate whose key is not written yet, are reported, and the former stay."""
        if not self._watched.has_changed:
            return
        try:
            self.context, self.name_server_context = self._watched.take(self._contexts)
        except Unsettled:  # a later look finds them settled
            pass
        except TlsError as error:
            log.error("certificate_not_reloaded", reason=str(error))
        else:
            log.info("certificate_reloaded")

    def _contexts(self) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
        files, authority = self._files, self._authority
        self.expires_s = _expiries([*(files.paths if files else ()), *([authority] if authority else ())])
        self._warned_s = -math.inf
        return server_context(files) if files else None, client_context(authority, files) if authority else None

    def warn_of_expiry(self, now_s: float) -> None:
        """Each day of the last 14 of a certificate, and each day after. `now_s`: since the epoch."""
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
        address = peer.rpartition(":")[0]
        self._turned_away.note((address, reason), f"{address}: {reason[:MAX_NAMED_CHARS]}")

    def failed(self, peer: str, reason: str) -> None:
        """A client's TLS did not come about, or was ended."""
        self.failed_handshakes += 1
        expired = [f"{path} expired on {_date(at_s)}" for path, at_s in self.expires_s.items() if at_s <= time.time()]
        reason = "; ".join([reason, *expired])
        self.note_turned_away(peer, reason)
        if self.reports.is_due(peer, reason):
            log.warning("tls_handshake_failed", peer=peer, reason=reason)


# ------------------------------------------------------------------------------
# Holds a TLS client's records back from OpenSSL.
#
# OpenSSL reads all that it is given in one piece, while the event loop waits, and the client decides what that costs:
#
# 1. Its part of a handshake takes a private-key operation, 0.1 to 3 ms. So each part waits for its turn.
# 2. A record may hold no data: a key update (RFC 8446, 4.6.3) has 27 bytes and takes 27 us, and OpenSSL takes any
#     number of
#    them. 1.9 MB stopped a broker for 1.1 s. So few records are decrypted at a time, and a client that sends many
#     without
#    data is cut off, as by Go's crypto/tls (maxUselessRecords). Key updates of honest clients lie millions of records
#     apart.
# 3. Nothing is decrypted while requests of this client wait. It would be decrypted later, in one piece.


_HEAD_BYTES = 5  # a record's kind, version, and the length of what follows (RFC 8446, 5.1)


class TlsRecords(asyncio.Protocol):
    """A socket's protocol while its client speaks TLS. `tls` is asyncio's, which decrypts; `in_turn` calls when
    there is time; `flooded` ends
    a connection whose client has sent too many records without data."""

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: asyncio.BufferedProtocol,
        connection: Client,
        in_turn: Callable[..., None],
        flooded: Callable[[], None],
    ) -> None:
        self._raw = raw
        self._tls = tls
        self._connection = connection
        self._in_turn = in_turn
        self._flooded = flooded
        self._rest = b""
        self._reach = 0  # bytes until the next record begins
        self._empty = 0.0  # records without data, as far as others have not made up for them
        self._has_paused = self._is_decrypting = False

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be decrypted, and encrypted bytes that the client has not read."""
        return len(self._rest) + self._raw.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self._connection.is_encrypted:
            self.go_on()
        else:
            self._pause()
            self._in_turn(self.go_on)

    def go_on(self) -> None:
        """Has as much decrypted as the time of a turn allows; the rest in the next turns, or when requests no longer wait."""
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
            if not size:  # all is done, but for the beginning of a record's head
                return
            self._give(records, size)
            if self._empty or time.perf_counter() > end_s:
                break
        if self._raw.is_closing():
            self._rest = b""
        elif self._rest:
            self._pause()
            if self._connection.is_reading:
                self._in_turn(self.go_on)

    def _pause(self) -> None:
        if self._raw.is_reading():  # otherwise TLS has paused it, and will resume it
            self._raw.pause_reading()
            self._has_paused = True

    def _next(self) -> tuple[int, int]:
        """How many records begin in the next bytes to decrypt, and their size."""
        rest, place, records = self._rest, self._reach, 0
        while records < RECORDS_AT_ONCE and place + _HEAD_BYTES <= len(rest):
            place += _HEAD_BYTES + (rest[place + 3] << 8 | rest[place + 4])
            records += 1
        size = min(place, len(rest))
        self._reach = place - size
        return records, size

    def _give(self, records: int, size: int) -> None:
        data, self._rest = self._rest[:size], self._rest[size:]
        before_bytes = self._connection.read_bytes
        _feed(self._tls, data, self._raw)
        found_bytes = self._connection.read_bytes - before_bytes
        self._empty = max(0.0, self._empty + records - found_bytes / RECORD_BYTES)
        if self._empty > MAX_EMPTY_RECORDS and not self._raw.is_closing():
            self._flooded()

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
    """Gives bytes to TLS as if they had just been read."""
    while data and not raw.is_closing():
        room = cast("memoryview", tls.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        tls.buffer_updated(count)
        data = data[count:]


# ------------------------------------------------------------------------------
# A certificate of the broker's own, where none is given: official clients of 5.x in Java, Go, C# and C++ begin with
# TLS, and check no certificate. It is made when the first of them comes, in memory, and nobody can know the broker by
# it.


T = TypeVar("T")


def can_sign() -> bool:
    """Whether the extra is there that makes certificates."""
    return importlib.util.find_spec("cryptography") is not None


def with_certificate(use: Callable[[Path], T]) -> T:
    """Calls `use` with a PEM file that has a fresh key and its certificate. OpenSSL reads files only; this one is deleted
    afterwards. Takes some 50 ms, most of them for imports."""
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
# Reads until when certificates are valid, which Python's `ssl` does not report. It steps over the few fields of X.509's
# DER before the validity (RFC 5280, 4.1).


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def expires_s(path: Path) -> float | None:
    """When the first of a file's certificates to expire does, in seconds since the epoch; None if it has none that can be
    read. Raises OSError."""
    found: list[float] = []
    for pem in _PEM.findall(read_file(path, MAX_TLS_FILE_BYTES)):
        try:
            found.append(_not_after_s(ssl.PEM_cert_to_DER_cert(pem.decode())))
        except (ValueError, IndexError):  # OpenSSL says what it thinks of it where it is used
            continue
    return min(found, default=None)


def _not_after_s(der: bytes) -> float:
    """Raises ValueError or IndexError for bytes that are no certificate."""
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
    """The tag and content at a place, and where the next element begins."""
    size, begin = data[at + 1], at + 2
    if size >= 0x80:
        octets = size & 0x7F
        size, begin = int.from_bytes(data[begin : begin + octets], "big"), begin + octets
    return data[at], data[begin : begin + size], begin + size
