"""The queue leases of a member: heartbeats, LOCK_BATCH_MQ and UNLOCK_BATCH_MQ, and the release of queues to the next
owner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from ...protocol import bodies, group_bodies
from ...protocol.bodies import BodyError, Heartbeat
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame
from ...protocol.group_bodies import LockRequest
from ...protocol.headers import HeaderError, HeartbeatAnswer, UnregisterClient, write
from ...protocol.names import Queue
from ..config import APACHE_LEASE_S, LAST_COMMIT_CHECKS, LEASE_MARGIN_S, LEASE_S, MAX_DISAGREEMENTS, OFFSET_TIMEOUT_S
from ..errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..message import Lease, clock_s
from ..wire.cluster import ClusterView, by_broker, parts
from ..wire.connection import Connection, cancelled, header_of
from .offsets import GroupOffsets

log = get_logger("rocketlet.membership")


# ------------------------------------------------------------------------------
# How the owner of a queue changes: the next owner can lock the queue only when the previous owner has unlocked it, or
# when the previous owner's lease has ended.
#
#     previous owner: stop pulling -> running handlers end -> commit, confirmed -> unlock
#     next owner:     lock, rejected until then -> query the committed offset -> pull
#
# The lock (LOCK_BATCH_MQ) is kept by the broker that has the queue. Rocketlet's broker notifies a rejected member when
# the queue becomes free, checks commits against the lock's epoch, and ends a lease that is not renewed. With Apache's
# broker, a rejected member retries, every 500 ms by default.
#
# Broker and member both know when a lease expires. The member counts it from the sending of the last renewal that the
# broker confirmed (`Lease`). When it has expired, no handler of the queue starts, and the queue is suspended until its
# broker has renewed the lease. If the response has the same epoch, no other member has owned the queue meanwhile. A
# renewal at a Rocketlet broker contains the epoch, so that it never acquires a new lease. The lease of a queue that is
# being released is renewed until a request to unlock the queue is sent. A member acquires a queue again only after the
# handlers of its previous ownership have ended.
#
# If the start offset of a queue cannot be determined, the queue is unlocked instead of being read from a guessed offset.


_UNREACHED = (ConnectionFailed, RequestTimeout)


class QueueUser(Protocol):
    """The reader of the assigned queues: a consumer, or a Spark query."""

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        """Start to read an assigned queue from `offset`. Once the lease has expired, start no handler."""

    async def give_queue(self, queue: Queue) -> int | None:
        """Stop reading a queue that is being released. Return when no handler is running any more, with the offset to
        commit, or None if nothing may be committed."""

    def is_pull_committing(self, queue: Queue) -> bool:
        """Return True if a pull in flight carries an offset, which Apache's broker may store after a later commit."""

    def lose_queue(self, queue: Queue) -> None:
        """Stop using a queue that this member does not own any more. Nothing of it may be committed."""

    def is_running(self, queue: Queue) -> bool:
        """Return True if handlers of a released or lost queue are still running."""

    async def ended(self, queue: Queue) -> None:
        """Wait until no handler of a released or lost queue is running."""

    def suspend_queue(self, queue: Queue) -> None:
        """Start no handlers of a queue whose broker is unreachable or whose lease has expired."""

    def resume_queue(self, queue: Queue) -> None:
        """Continue a suspended queue, whose lease the broker has renewed."""


