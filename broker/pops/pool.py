"""Pop pools: the queues of a topic that a group pops, their deliveries, and the receives that wait for messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import structlog

from ...protocol.bodies import DEFAULT_PRIORITY_FACTOR, SLICE, Work
from ...protocol.names import Subscription
from ..config import DELIVERIES_BYTES, LEVEL_WAIT_S, POOL_BYTES, POOL_IDLE_S, POPPER_BYTES, Limits
from ..groups.group import ConsumerGroup, FinishedAhead
from ..groups.offsets import Offsets
from ..messages.topics import Topics
from ..runtime.clock import Clock, Timer
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from ..sessions.shares import AddressShares
from ..store.index import ConsumeQueue
from ..store.store import Store
from .deliveries import DeliveriesOf, Delivery, DeliveryState, PopPart, TopicMessages
from .requests import PopClient, PopRequest, PopResult

log = structlog.get_logger("rocketlet.pops")

# ------------------------------------------------------------------------------
# Receives. Each protocol server has a subclass that encodes the result.


QueueDeliveries: TypeAlias = DeliveriesOf["Pool"]

_arrivals = count()
Ready = TypeVar("Ready")


class Receive(ABC):
    """A receive of a client, from its request to its result.

    Attributes:
        pool: the pool in which it waits or has waited; None if it never waited for a message.
        arrival: increases with each receive.
        is_over: True if it has its result or was cancelled.
        queue_id: the queue for whose messages it waits; None if it is any queue.
        address: the address of its client; empty without a session.
        charged_bytes: the bytes that are charged to its session while it waits for a message.
    """

    __slots__ = ("address", "arrival", "charged_bytes", "is_over", "pool", "queue_id", "request", "timer")

    def __init__(self, request: PopRequest) -> None:
        self.request = request
        self.arrival = next(_arrivals)
        self.is_over = False
        self.pool: Pool | None = None
        self.queue_id = request.queue_id if request.is_strict else None
        self.address = request.session.address if request.session is not None else ""
        self.timer: Timer | None = None
        self.charged_bytes = 0

    @abstractmethod
    def respond(self, result: PopResult) -> None:
        """Send the result. If the client does not take it, pass the messages to `Pops.put_back`."""

    def cancel(self) -> None:
        """Stop waiting, without a response. Does nothing after the result."""
        if self.pool is not None and not self.is_over:
            self.pool.remove(self)
        self.is_over = True


# ------------------------------------------------------------------------------
# One pool: the state of a topic in a group that pops it.


class PoolClient:
    """A client of one pool: its last request, and the session that is charged for this object, unless that is gone."""

    __slots__ = ("_charged_bytes", "asked_s", "of", "pool", "session", "wanted")

    def __init__(self, pool: Pool, of: PoppingClient) -> None:
        self.pool = pool
        self.of = of
        self.asked_s = 0.0
        self.wanted = Subscription(pool.topic)
        self.session: Session | None = None
        self._charged_bytes = 0

    def record_request(self, wanted: Subscription, session: Session | None) -> None:
        if session is not self.session:
            self.pay(0)
            self.session = session
        self.wanted = wanted
        self.pay(POPPER_BYTES + len(self.of.client.client_id) + len(wanted.expression))

    def pay(self, size: int) -> None:
        if self.session is not None and size != self._charged_bytes:
            self.session.charge(size - self._charged_bytes)
        self._charged_bytes = size


def firsts(ready: OrderedDict[Ready, None]) -> Iterator[Ready]:
    """Yield the first entry, up to once for each entry that there is now. The caller moves each to the end, or removes it."""
    for _ in range(len(ready)):
        if not ready:
            return
        yield next(iter(ready))


class PoolQueues(Protocol):
    """The queues of a pool: which of them a receive tries next, and which receive is served next.

    Attributes:
        is_divided: True if members pull some of the topic's queues.
        is_pinned: True if the pool stays although no client receives now.
        is_in_order: True if messages wait for unfinished ones of their message group.
    """

    @property
    def is_divided(self) -> bool: ...

    @property
    def is_pinned(self) -> bool: ...

    @property
    def is_in_order(self) -> bool: ...

    def opened(self) -> Collection[QueueDeliveries]:
        """Return the deliveries of the queues that a receive has tried."""

    def remove(self, deliveries: QueueDeliveries) -> None:
        """Take a queue out of the pool."""

    def allows(self, request: PopRequest) -> int:
        """Return how many messages a receive may pop."""

    def tried(self, request: PopRequest) -> Iterator[tuple[QueueDeliveries, PopPart]]:
        """Yield the deliveries of the ready queues that a receive tries, in this order, and which messages it takes of them.
        The caller calls `rotate` for each. Raises LimitExceeded if the group has too many offsets."""

    def has_some(self, request: PopRequest) -> bool:
        """Return True if there is something to pop. Messages that a filter would skip count, too."""

    def delivered(self, client: PopClient, deliveries: Iterable[Delivery]) -> None:
        """Record what a client has got."""

    def rotate(self, deliveries: QueueDeliveries) -> None:
        """Make a queue that was just tried the last of the ready ones, or take it out of them."""

    def refresh(self, deliveries: QueueDeliveries) -> None:
        """Find whether a queue is ready in which a delivery was finished or released."""

    def make_ready(self) -> None:
        """Find which queues may have a message."""

    def held(self, receive: Receive) -> None:
        """Record a receive that waits."""

    def ended(self, receive: Receive) -> None:
        """Record the end of a receive that waited."""

    def next_receive(self) -> Receive | None:
        """Return the receive that waits longest among those for which a queue may have a message; None without one."""

    def rest(self) -> int:
        """Return how many messages of the queues were not read yet."""


Queues = TypeVar("Queues", bound=PoolQueues, covariant=True)


class PoolOf(Generic[Queues]):
    """The pool of one group and topic: its clients, and the receives that wait. Its queues are those of the topic, or lite
    topics of a parent topic.

    Attributes:
        clients: the clients that pop, up to `max_members` of them. One of their sessions is charged for the pool.
        all_clients: the clients of all pools.
        counts: how many of its unfinished deliveries there are of each state.
        waiting: the receives that wait.
        used_s: the time of the last receive.
        is_partial: True if the last receive stopped before the end of a queue because its filter matched none of the
            messages that were read, so that this queue has more messages to read.
        is_in_order: True if a client has asked for the messages in order.
    """

    def __init__(
        self, all_clients: PoppingClients, of: ConsumerGroup, topic: str, make: Callable[[PoolOf[Queues]], Queues]
    ) -> None:
        self.all_clients = all_clients
        self.of = of
        self.group = of.name
        self.topic = topic
        self.clients: dict[PopClient, PoolClient] = {}
        self.waiting: dict[Receive, None] = {}
        self.counts = dict.fromkeys(DeliveryState, 0)
        self.used_s = float("-inf")
        self.is_partial = False
        self.is_in_order = False
        self._payer: Session | None = None
        self._paid_bytes = 0
        self.queues = make(self)

    @property
    def unfinished(self) -> int:
        """How many of its deliveries are not finished."""
        return sum(self.counts.values())

    @property
    def is_divided(self) -> bool:
        return self.queues.is_divided

    def is_used(self, now_s: float) -> bool:
        """Return True if a receive waits, a message is unfinished, or the last receive was within POOL_IDLE_S."""
        is_fresh = now_s - self.used_s < POOL_IDLE_S
        return is_fresh or bool(self.waiting) or self.unfinished > 0

    def stop_extending(self, delivery: Delivery) -> None:
        self.all_clients.stop_extending(delivery)

    def pay(self) -> None:
        """Charge one client's session for the pool and its queues, if a client has a session."""
        size = POOL_BYTES + len(self.group) + len(self.topic) + DELIVERIES_BYTES * len(self.queues.opened())
        if self._payer is None:
            sessions = (client.session for client in self.clients.values())
            self._payer = next((session for session in sessions if session is not None), None)
        if self._payer is not None and size != self._paid_bytes:
            self._payer.charge(size - self._paid_bytes)
            self._paid_bytes = size

    def stop_paying(self, session: Session | None) -> None:
        """Stop charging a session whose client is gone, and charge another client's session, if there is one."""
        if session is not None and self._payer is session:
            session.charge(-self._paid_bytes)
            self._payer, self._paid_bytes = None, 0
            self.pay()

    # Receives that wait

    def hold(self, receive: Receive) -> None:
        """Let a receive wait. Its session, if it has one, is charged for it, and counts it as a held pull."""
        receive.pool = self
        self.waiting[receive] = None
        self.all_clients.receives.acquire(receive.address)
        self.all_clients.obtain(receive.request.client).receives[receive] = None
        if (session := receive.request.session) is not None:
            receive.charged_bytes = receive.request.kept_bytes
            session.held_pulls += 1
            session.charge(receive.charged_bytes)
        self.queues.held(receive)

    def remove(self, receive: Receive) -> None:
        """End the wait of a receive, which has its result or is cancelled."""
        receive.is_over = True
        if receive.timer is not None:
            receive.timer.cancel()
        del self.waiting[receive]
        self.all_clients.receives.release(receive.address)
        client = self.all_clients.all[receive.request.client]
        del client.receives[receive]
        if not (client.receives or client.pools):
            self.all_clients.remove_if_idle(client)
        if (session := receive.request.session) is not None:
            session.held_pulls -= 1
            session.charge(-receive.charged_bytes)
        self.queues.ended(receive)

    def close(self, deliveries: QueueDeliveries) -> None:
        """Take a queue out of the pool."""
        deliveries.end()
        self.queues.remove(deliveries)

    def refresh(self, deliveries: QueueDeliveries) -> None:
        """Find whether a queue is ready in which a delivery was finished or released. If the pool has no clients, `unused`
        checks it."""
        self.queues.refresh(deliveries)
        if not self.clients:
            self.all_clients.note_unused(self)


