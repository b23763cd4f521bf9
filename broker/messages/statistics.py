"""Counters behind the rates that administration shows: messages put per topic, got per topic and group.

Puts are computed from the ends of queues, so a send costs nothing here; a pull costs one addition. A sample is taken every
10 s and kept for one hour.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple

from ..clock import Clock
from ..config import SAMPLE_INTERVAL_S
from ..store.store import Store

_SAMPLES = int(3600 / SAMPLE_INTERVAL_S) + 1
_DAY_S = 86_400

Key = tuple[str, str]
"""A statistic's name in Apache's words (TOPIC_PUT_NUMS, GROUP_GET_NUMS) and its key (`topic`, `topic@group`)."""


class Rate(NamedTuple):
    """Over a window: how many, and how many a second."""

    total: int
    per_second: float


class Statistics:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._samples: deque[tuple[float, Counter[Key]]] = deque(maxlen=_SAMPLES)
        self.got: Counter[str] = Counter()  # by `topic@group`; pulls add to it
        self.boot_ms = clock.time_ms()
        self._first = self._totals()
        self._midnight = self._yesterday = self._first
        self._day = self._today()
        self.sample()

    def sample(self) -> None:
        totals = self._totals()
        self._samples.append((self._clock.monotonic_s(), totals))
        today = self._today()
        if today != self._day:
            self._day, self._yesterday, self._midnight = today, self._midnight, totals

    def _today(self) -> int:
        return time.localtime(self._clock.time_s()).tm_yday

    def _totals(self) -> Counter[Key]:
        totals: Counter[Key] = Counter({("GROUP_GET_NUMS", key): count for key, count in self.got.items()})
        for queue in self._store.queues.values():
            totals["TOPIC_PUT_NUMS", queue.topic] += queue.next
        return totals

    def all_rates(self, window_s: float) -> dict[Key, float]:
        """Per second, of every statistic and key, over the last `window_s` seconds."""
        now_s = self._clock.monotonic_s()
        then_s, then = self._sample_of(now_s - window_s)
        return {key: (total - then[key]) / max(now_s - then_s, 1.0) for key, total in self._totals().items()}

    def _sample_of(self, since_s: float) -> tuple[float, Counter[Key]]:
        """The oldest sample since then, or the newest."""
        return next((sample for sample in self._samples if sample[0] >= since_s), self._samples[-1])

    def rate(self, name: str, key: str, window_s: float) -> Rate:
        """What was counted in the last `window_s` seconds, an hour at most."""
        now_s = self._clock.monotonic_s()
        then_s, then = self._sample_of(now_s - window_s)
        count = self._totals()[name, key] - then[name, key]
        return Rate(count, count / max(now_s - then_s, 1.0))

    def today(self, name: str, key: str) -> Rate:
        """Since midnight, or since the start if that was later."""
        count = self._totals()[name, key] - self._midnight[name, key]
        return Rate(count, count / max(self._clock.time_s() % _DAY_S, 1.0))

    def sums(self, name: str) -> tuple[int, int, int]:
        """The count of all keys yesterday morning, this morning, and now."""
        return _sum(self._yesterday, name), _sum(self._midnight, name), _sum(self._totals(), name)

    def rates(self, name: str) -> str:
        """Messages per second of all keys over 10 s, 1 min and 10 min, in Apache's form."""
        now_s, now = self._clock.monotonic_s(), self._totals()
        rates: list[str] = []
        for window_s in (10, 60, 600):
            samples = [sample for sample in self._samples if now_s - sample[0] <= window_s + SAMPLE_INTERVAL_S]
            then_s, then = samples[0] if samples else self._samples[-1]
            rates.append(f"{(_sum(now, name) - _sum(then, name)) / max(now_s - then_s, 1.0):.3f}")
        return " ".join(rates)


def _sum(totals: Counter[Key], name: str) -> int:
    return sum(count for key, count in totals.items() if key[0] == name)
