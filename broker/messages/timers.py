"""Messages with a delivery time."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import orjson
import structlog
from msgspec import Struct

from ...protocol import properties as props
from ...protocol.bodies import Work, shaped
from ...protocol.message import Record
from ...protocol.names import TIMER_TOPIC
from ..config import (
    DELAY_RETRY_S,
    MAX_TIMER_DELAY_MS,
    RECALL_READS,
    SEARCH_CHUNK_BYTES,
    TIMER_POLL_INTERVAL_S,
    LimitExceeded,
)
from ..runtime.clock import SingleTimer
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..store.files import Damaged, Save, StoreFull, Unreadable, read_state, replace_state
from ..store.index import ENTRY, ConsumeQueue
from ..store.journals import Journal
from ..store.schedule import ENTRIES_AT_ONCE, Schedule, due_of, key_of, offset_of
from .appender import Appender, with_real_queue
from .delays import stage_due
from .notes import OF_TIMERS, Notes
from .topics import Topics

log = structlog.get_logger("rocketlet.timers")


# Such a message is stored in rmq_sys_wheel_timer, and stored again in its own topic when it is due, unless it was recalled
# or that topic was deleted.
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


TIME_PREFIX: Final = "TIMER_D"  # common prefix of the properties that request a delivery time
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


def waiting_text(text: str, due_ms: int, topic: str, queue_id: int) -> str:
    """Return the properties of a message that waits for a delivery time."""
    return props.appended(with_real_queue(text, topic, queue_id), props.TIMER_OUT_MS, str(due_ms))


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
            log.error("timed_delivery_failed", reason=str(error))
            self._set_timer(DELAY_RETRY_S)
        except Exception as error:
            log.exception("timed_delivery_failed", reason=str(error))
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
            log.error("timed_message_set_aside", offset=offset, due_ms=due_of(key), reason=str(error))

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
            log.error("timed_messages_not_carried", reason=str(error), hint="their segments are kept")
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
            log.error("timed_message_set_aside", offset=offset, due_ms=due_ms, reason=str(error))
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
