"""The common part of campaigns: how long to go on, and the outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PROGRESS_S = 5.0
_met: set[str] = set()
"""The faults of this process, which runs one campaign."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A campaign tries `count` times, or for `seconds`. `for number in limit` counts the tries, and says how
    far it is on standard error, every 5 s. `only`: the one thing to try, where there are several. `ends_at_fault`: nothing
    is tried after a fault."""

    count: int | None = None
    seconds: float | None = None
    only: str | None = None
    ends_at_fault: bool = False

    def __iter__(self) -> Iterator[int]:
        began_s = said_s = time.monotonic()
        end_s = began_s + self.seconds if self.seconds is not None else float("inf")
        number = 0
        while (self.count is None or number < self.count) and (now_s := time.monotonic()) < end_s:
            if now_s >= said_s + PROGRESS_S:
                said_s = now_s
                print(f"{number} tried in {now_s - began_s:.0f} s", file=sys.stderr, flush=True)
            yield number
            if self.ends_at_fault and _met:
                return
            number += 1


@dataclass(slots=True)
class Outcome:
    """`faults` are in words, each kind once with how often it was met; `figures` is what else was measured."""

    tried: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Counts it, and says on standard error what is new."""
        _met.add(text)
        if text not in self.faults:
            print(f"fault: {text}", file=sys.stderr, flush=True)
        self.faults[text] = self.faults.get(text, 0) + 1
