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
from typing import Final, Protocol, Self

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
from ..runtime import MACHINE, Call, Clock, Device, Job, make_all, run
from . import disk
from . import log as marks
from .files import Folder, OpenFiles, StoreError, StoreFailed, StoreFull, read_state, replace_state
from .index import TAIL_ENTRIES, ConsumeQueue, Reader, Search
from .log import CommitLog, Damage, Marks
from .recovery import Recovered, Recovery, checkpoint_text, read_checkpoint

log = structlog.get_logger("rocketlet.store")
flusher_log = structlog.get_logger("rocketlet.flusher")


# ------------------------------------------------------------------------------
# The commit log and its indexes together: append, read, search, expire.
#
# The way of a message: `stage` gives it its place and its bytes, `commit` writes everything staged in one append. The
#     caller of
# `stage` commits before anything else reads the store; the broker does so once per socket read.


Carry = Callable[[int], Job[int]]

_HOST_FLAGS: Final = SYS_BORNHOST_V6 | SYS_STOREHOST_V6
_MARKED_PROPERTIES: Final = MAX_PROPERTY_BYTES - CHECKSUM_BYTES - BEGIN_BYTES  # a record with more goes without a mark
NOTHING_DELETED: Final[Mapping[str, int]] = {}
_NO_HOST: Final = bytes(8)  # 0.0.0.0:0


