"""Remoting requests of tools: groups, topics, broker settings, monitoring."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from struct import iter_unpack
from typing import Final

import orjson
import structlog

from ...host.version import own_version
from ...protocol import admin_bodies, bodies, names
from ...protocol.admin_bodies import ConnectedClient, ProgressColumns, QueueProgress, Range
from ...protocol.bodies import (
    LOOKS,
    SLICE,
    BodyError,
    ConsumerData,
    TopicConfig,
    Work,
    encode_group,
    listed,
    topic_json,
)
from ...protocol.codes import MAX_PERM, VERSION, Language, RequestCode, ResponseCode
from ...protocol.config import MAX_TABLE_BYTES
from ...protocol.frame import Frame
from ...protocol.group_bodies import SHARED_OWNER
from ...protocol.headers import (
    AskMember,
    CloneOffset,
    ConsumeQueueQuery,
    ConsumerGroupHeader,
    ConsumeStats,
    CorrectionOffset,
    CreateTopic,
    GroupHistory,
    GroupName,
    GroupOnly,
    IsOrder,
    ProducerGroup,
    ResetOffset,
    TopicGroup,
    TopicName,
    ViewStats,
    read,
)
from ...protocol.message import decode_host
from ...protocol.names import Queue, Subscription
from ...protocol.settings import changed_group, changed_topic, decode_group_change, decode_group_changes
from ..broker import BrokerController
from ..config import (
    MAX_ASKED_AT_ONCE,
    MAX_NAMED_MEMBERS,
    MAX_QUERY_ENTRIES,
    MAX_QUEUES_PER_TOPIC,
    MAX_RETAIN_HOURS,
    MAX_STATUSES_BYTES,
    MAX_TRANSACTION_TIMEOUT_S,
    BrokerConfig,
    within,
)
from ..groups.group import ConsumerGroup as Group
from ..groups.members import Member, shown
from ..machine import resident_bytes
from ..messages.statistics import GOT, GOT_BYTES, PUT, PUT_BYTES, SENT_BACK, Rate, Statistics, Totals
from ..runtime import Histogram
from ..sessions.events import Answer, ForwardedRequest, HandlingWanted, OffsetsReset, OffsetsWanted, RunningWanted
from ..store.files import StoreFull
from ..store.index import ConsumeQueue
from .connection import RemotingConnection
from .responses import Buffers, ResponseError, answer, small

log = structlog.get_logger("rocketlet.admin")
topics_log = structlog.get_logger("rocketlet.topics")


# ------------------------------------------------------------------------------
# Administration of groups: connections, progress, offsets that administrators set, and requests that members answer.


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


def one_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_SUBSCRIPTIONGROUP_CONFIG: return the settings of one group, for tools of 5.x."""
    name = read(GroupOnly, frame.ext).group
    settings = next((group for group in broker.group_configs if group.name == name), None)
    if settings is None:
        remark = f"No group in this broker. group: {name}"
        return answer(frame, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
    return answer(frame, body=encode_group(settings))


def delete_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(GroupName, frame.ext)
    _delete_group(broker, header.group_name, offsets=header.remove_offset)
    return answer(frame)


def delete_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """DELETE_SUBSCRIPTIONGROUP_LIST: delete several groups, for tools of 5.5.1."""
    wanted, offsets = bodies.decode_group_names(frame.body)
    for name in wanted:
        _delete_group(broker, name, offsets=offsets)
        yield
    return answer(frame)


def _delete_group(broker: BrokerController, name: str, *, offsets: bool) -> None:
    broker.group_configs.delete(name)
    if offsets:
        broker.offsets.group_deleted(name)
        broker.pops.group_deleted(name)
    else:
        broker.pops.end_receives(name)
    log.info("group_deleted", group=name, offsets=offsets)


# Progress


def consume_stats(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    header = read(ConsumeStats, frame.ext)
    group = header.consumer_group
    topics = [header.topic] if header.topic else broker.progress.topics_of(group)
    if header.columns:
        columns = yield from _columns(broker, group, topics, times=header.times)
        return answer(frame, body=(yield from admin_bodies.encode_progress_columns(columns)))
    tps = 0.0
    for number, topic in enumerate(topics, 1):
        tps += broker.statistics.rate(GOT, f"{topic}@{group}", 60).per_second
        if number % SLICE == 0:
            yield
    rows = yield from _progress(broker, group, topics)
    body = yield from admin_bodies.encode_consume_stats(rows, tps)
    return answer(frame, body=body)


def _columns(broker: BrokerController, group: str, topics: list[str], *, times: bool) -> Work[list[ProgressColumns]]:
    found: list[ProgressColumns] = []
    for topic in topics:
        columns = yield from broker.progress.columns(group, topic, times=times)
        found.append(columns)
    return found


def _progress(broker: BrokerController, group: str, topics: list[str]) -> Work[Iterator[tuple[Queue, QueueProgress]]]:
    """Return the progress of a group in topics. A row may read the disk when it is taken."""
    found: list[Iterator[tuple[Queue, QueueProgress]]] = []
    for topic in topics:
        rows = yield from broker.progress.rows(group, topic)
        found.append(rows)
    return chain.from_iterable(found)


def all_consume_stats(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    read(IsOrder, frame.ext)
    groups = []
    for number, name in enumerate([group.name for group in broker.group_configs], 1):
        rows = yield from _progress(broker, name, broker.progress.topics_of(name))
        groups.append((name, rows))
        if number % SLICE == 0:
            yield
    body = yield from admin_bodies.encode_all_consume_stats(broker.config.address, groups)
    return answer(frame, body=body)


def consumed_by(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """QUERY_TOPIC_CONSUME_BY_WHO: return the groups that subscribe to a topic, pop it, or have a committed offset in it."""
    topic = read(TopicName, frame.ext).topic
    online = [group.name for group in broker.groups.subscribing(topic)]
    popping = [pool.group for pool in broker.pops.pools.of_topic(topic)]
    found = list(dict.fromkeys([*online, *popping, *broker.offsets.groups_of(topic)]))
    return answer(frame, body=orjson.dumps({"groupList": found}))


def time_span(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """QUERY_CONSUME_TIME_SPAN: return the store times of the first, last, and last consumed message of each queue; -1 for a
    message that does not exist."""
    header = read(TopicGroup, frame.ext)
    if broker.topics.get(header.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{header.topic}] not exist")
    rows = yield from broker.progress.rows(header.group, header.topic)
    body = yield from admin_bodies.encode_times(_times(broker, rows))
    return answer(frame, body=body)


def _times(broker: BrokerController, rows: Iterable[tuple[Queue, QueueProgress]]) -> Iterator[dict[str, object]]:
    now_ms = broker.clock.time_ms()
    for at, item in rows:
        queue = broker.store.queues.get((at.topic, at.queue_id))
        stored = queue is not None and queue.begin < queue.next
        yield {
            "messageQueue": bodies.queue_json(at),
            "minTimeStamp": broker.store.store_time_ms(queue, queue.begin) if queue and stored else -1,
            "maxTimeStamp": broker.store.store_time_ms(queue, queue.next - 1) if queue and stored else -1,
            "consumeTimeStamp": item.last_ms or -1,
            "delayTime": now_ms - item.last_ms if item.lag and item.last_ms else 0,
        }


def correction_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """QUERY_CORRECTION_OFFSET: return for each queue the lowest offset that one of some groups has committed and that the
    queue still has; -1 if the compared group has committed the same or a higher one. Queues without such an offset are left
    out."""
    header = read(CorrectionOffset, frame.ext)
    topic = header.topic
    groups = (header.filter_groups or "").split(",") if header.filter_groups else broker.offsets.groups_of(topic)
    least: dict[str, int] = {}
    for group in groups:
        for queue_id, offset in broker.offsets.of(group, topic).items():
            queue = broker.store.queues.get((topic, queue_id))
            if queue is not None and offset >= queue.begin:
                least[str(queue_id)] = min(least.get(str(queue_id), offset), offset)
        yield
    compared = broker.offsets.of(header.compare_group, topic)
    corrections = {
        queue_id: offset if compared.get(int(queue_id), -1) < offset else -1 for queue_id, offset in least.items()
    }
    return answer(frame, body=orjson.dumps({"correctionOffsets": corrections}))


# Offsets that administrators set


def clone_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """CLONE_GROUP_OFFSET: copy the committed offsets of a group in one topic, or in all, to another group."""
    header = read(CloneOffset, frame.ext)
    topics = [header.topic] if header.topic else broker.offsets.topics_of(header.src_group)
    for topic in topics:
        for queue_id, offset in broker.offsets.of(header.src_group, topic).items():
            broker.offsets.put(header.dest_group, topic, queue_id, offset)
        broker.pops.offsets_reset(header.dest_group, topic)
        yield
    return answer(frame)


def reset_offset(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """INVOKE_BROKER_TO_RESET_OFFSET: send the new offsets to the group's members. Offsets of popped queues are set here. If
    the group has no members and does not pop the topic, return an error, and the tool commits the offsets.

    If `isForce` is false, only lower offsets are applied, as with Apache's broker, unless the request names a single
    queue.
    """
    header = read(ResetOffset, frame.ext)
    topic = broker.topics.get(header.topic)
    if topic is None:
        remark = f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    if header.queue_id >= topic.write_queues:
        remark = f"the topic {header.topic} has no queue {header.queue_id}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    is_single = header.queue_id >= 0
    offsets: dict[Queue, int] = {}
    for queue_id in [header.queue_id] if is_single else range(topic.write_queues):
        current = broker.offsets.get(header.group, header.topic, queue_id)
        if current is None:
            remark = f"THe consumer group <{header.group}> not exist"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
        wanted = yield from _wanted_offset(broker, broker.store.queues.get((header.topic, queue_id)), header)
        if header.is_force or is_single or wanted < current:
            offsets[Queue(header.topic, broker.config.name, queue_id)] = wanted
        else:
            offsets[Queue(header.topic, broker.config.name, queue_id)] = current
        if queue_id % SLICE == SLICE - 1:
            yield
    group = broker.groups.online(header.group)
    is_popped = broker.pops.is_popped(header.group, header.topic)
    if is_popped:
        _reset_popped(broker, header, offsets)
    if group is None and is_popped:
        return answer(frame, body=admin_bodies.encode_offsets(offsets))
    if group is None:
        remark = f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic}"
        return answer(frame, ResponseCode.CONSUMER_NOT_ONLINE, remark=remark)
    is_cpp = frame.language == Language.CPP
    event = OffsetsReset(header.topic, header.group, header.timestamp, header.is_force, offsets, is_cpp)
    for queue in offsets:
        broker.offsets.allow_lower_offset(header.group, header.topic, queue.queue_id)
    for session, member in list(group.members.items()):
        if not member.is_grpc_client:
            session.send_event(event)
        yield
    log.info("offsets_reset", group=header.group, topic=header.topic, members=len(group.members))
    return answer(frame, body=admin_bodies.encode_offsets(offsets))


def _reset_popped(broker: BrokerController, header: ResetOffset, offsets: Mapping[Queue, int]) -> None:
    """Set the offsets of those queues that clients of the group pop. Clients can then no longer acknowledge messages that
    they have popped from a queue whose offset has changed."""
    pool = broker.pops.pools.find_queues(header.group, header.topic)
    for queue, offset in offsets.items():
        if pool is not None and pool.queues.serves(queue.queue_id):
            broker.offsets.put(header.group, header.topic, queue.queue_id, offset)
    broker.pops.offsets_reset(header.group, header.topic)
    log.info("offsets_reset", group=header.group, topic=header.topic, members=0)


def _wanted_offset(broker: BrokerController, queue: ConsumeQueue | None, header: ResetOffset) -> Work[int]:
    """Return the offset to which a queue is reset. Raises ResponseError for an offset outside of the queue."""
    begin, end = (queue.begin, queue.next) if queue is not None else (0, 0)
    if header.queue_id >= 0 and header.offset != -1:
        if not begin <= header.offset <= end:
            remark = f"{header.topic}:{header.queue_id} has the offsets {begin} to {end}, not {header.offset}"
            raise ResponseError(ResponseCode.SYSTEM_ERROR, remark)
        return header.offset
    if queue is None or header.timestamp == -1:
        return end
    if header.exact:
        return (yield from broker.store.first_not_before(queue, header.timestamp))
    return (yield from broker.store.offset_by_time(queue, header.timestamp))


# Requests that members answer


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


# Settings, and data that tools show


def update_group(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    group = changed_group(decode_group_change(frame.body), broker.group_configs.get)
    fault = names.group_fault(group.name)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    _put_group(broker, connection, group)
    log.info("group_settings_changed", group=group.name)
    return answer(frame)


def update_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST of 5.x: create or change the groups of a list; none if a name is
    invalid."""
    wanted: list[bodies.GroupConfig] = []
    for change in decode_group_changes(frame.body):
        group = changed_group(change, broker.group_configs.get)
        fault = names.group_fault(group.name)
        if fault:
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
        wanted.append(group)
    for number, group in enumerate(wanted, 1):
        _put_group(broker, connection, group)
        if number % SLICE == 0:
            yield
    log.info("group_settings_changed", count=len(wanted), first=wanted[0].name if wanted else "")
    return answer(frame)


def _put_group(broker: BrokerController, connection: RemotingConnection, group: bodies.GroupConfig) -> None:
    former = broker.group_configs.get(group.name)
    if former is not None and former.lite_topic and former.lite_topic != group.lite_topic:
        broker.pops.check_unbinding(group.name, former.lite_topic)
        broker.group_configs.put(group)
        broker.pops.lite_group_unbound(group.name, former.lite_topic)
    else:
        broker.group_configs.put(group)
    if group.lite_topic:  # other groups get their retry topic later, for example when their first member joins
        broker.ensure_retry_topic(group, connection)


def _subscribed(group: Group | None) -> list[str]:
    return sorted(group.topics) if group else []


def _owners(broker: BrokerController, name: str, group: Group | None) -> Work[dict[tuple[str, int], str]]:
    """Return the client id of the owner of each owned queue, by topic and queue id: the client that has locked the queue, or
    the foreign member that reads it without a lock; `SHARED_OWNER` for queues of a topic that clients pop."""
    owners = broker.groups.owners(name)
    looks = 0
    found, now_s = broker.groups.get(name), broker.clock.monotonic_s()
    for topic in found.pools if found is not None else ():
        is_apart = found is not None and found.is_apart(topic, now_s)
        for queue_id in range(broker.topics.queues_of(topic) if is_apart else 0):
            owners.setdefault((topic, queue_id), SHARED_OWNER)
    for topic in _subscribed(group):
        for queue_id in range(broker.topics.queues_of(topic)):
            looks += 1
            if looks % LOOKS == 0:
                yield
            reader = broker.groups.queue(name, topic, queue_id).reader
            member = group.members.get(reader) if group and reader else None
            if member is not None and member.is_foreign:
                owners.setdefault((topic, queue_id), member.client_id)
    return owners


def group_history(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_GROUP_HISTORY, Rocketlet's own request: return the members, owners and events of a group."""
    name, since_ms, lag = read(GroupHistory, frame.ext)
    value = yield from history_of(broker, name, since_ms, lag=lag)
    parts: list[bytes] = []
    for key, item in value.items():
        if isinstance(item, list):
            parts.append(b"%b:[%b]" % (orjson.dumps(key), (yield from listed(map(orjson.dumps, item)))))
        else:
            parts.append(b"%b:%b" % (orjson.dumps(key), orjson.dumps(item)))
    return answer(frame, body=b"{%b}" % (yield from listed(parts)))


def _member(member: Member, *, pops: bool) -> dict[str, object]:
    return {
        "clientId": member.client_id,
        "peer": member.session.peer,
        "strategy": member.data.strategy,
        "rocketletVersion": member.data.own_version,
        "messageModel": member.data.message_model,
        "leaving": member.data.leaving,
        "subscriptions": {item.topic: item.expression for item in member.subscriptions.values()},
        "pops": pops,
    }


def _popper(client_id: str, wanted: Iterable[Subscription]) -> dict[str, object]:
    """Return the description of a client that pops and is no member, such as a gRPC client."""
    return {
        "clientId": client_id,
        "peer": "",
        "strategy": None,
        "messageModel": "CLUSTERING",
        "leaving": False,
        "subscriptions": {item.topic: item.expression for item in wanted},
        "pops": True,
    }


def history_of(broker: BrokerController, name: str, since_ms: int = 0, *, lag: bool = True) -> Work[dict[str, object]]:
    """Return the broker's report about a group, with events from `since_ms` on. Without `lag`, the report has no
    progress, and no message is read from the disk."""
    group = broker.groups.get(name)
    members: list[dict[str, object]] = []
    popping = broker.pops.pools.clients_of(name)
    for number, member in enumerate(list(group.members.values()) if group else (), 1):
        if not member.is_grpc_client:  # the client of this pop member is added below
            members.append(_member(member, pops=popping.pop(member.client_id, None) is not None))
        if number % SLICE == 0:
            yield
    members += [_popper(client_id, wanted) for client_id, wanted in popping.items()]
    owned = yield from _owners(broker, name, group)
    owners = [
        {"topic": topic, "brokerName": broker.config.name, "queueId": queue_id, "clientId": client_id}
        for (topic, queue_id), client_id in owned.items()
    ]
    progress: list[dict[str, object]] = []
    for topic in broker.progress.topics_of(name) if lag else ():
        messages, oldest_ms, in_hand = yield from broker.progress.lag(name, topic)
        progress.append({"topic": topic, "messages": messages, "oldestMs": oldest_ms, "inHand": in_hand})
    events: list[Mapping[str, object]] = []
    for number, event in enumerate(broker.history.since(name, since_ms), 1):
        events.append(shown(event))
        if number % SLICE == 0:
            yield
    return {
        "broker": broker.config.name,
        "members": members,
        "lag": progress,
        "owners": owners,
        "draining": broker.draining.is_pending(name),
        "full": [f"{topic}:{label}" for topic, label in broker.pops.pools.full(name)],
        "limited": broker.rates.limited(name),
        "queues": {topic: broker.topics.queues_of(topic) for topic in _subscribed(group)},
        "disagreements": sorted(group.reported) if group else [],
        "events": events,
    }


def all_groups(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    table = ((group.name, group) for group in broker.group_configs)
    body = yield from admin_bodies.encode_versioned(broker.group_configs.version, "subscriptionGroupTable", table)
    return answer(frame, body=body)


def all_consumer_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    table = yield from listed(broker.offsets.encoded())
    return answer(frame, body=b'{"offsetTable":{%b}}' % table)


# ------------------------------------------------------------------------------
# Administration of the broker's settings, as with mqadmin's getBrokerConfig and updateBrokerConfig.


# The settings that may be changed while the broker runs: by Apache's name, the field of BrokerConfig, the conversion
# from text, and the minimum and maximum.
_SETTINGS: dict[str, tuple[str, Callable[[str], float], float, float]] = {
    "brokerPermission": ("permission", int, 0, MAX_PERM),
    "autoCreateTopicEnable": ("auto_create_topics", lambda text: text == "true", 0, 1),
    "autoCreateSubscriptionGroup": ("auto_create_groups", lambda text: text == "true", 0, 1),
    "defaultTopicQueueNums": ("default_queues", int, 1, MAX_QUEUES_PER_TOPIC),
    "fileReservedTime": ("retain_hours", float, 0, MAX_RETAIN_HOURS),
    "transactionTimeOut": ("transaction_timeout_s", lambda text: int(text) / 1000, 0, MAX_TRANSACTION_TIMEOUT_S),
}


def all_delay_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    table = {str(level): offset for level, offset in broker.delays.progress.items()}
    return answer(frame, body=orjson.dumps({"offsetTable": table}))


def settings(config: BrokerConfig) -> dict[str, object]:
    """Return the settings that Apache's broker has, too, by Apache's names."""
    ours = asdict(config)
    apache = {
        "brokerName": config.name,
        "brokerClusterName": config.cluster,
        "brokerId": 0,
        "brokerRole": "ASYNC_MASTER",
        "brokerIP1": config.address.rpartition(":")[0].strip("[]"),
        "listenPort": config.address.rpartition(":")[2],
        "flushDiskType": "SYNC_FLUSH" if config.flush == "sync" else "ASYNC_FLUSH",
        "storePathRootDir": config.data_dir,
        "namesrvAddr": ";".join(config.name_servers),
        "maxMessageSize": 4 * 1024 * 1024,
        "enablePropertyFilter": "true",
    }
    for name, (field, *_) in _SETTINGS.items():
        value = ours[field]
        if name == "transactionTimeOut":
            value = int(value * 1000)
        apache[name] = str(value).lower() if isinstance(value, bool) else value
    return apache


def broker_config(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    version = orjson.dumps({"counter": broker.settings.changes, "timestamp": broker.statistics.boot_ms}).decode()
    return answer(frame, ext={"version": version}, body=admin_bodies.encode_properties(settings(broker.config)))


def update_broker_config(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """UPDATE_BROKER_CONFIG: apply all settings, or none if one is invalid. Changes last until the broker stops."""
    wanted = admin_bodies.decode_properties(frame.body)
    changed = asdict(broker.config)
    for name, text in wanted.items():
        if name not in _SETTINGS:
            remark = f"{name} cannot be changed while the broker runs; these can: {', '.join(_SETTINGS)}"
            return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)
        field, convert, low, high = _SETTINGS[name]
        try:
            changed[field] = within(name, convert(text), low, high)
        except (ValueError, OverflowError):
            raise BodyError(f"{name}: {text[:40]!r} is not a number") from None
    broker.change_config(BrokerConfig(**changed))
    log.info("settings_changed", **wanted)
    return answer(frame)


def clean(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CLEAN_EXPIRED_CONSUMEQUEUE and DELETE_EXPIRED_COMMITLOG: start to delete expired segments now."""
    broker.tasks.spawn(broker.expire_segments())
    return answer(frame)


def all_producers(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    return answer(frame, body=(yield from admin_bodies.encode_all_producers(broker.clients.all_producers())))


def producer_connections(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    name = read(ProducerGroup, frame.ext).producer_group
    infos = broker.clients.producers(name)
    if not infos:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"the producer group[{name}] not exist")
    return answer(frame, body=(yield from admin_bodies.encode_producer_connections(infos)))


# ------------------------------------------------------------------------------
# Requests of monitoring: mqadmin's brokerStatus and statsAll, Apache's exporter for Prometheus, and Apache's dashboard.
#
# The response contains every value that Apache's broker 4.9.7 returns, because the exporter ignores a broker whose
# response lacks a value. For parts that this broker does not have, such as thread pools, the values are those of an
# idle Apache broker.


# Capacities of the queues of Apache's thread pools (defaults of BrokerConfig), by which dashboards divide the number of
# waiting requests.
_POOLS: Final = {"send": 10_000, "pull": 100_000, "query": 20_000, "EndTransaction": 100_000}
_OF_BROKER: Final = {"BROKER_PUT_NUMS": PUT, "BROKER_GET_NUMS": GOT}
_STATS: Final = (PUT, PUT_BYTES, GOT, GOT_BYTES, SENT_BACK)
_SENDS: Final = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_PULLS: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
_LEVELS_MS: Final = (0, 10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)  # levels of StoreStatsService
_LEVEL_NAMES: Final = (
    "<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s", "3~4s", "4~5s", "5~10s",
    "10s~",
)  # fmt: skip
_UNLIMITED: Final = (1 << 31) - 1


def runtime_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    totals = yield from broker.statistics.totals()
    table = {
        **_identity(broker),
        **_rates(broker.statistics, totals),
        **_store(broker),
        **dict(_waiting()),
        **_latencies(broker),
        **dict(_delays(broker)),
        **_ours(broker),
    }
    return answer(frame, body=admin_bodies.encode_table({name: str(value) for name, value in table.items()}))


def _identity(broker: BrokerController) -> dict[str, object]:
    boot_ms = broker.statistics.boot_ms
    return {
        "brokerVersionDesc": "V4_9_8",
        "rocketletVersion": own_version(),
        "brokerVersion": VERSION,
        "bootTimestamp": boot_ms,
        "startAcceptSendRequestTimeStamp": 0,  # 0 as at Apache's broker, which refuses sends before this time
        "runtime": _spelled(broker.clock.time_ms() - boot_ms),
    }


def _rates(stats: Statistics, totals: Totals) -> dict[str, object]:
    got_rates, since_start = stats.rates(GOT, totals), stats.since_start(totals)
    table: dict[str, object] = {
        "putTps": stats.rates(PUT, totals),
        "getTransferedTps": got_rates,
        "getTransferredTps": got_rates,  # the name in 5.x
        "getTotalTps": got_rates,
        "getFoundTps": got_rates,
        "getMissTps": "0.0 0.0 0.0",
        "putMessageTimesTotal": since_start[PUT],
        "putMessageSizeTotal": since_start[PUT_BYTES],
        "putMessageAverageSize": since_start[PUT_BYTES] / max(since_start[PUT], 1),
    }
    for name, key in (("Put", PUT), ("Get", GOT)):
        yesterday, morning, now = stats.sums(key, totals)
        table[f"msg{name}TotalYesterdayMorning"] = yesterday
        table[f"msg{name}TotalTodayMorning"] = morning
        table[f"msg{name}TotalTodayNow"] = now
    return table


def _store(broker: BrokerController) -> dict[str, object]:
    store = broker.store
    ratio, (total, free) = round(store.disk_ratio(), 4), store.room.size_and_free_bytes()
    return {
        "earliestMessageTimeStamp": store.earliest_ms(),
        "commitLogMinOffset": store.begin,
        "commitLogMaxOffset": store.end,
        "commitLogDiskRatio": ratio,
        f"commitLogDiskRatio_{broker.config.data_dir / 'commitlog'}": ratio,
        "consumeQueueDiskRatio": ratio,
        "commitLogDirCapacity": f"Total : {total / (1 << 30):.1f} GiB, Free : {free / (1 << 30):.1f} GiB.",
        "putMessageFailedTimes": store.room.refused,
        "pageCacheLockTimeMills": 0,
        "remainHowManyDataToFlush": "0 B",
        "remainTransientStoreBufferNumbs": _UNLIMITED,
        "dispatchBehindBytes": 0,
        "dispatchMaxBuffer": 0,
    }


def _waiting() -> Iterator[tuple[str, int]]:
    for pool, capacity in _POOLS.items():
        yield f"{pool}ThreadPoolQueueCapacity", capacity
        name = pool[0].lower() + pool[1:]
        yield f"{name}ThreadPoolQueueSize", 0
        yield f"{name}ThreadPoolQueueHeadWaitTimeMills", 0
    yield "EndTransactionQueueSize", 0


def _latencies(broker: BrokerController) -> dict[str, object]:
    """Return the durations of sends and pulls, each rounded up to the upper bound of its histogram bucket; those in the last
    bucket count as twice its lower bound."""
    puts = [broker.request_times[code] for code in _SENDS]
    pulls = [broker.request_times[code] for code in _PULLS]
    counts = [0] * len(_LEVEL_NAMES)
    for histogram in puts:
        for bound_ms, count in zip(_bounds_ms(histogram), histogram.counts, strict=True):
            counts[bisect_left(_LEVELS_MS, bound_ms if bound_ms > 1 else 0)] += count  # Apache's broker counts whole ms
    levels = " ".join(f"[{name}]:{count}" for name, count in zip(_LEVEL_NAMES, counts, strict=True))
    return {
        "putMessageDistributeTime": f"{levels} ",
        "putLatency99": f"{_quantile_ms(puts, 0.99):.2f}",
        "putLatency999": f"{_quantile_ms(puts, 0.999):.2f}",
        "putMessageEntireTimeMax": round(_quantile_ms(puts, 1.0)),
        "getMessageEntireTimeMax": round(_quantile_ms(pulls, 1.0)),
    }


def _bounds_ms(histogram: Histogram) -> list[float]:
    return [bound_s * 1000 for bound_s in (*histogram.bounds_s, 2 * histogram.bounds_s[-1])]


def _quantile_ms(histograms: list[Histogram], share: float) -> float:
    counts = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    wanted, seen = share * sum(counts), 0
    for bound_ms, count in zip(_bounds_ms(histograms[0]), counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound_ms
    return 0.0


def _delays(broker: BrokerController) -> Iterator[tuple[str, str]]:
    for level in range(1, len(broker.config.delay_levels_ms) + 1):
        queue = broker.store.queues.get((names.SCHEDULE_TOPIC, level - 1))
        if queue is not None:
            yield f"scheduleMessageOffset_{level}", f"{broker.delays.progress.get(level, 0)},{queue.next}"


def _ours(broker: BrokerController) -> dict[str, object]:
    """Return values that only Rocketlet's brokers have, for `rocketlet doctor`."""
    return {
        "residentBytes": resident_bytes(),
        "writeFault": broker.store.write_fault() or "",
        "clockAheadSeconds": round(broker.retention_time.ahead_s),
        "damagedMessages": len(broker.store.damaged),
        "leases": len(broker.locks),
        "notAdopted": _json(broker.runtime.adoption.faults[:MAX_NAMED_MEMBERS]),
        "refusedHeartbeats": _json(broker.refusals.recent()[-MAX_NAMED_MEMBERS:]),
        "repeats": _json({**broker.repeats.recent(), "away": broker.draining.agreement.away()}),
        "refusedRequests": _json(broker.acl.recent()[-MAX_NAMED_MEMBERS:] if broker.acl else []),
        "unburied": _json(broker.pops.unstored_dead_letters.texts()[-MAX_NAMED_MEMBERS:]),
        "turnedAway": _json([*broker.tls.turned_away(), *broker.turned_away.texts()][-MAX_NAMED_MEMBERS:]),
        "outdatedClients": _json(broker.callers.outdated()[-MAX_NAMED_MEMBERS:]),
        "failedCalls": _json(broker.callers.failed()[-MAX_NAMED_MEMBERS:]),
        "certificates": _json({path.name: int(at_s) for path, at_s in broker.tls.expires_s.items()}),
        "members": sum(len(group.members) for group in broker.groups),
        "server": f"rocketlet, Python {sys.version.split()[0]}",
    }


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _spelled(duration_ms: int) -> str:
    """Return a duration as text, like Apache's StoreStatsService.getFormatRuntime."""
    minutes, seconds = divmod(duration_ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def view_stats(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """VIEW_BROKER_STATS_DATA: return the rates of a topic, of a group in a topic, or of the broker."""
    header = read(ViewStats, frame.ext)
    stats = broker.statistics
    if header.stats_name in _STATS:
        rates = {
            "statsMinute": stats.rate(*header, 60),
            "statsHour": stats.rate(*header, 3600),
            "statsDay": stats.today(*header),
        }
    elif header.stats_name in _OF_BROKER:
        totals = yield from stats.totals()
        kind = _OF_BROKER[header.stats_name]
        rates = {
            "statsMinute": stats.rate_of_all(kind, totals, 60),
            "statsHour": stats.rate_of_all(kind, totals, 3600),
            "statsDay": stats.today_of_all(kind, totals),
        }
    else:
        remark = f"The stats <{header.stats_name}> not exist; these do: {', '.join((*_STATS, *_OF_BROKER))}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    value = {name: _rate_values(rate) for name, rate in rates.items()}
    return answer(frame, body=orjson.dumps(value))


def _rate_values(rate: Rate) -> dict[str, float]:
    return {"avgpt": 0.0, "sum": rate.total, "tps": rate.per_second}


# ------------------------------------------------------------------------------
# Requests that read and change the settings of topics.


def create_topic(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(CreateTopic, frame.ext)
    fault = _new_topic_fault(broker, header.topic)
    if fault is None and header.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
        fault = f"the topic filter type {header.topic_filter_type} is unknown; use SINGLE_TAG or MULTI_TAG"
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    former = broker.topics.get(header.topic)
    if former is not None and header.if_missing:
        return answer(frame)
    topic = TopicConfig(
        header.topic,
        header.read_queue_nums,
        header.write_queue_nums,
        header.perm,
        header.topic_filter_type,
        header.topic_sys_flag,
        header.order,
    )
    broker.topics.put(changed_topic(topic, former, header.attributes), broker.store.end)
    topics_log.info("topic_created", topic=header.topic, queues=header.write_queue_nums)
    return answer(frame)


def _new_topic_fault(broker: BrokerController, name: str) -> str | None:
    fault = names.topic_fault(name)
    if fault is None and broker.topics.is_built_in(name):
        fault = f"the topic {name} is conflict with system topic"
    return fault


def create_topics(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """UPDATE_AND_CREATE_TOPIC_LIST of 5.x: create or change the topics of a list; none if a name is invalid or
    reserved."""
    wanted: list[TopicConfig] = []
    for number, (topic, changes) in enumerate(bodies.decode_new_topics(frame.body), 1):
        fault = _new_topic_fault(broker, topic.name)
        if fault:
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
        wanted.append(changed_topic(topic, broker.topics.get(topic.name), changes))
        if number % SLICE == 0:
            yield
    for number, topic in enumerate(wanted, 1):
        broker.topics.put(topic, broker.store.end)
        if number % SLICE == 0:
            yield
    topics_log.info("topics_created", count=len(wanted), first=wanted[0].name if wanted else "")
    return answer(frame)


async def delete_topic(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """DELETE_TOPIC_IN_BROKER. The response follows when the topic's index files are deleted. Raises ResponseError if the
    disk is full."""
    return await _delete_topics(broker, frame, [read(TopicName, frame.ext).topic])


async def delete_topics(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """DELETE_TOPIC_IN_BROKER_LIST of 5.5.1: delete the topics of a list; none if a name is invalid or reserved."""
    return await _delete_topics(broker, frame, bodies.decode_topic_names(frame.body))


async def _delete_topics(broker: BrokerController, frame: Frame, wanted: list[str]) -> Buffers:
    for name in wanted:
        fault = names.topic_fault(name)
        if fault is None and broker.topics.is_built_in(name):
            fault = f"the topic {name} is a system topic, which cannot be deleted"
        if fault:
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    for name in wanted:
        await _delete_topic(broker, name)
    return answer(frame)


async def _delete_topic(broker: BrokerController, name: str) -> None:
    broker.topics.delete(name, broker.store.end)
    broker.offsets.topic_deleted(name)
    broker.lites.topic_deleted(name)
    broker.pops.topic_deleted(name)
    broker.watch.topic_deleted(name)
    noting = broker.locks.topic_deleted(name)
    topics_log.info("topic_deleted", topic=name)
    removing = broker.store.deleting(name)
    broker.held_pulls.release_topic(name)
    try:
        await broker.device.do(noting)
        await broker.device.do(removing)
    except StoreFull as error:
        raise ResponseError(ResponseCode.SERVICE_NOT_AVAILABLE, f"not all of {name} is gone: {error}") from None


def all_topics(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    table = ((topic.name, topic_json(topic)) for topic in broker.topics)
    body = yield from admin_bodies.encode_versioned(broker.topics.version, "topicConfigTable", table)
    return answer(frame, ext={}, body=body)


def one_topic(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_TOPIC_CONFIG of 5.x: return the settings of one topic."""
    name = read(TopicName, frame.ext).topic
    topic = broker.topics.get(name)
    if topic is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"No topic in this broker. topic: {name}")
    return answer(frame, body=orjson.dumps({"attributes": {}, **topic_json(topic)}))


def system_topics(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    found: list[str] = []
    for number, topic in enumerate(broker.topics, 1):
        if broker.topics.is_built_in(topic.name):
            found.append(topic.name)
        if number % SLICE == 0:
            yield
    body = yield from bodies.encode_topic_list(found)
    return answer(frame, body=body)


def topic_stats(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_TOPIC_STATS_INFO: return the range of offsets of each queue, and the store time of its last message; 0 for an empty
    queue."""
    name = read(TopicName, frame.ext).topic
    topic = broker.topics.get(name)
    if topic is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{name}] not exist")
    count = max(topic.write_queues, topic.read_queues)
    ranges = ((Queue(name, broker.config.name, number), _range(broker, name, number)) for number in range(count))
    body = yield from admin_bodies.encode_topic_stats(ranges)
    return answer(frame, body=body)


def _range(broker: BrokerController, topic: str, queue_id: int) -> Range:
    queue = broker.store.queues.get((topic, queue_id))
    if queue is None:
        return Range(0, 0, 0)
    if queue.begin == queue.next:
        return Range(queue.begin, queue.next, 0)
    return Range(queue.begin, queue.next, broker.store.store_time_ms(queue, queue.next - 1))


def query_consume_queue(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """QUERY_CONSUME_QUEUE: return up to `MAX_QUERY_ENTRIES` index entries of a queue from the requested offset on."""
    header = read(ConsumeQueueQuery, frame.ext)
    queue = broker.store.queues.get((header.topic, header.queue_id))
    if queue is None:
        remark = f"{header.queue_id}@{header.topic} is not exist!"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    begin = max(header.index_, queue.begin)
    count = min(header.index_ + header.count_ - begin, queue.next - begin, MAX_QUERY_ENTRIES)
    entries = [
        {"eval": True, "physicOffset": position, "physicSize": size, "tagsCode": code}
        for position, size, code in iter_unpack(">QIq", queue.entries(begin, count) if count > 0 else b"")
    ]
    value = {"maxQueueIndex": queue.next, "minQueueIndex": queue.begin, "queueData": entries}
    return answer(frame, body=orjson.dumps(value))


def clean_unused_topics(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """CLEAN_UNUSED_TOPIC: do nothing. Apache's broker deletes index files of deleted topics, which this broker deletes
    with the topic."""
    return answer(frame)
