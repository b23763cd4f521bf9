"""Remoting requests of group members: HEART_BEAT, UNREGISTER_CLIENT, locks, assignments, offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hmac import compare_digest

import structlog

from ...protocol import allocation, bodies, group_bodies, names
from ...protocol.admin_bodies import Running, decode_running
from ...protocol.bodies import SLICE, BodyError, ConsumerData, Heartbeat, Route, Work, finish
from ...protocol.codes import EXT_DETAIL, EXT_SEEN_QUEUES, EXT_SHARES, EXT_UNKNOWN, RequestCode, ResponseCode
from ...protocol.config import MAX_ID_CHARS, MAX_REQUEST_QUEUES, MAX_SUBSCRIPTIONS
from ...protocol.frame import Ext, Frame
from ...protocol.group_bodies import (
    POP,
    AgreedMembers,
    TopicExtent,
    decode_agreed_members,
    decode_topics,
    encode_extents,
    encode_pop_assignment,
)
from ...protocol.headers import (
    AgreeOnMembers,
    BrokerTimes,
    ConfirmWord,
    HeartbeatAnswer,
    Offset,
    OptionalGroup,
    QueueOffset,
    SearchOffset,
    StoreTime,
    TopicQueue,
    UnregisterClient,
    UpdateOffset,
    read,
    write,
)
from ...protocol.headers import ConsumerGroupHeader as ConsumerGroupHeader
from ...protocol.names import RETRY_PREFIX, SQL92, TAG, Queue, SubscriptionError, parse_subscription
from ..broker import BrokerController
from ..config import MAX_RUNNING_INFO_BYTES, LimitExceeded
from ..groups.group import NO_QUEUE, ConsumerGroup
from ..groups.members import shape_of
from ..sessions.events import Answer, ForwardedRequest, RunningWanted
from ..sessions.refusal import Refusal
from ..store.index import ConsumeQueue
from ..store.journals import LeaseKey
from .connection import RemotingConnection
from .responses import Buffers, ResponseError, answer, small

log = structlog.get_logger("rocketlet.groups")
broker_log = structlog.get_logger("rocketlet.broker")


# ------------------------------------------------------------------------------
# The requests of membership: heartbeats, unregistering, member lists, locks, client checks.


def heartbeat(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    try:
        beat = _beat_of(connection, frame.body)
        if connection.beat is None:
            _forget_presumed(broker, connection, beat)
        not_taken = _check_heartbeat(broker, connection, beat)
        if not_taken:
            beat = _without_groups(beat, not_taken)
        broker.clients.heartbeat(connection, beat.client_id, beat.producer_groups, frame.language, frame.version)
    except Exception as error:
        client_id, groups = bodies.names_in_heartbeat(frame.body)
        _record_refusal(broker, connection, client_id, groups, str(error))
        raise
    faults = _register_client(broker, connection, beat, frame.language, frame.version)
    if not_taken:
        connection.keep_beat(None)
        reason = "; ".join(not_taken.values())
        _record_refusal(broker, connection, beat.client_id, list(not_taken), reason)
        raise ResponseError(ResponseCode.NO_PERMISSION, reason)
    if connection.beat is None or connection.beat[1] is not beat:
        connection.keep_beat((frame.body, beat))
    if not faults:
        return answer(frame)
    return answer(frame, ext=write(HeartbeatAnswer("\n".join(faults[: broker.limits.max_reported_faults]))))


def _register_presumed(
    broker: BrokerController, connection: RemotingConnection, beat: bodies.Heartbeat, language: int, version: int
) -> None:
    """Make a client a member of a group from its response to GET_CONSUMER_RUNNING_INFO, as a heartbeat would. The client's
    next heartbeat may contain another client id. Raises ResponseError, Refusal, LimitExceeded."""
    not_taken = _check_heartbeat(broker, connection, beat)
    if not_taken:
        raise ResponseError(ResponseCode.NO_PERMISSION, "; ".join(not_taken.values()))
    broker.clients.heartbeat(connection, beat.client_id, (), language, version)
    _register_client(broker, connection, beat, language, version)
    for consumer in beat.consumers:
        broker.groups.members_of(consumer.group)[connection].is_presumed = True


def _forget_presumed(broker: BrokerController, connection: RemotingConnection, beat: bodies.Heartbeat) -> None:
    """Confirm the memberships of a client that were derived from its running info (`_register_presumed`), or end those whose
    client id was wrong."""
    for consumer in beat.consumers:
        member = broker.groups.members_of(consumer.group).get(connection)
        if member is not None and member.is_presumed:
            member.is_presumed = False
            if member.client_id != beat.client_id:
                broker.groups.leave(connection, consumer.group)


def _register_client(
    broker: BrokerController, connection: RemotingConnection, beat: bodies.Heartbeat, language: int, version: int
) -> list[str]:
    """Register a client in its groups. Return the reported conflicts between members of the groups in which it is a
    Rocketlet member, which logs them."""
    faults: list[str] = []
    for consumer in beat.consumers:
        group = broker.groups.heartbeat(connection, beat.client_id, consumer, language, version)
        if group.missing_readers:
            for queue in broker.locks.readers_back(group, beat.client_id, connection):
                # the client may still handle messages that it got before the restart
                broker.locks.record_pull(connection, group, queue.key)
        broker.locks.join(connection, group.name)
        if consumer.queue_counts:
            broker.notifications.notify_outdated(connection, group)
        if consumer.own_version and group.reported:
            faults += (f"{group.name}: {fault}" for fault in sorted(group.reported))
    return faults


def _check_heartbeat(
    broker: BrokerController, connection: RemotingConnection, beat: bodies.Heartbeat
) -> dict[str, str]:
    """Check a heartbeat before the client is registered in any of its groups. Create settings and retry topics of new
    groups, if the broker may create groups. Return the groups of which the client may be no member, with the reasons: the
    client becomes a member of its other groups, and the response has the reasons. Raises Refusal, LimitExceeded."""
    not_taken: dict[str, str] = {}
    for consumer in beat.consumers:
        settings = broker.group_configs.ensure(consumer.group)
        if settings is None:
            continue
        fault = broker.group_configs.bound_fault(settings)
        if fault is None and connection not in broker.groups.members_of(consumer.group):
            fault = _id_fault(broker, connection, beat.client_id, consumer.group)
        if fault is None and settings.strict:
            fault = _strict_fault(broker, connection, consumer)
        if fault:
            not_taken[consumer.group] = fault
        else:
            broker.ensure_retry_topic(settings, connection)
    # an equal heartbeat of this connection was admitted before
    if connection.beat is None or connection.beat[1] is not beat:
        groups = (consumer.group for consumer in beat.consumers if consumer.group not in not_taken)
        broker.groups.admit(connection, beat.client_id, groups)
    return not_taken


def _without_groups(beat: bodies.Heartbeat, groups: Container[str]) -> bodies.Heartbeat:
    return replace(beat, consumers=tuple(consumer for consumer in beat.consumers if consumer.group not in groups))


def _record_refusal(
    broker: BrokerController, connection: RemotingConnection, client_id: str, groups: Sequence[str], reason: str
) -> None:
    is_news = connection.is_news("heartbeat_refused")
    broker.refused_heartbeats.record(connection.peer, client_id, groups, reason, is_news=is_news)


def _beat_of(connection: RemotingConnection, body: bytes) -> bodies.Heartbeat:
    """Return the decoded heartbeat, without decoding it again if it equals the client's last one, as most heartbeats
    do. Raises BodyError, IllegalName."""
    if connection.beat is not None and connection.beat[0] == body:
        return connection.beat[1]
    beat = bodies.decode_heartbeat(body)
    # Check all names before anything is registered, so that a heartbeat with an invalid name has no effect.
    for consumer in beat.consumers:
        fault = names.group_fault(consumer.group)
        if fault:
            raise names.IllegalName(fault)
    return beat


def _id_fault(broker: BrokerController, connection: RemotingConnection, client_id: str, name: str) -> str | None:
    """Return the reason why a connection may not use a client id in a group: a member with this id is of another account.
    None if it may, and without accounts. The number of members is limited (`max_members`)."""
    if broker.acl is None:
        return None
    account = broker.clients.account_of(connection)
    for session, member in broker.groups.members_of(name).items():
        # a member that stands for a client that pops owns nothing by its id
        if member.client_id == client_id and not member.pops and broker.clients.account_of(session) != account:
            return (
                f"the client id {client_id} of the group {name} is in use by a client of another account; "
                "give each client an id of its own"
            )
    return None


def _strict_fault(broker: BrokerController, connection: RemotingConnection, consumer: ConsumerData) -> str | None:
    """Return the reason why a strict group refuses a member; None if it does not."""
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


def unregister_client(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(UnregisterClient, frame.ext)
    connection.keep_beat(None)
    if header.consumer_group:
        broker.pops.session_gone(connection)
        group = broker.groups.get(header.consumer_group)
        is_foreign = group is not None and connection in group.foreign
        if group is not None and is_foreign:
            unfinished = 0
            for queue in broker.locks.read_by(connection, header.consumer_group):
                broker.offsets.fence(group, queue.key)  # the next reader may have queried the offset before this commit
                unfinished += max(queue.given_offset - (group.offset(*queue.key) or 0), 0)
                broker.locks.release(connection, queue)
            if unfinished:
                broker.repeats.note_left(header.consumer_group, header.client_ID, unfinished)
        broker.groups.leave(connection, header.consumer_group)
        if group is not None:
            owned = broker.locks.owned_by(connection, header.consumer_group)
            broker.offsets.hand_over(group, (queue.key for queue in owned))
        broker.offsets.write_handed_over()
        broker.locks.leave(connection, header.consumer_group, is_foreign=is_foreign)
    if header.producer_group:
        broker.clients.forget_producer(header.producer_group, connection)
    return answer(frame)


def consumer_list(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    header = read(ConsumerGroupHeader, frame.ext)
    name, topic, detail = header.consumer_group, header.topic, frame.ext.get(EXT_DETAIL)
    if detail is None and not topic:
        request, group = small(frame), broker.groups.get(name)
        if group is not None and broker.draining.lists.wait_until_sure(
            group, connection, lambda: connection.write(_list_given(broker, connection, request, name))
        ):
            return None
        return _list_given(broker, connection, frame, name)
    group = broker.groups.get(name)
    client_ids: list[str] = []
    if group is not None:
        client_ids = group.client_ids(topic) if topic else broker.draining.lists.current_list(group, connection)
    if group is None or not client_ids or detail is None:
        return _listed(frame, name, client_ids)
    if detail == "members" or not topic:
        return answer(frame, ext=_seen_queues(group, topic), body=group_bodies.encode_members(client_ids))
    return answer(frame, ext=_place_or_share(group, connection, frame, topic))


def _list_given(broker: BrokerController, connection: RemotingConnection, frame: Frame, name: str) -> Buffers:
    """Return the response to a member that allocates the queues of all its topics by one member list, as Apache's
    clients do."""
    group = broker.groups.get(name)
    # A client without a heartbeat, such as one that has not joined again since a restart, would drop its queues while its
    # handlers run, if it got a list without itself.
    if group is None or connection not in group.members:
        return _listed(frame, name, [])
    return _listed(frame, name, broker.draining.lists.current_list(group, connection))


def _listed(frame: Frame, name: str, client_ids: list[str]) -> Buffers:
    if not client_ids:
        # ConsumerManageProcessor.getConsumerListByGroup: Apache's Java client keeps its queues when it gets this error.
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"no consumer for this group, {name}")
    return answer(frame, body=group_bodies.encode_members(client_ids))


def _place_or_share(group: ConsumerGroup, connection: RemotingConnection, frame: Frame, topic: str) -> Ext:
    """Return a member's position in a topic, with which it does not need the member list, and its share if it has requested
    the share and the broker allocates the topic's queues."""
    member = group.members.get(connection)
    client_id = member.client_id if member else ""
    if member is not None and EXT_SEEN_QUEUES in frame.ext:
        group.record_counts(member, topic, group_bodies.decode_seen_queues(str(frame.ext[EXT_SEEN_QUEUES]).encode()))
    share = group.share(client_id, topic) if frame.ext.get(EXT_DETAIL) == "share" else None
    shares: Ext = {EXT_SHARES: group_bodies.encode_shares({topic: share})} if share else {}
    index, count = group.place(client_id, topic)
    return {"index": index, "count": count, **shares, **_seen_queues(group, topic)}


