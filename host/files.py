"""Files that users name, such as certificates. A pipe is refused, because its reader would wait, and so is a large file.

A file that is rewritten each time is locked by a file beside it.
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
    """Raises OSError unless this is a regular file of at most `max_bytes`."""
    _check(os.stat(path), path, max_bytes)


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """Raises OSError unless this is a regular file of at most `max_bytes`, also when it grows meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait for its writer
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
    """`PATH.lock`, locked until it is closed or the process ends. Raises BlockingIOError if somebody else has it. Where no
    file can be locked, it is opened only."""
    file = path.with_name(f"{path.name}.lock").open("ab")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # some network file systems lock nothing
    return file


def _check(found: os.stat_result, path: str | Path, max_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes; {max_bytes} are allowed", str(path))
