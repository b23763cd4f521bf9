"""Errors, file descriptors, state files, and the lock of the data folder, which all parts of the store use."""

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
from typing import Final, NamedTuple

import orjson
import structlog

from ...host.version import own_version
from ...protocol.bodies import encode_json
from ...protocol.names import topic_fault
from ..config import MAX_OPEN_SEGMENTS
from ..runtime.jobs import Call, Job
from . import disk

log = structlog.get_logger("rocketlet.store")

_OLD: Final = ".old"
_REMOVED: Final = "removed"
_FORMAT_FILE: Final = "format.json"
FORMAT: Final = 2
"""Version of the format of all files in a data folder. Increase it if you change how a file is written."""
_SUM_PREFIX: Final = b"\n#crc32 "
_NO_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class StoreError(Exception):
    """The base of the store's errors. For a data folder that cannot be used in its present state, the text has the remedy."""


class StoreFull(StoreError):
    """The error after the operating system has refused to write or remove a file. The store uses nothing of that write."""


class StoreFailed(StoreFull):
    """The device failed. Earlier writes may be lost as well, so nothing is written until the next start."""


class Damaged(StoreError):
    """The error for bytes that differ from those that were written, or are missing."""


class Unreadable(StoreError):
    """The error after the operating system has refused a read, which it may permit later."""


class OpenFiles:
    """Cache of file descriptors by path, so that thousands of queues need few descriptors.

    At most `limit` cached descriptors are open; the least recently used one is closed first. Some are also closed when the
    process has no descriptors left.
    """

    def __init__(self, limit: int = MAX_OPEN_SEGMENTS) -> None:
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str, *, creates: bool = False) -> int:
        """Return a descriptor for reads and appends; for reads only on a read-only file system. With `creates`, a file that
        is not open is created, or truncated if it exists. Raises OSError."""
        descriptor = self._open.get(path)
        if descriptor is None:
            while len(self._open) >= self._limit:
                self._close_oldest()
            descriptor = self._open[path] = self.open_apart(path, creates=creates)
        else:
            self._open.move_to_end(path)
        return descriptor

    def open_apart(self, path: str, *, creates: bool = False) -> int:
        """Return a descriptor that the caller must close, and that is not part of the cache. Raises OSError."""
        flags = disk.CREATE | os.O_TRUNC if creates else disk.APPEND
        while True:
            try:
                return disk.open_file(path, flags, disk.FILE_MODE)
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
        """Close the descriptor of a path, if it is open."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            disk.close(descriptor)

    def close(self) -> None:
        while self._open:
            disk.close(self._open.popitem()[1])


class State(NamedTuple):
    """The value of a state file, or None if there is none; and True if it is the newest value that was written, as far
    as is known."""

    value: object
    is_current: bool


def read_state(path: Path, *, is_derivable: bool = False) -> object:
    """Return the JSON value of a state file, or of its previous copy if the file is damaged or missing; None if neither
    exists.

    Raises StoreError if neither can be used, and at least one is damaged. If `is_derivable` is True, the value can be
    derived from the log, and a damaged file is renamed instead.
    """
    return find_state(path, is_derivable=is_derivable).value


def find_state(path: Path, *, is_derivable: bool = False) -> State:
    """Return the value that `read_state` returns, and True if it is the newest value. Raises StoreError."""
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
    """Return the reason why a state file cannot be used; None if it is intact."""
    try:
        _state_of(disk.read_file(path))
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _state_of(data: bytes) -> object:
    """Return the value in a state file's bytes. Raises ValueError."""
    value, prefix, found = data.rpartition(_SUM_PREFIX)
    if not prefix:
        raise ValueError("its checksum is missing")
    if found.strip() != b"%08x" % zlib.crc32(value):
        raise ValueError("its checksum is wrong")
    return orjson.loads(value)


def write_state(path: Path, value: object, *, sync: bool = True) -> None:
    """Replace a state file by the JSON of a small value, like `replace_state`."""
    replace_state(path, encode_json(value), sync=sync)


