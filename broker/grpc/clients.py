"""The gRPC clients that have open connections, by account and client id, each with its Telemetry stream, if it has opened
one, and the state that every handler gets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from ..access import Acl
from ..broker import BrokerController
from ..config import LIMITS, MEMBER_BYTES, REQUEST_TIMEOUT_S, LimitExceeded, Limits
from ..pops.requests import PopClient
from ..sessions.events import ClientRequest, SessionEvent
from ..sessions.session import Session
from ..tls import ClientTransport
from .calls import GrpcCall
from .schema import Code, StatusError

log = structlog.get_logger("rocketlet.grpc")


# A client sends its settings on its Telemetry stream. The broker serves clients without settings, too, because some
# clients resend their settings only five minutes after a restart of the broker.


_numbers = itertools.count(1)
SendEvent = Callable[["GrpcClient", SessionEvent], None]
_Key = tuple[str, str]  # account, client id


class GrpcClient:
    """A gRPC client: one client id of one account, on one or more connections.

    Attributes:
        connections: The open connections on which the client is registered.
        connection: The one of them that is charged for the client.
        stream: The Telemetry stream on which the client has sent settings; None unless it is open.
        topics: The topics to which the client publishes, from its settings.
        group: The consumer group of the client; empty for a client that has named none, such as a producer.
    """

    def __init__(self, client_id: str, connection: ClientTransport, account: str, send_event: SendEvent) -> None:
        self.number = next(_numbers)
        self.client_id = client_id
        self.account = account
        self.connection = connection
        self.connections: dict[Session, ClientTransport] = {connection: connection}
        self.stream: GrpcCall | None = None
        self.topics: tuple[str, ...] = ()
        self.group = ""
        self.request_timeout_s = REQUEST_TIMEOUT_S  # request timeout in the client's settings
        self.held_pulls = 0
        self.was_closed_by_client = True
        self.is_external = connection.is_external
        self.heard_s = connection.heard_s
        self._send_event = send_event
        self._charged_bytes = 0
        self._is_gone = False
        self._lost: list[Callable[[Session], None]] = []
        self.charge(MEMBER_BYTES)

    @property
    def pop_client(self) -> PopClient:
        """The key of this client in the pop pools, which are shared with the remoting server."""
        return PopClient(self.client_id, account_id=(self.account, self.client_id))

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def born_host(self) -> bytes:
        return self.connection.born_host

    @property
    def authentication(self) -> object:
        return self.connection.authentication

    @authentication.setter
    def authentication(self, authentication: object) -> None:
        self.connection.authentication = authentication

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def reached(self) -> str:
        return self.connection.reached

    @property
    def is_closed(self) -> bool:
        return self._is_gone or self.connection.is_closed

    def send_event(self, event: SessionEvent) -> None:
        """Send the event on the client's Telemetry stream. Nothing is sent without an open stream, or if gRPC has no command
        for the event."""
        self._send_event(self, event)

    def send_request(self, number: int, request: ClientRequest) -> None:
        """Do nothing: the gRPC protocol has no such request from broker to client, so the request times out."""

    def charge(self, size: int) -> None:
        """Charge memory to the client's connection. Ignored once the client is gone: its charges were refunded then."""
        if not self._is_gone:
            self._charged_bytes += size
            self.connection.charge(size)

    def is_news(self, event: str) -> bool:
        return self.connection.is_news(event)

    def when_read(self, action: Callable[[], None]) -> None:
        self.connection.when_read(action)

    def on_lost(self, action: Callable[[Session], None]) -> None:
        if action not in self._lost:
            self._lost.append(action)

    def close(self) -> None:
        self.connection.close()

    def abort(self) -> None:
        self.connection.abort()

    def move(self, connection: ClientTransport) -> None:
        """Charge another of the client's connections from now on."""
        if not self.connection.is_closed:
            self.connection.charge(-self._charged_bytes)
        self.connection = connection
        connection.charge(self._charged_bytes)

    def gone(self) -> None:
        self._is_gone = True
        if not self.connection.is_closed:
            self.connection.charge(-self._charged_bytes)
        for action in self._lost:
            action(self)


