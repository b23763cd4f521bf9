"""Files that an operator writes, such as certificates and accounts: have they changed, and how is one replaced?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

State = tuple[int, int, int] | None
T = TypeVar("T")


class Unsettled(Exception):
    """The files are not as they were at the last two looks: somebody may be writing them."""


class Watched:
    """Looks at the files' dates, sizes and inodes: a few microseconds, on every kind of file system, through the symlinks
    that Kubernetes swaps.

    Editors and configuration management write a file in place, and the first half of one can be whole by itself: YAML with
    fewer accounts, or without the permission that denies. (Apache's FileWatchService takes such a half when its hash
    differs.) So files are taken when two looks found them alike, and only if they are still so when they have been read.
    The first time there is no former look: files are written before a server is started.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._taken = self._seen = self._still = self._states()

    def look(self) -> bool:
        """Whether they are to be taken: they have changed, and are as they were at the former look."""
        now = self._states()
        if now == self._seen:
            self._still = now
        self._seen = now
        return now == self._still and self.has_changed

    @property
    def has_changed(self) -> bool:
        """Whether the last two looks that found them alike found other files than those that were taken."""
        return self._still != self._taken

    def take(self, read: Callable[[], T]) -> T:
        """Calls `read`. Raises Unsettled if the files have changed since the last two looks."""
        still = self._still
        try:
            return read()
        finally:
            if self._states() != still:
                raise Unsettled
            self._taken = still

    def written(self) -> None:
        """The files are now as this process has replaced them."""
        self._taken = self._seen = self._still = self._states()

    def _states(self) -> list[State]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


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
