"""Settings of consumer groups, their mode (pull or pop), refused heartbeats, and the history of rebalances."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any, Final

import orjson
import structlog

from ...protocol.bodies import BodyError, DataVersion, GroupConfig, encode_group, joined, read_group
from ...protocol.group_bodies import PULL, RequestMode, decode_request_modes, encode_request_modes
from ...protocol.names import SYSTEM_GROUP_PREFIX, IllegalName, group_fault
from ..config import (
    HANDOVER_BOUNDS_S,
    HISTORY_EVENT_BYTES,
    HISTORY_TEXT_CHARS,
    LIMITS,
    MAX_NAMED_CHARS,
    MAX_NAMED_MEMBERS,
    MAX_RETRY_QUEUES,
    MAX_RETRY_TIMES,
    REBALANCE_REST_S,
    LimitExceeded,
    Limits,
    within,
)
from ..runtime import Clock, Histogram, Job, Runtime
from ..sessions import Recent
from ..store.files import StoreFull, read_state, replace_state, write_state
from ..store.journals import Journal, LeaseKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# The settings of consumer groups: created with the first heartbeat, kept in a file.


MAX_LONG = 2**63 - 1


def _checked(group: GroupConfig) -> GroupConfig:
    """A group that may come into being. Raises IllegalName, LimitExceeded."""
    fault = group_fault(group.name)
    if fault:
        raise IllegalName(fault)
    within("retryQueueNums", group.retry_queues, 0, MAX_RETRY_QUEUES)
    within("retryMaxTimes", group.retry_max_times, -1, MAX_RETRY_TIMES)
    within("brokerId", group.broker_id, -1, MAX_LONG)
    within("whichBrokerWhenConsumeSlowly", group.slow_broker_id, -1, MAX_LONG)
    return group


class GroupConfigs:
    """`version` changes with them. Apache's brokers number it apart from that of the topics (SubscriptionGroupManager)."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        *,
        auto_create: bool,
    ) -> None:
        self._limits = runtime.limits
        self._path = path
        self._time_ms = time_ms = runtime.clock.time_ms
        self.version = DataVersion(time_ms())
        self.journal = Journal(path)
        self._is_behind = False  # whether neither file nor journal has all groups
        self.auto_create = auto_create
        self._generation = runtime.generation
        self._groups: dict[str, GroupConfig] = {}
        for item in (*(read_state(path) or ()), *self.journal.read()):
            if "deleted" in item:
                self._groups.pop(item["deleted"], None)
                continue
            try:
                group = _checked(read_group(item))
            except (IllegalName, BodyError, LimitExceeded) as fault:
                log.warning("group_settings_skipped", group=item.get("groupName"), reason=str(fault))
                continue
            self._groups[group.name] = group

    def get(self, name: str) -> GroupConfig | None:
        """Return the group's settings, or None if there is no such group."""
        return self._groups.get(name)

    def ensure(self, name: str, *, orderly: bool = False) -> GroupConfig | None:
        """The group's settings, made with defaults if groups may be made so; None if not. orderly: of one that is made.

        Raises IllegalName, LimitExceeded."""
        group = self._groups.get(name)
        if group is None and (self.auto_create or name.startswith(SYSTEM_GROUP_PREFIX)):
            group = GroupConfig(name, consume_orderly=orderly)
            try:
                self.put(group)
            except StoreFull as error:  # a group that only reads can do so on a full disk; the next change saves it
                log.error("group_save_failed", group=name, reason=str(error), hint="it is kept in memory")
                self._groups[name] = group
                self._is_behind = True
                self._touch()
        return group

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(list(self._groups.values()))

    def delete(self, name: str) -> None:
        """Forgets a group's settings. Raises StoreFull."""
        self._keep({"deleted": name})
        self._groups.pop(name, None)

    def put(self, group: GroupConfig) -> None:
        """Creates or alters a group. Raises IllegalName, LimitExceeded, StoreFull."""
        _checked(group)
        if group.name not in self._groups and len(self._groups) >= self._limits.max_groups:
            raise LimitExceeded(f"this broker takes {self._limits.max_groups} groups; delete some")
        self._keep(group)
        self._groups[group.name] = group

    def _keep(self, change: GroupConfig | dict[str, str]) -> None:
        """A change costs a line."""
        if self._is_behind:
            write_state(self._path, list(self._groups.values()))
            self.journal.clear()
            self._is_behind = False
        self.journal.append(change)
        self._touch()

    def _touch(self) -> None:
        self.version = DataVersion(self._time_ms(), self.version.counter + 1)
        self._generation.increment()

    def saving(self) -> Job[None]:
        """Writes the whole file when the journal has become long. Raises StoreFull; it is tried again the next time."""
        if self.journal.lines > self._limits.journal_lines + len(self._groups):
            yield from self.journal.shortening(self._saving())

    def _saving(self) -> Job[None]:
        groups = list(self._groups.values())
        content = yield from joined(map(encode_group, groups))
        yield partial(replace_state, self._path, b"[%b]" % content)


