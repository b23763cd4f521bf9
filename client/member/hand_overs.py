"""Collects one member's news about several queues in one request per broker: commits, and commits with the unlock of queues
that are handed over.

Only Rocketlet's brokers take that. Elsewhere, and where it did not work, each queue has requests of its own (`leases`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ...protocol import group_bodies
from ...protocol.codes import RequestCode
from ...protocol.group_bodies import LockRequest
from ...protocol.queue import Queue
from ...protocol.schema import BodyError
from ..config import OFFSET_TIMEOUT_S
from ..errors import BrokerRefused, RocketletError
from ..lease import Lease
from ..log import get_logger
from ..wire.cluster import Cluster, parts

log = get_logger("rocketlet.membership")


class _Batch:
    """The queues that are handed over to one broker together."""

    def __init__(self) -> None:
        self.offsets: dict[Queue, int] = {}
        self.epochs: dict[Queue, int] = {}


class HandOvers:
    """Hands one member's queues over."""

    def __init__(self, cluster: Cluster, group: str, client_id: str) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._client_id = client_id
        self._batches: dict[str, tuple[_Batch, asyncio.Task[set[Queue]]]] = {}

    async def hand_over(self, queue: Queue, offset: int, lease: Lease) -> bool:
        """Commits and unlocks a queue, with all others of its broker that are ready in the same turn of the loop. True if the
        broker has done both."""
        connection = self._cluster.connected(queue.broker_name)
        if connection is None or not connection.speaks_msgpack or not lease.epoch or lease.is_over:
            return False
        known = self._batches.get(queue.broker_name)
        if known is None or len(known[0].offsets) >= self._limits.lock_queues:
            batch = _Batch()
            self._batches[queue.broker_name] = batch, asyncio.create_task(self._send(queue.broker_name, batch))
        batch, sending = self._batches[queue.broker_name]
        batch.offsets[queue], batch.epochs[queue] = offset, lease.epoch
        return queue in await asyncio.shield(sending)

    async def commit(
        self, broker_name: str, offsets: Mapping[Queue, int], leases: Mapping[Queue, Lease]
    ) -> tuple[set[Queue], set[Queue]]:
        """Commits queues of one broker, as many in one request as it takes; that renews their leases there, too. The queues
        that are committed, and those that are to be tried alone: a broker that does not answer is not asked again, because
        by then a pull may carry a later offset."""
        answers = [
            await self._commit(broker_name, part, offsets, leases)
            for part in parts(list(offsets), self._limits.lock_queues)
        ]
        return set().union(*(done for done, _ in answers)), set().union(*(alone for _, alone in answers))

    async def _commit(
        self, broker_name: str, queues: list[Queue], said: Mapping[Queue, int], leases: Mapping[Queue, Lease]
    ) -> tuple[set[Queue], set[Queue]]:
        offsets = {queue: said[queue] for queue in queues}
        connection = self._cluster.connected(broker_name)
        epochs = {queue: leases[queue].epoch for queue in offsets}
        if len(offsets) < 2 or connection is None or not connection.speaks_msgpack or not all(epochs.values()):
            return set(), set(offsets)
        request = LockRequest(self._client_id, self._group, tuple(offsets), True, epochs, offsets)
        try:
            body = group_bodies.encode_lock_request(request)
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

    async def _send(self, broker_name: str, batch: _Batch) -> set[Queue]:
        """The queues that the broker has committed and unlocked."""
        await asyncio.sleep(0)  # the others that are ready
        known = self._batches.get(broker_name)
        if known is not None and known[0] is batch:  # not one that was begun when this one was full
            del self._batches[broker_name]
        connection = self._cluster.connected(broker_name)
        if connection is None:  # waiting for one, the commit would arrive after a later one
            return set()
        request = LockRequest(self._client_id, self._group, tuple(batch.offsets), True, batch.epochs, batch.offsets)
        try:
            body = group_bodies.encode_lock_request(request)
            answer = await connection.request(RequestCode.UNLOCK_BATCH_MQ, {}, body, OFFSET_TIMEOUT_S)
            return set(group_bodies.decode_locked(answer.body))
        except (RocketletError, BodyError) as error:
            log.info("hand_over_delayed", broker=broker_name, reason=str(error), hint="each queue is tried alone")
            return set()
