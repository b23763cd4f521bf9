"""Delayed messages: delay levels, messages with a delivery time, and recalls (RECALL_MESSAGE)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import orjson
import structlog
from msgspec import Struct

from ...protocol import properties as props
from ...protocol.bodies import Work, shaped
from ...protocol.message import HandleError, RecallHandle, Record, decode_handle
from ...protocol.names import NOTES_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, tag_code
from ..config import (
    CLOCK_TOLERANCE_MS,
    DELAY_DELIVERIES_AT_ONCE,
    DELAY_RETRY_S,
    MAX_TIMER_DELAY_MS,
    RECALL_READS,
    SEARCH_CHUNK_BYTES,
    TIMER_POLL_INTERVAL_S,
    LimitExceeded,
)
from ..runtime import Job, Runtime, SingleTimer, Timer
from ..store.files import Damaged, Save, StoreFull, Unreadable, read_state, replace_state
from ..store.index import ENTRY, ConsumeQueue
from ..store.journals import Journal
from ..store.schedule import ENTRIES_AT_ONCE, Schedule, due_of, key_of, offset_of
from .appender import Appender, real_queue, with_real_queue
from .topics import Topics

log = structlog.get_logger("rocketlet.delays")
timers_log = structlog.get_logger("rocketlet.timers")
notes_log = structlog.get_logger("rocketlet.notes")


# ------------------------------------------------------------------------------
# Delay levels. Delayed messages are stored in SCHEDULE_TOPIC_XXXX, with a queue per level, and stored again in their
# own topic when they are due, unless that was deleted.
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


# ------------------------------------------------------------------------------
# Messages with a delivery time. They are stored in rmq_sys_wheel_timer, and stored again in their own topic when they are
# due, unless they were recalled or that topic was deleted.
#
# The index of that queue contains the delivery time (ms) instead of the tag hash, so that waiting needs no read of
# messages. A key is a delivery time and an offset in that queue; `store/schedule.py` keeps the keys sorted, and all but the
# newest of very many on the disk.
#
# Progress is the last delivered key. Progress is recorded in the log in the same append as the delivered messages
# (`Notes`), and saved like offsets. After a kill, therefore, nothing is delivered twice, unless a note is damaged. Waiting
# messages with an earlier key than the progress, because the clock was set back, are recorded separately (`_behind`).
#
# Retention drops the log's oldest segments. Waiting messages in them are stored again at the log's end first
# (`carrying`).


MARK: Final = "TIMER_D"  # common prefix of the properties that request a delivery time
# the first one in this order counts
_TIME_PROPERTIES: Final = (props.TIMER_DELAY_SEC, props.TIMER_DELAY_MS, props.TIMER_DELIVER_MS)
_EARLY_S: Final = 1e-6  # tolerance for rounding errors of float sums
_NOTHING: Final = -1


class IllegalTime(ValueError):
    """A message requests an invalid delivery time. The text has the reason."""


def time_asked(text: str, now_ms: int) -> int:
    """Return the delivery time that these properties request, in ms since the epoch; 0 for immediate delivery. Raises
    IllegalTime.

    Like Apache's HookUtils.handleScheduleMessage, a time in the past means immediate delivery, and a message that has
    waited already is delivered immediately.
    """
    if props.find(text, props.TIMER_RECALL) is not None:
        raise IllegalTime("messages are recalled by a request of their own, RECALL_MESSAGE (370)")
    if props.find(text, props.TIMER_OUT_MS) is not None:
        return 0
    name, value = next(
        ((name, found) for name in _TIME_PROPERTIES if (found := props.find(text, name)) is not None), ("", "0")
    )
    if not (value.isascii() and value.removeprefix("-").isdecimal() and len(value) <= 19):
        raise IllegalTime(f"the property {name} is {value[:40]!r}, which is not a number")
    scale = 1000 if name == props.TIMER_DELAY_SEC else 1
    due_ms = int(value) * scale + (0 if name == props.TIMER_DELIVER_MS else now_ms)
    if due_ms - now_ms > MAX_TIMER_DELAY_MS:
        raise IllegalTime(
            f"timer message illegal, it asks for a time {(due_ms - now_ms) / 86_400_000:.1f} days ahead; the delay time "
            f"should not be bigger than the max delay {MAX_TIMER_DELAY_MS}ms"
        )
    return due_ms if name and due_ms > now_ms else 0


def without_time(text: str) -> str:
    """Return the properties without a delivery time, for a message whose delay level has precedence."""
    for name in _TIME_PROPERTIES:
        text = props.without(text, name)
    return text


class _TimerProgress(Struct):
    """The state file of the messages with a delivery time. See the attributes of `Timers`. `delivered` has the time in ms
    and the offset of the last delivered message."""

    delivered: tuple[int, int] = (0, 0)
    taken: int = 0
    carried: int = 0
    behind: list[int] = []
    notes: int = 0
    waiting: int = 0
    bytes: int = 0


class _TimerNote(Struct):
    """A note of the messages with a delivery time: those that no longer wait, as in `Timers._stage_note`."""

    delivered: tuple[int, int]
    carried: int
    done: list[int]
    count: int
    bytes: int


class _RecalledMessage(NamedTuple):
    """An entry of the recalled messages. `end` is the end of the queue at the time of the recall."""

    due_ms: int
    topic: str
    unique_key: str
    end: int


class Timers:
    """The messages with a delivery time.

    Attributes:
        waiting: number of waiting messages, including recalled ones
        waiting_bytes: size of these messages in the log
    """

    def __init__(self, runtime: Runtime, folder: Path, topics: Topics, appender: Appender) -> None:
        limits = self._limits = runtime.limits
        self._path = folder / "timers.json"
        self._topics = topics
        self._appender = appender
        self._store = appender.store
        self._clock = runtime.clock
        self._timer = SingleTimer(self._clock, self._deliver)
        self._is_started = False
        self._latest = _NOTHING  # the last key that was taken from the schedule
        self._dirty = False
        self.set_aside = 0
        saved = runtime.adoption.whole("progress of timers", read_state(self._path), _TimerProgress) or _TimerProgress()
        end = self.queue.next
        self._delivered = key_of(*saved.delivered)
        self._taken = min(saved.taken, end)
        # messages below this offset were delivered, or stored again at the log's end
        self._carried = min(saved.carried, end)
        self._behind = {offset for offset in saved.behind if offset < self._taken}
        self._notes = Notes(appender, OF_TIMERS, _TimerNote)
        self.waiting = saved.waiting
        self.waiting_bytes = saved.bytes
        self._recalled_path = folder / "recalled.json"
        self.journal = Journal(self._recalled_path)
        # By delivery time, topic and unique key of a recalled message: the end of the queue at the time of the recall. All
        # copies before it are recalled, because a kill during `carrying` may leave two copies of a message.
        self._recalled: dict[tuple[int, str, str], int] = {}
        recalled = runtime.adoption.whole("recalled messages", read_state(self._recalled_path), list[object]) or []
        runtime.adoption.each("recalled messages", (*recalled, *self.journal.read()), self._adopt_recalled)
        self._kept = len(self._recalled)  # number of recalled messages at the last save; some may be past their time
        done, count, size = self._read_notes(saved.notes)
        self._saved = self._delivered
        self._schedule = Schedule(folder / "timers", self.queue, self._is_done, limits)
        self._schedule.load(self._taken, self._delivered, self._behind)
        self._add_new(done)
        self._wait_for_less(count, size)

    def _adopt_recalled(self, item: object) -> None:
        found = shaped(item, _RecalledMessage)
        self._recalled[found.due_ms, found.topic, found.unique_key] = found.end

    def _read_notes(self, first: int) -> tuple[set[int], int, int]:
        """Apply the notes since the progress was saved. Return the offsets of messages that were delivered since, the
        number of messages that no longer wait, and their bytes."""
        notes, done, count, size = self._notes, set[int](), 0, 0
        if notes.next < first:  # a power failure removed the end of the log, including delivered messages
            for note in notes.since(notes.next - 1):
                self._delivered = min(self._delivered, key_of(*note.delivered))
        for note in notes.since(first):
            self._delivered = max(self._delivered, key_of(*note.delivered))
            self._carried = max(self._carried, min(note.carried, self.queue.next))
            done.update(note.done)
            count, size = count + note.count, size + note.bytes
            self._dirty = True
        self._behind = {offset for offset in self._behind - done if offset >= self._carried}
        return done, count, size

    def _stage_note(self, delivered: int, carried: int, done: list[int], sizes: list[int]) -> None:
        """Record in the same append as the staged messages which messages no longer wait: those at the offsets `done`,
        or those that were carried."""
        self._notes.stage(
            {
                "delivered": [due_of(delivered), offset_of(delivered)],
                "carried": carried,
                "done": done,
                "count": len(sizes),
                "bytes": sum(sizes),
            }
        )

    def _wait_for_less(self, count: int, size: int) -> None:
        self.waiting = max(self.waiting - count, 0)
        self.waiting_bytes = max(self.waiting_bytes - size, 0)

    @property
    def queue(self) -> ConsumeQueue:
        """The queue in which the messages wait."""
        return self._store.queue(TIMER_TOPIC, 0)

    # Waiting messages, by time

    def _is_done(self, key: int) -> bool:
        """Return True if the message of a key was delivered, or stored again at the log's end."""
        offset = offset_of(key)
        if offset < max(self._carried, self.queue.begin):
            return True
        return key <= self._delivered and offset not in self._behind

    def schedule_stored(self) -> None:
        """Add newly stored messages to the schedule, and set the timer again if another message is due first."""
        first = self._schedule.next
        self._add_new()
        if self._is_started and (not self._timer.is_set or self._schedule.next != first):
            self._set_timer()

    def _add_new(self, done: Container[int] = ()) -> None:
        """Add newly stored messages to the schedule. Messages at the offsets `done` were delivered, so that they are
        only counted."""
        queue = self.queue
        while self._taken < queue.next:
            data = queue.entries(self._taken, min(queue.next - self._taken, ENTRIES_AT_ONCE))
            for _, size, due_ms in ENTRY.iter_unpack(data):
                if size and self._taken in done:
                    self.waiting += 1
                    self.waiting_bytes += size
                elif size:
                    self._add(key_of(due_ms, self._taken), size)
                self._taken += 1

    def _add(self, key: int, size: int) -> None:
        self._dirty = True
        if key <= self._delivered:  # the clock was set back
            self._behind.add(offset_of(key))
        self.waiting += 1
        self.waiting_bytes += size
        self._schedule.add(key)

    # Delivering

    def start(self) -> None:
        self._is_started = True
        self._set_timer()

    def stop(self) -> None:
        self._is_started = False
        self._timer.cancel()

    def wait_s(self) -> float | None:
        """Return the time in seconds until the first message is due; None if no message waits."""
        key = self._schedule.next
        return None if key is None else due_of(key) / 1000 - self._clock.time_s()

    def _set_timer(self, at_least_s: float = 0.0) -> None:
        self._timer.cancel()
        wait_s = self.wait_s()
        if wait_s is not None:
            self._timer.set(min(max(wait_s, at_least_s), TIMER_POLL_INTERVAL_S))

    def _deliver(self) -> None:
        """Deliver messages that are due, up to `timer_deliveries_at_once`, and set the next timer, even after an error."""
        try:
            self._deliver_due()
        except StoreFull as error:
            timers_log.error("timed_delivery_failed", reason=str(error))
            self._set_timer(DELAY_RETRY_S)
        except Exception as error:
            timers_log.exception("timed_delivery_failed", reason=str(error))
            self._set_timer(DELAY_RETRY_S)
        else:
            self._set_timer()

    def _deliver_due(self) -> None:
        queue, end_s = self.queue, self._clock.time_s() + _EARLY_S
        taken: list[int] = []
        done: list[int] = []  # sizes of delivered messages
        limits = self._limits
        try:
            with self._appender.batch():
                while (key := self._schedule.next) is not None and due_of(key) <= end_s * 1000:
                    if len(taken) >= limits.timer_deliveries_at_once or sum(done) >= limits.timer_delivery_bytes:
                        break
                    self._schedule.remove_first()
                    taken.append(key)
                    # the key was added again after a failure, and a run contains it as well
                    is_again = key == self._latest
                    self._latest = key
                    if not is_again and not self._is_done(key):
                        done.append(queue.entry(offset_of(key))[1])
                        self._stage(queue, key)
                if taken:
                    self._stage_note(max(self._delivered, *taken), self._carried, [*map(offset_of, taken)], done)
        except BaseException:
            self._latest = _NOTHING
            self._schedule.add_again(taken)
            raise
        if taken:
            self._dirty = True
            # This runs only after the commit, because a batch that is rolled back is delivered again.
            self._behind.difference_update(map(offset_of, taken))
            self._delivered = max(self._delivered, *taken)
            self._wait_for_less(len(done), sum(done))

    def _stage(self, queue: ConsumeQueue, key: int) -> None:
        offset = offset_of(key)
        try:
            record = self._store.message(queue, offset)
            if not self._was_recalled(record, key) and not stage_due(record, self._topics, self._appender):
                self.set_aside += 1
        except (OSError, StoreFull, Unreadable):  # temporary errors
            raise
        except Exception as error:  # an unreadable message must not stop later ones
            self.set_aside += 1
            timers_log.error("timed_message_set_aside", offset=offset, due_ms=due_of(key), reason=str(error))

    # Recalling

    def recalling(self, topic: str, due_ms: int, unique_key: str) -> Work[bool]:
        """Recall the waiting message with this topic, delivery time and unique key. Return False if there is none. Raises
        StoreFull, LimitExceeded."""
        found = False
        between = self._schedule.between(key_of(due_ms, 0), key_of(due_ms + 1, 0))
        keys = list(islice(between, self._limits.max_recall_looks))
        looks = looked_bytes = 0
        for key in keys:
            if self._recall_if_matches(key, topic, unique_key):
                found = True
            looks, looked_bytes = looks + 1, looked_bytes + self.queue.entry(offset_of(key))[1]
            if looks >= RECALL_READS or looked_bytes > SEARCH_CHUNK_BYTES:
                looks = looked_bytes = 0
                yield
        if not found and len(keys) == self._limits.max_recall_looks:
            raise LimitExceeded(
                f"more than {self._limits.max_recall_looks} messages wait for this ms; the search ends there"
            )
        return found

    def _recall_if_matches(self, key: int, topic: str, unique_key: str) -> bool:
        offset = offset_of(key)
        if self._is_done(key):
            return False
        try:
            record = self._store.message(self.queue, offset)
        except Damaged:
            return False
        text = record.properties
        if props.find(text, props.UNIQUE_KEY) != unique_key or props.find(text, props.REAL_TOPIC) != topic:
            return False
        if self._was_recalled(record, key):
            return False
        if len(self._recalled) >= self._limits.max_recalled:
            most = self._limits.max_recalled
            raise LimitExceeded(f"{most} messages were recalled whose time has not come; retry later")
        self.journal.append([due_of(key), topic, unique_key, self.queue.next])
        self._recalled[due_of(key), topic, unique_key] = self.queue.next
        return True

    def _was_recalled(self, record: Record, key: int) -> bool:
        if not self._recalled:
            return False
        topic, unique_key = (props.find(record.properties, name) or "" for name in (props.REAL_TOPIC, props.UNIQUE_KEY))
        return offset_of(key) < self._recalled.get((due_of(key), topic, unique_key), 0)

    # Keeping

    def carrying(self, position: int) -> Job[int]:
        """Store waiting messages before a position of the log again at its end, and save the progress. Return the position
        before which no message waits, which is lower if the disk is full."""
        queue, had = self.queue, self._carried
        try:
            while (offset := max(self._carried, queue.begin)) < self._taken and queue.entry(offset)[0] < position:
                self._carry_some(queue, offset, position)
                yield None
            save = (yield from self.preparing_save()) if self._carried != had else None
            if save is not None:
                # sync messages that were delivered or stored again before the progress is saved
                yield from self._store.syncing()
                yield partial(save.write, True)
        except StoreFull as error:
            timers_log.error("timed_messages_not_carried", reason=str(error), hint="their segments are kept")
            self._dirty = True
            return min(position, queue.entry(offset)[0]) if offset < queue.next else position
        return position

    def _carry_some(self, queue: ConsumeQueue, offset: int, position: int) -> None:
        total = 0
        carried: list[int] = []
        limits = self._limits
        with self._appender.batch():
            while (
                offset < self._taken
                and len(carried) < limits.timer_deliveries_at_once
                and total < limits.timer_delivery_bytes
            ):
                at, size, due_ms = queue.entry(offset)
                if at >= position:
                    break
                if size and not self._is_done(key_of(due_ms, offset)):
                    total += size
                    carried.append(size)
                    self._carry_one(queue, offset, due_ms)
                offset += 1
            if carried:
                self._stage_note(self._delivered, offset, [], carried)
        self._carried = offset
        self._wait_for_less(len(carried), total)
        self._behind = {kept for kept in self._behind if kept >= offset}
        self._dirty = True
        self.schedule_stored()

    def _carry_one(self, queue: ConsumeQueue, offset: int, due_ms: int) -> None:
        try:
            record = self._store.message(queue, offset)
        except (Damaged, ValueError) as error:
            self.set_aside += 1
            timers_log.error("timed_message_set_aside", offset=offset, due_ms=due_ms, reason=str(error))
            return
        if not self._was_recalled(record, key_of(due_ms, offset)):
            self._appender.stage_again(record, queue, record.properties.encode(), due_ms)

    def preparing_save(self) -> Job[Save | None]:
        """Return the state file to save; None if nothing has changed."""
        yield from self._schedule.saving(lambda: self._delivered, lambda: self._behind)
        if not self._dirty:
            return None
        self._dirty = False
        self._saved = self._delivered
        state = {
            "delivered": [due_of(self._delivered), offset_of(self._delivered)],
            "taken": self._taken,
            "carried": self._carried,
            "notes": self._notes.next,
            "behind": sorted(self._behind),
            "waiting": self.waiting,
            "bytes": self.waiting_bytes,
        }
        return Save(self._path, orjson.dumps(state), self._save_failed)

    def _save_failed(self) -> None:
        self._dirty = True
        self._saved = 0

    def saving_recalled(self) -> Job[None]:
        """Write the file of recalled messages if the journal has become long. Raises StoreFull."""
        if self.journal.lines > self._limits.journal_lines + self._kept:
            # Messages after the saved progress may be loaded again after a kill, so their recalls are kept.
            self._recalled = {item: end for item, end in self._recalled.items() if item[0] >= due_of(self._saved)}
            self._kept = len(self._recalled)
            content = orjson.dumps([[*item, end] for item, end in self._recalled.items()])
            yield from self.journal.shortening(_single_job(partial(replace_state, self._recalled_path, content)))


