"""Durations counted in buckets, from which Prometheus computes quantiles, even over many brokers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """`bounds_s` are the upper bounds of the buckets, in seconds; a last bucket has all longer durations."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds_s, duration_s)] += count
        self.sum_s += duration_s * count

    def buckets(self) -> list[tuple[str, int]]:
        """Return each bound as Prometheus writes it, with the number of durations up to it."""
        found: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds_s), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found
