"""Messages of a cluster for administrators: found without a consumer group, sent again, and marked as copies."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_MASK, RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import LogOffset, PullMessageResult, QueryMessage, SendBack, SendMessage, TopicQueue, write
from ...protocol.message import MessageError, Record, decode_host, decode_record, offset_id_in, offset_in, split_records
from ...protocol.names import Queue, Subscription
from ..config import LOCKS_MEAN_ORDER_VERSION, OFFSET_TIMEOUT_S, SEARCH_MESSAGES, SEARCH_TIMEOUT_S
from ..errors import BrokerRefused, ConfigError, get_logger
from ..message import Message
from ..sending.accumulator import PROPERTY_BYTES
from ..wire.cluster import ClusterView, pull_header
from ..wire.connection import Connection, body_of, header_of

log = get_logger("rocketlet.admin")


# ------------------------------------------------------------------------------
# Messages found without a consumer group: by id, by key, by place. Nothing is consumed and nothing is committed.


FOREVER_MS = (1 << 63) - 1


async def by_offset_id(cluster: ClusterView, offset_id: str) -> Message | None:
    """The message with a broker's id, asked of the broker that the id names. Raises ConfigError for text that is no id."""
    host, port, position = parsed_offset_id(offset_id)
    connection = await cluster.connection(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        answer = await connection.request(RequestCode.VIEW_MESSAGE_BY_ID, write(LogOffset(position)))
    except BrokerRefused as error:
        if error.code == ResponseCode.SYSTEM_ERROR:  # both brokers answer this where no message begins
            return None
        raise
    return next(iter(_messages(answer, "")), None)


def parsed_offset_id(offset_id: str) -> tuple[str, int, int]:
    """Host, port and commit log position in an offset id. Raises ConfigError."""
    try:
        data = bytes.fromhex(offset_id)
        if len(data) not in (16, 28):
            raise ValueError
        host, port = decode_host(data[:-8])
        if (
            port > 65_535
        ):  # a port has four bytes here; a sender's id has as many digits, and its process id in this place
            raise ValueError
    except (ValueError, OSError):
        raise ConfigError(f"{offset_id!r} is not an offset id, which has 32 or 56 hex digits") from None
    return host, port, int.from_bytes(data[-8:], "big")


async def by_key(
    cluster: ClusterView, topic: str, key: str, *, begin_ms: int, end_ms: int, limit: int, unique: bool
) -> list[Message]:
    """Up to `limit` messages a broker with a key, or a sender's message id, oldest first."""
    header = QueryMessage(topic, key, limit, max(begin_ms, 0), min(end_ms, FOREVER_MS))
    ext = {**write(header), "_UNIQUE_KEY_QUERY": "true" if unique else "false"}
    addresses = await _masters(cluster, topic)
    found = await asyncio.gather(*(_query(cluster, *item, ext) for item in addresses.items()))
    messages = [message for part in found for message in part if _has_key(message, key, unique)]
    return sorted(messages, key=lambda message: message.store_ms)


def _has_key(message: Message, key: str, unique: bool) -> bool:
    """Apache's index answers by hash: messages with another key may be among them."""
    return message.message_id == key if unique else key in message.keys


async def _query(
    cluster: ClusterView, broker_name: str, address: str, ext: dict[str, str | int | bool]
) -> list[Message]:
    connection = await cluster.connection(address)
    try:
        answer = await connection.request(RequestCode.QUERY_MESSAGE, ext, timeout_s=SEARCH_TIMEOUT_S)
    except BrokerRefused as error:
        if error.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        raise
    return _messages(answer, broker_name)


async def read_queue(
    cluster: ClusterView, queue: Queue, begin: int, end: int, subscription: Subscription | None = None
) -> AsyncIterator[list[Message]]:
    """The messages of a queue from offset `begin` up to but not including `end`, in pieces of at most SEARCH_MESSAGES.

    Offsets that the broker has dropped are left out.
    """
    wanted = subscription or Subscription(queue.topic)
    connection = await cluster.broker(queue.broker_name)
    offset = begin
    while offset < end:
        header = pull_header(names.TOOLS_GROUP, queue, offset, min(end - offset, SEARCH_MESSAGES), wanted)
        answer = await connection.ask(RequestCode.PULL_MESSAGE, header, timeout_s=OFFSET_TIMEOUT_S)
        if answer.code not in (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ):
            if answer.code == ResponseCode.PULL_NOT_FOUND:
                return
            raise BrokerRefused(RequestCode.PULL_MESSAGE, answer.code, answer.remark, connection.address)
        after = header_of(answer, PullMessageResult).next_begin_offset
        if answer.code == ResponseCode.SUCCESS:
            yield [item for item in _messages(answer, queue.broker_name) if begin <= item.queue_offset < end]
        if after <= offset:
            return
        offset = after


def _messages(answer: Frame, broker_name: str) -> list[Message]:
    return [
        Message(
            record, Queue(record.topic, broker_name, record.queue_id), _shown_topic(record.topic, record.properties)
        )
        for record in body_of(answer, _readable)
    ]


def _readable(body: bytes) -> list[Record]:
    """The records that can be read; the others are logged and left out. Raises MessageError where none can begin."""
    found = []
    for data in split_records(body):
        try:
            found.append(decode_record(data, errors="replace"))
        except MessageError as error:
            log.warning(
                "message_unreadable", message=offset_id_in(data), offset=offset_in(data), reason=str(error),
                hint="it is left out",
            )  # fmt: skip
    return found


def _shown_topic(topic: str, properties: str) -> str:
    """A message that waits in a retry topic belongs to the topic that it was first sent to."""
    return (props.find(properties, props.RETRY_TOPIC) or topic) if topic.startswith(names.RETRY_PREFIX) else topic


async def _masters(cluster: ClusterView, topic: str) -> dict[str, str]:
    route = await cluster.find_route(topic)
    return {broker.name: broker.addresses[0] for broker in (route.brokers if route else ()) if 0 in broker.addresses}


# ------------------------------------------------------------------------------
# Sends a stored message again as it is: body, tag, keys, its sender's properties and id.
#
# `Producer.resend` is for services: it sends as any message is sent. This is for administrators: the bytes stay as
# they are stored, compressed or not, and it may send to a group's retry topic, which a producer must not.
#
# Apache's brokers of 5.x put what is sent to the retry topic of a group with locked queues among its dead letters at
# once (SendMessageProcessor.handleRetryAndDLQ): they take such a group for an orderly one, and our members always
# lock. There the message is handed back instead, as by a consumer that could not handle it. The broker counts that as
# a try, so what fails once more is a dead letter again.


GROUP = "rocketlet-replay"
SOONEST_LEVEL = 1  # 1 s; with none, the broker makes a message wait longer the more often it was tried
ANY_TRIES = 0x7FFFFFFF  # a dead letter has had all that its group allows
_KEPT = frozenset((props.KEYS, props.TAGS, props.UNIQUE_KEY))


async def send_again(cluster: ClusterView, message: Message, group: str | None) -> None:
    """Sends a message again to its first topic, or with `group` to that group alone. Raises RocketletError."""
    if group is not None:
        connection = await cluster.broker(message.queue.broker_name)
        if await _version(connection, message) >= LOCKS_MEAN_ORDER_VERSION:
            await _hand_back(connection, message, group)
            return
    await _send(cluster, message, group)


async def send_to_retry(cluster: ClusterView, message: Message, group: str) -> None:
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
    cluster: ClusterView, message: Message, group: str | None, tries: int = 0, *, is_copy: bool = False
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


async def store(cluster: ClusterView, queue: Queue, body: bytes) -> None:
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


# ------------------------------------------------------------------------------
# Where the original of a copy lies: a property that only copies to another cluster have.
#
# Brokers keep a message's properties when they put it into a group's retry topic or among its dead letters. So each
# kind of topic has a property of its own: a dead letter whose message was a copy is no copy of a dead letter.


ORIGIN: Final = "MIRRORED_FROM"
"""A copy's property: `broker:queue:offset` of its original."""
_DEAD: Final = f"{ORIGIN}_DLQ"
_RETRY: Final = f"{ORIGIN}_RETRY"
ORIGINS: Final = frozenset((ORIGIN, _DEAD, _RETRY))

_TEXT: Final = re.compile(r"(.+):([0-9]{1,10}):([0-9]{1,19})", re.DOTALL)  # Java's int and long


class Origin(NamedTuple):
    broker_name: str
    queue_id: int
    offset: int


def property_of(topic: str) -> str:
    """The name of the property in messages of a topic."""
    if topic.startswith(names.DLQ_PREFIX):
        return _DEAD
    return _RETRY if topic.startswith(names.RETRY_PREFIX) else ORIGIN


def origin_of(message: Message) -> Origin | None:
    """None for a message that is no copy."""
    found = _TEXT.fullmatch(message.properties.get(property_of(message.record.topic), ""))
    return None if found is None else Origin(found[1], int(found[2]), int(found[3]))


def marked(text: str, message: Message) -> tuple[str, list[str]]:
    """A copy's properties with its origin, and the names of properties for which there was no room."""
    name = property_of(message.record.topic)
    value = f"{message.queue.broker_name}:{message.queue_id}:{message.queue_offset}"
    room = PROPERTY_BYTES - len(name) - len(value.encode()) - 2
    dropped: list[str] = []
    if len(text.encode()) > room:
        text, dropped = props.shortened(text, room)
    return props.appended(text, name, value), dropped