class GrpcClients:
    """The gRPC clients of a broker.

    Args:
        send_event: Writes an event on a client's Telemetry stream.
        lost: Called for a client that is detached from a connection because that was closed, or from its last connection
            for another reason, with the time of the last data on the connection (monotonic, in seconds). After its last
            connection, a client has no `connections` left.
    """

    def __init__(
        self, send_event: SendEvent, lost: Callable[[GrpcClient, float], None], limits: Limits = LIMITS
    ) -> None:
        self._limits = limits
        self._send_event = send_event
        self._connection_lost = lost
        self._clients: dict[_Key, GrpcClient] = {}
        self._of_connection: dict[Session, set[_Key]] = {}

    def __iter__(self) -> Iterator[GrpcClient]:
        return iter(self._clients.values())

    def get(self, account: str, client_id: str) -> GrpcClient | None:
        return self._clients.get((account, client_id))

    def record_call(self, call: GrpcCall) -> GrpcClient:
        """Return the client of a call; register it if it is new. Equal client ids of two accounts are two clients.

        Raises StatusError if the connection has too many client ids, or the broker too many clients of which none can be
        removed.
        """
        connection = call.session
        client = self._clients.get((call.account, call.client_id))
        if client is None or connection not in client.connections:
            try:
                client = self._register(client, call)
            except LimitExceeded as error:
                raise StatusError(Code.TOO_MANY_REQUESTS, str(error)) from None
        client.heard_s = connection.heard_s
        return client

    def is_registered(self, call: GrpcCall) -> bool:
        """Return True if the client of the call is registered, on whichever connection."""
        return (call.account, call.client_id) in self._clients

    def _register(self, client: GrpcClient | None, call: GrpcCall) -> GrpcClient:
        """Register a client on a connection. Raises LimitExceeded."""
        key, connection = (call.account, call.client_id), call.session
        ids = self._of_connection.get(connection)
        if ids is not None and len(ids) >= self._limits.max_grpc_ids:
            raise LimitExceeded(f"the connection has {len(ids)} client ids; maximum {self._limits.max_grpc_ids}")
        if client is not None:
            client.connections[connection] = connection
        elif len(self._clients) >= self._limits.max_grpc_clients and not self._make_room(connection):
            raise LimitExceeded(
                f"this broker has {self._limits.max_grpc_clients} gRPC clients (the maximum); close some"
            )
        else:
            client = self._clients[key] = GrpcClient(call.client_id, connection, call.account, self._send_event)
        if ids is None:
            ids = self._of_connection[connection] = set()
            connection.on_lost(self._lost)
        ids.add(key)
        return client

    def _make_room(self, newcomer: Session) -> bool:
        """Detach the least recently active half of the clients from the connection with most client ids, at the address with
        most. Return True if the broker then has fewer clients than its limit.

        Return False, and detach nothing, if the newcomer's address, or its connection at the same address, has about as many
        clients itself. A removed client is registered again by its next call.
        """
        sums: Counter[str] = Counter()
        for connection, ids in self._of_connection.items():
            sums[connection.address] += len(ids)
        address = max(sums, key=lambda item: sums[item])
        crowded, ids = max(
            ((connection, ids) for connection, ids in self._of_connection.items() if connection.address == address),
            key=lambda item: len(item[1]),
        )
        own = len(self._of_connection.get(newcomer, ()))
        if sums[newcomer.address] + 1 >= sums[address] if newcomer.address != address else own + 1 >= len(ids):
            return False
        oldest = sorted(ids, key=lambda key: self._clients[key].heard_s)
        for account, client_id in oldest[: max(len(ids) // 2, 1)]:
            self.leave(account, client_id, crowded)
        if newcomer.is_news("grpc_clients_forgotten"):
            hint = f"this broker has {self._limits.max_grpc_clients} gRPC clients (the maximum), most of them of this address"
            log.warning("grpc_clients_forgotten", address=address, clients=sums[address], hint=hint)
        return len(self._clients) < self._limits.max_grpc_clients

    def _lost(self, connection: Session) -> None:
        for account, client_id in list(self._of_connection.get(connection, ())):
            client = self._clients[account, client_id]
            heard_s = client.connections[connection].heard_s
            if not self.leave(account, client_id, connection):
                self._connection_lost(client, heard_s)
        self._of_connection.pop(connection, None)

    def leave(self, account: str, client_id: str, connection: Session) -> bool:
        """Detach a client from a connection that has closed, or on which the client has terminated or is removed. Return True
        if that was its last one, so that the client is gone."""
        key = (account, client_id)
        client = self._clients.get(key)
        if client is None or client.connections.pop(connection, None) is None:
            return False
        self._of_connection[connection].discard(key)
        if client.connections:
            if client.connection is connection:
                client.move(next(iter(client.connections.values())))
            return False
        del self._clients[key]
        client.gone()
        self._connection_lost(client, client.connection.heard_s)
        return True


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """The state that every handler gets."""

    broker: BrokerController
    clients: GrpcClients
    acl: Acl | None

    def may_publish(self, call: GrpcCall, topic: str) -> bool:
        """Return True if the account of a call that was just authorized may publish to a topic."""
        return self.acl is None or self.acl.may_publish(call.session, topic)
