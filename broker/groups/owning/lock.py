"""A lock as it is kept, whose it is, and the functions by which locks ask and tell others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...config import HANDOVER_LEASE_S, LOCK_LEASE_S
from ...sessions.session import Session
from ...store.ledger import Change, LeaseKey
from .readers import reader_line


@dataclass(slots=True)
class Lock:
    """`connection` is None after a restart, and when the broker has closed it, until the client has come back.
    `former_end`: of a lease from a run before, where its queue ended when a run began, and 0 if its topic was deleted; until
    its owner has pulled. `is_awaited`: it is no lease, but kept for the foreign member that read the queue in
    a run before."""

    client_id: str
    connection: Session | None
    epoch: int
    handover: bool
    renewed_s: float
    has_pulled: bool = False
    has_committed: bool = False
    former_end: int | None = None
    is_awaited: bool = False
    waiters: dict[Session, None] = field(default_factory=dict)

    def is_over(self, now_s: float) -> bool:
        return now_s - self.renewed_s > (HANDOVER_LEASE_S if self.handover else LOCK_LEASE_S)


@dataclass(frozen=True, slots=True)
class Around:
    """The functions by which locks ask and tell others.

    `on_free(connection, group)` is called for each member that waited for a queue that is free now, `on_change` when there is
    something to save. `is_held_back(group, topic, queue_id)`: whether nobody may take a queue yet. `is_anothers(group,
    connection, topic, queue_id)`: whether a foreign member claims what is not its own. `queues_of(topic)`: how many queues
    there are; others are not locked. `end_of(topic, queue_id)`: where a queue ends. `on_unread(group, topic, queue_id)` is
    called when a queue waits no more for its reader from before a restart.
    """

    on_free: Callable[[Session, str], None]
    on_change: Callable[[], None]
    is_held_back: Callable[[str, str, int], bool]
    is_anothers: Callable[[str, Session, str, int], bool]
    queues_of: Callable[[str], int]
    end_of: Callable[[str, int], int]
    on_unread: Callable[[str, str, int], None] = lambda group, topic, queue_id: None


def is_lease(lock: Lock) -> bool:
    return lock.handover and not lock.is_awaited


def is_its_own(lock: Lock, connection: Session, epoch: int | None) -> bool:
    """Whether a client of the owner's id is the owner, or Apache's locks, which know only the id.

    An id alone may be copied, or of a client whose former socket has not closed yet: it has to wait. A client that names
    the epoch was granted it, and may come by another connection; requests on its former one may arrive later, and must not
    bring the lease back there. A renewal by an epoch that has ended must fail: its sender would go on reading what another
    had meanwhile (decision 6). An owner from before a restart that does not name its epoch never heard of it, and gets
    another.
    """
    if lock.connection is connection or not lock.handover:
        return epoch in (None, lock.epoch)
    return epoch == lock.epoch and (lock.connection is None or lock.connection.number < connection.number)


def lines_of(key: LeaseKey, lock: Lock) -> Iterator[Change]:
    """The lines in which the ledger keeps a lease."""
    yield reader_line(key, lock.client_id, lock.epoch) if lock.is_awaited else (*key, lock.client_id, lock.epoch)
    if lock.former_end is not None:
        yield *key, lock.client_id, lock.epoch, lock.former_end
