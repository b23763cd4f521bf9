"""Topics that some members of a group pull and others pop: each queue has one kind of reader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Protocol

import structlog

from ...protocol.allocation import AVG, COMPUTED, STICKY, subscribe_queues
from ...protocol.bodies import ConsumerData, Route
from ...protocol.group_bodies import POP, SHARED_OWNER, LockRequest
from ...protocol.names import Queue, Subscription
from ..config import POOL_LEAVE_S, POOL_POLL_INTERVAL_S
from ..groups.group import ConsumerGroup, ConsumerGroups
from ..groups.leases import Locks
from ..groups.members import POPS, History, Member
from ..groups.rates import RouteFinder
from ..groups.reading import shares_queues
from ..groups.settings import RequestModes
from ..messages.topics import Topics
from ..runtime.adoption import Adoption
from ..runtime.clock import SingleTimer
from ..runtime.runtime import Runtime
from ..sessions.events import ClientRequest, SessionEvent
from ..sessions.reports import Reports
from ..sessions.session import Session
from ..store.journals import LeaseKey
from .deliveries import DeliveryState
from .pool import QueuePool, is_queue_pool
from .pools import Pools
from .requests import PopClient, PopRequest

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# Topics that some members of a group pull and others pop. The clients that pop count as one owner. Their pool leases
# queues like a Rocketlet member, so no member pulls a queue of the pool, and no client pops a queue of a member.
#
#     apart      only clients pop: the pool has all queues, and leases none
#     divided    members pull, too: each client that pops is a member of the group, as a `PopMember` if it sends no heartbeat
#                of its own, and the pool has the queues that are allocated to these
#
# No further message is read from a queue that leaves the pool. It is free once all its popped messages are finished. If that
# takes longer than POOL_LEAVE_S, no message is redelivered any more, and the queue is free once none of them is in flight,
# except delayed ones, which go to members that pull. Unfinished messages before a finished one are then sent to the retry
# topic if a member reads it. In a group that is ordered by its settings, or without such a member, no message is sent back:
# the finished ones stay in the journal, and the broker leaves them out of what members pull (`FinishedAhead`).
#
# The pool acquires a queue like a Rocketlet member: after the owner has unlocked it or its lease has ended, or after a
# foreign reader is drained of it.


class PoolOwner(Protocol):
    """The part of `Pops` that serves the receives of pools and ends the deliveries of their queues."""

    def release_queue(self, pool: QueuePool, queue_id: int, *, is_lost: bool) -> bool:
        """End the deliveries of a queue. Returns False if unfinished messages are sent back first."""

    def serve(self, pool: QueuePool) -> None:
        """Serve the receives that wait, because the pool may have a message or a further queue."""

    def yield_pool(self, pool: QueuePool) -> None:
        """End a pool with its deliveries. The group continues from its offsets."""


class Divided:
    """A group of which at least one pool is divided.

    Attributes:
        owner: the session of the pools' leases.
        members: the clients that pop and are no members by a heartbeat of their own.
        is_checking: True while a check runs.
        is_stale: True if another check must follow.
    """

    def __init__(self, division: Division, name: str) -> None:
        self.name = name
        self._division = division
        self.owner = PopMember(self)
        self.pools: dict[QueuePool, None] = {}
        self.members: dict[PopClient, PopMember] = {}
        self.is_checking = False
        self.is_stale = False
        self.timer = SingleTimer(division.clock, self.check_soon)

    def check_soon(self) -> None:
        """Check soon, because the group has changed, or a queue is free."""
        self._division.check_soon(self)

    def queues(self, broker_name: str) -> list[Queue]:
        """Return the queues that this group's pools lease, including queues that a pool is releasing."""
        return [Queue(pool.topic, broker_name, queue_id) for pool in self.pools for queue_id in pool.queues.epochs]


