"""HOW a queue changes hands: a queue is handed over, not grabbed.

    giver: stop pulling -> running handlers end -> commit, answered -> unlock
    taker: lock, refused until then -> ask for the committed offset -> pull

The lock is LOCK_BATCH_MQ, kept by the one broker on which the queue lies. Rocketlet's broker tells a refused member as
soon as the queue is free (also when the owner's socket closes), checks commits against the lock's epoch and ends a
lease that is not renewed; on Apache's broker a refused member asks again every 500 ms.

An offset is never guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from typing import Protocol

from ..protocol import group_bodies
from ..protocol.bodies import Queue
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.group_bodies import LockRequest
from .cluster import Cluster, by_broker
from .config import HAND_OVER_PATIENCE_S, LOCK_INTERVAL_S, LOCK_TIMEOUT_S, RECONNECT_S
from .connection import Connection
from .errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from .heartbeats import Heartbeats
from .log import get_logger
from .offsets import GroupOffsets

log = get_logger("rocketlet.membership")

_UNREACHED = (ConnectionFailed, RequestTimeout)


class QueueUser(Protocol):
    """What reads the queues: a consumer, or a Spark query."""

    def take_queue(self, queue: Queue, offset: int, epoch: int) -> None:
        """The queue is ours, to be read from `offset`."""

    async def give_queue(self, queue: Queue) -> int | None:
        """The queue is to be given up: returns when nothing of it runs, with the offset to commit, or None."""

    def lose_queue(self, queue: Queue) -> None:
        """The queue is another's already: nothing of it may be committed."""

    def suspend_queue(self, queue: Queue) -> None:
        """The queue's broker is away: nothing new of it may begin."""

    def resume_queue(self, queue: Queue) -> None:
        """The broker is back and the queue still ours: goes on where it was."""


