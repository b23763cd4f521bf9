"""TLS on the port that also takes plain text: the first byte of a connection decides.

A TLS client begins with the byte 22, a handshake record (RFC 8446, 5.1). A plain frame begins with the high byte of its
length, which is 0 or 1 for every size that is allowed. So one port serves both, as Apache's does
(NettyRemotingServer.HandshakeHandler):

1. `Entrance` stands between a new socket and its `Connection` until the first bytes are there.
2. Plain: the Connection becomes the socket's protocol, and the Entrance is gone. Nothing is slower from then on.
3. TLS: the handshake waits for its turn (`handshakes`). Then `loop.start_tls` puts its own protocol before the socket, and
   `Records` stands before that. When the handshake is done, the Connection writes to the encrypted transport.
4. What the mode does not allow is refused with a reason, in the client's own language where that is possible.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

import structlog

from ...protocol.codes import ResponseCode
from ...protocol.frame import FrameError, FrameReader
from ..config import (
    MAX_HELLO_BYTES,
    MAX_TLS_FILE_BYTES,
    TLS_HANDSHAKE_TIMEOUT_S,
    TLS_SHUTDOWN_TIMEOUT_S,
)
from ..remoting.answers import answer
from ..remoting.connection import Connection
from ..running.settings_files import Unsettled, Watched, check_file
from ..sessions.reports import Reports
from .handshakes import Handshakes
from .records import Records

log = structlog.get_logger("rocketlet.tls")

TlsMode = Literal["permissive", "enforcing", "disabled"]
TLS_MODES: Final[tuple[TlsMode, ...]] = ("permissive", "enforcing", "disabled")

_HANDSHAKE: Final = 22
_NO_TLS_HERE: Final = bytes((21, 3, 1, 0, 2, 2, 40))  # a fatal alert, handshake_failure (RFC 5246, 7.2)
_NO_TLS_REASON: Final = (
    "a TLS client came to a port without TLS; give --tls-cert and --tls-key, or turn TLS off in the client"
)
_NO_PLAIN_REMARK: Final = "this port takes TLS connections only; turn TLS on in the client (Java: -Dtls.enable=true)"


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
    context.set_alpn_protocols(["h2"])  # for gRPC; who offers nothing speaks what it wants
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


def client_context(authority: Path, own: TlsFiles | None) -> ssl.SSLContext:
    """Of a broker that registers: the name server's certificate is checked, the broker's shown if one is asked for.
    Raises TlsError."""
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


class Tls:
    """What all connections of a server share: mode, certificate, what was already reported.

    Without files no TLS is offered, and the mode must not be `enforcing`. name_server_authority: PEM; with it the
    broker speaks TLS to its name servers, whose certificates one of these signed. Raises TlsError.
    """

    def __init__(
        self,
        mode: TlsMode = "permissive",
        files: TlsFiles | None = None,
        name_server_authority: Path | None = None,
    ) -> None:
        if mode == "enforcing" and files is None:
            raise TlsError("TLS is enforced, but there is no certificate; give --tls-cert and --tls-key")
        if mode == "disabled" and files is not None:
            raise TlsError("a certificate is given, but TLS is disabled; leave out one of them")
        self.takes_plain = mode != "enforcing"
        self.handshakes = self.failed_handshakes = self.refused = 0
        self._files = files
        self._authority = name_server_authority
        paths = files.paths if files else ()
        self._watched = Watched((*paths, name_server_authority) if name_server_authority else paths)
        try:
            self.context, self.name_server_context = self._watched.take(self._contexts)
        except Unsettled:
            raise TlsError(f"{', '.join(map(str, paths))}: these TLS files are being written; start again") from None
        self.reports = Reports()

    def look(self) -> bool:
        """Whether the files are to be loaded: they have changed, and nobody writes them any more."""
        return self._watched.look()

    def load(self) -> None:
        """Takes the files anew if they have changed; connections that are open keep what they have. Files that do not
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
        return server_context(files) if files else None, client_context(authority, files) if authority else None

    def failed(self, connection: Connection, reason: str) -> None:
        """A client's TLS did not come about, or was ended."""
        self.failed_handshakes += 1
        if self.reports.is_due(connection.peer, reason):
            log.warning("tls_handshake_failed", peer=connection.peer, reason=reason)


