"""Recovery after a crash, inspection for `rocketlet fsck`, and backups of a data folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import orjson
from msgspec import Struct

from ...protocol.bodies import BodyError, shaped
from ...protocol.message import FIXED_BYTES, Record
from ...protocol.names import counted, topic_fault
from . import log as marks
from .files import Folder, OpenFiles, StoreError, StoreFull, check_format, read_state, state_fault
from .index import ENTRY, ENTRY_BYTES, ConsumeQueue, QueueCheckpoint
from .journals import journal_fault
from .log import CommitLog, Damage, Marks

# ------------------------------------------------------------------------------
# Recovery of the store at the broker's start. Recovery trusts the log, and checks the indexes.
#
# The checkpoint contains a commit log position before which the index files have every message, the first and last
# offset of each queue, and a sum of every index file. Recovery truncates the indexes to the checkpoint, and reads the
# log from that position on. An index that differs from the checkpoint is rebuilt from the whole log; the other indexes
# are kept.
#
# Where the log has no whole record, recovery searches for the next one. The bytes between are damaged: they are saved
# in the folder `damaged`, and logged. The bytes after the last whole record are treated as a torn write, which was not
# acknowledged: they are saved in `damaged` and truncated.
#
# Records of a deleted topic stay in the log. The position at which each topic was created (`since`), and the position
# at which it was deleted, keep them from being indexed again. Entries of a checkpoint that is older than either
# position belong to an earlier topic of the same name.


_FAR_BYTES: Final = 1 << 40  # an index entry farther than this after the log's end is invalid


class Lost(NamedTuple):
    """Messages of a queue that the checkpoint or later records prove, and that the log does not contain: offsets
    `begin` to `end` (exclusive)."""

    topic: str
    queue_id: int
    begin: int
    end: int


class Recovered(NamedTuple):
    """Result of a recovery.

    Attributes:
        records: number of records that were read
        torn_bytes: size of a torn write at the end of the log, which is truncated
        rebuilt: queues whose indexes were rebuilt, as `topic@queue id`
        damage: damaged parts of the log
        lost: lost messages
        unknown_topics: number of queues of each topic that is missing in the state file of topics
    """

    records: int = 0
    torn_bytes: int = 0
    rebuilt: tuple[str, ...] = ()
    damage: tuple[Damage, ...] = ()
    lost: tuple[Lost, ...] = ()
    unknown_topics: Mapping[str, int] = {}


class Checkpoint(NamedTuple):
    """A checkpoint of the indexes.

    Attributes:
        position: commit log position up to which the index files have every message
        begin: start of the log
        queues: state of each queue's index
        end: end of the log when the last queue was flushed; indexes may contain messages up to this position
    """

    position: int
    begin: int
    queues: dict[tuple[str, int], QueueCheckpoint]
    end: int


class _SavedCheckpoint(Struct):
    """The state file of a checkpoint."""

    position: int
    begin: int
    end: int
    queues: dict[str, tuple[int, ...]]


def read_checkpoint(state: object) -> Checkpoint | None:
    """Return the checkpoint in the value of a state file; None if it is invalid."""
    try:
        saved = shaped(state, _SavedCheckpoint)
        queues = {_key(name): _queue_state(found) for name, found in saved.queues.items()}
        return Checkpoint(saved.position, saved.begin, queues, saved.end)
    except (BodyError, ValueError):
        return None


def _key(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("@")
    return topic, int(number)


def _queue_state(found: tuple[int, ...]) -> QueueCheckpoint:
    begin, end, *sums = found
    return QueueCheckpoint(begin, end, dict(zip(sums[::2], sums[1::2], strict=True)))


def checkpoint_text(position: int, end: int, begin: int, queues: bytes) -> bytes:
    """Return a checkpoint as JSON. `queues` contains the encoded entries of all queues."""
    head = orjson.dumps({"position": position, "end": end, "begin": begin})
    return b'%b,"queues":{%b}}' % (head[:-1], queues)


class RecoveredStore(Protocol):
    """The store that a recovery fills."""

    def queue(self, topic: str, queue_id: int, /) -> ConsumeQueue:
        """Return the index of a queue, opened if it is not."""
        ...

    def flush_index(self, queue: ConsumeQueue, /) -> bool:
        """Write a queue's index to its file. Raises StoreFull; a failed device stops all writes."""
        ...

    @property
    def tag_code_of(self) -> Callable[[Record], int]:
        """Returns the tag code of a record."""
        ...


