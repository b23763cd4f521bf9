"""Administration of groups: connections, progress, offsets set from outside, and questions to the members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import orjson
import structlog

from ....protocol import admin_bodies, bodies, group_config, names
from ....protocol.admin_bodies import ConnectedClient, Progress, ProgressColumns
from ....protocol.bodies import ConsumerData
from ....protocol.codes import Language, RequestCode, ResponseCode
from ....protocol.config import MAX_TABLE_BYTES
from ....protocol.frame import Frame
from ....protocol.group_config import encode_group, group_json
from ....protocol.headers import (
    AskMember,
    CloneOffset,
    ConsumerGroup,
    ConsumeStats,
    CorrectionOffset,
    GroupHistory,
    GroupName,
    GroupOnly,
    IsOrder,
    ResetOffset,
    TopicGroup,
    TopicName,
    read,
)
from ....protocol.message import decode_host
from ....protocol.pop_bodies import SHARED_OWNER
from ....protocol.queue import Queue
from ....protocol.schema import BodyError
from ....protocol.subscription import Subscription
from ....protocol.work import LOOKS, SLICE, Work, listed
from ...broker import Broker
from ...config import MAX_ASKED_AT_ONCE, MAX_STATUSES_BYTES
from ...groups.member import Member
from ...groups.members import ConsumerGroup as Group
from ...messages.statistics import GOT
from ...sessions.events import Answer, Asked, HandlingWanted, OffsetsReset, OffsetsWanted, RunningWanted
from ...store.consume_queue import ConsumeQueue
from ..answers import Buffers, Refused, answer, small
from ..connection import Connection

log = structlog.get_logger("rocketlet.admin")


def consumer_connections(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    name = read(ConsumerGroup, frame.ext).consumer_group
    group, popping = broker.groups.get(name), broker.pops.clients(name)
    if group is None and not popping:
        remark = f"the consumer group[{name}] not online"
        return answer(frame, ResponseCode.CONSUMER_NOT_ONLINE, remark=remark)
    members = [member for member in group.members.values() if not member.is_seat] if group is not None else []
    data = members[0].data if members else ConsumerData(name)
    infos = [
        ConnectedClient(member.client_id, member.connection.peer, member.language, member.version) for member in members
    ]
    known = {member.client_id for member in members}
    infos += [ConnectedClient(client_id, "", Language.OTHER, 0) for client_id in popping if client_id not in known]
    table: dict[str, Any] = {
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


def one_group(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """GET_SUBSCRIPTIONGROUP_CONFIG, which 5.x's tools ask for one group."""
    name = read(GroupOnly, frame.ext).group
    settings = next((group for group in broker.group_configs if group.name == name), None)
    if settings is None:
        remark = f"No group in this broker. group: {name}"
        return answer(frame, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
    return answer(frame, body=encode_group(settings))


def delete_group(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(GroupName, frame.ext)
    broker.group_configs.delete(header.group_name)
    if header.remove_offset:
        broker.offsets.forget_group(header.group_name)
        broker.pops.forget_group(header.group_name)
    log.info("group_deleted", group=header.group_name, offsets=header.remove_offset)
    return answer(frame)


# Progress


def consume_stats(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
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
    body = yield from admin_bodies.encode_consume_stats(_progress(broker, group, topics), tps)
    return answer(frame, body=body)


def _columns(broker: Broker, group: str, topics: list[str], *, times: bool) -> Work[list[ProgressColumns]]:
    found: list[ProgressColumns] = []
    for topic in topics:
        columns = yield from broker.progress.columns(group, topic, times=times)
        found.append(columns)
    return found


def _progress(broker: Broker, group: str, topics: list[str]) -> Iterator[tuple[Queue, Progress]]:
    return chain.from_iterable(broker.progress.of(group, topic) for topic in topics)


def all_consume_stats(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    read(IsOrder, frame.ext)
    names = [group.name for group in broker.group_configs]
    groups = ((name, _progress(broker, name, broker.progress.topics_of(name))) for name in names)
    body = yield from admin_bodies.encode_all_consume_stats(broker.config.address, groups)
    return answer(frame, body=body)


def consumed_by(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """QUERY_TOPIC_CONSUME_BY_WHO: the groups that subscribe to a topic, or have an offset in it."""
    topic = read(TopicName, frame.ext).topic
    online = [group.name for group in broker.groups.subscribing(topic)]
    found = list(dict.fromkeys([*online, *broker.offsets.groups_of(topic)]))
    return answer(frame, body=orjson.dumps({"groupList": found}))


def time_span(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """QUERY_CONSUME_TIME_SPAN: of each queue the times of its first, last, and last consumed message."""
    header = read(TopicGroup, frame.ext)
    if broker.topics.get(header.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{header.topic}] not exist")
    body = yield from admin_bodies.encode_times(_times(broker, header.group, header.topic))
    return answer(frame, body=body)


def _times(broker: Broker, group: str, topic: str) -> Iterator[dict[str, Any]]:
    now_ms = broker.clock.time_ms()
    for at, item in broker.progress.of(group, topic):
        queue = broker.store.queues.get((at.topic, at.queue_id))
        stored = queue is not None and queue.begin < queue.next
        yield {
            "messageQueue": bodies.queue_json(at),
            "minTimeStamp": broker.store.store_time_ms(queue, queue.begin) if queue and stored else -1,
            "maxTimeStamp": broker.store.store_time_ms(queue, queue.next - 1) if queue and stored else -1,
            "consumeTimeStamp": item.last_ms or -1,
            "delayTime": now_ms - item.last_ms if item.lag and item.last_ms else 0,
        }


def correction_offset(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """QUERY_CORRECTION_OFFSET: the least offset per queue among some groups, and the compared group where it is behind."""
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


# Offsets set from outside


def clone_offsets(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """CLONE_GROUP_OFFSET: a group begins where another one is."""
    header = read(CloneOffset, frame.ext)
    topics = [header.topic] if header.topic else broker.offsets.topics_of(header.src_group)
    for topic in topics:
        for queue_id, offset in broker.offsets.of(header.src_group, topic).items():
            broker.offsets.put(header.dest_group, topic, queue_id, offset)
        broker.pops.sent_elsewhere(header.dest_group, topic)
        yield
    return answer(frame)


def reset_offset(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """INVOKE_BROKER_TO_RESET_OFFSET: members are told the offsets. Without members, the tool commits them.

    `isForce` false only goes back, as Apache's, except for a single queue: the offset named for it counts.
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
    group = broker.groups.get(header.group)
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
        broker.offsets.let_go_back(header.group, header.topic, queue.queue_id)
    for session, member in list(group.members.items()):
        if not member.is_seat:
            session.tell(event)
        yield
    log.info("offsets_reset", group=header.group, topic=header.topic, members=len(group.members))
    return answer(frame, body=admin_bodies.encode_offsets(offsets))


def _reset_popped(broker: Broker, header: ResetOffset, offsets: Mapping[Queue, int]) -> None:
    """Clients that pop can no longer acknowledge the messages in their hands."""
    for queue, offset in offsets.items():
        if broker.pops.serves(header.group, header.topic, queue.queue_id):
            broker.offsets.put(header.group, header.topic, queue.queue_id, offset)
    broker.pops.sent_elsewhere(header.group, header.topic)
    log.info("offsets_reset", group=header.group, topic=header.topic, members=0)


def _wanted_offset(broker: Broker, queue: ConsumeQueue | None, header: ResetOffset) -> Work[int]:
    """Raises Refused for an offset that the queue does not have."""
    begin, end = (queue.begin, queue.next) if queue is not None else (0, 0)
    if header.queue_id >= 0 and header.offset != -1:
        if not begin <= header.offset <= end:
            remark = f"{header.topic}:{header.queue_id} has the offsets {begin} to {end}, not {header.offset}"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        return header.offset
    if queue is None or header.timestamp == -1:
        return end
    if header.exact:
        return (yield from broker.store.first_not_before(queue, header.timestamp))
    return (yield from broker.store.offset_by_time(queue, header.timestamp))


# Asked of members


def consumer_status(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: the offsets in the members' hands; answers when all have, or time is up."""
    header = read(TopicGroup, frame.ext)
    group = broker.groups.get(header.group)
    asked = {
        member.client_id: peer
        for peer, member in (group.members.items() if group else ())
        if not member.is_seat and header.client_addr in (None, "", member.client_id)
    }
    if not asked:
        remark = f"No Any Consumer online in the consumer group: [{header.group}]"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    frame = small(frame)  # the answers may be long in coming
    offsets: dict[str, dict[Queue, int]] = {}
    waiting, size = set(asked), 0
    if len(asked) > MAX_ASKED_AT_ONCE:
        remark = f"the group {header.group} has {len(asked)} members; {MAX_ASKED_AT_ONCE} are asked at once, name one"
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

    question = OffsetsWanted(header.group, header.topic)
    for client_id, peer in asked.items():
        broker.clients.ask(peer, question, partial(answered, client_id), by=connection)
    return None


def forward(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    """GET_CONSUMER_RUNNING_INFO and CONSUME_MESSAGE_DIRECTLY: asked of the member named, whose answer is passed on."""
    header = read(AskMember, frame.ext)
    group = broker.groups.get(header.consumer_group)
    member = next(
        (
            asked
            for asked, one in (group.members if group else {}).items()
            if one.client_id == header.client_id and not one.is_seat
        ),
        None,
    )
    if member is None:
        remark = f"The Consumer <{header.consumer_group}> <{header.client_id}> not online"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    fields, frame = dict(frame.ext), small(frame)  # the answer may be long in coming
    record: bytes | None = None
    if frame.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        fields["brokerName"] = broker.config.name
        record = broker.store.record_bytes_at(_position_in(header.msg_id))
        if record is None:
            remark = f"no message has the id {header.msg_id}"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)

    def answered(reply: Answer | None) -> None:
        if reply is not None and len(reply.body) > MAX_TABLE_BYTES:
            remark = f"the answer of {header.client_id} has {len(reply.body)} bytes; {MAX_TABLE_BYTES} are passed on"
            connection.write(answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark))
        elif reply is None:
            remark = f"consumer <{header.consumer_group}> <{header.client_id}> did not answer in time"
            connection.write(answer(frame, ResponseCode.CONSUME_MSG_TIMEOUT, remark=remark))
        else:
            connection.write(_passed_on(frame, reply))

    asked = Asked(header.consumer_group, header.client_id, fields)
    question = RunningWanted(asked) if record is None else HandlingWanted(asked, record)
    broker.clients.ask(member, question, answered, by=connection)
    return None


def _passed_on(request: Frame, reply: Answer) -> Buffers:
    """The answer of a member, which may have come in by another door."""
    if isinstance(reply.detail, Frame):
        came = reply.detail
        return answer(request, came.code, dict(came.ext), came.body, came.remark)
    return answer(request, ResponseCode.SUCCESS if reply.is_ok else ResponseCode.SYSTEM_ERROR, body=reply.body)


def _position_in(message_id: str | None) -> int:
    """The commit log position in an offset id; -1 if it is not an offset id."""
    try:
        data = bytes.fromhex(message_id or "")
        decode_host(data[:-8])
    except (ValueError, OSError):
        return -1
    return int.from_bytes(data[-8:], "big")


# Settings and what people look at


def update_group(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    group = group_config.decode_group(frame.body)
    fault = names.group_fault(group.name)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    broker.group_configs.put(group)
    log.info("group_settings_changed", group=group.name)
    return answer(frame)


def _subscribed(group: Group | None) -> list[str]:
    return sorted(group.topics) if group else []


def _owners(broker: Broker, name: str, group: Group | None) -> Work[dict[tuple[str, int], str]]:
    """Client id by topic and queue id: the one that has locked the queue or, for foreign members, which lock nothing, the
    one that reads it."""
    owners = broker.locks.owners(name)
    looks = 0
    for topic in broker.pops.topics_of(name):
        for queue_id in range(broker.topics.queues_of(topic) if broker.pops.is_apart(name, topic) else 0):
            owners.setdefault((topic, queue_id), SHARED_OWNER)
    for topic in _subscribed(group):
        for queue_id in range(broker.topics.queues_of(topic)):
            looks += 1
            if looks % LOOKS == 0:
                yield
            reader = broker.watch.reader(name, topic, queue_id)
            member = group.members.get(reader) if group and reader else None
            if member is not None and member.is_foreign:
                owners.setdefault((topic, queue_id), member.client_id)
    return owners


def group_history(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """GET_GROUP_HISTORY, our own: members, owners and events of a group."""
    name, since_ms, lag = read(GroupHistory, frame.ext)
    value = yield from history_of(broker, name, since_ms, lag=lag)
    parts: list[bytes] = []
    for key, item in value.items():
        if isinstance(item, list):
            parts.append(b"%b:[%b]" % (orjson.dumps(key), (yield from listed(map(orjson.dumps, item)))))
        else:
            parts.append(b"%b:%b" % (orjson.dumps(key), orjson.dumps(item)))
    return answer(frame, body=b"{%b}" % (yield from listed(parts)))


def _member(member: Member, *, pops: bool) -> dict[str, Any]:
    return {
        "clientId": member.client_id,
        "peer": member.connection.peer,
        "strategy": member.data.strategy,
        "rocketletVersion": member.data.own_version,
        "messageModel": member.data.message_model,
        "leaving": member.data.leaving,
        "subscriptions": {item.topic: item.expression for item in member.subscriptions.values()},
        "pops": pops,
    }


def _popper(client_id: str, wanted: Iterable[Subscription]) -> dict[str, Any]:
    """A client that pops and sends no heartbeats to this door, as those of 5.x."""
    return {
        "clientId": client_id,
        "peer": "",
        "strategy": None,
        "messageModel": "CLUSTERING",
        "leaving": False,
        "subscriptions": {item.topic: item.expression for item in wanted},
        "pops": True,
    }


def history_of(broker: Broker, name: str, since_ms: int = 0, *, lag: bool = True) -> Work[dict[str, Any]]:
    """The broker's report on a group, with events from `since_ms` on; without `lag` nothing is read."""
    group = broker.groups.get(name)
    members: list[dict[str, Any]] = []
    popping = broker.pops.clients(name)
    for number, member in enumerate(list(group.members.values()) if group else (), 1):
        if not member.is_seat:  # its client follows
            members.append(_member(member, pops=popping.pop(member.client_id, None) is not None))
        if number % SLICE == 0:
            yield
    members += [_popper(client_id, wanted) for client_id, wanted in popping.items()]
    owned = yield from _owners(broker, name, group)
    owners = [
        {"topic": topic, "brokerName": broker.config.name, "queueId": queue_id, "clientId": client_id}
        for (topic, queue_id), client_id in owned.items()
    ]
    progress: list[dict[str, Any]] = []
    for topic in broker.progress.topics_of(name) if lag else ():
        messages, oldest_ms, in_hand = yield from broker.progress.lag(name, topic)
        progress.append({"topic": topic, "messages": messages, "oldestMs": oldest_ms, "inHand": in_hand})
    return {
        "broker": broker.config.name,
        "members": members,
        "lag": progress,
        "owners": owners,
        "draining": broker.draining.is_pending(name),
        "full": [f"{topic}:{queue_id}" for topic, queue_id in broker.pops.full(name)],
        "queues": {topic: broker.topics.queues_of(topic) for topic in _subscribed(group)},
        "disagreements": sorted(group.reported) if group else [],
        "events": broker.history.of(name, since_ms),
    }


def all_groups(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    table = ((group.name, group_json(group)) for group in broker.group_configs)
    body = yield from admin_bodies.encode_versioned(broker.group_configs.version, "subscriptionGroupTable", table)
    return answer(frame, body=body)


def all_consumer_offsets(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    table = yield from listed(broker.offsets.encoded())
    return answer(frame, body=b'{"offsetTable":{%b}}' % table)
