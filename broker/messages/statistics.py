"""Counters behind the rates that administration shows: messages put per topic, got per topic and group.

Puts are computed from the ends of queues, so a send costs nothing here; a pull costs one addition. A sample is taken every
10 s and kept for one hour, if there is room: it has the counts since the one before. A broker has 500,000 queues at most,
so what looks at all of them does so in pieces.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

from ...protocol.work import LOOKS, Work, finish
from ..clock import Clock
from ..config import LIMITS, SAMPLE_INTERVAL_S, Limits
from ..store.store import Store

PUT = "TOPIC_PUT_NUMS"
GOT = "GROUP_GET_NUMS"
PUT_BYTES = "TOPIC_PUT_SIZE"
GOT_BYTES = "GROUP_GET_SIZE"
SENT_BACK = "SNDBCK_PUT_NUMS"

_SAMPLES = int(3600 / SAMPLE_INTERVAL_S) + 1

CountKey = tuple[str, str]
"""A statistic's name in Apache's words, and its key: `topic` of what was put, `topic@group` of the others."""


class Rate(NamedTuple):
    """Over a window: how many, and how many a second."""

    total: int
    per_second: float


class Totals(NamedTuple):
    """How many of each, and of each name."""

    of: dict[CountKey, int]
    sums: Mapping[str, int]


class _Sample(NamedTuple):
    """`grown`: by how much since the sample before."""

    time_s: float
    grown: dict[CountKey, int]
    sums: Mapping[str, int]


class Statistics:
    """`queues_of(topic)`: how many queues it has, to read or to write."""

    def __init__(self, store: Store, clock: Clock, queues_of: Callable[[str], int], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._store = store
        self._clock = clock
        self._queues_of = queues_of
        self._samples: deque[_Sample] = deque()
        self._sampled = 0  # counters in all samples
        self.got: Counter[str] = Counter()  # by `topic@group`; pulls add to it, and to the next
        self.got_bytes: Counter[str] = Counter()
        self.sent_back: Counter[str] = Counter()
        self.boot_ms = clock.time_ms()
        self._last = self._midnight = self._yesterday = finish(self.totals())
        self._start = self._last.sums
        self._day, self._midnight_s = self._today(), clock.monotonic_s()
        self._samples.append(_Sample(clock.monotonic_s(), {}, self._last.sums))

    def note_got(self, key: str, messages: int, pieces: Iterable[bytes | memoryview]) -> None:
        self.got[key] += messages
        self.got_bytes[key] += sum(map(len, pieces))

    def note_sent_back(self, topic: str, group: str) -> None:
        key = f"{topic}@{group}"
        if key in self.sent_back or len(self.sent_back) < self._limits.max_counted_reads:
            self.sent_back[key] += 1

    def totals(self) -> Work[Totals]:
        """The current counts."""
        totals: dict[CountKey, int] = {}
        sums = dict.fromkeys((GOT, GOT_BYTES, SENT_BACK, PUT, PUT_BYTES), 0)
        for kind, counted in ((GOT, self.got), (GOT_BYTES, self.got_bytes), (SENT_BACK, self.sent_back)):
            for number, (name, count) in enumerate(list(counted.items()), 1):
                totals[kind, name] = count
                sums[kind] += count
                if number % LOOKS == 0:
                    yield
        for number, queue in enumerate(list(self._store.queues.values()), 1):
            for kind, count in ((PUT, queue.next), (PUT_BYTES, queue.put_bytes)):
                if count:
                    key = (kind, queue.topic)
                    totals[key] = totals.get(key, 0) + count
                    sums[kind] += count
            if number % LOOKS == 0:
                yield
        return Totals(totals, sums)

    def sampling(self) -> Work[None]:
        totals = yield from self.totals()
        last, grown = self._last.of, dict[CountKey, int]()
        for number, (key, total) in enumerate(totals.of.items(), 1):
            before = last.get(key, 0)
            if total != before:  # one that was made anew begins at 0
                grown[key] = total - before if total > before else total
            if number % LOOKS == 0:
                yield
        self._samples.append(_Sample(self._clock.monotonic_s(), grown, totals.sums))
        self._sampled += len(grown)
        while len(self._samples) > _SAMPLES or (self._sampled > self._limits.max_sampled and len(self._samples) > 1):
            self._sampled -= len(self._samples.popleft().grown)
        self._last = totals
        today = self._today()
        if today != self._day:
            self._day, self._yesterday, self._midnight = today, self._midnight, totals
            self._midnight_s = self._clock.monotonic_s()
        yield from self._trimming(grown)

    def _trimming(self, grown: Mapping[CountKey, int]) -> Work[None]:
        """Forgets topics and groups beyond the limit: those that nobody reads now, then the oldest."""
        for is_idle in (True, False):
            for number, key in enumerate(list(self.got), 1):
                if len(self.got) <= self._limits.max_counted_reads:
                    return
                if not is_idle or (GOT, key) not in grown:
                    for counted in (self.got, self.got_bytes, self.sent_back):
                        del counted[key]
                if number % LOOKS == 0:
                    yield

    def _today(self) -> int:
        return time.localtime(self._clock.time_s()).tm_yday

    def _now(self, key: CountKey) -> int:
        """The current count of one statistic."""
        name, of = key
        counted = {GOT: self.got, GOT_BYTES: self.got_bytes, SENT_BACK: self.sent_back}.get(name)
        if counted is not None:
            return counted.get(of, 0)
        queues = (self._store.queues.get((of, number)) for number in range(self._queues_of(of)))
        return sum((queue.next if name == PUT else queue.put_bytes) for queue in queues if queue is not None)

    def _since(self, since_s: float) -> tuple[float, list[_Sample]]:
        """When the oldest sample since then was taken, or the newest of all, and those after it, newest first."""
        found = list(takewhile(lambda sample: sample.time_s >= since_s, reversed(self._samples)))
        if not found:
            return self._samples[-1].time_s, []
        return found[-1].time_s, found[:-1]

    def all_rates(self, window_s: float) -> Work[tuple[Totals, dict[CountKey, float]]]:
        """The current count of every statistic and key, and its rate per second over the last `window_s` seconds."""
        now_s, totals = self._clock.monotonic_s(), (yield from self.totals())
        then_s, samples = self._since(now_s - window_s)
        rates: dict[CountKey, float] = {}
        for number, (key, total) in enumerate(totals.of.items(), 1):
            count = total - self._last.of.get(key, 0) + sum(sample.grown.get(key, 0) for sample in samples)
            rates[key] = count / max(now_s - then_s, 1.0)
            if number % LOOKS == 0:
                yield
        return totals, rates

    def rate(self, name: str, of: str, window_s: float) -> Rate:
        """The count and rate of the last `window_s` seconds, an hour at most."""
        now_s, key = self._clock.monotonic_s(), (name, of)
        then_s, samples = self._since(now_s - window_s)
        count = self._now(key) - self._last.of.get(key, 0) + sum(sample.grown.get(key, 0) for sample in samples)
        return Rate(count, count / max(now_s - then_s, 1.0))

    def today(self, name: str, of: str) -> Rate:
        """The count and rate since midnight, or since the start if that was later."""
        count = self._now((name, of)) - self._midnight.of.get((name, of), 0)
        return Rate(count, count / max(self._clock.monotonic_s() - self._midnight_s, 1.0))

    def sums(self, name: str, now: Totals) -> tuple[int, int, int]:
        """The count of all keys yesterday morning, this morning, and now."""
        return self._yesterday.sums[name], self._midnight.sums[name], now.sums[name]

    def since_start(self, now: Totals) -> Mapping[str, int]:
        """The count of all keys, by statistic, since the broker started."""
        return {name: count - self._start[name] for name, count in now.sums.items()}

    def rate_of_all(self, name: str, now: Totals, window_s: float) -> Rate:
        """Like `rate`, for all keys together."""
        now_s = self._clock.monotonic_s()
        then = next((sample for sample in self._samples if sample.time_s >= now_s - window_s), self._samples[-1])
        count = now.sums[name] - then.sums[name]
        return Rate(count, count / max(now_s - then.time_s, 1.0))

    def today_of_all(self, name: str, now: Totals) -> Rate:
        count = now.sums[name] - self._midnight.sums[name]
        return Rate(count, count / max(self._clock.monotonic_s() - self._midnight_s, 1.0))

    def rates(self, name: str, now: Totals) -> str:
        """Messages per second of all keys over 10 s, 1 min and 10 min, in Apache's form."""
        now_s = self._clock.monotonic_s()
        rates: list[str] = []
        for window_s in (10, 60, 600):
            near = (sample for sample in self._samples if now_s - sample.time_s <= window_s + SAMPLE_INTERVAL_S)
            then = next(near, self._samples[-1])
            rates.append(f"{(now.sums[name] - then.sums[name]) / max(now_s - then.time_s, 1.0):.3f}")
        return " ".join(rates)
