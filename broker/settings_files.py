"""Files that an operator writes, such as certificates and accounts: have they changed, and how is one replaced?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

State = tuple[int, int, int] | None


class Watched:
    """Looks at the files' dates, sizes and inodes, as Apache's FileWatchService at their hashes: a few microseconds, on
    every kind of file system, through the symlinks that Kubernetes swaps."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._states()

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


def read_file(path: Path) -> bytes:
    """Raises OSError."""
    return path.read_bytes()


def is_readable_by_all(path: Path) -> bool:
    """Raises OSError."""
    return bool(path.stat().st_mode & 0o004)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file whole and synced; it keeps who may read it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, path.stat().st_mode & 0o777)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
