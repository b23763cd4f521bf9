"""Request and reply, as Apache's clients do it: a request names its client and a correlation id; who consumes it sends a
reply to the broker of the request, which pushes it to that client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ...protocol import names
from ...protocol import properties as props
from ...protocol.codes import RequestCode
from ...protocol.frame import Frame
from ...protocol.headers import HeaderError, PushReply, read
from ...protocol.message import Record
from ...protocol.queue import Queue
from ..config import MAX_INT
from ..errors import ConfigError, MessageIllegal
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


class Requests:
    """The requests of one producer that wait for their replies."""

    def __init__(self, cluster: Cluster) -> None:
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        cluster.requests[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._replied

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
            future.set_result(
                Message(_record(header, frame.body), Queue(header.topic, "", header.queue_id), header.topic)
            )
        connection.respond(frame)


def _record(header: PushReply, body: bytes) -> Record:
    """As if the reply had been pulled; where it is stored is not said."""
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