class Leases:
    """The queues that one member owns, acquires and releases.

    Args:
        wake: an event that is set to start another rebalance.
        rebalanced: an event that is cleared when a queue is lost.

    Attributes:
        owned: the leases of owned queues. A queue that is being released is not among them.
    """

    def __init__(
        self,
        cluster: ClusterView,
        group: str,
        client_id: str,
        user: QueueUser,
        offsets: GroupOffsets,
        heartbeats: Heartbeats,
        *,
        wake: asyncio.Event,
        rebalanced: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._user = user
        self._offsets = offsets
        self._heartbeats = heartbeats
        self._wake = wake
        self._rebalanced = rebalanced
        self.owned: dict[Queue, Lease] = {}
        self._suspended: set[Queue] = set()
        self._locks = MemberLocks(cluster, group, client_id)
        self._releasing: dict[Queue, Lease] = {}
        self._unlocking: set[Queue] = set()  # queues that are committed and unlocked by one request in flight
        self._handing_over: dict[Queue, asyncio.Task[None]] = {}
        self._ending: dict[Queue, asyncio.Task[None]] = {}  # not owned any more, but handlers are still running
        self._leaving_s = math.inf  # the loop's time when this member started to leave the group

    @property
    def releasing(self) -> Set[Queue]:
        """Queues that are being released: still locked, because handlers are running or the commit is in flight."""
        return self._handing_over.keys()

    @property
    def are_releasing(self) -> bool:
        """True if a queue is being released. Queues whose broker is in no route any more are not counted."""
        masters = self._cluster.masters() if self._handing_over else {}
        return any(queue.broker_name in masters for queue in self._handing_over)

    @property
    def are_doubtful(self) -> bool:
        """True if a broker may have locked a queue for this member that the member does not own."""
        return bool(self._locks.doubtful)

    @property
    def are_suspended(self) -> bool:
        """True if an owned queue is suspended, because its broker is unreachable or its lease has expired."""
        return bool(self._suspended)

    # Acquiring queues

    async def acquire(self, wanted: Iterable[Queue]) -> None:
        """Try to lock these queues, and start to read those that are locked. Unlock queues that may be locked but are not
        wanted.

        Skip queues that this member is still releasing or unlocking, queues with running handlers, and queues of
        brokers at which this member is not registered. A later rebalance locks them.
        """
        wanted = set(wanted)
        lockable = wanted - self._locks.unlocking
        unlockable = self._locks.doubtful - lockable - self._handing_over.keys()
        if unlockable:
            await self._give_back(queue for queue in unlockable if not self._locks.is_requested(queue))
        free = wanted - self._locks.unlocking - self.owned.keys() - self._handing_over.keys() - self._ending.keys()
        queues = by_broker(sorted(filter(self._is_known_at, free)))
        await gather_all(
            self._acquire_from(name, part)
            for name, of_broker in queues.items()
            for part in parts(of_broker, self._limits.lock_queues)
        )

    async def _acquire_from(self, broker_name: str, queues: list[Queue]) -> None:
        try:
            connection = await self._cluster.broker(broker_name)
            leases, offsets = await self._locks.lock(connection, queues)
        except (RocketletError, BodyError) as error:
            log.info("lock_failed", broker=broker_name, reason=str(error))
            return
        for queue, offset in offsets.items():
            self._own(connection, queue, leases[queue], offset)
        unknown = leases.keys() - offsets.keys()
        if unknown:
            await gather_all(self._begin(connection, queue, leases[queue]) for queue in unknown)

    async def _begin(self, connection: Connection, queue: Queue, lease: Lease) -> None:
        """Query the start offset of a locked queue and start to read it. Unlock the queue if the offset cannot be
        determined."""
        try:
            offset = await self._offsets.begin(connection, queue, lease.epoch)
        except (RocketletError, HeaderError) as error:
            log.warning("start_offset_unknown", queue=str(queue), reason=str(error))
            await self._locks.unlock(queue)
            return
        self._own(connection, queue, lease, offset)

    def _own(self, connection: Connection, queue: Queue, lease: Lease, offset: int) -> None:
        if not connection.is_open or lease.is_over:
            return  # the broker may have freed the lock, so the next rebalance requests it again
        self._locks.end_doubt(queue)
        self.owned[queue] = lease
        self._user.take_queue(queue, offset, lease)
        log.info("queue_assigned", queue=str(queue), offset=offset, epoch=lease.epoch)

    # Releasing queues

    def release(self, queue: Queue) -> None:
        """Start to release a queue. The queue is not owned from now on, but stays locked until its handlers have ended
        and its offset is committed, the commit has finally failed, or the lease has ended."""
        lease = self._releasing[queue] = self.owned.pop(queue)
        self._suspended.discard(queue)
        handing_over = asyncio.create_task(self._hand_over(queue, lease), name=f"hand over {queue}")
        self._handing_over[queue] = handing_over

    async def _hand_over(self, queue: Queue, lease: Lease) -> None:
        began_s = clock_s()
        try:
            offset = await self._user.give_queue(queue)
            drained_s = committed_s = clock_s()
            is_unlocked = offset is not None and await self._commit_and_unlock(queue, offset, lease)
            fault = None
            if not is_unlocked and offset is not None:
                fault = await self._final_commit(queue, offset, lease)
                committed_s = clock_s()
            if self._releasing.pop(queue, None) is not None:
                if not is_unlocked:
                    await self._locks.unlock(queue, lease.epoch)
                if fault is not None:
                    hint = "messages that were handled after the last commit are redelivered"
                    log.warning("hand_over_failed", queue=str(queue), offset=offset, reason=str(fault), hint=hint)
                    return
                log.info(
                    "queue_handed_over",
                    queue=str(queue),
                    offset=offset,
                    drain_ms=round((drained_s - began_s) * 1000, 1),
                    commit_ms=round((committed_s - drained_s) * 1000, 1),
                    unlock_ms=round((clock_s() - committed_s) * 1000, 1),
                )
        except RocketletError as error:
            log.warning("hand_over_failed", queue=str(queue), reason=str(error), hint="the broker will end the lease")
        finally:
            if self._releasing.pop(queue, None) is not None:
                self._locks.doubt([queue])  # the hand-over was cancelled or failed before the unlock
            self._handing_over.pop(queue, None)
            self._end(queue, lease)
            self._wake.set()

    async def _commit_and_unlock(self, queue: Queue, offset: int, lease: Lease) -> bool:
        """Commit and unlock in one request. Return True if the broker has done both.

        The lease is not renewed meanwhile, because the broker would process the renewal after the unlock and reject it.
        """
        self._unlocking.add(queue)
        try:
            return await self._locks.hand_over(queue, offset, lease)
        finally:
            self._unlocking.discard(queue)

    async def give_all(self) -> None:
        """Release all queues, and unlock queues that may be locked. Return when that is done or has failed."""
        loop = asyncio.get_running_loop()
        self._leaving_s = loop.time()
        end_s = self._leaving_s + self._limits.hand_over_timeout_s
        for queue in list(self.owned):
            self.release(queue)
        await asyncio.gather(*self._handing_over.values(), return_exceptions=True)
        while doubtful := list(self._locks.doubtful):
            masters = {self._cluster.master(queue.broker_name) for queue in doubtful}
            await self._heartbeats.register(filter(None, masters), self._limits.register_timeout_s)
            await self._give_back(doubtful)
            if not self._locks.doubtful or loop.time() >= end_s:
                return
            await asyncio.sleep(self._limits.reconnect_s)

    async def _give_back(self, queues: Iterable[Queue]) -> None:
        """Unlock queues that may be locked, at brokers where this member is registered. Otherwise other members could not
        lock them until the leases expire."""
        await asyncio.gather(*map(self._locks.unlock, filter(self._is_known_at, queues)))

    def _is_known_at(self, queue: Queue) -> bool:
        """Return True if this member has registered at the queue's broker on the open connection. Otherwise the broker
        unlocks nothing for it."""
        return self._heartbeats.is_registered(self._cluster.master(queue.broker_name))

    async def abandon(self) -> None:
        """Stop owning all queues immediately, even if they are not released yet. Send unlocks without waiting for
        responses."""
        held = self.owned | self._releasing
        self._locks.abandon(held)
        self.owned.clear()
        self._releasing.clear()
        for queue, lease in held.items():
            lease.end()
            self._user.lose_queue(queue)
        await cancelled(self._handing_over.values())
        for ending in self._ending.values():
            ending.cancel()

    def _end(self, queue: Queue, lease: Lease) -> None:
        """Stop owning a queue. The queue is not acquired again before its running handlers have ended."""
        lease.end()
        self._user.lose_queue(queue)
        if self._user.is_running(queue):
            self._ending[queue] = ending = asyncio.create_task(self._user.ended(queue), name=f"end {queue}")
            ending.add_done_callback(lambda _: self._ended(queue))

    def _ended(self, queue: Queue) -> None:
        del self._ending[queue]
        self._wake.set()

    async def _final_commit(self, queue: Queue, offset: int, lease: Lease) -> RocketletError | None:
        """Commit before the unlock, so that acknowledged messages are not redelivered.

        Return the error if the offset is not stored; None if it is, or if the queue was lost meanwhile.
        """
        may_be_undone = not lease.epoch and self._user.is_pull_committing(queue)
        if may_be_undone:
            await self._offsets.pulls_stored(queue, offset)
        fault = await self._commit_while_releasing(queue, offset, lease)
        if may_be_undone and fault is None:
            await self._repeat_overtaken_commit(queue, offset, lease)
        return fault

    async def _commit_while_releasing(self, queue: Queue, offset: int, lease: Lease) -> RocketletError | None:
        """Commit, and retry while the broker is unreachable.

        An unreachable broker may still have the lease. When it is reachable again, it accepts the commit after a
        renewal, or rejects the renewal because another member owns the queue. The commit is therefore retried for as
        long as the member is in the group. Once the member leaves the group, or if the broker rejects the commit, the
        commit is retried only for `hand_over_timeout_s`. A rejection that is final (`_is_final`) is not retried.

        Return the error if the offset is not stored; None if it is, or if the queue was lost meanwhile.
        """
        began_s = asyncio.get_running_loop().time()
        refused_s = math.inf
        fault: RocketletError | None = None
        while queue in self._releasing:
            if not lease.is_over and (fault is None or self._is_known_at(queue)):
                fault = await self._commit_one(queue, offset, lease)
                if fault is None or _is_final(fault):
                    return fault
            now_s = asyncio.get_running_loop().time()
            refused_s = min(refused_s, now_s) if isinstance(fault, BrokerRefused) else math.inf
            if now_s >= min(max(began_s, self._leaving_s), refused_s) + self._limits.hand_over_timeout_s:
                return fault or ConnectionFailed(f"the broker {queue.broker_name} has not renewed the lease")
            await self._renewed_for_commit(queue)
        return None

    async def _renewed_for_commit(self, queue: Queue) -> None:
        """Before a commit is retried, wait, register at the broker and request a renewal of the lease."""
        await asyncio.sleep(self._limits.reconnect_s)
        address = self._cluster.master(queue.broker_name)
        if address is not None:
            await self._heartbeats.register([address])
        await self._renew_all([queue])

    async def _repeat_overtaken_commit(self, queue: Queue, offset: int, lease: Lease) -> None:
        """Check the stored offset and repeat the commit if necessary, because the broker may have stored the offset of
        an earlier pull after it."""
        for _ in range(LAST_COMMIT_CHECKS):
            try:
                stored = await self._offsets.committed(queue)
            except RocketletError as error:
                log.info("last_commit_unknown", queue=str(queue), offset=offset, reason=str(error))
                return
            if stored == offset or queue not in self._releasing:
                return
            log.info("commit_overtaken", queue=str(queue), offset=offset, stored=stored)
            await self._commit_one(queue, offset, lease)

    def _lose(self, queue: Queue, reason: str) -> None:
        """Stop owning or releasing a queue whose lease the broker has ended, or that has another owner."""
        self._suspended.discard(queue)
        lease = self.owned.pop(queue, None)
        if lease is not None:
            log.warning("queue_lost", queue=str(queue), reason=reason)
            self._rebalanced.clear()
            self._end(queue, lease)
            self._wake.set()
        elif (lease := self._releasing.pop(queue, None)) is not None:
            log.warning("queue_lost_in_hand_over", queue=str(queue), reason=reason)
            lease.end()
            self._user.lose_queue(queue)

    # Leases

    def suspend(self, address: str) -> None:
        """Suspend the queues of a broker whose connection has closed, until it has renewed their leases.

        A Rocketlet broker has freed the queues if this client closed the connection; after any other end the leases
        last until they expire.
        """
        for queue, lease in self.owned.items():
            if lease.address == address:  # the lease's address, because the route may have a new one now
                self._suspend(queue)

    def _suspend(self, queue: Queue) -> None:
        if queue not in self._suspended:
            self._suspended.add(queue)
            self._user.suspend_queue(queue)

    async def reclaim(self) -> None:
        """Renew the leases of suspended queues, of queues that are being released, and of queues whose broker has moved."""
        reclaimed = self._suspended | self._releasing.keys()
        for queue, lease in self.owned.items():
            if self._has_moved(queue, lease):
                reclaimed.add(queue)
        if reclaimed:
            await self._renew_all(reclaimed)

    def _has_moved(self, queue: Queue, lease: Lease) -> bool:
        """Return True if the queue's broker has another address now than when the lease was granted or renewed. The
        broker accepts commits at its new address only after a renewal."""
        return bool(lease.address) and lease.address != self._cluster.master(queue.broker_name)

    async def renew_forever(self) -> None:
        """Renew leases at the interval `lock_interval_s`, and those of suspended queues every `lease_tick_s`. Suspend
        queues whose lease has expired."""
        while True:
            await asyncio.sleep(self._limits.lease_tick_s)
            over = [queue for queue, lease in self.owned.items() if lease.is_over and queue not in self._suspended]
            for queue in over:
                log.warning("lease_over", queue=str(queue), hint="waiting for the broker")
                self._suspend(queue)
            # A rebalance would register, too, but it may be waiting for another broker.
            masters = {self._cluster.master(queue.broker_name) for queue in self._suspended}
            await self._heartbeats.register(filter(None, masters), self._limits.register_timeout_s)
            due_s = clock_s() - self._limits.lock_interval_s
            leases = {queue: self._held(queue) for queue in self.owned.keys() | self._releasing.keys()}
            # If one lease is due, renew all leases at its broker in the same request, so that they stay due together.
            due = {queue.broker_name for queue, lease in leases.items() if lease is not None and lease.asked_s <= due_s}
            await self._renew_all(queue for queue in leases if queue in self._suspended or queue.broker_name in due)

    async def _renew_all(self, queues: Iterable[Queue]) -> None:
        """Renew leases at the brokers at which this member is registered. The other brokers need a heartbeat first."""
        await asyncio.gather(
            *(
                self._renew(broker_name, part)
                for broker_name, of_broker in by_broker(queues).items()
                if self._heartbeats.is_registered(self._cluster.master(broker_name))
                for part in parts(of_broker, self._limits.lock_queues)
            )
        )

    async def _renew(self, broker_name: str, queues: Iterable[Queue]) -> None:
        """Renew the leases of queues at one broker, and lose the queues whose lease it does not renew or renews with
        another epoch. After an error, or if the connection closes meanwhile, lose no queue."""
        try:
            connection = await self._cluster.broker(broker_name)
            # Do not renew a queue that is unlocked or being unlocked, because Apache's broker would lock it again.
            held = {queue: lease for queue in queues if (lease := self._held(queue)) is not None}
            if not held:
                return
            epochs = {queue: lease.epoch for queue, lease in held.items() if lease.epoch}
            fresh = await self._locks.renew(connection, held, epochs)
        except (RocketletError, BodyError) as error:
            log.warning("locks_not_renewed", broker=broker_name, reason=str(error))
            return
        if not connection.is_open:
            return  # the broker may have freed the queues since it responded
        for queue, lease in held.items():
            if self._held(queue) is lease:
                self._renewed(queue, lease, fresh.get(queue))

    def _held(self, queue: Queue) -> Lease | None:
        lease = self._releasing.get(queue) if queue not in self._unlocking else None
        return self.owned.get(queue) or lease

    def _renewed(self, queue: Queue, lease: Lease, fresh: Lease | None) -> None:
        if fresh is None or fresh.epoch != lease.epoch:
            self._lose(queue, "its lease ended" if fresh is None else "its broker has another epoch")
            return
        # A lease can expire without a suspension, after which handlers must be started again. At another address, the
        # broker has not stored the offsets that pulls have carried, so they must be repeated.
        must_resume = lease.is_over or lease.address != fresh.address or queue in self._suspended
        lease.renew(fresh)
        if queue in self.owned and must_resume:
            self._suspended.discard(queue)
            self._user.resume_queue(queue)
            self._wake.set()

    # Commits

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        """Commit offsets of owned queues, and return the queues whose offsets were stored.

        Skip suspended queues, and queues whose broker has moved since the last renewal. Lose a queue if the broker
        responds that another member owns it. Raise nothing if a broker is unreachable, because the next commit includes
        these offsets.
        """
        ready = {queue: offset for queue, offset in offsets.items() if self._may_commit(queue)}
        stored = await asyncio.gather(
            *(
                self._commit_at(broker_name, {queue: ready[queue] for queue in queues})
                for broker_name, queues in by_broker(ready).items()
            )
        )
        return set[Queue]().union(*stored)

    def _may_commit(self, queue: Queue) -> bool:
        lease = self.owned.get(queue)
        return lease is not None and queue not in self._suspended and not self._has_moved(queue, lease)

    async def commit_position(self, queue: Queue, offset: int, *, sought: bool) -> None:
        """Commit an offset that a user or an administrator has chosen. Raise nothing, like `commit`.

        With Apache's brokers, if a pull in flight carries an offset, first wait until the broker has most likely stored
        that offset, so that it does not replace this one. An error or a timeout ends the wait. Nothing is committed if
        the member does not own the queue, or no longer does after the wait.

        Args:
            sought: True if the broker itself returned the offset.
        """
        lease = self.owned.get(queue)
        if lease is not None and not lease.epoch and self._user.is_pull_committing(queue):
            await self._offsets.pulls_stored(queue, offset)
        if lease is not None and self.owned.get(queue) is lease and self._may_commit(queue):
            await self._commit_one(queue, offset, lease, sought=sought)

    async def _commit_at(self, broker_name: str, offsets: Mapping[Queue, int]) -> set[Queue]:
        leases = {queue: lease for queue in offsets if (lease := self.owned.get(queue)) is not None}
        stored, alone = await self._locks.commit(broker_name, {queue: offsets[queue] for queue in leases}, leases)
        tried = [queue for queue in alone if self.owned.get(queue) is leases[queue]]
        faults = await asyncio.gather(*(self._commit_one(queue, offsets[queue], leases[queue]) for queue in tried))
        return stored | {queue for queue, fault in zip(tried, faults, strict=True) if fault is None}

    async def _commit_one(
        self, queue: Queue, offset: int, lease: Lease, *, sought: bool = False
    ) -> RocketletError | None:
        """Commit an offset. Return the error if it is not stored, else None."""
        try:
            await self._offsets.store(queue, offset, lease.epoch, sought=sought)
        except BrokerRefused as error:
            log.warning("commit_refused", queue=str(queue), offset=offset, reason=str(error))
            if error.code == ResponseCode.NO_PERMISSION and self.owned.get(queue) is lease:
                self._lose(queue, "another member owns it")
            return error
        except _UNREACHED as error:
            log.warning("commit_failed", queue=str(queue), reason=str(error), hint="the next commit includes it")
            return error
        return None


def _is_final(fault: RocketletError) -> bool:
    """Return True if retrying a commit is useless, because the queue does not exist or ends before the offset.

    NO_PERMISSION is not final: a broker that has restarted responds with it until the lease is renewed there.
    """
    return isinstance(fault, BrokerRefused) and fault.code == ResponseCode.SYSTEM_ERROR


async def gather_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently and wait until all have ended. Raise the first exception, if any, after all have
    ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


# ------------------------------------------------------------------------------
# LOCK_BATCH_MQ and UNLOCK_BATCH_MQ of one member: locks, renewals, unlocks, and commits, which Rocketlet's brokers
# accept in the same requests.
#
# The member tries to unlock queues that a broker may have locked for it and that it does not own. A broker grants a lock
# even if nobody waits for the response any more, because the caller was cancelled or timed out. Apache's broker keeps
# such a lock for up to 60 s, Rocketlet's for up to 20 s, and no member reads the queue meanwhile. A queue is therefore
# *in doubt* from the lock request until the member owns the queue, the broker rejects the lock, the broker confirms an
# unlock, or 60 s have passed.
#
# An unlock, except in `abandon`, waits until all lock requests of its queue have a response or have timed out, even if
# nobody waits for them any more, because Apache's broker processes the requests of one connection in several threads
# (AdminBrokerProcessor's executor), so that the unlock could overtake the lock. For the same reason, no queue is locked
# while an unlock of it is in flight: the unlock could undo the lock without the new owner noticing. If a connection
# ends before the unlock has a response, another unlock must be confirmed first.


class ReleaseBatch(NamedTuple):
    """Queues that one request commits and unlocks."""

    offsets: dict[Queue, int]
    epochs: dict[Queue, int]


class MemberLocks:
    """The lock requests of one member of one group."""

    def __init__(self, cluster: ClusterView, group: str, client_id: str) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._client_id = client_id
        # lock requests in flight, without renewals that contain an epoch
        self._in_flight: dict[asyncio.Future[Frame], Set[Queue]] = {}
        self._unlocks: dict[Queue, asyncio.Future[Frame]] = {}
        self._unanswered: set[Queue] = set()  # queues whose last unlock will never get a response
        self._doubtful: dict[Queue, float] = {}  # with the time of `clock_s` at which a possible lock has expired
        # queues that are handed over in one request, by broker name
        self._hand_overs: dict[str, tuple[ReleaseBatch, asyncio.Task[set[Queue]]]] = {}

    def _body(
        self, queues: Iterable[Queue], epochs: Mapping[Queue, int], offsets: Mapping[Queue, int] | None = None
    ) -> bytes:
        request = LockRequest(self._client_id, self._group, tuple(queues), True, epochs, offsets or {})
        return group_bodies.encode_lock_request(request)

    @property
    def doubtful(self) -> Set[Queue]:
        """Queues that may be locked for this member and are not owned by it."""
        if self._doubtful:
            now_s = clock_s()
            self._doubtful = {queue: over_s for queue, over_s in self._doubtful.items() if over_s > now_s}
        return self._doubtful.keys()

    @property
    def unlocking(self) -> Set[Queue]:
        """Queues with an unlock that the broker may still process, which would undo a new lock."""
        self._unanswered &= self.doubtful
        return self._unanswered.union(self._unlocks)

    # Locks

    async def lock(
        self, connection: Connection, queues: Iterable[Queue]
    ) -> tuple[dict[Queue, Lease], dict[Queue, int]]:
        """Request locks. Return the leases of queues that are locked for this member now, and the group's committed
        offsets as far as the broker returns them.

        Each requested queue is in doubt, which means that it counts as possibly locked for this member, until the
        member owns it, the broker rejects the lock, the broker responds to an unlock, or 60 s have passed. Raises
        RocketletError and BodyError.
        """
        asked = tuple(queues)
        self.doubt(asked)
        try:
            answer, leases = await self._request(connection, asked, {})
        except BrokerRefused:
            self._refused(asked)
            raise
        self._refused(set(asked) - leases.keys())
        offsets = group_bodies.decode_committed(answer.body)
        return leases, {queue: offset for queue, offset in offsets.items() if queue in leases}

    async def renew(
        self, connection: Connection, queues: Iterable[Queue], epochs: Mapping[Queue, int]
    ) -> dict[Queue, Lease]:
        """Renew locks. Return the leases of queues that are still locked for this member. A queue in `epochs` does not
        get a new lock if its lock has ended. Raises RocketletError and BodyError."""
        return (await self._request(connection, tuple(queues), epochs))[1]

    async def _request(
        self, connection: Connection, queues: tuple[Queue, ...], epochs: Mapping[Queue, int]
    ) -> tuple[Frame, dict[Queue, Lease]]:
        body = self._body(queues, epochs)
        asked, sent_s = set(queues), clock_s()
        asking = connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, self._limits.hand_over_timeout_s)
        self._in_flight[asking] = asked - epochs.keys()
        asking.add_done_callback(self._answered)
        # Two waits, because after the process was suspended the first one ends before the loop has read its sockets.
        for _ in range(2):
            await asyncio.wait({asking}, timeout=self._limits.lock_timeout_s / 2)
        if not asking.done():
            raise RequestTimeout(
                f"{connection.address} did not respond to LOCK_BATCH_MQ within {self._limits.lock_timeout_s} s"
            )
        answer = asking.result()
        leases: dict[Queue, Lease] = {}
        for queue, epoch in group_bodies.decode_locked(answer.body).items():
            if queue in asked:
                ends_s = sent_s + (LEASE_S if epoch else APACHE_LEASE_S) - LEASE_MARGIN_S
                leases[queue] = Lease(epoch, ends_s, connection.address, sent_s)
        return answer, leases

    def _answered(self, asking: asyncio.Future[Frame]) -> None:
        del self._in_flight[asking]
        if not asking.cancelled():
            asking.exception()  # marked as retrieved, because nobody may be waiting for it any more

    # Queues in doubt

    def doubt(self, queues: Iterable[Queue]) -> None:
        """Record queues that may be locked for this member and are not owned by it."""
        over_s = clock_s() + APACHE_LEASE_S
        self._doubtful |= dict.fromkeys(queues, over_s)

    def end_doubt(self, queue: Queue) -> None:
        """Record that a queue is owned by this member or not locked for it, so that it needs no unlock."""
        self._doubtful.pop(queue, None)

    def _refused(self, queues: Iterable[Queue]) -> None:
        """Record that the broker rejected locks. A queue stays in doubt while another lock request of it has no
        response."""
        for queue in queues:
            if not self.is_requested(queue):
                self._doubtful.pop(queue, None)

    def is_requested(self, queue: Queue) -> bool:
        """Return True if a lock request of the queue is in flight."""
        return any(queue in queues for queues in self._in_flight.values()) if self._in_flight else False

    # Unlocks

    async def unlock(self, queue: Queue, epoch: int = 0) -> None:
        """Unlock a queue. Raise nothing; without a response, or if this is cancelled, the queue stays in doubt."""
        self.doubt([queue])
        in_flight = [asking for asking, queues in self._in_flight.items() if queue in queues]
        if in_flight:
            await asyncio.wait(in_flight)
            self.doubt([queue])  # the broker may have locked the queue just now
        try:
            connection = await self._cluster.broker(queue.broker_name)
        except RocketletError as error:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="the unlock is retried")
            return
        unlock = self._unlocks.get(queue)
        if unlock is None:  # a slow unlock is not repeated before it has timed out
            body = self._body((queue,), {queue: epoch} if epoch else {})
            unlock = self._unlocks[queue] = connection.request(
                RequestCode.UNLOCK_BATCH_MQ, {}, body, self._limits.hand_over_timeout_s
            )
            unlock.add_done_callback(partial(self._unlocked, queue))
        await asyncio.wait({unlock}, timeout=self._limits.lock_timeout_s)

    def _unlocked(self, queue: Queue, unlock: asyncio.Future[Frame]) -> None:
        """Record that an unlock has a response, or will never get one."""
        del self._unlocks[queue]
        error = unlock.exception()
        if error is None or isinstance(error, BrokerRefused):
            if error is not None:
                log.info(
                    "unlock_refused", queue=str(queue), reason=str(error), hint="this member did not own it any more"
                )
            self.end_doubt(queue)
            self._unanswered.discard(queue)
        else:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="the unlock is retried")
            self.doubt([queue])
            self._unanswered.add(queue)

    def abandon(self, held: Mapping[Queue, Lease]) -> None:
        """Unlock these queues and those in doubt at the connected brokers, without waiting for responses."""
        epochs = dict.fromkeys(self._doubtful, 0) | {queue: lease.epoch for queue, lease in held.items()}
        for broker_name, queues in by_broker(epochs).items():
            connection = self._cluster.connected(broker_name)
            if connection is None or not connection.is_open:
                continue
            for part in parts(queues, self._limits.lock_queues):
                body = self._body(part, {queue: epochs[queue] for queue in part if epochs[queue]})
                connection.oneway(RequestCode.UNLOCK_BATCH_MQ, {}, body)
        self._doubtful.clear()

    # Commits with locks, at Rocketlet's brokers

    async def hand_over(self, queue: Queue, offset: int, lease: Lease) -> bool:
        """Commit and unlock a queue, in one request with other queues of its broker that are released before the request is
        sent. Return True if the broker has done both; False also if it is not connected or not Rocketlet's, or if
        the lease has expired."""
        connection = self._cluster.connected(queue.broker_name)
        if connection is None or not connection.speaks_msgpack or not lease.epoch or lease.is_over:
            return False
        known = self._hand_overs.get(queue.broker_name)
        if known is None or len(known[0].offsets) >= self._limits.lock_queues:
            together = ReleaseBatch({}, {})
            known = together, asyncio.create_task(self._send_hand_over(queue.broker_name, together))
            self._hand_overs[queue.broker_name] = known
        together, sending = known
        together.offsets[queue], together.epochs[queue] = offset, lease.epoch
        return queue in await asyncio.shield(sending)

    async def _send_hand_over(self, broker_name: str, together: ReleaseBatch) -> set[Queue]:
        """Return the queues that the broker has committed and unlocked."""
        await asyncio.sleep(0)  # so that other queues can join the batch
        known = self._hand_overs.get(broker_name)
        if known is not None and known[0] is together:  # if this batch was full, another one is open already
            del self._hand_overs[broker_name]
        connection = self._cluster.connected(broker_name)
        if connection is None:  # do not wait for one, because the commit could then arrive after a later one
            return set()
        try:
            body = self._body(together.offsets, together.epochs, together.offsets)
            answer = await connection.request(RequestCode.UNLOCK_BATCH_MQ, {}, body, OFFSET_TIMEOUT_S)
            return set(group_bodies.decode_locked(answer.body))
        except (RocketletError, BodyError) as error:
            log.info("hand_over_delayed", broker=broker_name, reason=str(error), hint="each queue is retried alone")
            return set()

    async def commit(
        self, broker_name: str, offsets: Mapping[Queue, int], leases: Mapping[Queue, Lease]
    ) -> tuple[set[Queue], set[Queue]]:
        """Commit queues of one broker in as few requests as possible, which also renew their leases at the broker.

        Return the queues that are committed, and the queues to commit one by one. After a timeout or a connection error
        the queues are in neither, because a pull may carry a later offset before a retry.
        """
        stored, alone = set[Queue](), set[Queue]()
        for part in parts(list(offsets), self._limits.lock_queues):
            done, left = await self._commit(broker_name, {queue: offsets[queue] for queue in part}, leases)
            stored |= done
            alone |= left
        return stored, alone

    async def _commit(
        self, broker_name: str, offsets: dict[Queue, int], leases: Mapping[Queue, Lease]
    ) -> tuple[set[Queue], set[Queue]]:
        connection = self._cluster.connected(broker_name)
        epochs = {queue: leases[queue].epoch for queue in offsets}
        if len(offsets) < 2 or connection is None or not connection.speaks_msgpack or not all(epochs.values()):
            return set(), set(offsets)
        try:
            body = self._body(offsets, epochs, offsets)
            answer = await connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, OFFSET_TIMEOUT_S)
            stored = group_bodies.decode_committed(answer.body)
        except (BrokerRefused, BodyError) as error:
            log.info("commits_refused", broker=broker_name, reason=str(error), hint="each queue is retried alone")
            return set(), set(offsets)
        except RocketletError as error:
            log.warning("commit_failed", broker=broker_name, reason=str(error), hint="the next commit includes it")
            return set(), set()
        done = {queue for queue, offset in offsets.items() if stored.get(queue) == offset}
        return done, offsets.keys() - done


