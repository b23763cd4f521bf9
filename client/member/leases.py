"""The leases of a member: heartbeats, LOCK_BATCH_MQ and UNLOCK_BATCH_MQ, and the release of queues to their next owner."""

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
from ...protocol.headers import HeaderError, HeartbeatAnswer
from ...protocol.names import Queue
from ..config import APACHE_LEASE_S, LAST_COMMIT_CHECKS, LEASE_MARGIN_S, LEASE_S, MAX_DISAGREEMENTS, OFFSET_TIMEOUT_S
from ..errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..message import Lease, clock_s
from ..wire.cluster import ClusterView, by_broker, parts
from ..wire.connection import Connection, cancelled, header_of
from .offsets import GroupOffsets

log = get_logger("rocketlet.membership")


# ------------------------------------------------------------------------------
# HOW a queue changes hands: a queue is handed over, not grabbed.
#
#     giver: stop pulling -> running handlers end -> commit, answered -> unlock
#     taker: lock, refused until then -> ask for the committed offset -> pull
#
# The lock is LOCK_BATCH_MQ, kept by the one broker on which the queue lies. Rocketlet's broker tells a refused member
# as soon as the queue is free (also when the owner's socket closes), checks commits against the lock's epoch and ends
# a lease that is not renewed; on Apache's broker a refused member asks again every 500 ms.
#
# A lease is true on both sides. The member counts it from the sending of the last renewal that was answered
# (`lease`); when it is over nothing of the queue begins, and the queue is suspended until its broker has answered
# again: the same epoch means that nobody had it since. A renewal names its epoch, so that it never takes a queue
# anew. A queue that is given up is renewed until it is unlocked. A queue is taken again only when the handlers of its
# earlier ownership have ended.
#
# An offset is never guessed.


_UNREACHED = (ConnectionFailed, RequestTimeout)


class QueueUser(Protocol):
    """The reader of the queues: a consumer, or a Spark query."""

    def take_queue(self, queue: Queue, offset: int, lease: Lease) -> None:
        """The queue is ours, to be read from `offset`. When the lease is over, nothing of it may begin."""

    async def give_queue(self, queue: Queue) -> int | None:
        """The queue is to be given up: returns when nothing of it runs, with the offset to commit, or None."""

    def is_pull_committing(self, queue: Queue) -> bool:
        """Whether a pull that is not answered carries an offset. Apache's broker may store it behind a later commit."""

    def lose_queue(self, queue: Queue) -> None:
        """The queue is another's already: nothing of it may be committed."""

    def is_running(self, queue: Queue) -> bool:
        """Whether something of a queue that was given up or lost still runs."""

    async def ended(self, queue: Queue) -> None:
        """Returns when nothing of it runs any more."""

    def suspend_queue(self, queue: Queue) -> None:
        """The queue's broker is away, or the lease over: nothing new of it may begin."""

    def resume_queue(self, queue: Queue) -> None:
        """The broker is back and the queue still ours: goes on where it was."""