def _seen_queues(group: ConsumerGroup, topic: str | None) -> Ext:
    """Return the numbers of a topic's queues as the members see them, for a member whose route lacks a broker; nothing
    without a topic."""
    return {EXT_SEEN_QUEUES: group_bodies.encode_seen_queues(group.seen_queues(topic).of_brokers)} if topic else {}


def lock(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | Work[Buffers]:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request) or names.group_fault(request.group)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, body=group_bodies.encode_locked({}), remark=fault)
    return _in_pieces(request, _locking(broker, connection, frame, request))


def _in_pieces(request: group_bodies.LockRequest, work: Work[Buffers]) -> Buffers | Work[Buffers]:
    """Return the response to a request with few queues; of a larger one, the work that makes the response."""
    return finish(work) if len(request.queues) <= SLICE else work


def _parts(request: group_bodies.LockRequest) -> Iterator[group_bodies.LockRequest]:
    """Yield a request in parts, each with the queues of one piece of work."""
    for first in range(0, len(request.queues), SLICE):
        yield replace(request, queues=request.queues[first : first + SLICE])


def _locking(
    broker: BrokerController, connection: RemotingConnection, frame: Frame, request: group_bodies.LockRequest
) -> Work[Buffers]:
    locked: list[group_bodies.LockedShape] = []
    is_full, is_renewal = False, not request.handover or bool(request.epochs)
    for part in _parts(request):
        if connection.is_closed:  # its leases have ended, or are kept until it is back
            return []
        refused = broker.locks.refused  # other clients are refused between two parts
        epochs = broker.locks.lock(part, connection)
        is_full |= is_renewal and not request.offsets and broker.locks.refused > refused
        offsets: Mapping[Queue, int] = {}
        if request.offsets:
            offsets = _commit(broker, connection, part, epochs)
        elif not is_renewal:
            # The response contains the committed offsets of newly locked queues, so that a member needs no further request.
            offsets = _committed(broker, request.group, epochs)
        locked += group_bodies.locked_items(epochs, offsets)
        yield
    # Apache's clients treat queues that are not in the response as locked by another client, and retry.
    remark = "this broker keeps no more locks; retry later" if is_full else None
    return answer(frame, body=group_bodies.encode_locked_items(locked), remark=remark)


