"""The progress of groups, and the offsets that administrators set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import orjson
import structlog

from ....protocol import admin_bodies, bodies
from ....protocol.admin_bodies import ProgressColumns, QueueProgress
from ....protocol.bodies import SLICE, Work, listed
from ....protocol.codes import Language, ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import (
    CloneOffset,
    ConsumeStats,
    CorrectionOffset,
    IsOrder,
    ResetOffset,
    TopicGroup,
    TopicName,
    read,
)
from ....protocol.names import Queue
from ...broker import BrokerController
from ...messages.statistics import GOT
from ...sessions.events import OffsetsReset
from ...store.index import ConsumeQueue
from ..connection import RemotingConnection
from ..responses import Buffers, ResponseError, answer

log = structlog.get_logger("rocketlet.admin")


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


def all_consumer_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    table = yield from listed(broker.offsets.encoded())
    return answer(frame, body=b'{"offsetTable":{%b}}' % table)


def all_delay_offsets(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    table = {str(level): offset for level, offset in broker.delays.progress.items()}
    return answer(frame, body=orjson.dumps({"offsetTable": table}))


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
