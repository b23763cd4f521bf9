"""The owner of a queue in a group: one value, and the table of its transitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from ..sessions.session import Session
from ..store.journals import LeaseChange, LeaseEntry

# ------------------------------------------------------------------------------
# A queue has one owner. Rocketlet members and the pools of clients that pop hold a lease, which the journal of leases keeps
# over a restart. A foreign member reads without a lease; the journal keeps its client id, and reserves the queue for it.
#
#     FREE --grant--> LEASED --unlock, expire, close--> FREE
#     FREE --read--> FOREIGN --release--> FREE
#                    FOREIGN --lose--> LOST --read--> FOREIGN
#                    FOREIGN --restart--> AWAITED --read--> FOREIGN
#
# Apache's clients lock queues only to consume in order. Such a lock keeps others from locking. It fences no commit, survives
# the connection of its client, and is not in the journal. An orderly member locks and pulls, in any order, and its lock may
# outlive it as a reader. So a lock may be added to FREE, FOREIGN and LOST, which are then LOCKED, LOCKED_FOREIGN and
# LOCKED_LOST. It is no owner beside the reader: a lease ends both.


class OwnerState(Enum):
    FREE = "no client owns the queue"
    LEASED = "a Rocketlet member or a pool has the lease"
    LOCKED = "one of Apache's clients has the lock, and no foreign member reads the queue"
    FOREIGN = "a foreign member reads the queue without a lease"
    LOCKED_FOREIGN = "like FOREIGN, and one of Apache's clients has the lock"
    AWAITED = "the queue is reserved for the foreign member that read it before a restart of the broker"
    LOST = "the connection of the foreign member that read the queue is closed, and no other client has read it since"
    LOCKED_LOST = "like LOST, and one of Apache's clients has the lock"

    __hash__ = object.__hash__  # without a call in Python: a request may lock 8,192 queues


class OwnerEvent(Enum):
    GRANT = "a Rocketlet member or a pool gets the lease"
    LOCK = "one of Apache's clients gets the lock"
    RECONNECT = "the client of the lease, lock or reservation continues on another connection"
    DISCONNECT = "its connection was lost, which the client may not have noticed"
    UNLOCK = "its client requests the end, or has lost the queue to another member"
    EXPIRE = "it was not renewed in time"
    CLOSE = "its client has closed the connection"
    READ = "a foreign member pulls the queue, or is back after a restart"
    RELEASE = "the foreign member has handled its messages, or is not waited for any more"
    LOSE = "the connection of the foreign member was closed"
    RESTART = "the broker was restarted"

    __hash__ = object.__hash__


_FREE, _LEASED, _LOCKED, _FOREIGN, _LOCKED_FOREIGN, _AWAITED, _LOST, _LOCKED_LOST = OwnerState
_GRANT, _LOCK, _RECONNECT, _DISCONNECT, _UNLOCK, _EXPIRE, _CLOSE, _READ, _RELEASE, _LOSE, _RESTART = OwnerEvent
OWNER_TRANSITIONS: Final[Mapping[OwnerState, Mapping[OwnerEvent, OwnerState]]] = {
    _FREE: {_GRANT: _LEASED, _LOCK: _LOCKED, _READ: _FOREIGN, _RESTART: _FREE},
    # GRANT and LOCK: the lease, lock or reservation is over, or its client requests another one without the epoch
    _LEASED: {_GRANT: _LEASED, _LOCK: _LOCKED, _RECONNECT: _LEASED, _DISCONNECT: _LEASED, _UNLOCK: _FREE, _EXPIRE: _FREE,
              _CLOSE: _FREE, _RESTART: _LEASED},
    _LOCKED: {_GRANT: _LEASED, _LOCK: _LOCKED, _RECONNECT: _LOCKED, _UNLOCK: _FREE, _EXPIRE: _FREE, _READ: _LOCKED_FOREIGN},
    _FOREIGN: {_GRANT: _LEASED, _LOCK: _LOCKED_FOREIGN, _READ: _FOREIGN, _RELEASE: _FREE, _LOSE: _LOST, _RESTART: _AWAITED},
    _LOCKED_FOREIGN: {_GRANT: _LEASED, _LOCK: _LOCKED_FOREIGN, _RECONNECT: _LOCKED_FOREIGN, _UNLOCK: _FOREIGN,
                      _EXPIRE: _FOREIGN, _READ: _LOCKED_FOREIGN, _RELEASE: _LOCKED, _LOSE: _LOCKED_LOST},
    # RECONNECT: of a client without a heartbeat, which is taken for the awaited one
    _AWAITED: {_GRANT: _LEASED, _LOCK: _LOCKED, _RECONNECT: _AWAITED, _DISCONNECT: _AWAITED, _UNLOCK: _FREE, _EXPIRE: _FREE,
               _CLOSE: _FREE, _READ: _FOREIGN},
    _LOST: {_GRANT: _LEASED, _LOCK: _LOCKED_LOST, _READ: _FOREIGN, _RELEASE: _FREE},
    _LOCKED_LOST: {_GRANT: _LEASED, _LOCK: _LOCKED_LOST, _RECONNECT: _LOCKED_LOST, _UNLOCK: _LOST, _EXPIRE: _LOST,
                   _READ: _LOCKED_FOREIGN, _RELEASE: _LOCKED},
}  # fmt: skip

KEPT: Final = frozenset({_LEASED, _FOREIGN, _LOCKED_FOREIGN, _AWAITED})
"""The states of owners that the journal of leases keeps."""
MISSING: Final = frozenset({_AWAITED, _LOST, _LOCKED_LOST})
"""The states in which the foreign member that read the queue is not back yet."""


class Claim(NamedTuple):
    """What a client has of a queue.

    Attributes:
        epoch: the number of the claim, which is higher than those of all earlier ones.
        session: the connection of the client with the lease, lock or reservation. None for a foreign reader; and after a
            restart, and after the broker has closed the connection, until the client is back.
    """

    client_id: str
    epoch: int
    session: Session | None = None


class Owner(NamedTuple):
    """The owner of a queue.

    Attributes:
        holder: the client with the lease, lock or reservation; None without any.
        reader: the foreign member that reads the queue, or was lost; None without one.
    """

    state: OwnerState = OwnerState.FREE
    holder: Claim | None = None
    reader: Claim | None = None

    @property
    def is_leased(self) -> bool:
        """True if the queue has a lease or is reserved. Locks of Apache's clients do not count."""
        return self.state is _LEASED or self.state is _AWAITED

    @property
    def is_locked(self) -> bool:
        """True if one of Apache's clients has the lock."""
        return self.holder is not None and not self.is_leased

    def is_leased_to(self, session: Session) -> bool:
        """Return True if this session has the lease or the reservation. Locks of Apache's clients do not count."""
        return self.holder is not None and self.holder.session is session and self.is_leased

    def is_leased_to_another(self, session: Session) -> bool:
        """Return True if another session, or a client that is not connected, has the lease or the reservation. Locks of
        Apache's clients do not count."""
        return self.holder is not None and self.holder.session is not session and self.is_leased

    def is_held_by(self, session: Session) -> bool:
        """Return True if this session has the lease, the lock or the reservation."""
        return self.holder is not None and self.holder.session is session

    def belongs_to(self, client_id: str, session: Session, epoch: int | None) -> bool:
        """Return True if a connection of the holder's client id is the holder. Apache's locks know only the id.

        An id alone may be copied, or be that of a client whose previous socket has not closed yet: such a connection has
        to wait. A client that names the epoch was granted the lease, and may use another connection; requests on its
        previous connection may arrive later, and must not move the lease back. A renewal by an epoch that has ended must
        fail, because its sender would continue to read what another member had meanwhile (docs/decisions, 6). An owner from
        before a restart that does not name its epoch never received it, and gets another one.
        """
        holder = self.holder
        if holder is None or holder.client_id != client_id:
            return False
        if holder.session is session or not self.is_leased:
            return epoch in (None, holder.epoch)
        return epoch == holder.epoch and (holder.session is None or holder.session.number < session.number)

    def awaits(self, client_id: str) -> bool:
        """Return True if this foreign member has read the queue, and is not back yet."""
        awaited = self.reader or self.holder
        return self.state in MISSING and awaited is not None and awaited.client_id == client_id

    @property
    def last_reader_id(self) -> str | None:
        """The id of the foreign member that read the queue last, even before a restart; None if it has released the queue."""
        if self.state is _AWAITED and self.holder is not None:
            return self.holder.client_id
        return self.reader.client_id if self.reader is not None else None

    @property
    def entry(self) -> tuple[str, int] | tuple[str, int, bool] | None:
        """The owner as the journal of leases keeps it; None if the journal does not keep it."""
        kept = self.reader or self.holder
        if kept is None or self.state not in KEPT:
            return None
        return kept[:2] if self.state is _LEASED else (*kept[:2], True)


