"""Files that a browser saves: the body of a message, and a list of messages with their bodies."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...client.errors import ConfigError
from ...client.message import Message
from ...protocol.message import MessageError
from ...protocol.names import Queue
from ..form import query_of
from ..page import console_of
from .messages import at_place, search


async def body(request: Request) -> Response:
    """Return the decompressed body of a message. Raises ConfigError if it cannot be decompressed."""
    given = request.path_params
    queue = Queue(given["topic"], given["broker"], given["queue"])
    message = await at_place(console_of(request), queue, given["offset"])
    try:
        data = await asyncio.to_thread(lambda: message.body)
    except MessageError as error:
        raise ConfigError(f"the body cannot be read: {error}") from error
    return _file(data, f"{queue.topic}-{queue.queue_id}-{message.queue_offset}.bin", "application/octet-stream")


async def listed(request: Request) -> Response:
    """Return the messages that the page of the same parameters lists, one line of JSON for each."""
    form = query_of(request)
    history = await search(console_of(request), form)
    lines = await asyncio.to_thread(_lines, history.messages)
    return _file(lines, f"{form.text('topic', 'messages')}.jsonl", "application/jsonl")


def _lines(messages: Sequence[Message]) -> bytes:
    return b"".join(json.dumps(_record(message)).encode() + b"\n" for message in messages)


def _record(message: Message) -> dict[str, Any]:
    """Return a message as values for JSON. The body is text, base64 if it is not UTF-8, or missing if it cannot be
    decompressed."""
    found: dict[str, Any] = {
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "message_id": message.message_id,
        "born_ms": message.born_ms,
        "store_ms": message.store_ms,
        "tag": message.tag,
        "keys": list(message.keys),
        "reconsume_times": message.reconsume_times,
        "properties": dict(message.properties),
    }
    try:
        data = message.body
    except MessageError as error:
        return {**found, "body_fault": str(error)}
    try:
        return {**found, "body": data.decode()}
    except ValueError:
        return {**found, "body_base64": base64.b64encode(data).decode()}


def _file(data: bytes, name: str, content_type: str) -> Response:
    safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    return Response(data, media_type=content_type, headers={"Content-Disposition": f'attachment; filename="{safe}"'})