class Recovery:
    """One recovery.

    Args:
        log: the commit log
        store: has the queues that are recovered
        since: known topics, with the position at which each was created. Topics that only the checkpoint or later
            records have are added.
        deleted: deleted topics, with the position at which each was deleted
        knows_topics: True if `since` contains every topic of records before the checkpoint
    """

    def __init__(
        self,
        log: CommitLog,
        store: RecoveredStore,
        since: dict[str, int],
        deleted: Mapping[str, int],
        *,
        knows_topics: bool,
    ) -> None:
        self._log = log
        self._store = store
        self._since = since
        self._deleted = deleted
        self._knows_topics = knows_topics
        # True if the first offset of each queue is known, so that missing messages before it are not lost
        self._is_complete = False
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._unknown: dict[str, int] = {}
        self._known_until = 0  # log position after which records may belong to topics that the state file does not have
        self._most_lost = 0  # maximum lost messages of a queue, because a log of this length cannot contain more
        self._least_log_end = 0  # minimum end of the log, by index entries after the checkpoint
        self._rebuilt: list[str] = []
        self._lost: list[Lost] = []
        self._damage: list[Damage] = []

    def run(
        self, checkpoint: Checkpoint | None, on_disk: Iterable[tuple[str, int]], *, rebuilds: bool = False
    ) -> Recovered:
        states = self._states(checkpoint) if checkpoint else {}
        for key, state in states.items():
            if self._is_wanted(*key, is_known=state.next > 0):  # a checkpoint contains no deleted topic
                self._restore(key, state, rebuilds)
        for key in on_disk:
            if key not in states and key[0] in self._since:
                self._queue(*key).restart(0)
        start = self._start(checkpoint)
        self._most_lost = max(self._log.end, checkpoint.end if checkpoint else 0) // FIXED_BYTES
        records, damage, torn = self._log.replay(start, self._index_record, self._is_named)
        for key, state in states.items():
            if key in self._queues:
                # intact indexes may have entries for the part that is cut off
                if checkpoint is not None and torn.position < checkpoint.end:
                    self._queues[key].cut_from(torn.position)
                self._lose_until(self._queues[key], state.next, torn.position)
        damage = self._damage + damage
        return Recovered(
            records, torn.size, tuple(self._rebuilt), tuple(damage), tuple(self._lost), dict(self._unknown)
        )

    def _states(self, checkpoint: Checkpoint) -> dict[tuple[str, int], QueueCheckpoint]:
        """Return the checkpoint's entries of queues that still exist, because their topics were neither created nor
        deleted after it."""
        changed_at = {**self._deleted, **self._since}  # 0 means before the first record, and so before any checkpoint
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
        queue = self._queues[topic, queue_id] = self._store.queue(topic, queue_id)
        return queue

    def _restore(self, key: tuple[str, int], state: QueueCheckpoint, rebuilds: bool) -> None:
        queue = self._queue(*key)
        if queue.next > state.next:
            self._least_log_end = max(self._least_log_end, queue.least_log_end())
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
        """Return the position from which to read the log. Add gaps of the log, and parts missing at its ends,
        to the damage."""
        log = self._log
        self._is_complete = log.begin == 0 or checkpoint is not None
        self._damage += [Damage(*gap) for gap in log.gaps()]
        if checkpoint is None:
            self._known_until = log.end
            return log.begin
        if log.begin > checkpoint.begin:
            self._damage.append(Damage(checkpoint.begin, log.begin - checkpoint.begin))
        start = self._known_until = checkpoint.position
        least_log_end = max(checkpoint.end, self._least_log_end if self._least_log_end < log.end + _FAR_BYTES else 0)
        if least_log_end > log.end:
            self._damage.append(Damage(log.end, least_log_end - log.end))
        # After a power failure, the end of the log may be missing although the checkpoint was written: truncate the
        # indexes to the log's end.
        if checkpoint.end > log.end:
            start = min([start, log.end, *(queue.cut_from(log.end) for queue in self._queues.values())])
        return log.begin if self._rebuilt else max(start, log.begin)

    def _is_named(self, topic: str, queue_id: int, offset: int, position: int, size: int) -> bool:
        queue = self._queues.get((topic, queue_id))
        return queue is not None and queue.names(offset, position, size)

    def _index_record(self, record: Record) -> None:
        key = (record.topic, record.queue_id)
        queue = self._queues.get(key)
        if queue is None:
            # a deletion writes a checkpoint, so later records belong to a topic that exists
            is_new = record.physical_offset >= self._known_until
            if record.physical_offset < self._deleted.get(record.topic, 0):
                return
            if not self._is_wanted(*key, is_known=is_new or not self._knows_topics):
                return
            queue = self._queue(*key)
            queue.restart(0)  # index files without an entry in the checkpoint are not trusted
        # The record is indexed already, or belongs to an earlier, deleted topic of this name.
        if record.queue_offset < queue.next or record.physical_offset < self._since[record.topic]:
            return
        if record.queue_offset > queue.next:
            if queue.begin == queue.next and not self._is_complete:  # the messages before it may have expired
                queue.restart(record.queue_offset)
            elif not self._lose_until(queue, record.queue_offset, record.physical_offset):
                return
        queue.append(record.physical_offset, record.size, self._store.tag_code_of(record))
        if queue.tail_is_long:
            with contextlib.suppress(StoreFull):  # the tail stays in memory
                self._store.flush_index(queue)

    def _lose_until(self, queue: ConsumeQueue, offset: int, position: int) -> bool:
        """Record the lost messages before an offset. Return False if the offset is impossible, because an entry is
        written for each lost message."""
        if queue.begin < queue.next and offset - queue.next > self._most_lost:
            return False
        if queue.next < offset:
            self._lost.append(Lost(queue.topic, queue.queue_id, queue.next, offset))
            queue.lose_until(offset, position)
        return True


