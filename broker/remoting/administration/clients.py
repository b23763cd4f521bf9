"""The connections of producers and consumers, and requests that the members of a group answer."""

from __future__ import annotations

from functools import partial

import structlog

from ....protocol import admin_bodies, bodies
from ....protocol.admin_bodies import ConnectedClient
from ....protocol.bodies import BodyError, ConsumerData, Work
from ....protocol.codes import Language, RequestCode, ResponseCode
from ....protocol.config import MAX_TABLE_BYTES
from ....protocol.frame import Frame
from ....protocol.headers import AskMember, ConsumerGroupHeader, ProducerGroup, TopicGroup, read
from ....protocol.message import decode_host
from ....protocol.names import Queue
from ...broker import BrokerController
from ...config import MAX_ASKED_AT_ONCE, MAX_STATUSES_BYTES
from ...sessions.events import Answer, ForwardedRequest, HandlingWanted, OffsetsWanted, RunningWanted
from ..connection import RemotingConnection
from ..responses import Buffers, answer, small

log = structlog.get_logger("rocketlet.admin")


def all_producers(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    return answer(frame, body=(yield from admin_bodies.encode_all_producers(broker.clients.all_producers())))


def producer_connections(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    name = read(ProducerGroup, frame.ext).producer_group
    infos = broker.clients.producers(name)
    if not infos:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"the producer group[{name}] not exist")
    return answer(frame, body=(yield from admin_bodies.encode_producer_connections(infos)))


def consumer_connections(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    name = read(ConsumerGroupHeader, frame.ext).consumer_group
    group, popping = broker.groups.online(name), broker.pops.pools.clients_of(name)
    if group is None and not popping:
        remark = f"the consumer group[{name}] not online"
        return answer(frame, ResponseCode.CONSUMER_NOT_ONLINE, remark=remark)
    members = [member for member in group.members.values() if not member.is_grpc_client] if group is not None else []
    data = members[0].data if members else ConsumerData(name)
    infos = [
        ConnectedClient(member.client_id, member.session.peer, member.language, member.version) for member in members
    ]
    known = {member.client_id for member in members}
    infos += [ConnectedClient(client_id, "", Language.OTHER, 0) for client_id in popping if client_id not in known]
    table: dict[str, object] = {
        item.topic: bodies.encode_subscription(item) for wanted in popping.values() for item in wanted
    }
    for topic in sorted(group.topics) if group is not None else ():
        found = group.subscription(None, topic) if group is not None else None
        if found is not None:
            table[topic] = bodies.encode_subscription(found)
        yield
    body = yield from admin_bodies.encode_consumer_connections(
        infos, data.consume_type, data.message_model, data.consume_from, table
    )
    return answer(frame, body=body)


def consumer_status(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: query the offsets of all members, or of one. The response follows when all of
    these have responded, disconnected or timed out, and leaves out members without a valid response."""
    header = read(TopicGroup, frame.ext)
    group = broker.groups.get(header.group)
    asked = {
        member.client_id: peer
        for peer, member in (group.members.items() if group else ())
        if not member.is_grpc_client and header.client_addr in (None, "", member.client_id)
    }
    if not asked:
        remark = f"No Any Consumer online in the consumer group: [{header.group}]"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    frame = small(frame)  # the members may take seconds to respond, so keep only what is needed
    offsets: dict[str, dict[Queue, int]] = {}
    waiting, size = set(asked), 0
    if len(asked) > MAX_ASKED_AT_ONCE:
        remark = (
            f"the group {header.group} has {len(asked)} members; {MAX_ASKED_AT_ONCE} are queried together; name one"
        )
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)

    def answered(client_id: str, reply: Answer | None) -> None:
        nonlocal size
        waiting.discard(client_id)
        size += len(reply.body) if reply is not None else 0
        if reply is not None and reply.is_ok and size <= MAX_STATUSES_BYTES:
            try:
                offsets[client_id] = admin_bodies.decode_client_status(reply.body)
            except BodyError as error:
                if connection.is_news("consumer_status_unreadable"):
                    log.warning("consumer_status_unreadable", client=client_id, reason=str(error))
        if not waiting:
            connection.write(answer(frame, body=admin_bodies.encode_consumer_status(offsets)))

    wanted = OffsetsWanted(header.group, header.topic)
    for client_id, peer in asked.items():
        broker.client_requests.send(peer, wanted, partial(answered, client_id), by=connection)
    return None


def forward(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """GET_CONSUMER_RUNNING_INFO and CONSUME_MESSAGE_DIRECTLY: forward the request to the named member. The response follows
    when the member has responded, disconnected or timed out."""
    header = read(AskMember, frame.ext)
    group = broker.groups.get(header.consumer_group)
    member = next(
        (
            asked
            for asked, one in (group.members if group else {}).items()
            if one.client_id == header.client_id and not one.is_grpc_client
        ),
        None,
    )
    if member is None:
        remark = f"The Consumer <{header.consumer_group}> <{header.client_id}> not online"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    fields, frame = dict(frame.ext), small(frame)  # the member may take seconds to respond, so keep only what is needed
    record: bytes | None = None
    if frame.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        fields["brokerName"] = broker.config.name
        record = broker.store.record_bytes_at(_position_in(header.msg_id))
        if record is None:
            remark = f"no message has the id {header.msg_id}"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)

    def answered(reply: Answer | None) -> None:
        if reply is not None and len(reply.body) > MAX_TABLE_BYTES:
            remark = f"the response of {header.client_id} has {len(reply.body)} bytes; maximum {MAX_TABLE_BYTES}"
            connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark))
        elif reply is None:
            remark = f"consumer <{header.consumer_group}> <{header.client_id}> did not answer in time"
            connection.write(answer(frame, ResponseCode.CONSUME_MSG_TIMEOUT, remark=remark))
        else:
            connection.write(_passed_on(frame, reply))

    asked = ForwardedRequest(header.consumer_group, header.client_id, fields)
    wanted = RunningWanted(asked) if record is None else HandlingWanted(asked, record)
    broker.client_requests.send(member, wanted, answered, by=connection)
    return None


def _passed_on(request: Frame, reply: Answer) -> Buffers:
    """Return a member's response for the tool. For a member of the gRPC server, it has only the success and the body."""
    if isinstance(reply.detail, Frame):
        came = reply.detail
        return answer(request, came.code, dict(came.ext), came.body, came.remark)
    return answer(request, ResponseCode.SUCCESS if reply.is_ok else ResponseCode.SYSTEM_ERROR, body=reply.body)


def _position_in(message_id: str | None) -> int:
    """Return the commit log position in an offset id; -1 for other text."""
    try:
        data = bytes.fromhex(message_id or "")
        decode_host(data[:-8])
    except (ValueError, OSError):
        return -1
    return int.from_bytes(data[-8:], "big")
