"""A group that a page shows: its queues, members, owners and events.

The pages that show a group share one watch, which queries the brokers about once a second. Rocketlet's brokers return
events. With Apache's brokers the watch derives events from the queues that members report, which is coarser and happens
only while a page shows the group.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from ..client.admin.admin_client import AdminClient, GroupEvent, Masters, Topic, are_broadcasting, changes, locked
from ..client.admin.diagnosis import topic_or_none
from ..client.errors import BrokerRefused, ConfigError
from ..client.wire.connection import gather_limited
from ..protocol.admin_bodies import GroupConnections, QueueProgress, RunningHandler
from ..protocol.bodies import GroupConfig
from ..protocol.codes import ResponseCode
from ..protocol.group_bodies import SHARED_OWNER
from ..protocol.names import Queue
from .config import (
    COLOURS,
    DESCRIPTION_INTERVAL_S,
    MAX_EVENTS,
    MAX_REPORTING_MEMBERS,
    MEMBER_TIMEOUT_S,
    QUEUE_POINTS,
    SHOWN_HANDLERS,
    WATCH_INTERVAL_S,
)
from .samples import now_ms


@dataclass(frozen=True, slots=True)
class MemberRow:
    client_id: str
    address: str
    language: str
    version: int
    strategy: str
    subscriptions: Mapping[str, str]
    is_leaving: bool
    queues: int
    shares: bool = False
    own_version: str = ""


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """The state of a group at one time. `has_events` is True if its brokers report events, as Rocketlet's do."""

    ms: int = 0
    connections: Mapping[str, GroupConnections] = field(default_factory=dict)
    progress: Mapping[Queue, QueueProgress] = field(default_factory=dict)
    owners: Mapping[Queue, str] = field(default_factory=dict)
    members: tuple[MemberRow, ...] = ()
    has_events: bool = True
    is_draining: bool = False

    @property
    def lag(self) -> int | None:
        """The number of unconsumed messages; None for a broadcasting group, whose members keep their own offsets."""
        return None if are_broadcasting(self.connections) else sum(max(item.lag, 0) for item in self.progress.values())

    @property
    def in_hand(self) -> int:
        return sum(item.in_hand for item in self.progress.values())


