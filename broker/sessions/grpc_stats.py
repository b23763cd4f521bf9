"""Statistics of gRPC clients: connections, responses by code, and calls that failed lately."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..config import MAX_NAMED_CHARS
from ..runtime.clock import Clock
from .reports import Recent

_EXPECTED: Final = frozenset((20000, 30000, 40401, 40013, 40100))
"""Codes that are no failure: success, several results, no message, an expired receipt handle, and refused permissions, which
`access` reports."""


class GrpcClientStats:
    """The responses by method and code, the open connections, recent failures, and outdated clients."""

    def __init__(self, clock: Clock) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.connections = 0
        self._failed = Recent(clock)
        self.failed = self._failed.texts
        self._outdated = Recent(clock)
        self.outdated = self._outdated.texts

    def answered(self, method: str, code: int, reason: str, client: str) -> None:
        """Count a response, and record it if its code is a failure. `client` is the client's id and address."""
        self.answers[method, str(code)] += 1
        if code not in _EXPECTED:
            self._failed.record((method, code, client), f"{code} {method} of {client}: {reason[:MAX_NAMED_CHARS]}")

    def note_outdated(self, client: str, reason: str) -> None:
        """Record a client whose version has a defect that the broker cannot work around."""
        self._outdated.record(client, f"{client}: {reason}")

    def ended(self, method: str, status: int) -> None:
        """Count a call that ended with a gRPC status and without a message or headers before."""
        self.answers[method, f"gRPC {status}"] += 1
