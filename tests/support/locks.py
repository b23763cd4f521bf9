"""Groups and locks without a broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rocketlet.broker.config import LIMITS, Limits
from rocketlet.broker.groups.group import ConsumerGroup, ConsumerGroups, GroupChanges
from rocketlet.broker.groups.leases import Locks
from rocketlet.broker.groups.members import History
from rocketlet.broker.groups.stages import QueueKey
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime.runtime import Runtime
from rocketlet.broker.sessions.session import Session
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.protocol.bodies import ConsumerData, Route
from rocketlet.protocol.group_bodies import PeerMessage
from rocketlet.protocol.names import Subscription
from rocketlet.testing.clock import MovableClock

from ..conftest import peer


class Counts:
    """How many queues topics have: a number, or what a function says."""

    def __init__(self, queues: int | Callable[[str], int]) -> None:
        self.queues_of: Callable[[str], int] = queues if callable(queues) else lambda topic: queues


class Changes(GroupChanges):
    """Calls functions with the facts that lower parts report."""

    def __init__(
        self,
        *,
        members: Callable[[ConsumerGroup], None] = lambda group: None,
        freed: Callable[[Session, str], None] = lambda session, group: None,
        leases: Callable[[], None] = lambda: None,
        released: Callable[[QueueKey, Session | None], None] = lambda key, reader: None,
        appended: Callable[[list[ConsumeQueue]], None] = lambda queues: None,
        moved: Callable[[ConsumerGroup], None] = lambda group: None,
        away: Callable[[ConsumerGroup], None] = lambda group: None,
        ahead: Callable[[ConsumerGroup, QueueKey], None] = lambda group, key: None,
    ) -> None:
        self._ahead = ahead
        self._members, self._freed, self._leases = members, freed, leases
        self._released, self._appended, self._moved, self._away = released, appended, moved, away

    def members_changed(self, group: ConsumerGroup) -> None:
        self._members(group)

    def lease_freed(self, group: ConsumerGroup, waiter: Session) -> None:
        self._freed(waiter, group.name)

    def leases_changed(self) -> None:
        self._leases()

    def ahead_ended(self, group: ConsumerGroup, key: QueueKey) -> None:
        self._ahead(group, key)

    def owners_moved(self, group: ConsumerGroup) -> None:
        self._moved(group)

    def peer_away(self, group: ConsumerGroup) -> None:
        self._away(group)

    def appended(self, queues: list[ConsumeQueue]) -> None:
        self._appended(queues)

    def queue_released(self, group: ConsumerGroup, key: QueueKey, reader: Session | None) -> None:
        self._released(key, reader)


def queues_until(end: int) -> Any:
    """A store's queues, each of which ends here."""
    return SimpleNamespace(get=lambda key: SimpleNamespace(next=end))


class Routes:
    """Finds routes by a function; without one, no name server knows a topic."""

    def __init__(self, find: Callable[[str], Route | None] = lambda topic: None) -> None:
        self._find = find

    async def find_route(self, topic: str) -> Route | None:
        return self._find(topic)


class Peers:
    """No peer is reached."""

    def send(
        self, address: str, group: str, make: Callable[[], PeerMessage | None], failed: Callable[[bool], None]
    ) -> None:
        pass


def make_groups(
    runtime: Runtime | None = None,
    history: History | None = None,
    queues: int | Callable[[str], int] = 8,
    changes: GroupChanges | None = None,
) -> ConsumerGroups:
    """Groups alone; each topic has this many queues."""
    runtime = runtime or Runtime(MovableClock(stands=True))
    return ConsumerGroups(runtime, history or History(runtime), "a", Counts(queues), changes or GroupChanges())


def make_locks(
    folder: Path,
    clock: MovableClock,
    told: list[Session] | None = None,
    end: int = 0,
    limits: Limits = LIMITS,
    groups: ConsumerGroups | None = None,
    queues: Mapping[QueueKey, ConsumeQueue] | None = None,
    runtime: Runtime | None = None,
    history: History | None = None,
) -> Locks:
    """Locks alone; its list has the sessions that were notified of a free queue. end: where each queue ends."""
    runtime = runtime or Runtime(clock, limits)
    history = history or History(runtime)
    changes = Changes(freed=lambda session, group: told.append(session) if told is not None else None)
    return Locks(
        runtime,
        groups if groups is not None else make_groups(runtime, history, changes=changes),
        history,
        folder / "locks.json",
        Counts(8),
        queues_until(end) if queues is None else queues,
    )


def join_foreign(locks: Locks, group: str, topic: str, client_id: str) -> RemotingConnection:
    """A foreign member joins."""
    session = peer()
    locks.groups.heartbeat(session, client_id, ConsumerData(group, subscriptions=(Subscription(topic),)), 0, 0)
    session.charged_bytes = 0  # the membership is not counted here
    return session


def record_reader(locks: Locks, group: str, topic: str, queue_id: int, client_id: str) -> RemotingConnection:
    """A foreign member joins, and reads a queue."""
    session = join_foreign(locks, group, topic, client_id)
    locks.record_pull(session, locks.groups.obtain(group), (topic, queue_id))
    return session