class Entrance(asyncio.Protocol):
    """A socket's protocol until it is known what the client speaks; while TLS is being set up, it stands behind that."""

    __slots__ = ("_door", "_early", "_handshakes", "_in_turn", "_is_lost", "_tls", "_transport", "connection")

    def __init__(
        self,
        tls: Tls,
        handshakes: Handshakes,
        in_turn: Callable[..., None],
        connection: Connection,
        door: Callable[[Connection, bytes], asyncio.Protocol],
    ) -> None:
        self._tls = tls
        self._door = door
        self._handshakes = handshakes
        self._in_turn = in_turn
        self.connection = connection
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] | None = None
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._early is not None:  # the client's first request came with the end of its handshake
            self._early.append(data)
            self.connection.read_bytes += len(data)  # these records had data: see `Records`
        elif self.connection.is_encrypted:
            self._hand_over(data)
        elif data[0] != _HANDSHAKE:
            self._take_plain(data)
        elif self._tls.context is None:
            self._refuse_tls()
        else:
            self._take_tls(data)

    def _take_plain(self, data: bytes) -> None:
        assert self._transport is not None
        if self._tls.takes_plain:
            self._hand_over(data)
            return
        self._tls.refused += 1
        if self._tls.reports.is_due(self.connection.peer, _NO_PLAIN_REMARK):
            log.warning("plain_client_refused", peer=self.connection.peer, reason=_NO_PLAIN_REMARK)
        self._transport.write(_plain_refusal(data))
        self._transport.close()

    def _hand_over(self, data: bytes) -> None:
        """What the client speaks is known by its first bytes; from now on somebody else reads them."""
        assert self._transport is not None
        protocol = self._door(self.connection, data)
        self._transport.set_protocol(protocol)
        protocol.data_received(data)

    def _take_tls(self, first: bytes) -> None:
        assert self._transport is not None
        if len(first) > MAX_HELLO_BYTES:
            self.refuse("the client's hello is too long")
            return
        self._early = []
        self._transport.pause_reading()
        self._handshakes.begin(self, first)

    def _refuse_tls(self) -> None:
        assert self._transport is not None
        self._tls.refused += 1
        if self._tls.reports.is_due(self.connection.peer, _NO_TLS_REASON):
            log.warning("tls_client_refused", peer=self.connection.peer, reason=_NO_TLS_REASON)
        self._transport.write(_NO_TLS_HERE)
        self._transport.close()

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def is_gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def shake_hands(self, first: bytes) -> None:
        """Returns when the connection is encrypted, or has ended."""
        try:
            await self._encrypt(first)
            self._tls.handshakes += 1
        except OSError as error:  # ssl.SSLError and TimeoutError are
            self._tls.failed(self.connection, str(error) or "the client did not finish in time")
            self.abort()
            self.connection_lost(error)

    async def _encrypt(self, first: bytes) -> None:
        raw, context = self._transport, self._tls.context
        assert raw is not None and context is not None
        if raw.is_closing():  # start_tls would wait until the timeout
            raise ConnectionResetError("the connection was closed")
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            loop.start_tls(
                raw,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
            )
        )
        # start_tls puts its protocol before the socket in its first step, which runs before this task's next one, and
        # has it connected by call_soon; what is called soon after that comes before anything else is read.
        await asyncio.sleep(0)
        loop.call_soon(self._take_records, raw, first)
        try:
            encrypted = await starting
        finally:
            del starting  # what it raises refers to this frame, and must not be referred to by it: see `garbage`
        if encrypted is None or raw.is_closing():  # closed amid the handshake: start_tls does not mind
            raise ConnectionResetError("the connection was closed")
        self._use(encrypted)

    def _take_records(self, raw: asyncio.Transport, first: bytes) -> None:
        """From now on, what the client sends goes through `Records`."""
        if raw.is_closing():
            return
        tls = cast("asyncio.BufferedProtocol", raw.get_protocol())
        records = Records(raw, tls, self.connection, self._in_turn, self._end_flood)
        raw.set_protocol(records)
        self.connection.records = records
        records.data_received(first)
        self._in_turn(self._handshakes.opened, self)

    def _end_flood(self) -> None:
        self.refuse("the client sent many TLS records without data")

    def _use(self, encrypted: asyncio.Transport) -> None:
        early, self._early = self._early or [], None
        self._transport = encrypted
        if self._is_lost:
            return
        self.connection.encrypted(encrypted)
        if early:
            self._hand_over(b"".join(early))

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is told once, whoever hears of it first: asyncio tells nobody of a client that leaves amid a
        handshake, but of other ends it does."""
        if not self._is_lost:
            self._is_lost = True
            self.connection.connection_lost(error)

    def refuse(self, reason: str) -> None:
        self._tls.failed(self.connection, reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _plain_refusal(data: bytes) -> bytes:
    """What a plain client can read of a port that takes TLS only; empty if it asked nothing yet."""
    try:
        frames = FrameReader().feed(data)
    except FrameError:
        return b""
    asked = [frame for frame in frames[:1] if not frame.is_response]
    return b"".join(b"".join(answer(frame, ResponseCode.NO_PERMISSION, remark=_NO_PLAIN_REMARK)) for frame in asked)