def _single_job(call: partial[None]) -> Job[None]:
    yield call


def waiting_text(text: str, due_ms: int, topic: str, queue_id: int) -> str:
    """Return the properties of a message that waits for a delivery time."""
    return props.appended(with_real_queue(text, topic, queue_id), props.TIMER_OUT_MS, str(due_ms))


# ------------------------------------------------------------------------------
# Recalls of messages by their producer before their delivery time, by handles that the protocol servers return.


class RecallFault(Enum):
    ILLEGAL_HANDLE = "illegal handle"
    """The handle is invalid, or belongs to another topic or broker."""
    NOT_WAITING = "not waiting"
    """The message was delivered or recalled already, or never existed."""


class Recall(NamedTuple):
    """Result of a recall. `fault` is None for a recalled message; otherwise `reason` describes the error."""

    unique_key: str
    fault: RecallFault | None = None
    reason: str = ""


def handle_of(text: str, topic: str, broker_name: str, due_ms: int) -> str:
    """Return the handle of a message with a delivery time; empty if the message has no unique key or is a retry, as in
    Apache's brokers."""
    unique_key = props.find(text, props.UNIQUE_KEY)
    if not unique_key or " " in unique_key or topic.startswith(RETRY_PREFIX):
        return ""
    return RecallHandle(topic, broker_name, due_ms, unique_key).encoded()


