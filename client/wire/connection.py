"""One connection to a broker or name server: requests, responses, credentials, TLS, and the event loop that owns it."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from ipaddress import ip_address
from threading import get_ident
from typing import Any, Final, Literal, TypeVar, cast

from ...host.files import check_file
from ...protocol.bodies import BodyError
from ...protocol.codes import (
    EXT_ACCEPT_ENCODING,
    EXT_CHANNEL,
    ONEWAY_FLAG,
    RESPONSE_FLAG,
    Language,
    RequestCode,
    ResponseCode,
    request_name,
)
from ...protocol.frame import (
    JSON,
    MSGPACK,
    ROCKETMQ,
    Ext,
    Frame,
    FrameError,
    FrameReader,
    encode,
    encode_msgpack,
    encode_msgpack_head,
)
from ...protocol.headers import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, HeaderError, Signer, read
from ...protocol.message import MessageError
from ..config import (
    ASKED_AT_ONCE,
    CLIENT_LIMITS,
    CONNECT_TIMEOUT_S,
    MAX_CONNECT_ADDRESSES,
    MAX_TLS_FILE_BYTES,
    REQUEST_TIMEOUT_S,
    TIMEOUT_TICK_S,
    ClientLimits,
)
from ..errors import (
    AnswerUnreadable,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    get_logger,
    unencodable,
)

log = get_logger("rocketlet.connection")


# ------------------------------------------------------------------------------
# One socket to a name server or broker, and the set of them.
#
# The requests of one event-loop iteration are written together at the start of the next one (`call_soon`), except those that
# a caller writes earlier (`write_now`). A response is matched to its request by its number (`opaque`). A periodic sweep ends
# requests whose timeout has passed. Unless `Access.encoding` says otherwise, the connection starts with JSON headers, offers
# MessagePack in each request, and switches to it when the peer has responded in it, which Apache's servers never do.


_PYTHON = int(Language.PYTHON)
_JOINED_BYTES = 16_384  # larger data is written without copying it into one buffer

Answered = Callable[[Frame | Exception], None]
OnRequest = Callable[["Connection", Frame], None]


class Connection(asyncio.Protocol):
    """One connection to a name server or broker.

    `call` passes the response to a callback, `ask` returns a future of it, and `request` returns a future that raises for
    error codes.

    Args:
        on_request: called with requests that the peer sends.
        on_lost: called when the connection has ended.

    Attributes:
        is_writable: False while the transport's write buffer is full.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        on_request: OnRequest,
        on_lost: Callable[[Connection], None],
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self.address = address
        self._limits = limits
        self._max_in_flight = limits.max_in_flight
        self.is_open = False
        self._access = access
        self._signs = access.signs
        self._on_request = on_request
        self._on_lost = on_lost
        self.loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._serialize_type = ENCODINGS[access.encoding]
        self._opaque = 0
        self._pending: dict[int, tuple[Answered, float, int]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_due_s = 0.0
        self._blocked_s = 0.0  # the total time for which the loop was blocked or the process suspended
        # True if data arrived since `_received_s`. The sweep reads the clock, so that receiving data does not need to.
        self._fault = ""  # why this client has closed the connection, if the server's bytes are invalid
        self._has_received = True
        self._received_s = 0.0
        self._out: list[bytes] = []  # what this event-loop iteration is to write
        self._responses_out = self._out  # the iteration whose responses `_responses_bytes` counts
        self._responses_bytes = 0
        self._is_flush_due = False
        self._before_flush: deque[Callable[[], None]] = deque()
        self._has_ended = False  # True once nothing may be written any more
        self.is_writable = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._when_writable: list[Callable[[], None]] = []

    @property
    def speaks_msgpack(self) -> bool:
        """True once a Rocketlet server has responded with a MessagePack header, which it does only with
        `Access(encoding="auto")`."""
        return self._serialize_type == MSGPACK

    def running_s(self) -> float:
        """Return the loop's time minus the time for which it was blocked. Request timeouts are measured by it."""
        return self.loop.time() - self._blocked_s

    # Requests

    def call(self, code: int, ext: Ext, body: bytes, answered: Answered, due_s: float) -> None:
        """Send a request.

        Args:
            answered: called with the response, whatever its code, or with ConnectionFailed or RequestTimeout.
            due_s: the time of `running_s` at which the request times out.

        Raises ConfigError if a header field is a number of more than 64 bits.
        """
        if not self.is_open or len(self._pending) >= self._max_in_flight:
            reason = "is closed" if not self.is_open else f"has {self._max_in_flight} requests in flight (the maximum)"
            self.loop.call_soon(answered, ConnectionFailed(f"the connection to {self.address} {reason}"))
            return
        self._opaque = opaque = (self._opaque + 1) & 0x7FFFFFFF
        out = self._out
        try:
            if self._serialize_type == MSGPACK:
                if self._signs:
                    ext = self._access.signed(ext, body)
                if len(body) <= _JOINED_BYTES:
                    out.append(encode_msgpack(code, 0, opaque, _PYTHON, ext, body))
                else:
                    out += encode_msgpack_head(code, 0, opaque, _PYTHON, ext, len(body)), body
            else:
                out.append(self._encoded(code, opaque, ext, body))
        except OverflowError:
            raise ConfigError(f"{request_name(code)}: a number has more than 64 bits; use a smaller one") from None
        except UnicodeEncodeError as error:
            text = unencodable(error)
            raise ConfigError(f"{request_name(code)}: a text {text}; correct the argument") from None
        self._pending[opaque] = (answered, due_s, code)
        if self._sweep is None:
            self._sweep_later()
        if not self._is_flush_due:
            self._flush_soon()

    def _encoded(self, code: int, opaque: int, ext: Ext, body: bytes, flag: int = 0) -> bytes:
        if self._access.encoding == "auto" and self._serialize_type == JSON:
            ext = {**ext, EXT_ACCEPT_ENCODING: "MSGPACK"}
        if self._signs:
            ext = self._access.signed(ext, body)
        return encode(Frame(code, opaque, ext, body, flag, serialize_type=self._serialize_type))

    def request_unchecked(
        self, code: int, ext: Ext, body: bytes = b"", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> asyncio.Future[Frame]:
        """Send a request. Return a future of the response, whatever its code; it raises ConnectionFailed or
        RequestTimeout."""
        future: asyncio.Future[Frame] = self.loop.create_future()
        self.call(code, ext, body, partial(_complete, future), self.running_s() + timeout_s)
        return future

    def request(
        self, code: int, ext: Ext, body: bytes = b"", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> asyncio.Future[Frame]:
        """Send a request. Return a future of the successful response.

        The future raises BrokerRefused for an error code, ConnectionFailed or RequestTimeout.
        """
        future: asyncio.Future[Frame] = self.loop.create_future()
        self.call(code, ext, body, partial(self._resolve, future, code), self.running_s() + timeout_s)
        return future

    def _resolve(self, future: asyncio.Future[Frame], code: int, answer: Frame | Exception) -> None:
        if isinstance(answer, Frame) and answer.code:
            answer = BrokerRefused(code, answer.code, answer.remark, self.address)
        _complete(future, answer)

    def oneway(self, code: int, ext: Ext, body: bytes = b"") -> None:
        """Send a request that gets no response. Raises ConnectionFailed if the connection is closed."""
        if not self.is_open:
            raise ConnectionFailed(f"the connection to {self.address} is closed")
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        self._send(self._encoded(code, self._opaque, ext, body, ONEWAY_FLAG))

    @property
    def unwritten(self) -> int:
        """The number of buffers that this event-loop iteration has not written yet."""
        return len(self._out)

    def respond(self, request: Frame, code: int = 0, body: bytes = b"", remark: str | None = None) -> None:
        """Send the response to a request of the broker. Instead, close the connection if the responses of this event-loop
        iteration and the bytes that the broker has not read yet together exceed `max_unread_bytes`."""
        answer = Frame(code, request.opaque, {}, body, RESPONSE_FLAG, remark, serialize_type=request.serialize_type)
        data = encode(answer)
        if self._responses_out is not self._out:  # a new event-loop iteration
            self._responses_out, self._responses_bytes = self._out, 0
        self._responses_bytes += len(data)
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if self._responses_bytes + unread > self._limits.max_unread_bytes:
            log.warning(
                "connection_closed_unread",
                peer=self.address,
                hint="the broker sends requests and does not read the responses",
            )
            self.abort()
            return
        self._send(data)

    async def writable(self) -> None:
        """Wait until the transport accepts more bytes or the connection has ended."""
        await self._writable.wait()

    def when_writable(self, action: Callable[[], None]) -> None:
        """Call `action` once when the transport, which accepts no bytes now, accepts some again, or the connection has
        ended."""
        self._when_writable.append(action)

    def _send(self, data: bytes) -> None:
        if not self._is_flush_due:
            self._flush_soon()
        self._out.append(data)

    def _flush_soon(self) -> None:
        self._is_flush_due = True
        self.loop.call_soon(self._flush)

    def before_flush(self, action: Callable[[], None]) -> None:
        """Call `action` before the collected requests are written, in the next event-loop iteration at the latest. `action`
        may add requests."""
        if not self._is_flush_due:
            self._flush_soon()
        self._before_flush.append(action)

    def _flush(self) -> None:
        try:
            while self._before_flush:
                self._before_flush.popleft()()
        finally:  # after an exception, later writes must still be flushed
            self._is_flush_due = False
            if self._out:
                self.write_now()

    def write_now(self) -> None:
        """Write the collected requests now."""
        out, self._out = self._out, []
        if not out or self._has_ended or self._transport is None or self._transport.is_closing():
            return
        if len(out) == 1:
            self._transport.write(out[0])
        elif sum(map(len, out)) <= _JOINED_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)

    def _sweep_later(self) -> None:
        now_s = self.loop.time()
        if self._has_received:
            self._has_received, self._received_s = False, now_s - self._blocked_s
        self._sweep_due_s = now_s + self._limits.deadline_sweep_s
        self._sweep = self.loop.call_later(self._limits.deadline_sweep_s, self.sweep_deadlines)

    def sweep_deadlines(self) -> None:
        """Fail the requests whose deadline has passed, and sweep again later while others are in flight."""
        now_s = self.loop.time()
        # Time for which the loop was blocked does not count: it runs timers before it reads, so responses that arrived
        # meanwhile are still in the socket.
        late_s = now_s - self._sweep_due_s
        if late_s > self._limits.deadline_sweep_s:
            self._blocked_s += late_s
        self._time_out(now_s - self._blocked_s)
        self._sweep = None
        if self._pending and self.is_open:
            self._sweep_later()

    def _time_out(self, now_s: float) -> None:
        """Fail requests whose timeout has passed. Close the connection if it has received nothing for too long.

        Args:
            now_s: the time of `running_s`.
        """
        late = [item for item in self._pending.items() if item[1][1] <= now_s]
        for opaque, (answered, _, code) in late:
            del self._pending[opaque]
            answered(RequestTimeout(f"{self.address} did not respond to {request_name(code)} in time"))
        silent_s = now_s - self._received_s
        if late and silent_s > self._limits.silent_s and not self._has_received:
            log.warning(
                "connection_silent", peer=self.address, seconds=round(silent_s, 1), hint="the client reconnects"
            )
            self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        self._has_received = True
        try:
            frames = self._reader.feed(data)
        except FrameError as error:
            reason = str(error)
            if data.startswith(b"HTTP/"):
                reason = "it is an HTTP port; give the port of a name server, such as 9876"
            self._fault = f"{self.address} is no RocketMQ server: {reason}"
            log.error("connection_closed_not_a_frame", peer=self.address, reason=reason)
            self.abort()
            return
        for frame in frames:
            _, opaque, _, _, flag, _, _, _, serialize_type = frame
            if not flag & RESPONSE_FLAG:
                self._on_request(self, frame)
                if not self.is_open:  # the response to this request has closed the connection
                    return
                continue
            if serialize_type == MSGPACK != self._serialize_type:
                self._serialize_type = MSGPACK
                if self._signs:
                    self._identify()
            waiting = self._pending.pop(opaque, None)
            if waiting is not None:
                waiting[0](frame)
        if not self._is_flush_due:
            # The callers that these responses wake run before this flush, so their next requests leave in the same write.
            self._flush_soon()

    def _identify(self) -> None:
        """With TLS, authenticate the connection once at a Rocketlet broker, so that requests need no signature of their
        own.

        The proof is bound to this TLS connection, so it is useless on another one. Requests to other servers stay signed.
        """
        tls = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        binding = tls.get_channel_binding("tls-unique") if tls is not None else None
        if binding:
            due_s = self.running_s() + REQUEST_TIMEOUT_S
            self.call(RequestCode.IDENTIFY, {EXT_CHANNEL: binding.hex()}, b"", self._identified, due_s)

    def _identified(self, answer: Frame | Exception) -> None:
        self._signs = not (isinstance(answer, Frame) and answer.code == ResponseCode.SUCCESS)

    def pause_writing(self) -> None:
        self.is_writable = False
        self._writable.clear()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._writable.set()
        actions, self._when_writable = self._when_writable, []
        for action in actions:
            action()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._sweep is not None:
            self._sweep.cancel()
        self._on_lost(self)  # before the callbacks below, so that they see the connection as lost
        self.resume_writing()
        pending, self._pending = self._pending, {}
        for answered, _, code in pending.values():
            reason = self._fault or f"{self.address} closed the connection before it responded to {request_name(code)}"
            answered(ConnectionFailed(reason))

    def close(self) -> None:
        """Close the sending side, and keep reading until the peer closes the connection. `abort` does not wait for that.

        Closing a socket while responses arrive would reset the connection (RFC 1122, 4.2.2.13). The peer could then discard
        bytes that it has not read yet, such as an unlock request whose response nobody waits for.
        """
        self.is_open = False
        if self._out:
            self._flush()
        self._has_ended = True
        if self._transport is None:
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # with TLS, asyncio sends close_notify and waits for that of the peer
            self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately and discard what is not written yet."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


_OTHER_HOST: Final = "if a broker gives this address, start it with --advertise and a name of its certificate"
_HINTS: Final = {9: "check both clocks", 10: "renew it", 62: _OTHER_HOST, 64: _OTHER_HOST}  # by OpenSSL's X509_V_ERR_*


def _reason(error: Exception, context: ssl.SSLContext | None) -> str:
    """Return the reason why a connection could not be opened, with a hint for frequent causes."""
    text = str(error)
    # The text is checked, because a host name with several addresses raises one error for all of them.
    if f"[Errno {errno.ECONNREFUSED}]" in text:
        return "nothing listens there; start the server, or correct the address"
    if isinstance(error, socket.gaierror):
        return "the host name is not known; correct it"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = _HINTS.get(error.verify_code, "give the authority that signed it (ca_file, --tls-ca)")
        return f"its certificate is not trusted: {error.verify_message}; {hint}"
    return f"{text}; check that the server supports TLS" if context and _is_no_tls(error) else text


def _is_no_tls(error: Exception) -> bool:
    """Return True if a TLS handshake failed as it does with a peer without TLS: by an alert, or because the peer closed."""
    refused = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLCertVerificationError)
    return refused or isinstance(error, ConnectionResetError | ConnectionAbortedError)


def _complete(future: asyncio.Future[Frame], answer: Frame | Exception) -> None:
    if future.done():  # the caller has cancelled the future
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Connections:
    """The open connections by address. Each is opened when it is first needed."""

    def __init__(
        self,
        access: Access,
        on_request: OnRequest,
        on_lost: Callable[[Connection], None],
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._access = access
        self._limits = limits
        access.check_files()
        self._on_request = on_request
        self._on_lost = on_lost
        self._open: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._opened_s: dict[str, float] = {}
        self.home = LoopAffinity()
        self._is_closed = False
        self._all_closed = asyncio.Event()

    def find(self, address: str) -> Connection | None:
        """Return the open connection, or None."""
        return self._open.get(address)

    async def get(self, address: str) -> Connection:
        """Return the connection, opened if necessary.

        Raises ConnectionFailed, and ConfigError in another event loop or process than the client's.
        """
        self.home.enter()
        connection = self._open.get(address)
        return connection if connection is not None else await asyncio.shield(self.open(address))

    def open(self, address: str) -> asyncio.Task[Connection]:
        """Return the task that opens the connection, which runs to its end even if no caller waits for it."""
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.create_task(self._connect(address), name=f"connect {address}")
            self._opening[address] = opening
            opening.add_done_callback(lambda task: self._opened(address, task))
        return opening

    def _opened(self, address: str, task: asyncio.Task[Connection]) -> None:
        self._opening.pop(address, None)
        if not task.cancelled():
            task.exception()  # the caller that waits for the connection raises the exception

    async def _connect(self, address: str) -> Connection:
        if self._is_closed:
            raise ConnectionFailed("the client is closed")
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        # A load balancer without a server accepts connections and closes them immediately. Without this pause, the client
        # would reopen them in a busy loop.
        due_s = self._opened_s.get(address, -math.inf) + self._limits.reconnect_s
        await asyncio.sleep(max(due_s - loop.time(), 0.0))
        context = self._access.ssl_context
        name = host.strip("[]")
        fault = ConnectionFailed(f"cannot connect to {address}: the host name has no address")
        for one in await self._addresses(address, name, port):
            try:
                async with running_timeout(CONNECT_TIMEOUT_S):
                    _, connection = await loop.create_connection(
                        lambda: Connection(address, self._access, self._on_request, self._lost, self._limits),
                        one,
                        int(port),
                        ssl=context,
                        server_hostname=name if context else None,
                    )
            except TimeoutError:
                fault = ConnectionFailed(f"{address} did not accept a connection within {CONNECT_TIMEOUT_S} s")
            except (OSError, ValueError, OverflowError) as error:  # OverflowError for a port over 65535
                fault = ConnectionFailed(f"cannot connect to {address}: {_reason(error, context)}")
            else:
                break
        else:
            raise fault
        self._opened_s[address] = loop.time()
        if not connection.is_open:  # `_lost` was called before this, so nothing would remove it from `_open`
            raise ConnectionFailed(f"{address} closed the connection immediately")
        self._open[address] = connection
        return connection

    async def _addresses(self, address: str, name: str, port: str) -> list[str]:
        """Return the addresses of a host name that are tried. Raises ConnectionFailed if they cannot be looked up."""
        with suppress(ValueError):
            return [str(ip_address(name))]
        try:
            async with running_timeout(self._limits.resolve_timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise ConnectionFailed(
                f"the address of {name} was not found within {self._limits.resolve_timeout_s} s; check the name resolution "
                "(DNS) of this machine"
            ) from None
        except (OSError, ValueError, OverflowError) as error:
            raise ConnectionFailed(f"cannot connect to {address}: {_reason(error, None)}") from None
        return list(dict.fromkeys(str(place[0]) for *_, place in found))[:MAX_CONNECT_ADDRESSES]

    def _lost(self, connection: Connection) -> None:
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]
        if not self._open:
            self._all_closed.set()
        if not self._is_closed:
            self._on_lost(connection)

    async def close(self) -> None:
        self._is_closed = True
        self._all_closed.clear()
        for task in list(self._opening.values()):
            task.cancel()
        for connection in list(self._open.values()):
            connection.close()
        try:
            if self._open:
                with suppress(TimeoutError):
                    async with running_timeout(self._limits.close_timeout_s):
                        await self._all_closed.wait()
        finally:  # even if cancelled
            for connection in list(self._open.values()):
                connection.abort()
        if self._open:
            await self._all_closed.wait()


# ------------------------------------------------------------------------------
# A client's credentials and connection settings: TLS, signatures of Apache's ACL, the encoding of headers.


Encoding = Literal["auto", "json", "rocketmq"]
ENCODINGS: Final[Mapping[str, int]] = {"auto": JSON, "json": JSON, "rocketmq": ROCKETMQ}


@dataclass(frozen=True)
class Access:
    """The account and TLS settings of a client. Producer, Consumer and AdminClient use the same class.

    - `access_key`, `secret_key`, `security_token`: the account that signs requests, as Apache's AclClientRPCHook does.
      Over TLS, and with `encoding="auto"`, a Rocketlet broker authenticates the connection once instead.
    - `tls`: True to encrypt connections.
    - `ca_file`: PEM file of the certificate authorities to trust. Default: those of the system.
    - `verify_tls`: False to accept any certificate of the server.
    - `cert_file`, `key_file`: PEM files of this client's own certificate and its key, for servers that require one.
    - `encoding`: encoding of headers. "auto" is JSON, or MessagePack once a Rocketlet server has responded in it.

    Raises ConfigError for conflicting values. Files are read when a client is created with these settings, which raises
    ConfigError for files that cannot be used. Files that have changed are read again when a connection is opened; if they
    cannot be used then, the client logs `tls_files_not_reloaded` and uses their previous contents.
    """

    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str | None = None
    verify_tls: bool = True
    cert_file: str | None = None
    key_file: str | None = None
    encoding: Encoding = "auto"

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError("access_key, secret_key: only one of them is given; give both or neither")
        if self.encoding not in ENCODINGS:
            raise ConfigError(f"encoding: expected one of {', '.join(ENCODINGS)}, got {self.encoding!r}")
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError("tls: certificates are given, but TLS is off; turn it on")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file: a key without a certificate; give cert_file, too")

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached objects that cannot be pickled, so that Access can be sent to other processes."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_tls", "_signer")}

    @property
    def signs(self) -> bool:
        return bool(self.access_key)

    def check_files(self) -> None:
        """Raise ConfigError if a TLS file cannot be used."""
        _ = self.ssl_context

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context of the present files; None without TLS. Raises ConfigError if a file cannot be used and no earlier
        contents of the files could."""
        return self._tls.context() if self.tls else None

    @cached_property
    def _tls(self) -> _TlsFiles:
        return _TlsFiles(self)

    @cached_property
    def _signer(self) -> Signer:
        return Signer(self.secret_key)

    def signed(self, ext: Ext, body: bytes) -> Ext:
        """Return the header fields together with the access key and the signature of fields and body."""
        fields = {**ext, ACCESS_KEY: self.access_key}
        if self.security_token:
            fields[SECURITY_TOKEN] = self.security_token
        fields[SIGNATURE] = self._signer.signature(fields, body)
        return fields


class _TlsFiles:
    """The TLS context of an `Access`, which is created again when one of the files has changed."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._paths = {
            name: path
            for name in ("ca_file", "cert_file", "key_file")
            if (path := cast("str | None", getattr(access, name)))
        }
        self._versions: list[tuple[int, int, int] | None] = []
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        versions = [_version_of(path) for path in self._paths.values()]  # before the files are read
        if self._context is None or versions != self._versions:
            try:
                self._context = self._read()
            except ConfigError as error:
                if self._context is None:
                    raise
                log.warning("tls_files_not_reloaded", reason=str(error), hint="the client uses their previous contents")
            self._versions = versions
        return self._context

    def _read(self) -> ssl.SSLContext:
        for name, path in self._paths.items():
            if not os.access(path, os.R_OK):
                raise ConfigError(f"the TLS files cannot be used: {name}: {path} does not exist or is not readable")
        try:
            for path in self._paths.values():
                check_file(path, MAX_TLS_FILE_BYTES)
            context = ssl.create_default_context(cafile=self._access.ca_file)
            if not self._access.verify_tls:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self._access.cert_file:
                context.load_cert_chain(self._access.cert_file, self._access.key_file, _refuse_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the TLS files cannot be used: {error}") from None
        return context


def _version_of(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes if the file is rewritten or replaced; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _refuse_password() -> str:
    """Raise ConfigError for an encrypted key. Otherwise OpenSSL would prompt for the password and block the program."""
    raise ConfigError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")


# ------------------------------------------------------------------------------
# Decodes servers' responses. A response that cannot be decoded raises a RocketletError, like every other failure.


T = TypeVar("T")
H = TypeVar("H", bound=tuple[Any, ...])


def body_of(answer: Frame, decode: Callable[[bytes], T]) -> T:
    """Decode the body of a response. Raises AnswerUnreadable."""
    try:
        return decode(answer.body)
    except (BodyError, MessageError) as error:
        raise AnswerUnreadable(str(error)) from error


def header_of(answer: Frame, kind: type[H]) -> H:
    """Decode the header of a response. Raises AnswerUnreadable."""
    try:
        return read(kind, answer.ext)
    except HeaderError as error:
        raise AnswerUnreadable(f"the response cannot be decoded: {error}") from error


# ------------------------------------------------------------------------------
# A timeout that counts only the time for which the event loop runs.
#
# A loop runs its timers before it reads its sockets. After the loop was blocked (by a handler, or on an overloaded
# machine), a plain timeout would therefore fail requests whose responses are already in the socket.


_LONGEST_S: Final = 1e9  # replaces an infinite timeout, which has no number of ticks


@asynccontextmanager
async def running_timeout(timeout_s: float) -> AsyncIterator[None]:
    """Return a context manager like `asyncio.timeout`, which does not count time for which the loop was blocked.

    The timeout counts ticks of the loop, and a late tick counts as one. There are at least two ticks, so that the loop
    reads its sockets between them.
    """
    loop = asyncio.get_running_loop()
    timeout_s = min(timeout_s, _LONGEST_S)
    left = max(2, math.ceil(timeout_s / TIMEOUT_TICK_S))
    tick_s = timeout_s / left
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(tick_s, tick)
        else:
            timeout.reschedule(loop.time())

    timer = loop.call_later(tick_s, tick)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        timer.cancel()


# ------------------------------------------------------------------------------
# The process in which a client was created and the event loop in which it was started. A client may be used only in
# both.
#
# A client's sockets, timers and futures belong to that process and loop. In another one, the client could wait forever or
# lose responses. Besides, members that were created before a fork would have the same client id, by which brokers identify
# the owner of a queue.


_process = object()
"""A new object in each process, so a fork is detected by identity, without a system call. Before Python 3.12
`get_running_loop` needs one."""


def _renew_process() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_renew_process)


class LoopAffinity:
    """Binds a client to a process and an event loop.

    `begin` binds it to the running loop, and raises ConfigError in another process than the one that created the
    client. `check` raises ConfigError if a client that is bound is used in another process or loop. `enter` does
    either.
    """

    __slots__ = ("_loop", "_pid", "_process", "_thread")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process = _process
        self._thread = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        if os.getpid() != self._pid:
            raise self._error()
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()

    def enter(self) -> None:
        if self._loop is None:
            self.begin()
        else:
            self.check()

    def check(self) -> None:
        loop = self._loop
        if loop is None or (loop.is_running() and get_ident() == self._thread and self._process is _process):
            return  # a thread runs one loop at a time, so the thread's id identifies the running loop
        if asyncio.get_running_loop() is not loop:
            raise self._error()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Schedule a call in the client's loop, from any thread. Do nothing once the loop is closed, or in a forked
        process."""
        if self._loop is not None and self._process is _process:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(action)

    def _error(self) -> ConfigError:
        if os.getpid() != self._pid:
            return ConfigError(
                f"this client was created in process {self._pid} and is used in process {os.getpid()}; "
                "create a client in each process, after the fork"
            )
        return ConfigError(
            "this client was started in another event loop; create a client in each loop, or call it with "
            "asyncio.run_coroutine_threadsafe"
        )


# ------------------------------------------------------------------------------
# The end of background tasks.


def _do_nothing() -> None: ...


class KeptTask:
    """A background task that runs until its work returns or `cancel` is called. If it fails, or if other code cancels it, for
    example together with all tasks of the event loop, it is replaced after `restart_s`, unless the loop has ended.

    Attributes:
        task: the current task.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, restart_s: float) -> None:
        self._work = work
        self._name = name
        self._restart_s = restart_s
        self._restart: asyncio.TimerHandle | None = None
        self._is_cancelled = False
        self._start()

    def _start(self) -> None:
        self._restart = None
        self.task = asyncio.create_task(self._work(), name=self._name)
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task_failed", task=self._name, exc_info=error)
        if not self._is_cancelled and (task.cancelled() or error is not None):
            self._restart = task.get_loop().call_later(self._restart_s, self._replace)

    def _replace(self) -> None:
        try:  # `asyncio.run` cancels all tasks and then waits for threads, which a loop that ends refuses
            self.task.get_loop().run_in_executor(None, _do_nothing)
        except RuntimeError:
            return
        log.warning("task_replaced", task=self._name, hint="it failed, or code outside of Rocketlet cancelled it")
        self._start()

    def cancel(self) -> None:
        self._is_cancelled = True
        self.task.cancel()
        if self._restart is not None:
            self._restart.cancel()


