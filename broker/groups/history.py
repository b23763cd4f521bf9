"""The history of a group's queues and members, how long rebalances took, and refused heartbeats."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from functools import cache
from sys import getsizeof
from typing import Any, Final, Protocol

import structlog

from ..config import (
    HANDOVER_BOUNDS_S,
    HISTORY_EVENT_BYTES,
    HISTORY_TEXT_CHARS,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    REBALANCE_REST_S,
)
from ..runtime import Clock, Histogram, Runtime
from ..sessions import Recent
from ..store.journals import LeaseKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# Heartbeats that were refused: the client reads nothing, and most clients say nothing of it.
#
# A client sends a heartbeat every 30 s, so a refusal that was not repeated for longer is over.


class Refusals:
    """`count`: of all heartbeats that were refused."""

    def __init__(self, clock: Clock) -> None:
        self._recent = Recent(clock)
        self.recent = self._recent.texts
        self.count = 0

    def note(self, peer: str, client_id: str, groups: Sequence[str], reason: str, *, is_news: bool) -> None:
        """`is_news`: whether the log does not have it of this client's address already."""
        self.count += 1
        named = " ".join(groups[:MAX_NAMED_MEMBERS])[:MAX_NAMED_CHARS]
        text = f"{client_id[:MAX_NAMED_CHARS]} ({peer}) of {named or 'a group'}: {reason[:MAX_NAMED_CHARS]}"
        self._recent.note((peer, named), text)
        if is_news:
            log.warning("heartbeat_refused", client=client_id, peer=peer, groups=named, reason=reason)


# ------------------------------------------------------------------------------
# The newest events of each group's queues and members, for administrators.


LOCKED: Final = "locked"


# Of a lease there are the most events. A tuple takes half of a dictionary's memory; the names of the details are one
# object for all events of a kind.
HistoryEvent = tuple[Any, ...]  # the names of the details, time in ms, event, client id, details
_OF_LEASE: Final = ("topic", "queue", "epoch")


def shown(event: HistoryEvent) -> dict[str, Any]:
    """Return an event as it is reported: `{"ms", "event", "client", ...}`."""
    names, ms, kind, client, *details = event
    return {"ms": ms, "event": kind, "client": client, **dict(zip(names, details, strict=True))}


def _bytes_of(event: HistoryEvent) -> int:
    if event[0] is _OF_LEASE:  # the texts of lease events are shared with other objects, so they are not counted
        return HISTORY_EVENT_BYTES
    return HISTORY_EVENT_BYTES + sum(getsizeof(detail) for detail in event[4:] if isinstance(detail, str))


class History:
    """At most 10,000 events of a group, oldest first; of the 1,000 youngest groups, and 200,000 or 40 MiB in all."""

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._order: deque[deque[HistoryEvent]] = deque()  # the events of each group, that with the oldest event first
        self._bytes = 0
        self.rebalances = Rebalances(runtime)

    def add(self, group: str, event: str, client: str, **detail: Any) -> None:
        self._put(group, (_shared(tuple(detail)), self._clock.time_ms(), event, client, *map(_short, detail.values())))

    def members_changed(self, group: TimedGroup, event: str, client: str, members: int) -> None:
        """A member of a group has joined or left, or has other subscriptions."""
        self.add(group.name, event, client, members=members)
        self.rebalances.members_changed(group, event)

    def changed_hands(self, event: str, group: TimedGroup, key: LeaseKey, client: str, epoch: int) -> None:
        """A lease that began or ended. One request may contain 8,192 queues, so this method does as little as
        possible."""
        name, topic, queue_id = key
        self._put(name, (_OF_LEASE, self._clock.time_ms(), event, client, topic, queue_id, epoch))
        self.rebalances.changed_hands(group, key, is_free=event != LOCKED)

    def _put(self, group: str, event: HistoryEvent) -> None:
        events = self._events.get(group)
        if events is None:
            events = self._events[group] = deque()
            if len(self._events) > self._limits.history_groups:
                forgotten = self._events.pop(next(iter(self._events)))
                while forgotten:
                    self._drop_oldest(forgotten)
        events.append(event)
        self._bytes += _bytes_of(event)
        self._order.append(events)
        if len(events) > self._limits.history_events:
            self._drop_oldest(events)
        while len(self._order) > self._limits.history_all_events or self._bytes > self._limits.history_bytes:
            self._drop_oldest(self._order.popleft())

    def _drop_oldest(self, events: deque[HistoryEvent]) -> None:
        if events:
            self._bytes -= _bytes_of(events.popleft())

    def of(self, group: str) -> list[dict[str, Any]]:
        """Return all events of a group, as they are reported."""
        return list(map(shown, self.since(group)))

    def since(self, group: str, since_ms: int = 0) -> list[HistoryEvent]:
        """Return the events from a time on, so that a command that polls every second gets only new ones."""
        found = self._events.get(group, ())
        if not since_ms:
            return list(found)
        newest = list(itertools.takewhile(lambda event: event[1] >= since_ms, reversed(found)))
        return newest[::-1]


@cache
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return one object for all equal names of details. There are as many as kinds of events."""
    return names


def _short(detail: Any) -> Any:
    return detail[:HISTORY_TEXT_CHARS] if isinstance(detail, str) else detail


# ------------------------------------------------------------------------------
# For metrics: how long a queue has no owner when its owner changes, and how long a group takes until its rebalance is
# finished.
#
# Both durations are computed from the events of `History`: members that join and leave, queues that are locked and
# unlocked. Foreign members do not lock, so their groups are not measured.


_MEMBERS_CHANGED = frozenset(("joined", "left", "leaving", "subscribed"))


class TimedGroup(Protocol):
    """A group whose rebalances are timed. One that is recreated by the same name is another group."""

    name: str


class Rebalances:
    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self.handovers = Histogram(HANDOVER_BOUNDS_S)
        self.settling = Histogram(HANDOVER_BOUNDS_S)
        self._freed_s: dict[LeaseKey, float] = {}
        self._running: dict[TimedGroup, tuple[float, float]] = {}  # when members changed, the last lock since then

    def members_changed(self, group: TimedGroup, event: str) -> None:
        if event in _MEMBERS_CHANGED:
            now_s = self._clock.monotonic_s()
            self._end_if_at_rest(group, now_s)
            self._running.setdefault(group, (now_s, now_s))

    def changed_hands(self, group: TimedGroup, key: LeaseKey, *, is_free: bool) -> None:
        """A queue has no owner any more, or one."""
        now_s = self._clock.monotonic_s()
        if is_free:
            if len(self._freed_s) >= self._limits.max_free_queues:
                del self._freed_s[next(iter(self._freed_s))]
            self._freed_s[key] = now_s
        else:
            since_s = self._freed_s.pop(key, None)
            if since_s is not None:
                self.handovers.observe(now_s - since_s)
        running = self._running.get(group)
        if running is not None:
            self._running[group] = (running[0], now_s)

    def look(self) -> None:
        """Counts the groups that have come to rest."""
        now_s = self._clock.monotonic_s()
        for group in list(self._running):
            self._end_if_at_rest(group, now_s)

    def _end_if_at_rest(self, group: TimedGroup, now_s: float) -> None:
        began_s, last_s = self._running.get(group, (now_s, now_s))
        if now_s - last_s >= REBALANCE_REST_S:
            del self._running[group]
            if last_s > began_s:
                self.settling.observe(last_s - began_s)