# ------------------------------------------------------------------------------
# Inspection of a data folder for damage. The inspection reads state files, journals, the commit log and the indexes,
# and repairs nothing.


_BLOCK_ENTRIES: Final = 1000


class RecoveryFinding(NamedTuple):
    """A part of the folder, its error (None if it is intact), and how a repair or the next start fixes it."""

    part: str
    fault: str | None
    repair: str = ""


class _Index:
    """The index of one queue, compared with the records in the order of the log."""

    def __init__(self, queue: ConsumeQueue, known: int) -> None:
        self.queue = queue
        self.known = known  # the next offset by the checkpoint; a start reads later messages from the log
        self.right = self.wrong = 0
        self._block_at = 0
        self._block = b""

    def compare(self, record: Record) -> None:
        if not self.queue.begin <= record.queue_offset < self.known:
            return
        if self.names(record.queue_offset, record.physical_offset, record.size):
            self.right += 1
        else:
            self.wrong += 1

    def names(self, offset: int, position: int, size: int) -> bool:
        entry = self._entry(offset)
        return entry is not None and entry[:2] == (position, size)

    def _entry(self, offset: int) -> tuple[int, int, int] | None:
        at = (offset - self._block_at) * ENTRY_BYTES
        if not 0 <= at < len(self._block):
            try:
                is_there = self.queue.begin <= offset < self.queue.next
                self._block = self.queue.entries(offset, _BLOCK_ENTRIES) if is_there else b""
            except StoreError:
                self._block = b""
            self._block_at, at = offset, 0
        if len(self._block) < at + ENTRY_BYTES:
            return None
        position, size, code = ENTRY.unpack_from(self._block, at)
        return position, size, code


def inspect(path: Path) -> Iterator[RecoveryFinding]:
    """Yield a finding for each part of a data folder. Raises StoreError if it is not a data folder, or if a broker uses
    it."""
    folder = Folder(path, creates=False)
    files = OpenFiles()
    try:
        yield from _state_files(folder)
        yield from _journals(folder)
        yield from _log_and_indexes(folder, files)
    finally:
        files.close()
        folder.unlock()


