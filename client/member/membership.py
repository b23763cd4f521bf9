"""One client in one consumer group: puts heartbeats, the rebalance and leases together.

heartbeats   tells brokers that the member is here
rebalance    when queues change hands, and what the member's share is
leases       how a queue changes hands, and how long it is ours
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from ...host.version import own_version
from ...protocol import names
from ...protocol.allocation import AVG, Strategy
from ...protocol.bodies import ConsumerData, Heartbeat
from ...protocol.codes import RequestCode
from ...protocol.config import MAX_REQUEST_QUEUES
from ...protocol.counting import counted
from ...protocol.frame import Frame
from ...protocol.headers import UnregisterClient, write
from ...protocol.queue import Queue
from ...protocol.schema import BodyError
from ...protocol.subscription import Subscription
from ..config import HEARTBEAT_BYTES, HEARTBEAT_QUEUE_BYTES, At, Start
from ..errors import RocketletError
from ..lease import Lease
from ..log import get_logger
from ..tasks import cancelled
from ..wire.cluster import Cluster
from ..wire.connection import Connection
from ..wire.identity import new_client_id
from .heartbeats import Heartbeats
from .leases import Leases, QueueUser
from .offsets import GroupOffsets
from .rebalance import Rebalance
from .shares import Shares

log = get_logger("rocketlet.membership")


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
        self.client_id = new_client_id(cluster.client_name)
        self.group = group
        self.cluster = cluster
        self._subscriptions = dict(subscriptions)
        self._start = start
        self._strategy = strategy
        self._consume_type = consume_type
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._has_left = False
        self._offsets = GroupOffsets(cluster, group, start, starts)
        self._heartbeats = Heartbeats(cluster, self._described, self._addresses)
        self._leases = Leases(
            cluster,
            group,
            self.client_id,
            user,
            self._offsets,
            self._heartbeats,
            wake=self._wake,
            settled=self._settled,
        )
        self._shares = Shares(cluster, group, self.client_id, strategy)
        self._rebalance = Rebalance(
            cluster,
            self._subscriptions,
            self._leases,
            self._shares,
            self._heartbeats,
            wake=self._wake,
            settled=self._settled,
        )
        cluster.answer(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._notified)
        cluster.listen(on_change=lambda topic: self._wake.set(), on_lost=self._lost_connection)
        cluster.keeps_brokers = True

    @property
    def owned(self) -> Mapping[Queue, Lease]:
        """The queues that are this member's now."""
        return self._leases.owned

    async def join(self) -> None:
        """Registers at the brokers that can be reached, and starts. Raises ConnectionFailed if no name server can be, and
        BrokerRefused if a broker does not take this member."""
        for topic in self._subscriptions:
            await self.cluster.find_route(topic)
        await self._offsets.fix_latest(self._subscriptions)
        await self._heartbeats.beat()
        if self._heartbeats.refusal is not None:
            raise self._heartbeats.refusal
        self._tasks = [
            asyncio.create_task(self._rebalance.run_forever(), name="rebalance"),
            asyncio.create_task(self._heartbeats.beat_forever(), name="heartbeat"),
            asyncio.create_task(self._leases.renew_forever(), name="lock renewal"),
        ]

    async def leave(self) -> None:
        """Gives up every queue as in a rebalance, then unregisters. Leases are renewed until then. Says nothing of errors:
        brokers see the close."""
        self._has_left = True
        try:
            await cancelled(self._tasks[:1])  # from here on nothing is taken
            self._tasks.append(asyncio.create_task(self._rebalance.run_forever(leaving=True), name="leave"))
            if self.owned:  # says that we leave: the others prepare while our handlers end
                self._tasks.append(asyncio.create_task(self._heartbeats.beat(), name="leaving heartbeat"))
                await asyncio.wait(self._tasks[-1:], timeout=self.cluster.limits.register_patience_s)
            await self._leases.give_all()
        finally:  # also if cancelled
            await self.abandon()
        await asyncio.gather(*map(self._unregister, self.cluster.masters().values()))

    async def abandon(self) -> None:
        """Ends at once whatever still goes on. Harmless after `leave`."""
        await self._leases.abandon()
        await cancelled(self._tasks)
        await self._heartbeats.stop()

    async def _unregister(self, address: str) -> None:
        if not self.cluster.is_connected(address):
            return
        try:
            connection = await self.cluster.connection(address)
            ext = write(UnregisterClient(self.client_id, consumer_group=self.group))
            await connection.request(RequestCode.UNREGISTER_CLIENT, ext)
        except RocketletError as error:
            log.info("unregister_failed", broker=address, reason=str(error))

    async def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Adds topics that have come into being while this member was here: they are read from their start."""
        for topic in subscriptions:
            self._offsets.saw(topic, ())
            await self.cluster.find_route(topic)
        self._subscriptions |= subscriptions
        await self._heartbeats.beat()
        self._rebalance.add_topics(subscriptions)

    def unsettled(self) -> str:
        """Why the member is not settled, in words; empty if it is."""
        if self._rebalance.missing:
            topics = ", ".join(sorted(self._rebalance.missing))
            return f"no name server knows the topic {topics}; create it, or check its name"
        if self._leases.are_suspended:
            return "a broker of its queues is away"
        owned = counted(len(self.owned), "queue")
        return f"it owns {owned}; other members or brokers have not let go of the rest of its share yet"

    @property
    def is_settled(self) -> bool:
        """Whether this member holds exactly the queues that the last allocation gave it."""
        return self._settled.is_set()

    async def settled(self) -> None:
        """Returns when this member holds exactly the queues that the last allocation gave it."""
        await self._settled.wait()

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        """Stores the group's offsets of owned queues; returns the queues for which that was done."""
        return await self._leases.commit(offsets)

    async def commit_place(self, queue: Queue, offset: int, *, sought: bool) -> None:
        """Stores where the user or an administrator wants an owned queue to go on. sought: its broker named the offset."""
        await self._leases.commit_place(queue, offset, sought=sought)

    # Events of brokers

    def _notified(self, connection: Connection, frame: Frame) -> None:
        """Members have changed, or the queues of a topic."""
        self._rebalance.grown(str(frame.ext.get("topic")))
        try:
            self._shares.told(connection, frame.ext)
        except BodyError as error:
            log.warning("places_unreadable", peer=connection.address, reason=str(error))
        self._wake.set()

    def _lost_connection(self, address: str) -> None:
        self._heartbeats.forget(address)
        self._leases.suspend(address)
        self._wake.set()

    # Heartbeats

    def _described(self) -> Heartbeat:
        consumer = ConsumerData(
            self.group,
            self._consume_type,
            "CLUSTERING",
            _consume_from(self._start),
            tuple(self._subscriptions.values()),
            strategy=self._strategy.name,
            leaving=self._has_left,
            assigned=told_queues(self.owned, self.cluster.limits.told_queues),
            queue_counts=self._queue_counts(),
            own_version=own_version(),
        )
        return Heartbeat(self.client_id, (consumer,), (names.INNER_PRODUCER_GROUP,))

    def _addresses(self) -> Iterator[str]:
        """The brokers of the routes, and those of our queues when the route lacks them."""
        yield from self.cluster.masters().values()
        for queue in (*self.owned, *self._leases.releasing):
            address = self.cluster.master(queue.broker_name)
            if address is not None:
                yield address

    def _queue_counts(self) -> dict[str, dict[str, int]]:
        """How many queues this member sees, by broker and topic: brokers name those who see other numbers than they have."""
        counts: dict[str, dict[str, int]] = {}
        for topic in self._subscriptions:
            route = self.cluster.route(topic)
            for data in route.queues if route else ():
                counts.setdefault(data.broker_name, {})[topic] = data.read_queues
        return counts


def told_queues(owned: Iterable[Queue], most: int = MAX_REQUEST_QUEUES) -> tuple[Queue, ...]:
    """The first of a member's queues, as many as a broker takes in a heartbeat. One that has more would be refused, and its
    member with it. Brokers log them, and give STICKY members back their queues from before the broker started."""
    queues = sorted(owned)[:most]
    longest = max((len(f"{queue.topic}{queue.broker_name}".encode()) for queue in queues), default=0)
    return tuple(queues[: HEARTBEAT_BYTES // (longest + HEARTBEAT_QUEUE_BYTES)])


def _consume_from(start: Start) -> str:
    if isinstance(start, int):
        return "CONSUME_FROM_TIMESTAMP"
    return "CONSUME_FROM_FIRST_OFFSET" if start == "first" else "CONSUME_FROM_LAST_OFFSET"