class PoppedQueues:
    """The queues of a topic in a pool.

    Attributes:
        deliveries: the deliveries by queue id, for queues that a receive has tried.
        ready: the queues that may have a message, in the order in which they were served or became ready.
        owned: the queues that the pool may serve; None if they are all of the topic (`division`).
        leaving: owned queues that other members are to get, and since when.
        epochs: the epochs of the pool's leases.
        member_ids: the member id of each client in a divided pool.
    """

    is_pinned = False

    def __init__(self, source: QueueSource, pool: QueuePool) -> None:
        self._source = source
        self.pool = pool
        self.deliveries: dict[int, QueueDeliveries] = {}
        self._waiting: dict[int | None, OrderedDict[Receive, None]] = {}  # by the queue that they wait for
        self.ready: OrderedDict[int, None] = OrderedDict()
        self._retried_s = 0.0  # since when receives have passed over messages to redeliver
        self._other_percent = 0  # increases with each receive; at 100, one of them begins with another level
        # the level that has waited longest, and when a receive first passed it over
        self._passed: tuple[int, float] | None = None
        self.owned: set[int] | None = None
        self.leaving: dict[int, float] = {}
        self.epochs: dict[int, int] = {}
        self.member_ids: dict[PopClient, str] = {}

    @property
    def is_divided(self) -> bool:
        return self.owned is not None

    @property
    def is_in_order(self) -> bool:
        settings = self.pool.of.settings
        return self.pool.is_in_order or (settings is not None and settings.consume_orderly)

    def opened(self) -> Collection[QueueDeliveries]:
        return self.deliveries.values()

    def remove(self, deliveries: QueueDeliveries) -> None:
        del self.deliveries[deliveries.queue.queue_id]

    def allows(self, request: PopRequest) -> int:
        return request.count

    def delivered(self, client: PopClient, deliveries: Iterable[Delivery]) -> None:
        """Do nothing, because clients may have any number of messages in flight."""

    def held(self, receive: Receive) -> None:
        self._waiting.setdefault(receive.queue_id, OrderedDict())[receive] = None

    def ended(self, receive: Receive) -> None:
        waiting = self._waiting[receive.queue_id]
        del waiting[receive]
        if not waiting:
            del self._waiting[receive.queue_id]

    def next_receive(self) -> Receive | None:
        found: Receive | None = None
        if self.ready and (waiting := self._waiting.get(None)):
            found = next(iter(waiting))
        if len(self._waiting) > (found is not None):  # receives of single queues, which are rare
            for queue_id in self.ready:
                first = next(iter(self._waiting.get(queue_id, ())), None)
                if first is not None and (found is None or first.arrival < found.arrival):
                    found = first
        return found

    # Readiness

    def tried(self, request: PopRequest) -> Iterator[tuple[QueueDeliveries, PopPart]]:
        topic = self._source.topics.get(self.pool.topic)
        if topic is not None and topic.has_priorities and not self.is_in_order and not request.is_strict:
            for level, part in self._levels(request, retried_first=topic.retried_first) if self.ready else ():
                yield self._open(level), part
            return
        if request.queue_id is not None and request.queue_id in self.ready:
            yield self._open(request.queue_id), PopPart.ALL
        for queue_id in firsts(self.ready) if not request.is_strict else ():
            yield self._open(queue_id), PopPart.ALL

    def _open(self, queue_id: int) -> QueueDeliveries:
        return self.deliveries.get(queue_id) or self._source.open_queue(self.pool, queue_id)

    def has_some(self, request: PopRequest) -> bool:
        for deliveries, _ in self.tried(request):
            self.rotate(deliveries)
            if deliveries.queue.queue_id in self.ready:
                return True
        return False

    def _levels(self, request: PopRequest, *, retried_first: bool) -> list[tuple[int, PopPart]]:
        """Return the ready levels in the order in which a receive tries them: from the highest to the lowest, and then
        their messages to redeliver, as at Apache's broker; with `retried_first` each level together with these. What receives
        have passed over for LEVEL_WAIT_S comes first, so that it does not starve: the level that has waited longest, and the
        messages to redeliver. The former also comes first in 100 - `priority_factor` of 100 receives."""
        ordered = sorted(self.ready, reverse=True)
        levels, retried = [(level, PopPart.ALL) for level in ordered], False
        now_s, longest = self.pool.all_clients.now_s(), next(iter(self.ready))
        if not retried_first:
            opened = [(level, self.deliveries.get(level)) for level in ordered]
            # also levels without messages, which are then no longer ready
            levels = [(level, PopPart.NEW) for level, of in opened if of is None or of.has_new or not of.has_retried]
            again = [(level, PopPart.RETRIED) for level, of in opened if of is not None and of.has_retried]
            retried = bool(again)
            is_due = retried and now_s - self._retried_s >= LEVEL_WAIT_S
            levels = [*again, *levels] if is_due else [*levels, *again]
        if request.count <= 0:  # a receive that only checks whether there is a message
            return levels
        if not retried or levels[0][1] is PopPart.RETRIED:
            self._retried_s = now_s
        settings = self.pool.of.settings
        self._other_percent += 100 - (DEFAULT_PRIORITY_FACTOR if settings is None else settings.priority_factor)
        if self._passed is None or self._passed[0] != longest:
            self._passed = (longest, now_s)
        if self._other_percent >= 100 or now_s - self._passed[1] >= LEVEL_WAIT_S:
            self._other_percent %= 100
            levels.insert(0, (longest, PopPart.ALL))
        return levels

    def rotate(self, deliveries: QueueDeliveries) -> None:
        queue_id = deliveries.queue.queue_id
        if self._passed is not None and self._passed[0] == queue_id:
            self._passed = None
        if not deliveries.is_ended and deliveries.is_ready and (self.owned is None or self.serves(queue_id)):
            self.ready[queue_id] = None
            self.ready.move_to_end(queue_id)
        else:
            self.ready.pop(queue_id, None)

    def offer(self, queue_id: int) -> None:
        """Make a queue ready that may have a message, if the pool serves it."""
        if queue_id not in self.ready and (self.owned is None or self.serves(queue_id)):
            self.ready[queue_id] = None

    def refresh(self, deliveries: QueueDeliveries) -> None:
        if deliveries.queue.queue_id not in self.ready:
            self.rotate(deliveries)

    def make_ready(self) -> None:
        for queue_id in self._source.unread(self.pool):
            if queue_id in self.deliveries:
                self.rotate(self.deliveries[queue_id])
            else:
                self.offer(queue_id)

    def rest(self) -> int:
        found = 0
        for deliveries in self.deliveries.values():
            found += max(deliveries.queue.next - deliveries.next, 0)
        return found

    # Queues that members pull

    def serves(self, queue_id: int) -> bool:
        """Return True if messages of the queue may be popped. A queue that leaves before any of its messages was popped
        serves none."""
        return self.owned is None or (
            queue_id in self.owned and (queue_id not in self.leaving or queue_id in self.deliveries)
        )

    def divide(self) -> None:
        """Serve only owned queues from now on, because members pull, too."""
        self.owned = set()
        self.ready.clear()

    def own(self, queue_id: int) -> None:
        assert self.owned is not None
        self.owned.add(queue_id)
        self.offer(queue_id)

    def disown(self, queue_id: int) -> None:
        assert self.owned is not None
        self.owned.discard(queue_id)
        self.leaving.pop(queue_id, None)
        self.ready.pop(queue_id, None)

    def start_leaving(self, queue_id: int, now_s: float) -> None:
        """Stop reading further messages of an owned queue that a member is to get."""
        if queue_id not in self.leaving:
            self.leaving[queue_id] = now_s
            if queue_id in self.deliveries:
                self.deliveries[queue_id].gives_new = False
                self.rotate(self.deliveries[queue_id])
            else:
                self.ready.pop(queue_id, None)

    def stop_leaving(self, queue_id: int) -> None:
        """Keep a queue that was to leave."""
        del self.leaving[queue_id]
        if queue_id in self.deliveries:
            self.deliveries[queue_id].gives_new = self.deliveries[queue_id].gives_again = True
        self.offer(queue_id)


