"""The queues of a topic that a group pops, and the receives that wait for a message of any of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from ...protocol.subscription import Subscription
from ..clock import Timer
from ..config import DELIVERIES_BYTES, LIMITS, POOL_BYTES, POOL_IDLE_S, POPPER_BYTES, Limits
from ..sessions.session import Session
from .deliveries import QueueDeliveries, Tally
from .values import PopClient, PopRequest, PopResult

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
        self.come(queue_id)
