"""Membership in a consumer group: joining, rebalancing, the member's share of queues, leaving; and broadcasting members."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from ...host.files import locked_beside, read_file
from ...host.version import own_version
from ...protocol import group_bodies, names
from ...protocol.allocation import AVG, ByPosition, Sticky, Strategy, subscribe_queues
from ...protocol.bodies import BodyError, ConsumerData, Heartbeat, Route
from ...protocol.codes import EXT_DETAIL, EXT_PLACES, EXT_SEEN_QUEUES, EXT_SHARES, RequestCode
from ...protocol.config import MAX_REQUEST_QUEUES
from ...protocol.frame import Ext, Frame
from ...protocol.group_bodies import BrokerShare, Place
from ...protocol.headers import ConsumerGroupHeader, write
from ...protocol.names import Queue, Subscription, counted
from ..config import HEARTBEAT_BYTES, HEARTBEAT_QUEUE_BYTES, MAX_INT, MAX_LONG, MAX_OFFSETS_BYTES, PLACE_S, At, Start
from ..errors import BrokerRefused, ConfigError, ConnectionFailed, RequestTimeout, RocketletError, get_logger
from ..message import Lease, clock_s
from ..wire.cluster import ClusterView, new_client_id
from ..wire.connection import Connection, KeptTask, cancelled
from ..wire.late_queues import LateQueues
from .leases import Heartbeats, Leases, QueueUser
from .offsets import GroupOffsets, begin_offset

log = get_logger("rocketlet.membership")
broadcast_log = get_logger("rocketlet.broadcast")


# ------------------------------------------------------------------------------
# One client in one consumer group, which consists of these parts:
#
# Heartbeats   register the member at brokers
# Rebalance    determines the member's share of queues, and when to acquire and release queues
# Leases       acquires and releases queues, and renews their leases


class Membership:
    """The membership of one client in one consumer group. Between `join` and `leave`, `user` is notified of assigned
    and revoked queues.

    Args:
        start: the start position of queues for which the group has no committed offset.
        starts: start positions of single queues, which take precedence over `start`.
        consume_type: the consume type in heartbeats, such as "CONSUME_PASSIVELY" for a push consumer.
    """

    def __init__(
        self,
        cluster: ClusterView,
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
        self._tasks: list[asyncio.Task[None] | KeptTask] = []
        self._wake = asyncio.Event()
        self._rebalanced = asyncio.Event()
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
            rebalanced=self._rebalanced,
        )
        self._shares = Shares(cluster, group, self.client_id, strategy)
        self._rebalance = Rebalance(
            cluster,
            self._subscriptions,
            self._leases,
            self._shares,
            self._heartbeats,
            wake=self._wake,
            rebalanced=self._rebalanced,
        )
        cluster.answer(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._notified)
        cluster.listen(on_change=lambda topic: self._wake.set(), on_lost=self._lost_connection)
        cluster.keeps_brokers = True

    @property
    def owned(self) -> Mapping[Queue, Lease]:
        """The leases of the queues that this member owns now."""
        return self._leases.owned

    async def join(self) -> None:
        """Register at the reachable brokers and start to rebalance.

        Raises ConnectionFailed if no name server can be reached, and BrokerRefused if a broker rejects this member.
        """
        for topic in self._subscriptions:
            await self.cluster.find_route(topic)
        await self._offsets.fix_latest(self._subscriptions)
        restart_s = self.cluster.limits.restart_s
        await self._heartbeats.beat()
        if self._heartbeats.refusal is not None:
            raise self._heartbeats.refusal
        self._tasks = [
            KeptTask(self._rebalance.run_forever, "rebalance", restart_s),
            KeptTask(self._heartbeats.beat_forever, "heartbeat", restart_s),
            KeptTask(self._leases.renew_forever, "lock renewal", restart_s),
        ]

    async def leave(self) -> None:
        """Release all queues as in a rebalance, then unregister. Renew leases until then. Raise nothing, because brokers
        notice the closed connection anyway."""
        self._has_left = True
        try:
            await cancelled(self._tasks[:1])  # the rebalance, so that no more queues are acquired
            leaving = partial(self._rebalance.run_forever, leaving=True)
            self._tasks.append(KeptTask(leaving, "leave", self.cluster.limits.restart_s))
            if self.owned:  # announce the leave, so that other members can prepare while handlers end here
                beating = asyncio.create_task(self._heartbeats.beat(), name="leaving heartbeat")
                self._tasks.append(beating)
                await asyncio.wait([beating], timeout=self.cluster.limits.register_timeout_s)
            await self._leases.give_all()
        finally:  # also if `leave` was cancelled
            await self.abandon()
        await asyncio.gather(*map(partial(self._heartbeats.unregister, self.group), self.cluster.masters().values()))

    async def abandon(self) -> None:
        """Stop immediately, without releasing queues. `abandon` has no effect after `leave`."""
        await self._leases.abandon()
        await cancelled(self._tasks)
        await self._heartbeats.stop()

    async def subscribe(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Add topics that were created after this member joined. Without a committed offset, their queues are read from
        the first message, or from `start` if that is a time."""
        for topic in subscriptions:
            self._offsets.record_first_queues(topic, ())
            await self.cluster.find_route(topic)
        self._subscriptions |= subscriptions
        await self._heartbeats.beat()
        self._rebalance.add_topics(subscriptions)

    def rebalance_fault(self) -> str:
        """Return a text that says why the member does not own its share of queues yet."""
        if self._rebalance.missing:
            topics = ", ".join(sorted(self._rebalance.missing))
            return f"no name server knows the topic {topics}; create it, or check its name"
        if not self._rebalance.has_computed_share:
            return "the first rebalance has not finished"
        if self._leases.are_suspended:
            return "a broker of its queues is unreachable"
        owned = counted(len(self.owned), "queue")
        return f"it owns {owned}; other members or brokers have not released the rest of its share yet"

    @property
    def is_rebalanced(self) -> bool:
        """True if this member owns exactly the queues that the last allocation assigned to it."""
        return self._rebalanced.is_set()

    async def rebalanced(self) -> None:
        """Wait until this member owns exactly the queues that the last allocation assigned to it."""
        await self._rebalanced.wait()

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        """Commit offsets of owned queues, and return the queues whose offsets were stored."""
        return await self._leases.commit(offsets)

    async def commit_position(self, queue: Queue, offset: int, *, sought: bool) -> None:
        """Commit an offset that a user or an administrator has chosen for an owned queue. Raise nothing.

        Args:
            sought: True if the broker itself returned the offset.
        """
        await self._leases.commit_position(queue, offset, sought=sought)

    # Notifications

    def _notified(self, connection: Connection, frame: Frame) -> None:
        """Record a broker's notification that the group's members or a topic's queues have changed, and wake the
        rebalance task. A member that is leaving does not rebalance."""
        self._rebalance.grown(str(frame.ext.get("topic")))
        try:
            self._shares.record_notification(connection, frame.ext)
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
            assigned=heartbeat_queues(self.owned, self.cluster.limits.heartbeat_queues),
            queue_counts=self._queue_counts(),
            own_version=own_version(),
        )
        return Heartbeat(self.client_id, (consumer,), (names.INNER_PRODUCER_GROUP,))

    def _addresses(self) -> Iterator[str]:
        """Return the addresses of brokers in the routes, and of brokers of this member's queues that are missing there."""
        yield from self.cluster.masters().values()
        for queue in (*self.owned, *self._leases.releasing):
            address = self.cluster.master(queue.broker_name)
            if address is not None:
                yield address

    def _queue_counts(self) -> dict[str, dict[str, int]]:
        """Return the number of queues in this member's routes, by broker and topic. Brokers report members whose numbers
        differ from their own."""
        counts: dict[str, dict[str, int]] = {}
        for topic in self._subscriptions:
            route = self.cluster.route(topic)
            for data in route.queues if route else ():
                counts.setdefault(data.broker_name, {})[topic] = data.read_queues
        return counts