Pool: TypeAlias = PoolOf[PoolQueues]
QueuePool: TypeAlias = PoolOf[PoppedQueues]


def is_queue_pool(pool: Pool | None) -> TypeGuard[QueuePool]:
    """Return True if a pool has the queues of a topic."""
    return pool is not None and isinstance(pool.queues, PoppedQueues)


# ------------------------------------------------------------------------------
# The clients of all pools, found by client and session.


class PoppingClient:
    """The state of a client in all pools. It is removed when the four dictionaries are empty.

    Attributes:
        pools: the client in each pool that it pops.
        lite_pools: the pools of lite topics that it has joined.
        receives: its receives that wait.
        extended: its deliveries that the broker extends, while the client has contact and up to MAX_RENEWED_S.
        contact_s: when the client was last in contact.
    """

    __slots__ = ("client", "contact_s", "extended", "lite_pools", "pools", "receives")

    def __init__(self, client: PopClient, now_s: float) -> None:
        self.client = client
        self.contact_s = now_s
        self.pools: dict[PoolClient, None] = {}
        self.lite_pools: dict[Pool, None] = {}
        self.receives: dict[Receive, None] = {}
        self.extended: dict[Delivery, QueueDeliveries] = {}


class PoppingClients:
    """The clients of all pools, and the pools that may have none.

    Attributes:
        all: clients with a pool, subscriptions to lite topics, a receive that waits, or a message that is extended.
        receives: how many receives wait, by the address of their client.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._limits = runtime.limits
        self._clock: Clock = runtime.clock
        self.all: dict[PopClient, PoppingClient] = {}
        # clients, the one with the oldest last request first
        self._by_request: OrderedDict[PoolClient, None] = OrderedDict()
        self._of_session: dict[Session, dict[PoolClient, None]] = {}
        self._extending: dict[PoppingClient, None] = {}
        # pools that may have no clients, in the order in which these left
        self._unused: OrderedDict[Pool, None] = OrderedDict()
        self.receives = AddressShares(runtime.limits.max_waiting_receives)

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def obtain(self, client: PopClient) -> PoppingClient:
        found = self.all.get(client)
        if found is None:
            found = self.all[client] = PoppingClient(client, self.now_s())
        return found

    def remove_if_idle(self, client: PoppingClient) -> None:
        if not (client.pools or client.receives or client.extended or client.lite_pools):
            del self.all[client.client]

    def record_request(self, pool: Pool, request: PopRequest, now_s: float) -> bool:
        """Record a client of a pool; of a new client of a pool that has `max_members` clients, only its contact.
        Returns True if its session must call `session_lost` when it is gone."""
        pool.used_s = now_s
        found = pool.clients.get(request.client)
        if found is None:
            if len(pool.clients) >= self._limits.max_members:
                self.record_contact(request.client)
                return False
            found = pool.clients[request.client] = PoolClient(pool, self.obtain(request.client))
            found.of.pools[found] = None
            self._by_request[found] = None
            self._unused.pop(pool, None)
        found.asked_s = found.of.contact_s = now_s
        self._by_request.move_to_end(found)
        wanted, session, before = request.wanted, request.session, found.session
        if before is session and found.wanted == wanted:
            return False
        found.record_request(wanted, session)
        pool.pay()
        if before is session or session is None:
            return False
        self._leave_session(found, before)
        is_new = session not in self._of_session
        self._of_session.setdefault(session, {})[found] = None
        return is_new

    def _leave_session(self, client: PoolClient, session: Session | None) -> None:
        if session is None:
            return
        clients = self._of_session.get(session)
        if clients is not None and client in clients:
            del clients[client]
            if not clients:
                del self._of_session[session]
        client.pool.stop_paying(session)

    def session_lost(self, session: Session) -> Work[None]:
        """Remove the clients of a session that is gone, some at a time. Clients of divided pools stay until
        `remove_client` or `remove_idle_clients`, so that a gRPC client keeps its share while it reconnects."""
        for number, client in enumerate(self._of_session.pop(session, ()), 1):
            if client.session is session:
                client.session = None
                client.pool.stop_paying(session)
                if not client.pool.is_divided:
                    self._remove(client)
            if number % SLICE == 0:
                yield
        yield

    def remove_client(self, client: PopClient) -> None:
        """Remove a client from all pools."""
        found = self.all.get(client)
        for item in list(found.pools) if found is not None else ():
            self._remove(item)

    def is_silent(self, client: PoppingClient) -> bool:
        """Return True if a client has had no contact for `heartbeat_limit_s`, so that it is gone."""
        return self.now_s() - client.contact_s >= self._limits.heartbeat_limit_s

    def remove_idle_clients(self) -> None:
        """Remove clients from the pools in which they made no receive for `heartbeat_limit_s`."""
        before_s = self.now_s() - self._limits.heartbeat_limit_s
        while self._by_request and (client := next(iter(self._by_request))).asked_s < before_s:
            self._remove(client)

    def _remove(self, client: PoolClient) -> None:
        pool = client.pool
        if pool.clients.get(client.of.client) is not client:  # removed before
            return
        del pool.clients[client.of.client]
        del self._by_request[client]
        del client.of.pools[client]
        self.remove_if_idle(client.of)
        client.pay(0)
        self._leave_session(client, client.session)
        if not pool.clients:
            self._unused[pool] = None

    # Visibility timeouts that the broker extends

    def extend(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        """Extend a delivery while its client has contact, for up to `MAX_RENEWED_S` after the pop."""
        assert delivery.client is not None, "only a client's delivery is extended"
        client = self.obtain(delivery.client)
        if not client.extended:
            client.contact_s = self.now_s()
            self._extending[client] = None
        client.extended[delivery] = deliveries
        delivery.renewals = 0

    def stop_extending(self, delivery: Delivery) -> None:
        """Leave the deadline of a delivery as it is from now on."""
        delivery.renewals = -1
        client = self.all.get(delivery.client) if delivery.client is not None else None
        if client is not None and client.extended.pop(delivery, None) is not None and not client.extended:
            del self._extending[client]
            self.remove_if_idle(client)

    def record_contact(self, client: PopClient) -> None:
        """Record that a client has called or sent a heartbeat, if it has state here."""
        found = self.all.get(client)
        if found is not None:
            found.contact_s = self.now_s()

    def silent_clients(self) -> Iterator[PopClient]:
        """Yield clients with extended deliveries that have had no contact for too long, each when its turn comes."""
        for item in list(self._extending):
            if item in self._extending and self.is_silent(item):
                yield item.client

    # Pools without clients

    def note_unused(self, pool: Pool) -> None:
        """Let `unused` check a pool, which may have no clients any more."""
        self._unused[pool] = None

    def unused(self, now_s: float) -> Iterator[Pool]:
        """Yield pools without clients and waiting receives, each once, except divided and pinned ones: those idle for
        POOL_IDLE_S, and others while there are too many."""
        for pool in list(self._unused):
            if pool.clients or pool.waiting or pool.queues.is_pinned:
                del self._unused[pool]
            elif not pool.is_divided and (self.is_crowded or now_s - pool.used_s >= POOL_IDLE_S):
                del self._unused[pool]
                yield pool

    @property
    def is_crowded(self) -> bool:
        """True if there are more pools without clients than the limit."""
        return len(self._unused) > self._limits.max_unused_pools

    def pool_removed(self, pool: Pool) -> None:
        for client in list(pool.clients.values()):
            self._remove(client)
        self._unused.pop(pool, None)


# ------------------------------------------------------------------------------
# Where pools of topic queues begin.


class QueueSource:
    """The messages and the committed offsets that pools of topic queues continue from.

    Attributes:
        last_number: the last number of a queue in the journal.
    """

    def __init__(self, topics: Topics, store: Store, offsets: Offsets, limits: Limits) -> None:
        self.store = store
        self.limits = limits
        self.topics, self._offsets = topics, offsets
        self.last_number = 0

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def starts(self, request: PopRequest) -> Iterator[tuple[ConsumeQueue, int]]:
        """Yield the topic's queues that have an index, with the offset where the group continues: its own; for a group new to
        the topic the end if `from_end` is set; else the first message if retention has not deleted it; else the first or
        the last stored message, by `from_first`. A queue that is new to the group starts at its first message."""
        group, topic = request.group, request.topic
        is_known = self._offsets.knows(group, topic)
        for queue_id in range(self.topics.queues_of(topic)):
            queue = self.store.queues.get((topic, queue_id))
            if queue is None:
                continue
            offset = self._offsets.get(group, topic, queue_id)
            if offset is None:
                offset = self._start(request, queue, is_known=is_known)
            yield queue, offset

    def _start(self, request: PopRequest, queue: ConsumeQueue, *, is_known: bool) -> int:
        if request.from_end and not is_known:
            return queue.next
        is_first = is_known or request.from_first or queue.begin == 0
        return queue.begin if is_first else max(queue.next - 1, queue.begin)

    def open_queue(self, pool: QueuePool, queue_id: int) -> QueueDeliveries:
        """Return the new deliveries of a queue that the pool has not read yet."""
        queue = self.store.queue(pool.topic, queue_id)
        start = self._offsets.get(pool.group, pool.topic, queue_id)
        if start is None:  # the queue is newer than the pool
            start = queue.begin
            self._offsets.put(pool.group, pool.topic, queue_id, start)
        found = self.deliveries(pool, queue, start)
        ahead = self._offsets.take_ahead(pool.of, pool.topic, queue_id)
        if ahead is not None:
            found.resume(ahead)
        return found

    def hand_over(self, pool: QueuePool, queue_id: int, ahead: FinishedAhead | None) -> None:
        """Let members that pull a queue continue at its committed offset, without the messages after it that are finished."""
        if ahead is not None:
            self._offsets.put_ahead(pool.of, pool.topic, queue_id, ahead)
        self._offsets.fence(pool.of, (pool.topic, queue_id))

    def deliveries(self, pool: QueuePool, queue: ConsumeQueue, start: int) -> QueueDeliveries:
        messages = TopicMessages(pool.of, queue, self.store, self._offsets)
        found: QueueDeliveries = DeliveriesOf(self.next_number(), pool, messages, start, self.limits)
        pool.queues.deliveries[queue.queue_id] = found
        pool.pay()
        return found

    def unread(self, pool: QueuePool) -> Iterator[int]:
        """Yield the queues of which the pool has deliveries, and those with messages after the group's offset."""
        for queue_id in range(self.topics.queues_of(pool.topic)):
            queue = self.store.queues.get((pool.topic, queue_id))
            offset = self._offsets.get(pool.group, pool.topic, queue_id) or 0
            if queue_id in pool.queues.deliveries or (queue is not None and offset < queue.next):
                yield queue_id