def replace_state(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a state file atomically: a reader sees the old value or the new one. Raises StoreFull.

    The file consists of JSON and a line with the CRC-32 of the JSON. The previous file is kept with the suffix `.old`,
    if the file system supports links.

    Args:
        path: the file
        content: the JSON
        sync: True to sync the file to the device. Files that are written every few seconds while clients wait are not
            synced.
    """
    temporary = path.with_suffix(".new")
    try:
        descriptor = disk.open_file(temporary, disk.REPLACE, disk.FILE_MODE)
        try:
            disk.write_all(descriptor, content + _SUM_PREFIX + b"%08x\n" % zlib.crc32(content))
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
    with contextlib.suppress(OSError):  # there is no file yet, or the file system does not support links
        disk.link(path, old)


class Save(NamedTuple):
    """The new content of a state file. `failed` is called if it could not be written."""

    path: Path
    content: bytes
    failed: Callable[[], None]

    def write(self, sync: bool) -> None:
        """Write the file. Raises StoreFull."""
        replace_state(self.path, self.content, sync=sync)

    def saving(self, sync: bool) -> Job[None]:
        """Write the file as a job. Raises StoreFull; the file is then saved again at the next interval."""
        try:
            yield partial(self.write, sync)
        except BaseException:  # StoreFull, or a save that is cancelled
            self.failed()
            raise


class Folder:
    """The data folder, locked by this process. Raises StoreError if another broker uses it."""

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
            # the file can be removed, unlike the folder, which some network file systems cannot lock
            for descriptor in self._locks:
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
        """Return the names of the folders in a subfolder, sorted."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / name) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def queues(self) -> list[tuple[str, int]]:
        """Return topic and queue id of the queues with an index in this folder. Folders whose name is not a legal topic
        name are ignored."""
        return [
            (topic, int(number))
            for topic in self.subfolders("consumequeue")
            if topic_fault(topic) is None
            for number in self.subfolders(f"consumequeue/{topic}")
            if number.isascii() and number.isdigit()
        ]

    def state_files(self) -> list[Path]:
        """Return the paths of the state files, including files of which only the previous copy exists."""
        return sorted({path.with_suffix(".json") for end in ("*.json", f"*{_OLD}") for path in self.path.glob(end)})

    def put_aside(self, name: str, data: bytes) -> None:
        """Save bytes that cannot be interpreted in the folder `damaged`, if they are not saved there yet."""
        path = self.path / "damaged" / name
        try:
            if path.parent.is_symlink():
                raise OSError(errno.ELOOP, "the folder is a link; the broker writes into its data folder only")
            disk.make_folder(path.parent)
            with contextlib.suppress(FileExistsError), open(path, "xb", opener=disk.private) as file:
                file.write(data)
        except OSError as error:
            log.warning("damaged_bytes_not_kept", file=str(path), reason=error.strerror)

    def set_aside(self, topic: str) -> Path | None:
        """Move the index files of a topic away, and return the folder to remove; None if there are none. Raises
        OSError."""
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
        """Return the folder of a queue's index. Raises StoreError for a link, because the broker must not remove files
        outside of its folder."""
        path = self.indexes_of(topic) / str(queue_id)
        for linked in (path.parent, path):
            if linked.is_symlink():
                raise StoreError(
                    f"{linked} is a link; put the folder that it leads to in its place, or remove the link"
                )
        return path

    def empty_removed(self) -> None:
        """Remove files that an earlier run has moved away."""
        disk.remove_folder(self.path / _REMOVED)

    def fault(self) -> str | None:
        """Return the reason why writes no longer reach the folder; None if they do."""
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
    """Raise StoreError for a folder in another format. A folder without a mark has that of this release."""
    known = read_state(folder / _FORMAT_FILE, is_derivable=True)
    if not isinstance(known, dict) or not isinstance(known.get("format"), int):
        return
    if known["format"] < FORMAT:
        raise StoreError(
            f"{folder} was written by an earlier Rocketlet ({known.get('by')}) in format {known['format']}; expected "
            f"{FORMAT}; start that release, copy the topics with `rocketlet mirror` to a new broker, and start that one"
        )
    if known["format"] > FORMAT:
        raise StoreError(
            f"{folder} was written by a newer Rocketlet ({known.get('by')}) in format {known['format']}; expected "
            f"{FORMAT}; install a release that reads that format, or restore a backup that was made before the upgrade"
        )


def _mark_format(folder: Path) -> None:
    """Record the format of the folder. A full disk does not prevent the broker's start."""
    known = read_state(folder / _FORMAT_FILE, is_derivable=True)
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        with contextlib.suppress(StoreFull):
            write_state(folder / _FORMAT_FILE, {"format": FORMAT, "by": own_version()})


def _lock(descriptor: int) -> None:
    """Lock a file or folder. Raises OSError if another process has locked it. Some network file systems cannot lock
    folders."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, disk.FILE_MODE)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Unsynced:
    """Records whether a growing file has bytes that were not synced to the device.

    Attributes:
        is_synced: False after a write
        has_new_name: True after the file was created
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_synced = True
        self.has_new_name = False

    def syncs(self) -> list[Call]:
        """Return the calls that sync everything written to the device, for the thread that waits for the device."""
        if self.is_synced:
            return []
        calls: list[Call] = [partial(_sync, self._path)]
        if self.has_new_name:
            calls.append(partial(disk.sync_folder, self._path.parent))
        self.is_synced, self.has_new_name = True, False
        return calls


def _sync(path: Path) -> None:
    descriptor = disk.open_file(path, disk.APPEND, disk.FILE_MODE)
    try:
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
