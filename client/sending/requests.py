"""Request and reply, as Apache's clients do it: a request names its client and a correlation id; its consumer sends a reply
to the broker of the request, which pushes it to that client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import RequestCode
from ...protocol.frame import ExtValue, Frame
from ...protocol.headers import HeaderError, PushReply, read
from ...protocol.message import Record
from ...protocol.queue import Queue
from ..config import FAILURE_CHARS, MAX_INT
from ..errors import ConfigError, MessageIllegal, RequestFailed, RocketletError
from ..log import get_logger
from ..message import Message
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from .outgoing import encoded

log = get_logger("rocketlet.producer")

CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
REPLY: Final = "reply"
FAILURE: Final = "ROCKETLET_FAILURE"  # a property of replies: the consumer failed, and why


def request_properties(text: str, correlation_id: str, client_id: str, timeout_s: float) -> str:
    text = props.appended(text, CORRELATION_ID, correlation_id)
    text = props.appended(text, REPLY_TO_CLIENT, client_id)
    return props.appended(text, TTL, str(int(min(timeout_s * 1000, MAX_INT))))


def reply_properties(request: Message, properties: Mapping[str, str] | None) -> tuple[str, str]:
    """The topic of a reply and its properties (MessageUtil.createReplyMessage). Raises ConfigError, MessageIllegal."""
    found = request.properties
    if CORRELATION_ID not in found or REPLY_TO_CLIENT not in found or props.CLUSTER not in found:
        raise ConfigError(f"{request!r} was not sent as a request: it does not say who waits for a reply")
    fault = props.reserved_fault(properties or {})
    if fault:
        raise MessageIllegal(fault)
    system: dict[str, str] = {name: found[name] for name in (CORRELATION_ID, REPLY_TO_CLIENT, TTL) if name in found}
    text = props.encode({MESSAGE_TYPE: REPLY, **system, **(properties or {})})
    encoded("properties' text", text)
    return names.reply_topic(found[props.CLUSTER]), text


def is_awaited(message: Message) -> bool:
    """Whether somebody waits for a reply to this message, and for nobody else's: it is delivered for the first time."""
    text = message.record.properties
    return not message.reconsume_times and props.find(text, REPLY_TO_CLIENT) is not None


async def reply_failure(cluster: Cluster, group: str, request: Message, reason: str) -> None:
    """Tells the caller that waits for a reply that there will be none. Raises nothing."""
    try:
        topic, text = reply_properties(request, {FAILURE: _one_line(reason)})
        ext: dict[str, ExtValue] = {"a": group, "b": topic, "c": names.DEFAULT_TOPIC, "d": 1, "e": 0, "f": 0, "h": 0}
        ext |= {"g": int(time.time() * 1000), "i": text}
        connection = await cluster.broker(request.queue.broker_name)
        body = f"the request failed: {_one_line(reason)}".encode()
        await connection.request(RequestCode.SEND_REPLY_MESSAGE_V2, ext, body)
    except RocketletError as error:
        log.info("failure_not_replied", message=request.message_id, reason=str(error))


def _one_line(reason: str) -> str:
    """The reason as a property may hold it: without the separators of properties, or half of a surrogate pair."""
    text = " ".join(reason.split()).encode(errors="replace").decode()
    return "".join(char for char in text if char.isprintable())[:FAILURE_CHARS]


class Requests:
    """The requests of one producer that wait for their replies."""

    def __init__(self, cluster: Cluster) -> None:
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        cluster.answer(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self._replied)

    @contextmanager
    def expected(self, correlation_id: str) -> Iterator[asyncio.Future[Message]]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        try:
            yield future
        finally:
            self._waiting.pop(correlation_id, None)

    def _replied(self, connection: Connection, frame: Frame) -> None:
        try:
            header = read(PushReply, frame.ext)
        except HeaderError as error:
            log.error("reply_unreadable", broker=connection.address, reason=str(error))
            return
        future = self._waiting.get(props.find(header.properties, CORRELATION_ID) or "")
        if future is not None and not future.done():
            failure = props.find(header.properties, FAILURE)
            if failure is not None:
                future.set_exception(RequestFailed(f"the consumer of the request failed: {failure}"))
            else:
                reply = Message(_record(header, frame.body), Queue(header.topic, "", header.queue_id), header.topic)
                future.set_result(reply)
        connection.respond(frame)


def _record(header: PushReply, body: bytes) -> Record:
    """The reply as if it had been pulled; brokers do not say where it is stored."""
    return Record(
        0,
        0,
        header.queue_id,
        header.flag,
        0,
        0,
        header.sys_flag,
        header.born_timestamp,
        b"\0" * 8,
        header.store_timestamp,
        b"\0" * 8,
        header.reconsume_times,
        0,
        body,
        header.topic,
        header.properties,
    )
