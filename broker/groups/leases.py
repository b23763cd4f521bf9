"""Leases of queues (LOCK_BATCH_MQ, UNLOCK_BATCH_MQ): each queue of a group has one owner."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from ...protocol.bodies import LOOKS, Work
from ...protocol.group_bodies import LockRequest
from ...protocol.names import Queue
from ..config import HANDOVER_LEASE_S, LEASE_SWEEP_S, LIMITS, LOCK_LEASE_S, PLACE_BYTES, STANDSTILL_S, Limits
from ..runtime import Job, Runtime
from ..sessions import Session
from ..store.journals import Change, Former, LeaseKey, Ledger
from .settings import History

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# A lock as it is kept, whose it is, and the functions by which locks ask and tell others.


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


# ------------------------------------------------------------------------------
# The locks by which clients own queues in a group: LOCK_BATCH_MQ and UNLOCK_BATCH_MQ.
#
# Apache's clients lock queues only to consume in order; such locks last 60 s and survive a closed connection. They
# end when their member unregisters: a Java member unlocks before, but its rebalance may lock once more on its way
# out. A Rocketlet consumer locks every queue that it reads (`handover`). Its lock is a lease with an epoch: freed
# when the socket closes, ended when it is not renewed in time, and checked at every commit, so that a late one
# changes nothing. A member that was refused is told as soon as the queue is free.
#
# Leases are on the disk (`ledger`). After a restart of the broker, a member that comes back in time gets the same
# epoch and continues as if nothing had happened. Queues that foreign members read are kept for them (`readers`).


class Locks:
    """The leases of all groups. `refused` counts locks beyond the limits.

    Args:
        on_free: called with a member that waited for a queue, and its group, when the queue is free.
        on_change: called when leases must be saved.
        is_held_back: True if no member may lock the queue of a group, topic and queue id yet.
        is_anothers: True if a foreign member claims a queue that belongs to another member (group, session, topic, queue id).
        queues_of: the number of queues of a topic; other queues are not locked.
        end_of: the end offset of a topic's queue.
        on_unread: called with group, topic and queue id when a queue no longer waits for its reader from before a restart.
    """

    def __init__(
        self,
        runtime: Runtime,
        history: History,
        path: Path,
        *,
        on_free: Callable[[Session, str], None],
        on_change: Callable[[], None],
        is_held_back: Callable[[str, str, int], bool],
        is_anothers: Callable[[str, Session, str, int], bool],
        queues_of: Callable[[str], int],
        end_of: Callable[[str, int], int],
        on_unread: Callable[[str, str, int], None] = lambda group, topic, queue_id: None,
    ) -> None:
        limits = self._limits = runtime.limits
        self._path = path
        self._clock = clock = runtime.clock
        self._locks: dict[LeaseKey, Lock] = {}
        self._of_group: dict[str, dict[LeaseKey, None]] = {}
        self._keys: dict[Session, dict[LeaseKey, None]] = {}  # that a connection owned or waited for
        self._left: dict[Session, dict[str, None]] = {}  # the groups that foreign members have left
        self._generation = runtime.generation
        self._on_free = on_free
        self._on_change = on_change
        self._is_held_back = is_held_back
        self._is_anothers = is_anothers
        self._queues_of = queues_of
        self._on_unread = on_unread
        self._waiting = 0  # places in all lines
        self.refused = 0
        self._history = history
        self._ledger = ledger = Ledger(path, limits)
        self._epoch = max(
            clock.time_ms() << 16, ledger.epoch
        )  # beyond every epoch of an earlier run, whatever the clock says
        # The latest renewal is not known, and its owner may not know of the restart yet.
        self._awake_s = since_s = clock.monotonic_s()
        self._held_until_s = -math.inf if ledger.is_known else since_s + HANDOVER_LEASE_S
        self._is_closed = False
        self.is_restarted = ledger.epoch > 0
        self._readers = Readers(ledger, self._next_epoch, limits)
        for key, former in ledger.leases.items():
            end = end_of(*key[1:])
            if not former.is_reader and (former.end is None or end < former.end):
                former = former._replace(end=end)
                ledger.ended_at(key, former)
            lock = Lock(former.client_id, None, former.epoch, True, since_s, former_end=former.end)
            lock.is_awaited = former.is_reader
            if lock.is_awaited:
                self._readers.awaits(key)
            self._locks[key] = lock
            self._of_group.setdefault(key[0], {})[key] = None
        ledger.write()
        ledger.leases.clear()

    def saving(self, *, closes: bool = False) -> Job[None]:
        """Saves what `lock` and `unlock` have not. closes: nothing is granted any more. Raises StoreFull; it is tried again
        the next time."""
        self._is_closed = closes
        if self._clock.monotonic_s() >= self._held_until_s:
            yield from self._ledger.saving(self._leases, closes=closes)

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _leases(self) -> tuple[Iterator[Change], int]:
        """The leases as they are now, also if they are looked at later."""
        locks = list(self._locks.items())
        # Apache's locks are not kept: its broker forgets them, too (RebalanceLockManager), and its clients lock
        # again within 20 s.
        leases = (line for key, lock in locks if lock.handover for line in lines_of(key, lock))
        return itertools.chain(leases, self._readers.lines()), self._epoch

    def lock(self, request: LockRequest, connection: Session, *, has_had: bool = False) -> dict[Queue, int]:
        """Locks or renews queues that are free or the client's own. Returns the queues that it holds now, with their
        epochs. has_had: it had the queues for itself without a lock, so nobody else can have them."""
        if request.group in self._left.get(connection, ()) and not request.handover:
            return {}  # asked for by a Java member that has unregistered meanwhile
        now_s = self._now_s()
        epochs = {
            queue: epoch
            for queue in request.queues
            if (epoch := self._lock_one(request, queue, connection, now_s, has_had=has_had)) is not None
        }
        self._ledger.write()
        return epochs

    def _lock_one(
        self, request: LockRequest, queue: Queue, connection: Session, now_s: float, *, has_had: bool
    ) -> int | None:
        key = (request.group, queue.topic, queue.queue_id)
        lock = self._locks.get(key)
        if lock is not None and not lock.is_over(now_s):
            epoch = request.epochs.get(queue)
            if lock.client_id == request.client_id and is_its_own(lock, connection, epoch):
                lock.renewed_s = now_s
                if lock.connection is not connection:
                    self._forget_key(lock.connection, key)
                    lock.connection = connection
                    self._note_key(connection, key)
                    self._generation.increment()
                return lock.epoch
            if lock.client_id != request.client_id or lock.connection is not None or epoch is not None:
                if epoch is None:
                    # Told when the queue is free: a hand-over would otherwise last until its next try. Apache's clients
                    # try every 20 s (RebalanceService.waitInterval).
                    self._wait(connection, key, lock)
                return None
        if queue in request.epochs:
            return None  # a renewal takes nothing anew: its sender must first let go of the queue
        if self._is_closed or (now_s < self._held_until_s and not has_had):
            return None  # another member may believe in a lease that this run does not know
        if request.handover and not has_had and self._is_held_back(*key):
            return None  # a foreign member still handles messages of it; the group is notified when it does not
        if not request.handover and self._is_anothers(key[0], connection, *key[1:]):
            return None
        if not 0 <= queue.queue_id < self._queues_of(queue.topic) or not self._has_room(connection, key, lock):
            return None
        if lock is not None:
            self._note("lock expired", key, lock)
            self._forget_key(lock.connection, key)
        self._epoch += 1
        fresh = Lock(request.client_id, connection, self._epoch, request.handover, now_s)
        if lock is not None:
            # The waiters for the former owner wait for this one now.
            fresh.waiters = {waiter: None for waiter in lock.waiters if waiter is not connection}
            self._waiting -= len(lock.waiters) - len(fresh.waiters)
        self._locks[key] = fresh
        self._generation.increment()
        self._of_group.setdefault(key[0], {})[key] = None
        self._note_key(connection, key)
        self._note("locked", key, fresh)
        return fresh.epoch

    def unlock(self, request: LockRequest, connection: Session) -> list[str]:
        """Frees the client's own locks, not those of others. Returns a text that names the queues that were not its own."""
        faults: list[str] = []
        for queue in request.queues:
            key = (request.group, queue.topic, queue.queue_id)
            lock = self._locks.get(key)
            if lock is None:
                faults.append(f"{queue.topic}:{queue.queue_id} is not locked")
            elif lock.client_id != request.client_id or (
                # the owner of a lease from before a restart may let go, once its heartbeat has identified it
                lock.handover and lock.connection is not connection and lock.connection is not None
            ):
                faults.append(f"{queue.topic}:{queue.queue_id} is locked by {lock.client_id} (epoch {lock.epoch})")
            # An unlock that was long on its way must not free what its sender has locked again since.
            elif request.epochs.get(queue, lock.epoch) != lock.epoch:
                faults.append(f"{queue.topic}:{queue.queue_id} has the epoch {lock.epoch} by now")
            else:
                self._free(key, "unlocked")
        self._ledger.write()
        return faults

    def drop(self, connection: Session) -> None:
        """The connection is gone, and its waiting with it. If the client has ended it, its leases end, too. Otherwise the
        client may not know, so they last as long as it may believe in them; it can come back as after a restart."""
        keys = self._keys.pop(connection, {})
        connection.charge(-PLACE_BYTES * (len(keys) + len(self._left.pop(connection, ()))))
        for key in keys:
            lock = self._locks.get(key)
            if lock is None:
                continue
            if connection in lock.waiters:
                del lock.waiters[connection]
                self._waiting -= 1
            # Apache's locks outlive their connection, as on its broker, where only the member is dropped
            # (ClientHousekeepingService).
            if lock.handover and lock.connection is connection:
                if connection.is_left:
                    self._free(key, "lock lost")
                else:
                    lock.connection = None
                    self._generation.increment()

    def owned_by(self, connection: Session, group: str) -> list[tuple[str, int]]:
        """Return the queues of a group that a client owns, as topic and queue id."""
        keys = (key for key in self._keys.get(connection, ()) if key[0] == group)
        return [key[1:] for key in keys if self.is_owner(*key, connection)]

    def let_go(self, group: str, topic: str, queue_id: int, connection: Session) -> None:
        """A foreign reader has handled all of a queue that moves away from it. Apache's Go client does not unlock queues
        that it drops (pushConsumer.removeUnnecessaryMessageQueue), which would keep the next reader out for 60 s."""
        lock = self._locks.get((group, topic, queue_id))
        if lock is not None and not lock.handover and lock.connection is connection:
            self._free((group, topic, queue_id), "unlocked")

    def leave(self, connection: Session, group: str, *, is_foreign: bool) -> None:
        """A member unregisters: frees the queues that it has not unlocked. A foreign one locks nothing more."""
        for place in self.owned_by(connection, group):
            self._free((group, *place), "unlocked")
        self._ledger.write()
        if is_foreign:
            left = self._left.setdefault(connection, {})
            left[group] = None
            connection.charge(PLACE_BYTES)
            if len(left) > self._limits.max_memberships:
                self.join(connection, next(iter(left)))

    def join(self, connection: Session, group: str) -> None:
        """A heartbeat: the member may lock, also if it had left the group."""
        left = self._left.get(connection)
        if left is not None and group in left:
            connection.charge(-PLACE_BYTES)
            del left[group]
            if not left:
                del self._left[connection]

    def renew(self, connections: Iterable[Session]) -> None:
        """All leases of these clients last anew, as by a renewal of each."""
        now_s, living = self._clock.monotonic_s(), set(connections)
        self._awake_s = now_s
        for lock in self._locks.values():
            if lock.connection in living:
                lock.renewed_s = now_s

    def end(self, group: str, topic: str, queue_id: int) -> None:
        """Ends a lease before its time. Raises KeyError if nobody holds the queue."""
        self._free((group, topic, queue_id), "lock expired")

    def expiring(self) -> Work[None]:
        """Ends the leases that were not renewed in time."""
        now_s = self._now_s()
        for number, (key, lock) in enumerate(list(self._locks.items()), 1):
            if lock.is_over(now_s) and self._locks.get(key) is lock:
                self._free(key, "lock expired")
            if number % LOOKS == 0:
                yield

    def _now_s(self) -> float:
        """The time. If nothing has asked for it for longer than `expiring` is apart, this process stood still, and renewals
        that came meanwhile wait in its sockets: every lease gets that time back."""
        now_s = self._clock.monotonic_s()
        stood_s = now_s - self._awake_s - LEASE_SWEEP_S
        if stood_s > STANDSTILL_S:
            log.warning("broker_stood_still", seconds=round(stood_s, 1), hint="leases are prolonged")
            for lock in self._locks.values():
                lock.renewed_s += stood_s
            self._held_until_s += stood_s
        self._awake_s = now_s
        return now_s

    def commit_fault(self, group: str, queue: tuple[str, int], connection: Session, epoch: int | None) -> str | None:
        """Why a commit may not be stored; None if it may. Only leases fence commits."""
        lock = self._locks.get((group, queue[0], queue[1]))
        if lock is None or not lock.handover:
            # Apache's clients send no epoch, and nothing fences them (ConsumerManageProcessor.updateConsumerOffset).
            return None if epoch is None else f"the queue {queue[0]}:{queue[1]} is not locked by this client"
        if lock.connection is not connection or (epoch is not None and epoch != lock.epoch):
            return f"the queue {queue[0]}:{queue[1]} is owned by {lock.client_id} (epoch {lock.epoch})"
        return None

    def topic_deleted(self, topic: str) -> Job[None]:
        """Its messages are gone: if it is made anew, other messages get their offsets. This holds at once; the job writes
        it down."""
        keys = [key for key, lock in self._locks.items() if key[1] == topic and is_lease(lock)]
        for key in keys:
            self._locks[key].former_end = 0
        self._on_change()
        return self._noting_ends(keys)

    def _noting_ends(self, keys: Sequence[LeaseKey]) -> Job[None]:
        for number, key in enumerate(keys, 1):
            lock = self._locks.get(key)
            if lock is not None and lock.former_end == 0:  # else its owner has read the new topic already
                self._ledger.ended_at(key, Former(lock.client_id, lock.epoch, 0))
            if number % LOOKS == 0:
                self._ledger.write()
                yield None
        self._ledger.write()

    def former_end(self, group: str, topic: str, queue_id: int) -> int | None:
        """How far the queue's owner can be, if it comes from a run before or its topic was deleted, until it has pulled.
        The messages that it read behind that were lost, and others get their offsets; it must not skip those."""
        lock = self._locks.get((group, topic, queue_id))
        return None if lock is None else lock.former_end

    def forget_former_end(self, group: str, topic: str, queue_id: int) -> None:
        """The owner reads what this run has."""
        key = (group, topic, queue_id)
        lock = self._locks[key]
        if lock.former_end is None:
            return
        lock.former_end = None
        self._ledger.pulled(key, lock.client_id, lock.epoch)
        self._ledger.write()
        self._on_change()

    def note_pull(self, group: str, topic: str, queue_id: int) -> None:
        """A pull: the owner's first one is history."""
        key = (group, topic, queue_id)
        lock = self._locks.get(key)
        if lock is not None and lock.handover and not lock.has_pulled:
            lock.has_pulled = True
            self._history.add(group, "first pull", lock.client_id, topic=topic, queue=queue_id, epoch=lock.epoch)

    def note_commit(self, group: str, topic: str, queue_id: int, offset: int) -> int:
        """A commit: the offset that it counts as, `former_end` at most. The owner's first one is history, the others are too
        many."""
        lock = self._locks.get((group, topic, queue_id))
        if lock is None or not lock.handover:
            return offset
        if lock.former_end is not None:
            offset = min(offset, lock.former_end)
        if not lock.has_committed:
            lock.has_committed = True
            self._history.add(group, "first commit", lock.client_id, topic=topic, queue=queue_id, offset=offset)
        return offset

    def has_lease(self, group: str, topic: str, queue_id: int, connection: Session) -> bool:
        """Whether a Rocketlet member other than this one owns the queue."""
        lock = self._locks.get((group, topic, queue_id))
        return lock is not None and lock.handover and lock.connection is not connection

    def is_leased_to(self, group: str, topic: str, queue_id: int, connection: Session) -> bool:
        """Whether this Rocketlet member owns the queue."""
        lock = self._locks.get((group, topic, queue_id))
        return lock is not None and lock.handover and lock.connection is connection

    def is_owner(self, group: str, topic: str, queue_id: int, connection: Session) -> bool:
        lock = self._locks.get((group, topic, queue_id))
        return lock is not None and lock.connection is connection

    def leases_of(self, client_id: str) -> dict[LeaseKey, int]:
        """The epochs of a client's queues."""
        locks = self._locks.items()
        return {key: lock.epoch for key, lock in locks if is_lease(lock) and lock.client_id == client_id}

    def __len__(self) -> int:
        return len(self._locks)

    # Foreign members that read

    def note_reader(self, group: str, topic: str, queue_id: int, client_id: str) -> None:
        """A foreign member reads a queue: it is kept for that one over a restart."""
        self._readers.note((group, topic, queue_id), client_id)

    def forget_reader(self, group: str, topic: str, queue_id: int) -> None:
        self._readers.forget((group, topic, queue_id))

    def lose_reader(self, group: str, topic: str, queue_id: int) -> None:
        """The connection of the queue's reader has closed."""
        self._readers.lose((group, topic, queue_id))

    def last_reader(self, group: str, topic: str, queue_id: int) -> str | None:
        """The id of the foreign member that read the queue last, also in a run before; None if it has let go of it."""
        lock = self._locks.get((group, topic, queue_id))
        return lock.client_id if lock is not None and lock.is_awaited else self._readers.last((group, topic, queue_id))

    def awaits_readers(self, group: str) -> bool:
        """Whether queues of the group wait for their readers from before a restart."""
        return group in self._readers.awaited

    def misses_readers(self, group: str) -> bool:
        """Whether readers of the group, from before a restart or with a connection that has closed, are not back yet."""
        return self._readers.misses(group)

    def heard_reader(self, group: str, topic: str, queue_id: int, connection: Session) -> None:
        """A client that is no member has pulled or committed a queue, which may wait for its reader."""
        if group not in self._readers.awaited:
            return
        key = (group, topic, queue_id)
        lock = self._locks.get(key)
        if lock is not None and lock.is_awaited and lock.connection in (None, connection):
            lock.connection, lock.renewed_s = connection, self._clock.monotonic_s()
            self._note_key(connection, key)

    def readers_back(self, group: str, client_id: str) -> list[tuple[str, int]]:
        """A client is a member again: the queues that it has read since before. Those that waited for it are free now."""
        back = self._readers.back(group, client_id)
        if group in self._readers.awaited:
            locks = ((key, self._locks[key]) for key in self._of_group[group])
            awaited = [key for key, lock in locks if lock.is_awaited and lock.client_id == client_id]
            for key in awaited:
                self._free(key, "reader back")
            back += awaited
        return [key[1:] for key in back]

    def is_locked(self, group: str, topic: str, queue_id: int) -> bool:
        return (group, topic, queue_id) in self._locks

    def owners(self, group: str) -> dict[tuple[str, int], str]:
        """Client id by topic and queue id."""
        return {key[1:]: self._locks[key].client_id for key in self._of_group.get(group, ())}

    def _has_room(self, connection: Session, key: LeaseKey, former: Lock | None) -> bool:
        """Whether another lock may be kept."""
        keys = self._keys.get(connection, {})
        is_full = former is None and len(self._locks) >= self._limits.max_locks
        if not is_full and (key in keys or len(keys) < self._limits.max_locks_of_connection):
            return True
        self.refused += 1
        if connection.is_news("locks_refused"):
            limit = self._limits.max_locks if is_full else self._limits.max_locks_of_connection
            of = "this broker" if is_full else "one connection"
            hint = f"{of} has {limit} locks at most; they end when they are not renewed"
            log.warning("locks_refused", group=key[0], peer=connection.peer, limit=limit, hint=hint)
        return False

    def _wait(self, connection: Session, key: LeaseKey, lock: Lock) -> None:
        """Puts a member in line. If there are too many, the others ask again by themselves."""
        keys = self._keys.get(connection, {})
        is_full = self._waiting >= self._limits.max_lock_waiters or (
            key not in keys and len(keys) >= self._limits.max_locks_of_connection
        )
        if connection not in lock.waiters and not is_full:
            lock.waiters[connection] = None
            self._waiting += 1
            self._note_key(connection, key)

    def _note_key(self, connection: Session, key: LeaseKey) -> None:
        keys = self._keys.setdefault(connection, {})
        if key not in keys:
            keys[key] = None
            connection.charge(PLACE_BYTES)

    def _forget_key(self, connection: Session | None, key: LeaseKey) -> None:
        keys = self._keys.get(connection) if connection is not None else None
        if connection is not None and keys is not None and key in keys:
            del keys[key]
            connection.charge(-PLACE_BYTES)
            if not keys:
                del self._keys[connection]

    def _free(self, key: LeaseKey, event: str) -> None:
        lock = self._locks.pop(key)
        self._generation.increment()
        of_group = self._of_group[key[0]]
        del of_group[key]
        if not of_group:
            del self._of_group[key[0]]
        self._note(event, key, lock)
        self._forget_key(lock.connection, key)
        self._waiting -= len(lock.waiters)
        for waiter in lock.waiters:
            self._forget_key(waiter, key)
            self._on_free(waiter, key[0])

    def _note(self, event: str, key: LeaseKey, lock: Lock) -> None:
        if lock.is_awaited:
            self._readers.came(key, lock.client_id, lock.epoch, is_back=event == "reader back")
            self._on_unread(*key)
            self._on_change()
            return
        if not lock.handover:
            return
        if event == "locked":
            self._ledger.granted(key, lock.client_id, lock.epoch)
            self._readers.leased(key)
        elif event == "unlocked":
            self._ledger.unlocked(key, lock.epoch)
        else:
            self._ledger.freed(key, lock.epoch)
        self._on_change()
        self._history.changed_hands(event, key, lock.client_id, lock.epoch)


