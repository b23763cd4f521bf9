"""Journals of small changes: state files (a line per change), popped messages, and granted leases."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import orjson
import structlog

from ...protocol.bodies import encode_json, joined
from ..config import FREED_AT_ONCE, HANDOVER_LEASE_S, LIMITS, Limits
from ..runtime.jobs import Call, Job
from . import disk
from .files import StoreError, StoreFull, Unsynced, find_state, replace_state, state_fault

log = structlog.get_logger("rocketlet.store")


# ------------------------------------------------------------------------------
# A file to which lines or frames are appended.


class AppendedFile:
    """A file whose end after a failed write is truncated, at the latest by the next append.

    With `--flush sync`, what was appended may be acknowledged only after the calls of `syncs` were made.

    Attributes:
        size: size of the intact part of the file in bytes
        written: bytes appended since the file was opened
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # what was appended since the start of a rewrite; None if the file is not being rewritten
        self._since: list[bytes] | None = None
        self._unsynced = Unsynced(path)
        self._is_torn = False  # True if bytes of a failed write may be left after `size`
        self.size = 0
        self.written = 0

    def syncs(self) -> list[Call]:
        """Return the calls that sync everything appended to the device, for the thread that waits for it."""
        return self._unsynced.syncs()

    def _read(self) -> bytes:
        """Return the content of the file; empty without a file. Raises StoreError."""
        try:
            return disk.read_file(self.path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error

    def _append(self, data: bytes) -> None:
        """Append a line or frame. Raises StoreFull."""
        try:
            if self._is_torn:  # what follows a torn line or frame would be lost at the next start
                disk.cut(self.path, self.size)
                self._is_torn = False
            self._write(data)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self.path}: {error.strerror}") from error
        self.size += len(data)
        self.written += len(data)
        self._unsynced.is_synced = False
        if self._since is not None:
            self._since.append(data)

    def _write(self, data: bytes) -> None:
        self._unsynced.has_new_name |= self.written == 0
        descriptor = disk.open_file(self.path, disk.CREATE, disk.FILE_MODE)
        try:
            disk.write_all(descriptor, data)
        finally:
            disk.close(descriptor)

    def _truncate(self) -> None:
        """Truncate the file to `size`, including any intact lines or frames after a damaged one. If that fails, the next
        append retries it."""
        try:
            disk.cut(self.path, self.size)
            self._is_torn = False
        except FileNotFoundError:
            pass
        except OSError as error:
            self._is_torn = True
            log.warning("journal_cut_failed", file=str(self.path), reason=error.strerror)


def _write_file(path: Path, data: bytes, mode: int, *, sync: bool) -> None:
    descriptor = disk.open_file(path, mode, disk.FILE_MODE)
    try:
        disk.write_all(descriptor, data)
        if sync:
            disk.sync(descriptor)
    finally:
        disk.close(descriptor)


# ------------------------------------------------------------------------------
# Journal of the changes since a state file was written, one line each. A change therefore costs its own size, not that
# of the whole file.
#
# A line consists of the CRC-32 of its JSON, a space, and the JSON. A kill of the broker may cut off the last line,
# which was not acknowledged. A crash of the machine may cut off acknowledged lines as well, unless the broker has
# `--flush sync`.


_ATTEMPTS: Final = 3  # maximum attempts to shorten a journal while changes arrive