def _state_files(folder: Folder) -> Iterator[RecoveryFinding]:
    for path in folder.state_files():
        fault = state_fault(path)
        if fault is None:
            yield RecoveryFinding(path.name, None)
        elif state_fault(path.with_suffix(".old")) is None:
            yield RecoveryFinding(path.name, fault, "use its previous copy")
        elif path.stem in ("checkpoint", "topics", "locks", "transactions"):
            yield RecoveryFinding(path.name, fault, "rebuild it from the commit log")
        elif path.name == marks.FILE:
            yield RecoveryFinding(
                path.name, fault, "rebuild it; fewer messages are found after damage in the commit log"
            )
        else:
            yield RecoveryFinding(
                path.name, fault, "nothing: restore it from a backup, or remove it to lose that state"
            )


def _journals(folder: Folder) -> Iterator[RecoveryFinding]:
    for path in sorted(folder.path.glob("*.journal")):
        fault = journal_fault(path)
        yield RecoveryFinding(
            path.name, fault, "truncate the file; the changes in these bytes are lost" if fault else ""
        )


def _log_and_indexes(folder: Folder, files: OpenFiles) -> Iterator[RecoveryFinding]:
    log = CommitLog(folder.path, 1, files, Marks(_state_of(folder, "marks")))
    checkpoint = read_checkpoint(_state_of(folder, "checkpoint"))
    indexes = _indexes_of(folder, files, checkpoint)

    def compare(record: Record) -> None:
        index = indexes.get((record.topic, record.queue_id))
        if index is not None:
            index.compare(record)

    def is_named(topic: str, queue_id: int, offset: int, position: int, size: int) -> bool:
        index = indexes.get((topic, queue_id))
        return index is not None and index.names(offset, position, size)

    records, damage, torn = log.replay(log.begin, compare, is_named)
    yield RecoveryFinding(f"commit log, {counted(records, 'message')} in {log.end - log.begin:,} bytes", None)
    for position, size in damage:
        yield RecoveryFinding(
            f"commit log at {position}",
            f"{size:,} bytes contain no whole message",
            "save them in damaged/, and skip them",
        )
    if torn.size:
        yield RecoveryFinding(
            f"commit log at {torn.position}",
            f"ends in {torn.size:,} bytes of a torn message",
            "save them in damaged/, and truncate the log",
        )
    if checkpoint is not None and checkpoint.position > log.end:
        missing = checkpoint.position - log.end
        yield RecoveryFinding("commit log", f"{missing:,} bytes at its end are missing", "report the lost messages")
    if checkpoint is not None and checkpoint.begin < log.begin:
        yield RecoveryFinding(
            "commit log", f"{log.begin - checkpoint.begin:,} bytes at its start are missing", "report the lost messages"
        )
    for (topic, number), index in sorted(indexes.items()):
        yield _finding(f"queue {topic}:{number}", index)


def _state_of(folder: Folder, name: str) -> object:
    for end in (".json", ".old"):
        path = folder.path / f"{name}{end}"
        if state_fault(path) is None:
            return read_state(path)
    return None


def _indexes_of(folder: Folder, files: OpenFiles, checkpoint: Checkpoint | None) -> dict[tuple[str, int], _Index]:
    states = checkpoint.queues if checkpoint else {}
    found: dict[tuple[str, int], _Index] = {}
    for topic, number in sorted({*folder.queues(), *states}):
        queue = ConsumeQueue(topic, number, folder.index_of(topic, number), files)
        state = states.get((topic, number))
        if state is not None and not queue.next:
            queue.begin = queue.next = state.begin
        elif state is not None:
            # a segment is removed only after all of its messages have expired
            queue.begin = max(queue.begin, state.begin)
        found[topic, number] = _Index(queue, state.next if state else queue.next)
    return found


def _finding(part: str, index: _Index) -> RecoveryFinding:
    queue = index.queue
    lost = index.known - queue.begin - index.right - index.wrong
    faults = []
    if index.wrong:
        faults.append(f"{counted(index.wrong, 'message is', 'messages are')} not where the index says")
    if lost > 0:
        faults.append(f"{counted(lost, 'message is', 'messages are')} not in the commit log")
    if not faults:
        return RecoveryFinding(f"{part}, {counted(index.right, 'message')}", None)
    return RecoveryFinding(part, "; ".join(faults), "rebuild the index" if index.wrong else "skip them")


