"""Files that a browser saves: the body of a message, and a list of messages with their bodies."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

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
    name = f"{queue.topic}-{queue.queue_id}-{message.queue_offset}.bin"
    return Response(data, media_type="application/octet-stream", headers=_headers(name))


async def listed(request: Request) -> Response:
    """Return the messages that the page of the same parameters lists, one line of JSON for each."""
    form = query_of(request)
    history = await search(console_of(request), form)
    headers = _headers(f"{form.text('topic', 'messages')}.jsonl")
    return StreamingResponse(_lines(history.messages), media_type="application/jsonl", headers=headers)


async def _lines(messages: Sequence[Message]) -> AsyncIterator[bytes]:
    """Iterate over the lines. Only one decompressed body is in memory at a time."""
    for message in messages:
        yield await asyncio.to_thread(_line, message)


def _line(message: Message) -> bytes:
    return json.dumps(_record(message)).encode() + b"\n"


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


def _headers(name: str) -> dict[str, str]:
    safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    return {"Content-Disposition": f'attachment; filename="{safe}"'}