class Division:
    """The division of topics.

    Args:
        routes: finds the queues of a topic on all brokers, among which the members of a group are divided.

    Attributes:
        owner: serves and ends the pools; `Pops` sets it.
    """

    owner: PoolOwner

    def __init__(
        self,
        runtime: Runtime,
        topics: Topics,
        groups: ConsumerGroups,
        locks: Locks,
        modes: RequestModes,
        history: History,
        pools: Pools,
        routes: RouteFinder,
    ) -> None:
        self._limits = runtime.limits
        self._broker_name = groups.broker_name
        self._topics = topics
        self._groups, self._locks = groups, locks
        self._modes = modes
        self._reports, self._history = Reports(runtime.clock), history
        self._routes = routes
        self._tasks, self.clock = runtime.tasks, runtime.clock
        self._pools = pools
        self._divided: dict[ConsumerGroup, Divided] = {}
        self._is_stopped = False

    def adopt(self, adoption: Adoption) -> None:
        """Renew the leases that the pools had in the last run, and divide these pools."""
        adoption.each("leases of pools", self._locks.leases_of(SHARED_OWNER).items(), self._adopt)

    def _adopt(self, lease: tuple[LeaseKey, int]) -> None:
        (name, topic, queue_id), epoch = lease
        if self._pools.is_bound(name, topic):  # since the lease was granted
            self._locks.end(name, topic, queue_id)
            return
        pool = self._pools.find_queues(name, topic) or self._pools.make(name, topic)
        divided = self._divided_of(pool)
        if pool.queues.owned is None:
            pool.queues.divide()
        pool.queues.epochs[queue_id] = epoch
        if self._lease(divided, [Queue(topic, self._broker_name, queue_id)]):
            pool.queues.own(queue_id)

    def stop(self) -> None:
        """Stop the timers. Leases last over a restart."""
        self._is_stopped = True
        for divided in self._divided.values():
            divided.timer.cancel()

    def _divided_of(self, pool: QueuePool) -> Divided:
        """Return the divided group of a pool, made if this is its first pool."""
        divided = self._divided.get(pool.of)
        if divided is None:
            divided = self._divided[pool.of] = Divided(self, pool.group)
        divided.pools[pool] = None
        return divided

    # Checks and events

    def admit(self, request: PopRequest, pool: QueuePool | None, *, is_used: bool) -> str | None:
        """Return why a client may not pop a topic, or None if it may. A topic that members pull is divided from now on,
        and the client counts as a member in it, up to `max_members`.

        Args:
            pool: the topic's pool, if there is one.
            is_used: True if the pool is in use.
        """
        name, topic = request.group, request.topic
        # The client may have pulled this topic until now, so it no longer counts as the reader of the topic's queues
        if not is_used and request.session is not None and request.count > 0:
            self._locks.release_topic(request.session, name, topic)
        if pool is None or pool.queues.owned is None:
            if is_used:
                return None
            fault = self._reader_fault(name, topic)
            if fault is not None:
                self._report_conflict(name, topic, fault)
                return fault
            if not self._is_pulled(name, topic, request.client):
                return None
            pool = self._pools.get_or_make(request)
            pool.queues.divide()
        self._add_member(self._divided_of(pool), pool, request)
        return None

    def observe_pull(self, session: Session, group: ConsumerGroup, topic: str) -> None:
        """Record that a client pulls a topic that clients pop. The topic is divided from now on, if the client is a member
        that can share. A pool that is not used any more ends. Other clients, which are refused, are reported."""
        pool = self._pools.find_queues(group.name, topic)
        if pool is None:
            return
        member = group.members.get(session)
        if pool.queues.owned is None and not pool.is_used(self.clock.monotonic_s()):
            self.owner.yield_pool(pool)
        elif member is not None and shares_queues(member):
            if pool.queues.owned is None and topic in member.subscriptions:
                member.has_pulled = True
                self.members_changed(group)
        elif pool.queues.owned is None or member is not None:
            reason = f"{member.client_id if member is not None else session.peer} pulls it, and shares no queues"
            self._report_conflict(group.name, topic, reason)

    def members_changed(self, group: ConsumerGroup) -> None:
        """Divide the pools of topics that members pull now, before any member is notified of the change, and check the
        pools that are divided."""
        if not group.pools:
            return
        now_s = self.clock.monotonic_s()
        for pool in self._pools.of_group(group.name):
            if (
                is_queue_pool(pool)
                and pool.queues.owned is None
                and pool.is_used(now_s)
                and self._is_pulled(group.name, pool.topic)
            ):
                self._divide(pool)
        divided = self._divided.get(group)
        if divided is not None:
            self._replace_members(divided, group)
            self.check_soon(divided)

    def progressed(self, pool: QueuePool) -> None:
        """Release the leaving queues of a pool that are free now."""
        divided = self._divided.get(pool.of)
        if divided is not None and pool in divided.pools:
            self._release_free(divided, pool)

    def check(self) -> None:
        """Renew the leases of divided pools and the memberships of their clients, and remove clients that are gone."""
        for divided in list(self._divided.values()):
            leased = divided.queues(self._broker_name)
            if leased:
                self._lease(divided, leased)
            for queue in divided.queues(self._broker_name):  # the journal of pops has what the last run left
                self._locks.clear_former_end(self._groups.queue(divided.name, queue.topic, queue.queue_id))
            self._groups.record_contact(divided.members.values())
        self.clients_gone()

    def clients_gone(self) -> None:
        """Remove members whose clients have left their pools. Do nothing once the broker is stopped, because the clients may
        come back after a restart."""
        for divided in [] if self._is_stopped else list(self._divided.values()):
            for pool in list(divided.pools):
                for client in [item for item in pool.queues.member_ids if item not in pool.clients]:
                    del pool.queues.member_ids[client]
                    self._remove_member(divided, pool, client)
            self.check_soon(divided)

    def _report_conflict(self, group: str, topic: str, reason: str) -> None:
        """Report a group in which clients pop a topic, and others read it without sharing its queues with other members, at
        most once in REPORT_AGAIN_S for each topic. The kind of client that comes second is refused."""
        if self._reports.is_due(f"{group}:", topic):
            hint = "consumers that broadcast, or that assign queues to themselves, need a group of their own"
            log.warning("group_pulls_and_pops", group=group, topic=topic, reason=reason, hint=hint)
            self._history.add(group, "refused", "", topic=topic, fault=reason)

    # Members that pull

    def _is_pulled(self, name: str, topic: str, but: PopClient | None = None) -> bool:
        """Return True if a queue of the topic is leased, or members pull the topic or will. but: a client that is about to
        pop, and therefore does not count."""
        group = self._groups.get(name)
        pool = self._pools.find(name, topic)
        popping = {
            client.session for client in (*(pool.clients if pool is not None else ()), but) if client is not None
        }
        if group is None:
            return False
        if any(
            group.queue(topic, queue_id).owner.holder is not None for queue_id in range(self._topics.queues_of(topic))
        ):
            return True
        return any(
            self._pulls(member, topic, popping) for member in group.members.values() if topic in member.subscriptions
        )

    def _pulls(self, member: Member, topic: str, popping: Container[Session | None]) -> bool:
        """Return True if a member pulls, or is expected to. A foreign member that has not pulled is expected to, unless the
        request mode of the group and topic is POP, or its connection pops."""
        if not shares_queues(member):
            return False
        if member.data.strategy or member.has_pulled:
            return True
        is_to_pop = self._modes.of(member.data.group, topic).mode == POP
        return not is_to_pop and member.session not in popping

    def _reader_fault(self, name: str, topic: str) -> str | None:
        """Return why clients may not pop, if a queue is read by a member that shares it with no other; None otherwise.
        Clients that pop would get the messages that this member gets."""
        group = self._groups.get(name)
        for queue_id in range(self._topics.queues_of(topic)):
            reader = group.queue(topic, queue_id).reader if group is not None else None
            member = group.members.get(reader) if group is not None and reader is not None else None
            if member is not None and not shares_queues(member):
                return (
                    f"{member.client_id} pulls {topic}:{queue_id} in the group {name}, and shares it with no other member; "
                    "clients that pop need a group of their own"
                )
        return None

    # Clients that pop, as members

    def _add_member(self, divided: Divided, pool: QueuePool, request: PopRequest) -> None:
        client = request.client
        member = divided.members.get(client)
        if client in pool.queues.member_ids:
            if member is not None:
                member.pay_by(request.session)
            return
        group = self._groups.get(divided.name)
        members = group.members if group is not None else {}
        own = members.get(client.session) if client.session is not None else None
        pool.queues.member_ids[client] = own.listed_id if own is not None else f"~{client.client_id}"
        if member is None and (own is not None or len(members) >= self._limits.max_members):
            self.check_soon(divided)
            return
        if member is None:
            member = divided.members[client] = PopMember(divided)
        member.pay_by(request.session)
        member.subscriptions[pool] = request.wanted
        self._heartbeat(divided, client, member)

    def _replace_members(self, divided: Divided, group: ConsumerGroup) -> None:
        """End the memberships of clients that pop and send a heartbeat of their own now."""
        for client, member in list(divided.members.items()):
            own = group.members.get(client.session) if client.session is not None else None
            if own is not None and client in divided.members:
                del divided.members[client]
                for pool in member.subscriptions:
                    pool.queues.member_ids[client] = own.listed_id
                self._groups.leave(member, divided.name)

    def _heartbeat(self, divided: Divided, client: PopClient, member: PopMember) -> None:
        data = member.data(divided.name, self._strategy(self._groups.get(divided.name)))
        self._groups.heartbeat(member, client.client_id, data, 0, 0)
        self.check_soon(divided)

    def _remove_member(self, divided: Divided, pool: QueuePool, client: PopClient) -> None:
        member = divided.members.get(client)
        if member is None or member.subscriptions.pop(pool, None) is None:
            return
        if member.subscriptions:
            self._heartbeat(divided, client, member)
        else:
            del divided.members[client]
            self._groups.leave(member, divided.name)

    @staticmethod
    def _strategy(group: ConsumerGroup | None) -> str:
        """Return the strategy of the members that pull, if all of them have the same one that this broker can compute;
        else AVG."""
        members = group.members.values() if group is not None else ()
        names = {member.data.strategy for member in members if not member.pops} - {None}
        name = names.pop() if len(names) == 1 else None
        return name if name in (*COMPUTED, STICKY.name) else AVG.name

    # Dividing

    def _divide(self, pool: QueuePool) -> None:
        """Divide a pool, because members start to pull its topic. The pool keeps all queues that it can lease until the
        members have their shares."""
        divided = self._divided_of(pool)
        pool.queues.divide()
        queues = [Queue(pool.topic, self._broker_name, number) for number in range(self._topics.queues_of(pool.topic))]
        for queue in self._lease(divided, queues, has_had=True):
            pool.queues.own(queue.queue_id)
        for client, item in pool.clients.items():
            wanted, session = item.wanted, item.session
            self._add_member(
                divided, pool, PopRequest(pool.group, pool.topic, client, 0, 0, subscription=wanted, session=session)
            )
        self.owner.serve(pool)
        self.check_soon(divided)

    def _lease(self, divided: Divided, queues: Iterable[Queue], *, has_had: bool = False) -> list[Queue]:
        """Lock queues, or renew their leases. Returns those that are leased. A pool loses a queue whose lease has ended."""
        wanted = tuple(queues)
        pools = {pool.topic: pool for pool in divided.pools}
        epochs = {
            queue: pools[queue.topic].queues.epochs[queue.queue_id]
            for queue in wanted
            if queue.queue_id in pools[queue.topic].queues.epochs
        }
        request = LockRequest(SHARED_OWNER, divided.name, wanted, handover=True, epochs=epochs)
        got = self._locks.lock(request, divided.owner, has_had=has_had)
        for queue, epoch in got.items():
            pools[queue.topic].queues.epochs[queue.queue_id] = epoch
        for queue in epochs.keys() - got.keys():  # the lease has ended although the pool did not release the queue
            self._lose(pools[queue.topic], queue.queue_id)
        return list(got)

    def _lose(self, pool: QueuePool, queue_id: int) -> None:
        log.error("shared_queue_lost", group=pool.group, topic=pool.topic, queue=queue_id)
        del pool.queues.epochs[queue_id]
        if pool.queues.owned is not None:
            self.owner.release_queue(pool, queue_id, is_lost=True)
            pool.queues.disown(queue_id)

    def check_soon(self, divided: Divided) -> None:
        divided.is_stale = True
        if not divided.is_checking and not self._is_stopped:
            divided.is_checking = True
            self._tasks.spawn(self._check(divided))

    async def _check(self, divided: Divided) -> None:
        """Allocate the queues of each pool, and repeat that until nothing has changed meanwhile."""
        try:
            while divided.is_stale and not self._is_stopped:
                divided.is_stale = False
                for pool in list(divided.pools):
                    self._share_out(divided, pool, await self._routes.find_route(pool.topic))
        finally:
            divided.is_checking = False

    def _share_out(self, divided: Divided, pool: QueuePool, route: Route | None) -> None:
        if pool not in divided.pools or pool.queues.owned is None:  # the division has ended while the route was queried
            return
        group = self._groups.get(divided.name)
        wanted = self._wanted(group, pool, route) if group is not None else set()
        strategy = self._strategy(group)
        for client, member in divided.members.items():
            known = group.members.get(member) if group is not None else None
            if known is not None and known.data.strategy != strategy:
                self._heartbeat(divided, client, member)
        now_s = self.clock.monotonic_s()
        for queue_id in pool.queues.owned - wanted:
            pool.queues.start_leaving(queue_id, now_s)
        for queue_id in wanted & pool.queues.leaving.keys():
            pool.queues.stop_leaving(queue_id)
        missing = [Queue(pool.topic, self._broker_name, queue_id) for queue_id in sorted(wanted - pool.queues.owned)]
        got = self._lease(divided, missing) if missing else []
        for queue in got:
            pool.queues.own(queue.queue_id)
        if got or wanted:
            self.owner.serve(pool)
        self._release_free(divided, pool)
        is_moving = pool.queues.owned is not None and (pool.queues.leaving or wanted - pool.queues.owned)
        if is_moving and not divided.timer.is_set and not self._is_stopped:
            divided.timer.set(POOL_POLL_INTERVAL_S)

    def _wanted(self, group: ConsumerGroup, pool: QueuePool, route: Route | None) -> set[int]:
        """Return the queues on this broker that are allocated to clients that pop."""
        topic = pool.topic
        popping = set(pool.queues.member_ids.values())
        popping |= {item.listed_id for item in group.members.values() if item.pops and topic in item.subscriptions}
        if STICKY.name in group.strategies() and len(group.strategies()) == 1:
            shares = [group.share(client_id, topic) for client_id in popping]
            allocated = [queue for share in shares if share is not None for queue in share.of(topic)]
        else:
            strategy = COMPUTED.get(self._strategy(group), AVG)
            order, queues = list(group.order(topic)), self._queues(group, topic, route)
            allocated = [queue for client_id in popping for queue in strategy.allocate(client_id, queues, order)]
        return {queue.queue_id for queue in allocated if queue.broker_name == self._broker_name}

    def _queues(self, group: ConsumerGroup, topic: str, route: Route | None) -> list[Queue]:
        """Return the queues as members see them, including those of a broker that is away if some members have seen it."""
        queues = subscribe_queues(topic, route) if route is not None else []
        known = {queue.broker_name for queue in queues}
        seen = {name: count for name, count in group.seen_queues(topic).of_brokers.items() if name not in known}
        if route is None:
            seen.setdefault(self._broker_name, self._topics.queues_of(topic))
        return sorted(queues + [Queue(topic, name, number) for name, count in seen.items() for number in range(count)])

    # Handing over

    def _release_free(self, divided: Divided, pool: QueuePool) -> None:
        """Release the leaving queues that are free (`_is_free`). End the pool if no client pops the topic any more and
        the pool has no queue left; end the division if no member pulls any more and the pool has all queues."""
        queues = pool.queues
        if queues.owned is None:
            return
        now_s = self.clock.monotonic_s()
        free = [
            queue_id for queue_id, since_s in queues.leaving.items() if self._is_free(pool, queue_id, since_s, now_s)
        ]
        done = [queue_id for queue_id in free if self.owner.release_queue(pool, queue_id, is_lost=False)]
        for queue_id in done:
            queues.disown(queue_id)
        self._unlease(divided, pool, done)
        if not queues.member_ids and not pool.waiting and not queues.owned:
            self._end(divided, pool)
            self.owner.yield_pool(pool)
        elif (
            len(queues.owned) == self._topics.queues_of(pool.topic)
            and not queues.leaving
            and not self._others_pull(pool)
        ):
            self._rejoin(divided, pool)

    def _is_free(self, pool: QueuePool, queue_id: int, since_s: float, now_s: float) -> bool:
        """Return True if a leaving queue can go to another member, by the rules at the top of this file. After POOL_LEAVE_S,
        also stop redelivering its messages."""
        deliveries = pool.queues.deliveries.get(queue_id)
        if deliveries is None or not deliveries.unfinished:
            return True
        if now_s - since_s < POOL_LEAVE_S:
            return False
        if deliveries.gives_again:
            deliveries.gives_again = False
            pool.queues.rotate(deliveries)
        return not any(
            item.state is DeliveryState.IN_FLIGHT and not item.is_delayed for item in deliveries.unfinished.values()
        )

    def _others_pull(self, pool: QueuePool) -> bool:
        group = self._groups.get(pool.group)
        members = group.members.values() if group is not None else ()
        popping = {client.session for client in pool.clients}
        return any(self._pulls(item, pool.topic, popping) for item in members if pool.topic in item.subscriptions)

    def _unlease(self, divided: Divided, pool: QueuePool, queue_ids: Iterable[int]) -> None:
        epochs = {
            Queue(pool.topic, self._broker_name, queue_id): pool.queues.epochs.pop(queue_id)
            for queue_id in list(queue_ids)
            if queue_id in pool.queues.epochs
        }
        if epochs:
            request = LockRequest(SHARED_OWNER, divided.name, tuple(epochs), handover=True, epochs=epochs)
            self._locks.unlock(request, divided.owner)

    def _rejoin(self, divided: Divided, pool: QueuePool) -> None:
        """Let the pool serve all queues without leases again, because no member pulls any more."""
        pool.queues.owned = None
        self._unlease(divided, pool, pool.queues.epochs)
        self._end(divided, pool)
        pool.queues.make_ready()
        self.owner.serve(pool)

    def _end(self, divided: Divided, pool: QueuePool) -> None:
        del divided.pools[pool]
        clients = list(pool.queues.member_ids)
        pool.queues.member_ids.clear()
        for client in clients:
            self._remove_member(divided, pool, client)
        if not divided.pools and self._divided.get(pool.of) is divided:
            divided.timer.cancel()
            del self._divided[pool.of]

    def pool_deleted(self, pool: QueuePool) -> None:
        """End the division of a pool that is deleted with its group or topic."""
        divided = self._divided.get(pool.of)
        if divided is not None and pool.queues.owned is not None:
            self._unlease(divided, pool, pool.queues.epochs)
            self._end(divided, pool)