class Leases:
    """The queues that one member owns, takes and gives up.

    owned: the epoch of each lease. `wake` is set when there is something to share out again, `settled` cleared when a queue
    is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        client_id: str,
        user: QueueUser,
        offsets: GroupOffsets,
        heartbeats: Heartbeats,
        *,
        wake: asyncio.Event,
        settled: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._client_id = client_id
        self._user = user
        self._offsets = offsets
        self._heartbeats = heartbeats
        self._wake = wake
        self._settled = settled
        self.owned: dict[Queue, int] = {}
        self._suspended: set[Queue] = set()
        self._acquiring: set[Queue] = set()  # perhaps locked, not yet owned
        self._releasing: dict[Queue, asyncio.Task[None]] = {}

    @property
    def releasing(self) -> Set[Queue]:
        """Given up, but still locked: their handlers run, or their commit is on its way."""
        return self._releasing.keys()

    @property
    def are_suspended(self) -> bool:
        """Whether an owned queue waits for its broker."""
        return bool(self._suspended)

    # Taking

    async def acquire(self, wanted: Iterable[Queue]) -> None:
        """Locks and takes what can be had of these queues."""
        self._acquiring = set(wanted) - self.owned.keys() - self._releasing.keys()
        queues = by_broker(sorted(self._acquiring))
        await asyncio.gather(*(self._acquire_from(name, of_broker) for name, of_broker in queues.items()))
        self._acquiring = set()

    async def _acquire_from(self, broker_name: str, queues: list[Queue]) -> None:
        try:
            connection = await self._cluster.broker(broker_name)
            epochs = await self._lock_at(connection, queues)
        except RocketletError as error:
            log.info("lock failed; trying again", broker=broker_name, reason=str(error))
            return
        await asyncio.gather(*(self._begin(connection, queue, epoch) for queue, epoch in epochs.items()))

    async def _lock(self, broker_name: str, queues: list[Queue]) -> dict[Queue, int]:
        return await self._lock_at(await self._cluster.broker(broker_name), queues)

    async def _lock_at(self, connection: Connection, queues: list[Queue]) -> dict[Queue, int]:
        """Which of the queues are locked for us now, with their epochs."""
        body = group_bodies.encode_lock_request(LockRequest(self._client_id, self._group, tuple(queues), handover=True))
        answer = await connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, LOCK_TIMEOUT_S)
        return {queue: epoch for queue, epoch in group_bodies.decode_locked(answer.body).items() if queue in queues}

    async def _begin(self, connection: Connection, queue: Queue, epoch: int) -> None:
        """A queue was locked: finds where to read from, or unlocks it again."""
        try:
            offset = await self._offsets.begin(connection, queue)
        except RocketletError as error:
            log.warning("no start offset; trying again", queue=str(queue), reason=str(error))
            await self._unlock(queue)
            return
        if not connection.is_open:
            return  # and the lock went with it
        self.owned[queue] = epoch
        self._user.take_queue(queue, offset, epoch)
        log.info("queue assigned", queue=str(queue), offset=offset, epoch=epoch)

    # Giving

    def release(self, queue: Queue) -> None:
        """Starts to hand a queue over; it is not ours for the next allocation, but stays locked until it is handed over."""
        epoch = self.owned.pop(queue)
        self._suspended.discard(queue)
        self._releasing[queue] = asyncio.create_task(self._hand_over(queue, epoch), name=f"hand over {queue}")

    async def _hand_over(self, queue: Queue, epoch: int) -> None:
        try:
            offset = await self._user.give_queue(queue)
            if offset is not None:
                await self._commit_at_last(queue, offset, epoch)
            await self._unlock(queue, epoch)
            log.info("queue handed over", queue=str(queue), offset=offset)
        except RocketletError as error:
            log.warning("hand-over failed; the broker will end the lease", queue=str(queue), reason=str(error))
        finally:
            self._user.lose_queue(queue)
            self._releasing.pop(queue, None)
            self._wake.set()

    async def give_all(self) -> None:
        """Hands over every queue; returns when that is done or has failed."""
        for queue in list(self.owned):
            self.release(queue)
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        await asyncio.gather(*map(self._unlock, self._acquiring))

    async def _commit_at_last(self, queue: Queue, offset: int, epoch: int) -> None:
        """The commit before the unlock: without it what was acknowledged would be delivered again. A broker that has
        restarted takes it when the lock has been reclaimed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + HAND_OVER_PATIENCE_S
        while not await self.commit({queue: offset}, {queue: epoch}) and loop.time() < end_s:
            await asyncio.sleep(RECONNECT_S)
            try:
                await self._heartbeats.beat()
                if (await self._lock(queue.broker_name, [queue])).get(queue) != epoch:
                    return  # another's by now
            except RocketletError as error:
                log.info("lock not reclaimed; trying again", queue=str(queue), reason=str(error))

    async def _unlock(self, queue: Queue, epoch: int | None = None) -> None:
        epochs = {queue: epoch} if epoch else {}
        request = LockRequest(self._client_id, self._group, (queue,), handover=True, epochs=epochs)
        try:
            connection = await self._cluster.broker(queue.broker_name)
            body = group_bodies.encode_lock_request(request)
            await connection.request(RequestCode.UNLOCK_BATCH_MQ, {}, body, LOCK_TIMEOUT_S)
        except RocketletError as error:
            log.info("not unlocked; the broker will end the lease", queue=str(queue), reason=str(error))

    def _lose(self, queue: Queue, reason: str) -> None:
        self._suspended.discard(queue)
        if self.owned.pop(queue, None) is not None:
            log.warning("queue lost", queue=str(queue), reason=reason)
            self._settled.clear()
            self._user.lose_queue(queue)

    # Leases and commits

    def suspend(self, address: str) -> None:
        """A broker's socket closed. Whether its queues are still ours is known when it has answered again."""
        for queue in self.owned:
            if self._cluster.master(queue.broker_name) == address and queue not in self._suspended:
                self._suspended.add(queue)
                self._user.suspend_queue(queue)

    async def reclaim(self) -> None:
        """Asks brokers that are back for the locks that were ours: the same epoch means that nobody had them since."""
        for broker_name, queues in by_broker(self._suspended).items():
            if not self._heartbeats.is_registered(self._cluster.master(broker_name)):
                continue
            try:
                epochs = await self._lock(broker_name, queues)
            except RocketletError as error:
                log.info("locks not reclaimed; trying again", broker=broker_name, reason=str(error))
                continue
            for queue in queues:
                self._suspended.discard(queue)
                if queue in self.owned and epochs.get(queue) == self.owned[queue]:
                    self._user.resume_queue(queue)
                elif queue in self.owned:
                    self._lose(queue, "its broker gave it to another member")

    async def renew_forever(self) -> None:
        while True:
            await asyncio.sleep(LOCK_INTERVAL_S)
            held = (self.owned.keys() | self._releasing.keys()) - self._suspended
            await asyncio.gather(*(self._renew(name, queues) for name, queues in by_broker(held).items()))

    async def _renew(self, broker_name: str, queues: list[Queue]) -> None:
        before = {queue: self.owned.get(queue) for queue in queues}
        try:
            epochs = await self._lock(broker_name, queues)
        except RocketletError as error:
            log.warning("locks not renewed; trying again", broker=broker_name, reason=str(error))
            return
        for queue, epoch in before.items():
            if epoch is not None and self.owned.get(queue) == epoch and epochs.get(queue) != epoch:
                self._lose(queue, "its lease ended")
                self._wake.set()

    async def commit(self, offsets: Mapping[Queue, int], epochs: Mapping[Queue, int] | None = None) -> set[Queue]:
        """Stores the group's offsets; returns the queues for which that was done. A fenced queue is lost, a suspended one
        is left for later.

        Raises nothing for a broker that cannot be reached: the next commit says the same or more.
        """
        epochs = self.owned if epochs is None else epochs
        ready = (offsets.keys() & epochs.keys()) - self._suspended
        done = await asyncio.gather(*(self._commit_one(queue, offsets[queue], epochs[queue]) for queue in ready))
        return {queue for queue in done if queue is not None}

    async def _commit_one(self, queue: Queue, offset: int, epoch: int) -> Queue | None:
        try:
            await self._offsets.store(queue, offset, epoch)
        except BrokerRefused as error:
            log.warning("commit refused", queue=str(queue), offset=offset, reason=str(error))
            if error.code == ResponseCode.NO_PERMISSION and self.owned.get(queue) == epoch:
                self._lose(queue, "another member owns it")
                self._wake.set()
            return None
        except _UNREACHED as error:
            log.warning("commit failed; the next one says it again", queue=str(queue), reason=str(error))
            return None
        return queue
