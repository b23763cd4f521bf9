"""Messages that wait at the brokers for their time: sent with a delay, or handed back by a consumer to be tried again.

They lie in SCHEDULE_TOPIC_XXXX, a queue for each level, or, sent to a time, in rmq_sys_wheel_timer; no lag counts them.
Brokers tell how far a level is delivered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ...protocol import names
from ...protocol import properties as props
from ...protocol.admin_bodies import Range
from ...protocol.queue import Queue
from ..errors import TopicNotFound
from ..message import Message
from .admin_client import AdminClient


async def delayed(admin: AdminClient) -> Counter[str]:
    """How many wait, by the topic that they will be stored in: of those that were handed back, the group's retry topic."""
    return await _at_levels(admin) + await _to_times(admin)


async def _at_levels(admin: AdminClient) -> Counter[str]:
    waiting: Counter[str] = Counter()
    levels = await _ranges(admin, names.SCHEDULE_TOPIC)
    delivered = await admin.delay_offsets() if levels else {}
    for queue, span in levels.items():
        begin = max(delivered.get(queue.broker_name, {}).get(queue.queue_id + 1, 0), span.begin)
        async for messages in admin.read(queue, begin, span.end):
            waiting.update(message.properties.get(props.REAL_TOPIC, "") for message in messages)
    return waiting


async def _to_times(admin: AdminClient) -> Counter[str]:
    """Counts messages by the times that they have; recalled ones count, too."""
    waiting: Counter[str] = Counter()
    now_ms = time.time() * 1000
    for queue, span in (await _ranges(admin, names.TIMER_TOPIC)).items():
        async for messages in admin.read(queue, span.begin, span.end):
            late = (message.properties for message in messages if _due_ms(message) > now_ms)
            waiting.update(properties.get(props.REAL_TOPIC, "") for properties in late)
    return waiting


def _due_ms(message: Message) -> int:
    due_ms = message.properties.get(props.TIMER_OUT_MS, "")
    return int(due_ms) if due_ms.isascii() and due_ms.isdecimal() else 0


async def _ranges(admin: AdminClient, topic: str) -> Mapping[Queue, Range]:
    try:
        return (await admin.topic(topic)).ranges
    except TopicNotFound:
        return {}


__all__ = ["delayed"]