class Store:
    """A data folder opened for this process. `now_ms` is the store time of staged messages."""

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
        self._tag_code_of = tag_code_of
        self._open_files = OpenFiles(open_files)
        self._is_synced = is_synced
        self._marks = Marks(read_state(folder / marks.FILE, is_derivable=True))
        self._log = CommitLog(folder, segment_bytes, self._open_files, self._marks, is_synced=is_synced)
        self._staged: list[bytes] = []  # in pieces: a message, or a batch
        self._staged_queues: list[ConsumeQueue] = []  # a piece's queue; `_staged_counts` has its messages
        self._staged_counts: list[int] = []
        self._deletions = 0
        self._left: set[str] = set()  # deleted topics whose index files could not be taken out of the way
        self._next = self._log.end
        self.now_ms = 0
        self._unflushed = 0  # messages since the queues' tails were checked
        self._checkpointed = (-1, -1, False)
        self._reader = Reader(self._log, self.queues)
        self.fetch = self._reader.fetch
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
        """Makes log and indexes agree. `topics` are the known names with the position since which each exists.

        deleted: names with the position at which each was deleted; what the log has before does not come back.
        knows_topics: there are no others, but those made since the last checkpoint; False if their file was lost. All that
        the log has are then taken in.
        rebuilds: all indexes are rebuilt.
        """
        since = dict(topics)
        checkpoint = read_checkpoint(read_state(self.folder.path / "checkpoint.json", is_derivable=True))
        if not self._log.segments:
            self._log.summed_from = 0
        elif checkpoint is not None and checkpoint.summed_from is not None:
            self._log.summed_from = checkpoint.summed_from
        on_disk = self.folder.queues()
        recovery = Recovery(self._log, self.queue, self._tag_code_of, since, deleted, knows_topics=knows_topics)
        found = recovery.run(checkpoint, on_disk, rebuilds=rebuilds)
        self._put_aside(found)
        self._next = self._log.end
        self._log.summed_from = min(self._log.summed_from, self._log.end)
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
        """Keeps bytes of the log that are no records aside, and cuts the torn end off."""
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

    def sync_log(self, sync: bool = True) -> None:
        """With `sync`, returns when everything committed is on the device. Raises StoreFailed."""
        if sync and self.fault is None:
            try:
                self._log.sync()
            except StoreFailed as error:
                self.fail(str(error))
                raise

    def checkpoint(self, sync: bool = False, *, closes: bool = False) -> None:
        """Like `checkpointing`, but in one step."""
        run(self.checkpointing(sync, closes=closes))

    def checkpointing(self, sync: bool = False, *, closes: bool = False) -> Job[None]:
        """Writes everything committed so far to the index files, and says so in the checkpoint. Raises StoreFull.

        sync: the log and the checkpoint are on the device. closes: the index files are, too; without it, indexes that are
        lost in a power cut are rebuilt."""
        state = (self._log.end, len(self.queues), closes)
        fault = self.folder.fault()
        if fault is not None:
            self.fail(fault)
        if self.fault is not None or self._checkpointed == state:
            return
        yield from self._save_checkpoint(None, sync=sync or closes, closes=closes)
        self._checkpointed = state

    def _save_checkpoint(self, begin: int | None, *, sync: bool, closes: bool = False) -> Job[None]:
        """Messages that come meanwhile may be in the indexes already; the next start reads the log from `position`."""
        entries: list[bytes] = []
        deletions = -1
        while deletions != self._deletions:  # a topic that was deleted meanwhile must not come back
            deletions, position = self._deletions, self._log.end
            entries = yield from self._entries(closes)
        end = self._log.end
        yield from self.syncing(sync)
        content = checkpoint_text(
            position, end, self._log.begin if begin is None else begin, self._log.summed_from, b",".join(entries)
        )
        yield partial(replace_state, self.folder.path / "checkpoint.json", content, sync=sync)

    def _entries(self, closes: bool) -> Job[list[bytes]]:
        """Flushes the index of each queue. Returns its entries in the checkpoint."""
        entries: list[bytes] = []
        deletions = self._deletions
        for number, queue in enumerate(list(self.queues.values()), 1):
            wrote = queue.flush()
            if closes:
                queue.sync()
            entries.append(queue.checkpoint_entry)
            if wrote or number % SLICE == 0:
                yield None
            if deletions != self._deletions:
                break
        return entries

    def syncing(self, sync: bool = True) -> Job[None]:
        """With `sync`, puts everything committed on the device. Raises StoreFailed."""
        if not sync or self.fault is not None:
            return
        if not self._log.is_synced_apart:
            self.sync_log()
            return
        try:
            # As one call: messages acknowledged from now on count on all of them, and wait behind it in the same line.
            yield partial(make_all, self._log.syncs())
        except OSError as error:
            self.fail(f"the commit log cannot be synced: {error.strerror}")
            raise StoreFailed(str(self.fault)) from error

    def fail(self, reason: str) -> None:
        """Stops all writing, because nobody knows which writes the device holds. `fault` says why."""
        if self.fault is None:
            self.fault = f"the broker writes no more: {reason}; check the disk, then start it again"
            log.critical("store_stopped_writing", reason=reason, hint="check the disk, then start the broker again")

    def close(self) -> None:
        self._log.close()
        self._open_files.close()
        self.folder.unlock()

    # Queues

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if it is not there. Raises StoreError if its name or number can name no folder, StoreFull if files
        of a deleted topic of this name are in the way."""
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

    def delete_topic(self, topic: str) -> None:
        """Like `deleting`, but in one step."""
        run(self.deleting(topic))

    def deleting(self, topic: str) -> Job[None]:
        """Remove a topic's queues immediately, so that no checkpoint has them from now on; the job writes one and removes the
        files. The topic may be recreated meanwhile. Raises StoreFull."""
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
        """Remove what is left of a deleted topic where a recreated topic has its files. Raises StoreFull."""
        if topic not in self._left:
            return
        folder = self.folder.indexes_of(topic)
        disk.remove_folder(folder)
        if disk.is_there(folder):
            raise StoreFull(f"the index files of the deleted topic {topic} cannot be removed; remove {folder}")
        self._left.discard(topic)

    @property
    def end(self) -> int:
        """The commit log position after the last record, staged ones included."""
        return self._next

    @property
    def begin(self) -> int:
        return self._log.begin

    def write_fault(self) -> str | None:
        """Why messages are refused; None if they are not."""
        return self.fault or self.room.now()

    def disk_ratio(self) -> float:
        """How full the disk of the data folder is, 0 to 1."""
        return disk.used_ratio(self.folder.path)

    @property
    def damaged(self) -> frozenset[tuple[str, int, int]]:
        """The damaged messages that were met since the start: topic, queue, offset."""
        return self._reader.damaged

    def syncs(self) -> list[Call]:
        """The calls after which everything committed is on the device, for the one thread that waits for it."""
        return self._log.syncs()

    @property
    def written(self) -> int:
        return self._log.end

    # Appending

    def begin_batch(self) -> int:
        """Sets the store time of the next staged messages, ms."""
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
        """Gives a message its place: commit log position and queue offset. It exists after `commit`.

        Whatever this raises, nothing is staged."""
        position = self._next
        store_host = self.store_host
        if not self._staged and len(properties) <= _MARKED_PROPERTIES:
            properties += self._marks.mark(position)
        # as `_flags`, whose call would cost every message
        is_v4 = len(born_host) + len(store_host) == 16
        sys_flag = sys_flag & ~_HOST_FLAGS if is_v4 else _flags(sys_flag, born_host, store_host)
        record = encode_record(
            queue.queue_id, flag, queue.next, position, sys_flag, born_ms, born_host, self.now_ms, store_host,
            reconsume_times, prepared_offset, body, queue.topic_record, properties,
        )  # fmt: skip
        size = len(record)
        if size > MAX_RECORD_BYTES:  # recovery would take it for damage
            raise StoreError(f"the message takes {size} bytes; {MAX_RECORD_BYTES} are stored at most")
        offset = queue.append(position, size, tag_code)  # first, because it refuses a tag code beyond 64 bits
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
        """Gives the messages of a batch their places, next to each other: commit log positions and the first queue
        offset. They exist after `commit`.

        Whatever this raises, such as MessageError for a malformed body, nothing is staged."""
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
        account: bytes,
        queues: dict[bytes, tuple[ConsumeQueue, bytes]],
        born_host: bytes,
        broker_texts: tuple[bytes, bytes, bytes, bytes],
        limits: tuple[int, ...],
    ) -> fast.EncodedSends | None:
        """Give the messages of the sends at the start of the data their places, with the compiled module. They exist after
        `commit`. Return None, with nothing staged, if the first send is declined."""
        first_mark = b"" if self._staged else self._marks.mark(self._next)
        taken = fast.take_sends(
            data,
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
        if taken is None or not all(self._has(queue) for queue, _, _, _ in taken.queues):
            return None
        records = taken.records
        for queue, entries, count, put_bytes in taken.queues:
            queue.extend_packed(entries, count, put_bytes)
            self._staged.append(records)  # all of them with the first queue
            self._staged_queues.append(queue)
            self._staged_counts.append(count)
            records = b""
        self._next += len(taken.records)
        return taken

    @property
    def staged(self) -> int:
        """The number of pieces in which messages are staged: a batch is one."""
        return len(self._staged)

    def roll_back(self, kept: int = 0) -> None:
        """Forgets messages staged after the first `kept` pieces."""
        while len(self._staged) > kept:
            self._next -= len(self._staged.pop())
            self._staged_queues.pop().take_back(self._staged_counts.pop())

    def commit(self) -> list[ConsumeQueue]:
        """Writes the staged messages and returns their queues. If this raises, such as StoreFull, nothing of it is kept."""
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
                with contextlib.suppress(StoreFull):  # the index stays in memory, and the next flush tries again
                    queue.flush()

    # Reading

    def read_log(self, position: int, size: int) -> bytes:
        """Bytes of the commit log as they are. Raises StoreError for a dropped offset."""
        return self._log.read(position, size)

    def search(self, topic: str) -> Search:
        """A search for the topic's messages that hold a text."""
        return Search(self._log, self._reader, self._of_topic.get(topic, ()), self._has)

    def _has(self, queue: ConsumeQueue) -> bool:
        return self.queues.get((queue.topic, queue.queue_id)) is queue

    # Expiring

    def expire(self, *, older_than_s: float, total_bytes: int | None) -> int:
        """Like `expiring`, but in one step."""
        return run(self.expiring(Retention(older_than_s, total_bytes)))

    def expiring(self, retention: Retention, carry: Carry | None = None) -> Job[int]:
        """Drops the oldest segments as long as they expire. Returns how many.

        carry: stores needed messages before a position again at the end; returns the position up to which it did."""
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
        with contextlib.suppress(StoreFull):  # said before it is done: a start in between takes nothing for lost
            yield from self._save_checkpoint(position, sync=False)
        while self._log.begin < position:
            self._log.drop_first()
            yield None
        for number, queue in enumerate(queues, 1):
            queue.drop_expired()
            if number % SLICE == 0:
                yield None


