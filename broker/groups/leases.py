"""Leases of queues (LOCK_BATCH_MQ, UNLOCK_BATCH_MQ): each queue of a group has one owner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from ...protocol.bodies import LOOKS, Work
from ...protocol.group_bodies import LockRequest
from ...protocol.names import Queue
from ..config import HANDOVER_LEASE_S, LEASE_SWEEP_S, PLACE_BYTES, STANDSTILL_S
from ..runtime import Job, Runtime
from ..sessions.session import Session
from ..store.index import ConsumeQueue
from ..store.journals import Change, LeaseJournal, LeaseKey, PreviousRunLease
from .group import NO_QUEUE, ConsumerGroup, ConsumerGroups, ForeignReader, GroupQueue, QueueCounts, QueueLease
from .members import History
from .reading import ALLOWED, Read, ReadKind, may_read
from .stages import QueueKey

log = structlog.get_logger("rocketlet.groups")

_new_tuple = tuple.__new__  # without the call of a named tuple's constructor, for each queue of a request


def lines_of(queue: GroupQueue, lease: QueueLease) -> Iterator[Change]:
    """Yield the lines in which the ledger keeps a lease."""
    lease_key = queue.lease_key
    yield (
        reader_line(lease_key, lease.client_id, lease.epoch)
        if lease.is_awaited
        else (*lease_key, lease.client_id, lease.epoch)
    )
    if lease.former_end is not None:
        yield *lease_key, lease.client_id, lease.epoch, lease.former_end


def reader_line(lease_key: LeaseKey, client_id: str, epoch: int) -> Change:
    return *lease_key, client_id, epoch, True


# ------------------------------------------------------------------------------
# The locks by which clients own queues in a group: LOCK_BATCH_MQ and UNLOCK_BATCH_MQ.
#
# Apache's clients lock queues only to consume in order; such locks last 60 s and survive a closed connection. Such locks
# end when their member unregisters, because a Java member unlocks its queues before, but its rebalance may lock them
# again. A lock also ends when its queue moves away from a member with a list of itself alone, which claims all queues and
# would renew it for ever. A Rocketlet consumer locks every queue that it reads (`handover`). The lock of a Rocketlet
# consumer is a lease with an epoch. The lease ends when the client closes its socket, or when it is not renewed in time.
# A commit that contains an epoch is refused unless the lease still has that epoch. Members that were refused are notified
# when the queue is free, up to a limit on waiting members; the others retry on their own.
#
# Leases are on the disk (`ledger`). After a restart of the broker, a member that comes back in time gets the same
# epoch and continues, if the disk has taken the lease.
#
# Foreign members take no lease. A broker that restarts knows of them with their next heartbeat, up to 30 s later
# (Java's heartbeatBrokerInterval), while they still handle what they have. So the ledger keeps their client ids, too,
# and a restarted broker reserves each queue for its reader (`is_awaited`). The reservation ends
#
# - when that client sends a heartbeat as a member: it reads the queue, and is drained of it before the next one reads
# - when its connection closes, or nothing has pulled or committed the queue for as long as a lease lasts
#
# A connection that pulls or commits such a queue, and does not belong to a member yet, counts as the queue's reader. A
# connection that pulls a queue whose reader has lost its connection becomes the reader, too, as long as no other client
# has read the queue.


class Locks:
    """Grants, renews and ends the leases of all groups. `refused` counts locks beyond the limits.

    Args:
        topics: the number of queues of a topic; other queues are not locked.
        queues: the queues in the store.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        history: History,
        path: Path,
        topics: QueueCounts,
        queues: Mapping[QueueKey, ConsumeQueue],
    ) -> None:
        limits = self._limits = runtime.limits
        self._path = path
        self._clock = clock = runtime.clock
        self._turns = runtime.turns
        self.groups = groups
        self._queues: dict[Session, dict[GroupQueue, None]] = {}  # queues that each connection owns or waits for
        self._left: dict[Session, dict[str, None]] = {}  # the groups that foreign members have left
        self._changes = groups.changes
        self._queues_of = topics.queues_of
        self._has_changed = False
        self._count = 0  # leases
        self._waiting = 0  # number of waiting members, summed over queues
        self._unknown: set[LeaseKey] = set()  # queues whose leases of the last run could not be adopted
        self._reader_count = 0  # foreign readers, including those whose connections have closed
        self.refused = 0
        self._history = history
        self._ledger = ledger = LeaseJournal(path, limits)
        self._epoch = max(
            clock.time_ms() << 16, ledger.epoch
        )  # beyond every epoch of an earlier run, whatever the clock says
        # The latest renewal is not known, and its owner may not know of the restart yet.
        self._awake_s = self._began_s = since_s = clock.monotonic_s()
        self._held_until_s = -math.inf if ledger.is_known else since_s + HANDOVER_LEASE_S
        self._is_closed = False
        self.is_restarted = ledger.epoch > 0
        runtime.adoption.each("leases", ledger.leases.items(), partial(self._adopt, queues))
        ledger.write()
        ledger.leases.clear()

    def _adopt(self, queues: Mapping[QueueKey, ConsumeQueue], entry: tuple[LeaseKey, PreviousRunLease]) -> None:
        """Adopt the lease of an owner, or the reservation of a foreign reader."""
        (name, topic, queue_id), former = entry
        self._unknown.add(entry[0])  # until the end of this method
        found = queues.get((topic, queue_id))
        end = found.next if found is not None else 0
        if not former.is_reader and (former.end is None or end < former.end):
            former = former._replace(end=end)
            self._ledger.ended_at((name, topic, queue_id), former)
        group = self.groups.obtain(name)
        queue = self.groups.obtain_queue(group, (topic, queue_id))
        queue.lease = lease = QueueLease(
            former.client_id,
            None,
            former.epoch,
            True,
            self._began_s,
            former_end=former.end,
            is_awaited=former.is_reader,
        )
        group.awaited_readers += lease.is_awaited
        self._count += 1
        self._unknown.discard(entry[0])

    def saving(self, *, closes: bool = False) -> Job[None]:
        """Save what `lock` and `unlock` have not saved. closes: grant nothing any more. Raises StoreFull; the next call
        retries."""
        self._is_closed = closes
        if self._clock.monotonic_s() >= self._held_until_s:
            yield from self._ledger.saving(self._leases, closes=closes)

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _leases(self) -> tuple[Iterator[Change], int]:
        """Return the leases and foreign readers as they are now, even if the iterator is used later, and the last
        epoch."""
        queues = self.groups.queues()
        # Apache's locks are not saved: its broker forgets them, too (RebalanceLockManager), and its clients lock
        # again within 20 s.
        leases = [(queue, queue.lease) for queue in queues if queue.lease is not None and queue.lease.handover]
        readers = [
            (queue.lease_key, reader) for queue in queues if (reader := queue.foreign_reader) and not reader.is_lost
        ]
        return itertools.chain(
            (line for queue, lease in leases for line in lines_of(queue, lease)),
            (reader_line(lease_key, reader.client_id, reader.epoch) for lease_key, reader in readers),
        ), self._epoch

    def lock(self, request: LockRequest, session: Session, *, has_had: bool = False) -> dict[Queue, int]:
        """Lock or renew queues that are free or the client's own. Return the queues that it holds now, with their epochs.

        Args:
            request: the queues; the epochs of those that are to be renewed.
            session: the client's connection.
            has_had: True if the client had the queues for itself without a lock, so no other client can have them.
        """
        if request.group in self._left.get(session, ()) and not request.handover:
            return {}  # requested by a Java member that has unregistered meanwhile
        now_s = self._now_s()
        group = self.groups.obtain(request.group)
        epochs = {
            queue: epoch
            for queue in request.queues
            if (epoch := self._lock_one(group, request, queue, session, now_s, has_had=has_had)) is not None
        }
        self.groups.release(group)
        self._ledger.write()
        self._report_change()
        return epochs

    def _lock_one(
        self,
        group: ConsumerGroup,
        request: LockRequest,
        wanted: Queue,
        session: Session,
        now_s: float,
        *,
        has_had: bool,
    ) -> int | None:
        topic, queue_id = key = wanted.topic, wanted.queue_id
        queue = group.queues.get(key)
        lease = queue.lease if queue is not None else None
        if queue is not None and lease is not None and not lease.is_over(now_s):
            epoch = request.epochs.get(wanted)
            if lease.client_id == request.client_id and lease.belongs_to(session, epoch):
                renewal = None if lease.handover else Read(session, group, key, ReadKind.RENEWAL)
                if renewal is not None and may_read(renewal, now_s) is not ALLOWED:
                    self._free(queue, lease, "unlocked")
                    self._changes.queue_refused(group, key)
                    return None
                lease.renewed_s = now_s
                if lease.session is not session:
                    self._unlist(lease.session, queue)
                    lease.session = session
                    self._list(session, queue)
                    queue.version += 1
                return lease.epoch
            if lease.client_id != request.client_id or lease.session is not None or epoch is not None:
                if epoch is None:
                    # Notified when the queue is free: a hand-over would otherwise last until its next try. Apache's
                    # clients try every 20 s (RebalanceService.waitInterval).
                    self._add_waiter(session, queue, lease)
                return None
        if wanted in request.epochs:
            return None  # a renewal does not acquire a lease: its sender must first release the queue
        is_unknown = now_s < self._held_until_s or (
            bool(self._unknown) and (group.name, *key) in self._unknown and now_s < self._began_s + HANDOVER_LEASE_S
        )
        if self._is_closed or (is_unknown and not has_had):
            return None  # another member may have a lease that this run does not know
        kind = ReadKind.LEASE if request.handover else ReadKind.LOCK
        read = _new_tuple(Read, (session, group, key, kind, 0, 0, None))
        if not has_had and may_read(read, now_s) is not ALLOWED:
            self._changes.queue_refused(group, key)
            return None
        if not 0 <= queue_id < self._queues_of(topic) or not self._has_room(session, group, queue, lease):
            return None
        queue = self.groups.obtain_queue(group, key)
        if lease is not None:
            self._record_event("lock expired", queue, lease)
            self._unlist(lease.session, queue)
        else:
            self._count += 1
        self._epoch += 1
        queue.lease = granted = QueueLease(request.client_id, session, self._epoch, request.handover, now_s)
        if lease is not None:
            # The members that waited for the previous owner wait for this one now.
            granted.waiters = {waiter: None for waiter in lease.waiters if waiter is not session}
            self._waiting -= len(lease.waiters) - len(granted.waiters)
        queue.version += 1
        self._list(session, queue)
        self._record_event("locked", queue, granted)
        return granted.epoch

    def unlock(self, request: LockRequest, session: Session) -> list[str]:
        """Free the locks that the client holds among the given queues. Return a text for each queue that was not freed."""
        faults: list[str] = []
        group = self.groups.get(request.group)
        queues = group.queues if group is not None else {}
        for item in request.queues:
            queue = queues.get((item.topic, item.queue_id), NO_QUEUE)
            lease = queue.lease
            if lease is None:
                faults.append(f"{item.topic}:{item.queue_id} is not locked")
            elif lease.client_id != request.client_id or (
                # the owner of a lease from before a restart may unlock, once its heartbeat has identified it
                lease.handover and lease.session is not session and lease.session is not None
            ):
                faults.append(f"{item.topic}:{item.queue_id} is locked by {lease.client_id} (epoch {lease.epoch})")
            # An unlock that was delayed must not free what its sender has locked again since.
            elif request.epochs.get(item, lease.epoch) != lease.epoch:
                faults.append(f"{item.topic}:{item.queue_id} has the epoch {lease.epoch} by now")
            else:
                self._free(queue, lease, "unlocked")
        self._ledger.write()
        self._report_change()
        return faults

    def connection_gone(self, session: Session) -> None:
        """Remove what waits for a closed connection. Locks of Apache's clients last until they expire. Leases end
        if the client has closed the connection. Otherwise the client may not have noticed the loss, so its leases last
        until they expire, and the client can reconnect as after a restart."""
        queues = self._queues.pop(session, {})
        session.charge(-PLACE_BYTES * (len(queues) + len(self._left.pop(session, ()))))
        self._turns.do_some(self._losing(session, queues))

    def _losing(self, session: Session, queues: Iterable[GroupQueue]) -> Work[None]:
        """End what a closed connection had, a queue per piece. Its client may have come back since."""
        for queue in queues:
            lease = queue.lease
            if lease is None:
                continue
            if session in lease.waiters:
                del lease.waiters[session]
                self._waiting -= 1
            # Apache's locks outlive their connection, as on its broker, where only the member is dropped
            # (ClientHousekeepingService).
            if lease.handover and lease.session is session:
                if session.was_closed_by_client:
                    self._free(queue, lease, "lock lost")
                else:
                    lease.session = None
                    queue.version += 1
                self._report_change()
            yield

    def owned_by(self, session: Session, name: str) -> list[GroupQueue]:
        """Return the queues of a group that a client owns."""
        queues = self._queues.get(session, ())
        return [queue for queue in queues if queue.group.name == name and queue.is_owned_by(session)]

    def drained(self, queue: GroupQueue, session: Session) -> None:
        """Unlock a queue that moves away from a foreign reader, which has handled all of it. Apache's Go client does not
        unlock queues that it drops, and its lock would keep the next reader out for a minute."""
        lease = queue.lease
        if lease is not None and not lease.handover and lease.session is session:
            self._free(queue, lease, "unlocked")
            self._report_change()

    def leave(self, session: Session, name: str, *, is_foreign: bool) -> None:
        """Free the queues that a member has not unlocked before it unregistered. A foreign member cannot lock queues
        any more."""
        for queue in self.owned_by(session, name):
            if queue.lease is not None:
                self._free(queue, queue.lease, "unlocked")
        self._ledger.write()
        self._report_change()
        if is_foreign:
            left = self._left.setdefault(session, {})
            left[name] = None
            session.charge(PLACE_BYTES)
            if len(left) > self._limits.max_memberships:
                self.join(session, next(iter(left)))

    def join(self, session: Session, name: str) -> None:
        """Let a member lock after its heartbeat, even if it had left the group."""
        left = self._left.get(session)
        if left is not None and name in left:
            session.charge(-PLACE_BYTES)
            del left[name]
            if not left:
                del self._left[session]

    def renew(self, connections: Iterable[Session]) -> None:
        """Renew all leases of these clients."""
        now_s, living = self._clock.monotonic_s(), set(connections)
        self._awake_s = now_s
        for queue in self.groups.queues():
            if queue.lease is not None and queue.lease.session in living:
                queue.lease.renewed_s = now_s

    def end(self, group: str, topic: str, queue_id: int) -> None:
        """End a lease before its time. Raises KeyError if the queue has no owner."""
        queue = self.groups.queue(group, topic, queue_id)
        if queue.lease is None:
            raise KeyError(group, topic, queue_id)
        self._free(queue, queue.lease, "lock expired")
        self._report_change()

    def expiring(self) -> Work[None]:
        """End the leases that were not renewed in time."""
        now_s = self._now_s()
        for number, queue in enumerate(self.groups.queues(), 1):
            if queue.lease is not None and queue.lease.is_over(now_s):
                self._free(queue, queue.lease, "lock expired")
                self._report_change()
            if number % LOOKS == 0:
                yield

    def _now_s(self) -> float:
        """Return the time. If nothing has asked for it for longer than the interval of `expiring`, this process was
        suspended, and renewals that came meanwhile are still in its sockets: every lease gets that time back."""
        now_s = self._clock.monotonic_s()
        suspended_s = now_s - self._awake_s - LEASE_SWEEP_S
        if suspended_s > STANDSTILL_S:
            log.warning(
                "broker_stood_still", seconds=round(suspended_s, 1), hint="the leases were extended by that time"
            )
            for queue in self.groups.queues():
                if queue.lease is not None:
                    queue.lease.renewed_s += suspended_s
            self._held_until_s += suspended_s
        self._awake_s = now_s
        return now_s

    def topic_deleted(self, topic: str) -> Job[None]:
        """Adapt leases to the deletion of a topic: if the topic is recreated, new messages get the offsets of deleted
        ones, which owners must not skip. The change is in force when the method returns, and the returned job writes it
        to the disk."""
        queues = [
            (queue, queue.lease)
            for group in self.groups.of_topic(topic)
            for queue in group.queues.values()
            if queue.key[0] == topic and queue.lease is not None
        ]
        leases = [(queue, lease) for queue, lease in queues if lease.handover and not lease.is_awaited]
        for _, lease in leases:
            lease.former_end = 0
        self._changes.leases_changed()
        return self._noting_ends(leases)

    def _noting_ends(self, leases: Sequence[tuple[GroupQueue, QueueLease]]) -> Job[None]:
        for number, (queue, lease) in enumerate(leases, 1):
            # otherwise the owner has already pulled from the recreated topic
            if queue.lease is lease and lease.former_end == 0:
                self._ledger.ended_at(queue.lease_key, PreviousRunLease(lease.client_id, lease.epoch, 0))
            if number % LOOKS == 0:
                self._ledger.write()
                yield None
        self._ledger.write()

    def clear_former_end(self, queue: GroupQueue) -> None:
        """Remove the bound of the owner's offset, because the owner reads what this run has."""
        lease = queue.lease
        if lease is None or lease.former_end is None:
            return
        lease.former_end = None
        self._ledger.pulled(queue.lease_key, lease.client_id, lease.epoch)
        self._ledger.write()
        self._changes.leases_changed()

    def record_pull(self, queue: GroupQueue) -> None:
        """Record the owner's first pull in the history."""
        lease = queue.lease
        if lease is not None and lease.handover and not lease.has_pulled:
            lease.has_pulled = True
            name, topic, queue_id = queue.lease_key
            self._history.add(name, "first pull", lease.client_id, topic=topic, queue=queue_id, epoch=lease.epoch)

    def record_commit(self, queue: GroupQueue, offset: int) -> int:
        """Return the offset to store: for a lease of a Rocketlet client, `former_end` at most, if that is set. Record the
        first commit during such a lease in the history."""
        lease = queue.lease
        if lease is None or not lease.handover:
            return offset
        if lease.former_end is not None:
            offset = min(offset, lease.former_end)
        if not lease.has_committed:
            lease.has_committed = True
            name, topic, queue_id = queue.lease_key
            self._history.add(name, "first commit", lease.client_id, topic=topic, queue=queue_id, offset=offset)
        return offset

    def leases_of(self, client_id: str) -> dict[LeaseKey, int]:
        """Return the epochs of a client's queues."""
        leases = ((queue.lease_key, queue.lease) for queue in self.groups.queues())
        return {
            lease_key: lease.epoch
            for lease_key, lease in leases
            if lease is not None and lease.handover and not lease.is_awaited and lease.client_id == client_id
        }

    def __len__(self) -> int:
        return self._count

    # Foreign members that read

    def record_reader(self, queue: GroupQueue, client_id: str) -> None:
        """Write to the disk that a foreign member reads a queue, before the member gets messages, so that the queue
        is reserved for it after a restart. Beyond `max_locks` readers, nothing is written."""
        known = queue.foreign_reader
        if known is None and self._reader_count >= self._limits.max_locks:
            return
        if known is None or known.is_lost or known.client_id != client_id:
            self._set_reader(queue, reader := ForeignReader(client_id, self._next_epoch()))
            self._ledger.read_by(queue.lease_key, client_id, reader.epoch)
            self._ledger.write()

    def clear_reader(self, queue: GroupQueue) -> None:
        """Record that no foreign member reads the queue."""
        known = queue.foreign_reader
        if known is not None:
            self._set_reader(queue, None)
            if not known.is_lost:
                self._ledger.freed(queue.lease_key, known.epoch)

    def lose_reader(self, queue: GroupQueue) -> None:
        """Handle the closed connection of a queue's reader. A foreign member may come back on another one."""
        known = queue.foreign_reader
        self.clear_reader(queue)
        if known is not None and not known.is_lost:
            self._set_reader(queue, known._replace(is_lost=True))

    def _set_reader(self, queue: GroupQueue, reader: ForeignReader | None) -> None:
        former, queue.foreign_reader = queue.foreign_reader, reader
        self._reader_count += (reader is not None) - (former is not None)
        queue.group.lost_readers += bool(reader and reader.is_lost) - bool(former and former.is_lost)

    def renew_awaited(self, queue: GroupQueue, session: Session) -> None:
        """Renew the reservation of a queue for a client that is no member, and has pulled or committed the queue."""
        lease = queue.lease
        if lease is not None and lease.is_awaited and lease.session in (None, session):
            lease.session, lease.renewed_s = session, self._clock.monotonic_s()
            self._list(session, queue)

    def readers_back(self, group: ConsumerGroup, client_id: str) -> list[GroupQueue]:
        """Return the queues that a client, which is a member again, has read since before, and free those that were
        reserved."""
        queues = list(group.queues.values())
        back = [
            item for item in queues if (known := item.foreign_reader) and known.is_lost and known.client_id == client_id
        ]
        for queue in back:
            self._set_reader(queue, None)
        for queue in queues:
            lease = queue.lease
            if lease is not None and lease.is_awaited and lease.client_id == client_id:
                self._free(queue, lease, "reader back")
                self._report_change()
                back.append(queue)
        return back

    def _has_room(
        self, session: Session, group: ConsumerGroup, queue: GroupQueue | None, former: QueueLease | None
    ) -> bool:
        """Return True if one more lock may be granted."""
        held = self._queues.get(session, {})
        is_full = former is None and self._count >= self._limits.max_locks
        if not is_full and (queue in held or len(held) < self._limits.max_locks_of_connection):
            return True
        self.refused += 1
        if session.is_news("locks_refused"):
            limit = self._limits.max_locks if is_full else self._limits.max_locks_of_connection
            of = "this broker" if is_full else "one connection"
            hint = f"{of} has {limit} locks at most; they end when they are not renewed"
            log.warning("locks_refused", group=group.name, peer=session.peer, limit=limit, hint=hint)
        return False

    def _add_waiter(self, session: Session, queue: GroupQueue, lease: QueueLease) -> None:
        """Record that a member waits for a queue. If too many do, the others retry on their own."""
        held = self._queues.get(session, {})
        is_full = self._waiting >= self._limits.max_lock_waiters or (
            queue not in held and len(held) >= self._limits.max_locks_of_connection
        )
        if session not in lease.waiters and not is_full:
            lease.waiters[session] = None
            self._waiting += 1
            self._list(session, queue)

    def _list(self, session: Session, queue: GroupQueue) -> None:
        held = self._queues.setdefault(session, {})
        if queue not in held:
            held[queue] = None
            session.charge(PLACE_BYTES)

    def _unlist(self, session: Session | None, queue: GroupQueue) -> None:
        held = self._queues.get(session) if session is not None else None
        if session is not None and held is not None and queue in held:
            del held[queue]
            session.charge(-PLACE_BYTES)
            if not held:
                del self._queues[session]

    def _free(self, queue: GroupQueue, lease: QueueLease, event: str) -> None:
        queue.lease = None
        queue.version += 1
        self._count -= 1
        self._record_event(event, queue, lease)
        self._unlist(lease.session, queue)
        self._waiting -= len(lease.waiters)
        for waiter in lease.waiters:
            self._unlist(waiter, queue)
            self._changes.lease_freed(queue.group, waiter)
        self.groups.release_queue(queue)

    def _record_event(self, event: str, queue: GroupQueue, lease: QueueLease) -> None:
        lease_key = queue.lease_key
        if lease.is_awaited:
            queue.group.awaited_readers -= 1
            if event == "reader back":
                self._set_reader(queue, ForeignReader(lease.client_id, lease.epoch))
            else:
                self._ledger.freed(lease_key, lease.epoch)
            self._changes.queue_released(queue.group, queue.key, None)
            self._has_changed = True
            return
        if not lease.handover:
            return
        if event == "locked":
            self._ledger.granted(lease_key, lease.client_id, lease.epoch)
            if queue.foreign_reader is not None:  # the line of the lease replaces that of the reader
                self._set_reader(queue, None)
        elif event == "unlocked":
            self._ledger.unlocked(lease_key, lease.epoch)
        else:
            self._ledger.freed(lease_key, lease.epoch)
        self._has_changed = True
        self._history.changed_hands(event, queue.group, lease_key, lease.client_id, lease.epoch)

    def _report_change(self) -> None:
        """Report once what a request has changed, because it may have thousands of queues."""
        if self._has_changed:
            self._has_changed = False
            self._changes.leases_changed()
