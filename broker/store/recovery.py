"""Recovers the store at a start: it trusts the log and checks the indexes.

The checkpoint names a commit log position below which every message is in its queue's index file, where each queue
began and ended, and a sum of every index file. Recovery cuts the indexes back to it and reads the log from there on. An
index that differs from the checkpoint is rebuilt from the whole log; the others stay as they are.

Where the log has no whole record, recovery searches for the next one. The bytes between are damage: they are kept aside and
logged. The bytes behind the last whole record are torn: nothing there was acknowledged, so they are kept aside and cut off.

Records of a topic that was deleted stay in the log; `since`, the position at which a topic was created, and the one at which
it was deleted keep them from coming back. A checkpoint from before either speaks of an earlier topic with that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from ...protocol.message import FIXED_BYTES, Record
from ...protocol.names import topic_fault
from .commit_log import CommitLog, Damage
from .consume_queue import ConsumeQueue, QueueState
from .files import StoreError, StoreFull

_FAR_BYTES: Final = 1 << 40  # an index that points farther behind the log's end is garbage


class Lost(NamedTuple):
    """Messages of a queue that the checkpoint knows and the log has not: offsets `begin` to `end`."""

    topic: str
    queue_id: int
    begin: int
    end: int


class Recovered(NamedTuple):
    """The findings of a recovery: records read, bytes of a torn tail cut off, queues whose index was rebuilt and why,
    damage in the log, lost messages, and how many queues belong to unknown topics."""

    records: int = 0
    torn_bytes: int = 0
    rebuilt: tuple[str, ...] = ()
    damage: tuple[Damage, ...] = ()
    lost: tuple[Lost, ...] = ()
    unknown_topics: Mapping[str, int] = {}


class Checkpoint(NamedTuple):
    """How far the log is indexed, where it begins (None: an earlier release did not say), the state of each queue, from
    where on all records have a checksum (None, too), and where the log ended when the last queue was looked at: indexes may
    hold messages up to there."""

    position: int
    begin: int | None
    queues: dict[tuple[str, int], QueueState]
    summed_from: int | None = None
    end: int = 0


def read_checkpoint(state: Any) -> Checkpoint | None:
    """The checkpoint in a state file's value, of this release or an earlier one; None if it is none."""
    try:
        queues = {_key(name): _queue_state(found) for name, found in state["queues"].items()}
        position = int(state["position"])
        return Checkpoint(position, state.get("begin"), queues, state.get("checksums"), int(state.get("end", position)))
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None