def _committed(broker: BrokerController, name: str, queues: Iterable[Queue]) -> dict[Queue, int]:
    group = broker.groups.get(name)
    found = {queue: group.offset(queue.topic, queue.queue_id) for queue in queues} if group is not None else {}
    return {queue: offset for queue, offset in found.items() if offset is not None}


def _commit(
    broker: BrokerController,
    connection: RemotingConnection,
    request: group_bodies.LockRequest,
    epochs: Mapping[Queue, int],
) -> dict[Queue, int]:
    """Commit the offsets of the request's queues that have these epochs, and return the committed ones. The member commits
    the remaining queues one by one, and gets the error of each."""
    done: dict[Queue, int] = {}
    group = broker.groups.get(request.group)
    for queue in request.queues if group is not None else ():
        offset, epoch = request.offsets.get(queue), epochs.get(queue)
        if group is None or offset is None or epoch is None or request.epochs.get(queue) != epoch:
            continue
        if broker.commits.commit(connection, group, (queue.topic, queue.queue_id), offset, epoch) is None:
            done[queue] = offset
    return done


def unlock(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | Work[Buffers]:
    request = group_bodies.decode_lock_request(frame.body)
    fault = _foreign_client(broker, connection, request)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    return _in_pieces(request, _unlocking(broker, connection, frame, request))


def _unlocking(
    broker: BrokerController, connection: RemotingConnection, frame: Frame, request: group_bodies.LockRequest
) -> Work[Buffers]:
    """Unlock the queues of a request. If it has offsets, commit them first, and return the queues that were committed and
    unlocked. The member retries the remaining queues one by one, and gets the error of each."""
    faults: list[str] = []
    done: dict[Queue, int] = {}
    for part in _parts(request):
        queues = tuple(_commit(broker, connection, part, request.epochs)) if request.offsets else part.queues
        faults += _unlock(broker, connection, replace(part, queues=queues))
        if request.offsets and (group := broker.groups.get(request.group)) is not None:
            wanted = ((queue, group.queue(queue.topic, queue.queue_id)) for queue in queues)
            done |= {queue: request.epochs[queue] for queue, of in wanted if not of.owner.is_leased_to(connection)}
        yield
    if request.offsets:
        return answer(frame, body=group_bodies.encode_locked(done))
    # Apache's clients get success even if a queue was not locked, as from Apache's broker.
    if faults and request.handover:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"not unlocked: {'; '.join(faults)}")
    return answer(frame)


