"""One connection to a broker or name server: requests, responses, credentials, TLS, and the event loop that owns it."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
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
    MAX_TLS_FILE_BYTES,
    REQUEST_TIMEOUT_S,
    TIMEOUT_TICK_S,
    ClientLimits,
)
from ..errors import AnswerUnreadable, BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, get_logger

log = get_logger("rocketlet.connection")


# ------------------------------------------------------------------------------
# One socket to a name server or broker, and the set of them.
#
# Requests written within one turn of the event loop leave in one write. An answer finds its request by number;
# requests without an answer in time are swept. Unless told otherwise, the connection opens in JSON, asks for
# MessagePack in each request, and switches when the peer has answered in it: an Apache peer never does.


_PYTHON = int(Language.PYTHON)
_JOINED_BYTES = 16_384  # larger data is not copied into one piece

Answered = Callable[[Frame | Exception], None]
OnRequest = Callable[["Connection", Frame], None]


class Connection(asyncio.Protocol):
    """`call` answers by a callback, `request` by a future that raises for error codes. It `is_writable` while the peer takes
    more bytes."""

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
        self._stood_s = 0.0
        self._was_heard = (
            True  # the peer, since `_heard_s`; it is looked at now and then, so that reading costs nothing
        )
        self._heard_s = 0.0
        self._out: list[bytes] = []
        self._answered_out = self._out
        self._answered_bytes = 0  # its size
        self._is_flush_due = False
        self._before_flush: deque[Callable[[], None]] = deque()
        self._has_ended = False  # nothing is written any more
        self.is_writable = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._when_writable: list[Callable[[], None]] = []

    @property
    def speaks_msgpack(self) -> bool:
        """Whether the peer is Rocketlet's; known after the first answer."""
        return self._serialize_type == MSGPACK

    def running_s(self) -> float:
        """The loop's time without its standstills, by which requests are timed."""
        return self.loop.time() - self._stood_s

    # Requests

    def call(self, code: int, ext: Ext, body: bytes, answered: Answered, due_s: float) -> None:
        """Sends a request; `answered` gets the response, whatever its code, or ConnectionFailed, or RequestTimeout once
        `running_s` is `due_s`.

        Raises ConfigError for a number that no request can hold."""
        if not self.is_open or len(self._pending) >= self._max_in_flight:
            reason = "is closed" if not self.is_open else f"has {self._max_in_flight} requests in flight"
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
            raise ConfigError(f"{request_name(code)}: a number is larger than 64 bits") from None
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

    def ask(
        self, code: int, ext: Ext, body: bytes = b"", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> asyncio.Future[Frame]:
        """The response, whatever its code. The future raises ConnectionFailed or RequestTimeout."""
        future: asyncio.Future[Frame] = self.loop.create_future()
        self.call(code, ext, body, partial(_settle, future), self.running_s() + timeout_s)
        return future

    def request(
        self, code: int, ext: Ext, body: bytes = b"", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> asyncio.Future[Frame]:
        """The successful response. The future raises BrokerRefused, ConnectionFailed or RequestTimeout."""
        future: asyncio.Future[Frame] = self.loop.create_future()
        self.call(code, ext, body, partial(self._resolve, future, code), self.running_s() + timeout_s)
        return future

    def _resolve(self, future: asyncio.Future[Frame], code: int, answer: Frame | Exception) -> None:
        if isinstance(answer, Frame) and answer.code:
            answer = BrokerRefused(code, answer.code, answer.remark, self.address)
        _settle(future, answer)

    def oneway(self, code: int, ext: Ext, body: bytes = b"") -> None:
        """Sends a request that has no answer. Raises ConnectionFailed if the connection is closed."""
        if not self.is_open:
            raise ConnectionFailed(f"the connection to {self.address} is closed")
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        self._send(self._encoded(code, self._opaque, ext, body, ONEWAY_FLAG))

    @property
    def unwritten(self) -> int:
        """How many requests and answers this turn of the loop has not written yet."""
        return len(self._out)

    def respond(self, request: Frame, code: int = 0, body: bytes = b"", remark: str | None = None) -> None:
        """Answers a request of the broker."""
        answer = Frame(code, request.opaque, {}, body, RESPONSE_FLAG, remark, serialize_type=request.serialize_type)
        data = encode(answer)
        if self._answered_out is not self._out:  # another turn
            self._answered_out, self._answered_bytes = self._out, 0
        self._answered_bytes += len(data)
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if self._answered_bytes + unread > self._limits.max_unread_bytes:
            log.warning("connection_closed_unread", peer=self.address, hint="the broker asks, and does not read")
            self.abort()
            return
        self._send(data)

    async def writable(self) -> None:
        """Returns when the peer takes more bytes, or the connection is gone."""
        await self._writable.wait()

    def when_writable(self, action: Callable[[], None]) -> None:
        """Calls `action` once, as soon as the peer takes more bytes or the connection is gone."""
        self._when_writable.append(action)

    def _send(self, data: bytes) -> None:
        if not self._is_flush_due:
            self._flush_soon()
        self._out.append(data)

    def _flush_soon(self) -> None:
        self._is_flush_due = True
        self.loop.call_soon(self._flush)

    def before_flush(self, action: Callable[[], None]) -> None:
        """Calls `action` at the end of this turn of the loop, before its requests are written; it may add some."""
        if not self._is_flush_due:
            self._flush_soon()
        self._before_flush.append(action)

    def _flush(self) -> None:
        try:
            while self._before_flush:
                self._before_flush.popleft()()
        finally:  # else nothing would be written any more
            self._is_flush_due = False
            if self._out:
                self.write_now()

    def write_now(self) -> None:
        """Writes what this turn has asked for so far."""
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
        if self._was_heard:
            self._was_heard, self._heard_s = False, now_s - self._stood_s
        self._sweep_due_s = now_s + self._limits.deadline_sweep_s
        self._sweep = self.loop.call_later(self._limits.deadline_sweep_s, self._sweep_deadlines)

    def _sweep_deadlines(self) -> None:
        now_s = self.loop.time()
        # Time for which this process stood still is nobody's delay. A loop runs its timers before it reads, so answers that
        # came meanwhile wait in the socket.
        late_s = now_s - self._sweep_due_s
        if late_s > self._limits.deadline_sweep_s:
            self._stood_s += late_s
        self._give_up(now_s - self._stood_s)
        self._sweep = None
        if self._pending and self.is_open:
            self._sweep_later()

    def _give_up(self, now_s: float) -> None:
        """Ends requests that were not answered in time, by the time that this process ran."""
        late = [item for item in self._pending.items() if item[1][1] <= now_s]
        for opaque, (answered, _, code) in late:
            del self._pending[opaque]
            answered(RequestTimeout(f"{request_name(code)} was not answered in time by {self.address}"))
        silent_s = now_s - self._heard_s
        if late and silent_s > self._limits.silent_s and not self._was_heard:
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
        self._was_heard = True
        try:
            frames = self._reader.feed(data)
        except FrameError as error:
            log.error("connection_closed_not_a_frame", peer=self.address, reason=str(error))
            self.abort()
            return
        for frame in frames:
            _, opaque, _, _, flag, _, _, _, serialize_type = frame
            if not flag & RESPONSE_FLAG:
                self._on_request(self, frame)
                if not self.is_open:  # it asked too much
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
            self._flush_soon()  # behind all callers that the answers wake: their requests leave in the turn in which they run

    def _identify(self) -> None:
        """With TLS, proves once to a Rocketlet broker whose connection this is; the proof is worth nothing elsewhere. Other
        servers get signatures as before."""
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
        self._on_lost(self)  # first, so that callers that wait for an answer find things as they are
        self.resume_writing()
        pending, self._pending = self._pending, {}
        for answered, _, code in pending.values():
            answered(ConnectionFailed(f"{self.address} closed the connection before it answered {request_name(code)}"))

    def close(self) -> None:
        """Ends our side, and reads on until the peer hangs up; then asyncio closes. `abort` does not wait for that.

        A socket that is closed while answers come resets the connection (RFC 1122, 4.2.2.13). A peer that writes then gives
        it up, and unread bytes are lost: an unlock, for which nobody waits."""
        self.is_open = False
        if self._out:
            self._flush()
        self._has_ended = True
        if self._transport is None:
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS: asyncio says goodbye, and waits for the peer's
            self._transport.close()

    def abort(self) -> None:
        """Closes at once, whatever has not left yet."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


_OTHER_HOST: Final = "if a broker gives this address, start it with --advertise and a name of its certificate"
_CURES: Final = {9: "check both clocks", 10: "renew it", 62: _OTHER_HOST, 64: _OTHER_HOST}  # OpenSSL's X509_V_ERR_*


def _reason(error: Exception, context: ssl.SSLContext | None) -> str:
    """Why no connection was made, in words that say what to look at."""
    text = str(error)
    if (
        f"[Errno {errno.ECONNREFUSED}]" in text
    ):  # in the text, because a name with several addresses has one error for all
        return "nothing listens there; start the server, or correct the address"
    if isinstance(error, socket.gaierror):
        return "the host name is not known; correct it"
    if isinstance(error, ssl.SSLCertVerificationError):
        cure = _CURES.get(error.verify_code, "name who signed it (ca_file, --tls-ca)")
        return f"its certificate is not trusted: {error.verify_message}; {cure}"
    return f"{text}; does it take TLS?" if context and _is_no_tls(error) else text


def _is_no_tls(error: Exception) -> bool:
    """Whether a handshake ended as it does with a peer that speaks plain text only: by an alert, or by a hang-up."""
    refused = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLCertVerificationError)
    return refused or isinstance(error, ConnectionResetError | ConnectionAbortedError)


def _settle(future: asyncio.Future[Frame], answer: Frame | Exception) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Connections:
    """The open connections by address; each is opened when it is first asked for."""

    def __init__(
        self,
        access: Access,
        on_request: OnRequest,
        on_lost: Callable[[Connection], None],
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._access = access
        self._limits = limits
        self._ssl = access.ssl_context
        self._on_request = on_request
        self._on_lost = on_lost
        self._open: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._opened_s: dict[str, float] = {}
        self.home = LoopAffinity()
        self._is_closed = False
        self._all_closed = asyncio.Event()

    def find(self, address: str) -> Connection | None:
        """The open connection, if there is one."""
        return self._open.get(address)

    async def get(self, address: str) -> Connection:
        """The open connection, opened if need be. Raises ConnectionFailed, and ConfigError away from home."""
        self.home.enter()
        connection = self._open.get(address)
        if connection is not None:
            return connection
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.create_task(self._connect(address), name=f"connect {address}")
            self._opening[address] = opening
            opening.add_done_callback(lambda task: self._opened(address, task))
        return await asyncio.shield(opening)

    def _opened(self, address: str, task: asyncio.Task[Connection]) -> None:
        self._opening.pop(address, None)
        if not task.cancelled():
            task.exception()  # the waiting caller raises it

    async def _connect(self, address: str) -> Connection:
        if self._is_closed:
            raise ConnectionFailed("the client is closed")
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        # A load balancer whose server is away takes each connection and hangs up; the end of one is a reason to open the
        # next.
        due_s = self._opened_s.get(address, -math.inf) + self._limits.reconnect_s
        await asyncio.sleep(max(due_s - loop.time(), 0.0))
        try:
            async with running_timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(address, self._access, self._on_request, self._lost, self._limits),
                    host.strip("[]"),
                    int(port),
                    ssl=self._ssl,
                )
        except TimeoutError:
            raise ConnectionFailed(f"{address} did not accept a connection in {CONNECT_TIMEOUT_S} s") from None
        except (OSError, ValueError, OverflowError) as error:  # OverflowError: of a port that is none
            raise ConnectionFailed(f"cannot connect to {address}: {_reason(error, self._ssl)}") from None
        self._opened_s[address] = loop.time()
        if not connection.is_open:  # kept, it would never be replaced: its end was told before it was known here
            raise ConnectionFailed(f"{address} closed the connection immediately")
        self._open[address] = connection
        return connection

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
        finally:  # also if cancelled
            for connection in list(self._open.values()):
                connection.abort()
        if self._open:
            await self._all_closed.wait()


# ------------------------------------------------------------------------------
# Opens a client's sockets and proves its account: TLS, Apache's ACL, the encoding of headers.


Encoding = Literal["auto", "json", "rocketmq"]
ENCODINGS: Final[Mapping[str, int]] = {"auto": JSON, "json": JSON, "rocketmq": ROCKETMQ}


@dataclass(frozen=True)
class Access:
    """A client's account, and its settings of TLS. The same value serves Producer, Consumer and AdminClient.

    - `access_key`, `secret_key`, `security_token`: sign every request with them (as AclClientRPCHook of Apache's client).
    - `tls`: encrypt connections.
    - `ca_file`: the certificate authorities to trust, a PEM file. Default: the system's.
    - `verify_tls`: False accepts any certificate.
    - `cert_file`, `key_file`: this client's own certificate, for servers that ask for one.
    - `encoding`: of headers. `auto` is JSON, and MessagePack with Rocketlet's brokers.

    Raises ConfigError for values that contradict each other, and for files that cannot be read.
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
            raise ConfigError("access_key and secret_key are given together, or neither is: one of them is missing")
        if self.encoding not in ENCODINGS:
            raise ConfigError(f"encoding is {self.encoding!r}; allowed: {', '.join(ENCODINGS)}")
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError("certificates are given, but tls is off; set tls as well")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file is given, cert_file is not")

    def __getstate__(self) -> dict[str, object]:
        """Leaves out the parts that belong to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("ssl_context", "_signer")}

    @property
    def signs(self) -> bool:
        return bool(self.access_key)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The settings of TLS; None without TLS. Raises ConfigError."""
        if not self.tls:
            return None
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"the TLS files cannot be used: {name} {path} is not there, or may not be read")
        try:
            for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
                check_file(path, MAX_TLS_FILE_BYTES)
            context = ssl.create_default_context(cafile=self.ca_file)
            if not self.verify_tls:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file, _refuse_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the TLS files cannot be used: {error}") from None
        return context

    @cached_property
    def _signer(self) -> Signer:
        return Signer(self.secret_key)

    def signed(self, ext: Ext, body: bytes) -> Ext:
        """The header fields with the access key and the signature over them and the body."""
        fields = {**ext, ACCESS_KEY: self.access_key}
        if self.security_token:
            fields[SECURITY_TOKEN] = self.security_token
        fields[SIGNATURE] = self._signer.signature(fields, body)
        return fields


def _refuse_password() -> str:
    """OpenSSL would ask for it on the terminal, and the program would stand."""
    raise ConfigError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")


# ------------------------------------------------------------------------------
# Reads servers' answers. An unreadable one raises an error of the client's tree, like every other failure.


T = TypeVar("T")
H = TypeVar("H", bound=tuple[Any, ...])


def body_of(answer: Frame, decode: Callable[[bytes], T]) -> T:
    """Raises AnswerUnreadable."""
    try:
        return decode(answer.body)
    except (BodyError, MessageError) as error:
        raise AnswerUnreadable(str(error)) from error


def header_of(answer: Frame, kind: type[H]) -> H:
    """Raises AnswerUnreadable."""
    try:
        return read(kind, answer.ext)
    except HeaderError as error:
        raise AnswerUnreadable(f"the answer cannot be read: {error}") from error


# ------------------------------------------------------------------------------
# A timeout that counts the time for which the event loop runs.
#
# A loop runs its timers before it reads its sockets. When the process stood still (a handler blocked, the machine was
# overloaded), a plain timeout would end requests whose answers wait in the socket.


_LONGEST_S: Final = 1e9  # stands for an endless one


@asynccontextmanager
async def running_timeout(timeout_s: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but in ticks: one that comes late counts as one. At least two, with a look at the sockets
    between."""
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
# A client's home: the process that made it, and the event loop that it was started in.
#
# Its sockets, timers and futures belong to both. Used from elsewhere it would wait for ever, or lose answers; and
# members that were made before a fork would all have one client id, by which brokers tell who owns a queue.


_process = object()
"""Another one in each process: to compare it asks nobody, and before Python 3.12 `get_running_loop` asks the kernel."""


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_forked)


class LoopAffinity:
    """`begin` says that the client lives here from now on, `check` that it is used where it lives, if it has begun; `enter`
    is the one or the other. All raise ConfigError."""

    __slots__ = ("_loop", "_pid", "_process", "_thread")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._process = _process
        self._thread = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        if os.getpid() != self._pid:
            raise self._elsewhere()
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
            return  # a thread runs one loop at a time
        if asyncio.get_running_loop() is not loop:
            raise self._elsewhere()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Calls from any thread. Does nothing once the loop is closed, or in a fork."""
        if self._loop is not None and self._process is _process:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(action)

    def _elsewhere(self) -> ConfigError:
        if os.getpid() != self._pid:
            return ConfigError(
                f"this client was made in process {self._pid} and is used in {os.getpid()}; "
                "make one in each process, after the fork"
            )
        return ConfigError(
            "this client was started in another event loop; make one in each loop, or reach the other by "
            "asyncio.run_coroutine_threadsafe"
        )


# ------------------------------------------------------------------------------
# How tasks in the background end.


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks; returns when they have ended, whatever they raised."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def finished(tasks: Set[asyncio.Task[Any]], timeout_s: float) -> None:
    """Waits for tasks, and cancels what takes longer. They run code of the user, which may call this and wait for it: so not
    for the task that calls this."""
    others = tasks - {asyncio.current_task()}
    if not others:
        return
    try:
        await asyncio.wait(others, timeout=timeout_s)
    finally:  # also when this is cancelled
        for task in others:
            task.cancel()


# ------------------------------------------------------------------------------
# Many questions, some of them at once.


R = TypeVar("R")


async def gather_limited(ask: Callable[[T], Awaitable[R]], items: Iterable[T], at_once: int = ASKED_AT_ONCE) -> list[R]:
    """The answers, in the order of the items. The first that fails ends the others."""
    places = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with places:
            return await ask(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
