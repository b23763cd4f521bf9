"""QueryRoute and QueryAssignment: where a topic's queues are.

A client is told the address by which it has reached this broker. Apache's proxy answers the one that it was configured with:
where that is a container's, clients outside connect to themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from ...protocol import names
from ...protocol.bodies import QueueData, Route, TopicConfig
from ...protocol.codes import PERM_READ, PERM_WRITE
from ..config import MAX_ENDPOINTS_BYTES, MAX_NAMESPACE_CHARS
from ..store.files import StoreFull
from .calls import Call, set_status
from .codes import Code, Fault
from .hall import Hall
from .names import group_of, topic_of
from .schema import Endpoints, MessageQueue, QueryAssignmentResponse, QueryRouteResponse

_NONE, _READ, _WRITE, _READ_WRITE = 1, 2, 3, 4
_IPV4, _IPV6, _DOMAIN = 1, 2, 3
_IS_IPV4: Final = re.compile(r"\d+\.\d+\.\d+\.\d+\Z").match
_ALL_TYPES: Final = (1, 2, 3, 4)
TYPES: Final = {
    "NORMAL": (1,),
    "FIFO": (2,),
    "DELAY": (3,),
    "TRANSACTION": (4,),
    "MIXED": _ALL_TYPES,
    "UNSPECIFIED": _ALL_TYPES,
}


def accepted_types(topic: TopicConfig) -> tuple[int, ...]:
    """A topic that nobody gave a type takes all: those of 4.9 never had one."""
    return TYPES.get(topic.message_type, _ALL_TYPES)


class Holding(NamedTuple):
    """The queues of a topic that one broker has. `address`: empty for this one, which is where the client has reached it."""

    queues: QueueData
    address: str
    types: tuple[int, ...]


def query_route(hall: Hall, call: Call, request: Any) -> Any:
    name = topic_of(request.topic)
    return _answer(hall, call, name, partial(_route, call, request))


def query_assignment(hall: Hall, call: Call, request: Any) -> Any:
    """Every client of a group gets the same: of each broker one place that stands for all its queues, or in a group that
    takes messages in order each queue for itself."""
    name = topic_of(request.topic)
    group = group_of(request.group)
    settings = hall.broker.group_configs.ensure(group)
    is_in_order = settings is not None and settings.consume_orderly
    return _answer(hall, call, name, partial(_assignments, call, request, is_in_order))


def _answer(hall: Hall, call: Call, name: str, make: Callable[[list[Holding]], Any]) -> Any:
    """Answers at once, or when a name server in another process has answered."""
    servers, creates = hall.broker.name_servers, hall.may_publish(call, name)
    if servers.are_elsewhere:
        return _answer_later(hall, name, creates, make)
    route = servers.local.route(name) if servers.local is not None else None
    return make(_holdings(hall, name, creates, route))


async def _answer_later(hall: Hall, name: str, creates: bool, make: Callable[[list[Holding]], Any]) -> Any:
    return make(_holdings(hall, name, creates, await hall.broker.name_servers.find_route(name)))


def _route(call: Call, request: Any, holdings: list[Holding]) -> Any:
    response = QueryRouteResponse()
    set_status(response.status)
    for holding in holdings:
        pattern = _pattern(call, request, holding)
        pattern.accept_message_types.extend(holding.types)
        for queue_id in range(max(holding.queues.read_queues, holding.queues.write_queues)):
            pattern.id, pattern.permission = queue_id, _permission(holding.queues, queue_id)
            response.message_queues.append(pattern)
    return response


def _assignments(call: Call, request: Any, is_in_order: bool, holdings: list[Holding]) -> Any:
    response = QueryAssignmentResponse()
    set_status(response.status)
    for holding in holdings:
        queues = holding.queues
        if not queues.perm & PERM_READ or not queues.read_queues:
            continue
        pattern = _pattern(call, request, holding)
        for queue_id in range(queues.read_queues) if is_in_order else (-1,):
            pattern.id = queue_id
            pattern.permission = _READ_WRITE if queue_id < 0 else _permission(queues, queue_id)
            response.assignments.add().message_queue.CopyFrom(pattern)
    if not response.assignments:
        raise Fault(Code.FORBIDDEN, f"the topic {request.topic.name} has no queue that may be read")
    return response


def _holdings(hall: Hall, name: str, creates: bool, route: Route | None) -> list[Holding]:
    """This broker's first. creates: for who may send, as a send creates topics. Raises Fault if nobody has the topic, and it
    may not be created."""
    broker = hall.broker
    own = broker.config.name
    others = [data for data in route.queues if data.broker_name != own] if route is not None else []
    topic = broker.topics.get(name) or (_created(hall, name) if creates and not others else None)
    found: list[Holding] = []
    if topic is not None:
        queues = QueueData(own, topic.read_queues, topic.write_queues, topic.perm)
        found.append(Holding(queues, "", accepted_types(topic)))
    addresses = {data.name: data.addresses.get(0, "") for data in route.brokers} if route is not None else {}
    found += [
        Holding(data, addresses[data.broker_name], _ALL_TYPES) for data in others if addresses.get(data.broker_name)
    ]
    if not found:
        raise Fault(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
    return found


def _created(hall: Hall, name: str) -> TopicConfig | None:
    """Clients ask for the route before they send, so a topic that a send may create is created here. Raises Fault."""
    broker = hall.broker
    if name.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
        return None
    try:
        return broker.topics.auto_create(name, names.DEFAULT_TOPIC, broker.config.default_queues, broker.store.end)
    except StoreFull as error:
        raise Fault(Code.INTERNAL_SERVER_ERROR, str(error)) from None


def _pattern(call: Call, request: Any, holding: Holding) -> Any:
    """A queue of the answer. Raises Fault for what would make each of them long."""
    if len(request.topic.resource_namespace) > MAX_NAMESPACE_CHARS:
        raise Fault(Code.BAD_REQUEST, f"the namespace has more than {MAX_NAMESPACE_CHARS} characters")
    if request.endpoints.ByteSize() > MAX_ENDPOINTS_BYTES:
        raise Fault(Code.ILLEGAL_ACCESS_POINT, f"the endpoints have more than {MAX_ENDPOINTS_BYTES} bytes")
    queue = MessageQueue()
    queue.topic.CopyFrom(request.topic)
    queue.broker.name = holding.queues.broker_name
    if holding.address:
        endpoints = endpoints_of(holding.address)
    elif request.endpoints.addresses:
        endpoints = request.endpoints
    else:  # the client's target, as far as can be seen from here
        endpoints = endpoints_of(call.text(b":authority") or call.session.reached)
    queue.broker.endpoints.CopyFrom(endpoints)
    return queue


def endpoints_of(address: str) -> Any:
    """The endpoints of `host:port`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    endpoints = Endpoints()
    endpoints.scheme = _IPV6 if ":" in host else _IPV4 if _IS_IPV4(host) else _DOMAIN
    endpoints.addresses.add(host=host, port=int(port) if port.isdecimal() and len(port) < 6 else 0)
    return endpoints


def _permission(queues: QueueData, queue_id: int) -> int:
    reads = bool(queues.perm & PERM_READ) and queue_id < queues.read_queues
    writes = bool(queues.perm & PERM_WRITE) and queue_id < queues.write_queues
    return (_NONE, _READ, _WRITE, _READ_WRITE)[reads + 2 * writes]
