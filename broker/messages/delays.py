"""Delayed messages: kept in SCHEDULE_TOPIC_XXXX, a queue per level, and stored again in their own topic when due.

The index of a schedule queue holds the due time (ms) where others hold the tag's hash, so waiting reads no message.
Progress is noted in the log with the messages that were delivered (`notes`), and saved like offsets, for each level. So
nothing is delivered again after a kill.

Due times are of the machine's clock. If that was ahead and is set right, what was stored meanwhile seems to be due later,
and all that stands behind it in its level with it, retries of all groups among them. So nothing waits longer than its level
says, from when that is noticed (Apache's broker delivers it at once: ScheduleMessageService.correctDeliverTimestamp).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson
import structlog

from ...protocol import properties as props
from ...protocol.message import Record
from ...protocol.names import SCHEDULE_TOPIC, TIMER_TOPIC
from ...protocol.subscription import tag_code
from ..clock import Clock, Timer
from ..config import CLOCK_TOLERANCE_MS, DELAY_DELIVERIES_AT_ONCE, DELAY_RETRY_S
from ..running.jobs import Job
from ..store.consume_queue import ConsumeQueue
from ..store.files import Save, StoreFull, Unreadable, read_state
from .appender import Appender
from .notes import OF_DELAYS, Notes
from .properties import with_real_queue
from .topics import Topics

log = structlog.get_logger("rocketlet.delays")

_NOTES: Final = 0  # the level under which the state file has the number of the next note


def tag_code_of(record: Record, levels_ms: tuple[int, ...]) -> int:
    """The third field of a record's index entry: its tag's hash, or the time at which a delayed message is due."""
    # As CommitLog.checkMessageAndReturnSize: the index alone says when something is due.
    if record.topic == TIMER_TOPIC:
        return int(props.find(record.properties, props.TIMER_OUT_MS) or 0)
    if record.topic == SCHEDULE_TOPIC:
        return record.store_ms + levels_ms[min(record.queue_id, len(levels_ms) - 1)]
    return tag_code(record.properties)


def stage_due(record: Record, topics: Topics, appender: Appender) -> bool:
    """Stages a message whose time has come in its own topic; whether that is there still."""
    topic = props.find(record.properties, props.REAL_TOPIC) or ""
    wanted = int(props.find(record.properties, props.REAL_QUEUE_ID) or 0)
    queue_id = topics.queue_now(topic, wanted)
    if queue_id is None:
        log.warning("delayed_message_dropped", topic=topic, id=record.offset_id, hint="its topic was deleted")
        return False
    if queue_id != wanted:
        log.info("message_in_another_queue", topic=topic, queue=queue_id, wanted=wanted)
    queue = appender.store.queue(topic, queue_id)
    appender.stage_again(record, queue, record.properties.encode(), tag_code(record.properties))
    return True


class Delays:
    """`levels_ms`: how long each level waits, level 1 first."""

    def __init__(
        self, path: Path, levels_ms: tuple[int, ...], topics: Topics, appender: Appender, clock: Clock
    ) -> None:
        self._path = path
        self._levels_ms = levels_ms
        self._topics = topics
        self._appender = appender
        self._clock = clock
        self._store = appender.store
        self._notes = Notes(appender, OF_DELAYS)
        self.progress = self._load()
        self._timers: dict[int, Timer] = {}
        self._ahead_ms: dict[int, int] = {}  # how far the clock was ahead when messages of a level were stored
        self._dirty = False
        self.set_aside = 0
        self._clamp()

    def _load(self) -> dict[int, int]:
        """The saved progress, or that of the last note if there are other notes now. A power cut may have taken some."""
        saved = {int(level): offset for level, offset in (read_state(self._path) or {}).items()}
        known = saved.pop(_NOTES, 0)
        last = list(self._notes.since(self._notes.next - 1)) if known != self._notes.next else []
        return {int(level): offset for level, offset in last[0].items()} if last else saved

    def start(self) -> None:
        for level in range(1, len(self._levels_ms) + 1):
            if (SCHEDULE_TOPIC, level - 1) in self._store.queues:
                self.expect(level)

    def _clamp(self) -> None:
        """Progress behind the end of a level was lost with it; messages that come there are not delivered yet."""
        for level, offset in self.progress.items():
            queue = self._store.queues.get((SCHEDULE_TOPIC, level - 1))
            end = queue.next if queue else 0
            if offset > end:
                log.warning("delay_progress_set_back", level=level, end=end)
                self.progress[level] = end
                self._dirty = True

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def queue(self, level: int) -> ConsumeQueue:
        """The queue in which the messages of a level wait."""
        return self._store.queue(SCHEDULE_TOPIC, level - 1)

    def place_of(self, level: int, topic: str, queue_id: int, text: str) -> tuple[ConsumeQueue, str, int]:
        """The queue in which a message waits, its properties there, and its due time (ms) for the index."""
        return self.queue(level), with_real_queue(text, topic, queue_id), self.due_ms(level, self._store.now_ms)

    def level(self, wanted: int) -> int:
        """A level as asked, the highest at most."""
        # CommitLog.putMessage: a level beyond the highest is the highest
        return min(wanted, len(self._levels_ms))

    def due_ms(self, level: int, now_ms: int) -> int:
        return now_ms + self._levels_ms[level - 1]

    def expect(self, level: int) -> None:
        """A message was stored at this level: makes sure that a timer runs for the first one that is due."""
        if level not in self._timers:
            self._set_timer(level)

    def _set_timer(self, level: int, at_least_s: float = 0.0) -> None:
        self._timers.pop(level, None)
        try:
            wait_s = self.wait_s(level)
        except Exception as error:
            log.exception("delay_level_stuck", level=level, reason=str(error))
            wait_s = DELAY_RETRY_S
        if wait_s is not None:
            self._timers[level] = self._clock.call_later(max(wait_s, at_least_s), self._deliver, level)

    @property
    def levels(self) -> range:
        return range(1, len(self._levels_ms) + 1)

    def wait_s(self, level: int) -> float | None:
        """How long until the level's first message is due; None if it has none."""
        queue = self.queue(level)
        offset = max(self.progress.get(level, 0), queue.begin)
        return (
            self._wait_ms(level, queue.entry(offset)[2], self._clock.time_ms()) / 1000 if offset < queue.next else None
        )

    def _wait_ms(self, level: int, due_ms: int, now_ms: int) -> int:
        ahead_ms = due_ms - now_ms - self._levels_ms[level - 1]
        if ahead_ms <= CLOCK_TOLERANCE_MS:
            return due_ms - now_ms
        known_ms = self._ahead_ms.get(level, 0)
        if ahead_ms > known_ms:
            self._ahead_ms[level] = ahead_ms
            if not known_ms:
                hint = "messages of this level wait no longer than it says; check the time service of the machine"
                log.warning("clock_set_back", level=level, ahead_s=ahead_ms / 1000, hint=hint)
        return due_ms - now_ms - self._ahead_ms[level]

    def _deliver(self, level: int) -> None:
        """Stores the messages that are due, some hundreds at once, and sets the next timer, whatever happens."""
        try:
            self._deliver_due(level)
        except StoreFull as error:
            log.error("delayed_delivery_failed", reason=str(error), level=level)
            self._set_timer(level, DELAY_RETRY_S)
        except Exception as error:
            log.exception("delayed_delivery_failed", reason=str(error), level=level)
            self._set_timer(level, DELAY_RETRY_S)
        else:
            self._set_timer(level)

    def _deliver_due(self, level: int) -> None:
        store, queue = self._store, self.queue(level)
        offset = max(self.progress.get(level, 0), queue.begin)
        # Thousands may be due in the same ms; the other clients' requests come between.
        end = min(queue.next, offset + DELAY_DELIVERIES_AT_ONCE)
        with self._appender.batch() as now_ms:
            while offset < end and self._wait_ms(level, queue.entry(offset)[2], now_ms) <= 0:
                try:
                    if not stage_due(store.message(queue, offset), self._topics, self._appender):
                        self.set_aside += 1
                except (OSError, StoreFull, Unreadable):  # that may pass
                    raise
                except Exception as error:  # one that cannot be read or placed must not stop those behind it
                    self.set_aside += 1
                    log.error("delayed_message_set_aside", level=level, offset=offset, reason=str(error))
                offset += 1
            progress = {**self.progress, level: offset}
            if progress != self.progress:
                self._notes.stage({str(level): offset for level, offset in progress.items()})
        # Only now: if the batch was rolled back, all of it is delivered again.
        self.progress = progress
        self._dirty = True

    def saving(self) -> Job[Save | None]:
        """How to save what has changed; None if nothing has."""
        yield from ()
        if not self._dirty:
            return None
        self._dirty = False
        progress = {str(level): offset for level, offset in self.progress.items()} | {str(_NOTES): self._notes.next}
        return Save(self._path, orjson.dumps(progress), self._again)

    def _again(self) -> None:
        self._dirty = True
