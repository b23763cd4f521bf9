"""The first message of a queue that was stored at a time or later."""

from __future__ import annotations

from ...protocol.codes import RequestCode
from ...protocol.headers import Offset, SearchOffset, write
from ...protocol.message import decode_records
from ...protocol.names import TOOLS_GROUP
from ...protocol.queue import Queue
from ...protocol.subscription import Subscription
from ..config import OFFSET_TIMEOUT_S
from .answers import body_of, header_of
from .connection import Connection
from .pull_header import pull_header


async def stored_since(connection: Connection, queue: Queue, time_ms: int) -> int:
    """Return the offset of the first message stored at a time or later (ms since the epoch); the queue's end without one.

    A broker names the nearest message (SEARCH_OFFSET_BY_TIMESTAMP), which may be the one before. Where several messages have
    exactly that time, it names any of them, and at a time after the newest message, it names that. So this looks for the
    boundary from there on, in steps that double. Raises RocketletError.
    """
    header = write(SearchOffset(queue.topic, queue.queue_id, time_ms))
    answer = await connection.request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, timeout_s=OFFSET_TIMEOUT_S)
    offset = header_of(answer, Offset).offset
    stored_ms = await _stored_ms(connection, queue, offset)
    is_before = stored_ms is not None and stored_ms < time_ms
    step = 1 if is_before else -1
    low = high = offset  # the boundary is between them: `low` is before the time, `high` is not
    while True:
        at = max(offset + step, 0)
        if at == offset:
            return high
        stored_ms = await _stored_ms(connection, queue, at)
        if is_before and (stored_ms is None or stored_ms >= time_ms):  # a message beyond the end is not there
            high = at
            break
        if not is_before and (stored_ms is None or stored_ms < time_ms):  # a message before the first one has expired
            low = at
            break
        low = high = offset = at
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        stored_ms = await _stored_ms(connection, queue, middle)
        is_in_front = not is_before if stored_ms is None else stored_ms < time_ms
        low, high = (middle, high) if is_in_front else (low, middle)
    return high


async def _stored_ms(connection: Connection, queue: Queue, offset: int) -> int | None:
    """When the message at an offset was stored; None if there is none."""
    pull = pull_header(TOOLS_GROUP, queue, offset, 1, Subscription(queue.topic))
    answer = await connection.ask(RequestCode.PULL_MESSAGE, pull, timeout_s=OFFSET_TIMEOUT_S)
    for record in body_of(answer, decode_records):
        if record.queue_offset == offset:
            return record.store_ms
    return None


__all__ = ["stored_since"]
