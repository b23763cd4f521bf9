"""Pulls that were checked, and stay so until something changes.

A client sends the same pull again and again, with another offset. `CheckedPulls.of` keeps the result of the checks that
`Pulling` has made, with the generation from before them, and `CheckedPulls.pull` answers the next pull by it. The committed
offset, the queue's last reader, and whether there is a message may differ from pull to pull: they are looked at each time.
Nothing is kept while time decides.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.codes import PULL_COMMIT_OFFSET, PULL_SUSPEND
from ...protocol.headers import PullMessage
from ...protocol.subscription import SQL92, Subscription
from ..sessions.session import Session
from .commits import Commits
from .outcomes import Outcome, Pulled
from .parts import Parts


class CheckedPull(NamedTuple):
    """`name`: by which messages are counted. is_foreign: whether the reader is a foreign member."""

    generation: int
    place: tuple[str, str, int]  # group, topic, queue id
    queue: tuple[str, int]
    flags: int
    limit: int
    max_bytes: int | None
    subscription: Subscription | None
    name: str
    is_foreign: bool


_new_tuple = tuple.__new__


class CheckedPulls:
    def __init__(self, parts: Parts, commits: Commits) -> None:
        self._generation = parts.groups.generation
        self._store = parts.appender.store
        self._statistics = parts.statistics
        self._offsets = parts.offsets
        self._locks = parts.locks
        self._watch = parts.watch
        self._draining = parts.draining
        self._pops = parts.pops
        self._commits = commits

    def of(
        self, session: Session, header: PullMessage, limit: int, subscription: Subscription | None, generation: int
    ) -> CheckedPull | None:
        """A pull that has passed every check since the generation was read; None if one of them is made each time: while
        queues of the group move, and for filters that are parsed anew when others need their room."""
        group, topic, queue_id = place = header[:3]
        if self._pops.pools or self._draining.is_moving(group, session):
            return None
        if self._locks.awaits_readers(group) or self._locks.former_end(*place) is not None:
            return None
        if subscription is not None and subscription.kind == SQL92:
            return None
        is_foreign = self._commits.is_foreign_member(session, group)
        name = f"{topic}@{group}"
        flags, max_bytes = header.sys_flag, header.max_msg_bytes
        return CheckedPull(
            generation, place, (topic, queue_id), flags, limit, max_bytes, subscription, name, is_foreign
        )

    def pull(self, session: Session, checked: CheckedPull, offset: int, commit_offset: int) -> Pulled | None:
        """The outcome of a pull that differs in its offsets alone; None if it has to be checked, or may wait. Raises the
        store's errors for damage."""
        generation, place, key, flags, limit, max_bytes, subscription, name, is_foreign = checked
        if generation != self._generation.number or self._pops.pools:
            return None
        queue, reader = self._store.queues.get(key), self._watch.readers.get(place)
        if queue is None or not queue.begin <= offset < queue.next or reader is None or reader[0] is not session:
            return None
        if flags & PULL_SUSPEND:
            committed = self._offsets.get(*place) or 0
            if offset < committed or (offset < commit_offset and flags & PULL_COMMIT_OFFSET):
                return None  # another member may have read the queue since
        if flags & PULL_COMMIT_OFFSET:
            self._commits.carried(session, place[0], key, commit_offset)
        begin, end = queue.begin, queue.next
        pieces, messages, next_offset = self._store.fetch(queue, offset, limit, subscription, None, max_bytes)
        if not messages:
            return Pulled(Outcome.NO_MATCH, next_offset, begin, end)
        self._statistics.note_got(name, messages, pieces)
        if is_foreign:
            self._watch.gave(session, *place, next_offset)
        return _new_tuple(Pulled, (Outcome.FOUND, next_offset, begin, end, pieces))
