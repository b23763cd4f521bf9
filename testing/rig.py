"""A rig: a real broker with its sockets, a clock that tests advance, faults, and a tap.

A rig belongs to the event loop that opens it. `Broker` of this package runs a rig in a test's process, and `rocketlet
start --control-port` runs one behind HTTP.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..broker.broker import BrokerController as RunningBroker
from ..broker.config import BrokerConfig
from ..broker.nameserver import Networks, Routes
from ..broker.pops.deliveries import DeliveryState
from ..broker.remoting.administration.history import history_of
from ..broker.remoting.connection import RemotingConnection
from ..broker.server import Listening, Server, Taps
from ..broker.tls import Tls, can_sign
from ..client.admin.admin_client import AdminClient
from ..client.wire.connection import Access
from ..protocol.bodies import finish
from .clock import BrokerClock, Run, run_here
from .faults import Faults
from .ports import free_port
from .tap import Request, Tap, TappedConnection

if TYPE_CHECKING:
    from ..broker.grpc.server import ServeCalls
    from .grpc_tap import GrpcTap

_MEMORY = Path("/dev/shm")  # a file system in memory on Linux


class Rig:
    """A broker under test.

    Args:
        settings: settings of the broker; `data_dir` is replaced by `folder`
        listening: addresses and certificates of the server
        networks: networks of the name server's clients
        folder: folder for the data; None for a temporary folder, in memory if the system supports it
        empties: True if `clear` may delete the contents of `folder`
        run: calls a function in the broker's thread
    """

    def __init__(
        self,
        settings: BrokerConfig,
        listening: Listening,
        *,
        networks: Networks | None = None,
        folder: Path | None = None,
        empties: bool = False,
        run: Run = run_here,
    ) -> None:
        self.faults = Faults(on_end=self._thaw, run=run)
        self.clock = BrokerClock(
            keep_alive=self._keep_alive,
            next_due_s=self.next_due_s,
            is_anyone_frozen=lambda: bool(self.faults.frozen()),
            run=run,
        )
        self._settings = settings
        self._listening = listening
        self._networks = networks
        self._given = folder
        self._empties = empties
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._folders = 0
        self._has_moved = False
        self._folder: Path | None = None
        self._server: Server | None = None
        self._broker: _MortalBroker | None = None
        self._tap: Tap | None = None
        self._grpc_tap: GrpcTap | None = None
        self._routes: Routes | None = None

    # Lifecycle

    async def open(self) -> None:
        if self._given is None:
            parent = _MEMORY if _MEMORY.is_dir() else None  # noqa: ASYNC240 (before the first client connects)
            self._temporary = tempfile.TemporaryDirectory(prefix="rocketlet-", dir=parent, ignore_cleanup_errors=True)
        try:
            await self._start_in(self._new_folder())
        except BaseException:
            self._clean_up()
            raise

    async def close(self) -> None:
        await self._end()
        self._clean_up()

    def _clean_up(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    async def clear(self) -> None:
        """Delete all topics, groups, messages, faults and requests, reset the clock, and disconnect all clients. Raises
        RuntimeError if the broker has a given folder that may not be emptied."""
        if self._temporary is None and not self._empties:
            raise RuntimeError("a broker with a folder of its own keeps it; delete topics and groups instead")
        self.faults.clear()
        if self._broker is not None:
            self._broker.is_killed = True  # no state is saved
        await self._end()
        self.clock.reset()
        if self._folder is not None:
            _empty(self._folder)
        self._tap = None  # with its requests
        await self._start_in(self._new_folder())

    async def restart(self) -> None:
        """Stop as by SIGTERM, and start on the same data."""
        await self.stop()
        await self.start()

    async def kill(self, *, lose: int = 0) -> None:
        """Stop as by SIGKILL, and start on the data without the last `lose` messages. Raises ValueError if the broker has
        fewer messages."""
        broker = self.running
        end = _end_without(broker, lose)
        broker.is_killed = True
        await self._end()
        _truncate(broker.config.data_dir / "commitlog", end)
        await self.start()

    async def stop(self) -> None:
        """Stop as by SIGTERM. The clock, the faults and the list of requests are kept."""
        assert self.running
        await self._end()

    async def start(self) -> None:
        """Start after `stop`, with the same data and address. Raises RuntimeError if the broker is running."""
        if self._server is not None:
            raise RuntimeError("the broker is running; stop it first")
        if self._folder is None:
            raise RuntimeError("the broker was never started; use it inside of its `with` block")
        await self._start_in(self._folder)

    def _new_folder(self) -> Path:
        if self._temporary is None:
            assert self._given is not None
            return self._given
        self._folders += 1
        return Path(self._temporary.name) / str(self._folders)

    async def _start_in(self, folder: Path) -> None:
        listening = self._listening
        if not listening.port:
            listening = self._listening = replace(listening, port=free_port())
        config = replace(self._settings, data_dir=folder, address=self._settings.address or self.address)
        routes = self._routes = None if config.name_servers else Routes(networks=self._networks)
        if routes is not None and self._has_moved:
            routes.announce_registered()
        broker = _MortalBroker(config, routes, self.clock, tls=listening.tls, acl=listening.acl)
        seen = [] if self._tap is None or folder != self._folder else self._tap.requests
        tap = Tap(self._client_of, self.faults, self.clock, seen)
        listening = replace(listening, tls=listening.tls or Tls(signs_itself=can_sign()))
        self._grpc_tap = None
        taps = Taps(TappedConnection, tap.on, partial(self._tapped_calls, tap))
        server = Server(listening, broker=broker, routes=routes, taps=taps)
        self._broker, self._server, self._tap, self._folder = broker, server, tap, folder
        try:
            await server.__aenter__()
        except BaseException:
            self._broker = self._server = None
            await broker.stop()
            raise

    def _tapped_calls(self, tap: Tap, serve: ServeCalls) -> ServeCalls:
        """Return a function that wraps the gRPC server's `serve`. Called only if protobuf is installed."""
        from .grpc_tap import GrpcTap

        self._grpc_tap = GrpcTap(serve, self.faults, self.clock, tap.record)
        return self._grpc_tap.serve

    async def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            for connection in server.connections:
                connection.abort()
            await server.__aexit__()
        self._broker = None

    # Internals

    @property
    def address(self) -> str:
        """`host:port` for clients on this machine."""
        host = self._listening.host
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{self._listening.port}"

    @property
    def endpoint(self) -> str:
        """The address for 5.x clients. Raises RuntimeError if this broker cannot serve them."""
        if self._server is not None and self._server.grpc_server is None:
            raise RuntimeError("clients of 5.x need protobuf here: pip install '.[pytest]'")
        return self.address

    @property
    def name(self) -> str:
        """The name of the broker in its cluster."""
        return self._settings.name

    @property
    def name_server(self) -> str:
        """The name server for the cluster's clients: the broker's own, or the one that it registers with."""
        return self._settings.name_servers[0] if self._settings.name_servers else self.address

    @property
    def folder(self) -> Path:
        """The folder of the broker's data."""
        if self._folder is None:
            raise RuntimeError("the broker was never started; use it inside of its `with` block")
        return self._folder

    @property
    def is_running(self) -> bool:
        return self._server is not None

    @property
    def running(self) -> _MortalBroker:
        """The running broker. Raises RuntimeError if it is stopped."""
        if self._broker is None:
            raise RuntimeError(
                "the broker is not running; use it inside of its `with` block, and start it after a stop"
            )
        return self._broker

    @property
    def requests(self) -> list[Request]:
        return [] if self._tap is None else list(self._tap.requests)

    async def reports(self, group: str) -> list[dict[str, Any]]:
        """Return the reports of all brokers of the cluster about a group.

        If this broker is the only one of its own name server, it is called directly, because a request over the network may
        need an account. Otherwise all brokers are queried with the account that this broker registers with.
        """
        broker = self.running
        if self._routes is not None and len(self._routes.brokers()) <= 1:
            return [finish(history_of(broker, group))]
        async with AdminClient(self.name_server, access=self._access()) as admin:
            return await admin.history(group)

    def _access(self) -> Access:
        """Return the credentials for the brokers of the cluster."""
        acl, account = self._listening.acl, self._settings.name_server_account
        entries = acl.file.entries if acl is not None and account else ()
        secret = next((str(entry["secretKey"]) for entry in entries if entry.get("accessKey") == account), "")
        return Access(
            access_key=str(account) if secret else "",
            secret_key=secret,
            tls=self._listening.tls is not None,
            verify_tls=False,  # it only reads the state of its own cluster, on this machine or in a test's network
        )

    def next_due_s(self) -> float | None:
        """Return the time in seconds until the first delayed message or delayed redelivery of a popped message is due;
        None if there is none."""
        if self._broker is None:
            return None
        delays = self._broker.delays
        now_s = self._broker.clock.monotonic_s()
        popped = (
            max(item.deadline_s - now_s, 0.0)
            for deliveries in self._broker.pops.pools.deliveries()
            for item in deliveries.unfinished.values()
            if item.is_delayed and item.state is DeliveryState.IN_FLIGHT
        )
        waits = (self._broker.timers.wait_s(), *popped, *map(delays.wait_s, delays.levels))
        first_s = min((wait_s for wait_s in waits if wait_s is not None), default=None)
        return None if first_s is None else max(first_s, 0.0)

    def skip(self) -> bool:
        """Advance the clock to the next delayed message or redelivery. Return False if there is none."""
        wait_s = self.next_due_s()
        if wait_s is not None:
            self.clock.advance(wait_s)
        return wait_s is not None

    def advertise(self, address: str | None, external: str | None) -> None:
        """Change the addresses that clients receive, inside of the broker's network and outside. The change survives a
        restart."""
        self._settings = replace(
            self._settings,
            address=address or self._settings.address,
            external_address=external or self._settings.external_address,
        )
        self._has_moved = self._has_moved or address is not None
        self.running.advertise(address, external)

    def _client_of(self, connection: RemotingConnection) -> str:
        return connection.client if isinstance(connection, TappedConnection) else ""

    def _thaw(self) -> None:
        """Resume clients that are no longer frozen."""
        if self._server is None or self._tap is None:
            return
        frozen = self.faults.frozen()
        for connection in self._server.connections:
            if isinstance(connection, TappedConnection) and self._client_of(connection) not in frozen:
                self._tap.thaw(connection)
        if self._grpc_tap is not None:
            self._grpc_tap.thaw()

    def _keep_alive(self) -> None:
        """Record contact with all connected clients, except for frozen ones."""
        broker, server = self._broker, self._server
        if broker is None or server is None:
            return
        frozen = self.faults.frozen()
        active_clients = [item for item in server.connections if not frozen or self._client_of(item) not in frozen]
        now_s = self.clock.monotonic_s()
        for connection in active_clients:
            connection.active_s = now_s
        broker.groups.record_contact(active_clients)
        broker.locks.renew(active_clients)
        for client in self._grpc_tap.active_clients() if self._grpc_tap is not None else ():
            broker.pops.pools.clients.record_contact(client)


class _MortalBroker(RunningBroker):
    """A broker that can stop without saving its state, as by SIGKILL."""

    is_killed = False

    def persist(self, closes: bool = False) -> None:
        if not self.is_killed:
            super().persist(closes)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _end_without(broker: RunningBroker, lose: int) -> int:
    """Return the end of the commit log without its last messages. Raises ValueError if it has fewer messages."""
    if lose < 0:
        raise ValueError(f"lose is {lose}; expected 0 or more")
    entries = (
        queue.entry(offset) for queue in broker.store.queues.values() for offset in range(queue.begin, queue.next)
    )
    # a message that an earlier kill has cut off has an entry, but no bytes
    positions = [position for position, size, _ in entries if size and position + size <= broker.store.end]
    if lose > len(positions):
        raise ValueError(f"lose is {lose}; the broker has only {len(positions)} messages")
    return sorted(positions)[-lose] if lose else broker.store.end


def _truncate(log: Path, end: int) -> None:
    for segment in sorted(log.glob("*"), reverse=True):  # a broker without messages has no log files
        if segment.name.isdigit():
            begin = int(segment.name)
            size = segment.stat().st_size
            if begin + size > end:
                with segment.open("r+b") as file:
                    file.truncate(max(end - begin, 0))
