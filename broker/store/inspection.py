"""Finds damage in a data folder. Reads all of it, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...protocol.counting import counted
from ...protocol.message import Record
from . import marks
from .commit_log import CommitLog
from .consume_queue import ENTRY, ENTRY_BYTES, ConsumeQueue
from .files import Folder, OpenFiles, StoreError, read_state, state_fault
from .marks import Marks
from .recovery import Checkpoint, read_checkpoint

_BLOCK_ENTRIES: Final = 1000


class Finding(NamedTuple):
    """A part of the folder, its fault (None: none), and the cure by a repair or the next start."""

    part: str
    fault: str | None
    repair: str = ""


class _Index:
    """One queue's index, compared with the records in the order of the log."""

    def __init__(self, queue: ConsumeQueue, known: int) -> None:
        self.queue = queue
        self.known = known  # the next offset by the checkpoint; entries behind it are read from the log anyway
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


def inspect(path: Path) -> Iterator[Finding]:
    """The parts of a data folder, one by one. Raises StoreError if it is not a data folder, or if a broker uses it."""
    folder = Folder(path, creates=False)
    files = OpenFiles()
    try:
        yield from _state_files(folder)
        yield from _log_and_indexes(folder, files)
    finally:
        files.close()
        folder.unlock()


def _state_files(folder: Folder) -> Iterator[Finding]:
    for path in folder.state_files():
        fault = state_fault(path)
        if fault is None:
            yield Finding(path.name, None)
        elif state_fault(path.with_suffix(".old")) is None:
            yield Finding(path.name, fault, "take the copy before it")
        elif path.stem in ("checkpoint", "topics", "locks", "transactions"):
            yield Finding(path.name, fault, "make it anew from the commit log")
        elif path.name == marks.FILE:
            yield Finding(path.name, fault, "make it anew; fewer messages are found behind damage in the commit log")
        else:
            yield Finding(path.name, fault, "nothing: restore it from a backup, or remove it to lose that state")


def _log_and_indexes(folder: Folder, files: OpenFiles) -> Iterator[Finding]:
    log = CommitLog(folder.path, 1, files, Marks(_state_of(folder, "marks")))
    checkpoint = read_checkpoint(_state_of(folder, "checkpoint"))
    if checkpoint is not None and checkpoint.summed_from is not None:
        log.summed_from = checkpoint.summed_from
    indexes = _indexes_of(folder, files, checkpoint)

    def take(record: Record) -> None:
        index = indexes.get((record.topic, record.queue_id))
        if index is not None:
            index.compare(record)

    def is_named(topic: str, queue_id: int, offset: int, position: int, size: int) -> bool:
        index = indexes.get((topic, queue_id))
        return index is not None and index.names(offset, position, size)

    records, damage, torn = log.replay(log.begin, take, is_named)
    yield Finding(f"commit log, {counted(records, 'message')} in {log.end - log.begin:,} bytes", None)
    for position, size in damage:
        yield Finding(
            f"commit log at {position}",
            f"{size:,} bytes hold no whole message",
            "put them aside in damaged/; skip them",
        )
    if torn.size:
        yield Finding(
            f"commit log at {torn.position}", f"ends in {torn.size:,} bytes of a torn message", "put aside and cut off"
        )
    if checkpoint is not None and checkpoint.position > log.end:
        missing = checkpoint.position - log.end
        yield Finding("commit log", f"{missing:,} bytes at its end are gone", "name the messages that are lost")
    if checkpoint is not None and checkpoint.begin is not None and checkpoint.begin < log.begin:
        yield Finding("commit log", f"{log.begin - checkpoint.begin:,} bytes at its beginning are gone", "name them")
    for (topic, number), index in sorted(indexes.items()):
        yield _finding(f"queue {topic}:{number}", index)


def _state_of(folder: Folder, name: str) -> Any:
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
            queue.begin = max(queue.begin, state.begin)  # a file goes when all of its messages have expired
        found[topic, number] = _Index(queue, state.next if state else queue.next)
    return found


def _finding(part: str, index: _Index) -> Finding:
    queue = index.queue
    lost = index.known - queue.begin - index.right - index.wrong
    faults = []
    if index.wrong:
        faults.append(f"{counted(index.wrong, 'message is', 'messages are')} not where the index says")
    if lost > 0:
        faults.append(f"{counted(lost, 'message is', 'messages are')} not in the commit log")
    if not faults:
        return Finding(f"{part}, {counted(index.right, 'message')}", None)
    return Finding(part, "; ".join(faults), "make the index anew" if index.wrong else "leave them out")
