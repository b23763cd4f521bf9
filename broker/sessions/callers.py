"""Clients of 5.x: how many connections they have, what they were answered, and which of their calls failed lately."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..clock import Clock
from ..config import MAX_NAMED_CHARS
from .recent import Recent

_EXPECTED: Final = frozenset((20000, 30000, 40401, 40013, 40100))
"""Well, nothing to receive, a handle whose time is over; and what an account may not do, of which accounts tell."""


class Callers:
    """`answers`: by method and code."""

    def __init__(self, clock: Clock) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self._failed = Recent(clock.monotonic_s)
        self.failed = self._failed.texts

    def answered(self, method: str, code: int, reason: str, client: str) -> None:
        """`client`: its id and address."""
        self.answers[method, str(code)] += 1
        if code not in _EXPECTED:
            self._failed.note((method, code, client), f"{code} {method} of {client}: {reason[:MAX_NAMED_CHARS]}")

    def ended(self, method: str, status: int) -> None:
        """Without a message: with a status of gRPC alone."""
        self.answers[method, f"gRPC {status}"] += 1
