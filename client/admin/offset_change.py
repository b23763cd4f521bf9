"""Offsets that are set from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...protocol.queue import Queue

To = Literal["first", "last"] | int | Mapping[Queue, int]
"""The target of a reset: the first message, the end, a store time in ms since the epoch, or an offset for each queue."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """A reset's effect on a queue: the messages that it skips, or that will be consumed again. `before` is None for a group
    that has no offset there."""

    before: int | None
    after: int

    @property
    def skipped(self) -> int:
        return max(self.after - (self.before or 0), 0)

    @property
    def repeated(self) -> int:
        return max((self.before or 0) - self.after, 0)
