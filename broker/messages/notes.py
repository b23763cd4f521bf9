"""Notes of what was delivered of delayed and timed messages, in the log itself.

A note is stored in the same append as the messages that it speaks of, so a broker that is killed has both or none. State
files hold what was delivered when they were written, and the number of the next note. A start reads the notes since then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson
import structlog

from ...protocol.names import NOTES_TOPIC
from ..store.consume_queue import ConsumeQueue
from ..store.files import Damaged
from .appender import Appender

log = structlog.get_logger("rocketlet.notes")

OF_DELAYS: Final = 0  # queues of the topic
OF_TIMERS: Final = 1
QUEUES: Final = 2


class Notes:
    """The notes of one kind."""

    def __init__(self, appender: Appender, queue_id: int) -> None:
        self._appender = appender
        self._store = appender.store
        self._queue_id = queue_id

    @property
    def _queue(self) -> ConsumeQueue:
        return self._store.queue(NOTES_TOPIC, self._queue_id)

    @property
    def next(self) -> int:
        """The number of the next note."""
        return self._queue.next

    def stage(self, value: Any) -> None:
        """Notes a value with the messages that are staged."""
        self._appender.stage(self._queue, orjson.dumps(value), b"", 0, 0, 0, self._store.now_ms, self._store.store_host)

    def since(self, number: int) -> Iterator[Any]:
        """The values of this note and of those after it, oldest first."""
        queue = self._queue
        for offset in range(max(number, queue.begin), queue.next):
            try:
                yield orjson.loads(self._store.message(queue, offset).body)
            except (Damaged, ValueError) as error:
                hint = "messages that it speaks of may be delivered again"
                log.error("delivery_note_unreadable", offset=offset, reason=str(error), hint=hint)
