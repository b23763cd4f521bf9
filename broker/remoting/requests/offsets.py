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
    (ConsumerManageProcessor.queryConsumerOffset), so "latest" starts at 0. A Rocketlet client says what it wants instead:
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
    fault = fence_fault(broker, connection, group, queue, header.commit_offset, header.epoch)
    if fault:
        if connection.is_news("commit_refused"):
            log.warning("commit_refused", group=group, peer=connection.peer, reason=fault)
        return answer(frame, ResponseCode.NO_PERMISSION, remark=f"the offset is not stored: {fault}")
    fault = offset_fault(broker, group, queue, header.commit_offset)
    if fault:
        if connection.is_news("commit_refused"):
            log.warning("commit_refused", group=group, peer=connection.peer, reason=fault)
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=f"the offset is not stored: {fault}")
    if header.sought and header.epoch is not None:
        broker.locks.forget_former_end(group, *queue)
    store_offset(broker, group, queue, header.commit_offset, by_owner=header.epoch is not None)
    return answer(frame, ext={})


def fence_fault(
    broker: Broker, connection: Connection, group: str, queue: tuple[str, int], offset: int, epoch: int | None
) -> str | None:
    """Why this client may not say how far a group is in a queue; None if it may."""
    found = broker.groups.get(group)
    if found is not None and connection in found.members and broker.pops.is_popped(group, queue[0]):
        return popped_fault(group, queue[0])
    fault = broker.locks.commit_fault(group, queue, connection, epoch)
    allotment = broker.draining.allotment
    if fault is None and group in allotment.bound and allotment.is_bystander(group, connection, *queue):
        return f"{queue[0]}:{queue[1]} is another's; this member does not read it"
    if fault is None and offset < (broker.offsets.get(group, queue[0], queue[1]) or 0):
        return stale_fault(broker, connection, group, queue, offset)
    return fault


def popped_fault(group: str, topic: str) -> str:
    return f"clients of the group {group} pop {topic}; a group either pulls a topic or pops it: use another group"


def store_offset(broker: Broker, group: str, queue: tuple[str, int], offset: int, *, by_owner: bool) -> None:
    topic, queue_id = queue
    end = broker.locks.note_commit(group, topic, queue_id, offset)
    if end != offset:
        log.warning(
            "offset_set_back", group=group, topic=topic, queue=queue_id, offset=offset, end=end,
            hint="the member read messages that were lost before this start; their offsets are given again",
        )  # fmt: skip
    broker.offsets.put(group, topic, queue_id, end, by_owner=by_owner)
    broker.pops.sent_elsewhere(group, topic)


def stale_fault(broker: Broker, connection: Connection, group: str, queue: tuple[str, int], offset: int) -> str | None:
    """Why a foreign member's commit that goes back is refused; None if it is not. Only who reads the queue may go back:
    others have loaded their offset before somebody else came further, and say it when they drop the queue. An
    administrator is no member and may go back."""
    if not is_foreign_member(broker, connection, group):
        return None
    if broker.offsets.is_behind_owner(group, *queue, offset):
        return f"{offset} is behind what the last owner of {queue[0]}:{queue[1]} has committed"
    if broker.watch.reader(group, *queue) is not connection:
        committed = f"{broker.offsets.get(group, *queue)}, which the group has committed of {queue[0]}:{queue[1]}"
        return f"{offset} is behind {committed}; this member does not read it"
    return None


def is_foreign_member(broker: Broker, connection: Connection, group: str) -> bool:
    """Whether Apache's push consumer is at the other end, as a member of the group."""
    found = broker.groups.get(group)
    member = found.members.get(connection) if found else None
    return member is not None and member.is_foreign


def offset_fault(broker: Broker, group: str, queue: tuple[str, int], offset: int) -> str | None:
    """Why an offset cannot be a group's; None if it can, or is set back. Apache's broker takes any number."""
    former_end = broker.locks.former_end(group, *queue)
    if former_end is not None:
        offset = min(offset, former_end)
    found = broker.store.queues.get(queue)
    if found is not None:
        begin, end = found.begin, found.next
    else:
        begin = end = 0
        topic = broker.topics.get(queue[0])
        if topic is None or not 0 <= queue[1] < max(topic.read_queues, topic.write_queues):
            return f"there is no queue {queue[0]}:{queue[1]}"
    if begin <= offset <= end:
        return None
    return f"{offset} is not between the start {begin} and the end {end} of {queue[0]}:{queue[1]}"


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


def search_offset(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(SearchOffset, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    return answer(frame, ext=write(Offset(broker.store.offset_by_time(queue, header.timestamp) if queue else 0)))


def earliest_store_time(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(TopicQueue, frame.ext)
    queue = _queue(broker, header.topic, header.queue_id)
    stored = queue is not None and queue.begin < queue.next
    return answer(
        frame, ext=write(StoreTime(broker.store.store_time_ms(queue, queue.begin) if queue and stored else -1))
    )
