"""Whether the device takes writes. A broker whose disk is full refuses messages: it says so once, and its end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

import structlog

from ..config import ROOM_BYTES
from . import disk
from .files import StoreFull

log = structlog.get_logger("rocketlet.store")

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """`lack` is why the last write was refused, None if it was not; `refused` is how many were."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free_bytes = 0
        self.lack: str | None = None
        self.refused = 0

    def write_failed(self, error: StoreFull) -> None:
        self.refused += 1
        if self.lack is None:
            free_bytes = self._free_now()
            log.error(
                "writes_refused", reason=str(error), free_bytes=free_bytes, hint="free space on the broker's disk"
            )
        self.lack = f"the disk takes no more: {error}; free space"
        self._free_bytes = self._free_now()

    def save_failed(self, error: StoreFull) -> None:
        """One file of many could not be saved. The others may still be written, unless the disk is full."""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
            self.write_failed(error)

    def wrote(self) -> None:
        if self.lack is not None:
            self.lack = None
            log.info("writes_taken_again", free_bytes=self._free_now())

    def now(self) -> str | None:
        """`lack`, unless space was freed since: nobody may send to a broker that says it is not ready."""
        if self.lack is not None and self._free_now() - self._free_bytes >= ROOM_BYTES:
            self.wrote()
        return self.lack

    def size_and_free_bytes(self) -> tuple[int, int]:
        """The disk's size and its free bytes."""
        return disk.size_and_free_bytes(self._folder)

    def _free_now(self) -> int:
        try:
            return disk.free_bytes(self._folder)
        except OSError:  # the folder is gone, which the checkpoint reports
            return 0
