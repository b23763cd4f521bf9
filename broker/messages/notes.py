"""Notes: records of delivered delayed messages in the log itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import orjson
import structlog

from ...protocol.bodies import shaped
from ...protocol.names import NOTES_TOPIC
from ..store.files import Damaged
from ..store.index import ConsumeQueue
from .appender import Appender

log = structlog.get_logger("rocketlet.notes")


# A note is stored in the same append as the messages that it describes, so that after a kill the log contains both or
# none. State files contain the progress at the time of their save, and the number of the next note. A start reads later
# notes.


# Queue ids of the topic NOTES_TOPIC: the progress of delay levels, and of timed messages
OF_DELAYS: Final = 0
OF_TIMERS: Final = 1
Note = TypeVar("Note")


class Notes(Generic[Note]):
    """The notes of delay levels or of delivery times, whose type is `shape`."""

    def __init__(self, appender: Appender, queue_id: int, shape: type[Note]) -> None:
        self._appender = appender
        self._store = appender.store
        self._queue_id = queue_id
        self._shape = shape

    @property
    def _queue(self) -> ConsumeQueue:
        return self._store.queue(NOTES_TOPIC, self._queue_id)

    @property
    def next(self) -> int:
        """The number of the next note."""
        return self._queue.next

    def stage(self, value: object) -> None:
        """Stage a note together with the staged messages."""
        self._appender.stage(self._queue, orjson.dumps(value), b"", 0, 0, 0, self._store.now_ms, self._store.store_host)

    def since(self, number: int) -> Iterator[Note]:
        """Yield the values of a note and of all later notes, oldest first. Unreadable notes are logged and skipped."""
        queue = self._queue
        for offset in range(max(number, queue.begin), queue.next):
            try:
                yield shaped(orjson.loads(self._store.message(queue, offset).body), self._shape)
            except (Damaged, ValueError) as error:
                hint = "messages of this note may be delivered again"
                log.error("delivery_note_unreadable", offset=offset, reason=str(error), hint=hint)
