"""Copies a data folder, also while a broker writes to it.

The log is the truth: entries that the other files lack are found in it at the start. So they are copied first, the log
behind them. If retention deletes the log's first segment in between, everything is done once more, which copies only new
data. Segments are only ever appended to: a copy of one is continued where it ends, unless another file has its name now.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .files import StoreError, check_format

_LOG: Final = "commitlog"
_APPENDED: Final = (_LOG, "consumequeue")
_PARTIAL: Final = ".partial"
_ROUNDS: Final = 10
_AT_ONCE_BYTES: Final = 1 << 20
# Leases are over by the time of a copy, and files that were put aside are for people who look at the damaged folder.
_LEFT_OUT: Final = ("lock", "removed", "damaged")


def copying(source: Path, target: Path) -> Iterator[int]:
    """Copies a data folder into a folder that is new or empty; yields how many bytes were copied since. The copy has its name
    when it is whole: until then it is in `target/.partial`. Raises StoreError and OSError."""
    if not (source / "lock").exists():
        raise StoreError(f"{source} is not a data folder: it has no file `lock`")
    check_format(source)
    partial = target / _PARTIAL
    target.mkdir(parents=True, exist_ok=True)
    if any(entry.name != _PARTIAL for entry in target.iterdir()):
        raise StoreError(f"{target} is not empty; give a new folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    copy = _Copy(source, partial)
    for _ in range(_ROUNDS):
        first = _first_segment(source)
        yield from copy.states()
        yield from copy.log()
        if _first_segment(source) == first:
            break
    else:
        raise StoreError(
            f"retention deletes faster from {source} than it can be copied; keep messages longer meanwhile"
        )
    (partial / "lock").touch()


def finish(target: Path) -> None:
    """The copy is whole."""
    partial = target / _PARTIAL
    for entry in sorted(partial.iterdir(), key=lambda path: path.name == "lock"):  # which makes it a data folder
        entry.rename(target / entry.name)
    partial.rmdir()
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(target: Path) -> Path:
    return target / _PARTIAL


def _first_segment(source: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return min(os.listdir(source / _LOG), default="")
    return ""


class _Copy:
    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        self._copied: dict[Path, int] = {}  # the inodes of the files that copies were begun of

    def states(self) -> Iterator[int]:
        """All but the log."""
        for entry in sorted(os.listdir(self._source)):
            if entry not in (_LOG, *_LEFT_OUT) and not entry.startswith("locks.") and not entry.endswith(".new"):
                yield from self._tree(Path(entry))

    def log(self) -> Iterator[int]:
        first = _first_segment(self._source)
        yield from self._tree(Path(_LOG))
        for name in os.listdir(self._target / _LOG):
            if name < first:
                (self._target / _LOG / name).unlink()

    def _tree(self, path: Path) -> Iterator[int]:
        """A file, or a folder with all that is in it. A file that goes meanwhile, such as of a deleted topic, is left out."""
        source = self._source / path
        if source.is_symlink():
            raise StoreError(f"{source} is a link; put what it leads to in its place")
        if not source.is_dir():
            with contextlib.suppress(FileNotFoundError):
                yield from self._file(path)
            return
        (self._target / path).mkdir(exist_ok=True)
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(source))
        for name in names:
            yield from self._tree(path / name)

    def _file(self, path: Path) -> Iterator[int]:
        target = self._target / path
        with open(self._source / path, "rb") as read:
            inode = os.fstat(read.fileno()).st_ino
            is_continued = path.parts[0] in _APPENDED and self._copied.get(path) == inode
            with open(target, "ab" if is_continued else "wb") as written:
                self._copied[path] = inode
                shutil.copymode(self._source / path, target)
                read.seek(written.tell())
                while data := read.read(_AT_ONCE_BYTES):
                    written.write(data)
                    yield len(data)
                written.flush()
                os.fsync(written.fileno())