class Leases:
    """The queues that one member owns, takes and gives up.

    `wake` is set when there is something to share out again, `rebalanced` cleared when a queue
    is lost.
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
        self._unlocking: set[Queue] = set()  # the ones whose unlock is under way
        self._handing_over: dict[Queue, asyncio.Task[None]] = {}
        self._ending: dict[Queue, asyncio.Task[None]] = {}  # not ours, but handlers of them still run
        self._leaving_s = math.inf  # since when this member gives up everything, in the loop's time

    @property
    def releasing(self) -> Set[Queue]:
        """Given up, but still locked: their handlers run, or their commit is on its way."""
        return self._handing_over.keys()

    @property
    def are_releasing(self) -> bool:
        """True if a hand-over is under way. One whose broker is in no route any more is not waited for."""
        masters = self._cluster.masters() if self._handing_over else {}
        return any(queue.broker_name in masters for queue in self._handing_over)

    @property
    def are_doubtful(self) -> bool:
        """Whether a broker may have locked a queue that is not owned."""
        return bool(self._locks.doubtful)

    @property
    def are_suspended(self) -> bool:
        """Whether an owned queue waits for its broker."""
        return bool(self._suspended)

    # Taking

    async def acquire(self, wanted: Iterable[Queue]) -> None:
        """Locks and takes what can be had of these queues."""
        wanted = set(wanted)
        lockable = wanted - self._locks.unlocking
        unlockable = self._locks.doubtful - lockable - self._handing_over.keys()
        if unlockable:
            await self._give_back(queue for queue in unlockable if not self._locks.is_requested(queue))
        free = wanted - self._locks.unlocking - self.owned.keys() - self._handing_over.keys() - self._ending.keys()
        queues = by_broker(sorted(filter(self._is_known_at, free)))
        await _all(
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
            self._take(connection, queue, leases[queue], offset)
        unknown = leases.keys() - offsets.keys()
        if unknown:
            await _all(self._begin(connection, queue, leases[queue]) for queue in unknown)

    async def _begin(self, connection: Connection, queue: Queue, lease: Lease) -> None:
        """A queue was locked: finds where to read from, or unlocks it again."""
        try:
            offset = await self._offsets.begin(connection, queue, lease.epoch)
        except (RocketletError, HeaderError) as error:
            log.warning("start_offset_unknown", queue=str(queue), reason=str(error))
            await self._locks.unlock(queue)
            return
        self._take(connection, queue, lease, offset)

    def _take(self, connection: Connection, queue: Queue, lease: Lease, offset: int) -> None:
        if not connection.is_open or lease.is_over:
            return  # the lock may be gone: the next pass asks again
        self._locks.end_doubt(queue)
        self.owned[queue] = lease
        self._user.take_queue(queue, offset, lease)
        log.info("queue_assigned", queue=str(queue), offset=offset, epoch=lease.epoch)

    # Giving

    def release(self, queue: Queue) -> None:
        """Starts to hand a queue over; it is not ours for the next allocation, but stays locked until it is handed over."""
        lease = self._releasing[queue] = self.owned.pop(queue)
        self._suspended.discard(queue)
        handing_over = asyncio.create_task(self._hand_over(queue, lease), name=f"hand over {queue}")
        self._handing_over[queue] = handing_over

    async def _hand_over(self, queue: Queue, lease: Lease) -> None:
        began_s = clock_s()
        try:
            offset = await self._user.give_queue(queue)
            drained_s = committed_s = clock_s()
            is_over = offset is not None and await self._unlocked_with(queue, offset, lease)
            fault = None
            if not is_over and offset is not None:
                fault = await self._commit_at_last(queue, offset, lease)
                committed_s = clock_s()
            if self._releasing.pop(queue, None) is not None:
                if not is_over:
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
                self._locks.doubt([queue])  # it has not come to the unlock
            self._handing_over.pop(queue, None)
            self._end(queue, lease)
            self._wake.set()

    async def _unlocked_with(self, queue: Queue, offset: int, lease: Lease) -> bool:
        """Commits and unlocks in one request. A renewal behind it would be told that nobody has the queue."""
        self._unlocking.add(queue)
        try:
            return await self._locks.hand_over(queue, offset, lease)
        finally:
            self._unlocking.discard(queue)

    async def give_all(self) -> None:
        """Hands over every queue, and gives back locks in doubt; returns when that is done or has failed."""
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
        """Unlocks queues that perhaps are locked. Left alone, they would keep others out until their leases end."""
        await asyncio.gather(*map(self._locks.unlock, filter(self._is_known_at, queues)))

    def _is_known_at(self, queue: Queue) -> bool:
        """Whether the queue's broker has heard this member on its connection: else it unlocks nothing for it."""
        return self._heartbeats.is_registered(self._cluster.master(queue.broker_name))

    async def abandon(self) -> None:
        """The end, also where there was no time to hand over: nothing is ours any more."""
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
        """The queue is not ours any more. It is not taken again before what runs of it has ended."""
        lease.end()
        self._user.lose_queue(queue)
        if self._user.is_running(queue):
            self._ending[queue] = ending = asyncio.create_task(self._user.ended(queue), name=f"end {queue}")
            ending.add_done_callback(lambda _: self._ended(queue))

    def _ended(self, queue: Queue) -> None:
        del self._ending[queue]
        self._wake.set()

    async def _commit_at_last(self, queue: Queue, offset: int, lease: Lease) -> RocketletError | None:
        """The commit before the unlock: without it acknowledged messages would be delivered again. Why it is not stored;
        None if it is, or the queue was lost meanwhile."""
        may_be_undone = not lease.epoch and self._user.is_pull_committing(queue)
        if may_be_undone:
            await self._offsets.pulls_stored(queue, offset)
        fault = await self._commit_while_ours(queue, offset, lease)
        if may_be_undone and fault is None:
            await self._commit_until_it_stands(queue, offset, lease)
        return fault

    async def _commit_while_ours(self, queue: Queue, offset: int, lease: Lease) -> RocketletError | None:
        """A broker that is away keeps the lease, and knows it when it is back: it takes the commit when it has heard a
        renewal, or says that the queue is another's. So this waits for as long as the member lives. A broker that answers
        and refuses is asked for a while."""
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
        """Returns when a commit is worth another try: the broker has heard this member, and was asked for the lease."""
        await asyncio.sleep(self._limits.reconnect_s)
        address = self._cluster.master(queue.broker_name)
        if address is not None:
            await self._heartbeats.register([address])
        await self._renew_all([queue])

    async def _commit_until_it_stands(self, queue: Queue, offset: int, lease: Lease) -> None:
        """An offset that a pull carried may have been stored behind the last commit."""
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
        """The broker says that a queue is not ours, or another's under a later epoch."""
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
        """A broker's socket closed. Whether its queues are still ours is known when it has answered again."""
        for queue, lease in self.owned.items():
            # It may be the network or the broker. If the broker has seen the close, it has freed the queue (decision
            # 6). Its route may name another address by now.
            if lease.address == address:
                self._suspend(queue)

    def _suspend(self, queue: Queue) -> None:
        if queue not in self._suspended:
            self._suspended.add(queue)
            self._user.suspend_queue(queue)

    async def reclaim(self) -> None:
        """Asks brokers that are back, or have another address, for the queues that were ours."""
        reclaimed = self._suspended | self._releasing.keys()
        for queue, lease in self.owned.items():
            if self._has_moved(queue, lease):
                reclaimed.add(queue)
        if reclaimed:
            await self._renew_all(reclaimed)

    def _has_moved(self, queue: Queue, lease: Lease) -> bool:
        """Whether the queue's broker has another address than the lease was granted or renewed at: there it takes a commit
        only when it has heard a renewal."""
        return bool(lease.address) and lease.address != self._cluster.master(queue.broker_name)

    async def renew_forever(self) -> None:
        """Renews leases every 5 s, and overdue ones more often; suspends queues whose lease is over."""
        while True:
            await asyncio.sleep(self._limits.lease_tick_s)
            over = [queue for queue, lease in self.owned.items() if lease.is_over and queue not in self._suspended]
            for queue in over:
                log.warning("lease_over", queue=str(queue), hint="waiting for the broker")
                self._suspend(queue)
            # A rebalance would say it, too, but perhaps it waits for another broker just now.
            masters = {self._cluster.master(queue.broker_name) for queue in self._suspended}
            await self._heartbeats.register(filter(None, masters), self._limits.register_timeout_s)
            due_s = clock_s() - self._limits.lock_interval_s
            leases = {queue: self._held(queue) for queue in self.owned.keys() | self._releasing.keys()}
            # With one that is due, all of its broker are renewed, so that they go on together.
            due = {queue.broker_name for queue, lease in leases.items() if lease is not None and lease.asked_s <= due_s}
            await self._renew_all(queue for queue in leases if queue in self._suspended or queue.broker_name in due)

    async def _renew_all(self, queues: Iterable[Queue]) -> None:
        """Renews leases at the brokers that know this member: the others hear a heartbeat first."""
        await asyncio.gather(
            *(
                self._renew(broker_name, part)
                for broker_name, of_broker in by_broker(queues).items()
                if self._heartbeats.is_registered(self._cluster.master(broker_name))
                for part in parts(of_broker, self._limits.lock_queues)
            )
        )

    async def _renew(self, broker_name: str, queues: Iterable[Queue]) -> None:
        """Asks a broker whether these queues are still ours."""
        try:
            connection = await self._cluster.broker(broker_name)
            # A queue that was unlocked meanwhile, or is being unlocked, is not renewed: Apache's broker would lock it anew.
            held = {queue: lease for queue in queues if (lease := self._held(queue)) is not None}
            if not held:
                return
            epochs = {queue: lease.epoch for queue, lease in held.items() if lease.epoch}
            fresh = await self._locks.renew(connection, held, epochs)
        except (RocketletError, BodyError) as error:
            log.warning("locks_not_renewed", broker=broker_name, reason=str(error))
            return
        if not connection.is_open:
            return  # its answer is out of date
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
        # Also when nobody has noticed: work that was held back goes on now. Commits on pulls at another address were not
        # stored.
        goes_on = lease.is_over or lease.address != fresh.address or queue in self._suspended
        lease.renew(fresh)
        if queue in self.owned and goes_on:
            self._suspended.discard(queue)
            self._user.resume_queue(queue)
            self._wake.set()

    # Commits

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        """Stores the group's offsets; returns the queues for which that was done. A fenced queue is lost; a suspended one,
        and one whose broker has another address since the last renewal, are left for later.

        Raises nothing for a broker that cannot be reached: the next commit says the same or more.
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

    async def commit_place(self, queue: Queue, offset: int, *, sought: bool) -> None:
        """Stores an offset that no message led to: where the user or an administrator wants to go on. sought: the broker
        has named it. An offset that an Apache broker has begun to store counts before it. Raises nothing, as `commit`."""
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
        """Why it is not stored; None if it is."""
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
    """Whether a commit would be refused again: the queue is gone, or ends before it. A broker that has restarted refuses a
    commit with NO_PERMISSION, and takes it once the lease was renewed there."""
    return isinstance(fault, BrokerRefused) and fault.code == ResponseCode.SYSTEM_ERROR


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when each has ended, and raises the first one's exception: none goes on behind the caller's back."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


# ------------------------------------------------------------------------------
# LOCK_BATCH_MQ and UNLOCK_BATCH_MQ of one member: locks, renewals, unlocks, and in the same requests the commits that
# Rocketlet's brokers take with them.
#
# Whatever a broker may have locked for the member is given back. A broker grants a lock even if nobody waits for the
# response any more, because the caller was cancelled or gave up. Apache's broker keeps it for 60 s, Rocketlet's for 20 s if
# it restarts at that moment, and nobody reads the queue meanwhile. So a queue is in doubt from the lock request until the
# queue is owned, the lock is refused, or an unlock is answered.
#
# An unlock waits until all lock requests of its queue are answered, including those that were given up. Apache's broker
# serves the requests of one connection in several threads (AdminBrokerProcessor's executor), so the unlock could overtake
# the lock. For the same reason no queue is locked while an unlock of it is in flight: the lock would be undone, and its
# owner would not know. If a connection ends before the unlock is answered, another unlock must be answered first.


class ReleaseBatch(NamedTuple):
    """Queues that are handed over to one broker together."""

    offsets: dict[Queue, int]
    epochs: dict[Queue, int]


class MemberLocks:
    """The lock requests of one member of one group."""

    def __init__(self, cluster: ClusterView, group: str, client_id: str) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._client_id = client_id
        self._in_flight: dict[asyncio.Future[Frame], Set[Queue]] = {}  # locks, not renewals
        self._unlocks: dict[Queue, asyncio.Future[Frame]] = {}
        self._unanswered: set[Queue] = set()  # whose last unlock will have no response
        self._doubtful: dict[Queue, float] = {}  # until when, by our clock: then the lock has expired
        self._hand_overs: dict[str, tuple[ReleaseBatch, asyncio.Task[set[Queue]]]] = {}  # by broker name

    def _body(
        self, queues: Iterable[Queue], epochs: Mapping[Queue, int], offsets: Mapping[Queue, int] | None = None
    ) -> bytes:
        request = LockRequest(self._client_id, self._group, tuple(queues), True, epochs, offsets or {})
        return group_bodies.encode_lock_request(request)

    @property
    def doubtful(self) -> Set[Queue]:
        """Queues that may be locked for us, and are not owned."""
        if self._doubtful:
            now_s = clock_s()
            self._doubtful = {queue: over_s for queue, over_s in self._doubtful.items() if over_s > now_s}
        return self._doubtful.keys()

    @property
    def unlocking(self) -> Set[Queue]:
        """Queues whose unlock may still be carried out, and would free a new lock."""
        self._unanswered &= self.doubtful
        return self._unanswered.union(self._unlocks)

    # Locks

    async def lock(
        self, connection: Connection, queues: Iterable[Queue]
    ) -> tuple[dict[Queue, Lease], dict[Queue, int]]:
        """Request locks. Returns the leases of the queues that are locked for us now, and the group's offsets as far as the
        broker returns them. The queues are in doubt until they are `owned` or unlocked. Raises RocketletError and BodyError.
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
        """Return the leases of the queues that are still locked for us. A queue with an epoch is not locked anew. Raises
        RocketletError and BodyError."""
        return (await self._request(connection, tuple(queues), epochs))[1]

    async def _request(
        self, connection: Connection, queues: tuple[Queue, ...], epochs: Mapping[Queue, int]
    ) -> tuple[Frame, dict[Queue, Lease]]:
        body = self._body(queues, epochs)
        asked, sent_s = set(queues), clock_s()
        asking = connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, self._limits.hand_over_timeout_s)
        self._in_flight[asking] = asked - epochs.keys()
        asking.add_done_callback(self._answered)
        for _ in range(2):  # halves: if this process was frozen, the first one is over before its sockets are read
            await asyncio.wait({asking}, timeout=self._limits.lock_timeout_s / 2)
        if not asking.done():
            raise RequestTimeout(
                f"LOCK_BATCH_MQ was not answered in {self._limits.lock_timeout_s} s by {connection.address}"
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
            asking.exception()  # a waiting caller raises it

    # Doubt

    def doubt(self, queues: Iterable[Queue]) -> None:
        """Record queues that are not owned any more, and not unlocked."""
        over_s = clock_s() + APACHE_LEASE_S
        self._doubtful |= dict.fromkeys(queues, over_s)

    def end_doubt(self, queue: Queue) -> None:
        """The queue is owned, or not locked for us: there is nothing to give back."""
        self._doubtful.pop(queue, None)

    def _refused(self, queues: Iterable[Queue]) -> None:
        """These queues are not locked for us, unless an earlier request is carried out after this one."""
        for queue in queues:
            if not self.is_requested(queue):
                self._doubtful.pop(queue, None)

    def is_requested(self, queue: Queue) -> bool:
        """Return True if a lock request of the queue is not answered yet."""
        return any(queue in queues for queues in self._in_flight.values()) if self._in_flight else False

    # Unlocks

    async def unlock(self, queue: Queue, epoch: int = 0) -> None:
        """Unlock a queue. Raises nothing: without a response the queue is in doubt."""
        in_flight = [asking for asking, queues in self._in_flight.items() if queue in queues]
        if in_flight:
            await asyncio.wait(in_flight)
        self.doubt([queue])
        try:
            connection = await self._cluster.broker(queue.broker_name)
        except RocketletError as error:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="the unlock is retried")
            return
        unlock = self._unlocks.get(queue)
        if unlock is None:  # one that is slow is not repeated before its connection gives it up
            body = self._body((queue,), {queue: epoch} if epoch else {})
            unlock = self._unlocks[queue] = connection.request(
                RequestCode.UNLOCK_BATCH_MQ, {}, body, self._limits.hand_over_timeout_s
            )
            unlock.add_done_callback(partial(self._unlocked, queue))
        await asyncio.wait({unlock}, timeout=self._limits.lock_timeout_s)

    def _unlocked(self, queue: Queue, unlock: asyncio.Future[Frame]) -> None:
        """An unlock was answered, or will never be."""
        del self._unlocks[queue]
        error = unlock.exception()
        if error is None or isinstance(error, BrokerRefused):
            if error is not None:
                log.info("unlock_refused", queue=str(queue), reason=str(error), hint="it was not ours any more")
            self.end_doubt(queue)
            self._unanswered.discard(queue)
        else:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="the unlock is retried")
            self.doubt([queue])
            self._unanswered.add(queue)

    def abandon(self, held: Mapping[Queue, Lease]) -> None:
        """Unlock these queues and those in doubt without waiting for a response, because there is no time to."""
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
        """Commit and unlock a queue, in one request with all others of its broker that are ready in the same event-loop
        iteration. Returns True if the broker has done both."""
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
        await asyncio.sleep(0)  # the others that are ready
        known = self._hand_overs.get(broker_name)
        if known is not None and known[0] is together:  # not one that was begun when this one was full
            del self._hand_overs[broker_name]
        connection = self._cluster.connected(broker_name)
        if connection is None:  # waiting for a connection, the commit would arrive after a later one
            return set()
        try:
            body = self._body(together.offsets, together.epochs, together.offsets)
            answer = await connection.request(RequestCode.UNLOCK_BATCH_MQ, {}, body, OFFSET_TIMEOUT_S)
            return set(group_bodies.decode_locked(answer.body))
        except (RocketletError, BodyError) as error:
            log.info("hand_over_delayed", broker=broker_name, reason=str(error), hint="each queue is tried alone")
            return set()

    async def commit(
        self, broker_name: str, offsets: Mapping[Queue, int], leases: Mapping[Queue, Lease]
    ) -> tuple[set[Queue], set[Queue]]:
        """Commit queues of one broker, up to the limit in one request, which renews their leases at the broker, too. Returns
        the queues that are committed, and those to commit one by one: a broker that does not respond is not asked again,
        because by then a pull may carry a later offset."""
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
            log.info("commits_refused", broker=broker_name, reason=str(error), hint="each queue is tried alone")
            return set(), set(offsets)
        except RocketletError as error:
            log.warning("commit_failed", broker=broker_name, reason=str(error), hint="the next commit includes it")
            return set(), set()
        done = {queue for queue, offset in offsets.items() if stored.get(queue) == offset}
        return done, offsets.keys() - done


