"""gRPC clients and their calls: sessions by client id, the context of handlers, QueryRoute and QueryAssignment."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import structlog

from ...protocol import grpc, names
from ...protocol.bodies import QueueData, Route, TopicConfig, Work
from ...protocol.codes import PERM_READ, PERM_WRITE
from ...protocol.grpc import MessageReader, Status
from ...protocol.http2 import Fields, Stream
from ..access import Acl, Need
from ..broker import BrokerController
from ..config import (
    LIMITS,
    MAX_ENDPOINTS_BYTES,
    MAX_NAMED_CHARS,
    MEMBER_BYTES,
    QUEUE_BYTES,
    REQUEST_TIMEOUT_S,
    ROUTE_PIECE_BYTES,
    LimitExceeded,
    Limits,
)
from ..pops.requests import PopClient
from ..sessions.events import ClientRequest, SessionEvent
from ..sessions.grpc_stats import GrpcClientStats
from ..sessions.session import Session
from ..store.files import StoreFull
from ..tls import ClientTransport
from .schema import (
    OK_TEXT,
    Code,
    Endpoints,
    MessageQueue,
    QueryAssignmentResponse,
    QueryRouteResponse,
    StatusError,
    group_of,
    topic_of,
)

log = structlog.get_logger("rocketlet.grpc")


# ------------------------------------------------------------------------------
# The gRPC clients that have open connections, by account and client id, each with its Telemetry stream, if it has opened
# one. The broker sends commands on that stream.
#
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


# ------------------------------------------------------------------------------
# One call: its request, its client, and its response.


Needs = Callable[[Any], list[Need]]


class Method(NamedTuple):
    """A gRPC method that the broker serves.

    Attributes:
        needs: Returns the permissions that a request needs.
        is_stream: True if the response may have several messages.
        is_open: True if the client may send several messages; each is handled when it arrives.
    """

    name: str
    request: Any
    response: Any
    handler: Callable[..., Any]
    needs: Needs
    is_stream: bool = False
    is_open: bool = False


class ResponseWriter(Protocol):
    """The HTTP/2 side of a response."""

    def send_headers(self, stream: Stream, block: bytes) -> None: ...

    def send_data(self, stream: Stream, data: bytes) -> None: ...

    def send_end(self, stream: Stream, block: bytes) -> None: ...


class GrpcCall:
    """A gRPC call of a client: its metadata, its deadline, and the response.

    Attributes:
        account: The access key that the call was authenticated with; empty without one.
        session: The client's connection.
        due_s: The client's deadline by the broker's monotonic clock, in seconds; None without one.
        answers: Writes the response. The test kit may replace it.
        callers: Counts responses for the metrics, and records failed calls and outdated clients for `doctor`.
        namespace: The resource namespace of the topics in messages for the client.
        keep_answered: Registers a function for `on_given_up`.
    """

    __slots__ = (
        "_aborted",
        "_has_begun",
        "account",
        "answers",
        "callers",
        "due_s",
        "flush_soon",
        "has_request",
        "keep_answered",
        "method",
        "namespace",
        "reader",
        "session",
        "stream",
    )

    def __init__(
        self,
        session: ClientTransport,
        stream: Stream,
        method: Method,
        due_s: float | None,
        answers: ResponseWriter,
        flush_soon: Callable[[], None],
        callers: GrpcClientStats,
        keep_answered: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self.keep_answered = keep_answered
        self.session = session
        self.stream = stream
        self.method = method
        self.reader = MessageReader()
        self.due_s = due_s
        self.account = self.namespace = ""
        self._aborted: Callable[[], None] | None = None
        self.has_request = False
        self._has_begun = False
        self.answers = answers
        self.callers = callers
        self.flush_soon = flush_soon

    @property
    def fields(self) -> Fields:
        return self.stream.fields

    @property
    def is_over(self) -> bool:
        return self.stream.is_answer_ended

    def text(self, name: bytes) -> str:
        """Return a request header; empty if it is missing."""
        value = self.stream.fields.get(name)
        return "" if value is None else value.decode("utf-8", "replace")

    @property
    def client_id(self) -> str:
        return self.text(b"x-mq-client-id")

    @property
    def client(self) -> PopClient:
        """The key of the calling client in the pop pools."""
        client_id = self.client_id
        return PopClient(client_id, account_id=(self.account, client_id))

    def answer(self, response: Any) -> None:
        """Send the only message of a response, and end it."""
        self.send(response)
        self.end()

    def refuse(self, code: int, reason: str) -> None:
        """Send a response that has only a status."""
        response = self.method.response()
        set_status(response.status, code, reason)
        self.answer(response)

    def charging(self, work: Work[None], size: Callable[[], int]) -> Work[None]:
        """Do the work of a request. The memory that it needs is charged to the connection until it has ended or is dropped.

        Args:
            size: Returns the size in bytes, which may grow with each piece.
        """
        charged_bytes = size()
        self.session.charge(charged_bytes)
        try:
            for _ in work:
                more = size() - charged_bytes
                charged_bytes += more
                self.session.charge(more)
                yield
        finally:
            self.session.charge(-charged_bytes)

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.answers.send_headers(self.stream, grpc.HEAD)
            self.flush_soon()

    def send(self, message: Any) -> None:
        if not self._has_begun:  # the first message carries the status
            self._count(message.status)
        self.begin()
        self.answers.send_data(self.stream, grpc.encode_message(message.SerializeToString()))
        self.flush_soon()

    def _count(self, status: Any) -> None:
        client = f"{self.client_id[:MAX_NAMED_CHARS]} ({self.session.peer})"
        self.callers.answered(self.method.name, status.code, status.message, client)

    def answering(self, status: Any, parts: list[bytes]) -> Work[None]:
        """Send the only message of a response in parts. The parts are encoded messages, which protobuf merges into one."""
        self._count(status)
        self.begin()
        self.answers.send_data(self.stream, grpc.message_head(sum(map(len, parts))))
        for part in parts:
            if self.is_over:
                return
            self.answers.send_data(self.stream, part)
            self.flush_soon()
            yield
        self.end()

    def on_abort(self, action: Callable[[], None]) -> None:
        """Call `action` if the client cancels the call, or the connection is lost, before the response has ended. Only the
        last `action` is called."""
        self._aborted = action

    def on_given_up(self, action: Callable[[], None]) -> None:
        """Call `action` if the client cancels the call after its response was written, unless KEPT_RECEIVES later responses
        were registered since. The loss of the connection does not call it."""
        self.keep_answered(self.stream.id, action)

    def is_late(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def abort(self) -> None:
        if self._aborted is not None:
            self._aborted()

    def end(self, status: int = Status.OK, reason: str = "") -> None:
        if not self._has_begun:
            self.callers.ended(self.method.name, int(status))
        block = grpc.trailers(status, reason) if self._has_begun else grpc.only_trailers(status, reason)
        self._has_begun = True
        self.answers.send_end(self.stream, block)
        self.flush_soon()


def set_status(status: Any, code: int = Code.OK, reason: str = OK_TEXT) -> None:
    status.code = code
    status.message = reason


# ------------------------------------------------------------------------------
# The state that every handler gets.


@dataclass(frozen=True, slots=True)
class HandlerContext:
    broker: BrokerController
    clients: GrpcClients
    acl: Acl | None

    def may_publish(self, call: GrpcCall, topic: str) -> bool:
        """Return True if the account of a call that was just authorized may publish to a topic."""
        return self.acl is None or self.acl.may_publish(call.session, topic)


# ------------------------------------------------------------------------------
# QueryRoute and QueryAssignment: where a topic's queues are.
#
# A route has for this broker the endpoints in the request, or else the address by which the client reached the broker, and
# for other brokers their registered addresses. Apache's proxy returns its configured address, which clients outside of a
# container's network cannot reach.


_NONE, _READ, _WRITE, _READ_WRITE = 1, 2, 3, 4
_IPV4, _IPV6, _DOMAIN = 1, 2, 3
_IS_IPV4: Final = re.compile(r"\d+\.\d+\.\d+\.\d+\Z").match
_ALL_TYPES: Final = (1, 2, 3, 4)
_ALL_QUEUES: Final = -1  # in an assignment: the client receives from any queue
TYPES: Final = {
    "NORMAL": (1,),
    "FIFO": (2,),
    "DELAY": (3,),
    "TRANSACTION": (4,),
    "PRIORITY": (6,),
    "LITE": (5,),
    "MIXED": _ALL_TYPES,
    "UNSPECIFIED": _ALL_TYPES,
}


def announced_types(topic: TopicConfig) -> tuple[int, ...]:
    """Return the message types that routes announce.

    A topic without a type accepts messages with a priority, but these are announced for topics of the type PRIORITY only,
    because Java's client 5.0.3 fails at a route with a type that it does not know.
    """
    return TYPES.get(topic.message_type, _ALL_TYPES)


def accepted_types(topic: TopicConfig) -> tuple[int, ...]:
    """Return the message types that a topic accepts. A topic without a type, such as one created by a client of 4.9, accepts
    all but lite messages."""
    if topic.message_type in ("", "UNSPECIFIED"):
        return (*_ALL_TYPES, *TYPES["PRIORITY"])
    return TYPES[topic.message_type]


class Holding(NamedTuple):
    """The queues of a topic on one broker. `address` is empty for this broker, whose address the client knows."""

    queues: QueueData
    address: str
    types: tuple[int, ...]


Making = Callable[[list[Holding]], Work[None]]


def query_route(context: HandlerContext, call: GrpcCall, request: Any) -> Work[None] | Coroutine[Any, Any, Work[None]]:
    name = topic_of(request.topic)
    return _answer(context, call, name, partial(_route, call, request))


def query_assignment(
    context: HandlerContext, call: GrpcCall, request: Any
) -> Work[None] | Coroutine[Any, Any, Work[None]]:
    """Return the same queues to every client of a group.

    The assignment has one entry for each broker with readable queues, which stands for all of its queues; in an ordered
    group that is no lite group, an entry for each queue.
    """
    name = topic_of(request.topic)
    group = group_of(request.group)
    settings = context.broker.group_configs.ensure(group)
    is_in_order = settings is not None and settings.consume_orderly and not settings.lite_topic
    return _answer(context, call, name, partial(_assignments, call, request, is_in_order))


def _answer(
    context: HandlerContext, call: GrpcCall, name: str, make: Making
) -> Work[None] | Coroutine[Any, Any, Work[None]]:
    """Return the work that sends the response in pieces, if necessary after a request to a name server in another process."""
    servers, creates = context.broker.name_servers, context.may_publish(call, name)
    if servers.are_elsewhere:
        return _answer_later(context, name, creates, make)
    route = servers.local.route(name) if servers.local is not None else None
    return make(_queues_by_broker(context, name, creates, route))


async def _answer_later(context: HandlerContext, name: str, creates: bool, make: Making) -> Work[None]:
    return make(_queues_by_broker(context, name, creates, await context.broker.name_servers.find_route(name)))


def _route(call: GrpcCall, request: Any, holdings: list[Holding]) -> Work[None]:
    response = QueryRouteResponse()
    set_status(response.status)
    queues = []
    for holding in holdings:
        pattern = _queue_template(call, request, holding)
        pattern.accept_message_types.extend(holding.types)
        count = max(holding.queues.read_queues, holding.queues.write_queues)
        queues.append((pattern, holding.queues, range(count)))
    return _in_pieces(call, response, queues, lambda part, pattern: part.message_queues.append(pattern))


def _assignments(call: GrpcCall, request: Any, is_in_order: bool, holdings: list[Holding]) -> Work[None]:
    response = QueryAssignmentResponse()
    set_status(response.status)
    queues = []
    for holding in holdings:
        found = holding.queues
        if not found.perm & PERM_READ or not found.read_queues:
            continue
        ids = range(found.read_queues) if is_in_order else range(_ALL_QUEUES, _ALL_QUEUES + 1)
        queues.append((_queue_template(call, request, holding), found, ids))
    if not queues:
        raise StatusError(Code.FORBIDDEN, f"the topic {request.topic.name} has no queue that may be read")
    return _in_pieces(
        call, response, queues, lambda part, pattern: part.assignments.add().message_queue.CopyFrom(pattern)
    )


def _in_pieces(
    call: GrpcCall, response: Any, queues: list[tuple[Any, QueueData, range]], add: Callable[[Any, Any], None]
) -> Work[None]:
    """Send a response with queues, which are copies of a pattern with their own id and permission.

    A response may have thousands of queues, each with endpoints. The response is therefore encoded in parts, which are
    charged to the client's connection until they are passed to HTTP/2.
    """
    parts = [response.SerializeToString()]
    kept_bytes = 0
    try:
        for pattern, data, ids in queues:
            at_once = max(ROUTE_PIECE_BYTES // (pattern.ByteSize() + QUEUE_BYTES), 1)
            for first in range(0, len(ids), at_once):
                part = type(response)()
                for pattern.id in ids[first : first + at_once]:
                    pattern.permission = _permission(data, pattern.id)
                    add(part, pattern)
                parts.append(part.SerializeToString())
                call.session.charge(len(parts[-1]))
                kept_bytes += len(parts[-1])
                yield
        yield from call.answering(response.status, parts)
    finally:
        call.session.charge(-kept_bytes)


def _queues_by_broker(context: HandlerContext, name: str, creates: bool, route: Route | None) -> list[Holding]:
    """Return the queues of a topic by broker, this broker first if it has the topic.

    Args:
        creates: True if the account may publish. A topic that no broker has is then created, if a send would create it.

    Raises StatusError if no broker has the topic and it may not be created.
    """
    broker = context.broker
    own = broker.config.name
    others = [data for data in route.queues if data.broker_name != own] if route is not None else []
    topic = broker.topics.get(name) or (_create_topic(context, name) if creates and not others else None)
    found: list[Holding] = []
    if topic is not None:
        queues = QueueData(own, topic.read_queues, topic.write_queues, topic.perm)
        found.append(Holding(queues, "", announced_types(topic)))
    addresses = {data.name: data.addresses.get(0, "") for data in route.brokers} if route is not None else {}
    found += [
        Holding(data, addresses[data.broker_name], _ALL_TYPES) for data in others if addresses.get(data.broker_name)
    ]
    if not found:
        raise StatusError(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
    return found


def _create_topic(context: HandlerContext, name: str) -> TopicConfig | None:
    """Create and return the topic that a send would create, because clients request the route before they send. Return None
    if a send would not create it. Raises StatusError if the disk is full."""
    broker = context.broker
    if name.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
        return None
    try:
        return broker.topics.auto_create(name, names.DEFAULT_TOPIC, broker.config.default_queues, broker.store.end)
    except StoreFull as error:
        raise StatusError(Code.INTERNAL_SERVER_ERROR, str(error)) from None


def _queue_template(call: GrpcCall, request: Any, holding: Holding) -> Any:
    """Return a queue of the response without id and permission. Raises StatusError for endpoints that are too long."""
    if request.endpoints.ByteSize() > MAX_ENDPOINTS_BYTES:
        raise StatusError(Code.ILLEGAL_ACCESS_POINT, f"the endpoints have more than {MAX_ENDPOINTS_BYTES} bytes")
    queue = MessageQueue()
    queue.topic.CopyFrom(request.topic)
    queue.broker.name = holding.queues.broker_name
    if holding.address:
        endpoints = endpoints_of(holding.address)
    elif request.endpoints.addresses:
        endpoints = request.endpoints
    else:  # the address that the client dialed, as far as its request shows it
        endpoints = endpoints_of(call.text(b":authority") or call.session.reached)
    queue.broker.endpoints.CopyFrom(endpoints)
    return queue


def endpoints_of(address: str) -> Any:
    """Return the endpoints of `host:port`; port 0 if the text has no valid port."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    endpoints = Endpoints()
    endpoints.scheme = _IPV6 if ":" in host else _IPV4 if _IS_IPV4(host) else _DOMAIN
    endpoints.addresses.add(host=host, port=int(port) if port.isdecimal() and len(port) < 6 else 0)
    return endpoints


def _permission(queues: QueueData, queue_id: int) -> int:
    if queue_id == _ALL_QUEUES:
        return _READ_WRITE
    reads = bool(queues.perm & PERM_READ) and queue_id < queues.read_queues
    writes = bool(queues.perm & PERM_WRITE) and queue_id < queues.write_queues
    return (_NONE, _READ, _WRITE, _READ_WRITE)[reads + 2 * writes]
