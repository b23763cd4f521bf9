"""Listening sockets: accepts connections, detects TLS and the protocol by the first bytes, and runs the servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar, cast

import structlog

from ..host.address import is_loopback
from ..protocol.bodies import SLICE, Work
from .access import Acl
from .broker import BrokerController
from .config import (
    ADDRESS_SHARE,
    DRAIN_TIMEOUT_S,
    IDLE_LIMIT_S,
    LIMITS,
    LISTEN_BACKLOG,
    MAX_HELLO_BYTES,
    MEMORY_SWEEP_S,
    RELOAD_INTERVAL_S,
    SWEEP_INTERVAL_S,
    TLS_HANDSHAKE_TIMEOUT_S,
    TLS_SHUTDOWN_TIMEOUT_S,
    VIP_DISTANCE,
    Limits,
)
from .machine import default_budget, shares
from .memory import Memory
from .nameserver import Routes
from .remoting.connection import RemotingConnection
from .remoting.dispatch import Dispatch
from .runtime.clock import MACHINE
from .runtime.tasks import Tasks
from .runtime.turns import Moment, OnePerIteration, Turns
from .sessions.reports import Reports
from .sessions.session import Session
from .tls import Client, ClientTransport, Tls, TlsRecords

if TYPE_CHECKING:
    from .grpc.server import GrpcServer, ServeCalls
    from .metrics import MetricsPort

log = structlog.get_logger("rocketlet.server")
tls_log = structlog.get_logger("rocketlet.tls")


# ------------------------------------------------------------------------------
# The server of a process: a broker, a name server, or both, on one port.


_HTTP2 = b"P"  # first byte of the HTTP/2 preface; a remoting frame that began with it would exceed the size limit
_NO_GRPC = "a gRPC client connected, and protobuf is missing here: pip install '.[broker]'"


@dataclass(frozen=True, slots=True)
class Listening:
    """The ports and settings by which clients reach a server, and the permissions that clients need.

    Attributes:
        external_port: A second port, for clients outside of the brokers' network; routes that are requested there have the
            external addresses of brokers that have one.
        grpc_port: An additional port for gRPC, which the other ports accept, too.
        tls: TLS for all ports but that of the metrics; None for plain text only.
        acl: Accounts and their permissions; None to accept requests without an account.
        admin_is_local: True to accept administrative requests from this machine only, except those of other brokers.
    """

    host: str = "127.0.0.1"
    port: int = 0
    external_port: int | None = None
    grpc_port: int | None = None
    tls: Tls | None = None
    acl: Acl | None = None
    admin_is_local: bool = False


S = TypeVar("S")

Serve = Callable[[RemotingConnection], None]


def _untapped(serve: S) -> S:
    return serve


class Taps(NamedTuple):
    """Hooks with which the test kit sees and delays requests.

    Attributes:
        connection_type: The class of client connections.
        serve: Wraps the function that serves remoting requests.
        calls: Wraps the function that serves gRPC calls.
    """

    connection_type: type[RemotingConnection] = RemotingConnection
    serve: Callable[[Serve], Serve] = _untapped
    calls: Callable[[ServeCalls], ServeCalls] = _untapped


_NO_TAPS: Final = Taps()


class Server:
    """A context manager: listens until the block ends, then closes the connections when their responses are written, or after
    DRAIN_TIMEOUT_S."""

    def __init__(
        self, listening: Listening, *, broker: BrokerController | None, routes: Routes | None, taps: Taps = _NO_TAPS
    ) -> None:
        acl = listening.acl
        self._host = listening.host
        self._port = listening.port
        self._external_port = listening.external_port
        self._grpc_port = listening.grpc_port
        self._grpc: asyncio.Server | None = None
        self._loading: asyncio.Task[None] | None = None
        self._tls = listening.tls or Tls()
        self._acl = acl
        self._policy = acl.file.policy if acl is not None else None
        self._external: asyncio.Server | None = None
        self._vip: asyncio.Server | None = None
        self._metrics: MetricsPort | None = None
        self._broker = broker
        served = broker if broker is not None else routes
        if served is None:
            raise ValueError("a server serves a broker, the routes of a name server, or both")
        if broker is not None and broker.name_servers.local is not routes:
            raise ValueError("give the name server's routes to the broker, too: Broker(config, routes)")
        self._routes = routes
        self._connection_type = taps.connection_type
        self._tap_calls = taps.calls
        self._connections: dict[RemotingConnection, None] = {}
        self._last_is_gone: asyncio.Event | None = None  # set to an event when the server closes its connections
        self._server: asyncio.Server | None = None
        self._turns = broker.turns if broker is not None else Turns(limits=served.limits)
        self.handshakes = Handshakes(served.limits)
        dispatch = Dispatch(
            broker, routes, self._turns, acl, admin_is_local=listening.admin_is_local, limits=served.limits
        )
        self.serve = taps.serve(dispatch.serve)
        self.max_connections = shares().connections
        budget = (broker.config.memory_bytes if broker else None) or default_budget()
        self.memory = Memory(budget)
        self.turns = self._turns
        self.moment = Moment()
        self.behind = OnePerIteration()
        self.reports = Reports()
        self._of_address: Counter[str] = Counter()
        self._clock = broker.clock if broker is not None else MACHINE
        self._tasks = Tasks(self._clock)
        self.now_s = self._clock.monotonic_s

    @property
    def connections(self) -> list[RemotingConnection]:
        return list(self._connections)

    @property
    def port(self) -> int:
        """The port that the server listens on, even if port 0 was given."""
        if self._server is None:
            return self._port
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Server:
        try:
            await self._start()
        except BaseException:
            await self._close_listeners()
            raise
        return self

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if not is_loopback(self._host):
            hint = (
                "give --acl, so that only accounts with permission can read, write and administrate"
                if self._acl is None
                else None
            )
            log.warning("listening_to_other_machines", host=self._host, port=self._port, hint=hint)
        self._server = await loop.create_server(self._entrance, self._host, self._port, backlog=LISTEN_BACKLOG)
        if self._external_port is not None:
            self._external = await loop.create_server(
                partial(self._entrance, is_external=True), self._host, self._external_port, backlog=LISTEN_BACKLOG
            )
        if self._grpc_port is not None:
            self._grpc = await loop.create_server(self._entrance, self._host, self._grpc_port, backlog=LISTEN_BACKLOG)
        if self._broker is not None and self._broker.config.vip_channel:
            await self._listen_for_vip()
        if self._broker is not None:
            self._serve_metrics(self._broker)
        self._tasks.every(SWEEP_INTERVAL_S, "sweep", self._close_idle)
        self._tasks.every(RELOAD_INTERVAL_S, "reload", self._reload)
        self._tasks.every(MEMORY_SWEEP_S, "memory", partial(self._turns.do_alone, "memory", self.memory.sweeping))
        if self._broker is not None:
            self._broker.start()
            await self._broker.registration.start()
        self._loading = self._tasks.spawn(_load_grpc_ahead())

    def _serve_metrics(self, broker: BrokerController) -> None:
        config = broker.config
        if config.metrics_port is not None:
            from .metrics import Collector, MetricsPort

            measured = Collector(broker, self.memory, self._connections)
            self._metrics = MetricsPort(measured, config.metrics_host or self._host, config.metrics_port, broker.limits)

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        await self._close_listeners()
        if self._broker is not None:
            await self._broker.registration.stop()
        if self._broker is not None:
            await self._broker.stop()
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            self._last_is_gone = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last_is_gone.wait(), DRAIN_TIMEOUT_S)
        for connection in list(self._connections):
            connection.abort()

    async def _close_listeners(self) -> None:
        for listener in (self._server, self._external, self._grpc, self._vip):
            if listener is not None:
                listener.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        await self._tasks.stop()

    def _entrance(self, *, is_external: bool = False, is_vip: bool = False) -> TlsDetector[RemotingConnection]:
        connection = self._connection_type(self, is_external=is_external, is_vip=is_vip)
        return TlsDetector(self._tls, self.handshakes, self._turns, connection, self._protocol_of)

    @cached_property
    def grpc_server(self) -> GrpcServer | None:
        """The gRPC server; None without the extra `broker`."""
        make_server = load_grpc()
        return make_server(self._broker, self._acl, self._tap_calls) if make_server is not None else None

    def _protocol_of(self, connection: RemotingConnection, first: bytes) -> asyncio.Protocol:
        """Return the protocol for a client's first bytes, which are decrypted if it uses TLS."""
        if not first.startswith(_HTTP2):
            return connection
        if self._loading is not None and not self._loading.done():
            return LazyProtocol(connection, self._loading, partial(self._grpc_protocol, connection))
        return self._grpc_protocol(connection)

    def _grpc_protocol(self, connection: RemotingConnection) -> asyncio.Protocol:
        if self.grpc_server is not None:
            return self.grpc_server.protocol(connection)
        if self._broker is not None:
            self._broker.note_turned_away(connection.address, _NO_GRPC)
        if connection.is_news("grpc_client_refused"):
            log.warning("grpc_client_refused", peer=connection.peer, reason=_NO_GRPC)
        return connection

    async def _listen_for_vip(self) -> None:
        """Listen on the VIP channel (the port minus 2), as Apache's broker does; only log it if that is impossible, for
        example because the port is in use."""
        loop = asyncio.get_running_loop()
        port = int(self._broker.config.address.rpartition(":")[2]) - VIP_DISTANCE if self._broker else 0
        try:
            self._vip = await loop.create_server(
                partial(self._entrance, is_vip=True), self._host, port, backlog=LISTEN_BACKLOG
            )
        except (OSError, OverflowError) as error:
            log.info("vip_channel_off", port=port, reason=str(error))

    @property
    def grpc_port(self) -> int | None:
        """The additional port for gRPC that the server listens on, even if port 0 was given; None without one."""
        return int(self._grpc.sockets[0].getsockname()[1]) if self._grpc else None

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics, even if port 0 was given; None without one."""
        return self._metrics.port if self._metrics else None

    def opened(self, connection: RemotingConnection) -> None:
        fault, limit = self._reason_to_refuse(connection)
        if fault:
            if self._broker is not None:
                self._broker.note_turned_away(connection.address, fault)
            if connection.is_news("connection_refused"):
                log.warning("connection_refused", peer=connection.peer, reason=fault, limit=limit)
            connection.abort()
        self._connections[connection] = None
        self._of_address[connection.address] += 1

    def _reason_to_refuse(self, connection: RemotingConnection) -> tuple[str, int]:
        """Return the reason to refuse a connection, and the limit; an empty reason if it is accepted, which may close another
        connection."""
        if len(self._connections) >= self.max_connections and not self._make_room(connection.address):
            return "too many connections; raise `ulimit -n`, or close idle clients", self.max_connections
        of_address = int(self.max_connections * ADDRESS_SHARE)
        if self._of_address[connection.address] >= of_address and not is_loopback(connection.address):
            return "too many connections of one address", of_address
        return "", 0

    def _make_room(self, newcomer: str) -> bool:
        """Close the longest silent connection of the address with most connections. Return False and close none if that
        address has at most one more than the newcomer's, or if all of its connections are closing."""
        address = max(self._of_address, key=lambda item: self._of_address[item])
        if self._of_address[address] <= self._of_address[newcomer] + 1:
            return False
        found = (item for item in self._connections if item.address == address and not item.is_closed)
        silent = min(found, key=lambda item: item.heard_s, default=None)
        if silent is not None:
            silent.abort()
        return silent is not None

    def closed(self, connection: RemotingConnection) -> None:
        self._connections.pop(connection, None)
        if self._last_is_gone is not None and not self._connections:
            self._last_is_gone.set()
        self.memory.forget(connection)
        self._of_address[connection.address] -= 1
        if self._of_address[connection.address] <= 0:
            del self._of_address[connection.address]
        if self._broker is not None:
            self._turns.call(self._broker.dropped, connection)
        self._free_routes()

    def _free_routes(self) -> None:
        if self._routes is not None and self._routes.has_gone:
            self._turns.do_alone("routes", self._routes.freeing)

    def _reload(self) -> None:
        """Load changed TLS and account files in a thread, so that a slow device does not block the event loop. Apply accounts
        that an earlier call has loaded."""
        self._tls.warn_of_expiry(self._clock.time_ms() / 1000)
        for settings in (self._tls, self._acl):
            if settings is not None and settings.poll():
                self._tasks.spawn(asyncio.to_thread(settings.load))
        if self._acl is not None:
            self._end_outdated_waits(self._acl)

    def _end_outdated_waits(self, acl: Acl) -> None:
        """End held pulls and waiting receives of accounts that have changed, so that their clients retry and are
        authorized again."""
        before, self._policy = self._policy, acl.file.policy
        if self._broker is not None and before is not None and before is not self._policy:
            changed = [session for session in self._connections if acl.has_changed(session, before)]
            self._turns.do(self._broker.held_pulls.releasing(changed))
            self._turns.do(self._broker.pops.releasing(partial(acl.has_changed, before=before)))

    def _close_idle(self) -> None:
        limit = self.now_s() - IDLE_LIMIT_S
        idle = [connection for connection in self._connections if connection.active_s < limit]
        silent = self._routes.expire() if self._routes is not None else []
        self._turns.do(_aborting({*idle, *silent}))
        self._free_routes()


