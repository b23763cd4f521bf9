"""Every call that the store makes to the operating system. Campaigns replace them here to put faults in."""

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


def used_ratio(path: Path) -> float:
    """How full the file system is that a folder lies on, 0 to 1: of what may be written, as `df` counts it. Blocks that are
    reserved for root are neither used nor free."""
    usage = shutil.disk_usage(path)
    return usage.used / ((usage.used + usage.free) or 1)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def size_and_free_bytes(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def read_file(path: Path) -> bytes:
    """The content of a file; raises OSError for anything else, such as a pipe, which would not end."""
    with open(os.open(path, READ | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
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
    """Removes a folder with its contents. Files that cannot be removed stay."""
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path | str) -> None:
    """Returns when the names in a folder are on the device."""
    descriptor = open_file(str(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        close(descriptor)
