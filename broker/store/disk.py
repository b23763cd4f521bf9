"""The store's calls to the operating system that write, sync, replace and remove its files, and most reads. Fault
injection replaces these calls here."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Final

APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
CREATE: Final = APPEND | os.O_CREAT
REPLACE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
READ: Final = os.O_RDONLY | os.O_CLOEXEC

FILE_MODE: Final = 0o600  # only the user of the broker may read messages and state


def private(path: str, flags: int) -> int:
    """Open a file for `open`, whose argument `opener` this is. A new file has `FILE_MODE`."""
    return os.open(path, flags, FILE_MODE)


open_file = os.open
close = os.close
write = os.write
read_at = os.pread
truncate = os.ftruncate
cut = os.truncate
sync = os.fdatasync
replace = os.replace
link = os.link
remove = os.unlink
rename_folder = os.rename


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(descriptor, view) :]


def used_ratio(path: Path) -> float:
    """Return the used fraction (0 to 1) of a folder's file system, as `df` counts it: blocks that are reserved for root
    are neither used nor free."""
    usage = shutil.disk_usage(path)
    return usage.used / ((usage.used + usage.free) or 1)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def size_and_free_bytes(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def read_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else, such as a pipe, which might never end."""
    with open(os.open(path, READ | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def names_in(folder: Path) -> list[str]:
    return os.listdir(folder)


def size_of(path: Path) -> int:
    return path.stat().st_size


def is_there(path: Path) -> bool:
    return path.exists()


def make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path | str) -> None:
    """Remove a folder and its contents. Files that cannot be removed are kept."""
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path | str) -> None:
    """Sync the names of the files in a folder to the device."""
    descriptor = open_file(str(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        close(descriptor)
