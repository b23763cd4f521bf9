"""Files whose paths users give, such as certificates. Pipes are rejected, because reading one could block, and large
files, too.

A file that is replaced at each write is locked with a separate lock file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def check_file(path: str | Path, max_bytes: int) -> None:
    """Raise OSError if a path is not a regular file of at most `max_bytes`."""
    _check(os.stat(path), path, max_bytes)


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Raises OSError for any other, even if it grows
    meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not wait for a writer
    try:
        _check(os.fstat(descriptor), path, max_bytes)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it grew beyond {max_bytes} bytes while it was read", str(path))
    return data


def locked_beside(path: Path) -> BinaryIO:
    """Open and lock `PATH.lock`, until it is closed or the process ends. Return the open file.

    Raises BlockingIOError if it is locked already. On systems that do not support locks, the file is only opened.
    """
    file = path.with_name(f"{path.name}.lock").open("ab")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # some network file systems do not support locks
    return file


def _check(found: os.stat_result, path: str | Path, max_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes (maximum {max_bytes})", str(path))