# ------------------------------------------------------------------------------
# Tells every broker of the routes that this member is here, and knows which of them have heard it.
#
# Apache's brokers forget a member after 120 s without a heartbeat; a Rocketlet broker gives no lock to a connection
# that has sent none.


class Heartbeats:
    """`describe` makes the heartbeat as it is now; `addresses` names the brokers that are to get it."""

    def __init__(
        self, cluster: ClusterView, describe: Callable[[], Heartbeat], addresses: Callable[[], Iterable[str]]
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._describe = describe
        self._addresses = addresses
        self._registered: set[str] = set()
        self._failing: set[str] = set()
        self._beating: dict[str, asyncio.Task[None]] = {}  # at single brokers
        self._disagreements: set[str] = set()  # those that are logged
        self.refusal: BrokerRefused | None = None
        self._said = b""
        self._news = asyncio.Event()

    @property
    def are_failing(self) -> bool:
        """Whether a broker has not answered the last heartbeat."""
        return bool(self._failing)

    def is_registered(self, address: str | None) -> bool:
        """Whether the broker at this address has heard this member on the connection that is open."""
        return address in self._registered

    def forget(self, address: str | None = None) -> None:
        """This broker, or all of them, must hear this member again."""
        if address is None:
            self._registered.clear()
        else:
            self._registered.discard(address)

    def tell_news(self) -> None:
        """`beat_forever` says it now, if it would say something else than the last time."""
        if bodies.encode_heartbeat(self._describe()) != self._said:
            self._news.set()

    async def beat(self) -> None:
        """Registers at every broker, and returns when each has answered or failed to."""
        self._said = body = bodies.encode_heartbeat(self._describe())
        addresses = set(self._addresses())
        self._failing &= addresses  # a broker that moved is not awaited where it was
        await asyncio.gather(*(self._beat_at(address, body) for address in addresses))

    async def register(self, addresses: Iterable[str] | None = None, patience_s: float | None = None) -> None:
        """Says it to those of all brokers, or of these, that have not heard it. Returns when each of them has answered or
        failed to, or after `patience_s`: a broker that stands still keeps nobody from the others. Its heartbeat goes on."""
        named = self._addresses() if addresses is None else addresses
        news = {address for address in named if address not in self._registered}
        for address in news - self._beating.keys():
            beating = asyncio.create_task(self._beat_at(address, bodies.encode_heartbeat(self._describe())))
            self._beating[address] = beating
            beating.add_done_callback(partial(self._has_beaten, address))
        if news:
            await asyncio.wait([self._beating[address] for address in news], timeout=patience_s)

    def _has_beaten(self, address: str, beating: asyncio.Task[None]) -> None:
        del self._beating[address]

    async def stop(self) -> None:
        """Ends what `register` has not waited for."""
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
        """Log each disagreement of the members once: brokers report it in every answer for as long as it lasts."""
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
                    await self._news.wait()
            self._news.clear()
            await self.beat()
