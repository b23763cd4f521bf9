"""`Store`: opens the data folder, appends to the commit log, expires segments, and syncs to the device."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import structlog

from ...protocol import fast
from ...protocol.bodies import SLICE
from ...protocol.codes import SYS_BORNHOST_V6, SYS_STOREHOST_V6
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import (
    BEGIN_BYTES,
    CHECKSUM_BYTES,
    MAX_RECORD_BYTES,
    Piece,
    Record,
    Shared,
    encode_record,
    encode_records,
    host_flags,
)
from ...protocol.names import topic_fault
from ..config import (
    DAMAGE_ASIDE_BYTES,
    DELETE_LIMIT,
    MAX_CLOCK_DOUBT_S,
    MAX_OPEN_SEGMENTS,
    RETENTION_JUMP_S,
    ROOM_BYTES,
    BrokerConfig,
)
from ..runtime.clock import MACHINE, Clock
from ..runtime.jobs import Call, Device, Job, make_all, run
from . import disk
from . import log as marks
from .files import Folder, OpenFiles, StoreError, StoreFailed, StoreFull, read_state, replace_state
from .index import TAIL_ENTRIES, ConsumeQueue, Reader, Search
from .journals import AppendedFile
from .log import CommitLog, Damage, Marks
from .recovery import Recovered, Recovery, checkpoint_text, read_checkpoint

log = structlog.get_logger("rocketlet.store")
flusher_log = structlog.get_logger("rocketlet.flusher")


# ------------------------------------------------------------------------------
# The commit log and its indexes: append, read, search, expire.
#
# `stage` determines position, offset and bytes of a message, and `commit` writes all staged messages in one append. The
# caller of `stage` must commit before anything else reads the store.


Carry = Callable[[int], Job[int]]

_HOST_FLAGS: Final = SYS_BORNHOST_V6 | SYS_STOREHOST_V6
# a record with larger properties gets no mark
_MARKED_PROPERTIES: Final = MAX_PROPERTY_BYTES - CHECKSUM_BYTES - BEGIN_BYTES
NOTHING_DELETED: Final[Mapping[str, int]] = {}
_NO_HOST: Final = bytes(8)  # 0.0.0.0:0


class Store:
    """A data folder, opened by this process. `now_ms` is the store time of staged messages."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        store_host: bytes = _NO_HOST,
        tag_code_of: Callable[[Record], int],
        open_files: int = MAX_OPEN_SEGMENTS,
        is_synced: bool = False,
        clock: Clock = MACHINE,
    ) -> None:
        self._time_ms = clock.time_ms
        self.folder = Folder(folder)
        self.folder.empty_removed()
        self.store_host = store_host
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._of_topic: dict[str, list[ConsumeQueue]] = {}
        self.tag_code_of = tag_code_of
        self._open_files = OpenFiles(open_files)
        self._is_synced = is_synced
        self._marks = Marks(read_state(folder / marks.FILE, is_derivable=True))
        self._log = CommitLog(folder, segment_bytes, self._open_files, self._marks, is_synced=is_synced)
        self._staged: list[bytes] = []  # records in pieces; each piece is a message or a batch
        # the queue of each piece; `_staged_counts` has its number of messages
        self._staged_queues: list[ConsumeQueue] = []
        self._staged_counts: list[int] = []
        self._deletions = 0
        self._left: set[str] = set()  # deleted topics whose index files could not be moved away
        self._next = self._log.end
        self.now_ms = 0
        self._unflushed = 0  # messages since the lengths of the queues' tails were checked
        self._checkpointed = (-1, -1, False)
        self._reader = Reader(self._log, self.queues)
        self.fetch = self._reader.fetch
        self.take_pulls = self._reader.take_pulls
        self.entries_ahead = self._reader.entries_ahead
        self.message = self._reader.message
        self.is_indexed = self._reader.is_indexed
        self.record_at = self._reader.record_at
        self.record_bytes_at = self._reader.record_bytes_at
        self.store_time_ms = self._reader.store_time_ms
        self.offset_by_time = self._reader.offset_by_time
        self.first_not_before = self._reader.first_not_before
        self.earliest_ms = self._reader.earliest_ms
        self.fault: str | None = None
        self.room = WriteAvailability(folder)

    # Opening and closing

    def recover(
        self,
        topics: Iterable[tuple[str, int]],
        *,
        deleted: Mapping[str, int] = NOTHING_DELETED,
        knows_topics: bool = True,
        rebuilds: bool = False,
    ) -> Recovered:
        """Make the log and the indexes consistent.

        Args:
            topics: names of the known topics, with the position at which each was created
            deleted: names of deleted topics, with the position at which each was deleted; their earlier records are not
                indexed again
            knows_topics: True if `topics` contains every topic created before the last checkpoint; False if the file of
                topics was lost, so that all topics in the log are added
            rebuilds: True to rebuild all indexes
        """
        since = dict(topics)
        checkpoint = read_checkpoint(read_state(self.folder.path / "checkpoint.json", is_derivable=True))
        on_disk = self.folder.queues()
        recovery = Recovery(self._log, self, since, deleted, knows_topics=knows_topics)
        found = recovery.run(checkpoint, on_disk, rebuilds=rebuilds)
        self._put_aside(found)
        self._next = self._log.end
        for queue in self.queues.values():
            queue.expire_before(self._log.begin)
            queue.drop_expired()
        for key in on_disk:
            if key not in self.queues:  # its topic was deleted
                ConsumeQueue(*key, self.folder.index_of(*key), self._open_files).delete()
        if checkpoint is not None and found == Recovered():
            self._checkpointed = (self._log.end, len(self.queues), False)
        self._save_recovered()
        self._renew_marks()
        return found

    def _put_aside(self, found: Recovered) -> None:
        """Save the damaged and torn bytes of the log in `damaged`, up to DAMAGE_ASIDE_BYTES of each part, and truncate a torn
        end."""
        for position, size in (*found.damage, Damage(self._log.end - found.torn_bytes, found.torn_bytes)):
            data = (
                self._log.read_up_to_damage(position, min(size, DAMAGE_ASIDE_BYTES))
                if position >= self._log.begin
                else b""
            )
            if data:
                self.folder.put_aside(f"commitlog-{position:020d}", data)
        if found.torn_bytes:
            self._log.truncate(self._log.end - found.torn_bytes)

    def _save_recovered(self) -> None:
        try:
            self.checkpoint()
        except StoreFull as error:
            log.error("recovered_state_not_saved", reason=str(error), hint="the store can be read only")

    def _renew_marks(self) -> None:
        try:
            self._marks.renew(self.folder.path, self._log.begin, self._log.end, sync=self._is_synced)
        except StoreFull as error:
            log.error("marks_not_renewed", reason=str(error), hint="free space, then start the broker again")

    def checkpoint(self, sync: bool = False, *, closes: bool = False) -> None:
        """Write a checkpoint in one step, like `checkpointing`."""
        run(self.checkpointing(sync, closes=closes))

    def checkpointing(self, sync: bool = False, *, closes: bool = False) -> Job[None]:
        """Write everything committed so far to the index files, and record this in the checkpoint. Do nothing if nothing has
        changed, or if the store has failed. Raises StoreFull.

        Args:
            sync: True to sync the log and the checkpoint to the device, unless nothing has changed since the last checkpoint
            closes: True to sync the index files as well. Without it, indexes that are lost in a power failure are
                rebuilt.
        """
        state = (self._log.end, len(self.queues), closes)
        fault = self.folder.fault()
        if fault is not None:
            self.fail(fault)
        if self.fault is not None or self._checkpointed == state:
            return
        yield from self._save_checkpoint(None, sync=sync or closes, closes=closes)
        self._checkpointed = state

    def _save_checkpoint(self, begin: int | None, *, sync: bool, closes: bool = False) -> Job[None]:
        """Write the checkpoint. Messages that arrive meanwhile may be in the indexes already; the next start reads the
        log from `position`."""
        entries: list[bytes] = []
        deletions = -1
        while deletions != self._deletions:  # a topic that is deleted meanwhile must not be in the checkpoint
            deletions, position = self._deletions, self._log.end
            entries = yield from self._entries(closes)
        end = self._log.end
        yield from self.syncing(sync)
        content = checkpoint_text(position, end, self._log.begin if begin is None else begin, b",".join(entries))
        yield partial(replace_state, self.folder.path / "checkpoint.json", content, sync=sync)

    def _entries(self, closes: bool) -> Job[list[bytes]]:
        """Flush the index of each queue, and return the queues' entries in the checkpoint. Stop if a topic is deleted
        meanwhile; the caller then calls this again."""
        entries: list[bytes] = []
        deletions = self._deletions
        for number, queue in enumerate(list(self.queues.values()), 1):
            wrote = self.flush_index(queue, sync=closes)
            entries.append(queue.checkpoint_entry)
            if wrote or number % SLICE == 0:
                yield None
            if deletions != self._deletions:
                break
        return entries

    def syncing(self, sync: bool = True) -> Job[None]:
        """Sync everything committed to the device, if `sync` is True and the store has not failed. Raises StoreFailed."""
        if not sync or self.fault is not None:
            return
        if not self._log.is_synced_apart:
            try:
                self._log.sync()
            except StoreFailed as error:
                self.fail(str(error))
                raise
            return
        try:
            # In one call, because messages that are acknowledged from now on depend on all of these syncs, and wait for
            # the same thread.
            yield partial(make_all, self._log.syncs())
        except OSError as error:
            self.fail(f"the commit log cannot be synced: {error.strerror}")
            raise StoreFailed(str(self.fault)) from error

    def fail(self, reason: str) -> None:
        """Stop all writes, because it is unknown which earlier writes are on the device. `fault` has the reason."""
        if self.fault is None:
            self.fault = f"the broker has stopped writing: {reason}; check the disk, then start it again"
            log.critical("store_stopped_writing", reason=reason, hint="check the disk, then start the broker again")

    def close(self) -> None:
        self._log.close()
        self._open_files.close()
        self.folder.unlock()

    # Queues

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, and create it if it does not exist.

        Raises:
            StoreError: the topic or the queue id is illegal
            StoreFull: files of a deleted topic of this name cannot be removed
        """
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            fault = topic_fault(topic)
            if fault or queue_id < 0:
                raise StoreError(f"no queue {queue_id} of this topic: {fault or 'queues count from 0'}")
            self._remove_left(topic)
            queue = ConsumeQueue(topic, queue_id, self.folder.index_of(topic, queue_id), self._open_files)
            self.queues[topic, queue_id] = queue
            self._of_topic.setdefault(topic, []).append(queue)
        return queue

    def queues_of(self, topic: str) -> list[ConsumeQueue]:
        """Return the queues of a topic that have an index, even if the topic has fewer queues now."""
        return list(self._of_topic.get(topic, ()))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic's queues in one step, like `deleting`."""
        run(self.deleting(topic))

    def deleting(self, topic: str) -> Job[None]:
        """Remove a topic's queues immediately, so that later checkpoints do not contain them, and return a job that
        writes a checkpoint and removes the files.

        The topic may be recreated meanwhile. Raises StoreFull.
        """
        for queue in self._of_topic.pop(topic, ()):
            del self.queues[topic, queue.queue_id]
            queue.close()
        self._deletions += 1
        try:
            return self._removing(topic, self.folder.set_aside(topic))
        except OSError as error:
            log.error("indexes_not_set_aside", topic=topic, reason=str(error), hint="they are removed in their place")
            self._left.add(topic)
            return self._removing(topic, None)

    def _removing(self, topic: str, aside: Path | None) -> Job[None]:
        yield from self.checkpointing()
        if aside is not None:
            yield partial(disk.remove_folder, aside)
        self._remove_left(topic)

    def _remove_left(self, topic: str) -> None:
        """Remove index files of a deleted topic that are where a recreated topic has its files. Raises StoreFull."""
        if topic not in self._left:
            return
        folder = self.folder.indexes_of(topic)
        disk.remove_folder(folder)
        if disk.is_there(folder):
            raise StoreFull(f"the index files of the deleted topic {topic} cannot be removed; remove {folder}")
        self._left.discard(topic)

    @property
    def end(self) -> int:
        """The commit log position after the last record, including staged records."""
        return self._next

    @property
    def begin(self) -> int:
        return self._log.begin

    def write_fault(self) -> str | None:
        """Return the reason why messages are refused; None if they are accepted."""
        return self.fault or self.room.now()

    def disk_ratio(self) -> float:
        """Return the used fraction (0 to 1) of the data folder's disk."""
        return disk.used_ratio(self.folder.path)

    @property
    def damaged(self) -> frozenset[tuple[str, int, int]]:
        return self._reader.damaged

    def syncs(self) -> list[Call]:
        """Return the calls that sync everything committed to the device, for the thread that waits for the device."""
        return self._log.syncs()

    @property
    def written(self) -> int:
        return self._log.end

    # Appending

    def begin_batch(self) -> int:
        """Set the store time of the messages staged next, and return it in ms since the epoch."""
        self.now_ms = self._time_ms()
        return self.now_ms

    def stage(
        self,
        queue: ConsumeQueue,
        body: bytes,
        properties: bytes,
        tag_code: int,
        flag: int,
        sys_flag: int,
        born_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[int, int]:
        """Stage a message, and return its commit log position and queue offset. `commit` writes the record to the log.

        If this raises, nothing is staged.
        """
        position = self._next
        store_host = self.store_host
        if not self._staged and len(properties) <= _MARKED_PROPERTIES:
            properties += self._marks.mark(position)
        # inlined `_flags`, because a call per message is expensive
        is_v4 = len(born_host) + len(store_host) == 16
        sys_flag = sys_flag & ~_HOST_FLAGS if is_v4 else _flags(sys_flag, born_host, store_host)
        record = encode_record(
            queue.queue_id, flag, queue.next, position, sys_flag, born_ms, born_host, self.now_ms, store_host,
            reconsume_times, prepared_offset, body, queue.topic_record, properties,
        )  # fmt: skip
        size = len(record)
        if size > MAX_RECORD_BYTES:  # recovery would treat it as damaged
            raise StoreError(f"the message takes {size} bytes; maximum {MAX_RECORD_BYTES}")
        offset = queue.append(position, size, tag_code)  # first, because it raises for a tag code beyond 64 bits
        self._staged.append(record)
        self._staged_queues.append(queue)
        self._staged_counts.append(1)
        self._next = position + size
        return position, offset

    def stage_batch(
        self,
        queue: ConsumeQueue,
        pieces: Iterable[Piece],
        sys_flag: int,
        born_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
    ) -> tuple[list[int], int]:
        """Stage the messages of a batch next to each other, and return their commit log positions and the first queue
        offset. `commit` writes the messages.

        If this raises, for example MessageError for a malformed body, nothing is staged.
        """
        store_host = self.store_host
        flags = _flags(sys_flag, born_host, store_host)
        of_all = (flags, born_ms, born_host, self.now_ms, store_host, reconsume_times)
        shared = Shared(queue.topic_record, queue.queue_id, *of_all)
        data, positions, sizes, tag_codes = encode_records(pieces, shared, queue.next, self._next, self._marks.mark)
        offset = queue.extend(positions, sizes, tag_codes)
        self._staged.append(data)
        self._staged_queues.append(queue)
        self._staged_counts.append(len(positions))
        self._next += len(data)
        return positions, offset

    def stage_sends(
        self,
        data: bytes,
        at: int,
        account: bytes,
        queues: dict[bytes, tuple[ConsumeQueue, bytes]],
        born_host: bytes,
        broker_texts: tuple[bytes, bytes, bytes, bytes],
        limits: tuple[int, ...],
    ) -> fast.EncodedSends | None:
        """Stage the messages of the sends from a position of the data on, with the compiled module. `commit` writes the
        messages.

        Return None, with nothing staged, if the module declines the first send, or if one of the queues was deleted.
        """
        first_mark = b"" if self._staged else self._marks.mark(self._next)
        encoded = fast.take_sends(
            data,
            at,
            account,
            queues,
            self._next,
            self.now_ms,
            first_mark,
            self._marks.mark,
            born_host,
            broker_texts,
            limits,
        )
        if encoded is None or not all(self._has(queue) for queue, _, _, _ in encoded.queues):
            return None
        records = encoded.records
        for queue, entries, count, put_bytes in encoded.queues:
            queue.extend_packed(entries, count, put_bytes)
            self._staged.append(records)  # all records are in the piece of the first queue
            self._staged_queues.append(queue)
            self._staged_counts.append(count)
            records = b""
        self._next += len(encoded.records)
        return encoded

    @property
    def segments(self) -> int:
        """The number of the commit log's files."""
        return self._log.segments

    @property
    def staged(self) -> int:
        """The number of staged pieces: messages, batches, and for each queue the sends that one call of the compiled module
        has staged."""
        return len(self._staged)

    def roll_back(self, kept: int = 0) -> None:
        """Discard the messages staged after the first `kept` pieces."""
        while len(self._staged) > kept:
            self._next -= len(self._staged.pop())
            self._staged_queues.pop().remove_last(self._staged_counts.pop())

    def commit(self) -> list[ConsumeQueue]:
        """Write the staged messages, and return the queue of each piece. If this raises, for example StoreFull, all
        staged messages are discarded."""
        try:
            if self.fault is not None:
                raise StoreFailed(self.fault)
            self._log.append(b"".join(self._staged) if len(self._staged) > 1 else self._staged[0])
        except BaseException as error:
            self.roll_back()
            if isinstance(error, StoreFailed):
                self.fail(str(error))
            elif isinstance(error, StoreFull):
                self.room.write_failed(error)
            raise
        self.room.wrote()
        queues, self._staged, self._staged_queues = self._staged_queues, [], []
        self._unflushed += sum(self._staged_counts)
        self._staged_counts = []
        if self._unflushed >= TAIL_ENTRIES:
            self._flush_long_tails()
        return queues

    def _flush_long_tails(self) -> None:
        self._unflushed = 0
        for queue in self.queues.values():
            if queue.tail_is_long:
                with contextlib.suppress(StoreFull):  # the tail stays in memory, and the next flush retries
                    self.flush_index(queue)

    def flush_index(self, queue: ConsumeQueue, *, sync: bool = False) -> bool:
        """Flush a queue's index, and sync it if `sync` is True; return False if there was nothing to flush. Raises
        StoreFull. If the device failed, all writes stop."""
        try:
            wrote = queue.flush()
            if sync:
                queue.sync()
        except StoreFailed as error:
            self.fail(str(error))
            raise
        return wrote

    # Reading

    def read_log(self, position: int, size: int) -> bytes:
        """Return bytes of the commit log, unchecked. Raises StoreError for a dropped position."""
        return self._log.read(position, size)

    def search(self, topic: str) -> Search:
        """Return a search for messages of the topic that contain a text."""
        return Search(self._log, self._reader, self._of_topic.get(topic, ()), self.queues)

    def _has(self, queue: ConsumeQueue) -> bool:
        return self.queues.get((queue.topic, queue.queue_id)) is queue

    # Expiry

    def expire(self, *, older_than_s: float, total_bytes: int | None) -> int:
        """Drop expired segments in one step, like `expiring`."""
        return run(self.expiring(Retention(older_than_s, total_bytes)))

    def expiring(self, retention: Retention, carry: Carry | None = None) -> Job[int]:
        """Drop the oldest segments while they are expired, up to DELETE_LIMIT and never the last one. Return their number.

        Args:
            retention: decides which segments are expired
            carry: stores messages before a position again at the end of the log if they are still needed, and returns
                the position up to which it did so
        """
        starts = self._log.starts
        dropped = 0
        most = min(len(starts) - 1, DELETE_LIMIT)
        while dropped < most and retention.expires(self._log, starts[dropped]):
            dropped += 1
        if dropped:
            free_before = starts[dropped] if carry is None else (yield from carry(starts[dropped]))
            dropped = max(bisect_right(starts, free_before) - 1, 0)
            yield from self._drop_before(starts[dropped])
        return dropped

    def _drop_before(self, position: int) -> Job[None]:
        queues = list(self.queues.values())
        for number, queue in enumerate(queues, 1):
            queue.expire_before(position)
            if number % SLICE == 0:
                yield None
        # recorded before the segments are dropped, so that a start in between does not count their messages as lost
        with contextlib.suppress(StoreFull):
            yield from self._save_checkpoint(position, sync=False)
        while self._log.begin < position:
            self._log.drop_first()
            yield None
        for number, queue in enumerate(queues, 1):
            queue.drop_expired()
            if number % SLICE == 0:
                yield None


def _flags(sys_flag: int, born_host: bytes, store_host: bytes) -> int:
    """Return the sys flag to store: the flags of the hosts' address families depend on the stored addresses, not on the
    client's flags."""
    sys_flag &= ~_HOST_FLAGS
    return sys_flag if len(born_host) + len(store_host) == 16 else sys_flag | host_flags(born_host, store_host)


# ------------------------------------------------------------------------------
# `--flush sync`: responses wait until the messages, topics, groups, recalls and popped messages that they confirm are on the
# device; responses to commits of offsets and to locks do not wait. One sync runs at a time, and serves all responses that
# were waiting before it started.
#
# The data is in the commit log and in the journals of topics, groups, recalls and popped messages. After a failed sync it is
# unknown what the device has, even if a later sync succeeds ("fsyncgate"). The store then accepts no more writes, and
# `otherwise` is called for every waiting response.


Action = Callable[[], None]


class Flusher:
    """Syncs the store and the journals to the device, and runs actions after that."""

    def __init__(self, store: Store, sources: Iterable[AppendedFile], device: Device) -> None:
        self._store = store
        self._sources = tuple(sources)
        self._device = device
        self._waiting: list[tuple[Action, Action]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def written(self) -> int:
        """A number that increases with everything that must be synced before it may be acknowledged."""
        return self._store.end + sum(source.written for source in self._sources)

    def after_sync(self, action: Action, otherwise: Action) -> None:
        """Call `action` after everything written until now is on the device, or `otherwise` if the sync fails."""
        self._waiting.append((action, otherwise))
        if self._task is None:
            self._task = asyncio.create_task(self._sync_all(), name="flush")

    async def _sync_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                is_synced = await self._sync()
                for action, otherwise in waiting:
                    _call(action if is_synced else otherwise)
        finally:
            self._task = None

    async def _sync(self) -> bool:
        try:
            await self._device.make(self._calls())
        except OSError as error:
            self._store.fail(f"written data cannot be synced: {error.strerror}")
        return self._store.fault is None

    def _calls(self) -> list[Call]:
        """Return the calls of all files, journals first, because the log may contain messages of a topic that only a
        journal contains."""
        if self._store.fault is not None:
            return []
        return [*(call for source in self._sources for call in source.syncs()), *self._store.syncs()]

    async def drain(self) -> None:
        """Wait until no action is waiting."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _call(action: Action) -> None:
    try:
        action()
    except Exception:  # a defect of the action; later actions wait for the same sync
        flusher_log.exception("answer_failed")


# ------------------------------------------------------------------------------
# Availability of the disk for writes. A broker whose disk is full refuses messages, and logs the start and the end of
# this state once.


_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class WriteAvailability:
    """Availability of the disk. `lack` is the reason why the last write was refused, or None; `refused` is the number
    of refused writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free_bytes = 0
        self.lack: str | None = None
        self.refused = 0

    def write_failed(self, error: StoreFull) -> None:
        self.refused += 1
        if self.lack is None:
            free_bytes = self._free_now()
            log.error(
                "writes_refused", reason=str(error), free_bytes=free_bytes, hint="free space on the broker's disk"
            )
        self.lack = f"the disk accepts no writes: {error}; free space"
        self._free_bytes = self._free_now()

    def save_failed(self, error: StoreFull) -> None:
        """Handle the failed save of one file. Messages are refused only if the disk is full, because otherwise other
        files may still be writable."""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            self.write_failed(error)

    def wrote(self) -> None:
        if self.lack is not None:
            self.lack = None
            log.info("writes_resumed", free_bytes=self._free_now())

    def now(self) -> str | None:
        """Return `lack`, or None if ROOM_BYTES were freed since. Without this check, the state might never end, because load
        balancers send nothing to a broker that is not ready."""
        if self.lack is not None and self._free_now() - self._free_bytes >= ROOM_BYTES:
            self.wrote()
        return self.lack

    def size_and_free_bytes(self) -> tuple[int, int]:
        return disk.size_and_free_bytes(self._folder)

    def _free_now(self) -> int:
        try:
            return disk.free_bytes(self._folder)
        except OSError:  # the folder is missing, which the checkpoint reports
            return 0


# ------------------------------------------------------------------------------
# Retention: which segments expire, by the machine's clock unless it has just jumped ahead.
#
# A wall clock that is set ahead by mistake, for example by 30 days, would make everything expire immediately and
# irrevocably. A comparison with the monotonic clock distinguishes such a jump from elapsed time. For as long as the
# jump is wide, at most a day, retention uses the time before the jump. After that, either the machine was really
# suspended, or an operator had a day to read the log event.


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention rule: a segment expires if it was last written before a time, or if more than `total_bytes` of the log
    follow its start."""

    older_than_s: float
    total_bytes: int | None

    @classmethod
    def of(cls, config: BrokerConfig, now_s: float, waiting_bytes: int) -> Self:
        """Return the rule of the configuration. Messages that wait for their delivery time are kept in addition to the
        retained bytes."""
        total_bytes = None if config.retain_bytes is None else config.retain_bytes + waiting_bytes
        return cls(now_s - config.retain_hours * 3600, total_bytes)

    def expires(self, log: CommitLog, start: int) -> bool:
        is_too_old = log.modified_s(start) < self.older_than_s
        return is_too_old or (self.total_bytes is not None and log.end - start > self.total_bytes)


class RetentionTime:
    """The time for retention, from a clock that is read periodically."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = self._wall_ahead_s()
        self._ahead_s = 0.0
        self._doubted_until_s = 0.0

    def _wall_ahead_s(self) -> float:
        return self._clock.time_s() - self._clock.monotonic_s()

    @property
    def ahead_s(self) -> float:
        """Number of seconds that the wall clock jumped ahead, while retention uses the time before the jump; otherwise 0."""
        return self._ahead_s if self._clock.monotonic_s() < self._doubted_until_s else 0.0

    def now_s(self) -> float:
        offset_s, now_s = self._wall_ahead_s(), self._clock.monotonic_s()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if now_s >= self._doubted_until_s:
            self._ahead_s = 0.0
        if jump_s > RETENTION_JUMP_S:
            self._ahead_s += jump_s
            self._doubted_until_s = now_s + min(self._ahead_s, MAX_CLOCK_DOUBT_S)
            self._log_jump(jump_s, self._doubted_until_s - now_s)
        elif jump_s < 0:  # the clock was set back
            self._ahead_s = max(self._ahead_s + jump_s, 0.0)
        return self._clock.time_s() - self._ahead_s

    def _log_jump(self, jump_s: float, wait_s: float) -> None:
        hint = "until then, segments expire by the time before the jump; if the machine's clock is wrong, set it back"
        log.error("clock_set_ahead", ahead_s=round(jump_s), wait_s=round(wait_s), hint=hint)