# ------------------------------------------------------------------------------
# The queues that foreign members read, as a restarted broker has to know them.
#
# Apache's clients take no lease. A broker that restarts knows of them with their next heartbeat, up to 30 s later
# (Java's heartbeatBrokerInterval), while they still handle what they have. Until then each queue is its former
# reader's: a lock for that client id keeps everybody else out, and ends
#
# - when that client is heard from as a member: it reads the queue, and is drained of it before the next one reads
# - when its connection closes, or nothing has pulled or committed the queue for as long as a lease lasts
#
# A connection that pulls or commits such a queue, and is no member yet, is its reader. So is one that pulls a queue
# whose reader has lost its connection, as long as nobody else has read the queue.


class Readers:
    """`awaited`: how many queues of each group wait for their readers from before a restart. `next_epoch()`: each reader has
    one, by which its line in the ledger is told from others."""

    def __init__(self, ledger: Ledger, next_epoch: Callable[[], int], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._ledger = ledger
        self._next_epoch = next_epoch
        self._readers: dict[LeaseKey, Former] = {}
        self._lost: dict[LeaseKey, str] = {}  # clients whose connections have closed
        self._lost_of: Counter[str] = Counter()  # how many queues of each group
        self.awaited: Counter[str] = Counter()

    def note(self, key: LeaseKey, client_id: str) -> None:
        """A foreign member reads a queue. It is on the disk before the member gets messages."""
        self._is_back(key)
        former = self._readers.get(key)
        if former is None and len(self._readers) >= self._limits.max_locks:
            return
        if former is None or former.client_id != client_id:
            self._readers[key] = Former(client_id, self._next_epoch(), is_reader=True)
            self._ledger.read_by(key, client_id, self._readers[key].epoch)
            self._ledger.write()

    def forget(self, key: LeaseKey) -> None:
        """Nobody reads the queue."""
        self._is_back(key)
        former = self._readers.pop(key, None)
        if former is not None:
            self._ledger.freed(key, former.epoch)

    def lose(self, key: LeaseKey) -> None:
        """The reader's connection has closed. It may come back by another one."""
        former = self._readers.get(key)
        self.forget(key)
        if former is not None and len(self._lost) < self._limits.max_locks:
            self._lost[key] = former.client_id
            self._lost_of[key[0]] += 1

    def _is_back(self, key: LeaseKey) -> None:
        """The queue's reader, or another one, is known."""
        if self._lost.pop(key, None) is not None:
            _count_down(self._lost_of, key[0])

    def back(self, group: str, client_id: str) -> list[LeaseKey]:
        """A client whose connection has closed is a member again: the queues that nobody else has read meanwhile."""
        if group not in self._lost_of:
            return []
        keys = [key for key, lost in self._lost.items() if key[0] == group and lost == client_id]
        for key in keys:
            self._is_back(key)
        return keys

    def misses(self, group: str) -> bool:
        """Whether readers of the group are not known again yet."""
        return group in self.awaited or group in self._lost_of

    def last(self, key: LeaseKey) -> str | None:
        """The client that has read the queue last; None if it has let go of it, or has taken a lease."""
        former = self._readers.get(key)
        return former.client_id if former is not None else self._lost.get(key)

    def leased(self, key: LeaseKey) -> None:
        """The queue has the lease of one of our members: the line of that stands for it now."""
        if key in self._readers:
            del self._readers[key]
        if key in self._lost:
            self._is_back(key)

    def awaits(self, key: LeaseKey) -> None:
        self.awaited[key[0]] += 1

    def came(self, key: LeaseKey, client_id: str, epoch: int, *, is_back: bool) -> None:
        """A queue waits no more. is_back: its reader has come; else the queue is free."""
        _count_down(self.awaited, key[0])
        if is_back:
            self._readers[key] = Former(client_id, epoch, is_reader=True)
        else:
            self._ledger.freed(key, epoch)

    def lines(self) -> Iterator[Change]:
        """The lines in which the ledger keeps them."""
        return (reader_line(key, former.client_id, former.epoch) for key, former in list(self._readers.items()))


def _count_down(counts: Counter[str], group: str) -> None:
    counts[group] -= 1
    if not counts[group]:
        del counts[group]


def reader_line(key: LeaseKey, client_id: str, epoch: int) -> Change:
    return *key, client_id, epoch, True
