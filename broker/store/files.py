"""Errors, descriptors, state files and the folder's lock: the common part of the store's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import structlog

from ...protocol.bodies import encode_json
from ...protocol.names import topic_fault
from ..config import MAX_OPEN_SEGMENTS
from ..runtime import Call, Job
from . import disk

log = structlog.get_logger("rocketlet.store")

_OLD: Final = ".old"
_REMOVED: Final = "removed"
_FORMAT_FILE: Final = "format.json"
FORMAT: Final = 1
"""The format of all files of a data folder together. If you change how one is written, raise it, unless earlier releases
read it as before."""
_SUM_MARK: Final = b"\n#crc32 "
_NO_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class StoreError(Exception):
    """The data folder cannot be used as it is. The text says what to do."""


class StoreFull(StoreError):
    """The operating system took no more bytes; nothing of the write was kept."""


class StoreFailed(StoreFull):
    """The device failed. Earlier writes may be lost, too, so nothing is written until the next start."""


class Damaged(StoreError):
    """The bytes that were read differ from those written, or are gone."""


class Unreadable(StoreError):
    """The operating system refuses to read now; it may do so later."""


class OpenFiles:
    """File descriptors by path, least recently used closed first, so that thousands of queues need few.

    `limit` is never exceeded. When the process runs out of descriptors, some of these are closed.
    """

    def __init__(self, limit: int = MAX_OPEN_SEGMENTS) -> None:
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str, *, creates: bool = False) -> int:
        """A descriptor for reading and appending. Raises OSError. `creates`: the file is new and empty, whatever is there."""
        descriptor = self._open.get(path)
        if descriptor is None:
            while len(self._open) >= self._limit:
                self._close_oldest()
            descriptor = self._open[path] = self.open_apart(path, creates=creates)
        else:
            self._open.move_to_end(path)
        return descriptor

    def open_apart(self, path: str, *, creates: bool = False) -> int:
        """A descriptor that is the caller's to close, and that never makes room for another."""
        flags = disk.CREATE | os.O_TRUNC if creates else disk.APPEND
        while True:
            try:
                return disk.open_file(path, flags, 0o644)
            except OSError as error:
                if error.errno == errno.EROFS and not creates and flags != disk.READ:
                    flags = disk.READ
                elif error.errno in _NO_DESCRIPTOR and self._open:
                    self._close_oldest()
                else:
                    raise

    def _close_oldest(self) -> None:
        disk.close(self._open.popitem(last=False)[1])

    def forget(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            disk.close(descriptor)

    def close(self) -> None:
        while self._open:
            disk.close(self._open.popitem()[1])


class State(NamedTuple):
    """The value of a state file, None if there is none; whether it is the newest that was written, as far as is known."""

    value: Any
    is_current: bool


def read_state(path: Path, *, is_derivable: bool = False) -> Any:
    """The JSON value of a state file, or of the copy before it if it is damaged or gone; None if there is none.

    Raises StoreError if both are damaged, unless the value `is_derivable` from the log: the file is then put aside.
    """
    return find_state(path, is_derivable=is_derivable).value


def find_state(path: Path, *, is_derivable: bool = False) -> State:
    """Like `read_state`, and says whether the value is current."""
    faults: list[str] = []
    for source in (path, path.with_suffix(_OLD)):
        try:
            value = _state_of(disk.read_file(source))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            faults.append(f"{source} is damaged ({error})")
            continue
        if source != path:
            log.error(
                "state_file_restored",
                file=str(path),
                faults=faults,
                hint="it was lost or damaged; the copy before it is used",
            )
        return State(value, source == path)
    if faults and not is_derivable:
        raise StoreError(f"{faults[0]}; restore it, or remove it to lose that state")
    if faults:
        log.error("state_file_rebuilt", faults=faults, hint="it was damaged; its content comes from the log")
        with contextlib.suppress(OSError):
            disk.replace(path, path.with_suffix(".damaged"))
    return State(None, is_current=False)


def state_fault(path: Path) -> str | None:
    """Why a state file cannot be used; None if it is whole."""
    try:
        _state_of(disk.read_file(path))
    except FileNotFoundError:
        return "it is gone"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _state_of(data: bytes) -> Any:
    """The value behind a state file's bytes. Raises ValueError; files of earlier releases have no checksum."""
    value, mark, found = data.rpartition(_SUM_MARK)
    if not mark:
        state = orjson.loads(data)
        if not isinstance(state, (dict, list)):  # the remaining digits of a checksum may be a number
            raise ValueError("its beginning is gone")
        return state
    if found.strip() != b"%08x" % zlib.crc32(value):
        raise ValueError("its checksum is wrong")
    return orjson.loads(value)


def write_state(path: Path, value: Any, *, sync: bool = True, mode: int = 0o644) -> None:
    """Like `replace_state`, for a small value."""
    replace_state(path, encode_json(value), sync=sync, mode=mode)


def replace_state(path: Path, content: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replaces a state file whole: a reader sees the old value or the new one. Raises StoreFull.

    The file is JSON, a line of its own with the JSON's CRC-32 behind it; the one before is kept as `.old`. sync: it is on
    the device, too. A file that is written every few seconds while clients wait is not synced.
    """
    temporary = path.with_suffix(".new")
    try:
        descriptor = disk.open_file(temporary, disk.REPLACE, mode)
        try:
            data = memoryview(content + _SUM_MARK + b"%08x\n" % zlib.crc32(content))
            while data:
                data = data[disk.write(descriptor, data) :]
            if sync:
                disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        _keep_old(path)
        disk.replace(temporary, path)
        if sync:
            disk.sync_folder(path.parent)
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from error


def _keep_old(path: Path) -> None:
    old = path.with_suffix(_OLD)
    with contextlib.suppress(OSError):
        disk.remove(old)
    with contextlib.suppress(OSError):  # there is none yet, or the file system has no links
        disk.link(path, old)


class Save(NamedTuple):
    """A state file's new content. `failed` is called if it could not be written."""

    path: Path
    content: bytes
    failed: Callable[[], None]

    def write(self, sync: bool) -> None:
        """Raises StoreFull."""
        replace_state(self.path, self.content, sync=sync)

    def saving(self, sync: bool) -> Job[None]:
        """Raises StoreFull; it is saved the next time then."""
        try:
            yield partial(self.write, sync)
        except StoreFull:
            self.failed()
            raise


class Folder:
    """The data folder, locked for this process. Raises StoreError if another broker has it."""

    def __init__(self, path: Path, *, creates: bool = True) -> None:
        if not creates and not (path / "lock").exists():
            reason = "it has no file `lock`" if path.exists() else "it does not exist"
            raise StoreError(f"{path} is not a data folder: {reason}")
        self._locks: list[int] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._locks += [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), _lock_file(path / "lock")]
        except OSError as error:
            self.unlock()
            raise StoreError(f"cannot use the data folder {path}: {error.strerror}") from None
        try:
            for descriptor in self._locks:  # the file for earlier releases; it can be removed, the folder cannot
                _lock(descriptor)
        except OSError:
            self.unlock()
            raise StoreError(f"another broker uses the data folder {path}; stop it or choose another") from None
        self.path = path
        self._numbers = itertools.count()
        try:
            check_format(path)
        except StoreError:
            self.unlock()
            raise
        if creates:
            _mark_format(path)

    def subfolders(self, name: str) -> list[str]:
        """The names of the folders in one of this folder's, sorted."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / name) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def queues(self) -> list[tuple[str, int]]:
        """Topic and number of the queues that have an index here. A folder whose name no topic can have is not ours."""
        return [
            (topic, int(number))
            for topic in self.subfolders("consumequeue")
            if topic_fault(topic) is None
            for number in self.subfolders(f"consumequeue/{topic}")
            if number.isascii() and number.isdigit()
        ]

    def state_files(self) -> list[Path]:
        """The state files, also one of which only the copy before it is left."""
        return sorted({path.with_suffix(".json") for end in ("*.json", f"*{_OLD}") for path in self.path.glob(end)})

    def put_aside(self, name: str, data: bytes) -> None:
        """Keep bytes that are not understood for inspection, once, and up to a limit."""
        path = self.path / "damaged" / name
        try:
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "the folder is a link; the broker writes into its data folder only")
            disk.make_folder(path.parent)
            with contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(data)
        except OSError as error:
            log.warning("damaged_bytes_not_kept", file=str(path), reason=error.strerror)

    def set_aside(self, topic: str) -> Path | None:
        """Takes the index files of a topic out of the way; the folder to remove. None if there are none. Raises OSError."""
        source = self.indexes_of(topic)
        target = self.path / _REMOVED / str(next(self._numbers))
        try:
            disk.make_folder(target.parent)
            disk.rename_folder(source, target)
        except FileNotFoundError:
            return None
        return target

    def indexes_of(self, topic: str) -> Path:
        return self.path / "consumequeue" / topic

    def index_of(self, topic: str, queue_id: int) -> Path:
        """The folder of a queue's index. Raises StoreError for a link: files behind it are not ours to remove."""
        path = self.indexes_of(topic) / str(queue_id)
        for linked in (path.parent, path):
            if linked.is_symlink():
                raise StoreError(
                    f"{linked} is a link; put the folder that it leads to in its place, or remove the link"
                )
        return path

    def empty_removed(self) -> None:
        """Removes files that an earlier run has set aside."""
        disk.remove_folder(self.path / _REMOVED)

    def fault(self) -> str | None:
        """Why writes no longer reach the folder; None if they do."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._locks[0])):
                return None
        except OSError as error:
            return f"the data folder {self.path} is gone: {error.strerror}"
        return f"another folder is at {self.path} now"

    def unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


def check_format(folder: Path) -> None:
    """Raises StoreError for a folder that a later release has written, which would pass for damaged."""
    known = read_state(folder / _FORMAT_FILE, is_derivable=True)
    if isinstance(known, dict) and isinstance(known.get("format"), int) and known["format"] > FORMAT:
        raise StoreError(
            f"{folder} was written by a newer Rocketlet ({known.get('by')}), whose files this one cannot read; "
            "install that version, or restore a backup that was made before the upgrade"
        )


def _mark_format(folder: Path) -> None:
    """A disk that takes nothing does not keep a broker from starting."""
    known = read_state(folder / _FORMAT_FILE, is_derivable=True)
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        from importlib.metadata import version  # slow to import, and most folders are marked already

        with contextlib.suppress(StoreFull):
            write_state(folder / _FORMAT_FILE, {"format": FORMAT, "by": version("rocketlet")})


def _lock(descriptor: int) -> None:
    """Raises OSError if somebody else has it. Some network file systems lock no folders."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Unsynced:
    """Notes of a file that grows what the device has not been asked to keep."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_synced = True
        self.has_new_name = False

    def wrote(self) -> None:
        self._is_synced = False

    def syncs(self) -> list[Call]:
        """The calls after which everything written is on the device, for the thread that waits for it."""
        if self._is_synced:
            return []
        calls: list[Call] = [partial(_sync, self._path)]
        if self.has_new_name:
            calls.append(partial(disk.sync_folder, self._path.parent))
        self._is_synced, self.has_new_name = True, False
        return calls


def _sync(path: Path) -> None:
    descriptor = disk.open_file(path, disk.APPEND, 0o644)
    try:
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