async def _load_grpc_ahead() -> None:
    await asyncio.to_thread(load_grpc)


def load_grpc() -> type[GrpcServer] | None:
    """Return the class of the gRPC server; None without the extra `broker`.

    The import of the gRPC server takes long, so a thread does it after the server has started. gRPC clients that connect
    before its end wait (`LazyProtocol`).
    """
    try:
        from .grpc.server import GrpcServer
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "google":
            raise
        return None
    return GrpcServer


def _aborting(connections: set[Session]) -> Work[None]:
    """Abort the connections, because a connection whose client does not read would never finish a normal close."""
    for number, connection in enumerate(connections, 1):
        connection.abort()
        if number % SLICE == 0:
            yield


# ------------------------------------------------------------------------------
# One port for TLS and plain text, which the first byte of a connection distinguishes.
#
# A TLS client starts with the byte 22, a handshake record (RFC 8446, 5.1). A plain remoting frame starts with the high byte
# of its length, which is 0 or 1 for every allowed size, and HTTP/2 starts with a letter. So one port serves both, like
# Apache's (NettyRemotingServer.HandshakeHandler):
#
# 1. `TlsDetector` is the protocol of a new socket until its first bytes have arrived.
# 2. Plain text: the `RemotingConnection` or gRPC connection replaces it, without any cost from then on.
# 3. TLS: the handshake waits for its turn (`Handshakes`). Then `loop.start_tls` inserts its own protocol at the socket, and
#    `TlsRecords` is inserted before that. After the handshake, the connection writes to the encrypted transport.
# 4. A client that the TLS mode does not allow is refused: a remoting request by a response with the reason, a TLS client by
#    an alert.


