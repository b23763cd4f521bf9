"""Journals of small changes: state files (a line per change), popped messages, and granted leases."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import orjson
import structlog

from ...protocol.bodies import encode_json, joined
from ..config import FREED_AT_ONCE, HANDOVER_LEASE_S, LIMITS, Limits
from ..runtime import Call, Job
from . import disk
from .files import StoreError, StoreFull, Unsynced, find_state, replace_state, state_fault

log = structlog.get_logger("rocketlet.store")


# ------------------------------------------------------------------------------
# The changes since a state file was written, one line each. So a change costs its own size, not that of the file.
#
# A line is the CRC-32 of its JSON, a blank, the JSON. The last line may be cut off, by a crash; it was never
# acknowledged.


_TRIES: Final = 3  # to shorten a journal while changes come


class Journal:
    """The journal beside the state file at `path`. `lines` is how many changes it holds, `written` how many bytes were
    appended since it was opened. With `--flush sync` a change may be acknowledged when the calls of `syncs` were made."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".journal")
        self._end = 0
        self._since: list[bytes] | None = None  # the lines since a state file that is being written
        self._unsynced = Unsynced(self._path)
        self.written = 0
        self.lines = 0
        self.is_whole = True  # whether all that was written could be read

    def read(self) -> list[Any]:
        """The changes, oldest first, up to the first that is damaged or cut off, which is taken off. Raises StoreError."""
        try:
            data = disk.read_file(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        values: list[Any] = []
        for line in data.splitlines(keepends=True):
            try:
                values.append(_value(line))
            except ValueError:
                log.error("journal_damaged", file=str(self._path), kept=len(values), bytes=len(data) - self._end)
                self._truncate()
                self.is_whole = False
                break
            self._end += len(line)
        self.lines = len(values)
        return values

    def append(self, value: Any) -> None:
        """Keeps a change. Raises StoreFull; nothing of it is kept then."""
        content = encode_json(value)
        line = b"%08x %b\n" % (zlib.crc32(content), content)
        try:
            self._unsynced.has_new_name |= self.written == 0
            descriptor = disk.open_file(self._path, disk.CREATE, 0o644)
            try:
                written = 0
                while written < len(line):
                    written += disk.write(descriptor, line[written:])
            finally:
                disk.close(descriptor)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self._path}: {error.strerror}") from error
        self._end += len(line)
        self.written += len(line)
        self.lines += 1
        self._unsynced.wrote()
        if self._since is not None:
            self._since.append(line)

    def syncs(self) -> list[Call]:
        """The calls after which everything appended is on the device, for the thread that waits for it."""
        return self._unsynced.syncs()

    def shortening(self, save: Job[None]) -> Job[None]:
        """Saves the state, which then holds all earlier changes, and keeps only the changes since."""
        self._since = []
        aside = self._path.with_suffix(".journal-new")
        try:
            yield from save
            for _ in range(_TRIES):
                lines = list(self._since)
                yield partial(_write, aside, b"".join(lines))
                if len(lines) == len(self._since):
                    disk.replace(aside, self._path)
                    self._end, self.lines = sum(map(len, lines)), len(lines)
                    yield partial(disk.sync_folder, self._path.parent)
                    break
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def clear(self) -> None:
        """The state file holds everything."""
        self._end = self.lines = 0
        self._truncate()

    def _truncate(self) -> None:
        """Cuts off bytes behind the last whole line; if that fails, it fails when the line is read again."""
        try:
            disk.cut(self._path, self._end)
        except OSError as error:
            log.warning("journal_cut_failed", file=str(self._path), reason=error.strerror)


def _write(path: Path, data: bytes) -> None:
    descriptor = disk.open_file(path, disk.REPLACE, 0o644)
    try:
        while data:
            data = data[disk.write(descriptor, data) :]
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _value(line: bytes) -> Any:
    """Raises ValueError."""
    mark, content = line[:8], line[9:-1]
    if line[-1:] != b"\n" or mark != b"%08x" % zlib.crc32(content):
        raise ValueError("the line is cut off or damaged")
    return orjson.loads(content)


# ------------------------------------------------------------------------------
# A journal of binary frames, appended to many times a second: each frame is one write to a descriptor that stays
# open.
#
#     int32 size of the content, int32 CRC-32 of the content, content
#
# A crash may cut off the last frame; its content was never acknowledged. This module does not interpret content.


_HEAD: Final = Struct(">II")
_LAST_BYTES: Final = 64 * 1024  # frames that came while the file was rewritten; they are written together