def heartbeat_queues(owned: Iterable[Queue], most: int = MAX_REQUEST_QUEUES) -> tuple[Queue, ...]:
    """Return the queues to name in a heartbeat: the first ones, up to the maximum that a broker accepts.

    A Rocketlet broker would reject a larger heartbeat, and the member with it. It logs these queues, and uses them after
    a restart to assign STICKY members their previous queues again.
    """
    queues = sorted(owned)[:most]
    longest = max((len(f"{queue.topic}{queue.broker_name}".encode()) for queue in queues), default=0)
    return tuple(queues[: HEARTBEAT_BYTES // (longest + HEARTBEAT_QUEUE_BYTES)])


def _consume_from(start: Start) -> str:
    if isinstance(start, int):
        return "CONSUME_FROM_TIMESTAMP"
    return "CONSUME_FROM_FIRST_OFFSET" if start == "first" else "CONSUME_FROM_LAST_OFFSET"


# ------------------------------------------------------------------------------
# The rebalance: one loop that determines this member's share of queues and has `Leases` acquire and release queues.
#
# Every member computes its own share from the member list or the position that its broker sent (`Shares`, with the
# strategies of `protocol/allocation`). For STICKY, the broker computes the shares. Members notice changes at different
# times, so their shares overlap for a while. Meanwhile the locks of `Leases` ensure that a queue has at most one owner.
#
# If a lookup of routes or members fails or returns nothing, the assignment stays unchanged.


class Rebalance:
    """Rebalances one member.

    Args:
        wake: an event that starts the next pass.
        rebalanced: an event that is set while the member owns exactly its share.

    Attributes:
        missing: topics that no name server knows, except retry topics.
        has_computed_share: True once a pass has determined this member's share.
    """

    def __init__(
        self,
        cluster: ClusterView,
        topics: Iterable[str],
        leases: Leases,
        shares: Shares,
        heartbeats: Heartbeats,
        *,
        wake: asyncio.Event,
        rebalanced: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.limits
        self._topics = list(topics)
        self._leases = leases
        self._shares = shares
        self._heartbeats = heartbeats
        self._wake = wake
        self._rebalanced = rebalanced
        self._results: dict[str, set[Queue]] = {}
        self._queues: dict[str, tuple[Route, list[Queue]]] = {}
        self._grown: set[str] = set()
        self.missing: set[str] = set()
        self.has_computed_share = False

    def add_topics(self, topics: Iterable[str]) -> None:
        self._topics = list(dict.fromkeys((*self._topics, *topics)))
        self._wake.set()

    def grown(self, topic: str) -> None:
        """Look up the route of a topic in the next pass, because its queues have changed."""
        if topic in self._topics:
            self._grown.add(topic)

    async def run_forever(self, *, leaving: bool = False) -> None:
        """Run a pass immediately, whenever `wake` is set, and every `rebalance_interval_s`, or sooner while the last pass
        could not finish.

        Args:
            leaving: True to acquire and release nothing, and only keep the member registered until its queues are released.
        """
        step = self._keep_in_touch if leaving else self._pass
        while True:
            self._wake.clear()
            self._retry_s = self._limits.rebalance_interval_s
            try:
                await step()
            except Exception:
                log.exception("rebalance_failed")
                self._retry_s = self._limits.lock_retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._wake.wait()

    async def _pass(self) -> None:
        """Determine this member's share, release queues outside of it, and lock new ones."""
        await self._keep_in_touch()
        await self._look_up_grown()
        mine, complete = await self._share_of_all()
        self.has_computed_share = True
        leases = self._leases
        if mine != leases.owned.keys():
            self._rebalanced.clear()
        for queue in leases.owned.keys() - mine:
            leases.release(queue)
        await leases.acquire(mine)
        if leases.are_doubtful:
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        holds_all = complete and mine == leases.owned.keys()
        if not holds_all:
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        if not holds_all or leases.are_releasing:
            self._rebalanced.clear()
        else:
            self._rebalanced.set()
            self._heartbeats.send_if_changed()  # so that brokers know the queues that this member owns now

    async def _keep_in_touch(self) -> None:
        await self._register()
        await self._leases.reclaim()

    async def _register(self) -> None:
        """Register at brokers that are new or reachable again, before other requests are sent to them."""
        await self._heartbeats.register(timeout_s=self._limits.register_timeout_s)
        if not all(map(self._heartbeats.is_registered, self._cluster.masters().values())):
            self._retry_s = self._limits.reconnect_s

    async def _look_up_grown(self) -> None:
        grown, self._grown = self._grown, set()
        for topic in grown:
            try:
                await self._cluster.find_route(topic)
            except (RocketletError, BodyError) as error:
                log.info("lookup_failed", topic=topic, reason=str(error), hint="the lookup is retried")
                self._grown.add(topic)
                self._retry_s = min(self._retry_s, self._limits.lock_retry_s)

    async def _share_of_all(self) -> tuple[set[Queue], bool]:
        """Return this member's share of all topics, and True if it is complete.

        If the share of a topic cannot be determined, it consists of the queues that the member owns, and is not complete.
        """
        mine: set[Queue] = set()
        complete = not self._leases.are_suspended
        for topic in self._topics:
            share = await self._share_of(topic)
            if share is None:
                complete = False
                share = {queue for queue in self._leases.owned if queue.topic == topic}
            mine |= share
        return mine, complete

    def _miss(self, topic: str) -> None:
        """Log that a topic does not exist, once until it is found. A group's retry topic is not logged, because its first
        retry creates it."""
        if topic not in self.missing and not topic.startswith(names.RETRY_PREFIX):
            self.missing.add(topic)
            hint = "create it, send to it, or check its name and brokers; once it exists, it is read from offset 0"
            log.warning("topic_missing", topic=topic, hint=hint)

    async def _share_of(self, topic: str) -> set[Queue] | None:
        """Return this member's share of a topic; None if it cannot be determined now."""
        began_s = clock_s()
        try:
            route = self._cluster.route(topic) or await self._cluster.find_route(topic)
            if route is None:
                self._retry_s = min(self._retry_s, self._limits.missing_route_interval_s)
                self._miss(topic)
                return set() if topic.startswith(names.RETRY_PREFIX) else None
            self.missing.discard(topic)
            queues = self._queues_of(topic, route)
            share = await self._shares.of(topic, queues)
        except (RocketletError, BodyError) as error:
            log.info("lookup_failed", topic=topic, reason=str(error), hint="the assignment stays unchanged")
            return None
        if share is None:
            self._heartbeats.forget()  # the broker does not have this member, so register at all brokers again
            return None
        self._log_change(topic, share, clock_s() - began_s)
        if share.unknown:
            self._grown.add(topic)  # look up the route again, because other members know more brokers of the topic
            self._retry_s = min(self._retry_s, self._limits.lock_retry_s)
        return set(share.mine)

    def _queues_of(self, topic: str, route: Route) -> list[Queue]:
        """Return the queues of a topic. The queues are cached until the route changes, because each change of the group
        starts a pass."""
        found = self._queues.get(topic)
        if found is None or found[0] is not route:
            found = self._queues[topic] = (route, subscribe_queues(topic, route))
        return found[1]

    def _log_change(self, topic: str, share: Share, look_up_s: float) -> None:
        """Log the member's share if it has changed, with the fields of Apache's log entry `rebalanced result changed`."""
        mine, before = set(share.mine), self._results.get(topic, set())
        if topic in self._results and mine == before:
            return
        self._results[topic] = mine
        log.info(
            "rebalanced",
            strategy=self._shares.strategy_name,
            group=self._shares.group,
            topic=topic,
            client_id=self._shares.client_id,
            queues=len(share.queues),
            members=share.members,
            result_count=len(mine),
            result=sorted(map(str, mine)),
            added=sorted(map(str, mine - before)),
            removed=sorted(map(str, before - mine)),
            look_up_ms=round(look_up_s * 1000, 1),
        )


# ------------------------------------------------------------------------------
# A member's share of a topic: queries the members of the group, and has the strategy allocate the queues.
#
# For a strategy that does not need the members' ids, Rocketlet's broker returns only the member's position and the
# number of members, so that the total size of the responses to all members grows linearly with their number, not
# quadratically. For the same reason, the broker computes the shares of STICKY.


class Share(NamedTuple):
    """A member's share of one topic.

    Attributes:
        mine: the queues that are allocated to this member.
        queues: all queues of the topic.
        members: the number of members among which the queues are allocated.
        unknown: the queues on brokers that only other members know.
    """

    mine: list[Queue]
    queues: list[Queue]
    members: int
    unknown: list[Queue]


class _Notified(NamedTuple):
    """What a broker's notification contained about a topic: this member's position in the group (`place`), or its share.
    Position and share are valid only for the number of queues that the notification contains."""

    connection: Connection
    notified_s: float
    place: Place | None = None
    share: BrokerShare | None = None


class Shares:
    """The shares of one member of one group."""

    def __init__(self, cluster: ClusterView, group: str, client_id: str, strategy: Strategy) -> None:
        self._cluster = cluster
        self.group = group
        self.client_id = client_id
        self._strategy = strategy
        self._by_position = strategy if isinstance(strategy, ByPosition) else None
        self._detail = "share" if isinstance(strategy, Sticky) else "position" if self._by_position else "members"
        self._notified: dict[str, _Notified] = {}  # by topic
        self._silent_s: dict[str, float] = {}  # by broker name: the time of the last timeout

    @property
    def strategy_name(self) -> str:
        return self._strategy.name

    async def of(self, topic: str, queues: list[Queue]) -> Share | None:
        """Return the member's share of a topic's queues; None if the broker does not list this client as a member.

        Raises RocketletError and BodyError.
        """
        notified = self._notified.get(topic)
        if notified is not None and self._may_use(queues, notified):
            if notified.share is not None and notified.share.queues == len(queues):
                return Share(notified.share.of(topic), queues, notified.share.members, [])
            place = notified.place
            # If other members see more queues, they allocate more. A share of fewer queues would then leave some queues
            # without an owner.
            if (
                place is not None
                and place.position >= 0
                and place.queues == len(queues)
                and self._by_position is not None
            ):
                mine = self._by_position.allocate_at(place.position, place.members, queues)
                return Share(mine, queues, place.members, [])
        return await self._query(topic, queues)

    async def _query(self, topic: str, queues: list[Queue]) -> Share | None:
        answer = await self._members(topic, queues, self._detail)
        unknown = _unknown(topic, queues, answer)
        queues = sorted(queues + unknown)
        found = group_bodies.decode_shares(str(answer.ext.get(EXT_SHARES, "{}")).encode()).get(topic)
        if found is not None:
            return Share(found.of(topic), queues, found.members, unknown)
        if "index" in answer.ext:
            index, count = int(answer.ext["index"]), int(answer.ext["count"])
            strategy = self._by_position or AVG
            return None if index < 0 else Share(strategy.allocate_at(index, count, queues), queues, count, unknown)
        ids = names.sorted_ids(group_bodies.decode_members(answer.body))
        if self.client_id not in ids:
            return None
        return Share(self._strategy.allocate(self.client_id, queues, ids), queues, len(ids), unknown)

    def record_notification(self, connection: Connection, ext: Mapping[str, object]) -> None:
        """Record a broker's notification that the group has changed. The notification may contain the response to the
        query that this member would send next. Raises BodyError."""
        places = group_bodies.decode_places(str(ext.get(EXT_PLACES, "{}")).encode())
        shares = group_bodies.decode_shares(str(ext.get(EXT_SHARES, "{}")).encode())
        now_s = clock_s()
        for name in list(self._silent_s):
            # The broker responds again. New members query it first, so this member must, too, or their shares could differ.
            if self._cluster.connected(name) is connection:
                del self._silent_s[name]
        for topic in list(self._notified) if EXT_PLACES in ext or EXT_SHARES in ext else ():
            # The broker's earlier values are outdated even if it sends none for a topic now, because then a member with
            # another strategy has joined.
            if self._notified[topic].connection is connection:
                del self._notified[topic]
        for topic, place in places.items():
            self._notified[topic] = _Notified(connection, now_s, place=place)
        for topic, share in shares.items():
            self._notified[topic] = _Notified(connection, now_s, share=share)

    def _may_use(self, queues: list[Queue], notified: _Notified) -> bool:
        """Return True if a notification is recent, and came from the broker that a query would be sent to."""
        brokers = self._query_order(queues)
        first = self._cluster.connected(brokers[0]) if brokers else None
        is_fresh = clock_s() - notified.notified_s < PLACE_S
        return is_fresh and notified.connection is first

    async def _members(self, topic: str, queues: list[Queue], detail: str | None) -> Frame:
        """Query the members that subscribe to a topic. Return the first successful response of the brokers of its
        queues, which are queried one after another. Raises the last error if all fail."""
        error: RocketletError = ConnectionFailed(f"no broker of the topic {topic} is known")
        ext: Ext = write(ConsumerGroupHeader(self.group, topic)) | ({EXT_DETAIL: detail} if detail else {})
        if detail == "share":
            counts = Counter(queue.broker_name for queue in queues)
            ext = {**ext, EXT_SEEN_QUEUES: group_bodies.encode_seen_queues(counts)}
        for broker_name in self._query_order(queues):
            try:
                connection = await self._cluster.broker(broker_name)
                return await connection.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
            except (ConnectionFailed, RequestTimeout, BrokerRefused) as failed:
                error = failed
                if isinstance(failed, RequestTimeout):
                    self._silent_s[broker_name] = clock_s()
        raise error

    def _query_order(self, queues: list[Queue]) -> list[str]:
        """Return the names of the queues' brokers in the order in which they are queried. After a timeout, a broker is
        moved to the end for a while."""
        brokers: dict[str, None] = {}
        for queue in queues:
            brokers[queue.broker_name] = None
        if not self._silent_s:
            return list(brokers)
        since_s = clock_s() - PLACE_S
        return sorted(brokers, key=lambda name: self._silent_s.get(name, since_s) > since_s)


def _unknown(topic: str, queues: list[Queue], answer: Frame) -> list[Queue]:
    """Return the queues of brokers that only other members have in their routes, because a broker was unreachable when
    this member joined. The other members allocate these queues, too, so without them the shares would not fit together."""
    if EXT_SEEN_QUEUES not in answer.ext:
        return []
    seen = group_bodies.decode_seen_queues(str(answer.ext.get(EXT_SEEN_QUEUES, "{}")).encode())
    missing = seen.keys() - {queue.broker_name for queue in queues}
    return [Queue(topic, broker_name, number) for broker_name in missing for number in range(seen[broker_name])]


# ------------------------------------------------------------------------------
# Broadcasting: every member reads every queue, from offsets that it can keep in a file of its own.


class Broadcast:
    """Replaces `Membership` in a broadcasting consumer: it needs no rebalance and no locks.

    Args:
        start: the start position of queues for which the file has no offset.
        offsets_file: the file that keeps this member's offsets between runs; None to start each run at `start`. The
            file is locked while the member is running, because members that share a file would resume at each other's
            offsets.
    """

    def __init__(
        self,
        cluster: ClusterView,
        group: str,
        subscriptions: Mapping[str, Subscription],
        user: QueueUser,
        *,
        start: Start,
        offsets_file: Path | str | None,
    ) -> None:
        self.client_id = new_client_id(cluster.client_name)
        self.owned: dict[Queue, Lease] = {}
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._subscriptions = dict(subscriptions)
        self._user = user
        self._start = start
        self._file = (
            None if offsets_file is None else Path(os.path.realpath(offsets_file))
        )  # resolve links, so that saving replaces the file and not a link to it
        self._offsets = _load(offsets_file)
        self._lock: BinaryIO | None = None
        self._at_joining: frozenset[Queue] = frozenset()
        self._late = LateQueues(cluster)
        self._tasks: list[KeptTask] = []
        self._wake = asyncio.Event()
        self._rebalanced = asyncio.Event()
        self._heartbeats = Heartbeats(cluster, self._described, lambda: cluster.masters().values())
        cluster.keeps_brokers = (
            True  # so that heartbeats reconnect to a broker that restarts as soon as it is reachable
        )
        cluster.listen(on_change=lambda topic: self._wake.set(), on_lost=lambda address: self._wake.set())

    async def join(self) -> None:
        self._lock = _locked(self._file)
        self._offsets = _load(
            self._file
        )  # a second time, because another member may have written it before it was locked
        for topic in self._subscriptions:
            await self._cluster.find_route(topic)
        if self._start == "last":
            await self._late.join()
        self._at_joining = frozenset(
            queue
            for topic in self._subscriptions
            if (route := self._cluster.route(topic)) is not None
            for queue in subscribe_queues(topic, route)
        )
        await self._heartbeats.beat()
        await self._take_queues()
        self._tasks = [KeptTask(self._keep_up, "broadcast", self._cluster.limits.restart_s)]

    async def leave(self) -> None:
        await cancelled(self._tasks)
        try:
            for queue in list(self.owned):
                del self.owned[queue]
                offset = await self._user.give_queue(queue)
                if offset is not None:
                    self._offsets[queue] = offset
                self._user.lose_queue(queue)
        finally:  # also if `leave` was cancelled
            try:
                self._save()
            finally:
                self._unlock()

    async def abandon(self) -> None:
        """Stop immediately, as `Membership.abandon` does."""
        await cancelled(self._tasks)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def rebalance_fault(self) -> str:
        """Return a text that says why the member has not assigned itself all queues yet."""
        topics = [topic for topic in self._subscriptions if self._cluster.route(topic) is None]
        return (
            f"no name server knows the topic {', '.join(topics)}" if topics else "a broker of its queues is unreachable"
        )

    @property
    def is_rebalanced(self) -> bool:
        """True once the member has started to read all queues in its routes."""
        return self._rebalanced.is_set()

    async def rebalanced(self) -> None:
        await self._rebalanced.wait()

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        self._offsets |= offsets
        self._save()
        return set(offsets)

    async def commit_position(self, queue: Queue, offset: int, *, sought: bool) -> None:
        await self.commit({queue: offset})

    def _described(self) -> Heartbeat:
        consumer = ConsumerData(
            self._group,
            "CONSUME_PASSIVELY",
            "BROADCASTING",
            subscriptions=tuple(self._subscriptions.values()),
            own_version=own_version(),
        )
        return Heartbeat(self.client_id, (consumer,))

    async def _keep_up(self) -> None:
        """Send heartbeats, which also reconnect to brokers, and start to read queues that appear in the routes."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            self._wake.clear()
            missing = await self._take_queues()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(missing=missing)):
                    await self._wake.wait()
            is_due = missing or self._wake.is_set() or self._heartbeats.are_failing
            if is_due or loop.time() - beat_s >= self._limits.heartbeat_interval_s:
                await self._heartbeats.beat()
                beat_s = loop.time()

    def _pause_s(self, *, missing: bool) -> float:
        if missing:
            return self._limits.missing_route_interval_s
        return self._limits.heartbeat_retry_s if self._heartbeats.are_failing else self._limits.rebalance_interval_s

    async def _take_queues(self) -> bool:
        """Start to read every queue. Return True if some queues cannot be read yet."""
        missing = False
        for topic in self._subscriptions:
            try:
                route = self._cluster.route(topic) or await self._cluster.find_route(topic)
                queues = subscribe_queues(topic, route) if route is not None else []
                missing = missing or not queues
                for queue in queues:
                    if queue not in self.owned:
                        offset = await self._start_offset(queue)
                        self.owned[queue] = Lease(0)
                        self._user.take_queue(queue, offset, self.owned[queue])
            except (RocketletError, BodyError) as error:
                broadcast_log.info("queues_not_taken", topic=topic, reason=str(error))
                missing = True
        if not missing:
            self._rebalanced.set()
        return missing

    async def _start_offset(self, queue: Queue) -> int:
        kept = self._offsets.get(queue)
        if kept is not None:
            return kept
        connection = await self._cluster.broker(queue.broker_name)
        if self._start == "last" and not self._late.was_there(queue.broker_name):
            return await self._late.begin_offset(connection, queue)
        is_as_said = queue in self._at_joining or isinstance(self._start, int)
        return await begin_offset(connection, queue, self._start if is_as_said else "first")

    def _save(self) -> None:
        """Write the offsets to the file. Raises ConfigError."""
        if self._file is None:
            return
        value = [[*queue, offset] for queue, offset in self._offsets.items()]
        temporary = self._file.with_name(f"{self._file.name}.new")  # unique to this offsets file
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(orjson.dumps(value))
            os.replace(temporary, self._file)
        except OSError as error:
            raise ConfigError(
                f"offsets_file: {self._file} cannot be written: {error}; messages since its last write are redelivered"
            ) from error


def _locked(path: Path | None) -> BinaryIO | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return locked_beside(path)
    except BlockingIOError:
        raise ConfigError(f"offsets_file: {path} is in use by another member; give each member its own file") from None
    except OSError as error:
        raise ConfigError(f"offsets_file: {path} cannot be written: {error}") from None


def _load(path: Path | str | None) -> dict[Queue, int]:
    if path is None:
        return {}
    try:
        kept = read_file(path, MAX_OFFSETS_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"offsets_file: {path} cannot be read: {error}") from None
    try:
        return dict(map(_entry, _checked_list(orjson.loads(kept))))
    except ValueError as error:
        raise ConfigError(
            f"offsets_file: {path} is damaged ({error}); restore it, or delete it to begin at `start`"
        ) from None


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {value!r:.100}")
    return value


def _entry(item: Any) -> tuple[Queue, int]:
    match item:
        case [str(topic), str(broker), int(number), int(offset)] if 0 <= number <= MAX_INT and 0 <= offset <= MAX_LONG:
            return Queue(topic, broker, number), offset
    raise ValueError(f"expected [topic, broker, queue id, offset], got {item!r:.100}")
