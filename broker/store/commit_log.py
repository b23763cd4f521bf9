"""The commit log: record after record, each with a checksum. Finds whole ones, and those behind damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ...protocol.message import MAGIC, MAX_RECORD_BYTES, MessageError, Record, decode_record, is_intact, record_size
from ..config import RECOVERY_READ_BYTES
from .files import OpenFiles
from .segments import SegmentedFile

_MAGIC: Final = MAGIC.to_bytes(4, "big")
NOWHERE: Final = 1 << 63


class Damage(NamedTuple):
    """A part of the log that holds no whole record."""

    position: int
    size: int


class CommitLog(SegmentedFile):
    """Records at and behind `summed_from` have a checksum over all of them; those of earlier releases may have none."""

    def __init__(self, folder: Path, segment_bytes: int, open_files: OpenFiles, *, is_synced: bool = False) -> None:
        super().__init__(folder / "commitlog", segment_bytes, open_files, stays_open=True, is_synced=is_synced)
        self.summed_from = NOWHERE

    def record_in(self, data: bytes, at: int, position: int) -> Record | None:
        """The record that `data` holds at `at`, if it is what was written at that position of the log."""
        size = record_size(data, at)
        if not size or at + size > len(data) or size > MAX_RECORD_BYTES:
            return None
        try:
            record = decode_record(data, at)
        except MessageError:
            return None
        is_summed = position >= self.summed_from
        is_whole = record.physical_offset == position and is_intact(data, at, record, is_summed=is_summed)
        return record if is_whole else None

    def record_at(self, position: int) -> Record | None:
        """The whole record at a position of the log; None if there is none."""
        head = self.read_up_to_damage(position, 36)
        size = record_size(head, 0)
        if not size or len(head) < 36 or int.from_bytes(head[28:36], "big") != position:
            return None
        return self.record_in(self.read_up_to_damage(position, size), 0, position)

    def next_record(self, position: int) -> int | None:
        """Where the first whole record at or behind a position begins; None if there is none."""
        while position < self.end:
            data = self.read_up_to_damage(position, RECOVERY_READ_BYTES)
            if len(data) < 8:
                position = self.next_start(position)
                continue
            at = data.find(_MAGIC, 4)
            while at >= 0:
                start = position + at - 4
                if self.record_at(start) is not None:
                    return start
                at = data.find(_MAGIC, at + 1)
            position += len(data) - 7
        return None

    def replay(self, position: int, take: Callable[[Record], None]) -> tuple[int, list[Damage], Damage]:
        """Calls `take` with the log's whole records from `position` on. How many, the damage between, the torn tail."""
        records = 0
        damage: list[Damage] = []
        while position < self.end:
            data = self.read_up_to_damage(position, RECOVERY_READ_BYTES)
            at = 0
            while (record := self.record_in(data, at, position + at)) is not None:
                take(record)
                at += record.size
                records += 1
            position += at
            if at == 0:
                found = self.next_record(position + 1)
                if found is None:
                    return records, damage, Damage(position, self.end - position)
                damage.append(Damage(position, found - position))
                position = found
        return records, damage, Damage(position, 0)
