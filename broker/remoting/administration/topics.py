"""Requests about topics: their settings, and the offsets in their queues."""

from __future__ import annotations

from struct import iter_unpack

import orjson
import structlog

from ....protocol import admin_bodies, bodies, names
from ....protocol.admin_bodies import Range
from ....protocol.bodies import SLICE, TopicConfig, Work, topic_json
from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import ConsumeQueueQuery, CreateTopic, TopicName, read
from ....protocol.names import Queue
from ....protocol.settings import changed_topic
from ...broker import BrokerController
from ...config import MAX_QUERY_ENTRIES
from ...store.files import StoreFull
from ..connection import RemotingConnection
from ..responses import Buffers, ResponseError, answer

log = structlog.get_logger("rocketlet.topics")


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
    log.info("topic_created", topic=header.topic, queues=header.write_queue_nums)
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
    log.info("topics_created", count=len(wanted), first=wanted[0].name if wanted else "")
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
    noting = broker.locks.topic_deleted(name)
    log.info("topic_deleted", topic=name)
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