# ------------------------------------------------------------------------------
# Clients that pop, as members of a group in which others pull, so that these leave them their share. Nothing is sent to a
# `PopMember`. Its events make `Division` check the group again.


_numbers = itertools.count(1)


class PopMember:
    """The session by which a client that pops is a member of its group, or by which a group's pools hold their leases."""

    held_pulls = 0
    peer = ""
    born_host = b""
    address = ""
    reached = ""
    was_closed_by_client = True
    is_external = False
    is_closed = False
    authentication: object = None

    def __init__(self, divided: Divided) -> None:
        self.number = next(_numbers)
        self.subscriptions: dict[QueuePool, Subscription] = {}
        self._divided = divided
        self._session: Session | None = None
        self._charged_bytes = 0

    def send_event(self, event: SessionEvent) -> None:
        self._divided.check_soon()

    def send_request(self, number: int, request: ClientRequest) -> None:
        pass

    def charge(self, size: int) -> None:
        self._charged_bytes += size
        if self._session is not None:
            self._session.charge(size)

    def pay_by(self, session: Session | None) -> None:
        """Charge this session of the client for the member from now on; None charges nobody."""
        if session is not self._session:
            if self._session is not None:
                self._session.charge(-self._charged_bytes)
            self._session = session
            if session is not None:
                session.charge(self._charged_bytes)

    def is_news(self, event: str) -> bool:
        return True

    def when_read(self, action: Callable[[], None]) -> None:
        action()

    def on_lost(self, action: Callable[[Session], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def data(self, group: str, strategy: str) -> ConsumerData:
        return ConsumerData(group, POPS, subscriptions=tuple(self.subscriptions.values()), strategy=strategy)
