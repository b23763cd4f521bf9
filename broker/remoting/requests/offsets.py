"""Offsets: where a group is in a queue, and where the queue begins and ends."""

from __future__ import annotations

import structlog

from ....protocol.codes import EXT_UNKNOWN, ResponseCode
from ....protocol.extents import TopicExtent, decode_topics, encode_extents
from ....protocol.frame import Frame
from ....protocol.headers import (
    BrokerTimes,
    Offset,
    OptionalGroup,
    QueueOffset,
    SearchOffset,
    StoreTime,
    TopicQueue,
    UpdateOffset,
    read,
    write,
)
from ....protocol.work import Work
from ...broker import Broker
from ...store.consume_queue import ConsumeQueue
from ..answers import Buffers, Refused, answer
from ..connection import Connection

log = structlog.get_logger("rocketlet.broker")


def query_consumer_offset(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Apache's broker answers 0 for a group that has no offset and a queue whose start is still there
    (ConsumerManageProcessor.queryConsumerOffset), so "latest" starts at 0. A Rocketlet client says which it wants instead:
    an error, or the latest, which is then fixed for all queues of the topic, so that members who start together agree."""
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


def _fix_latest(broker: Broker, group: str, topic: str, queue: ConsumeQueue | None) -> int:
    if broker.group_configs.ensure(group) is None:
        raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
    if broker.offsets.knows(group, topic):  # the queue is newer than the group
        return queue.begin if queue else 0
    for queue_id in range(broker.topics.queues_of(topic)):
        other = broker.store.queues.get((topic, queue_id))
        broker.offsets.put(group, topic, queue_id, other.next if other else 0)
    return queue.next if queue else 0


def update_consumer_offset(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(UpdateOffset, frame.ext)
    group, queue = header.consumer_group, (header.topic, header.queue_id)
    fault = broker.commits.fence_fault(
        connection, group, queue, header.commit_offset, header.epoch, may_be_tool=not frame.is_oneway
    )
    if fault:
        if connection.is_news("commit_refused"):
            log.warning("commit_refused", group=group, peer=connection.peer, reason=fault)
        return answer(frame, ResponseCode.NO_PERMISSION, remark=f"the offset is not stored: {fault}")
    fault = broker.commits.offset_fault(group, queue, header.commit_offset)
    if fault:
        if connection.is_news("commit_refused"):
            log.warning("commit_refused", group=group, peer=connection.peer, reason=fault)
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"the offset is not stored: {fault}")
    if header.sought and header.epoch is not None:
        broker.locks.forget_former_end(group, *queue)
    broker.commits.store(connection, group, queue, header.commit_offset, by_owner=header.epoch is not None)
    return answer(frame, ext={})


def _queue(broker: Broker, topic: str, queue_id: int) -> ConsumeQueue | None:
    return broker.store.queues.get((topic, queue_id))


def max_offset(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    return answer(frame, ext=write(Offset(queue.next if queue else 0)))


def min_offset(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    return answer(frame, ext=write(Offset(queue.begin if queue else 0)))


def queue_offsets(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """GET_QUEUE_OFFSETS, our own. Topics that are not here are skipped."""
    group = read(OptionalGroup, frame.ext).consumer_group or ""
    found: dict[str, TopicExtent] = {}
    for name in decode_topics(frame.body):
        if broker.topics.get(name):
            found[name] = _extent(broker, group, name)
            yield
    times = BrokerTimes(broker.clock.time_ms(), broker.statistics.boot_ms)
    return answer(frame, ext=write(times), body=encode_extents(found))


def _extent(broker: Broker, group: str, topic: str) -> TopicExtent:
    queues = [_queue(broker, topic, queue_id) for queue_id in range(broker.topics.queues_of(topic))]
    return TopicExtent(
        broker.topics.identity(topic),
        broker.offsets.rewinds(group, topic),
        tuple(queue.begin if queue else 0 for queue in queues),
        tuple(queue.next if queue else 0 for queue in queues),
    )


def search_offset(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    header = read(SearchOffset, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    offset = (yield from broker.store.offset_by_time(queue, header.timestamp)) if queue else 0
    return answer(frame, ext=write(Offset(offset)))


def earliest_store_time(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    stored = queue is not None and queue.begin < queue.next
    return answer(
        frame, ext=write(StoreTime(broker.store.store_time_ms(queue, queue.begin) if queue and stored else -1))
    )