def framed(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


class Frames:
    """`size` is that of the file, `base` its size after the last rewrite, in bytes. `written` grows with each append.
    is_synced: `--flush sync`, so a frame is acknowledged when the calls of `syncs` were made."""

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        self.path = path
        self._is_synced_always = is_synced
        self._descriptor: int | None = None
        self._since: list[bytes] | None = None  # the frames since the rewrite of the file started
        self._unsynced = Unsynced(self.path)
        self.size = 0
        self.base = 0
        self.written = 0

    def read(self) -> Iterator[bytes]:
        """The frames' contents, oldest first, up to the first that is damaged or cut off. Raises StoreError."""
        try:
            data = disk.read_file(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error
        for content in _contents(data):
            yield content
            self.size += _HEAD.size + len(content)
        if self.size < len(data):
            log.error("pop_journal_damaged", file=str(self.path), kept=self.size, bytes=len(data) - self.size)
            self._truncate()
        self.base = self.size

    def append(self, content: bytes) -> None:
        """Keeps a frame. Raises StoreFull; nothing of it is kept then."""
        data = framed(content)
        try:
            descriptor = self._open()
            written = 0
            while written < len(data):
                written += disk.write(descriptor, data[written:] if written else data)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self.path}: {error.strerror}") from error
        self.size += len(data)
        self.written += len(data)
        self._unsynced.wrote()
        if self._since is not None:
            self._since.append(data)

    def _open(self) -> int:
        if self._descriptor is None:
            self._unsynced.has_new_name |= not disk.is_there(self.path)
            self._descriptor = disk.open_file(self.path, disk.CREATE, 0o644)
        return self._descriptor

    def syncs(self) -> list[Call]:
        """The calls after which everything appended is on the device, for the thread that waits for it."""
        return self._unsynced.syncs()

    def renewing(self, contents: Iterable[bytes]) -> Job[None]:
        """Rewrite the file: these frames, taken one by one, and those that are appended meanwhile. Raises StoreFull."""
        since: list[bytes] = []
        self._since = since
        aside = self.path.with_suffix(".new")
        frames: list[bytes] = []
        try:
            for content in contents:
                frames.append(framed(content))
                yield None
            size = sum(map(len, frames))
            yield partial(_write_frame, aside, b"".join(frames), disk.REPLACE, sync=True)
            written = 0
            while sum(map(len, since[written:])) > _LAST_BYTES:
                data, written = b"".join(since[written:]), len(since)
                yield partial(_write_frame, aside, data, disk.APPEND, sync=True)
            # nothing comes between this and the new name
            _write_frame(aside, b"".join(since[written:]), disk.APPEND, sync=self._is_synced_always)
            disk.replace(aside, self.path)
            self.close()
            self.size = self.base = size + sum(map(len, since))
            yield partial(disk.sync_folder, self.path.parent)
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def close(self) -> None:
        """Gives back the descriptor."""
        if self._descriptor is not None:
            disk.close(self._descriptor)
            self._descriptor = None

    def _truncate(self) -> None:
        """Cuts off bytes behind the last whole frame; if that fails, they are damage when the file is read again."""
        try:
            disk.cut(self.path, self.size)
        except OSError as error:
            log.warning("journal_cut_failed", file=str(self.path), reason=error.strerror)


def _contents(data: bytes) -> Iterator[bytes]:
    """The contents of the frames, up to the first that is damaged or cut off."""
    position = 0
    while (content := _content(data, position)) is not None:
        yield content
        position += _HEAD.size + len(content)


POPS_JOURNAL: Final = "pops.journal"  # the one that consists of frames; the others of lines


def repair_journal(path: Path) -> None:
    """Cut off what is damaged. Raises StoreError."""
    if path.name == POPS_JOURNAL:
        for _ in Frames(path).read():
            pass
    else:
        Journal(path).read()


def journal_fault(path: Path) -> str | None:
    """Return why a journal is not whole; None if it is."""
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
    """The content of the frame at a position; None if it is not whole."""
    if len(data) - position < _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, position)
    begin = position + _HEAD.size
    content = data[begin : begin + size]
    return content if len(content) == size and zlib.crc32(content) == checksum else None