# ------------------------------------------------------------------------------
# Copies of a data folder, even while a broker writes to it.
#
# The log is the source of truth: a start finds entries in it that other files lack. The other files are therefore
# copied first, and the log last. If retention deletes the log's first segment in between, everything is repeated, which
# copies only new data of the log and the indexes. Segments are only appended to, so the copy of a segment is continued
# at its end, unless another file has the name now.


_LOG: Final = "commitlog"
_APPENDED: Final = (_LOG, "consumequeue")
_PARTIAL: Final = ".partial"
_ROUNDS: Final = 10
_AT_ONCE_BYTES: Final = 1 << 20
# Leases have expired by the time a copy is used. Files in `damaged` are for the inspection of the original folder.
_LEFT_OUT: Final = ("lock", "removed", "damaged")


def copying(source: Path, target: Path) -> Iterator[int]:
    """Copy a data folder into a new or empty folder, and yield the number of bytes copied since the last yield.

    Until `finish` the copy is in `target/.partial`. Raises StoreError and OSError.
    """
    if not (source / "lock").exists():
        raise StoreError(f"{source} is not a data folder: it has no file `lock`")
    check_format(source)
    partial = target / _PARTIAL
    target.mkdir(parents=True, exist_ok=True)
    if any(entry.name != _PARTIAL for entry in target.iterdir()):
        raise StoreError(f"{target} is not empty; give a new folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    copy = _Copy(source, partial)
    for _ in range(_ROUNDS):
        first = _first_segment(source)
        yield from copy.states()
        yield from copy.log()
        if _first_segment(source) == first:
            break
    else:
        raise StoreError(
            f"retention deletes faster from {source} than it can be copied; keep messages longer meanwhile"
        )
    (partial / "lock").touch()


def finish(target: Path) -> None:
    """Move a complete copy from `.partial` to its place."""
    partial = target / _PARTIAL
    # last, because the file `lock` makes it a data folder
    for entry in sorted(partial.iterdir(), key=lambda path: path.name == "lock"):
        entry.rename(target / entry.name)
    partial.rmdir()
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(target: Path) -> Path:
    return target / _PARTIAL


def _first_segment(source: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return min(os.listdir(source / _LOG), default="")
    return ""


class _Copy:
    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        # inode of each file that was copied, to detect another file with the same name
        self._copied: dict[Path, int] = {}

    def states(self) -> Iterator[int]:
        """Copy everything but the log, leases and temporary files."""
        for entry in sorted(os.listdir(self._source)):
            if entry not in (_LOG, *_LEFT_OUT) and not entry.startswith("locks.") and not entry.endswith(".new"):
                yield from self._tree(Path(entry))

    def log(self) -> Iterator[int]:
        first = _first_segment(self._source)
        yield from self._tree(Path(_LOG))
        for name in os.listdir(self._target / _LOG):
            if name < first:
                (self._target / _LOG / name).unlink()

    def _tree(self, path: Path) -> Iterator[int]:
        """Copy a file, or a folder with its contents. A file that is removed meanwhile, such as that of a deleted
        topic, is left out."""
        source = self._source / path
        if source.is_symlink():
            raise StoreError(f"{source} is a link; put what it leads to in its place")
        if not source.is_dir():
            with contextlib.suppress(FileNotFoundError):
                yield from self._file(path)
            return
        (self._target / path).mkdir(exist_ok=True)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(source))
        for name in names:
            yield from self._tree(path / name)

    def _file(self, path: Path) -> Iterator[int]:
        target = self._target / path
        with open(self._source / path, "rb") as read:
            inode = os.fstat(read.fileno()).st_ino
            is_continued = path.parts[0] in _APPENDED and self._copied.get(path) == inode
            with open(target, "ab" if is_continued else "wb") as written:
                self._copied[path] = inode
                shutil.copymode(self._source / path, target)
                read.seek(written.tell())
                while data := read.read(_AT_ONCE_BYTES):
                    written.write(data)
                    yield len(data)
                written.flush()
                os.fsync(written.fileno())
