"""What campaigns share: how long to go on, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """A campaign tries `count` times, or for `seconds`. `for number in limit` counts the tries. `only`: the one thing to try,
    where there are several."""

    count: int | None = None
    seconds: float | None = None
    only: str | None = None

    def __iter__(self) -> Iterator[int]:
        end_s = time.monotonic() + self.seconds if self.seconds is not None else float("inf")
        number = 0
        while (self.count is None or number < self.count) and time.monotonic() < end_s:
            yield number
            number += 1


@dataclass(slots=True)
class Outcome:
    """`faults` are in words, each kind once with how often it was met; `figures` is what else was measured."""

    tried: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        self.faults[text] = self.faults.get(text, 0) + 1