def _unlock(broker: BrokerController, connection: RemotingConnection, request: group_bodies.LockRequest) -> list[str]:
    """Free the queues that a member owns, and return the reasons why others were not freed. The offsets of the freed queues
    are written to the disk first, because the next owner continues from them."""
    group = broker.groups.get(request.group)
    if group is not None:
        wanted = [group.queue(queue.topic, queue.queue_id) for queue in request.queues]
        broker.offsets.hand_over(group, (queue.key for queue in wanted if queue.owner.is_held_by(connection)))
    broker.offsets.write_handed_over()
    return broker.locks.unlock(request, connection)


def _foreign_client(
    broker: BrokerController, connection: RemotingConnection, request: group_bodies.LockRequest
) -> str | None:
    """Return the reason why a connection may not lock or unlock queues for a client id; None if it may. Apache's clients may
    use any id that is not a member's of another account."""
    member = broker.groups.members_of(request.group).get(connection)
    if not request.handover:
        is_own = member is not None and member.client_id == request.client_id
        return None if is_own else _id_fault(broker, connection, request.client_id, request.group)
    if member is None:
        return f"this connection is not a member of the group {request.group}; send a heartbeat first"
    if member.client_id != request.client_id:
        return f"this connection is the client {member.client_id}, not {request.client_id}"
    return None