def _flags(sys_flag: int, born_host: bytes, store_host: bytes) -> int:
    """The sys flag as stored: a client does not know which kinds of hosts are stored."""
    sys_flag &= ~_HOST_FLAGS
    return sys_flag if len(born_host) + len(store_host) == 16 else sys_flag | host_flags(born_host, store_host)


# ------------------------------------------------------------------------------
# `--flush sync`: answers wait until the data that they confirm is on the device. One sync at a time serves all that
# came before.
#
# That data is in the commit log and in the journals of topics and groups. After a failed sync nobody knows what the
# device holds, and a second sync may still succeed ("fsyncgate"). So the store takes nothing more, and every sender
# that waits gets an error.


Action = Callable[[], None]


class AppendedFile(Protocol):
    """A file that is appended to. `written` grows with each append."""

    @property
    def written(self) -> int: ...

    def syncs(self) -> list[Call]: ...


class Flusher:
    def __init__(self, store: Store, sources: Iterable[AppendedFile], device: Device) -> None:
        self._store = store
        self._sources = tuple(sources)
        self._device = device
        self._waiting: list[tuple[Action, Action]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def written(self) -> int:
        """Grows with everything that must be synced before it may be acknowledged."""
        return self._store.end + sum(source.written for source in self._sources)

    def after_sync(self, action: Action, otherwise: Action) -> None:
        """Calls `action` when everything written until now is on the device, `otherwise` if the sync fails."""
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
            self._failed(error)
        return self._store.fault is None

    def _calls(self) -> list[Call]:
        """Journals first: the log may hold messages of a topic that is new in them."""
        if self._store.fault is not None:
            return []
        return [call for source in (*self._sources, self._store) for call in source.syncs()]

    def _failed(self, error: OSError) -> None:
        self._store.fail(f"what was written cannot be synced: {error.strerror}")

    def sync(self) -> bool:
        """Sync immediately, while everybody waits. False if it failed."""
        try:
            for call in self._calls():
                call()
        except OSError as error:
            self._failed(error)
        return self._store.fault is None

    async def drain(self) -> None:
        """Returns when nobody waits any more."""
        while self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _call(action: Action) -> None:
    try:
        action()
    except Exception:  # a defect of ours: those behind it wait for the same sync
        flusher_log.exception("answer_failed")


# ------------------------------------------------------------------------------
# Whether the device takes writes. A broker whose disk is full refuses messages: it says so once, and its end.


_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class WriteAvailability:
    """`lack` is why the last write was refused, None if it was not; `refused` is how many were."""

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
        self.lack = f"the disk takes no more: {error}; free space"
        self._free_bytes = self._free_now()

    def save_failed(self, error: StoreFull) -> None:
        """One file of many could not be saved. The others may still be written, unless the disk is full."""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            self.write_failed(error)

    def wrote(self) -> None:
        if self.lack is not None:
            self.lack = None
            log.info("writes_resumed", free_bytes=self._free_now())

    def now(self) -> str | None:
        """`lack`, unless space was freed since: nobody may send to a broker that says it is not ready."""
        if self.lack is not None and self._free_now() - self._free_bytes >= ROOM_BYTES:
            self.wrote()
        return self.lack

    def size_and_free_bytes(self) -> tuple[int, int]:
        """The disk's size and its free bytes."""
        return disk.size_and_free_bytes(self._folder)

    def _free_now(self) -> int:
        try:
            return disk.free_bytes(self._folder)
        except OSError:  # the folder is gone, which the checkpoint reports
            return 0


# ------------------------------------------------------------------------------
# Which segments expire, and the time by which they do: the machine's, unless it has just jumped ahead.
#
# A wall clock that is set ahead by mistake, by 30 days say, would make everything expire immediately, and nothing brings
# that back. The monotonic clock distinguishes such a jump from elapsed time. For as long as the jump is wide, a day at
# most, the time before it counts on: then it was a machine that slept, or somebody had a day to see what the log
# says.


@dataclass(frozen=True, slots=True)
class Retention:
    """A segment expires that was last written before a time, or that begins before the last `total_bytes` of the log."""

    older_than_s: float
    total_bytes: int | None

    @classmethod
    def of(cls, config: BrokerConfig, now_s: float, waiting_bytes: int) -> Self:
        """Messages that wait for their time are kept until then, on top of the retained bytes."""
        total_bytes = None if config.retain_bytes is None else config.retain_bytes + waiting_bytes
        return cls(now_s - config.retain_hours * 3600, total_bytes)

    def expires(self, log: CommitLog, start: int) -> bool:
        is_too_old = log.modified_s(start) < self.older_than_s
        return is_too_old or (self.total_bytes is not None and log.end - start > self.total_bytes)


class RetentionTime:
    """Seconds since the epoch, by a clock that is read periodically."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = self._wall_ahead_s()
        self._ahead_s = 0.0
        self._doubted_until_s = 0.0

    def _wall_ahead_s(self) -> float:
        return self._clock.time_s() - self._clock.monotonic_s()

    @property
    def ahead_s(self) -> float:
        """How far the wall clock jumped, while the time before counts on; else 0."""
        return self._ahead_s if self._clock.monotonic_s() < self._doubted_until_s else 0.0

    def now_s(self) -> float:
        offset_s, now_s = self._wall_ahead_s(), self._clock.monotonic_s()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if now_s >= self._doubted_until_s:
            self._ahead_s = 0.0
        if jump_s > RETENTION_JUMP_S:
            self._ahead_s += jump_s
            self._doubted_until_s = now_s + min(self._ahead_s, MAX_CLOCK_DOUBT_S)
            self._say(jump_s, self._doubted_until_s - now_s)
        elif jump_s < 0:  # it was set back, or is being
            self._ahead_s = max(self._ahead_s + jump_s, 0.0)
        return self._clock.time_s() - self._ahead_s

    def _say(self, jump_s: float, wait_s: float) -> None:
        hint = "segments expire by the time before for so long; if the machine's clock is wrong, set it back"
        log.error("clock_set_ahead", ahead_s=round(jump_s), wait_s=round(wait_s), hint=hint)
