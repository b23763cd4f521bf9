"""The way into a port that also takes plain text: the first byte of a connection decides.

A TLS client begins with the byte 22, a handshake record (RFC 8446, 5.1). A plain remoting frame begins with the high byte of
its length, which is 0 or 1 for every size that is allowed, and HTTP/2 with a letter. So one port serves both, as Apache's
does (NettyRemotingServer.HandshakeHandler):

1. `Entrance` stands between a new socket and its `Connection` until the first bytes are there.
2. Plain: the Connection becomes the socket's protocol, and the Entrance is gone. Nothing is slower from then on.
3. TLS: the handshake waits for its turn (`handshakes`). Then `loop.start_tls` puts its own protocol before the socket, and
   `TlsRecords` stands before that. When the handshake is done, the Connection writes to the encrypted transport.
4. A client that the mode does not allow is refused with a reason, in its own protocol where that is possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

import structlog

from ..config import MAX_HELLO_BYTES, TLS_HANDSHAKE_TIMEOUT_S, TLS_SHUTDOWN_TIMEOUT_S
from .client import Client
from .handshakes import Handshakes
from .records import TlsRecords
from .tls import Tls

log = structlog.get_logger("rocketlet.tls")

_HANDSHAKE: Final = 22
_NO_TLS_HERE: Final = bytes((21, 3, 1, 0, 2, 2, 40))  # a fatal alert, handshake_failure (RFC 5246, 7.2)
_NO_TLS_REASON: Final = (
    "a TLS client came to a port without TLS; give --tls-cert and --tls-key, or turn TLS off in the client"
)
_NO_PLAIN_REMARK: Final = (
    "this port takes TLS connections only; turn TLS on in the client "
    "(rocketlet: Access(tls=True), --tls; Java: -Dtls.enable=true)"
)


C = TypeVar("C", bound=Client)


class Entrance(asyncio.Protocol, Generic[C]):
    """A socket's protocol until the client's protocol is known; while TLS is being set up, it stands behind that."""

    __slots__ = ("_door", "_early", "_handshakes", "_in_turn", "_is_lost", "_tls", "_transport", "connection")

    def __init__(
        self,
        tls: Tls,
        handshakes: Handshakes,
        in_turn: Callable[..., None],
        connection: C,
        door: Callable[[C, bytes], asyncio.Protocol],
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
            self.connection.read_bytes += len(data)  # these records had data: see `TlsRecords`
        elif self.connection.is_encrypted:
            self._hand_over(data)
        elif data[0] != _HANDSHAKE:
            self._take_plain(data)
        elif not self._tls.is_offered:
            self._refuse_tls()
        else:
            self._take_tls(data)

    def _take_plain(self, data: bytes) -> None:
        assert self._transport is not None
        if self._tls.takes_plain:
            self._hand_over(data)
            return
        self._tls.refused += 1
        self._tls.note_turned_away(self.connection.peer, _NO_PLAIN_REMARK)
        if self._tls.reports.is_due(self.connection.peer, _NO_PLAIN_REMARK):
            log.warning("plain_client_refused", peer=self.connection.peer, reason=_NO_PLAIN_REMARK)
        self._transport.write(self.connection.plain_refusal(data, _NO_PLAIN_REMARK))
        self._transport.close()

    def _hand_over(self, data: bytes) -> None:
        """Picks the door by the client's first bytes, and hands the socket over to it."""
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
        self._tls.note_turned_away(self.connection.peer, _NO_TLS_REASON)
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
            self._tls.failed(self.connection.peer, str(error) or "the client did not finish in time")
            self.abort()
            self.connection_lost(error)

    async def _encrypt(self, first: bytes) -> None:
        raw, context = self._transport, await self._tls.ready()
        assert raw is not None
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
            del starting  # its exception refers to this frame; a reference back would be a circle: see `garbage`
        if encrypted is None or raw.is_closing():  # closed amid the handshake: start_tls does not mind
            raise ConnectionResetError("the connection was closed")
        self._use(encrypted)

    def _take_records(self, raw: asyncio.Transport, first: bytes) -> None:
        """From now on, the client's bytes go through `TlsRecords`."""
        if raw.is_closing():
            return
        tls = cast("asyncio.BufferedProtocol", raw.get_protocol())
        records = TlsRecords(raw, tls, self.connection, self._in_turn, self._end_flood)
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
        self._tls.failed(self.connection.peer, reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