def _key(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("@")
    return topic, int(number)


def _queue_state(found: Any) -> QueueState:
    if isinstance(found, int):
        return QueueState(0, found, None)
    begin, end, *sums = found
    return QueueState(begin, end, dict(zip(sums[::2], sums[1::2], strict=True)))


def checkpoint_text(position: int, end: int, begin: int, summed_from: int, queues: bytes) -> bytes:
    """A checkpoint as it is kept; `queues` are the entries of all queues."""
    head = orjson.dumps({"position": position, "end": end, "begin": begin, "checksums": summed_from})
    return b'%b,"queues":{%b}}' % (head[:-1], queues)


class Recovery:
    """One recovery. `since`: the known topics with the position at which each was created. Others that the checkpoint has,
    or records behind it, are taken in; `knows_topics` says whether those of earlier records were deleted."""

    def __init__(
        self,
        log: CommitLog,
        open_queue: Callable[[str, int], ConsumeQueue],
        tag_code_of: Callable[[Record], int],
        since: dict[str, int],
        deleted: Mapping[str, int],
        *,
        knows_topics: bool,
    ) -> None:
        self._log = log
        self._open_queue = open_queue
        self._tag_code_of = tag_code_of
        self._since = since
        self._deleted = deleted
        self._knows_topics = knows_topics
        self._is_complete = False  # whether it is known from which offset on a queue's messages must be there
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._unknown: dict[str, int] = {}
        self._known_until = 0  # where the log goes on behind the checkpoint
        self._most_lost = 0  # messages of a queue: no log that was as long as this one can have had more
        self._known_end = 0  # the log's end, by the index entries behind the checkpoint
        self._rebuilt: list[str] = []
        self._lost: list[Lost] = []
        self._damage: list[Damage] = []

    def run(
        self, checkpoint: Checkpoint | None, on_disk: Iterable[tuple[str, int]], *, rebuilds: bool = False
    ) -> Recovered:
        """Recovers, and returns the findings."""
        states = self._states(checkpoint) if checkpoint else {}
        for key, state in states.items():
            if self._is_wanted(*key, is_known=state.next > 0):  # a topic that was deleted is in no checkpoint
                self._restore(key, state, rebuilds)
        for key in on_disk:
            if key not in states and key[0] in self._since:
                self._queue(*key).restart(0)
        start = self._start(checkpoint)
        self._most_lost = max(self._log.end, checkpoint.end if checkpoint else 0) // FIXED_BYTES
        records, damage, torn = self._log.replay(start, self._take, self._is_named)
        for key, state in states.items():
            if key in self._queues:
                # whole indexes know the part that was cut off, too
                if checkpoint is not None and torn.position < checkpoint.end:
                    self._queues[key].cut_from(torn.position)
                self._lose_until(self._queues[key], state.next, torn.position)
        damage = self._damage + damage
        return Recovered(
            records, torn.size, tuple(self._rebuilt), tuple(damage), tuple(self._lost), dict(self._unknown)
        )

    def _states(self, checkpoint: Checkpoint) -> dict[tuple[str, int], QueueState]:
        """The checkpoint's entries for queues that still exist, because their topics were neither made nor deleted after
        it."""
        changed_at = {**self._deleted, **self._since}  # 0: before the first record, so before any checkpoint
        return {
            (topic, queue_id): state
            for (topic, queue_id), state in checkpoint.queues.items()
            if changed_at.get(topic, 0) == 0 or changed_at[topic] < checkpoint.position
        }

    def _is_wanted(self, topic: str, queue_id: int, *, is_known: bool) -> bool:
        if topic not in self._since:
            if not is_known or topic_fault(topic):
                return False
            self._since[topic] = self._deleted.get(topic, 0)
            self._unknown[topic] = 0
        if topic in self._unknown:
            self._unknown[topic] = max(self._unknown[topic], queue_id + 1)
        return True

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._queues[topic, queue_id] = self._open_queue(topic, queue_id)
        return queue

    def _restore(self, key: tuple[str, int], state: QueueState, rebuilds: bool) -> None:
        queue = self._queue(*key)
        if queue.next > state.next:
            self._known_end = max(self._known_end, queue.known_end())
        try:
            is_whole = not rebuilds and queue.restore(state)
        except StoreFull:
            raise
        except StoreError:
            is_whole = False
        if not is_whole:
            queue.restart(state.begin)
            self._rebuilt.append(f"{key[0]}@{key[1]}")

    def _start(self, checkpoint: Checkpoint | None) -> int:
        """The position from which to read the log. Notes the parts that are missing."""
        log = self._log
        self._is_complete = log.begin == 0 or (checkpoint is not None and checkpoint.begin is not None)
        self._damage += [Damage(*gap) for gap in log.gaps()]
        if checkpoint is None:
            self._known_until = log.end
            return log.begin
        if checkpoint.begin is not None and log.begin > checkpoint.begin:
            self._damage.append(Damage(checkpoint.begin, log.begin - checkpoint.begin))
        start = self._known_until = checkpoint.position
        known_end = max(checkpoint.end, self._known_end if self._known_end < log.end + _FAR_BYTES else 0)
        if known_end > log.end:
            self._damage.append(Damage(log.end, known_end - log.end))
        # A power cut took the end of the log, and the checkpoint is newer: indexes go back to where the log still is.
        if checkpoint.end > log.end:
            start = min([start, log.end, *(queue.cut_from(log.end) for queue in self._queues.values())])
        return log.begin if self._rebuilt else max(start, log.begin)

    def _is_named(self, topic: str, queue_id: int, offset: int, position: int, size: int) -> bool:
        queue = self._queues.get((topic, queue_id))
        return queue is not None and queue.names(offset, position, size)

    def _take(self, record: Record) -> None:
        key = (record.topic, record.queue_id)
        queue = self._queues.get(key)
        if queue is None:
            is_new = record.physical_offset >= self._known_until  # when a topic is deleted, a checkpoint is written
            if record.physical_offset < self._deleted.get(record.topic, 0):
                return
            if not self._is_wanted(*key, is_known=is_new or not self._knows_topics):
                return
            queue = self._queue(*key)
            queue.restart(0)  # whatever files it has, no checkpoint speaks for them
        # Indexed already, or of an earlier topic with this name, which was deleted.
        if record.queue_offset < queue.next or record.physical_offset < self._since[record.topic]:
            return
        if record.queue_offset > queue.next:
            if queue.begin == queue.next and not self._is_complete:  # earlier messages may have expired
                queue.restart(record.queue_offset)
            elif not self._lose_until(queue, record.queue_offset, record.physical_offset):
                return
        queue.append(record.physical_offset, record.size, self._tag_code_of(record))
        if queue.tail_is_long:
            with contextlib.suppress(StoreFull):  # it stays in memory
                queue.flush()

    def _lose_until(self, queue: ConsumeQueue, offset: int, position: int) -> bool:
        """Names the messages that are lost before an offset. False if that cannot be one: an entry is written for each lost
        message."""
        if queue.begin < queue.next and offset - queue.next > self._most_lost:
            return False
        if queue.next < offset:
            self._lost.append(Lost(queue.topic, queue.queue_id, queue.next, offset))
            queue.lose_until(offset, position)
        return True
