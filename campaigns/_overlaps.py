"""Messages in two hands at one time, and what had happened before: of some the broker cannot know.

A client of Apache's that stood still handles what it has when it goes on, whoever has got it meanwhile; ours ask the clock.
No other cause is an excuse.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

BEFORE_MS = 30_000.0  # Apache's clients say nothing for so long (heartbeatBrokerInterval)
STOOD = "a foreign member stood still"
BROKER_STOOD = "a broker stood still"
BROKER_AWAY = "a broker was away"
CHANGED = "members came or went"
NOTHING = "nothing"


class Party(Protocol):
    name: str
    heeds_time: bool


class Overlaps:
    """`causes` counts the overlaps by what had happened last."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self._happened: dict[tuple[str, str], list[list[float]]] = {}

    @contextmanager
    def happening(self, cause: str, name: str) -> Iterator[None]:
        """name: of a member, or of a broker."""
        times = [time.time() * 1000, math.inf]
        self._happened.setdefault((cause, name), []).append(times)
        yield
        times[1] = time.time() * 1000

    def found(self, parties: tuple[Party, Party], began_ms: float) -> str:
        """Counts an overlap that began then. Returns its cause."""
        cause = self._cause(parties, began_ms)
        self.causes[cause] += 1
        return cause

    def _cause(self, parties: tuple[Party, Party], began_ms: float) -> str:
        foreign = {party.name for party in parties if not party.heeds_time}
        if any(self._was(STOOD, name, began_ms) for name in foreign):
            return STOOD
        for cause in (BROKER_STOOD, BROKER_AWAY, CHANGED):
            if any(self._was(*key, began_ms) for key in self._happened if key[0] == cause):
                return cause
        return NOTHING

    def _was(self, cause: str, name: str, began_ms: float) -> bool:
        times = self._happened.get((cause, name), ())
        return any(since_ms <= began_ms <= until_ms + BEFORE_MS for since_ms, until_ms in times)
