"""Topics that some members of a group pull and others pop: each queue has one kind of reader."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial

import structlog

from ...protocol.allocation import AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, STICKY, Strategy, subscribe_queues
from ...protocol.bodies import ConsumerData, Route
from ...protocol.group_bodies import POP, SHARED_OWNER, LockRequest
from ...protocol.names import Queue, Subscription
from ..config import POOL_LEAVE_S, POOL_LOOK_S, REPORT_AGAIN_S
from ..groups.group import ConsumerGroup, ConsumerGroups
from ..groups.leases import Locks
from ..groups.members import POPS, Member
from ..groups.offsets import Watch
from ..groups.settings import History, RequestModes
from ..runtime import Runtime, Timer
from ..sessions import Event, Question, Session
from .deliveries import DeliveryState, PopClient, PopRequest, QueueDeliveries
from .pool import Pool, Pools

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# Topics that some members of a group pull and others pop. The clients that pop are one owner: their pool leases
# queues, as one of our members does, and nobody pulls a queue of the pool, or pops another.
#
#     apart      only clients pop: the pool has all queues, and nothing is leased
#     divided    others pull: each client that pops has a seat among the members, and what falls to the seats is the
#     pool's
#
# A queue leaves the pool when nothing of it is in flight. Until then nothing new of it is given, but what comes back
# within 30 s is given again, because one offset cannot say what was acknowledged behind it. After that the pool waits
# only for what was popped, until its time is over; messages that a client has asked for at a later time come at once
# to members that pull. Messages left before an acknowledged one go to them by the retry topic, so that the offset can
# be behind both. In a group in order nothing is sent back: there the queue stays with the clients that pop until they
# have finished everything before an acknowledged message. A queue comes to the pool as to one of our members: its
# former reader unlocks it, or is drained of it.


_STRATEGIES: dict[str, Strategy] = {item.name: item for item in (AVG, AVG_BY_CIRCLE, CONSISTENT_HASH)}


@dataclass(slots=True, eq=False)
class Divided:
    """A group of which a topic is divided. owner: the session of the pool's leases. popping: the clients that pop, by
    topic: ids of members, which are seats' or the clients' own."""

    name: str
    owner: Seat
    seats: dict[PopClient, Seat] = field(default_factory=dict)
    popping: dict[str, dict[PopClient, str]] = field(default_factory=dict)
    epochs: dict[Queue, int] = field(default_factory=dict)
    is_looking: bool = False
    is_stale: bool = False
    timer: Timer | None = None


class Division:
    """`let_go(pool, queue_id, is_lost)`: nothing more is given of a queue, and its offset is said. False: not yet; it is
    asked again when something is finished. is_lost: at once, whatever is left. `gained(pool)`: there may be something to
    pop. `drop(pool)`: nobody pops any more."""

    def __init__(
        self,
        runtime: Runtime,
        broker_name: str,
        groups: ConsumerGroups,
        locks: Locks,
        watch: Watch,
        modes: RequestModes,
        mixed: Mixed,
        pools: Pools,
        *,
        find_route: Callable[[str], Awaitable[Route | None]],
        queues_of: Callable[[str], int],
        let_go: Callable[[Pool, int, bool], bool],
        gained: Callable[[Pool], None],
        drop: Callable[[Pool], None],
    ) -> None:
        self._limits = runtime.limits
        self._broker_name = broker_name
        self._groups, self._locks, self._watch = groups, locks, watch
        self._modes, self._mixed = modes, mixed
        self._find_route, self._queues_of = find_route, queues_of
        self._tasks, self._clock = runtime.tasks, runtime.clock
        self._pools = pools
        self._let_go = let_go
        self._gained = gained
        self._drop = drop
        self._divided: dict[str, Divided] = {}
        self._is_stopped = False

    def adopt(self) -> None:
        """The pool keeps the queues that it owned in an earlier run."""
        for (name, topic, queue_id), epoch in self._locks.leases_of(SHARED_OWNER).items():
            divided, queue = self._of(name), Queue(topic, self._broker_name, queue_id)
            pool = self._pools.find(name, topic) or self._pools.make(name, topic)
            if pool.owned is None:
                pool.divide()
            divided.epochs[queue] = epoch
            divided.popping.setdefault(topic, {})
            if self._lease(divided, [queue]):
                pool.own(queue_id)

    def stop(self) -> None:
        """Leases last over a restart."""
        self._is_stopped = True
        for divided in self._divided.values():
            if divided.timer is not None:
                divided.timer.cancel()

    def _of(self, name: str) -> Divided:
        if name not in self._divided:
            self._divided[name] = Divided(name, Seat(partial(self._told, name)))
        return self._divided[name]

    def _told(self, name: str) -> None:
        """The group has changed, or a queue is free."""
        divided = self._divided.get(name)
        if divided is not None:
            self._look_soon(divided)

    # Questions and events

    def admit(self, request: PopRequest) -> str | None:
        """Why a client may not pop a topic; None if it may. A topic that others pull is divided from now on."""
        name, topic = request.group, request.topic
        pool, now_s = self._pools.find(name, topic), self._clock.monotonic_s()
        if pool is None or pool.owned is None:
            if pool is not None and pool.is_used(now_s):
                return None
            fault = self._fault(name, topic)
            if fault is not None:
                self._mixed.note(name, topic, fault)
                return fault
            if not self._is_pulled(name, topic, request.client):
                return None
            pool = self._pools.get(request)
            pool.divide()
        self._seat(self._of(name), pool, request)
        return None

    def pull_fault(self, session: Session, name: str, topic: str) -> str | None:
        """Why a client may not pull a topic; None if it may, as far as pops go. A topic that others pop is divided from now
        on, if the member that pulls can share. Pops of long ago are forgotten."""
        pool = self._pools.find(name, topic)
        if pool is None:
            return None
        group = self._groups.get(name)
        member = group.members.get(session) if group is not None else None
        if pool.owned is None and not pool.is_used(self._clock.monotonic_s()):
            self._drop(pool)
        elif group is not None and member is not None and _shares(member):
            if pool.owned is None and topic in member.subscriptions:
                member.has_pulled = True
                self.changed(group)
            return None if pool.owned is not None else _fault_of(name, topic)
        elif pool.owned is None or member is not None:
            fault = _fault_of(name, topic)
            self._mixed.note(name, topic, fault)
            return fault
        return None

    def changed(self, group: ConsumerGroup) -> None:
        """Members or their topics have changed. Before anybody else hears of it, the pool leases its queues."""
        if not self._pools.all:
            return
        now_s = self._clock.monotonic_s()
        for pool in self._pools.of_group(group.name):
            if pool.owned is None and pool.is_used(now_s) and self._is_pulled(group.name, pool.topic):
                self._divide(pool)
        self._told(group.name)

    def progressed(self, touched: Iterable[QueueDeliveries]) -> None:
        """Something of these queues is finished, or its time is over. Those that leave may be free now."""
        for deliveries in touched:
            divided = self._divided.get(deliveries.group)
            pool = self._pools.find(deliveries.group, deliveries.queue.topic) if divided is not None else None
            if divided is not None and pool is not None and pool.leaving:
                self._settle(divided, pool)

    def look(self) -> None:
        """At intervals: renews leases, and finds clients that have gone and queues that have come."""
        for divided in list(self._divided.values()):
            if divided.epochs:
                self._lease(divided, list(divided.epochs))
            for queue in divided.epochs:  # the pool knows by its own journal what was lost
                self._locks.forget_former_end(divided.name, queue.topic, queue.queue_id)
            self._groups.heard_from(divided.seats.values())
        self.clients_gone()

    def clients_gone(self) -> None:
        """Some clients may not pop any more. Those that a stopped broker has lost may come back after a restart."""
        for divided in [] if self._is_stopped else list(self._divided.values()):
            for topic, popping in list(divided.popping.items()):
                pool = self._pools.find(divided.name, topic)
                for client in [item for item in popping if pool is None or item not in pool.clients]:
                    del popping[client]
                    self._leave_seat(divided, topic, client)
            self._look_soon(divided)

    # Members that pull

    def _is_pulled(self, name: str, topic: str, but: PopClient | None = None) -> bool:
        """Whether members pull the topic, or will. but: a client that pops."""
        group = self._groups.get(name)
        pool = self._pools.find(name, topic)
        popping = {
            client.session for client in (*(pool.clients if pool is not None else ()), but) if client is not None
        }
        if any(self._locks.is_locked(name, topic, queue_id) for queue_id in range(self._queues_of(topic))):
            return True
        return group is not None and any(
            self._pulls(member, topic, popping) for member in group.members.values() if topic in member.subscriptions
        )

    def _pulls(self, member: Member, topic: str, popping: Container[Session | None]) -> bool:
        """A remoting client that pops is a member, too. Before it does, nobody knows, where members are to pop."""
        if not _shares(member):
            return False
        if member.data.strategy or member.has_pulled:
            return True
        is_to_pop = self._modes.of(member.data.group, topic).mode == POP
        return not is_to_pop and member.connection not in popping

    def _fault(self, name: str, topic: str) -> str | None:
        """A reader that shares with nobody: there every one who pops would get the same."""
        group = self._groups.get(name)
        for queue_id in range(self._queues_of(topic)):
            reader = self._watch.reader(name, topic, queue_id)
            member = group.members.get(reader) if group is not None and reader is not None else None
            if member is not None and not _shares(member):
                return (
                    f"{member.client_id} pulls {topic}:{queue_id} in the group {name}, and shares it with nobody; "
                    "clients that pop need a group of their own"
                )
        return None

    # Seats

    def _seat(self, divided: Divided, pool: Pool, request: PopRequest) -> None:
        popping = divided.popping.setdefault(pool.topic, {})
        client = request.client
        if client in popping:
            if (seat := divided.seats.get(client)) is not None:
                seat.pay_by(request.session)
            return
        group = self._groups.get(divided.name)
        members = group.members if group is not None else {}
        member = members.get(client.session) if client.session is not None else None
        popping[client] = member.listed_id if member is not None else f"~{client.client_id}"
        is_full = client not in divided.seats and len(members) >= self._limits.max_members
        if is_full or (member is not None and client not in divided.seats):
            self._look_soon(divided)
            return
        seat = divided.seats.get(client)
        if seat is None:
            seat = divided.seats[client] = Seat(partial(self._told, divided.name))
        seat.pay_by(request.session)
        seat.subscriptions[pool.topic] = request.wanted
        self._heartbeat(divided, client, seat)

    def _heartbeat(self, divided: Divided, client: PopClient, seat: Seat) -> None:
        data = seat.data(divided.name, self._strategy(self._groups.get(divided.name)))
        self._groups.heartbeat(seat, client.client_id, data, 0, 0)
        self._look_soon(divided)

    def _leave_seat(self, divided: Divided, topic: str, client: PopClient) -> None:
        seat = divided.seats.get(client)
        if seat is None or seat.subscriptions.pop(topic, None) is None:
            return
        if seat.subscriptions:
            self._heartbeat(divided, client, seat)
        else:
            del divided.seats[client]
            self._groups.leave(seat, divided.name)

    @staticmethod
    def _strategy(group: ConsumerGroup | None) -> str:
        """As our members allocate, where they agree."""
        members = group.members.values() if group is not None else ()
        names = {member.data.strategy for member in members if not member.pops} - {None}
        name = names.pop() if len(names) == 1 else None
        return name if name in (*_STRATEGIES, STICKY.name) else AVG.name

    # Dividing

    def _divide(self, pool: Pool) -> None:
        """Others begin to pull what only this pool has had. It keeps all of it until they have their shares."""
        divided = self._of(pool.group)
        divided.popping.setdefault(pool.topic, {})  # those who pop may have gone
        pool.divide()
        queues = [Queue(pool.topic, self._broker_name, number) for number in range(self._queues_of(pool.topic))]
        for queue in self._lease(divided, queues, has_had=True):
            pool.own(queue.queue_id)
        for client, popper in pool.clients.items():
            wanted, session = popper.wanted, popper.session
            self._seat(
                divided, pool, PopRequest(pool.group, pool.topic, client, 0, 0, subscription=wanted, session=session)
            )
        self._gained(pool)
        self._look_soon(divided)

    def _lease(self, divided: Divided, queues: Iterable[Queue], *, has_had: bool = False) -> list[Queue]:
        wanted = tuple(queues)
        epochs = {queue: divided.epochs[queue] for queue in wanted if queue in divided.epochs}
        request = LockRequest(SHARED_OWNER, divided.name, wanted, handover=True, epochs=epochs)
        got = self._locks.lock(request, divided.owner, has_had=has_had)
        divided.epochs.update(got)
        for queue in epochs.keys() - got.keys():  # somebody has ended it
            self._lost(divided, queue)
        return list(got)

    def _lost(self, divided: Divided, queue: Queue) -> None:
        log.error("shared_queue_lost", group=divided.name, topic=queue.topic, queue=queue.queue_id)
        del divided.epochs[queue]
        pool = self._pools.find(divided.name, queue.topic)
        if pool is not None and pool.owned is not None:
            self._let_go(pool, queue.queue_id, True)
            pool.disown(queue.queue_id)

    def _look_soon(self, divided: Divided) -> None:
        divided.is_stale = True
        if not divided.is_looking and not self._is_stopped:
            divided.is_looking = True
            self._tasks.spawn(self._looking(divided))

    async def _looking(self, divided: Divided) -> None:
        try:
            while divided.is_stale and not self._is_stopped:
                divided.is_stale = False
                for topic in list(divided.popping):
                    self._share_out(divided, topic, await self._find_route(topic))
        finally:
            divided.is_looking = False

    def _share_out(self, divided: Divided, topic: str, route: Route | None) -> None:
        pool = self._pools.find(divided.name, topic)
        if pool is None or pool.owned is None:
            divided.popping.pop(topic, None)
            return
        group = self._groups.get(divided.name)
        wanted = self._wanted(divided, group, topic, route) if group is not None else set()
        strategy = self._strategy(group)
        for client, seat in divided.seats.items():
            member = group.members.get(seat) if group is not None else None
            if member is not None and member.data.strategy != strategy:
                self._heartbeat(divided, client, seat)
        now_s = self._clock.monotonic_s()
        for queue_id in pool.owned - wanted:
            pool.leave(queue_id, now_s)
        for queue_id in wanted & pool.leaving.keys():
            pool.stay(queue_id)
        missing = [Queue(topic, self._broker_name, queue_id) for queue_id in sorted(wanted - pool.owned)]
        got = self._lease(divided, missing) if missing else []
        for queue in got:
            pool.own(queue.queue_id)
        if got or wanted:
            self._gained(pool)
        self._settle(divided, pool)
        if pool.owned is not None and (pool.leaving or wanted - pool.owned):
            self._look_later(divided)

    def _look_later(self, divided: Divided) -> None:
        if divided.timer is None and not self._is_stopped:
            divided.timer = self._clock.call_later(POOL_LOOK_S, self._look_again, divided)

    def _look_again(self, divided: Divided) -> None:
        divided.timer = None
        self._look_soon(divided)

    def _wanted(self, divided: Divided, group: ConsumerGroup, topic: str, route: Route | None) -> set[int]:
        """The queues here that fall to clients that pop."""
        popping = set(divided.popping[topic].values())
        popping |= {item.listed_id for item in group.members.values() if item.pops and topic in item.subscriptions}
        if STICKY.name in group.strategies() and len(group.strategies()) == 1:
            shares = [group.share(client_id, topic) for client_id in popping]
            mine = [queue for share in shares if share is not None for queue in share.of(topic)]
        else:
            strategy = _STRATEGIES.get(self._strategy(group), AVG)
            order, queues = list(group.order(topic)), self._queues(group, topic, route)
            mine = [queue for client_id in popping for queue in strategy.allocate(client_id, queues, order)]
        return {queue.queue_id for queue in mine if queue.broker_name == self._broker_name}

    def _queues(self, group: ConsumerGroup, topic: str, route: Route | None) -> list[Queue]:
        """As members see them: those of a broker that is away are theirs, too, if some have seen them."""
        queues = subscribe_queues(topic, route) if route is not None else []
        known = {queue.broker_name for queue in queues}
        seen = {name: count for name, count in group.seen_queues(topic).items() if name not in known}
        if route is None:
            seen.setdefault(self._broker_name, self._queues_of(topic))
        return sorted(queues + [Queue(topic, name, number) for name, count in seen.items() for number in range(count)])

    # Handing over

    def _settle(self, divided: Divided, pool: Pool) -> None:
        """Lets go of the queues that leave and of which nothing is in flight."""
        if pool.owned is None:
            return
        now_s = self._clock.monotonic_s()
        free = [queue_id for queue_id, since_s in pool.leaving.items() if self._is_free(pool, queue_id, since_s, now_s)]
        done = [queue_id for queue_id in free if self._let_go(pool, queue_id, False)]
        for queue_id in done:
            pool.disown(queue_id)
        self._unlease(divided, [Queue(pool.topic, self._broker_name, queue_id) for queue_id in done])
        if not divided.popping.get(pool.topic) and not pool.waits and not pool.owned:
            self._end(divided, pool)
            self._drop(pool)
        elif len(pool.owned) == self._queues_of(pool.topic) and not pool.leaving and not self._others_pull(pool):
            self._rejoin(divided, pool)

    def _is_free(self, pool: Pool, queue_id: int, since_s: float, now_s: float) -> bool:
        """Whether a queue that leaves can be another's. See above."""
        deliveries = pool.queues.get(queue_id)
        if deliveries is None or not deliveries.unfinished:
            return True
        if now_s - since_s < POOL_LEAVE_S:
            return False
        is_needed = deliveries.is_in_order and bool(pool.clients) and bool(deliveries.before_finished())
        if is_needed and not deliveries.is_late:
            deliveries.is_late = True
            log.warning(
                "queue_stays_for_its_order",
                group=pool.group, topic=pool.topic, queue=queue_id, offset=deliveries.committed,
                hint="members that pull get the queue when clients that pop have finished this message",
            )  # fmt: skip
        if deliveries.gives_again is not is_needed:
            deliveries.gives_again = is_needed
            pool.note(queue_id)
            self._gained(pool)
        return not is_needed and not any(
            item.state is DeliveryState.IN_FLIGHT and not item.is_delayed for item in deliveries.unfinished.values()
        )

    def _others_pull(self, pool: Pool) -> bool:
        group = self._groups.get(pool.group)
        members = group.members.values() if group is not None else ()
        popping = {client.session for client in pool.clients}
        return any(self._pulls(item, pool.topic, popping) for item in members if pool.topic in item.subscriptions)

    def _unlease(self, divided: Divided, queues: list[Queue]) -> None:
        epochs = {queue: divided.epochs.pop(queue) for queue in queues if queue in divided.epochs}
        if epochs:
            request = LockRequest(SHARED_OWNER, divided.name, tuple(epochs), handover=True, epochs=epochs)
            self._locks.unlock(request, divided.owner)

    def _rejoin(self, divided: Divided, pool: Pool) -> None:
        """Nobody pulls any more: the pool has all, as before."""
        pool.rejoin()
        self._unlease(divided, [queue for queue in divided.epochs if queue.topic == pool.topic])
        self._end(divided, pool)
        self._pools.make_ready(pool)
        self._gained(pool)

    def _end(self, divided: Divided, pool: Pool) -> None:
        for client in list(divided.popping.pop(pool.topic, ())):
            self._leave_seat(divided, pool.topic, client)
        if not divided.popping and self._divided.get(divided.name) is divided:
            if divided.timer is not None:
                divided.timer.cancel()
            del self._divided[divided.name]

    def forget(self, pool: Pool) -> None:
        """Its group or topic is gone, and the pool with it."""
        divided = self._divided.get(pool.group)
        if divided is not None and pool.owned is not None:
            self._unlease(divided, [queue for queue in divided.epochs if queue.topic == pool.topic])
            self._end(divided, pool)


