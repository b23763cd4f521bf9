"""The requests of membership: heartbeats, unregistering, member lists, locks, client checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog

from ....protocol import bodies, group_bodies, names
from ....protocol.bodies import ConsumerData, TopicConfig
from ....protocol.codes import EXT_DETAIL, EXT_SEEN_QUEUES, EXT_SHARES, ResponseCode
from ....protocol.frame import Ext, Frame
from ....protocol.group_config import GroupConfig
from ....protocol.headers import ConsumerGroup as ConsumerGroupHeader
from ....protocol.headers import UnregisterClient, read
from ....protocol.queue import Queue
from ....protocol.subscription import SQL92, TAG
from ...broker import Broker
from ...groups.member import shape_of
from ...groups.members import ConsumerGroup
from ...sessions.refusal import Refusal
from ...store.files import StoreFull
from ..answers import Buffers, Refused, answer, refused, small
from ..connection import Connection

log = structlog.get_logger("rocketlet.groups")


def heartbeat(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    try:
        beat = _beat_of(connection, frame.body)
        if connection.beat is None:
            _forget_presumed(broker, connection, beat)
        _check(broker, connection, beat)
        broker.clients.heartbeat(connection, beat.client_id, beat.producer_groups, frame.language, frame.version)
    except Exception as error:
        client_id, groups = bodies.names_in_heartbeat(frame.body)
        is_news = connection.is_news("heartbeat_refused")
        broker.refusals.note(connection.peer, client_id, groups, str(error), is_news=is_news)
        raise
    _take(broker, connection, beat, frame.language, frame.version)
    if connection.beat is None or connection.beat[1] is not beat:
        connection.keep_beat((frame.body, beat))
    return answer(frame)


def introduced(broker: Broker, connection: Connection, beat: bodies.Heartbeat, language: int, version: int) -> None:
    """A client becomes a member by what it has answered, as by a heartbeat of its own; that one may give another id. Raises
    Refused, Refusal, LimitExceeded."""
    _check(broker, connection, beat)
    broker.clients.heartbeat(connection, beat.client_id, (), language, version)
    _take(broker, connection, beat, language, version)
    for consumer in beat.consumers:
        broker.groups.members_of(consumer.group)[connection].is_presumed = True


def _forget_presumed(broker: Broker, connection: Connection, beat: bodies.Heartbeat) -> None:
    """The client says who it is."""
    for consumer in beat.consumers:
        member = broker.groups.members_of(consumer.group).get(connection)
        if member is not None and member.is_presumed:
            member.is_presumed = False
            if member.client_id != beat.client_id:
                broker.groups.leave(connection, consumer.group)


def _take(broker: Broker, connection: Connection, beat: bodies.Heartbeat, language: int, version: int) -> None:
    for consumer in beat.consumers:
        broker.groups.heartbeat(connection, beat.client_id, consumer, language, version)
        for place in broker.locks.readers_back(consumer.group, beat.client_id):
            broker.watch.pulled(connection, consumer.group, *place)  # it handles messages of the queue since before
        broker.locks.join(connection, consumer.group)
        broker.notifications.heard(connection, consumer.group)


def _check(broker: Broker, connection: Connection, beat: bodies.Heartbeat) -> None:
    """All that a heartbeat may be refused for, before any of its groups is registered. Raises Refused, Refusal,
    LimitExceeded."""
    for consumer in beat.consumers:
        settings = broker.group_configs.ensure(consumer.group)
        if settings is not None and settings.strict:
            fault = _strict_fault(broker, connection, consumer)
            if fault:
                raise Refused(ResponseCode.NO_PERMISSION, fault)
        if settings is not None:
            _ensure_retry_topic(broker, connection, settings)
    if connection.beat is None or connection.beat[1] is not beat:  # the last one once more was admitted
        broker.groups.admit(connection, beat.client_id, (consumer.group for consumer in beat.consumers))


def _beat_of(connection: Connection, body: bytes) -> bodies.Heartbeat:
    """Most heartbeats are their client's last one once more, which was decoded and checked. Raises BodyError, IllegalName."""
    if connection.beat is not None and connection.beat[0] == body:
        return connection.beat[1]
    beat = bodies.decode_heartbeat(body)
    # All names first: a heartbeat that is refused registers nothing.
    for consumer in beat.consumers:
        fault = names.group_fault(consumer.group)
        if fault:
            raise names.IllegalName(fault)
    return beat


