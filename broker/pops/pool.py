"""Pop pools: the queues of a topic that a group pops, and the receives that wait for messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

import structlog

from ...protocol.bodies import SLICE, Work
from ...protocol.names import Subscription
from ..config import DELIVERIES_BYTES, LIMITS, POOL_BYTES, POOL_IDLE_S, POPPER_BYTES, Limits
from ..groups.offsets import Offsets
from ..messages.appender import Appender
from ..messages.topics import Topics
from ..runtime import Runtime, Timer
from ..sessions import Session
from ..store.index import ConsumeQueue
from .deliveries import (
    TOPIC_MARK,
    AckStatus,
    Delivered,
    Delivery,
    Handle,
    KeptQueue,
    PopClient,
    PopNumbers,
    PopRequest,
    PopResult,
    QueueDeliveries,
    Tally,
    decode_handle,
)

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# The queues of a topic that a group pops, and the receives that wait for a message of any of them.


_arrivals = count()


class Wait:
    """A receive that waits. `address`: its client's. `cancel` when that has gone away or does not want an answer any more."""

    __slots__ = ("_answer", "_cancel", "address", "arrival", "is_over", "request", "timer")

    def __init__(
        self, request: PopRequest, answer: Callable[[PopResult], object], cancel: Callable[[Wait], object]
    ) -> None:
        self.request = request
        self.arrival = next(_arrivals)
        self.is_over = False
        self.address = ""
        self.timer: Timer | None = None
        self._answer = answer
        self._cancel = cancel

    @property
    def place(self) -> int | None:
        """The queue that it waits for; None: any."""
        return self.request.queue_id if self.request.is_strict else None

    def end(self) -> bool:
        """False if it has ended before."""
        if self.is_over:
            return False
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()
        return True

    def answer(self, received: PopResult) -> None:
        self._answer(received)

    def cancel(self) -> None:
        """Ends the wait without an answer. After an answer this does nothing."""
        if not self.is_over:
            self._cancel(self)


class Popper:
    """A client that pops: when it asked last, and for what. `session` pays for what is kept of it; None once that is gone."""

    __slots__ = ("_charged_bytes", "asked_s", "client", "pool", "session", "wanted")

    def __init__(self, pool: Pool, client: PopClient) -> None:
        self.pool = pool
        self.client = client
        self.asked_s = 0.0
        self.wanted = Subscription(pool.topic)
        self.session: Session | None = None
        self._charged_bytes = 0

    def take(self, wanted: Subscription, session: Session | None) -> None:
        """The client asks for this now, on this session."""
        if session is not self.session:
            self.pay(0)
            self.session = session
        self.wanted = wanted
        self.pay(POPPER_BYTES + len(self.client.client_id) + len(wanted.expression))

    def pay(self, size: int) -> None:
        if self.session is not None and size != self._charged_bytes:
            self.session.charge(size - self._charged_bytes)
        self._charged_bytes = size


