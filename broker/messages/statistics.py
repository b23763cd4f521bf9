"""Counters for the rates that administrative tools show: messages stored per topic, and read or sent back per topic and
group."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple

from ...protocol.bodies import LOOKS, Work, finish
from ..config import SAMPLE_INTERVAL_S
from ..runtime.runtime import Runtime
from ..store.store import Store
from .topics import Topics

# Stored messages are computed from the ends of queues, so that a send costs nothing here; a pull costs two additions. A
# sample with the counts since the previous sample is taken every 10 s and kept for one hour, within a memory limit. A
# broker may have 500,000 queues, so work on all of them is done in pieces.


PUT = "TOPIC_PUT_NUMS"
GOT = "GROUP_GET_NUMS"
PUT_BYTES = "TOPIC_PUT_SIZE"
GOT_BYTES = "GROUP_GET_SIZE"
SENT_BACK = "SNDBCK_PUT_NUMS"

_SAMPLES = int(3600 / SAMPLE_INTERVAL_S) + 1

CountKey = tuple[str, str]
"""Apache's name of a statistic, and its key: `topic` for stored messages, `topic@group` for others."""


class Rate(NamedTuple):
    """Count and rate over a time window."""

    total: int
    per_second: float


class Totals(NamedTuple):
    """Counts by statistic and key, and sums by statistic."""

    of: dict[CountKey, int]
    sums: Mapping[str, int]


class _Sample(NamedTuple):
    """A sample. `grown` has the increase of each count since the sample before."""

    time_s: float
    grown: dict[CountKey, int]
    sums: Mapping[str, int]


class Statistics:
    """Counts and rates of stored and read messages."""

    def __init__(self, runtime: Runtime, store: Store, topics: Topics) -> None:
        self._limits = runtime.limits
        self._store = store
        self._clock = clock = runtime.clock
        self._queues_of = topics.all_queues_of
        self._samples: deque[_Sample] = deque()
        self._sampled = 0  # number of counts in all samples
        self.got: Counter[str] = Counter()  # messages that were read, by `topic@group`
        self.got_bytes: Counter[str] = Counter()
        self.sent_back: Counter[str] = Counter()
        self.boot_ms = clock.time_ms()
        self._last = self._midnight = self._yesterday = finish(self.totals())
        self._start = self._last.sums
        self._day, self._midnight_s = self._today(), clock.monotonic_s()
        self._samples.append(_Sample(clock.monotonic_s(), {}, self._last.sums))

    def note_got(self, key: str, messages: int, size: int) -> None:
        self.got[key] += messages
        self.got_bytes[key] += size

    def note_sent_back(self, topic: str, group: str) -> None:
        key = f"{topic}@{group}"
        if key in self.sent_back or len(self.sent_back) < self._limits.max_counted_reads:
            self.sent_back[key] += 1

    def totals(self) -> Work[Totals]:
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
            if total != before:
                grown[key] = total - before if total > before else total  # a recreated topic restarts at 0
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
        """Remove counters beyond the limit: first those of groups that do not read now, then the oldest."""
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

    def _current_count(self, key: CountKey) -> int:
        name, of = key
        counted = {GOT: self.got, GOT_BYTES: self.got_bytes, SENT_BACK: self.sent_back}.get(name)
        if counted is not None:
            return counted.get(of, 0)
        queues = (self._store.queues.get((of, number)) for number in range(self._queues_of(of)))
        return sum((queue.next if name == PUT else queue.put_bytes) for queue in queues if queue is not None)

    def _since(self, since_s: float) -> tuple[float, list[_Sample]]:
        """Return the time of the oldest sample since `since_s` (or of the newest sample if there is none), and the
        samples after it, newest first."""
        found = list(takewhile(lambda sample: sample.time_s >= since_s, reversed(self._samples)))
        if not found:
            return self._samples[-1].time_s, []
        return found[-1].time_s, found[:-1]

    def all_rates(self, window_s: float) -> Work[tuple[Totals, dict[CountKey, float]]]:
        """Return the present count of every statistic and key, and its rate per second over the last `window_s`
        seconds."""
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
        """Return count and rate over the last `window_s` seconds, at most an hour."""
        now_s, key = self._clock.monotonic_s(), (name, of)
        then_s, samples = self._since(now_s - window_s)
        count = (
            self._current_count(key) - self._last.of.get(key, 0) + sum(sample.grown.get(key, 0) for sample in samples)
        )
        return Rate(count, count / max(now_s - then_s, 1.0))

    def today(self, name: str, of: str) -> Rate:
        """Return count and rate since midnight, or since the start if that was later."""
        count = self._current_count((name, of)) - self._midnight.of.get((name, of), 0)
        return Rate(count, count / max(self._clock.monotonic_s() - self._midnight_s, 1.0))

    def sums(self, name: str, now: Totals) -> tuple[int, int, int]:
        """Return the sum of all keys at the start of yesterday, at the start of today, and now. A day that began before the
        broker's start counts from its start."""
        return self._yesterday.sums[name], self._midnight.sums[name], now.sums[name]

    def since_start(self, now: Totals) -> Mapping[str, int]:
        """Return the sum of all keys since the broker's start, by statistic."""
        return {name: count - self._start[name] for name, count in now.sums.items()}

    def rate_of_all(self, name: str, now: Totals, window_s: float) -> Rate:
        """Return count and rate over the last `window_s` seconds, for all keys together."""
        now_s = self._clock.monotonic_s()
        then = next((sample for sample in self._samples if sample.time_s >= now_s - window_s), self._samples[-1])
        count = now.sums[name] - then.sums[name]
        return Rate(count, count / max(now_s - then.time_s, 1.0))

    def today_of_all(self, name: str, now: Totals) -> Rate:
        count = now.sums[name] - self._midnight.sums[name]
        return Rate(count, count / max(self._clock.monotonic_s() - self._midnight_s, 1.0))

    def rates(self, name: str, now: Totals) -> str:
        """Return messages per second of all keys over 10 s, 1 min and 10 min, in Apache's format."""
        now_s = self._clock.monotonic_s()
        rates: list[str] = []
        for window_s in (10, 60, 600):
            near = (sample for sample in self._samples if now_s - sample.time_s <= window_s + SAMPLE_INTERVAL_S)
            then = next(near, self._samples[-1])
            rates.append(f"{(now.sums[name] - then.sums[name]) / max(now_s - then.time_s, 1.0):.3f}")
        return " ".join(rates)
