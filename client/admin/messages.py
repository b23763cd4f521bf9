"""Messages of a cluster for administrators: finding them without a consumer group, resending them, and marking copies."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
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
# Finds messages by id, by key or by position, without a consumer group. Nothing is consumed or committed.


FOREVER_MS = (1 << 63) - 1


async def by_offset_id(cluster: ClusterView, offset_id: str) -> Message | None:
    """Query a message by its offset id at the broker whose address the id contains. Return None if there is none.

    Raises ConfigError if the id is invalid, and RocketletError.
    """
    host, port, position = parsed_offset_id(offset_id)
    connection = await cluster.connection(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        answer = await connection.request(RequestCode.VIEW_MESSAGE_BY_ID, write(LogOffset(position)))
    except BrokerRefused as error:
        if error.code == ResponseCode.SYSTEM_ERROR:  # the code for a position at which no message starts
            return None
        raise
    return next(iter(_messages(answer, "")), None)


def parsed_offset_id(offset_id: str) -> tuple[str, int, int]:
    """Return the host, port and commit log position in an offset id. Raises ConfigError."""
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
    """Return the messages with a key, oldest first, up to `limit` of each broker.

    Args:
        begin_ms, end_ms: the range of store times, in ms since the epoch.
        unique: True if `key` is the message id that the sender set.
    """
    header = QueryMessage(topic, key, limit, max(begin_ms, 0), min(end_ms, FOREVER_MS))
    ext = {**write(header), "_UNIQUE_KEY_QUERY": "true" if unique else "false"}
    addresses = await _masters(cluster, topic)
    found = await asyncio.gather(*(_query(cluster, *item, ext) for item in addresses.items()))
    messages = [message for part in found for message in part if _has_key(message, key, unique)]
    return sorted(messages, key=lambda message: message.store_ms)


def _has_key(message: Message, key: str, unique: bool) -> bool:
    """Return True if a message really has the key. Apache's index compares only hashes."""
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
    """Iterate over the messages of a queue from offset `begin` to before `end`, in lists of up to SEARCH_MESSAGES messages.

    Messages that the broker has deleted are skipped.
    """
    wanted = subscription or Subscription(queue.topic)
    connection = await cluster.broker(queue.broker_name)
    offset = begin
    while offset < end:
        header = pull_header(names.TOOLS_GROUP, queue, offset, min(end - offset, SEARCH_MESSAGES), wanted)
        answer = await connection.request_unchecked(RequestCode.PULL_MESSAGE, header, timeout_s=OFFSET_TIMEOUT_S)
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
    """Return the records that can be decoded, and log the others. Raises MessageError if the body cannot be split into
    records."""
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
    """Return the topic to show for a message: for one in a retry topic, the topic that it was first sent to."""
    return (props.find(properties, props.RETRY_TOPIC) or topic) if topic.startswith(names.RETRY_PREFIX) else topic


async def _masters(cluster: ClusterView, topic: str) -> dict[str, str]:
    route = await cluster.find_route(topic)
    return {broker.name: broker.addresses[0] for broker in (route.brokers if route else ()) if 0 in broker.addresses}


# ------------------------------------------------------------------------------
# Resends a stored message unchanged: body, tag, keys, the sender's properties and id.
#
# `Producer.resend` is for services, and sends like any send. The functions here are for administrators: the body stays
# as it is stored, compressed or not, and it may be sent to a group's retry topic, which producers must not do.
#
# If a group has locked queues, Apache's brokers of 5.x immediately dead-letter messages that are sent to its retry topic
# (SendMessageProcessor.handleRetryAndDLQ), because they take it for an orderly group. Members of the class Consumer
# lock, unless they are broadcasting. For such a group, the message is returned to the broker instead, as a consumer
# does after a failure. The broker counts that as an attempt, so the message becomes a dead letter again if the next
# attempt fails.


GROUP = "rocketlet-replay"
SOONEST_LEVEL = 1  # 1 s; with level 0, the delay grows with the number of attempts
ANY_TRIES = 0x7FFFFFFF  # a dead letter has no retries left under its group's setting
_KEPT = frozenset((props.KEYS, props.TAGS, props.UNIQUE_KEY))


def matches(message: Message, text: str | None, wanted: Mapping[str, str]) -> bool:
    """Return True if a message has a text in its body, unless that is None, and all properties with these values."""
    if any(message.properties.get(name) != value for name, value in wanted.items()):
        return False
    if text is None:
        return True
    try:
        return text.encode(errors="replace") in message.body
    except MessageError:  # the compressed body is damaged
        return False


async def send_again(cluster: ClusterView, message: Message, group: str | None) -> None:
    """Resend a message to the topic that it was first sent to, or with `group` only to that group. Raises
    RocketletError."""
    if group is not None:
        connection = await cluster.broker(message.queue.broker_name)
        if await _version(connection, message) >= LOCKS_MEAN_ORDER_VERSION:
            await _hand_back(connection, message, group)
            return
    await _send(cluster, message, group)


async def send_to_retry(cluster: ClusterView, message: Message, group: str) -> None:
    """Send a pending retry of another cluster to the group's retry topic, with its number of attempts. Raises
    RocketletError.

    Call this before the group has members at this cluster, and thus locks.
    """
    await _send(cluster, message, group, message.record.reconsume_times, is_copy=True)


async def _version(connection: Connection, message: Message) -> int:
    """Return the broker's version, which each response contains."""
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
        own[props.RETRY_TOPIC] = message.origin  # the property from which the consumer takes the original topic
    else:
        own[props.ORIGIN_MESSAGE_ID] = message.message_id  # a topic with `dedup` stores it although its id is known
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
    """Store a message with this body in a queue of an existing topic. Raises RocketletError."""
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
# The position of a copy's original: a property that only messages that were copied to another cluster have.
#
# Brokers keep a message's properties when they move it to a group's retry topic or dead-letter topic. Each type of
# topic therefore has a property of its own, because a dead letter of a copied message is not a copy of a dead letter.


ORIGIN: Final = "MIRRORED_FROM"
"""A copy's property: `broker:queue:offset` of its original."""
_DEAD: Final = f"{ORIGIN}_DLQ"
_RETRY: Final = f"{ORIGIN}_RETRY"
ORIGINS: Final = frozenset((ORIGIN, _DEAD, _RETRY))

_TEXT: Final = re.compile(r"(.+):([0-9]{1,10}):([0-9]{1,19})", re.DOTALL)  # as many digits as Java's int and long have


class Origin(NamedTuple):
    broker_name: str
    queue_id: int
    offset: int


def property_of(topic: str) -> str:
    """Return the name of the origin property for messages of a topic."""
    if topic.startswith(names.DLQ_PREFIX):
        return _DEAD
    return _RETRY if topic.startswith(names.RETRY_PREFIX) else ORIGIN


def origin_of(message: Message) -> Origin | None:
    """Return the position of a copy's original; None for a message that is not a copy."""
    found = _TEXT.fullmatch(message.properties.get(property_of(message.record.topic), ""))
    return None if found is None else Origin(found[1], int(found[2]), int(found[3]))


def marked(text: str, message: Message) -> tuple[str, list[str]]:
    """Return a copy's properties with its origin, and the names of properties that were dropped because they did not
    fit."""
    name = property_of(message.record.topic)
    value = f"{message.queue.broker_name}:{message.queue_id}:{message.queue_offset}"
    room = PROPERTY_BYTES - len(name) - len(value.encode()) - 2
    dropped: list[str] = []
    if len(text.encode()) > room:
        text, dropped = props.shortened(text, room)
    return props.appended(text, name, value), dropped
