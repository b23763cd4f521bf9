"""A journal of binary frames, appended to many times a second: each frame is one write to a descriptor that stays open.

    int32 size of the content, int32 CRC-32 of the content, content

A crash may cut off the last frame; its content was never acknowledged. This module does not interpret content.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final

import structlog

from ..running.jobs import Call, Job
from . import disk
from .files import StoreError, StoreFull, Unsynced

log = structlog.get_logger("rocketlet.store")

_HEAD: Final = Struct(">II")
_LAST_BYTES: Final = 64 * 1024  # frames that came while the file was written anew; they are written at once


def framed(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


class Frames:
    """`size` is that of the file, `base` its size when it was written anew, in bytes. `written` grows with each append.
    is_synced: `--flush sync`, so a frame is acknowledged when the calls of `syncs` were made."""

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        self.path = path
        self._is_synced_always = is_synced
        self._descriptor: int | None = None
        self._since: list[bytes] | None = None  # the frames since the file is being written anew
        self._unsynced = Unsynced(self.path)
        self.size = 0
        self.base = 0
        self.written = 0

    def read(self) -> Iterator[bytes]:
        """The frames' contents, oldest first, up to the first that is damaged or cut off. Raises StoreError."""
        try:
            data = disk.read_file(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror}") from error
        while self.size < len(data):
            content = _content(data, self.size)
            if content is None:
                log.error("pop_journal_damaged", file=str(self.path), kept=self.size, bytes=len(data) - self.size)
                self._truncate()
                break
            yield content
            self.size += _HEAD.size + len(content)
        self.base = self.size

    def append(self, content: bytes) -> None:
        """Keeps a frame. Raises StoreFull; nothing of it is kept then."""
        data = framed(content)
        try:
            descriptor = self._open()
            written = 0
            while written < len(data):
                written += disk.write(descriptor, data[written:] if written else data)
        except OSError as error:
            self._truncate()
            raise StoreFull(f"cannot write {self.path}: {error.strerror}") from error
        self.size += len(data)
        self.written += len(data)
        self._unsynced.wrote()
        if self._since is not None:
            self._since.append(data)

    def _open(self) -> int:
        if self._descriptor is None:
            self._unsynced.has_new_name |= not disk.is_there(self.path)
            self._descriptor = disk.open_file(self.path, disk.CREATE, 0o644)
        return self._descriptor

    def syncs(self) -> list[Call]:
        """The calls after which everything appended is on the device, for the thread that waits for it."""
        return self._unsynced.syncs()

    def renewing(self, contents: Iterable[bytes]) -> Job[None]:
        """Writes the file anew: these frames, taken one by one, and those that are appended meanwhile. Raises StoreFull."""
        since: list[bytes] = []
        self._since = since
        aside = self.path.with_suffix(".new")
        frames: list[bytes] = []
        try:
            for content in contents:
                frames.append(framed(content))
                yield None
            size = sum(map(len, frames))
            yield partial(_write, aside, b"".join(frames), disk.REPLACE, sync=True)
            written = 0
            while sum(map(len, since[written:])) > _LAST_BYTES:
                data, written = b"".join(since[written:]), len(since)
                yield partial(_write, aside, data, disk.APPEND, sync=True)
            # nothing comes between this and the new name
            _write(aside, b"".join(since[written:]), disk.APPEND, sync=self._is_synced_always)
            disk.replace(aside, self.path)
            self.close()
            self.size = self.base = size + sum(map(len, since))
            yield partial(disk.sync_folder, self.path.parent)
        except OSError as error:
            raise StoreFull(f"cannot write {aside}: {error.strerror}") from error
        finally:
            self._since = None

    def close(self) -> None:
        """Gives back the descriptor."""
        if self._descriptor is not None:
            disk.close(self._descriptor)
            self._descriptor = None

    def _truncate(self) -> None:
        """Cuts off bytes behind the last whole frame; if that fails, they are damage when the file is read again."""
        try:
            disk.cut(self.path, self.size)
        except OSError as error:
            log.warning("journal_cut_failed", file=str(self.path), reason=error.strerror)


def _content(data: bytes, position: int) -> bytes | None:
    """The content of the frame at a position; None if it is not whole."""
    if len(data) - position < _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, position)
    begin = position + _HEAD.size
    content = data[begin : begin + size]
    return content if len(content) == size and zlib.crc32(content) == checksum else None


def _write(path: Path, data: bytes, mode: int, *, sync: bool) -> None:
    descriptor = disk.open_file(path, mode, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[disk.write(descriptor, view) :]
        if sync:
            disk.sync(descriptor)
    finally:
        disk.close(descriptor)
