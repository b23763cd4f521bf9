"""The settings of topics, asked for and changed."""

from __future__ import annotations

from struct import iter_unpack

import orjson
import structlog

from ....protocol import admin_bodies, bodies, names
from ....protocol.admin_bodies import Range
from ....protocol.bodies import TopicConfig, topic_json
from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import ConsumeQueueQuery, CreateTopic, TopicName, read
from ....protocol.queue import Queue
from ....protocol.work import SLICE, Work
from ...broker import Broker
from ...config import MAX_QUERY_ENTRIES
from ...store.files import StoreFull
from ..answers import Buffers, Refused, answer
from ..connection import Connection

log = structlog.get_logger("rocketlet.topics")


def create_topic(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(CreateTopic, frame.ext)
    fault = names.topic_fault(header.topic)
    if fault is None and broker.topics.is_built_in(header.topic):
        fault = f"the topic {header.topic} is conflict with system topic"
    if fault is None and header.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
        fault = f"the topic filter type {header.topic_filter_type} is unknown; use SINGLE_TAG or MULTI_TAG"
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    former = broker.topics.get(header.topic)
    wanted = TopicConfig(
        header.topic,
        header.read_queue_nums,
        header.write_queue_nums,
        header.perm,
        header.topic_filter_type,
        header.topic_sys_flag,
        message_type=former.message_type if former is not None else "",
    )
    broker.topics.put(bodies.altered_attributes(wanted, header.attributes), broker.store.end)
    log.info("topic_created", topic=header.topic, queues=header.write_queue_nums)
    return answer(frame)


async def delete_topic(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Answers when its files are gone."""
    name = read(TopicName, frame.ext).topic
    fault = names.topic_fault(name)
    if fault is None and broker.topics.is_built_in(name):
        fault = f"the topic {name} is a system topic, which cannot be deleted"
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    broker.topics.delete(name, broker.store.end)
    broker.offsets.forget_topic(name)
    broker.pops.forget_topic(name)
    noting = broker.locks.topic_deleted(name)
    log.info("topic_deleted", topic=name)
    removing = broker.store.deleting(name)
    broker.held_pulls.let_topic_go(name)
    try:
        await broker.device.do(noting)
        await broker.device.do(removing)
    except StoreFull as error:
        raise Refused(ResponseCode.SERVICE_NOT_AVAILABLE, f"not all of it is gone: {error}") from None
    return answer(frame)


def all_topics(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    table = ((topic.name, topic_json(topic)) for topic in broker.topics)
    body = yield from admin_bodies.encode_versioned(broker.topics.version, "topicConfigTable", table)
    return answer(frame, ext={}, body=body)


def one_topic(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """GET_TOPIC_CONFIG, which 5.x's tools ask for one topic."""
    name = read(TopicName, frame.ext).topic
    topic = broker.topics.get(name)
    if topic is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"No topic in this broker. topic: {name}")
    return answer(frame, body=orjson.dumps({"attributes": {}, **topic_json(topic)}))


def system_topics(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    found: list[str] = []
    for number, topic in enumerate(broker.topics, 1):
        if broker.topics.is_built_in(topic.name):
            found.append(topic.name)
        if number % SLICE == 0:
            yield
    body = yield from bodies.encode_topic_list(found)
    return answer(frame, body=body)


def topic_stats(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """GET_TOPIC_STATS_INFO: the range of each queue."""
    name = read(TopicName, frame.ext).topic
    topic = broker.topics.get(name)
    if topic is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{name}] not exist")
    count = max(topic.write_queues, topic.read_queues)
    ranges = ((Queue(name, broker.config.name, number), _range(broker, name, number)) for number in range(count))
    body = yield from admin_bodies.encode_topic_stats(ranges)
    return answer(frame, body=body)


def _range(broker: Broker, topic: str, queue_id: int) -> Range:
    queue = broker.store.queues.get((topic, queue_id))
    if queue is None:
        return Range(0, 0, 0)
    if queue.begin == queue.next:
        return Range(queue.begin, queue.next, 0)
    return Range(queue.begin, queue.next, broker.store.store_time_ms(queue, queue.next - 1))


def query_consume_queue(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """QUERY_CONSUME_QUEUE: entries of a queue's index, 1,024 at most."""
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


def clean_unused_topics(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CLEAN_UNUSED_TOPIC: drops the queues' data of topics that are gone; here a deleted topic leaves none."""
    return answer(frame)
