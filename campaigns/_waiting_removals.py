"""Fixes of what becomes of messages that wait."""

from __future__ import annotations

from rocketlet.broker.messages import retries, sending
from rocketlet.broker.messages.retries import Retries
from rocketlet.broker.messages.topics import Topics
from rocketlet.broker.store.retention import RetentionTime
from rocketlet.protocol.config import MAX_PROPERTY_BYTES

from ._removal import Change, Lines, Removal

WAITING: dict[str, Removal] = {
    "deleted-stays": Removal(
        "a message that waits does not bring its deleted topic back", "waiting", 60, [Change(Topics, "queue_now", Lines(
            "return None\n", "return queue_id\n"
        ))], "H7",
    ),
    "queue-readable": Removal(
        "a message that waits comes to a queue that can be read", "waiting", 60, [Change(Topics, "queue_now", Lines(
            "if queue_id < max(topic.read_queues, topic.write_queues):", "if True:"
        ))], "H7",
    ),
    "retry-room": Removal(
        "a message leaves room for what retries add", "waiting", 60,
        [Change(sending, "SENT_PROPERTY_BYTES", MAX_PROPERTY_BYTES)], "H6",
    ),
    "dead-letter-room": Removal(
        "a message without room for more properties can be given up", "waiting", 60, [
            Change(retries, "_has_room", lambda group, text, level: True),
            Change(Retries, "_stage_dead", Lines("if len(text.encode()) > MAX_PROPERTY_BYTES:", "if False:")),
        ], "H6",
    ),
    "clock-doubted": Removal(
        "nothing expires because the machine's clock jumped", "waiting", 60,
        [Change(RetentionTime, "now_s", lambda self: self._clock.time_s())], "M",
    ),
}  # fmt: skip