class GroupWatch:
    def __init__(self, admin: AdminClient, group: str) -> None:
        self._admin = admin
        self.group = group
        self.look = GroupSnapshot()
        self.events: list[GroupEvent] = []
        self._newest: dict[str, tuple[int, frozenset[bytes]]] = {}  # by broker: the ms of its newest events, and these
        self.lags: dict[Queue, deque[tuple[int, int]]] = {}
        self.total: deque[tuple[int, int]] = deque(maxlen=QUEUE_POINTS)
        self.topics: dict[str, Topic] = {}
        self.config: Mapping[str, GroupConfig] = {}
        self.handlers: list[tuple[str, RunningHandler]] = []
        self._colours: dict[str, int] = {}
        self.masters: Masters = {}
        self._looked_s = self._described_s = float("-inf")
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Query the group unless its sample and its description are recent enough. Raises RocketletError; ConfigError if no
        broker knows the group."""
        async with self._lock:
            if time.monotonic() - self._looked_s >= WATCH_INTERVAL_S:
                await self.poll()
                self._looked_s = time.monotonic()
            if time.monotonic() - self._described_s >= DESCRIPTION_INTERVAL_S:
                await self._describe()
                self._described_s = time.monotonic()

    def colour(self, client_id: str) -> str:
        """Return the name of a member's colour, which is unique while there are colours left. All members that have left
        have the same colour, and so have queues that members share."""
        if client_id == SHARED_OWNER:
            return "shared"
        present = {member.client_id for member in self.look.members}
        if client_id not in present:
            return "gone"
        for name in self._colours.keys() - present:
            del self._colours[name]
        if client_id not in self._colours:
            free = set(range(COLOURS)) - set(self._colours.values())
            self._colours[client_id] = min(free, default=COLOURS)
        number = self._colours[client_id]
        return str(number) if number < COLOURS else "more"

    def queues(self) -> list[Queue]:
        """Return the queues that have an offset or an owner in the group, and those of its subscribed topics, sorted."""
        found = {*self.look.progress, *self.look.owners}
        for name in {topic for member in self.look.members for topic in member.subscriptions}:
            if name in self.topics:
                found.update(self.topics[name].ranges)
        return sorted(found)

    async def poll(self) -> None:
        """Query the group's members, offsets and owners once."""
        masters = self.masters = await self._admin.masters()
        progress, connections = await asyncio.gather(
            self._admin.progress(self.group, masters=masters), self._admin.connections(self.group, masters)
        )
        if not progress and not connections and not await self._admin.group_configs(self.group, masters):
            raise ConfigError(f"no broker knows the group {self.group}")
        if are_broadcasting(connections):
            progress = {}
        try:
            reports = await gather_limited(self._report, masters)
        except BrokerRefused as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            await self._look_at_foreign(progress, connections)
        else:
            self._keep_events(reports)
            self.look = _look_of(reports, progress, connections)
        self._note_lags()

    async def _report(self, broker: str) -> dict[str, Any]:
        """Query a broker's report, with its events since the newest known one."""
        newest_ms, _ = self._newest.get(broker, (0, frozenset()))
        (report,) = await self._admin.history(self.group, {broker: self.masters[broker]}, since_ms=newest_ms)
        return report

    def _keep_events(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            self.events += self._fresh(report["broker"], report["events"])
        self.events.sort(key=lambda event: int(event["ms"]))
        del self.events[:-MAX_EVENTS]

    def _fresh(self, broker: str, events: list[GroupEvent]) -> list[GroupEvent]:
        """Return the events of a broker's report that are new: brokers also return known events of the newest known ms."""
        newest_ms, known = self._newest.get(broker, (0, frozenset[bytes]()))
        all_events: list[GroupEvent] = [{"broker": broker, **event} for event in events]
        fresh = [event for event in all_events if event["ms"] > newest_ms or _text_of(event) not in known]
        if fresh:
            newest_ms = max(event["ms"] for event in fresh)
            self._newest[broker] = (
                newest_ms,
                frozenset(_text_of(event) for event in all_events if event["ms"] == newest_ms),
            )
        return fresh

    async def _look_at_foreign(
        self, progress: Mapping[Queue, QueueProgress], connections: Mapping[str, GroupConnections]
    ) -> None:
        running = await self._admin.running(self.group, self.masters, connections)
        owners: dict[Queue, str] = {}
        for client_id, member in sorted(running.items()):
            for queue in member.commit_offsets:
                owners.setdefault(queue, client_id)
        ms, before = now_ms(), self.look
        known = {member.client_id: member for item in connections.values() for member in item.members}
        counts = Counter(owners.values())
        members = tuple(
            MemberRow(
                client_id,
                item.address,
                item.language,
                item.version,
                "",
                running[client_id].subscriptions if client_id in running else {},
                False,
                counts[client_id],
            )
            for client_id, item in sorted(known.items())
        )
        self.look = GroupSnapshot(ms, connections, progress, owners, members, has_events=False)
        if before.ms:
            self._note_changes(before, self.look)
        else:
            self.events += changes({}, owners, ms)

    def _note_changes(self, before: GroupSnapshot, after: GroupSnapshot) -> None:
        old, new = ({member.client_id for member in item.members} for item in (before, after))
        for client_id in sorted(new - old):
            self._add(after.ms, "joined", client_id)
        for client_id in sorted(old - new):
            self._add(after.ms, "left", client_id)
        self.events += changes(before.owners, after.owners, after.ms)
        del self.events[:-MAX_EVENTS]

    def _add(self, ms: int, event: str, client_id: str) -> None:
        """Add an event in the format of Rocketlet's brokers."""
        self.events.append({"ms": ms, "event": event, "client": client_id, "broker": ""})

    def _note_lags(self) -> None:
        ms = self.look.ms
        for queue, item in self.look.progress.items():
            points = self.lags.get(queue)
            if points is None:
                points = self.lags[queue] = deque(maxlen=QUEUE_POINTS)
            points.append((ms, max(item.lag, 0)))
        for queue in self.lags.keys() - self.look.progress.keys():
            del self.lags[queue]
        self.total.append((ms, self.look.lag or 0))

    async def _describe(self) -> None:
        """Query the topics that the group reads, its settings, and the handlers that are running."""
        names = {topic for member in self.look.members for topic in member.subscriptions}
        names |= {queue.topic for queue in self.look.progress}
        found = await gather_limited(
            partial(topic_or_none, self._admin), sorted(name for name in names if not name.startswith("%"))
        )
        self.topics = {topic.name: topic for topic in found if topic is not None}
        self.config = await self._admin.group_configs(self.group, self.masters)
        self.handlers = []
        if len(self.look.members) <= MAX_REPORTING_MEMBERS:
            running = await self._admin.running(
                self.group, self.masters, self.look.connections, timeout_s=MEMBER_TIMEOUT_S
            )
            calls = [(client_id, call) for client_id, member in running.items() for call in member.handlers]
            self.handlers = sorted(calls, key=lambda item: -item[1].age_ms)[:SHOWN_HANDLERS]


def _text_of(event: GroupEvent) -> bytes:
    return orjson.dumps(event, option=orjson.OPT_SORT_KEYS)


def _look_of(
    reports: list[dict[str, Any]], progress: Mapping[Queue, QueueProgress], connections: Mapping[str, GroupConnections]
) -> GroupSnapshot:
    owners = locked(reports)
    known = {member.client_id: member for item in connections.values() for member in item.members}
    told = {member["clientId"]: member for report in reports for member in report["members"]}
    counts = Counter(owners.values())
    members = tuple(
        MemberRow(
            client_id,
            str(member["peer"]),
            known[client_id].language if client_id in known else "",
            known[client_id].version if client_id in known else 0,
            str(member["strategy"] or ""),
            member["subscriptions"],
            bool(member["leaving"]),
            counts[client_id],
            bool(member.get("pops")) and not counts[client_id],
            str(member.get("rocketletVersion") or ""),
        )
        for client_id, member in sorted(told.items())
    )
    is_draining = any(report.get("draining") for report in reports)
    return GroupSnapshot(now_ms(), connections, progress, owners, members, is_draining=is_draining)
