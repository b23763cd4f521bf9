"""Changes the owners of queues: leases and locks (LOCK_BATCH_MQ, UNLOCK_BATCH_MQ), foreign readers, and their journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from ...protocol.bodies import LOOKS, Work
from ...protocol.group_bodies import LockRequest
from ...protocol.names import Queue
from ..config import HANDOVER_LEASE_S, LEASE_SWEEP_S, MAX_HOLD_S, PLACE_BYTES, STANDSTILL_S
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from ..store.index import ConsumeQueue
from ..store.journals import Change, LeaseChange, LeaseJournal, LeaseKey
from .group import NO_QUEUE, ConsumerGroup, ConsumerGroups, GroupQueue, QueueCounts
from .members import LOCKED, History, Member
from .owners import KEPT, MISSING, NO_OWNER, Claim, Owner, OwnerEvent, OwnerState, next_owner, replay
from .reading import ALLOWED, Read, ReadKind, may_read
from .stages import QueueKey

log = structlog.get_logger("rocketlet.groups")

_new_tuple = tuple.__new__  # without the call of a named tuple's constructor, for each queue of a request


# without the search of an enum for its member, for each queue of a request
_LEASED, _AWAITED = OwnerState.LEASED, OwnerState.AWAITED
_GRANT, _LOCK, _UNLOCK = OwnerEvent.GRANT, OwnerEvent.LOCK, OwnerEvent.UNLOCK
_BEGINS = frozenset({_GRANT, _LOCK, OwnerEvent.READ})
# what the history has of the end of a lease; otherwise the lease has expired
_ENDED_TEXTS = {_UNLOCK: "unlocked", OwnerEvent.CLOSE: "lock lost"}


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
# and a restarted broker reserves each queue for its reader (AWAITED). The reservation ends
#
# - when that client sends a heartbeat as a member: it reads the queue, and is drained of it before the next one reads
# - when its connection closes, or nothing has pulled or committed the queue for as long as a lease lasts
#
# A connection that pulls or commits such a queue, and does not belong to a member yet, counts as the queue's reader. A
# connection that pulls a queue whose reader has lost its connection becomes the reader, too, as long as no other client
# has read the queue.
#
# Rocketlet members cannot read a queue that another one has locked. Foreign members do not lock, and two of them read
# a queue while they have different member lists. A member that pulls again soon after another one has pulled is the
# second reader, unless it has the lock, or comes after longer than a pull is held: then it has got the queue back.


class Locks:
    """Changes the owners of the queues of all groups, and records their readers. `refused` counts locks beyond the limits,
    `double_readers` the times that a queue was read by two members.

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
        self._read: dict[
            Session, dict[GroupQueue, None]
        ] = {}  # queues that each connection reads, or read before another
        self._left: dict[Session, dict[str, None]] = {}  # the groups that foreign members have left
        self._changes = groups.changes
        self._queues_of = topics.queues_of
        self._has_changed = False
        self._count = 0  # leases, locks and reservations
        self._waiting = 0  # number of waiting members, summed over queues
        self._unknown: set[LeaseKey] = set()  # queues whose owners of the last run could not be adopted
        self._reader_count = 0  # foreign readers, including those whose connections have closed
        self.refused = self.double_readers = 0
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
        runtime.adoption.each("leases", ledger.changes.items(), partial(self._adopt, queues))
        ledger.write()
        ledger.changes.clear()

    def _adopt(self, queues: Mapping[QueueKey, ConsumeQueue], entry: tuple[LeaseKey, list[LeaseChange]]) -> None:
        """Adopt the owner of a queue by its lines in the journal."""
        lease_key, changes = entry
        name, topic, queue_id = lease_key
        self._unknown.add(lease_key)  # until the end of this method
        owner, former_end = replay(changes)
        if owner.holder is not None:
            found = queues.get((topic, queue_id))
            end = found.next if found is not None else 0
            if owner.state is _LEASED and (former_end is None or end < former_end):
                former_end = end
                self._ledger.record((*lease_key, owner.holder.client_id, owner.holder.epoch, end))
            queue = self.groups.obtain_queue(self.groups.obtain(name), (topic, queue_id))
            self._set_owner(queue, owner)
            queue.renewed_s, queue.former_end = self._began_s, former_end
        self._unknown.discard(lease_key)

    def saving(self, *, closes: bool = False) -> Job[None]:
        """Save what `lock` and `unlock` have not saved. closes: grant nothing any more. Raises StoreFull; the next call
        retries."""
        self._is_closed = closes
        if self._clock.monotonic_s() >= self._held_until_s:
            yield from self._ledger.saving(self._leases, closes=closes)

    def _leases(self) -> tuple[Iterator[Change], int]:
        """Return the owners as they are now, even if the iterator is used later, and the last epoch."""
        # Apache's locks are not saved: its broker forgets them, too (RebalanceLockManager), and its clients lock
        # again within 20 s.
        owners = [(queue.lease_key, queue.owner, queue.former_end) for queue in self.groups.queues()]
        return (line for key, owner, end in owners for line in _lines_of(key, owner, end)), self._epoch

    # The mover

    def _move(self, queue: GroupQueue, event: OwnerEvent, client_id: str = "", session: Session | None = None) -> None:
        """Change the owner of a queue by an event, with everything that depends on the owner: what the journal and the
        history have, and who waits. No other method changes the owner of a queue. Callers write the journal."""
        before, former = queue.owner, queue.owner.holder
        claim = None
        if event in _BEGINS:
            self._epoch += 1
            claim = _new_tuple(Claim, (client_id, self._epoch, session))
        elif event is OwnerEvent.RECONNECT and former is not None:
            claim = former._replace(session=session)
        owner = next_owner(before, event, claim)
        self._set_owner(queue, owner)
        holder = owner.holder
        entry = owner.entry if owner.state in KEPT else None
        former_entry = before.entry if before.state in KEPT else None
        if entry is not None and entry != former_entry:  # it replaces the earlier one
            self._ledger.record((*queue.lease_key, *entry))
        elif entry is None and former_entry is not None:
            self._ledger.record((*queue.lease_key, former_entry[1]), may_wait=event is not _UNLOCK)
        has_ended = former is not None and (holder is None or holder.epoch != former.epoch)
        if before.state is _LEASED and former is not None and has_ended:
            self._has_changed = True
            text = _ENDED_TEXTS.get(event, "lock expired")
            self._history.changed_hands(text, queue.group, queue.lease_key, former.client_id, former.epoch)
        elif before.state is _AWAITED and has_ended:
            self._has_changed = True
            self._changes.queue_released(queue.group, queue.key, None)
        if owner.state is _LEASED and holder is not None and (former is None or has_ended):
            self._has_changed = True
            self._history.changed_hands(LOCKED, queue.group, queue.lease_key, holder.client_id, holder.epoch)
        if holder is None and has_ended:
            if queue.waiters:
                self._notify_waiters(queue)
            self.groups.release_queue(queue)

    def _set_owner(self, queue: GroupQueue, owner: Owner) -> None:
        """Set the owner of a queue, count it, and list the queue for its session."""
        before, queue.owner = queue.owner, owner
        queue.version += 1
        holder, former = owner.holder, before.holder
        self._count += (holder is not None) - (former is not None)
        self._reader_count += (owner.reader is not None) - (before.reader is not None)
        queue.group.missing_readers += (owner.state in MISSING) - (before.state in MISSING)
        if holder is former:
            return
        if former is not None and former.session is not None:
            _unlist(self._queues, former.session, queue)
        if holder is not None and holder.session is not None:
            _list(self._queues, holder.session, queue)
        if holder is None or former is None or holder.epoch != former.epoch:
            queue.former_end, queue.is_pull_recorded, queue.is_commit_recorded = None, False, False

    def _notify_waiters(self, queue: GroupQueue) -> None:
        """Notify the members that wait for a lease, lock or reservation that has ended."""
        waiters, queue.waiters = queue.waiters or {}, None
        self._waiting -= len(waiters)
        for waiter in waiters:
            _unlist(self._queues, waiter, queue)
            self._changes.lease_freed(queue.group, waiter)

    # Requests

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
        owner = queue.owner if queue is not None else NO_OWNER
        holder = owner.holder
        if queue is not None and holder is not None and not queue.is_over(now_s):
            epoch = request.epochs.get(wanted)
            if owner.belongs_to(request.client_id, session, epoch):
                renewal = Read(session, group, key, ReadKind.RENEWAL) if owner.is_locked else None
                if renewal is not None and may_read(renewal, now_s) is not ALLOWED:
                    self._move(queue, _UNLOCK)
                    self._changes.queue_refused(group, key)
                    return None
                queue.renewed_s = now_s
                if holder.session is not session:
                    self._move(queue, OwnerEvent.RECONNECT, session=session)
                return holder.epoch
            if holder.client_id != request.client_id or holder.session is not None or epoch is not None:
                if epoch is None:
                    # Notified when the queue is free: a hand-over would otherwise last until its next try. Apache's
                    # clients try every 20 s (RebalanceService.waitInterval).
                    self._add_waiter(session, queue)
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
        if not 0 <= queue_id < self._queues_of(topic) or not self._has_room(session, group, queue):
            return None
        queue = self.groups.obtain_queue(group, key)
        if queue.waiters:  # the others that waited for the previous owner wait for this one now
            self._remove_waiter(session, queue)
        event = _GRANT if request.handover else _LOCK
        self._move(queue, event, request.client_id, session)
        queue.renewed_s = now_s
        return self._epoch

    def unlock(self, request: LockRequest, session: Session) -> list[str]:
        """Free the locks that the client holds among the given queues. Return a text for each queue that was not freed."""
        faults: list[str] = []
        group = self.groups.get(request.group)
        queues = group.queues if group is not None else {}
        for item in request.queues:
            queue = queues.get((item.topic, item.queue_id), NO_QUEUE)
            owner, holder = queue.owner, queue.owner.holder
            if holder is None:
                faults.append(f"{item.topic}:{item.queue_id} is not locked")
            elif holder.client_id != request.client_id or (
                # the owner of a lease from before a restart may unlock, once its heartbeat has identified it
                holder.session not in (session, None) and owner.is_leased
            ):
                faults.append(f"{item.topic}:{item.queue_id} is locked by {holder.client_id} (epoch {holder.epoch})")
            # An unlock that was delayed must not free what its sender has locked again since.
            elif request.epochs.get(item, holder.epoch) != holder.epoch:
                faults.append(f"{item.topic}:{item.queue_id} has the epoch {holder.epoch} by now")
            else:
                self._move(queue, _UNLOCK)
        self._ledger.write()
        self._report_change()
        return faults

    def connection_gone(self, session: Session) -> None:
        """Remove what waits for a closed connection, and the connection as the reader of queues. Locks of Apache's clients
        last until they expire. Leases end if the client has closed the connection. Otherwise the client may not have noticed
        the loss, so its leases last until they expire, and the client can reconnect as after a restart."""
        queues, read = self._queues.pop(session, {}), self._read.pop(session, {})
        session.charge(-PLACE_BYTES * (len(queues) + len(read) + len(self._left.pop(session, ()))))
        self._turns.do_some(self._losing(session, {**queues, **read}))

    def _losing(self, session: Session, queues: Iterable[GroupQueue]) -> Work[None]:
        """End what a closed connection had, a queue per piece. Its client may have come back since."""
        for queue in queues:
            self._remove_waiter(session, queue)
            # Apache's locks outlive their connection, as on its broker, where only the member is dropped
            # (ClientHousekeepingService).
            if queue.owner.is_leased_to(session):
                self._move(queue, OwnerEvent.CLOSE if session.was_closed_by_client else OwnerEvent.DISCONNECT)
                self._report_change()
            if queue.previous_reader is session:
                queue.previous_reader = None
            if queue.reader is session:
                queue.set_reader(None)
                if queue.owner.reader is not None:
                    # A foreign member may come back on another connection. If it was lost before, this other client has read
                    # the queue since.
                    self._move(queue, OwnerEvent.RELEASE if queue.owner.state in MISSING else OwnerEvent.LOSE)
            self.groups.release_queue(queue)
            yield

    def owned_by(self, session: Session, name: str) -> list[GroupQueue]:
        """Return the queues of a group that a client owns."""
        queues = self._queues.get(session, ())
        return [queue for queue in queues if queue.group.name == name and queue.owner.is_held_by(session)]

    def drained(self, queue: GroupQueue, session: Session) -> None:
        """Unlock a queue that moves away from a foreign reader, which has handled all of it. Apache's Go client does not
        unlock queues that it drops, and its lock would keep the next reader out for a minute."""
        if queue.owner.is_locked and queue.owner.is_held_by(session):
            self._move(queue, _UNLOCK)

    def leave(self, session: Session, name: str, *, is_foreign: bool) -> None:
        """Free the queues that a member has not unlocked before it unregistered. A foreign member cannot lock queues
        any more."""
        for queue in self.owned_by(session, name):
            self._move(queue, _UNLOCK)
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
            if queue.owner.holder is not None and queue.owner.holder.session in living:
                queue.renewed_s = now_s

    def end(self, group: str, topic: str, queue_id: int) -> None:
        """End a lease before its time. Raises KeyError if the queue has no owner."""
        queue = self.groups.queue(group, topic, queue_id)
        if queue.owner.holder is None:
            raise KeyError(group, topic, queue_id)
        self._move(queue, OwnerEvent.EXPIRE)
        self._report_change()

    def expiring(self) -> Work[None]:
        """End the leases that were not renewed in time."""
        now_s = self._now_s()
        for number, queue in enumerate(self.groups.queues(), 1):
            if queue.owner.holder is not None and queue.is_over(now_s):
                self._move(queue, OwnerEvent.EXPIRE)
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
                queue.renewed_s += suspended_s
            self._held_until_s += suspended_s
        self._awake_s = now_s
        return now_s

    def topic_deleted(self, topic: str) -> Job[None]:
        """Adapt leases and readers to the deletion of a topic: if the topic is recreated, new messages get the offsets of
        deleted ones, which owners must not skip, and which readers were not given. The change is in force when the method
        returns, and the returned job writes it to the disk."""
        for group in self.groups.of_topic(topic):
            for queue in group.queues.values():
                if queue.key[0] == topic:
                    queue.given_offset, queue.passed = 0, None
        leases = [
            (queue, queue.owner.holder)
            for group in self.groups.of_topic(topic)
            for queue in group.queues.values()
            if queue.key[0] == topic and queue.owner.holder is not None and queue.owner.state is _LEASED
        ]
        for queue, _ in leases:
            queue.former_end = 0
        self._changes.leases_changed()
        return self._noting_ends(leases)

    def _noting_ends(self, leases: Sequence[tuple[GroupQueue, Claim]]) -> Job[None]:
        for number, (queue, claim) in enumerate(leases, 1):
            # otherwise the owner has already pulled from the recreated topic, or another one has the queue
            if queue.former_end == 0 and queue.owner.holder is not None and queue.owner.holder.epoch == claim.epoch:
                self._ledger.record((*queue.lease_key, claim.client_id, claim.epoch, 0))
            if number % LOOKS == 0:
                self._ledger.write()
                yield None
        self._ledger.write()

    def clear_former_end(self, queue: GroupQueue) -> None:
        """Remove the bound of the owner's offset, because the owner reads what this run has. It is written before the
        response, because messages that the owner reads from now on would otherwise be repeated."""
        holder = queue.owner.holder
        if holder is None or queue.former_end is None:
            return
        queue.former_end = None
        self._ledger.record((*queue.lease_key, holder.client_id, holder.epoch, None))
        self._ledger.write()
        self._changes.leases_changed()

    def record_commit(self, queue: GroupQueue, offset: int) -> int:
        """Return the offset to store: for a lease of a Rocketlet client, `former_end` at most, if that is set. Record the
        first commit during such a lease in the history."""
        holder = queue.owner.holder
        if holder is None or not queue.owner.is_leased:
            return offset
        if queue.former_end is not None:
            offset = min(offset, queue.former_end)
        if not queue.is_commit_recorded:
            queue.is_commit_recorded = True
            name, topic, queue_id = queue.lease_key
            self._history.add(name, "first commit", holder.client_id, topic=topic, queue=queue_id, offset=offset)
        return offset

    def leases_of(self, client_id: str) -> dict[LeaseKey, int]:
        """Return the epochs of a client's queues."""
        leases = (queue for queue in self.groups.queues() if queue.owner.state is _LEASED)
        holders = ((queue.lease_key, queue.owner.holder) for queue in leases)
        return {key: holder.epoch for key, holder in holders if holder is not None and holder.client_id == client_id}

    def __len__(self) -> int:
        return self._count

    # Readers

    def record_pull(self, session: Session, group: ConsumerGroup, key: QueueKey) -> GroupQueue:
        """Record that a connection has pulled a queue, and return the queue. If the connection reads too many queues,
        record nothing, and return `NO_QUEUE` if the group has no state of the queue."""
        queue = group.queues.get(key, NO_QUEUE)
        if queue.reader is session or len(self._read.get(session, ())) >= self._limits.max_read_queues:
            return queue
        if queue is NO_QUEUE:
            queue = self.groups.obtain_queue(group, key)
        _list(self._read, session, queue)
        last, before, since_s = queue.reader, queue.previous_reader, queue.reader_since_s
        now_s = self._clock.monotonic_s()
        queue.set_reader(session)
        queue.previous_reader, queue.reader_since_s = last, now_s
        if before is not None and before is not session:
            _unlist(self._read, before, queue)
        self._record_first_pull(queue)
        member = group.members.get(session)
        if member is not None and member.is_foreign:
            self._record_reader(queue, member.client_id)
        is_back = session is before and last is not None and now_s - since_s < MAX_HOLD_S
        if not is_back or queue.owner.is_held_by(session):
            return queue
        other = group.members.get(last) if last is not None else None
        if member is not None and other is not None and _may_be_two(member, other):
            self.double_readers += 1
            fault = f"{key[0]}:{key[1]} is read by {other.client_id} and {member.client_id}"
            self._history.report_misread("two readers", group.name, member.client_id, fault)
        return queue

    def _record_first_pull(self, queue: GroupQueue) -> None:
        """Record the owner's first pull in the history."""
        holder = queue.owner.holder
        if holder is not None and queue.owner.is_leased and not queue.is_pull_recorded:
            queue.is_pull_recorded = True
            name, topic, queue_id = queue.lease_key
            self._history.add(name, "first pull", holder.client_id, topic=topic, queue=queue_id, epoch=holder.epoch)

    def _record_reader(self, queue: GroupQueue, client_id: str) -> None:
        """Write to the disk that a foreign member reads a queue, before the member gets messages, so that the queue
        is reserved for it after a restart. Beyond `max_locks` readers, nothing is written."""
        owner = queue.owner
        if owner.is_leased or (owner.reader is None and self._reader_count >= self._limits.max_locks):
            return
        if owner.state in MISSING or owner.last_reader_id != client_id:
            self._move(queue, OwnerEvent.READ, client_id)
            self._ledger.write()

    def release(self, session: Session, queue: GroupQueue) -> None:
        """Forget the reader of a queue that moves away from it, because it has handled all its messages or is not
        waited for any more."""
        if queue.reader is not session:
            return
        for item in (session, queue.previous_reader):
            if item is not None:
                _unlist(self._read, item, queue)
        queue.set_reader(None)
        queue.previous_reader = None
        if queue.owner.reader is not None:
            self._move(queue, OwnerEvent.RELEASE)
        self.groups.release_queue(queue)

    def release_topic(self, session: Session, group: str, topic: str) -> None:
        """Forget a reader that does not pull the topic any more."""
        for queue in self.read_by(session, group):
            if queue.key[0] == topic:
                self.release(session, queue)

    def read_by(self, session: Session, group: str) -> list[GroupQueue]:
        """Return the queues of a group that this connection pulled last."""
        queues = self._read.get(session, ())
        return [queue for queue in queues if queue.reader is session and queue.group.name == group]

    def reads(self, session: Session, group: ConsumerGroup) -> bool:
        """Return True if `read_by` has a queue. This is faster, for connections with very many queues."""
        return any(queue.reader is session and queue.group is group for queue in self._read.get(session, ()))

    def renew_awaited(self, queue: GroupQueue, session: Session) -> None:
        """Renew the reservation of a queue for a client that is no member, and has pulled or committed the queue."""
        holder = queue.owner.holder
        if holder is None or queue.owner.state is not _AWAITED or holder.session not in (session, None):
            return
        if holder.session is None:
            self._move(queue, OwnerEvent.RECONNECT, session=session)
        queue.renewed_s = self._clock.monotonic_s()

    def readers_back(self, group: ConsumerGroup, client_id: str, session: Session) -> list[GroupQueue]:
        """Return the queues that a client, which is a member again, has read since before. It is their reader again, and no
        longer taken for the reader of others, which it also claims."""
        for queue in self.owned_by(session, group.name):
            if queue.owner.state is _AWAITED and not queue.owner.awaits(client_id):
                self._move(queue, OwnerEvent.DISCONNECT)
        back = [queue for queue in group.queues.values() if queue.owner.awaits(client_id)]
        for queue in back:
            self._move(queue, OwnerEvent.READ, client_id)
        self._ledger.write()
        self._report_change()
        return back

    def _has_room(self, session: Session, group: ConsumerGroup, queue: GroupQueue | None) -> bool:
        """Return True if one more lock may be granted."""
        held = self._queues.get(session, {})
        is_full = (queue is None or queue.owner.holder is None) and self._count >= self._limits.max_locks
        if not is_full and (queue in held or len(held) < self._limits.max_locks_of_connection):
            return True
        self.refused += 1
        if session.is_news("locks_refused"):
            limit = self._limits.max_locks if is_full else self._limits.max_locks_of_connection
            of = "this broker" if is_full else "one connection"
            hint = f"{of} has {limit} locks at most; they end when they are not renewed"
            log.warning("locks_refused", group=group.name, peer=session.peer, limit=limit, hint=hint)
        return False

    def _add_waiter(self, session: Session, queue: GroupQueue) -> None:
        """Record that a member waits for a queue. If too many do, the others retry on their own."""
        held = self._queues.get(session, {})
        is_full = self._waiting >= self._limits.max_lock_waiters or (
            queue not in held and len(held) >= self._limits.max_locks_of_connection
        )
        if queue.waiters is None:
            queue.waiters = {}
        if session not in queue.waiters and not is_full:
            queue.waiters[session] = None
            self._waiting += 1
            _list(self._queues, session, queue)

    def _remove_waiter(self, session: Session, queue: GroupQueue) -> None:
        if queue.waiters and session in queue.waiters:
            del queue.waiters[session]
            self._waiting -= 1

    def _report_change(self) -> None:
        """Report once what a request has changed, because it may have thousands of queues."""
        if self._has_changed:
            self._has_changed = False
            self._changes.leases_changed()


def _lines_of(lease_key: LeaseKey, owner: Owner, former_end: int | None) -> Iterator[Change]:
    """Yield the lines in which the ledger keeps an owner."""
    if owner.entry is not None:
        yield *lease_key, *owner.entry
        if former_end is not None:
            yield *lease_key, *owner.entry[:2], former_end


def _list(index: dict[Session, dict[GroupQueue, None]], session: Session, queue: GroupQueue) -> None:
    held = index.setdefault(session, {})
    if queue not in held:
        held[queue] = None
        session.charge(PLACE_BYTES)


def _unlist(index: dict[Session, dict[GroupQueue, None]], session: Session, queue: GroupQueue) -> None:
    held = index.get(session, {})
    if queue in held:
        del held[queue]
        session.charge(-PLACE_BYTES)
        if not held:
            del index[session]


def _may_be_two(reader: Member, last: Member) -> bool:
    """Return True if the last reader may still read the queue. A Rocketlet member reads nothing without its lock: a foreign
    one that reads has got the queue back."""
    return reader.data.message_model == "CLUSTERING" and not last.data.strategy