def _shares(member: Member) -> bool:
    """Whether a member is one of those that hand queues over."""
    is_ours = bool(member.data.strategy) and member.data.message_model == "CLUSTERING"
    return not member.pops and (is_ours or member.is_foreign)


def _fault_of(name: str, topic: str) -> str:
    return f"clients of the group {name} pop {topic}; members that share no queues need a group of their own"


# ------------------------------------------------------------------------------
# Clients that pop, as members of a group in which others pull: each has a seat among the members, so that the others
# leave it its share. A seat says nothing and is asked nothing; its client has a door of its own.


_numbers = itertools.count(1)


class Seat:
    """A session without a client at its other end. told: hears that its group has changed."""

    held_pulls = 0
    peer = ""
    born_host = b""
    address = ""
    reached = ""
    is_left = True
    is_external = False
    is_closed = False
    known: object = None

    def __init__(self, told: Callable[[], object]) -> None:
        self.number = next(_numbers)
        self.subscriptions: dict[str, Subscription] = {}  # by topic: what its client pops
        self._told = told
        self._session: Session | None = None
        self._charged_bytes = 0

    def tell(self, event: Event) -> None:
        self._told()

    def ask(self, number: int, question: Question) -> None:
        pass

    def charge(self, size: int) -> None:
        self._charged_bytes += size
        if self._session is not None:
            self._session.charge(size)

    def pay_by(self, session: Session | None) -> None:
        """The session of its client, which is charged for it."""
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


# ------------------------------------------------------------------------------
# Groups in which clients pop a topic, and others read it that share its queues with nobody, or the other way round:
# the second kind is refused. The log and the group's history say that every ten minutes for as long as it goes on.


class Mixed:
    def __init__(self, runtime: Runtime, history: History) -> None:
        self._limits = runtime.limits
        self._clock = runtime.clock
        self._history = history
        self._said_s: dict[tuple[str, str], float] = {}

    def note(self, group: str, topic: str, reason: str) -> None:
        key, now_s = (group, topic), self._clock.monotonic_s()
        if now_s - self._said_s.get(key, float("-inf")) < REPORT_AGAIN_S:
            return
        self._said_s.pop(key, None)
        self._said_s[key] = now_s
        if len(self._said_s) > self._limits.max_mixed:
            del self._said_s[next(iter(self._said_s))]
        hint = "consumers that broadcast, or that assign queues to themselves, need a group of their own"
        log.warning("group_pulls_and_pops", group=group, topic=topic, reason=reason, hint=hint)
        self._history.add(group, "refused", "", topic=topic, fault=reason)
