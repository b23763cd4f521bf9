"""The delay levels of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson
import structlog

from ...protocol import properties as props
from ...protocol.message import Record
from ...protocol.names import SCHEDULE_TOPIC, TIMER_TOPIC, tag_code
from ..config import CLOCK_TOLERANCE_MS, DELAY_DELIVERIES_AT_ONCE, DELAY_RETRY_S
from ..runtime.clock import Timer
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..store.files import Save, StoreFull, Unreadable, read_state
from ..store.index import ConsumeQueue
from .appender import Appender, real_queue, with_real_queue
from .notes import OF_DELAYS, Notes
from .topics import Topics

log = structlog.get_logger("rocketlet.delays")


# Delayed messages are stored in SCHEDULE_TOPIC_XXXX, with a queue per level, and stored again in their own topic when they
# are due, unless that was deleted.
#
# The index of a schedule queue contains the due time (ms) instead of the tag hash, so that waiting needs no read of
# messages. The progress of each level is recorded in the log in the same append as the delivered messages (`Notes`),
# and saved like offsets. After a kill, therefore, nothing is delivered twice, unless a note is damaged.
#
# Due times are by the machine's clock. If the clock was ahead and is corrected, messages that were stored meanwhile
# seem to be due later, and so do all later messages of the level, including retries of all groups. From the detection
# on, therefore, no message waits longer than its level's delay. (Apache's broker delivers it immediately:
# ScheduleMessageService.correctDeliverTimestamp.)


_NOTES: Final = 0  # key of the next note's number in the state file, beside the levels


def tag_code_of(record: Record, levels_ms: tuple[int, ...]) -> int:
    """Return the third field of a record's index entry: the hash of its tag, or the due time of a delayed message."""
    # As in CommitLog.checkMessageAndReturnSize: only the index contains the due time.
    if record.topic == TIMER_TOPIC:
        return int(props.find(record.properties, props.TIMER_OUT_MS) or 0)
    if record.topic == SCHEDULE_TOPIC:
        return record.store_ms + levels_ms[min(record.queue_id, len(levels_ms) - 1)]
    return tag_code(record.properties)


def stage_due(record: Record, topics: Topics, appender: Appender) -> bool:
    """Stage a message that is due in its own topic. Return False if `Topics.queue_now` finds no queue for it."""
    topic, wanted = real_queue(record)
    queue_id = topics.queue_now(topic, wanted, record.physical_offset)
    if queue_id is None:
        log.warning("delayed_message_dropped", topic=topic, id=record.offset_id, hint="its topic was deleted")
        return False
    if queue_id != wanted:
        log.info("message_in_another_queue", topic=topic, queue=queue_id, wanted=wanted)
    queue = appender.store.queue(topic, queue_id)
    appender.stage_again(record, queue, record.properties.encode(), tag_code(record.properties))
    return True


_Progress = dict[int, int]
"""The first offset of each delay level that is not delivered yet; of the level `_NOTES` the next note."""


class Delays:
    """The delay levels. `levels_ms` has the delay of each level in ms, level 1 first."""

    def __init__(
        self, runtime: Runtime, path: Path, levels_ms: tuple[int, ...], topics: Topics, appender: Appender
    ) -> None:
        self._path = path
        self._adoption = runtime.adoption
        self._levels_ms = levels_ms
        self._topics = topics
        self._appender = appender
        self._clock = runtime.clock
        self._store = appender.store
        self._notes = Notes(appender, OF_DELAYS, _Progress)
        self.progress = self._load()
        self._timers: dict[int, Timer] = {}
        self._ahead_ms: dict[int, int] = {}  # how far the clock was ahead, in ms, when messages of a level were stored
        self._dirty = False
        self.set_aside = 0
        self._clamp()

    def _load(self) -> dict[int, int]:
        """Return the saved progress, or that of the last note if the notes differ from those at the time of the save:
        there may be later ones, or a power failure may have removed some."""
        saved = self._adoption.whole("progress of delays", read_state(self._path), _Progress) or {}
        known = saved.pop(_NOTES, 0)
        last = list(self._notes.since(self._notes.next - 1)) if known != self._notes.next else []
        return last[0] if last else saved

    def start(self) -> None:
        for level in self.levels:
            if (SCHEDULE_TOPIC, level - 1) in self._store.queues:
                self.expect(level)

    def _clamp(self) -> None:
        """Reduce progress beyond the end of a level, whose messages were lost: later messages at these offsets are not
        delivered yet."""
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
        """Return the queue in which the messages of a level wait."""
        return self._store.queue(SCHEDULE_TOPIC, level - 1)

    def prepare(self, level: int, topic: str, queue_id: int, text: str) -> tuple[ConsumeQueue, str, int]:
        """Return the queue in which a message waits, its properties there, and its due time (ms) for the index."""
        return self.queue(level), with_real_queue(text, topic, queue_id), self.due_ms(level, self._store.now_ms)

    def level(self, wanted: int) -> int:
        """Return a requested level, or the highest level if the requested one is above it, as CommitLog.putMessage does."""
        return min(wanted, len(self._levels_ms))

    def due_ms(self, level: int, now_ms: int) -> int:
        return now_ms + self._levels_ms[level - 1]

    def expect(self, level: int) -> None:
        """Set a timer for the first message of a level, after a message was stored there, unless one is set."""
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
        """Return the time in seconds until the level's first message is due; None if the level has no message."""
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
                hint = "messages of this level wait no longer than its delay; check the time service of the machine"
                log.warning("clock_set_back", level=level, ahead_s=ahead_ms / 1000, hint=hint)
        return due_ms - now_ms - self._ahead_ms[level]

    def _deliver(self, level: int) -> None:
        """Deliver messages that are due, up to DELAY_DELIVERIES_AT_ONCE, and set the next timer, even after an error."""
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
        # Thousands of messages may be due in the same ms, so requests of clients are served in between.
        end = min(queue.next, offset + DELAY_DELIVERIES_AT_ONCE)
        with self._appender.batch() as now_ms:
            while offset < end and self._wait_ms(level, queue.entry(offset)[2], now_ms) <= 0:
                try:
                    if not stage_due(store.message(queue, offset), self._topics, self._appender):
                        self.set_aside += 1
                except (OSError, StoreFull, Unreadable):  # temporary errors
                    raise
                except Exception as error:  # an unreadable message must not stop later ones
                    self.set_aside += 1
                    log.error("delayed_message_set_aside", level=level, offset=offset, reason=str(error))
                offset += 1
            progress = {**self.progress, level: offset}
            if progress != self.progress:
                self._notes.stage({str(level): offset for level, offset in progress.items()})
        # This runs only after the commit, because a batch that is rolled back is delivered again.
        self.progress = progress
        self._dirty = True

    def preparing_save(self) -> Job[Save | None]:
        """Return the state file to save; None if nothing has changed."""
        yield from ()
        if not self._dirty:
            return None
        self._dirty = False
        progress = {str(level): offset for level, offset in self.progress.items()} | {str(_NOTES): self._notes.next}
        return Save(self._path, orjson.dumps(progress), self._save_failed)

    def _save_failed(self) -> None:
        self._dirty = True
