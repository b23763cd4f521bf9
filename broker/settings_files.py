"""Files that an operator writes, such as certificates and accounts: have they changed, and how is one replaced?"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

State = tuple[int, int, int] | None


class Watched:
    """Looks at the files' dates, sizes and inodes, as Apache's FileWatchService at their hashes: a few microseconds, on
    every kind of file system, through the symlinks that Kubernetes swaps."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._states()

    @property
    def is_stale(self) -> bool:
        """Whether they have changed since the last `has_changed`."""
        return self._states() != self._seen

    def has_changed(self) -> bool:
        """Whether they have changed since the last look."""
        now = self._states()
        changed, self._seen = now != self._seen, now
        return changed

    def _states(self) -> list[State]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def check_file(path: Path, max_bytes: int) -> None:
    """Raises OSError for a file that is too large to be read, and for what is none: from a pipe, a reader would wait."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes; {max_bytes} are allowed", str(path))


def read_file(path: Path, max_bytes: int) -> bytes:
    """Raises OSError, also for what is no file or too large."""
    check_file(path, max_bytes)
    return path.read_bytes()


def is_readable_by_all(path: Path) -> bool:
    """Raises OSError."""
    return bool(path.stat().st_mode & 0o004)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file whole and synced; it keeps who may read it. Raises OSError, the file then as it was."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        _write_synced(temporary, data, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
