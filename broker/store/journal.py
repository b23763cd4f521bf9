"""The changes since a state file was written, one line each. So a change costs its own size, not that of the file.

A line is the CRC-32 of its JSON, a blank, the JSON. The last line may be cut off, by a crash; it was never acknowledged.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import orjson
import structlog

from . import disk
from .files import StoreFull

log = structlog.get_logger("rocketlet.store")


class Journal:
    """Beside the state file at `path`. `lines` is how many changes it holds."""

    def __init__(self, path: Path, *, syncs: bool) -> None:
        self._path = path.with_suffix(".journal")
        self._syncs = syncs
        self._end = 0
        self.lines = 0
        self.is_whole = True  # whether all that was written could be read

    def read(self) -> list[Any]:
        """The changes, oldest first, up to the first that is damaged or cut off, which is taken off."""
        try:
            data = disk.read_file(self._path)
        except FileNotFoundError:
            return []
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
            is_new = self._syncs and not disk.is_there(self._path)
            descriptor = disk.open_file(self._path, disk.CREATE, 0o644)
            try:
                written = 0
                while written < len(line):
                    written += disk.write(descriptor, line[written:])
                if self._syncs:
                    disk.sync(descriptor)
            finally:
                disk.close(descriptor)
            if is_new:
                disk.sync_folder(self._path.parent)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self._path}: {error.strerror}") from error
        self._end += len(line)
        self.lines += 1

    def clear(self) -> None:
        """The state file holds everything."""
        self._end = self.lines = 0
        self._truncate()

    def _truncate(self) -> None:
        """Takes off what is behind the last whole line; if that fails, it fails when the line is read again."""
        try:
            disk.cut(self._path, self._end)
        except OSError as error:
            log.warning("journal_cut_failed", file=str(self._path), reason=error.strerror)


def _value(line: bytes) -> Any:
    """Raises ValueError."""
    mark, content = line[:8], line[9:-1]
    if line[-1:] != b"\n" or mark != b"%08x" % zlib.crc32(content):
        raise ValueError("the line is cut off or damaged")
    return orjson.loads(content)
