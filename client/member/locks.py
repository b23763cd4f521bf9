"""LOCK_BATCH_MQ and UNLOCK_BATCH_MQ, as one member asks for them: whatever a broker may have locked for it is given back.

A broker grants a lock also when nobody waits for the answer any more: the caller was cancelled, or gave up. Apache's keeps
it for 60 s, Rocketlet's for 20 s if it restarts just then, and nobody reads the queue meanwhile. So a queue is in doubt
from the moment when its lock is asked for, until it is taken, refused, or an unlock is answered.

An unlock waits until the lock requests of its queue are answered, those that were given up, too. Apache's broker carries
out what one connection asks in several threads (AdminBrokerProcessor's executor): the unlock could overtake the lock.
For the same reason nothing is locked while an unlock of it is under way: the lock would be undone, and its owner would not
know. If a connection ends before the unlock is answered, another unlock must be answered first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from functools import partial

from ...protocol import group_bodies
from ...protocol.codes import RequestCode
from ...protocol.frame import Frame
from ...protocol.group_bodies import LockRequest
from ...protocol.queue import Queue
from ..config import APACHE_LEASE_S, LEASE_MARGIN_S, LEASE_S
from ..errors import BrokerRefused, RequestTimeout, RocketletError
from ..lease import Lease, clock_s
from ..log import get_logger
from ..wire.cluster import Cluster, by_broker, parts
from ..wire.connection import Connection

log = get_logger("rocketlet.membership")


class MemberLocks:
    """The lock requests of one member of one group."""

    def __init__(self, cluster: Cluster, group: str, client_id: str) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._client_id = client_id
        self._under_way: dict[asyncio.Future[Frame], Set[Queue]] = {}
        self._unlocks: dict[Queue, asyncio.Future[Frame]] = {}
        self._unanswered: set[Queue] = set()  # whose last unlock had no answer, and will have none
        self._doubtful: dict[Queue, float] = {}  # until when, by our clock: then the lock has ended by itself

    @property
    def doubtful(self) -> Set[Queue]:
        """Perhaps locked for us, and not owned."""
        now_s = clock_s()
        self._doubtful = {queue: over_s for queue, over_s in self._doubtful.items() if over_s > now_s}
        return self._doubtful.keys()

    @property
    def unlocking(self) -> Set[Queue]:
        """An unlock of these may still be carried out, and would free their present locks."""
        self._unanswered &= self.doubtful
        return self._unanswered.union(self._unlocks)

    async def lock(
        self, connection: Connection, queues: Iterable[Queue]
    ) -> tuple[dict[Queue, Lease], dict[Queue, int]]:
        """Asks for locks. Returns the queues that are locked for us now, and the group's offsets, as far as the broker
        tells them. The queues are in doubt until they are `taken` or unlocked. Raises RocketletError and BodyError."""
        asked = tuple(queues)
        self.doubt(asked)
        try:
            answer, leases = await self._ask(connection, asked, {})
        except BrokerRefused:
            self._refused(asked)
            raise
        self._refused(set(asked) - leases.keys())
        offsets = group_bodies.decode_committed(answer.body)
        return leases, {queue: offset for queue, offset in offsets.items() if queue in leases}

    async def renew(
        self, connection: Connection, queues: Iterable[Queue], epochs: Mapping[Queue, int]
    ) -> dict[Queue, Lease]:
        """The queues that are still locked for us. One with an epoch is not taken anew. Raises RocketletError and
        BodyError."""
        return (await self._ask(connection, tuple(queues), epochs))[1]

    async def _ask(
        self, connection: Connection, queues: tuple[Queue, ...], epochs: Mapping[Queue, int]
    ) -> tuple[Frame, dict[Queue, Lease]]:
        request = LockRequest(self._client_id, self._group, queues, handover=True, epochs=epochs)
        body = group_bodies.encode_lock_request(request)
        asked, sent_s = set(queues), clock_s()
        asking = connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, self._limits.hand_over_patience_s)
        self._under_way[asking] = asked - epochs.keys()
        asking.add_done_callback(self._answered)
        for _ in range(2):  # halves: if this process stood still, the first one is over before its sockets are read
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
        del self._under_way[asking]
        if not asking.cancelled():
            asking.exception()  # a waiting caller raises it

    # Doubt

    def doubt(self, queues: Iterable[Queue]) -> None:
        """Notes queues that are not owned any more, and not unlocked."""
        over_s = clock_s() + APACHE_LEASE_S
        self._doubtful |= dict.fromkeys(queues, over_s)

    def taken(self, queues: Iterable[Queue]) -> None:
        """These queues are owned, or not locked for us: nothing is to be given back."""
        for queue in queues:
            self._doubtful.pop(queue, None)

    def _refused(self, queues: Iterable[Queue]) -> None:
        """These queues are not locked for us, unless an earlier request is carried out after this one."""
        self.taken(queue for queue in queues if not self.is_asked_for(queue))

    def is_asked_for(self, queue: Queue) -> bool:
        """Whether a lock request of the queue is not answered yet."""
        return any(queue in queues for queues in self._under_way.values())

    async def unlock(self, queue: Queue, epoch: int = 0) -> None:
        """Raises nothing: without an answer the queue is in doubt."""
        await self._asked(queue)
        self.doubt([queue])
        try:
            connection = await self._cluster.broker(queue.broker_name)
        except RocketletError as error:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="it is tried again")
            return
        unlock = self._unlocks.get(queue)
        if unlock is None:  # one that is slow is not said again before its connection gives it up
            body = self._unlock_body({queue: epoch})
            unlock = self._unlocks[queue] = connection.request(
                RequestCode.UNLOCK_BATCH_MQ, {}, body, self._limits.hand_over_patience_s
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
            self.taken([queue])
            self._unanswered.discard(queue)
        else:
            log.info("unlock_failed", queue=str(queue), reason=str(error), hint="it is tried again")
            self.doubt([queue])
            self._unanswered.add(queue)

    async def _asked(self, queue: Queue) -> None:
        """Returns when no lock request of the queue is under way."""
        under_way = [asking for asking, queues in self._under_way.items() if queue in queues]
        if under_way:
            await asyncio.wait(under_way)

    def abandon(self, held: Mapping[Queue, Lease]) -> None:
        """Unlocks these and those in doubt, without waiting for an answer: nobody has the time to."""
        epochs = dict.fromkeys(self._doubtful, 0) | {queue: lease.epoch for queue, lease in held.items()}
        for broker_name, queues in by_broker(epochs).items():
            connection = self._cluster.connected(broker_name)
            if connection is None or not connection.is_open:
                continue
            for part in parts(queues, self._limits.lock_queues):
                body = self._unlock_body({queue: epochs[queue] for queue in part})
                connection.oneway(RequestCode.UNLOCK_BATCH_MQ, {}, body)
        self._doubtful.clear()

    def _unlock_body(self, epochs: Mapping[Queue, int]) -> bytes:
        known = {queue: epoch for queue, epoch in epochs.items() if epoch}
        request = LockRequest(self._client_id, self._group, tuple(epochs), handover=True, epochs=known)
        return group_bodies.encode_lock_request(request)
