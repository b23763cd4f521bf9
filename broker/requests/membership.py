"""The requests of membership: heartbeats, unregistering, member lists, locks, client checks."""

from __future__ import annotations

import structlog

from ...protocol import bodies, group_bodies, names
from ...protocol.bodies import ConsumerData, Queue, TopicConfig
from ...protocol.codes import EXT_DETAIL, EXT_SEEN_QUEUES, ResponseCode
from ...protocol.frame import Ext, Frame
from ...protocol.headers import ConsumerGroup as ConsumerGroupHeader
from ...protocol.headers import UnregisterClient, read
from ...protocol.subscription import SQL92, TAG
from ..broker import Broker
from ..groups.members import ConsumerGroup
from ..net.answers import Buffers, answer
from ..net.connection import Connection
from ..store.files import StoreFull

log = structlog.get_logger("rocketlet.groups")


def heartbeat(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    beat = bodies.decode_heartbeat(frame.body)
    for consumer in beat.consumers:
        fault = names.group_fault(consumer.group)
        if fault:
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    for consumer in beat.consumers:
        settings = broker.group_configs.ensure(consumer.group)
        if settings is not None and settings.strict:
            fault = _strict_fault(broker, connection, consumer)
            if fault:
                return answer(frame, ResponseCode.NO_PERMISSION, remark=fault)
        if settings is not None:
            queues = settings.retry_queues
            try:
                broker.topics.ensure(TopicConfig(names.retry_topic(consumer.group), queues, queues), broker.store.end)
            except StoreFull as error:  # who only reads can do so on a full disk
                log.error("retry_topic_save_failed", group=consumer.group, reason=str(error))
        broker.groups.heartbeat(connection, beat.client_id, consumer, frame.language, frame.version)
    broker.clients.heartbeat(connection, beat.client_id, beat.producer_groups, frame.language, frame.version)
    return answer(frame)


def _strict_fault(broker: Broker, connection: Connection, consumer: ConsumerData) -> str | None:
    """Why a strict group refuses a member; None if it does not."""
    wanted = {item.topic: item.expression for item in consumer.subscriptions}
    group = broker.groups.get(consumer.group)
    for other, member in group.members.items() if group else ():
        theirs = {item.topic: item.expression for item in member.subscriptions.values()}
        if other is not connection and theirs != wanted:
            return (
                f"the group {consumer.group} is strict: this client subscribes to {_spelled(wanted)}, {member.client_id} to "
                f"{_spelled(theirs)}; subscribe to the same, or use `rocketlet groups strict {consumer.group} off`"
            )
    return None


def _spelled(subscriptions: dict[str, str]) -> str:
    return ", ".join(f"{topic} [{expression}]" for topic, expression in sorted(subscriptions.items()))


def unregister_client(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(UnregisterClient, frame.ext)
    if header.consumer_group:
        broker.groups.leave(connection, header.consumer_group)
        broker.locks.leave(connection, header.consumer_group)
    if header.producer_group:
        broker.clients.forget_producer(header.producer_group, connection)
    return answer(frame)


def consumer_list(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(ConsumerGroupHeader, frame.ext)
    group = broker.groups.get(header.consumer_group)
    client_ids: list[str] = []
    if group is not None:
        if header.topic:
            client_ids = group.client_ids(header.topic)
        else:
            client_ids = broker.draining.given(group, connection, group.companions(connection))
    if not client_ids:
        remark = f"no consumer for this group, {header.consumer_group}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    detail = frame.ext.get(EXT_DETAIL)
    if group is not None and detail == "position":
        member = group.members.get(connection)
        index, count = group.place(member.client_id if member else "", header.topic)
        return answer(frame, ext={"index": index, "count": count, **_seen_queues(group, header.topic)})
    members = group_bodies.MemberList(client_ids, {}, frozenset())
    if group is not None and detail == "owners":
        owners = broker.locks.owners(group.name).items()
        found = {Queue(topic, broker.config.name, number): owner for (topic, number), owner in owners}
        members = group_bodies.MemberList(client_ids, found, group.strategies())
    ext = _seen_queues(group, header.topic) if group is not None and detail else {}
    return answer(frame, ext=ext, body=group_bodies.encode_members(members))


def _seen_queues(group: ConsumerGroup, topic: str | None) -> Ext:
    """The queues of a topic as the members see them, for one that asks just when a broker is missing in its route."""
    return {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues(group.seen_queues(topic))} if topic else {}


def lock(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, body=group_bodies.encode_locked({}), remark=fault)
    return answer(frame, body=group_bodies.encode_locked(broker.locks.lock(request, connection)))


def unlock(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    faults = broker.locks.unlock(request, connection)
    if faults and request.handover:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"not unlocked: {'; '.join(faults)}")
    return answer(frame)


def _foreign_client(broker: Broker, connection: Connection, request: group_bodies.LockRequest) -> str | None:
    """Why a lease is not this connection's to take or free; None if it is. Apache's clients are believed."""
    if not request.handover:
        return None
    group = broker.groups.get(request.group)
    member = group.members.get(connection) if group else None
    if member is None:
        return f"this connection is not a member of the group {request.group}; send a heartbeat first"
    if member.client_id != request.client_id:
        return f"this connection is the client {member.client_id}, not {request.client_id}"
    return None


def check_client(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CHECK_CLIENT_CONFIG: whether the broker can filter as the client wants."""
    check = group_bodies.decode_client_check(frame.body)
    kind = check.kind or TAG
    if kind == TAG:
        return answer(frame)
    if kind != SQL92:
        remark = f"the expression type {kind} is unknown; use TAG or SQL92"
        return answer(frame, ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=remark)
    from ..messages.sql_filter import FilterError, parse_filter

    try:
        parse_filter(check.expression)
    except FilterError as error:
        return answer(frame, ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
    return answer(frame)