_HANDSHAKE: Final = 22
_NO_TLS_HERE: Final = bytes((21, 3, 1, 0, 2, 2, 40))  # a fatal alert, handshake_failure (RFC 5246, 7.2)
_NO_TLS_REASON: Final = (
    "a TLS client connected to a port without TLS; give --tls-cert and --tls-key, or turn TLS off in the client"
)
_NO_PLAIN_REMARK: Final = (
    "this port accepts TLS connections only; turn TLS on in the client "
    "(rocketlet: Access(tls=True), --tls; Java: -Dtls.enable=true)"
)


C = TypeVar("C", bound=Client)


class TlsDetector(asyncio.Protocol, Generic[C]):
    """A socket's protocol until the client's protocol is known; from the start of a TLS handshake to the first decrypted
    bytes, the protocol above TLS.

    Args:
        turns: Schedules the work of each client address.
        make_protocol: Returns the client's protocol for its first bytes.
    """

    __slots__ = (
        "_early",
        "_handshakes",
        "_is_lost",
        "_is_refused",
        "_make_protocol",
        "_tls",
        "_transport",
        "_turns",
        "connection",
    )

    def __init__(
        self,
        tls: Tls,
        handshakes: Handshakes,
        turns: Turns,
        connection: C,
        make_protocol: Callable[[C, bytes], asyncio.Protocol],
    ) -> None:
        self._tls = tls
        self._make_protocol = make_protocol
        self._handshakes = handshakes
        self._turns = turns
        self.connection = connection
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] | None = None
        self._is_lost = self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._early is not None:  # the client sent its first request with the end of its handshake
            self._early.append(data)
            self.connection.read_bytes += len(data)  # so that `TlsRecords` does not count these records as empty
        elif self.connection.is_encrypted:
            self._hand_over(data)
        elif data[0] != _HANDSHAKE:
            self._accept_plain(data)
        elif not self._tls.is_offered:
            self._refuse_tls()
        else:
            self._accept_tls(data)

    def _accept_plain(self, data: bytes) -> None:
        assert self._transport is not None
        if self._tls.takes_plain:
            self._hand_over(data)
            return
        self._tls.refused += 1
        self._tls.note_turned_away(self.connection.peer, _NO_PLAIN_REMARK)
        if self._tls.reports.is_due(self.connection.peer, _NO_PLAIN_REMARK):
            tls_log.warning("plain_client_refused", peer=self.connection.peer, reason=_NO_PLAIN_REMARK)
        self._transport.write(self.connection.plain_refusal(data, _NO_PLAIN_REMARK))
        self._transport.close()

    def _hand_over(self, data: bytes) -> None:
        """Set the client's protocol, which its first bytes show, and pass the bytes to it."""
        assert self._transport is not None
        protocol = self._make_protocol(self.connection, data)
        self._transport.set_protocol(protocol)
        protocol.data_received(data)

    def _accept_tls(self, first: bytes) -> None:
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
            tls_log.warning("tls_client_refused", peer=self.connection.peer, reason=_NO_TLS_REASON)
        self._transport.write(_NO_TLS_HERE)
        self._transport.close()

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def is_gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def shake_hands(self, first: bytes) -> None:
        """Make the handshake, and return when the connection is encrypted, or has failed and is aborted."""
        try:
            await self._encrypt(first)
            self._tls.handshakes += 1
        except OSError as error:  # the base of ssl.SSLError and of TimeoutError
            if not self._is_refused:  # a refusal has been logged already
                self._tls.failed(self.connection.peer, str(error) or "the client did not finish in time")
            self.abort()
            self.connection_lost(error)

    async def _encrypt(self, first: bytes) -> None:
        raw, context = self._transport, await self._tls.ready()
        assert raw is not None
        if raw.is_closing():  # `start_tls` would wait until its timeout
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
        # The first step of `start_tls`, which runs before this task continues, sets its protocol and connects it by
        # call_soon. Another call_soon after that runs before any further bytes are read.
        await asyncio.sleep(0)
        loop.call_soon(self._intercept_records, raw, first)
        try:
            encrypted = await starting
        finally:
            del starting  # its exception refers to this frame, so a reference back would be a reference cycle
        if encrypted is None or raw.is_closing():  # closed during the handshake, which `start_tls` does not report
            raise ConnectionResetError("the connection was closed")
        self._use(encrypted)

    def _intercept_records(self, raw: asyncio.Transport, first: bytes) -> None:
        """Pass the client's bytes through `TlsRecords` from now on. The next handshake may then start."""
        if raw.is_closing():
            return
        tls = cast("asyncio.BufferedProtocol", raw.get_protocol())
        records = TlsRecords(raw, tls, self.connection, self)
        raw.set_protocol(records)
        self.connection.records = records
        records.data_received(first)
        self._turns.call_for(self.address, self._handshakes.opened, self)

    def call_in_turn(self, action: Callable[[], None]) -> None:
        self._turns.call_for(self.address, action)

    def end_flood(self) -> None:
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
        """Notify the connection once. asyncio does not report a client that disconnects during a handshake, but it reports
        other ends, so both callers come here."""
        if not self._is_lost:
            self._is_lost = True
            self.connection.connection_lost(error)

    def refuse(self, reason: str) -> None:
        self._is_refused = True
        self._tls.failed(self.connection.peer, reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


# ------------------------------------------------------------------------------
# The schedule of TLS handshakes.
#
# Every client that connects can request a private-key operation by sending a copied hello, which costs it nothing. 400 of
# them blocked the event loop for 223 ms. Only a few handshakes therefore start at a time (`opening_handshakes`). The others
# wait in round-robin order by client address, so that an address with very many handshakes delays mainly its own.


class Entering(Protocol):
    """A client that requests a handshake."""

    @property
    def address(self) -> str: ...

    @property
    def is_gone(self) -> bool: ...

    async def shake_hands(self, first: bytes) -> None: ...

    def abort(self) -> None: ...

    def refuse(self, reason: str) -> None: ...


class Handshakes:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._waiting: dict[str, deque[tuple[Entering, bytes]]] = {}  # by address, in the order of their turns
        self._running: dict[Entering, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[Entering] = set()
        self.waiting = 0

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self, entering: Entering, first: bytes) -> None:
        """Start a handshake, or queue it; if too many wait, refuse one (`_drop`). `first` are the client's first bytes."""
        self._waiting.setdefault(entering.address, deque()).append((entering, first))
        self.waiting += 1
        if self.waiting > self._limits.max_waiting_handshakes:
            self._drop()
        self._start_waiting()

    def opened(self, entering: Entering) -> None:
        """Start the next handshake, because this one's private-key operation is done and the rest is cheap, or because this
        one has ended."""
        self._opening.discard(entering)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._opening) < self._limits.opening_handshakes:
            entering, first = self._next()
            if entering.is_gone:
                continue
            if len(self._running) >= self._limits.max_handshakes:
                self._make_room()
            self._opening.add(entering)
            self._running[entering] = None
            task = asyncio.create_task(self._run(entering, first), name="tls handshake")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> tuple[Entering, bytes]:
        address = next(iter(self._waiting))
        queue = self._waiting.pop(address)
        if len(queue) > 1:
            self._waiting[address] = queue
        self.waiting -= 1
        return queue.popleft()

    async def _run(self, entering: Entering, first: bytes) -> None:
        try:
            await entering.shake_hands(first)
        finally:
            self._running.pop(entering, None)
            self.opened(entering)

    def _drop(self) -> None:
        """Refuse the newest waiting handshake of the address with most of them."""
        address = max(self._waiting, key=lambda address: len(self._waiting[address]))
        entering, _ = self._waiting[address].pop()
        if not self._waiting[address]:
            del self._waiting[address]
        self.waiting -= 1
        entering.refuse("too many TLS handshakes wait")

    def _make_room(self) -> None:
        """Abort the oldest running handshake of the address with most of them."""
        address, _ = Counter(entering.address for entering in self._running).most_common(1)[0]
        oldest = next(entering for entering in self._running if entering.address == address)
        del self._running[oldest]  # now, because its task does that only at its end
        oldest.abort()


# ------------------------------------------------------------------------------
# The protocol of a gRPC client that connects before the gRPC server was imported in a thread.


class LazyProtocol(asyncio.Protocol):
    """Keeps the client's bytes until `loading` is done, then passes them and the socket to the result of `make_protocol`. If
    `loading` is cancelled, because the server stops, the connection is closed."""

    def __init__(
        self, connection: ClientTransport, loading: asyncio.Future[None], make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._connection = connection
        self._loading = loading
        self._make_protocol = make_protocol
        self._kept = b""
        loading.add_done_callback(self._loaded)

    def data_received(self, data: bytes) -> None:
        self._kept += data
        self._connection.is_held = True
        self._connection.charge(len(data))
        self._connection.pause_reading()

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        connection, kept = self._connection, self._kept
        connection.charge(-len(kept))
        if loading.cancelled():  # the server stops
            connection.close()
            return
        connection.is_held = False
        protocol = self._make_protocol()
        connection.set_protocol(protocol)
        protocol.data_received(kept)
        if not connection.is_held:
            connection.resume()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._loading.remove_done_callback(self._loaded)
        self._connection.connection_lost(error)