NO_OWNER: Final = Owner()
_new_tuple = tuple.__new__  # without the call of a named tuple's constructor, for each queue of a request


def next_owner(owner: Owner, event: OwnerEvent, claim: Claim | None = None) -> Owner:
    """Return the owner after an event. Raises KeyError for an event that the state does not allow.

    Args:
        claim: the claim of the client that gets the lease or the lock, or reads the queue; or that of the holder with its
            connection from now on.
    """
    state = OWNER_TRANSITIONS[owner.state][event]
    holder, reader = owner.holder, owner.reader
    if event is _GRANT:
        holder, reader = claim, None
    elif event is _UNLOCK or event is _EXPIRE or event is _CLOSE:
        holder = None
    elif event in (_LOCK, _RECONNECT):
        holder = claim
    elif event is _READ:
        # a member that is back has the epoch of its reservation, so that the journal need not be written
        holder, reader = (None, holder) if owner.state is _AWAITED else (holder, claim)
    elif event is _RELEASE:
        reader = None
    elif event in (_DISCONNECT, _RESTART):
        kept = holder or reader
        holder, reader = kept and kept._replace(session=None), None
    return NO_OWNER if state is _FREE else _new_tuple(Owner, (state, holder, reader))


def replay(changes: Iterable[LeaseChange]) -> tuple[Owner, int | None]:
    """Return the owner after a restart by the lines of the journal, and up to where a lease's owner may have read
    (`GroupQueue.former_end`). Raises ValueError for a line that cannot follow the earlier ones."""
    owner, end, latest = NO_OWNER, None, 0
    for change in changes:
        if change.entry in (LeaseEntry.LEASE, LeaseEntry.READER):
            if change.epoch <= latest:
                raise ValueError(f"epoch: expected one above {latest}, got {change.epoch}; the queue had a later owner")
            if owner.state is _LEASED:  # its end may not have been written
                owner = next_owner(owner, _EXPIRE)
            event = _GRANT if change.entry is LeaseEntry.LEASE else _READ
            owner, end, latest = next_owner(owner, event, Claim(change.client_id, change.epoch)), None, change.epoch
        elif change.epoch != latest or owner is NO_OWNER:
            continue  # it is of an earlier owner, and was written late
        elif change.entry is LeaseEntry.END:
            owner, end = next_owner(owner, _EXPIRE if owner.is_leased else _RELEASE), None
        elif owner.is_leased:
            end = change.end
    return next_owner(owner, _RESTART), end
