"""WHEN queues change hands: heartbeats, rebalance, locks, hand-over.

Every member registers by heartbeat at every broker, asks for the list of members, and computes its own share
(`shares`, by the strategies of `protocol/allocation`). Because members see changes at different moments, shares overlap
for a while. Apache's clients then both read a queue; ours do not, because a queue is handed over, not grabbed:

    giver: stop pulling -> running handlers end -> commit, answered -> unlock
    taker: lock, refused until then -> ask for the committed offset -> pull

The lock is LOCK_BATCH_MQ, kept by the one broker on which the queue lies. Rocketlet's broker tells a refused member as
soon as the queue is free (also when the owner's socket closes), checks commits against the lock's epoch and ends a
lease that is not renewed; on Apache's broker a refused member asks again every 500 ms.

A failed or empty lookup of routes or members changes nothing. An offset is never guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from ..protocol import bodies, group_bodies, names
from ..protocol.allocation import AVG, Strategy, subscribe_queues
from ..protocol.bodies import ConsumerData, Heartbeat, Queue
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.frame import Frame
from ..protocol.group_bodies import LockRequest
from ..protocol.headers import UnregisterClient, write
from ..protocol.subscription import Subscription
from .cluster import Cluster, by_broker
from .config import (
    HAND_OVER_PATIENCE_S,
    HEARTBEAT_INTERVAL_S,
    LOCK_INTERVAL_S,
    LOCK_RETRY_S,
    LOCK_TIMEOUT_S,
    MISSING_ROUTE_INTERVAL_S,
    REBALANCE_INTERVAL_S,
    RECONNECT_S,
    At,
    Start,
)
from .connection import Connection
from .errors import BrokerRefused, ConnectionFailed, RequestTimeout, RocketletError
from .log import get_logger
from .message import new_client_id
from .offsets import GroupOffsets
from .shares import Shares

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


class Membership:
    """One client in one consumer group. `join` and `leave` frame its life; between them `user` is told of queues.

    start, starts: where queues are read from that the group has no offset of, the latter for single queues.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        subscriptions: Mapping[str, Subscription],
        user: QueueUser,
        *,
        start: Start = "last",
        starts: Mapping[Queue, Start | At] | None = None,
        strategy: Strategy = AVG,
        consume_type: str = "CONSUME_PASSIVELY",
    ) -> None:
        self.client_id = new_client_id()
        self.group = group
        self.cluster = cluster
        self.owned: dict[Queue, int] = {}
        self._subscriptions = dict(subscriptions)
        self._user = user
        self._start = start
        self._starts = starts or {}
        self._strategy = strategy
        self._offsets = GroupOffsets(cluster, group)
        self._shares = Shares(cluster, group, self.client_id, strategy)
        self._consume_type = consume_type
        self._suspended: set[Queue] = set()
        self._acquiring: set[Queue] = set()  # perhaps locked, not yet owned
        self._releasing: dict[Queue, asyncio.Task[None]] = {}
        self._first_seen: dict[str, frozenset[Queue]] = {}
        self._registered: set[str] = set()
        self._failing: set[str] = set()
        self._refusal: BrokerRefused | None = None
        self._grown: set[str] = set()
        self._reported: set[Queue] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._has_left = False
        self._wants_retry_s = REBALANCE_INTERVAL_S
        cluster.requests[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = self._notified
        cluster.on_lost = self._on_lost
        cluster.keeps_brokers = True
        cluster.on_change = lambda topic: self._wake.set()

    # Life

    async def join(self) -> None:
        """Registers at the brokers that can be reached, and starts. Raises ConnectionFailed if no name server can be, and
        BrokerRefused if a broker does not take this member."""
        for topic in self._subscriptions:
            await self.cluster.find_route(topic)
        await self._heartbeat()
        if self._refusal is not None:
            raise self._refusal
        self._tasks = [
            asyncio.create_task(self._rebalance_forever(), name="rebalance"),
            asyncio.create_task(self._heartbeat_forever(), name="heartbeat"),
            asyncio.create_task(self._renew_forever(), name="lock renewal"),
        ]

    async def leave(self) -> None:
        """Gives up every queue as in a rebalance, then unregisters. Says nothing of errors: brokers see the close."""
        self._has_left = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.owned:
            await self._heartbeat()  # says that we leave: the others prepare while our handlers end
        for queue in list(self.owned):
            self._release(queue)
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        await asyncio.gather(*map(self._unlock, self._acquiring))
        ext = write(UnregisterClient(self.client_id, consumer_group=self.group))
        await asyncio.gather(
            *(self._unregister(address, ext) for address in self.cluster.masters().values()),
        )

    async def _unregister(self, address: str, ext: Mapping[str, str | int | bool]) -> None:
        if not self.cluster.is_connected(address):
            return
        try:
            connection = await self.cluster.connection(address)
            await connection.request(RequestCode.UNREGISTER_CLIENT, ext)
        except RocketletError as error:
            log.info("not unregistered", broker=address, reason=str(error))

    async def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Adds topics that have come into being while this member was here: they are read from their start."""
        for topic in subscriptions:
            self._first_seen[topic] = frozenset()
            await self.cluster.find_route(topic)
        self._subscriptions = {**self._subscriptions, **subscriptions}
        await self._heartbeat()
        self._wake.set()

    async def settled(self) -> None:
        """Returns when this member holds exactly the queues that the last allocation gave it."""
        await self._settled.wait()

    # Heartbeats

    async def _heartbeat(self) -> None:
        """Registers at every broker of the routes, and returns when each has answered or failed to."""
        body = bodies.encode_heartbeat(
            Heartbeat(
                self.client_id,
                (
                    ConsumerData(
                        self.group,
                        self._consume_type,
                        "CLUSTERING",
                        _consume_from(self._start),
                        tuple(self._subscriptions.values()),
                        strategy=self._strategy.name,
                        leaving=self._has_left,
                        assigned=tuple(sorted(self.owned)),
                        queue_counts=self._queue_counts(),
                    ),
                ),
                (names.INNER_PRODUCER_GROUP,),
            )
        )
        self._reported = set(self.owned)
        addresses = set(self.cluster.masters().values())
        for queue in (*self.owned, *self._releasing):  # their brokers, also when the route lacks them
            addresses.add(self.cluster.master(queue.broker_name) or "")
        await asyncio.gather(*(self._heartbeat_to(address, body) for address in addresses - {""}))

    def _queue_counts(self) -> dict[str, dict[str, int]]:
        """How many queues this member sees, by broker and topic: brokers name those who see other numbers than they have."""
        counts: dict[str, dict[str, int]] = {}
        for topic in self._subscriptions:
            route = self.cluster.route(topic)
            for data in route.queues if route else ():
                counts.setdefault(data.broker_name, {})[topic] = data.read_queues
        return counts

    async def _heartbeat_to(self, address: str, body: bytes) -> None:
        try:
            connection = await self.cluster.connection(address)
            await connection.request(RequestCode.HEART_BEAT, {}, body)
        except RocketletError as error:
            self._registered.discard(address)
            self._refusal = error if isinstance(error, BrokerRefused) else None
            if address not in self._failing:
                log.warning("heartbeat failed; trying on", broker=address, reason=str(error))
            self._failing.add(address)
        else:
            self._registered.add(address)
            if address in self._failing:
                self._failing.discard(address)
                log.info("broker is back", broker=address)

    async def _heartbeat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            await self._heartbeat()

    # Rebalance

    def _notified(self, connection: Connection, frame: Frame) -> None:
        """Members have changed, or the queues of a topic."""
        topic = frame.ext.get("topic")
        if topic in self._subscriptions:
            self._grown.add(str(topic))
        self._wake.set()

    def _on_lost(self, address: str) -> None:
        """A broker's socket closed. Whether its queues are still ours is known when it has answered again."""
        self._registered.discard(address)
        for queue in self.owned:
            if self.cluster.master(queue.broker_name) == address and queue not in self._suspended:
                self._suspended.add(queue)
                self._user.suspend_queue(queue)
        if not self._has_left:
            self._wake.set()

    async def _reclaim(self) -> None:
        """Asks brokers that are back for the locks that were ours: the same epoch means that nobody had them since."""
        for broker_name, queues in by_broker(self._suspended).items():
            if self.cluster.master(broker_name) not in self._registered:
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

    async def _rebalance_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._rebalance()
            except Exception:
                log.exception("rebalance failed; trying again", group=self.group)
                self._wants_retry_s = LOCK_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wants_retry_s):
                    await self._wake.wait()

    async def _rebalance(self) -> None:
        """One pass: what is mine, give up what is not, lock what is new."""
        self._wants_retry_s = REBALANCE_INTERVAL_S
        if not self._registered.issuperset(self.cluster.masters().values()):
            await self._heartbeat()
            if self._failing:
                self._wants_retry_s = RECONNECT_S
        await self._reclaim()
        grown, self._grown = self._grown, set()
        for topic in grown:
            await self.cluster.find_route(topic)
        mine: set[Queue] = set()
        complete = not self._suspended
        for topic in self._subscriptions:
            share = await self._share(topic)
            if share is None:
                complete = False
                share = {queue for queue in self.owned if queue.topic == topic}
            mine |= share
        for queue in self.owned.keys() - mine:
            self._release(queue)
        self._acquiring = mine - self.owned.keys() - self._releasing.keys()
        if self._acquiring:
            await self._acquire(self._acquiring)
            self._acquiring = set()
        if not complete or mine != self.owned.keys():
            self._settled.clear()
            self._wants_retry_s = min(self._wants_retry_s, LOCK_RETRY_S)
        elif not self._releasing:
            self._settled.set()
            if self._reported != self.owned.keys():
                await self._heartbeat()  # so that whoever watches sees the assignment as this member does

    async def _share(self, topic: str) -> set[Queue] | None:
        """The queues of a topic that are this member's; None if that cannot be known now."""
        try:
            route = self.cluster.route(topic) or await self.cluster.find_route(topic)
            if route is None:
                self._wants_retry_s = min(self._wants_retry_s, MISSING_ROUTE_INTERVAL_S)
                return set() if topic.startswith(names.RETRY_PREFIX) else None
            queues = subscribe_queues(topic, route)
            share = await self._shares.of(topic, queues)
        except (RocketletError, bodies.BodyError) as error:
            log.info("lookup failed; the assignment stays", topic=topic, reason=str(error))
            return None
        if share is None:
            self._registered.clear()  # the broker forgot us: register again
            return None
        self._first_seen.setdefault(topic, frozenset(queues))
        return set(share)

    # Taking

    async def _acquire(self, wanted: Iterable[Queue]) -> None:
        await asyncio.gather(*(self._acquire_from(name, queues) for name, queues in by_broker(sorted(wanted)).items()))

    async def _acquire_from(self, broker_name: str, queues: list[Queue]) -> None:
        try:
            connection = await self.cluster.broker(broker_name)
            epochs = await self._lock_at(connection, queues)
        except RocketletError as error:
            log.info("lock failed; trying again", broker=broker_name, reason=str(error))
            return
        await asyncio.gather(*(self._begin(connection, queue, epoch) for queue, epoch in epochs.items()))

    async def _lock(self, broker_name: str, queues: list[Queue]) -> dict[Queue, int]:
        return await self._lock_at(await self.cluster.broker(broker_name), queues)

    async def _lock_at(self, connection: Connection, queues: list[Queue]) -> dict[Queue, int]:
        """Which of the queues are locked for us now, with their epochs."""
        body = group_bodies.encode_lock_request(LockRequest(self.client_id, self.group, tuple(queues), handover=True))
        answer = await connection.request(RequestCode.LOCK_BATCH_MQ, {}, body, LOCK_TIMEOUT_S)
        return {queue: epoch for queue, epoch in group_bodies.decode_locked(answer.body).items() if queue in queues}

    async def _begin(self, connection: Connection, queue: Queue, epoch: int) -> None:
        """A queue was locked: finds where to read from, or unlocks it again."""
        try:
            offset = await self._start_offset(connection, queue)
        except RocketletError as error:
            log.warning("no start offset; trying again", queue=str(queue), reason=str(error))
            await self._unlock(queue)
            return
        if not connection.is_open:
            return  # and the lock went with it
        self.owned[queue] = epoch
        self._user.take_queue(queue, offset, epoch)
        log.info("queue assigned", queue=str(queue), offset=offset, epoch=epoch)

    async def _start_offset(self, connection: Connection, queue: Queue) -> int:
        """The group's committed offset, or where a new group begins; all of a queue that is new or for retries."""
        grown = queue not in self._first_seen.get(queue.topic, ())
        everything = grown or queue.topic.startswith(names.RETRY_PREFIX)
        if queue in self._starts:
            return await self._offsets.load(connection, queue, self._starts[queue], alone=True)
        return await self._offsets.load(connection, queue, "first" if everything else self._start)

    # Giving

    def _release(self, queue: Queue) -> None:
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

    async def _commit_at_last(self, queue: Queue, offset: int, epoch: int) -> None:
        """The commit before the unlock: without it what was acknowledged would be delivered again. A broker that has
        restarted takes it when the lock has been reclaimed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + HAND_OVER_PATIENCE_S
        while not await self.commit({queue: offset}, {queue: epoch}) and loop.time() < end_s:
            await asyncio.sleep(RECONNECT_S)
            try:
                await self._heartbeat()
                if (await self._lock(queue.broker_name, [queue])).get(queue) != epoch:
                    return  # another's by now
            except RocketletError as error:
                log.info("lock not reclaimed; trying again", queue=str(queue), reason=str(error))

    async def _unlock(self, queue: Queue, epoch: int | None = None) -> None:
        epochs = {queue: epoch} if epoch else {}
        request = LockRequest(self.client_id, self.group, (queue,), handover=True, epochs=epochs)
        try:
            connection = await self.cluster.broker(queue.broker_name)
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

    async def _renew_forever(self) -> None:
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


def _consume_from(start: Start) -> str:
    if isinstance(start, int):
        return "CONSUME_FROM_TIMESTAMP"
    return "CONSUME_FROM_FIRST_OFFSET" if start == "first" else "CONSUME_FROM_LAST_OFFSET"
