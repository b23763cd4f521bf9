"""QueryRoute and QueryAssignment: where a topic's queues are.

A client is told the address by which it has reached this broker. Apache's proxy answers the one that it was configured with:
where that is a container's, clients outside connect to themselves.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ...protocol import names
from ...protocol.bodies import TopicConfig
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


def query_route(hall: Hall, call: Call, request: Any) -> Any:
    topic = _topic_at(hall, topic_of(request.topic), creates=True)
    response = QueryRouteResponse()
    set_status(response.status)
    pattern = _pattern(hall, call, request)
    pattern.accept_message_types.extend(accepted_types(topic))
    for queue_id in range(max(topic.read_queues, topic.write_queues)):
        pattern.id, pattern.permission = queue_id, _permission(topic, queue_id)
        response.message_queues.append(pattern)
    return response


def query_assignment(hall: Hall, call: Call, request: Any) -> Any:
    """Every client of a group gets the same: one place that stands for all queues, or in a group that takes messages in order
    each queue for itself."""
    name = topic_of(request.topic)
    group = group_of(request.group)
    topic = _topic_at(hall, name, creates=True)
    if not topic.perm & PERM_READ or not topic.read_queues:
        raise Fault(Code.FORBIDDEN, f"the topic {topic.name} has no queue that may be read")
    settings = hall.broker.group_configs.ensure(group)
    is_in_order = settings is not None and settings.consume_orderly
    response = QueryAssignmentResponse()
    set_status(response.status)
    pattern = _pattern(hall, call, request)
    for queue_id in range(topic.read_queues) if is_in_order else (-1,):
        pattern.id = queue_id
        pattern.permission = _READ_WRITE if queue_id < 0 else _permission(topic, queue_id)
        response.assignments.add().message_queue.CopyFrom(pattern)
    return response


def _topic_at(hall: Hall, name: str, *, creates: bool) -> TopicConfig:
    """Clients ask for the route before they send, so a topic that a send may create is created here. Raises Fault."""
    broker = hall.broker
    topic = broker.topics.get(name)
    if topic is None and creates and not name.startswith((names.RETRY_PREFIX, names.DLQ_PREFIX)):
        try:
            topic = broker.topics.auto_create(name, names.DEFAULT_TOPIC, broker.config.default_queues, broker.store.end)
        except StoreFull as error:
            raise Fault(Code.INTERNAL_SERVER_ERROR, str(error)) from None
    if topic is None:
        raise Fault(Code.TOPIC_NOT_FOUND, f"No topic route info of {name}: create the topic first")
    return topic


def _pattern(hall: Hall, call: Call, request: Any) -> Any:
    """A queue of the answer. Raises Fault for what would make each of them long."""
    if len(request.topic.resource_namespace) > MAX_NAMESPACE_CHARS:
        raise Fault(Code.BAD_REQUEST, f"the namespace has more than {MAX_NAMESPACE_CHARS} characters")
    if request.endpoints.ByteSize() > MAX_ENDPOINTS_BYTES:
        raise Fault(Code.ILLEGAL_ACCESS_POINT, f"the endpoints have more than {MAX_ENDPOINTS_BYTES} bytes")
    queue = MessageQueue()
    queue.topic.CopyFrom(request.topic)
    queue.broker.name = hall.broker.config.name
    queue.broker.endpoints.CopyFrom(request.endpoints if request.endpoints.addresses else _reached(call))
    return queue


def _reached(call: Call) -> Any:
    """What the client has connected to, as far as can be seen from here."""
    host, _, port = (call.text(b":authority") or call.session.reached).rpartition(":")
    host = host.strip("[]")
    endpoints = Endpoints()
    endpoints.scheme = _IPV6 if ":" in host else _IPV4 if _IS_IPV4(host) else _DOMAIN
    address = endpoints.addresses.add()
    address.host, address.port = host, int(port) if port.isdecimal() and len(port) < 6 else 0
    return endpoints


def _permission(topic: TopicConfig, queue_id: int) -> int:
    reads = bool(topic.perm & PERM_READ) and queue_id < topic.read_queues
    writes = bool(topic.perm & PERM_WRITE) and queue_id < topic.write_queues
    return (_NONE, _READ, _WRITE, _READ_WRITE)[reads + 2 * writes]
