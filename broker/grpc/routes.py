"""QueryRoute and QueryAssignment: where a topic's queues are."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

from ...protocol import names
from ...protocol.bodies import QueueData, Route, TopicConfig, Work
from ...protocol.codes import PERM_READ, PERM_WRITE
from ..config import MAX_ENDPOINTS_BYTES, QUEUE_BYTES, ROUTE_PIECE_BYTES
from ..store.files import StoreFull
from .calls import GrpcCall, set_status
from .clients import HandlerContext
from .schema import (
    Code,
    Endpoints,
    MessageQueue,
    QueryAssignmentResponse,
    QueryRouteResponse,
    StatusError,
    group_of,
    topic_of,
)

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
