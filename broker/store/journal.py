"""The changes since a state file was written, one line each. So a change costs its own size, not that of the file.

A line is the CRC-32 of its JSON, a blank, the JSON. The last line may be cut off, by a crash; it was never acknowledged.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from ..running.jobs import Call, Job
from . import disk
from .files import StoreError, StoreFull, Unsynced

log = structlog.get_logger("rocketlet.store")


_TRIES: Final = 3  # to shorten a journal while changes come


class Journal:
    """The journal beside the state file at `path`. `lines` is how many changes it holds, `written` how many bytes were
    appended since it was opened. With `--flush sync` a change may be acknowledged when the calls of `syncs` were made."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".journal")
        self._end = 0
        self._since: list[bytes] | None = None  # the lines since a state file that is being written
        self._unsynced = Unsynced(self._path)
        self.written = 0
        self.lines = 0
        self.is_whole = True  # whether all that was written could be read

    def read(self) -> list[Any]:
        """The changes, oldest first, up to the first that is damaged or cut off, which is taken off. Raises StoreError."""
        try:
            data = disk.read_file(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from error
        values: list[Any] = []
        for line in data.splitlines(keepends=True):
            try:
                values.append(_value(line))
            except ValueError:
                log.error("journal_damaged", file=str(self._path), kept=len(values), bytes=len(data) - self._end)
                self._truncate()
                self.is_whole = False
                break
            self._end += len(line)
        self.lines = len(values)
        return values

    def append(self, value: Any) -> None:
        """Keeps a change. Raises StoreFull; nothing of it is kept then."""
        content = orjson.dumps(value)
        line = b"%08x %b\n" % (zlib.crc32(content), content)
        try:
            self._unsynced.has_new_name |= self.written == 0
            descriptor = disk.open_file(self._path, disk.CREATE, 0o644)
            try:
                written = 0
                while written < len(line):
                    written += disk.write(descriptor, line[written:])
            finally:
                disk.close(descriptor)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self._path}: {error.strerror}") from error
        self._end += len(line)
        self.written += len(line)
        self.lines += 1
        self._unsynced.wrote()
        if self._since is not None:
            self._since.append(line)

    def syncs(self) -> list[Call]:
        """The calls after which everything appended is on the device, for the thread that waits for it."""
        return self._unsynced.syncs()

    def shortening(self, save: Job[None]) -> Job[None]:
        """Saves the state, which then holds all earlier changes, and keeps only the changes since."""
        self._since = []
        aside = self._path.with_suffix(".journal-new")
        try:
            yield from save
            for _ in range(_TRIES):
                lines = list(self._since)
                yield partial(_write, aside, b"".join(lines))
                if len(lines) == len(self._since):
                    disk.replace(aside, self._path)
                    self._end, self.lines = sum(map(len, lines)), len(lines)
                    yield partial(disk.sync_folder, self._path.parent)
                    break
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def clear(self) -> None:
        """The state file holds everything."""
        self._end = self.lines = 0
        self._truncate()

    def _truncate(self) -> None:
        """Cuts off bytes behind the last whole line; if that fails, it fails when the line is read again."""
        try:
            disk.cut(self._path, self._end)
        except OSError as error:
            log.warning("journal_cut_failed", file=str(self._path), reason=error.strerror)


def _write(path: Path, data: bytes) -> None:
    descriptor = disk.open_file(path, disk.REPLACE, 0o644)
    try:
        while data:
            data = data[disk.write(descriptor, data) :]
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _value(line: bytes) -> Any:
    """Raises ValueError."""
    mark, content = line[:8], line[9:-1]
    if line[-1:] != b"\n" or mark != b"%08x" % zlib.crc32(content):
        raise ValueError("the line is cut off or damaged")
    return orjson.loads(content)