# ------------------------------------------------------------------------------
# How the members of a group get a topic's messages: by queues that are theirs (PULL), or any message (POP). An
# administrator says it; members ask.


class RequestModes:
    """Kept in a file. Without a word, members pull."""

    def __init__(self, path: Path, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._path = path
        self._modes: dict[tuple[str, str], RequestMode] = {}
        state = read_state(path)
        if state is not None:
            try:
                modes = decode_request_modes(orjson.dumps(state))
            except BodyError as fault:
                log.error(
                    "request_modes_unreadable",
                    file=str(path),
                    reason=str(fault),
                    hint="all groups pull until their modes are set again",
                )
                modes = []
            self._modes = {(mode.group, mode.topic): mode for mode in modes}

    def __iter__(self) -> Iterator[RequestMode]:
        return iter(self._modes.values())

    def of(self, group: str, topic: str) -> RequestMode:
        return self._modes.get((group, topic)) or RequestMode(topic, group, PULL)

    def put(self, mode: RequestMode) -> None:
        """Raises LimitExceeded, StoreFull."""
        key = mode.group, mode.topic
        if key not in self._modes and len(self._modes) >= self._limits.max_request_modes:
            raise LimitExceeded(f"this broker keeps {self._limits.max_request_modes} request modes")
        modes = {**self._modes, key: mode}
        write_state(self._path, orjson.loads(encode_request_modes(modes.values())))
        self._modes = modes


# ------------------------------------------------------------------------------
# Heartbeats that were refused: the client reads nothing, and most clients say nothing of it.
#
# A client says who it is every 30 s, so a refusal that has not come again for longer is over.


class Refusals:
    """`count`: of all heartbeats that were refused."""

    def __init__(self, clock: Clock) -> None:
        self._recent = Recent(clock.monotonic_s)
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
    if event[0] is _OF_LEASE:  # whose texts others keep, too
        return HISTORY_EVENT_BYTES
    return HISTORY_EVENT_BYTES + sum(getsizeof(detail) for detail in event[4:] if isinstance(detail, str))


class History:
    """At most 10,000 events of a group, oldest first; of the 1,000 youngest groups, and 200,000 or 40 MiB in all."""

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._order: deque[deque[HistoryEvent]] = deque()  # whose event is the oldest of all
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._bytes = 0
        self.rebalances = Rebalances(runtime)

    def add(self, group: str, event: str, client: str, **detail: Any) -> None:
        names = tuple(detail)
        names = self._names.setdefault(names, names)
        self._put(group, (names, self._clock.time_ms(), event, client, *map(_short, detail.values())))
        self.rebalances.note(group, event)

    def changed_hands(self, event: str, key: LeaseKey, client: str, epoch: int) -> None:
        """A lease that began or ended. One request may have 8,192 of them, so this does as little as it can."""
        group, topic, queue_id = key
        self._put(group, (_OF_LEASE, self._clock.time_ms(), event, client, topic, queue_id, epoch))
        self.rebalances.changed_hands(key, is_free=event != LOCKED)

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


def _short(detail: Any) -> Any:
    return detail[:HISTORY_TEXT_CHARS] if isinstance(detail, str) else detail


# ------------------------------------------------------------------------------
# How long queues have no owner when they change hands, and how long groups take to come to rest, for metrics.
#
# Both follow from what History is told: members that come and go, queues that are locked and unlocked. Foreign
# members do not lock, so their groups are not in here.


_MEMBERS_CHANGED = frozenset(("joined", "left", "leaving", "subscribed"))


class Rebalances:
    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self.handovers = Histogram(HANDOVER_BOUNDS_S)
        self.settling = Histogram(HANDOVER_BOUNDS_S)
        self._freed_s: dict[LeaseKey, float] = {}
        self._running: dict[str, tuple[float, float]] = {}  # by group: when members changed, the last lock since then

    def note(self, group: str, event: str) -> None:
        """An event of the group's history that is no queue's."""
        if event in _MEMBERS_CHANGED:
            now_s = self._clock.monotonic_s()
            self._end_if_at_rest(group, now_s)
            self._running.setdefault(group, (now_s, now_s))

    def changed_hands(self, key: LeaseKey, *, is_free: bool) -> None:
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
        running = self._running.get(key[0])
        if running is not None:
            self._running[key[0]] = (running[0], now_s)

    def look(self) -> None:
        """Counts the groups that have come to rest."""
        now_s = self._clock.monotonic_s()
        for group in list(self._running):
            self._end_if_at_rest(group, now_s)

    def _end_if_at_rest(self, group: str, now_s: float) -> None:
        began_s, last_s = self._running.get(group, (now_s, now_s))
        if now_s - last_s >= REBALANCE_REST_S:
            del self._running[group]
            if last_s > began_s:
                self.settling.observe(last_s - began_s)
