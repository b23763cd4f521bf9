"""The clients that this door has heard of, by their accounts and ids, and the stream on which the broker tells them things.

A client says what it is in its settings, on a stream that stays open (Telemetry). Nothing depends on them: some clients send
theirs again only five minutes after a restart of the broker.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import structlog

from ..config import LIMITS, MEMBER_BYTES, LimitExceeded, Limits
from ..listening.carrier import Carrier
from ..pops.values import PopClient
from ..sessions.events import Event, Question
from ..sessions.session import Session
from .calls import Call
from .codes import Code, Fault

log = structlog.get_logger("rocketlet.grpc")

_numbers = itertools.count(1)
Told = Callable[["GrpcClient", Event], None]
_Key = tuple[str, str]  # account, client id


class GrpcClient:
    """A session of this door: a client id, its account, and the connections on which it is heard. `connection`: of these the
    one that is charged. `stream`: its telemetry stream while that is open. `topics`: that it has said it publishes to.
    `group`: of which it is a consumer."""

    def __init__(self, client_id: str, connection: Carrier, account: str, told: Told) -> None:
        self.number = next(_numbers)
        self.client_id = client_id
        self.account = account
        self.connection = connection
        self.connections: dict[Session, Carrier] = {connection: connection}
        self.stream: Call | None = None
        self.topics: tuple[str, ...] = ()
        self.group = ""
        self.held_pulls = 0
        self.is_left = True
        self.is_external = connection.is_external
        self.heard_s = connection.heard_s
        self._told = told
        self._charged_bytes = 0
        self._is_gone = False
        self._lost: list[Callable[[Session], None]] = []
        self.charge(MEMBER_BYTES)

    @property
    def pop_client(self) -> PopClient:
        """The client as the shared state knows it."""
        return PopClient(self.client_id, account_id=(self.account, self.client_id))

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def born_host(self) -> bytes:
        return self.connection.born_host

    @property
    def known(self) -> object:
        return self.connection.known

    @known.setter
    def known(self, known: object) -> None:
        self.connection.known = known

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def reached(self) -> str:
        return self.connection.reached

    @property
    def is_closed(self) -> bool:
        return self._is_gone or self.connection.is_closed

    def tell(self, event: Event) -> None:
        """Tells the client an event on its stream; without a stream, does nothing."""
        self._told(self, event)

    def ask(self, number: int, question: Question) -> None:
        """These clients cannot be asked, so the question gets no answer."""

    def charge(self, size: int) -> None:
        """Nothing once the client is gone: then it has been given back what it was charged."""
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

    def move(self, connection: Carrier) -> None:
        """Another connection is charged."""
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
    """`told` writes an event on a client's stream; `gone` is told of each client that is."""

    def __init__(self, told: Told, gone: Callable[[GrpcClient], None], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._told = told
        self._gone = gone
        self._clients: dict[_Key, GrpcClient] = {}
        self._of_connection: dict[Session, set[_Key]] = {}

    def __iter__(self) -> Iterator[GrpcClient]:
        return iter(self._clients.values())

    def get(self, account: str, client_id: str) -> GrpcClient | None:
        return self._clients.get((account, client_id))

    def hear(self, call: Call) -> GrpcClient:
        """The client, which is there as long as one of its connections. Clients of two accounts that go by one id are two.
        Raises Fault if the client's address or connection has too many."""
        connection = call.session
        client = self._clients.get((call.account, call.client_id))
        if client is None or connection not in client.connections:
            try:
                client = self._take(client, call)
            except LimitExceeded as error:
                raise Fault(Code.TOO_MANY_REQUESTS, str(error)) from None
        client.heard_s = connection.heard_s
        return client

    def is_heard(self, call: Call) -> bool:
        """Whether its client is known."""
        return (call.account, call.client_id) in self._clients

    def _take(self, client: GrpcClient | None, call: Call) -> GrpcClient:
        """A client that is new to the connection."""
        key, connection = (call.account, call.client_id), call.session
        ids = self._of_connection.get(connection)
        if ids is not None and len(ids) >= self._limits.max_grpc_ids:
            raise LimitExceeded(f"a connection goes by {self._limits.max_grpc_ids} client ids at most")
        if client is not None:
            client.connections[connection] = connection
        elif len(self._clients) >= self._limits.max_grpc_clients and not self._make_room(connection):
            raise LimitExceeded(f"this broker knows {self._limits.max_grpc_clients} gRPC clients; close some")
        else:
            client = self._clients[key] = GrpcClient(call.client_id, connection, call.account, self._told)
        if ids is None:
            ids = self._of_connection[connection] = set()
            connection.on_lost(self._lost)
        ids.add(key)
        return client

    def _make_room(self, newcomer: Session) -> bool:
        """Forgets clients of the address that has most of them, of its connection that goes by most ids: those that called
        longest ago. False if the newcomer's address or connection would then have more. A client that is forgotten is known
        again by its next call."""
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
            hint = f"this broker knows {self._limits.max_grpc_clients} gRPC clients, and most are of this address"
            log.warning("grpc_clients_forgotten", address=address, clients=sums[address], hint=hint)
        return len(self._clients) < self._limits.max_grpc_clients

    def _lost(self, connection: Session) -> None:
        for account, client_id in list(self._of_connection.get(connection, ())):
            self.leave(account, client_id, connection)
        self._of_connection.pop(connection, None)

    def leave(self, account: str, client_id: str, connection: Session) -> bool:
        """A client is not heard on a connection any more. Whether it is gone: nobody says good-bye for others, which are
        heard on connections of their own."""
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
        self._gone(client)
        return True