async def cancelled(tasks: Iterable[asyncio.Task[Any] | KeptTask]) -> None:
    """Cancel tasks and wait until they have ended. Ignore their exceptions."""
    ending = list(tasks)
    for item in ending:
        item.cancel()
    waited = (item.task if isinstance(item, KeptTask) else item for item in ending)
    await asyncio.gather(*waited, return_exceptions=True)


async def finished(tasks: Set[asyncio.Task[Any]], timeout_s: float) -> None:
    """Wait up to `timeout_s` for tasks, then cancel those that are still running.

    The tasks run user code, which may itself call this function, so the calling task is not waited for.
    """
    others = tasks - {asyncio.current_task()}
    if not others:
        return
    try:
        await asyncio.wait(others, timeout=timeout_s)
    finally:  # even if this is cancelled
        for task in others:
            task.cancel()


# ------------------------------------------------------------------------------
# Many requests, of which a limited number are in flight.


R = TypeVar("R")


async def gather_limited(call: Callable[[T], Awaitable[R]], items: Iterable[T], limit: int = ASKED_AT_ONCE) -> list[R]:
    """Call a function for each item, with at most `limit` calls concurrently. Return the results in the order of the items.

    The first exception is raised and cancels the other calls.
    """
    slots = asyncio.Semaphore(limit)

    async def one(item: T) -> R:
        async with slots:
            return await call(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
