"""Listens, and owns what runs in this process: a broker, a name server, or both, on one port."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import structlog

from ..protocol.frame import Frame
from ..protocol.work import SLICE, Work
from .access.acl import Acl
from .broker import Broker
from .clock import MACHINE
from .config import (
    ADDRESS_SHARE,
    DRAIN_TIMEOUT_S,
    IDLE_LIMIT_S,
    LISTEN_BACKLOG,
    MEMORY_SWEEP_S,
    RELOAD_INTERVAL_S,
    SWEEP_INTERVAL_S,
    VIP_DISTANCE,
)
from .listening.arrival import Arrival
from .listening.entrance import Entrance
from .listening.handshakes import Handshakes
from .listening.tls import Tls
from .nameserver.routes import Routes
from .remoting.connection import Connection
from .remoting.dispatch import Dispatch
from .running.machine import default_budget
from .running.open_files import shares
from .running.tasks import Tasks
from .running.turns import OneATurn, Turns
from .sessions.memory import Memory
from .sessions.reports import Reports
from .sessions.session import Session, is_loopback

if TYPE_CHECKING:
    from .grpc.door import Door, ServeCalls
    from .observing.metrics_port import MetricsPort

_HTTP2 = b"P"  # with which its preface begins; a frame of the other door cannot, it would be too long
_NO_GRPC = "a gRPC client came, and gRPC is an extra here: pip install 'rocketlet[broker,grpc]'"

log = structlog.get_logger("rocketlet.server")


@dataclass(frozen=True, slots=True)
class Listening:
    """How clients reach a server, and who may do what. external_port: a second port, for clients outside the brokers'
    network; routes asked for there hold the brokers' external addresses. grpc_port: one of its own for gRPC, which the
    others take, too. tls: of all ports; without it they speak plain text. acl: the accounts and their
    permissions; without it everybody may do everything."""

    host: str = "127.0.0.1"
    port: int = 0
    external_port: int | None = None
    grpc_port: int | None = None
    tls: Tls | None = None
    acl: Acl | None = None
    admin_is_local: bool = False


S = TypeVar("S")

Serve = Callable[[Connection, list[Frame]], None]


def _untapped(serve: S) -> S:
    return serve


class Taps(NamedTuple):
    """Hooks between clients and the dispatch, so that tests see and delay requests. connection_type: the class of a client's
    connection. serve: makes another function of the dispatch's `serve`; calls: of the one by which gRPC's door serves."""

    connection_type: type[Connection] = Connection
    serve: Callable[[Serve], Serve] = _untapped
    calls: Callable[[ServeCalls], ServeCalls] = _untapped


_NO_TAPS: Final = Taps()


class Server:
    """`async with Server(...)`: listens until the block ends, then drains and closes."""

    def __init__(
        self, listening: Listening, *, broker: Broker | None, routes: Routes | None, taps: Taps = _NO_TAPS
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
        self._judged_by = acl.file.policy if acl is not None else None
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
        self._connections: dict[Connection, None] = {}
        self._last_is_gone: asyncio.Event | None = None  # while it closes
        self._server: asyncio.Server | None = None
        self._turns = broker.turns if broker is not None else Turns()
        self.handshakes = Handshakes(served.limits)
        dispatch = Dispatch(
            broker, routes, self._turns, acl, admin_is_local=listening.admin_is_local, limits=served.limits
        )
        self.serve = taps.serve(dispatch.serve)
        self.max_connections = shares().connections
        budget = (broker.config.memory_bytes if broker else None) or default_budget()
        self.memory = Memory(budget)
        self.behind = OneATurn()
        self.reports = Reports()
        self._of_address: Counter[str] = Counter()
        self._clock = broker.clock if broker is not None else MACHINE
        self._tasks = Tasks(self._clock)
        self.now_s = self._clock.monotonic_s

    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        return list(self._connections)

    @property
    def port(self) -> int:
        """The port it listens on, also when 0 was asked for."""
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
        if self._host != "localhost" and not is_loopback(self._host):
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

    def _serve_metrics(self, broker: Broker) -> None:
        config = broker.config
        if config.metrics_port is not None:
            from .observing.metrics import Collector
            from .observing.metrics_port import MetricsPort

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

    def _entrance(self, *, is_external: bool = False, is_vip: bool = False) -> Entrance[Connection]:
        connection = self._connection_type(self, is_external=is_external, is_vip=is_vip)
        return Entrance(self._tls, self.handshakes, self._turns.call, connection, self._door_of)

    @cached_property
    def grpc_door(self) -> Door | None:
        """None without the extra."""
        door = _load_grpc()
        return door(self._broker, self._acl, self._tap_calls) if door is not None else None

    def _door_of(self, connection: Connection, first: bytes) -> asyncio.Protocol:
        """Picks the door by a client's first bytes, those of TLS aside."""
        if not first.startswith(_HTTP2):
            return connection
        if self._loading is not None and not self._loading.done():
            return Arrival(connection, self._loading, partial(self._grpc_protocol, connection))
        return self._grpc_protocol(connection)

    def _grpc_protocol(self, connection: Connection) -> asyncio.Protocol:
        if self.grpc_door is not None:
            return self.grpc_door.protocol(connection)
        if self._broker is not None:
            self._broker.note_turned_away(connection.address, _NO_GRPC)
        if connection.is_news("grpc_client_refused"):
            log.warning("grpc_client_refused", peer=connection.peer, reason=_NO_GRPC)
        return connection

    async def _listen_for_vip(self) -> None:
        """The port below by two, where clients with a VIP channel send to: as Apache's broker, but it may be taken."""
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
        """The port of its own that gRPC has, also when 0 was asked for; None without one."""
        return int(self._grpc.sockets[0].getsockname()[1]) if self._grpc else None

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics, also when 0 was asked for."""
        return self._metrics.port if self._metrics else None

    @property
    def vip_connections(self) -> int:
        """How many clients are connected to the VIP channel."""
        return sum(connection.is_vip for connection in self._connections)

    def opened(self, connection: Connection) -> None:
        fault, limit = self._refusal(connection)
        if fault:
            if self._broker is not None:
                self._broker.note_turned_away(connection.address, fault)
            if connection.is_news("connection_refused"):
                log.warning("connection_refused", peer=connection.peer, reason=fault, limit=limit)
            connection.abort()
        self._connections[connection] = None
        self._of_address[connection.address] += 1

    def _refusal(self, connection: Connection) -> tuple[str, int]:
        """Why another connection is not taken, and the limit; empty if it may be."""
        if len(self._connections) >= self.max_connections and not self._make_room(connection.address):
            return "there are too many; raise `ulimit -n`, or close idle clients", self.max_connections
        of_address = int(self.max_connections * ADDRESS_SHARE)
        if self._of_address[connection.address] >= of_address and not is_loopback(connection.address):
            return "one address has too many", of_address
        return "", 0

    def _make_room(self, newcomer: str) -> bool:
        """Ends the connection that was silent for longest, of the address that has most; False if that has hardly more than
        the newcomer's address."""
        address = max(self._of_address, key=lambda item: self._of_address[item])
        if self._of_address[address] <= self._of_address[newcomer] + 1:
            return False
        found = (item for item in self._connections if item.address == address and not item.is_closed)
        silent = min(found, key=lambda item: item.heard_s, default=None)
        if silent is not None:
            silent.abort()
        return silent is not None

    def closed(self, connection: Connection) -> None:
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
        """Has a thread read changed files: neither a long file nor a slow device stops anybody."""
        self._tls.warn_of_expiry(self._clock.time_ms() / 1000)
        for settings in (self._tls, self._acl):
            if settings is not None and settings.look():
                self._tasks.spawn(asyncio.to_thread(settings.load))
        if self._acl is not None:
            self._judge_anew(self._acl)

    def _judge_anew(self, acl: Acl) -> None:
        """Pulls that are held were judged by accounts that are others now: their clients ask again, and are judged again."""
        before, self._judged_by = self._judged_by, acl.file.policy
        if self._broker is not None and before is not None and before is not self._judged_by:
            changed = [session for session in self._connections if acl.has_changed(session, before)]
            self._turns.do(self._broker.held_pulls.letting_go(changed))

    def _close_idle(self) -> None:
        limit = self.now_s() - IDLE_LIMIT_S
        idle = [connection for connection in self._connections if connection.active_s < limit]
        silent = self._routes.expire() if self._routes is not None else []
        self._turns.do(_aborting({*idle, *silent}))
        self._free_routes()


async def _load_grpc_ahead() -> None:
    await asyncio.to_thread(_load_grpc)


def _load_grpc() -> type[Door] | None:
    """The gRPC door's class; None without the extra. Its modules take a seventh of the time of all others, so a server is
    ready before a thread loads them. A client that comes sooner waits (`Arrival`)."""
    try:
        from .grpc.door import Door
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "google":
            raise
        return None
    return Door


def _aborting(connections: set[Session]) -> Work[None]:
    """Closes them, also those that do not read, which would never be closed otherwise."""
    for number, connection in enumerate(connections, 1):
        connection.abort()
        if number % SLICE == 0:
            yield
