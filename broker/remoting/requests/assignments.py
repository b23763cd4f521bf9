"""QUERY_ASSIGNMENT, 5.0's: the broker computes a member's share, for members that ask for it, or lets it pop."""

from __future__ import annotations

from ....protocol import allocation, group_bodies
from ....protocol.bodies import Route
from ....protocol.codes import ResponseCode
from ....protocol.config import MAX_REQUEST_QUEUES
from ....protocol.frame import Frame
from ....protocol.pop_bodies import POP, encode_pop_assignment
from ....protocol.queue import Queue
from ...broker import Broker
from ...config import LimitExceeded
from ..answers import Buffers, answer
from ..connection import Connection


async def query_assignment(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Answers when the topic's route is known, which lies with a name server."""
    request = group_bodies.decode_assignment_request(frame.body)
    if request.strategy not in allocation.COMPUTED:
        remark = f"the strategy {request.strategy} is unknown; use {', '.join(allocation.COMPUTED)}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    is_popped = broker.request_modes.of(request.group, request.topic).mode == POP
    route = await broker.name_servers.find_route(request.topic)
    if route is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{request.topic}] not exist")
    if is_popped and request.message_model != "BROADCASTING":
        names = dict.fromkeys(data.broker_name for data in route.queues if data.read_queues)
        return answer(frame, body=encode_pop_assignment(request.topic, names))
    return answer(frame, body=group_bodies.encode_assignment(_share(broker, request, route)))


def _share(broker: Broker, request: group_bodies.AssignmentRequest, route: Route) -> list[Queue]:
    """Raises LimitExceeded where one request would keep all others waiting."""
    count = sum(data.read_queues for data in route.queues)
    if count > MAX_REQUEST_QUEUES:
        raise LimitExceeded(f"{request.topic} has {count} queues; a broker shares out {MAX_REQUEST_QUEUES} at most")
    queues = allocation.subscribe_queues(request.topic, route)
    if request.message_model == "BROADCASTING":
        return queues
    group = broker.groups.get(request.group)
    ids = list(group.order(request.topic)) if group else []
    strategy = allocation.COMPUTED[request.strategy]
    points = strategy.virtual_nodes * len(ids) if isinstance(strategy, allocation.ConsistentHash) else 0
    if points + count > broker.limits.max_hashed:
        raise LimitExceeded(f"{request.strategy} with {count} queues and {len(ids)} members takes too long; use AVG")
    return strategy.allocate(request.client_id, queues, ids)