class Journal(AppendedFile):
    """The journal of the state file at `path`.

    Attributes:
        lines: number of changes in the journal
        is_whole: False if damaged lines were found
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_suffix(".journal"))
        self.lines = 0
        self.is_whole = True

    def read(self) -> list[object]:
        """Return the changes, oldest first, up to the first damaged or incomplete one. The file is truncated there,
        even if intact lines follow. Raises StoreError."""
        data = self._read()
        values: list[object] = []
        for line in data.splitlines(keepends=True):
            try:
                values.append(_value(line))
            except ValueError:
                log.error("journal_damaged", file=str(self.path), kept=len(values), bytes=len(data) - self.size)
                self._truncate()
                self.is_whole = False
                break
            self.size += len(line)
        self.lines = len(values)
        return values

    def append(self, value: object) -> None:
        """Append a change. Raises StoreFull."""
        content = encode_json(value)
        self._append(b"%08x %b\n" % (zlib.crc32(content), content))
        self.lines += 1

    def shortening(self, save: Job[None]) -> Job[None]:
        """Save the state file with all earlier changes, and keep only later changes in the journal. If changes arrive during
        each of `_ATTEMPTS` writes, the journal is not shortened. Raises StoreFull."""
        self._since = []
        aside = self.path.with_suffix(".journal-new")
        try:
            yield from save
            for _ in range(_ATTEMPTS):
                lines = list(self._since)
                yield partial(_write_file, aside, b"".join(lines), disk.REPLACE, sync=True)
                if len(lines) == len(self._since):
                    disk.replace(aside, self.path)
                    self.size, self.lines = sum(map(len, lines)), len(lines)
                    self._is_torn = False
                    yield partial(disk.sync_folder, self.path.parent)
                    break
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def clear(self) -> None:
        """Remove all changes, which the state file contains."""
        self.size = self.lines = 0
        self._truncate()


def _value(line: bytes) -> object:
    """Return the value of a line. Raises ValueError."""
    checksum, content = line[:8], line[9:-1]
    if line[-1:] != b"\n" or checksum != b"%08x" % zlib.crc32(content):
        raise ValueError("the line is cut off or damaged")
    return orjson.loads(content)


# ------------------------------------------------------------------------------
# Journal of binary frames, which is appended to many times per second. A frame is usually one write, to a descriptor
# that stays open.
#
#     int32 size of the content, int32 CRC-32 of the content, content
#
# A kill of the broker may cut off the last frame, which was not acknowledged. A crash of the machine may cut off
# acknowledged frames as well, unless the broker has `--flush sync`. The content is opaque here.


_HEAD: Final = Struct(">II")
# maximum bytes of frames appended during a rewrite that are written in the last, blocking step
_LAST_BYTES: Final = 64 * 1024


def framed(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


class Frames(AppendedFile):
    """A journal of frames.

    Attributes:
        base: size of the file after its last rewrite

    Args:
        path: the file
        is_synced: True with `--flush sync`
    """

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        super().__init__(path)
        self._is_synced_always = is_synced
        self._descriptor: int | None = None
        self.base = 0

    def read(self) -> Iterator[bytes]:
        """Yield the contents of the frames, oldest first, up to the first damaged or incomplete one. The file is
        truncated there, even if intact frames follow. Raises StoreError."""
        data = self._read()
        for content in _contents(data):
            yield content
            self.size += _HEAD.size + len(content)
        if self.size < len(data):
            log.error("pop_journal_damaged", file=str(self.path), kept=self.size, bytes=len(data) - self.size)
            self._truncate()
        self.base = self.size

    def append(self, content: bytes) -> None:
        """Append a frame. Raises StoreFull."""
        self._append(framed(content))

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._unsynced.has_new_name |= not disk.is_there(self.path)
            self._descriptor = disk.open_file(self.path, disk.CREATE, disk.FILE_MODE)
        disk.write_all(self._descriptor, data)

    def renewing(self, contents: Iterable[bytes]) -> Job[None]:
        """Rewrite the file with the frames of `contents`, which are read one by one, followed by frames that are
        appended meanwhile. Raises StoreFull."""
        since: list[bytes] = []
        self._since = since
        aside = self.path.with_suffix(".new")
        frames: list[bytes] = []
        try:
            for content in contents:
                frames.append(framed(content))
                yield None
            size = sum(map(len, frames))
            yield partial(_write_file, aside, b"".join(frames), disk.REPLACE, sync=True)
            written = 0
            while sum(map(len, since[written:])) > _LAST_BYTES:
                data, written = b"".join(since[written:]), len(since)
                yield partial(_write_file, aside, data, disk.APPEND, sync=True)
            # without a pause, so that no frame is appended before the file is replaced
            _write_file(aside, b"".join(since[written:]), disk.APPEND, sync=self._is_synced_always)
            disk.replace(aside, self.path)
            self._is_torn = False
            self.close()
            self.size = self.base = size + sum(map(len, since))
            yield partial(disk.sync_folder, self.path.parent)
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def close(self) -> None:
        if self._descriptor is not None:
            disk.close(self._descriptor)
            self._descriptor = None


def _contents(data: bytes) -> Iterator[bytes]:
    """Yield the contents of the frames up to the first damaged or incomplete one."""
    position = 0
    while (content := _content(data, position)) is not None:
        yield content
        position += _HEAD.size + len(content)


POPS_JOURNAL: Final = "pops.journal"  # the journal that consists of frames; other journals consist of lines


def repair_journal(path: Path) -> None:
    """Truncate a journal at its first damaged line or frame. Raises StoreError."""
    if path.name == POPS_JOURNAL:
        for _ in Frames(path).read():
            pass
    else:
        Journal(path).read()


def journal_fault(path: Path) -> str | None:
    """Return the reason why a journal is not intact; None if it is."""
    if not path.is_file():
        return "it is not a regular file"
    try:
        data = disk.read_file(path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if path.name == POPS_JOURNAL:
        whole = sum(_HEAD.size + len(content) for content in _contents(data))
    else:
        whole = sum(map(len, itertools.takewhile(_is_whole, data.splitlines(keepends=True))))
    return None if whole == len(data) else f"{len(data) - whole:,} bytes at its end are damaged or cut off"


def _is_whole(line: bytes) -> bool:
    try:
        _value(line)
    except ValueError:
        return False
    return True


def _content(data: bytes, position: int) -> bytes | None:
    """Return the content of the frame at a position; None if it is damaged or incomplete."""
    if len(data) - position < _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, position)
    begin = position + _HEAD.size
    content = data[begin : begin + size]
    return content if len(content) == size and zlib.crc32(content) == checksum else None


# ------------------------------------------------------------------------------
# Journal of granted leases, which are written before the response to the member.
#
# A broker that is killed and restarted must know every lease that a member holds. If it forgot a lease, it would grant
# the queue to another member; if it forgot that a lease has ended, it would give the queue back to the previous owner.
# Each request that grants or ends leases is therefore one line in a journal, written before the response, because bytes
# that the operating system has accepted survive the broker. Leases that end because a connection closed or because they
# expired are written a moment later. A kill in between leaves a queue without a reader for as long as a lease lasts,
# and never with two readers.
#
# A crash of the operating system is different, because appended lines are not synced. After it, and if a file is
# damaged or could not be written, the owners are unknown: stored leases are ignored, and no lease is granted until the
# last lease that a member may still hold has expired (`is_known`).
#
# The file is a list, and so is each line of the journal. Their entries:
#
#     [group, topic, queue id, client id, epoch]        a lease
#     [group, topic, queue id, client id, epoch, end]   the end of the lease's queue when a later run of the broker
#                                                       started; null: the owner has pulled in the later run
#     [group, topic, queue id, client id, epoch, true]  not a lease: a foreign member reads the queue
#     [group, topic, queue id, epoch]                   the lease has ended
#     [boot id, epoch]                                  later entries were written since this boot of the machine
#     (empty:
#                                                       by a broker that was stopped); the file has at least this epoch
#     [boot id]                                         in the file: it was written since this boot
#     epoch                                             in the file: the last epoch granted when it was written


LeaseKey = tuple[str, str, int]  # group, topic, queue id
Change = tuple[str | int | None, ...]  # a lease as an entry of the state file or a line of the journal

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return an id that changes with each boot of the machine; empty if the system has none."""
    with contextlib.suppress(OSError):
        return disk.read_file(_BOOT).decode().strip()
    return ""


