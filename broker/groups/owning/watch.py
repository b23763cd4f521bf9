"""Watches who reads which queue, and reports queues that two members read or that nobody reads.

Rocketlet members cannot read a queue that another one has locked; foreign ones do not lock, and two of them read a queue
while they disagree about the members. A member that pulls again soon after another one has pulled is the second reader; one
that has the lock has got the queue back, and so has one that comes after longer than a pull is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from ....protocol.work import LOOKS, Work
from ...clock import Clock
from ...config import LIMITS, MAX_HOLD_S, ORPHAN_S, PLACE_BYTES, Limits
from ...sessions.session import Session
from ..history import History
from ..member import Member
from ..members import ConsumerGroups
from .locks import Locks

log = structlog.get_logger("rocketlet.groups")

_Key = tuple[str, str, int]  # group, topic, queue id


class Watch:
    """is_popped: whether a group's members share a topic's messages, so that no queue has a reader."""

    def __init__(
        self,
        groups: ConsumerGroups,
        locks: Locks,
        history: History,
        queues_of: Callable[[str], int],
        clock: Clock,
        is_popped: Callable[[str, str], bool] = lambda group, topic: False,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._groups = groups
        self._locks = locks
        self._history = history
        self._queues_of = queues_of
        self._clock = clock
        self._is_popped = is_popped
        # the connection that pulled last, another before it, and since when it is the last
        self.readers: dict[_Key, tuple[Session | None, Session | None, float]] = {}
        self._keys: dict[Session, set[_Key]] = {}
        self._given: dict[Session, dict[_Key, int]] = {}  # up to where each foreign reader got messages
        self._unread_s: dict[_Key, float] = {}
        self._named: set[_Key] = set()
        self._due_s = float("-inf")
        self.double_readers = 0
        self.orphaned: Counter[tuple[str, str]] = Counter()
        """How many queues nobody reads, by group and topic."""

    def pulled(self, connection: Session, group: str, topic: str, queue_id: int) -> None:
        key = (group, topic, queue_id)
        last, before, since_s = self.readers.get(key, (None, None, 0.0))
        if last is connection:
            return
        keys = self._keys.setdefault(connection, set())
        if len(keys) >= self._limits.max_read_queues:
            return
        if key not in keys:
            keys.add(key)
            connection.charge(PLACE_BYTES)
        now_s = self._clock.monotonic_s()
        self.readers[key] = (connection, last, now_s)
        self._locks.note_pull(group, topic, queue_id)
        found = self._groups.get(group)
        members = found.members if found else {}
        if connection in members and members[connection].is_foreign:
            self._locks.note_reader(group, topic, queue_id, members[connection].client_id)
        is_back = connection is before and last is not None and now_s - since_s < MAX_HOLD_S
        if not is_back or self._locks.is_owner(group, topic, queue_id, connection):
            return
        if connection in members and last in members and _may_be_two(members[connection], members[last]):
            self.double_readers += 1
            both = f"{members[last].client_id} and {members[connection].client_id}"
            self._name("two readers", group, members[connection].client_id, f"{topic}:{queue_id} is read by {both}")

    def reader(self, group: str, topic: str, queue_id: int) -> Session | None:
        """The connection that pulled last."""
        found = self.readers.get((group, topic, queue_id))
        return found[0] if found else None

    @property
    def is_restarted(self) -> bool:
        """Whether queues had readers or owners in a run before."""
        return self._locks.is_restarted

    def gave(self, connection: Session, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A foreign reader was given messages up to there."""
        key = (group, topic, queue_id)
        if key in self._keys.get(connection, ()):
            self._given.setdefault(connection, {})[key] = offset

    def given(self, connection: Session, group: str, topic: str, queue_id: int) -> int:
        """Up to where a foreign reader was given messages."""
        return self._given.get(connection, {}).get((group, topic, queue_id), 0)

    def let_go(self, connection: Session, group: str, topic: str, queue_id: int) -> None:
        """The reader has handled everything of a queue that moves away from it."""
        if self.reader(group, topic, queue_id) is connection:
            self.readers[group, topic, queue_id] = (None, None, self._clock.monotonic_s())
            self._locks.forget_reader(group, topic, queue_id)

    def let_all_go(self, connection: Session, group: str, topic: str) -> None:
        """The reader does not pull the topic any more."""
        for key in self._keys.get(connection, ()):
            if key[:2] == (group, topic):
                self.let_go(connection, *key)

    def read_by(self, connection: Session, group: str) -> list[tuple[str, int]]:
        """The queues of a group that this connection pulled last, as topic and queue id."""
        keys = self._keys.get(connection, ())
        return [key[1:] for key in keys if key[0] == group and self.reader(*key) is connection]

    def reads(self, connection: Session, group: str) -> bool:
        """Whether there are any. Asked more often, and of connections with very many."""
        keys = self._keys.get(connection, ())
        return any(key[0] == group and self.reader(*key) is connection for key in keys)

    def drop(self, connection: Session) -> None:
        """The connection is closed and reads nothing any more."""
        keys = self._keys.pop(connection, set())
        self._given.pop(connection, None)
        connection.charge(-PLACE_BYTES * len(keys))
        for key in keys:
            last, before, since_s = self.readers.get(key, (None, None, 0.0))
            if last is connection:
                self._locks.lose_reader(*key)
            last, before = (None if item is connection else item for item in (last, before))
            if last is None and before is None:
                self.readers.pop(key, None)
            else:
                self.readers[key] = (last, before, since_s)

    def looking(self) -> Work[None]:
        """Reports the queues that no member has read or locked for some seconds, although members subscribe to them; 100
        at a time. After very many queues it rests."""
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return
        unread = yield from self._unread(now_s)
        now_s = self._clock.monotonic_s()
        unread_s: dict[_Key, float] = {}
        named: set[_Key] = set()
        fresh: list[_Key] = []
        orphaned: Counter[tuple[str, str]] = Counter()
        for number, key in enumerate(unread, 1):
            unread_s[key] = since_s = self._unread_s.get(key, now_s)
            if now_s - since_s >= ORPHAN_S:
                orphaned[key[:2]] += 1
                if key in self._named:
                    named.add(key)
                elif len(fresh) < self._limits.max_reported:
                    fresh.append(key)
            if number % LOOKS == 0:
                yield
        for group_name, topic, queue_id in fresh:
            self._name("orphaned", group_name, "", f"{topic}:{queue_id} is read by nobody")
        self._unread_s, self._named, self.orphaned = unread_s, named.union(fresh), orphaned

    @property
    def orphans(self) -> int:
        return self.orphaned.total()

    def _unread(self, now_s: float) -> Work[list[_Key]]:
        """The queues that nobody reads now, as many as are watched."""
        unread: list[_Key] = []
        looks = 0
        for group in self._groups:
            for topic in () if group.is_broadcasting else sorted(group.topics):
                if self._is_popped(group.name, topic):
                    continue
                for queue_id in range(self._queues_of(topic)):
                    key = (group.name, topic, queue_id)
                    is_unread = not self._locks.is_locked(*key) and self.reader(*key) not in group.members
                    if is_unread and len(unread) < self._limits.max_read_queues:
                        unread.append(key)
                    looks += 1
                    if looks % LOOKS == 0:
                        yield
            looks += 1
        self._due_s = now_s + looks / self._limits.watched_per_s
        return unread

    def _name(self, event: str, group: str, client_id: str, fault: str) -> None:
        log.warning("queue_misread", kind=event, group=group, fault=fault)
        self._history.add(group, event, client_id, fault=fault)


def _may_be_two(reader: Member, last: Member) -> bool:
    """Whether the last reader may still be one. A Rocketlet member reads nothing without its lock: a foreign one that reads
    has got the queue back."""
    return reader.data.message_model == "CLUSTERING" and not last.data.strategy