def _write_frame(path: Path, data: bytes, mode: int, *, sync: bool) -> None:
    descriptor = disk.open_file(path, mode, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[disk.write(descriptor, view) :]
        if sync:
            disk.sync(descriptor)
    finally:
        disk.close(descriptor)


# ------------------------------------------------------------------------------
# Keeps granted leases on the disk, before a member is notified.
#
# A broker that is killed and restarts must know every lease that a member believes in. A lease that it has forgotten
# it would give to somebody else; a lease whose queue has changed hands since it would give back to the former owner.
# So each request that grants or ends leases is a line in a journal, written before the answer: bytes that the
# operating system has survive the broker. Leases that end with a socket or expire are written a
# moment later. A kill just then leaves a queue without a reader for as long as a lease lasts, and never with two.
#
# The operating system's end is another matter, since nothing here is synced. Then, and when a file is damaged or
# could not be written, nobody knows who owns what: no lease is believed, and none granted until the last one that a
# member may still believe in has ended (`is_known`).
#
# The file is a list, and so is each line of the journal:
#
#     [group, topic, queue id, client id, epoch]        a lease
#     [group, topic, queue id, client id, epoch, end]   where its queue ended when a later run began; null: its owner
#     has pulled
#     [group, topic, queue id, client id, epoch, true]  no lease: a foreign member reads the queue
#     [group, topic, queue id, epoch]                   it has ended
#     [boot id, epoch]                                  what follows was written since this start of the machine
#     (empty: by
#                                                       a broker that was stopped), beside a file of this epoch at
#     least
#     [boot id]                                         the file's: written since that start; journals of earlier
#     releases
#     epoch                                             the file's: no later one was granted when it was written


LeaseKey = tuple[str, str, int]  # group, topic, queue id
Change = tuple[str | int, ...]  # as it is written

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """An id that changes with each start of the machine; empty where the system has none."""
    with contextlib.suppress(OSError):
        return disk.read_file(_BOOT).decode().strip()
    return ""


class PreviousRunLease(NamedTuple):
    """A lease of a run before. `end`: where its queue ended when a run began in which its owner has not pulled.
    `is_reader`: it is no lease; a foreign member read the queue."""

    client_id: str
    epoch: int
    end: int | None = None
    is_reader: bool = False


def _changes(value: Any) -> list[Any]:
    """Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError("the leases are not a list")
    return value


class LeaseJournal:
    """`leases` are those of the run before; `epoch` is the last one granted."""

    def __init__(self, path: Path, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._path = path
        # One of two empty files. Its name says whether the disk has all grants: another name needs neither room nor a
        # descriptor.
        self._sound_path, self._behind_path = path.with_suffix(".sound"), path.with_suffix(".behind")
        self._journal = Journal(path)
        self._boot = boot_id()
        self._written_at = ""
        self._saved_epoch = self._least_epoch = 0  # the file's, and the least one if it is the journal's
        self._changes: list[object] = []
        self._freed: list[object] = []
        self._count = 0  # changes in the journal
        self._saved = 0  # leases in the file
        self.leases: dict[LeaseKey, PreviousRunLease] = {}
        self.epoch = 0
        fault = self._read()
        is_unused = not fault and not disk.is_there(path) and not self._journal.lines
        self._is_behind = bool(fault)
        self._changes.append([self._boot, self._saved_epoch])
        self.write()
        self._make(self._sound_path)
        self._is_unused = is_unused and not self._is_behind  # nothing but this run's name was ever written
        self.is_known = not self._is_behind
        if not self.is_known:
            self.leases.clear()
            self._mark()
            log.warning(
                "leases_unknown",
                file=str(path),
                reason=fault or "the disk takes nothing",
                hint=f"queues have no readers for {HANDOVER_LEASE_S:.0f} s, until every lease from before has ended",
            )

    def _read(self) -> str:
        """Takes over the leases that the last run has written. Returns why they are not all; empty if they are."""
        damage = state_fault(self._path) if disk.is_there(self._path) else None
        state = find_state(self._path, is_derivable=True)
        try:
            for change in _changes(state.value if state.value is not None else []):
                self._apply(change, 0)
            was_written = self._written_at or disk.is_there(self._sound_path)
            is_current = not was_written or disk.is_there(self._path.with_suffix(".journal"))
            lines = self._journal.read()
            self._saved_epoch = self.epoch
            for change in chain.from_iterable(map(_changes, lines)):
                self._apply(change, self._saved_epoch)
        except (StoreError, ValueError) as error:
            return str(error)
        self._count = sum(map(len, lines))
        if not is_current:
            return "the journal is gone"
        if damage or (state.value is not None and not state.is_current) or not self._journal.is_whole:
            return "a file is damaged"
        if self._least_epoch > self._saved_epoch:
            return f"{self._path.name} is gone, or an older one"
        if self._written_at not in ("", self._boot):
            return "the machine ended before the broker did"
        return "the disk took nothing before the broker ended" if disk.is_there(self._behind_path) else ""

    def _apply(self, change: Any, saved_epoch: int) -> None:
        """saved_epoch: a grant that is not later is in the file, or has ended since. Raises ValueError."""
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
                raise self._no_lease()

    def _apply_to_lease(self, key: LeaseKey, change: Any, saved_epoch: int) -> None:
        match change:
            case [str(client_id), int(epoch)]:
                if epoch > saved_epoch:
                    self.leases[key] = PreviousRunLease(client_id, epoch)
            case [str(client_id), int(epoch), True]:
                if epoch > saved_epoch:
                    self.leases[key] = PreviousRunLease(client_id, epoch, is_reader=True)
            case [int(epoch)]:
                if key in self.leases and self.leases[key].epoch == epoch:
                    del self.leases[key]
            case [str(client_id), int(epoch), (int() | None) as end]:
                if key in self.leases and self.leases[key].epoch == epoch:
                    self.leases[key] = PreviousRunLease(client_id, epoch, end)
            case _:
                raise self._no_lease()
        self.epoch = max(self.epoch, epoch)

    def _no_lease(self) -> ValueError:
        return ValueError(f"{self._path} or its journal has an entry that is not a lease")

    # Changes

    def granted(self, key: LeaseKey, client_id: str, epoch: int) -> None:
        """To be written before the answer."""
        self._changes.append([*key, client_id, epoch])

    def read_by(self, key: LeaseKey, client_id: str, epoch: int) -> None:
        """To be written before a foreign member gets messages."""
        self._changes.append([*key, client_id, epoch, True])

    def unlocked(self, key: LeaseKey, epoch: int) -> None:
        """To be written before the answer."""
        self._changes.append([*key, epoch])

    def freed(self, key: LeaseKey, epoch: int) -> None:
        """To be written soon. A later grant may be written first: it has another epoch."""
        self._freed.append([*key, epoch])

    def ended_at(self, key: LeaseKey, former: PreviousRunLease) -> None:
        """To be written before anything is appended to the queue."""
        self._changes.append([*key, former.client_id, former.epoch, former.end])

    def pulled(self, key: LeaseKey, client_id: str, epoch: int) -> None:
        """To be written before the answer: messages that the owner reads from now on would otherwise be repeated."""
        self._changes.append([*key, client_id, epoch, None])

    def write(self) -> None:
        """Writes what must be written before an answer. If the disk refuses, a mark says so to the next run."""
        changes, self._changes = self._changes, []
        if changes:
            self._append(changes)

    def _append(self, changes: list[object]) -> None:
        self._is_unused = False
        if self._is_behind:
            return  # all of it is written together, when the disk accepts it
        try:
            self._journal.append(changes)
            self._count += len(changes)
        except StoreFull as error:
            self._is_behind = True
            hint = (
                f"if the broker ends before it can, queues have no readers for {HANDOVER_LEASE_S:.0f} s when it is back"
            )
            log.error("leases_not_saved", reason=str(error), hint=hint)
            self._mark()

    def _mark(self) -> None:
        """Where not even that is taken, the file system takes nothing, and usually will not until the machine restarts."""
        try:
            disk.replace(self._sound_path, self._behind_path)
        except OSError:
            self._make(self._behind_path)

    def _make(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            disk.close(disk.open_file(path, disk.CREATE, 0o644))

    def saving(self, now: Callable[[], tuple[Iterator[Change], int]], *, closes: bool) -> Job[None]:
        """Write leases that have ended or expired, and the whole file when the journal has become long or lacks
        something. now: the leases and the last epoch. closes: nothing follows. Raises StoreFull; it is retried the next
        time."""
        freed, self._freed = self._freed, []
        for first in range(0, len(freed), FREED_AT_ONCE):
            self._append(freed[first : first + FREED_AT_ONCE])
            yield None
        if closes and self._is_unused:
            self._journal.clear()  # a broker without members is stopped without waiting for the device
        elif closes or self._is_behind or self._count > self._limits.journal_lines + self._saved:
            yield from self._shortening(now, closes=closes)

    def _shortening(self, now: Callable[[], tuple[Iterator[Change], int]], *, closes: bool) -> Job[None]:
        was_behind, count = self._is_behind, self._count
        self._is_behind, self._count = False, 0  # from here on, what changes is appended to the journal
        leases, epoch = now()
        try:
            yield from self._journal.shortening(self._saving(leases, epoch, closes=closes))
        except StoreFull:
            self._is_behind, self._count = self._is_behind or was_behind, self._count + count
            raise
        if closes:
            self._journal.clear()
            self._append([["", epoch]])
        if not self._is_behind:
            with contextlib.suppress(OSError):
                disk.replace(self._behind_path, self._sound_path)

    def _saving(self, leases: Iterator[Change], epoch: int, *, closes: bool) -> Job[None]:
        self._saved = 0
        head: list[object] = [epoch] if closes else [epoch, [self._boot]]
        content = yield from joined(map(orjson.dumps, chain(head, self._counted(leases))))
        yield partial(replace_state, self._path, b"[%b]" % content)
        self._append([[self._boot, epoch]])  # without this file, or with one of before, the journal is not all there is

    def _counted(self, leases: Iterator[Change]) -> Iterator[Change]:
        for lease in leases:
            self._saved += 1
            yield lease