class LeaseEntry(Enum):
    LEASE = "a client has got the lease"
    READER = "a foreign member reads the queue"
    END = "the lease or the reader with this epoch has ended"
    BOUND = "the end of the lease's queue when a later run of the broker started, or None"


class LeaseChange(NamedTuple):
    """An entry of an earlier run of the broker."""

    entry: LeaseEntry
    epoch: int
    client_id: str = ""
    end: int | None = None


def _changes(value: object) -> list[object]:
    """Return the value of a file or a line, which must be a list of changes. Raises ValueError if it is not."""
    if not isinstance(value, list):
        raise ValueError("the leases are not a list")
    return value


class LeaseJournal:
    """The leases on disk.

    Attributes:
        changes: the entries of earlier runs by queue, oldest first
        epoch: the last epoch granted
        is_known: False if the owners of the last run are unknown
    """

    def __init__(self, path: Path, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._path = path
        # One of two empty files exists. The name of that file records whether the disk has all grants, because a rename
        # needs neither disk space nor a descriptor.
        self._sound_path, self._lacking_path = path.with_suffix(".sound"), path.with_suffix(".behind")
        self._journal = Journal(path)
        self._boot = boot_id()
        self._written_at = ""
        # the epoch of the file, and the minimum that the journal requires of it
        self._saved_epoch = self._least_epoch = 0
        self._due: list[object] = []  # entries that must be written before a response
        self._late: list[object] = []
        self._count = 0  # entries in the journal
        self._saved = 0  # number of leases in the file
        self.changes: dict[LeaseKey, list[LeaseChange]] = {}
        self.epoch = 0
        fault = self._read()
        is_unused = not fault and not disk.is_there(path) and not self._journal.lines
        self._is_lacking = bool(fault)
        self._due.append([self._boot, self._saved_epoch])
        self.write()
        self._create(self._sound_path)
        self._is_unused = is_unused and not self._is_lacking  # nothing but the boot id of this run was ever written
        self.is_known = not self._is_lacking
        if not self.is_known:
            self.changes.clear()
            self._record_lack()
            log.warning(
                "leases_unknown",
                file=str(path),
                reason=fault or "the disk accepts no writes",
                hint=f"queues have no readers for {HANDOVER_LEASE_S:.0f} s, until every lease from before has ended",
            )

    def _read(self) -> str:
        """Load the leases of the last run. Return the reason why they are incomplete; empty if they are complete."""
        damage = state_fault(self._path) if disk.is_there(self._path) else None
        state = find_state(self._path, is_derivable=True)
        try:
            for change in _changes(state.value if state.value is not None else []):
                self._apply(change, 0)
            was_written = self._written_at or disk.is_there(self._sound_path)
            is_current = not was_written or disk.is_there(self._path.with_suffix(".journal"))
            lines = list(map(_changes, self._journal.read()))
            self._saved_epoch = self.epoch
            for change in chain.from_iterable(lines):
                self._apply(change, self._saved_epoch)
        except (StoreError, ValueError) as error:
            return str(error)
        self._count = sum(map(len, lines))
        if not is_current:
            return "the journal is missing"
        if damage or (state.value is not None and not state.is_current) or not self._journal.is_whole:
            return "a file is damaged"
        if self._least_epoch > self._saved_epoch:
            return f"{self._path.name} is missing, or is an older one"
        if self._written_at not in ("", self._boot):
            return "the machine crashed while the broker was running"
        return "the disk accepted no writes before the broker ended" if disk.is_there(self._lacking_path) else ""

    def _apply(self, change: object, saved_epoch: int) -> None:
        """Apply a change. Raises ValueError.

        Args:
            change: an entry of the file or the journal
            saved_epoch: epoch of the file. A grant of the journal that is not later is in the file, or has ended since.
        """
        match change:
            case int(epoch):
                self.epoch = max(self.epoch, epoch)
            case [str(boot)]:
                self._written_at = boot
            case [str(boot), int(least_epoch)]:
                self._written_at, self._least_epoch = boot, max(least_epoch, self._least_epoch)
            case [str(group), str(topic), int(queue_id), *rest]:
                self._apply_to_lease((group, topic, queue_id), rest, saved_epoch)
            case _:
                raise self._invalid_entry()

    def _apply_to_lease(self, key: LeaseKey, entry: object, saved_epoch: int) -> None:
        match entry:
            case [str(client_id), int(epoch)]:
                change = LeaseChange(LeaseEntry.LEASE, epoch, client_id)
            case [str(client_id), int(epoch), True]:
                change = LeaseChange(LeaseEntry.READER, epoch, client_id)
            case [int(epoch)]:
                change = LeaseChange(LeaseEntry.END, epoch)
            case [str(client_id), int(epoch), (int() | None) as end]:
                change = LeaseChange(LeaseEntry.BOUND, epoch, client_id, end)
            case _:
                raise self._invalid_entry()
        if epoch > saved_epoch or change.entry in (LeaseEntry.END, LeaseEntry.BOUND):
            self.changes.setdefault(key, []).append(change)
        self.epoch = max(self.epoch, epoch)

    def _invalid_entry(self) -> ValueError:
        return ValueError(f"{self._path} or its journal has an entry that is not a lease")

    # Changes

    def record(self, change: Change, *, may_wait: bool = False) -> None:
        """Record an entry, which `write` writes before the response.

        Args:
            may_wait: True for the end of a lease without a request, which is written a moment later. A later grant may be
                written first, because it has another epoch.
        """
        (self._late if may_wait else self._due).append(change)

    def write(self) -> None:
        """Write the recorded changes that must be on disk before a response. If the disk refuses, a renamed file
        reports this to the next run."""
        due, self._due = self._due, []
        if due:
            self._append(due)

    def _append(self, changes: list[object]) -> None:
        self._is_unused = False
        if self._is_lacking:
            return  # the whole file is written when the disk accepts it
        try:
            self._journal.append(changes)
            self._count += len(changes)
        except StoreFull as error:
            self._is_lacking = True
            hint = (
                "if the broker ends before it can save them, queues have no readers for "
                f"{HANDOVER_LEASE_S:.0f} s after its restart"
            )
            log.error("leases_not_saved", reason=str(error), hint=hint)
            self._record_lack()

    def _record_lack(self) -> None:
        """Record that the disk lacks grants. If even this fails, the file system accepts nothing, and usually will not
        until the machine is restarted."""
        try:
            disk.replace(self._sound_path, self._lacking_path)
        except OSError:
            self._create(self._lacking_path)

    def _create(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            disk.close(disk.open_file(path, disk.CREATE, disk.FILE_MODE))

    def saving(self, now: Callable[[], tuple[Iterator[Change], int]], *, closes: bool) -> Job[None]:
        """Write leases that have ended or expired, and the whole file if the journal has become long or incomplete.

        Args:
            now: returns the present leases and the last epoch
            closes: True if this is the last write of the run
        Raises:
            StoreFull: the write is retried the next time
        """
        late, self._late = self._late, []
        for first in range(0, len(late), FREED_AT_ONCE):
            self._append(late[first : first + FREED_AT_ONCE])
            yield None
        if closes and self._is_unused:
            self._journal.clear()  # a broker without members stops without waiting for the device
        elif closes or self._is_lacking or self._count > self._limits.journal_lines + self._saved:
            yield from self._shortening(now, closes=closes)

    def _shortening(self, now: Callable[[], tuple[Iterator[Change], int]], *, closes: bool) -> Job[None]:
        was_lacking, count = self._is_lacking, self._count
        # Reset first: a change that comes while the snapshot is written is appended to the journal and counted
        self._is_lacking, self._count = False, 0
        leases, epoch = now()
        try:
            yield from self._journal.shortening(self._saving(leases, epoch, closes=closes))
        except StoreFull:
            self._is_lacking, self._count = self._is_lacking or was_lacking, self._count + count
            raise
        if closes:
            self._journal.clear()
            self._append([["", epoch]])
        if not self._is_lacking:
            with contextlib.suppress(OSError):
                disk.replace(self._lacking_path, self._sound_path)

    def _saving(self, leases: Iterator[Change], epoch: int, *, closes: bool) -> Job[None]:
        self._saved = 0
        head: list[object] = [epoch] if closes else [epoch, [self._boot]]
        content = yield from joined(map(orjson.dumps, chain(head, self._counted(leases))))
        yield partial(replace_state, self._path, b"[%b]" % content)
        # if this file is missing or older at the next start, the journal is known to be incomplete
        self._append([[self._boot, epoch]])

    def _counted(self, leases: Iterator[Change]) -> Iterator[Change]:
        for lease in leases:
            self._saved += 1
            yield lease
