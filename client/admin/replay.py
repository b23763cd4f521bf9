"""Sends a stored message again as it is: body, tag, keys, its sender's properties and id.

`Producer.resend` is for services: it sends as any message is sent. This is for administrators: the bytes stay as they are
stored, compressed or not, and it may send to a group's retry topic, which a producer must not.

Apache's brokers of 5.x put what is sent to the retry topic of a group with locked queues among its dead letters at once
(SendMessageProcessor.handleRetryAndDLQ): they take such a group for an orderly one, and our members always lock. There the
message is handed back instead, as by a consumer that could not handle it. The broker counts that as a try, so what fails
once more is a dead letter again.
"""

from __future__ import annotations

import random
import time

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_MASK, RequestCode
from ...protocol.headers import SendBack, SendMessage, TopicQueue, write
from ...protocol.queue import Queue
from ..config import LOCKS_MEAN_ORDER_VERSION
from ..message import Message
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from .origins import ORIGINS, marked

GROUP = "rocketlet-replay"
SOONEST_LEVEL = 1  # 1 s; with none, the broker makes a message wait longer the more often it was tried
ANY_TRIES = 0x7FFFFFFF  # a dead letter has had all that its group allows
_KEPT = frozenset((props.KEYS, props.TAGS, props.UNIQUE_KEY))


async def send_again(cluster: Cluster, message: Message, group: str | None) -> None:
    """Sends a message again to its first topic, or with `group` to that group alone. Raises RocketletError."""
    if group is not None:
        connection = await cluster.broker(message.queue.broker_name)
        if await _version(connection, message) >= LOCKS_MEAN_ORDER_VERSION:
            await _hand_back(connection, message, group)
            return
    await _send(cluster, message, group)


async def send_to_retry(cluster: Cluster, message: Message, group: str) -> None:
    """A message of another cluster that waits to be tried again, with the tries that it has had. The group has no members
    here, and so no locks. Raises RocketletError."""
    await _send(cluster, message, group, message.record.reconsume_times, is_copy=True)


async def _version(connection: Connection, message: Message) -> int:
    """The broker's; each answer has it."""
    place = TopicQueue(message.topic, message.queue_id)
    return (await connection.request(RequestCode.GET_MAX_OFFSET, write(place))).version


async def _hand_back(connection: Connection, message: Message, group: str) -> None:
    header = SendBack(
        message.physical_offset,
        group,
        SOONEST_LEVEL,
        message.message_id,
        message.origin,
        False,
        ANY_TRIES,
    )
    await connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, write(header))


async def _send(
    cluster: Cluster, message: Message, group: str | None, tries: int = 0, *, is_copy: bool = False
) -> None:
    kept = (item for item in message.properties.items() if item[0] not in ORIGINS)
    own = {name: value for name, value in kept if name in _KEPT or name not in props.RESERVED}
    if group is not None:
        own[props.RETRY_TOPIC] = message.origin  # by which a consumer knows which topic it stands for
    topic = names.retry_topic(group) if group is not None else message.origin
    queue = random.choice(await cluster.route_to_publish(topic, 1))
    record, text = message.record, props.encode(own)
    if is_copy:
        text, _ = marked(text, message)
    header = _header(queue)._replace(
        sys_flag=record.sys_flag & (SYS_COMPRESSED | SYS_COMPRESSION_MASK),
        flag=record.flag,
        reconsume_times=tries,
        properties=text,
    )
    connection = await cluster.broker(queue.broker_name)
    await connection.request(RequestCode.SEND_MESSAGE, write(header), record.body)


async def store(cluster: Cluster, queue: Queue, body: bytes) -> None:
    """Stores a body in a queue whose topic exists. Raises RocketletError."""
    if cluster.master(queue.broker_name) is None:
        await cluster.find_route(queue.topic)
    connection = await cluster.broker(queue.broker_name)
    await connection.request(RequestCode.SEND_MESSAGE, write(_header(queue)), body)


def _header(queue: Queue) -> SendMessage:
    return SendMessage(
        producer_group=GROUP,
        topic=queue.topic,
        default_topic=names.DEFAULT_TOPIC,
        default_topic_queue_nums=1,
        queue_id=queue.queue_id,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties="",
    )