class Pool:
    """The pool of one group and topic. `queues`: the deliveries by queue id. `ready`: the queues that may have something,
    the one served longest ago first. `owned`: the queues that are the pool's; None: all. `leaving`: those of them that are to
    be others', and since when (`division`). `is_in_order`: a client has asked for the messages in order. `clients`: those
    that pop, by id; one of them pays for what the pool keeps for all."""

    def __init__(self, group: str, topic: str, tally: Tally, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self.group = group
        self.topic = topic
        self.tally = tally
        self.queues: dict[int, QueueDeliveries] = {}
        self.owned: set[int] | None = None
        self.leaving: dict[int, float] = {}
        self.ready: OrderedDict[int, None] = OrderedDict()
        self._waiting: dict[int | None, OrderedDict[Wait, None]] = {}
        self.waits = 0
        self.used_s = float("-inf")  # when somebody asked last
        self.clients: dict[PopClient, Popper] = {}
        self.is_cut = False  # the last look at the queues has ended early, and found nothing
        self.is_served_later = False
        self.is_in_order = False
        self._payer: Session | None = None
        self._paid_bytes = 0

    def is_used(self, now_s: float) -> bool:
        """Whether somebody waits, has messages, or asked lately."""
        is_fresh = now_s - self.used_s < POOL_IDLE_S
        return is_fresh or self.waits > 0 or any(item.unfinished for item in self.queues.values())

    def pay(self) -> None:
        """Has a client's session pay for the pool and its queues; nobody can once all clients are gone."""
        size = POOL_BYTES + len(self.group) + len(self.topic) + DELIVERIES_BYTES * len(self.queues)
        if self._payer is None:
            sessions = (popper.session for popper in self.clients.values())
            self._payer = next((session for session in sessions if session is not None), None)
        if self._payer is not None and size != self._paid_bytes:
            self._payer.charge(size - self._paid_bytes)
            self._paid_bytes = size

    def stop_paying(self, session: Session | None) -> None:
        """A client has gone, or the pool has; another client pays from now on, if there is one."""
        if session is not None and self._payer is session:
            session.charge(-self._paid_bytes)
            self._payer, self._paid_bytes = None, 0
            self.pay()

    def hold(self, wait: Wait) -> None:
        self._waiting.setdefault(wait.place, OrderedDict())[wait] = None
        self.waits += 1

    def drop(self, wait: Wait) -> None:
        waiting = self._waiting[wait.place]
        del waiting[wait]
        if not waiting:
            del self._waiting[wait.place]
        self.waits -= 1

    def waiting(self) -> list[Wait]:
        """All, in no order."""
        return [wait for waiting in self._waiting.values() for wait in waiting]

    def next_wait(self) -> Wait | None:
        """The receive that waits longest, of those for which a queue may have something."""
        found = self._first(None) if self.ready else None
        if len(self._waiting) > (found is not None):  # receives of single queues, which are rare
            for queue_id in self.ready:
                wait = self._first(queue_id)
                if wait is not None and (found is None or wait.arrival < found.arrival):
                    found = wait
        return found

    def _first(self, place: int | None) -> Wait | None:
        waiting = self._waiting.get(place)
        return next(iter(waiting)) if waiting else None

    def places(self, request: PopRequest) -> Iterator[int]:
        """The ready queues, in the order in which a receive looks at them."""
        if request.queue_id is not None and request.queue_id in self.ready:
            yield request.queue_id
        if request.is_strict:
            return
        for _ in range(len(self.ready)):  # each is the last one when it was looked at
            queue_id = next(iter(self.ready), None)
            if queue_id is None:
                return
            yield queue_id

    def rest(self) -> int:
        """How many messages of the queues that were looked at nobody has popped."""
        return sum(max(deliveries.queue.next - deliveries.next, 0) for deliveries in self.queues.values())

    def note(self, queue_id: int) -> None:
        """A queue has been looked at: it is ready or not, and the last of those that are."""
        deliveries = self.queues.get(queue_id)
        if deliveries is not None and deliveries.is_ready and self.serves(queue_id):
            self.ready[queue_id] = None
            self.ready.move_to_end(queue_id)
        else:
            self.ready.pop(queue_id, None)

    def come(self, queue_id: int) -> None:
        """Something may be in a queue."""
        if queue_id not in self.ready and self.serves(queue_id):
            self.ready[queue_id] = None

    # Queues that others pull

    def serves(self, queue_id: int) -> bool:
        """Whether messages of the queue may be popped. A queue that leaves before any of its messages was popped serves
        none."""
        return self.owned is None or (
            queue_id in self.owned and (queue_id not in self.leaving or queue_id in self.queues)
        )

    def divide(self) -> None:
        """Others pull, too: nothing is the pool's before it owns it."""
        self.owned = set()
        self.ready.clear()

    def rejoin(self) -> None:
        """Nobody else pulls any more."""
        self.owned = None

    def own(self, queue_id: int) -> None:
        assert self.owned is not None
        self.owned.add(queue_id)
        self.come(queue_id)

    def disown(self, queue_id: int) -> None:
        assert self.owned is not None
        self.owned.discard(queue_id)
        self.leaving.pop(queue_id, None)
        self.ready.pop(queue_id, None)

    def leave(self, queue_id: int, now_s: float) -> None:
        """A queue is to be another's. Nothing new of it is given."""
        if queue_id not in self.leaving:
            self.leaving[queue_id] = now_s
            if queue_id in self.queues:
                self.queues[queue_id].gives_new = False
            self.note(queue_id)

    def stay(self, queue_id: int) -> None:
        """It is not."""
        del self.leaving[queue_id]
        if queue_id in self.queues:
            self.queues[queue_id].gives_new = self.queues[queue_id].gives_again = True
            self.queues[queue_id].is_late = False
        self.come(queue_id)


# ------------------------------------------------------------------------------
# The pools of all groups: which there are, where a group begins, and whom a message concerns.


class Pools:
    """number: gives each new queue what stands for it on the disk."""

    def __init__(
        self, runtime: Runtime, topics: Topics, appender: Appender, offsets: Offsets, number: Callable[[], int]
    ) -> None:
        self._limits = runtime.limits
        self._topics, self._offsets = topics, offsets
        self._store = appender.store
        self._number = number
        self.all: dict[tuple[str, str], Pool] = {}
        self._of_topic: dict[str, dict[str, Pool]] = {}
        self._of_group: dict[str, dict[str, Pool]] = {}
        self._poppers: OrderedDict[Popper, None] = OrderedDict()  # the one that asked longest ago first
        self._of_client: dict[PopClient, dict[Popper, None]] = {}
        self._of_session: dict[Session, dict[Popper, None]] = {}
        self._unused: OrderedDict[Pool, None] = OrderedDict()  # without clients, in the order in which these have gone
        self._tallies: dict[str, Tally] = {}

    def find(self, group: str, topic: str) -> Pool | None:
        return self.all.get((group, topic))

    def get(self, request: PopRequest) -> Pool:
        """The pool, made if it is not there. Raises LimitExceeded for a group that has too many offsets."""
        pool = self.all.get((request.group, request.topic))
        if pool is None:
            begins = list(self._begins(request))
            for queue, offset in begins:
                if self._offsets.get(request.group, request.topic, queue.queue_id) is None:
                    self._offsets.put(request.group, request.topic, queue.queue_id, offset)
            pool = self.make(request.group, request.topic)
            pool.ready.update((queue.queue_id, None) for queue, offset in begins if offset < queue.next)
        return pool

    def make(self, group: str, topic: str) -> Pool:
        pool = self.all[group, topic] = Pool(group, topic, self._tallies.setdefault(group, Tally()), self._limits)
        self._of_topic.setdefault(topic, {})[group] = pool
        self._of_group.setdefault(group, {})[topic] = pool
        self._unused[pool] = None
        return pool

    def _begins(self, request: PopRequest) -> Iterator[tuple[ConsumeQueue, int]]:
        """The queues of the topic and where the group goes on. A group that is new to it begins at the end if it is asked for
        that; else at the first message if that is still there, as everywhere on this broker; else at the first or the last
        one, as it is asked for."""
        group, topic = request.group, request.topic
        is_known = self._offsets.knows(group, topic)
        for queue_id in range(self._topics.queues_of(topic)):
            queue = self._store.queues.get((topic, queue_id))
            if queue is None:
                continue
            offset = self._offsets.get(group, topic, queue_id)
            if offset is None:
                offset = self._begin(request, queue, is_known=is_known)
            yield queue, offset

    def _begin(self, request: PopRequest, queue: ConsumeQueue, *, is_known: bool) -> int:
        if request.from_end and not is_known:
            return queue.next
        is_first = is_known or request.from_first or queue.begin == 0
        return queue.begin if is_first else max(queue.next - 1, queue.begin)

    def deliveries_at(self, pool: Pool, queue_id: int) -> QueueDeliveries:
        """The deliveries of a queue that has messages."""
        found = pool.queues.get(queue_id)
        if found is None:
            queue = self._store.queue(pool.topic, queue_id)
            begin = self._offsets.get(pool.group, pool.topic, queue_id)
            if begin is None:  # a queue that is newer than the pool
                begin = queue.begin
                self._offsets.put(pool.group, pool.topic, queue_id, begin)
            found = self._deliveries(pool, queue, begin)
        return found

    def _deliveries(self, pool: Pool, queue: ConsumeQueue, begin: int) -> QueueDeliveries:
        found = QueueDeliveries(self._number(), pool.group, queue, begin, self._store.fetch, pool.tally, self._limits)
        pool.queues[queue.queue_id] = found
        pool.pay()
        return found

    def has_some(self, pool: Pool, request: PopRequest) -> bool:
        """Whether there is something to pop. Messages that a filter would skip count, too."""
        for queue_id in pool.places(request):
            self.deliveries_at(pool, queue_id)
            pool.note(queue_id)
            if queue_id in pool.ready:
                return True
        return False

    def peek(self, group: str, topic: str, queue_id: int | None, count: int) -> list[Delivered]:
        """The messages that would be popped next, as many as an answer may have, without handles. They stay where they are.
        Raises the errors of reading."""
        request = PopRequest(group, topic, PopClient(""), count, 0, queue_id=queue_id)
        pool = self.get(request)
        found: list[Delivered] = []
        size = 0
        for queue_id in [queue_id for queue_id in pool.ready if request.queue_id in (None, queue_id)]:
            for message in self.deliveries_at(pool, queue_id).peek(request.count - len(found)):
                size += len(message.record)
                if found and size > request.max_bytes:
                    return found
                found.append(message)
            if len(found) >= request.count:
                break
        return found

    def deliveries_of(self, group: str, topic: str, handle: Handle) -> QueueDeliveries | None:
        """The deliveries that a handle belongs to."""
        pool = self.all.get((group, topic))
        return pool.queues.get(handle.queue_id) if pool is not None and handle.mark == TOPIC_MARK else None

    def delivery(
        self, broker_name: str, group: str, topic: str, text: str
    ) -> tuple[QueueDeliveries, Delivery] | AckStatus:
        """The delivery of a handle, or why there is none."""
        handle = decode_handle(text)
        if handle is None:
            return AckStatus.UNREADABLE
        deliveries = self.deliveries_of(group, topic, handle)
        if handle.broker_name != broker_name or deliveries is None or handle.offset >= deliveries.next:
            return AckStatus.UNKNOWN
        delivery = deliveries.unfinished.get(handle.offset)
        if delivery is None:
            return AckStatus.DONE
        if delivery.pop_ms != handle.pop_ms:
            return AckStatus.EXPIRED if handle.pop_ms < delivery.pop_ms else AckStatus.UNKNOWN
        return deliveries, delivery

    def deliveries(self) -> Iterator[QueueDeliveries]:
        for pool in list(self.all.values()):
            yield from list(pool.queues.values())

    def appended(self, queues: Iterable[ConsumeQueue]) -> Iterator[Pool]:
        """The pools that messages have come to, of those in which somebody waits."""
        for queue in dict.fromkeys(queues):
            pools = self._of_topic.get(queue.topic)
            if pools is not None:
                for pool in list(pools.values()):
                    pool.come(queue.queue_id)
                    if pool.waits:
                        yield pool

    def refresh(self, deliveries: QueueDeliveries) -> None:
        """Something has become free in a queue."""
        pool = self.all.get((deliveries.group, deliveries.queue.topic))
        if pool is None:
            return
        if deliveries.queue.queue_id not in pool.ready:
            pool.note(deliveries.queue.queue_id)
        if not pool.clients:
            self._unused[pool] = None

    def serving(self, deliveries: QueueDeliveries) -> Sequence[Pool]:
        """The pools that serve a queue."""
        pool = self.all.get((deliveries.group, deliveries.queue.topic))
        return (pool,) if pool is not None else ()

    def waits(self, group: str, topic: str) -> int:
        """How many receives wait."""
        pool = self.find(group, topic)
        return pool.waits if pool is not None else 0

    def serves(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a queue's messages are popped."""
        pool = self.find(group, topic)
        return pool is not None and pool.serves(queue_id)

    def popped(self, group: str, topic: str) -> dict[int, QueueDeliveries]:
        """The queues that are popped, by queue id."""
        pool = self.find(group, topic)
        return dict(pool.queues) if pool is not None else {}

    def numbers(self, group: str, topic: str) -> dict[int, PopNumbers]:
        """The numbers by queue id, for queues that were popped. The others are where the group's offsets say."""
        pool = self.find(group, topic)
        return {} if pool is None else {queue_id: of.numbers() for queue_id, of in pool.queues.items()}

    def full(self, group: str) -> Iterator[tuple[str, int]]:
        """The queues of which nothing new is given, because too many messages are not finished."""
        is_full = self.unfinished(group) >= self._limits.max_unfinished_of_group
        for pool in self.of_group(group):
            for queue_id, of in pool.queues.items():
                if of.is_full or (is_full and of.next < of.queue.next):
                    yield pool.topic, queue_id

    def unfinished(self, group: str) -> int:
        """How many messages are in the hands of the group's clients, or to be given again."""
        tally = self._tallies.get(group)
        return tally.unfinished if tally is not None else 0

    def forget_tally(self, group: str) -> None:
        """The group was deleted, and has no pool."""
        self._tallies.pop(group, None)

    def redelivered(self, group: str) -> int:
        """How many deliveries were given again, since the start."""
        tally = self._tallies.get(group)
        return tally.again if tally is not None else 0

    def topics_of(self, group: str) -> list[str]:
        """The topics that the group pops."""
        return [pool.topic for pool in self.of_group(group)]

    def clients(self, group: str) -> dict[str, list[Subscription]]:
        """The clients that popped in the group in the last two minutes: what each wants, by client id."""
        found: dict[str, list[Subscription]] = {}
        for pool in self.of_group(group):
            for item in pool.clients.values():
                found.setdefault(item.client.client_id, []).append(item.wanted)
        return found

    def note_client(self, pool: Pool, request: PopRequest, now_s: float) -> bool:
        """A client asks. True if its session has to be given to `losing` when it is gone."""
        pool.used_s = now_s
        popper = pool.clients.get(request.client)
        if popper is None:
            if len(pool.clients) >= self._limits.max_members:
                return False
            popper = pool.clients[request.client] = Popper(pool, request.client)
            self._of_client.setdefault(request.client, {})[popper] = None
            self._unused.pop(pool, None)
        popper.asked_s = now_s
        self._poppers[popper] = None
        self._poppers.move_to_end(popper)
        wanted = request.wanted
        if popper.session is request.session and popper.wanted == wanted:
            return False
        former, session = popper.session, request.session
        popper.take(wanted, session)
        pool.pay()
        if former is session or session is None:
            return False
        self._leave_session(popper, former)
        is_new = session not in self._of_session
        self._of_session.setdefault(session, {})[popper] = None
        return is_new

    def _leave_session(self, popper: Popper, session: Session | None) -> None:
        if session is None:
            return
        poppers = self._of_session.get(session)
        if poppers is not None and popper in poppers:
            del poppers[popper]
            if not poppers:
                del self._of_session[session]
        popper.pool.stop_paying(session)

    def losing(self, session: Session) -> Work[None]:
        """The session is gone: nobody pays for its clients any more. Those of divided pools are to keep their share while
        they come back on another session, so they stay until `forget_client`."""
        for number, popper in enumerate(self._of_session.pop(session, ()), 1):
            if popper.session is session:
                popper.session = None
                popper.pool.stop_paying(session)
                if popper.pool.owned is None:
                    self._forget(popper)
            if number % SLICE == 0:
                yield

    def _forget(self, popper: Popper) -> None:
        pool = popper.pool
        if pool.clients.get(popper.client) is not popper:  # forgotten already
            return
        del pool.clients[popper.client]
        del self._poppers[popper]
        of_client = self._of_client[popper.client]
        del of_client[popper]
        if not of_client:
            del self._of_client[popper.client]
        popper.pay(0)
        self._leave_session(popper, popper.session)
        if not pool.clients:
            self._unused[pool] = None

    def forget_clients(self, before_s: float) -> None:
        """Forgets the clients that have not asked since."""
        while self._poppers and (popper := next(iter(self._poppers))).asked_s < before_s:
            self._forget(popper)

    def forget_client(self, client: PopClient) -> None:
        for popper in list(self._of_client.get(client, ())):
            self._forget(popper)

    def unused(self, now_s: float) -> Iterator[Pool]:
        """The pools that clients have left: each once, when nobody has popped it for a while, or too many wait for that."""
        for pool in list(self._unused):
            is_crowded = len(self._unused) > self._limits.max_unused_pools
            if pool.clients or pool.waits:
                del self._unused[pool]
            elif pool.owned is None and (is_crowded or now_s - pool.used_s >= POOL_IDLE_S):
                del self._unused[pool]
                yield pool

    @property
    def is_crowded(self) -> bool:
        """Whether more pools without clients are kept than may be."""
        return len(self._unused) > self._limits.max_unused_pools

    def of_group(self, group: str) -> list[Pool]:
        return list(self._of_group.get(group, {}).values())

    def of_topic(self, topic: str) -> list[Pool]:
        return list(self._of_topic.get(topic, {}).values())

    def drop(self, pool: Pool) -> None:
        """Nobody pops any more, or the group or the topic is gone."""
        for popper in list(pool.clients.values()):
            self._forget(popper)
        self._unused.pop(pool, None)
        del self.all[pool.group, pool.topic]
        for table, name, other in ((self._of_topic, pool.topic, pool.group), (self._of_group, pool.group, pool.topic)):
            del table[name][other]
            if not table[name]:
                del table[name]

    # A restart

    def adopt(self, kept: Iterable[KeptQueue], to_monotonic_s: Callable[[int], float]) -> Iterator[QueueDeliveries]:
        """Takes over the state of the last run, for topics that are still the same."""
        for item in kept:
            _, group, topic, queue_id = item.place
            queue = self._store.queues.get((topic, queue_id))
            if self._topics.get(topic) is None or self._topics.identity(topic) != item.place.identity or queue is None:
                continue
            if item.is_yielded and not item.unfinished:
                offset = self._offsets.get(group, topic, queue_id) or 0
                self._offsets.put(group, topic, queue_id, max(offset, min(item.next, queue.next)))
                continue
            if item.next > queue.next:
                log.warning(
                    "offset_set_back", group=group, topic=topic, queue=queue_id, offset=item.next, end=queue.next,
                    hint="it was beyond the end of the queue",
                )  # fmt: skip
            pool = self.all.get((group, topic)) or self.make(group, topic)
            deliveries = self._deliveries(pool, queue, 0)
            deliveries.adopt(item, to_monotonic_s)
            deliveries.reported = deliveries.committed
            self._offsets.put(group, topic, queue_id, deliveries.committed)
            yield deliveries
        for pool in self.all.values():
            self.make_ready(pool)

    def make_ready(self, pool: Pool) -> None:
        """Finds which queues have something."""
        for queue_id in range(self._topics.queues_of(pool.topic)):
            queue = self._store.queues.get((pool.topic, queue_id))
            if queue_id in pool.queues:
                pool.note(queue_id)
            elif queue is not None and (self._offsets.get(pool.group, pool.topic, queue_id) or 0) < queue.next:
                pool.come(queue_id)
