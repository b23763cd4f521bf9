"""Messages found without a consumer group: by id, by key, by place. Nothing is consumed and nothing is committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import LogOffset, PullMessageResult, QueryMessage, write
from ...protocol.message import (
    MessageError,
    Record,
    decode_host,
    decode_record,
    offset_id_in,
    offset_in,
    split_records,
)
from ...protocol.queue import Queue
from ...protocol.subscription import Subscription
from ..config import OFFSET_TIMEOUT_S, SEARCH_MESSAGES, SEARCH_TIMEOUT_S
from ..errors import BrokerRefused, ConfigError
from ..log import get_logger
from ..message import Message
from ..wire.answers import body_of, header_of
from ..wire.cluster import Cluster
from ..wire.pull_header import pull_header

log = get_logger("rocketlet.admin")

FOREVER_MS = (1 << 63) - 1


async def by_offset_id(cluster: Cluster, offset_id: str) -> Message | None:
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
    cluster: Cluster, topic: str, key: str, *, begin_ms: int, end_ms: int, limit: int, unique: bool
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


async def _query(cluster: Cluster, broker_name: str, address: str, ext: dict[str, str | int | bool]) -> list[Message]:
    connection = await cluster.connection(address)
    try:
        answer = await connection.request(RequestCode.QUERY_MESSAGE, ext, timeout_s=SEARCH_TIMEOUT_S)
    except BrokerRefused as error:
        if error.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        raise
    return _messages(answer, broker_name)


async def read_queue(
    cluster: Cluster, queue: Queue, begin: int, end: int, subscription: Subscription | None = None
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


async def _masters(cluster: Cluster, topic: str) -> dict[str, str]:
    route = await cluster.find_route(topic)
    return {broker.name: broker.addresses[0] for broker in (route.brokers if route else ()) if 0 in broker.addresses}