def _ensure_retry_topic(broker: Broker, connection: Connection, group: GroupConfig) -> None:
    name = names.retry_topic(group.name)
    if broker.topics.get(name) is not None:
        return
    try:
        broker.topics.ensure(TopicConfig(name, group.retry_queues, group.retry_queues), broker.store.end)
    except StoreFull as error:  # members can read from a full disk
        if connection.is_news("retry_topic_save_failed"):
            log.error("retry_topic_save_failed", group=group.name, reason=str(error))


def _strict_fault(broker: Broker, connection: Connection, consumer: ConsumerData) -> str | None:
    """Why a strict group refuses a member; None if it does not."""
    wanted = shape_of({item.topic: item for item in consumer.subscriptions}.values())
    group = broker.groups.get(consumer.group)
    other = group.other_than(connection, wanted) if group else None
    if other is None:
        return None
    return (
        f"the group {consumer.group} is strict: this client subscribes to {_spelled(wanted)}, {other.client_id} to "
        f"{_spelled(other.shape)}; subscribe to the same, or use `rocketlet groups set {consumer.group} --strict off`"
    )


def _spelled(subscriptions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{topic} [{expression}]" for topic, expression in sorted(subscriptions))


def unregister_client(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(UnregisterClient, frame.ext)
    connection.keep_beat(None)
    if header.consumer_group:
        broker.pops.session_gone(connection)
        is_foreign = broker.commits.is_foreign_member(connection, header.consumer_group)
        if is_foreign:
            unfinished = 0
            for place in broker.watch.read_by(connection, header.consumer_group):
                broker.offsets.mark(header.consumer_group, *place)  # the next one may have loaded its offset before
                broker.locks.forget_reader(header.consumer_group, *place)
                committed = broker.offsets.get(header.consumer_group, *place) or 0
                unfinished += max(broker.watch.given(connection, header.consumer_group, *place) - committed, 0)
            if unfinished:
                broker.repeats.note_left(header.consumer_group, header.client_ID, unfinished)
        broker.groups.leave(connection, header.consumer_group)
        broker.locks.leave(connection, header.consumer_group, is_foreign=is_foreign)
    if header.producer_group:
        broker.clients.forget_producer(header.producer_group, connection)
    return answer(frame)


def consumer_list(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    header = read(ConsumerGroupHeader, frame.ext)
    name, topic, detail = header.consumer_group, header.topic, frame.ext.get(EXT_DETAIL)
    if detail is None and not topic:
        question = small(frame)
        if broker.draining.notices.when_sure(
            name, connection, lambda: connection.write(_list_given(broker, connection, question, name))
        ):
            return None
        return _list_given(broker, connection, frame, name)
    group = broker.groups.get(name)
    client_ids: list[str] = []
    if group is not None:
        client_ids = group.client_ids(topic) if topic else broker.draining.notices.given(group, connection)
    if group is None or not client_ids or detail is None:
        return _listed(frame, name, client_ids)
    if detail == "members" or not topic:
        return answer(frame, ext=_seen_queues(group, topic), body=group_bodies.encode_members(client_ids))
    return answer(frame, ext=_place_or_share(group, connection, frame, topic))


def _list_given(broker: Broker, connection: Connection, frame: Frame, name: str) -> Buffers:
    """The answer to a member that shares the queues of all its topics out by one list."""
    group = broker.groups.get(name)
    # A reader that is not known again yet would drop its queues, with messages of them in its handlers.
    if group is None or (connection not in group.members and broker.locks.misses_readers(name)):
        return _listed(frame, name, [])
    return _listed(frame, name, broker.draining.notices.given(group, connection))


def _listed(frame: Frame, name: str, client_ids: list[str]) -> Buffers:
    if not client_ids:
        # ConsumerManageProcessor.getConsumerListByGroup: Apache's Java client keeps its queues when it gets this.
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"no consumer for this group, {name}")
    return answer(frame, body=group_bodies.encode_members(client_ids))


def _place_or_share(group: ConsumerGroup, connection: Connection, frame: Frame, topic: str) -> Ext:
    """A member's position or share, which spares it the list of the others."""
    member = group.members.get(connection)
    client_id = member.client_id if member else ""
    if member is not None and EXT_SEEN_QUEUES in frame.ext:
        group.sees(member, topic, group_bodies.decode_seen_queues(str(frame.ext[EXT_SEEN_QUEUES]).encode()))
    share = group.share(client_id, topic) if frame.ext.get(EXT_DETAIL) == "share" else None
    shares: Ext = {EXT_SHARES: group_bodies.encode_shares({topic: share})} if share else {}
    index, count = group.place(client_id, topic)
    return {"index": index, "count": count, **shares, **_seen_queues(group, topic)}


def _seen_queues(group: ConsumerGroup, topic: str | None) -> Ext:
    """The queues of a topic as the members see them, for one that asks just when a broker is missing in its route."""
    return {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues(group.seen_queues(topic))} if topic else {}


def lock(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request) or names.group_fault(request.group)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, body=group_bodies.encode_locked({}), remark=fault)
    refused = broker.locks.refused
    epochs = broker.locks.lock(request, connection)
    if request.offsets:
        return answer(frame, body=group_bodies.encode_locked(epochs, _commit(broker, connection, request, epochs)))
    # A queue taken anew: with its offset a member can begin without another request.
    if not request.handover or request.epochs:
        # Apache's clients take queues that are not in the answer for locked by another, and ask again.
        remark = "this broker keeps no more locks; try again later" if broker.locks.refused > refused else None
        return answer(frame, body=group_bodies.encode_locked(epochs), remark=remark)
    found = {queue: broker.offsets.get(request.group, queue.topic, queue.queue_id) for queue in epochs}
    offsets = {queue: offset for queue, offset in found.items() if offset is not None}
    return answer(frame, body=group_bodies.encode_locked(epochs, offsets))


def _commit(
    broker: Broker, connection: Connection, request: group_bodies.LockRequest, epochs: Mapping[Queue, int]
) -> dict[Queue, int]:
    """Carries out a member's commits, in one request that renews its leases, too. The member asks for the rest queue by
    queue, and is told why not."""
    done: dict[Queue, int] = {}
    for queue, offset in request.offsets.items():
        place = (queue.topic, queue.queue_id)
        epoch = epochs.get(queue)
        if epoch is None or request.epochs.get(queue) != epoch:
            continue
        fault = broker.commits.fence_fault(
            connection, request.group, place, offset, epoch
        ) or broker.commits.offset_fault(request.group, place, offset)
        if fault is None:
            broker.commits.store(connection, request.group, place, offset, by_owner=True)
            done[queue] = offset
    return done


def unlock(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    if request.offsets:
        return _commit_and_unlock(broker, connection, frame, request)
    faults = broker.locks.unlock(request, connection)
    # Apache's clients expect success whatever was locked: their broker says nothing else.
    if faults and request.handover:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"not unlocked: {'; '.join(faults)}")
    return answer(frame)


def _commit_and_unlock(
    broker: Broker, connection: Connection, frame: Frame, request: group_bodies.LockRequest
) -> Buffers:
    """Hands over several queues of a member in one request: the answer names those that were committed and unlocked. The
    member commits the rest queue by queue, and is told why not."""
    ready: list[Queue] = []
    for queue, offset in request.offsets.items():
        place, epoch = (queue.topic, queue.queue_id), request.epochs.get(queue)
        fault = broker.commits.fence_fault(
            connection, request.group, place, offset, epoch
        ) or broker.commits.offset_fault(request.group, place, offset)
        if fault is None and epoch is not None:
            broker.commits.store(connection, request.group, place, offset, by_owner=True)
            ready.append(queue)
    broker.locks.unlock(replace(request, queues=tuple(ready)), connection)
    locks, group = broker.locks, request.group
    done = {
        queue: request.epochs[queue]
        for queue in ready
        if not locks.is_leased_to(group, queue.topic, queue.queue_id, connection)
    }
    return answer(frame, body=group_bodies.encode_locked(done))


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


def check_client(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    """CHECK_CLIENT_CONFIG: whether the broker can filter as the client wants."""
    check = group_bodies.decode_client_check(frame.body)
    kind = check.kind or TAG
    if kind == TAG:
        return answer(frame)
    if kind != SQL92:
        remark = f"the expression type {kind} is unknown; use TAG or SQL92"
        return answer(frame, ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=remark)
    request = small(frame)
    if broker.filters.find(check.expression) is None:
        broker.filters.when_parsed(
            connection,
            check.expression,
            lambda: connection.write(_checked(broker, request, check.expression)),
            len(check.expression),
        )
        return None
    return answer(frame)


def _checked(broker: Broker, frame: Frame, expression: str) -> Buffers:
    try:
        broker.filters.find(expression)
    except Refusal as refusal:
        return refused(refusal).answer(frame)
    return answer(frame)
