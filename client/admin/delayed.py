"""Messages that wait at the brokers for their time: sent with a delay, or handed back by a consumer to be tried again.

They lie in SCHEDULE_TOPIC_XXXX, a queue for each level, and no lag counts them. Brokers tell how far a level is delivered.
"""

from __future__ import annotations

from collections import Counter

from ...protocol import names
from ...protocol import properties as props
from ..errors import TopicNotFound
from .admin_client import AdminClient


async def delayed(admin: AdminClient) -> Counter[str]:
    """How many wait, by the topic that they will be stored in: of those that were handed back, the group's retry topic."""
    try:
        levels = (await admin.topic(names.SCHEDULE_TOPIC)).ranges
    except TopicNotFound:
        return Counter()
    delivered = await admin.delay_offsets()
    waiting: Counter[str] = Counter()
    for queue, span in levels.items():
        begin = max(delivered.get(queue.broker_name, {}).get(queue.queue_id + 1, 0), span.begin)
        async for messages in admin.read(queue, begin, span.end):
            waiting.update(message.properties.get(props.REAL_TOPIC, "") for message in messages)
    return waiting


__all__ = ["delayed"]
