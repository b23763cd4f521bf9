"""Rates of groups (`groups set GROUP --rate 100/s`): how many messages a broker hands out to a group in a second.

Each topic of a group has a token bucket at each of its brokers, with the rate divided by the number of brokers that have the
topic. A message that is pulled or popped takes a token. Retries are another topic. Pulls without PULL_SUSPEND are those of
tools, and take none.
"""

from __future__ import annotations

import math
from typing import Protocol

from ...protocol.bodies import GroupConfig, Route, rate_of
from ..config import LIMITED_S, RATE_BURST_S, RATE_COLLECTED_S, RATE_RECHECK_S, RATE_ROUTE_INTERVAL_S
from ..runtime.runtime import Runtime


class RouteFinder(Protocol):
    """Finds the queues of a topic on all brokers."""

    async def find_route(self, topic: str) -> Route | None:
        """Return the route of a topic; None if no name server knows it."""
        ...


class TokenBucket:
    """The tokens of a group in a topic.

    Attributes:
        text: the setting from which the bucket was made.
        brokers: the number of brokers that share the rate.
    """

    def __init__(self, text: str, now_s: float) -> None:
        self.text = text
        self.brokers = 1
        self._promised_s = -math.inf  # when the last read that waits gets its tokens
        self._tokens = self._burst
        self._at_s = now_s
        self._limited_s = -math.inf

    @property
    def _rate(self) -> float:
        return rate_of(self.text) / self.brokers

    @property
    def _burst(self) -> float:
        return max(self._rate * RATE_BURST_S, 1.0)

    def available(self, now_s: float) -> int:
        """Return the number of messages that may be handed out now."""
        return int(self._tokens_at(now_s) + 1e-9)

    def take(self, count: int, now_s: float) -> None:
        """Take a token for each of these messages."""
        self._tokens = self._tokens_at(now_s) - count
        self._at_s = now_s

    def _tokens_at(self, now_s: float) -> float:
        return min(self._tokens + max(now_s - self._at_s, 0.0) * self._rate, self._burst)

    def wait_s(self, now_s: float, most_s: float = RATE_RECHECK_S) -> float:
        """Return how long a read must wait for tokens, at most `most_s` and RATE_RECHECK_S. Reads that wait get tokens in
        order, so that few are woken in vain."""
        most_s = min(most_s, RATE_RECHECK_S)
        self._limited_s = now_s
        needed = max(self._rate * RATE_COLLECTED_S, 1.0)
        until_s = now_s + max(needed - self._tokens_at(now_s), 0.0) / self._rate
        until_s = max(until_s, self._promised_s + needed / self._rate)
        if until_s - now_s > most_s:
            return most_s
        self._promised_s = until_s
        return until_s - now_s

    def is_limited(self, now_s: float) -> bool:
        """Return True if a read has waited for a token lately."""
        return now_s - self._limited_s < LIMITED_S


class Rates:
    """The token buckets of all groups with a rate."""

    def __init__(self, runtime: Runtime, routes: RouteFinder) -> None:
        self._clock, self._tasks, self._limits = runtime.clock, runtime.tasks, runtime.limits
        self._routes = routes
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._looked_s: dict[str, float] = {}
        self._brokers: dict[str, int] = {}

    def bucket(self, settings: GroupConfig, topic: str) -> TokenBucket | None:
        """Return the bucket of a group in a topic; None for a group without a rate."""
        if not settings.has_rate:
            return None
        key, now_s = (settings.name, topic), self._clock.monotonic_s()
        found = self._buckets.get(key)
        if found is None or found.text != settings.rate:
            if len(self._buckets) >= self._limits.max_rate_buckets:
                self._buckets.clear()  # those that are still used are made again, with the tokens of a burst
            found = self._buckets[key] = TokenBucket(settings.rate, now_s)
        found.brokers = self._brokers_of(topic, now_s)
        return found

    def limited(self, group: str) -> list[str]:
        """Return the topics in which a read of a group has waited for a token lately. A loop over all buckets."""
        now_s = self._clock.monotonic_s()
        return [topic for (name, topic), item in self._buckets.items() if name == group and item.is_limited(now_s)]

    def _brokers_of(self, topic: str, now_s: float) -> int:
        """Return the number of brokers that have the topic, as it was found last; 1 until it is known."""
        if now_s - self._looked_s.get(topic, -math.inf) >= RATE_ROUTE_INTERVAL_S:
            if len(self._looked_s) >= self._limits.max_rate_buckets:
                self._looked_s.clear()
            self._looked_s[topic] = now_s
            self._tasks.spawn(self._find(topic))
        return self._brokers.get(topic, 1)

    async def _find(self, topic: str) -> None:
        route = await self._routes.find_route(topic)
        with_master = {broker.name for broker in route.brokers if 0 in broker.addresses} if route is not None else set()
        found = {data.broker_name for data in route.queues} & with_master if route is not None else with_master
        if len(self._brokers) >= self._limits.max_rate_buckets:
            self._brokers.clear()
        self._brokers[topic] = max(len(found), 1)