def recalling(timers: Timers, broker_name: str, topic: str, text: str) -> Work[Recall]:
    """Recall the message of a handle. The recall is written when this returns; with `--flush sync`, the caller waits until it
    is on the device. Raises StoreFull, LimitExceeded."""
    try:
        handle = decode_handle(text)
    except HandleError as fault:
        return Recall("", RecallFault.ILLEGAL_HANDLE, str(fault))
    if handle.topic != topic:
        return Recall(
            "", RecallFault.ILLEGAL_HANDLE, f"recall failed, topic not match: the handle is of {handle.topic}"
        )
    if handle.broker_name != broker_name:
        reason = f"recall failed, broker service not available: the handle is of {handle.broker_name}"
        return Recall("", RecallFault.ILLEGAL_HANDLE, reason)
    found = yield from timers.recalling(topic, handle.due_ms, handle.unique_key)
    if not found:
        reason = "recall failed, no such message is waiting: it was delivered or recalled already"
        return Recall(handle.unique_key, RecallFault.NOT_WAITING, reason)
    return Recall(handle.unique_key)


# ------------------------------------------------------------------------------
# Notes: records of delivered delayed messages in the log itself.
#
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
                notes_log.error("delivery_note_unreadable", offset=offset, reason=str(error), hint=hint)
