"""Logs clients' faults. A client that keeps trying does not fill the log."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..config import MAX_REPORTED_PEERS, REPORT_AGAIN_S


class Reports:
    """One report for an address and reason in ten minutes, and a limited number in all."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._reported: set[tuple[str, str]] = set()
        self._since_s = now_s()

    def is_due(self, peer: str, reason: str) -> bool:
        """Whether this is to be reported; it then counts as reported."""
        if self._now_s() - self._since_s >= REPORT_AGAIN_S:
            self._reported.clear()
            self._since_s = self._now_s()
        key = peer.rpartition(":")[0], reason
        if key in self._reported or len(self._reported) >= MAX_REPORTED_PEERS:
            return False
        self._reported.add(key)
        return True