def check_client(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CHECK_CLIENT_CONFIG: check that the broker supports the client's filter."""
    wanted = group_bodies.decode_client_check(frame.body).subscription
    kind = (wanted and wanted.expression_type) or TAG
    expression = (wanted and wanted.sub_string) or ""
    if kind == TAG:
        return answer(frame)
    if kind != SQL92:
        remark = f"the expression type {kind} is unknown; use TAG or SQL92"
        return answer(frame, ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=remark)
    broker.filters.find(expression, connection.address)
    return answer(frame)


# ------------------------------------------------------------------------------
# An Apache push consumer that pulls without a heartbeat, after a restart of the broker or on a new connection, becomes a
# member by its running info before its next heartbeat.
#
# The next heartbeat of such a consumer comes up to 30 s later (MQClientInstance.startScheduledTask), and no response of
# a broker makes Java's client send one earlier. The broker therefore queries the client's running info
# (ClientRemotingProcessor.getConsumerRunningInfo), which contains its subscriptions and its queues, but not its client
# id. The broker assumes the id of the client that has read most of these queues last. If there is none, or a member has the
# id, the consumer becomes a member with its heartbeat.


def request_membership(broker: BrokerController, connection: RemotingConnection, frame: Frame, key: LeaseKey) -> None:
    """Query the running info of a client that pulls a queue, unless a request to it is in flight or too many are."""
    if not broker.client_requests.has_open(connection):
        wanted = RunningWanted(ForwardedRequest(key[0], broker.groups.queue(*key).owner.last_reader_id or "", {}))
        answered = partial(_join_by_running_info, broker, connection, key, frame.language, frame.version)
        with suppress(LimitExceeded):
            broker.client_requests.send(connection, wanted, answered, by=connection)


def _join_by_running_info(
    broker: BrokerController,
    connection: RemotingConnection,
    key: LeaseKey,
    language: int,
    version: int,
    reply: Answer | None,
) -> None:
    if reply is None or not reply.is_ok or connection in broker.groups.members_of(key[0]) or connection.is_closed:
        return
    try:
        beat = _presumed_heartbeat(broker, connection, key, reply.body)
        if beat is not None:
            _register_presumed(broker, connection, beat, language, version)
            log.info("member_known_again", group=key[0], client=beat.client_id)
    except (BodyError, SubscriptionError, ResponseError, Refusal, LimitExceeded) as fault:
        if connection.is_news("member_unreadable"):
            log.info("member_unreadable", group=key[0], peer=connection.peer, reason=str(fault))


def _presumed_heartbeat(
    broker: BrokerController, connection: RemotingConnection, key: LeaseKey, body: bytes
) -> Heartbeat | None:
    """Return the heartbeat that the client would send, from its running info; None if its id is not known, or if the client
    does not read the queue, is not permitted to read all its topics, or reports too much. Raises BodyError,
    SubscriptionError."""
    if len(body) > MAX_RUNNING_INFO_BYTES:
        return None
    running = decode_running(body)
    client_id = _presumed_id(broker, key[0], running.commit_offsets)
    is_reader = Queue(key[1], broker.config.name, key[2]) in running.commit_offsets
    if client_id is None or not is_reader or key[1] not in running.subscriptions:
        return None
    if len(running.subscriptions) > MAX_SUBSCRIPTIONS or not _may_read(broker, connection, running):
        return None
    subscriptions = tuple(
        parse_subscription(topic, expression, version=running.versions[topic])
        for topic, expression in running.subscriptions.items()
    )
    where = running.properties.get("consumeFromWhere") or "CONSUME_FROM_LAST_OFFSET"
    return Heartbeat(client_id, (ConsumerData(key[0], "CONSUME_PASSIVELY", "CLUSTERING", where, subscriptions),))


def _presumed_id(broker: BrokerController, name: str, queues: Iterable[Queue]) -> str | None:
    """Return the id of the client that has read most of these queues last; None if no client or several have, or if a member
    has the id. A client may also claim queues by an old member list, which another one reads."""
    here = (queue for queue in queues if queue.broker_name == broker.config.name)
    readers = (broker.groups.queue(name, queue.topic, queue.queue_id).owner.last_reader_id for queue in here)
    found = Counter(reader for reader in readers if reader is not None).most_common(2)
    if not found or (len(found) > 1 and found[0][1] == found[1][1]):
        return None
    client_id = found[0][0]
    is_there = any(member.client_id == client_id for member in broker.groups.members_of(name).values())
    return None if is_there else client_id


def _may_read(broker: BrokerController, connection: RemotingConnection, running: Running) -> bool:
    acl = broker.acl
    topics = (topic for topic in running.subscriptions if not topic.startswith(RETRY_PREFIX))
    return acl is None or all(acl.may_subscribe(connection, topic) for topic in topics)


# ------------------------------------------------------------------------------
# QUERY_ASSIGNMENT of 5.x: the broker computes the share of the member that requests it, or lets the member pop.


async def query_assignment(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """QUERY_ASSIGNMENT. Finding the topic's route may need a request to a name server."""
    request = group_bodies.decode_assignment_request(frame.body)
    if request.strategy not in allocation.COMPUTED:
        remark = f"the strategy {request.strategy} is unknown; use {', '.join(allocation.COMPUTED)}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    is_popped = broker.request_modes.of(request.group, request.topic).mode == POP
    route = await broker.name_servers.find_route(request.topic)
    if route is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{request.topic}] not exist")
    if is_popped and not request.is_broadcasting:
        names = dict.fromkeys(data.broker_name for data in route.queues if data.read_queues)
        return answer(frame, body=encode_pop_assignment(request.topic, names))
    return answer(frame, body=group_bodies.encode_assignment(_share_of_topic(broker, request, route)))


def _share_of_topic(broker: BrokerController, request: group_bodies.AssignmentRequest, route: Route) -> list[Queue]:
    """Return a member's share of a topic. Raises LimitExceeded if computing it would block the event loop for too
    long."""
    count = sum(data.read_queues for data in route.queues)
    if count > MAX_REQUEST_QUEUES:
        raise LimitExceeded(f"{request.topic} has {count} queues; a broker allocates at most {MAX_REQUEST_QUEUES}")
    queues = allocation.subscribe_queues(request.topic, route)
    if request.is_broadcasting:
        return queues
    group = broker.groups.get(request.group)
    ids = list(group.order(request.topic)) if group else []
    strategy = allocation.COMPUTED[request.strategy]
    points = strategy.virtual_nodes * len(ids) if isinstance(strategy, allocation.ConsistentHash) else 0
    if points + count > broker.limits.max_hashed:
        raise LimitExceeded(f"{request.strategy} with {count} queues and {len(ids)} members takes too long; use AVG")
    return strategy.allocate(request.client_id, queues, ids)


# ------------------------------------------------------------------------------
# Receives messages of other brokers about groups with foreign members, and verifies that those brokers sent them.
#
# Without accounts, any client that reaches the port could send such a message in the name of another broker. The
# receiver therefore requests a confirmation from the broker of that name, at the address that the name server has for
# it, once for each connection. The sender's token is valid for one receiver, which cannot use it with another broker.
# With accounts, these requests need an administrator's account, and no confirmation is requested.


async def agree_on_members(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """AGREE_ON_MEMBERS, Rocketlet's own request: another broker reports its state of a group with foreign members."""
    header = read(AgreeOnMembers, frame.ext)
    fault = names.group_fault(header.consumer_group)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    for text in (header.broker_name, header.digest, header.token):
        if len(text) > MAX_ID_CHARS:
            remark = f"a name, digest or token has {len(text)} characters; maximum {MAX_ID_CHARS}"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    members = decode_agreed_members(frame.body)
    group = broker.groups.get(header.consumer_group)
    peer = group.sync.peers.get(header.broker_name) if group is not None else None
    if peer is None or broker.acl is not None or connection.broker_name == header.broker_name:
        broker.draining.on_peer_update(header, members)  # has no effect if the sender is not a peer of the group
        return answer(frame)
    if connection.is_proving or not broker.peers.may_ask:
        return answer(frame, ResponseCode.SYSTEM_BUSY, remark="too many confirmations are in flight; retry later")
    connection.is_proving = True
    return await _apply_if_confirmed(broker, connection, frame, peer.address, header, members)


async def _apply_if_confirmed(
    broker: BrokerController,
    connection: RemotingConnection,
    frame: Frame,
    address: str,
    header: AgreeOnMembers,
    members: AgreedMembers,
) -> Buffers:
    confirm = Frame(RequestCode.CONFIRM_WORD, ext=write(ConfirmWord(broker.config.name, header.token)))
    try:
        is_confirmed = await broker.peers.confirms(address, confirm)
    finally:
        connection.is_proving = False
    if is_confirmed:
        connection.broker_name = header.broker_name
        broker.draining.on_peer_update(header, members)
        return answer(frame)
    if connection.is_news("peer_unverified"):
        log.warning("peer_unverified", peer=connection.peer, broker=header.broker_name, address=address)
    remark = f"the broker {header.broker_name} at {address} has not confirmed that it sent this request"
    return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)


def confirm_word(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CONFIRM_WORD, Rocketlet's own request: confirm to another broker that a token is the one with which this broker sends
    it AGREE_ON_MEMBERS."""
    header = read(ConfirmWord, frame.ext)
    if compare_digest(header.token.encode(), broker.draining.agreement.token(header.broker_name).encode()):
        return answer(frame)
    return answer(frame, ResponseCode.NO_PERMISSION, remark=f"the token is not one of the broker {broker.config.name}")


# ------------------------------------------------------------------------------
# Committed offsets of a group in a queue, and the first and last offset of the queue.


def query_consumer_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """QUERY_CONSUMER_OFFSET. For a group without an offset in the queue, this broker returns 0 if the queue still has its
    first message, and an error otherwise, as Apache's broker does (ConsumerManageProcessor.queryConsumerOffset), so that
    "latest" starts at 0. A Rocketlet client may request an error in both cases, or the end of the queue. In the latter
    case the ends of all queues of the topic are stored as the group's offsets, so that members that start at the same time
    agree; if the group has offsets in other queues of the topic, the queue is newer than the group, and its beginning is
    returned."""
    header = read(QueueOffset, frame.ext)
    group, topic = header.consumer_group, header.topic
    offset = broker.offsets.get(group, topic, header.queue_id)
    if offset is not None:
        return answer(frame, ext=write(Offset(offset)))
    queue = _queue(broker, topic, header.queue_id)
    wanted = frame.ext.get(EXT_UNKNOWN)
    if wanted == "latest":
        return answer(frame, ext=write(Offset(_fix_latest(broker, group, topic, queue))))
    if wanted == "error" or (queue is not None and queue.begin > 0):
        remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
        return answer(frame, ResponseCode.QUERY_NOT_FOUND, remark=remark)
    return answer(frame, ext=write(Offset(0)))


def _fix_latest(broker: BrokerController, group: str, topic: str, queue: ConsumeQueue | None) -> int:
    if broker.group_configs.ensure(group) is None:
        raise ResponseError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
    if broker.offsets.knows(group, topic):  # the queue is newer than the group
        return queue.begin if queue else 0
    for queue_id in range(broker.topics.queues_of(topic)):
        other = broker.store.queues.get((topic, queue_id))
        broker.offsets.put(group, topic, queue_id, other.next if other else 0)
    return queue.next if queue else 0


def update_consumer_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(UpdateOffset, frame.ext)
    group, key = broker.groups.obtain(header.consumer_group), (header.topic, header.queue_id)
    offset, epoch = header.commit_offset, header.epoch
    code, may_be_tool = ResponseCode.NO_PERMISSION, not frame.is_oneway
    queue = group.queues.get(key, NO_QUEUE)
    fault = broker.commits.fault(connection, group, key, offset, epoch, may_be_tool=may_be_tool)
    if fault is None:
        code, fault = ResponseCode.SYSTEM_ERROR, broker.commits.offset_fault(queue, key, offset)
    if fault is not None:
        broker.groups.release(group)
        if connection.is_news("commit_refused"):
            broker_log.warning("commit_refused", group=group.name, peer=connection.peer, reason=fault)
        return answer(frame, code, remark=f"the offset is not stored: {fault}")
    if header.sought and epoch is not None:
        broker.locks.clear_former_end(queue)
    try:
        broker.commits.store(connection, group, queue, key, offset, by_owner=epoch is not None)
    except (LimitExceeded, names.IllegalName):
        broker.groups.release(group)
        raise
    if epoch is None and queue.reader is connection:
        broker.guard.record_commit(connection, queue)
    return answer(frame, ext={})


def _queue(broker: BrokerController, topic: str, queue_id: int) -> ConsumeQueue | None:
    return broker.store.queues.get((topic, queue_id))


def max_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    return answer(frame, ext=write(Offset(queue.next if queue else 0)))


def min_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    return answer(frame, ext=write(Offset(queue.begin if queue else 0)))


def queue_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_QUEUE_OFFSETS, Rocketlet's own request. Topics that this broker does not have are skipped."""
    group = read(OptionalGroup, frame.ext).consumer_group or ""
    found: dict[str, TopicExtent] = {}
    for name in decode_topics(frame.body):
        if broker.topics.get(name):
            found[name] = _extent(broker, group, name)
            yield
    times = BrokerTimes(broker.clock.time_ms(), broker.statistics.boot_ms)
    return answer(frame, ext=write(times), body=encode_extents(found))


def _extent(broker: BrokerController, group: str, topic: str) -> TopicExtent:
    queues = [_queue(broker, topic, queue_id) for queue_id in range(broker.topics.queues_of(topic))]
    return TopicExtent(
        broker.topics.identity(topic),
        broker.offsets.rewinds(group, topic),
        tuple(queue.begin if queue else 0 for queue in queues),
        tuple(queue.next if queue else 0 for queue in queues),
    )


def search_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    header = read(SearchOffset, frame.ext)
    if header.lite_topic:
        lite = broker.lites.get(header.topic, header.lite_topic)
        return answer(frame, ext=write(Offset(broker.lites.first_not_before(lite, header.timestamp) if lite else 0)))
    queue = _queue(broker, header.topic, header.queue_id)
    offset = (yield from broker.store.offset_by_time(queue, header.timestamp)) if queue else 0
    return answer(frame, ext=write(Offset(offset)))


def earliest_store_time(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    stored = queue is not None and queue.begin < queue.next
    return answer(
        frame, ext=write(StoreTime(broker.store.store_time_ms(queue, queue.begin) if queue and stored else -1))
    )