# ------------------------------------------------------------------------------
# Sends heartbeats, which register this member, to all brokers of the routes, and records at which of them it is registered.
#
# Apache's brokers remove a member after 120 s without a heartbeat. A Rocketlet broker grants no lock on a connection
# without a heartbeat.


class Heartbeats:
    """The heartbeats of one member.

    Args:
        describe: returns the current heartbeat.
        addresses: returns the addresses of the brokers to which heartbeats are sent.

    Attributes:
        refusal: the error if a broker rejected the heartbeat that failed last; None if it failed otherwise, or none failed.
    """

    def __init__(
        self, cluster: ClusterView, describe: Callable[[], Heartbeat], addresses: Callable[[], Iterable[str]]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._describe = describe
        self._addresses = addresses
        self._registered: set[str] = set()
        self._failing: set[str] = set()
        self._beating: dict[str, asyncio.Task[None]] = {}  # heartbeats of `register`, by address
        self._disagreements: set[str] = set()  # conflicts between members that are logged already
        self.refusal: BrokerRefused | None = None
        self._last_body = b""
        self._changed = asyncio.Event()

    @property
    def are_failing(self) -> bool:
        """True if the last heartbeat to a broker failed."""
        return bool(self._failing)

    def is_registered(self, address: str | None) -> bool:
        """Return True if this member is registered at the broker with this address, on the open connection."""
        return address in self._registered

    def forget(self, address: str | None = None) -> None:
        """Record that this member is not registered any more at this broker, or at all brokers if None."""
        if address is None:
            self._registered.clear()
        else:
            self._registered.discard(address)

    def lost(self, address: str) -> None:
        """Record that the connection to a broker has ended, and have `beat_forever` open it again."""
        self._registered.discard(address)
        self._changed.set()

    def send_if_changed(self) -> None:
        """Have `beat_forever` send a heartbeat now, if it has changed since the last one."""
        if bodies.encode_heartbeat(self._describe()) != self._last_body:
            self._changed.set()

    async def beat(self) -> None:
        """Send a heartbeat to every broker. Return when each has responded or failed."""
        self._last_body = body = bodies.encode_heartbeat(self._describe())
        addresses = set(self._addresses())
        self._failing &= addresses  # forget failures at the previous address of a broker that moved
        await asyncio.gather(*(self._beat_at(address, body) for address in addresses))

    async def register(self, addresses: Iterable[str] | None = None, timeout_s: float | None = None) -> None:
        """Send a heartbeat to those brokers at which this member is not registered.

        Return when each has responded or failed, or after `timeout_s`, so that a broker that hangs does not delay the
        others. The heartbeat to that broker stays in flight.

        Args:
            addresses: the addresses of brokers. Default: all brokers.
        """
        named = self._addresses() if addresses is None else addresses
        news = {address for address in named if address not in self._registered}
        for address in news - self._beating.keys():
            beating = asyncio.create_task(self._beat_at(address, bodies.encode_heartbeat(self._describe())))
            self._beating[address] = beating
            beating.add_done_callback(partial(self._has_beaten, address))
        if news:
            await asyncio.wait([self._beating[address] for address in news], timeout=timeout_s)

    def _has_beaten(self, address: str, beating: asyncio.Task[None]) -> None:
        del self._beating[address]

    async def unregister(self, group: str, address: str) -> None:
        """Unregister this member of a group at a broker to which a connection is open."""
        if not self._cluster.is_connected(address):
            return
        try:
            connection = await self._cluster.connection(address)
            ext = write(UnregisterClient(self._describe().client_id, consumer_group=group))
            await connection.request(RequestCode.UNREGISTER_CLIENT, ext)
        except RocketletError as error:
            log.info("unregister_failed", broker=address, reason=str(error))

    async def stop(self) -> None:
        """Cancel the heartbeats of `register` that are in flight."""
        await cancelled(self._beating.values())

    async def _beat_at(self, address: str, body: bytes) -> None:
        try:
            connection = await self._cluster.connection(address)
            answer = header_of(await connection.request(RequestCode.HEART_BEAT, {}, body), HeartbeatAnswer)
        except RocketletError as error:
            self._registered.discard(address)
            self.refusal = error if isinstance(error, BrokerRefused) else None
            if address not in self._failing:
                log.warning("heartbeat_failed", broker=address, reason=str(error))
            self._failing.add(address)
        else:
            self._registered.add(address)
            self._log_disagreements(answer.disagreements)
            if address in self._failing:
                self._failing.discard(address)
                log.info("broker_back", broker=address)

    def _log_disagreements(self, text: str) -> None:
        """Log each conflict between members once, although brokers report it in every response while it lasts."""
        for line in text.splitlines():
            if line not in self._disagreements:
                if len(self._disagreements) >= MAX_DISAGREEMENTS:
                    self._disagreements.clear()
                self._disagreements.add(line)
                group, _, fault = line.partition(": ")
                log.warning(
                    "members_disagree", group=group, fault=fault,
                    hint="give all members of the group the same subscriptions, strategy and model",
                )  # fmt: skip

    async def beat_forever(self) -> None:
        while True:
            limits = self._limits
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.heartbeat_retry_s if self._failing else limits.heartbeat_interval_s):
                    await self._changed.wait()
            self._changed.clear()
            await self.beat()
