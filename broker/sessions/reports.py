"""Errors and events that clients repeat: which of them are logged, and the recent ones, which metrics and tools report."""

from __future__ import annotations

from collections.abc import Hashable

from ..config import MAX_REFUSED, MAX_REPORTED_PEERS, REFUSED_S, REPORT_AGAIN_S
from ..runtime.clock import MACHINE, Clock


class Reports:
    """Allows one report for each address and reason in an interval of REPORT_AGAIN_S, and up to MAX_REPORTED_PEERS of all."""

    def __init__(self, clock: Clock = MACHINE) -> None:
        self._now_s = clock.monotonic_s
        self._reported: set[tuple[str, str]] = set()
        self._since_s = clock.monotonic_s()

    def is_due(self, peer: str, reason: str) -> bool:
        """Return True if this address and reason were not reported yet in the current interval and the limit is not reached.
        A True result records them as reported."""
        if self._now_s() - self._since_s >= REPORT_AGAIN_S:
            self._reported.clear()
            self._since_s = self._now_s()
        key = peer.rpartition(":")[0], reason
        if key in self._reported or len(self._reported) >= MAX_REPORTED_PEERS:
            return False
        self._reported.add(key)
        return True


class Recent:
    """The latest text of each of the `MAX_REFUSED` keys that were recorded last, for `keep_s`."""

    def __init__(self, clock: Clock = MACHINE, keep_s: float = REFUSED_S) -> None:
        self._now_s = clock.monotonic_s
        self._keep_s = keep_s
        self._latest: dict[Hashable, tuple[float, str]] = {}

    def record(self, key: Hashable, text: str) -> None:
        self._latest.pop(key, None)
        self._latest[key] = self._now_s(), text
        if len(self._latest) > MAX_REFUSED:
            del self._latest[next(iter(self._latest))]

    def texts(self) -> list[str]:
        """Return the texts that were recorded in the last `keep_s`, newest last."""
        since_s = self._now_s() - self._keep_s
        return [text for at_s, text in self._latest.values() if at_s >= since_s]
