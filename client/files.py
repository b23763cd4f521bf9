"""Files that the user names: what is no file, or far too large, is refused before it is read. From a pipe one would wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def check_file(path: str | Path, max_bytes: int) -> None:
    """Raises OSError for what is no regular file, is too large, or is not there."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes; {max_bytes} are allowed", str(path))


def read_file(path: Path, max_bytes: int) -> bytes:
    """Raises OSError."""
    check_file(path, max_bytes)
    return path.read_bytes()
