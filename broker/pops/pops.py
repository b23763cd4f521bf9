"""POP, ACK and CHANGE_MESSAGE_INVISIBLETIME for both protocol servers: `Pops` is the entry point."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import SLICE, Route, TopicConfig, Work
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record, reconsume_times_in, tried
from ...protocol.names import tag_code
from ..config import (
    DEAD_LETTER_RETRY_S,
    LIMITS,
    MAX_POP_MESSAGES,
    MAX_RENEWED_S,
    POOL_SENT_BACK,
    POP_CLIENT_SILENT_S,
    RENEWAL_STEPS_S,
    LimitExceeded,
    Limits,
)
from ..groups.group import ConsumerGroups
from ..groups.leases import Locks
from ..groups.offsets import Offsets, Watch
from ..groups.settings import GroupConfigs, RequestModes
from ..messages.appender import Appender, property_bytes
from ..messages.sending import sent_back
from ..messages.topics import Topics
from ..runtime import Clock, Job, Runtime, run
from ..sessions import AddressShares, Recent, Reports, Session
from ..store.files import Damaged, StoreError, StoreFull
from ..store.index import ConsumeQueue
from ..store.journals import Frames
from .deliveries import (
    AckStatus,
    Changed,
    Deadlines,
    Delivered,
    Delivery,
    DeliveryState,
    Event,
    PopClient,
    PopRequest,
    PopResult,
    QueueDeliveries,
    TakenDelivery,
    Why,
    encode_handle,
)
from .division import Division, Mixed
from .journal import Book
from .pool import Pool, Pools, Wait

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# Messages shared among the clients of a group: each is in the hands of one at a time, until it is done with it.
#
# A door hands in the client's wish, in values, and a function for the answer, which comes at once or later, and once.
# Acknowledgements are answered when they are on the disk, all those of one turn of the loop behind one write.


_UNBURIED_HINT = "the messages stay in flight, and are tried again every second; free disk space, or delete topics"

Answer = Callable[[PopResult], object]

_OVER: Final = object()


class Pops:
    """The entry point of POP. Raises StoreError if the state of the last run cannot be read.

    Args:
        frames: the journal of popped messages.
        find_route: returns the queues of a topic on all brokers, because members divide them all.
        queues_of: the number of queues that a topic has here.
        when_kept: calls its first argument when the written data is as durable as the broker's settings demand, its second
            if the write failed.
        soon: calls a function in the next event-loop iteration.
    """

    def __init__(
        self,
        runtime: Runtime,
        broker_name: str,
        topics: Topics,
        appender: Appender,
        offsets: Offsets,
        settings: GroupConfigs,
        groups: ConsumerGroups,
        locks: Locks,
        watch: Watch,
        modes: RequestModes,
        mixed: Mixed,
        frames: Frames,
        *,
        find_route: Callable[[str], Awaitable[Route | None]],
        queues_of: Callable[[str], int],
        when_kept: When,
        soon: Soon | None = None,
    ) -> None:
        clock, limits = runtime.clock, runtime.limits
        self._limits = limits
        self._broker_name = broker_name
        self._offsets, self._settings = offsets, settings
        self._clock = clock
        self._soon = soon or _in_the_loop
        self._hands = Hands(clock)
        self._unburied, self._reports = Recent(clock.monotonic_s), Reports(clock.monotonic_s)
        self.unburied = self._unburied.texts
        self._letters = Letters(topics, appender, self._settings, groups)
        self._deadlines = Deadlines(clock, self._expire)
        self._batches = PopBatches(limits)
        self._book = Book(frames, topics.identity, clock)
        self._pools = Pools(runtime, topics, appender, offsets, self._book.next_number)
        self.pools = self._pools.all  # empty as long as nobody pops: others then pay one look
        self.clients = self._pools.clients
        self.unfinished, self.redelivered = self._pools.unfinished, self._pools.redelivered
        self.topics_of = self._pools.topics_of
        self.serves = self._pools.serves
        self.waits = self._pools.waits
        self.peek = self._pools.peek
        self.popped = self._pools.popped
        self.numbers, self.full = self._pools.numbers, self._pools.full
        self._settling = Acknowledging(self._book, self._offsets, clock, when_kept, self._soon, self._freed)
        self._waits = Waits(clock, self.put_back, limits.max_waiting_receives)
        self._division = Division(
            runtime,
            broker_name,
            groups,
            locks,
            watch,
            modes,
            mixed,
            self._pools,
            find_route=find_route,
            queues_of=queues_of,
            let_go=self._let_go,
            gained=self._gained,
            drop=self._yield,
        )
        self.changed = self._division.changed
        self.pull_fault = self._division.pull_fault
        self._is_stopped = False
        self._losing: deque[Work[None]] = deque()
        self._take_over()

    def _take_over(self) -> None:
        """Take over from the last run: handles stay valid, and deadlines stay as they are.

        The broker extends none of these deliveries any more. It may have ended before their response reached the client,
        which then knows nothing of them although its heartbeats go on."""
        for deliveries in self._pools.adopt(
            self._book.read(is_expected=self._offsets.has_pops), self._book.monotonic_s
        ):
            for delivery in deliveries.unfinished.values():
                if delivery.state is DeliveryState.IN_FLIGHT:
                    self._deadlines.put(deliveries, (delivery,), delivery.deadline_s)
        self._division.adopt()
        try:
            run(self._book.saving(self._pools.deliveries))
        except StoreFull as error:
            log.error("save_failed", reason=str(error))

    # Receiving

    def receive(self, request: PopRequest, answer: Answer) -> Wait:
        """Gives messages to a client: at once, or the first that come within `request.wait_ms`. `answer` is called once,
        perhaps before this returns; not at all after `cancel` of the returned wait.

        An answer that did not reach its client goes back with `put_back`. Raises what reading raises (StoreError, OSError),
        and LimitExceeded for a group that has too many offsets."""
        self._hands.heard(request.client)
        wait = Wait(request, answer, self._waits.drop)
        if self._is_stopped:
            return _answered(wait, PopResult(Why.STOPPED))
        fault = self._division.admit(request)
        if fault is not None:
            return _answered(wait, PopResult(Why.PULLED, fault=fault))
        pool = self._pools.get(request)
        if self._pools.note_client(pool, request, self._clock.monotonic_s()) and request.session is not None:
            request.session.on_lost(self._session_lost)
        pool.is_in_order = pool.is_in_order or request.in_order
        received = self._batches.again(request, self._give_again) or self._pop(pool, request)
        if received.why is Why.FOUND or request.wait_ms <= 0:
            return _answered(wait, received)
        if not self._waits.has_room(request.session):
            return _answered(wait, PopResult(Why.TOO_MANY_WAIT))
        self._waits.hold(pool, wait)
        if pool.is_cut:
            self._serve_later(pool)
        return wait

    def _pop(self, pool: Pool, request: PopRequest) -> PopResult:
        if request.count <= 0:
            return PopResult(Why.FOUND if self._pools.has_some(pool, request) else Why.NOTHING_NEW)
        now_ms = self._clock.time_ms()
        count, room = min(request.count, MAX_POP_MESSAGES), request.max_bytes
        is_in_order = pool.is_in_order or self._is_orderly(request.group)
        found: list[Delivered] = []
        batch: list[tuple[QueueDeliveries, Delivery]] = []
        pool.is_cut = False
        for queue_id in pool.places(request):
            deliveries = self._pools.deliveries_at(pool, queue_id)
            self._settling.has_left(deliveries)
            deliveries.set_order(is_in_order)
            before = deliveries.next
            allowed = self._limits.max_unfinished_of_group - pool.tally.unfinished
            taken = deliveries.take(request, count - len(found), room, allowed)
            if taken:
                found += self._hand_out(deliveries, taken, request, now_ms)
                room -= sum(len(item.record) for item in taken)
                batch += [(deliveries, item.delivery) for item in taken]
            else:
                pool.is_cut = pool.is_cut or before < deliveries.next < deliveries.queue.next
            self._note_passed(deliveries)
            pool.note(queue_id)
            if len(found) >= count or room <= 0:
                break
        if not found:
            return PopResult(Why.NOTHING_NEW)
        if is_in_order:
            self._batches.note(request, batch)
        return PopResult(Why.FOUND, tuple(found), found[0].pop_ms, request.invisible_ms, pool.rest())

    def _is_orderly(self, group: str) -> bool:
        settings = self._settings.get(group)
        return settings is not None and settings.consume_orderly

    def _note_passed(self, deliveries: QueueDeliveries) -> None:
        """Notes messages that were looked at and not handed out."""
        if deliveries.fresh_behind:
            self._book.waiting(deliveries)
        if deliveries.is_passed:
            self._book.passed(deliveries)
        elif not deliveries.fresh_behind:
            return
        self._settling.note(deliveries)

    def _hand_out(
        self, deliveries: QueueDeliveries, taken: list[TakenDelivery], request: PopRequest, now_ms: int
    ) -> list[Delivered]:
        now_s = self._clock.monotonic_s()
        deadline_s = now_s + request.invisible_ms / 1000
        for delivery, _ in taken:  # some messages of a batch in order may be in other hands
            if delivery.renewals >= 0:
                self._hands.take(delivery)
        deliveries.hand_out(taken, now_ms)
        for delivery, _ in taken:
            delivery.client, delivery.deadline_s, delivery.since_s = request.client, deadline_s, now_s
            delivery.is_delayed = False
            if request.auto_renew:
                delivery.renewals = 0
                self._hands.give(deliveries, delivery)
        self._deadlines.put(deliveries, [item.delivery for item in taken], deadline_s)
        self._book.popped(deliveries, taken)
        self._offsets.note_pops()
        self._settling.note(deliveries)
        return [self._delivered(deliveries, item, request.invisible_ms) for item in taken]

    def _delivered(self, deliveries: QueueDeliveries, taken: TakenDelivery, invisible_ms: int) -> Delivered:
        delivery, record = taken
        queue = deliveries.queue
        handle = encode_handle(self._broker_name, queue.queue_id, delivery.offset, delivery.pop_ms, invisible_ms)
        attempt = tried(delivery.attempts + reconsume_times_in(record))
        return Delivered(record, queue.topic, queue.queue_id, delivery.offset, attempt, handle, delivery.pop_ms)

    def _give_again(self, deliveries: QueueDeliveries, delivery: Delivery, request: PopRequest) -> Delivered | None:
        """Gives messages again to a client that repeats its attempt, because the answer did not reach it."""
        record = deliveries.record(delivery.offset)
        if record is None:
            return None
        delivery.deadline_s = self._clock.monotonic_s() + request.invisible_ms / 1000
        self._deadlines.put(deliveries, (delivery,), delivery.deadline_s)
        self._changed(deliveries, delivery)
        return self._delivered(deliveries, TakenDelivery(delivery, record), request.invisible_ms)

    def appended(self, queues: Iterable[ConsumeQueue]) -> None:
        """Messages have been stored in these queues: wakes those that wait for them."""
        for pool in self._pools.appended(queues):
            self._serve(pool)

    def _serve(self, pool: Pool) -> None:
        pool.is_served_later = False
        while (wait := pool.next_wait()) is not None:
            try:
                received = self._pop(pool, wait.request)
            except Exception as error:
                log.exception("receive_failed", group=pool.group, topic=pool.topic)
                self._waits.end(wait, PopResult(Why.FAILED, fault=str(error)))
                continue
            if received.why is Why.FOUND:
                self._waits.end(wait, received)
                continue
            if pool.is_cut:
                self._serve_later(pool)
            return

    def _serve_later(self, pool: Pool) -> None:
        """Serves those that wait when others had their turn: a filter that finds nothing looks on then."""
        if pool.waits and not pool.is_served_later:
            pool.is_served_later = True
            self._soon(partial(self._serve, pool))

    # Clients' words on their messages

    def put_back(self, group: str, topic: str, messages: Iterable[Delivered]) -> None:
        """An answer has not reached its client: its messages can be popped at once, and do not count as tried."""
        for message in messages:
            found = self._find(group, topic, message.handle)
            if isinstance(found, AckStatus) or found[1].state is not DeliveryState.IN_FLIGHT:
                continue
            deliveries, delivery = found
            delivery.attempts = max(delivery.attempts - 1, 0)
            self._release(deliveries, delivery)
            for pool in self._pools.serving(deliveries):
                self._serve_later(pool)  # the next that waits may be of the same client, and put it back in its turn

    def ack(self, group: str, topic: str, handles: Sequence[str], answer: Answered, *, takes_late: bool = True) -> None:
        """The client is done with these messages. `answer` gets an outcome for each, when that is on the disk.

        takes_late: True if this finishes messages whose visibility timeout has expired, too, unless they were redelivered.
        """
        found = [self._find(group, topic, handle) for handle in handles]
        if not takes_late:
            found = [AckStatus.TOO_LATE if _is_visible(item) else item for item in found]
        self._settling.settle([self._done(item) for item in found], answer)

    def _done(self, found: tuple[QueueDeliveries, Delivery] | AckStatus) -> AckStatus:
        if isinstance(found, AckStatus):
            return found
        if found[1].renewals >= 0:
            self._hands.take(found[1])
        return self._settling.acknowledge(*found)

    def change(
        self,
        group: str,
        topic: str,
        handle: str,
        invisible_ms: int,
        *,
        is_counted: bool = True,
        renews: bool = False,
        takes_late: bool = True,
    ) -> Changed:
        """The message comes again after that time; 0: at once, a nack. It is not prolonged any more. is_counted: whether
        this was a try. renews: its client still handles it. A finished message stays finished: perhaps it was another client
        that acknowledged it, so whoever asks for more time does not have it."""
        found = self._find(group, topic, handle)
        if isinstance(found, AckStatus):
            return Changed(AckStatus.FINISHED if found is AckStatus.DONE else found, handle)
        deliveries, delivery = found
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            return Changed(AckStatus.DONE, handle, delivery.pop_ms)
        if _is_visible(found) and not takes_late:
            return Changed(AckStatus.TOO_LATE, handle)
        outcome = AckStatus.LATE if delivery.state is DeliveryState.VISIBLE else AckStatus.DONE
        if delivery.renewals >= 0:
            self._hands.take(delivery)
        if not is_counted:
            delivery.attempts = max(delivery.attempts - 1, 0)
        if invisible_ms > 0:
            delivery.turn(Event.CHANGE)
            delivery.is_delayed = not renews
            delivery.deadline_s = self._clock.monotonic_s() + invisible_ms / 1000
            self._deadlines.put(deliveries, (delivery,), delivery.deadline_s)
            self._changed(deliveries, delivery)
        elif delivery.state is DeliveryState.IN_FLIGHT:
            self._come_again(deliveries, delivery, "its last consumer could not handle it")
            self._serve_all(deliveries)
        until_ms = self._clock.time_ms() + invisible_ms
        return Changed(outcome, handle, delivery.pop_ms, until_ms - delivery.pop_ms)

    def to_dead_letters(self, group: str, topic: str, handle: str, reason: str, answer: Answered) -> None:
        """Stores a copy in the group's dead-letter topic and acknowledges the message; a second time does nothing. Raises
        StoreError if the message cannot be read or the copy not be stored."""
        found = self._find(group, topic, handle)
        if not isinstance(found, AckStatus) and found[1].state is not DeliveryState.ACKNOWLEDGED:
            self._letters.bury(*found, reason)
        self._settling.settle([self._done(found)], answer)

    def _find(self, group: str, topic: str, handle: str) -> tuple[QueueDeliveries, Delivery] | AckStatus:
        return self._pools.delivery(self._broker_name, group, topic, handle)

    # Time

    def delayed_wait_s(self) -> float | None:
        """Return how long the first message has to wait that a client has asked for at a later time; None without one. It
        takes a look at each message in flight, for tests."""
        due_s = (
            item.deadline_s
            for deliveries in self._pools.deliveries()
            for item in deliveries.unfinished.values()
            if item.is_delayed and item.state is DeliveryState.IN_FLIGHT
        )
        first_s = min(due_s, default=None)
        return None if first_s is None else max(first_s - self._clock.monotonic_s(), 0.0)

    def _expire(self, deliveries: QueueDeliveries, due: list[Delivery]) -> None:
        for delivery in due:
            until_s = self._hands.prolonged_s(delivery) if deliveries.gives_again else None
            if until_s is None:
                self._come_again(deliveries, delivery, "nobody has acknowledged it in time")
            else:
                self._prolong(deliveries, delivery, until_s)
        self._serve_all(deliveries)
        self._division.progressed((deliveries,))

    def _prolong(self, deliveries: QueueDeliveries, delivery: Delivery, until_s: float) -> None:
        delivery.deadline_s = until_s
        self._deadlines.put(deliveries, (delivery,), until_s)
        self._changed(deliveries, delivery)

    def _come_again(self, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        """The message can be popped again, or is given up if it was tried often enough."""
        settings = self._settings.get(deliveries.group)  # a group that was deleted is not created by its messages
        if settings is None or delivery.attempts <= settings.retry_max_times:
            self._release(deliveries, delivery)
            return
        try:
            self._letters.bury(deliveries, delivery, f"tried {delivery.attempts} times; {reason}")
        except Damaged:  # nobody can read it, and the next receive drops it with a log event
            self._release(deliveries, delivery)
        except Exception as error:
            self._not_buried(deliveries, error)
            self._prolong(deliveries, delivery, self._clock.monotonic_s() + DEAD_LETTER_RETRY_S)
        else:
            self._done((deliveries, delivery))

    def _not_buried(self, deliveries: QueueDeliveries, error: Exception) -> None:
        """A dead letter cannot be stored, such as on a full disk or with a full table of topics: `doctor` says so while it
        goes on, and the log every ten minutes."""
        group, reason = deliveries.group, str(error)
        self._unburied.note((group, reason), f"{group}: {reason}")
        if not isinstance(error, StoreError | LimitExceeded):
            log.error("dead_letter_failed", group=group, reason=reason, exc_info=error)
        elif self._reports.is_due(f"{group}:", reason):
            log.error("dead_letter_failed", group=group, reason=reason, hint=_UNBURIED_HINT)

    def _release(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        if delivery.renewals >= 0:
            self._hands.take(delivery)
        deliveries.release(delivery)
        if delivery.deadline_s > self._clock.monotonic_s():  # else the disk knows by its deadline
            self._changed(deliveries, delivery)
        self._pools.refresh(deliveries)

    def _changed(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._book.changed(deliveries, delivery)
        self._settling.write_soon()

    def _serve_all(self, deliveries: QueueDeliveries) -> None:
        for pool in self._pools.serving(deliveries):
            if pool.waits:
                self._serve(pool)

    def _freed(self, touched: Iterable[QueueDeliveries]) -> None:
        """Something is finished, so more may be popped."""
        for deliveries in touched:
            self._pools.refresh(deliveries)
            self._serve_all(deliveries)
        self._division.progressed(touched)

    # Queues that come and go

    def _gained(self, pool: Pool) -> None:
        if pool.waits:
            self._serve(pool)

    def _let_go(self, pool: Pool, queue_id: int, is_lost: bool) -> bool:
        """Members pull the queue from its lowest offset on that is not finished. False: not yet."""
        deliveries = pool.queues.get(queue_id)
        if deliveries is None:
            return True
        if not is_lost and self._sends_back(deliveries):
            return False
        del pool.queues[queue_id]
        self._settling.report(deliveries)
        self._book.yielded(deliveries, deliveries.committed)
        self._forget_deliveries(deliveries)
        self._offsets.mark(pool.group, pool.topic, queue_id)
        self._write_now()
        return True

    def _sends_back(self, deliveries: QueueDeliveries) -> bool:
        """Sends back what is left before something finished, some at a time; False if nothing is, or nobody would read it."""
        left = deliveries.before_finished() if self._letters.are_sent_back(deliveries.group) else []
        if any(delivery.state is DeliveryState.ACKNOWLEDGED for delivery in left):
            return True  # the disk has not said yet that these are finished
        try:
            for delivery in left[:POOL_SENT_BACK]:
                self._letters.send_back(deliveries, delivery)
                self._done((deliveries, delivery))
        except (StoreError, LimitExceeded) as error:
            log.error("send_back_failed", group=deliveries.group, reason=str(error))
            return False
        return bool(left)

    def _yield(self, pool: Pool) -> None:
        """Members pull the topic, and nothing is in flight: the group goes on from its offsets."""
        for deliveries in pool.queues.values():
            self._book.yielded(deliveries, deliveries.next)
        self._drop_pool(pool)
        self._write_now()

    def look_for_silent_clients(self) -> None:
        """Messages in the hands of clients that went silent come again."""
        for client in self._hands.silent():
            self.client_gone(client)
        self._pools.forget_clients(self._clock.monotonic_s() - POP_CLIENT_SILENT_S)
        self._leave_unused()
        self._division.look()

    def _leave_unused(self) -> None:
        """Keeps nothing of groups and topics that nobody pops any more, except messages that are not finished."""
        touched = False
        for pool in self._pools.unused(self._clock.monotonic_s()):
            touched = True
            for deliveries in [item for item in pool.queues.values() if not item.unfinished]:
                self._settling.report(deliveries)
                del pool.queues[deliveries.queue.queue_id]
                self._book.yielded(deliveries, deliveries.next)
                self._forget_deliveries(deliveries)
            if not pool.queues:
                self._pools.drop(pool)
        if touched:
            self._write_now()

    def _session_lost(self, session: Session) -> None:
        """A session is gone, perhaps with very many clients: they are forgotten in pieces."""
        self._losing.append(self._pools.losing(session))
        if len(self._losing) == 1:
            self._soon(self._lose_some)

    def _lose_some(self) -> None:
        if next(self._losing[0], _OVER) is _OVER:
            self._losing.popleft()
        if self._pools.is_crowded:
            self._leave_unused()
        if self._losing and not self._is_stopped:
            self._soon(self._lose_some)

    def letting_go(self, has_changed: Callable[[Session], bool]) -> Work[None]:
        """Answer the waiting receives of sessions whose accounts have changed, some at a time."""
        for number, wait in enumerate(self._waits.all(), 1):
            session = wait.request.session
            if session is not None and has_changed(session):
                self._waits.end(wait, PopResult(Why.NOTHING_NEW))
            if number % SLICE == 0:
                yield

    def heard(self, client: PopClient) -> None:
        """Something was heard of a client, such as a heartbeat: messages in its hands are prolonged if it wants."""
        self._hands.heard(client)

    def connection_lost(self, client: PopClient, heard_s: float) -> None:
        """A client that may come back has lost its connection, on which it was last heard then. What it was given since may
        be lost, and is not prolonged any more."""
        self._hands.stop_renewing(client, heard_s)

    def client_gone(self, client: PopClient) -> None:
        """The client has said good-bye or is not heard any more: its receives end, and messages that the broker prolongs
        for it come again at once. Those with a time of its own stay with it until then."""
        if self._is_stopped:  # and the next broker writes the journal, perhaps in this process
            return
        self._pools.forget_client(client)
        for wait in self._waits.of(client):
            self._waits.end(wait, PopResult(Why.CLIENT_GONE))
        touched: dict[QueueDeliveries, None] = {}
        for deliveries, delivery in self._hands.of(client):
            self._come_again(deliveries, delivery, "its last consumer has gone")
            touched[deliveries] = None
        for deliveries in touched:
            self._serve_all(deliveries)
        self._division.clients_gone()

    def session_gone(self, session: Session) -> None:
        """The same for the client at a remoting connection."""
        self.client_gone(PopClient("", session=session))

    def sent_elsewhere(self, group: str, topic: str, queue_id: int | None = None) -> None:
        """Somebody has changed the group's offsets in a topic, or in one queue. Messages popped before can no longer be
        acknowledged."""
        pool = self._pools.find(group, topic)
        if pool is None or (queue_id is not None and not pool.serves(queue_id)):
            return
        for deliveries in list(pool.queues.values()):
            self._settling.has_left(deliveries)
        self._pools.make_ready(pool)
        self._write_now()
        self._serve(pool)

    def forget_group(self, group: str) -> None:
        """The group was deleted."""
        self._forget(self._pools.of_group(group), Why.GROUP_GONE)
        self._pools.forget_tally(group)

    def end_receives(self, group: str) -> None:
        """The group was deleted, but for its offsets and what it has in flight."""
        for pool in self._pools.of_group(group):
            for wait in pool.waiting():
                self._waits.end(wait, PopResult(Why.GROUP_GONE))

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted. Another one of this name has another identity."""
        self._forget(self._pools.of_topic(topic), Why.TOPIC_GONE)

    def _forget(self, pools: Iterable[Pool], why: Why) -> None:
        for pool in pools:
            for wait in pool.waiting():
                self._waits.end(wait, PopResult(why))
            for deliveries in pool.queues.values():
                self._book.forgotten(deliveries)
            self._division.forget(pool)
            self._drop_pool(pool)
        self._write_now()

    def _drop_pool(self, pool: Pool) -> None:
        for deliveries in pool.queues.values():
            self._forget_deliveries(deliveries)
        self._pools.drop(pool)

    def _forget_deliveries(self, deliveries: QueueDeliveries) -> None:
        for delivery in deliveries.unfinished.values():
            if delivery.renewals >= 0:
                self._hands.take(delivery)
        deliveries.forget()
        self._settling.forget(deliveries)

    def _write_now(self) -> None:
        """Writes. Frames that a disk refuses are written with the whole file, as soon as the disk takes it."""
        try:
            self._book.write()
        except StoreFull as error:
            log.error("save_failed", reason=str(error))

    def saving(self) -> Job[None]:
        """Writes the file anew if it has become long. Raises StoreFull; it is tried again with the next call."""
        yield from self._book.saving(self._pools.deliveries)

    def stop(self) -> None:
        """Tells everybody that waits. Messages in flight stay so over a restart."""
        self._is_stopped = True
        self._deadlines.stop()
        self._division.stop()
        for wait in self._waits.all():
            self._waits.end(wait, PopResult(Why.STOPPED))
        self._settling.write()
        self._book.frames.close()

    # Looking

    @property
    def waiting(self) -> int:
        """How many receives wait."""
        return self._waits.count

    def is_popped(self, group: str, topic: str) -> bool:
        """Whether clients of the group pop the topic now, or have messages of it in their hands."""
        pool = self._pools.find(group, topic)
        return pool is not None and pool.is_used(self._clock.monotonic_s())

    def is_apart(self, group: str, topic: str) -> bool:
        """Whether the group's clients pop the topic and nobody else reads it."""
        pool = self._pools.find(group, topic)
        return pool is not None and pool.owned is None and pool.is_used(self._clock.monotonic_s())


def _is_visible(found: tuple[QueueDeliveries, Delivery] | AckStatus) -> bool:
    """True if the visibility timeout of the delivery has expired, and it waits to be delivered again."""
    return not isinstance(found, AckStatus) and found[1].state is DeliveryState.VISIBLE


def _answered(wait: Wait, received: PopResult) -> Wait:
    wait.end()
    wait.answer(received)
    return wait


# ------------------------------------------------------------------------------
# Settles messages that clients are done with: one write for all acknowledgements of a turn of the loop, and the
# answers behind it.


Answered = Callable[[Sequence[AckStatus]], object]
When = Callable[[Callable[[], None], Callable[[], None]], None]
Soon = Callable[[Callable[[], object]], object]


def _in_the_loop(action: Callable[[], object]) -> object:
    return asyncio.get_running_loop().call_soon(action)


class _Waiting(NamedTuple):
    """The acknowledgements of one request, and its answer that waits for the disk."""

    outcomes: list[AckStatus]
    answer: Answered


class Acknowledging:
    """when_kept, soon: as of `Keeping`. on_finished: hears of queues in which something is finished, behind the answers."""

    def __init__(
        self,
        book: Book,
        offsets: Offsets,
        clock: Clock,
        when_kept: When,
        soon: Soon,
        on_finished: Callable[[Iterable[QueueDeliveries]], None],
    ) -> None:
        self._book = book
        self._offsets = offsets
        self._clock = clock
        self._when_kept = when_kept
        self._soon = soon
        self._on_finished = on_finished
        self._acked: dict[QueueDeliveries, list[Delivery]] = {}
        self._waiting: list[_Waiting] = []
        self._touched: dict[QueueDeliveries, None] = {}
        self._is_writing = False

    def acknowledge(self, deliveries: QueueDeliveries, delivery: Delivery) -> AckStatus:
        """Acknowledges a delivery. It is finished when that is on the disk."""
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            return AckStatus.DONE
        outcome = AckStatus.LATE if delivery.state is DeliveryState.VISIBLE else AckStatus.DONE
        delivery.turn(Event.ACKNOWLEDGE)
        self._acked.setdefault(deliveries, []).append(delivery)
        self.note(deliveries)
        return outcome

    def settle(self, outcomes: list[AckStatus], answer: Answered) -> None:
        """Answers when the acknowledgements are on the disk."""
        if any(outcome.is_done for outcome in outcomes):
            self._waiting.append(_Waiting(outcomes, answer))
            self.write_soon()
        else:
            answer(outcomes)

    def note(self, deliveries: QueueDeliveries) -> None:
        """How far the group has come may be another offset."""
        self._touched[deliveries] = None
        self.write_soon()

    def forget(self, deliveries: QueueDeliveries) -> None:
        self._touched.pop(deliveries, None)

    def write_soon(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._soon(self.write)

    def write(self) -> None:
        """Writes once in a turn of the loop, for everything that happened in it."""
        self._is_writing = False
        acked, self._acked = self._acked, {}
        waiting, self._waiting = self._waiting, []
        try:
            for deliveries, done in acked.items():
                self._book.acknowledged(deliveries, done)
            self._book.write()
        except Exception as error:  # whatever it is, nothing stays acknowledged without an answer
            is_full = isinstance(error, StoreFull)
            log.error(
                "acknowledgements_refused", reason=str(error), count=len(waiting), exc_info=None if is_full else error
            )
            for deliveries, done in acked.items():
                for delivery in done:
                    deliveries.refuse(delivery)
            answer = partial(_refuse, waiting)
        else:
            for deliveries, done in acked.items():
                deliveries.finish(done)
            answer = partial(self._when_kept, partial(_answer, waiting), partial(_refuse, waiting))
        self._report()
        if waiting:
            answer()
        self._on_finished(acked)

    def _report(self) -> None:
        """Says how far groups have come, where everybody looks for that."""
        touched, self._touched = self._touched, {}
        for deliveries in touched:
            try:
                self.report(deliveries)
            except Exception:
                log.exception("offset_not_reported", group=deliveries.group, topic=deliveries.queue.topic)

    def report(self, deliveries: QueueDeliveries) -> None:
        committed = deliveries.committed
        if committed != deliveries.reported and not self.has_left(deliveries):
            queue = deliveries.queue
            self._offsets.put(deliveries.group, queue.topic, queue.queue_id, committed)
            deliveries.reported = committed

    def has_left(self, deliveries: QueueDeliveries) -> bool:
        """Whether somebody, such as an administrator, has given the group another offset: it goes on from there."""
        queue = deliveries.queue
        offset = self._offsets.get(deliveries.group, queue.topic, queue.queue_id)
        if offset is None or offset == deliveries.reported:
            return False
        deliveries.restart(offset, self._clock.time_ms())
        self._book.restarted(deliveries)
        self.write_soon()
        return True


def _answer(waiting: Iterable[_Waiting]) -> None:
    for outcomes, answer in waiting:
        _call(answer, outcomes)


def _refuse(waiting: Iterable[_Waiting]) -> None:
    for outcomes, answer in waiting:
        _call(answer, [AckStatus.NOT_KEPT if outcome.is_done else outcome for outcome in outcomes])


def _call(answer: Answered, outcomes: list[AckStatus]) -> None:
    """A door that fails must not take the answers of others along."""
    try:
        answer(outcomes)
    except Exception:
        log.exception("acknowledgement_not_answered")


# ------------------------------------------------------------------------------
# The waiting receives of all groups, and how each of them ends.


class Waits:
    """put_back: takes the messages of an answer that could not be given, with their group and topic. most: receives that may
    wait."""

    def __init__(self, clock: Clock, put_back: Callable[[str, str, Iterable[Delivered]], None], most: int) -> None:
        self._clock = clock
        self._put_back = put_back
        self._pools: dict[Wait, Pool] = {}
        self._shares = AddressShares(most)
        self._of: dict[PopClient, dict[Wait, None]] = {}

    def has_room(self, session: Session | None) -> bool:
        """Whether another receive of this session may wait."""
        return self._shares.has_room(_address_of(session))

    @property
    def count(self) -> int:
        return len(self._pools)

    def of(self, client: PopClient) -> list[Wait]:
        return list(self._of.get(client, ()))

    def all(self) -> list[Wait]:
        return list(self._pools)

    def hold(self, pool: Pool, wait: Wait) -> None:
        """Waits for a message, until its time is up."""
        pool.hold(wait)
        self._pools[wait] = pool
        wait.address = _address_of(wait.request.session)
        self._shares.take(wait.address)
        self._of.setdefault(wait.request.client, {})[wait] = None
        wait_s = wait.request.wait_ms / 1000
        wait.timer = self._clock.call_later(wait_s, self.end, wait, PopResult(Why.NOTHING_NEW))

    def drop(self, wait: Wait) -> None:
        """Drops a wait without an answer."""
        if not wait.end():
            return
        self._pools.pop(wait).drop(wait)
        self._shares.give_back(wait.address)
        waits = self._of[wait.request.client]
        del waits[wait]
        if not waits:
            del self._of[wait.request.client]

    def end(self, wait: Wait, received: PopResult) -> None:
        """Answers a wait. A door that fails must not harm the sender of the message."""
        if wait.is_over:
            return
        self.drop(wait)
        try:
            wait.answer(received)
        except Exception:
            log.exception("receive_not_answered", group=wait.request.group, topic=wait.request.topic)
            self._put_back(wait.request.group, wait.request.topic, received.messages)


def _address_of(session: Session | None) -> str:
    return session.address if session is not None else ""


# ------------------------------------------------------------------------------
# The clients that messages are in the hands of, of those for which the broker prolongs the time.


class Hands:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[PopClient, dict[Delivery, QueueDeliveries]] = {}
        self._heard_s: dict[PopClient, float] = {}

    def heard(self, client: PopClient) -> None:
        """Anything was heard of the client."""
        if client in self._of:
            self._heard_s[client] = self._clock.monotonic_s()

    def give(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        client = delivery.client
        assert client is not None, "only a client's delivery is prolonged"
        if client not in self._of:
            self._of[client] = {}
            self._heard_s[client] = self._clock.monotonic_s()
        self._of[client][delivery] = deliveries

    def take(self, delivery: Delivery) -> None:
        """Takes a delivery out of its client's hands, or ends its prolonging."""
        delivery.renewals = -1
        client = delivery.client
        held = self._of.get(client) if client is not None else None
        if client is not None and held is not None and held.pop(delivery, None) is not None and not held:
            del self._of[client], self._heard_s[client]

    def prolonged_s(self, delivery: Delivery) -> float | None:
        """The new deadline of a delivery whose time is over; None if it is not prolonged."""
        if delivery.renewals < 0 or delivery.client is None or not self._is_heard(delivery.client):
            return None
        now_s, end_s = self._clock.monotonic_s(), delivery.since_s + MAX_RENEWED_S
        if now_s >= end_s:
            return None
        step_s = RENEWAL_STEPS_S[min(delivery.renewals, len(RENEWAL_STEPS_S) - 1)]
        delivery.renewals += 1
        return min(now_s + step_s, end_s)

    def _is_heard(self, client: PopClient) -> bool:
        heard_s = self._heard_s.get(client)
        return heard_s is not None and self._clock.monotonic_s() - heard_s < POP_CLIENT_SILENT_S

    def silent(self) -> list[PopClient]:
        """The clients that nothing was heard of for too long."""
        return [client for client in self._of if not self._is_heard(client)]

    def stop_renewing(self, client: PopClient, given_since_s: float) -> None:
        """Messages that were given since then may not have reached the client: their deadlines stay."""
        for delivery in self._of.get(client, ()):
            if delivery.since_s >= given_since_s:
                delivery.since_s = float("-inf")  # as if it had been extended for as long as may be

    def of(self, client: PopClient) -> Iterator[tuple[QueueDeliveries, Delivery]]:
        """The deliveries that the broker prolongs for a client."""
        for delivery, deliveries in list(self._of.get(client, {}).items()):
            if delivery.state is DeliveryState.IN_FLIGHT:
                yield deliveries, delivery


# ------------------------------------------------------------------------------
# The messages that receives in order were given, by attempt. A client that did not get the answer asks again in the
# same attempt, and gets the same: otherwise it would wait until the time of messages is over that it never saw.


Give = Callable[[QueueDeliveries, Delivery, PopRequest], Delivered | None]
_Key = tuple[PopClient, str, str, str]  # client, group, topic, attempt


class PopBatches:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._given: OrderedDict[_Key, list[tuple[QueueDeliveries, Delivery, int]]] = OrderedDict()

    def note(self, request: PopRequest, batch: Sequence[tuple[QueueDeliveries, Delivery]]) -> None:
        if request.attempt_id:
            self._given[_key(request)] = [(deliveries, delivery, delivery.pop_ms) for deliveries, delivery in batch]
            if len(self._given) > self._limits.max_attempt_ids:
                self._given.popitem(last=False)

    def again(self, request: PopRequest, give: Give) -> PopResult | None:
        """The messages that the attempt was given and has in flight; None if there are none."""
        given = self._given.pop(_key(request), None) if request.attempt_id else None
        if given is None:
            return None
        still = [
            (deliveries, delivery)
            for deliveries, delivery, pop_ms in given
            if delivery.state is DeliveryState.IN_FLIGHT and delivery.pop_ms == pop_ms
        ]
        found = [message for of, delivery in still if (message := give(of, delivery, request)) is not None]
        if not found:
            return None
        self.note(request, still)
        return PopResult(Why.FOUND, tuple(found), found[0].pop_ms, request.invisible_ms)


def _key(request: PopRequest) -> _Key:
    return request.client, request.group, request.topic, request.attempt_id or ""


# ------------------------------------------------------------------------------
# Copies of messages that nobody could handle: among the group's dead letters, or in its retry topic.


_OF_OTHER_TIMES: Final = (props.DELAY, props.WAIT)  # left in, it would be delayed once more


class Letters:
    def __init__(self, topics: Topics, appender: Appender, settings: GroupConfigs, groups: ConsumerGroups) -> None:
        self._topics = topics
        self._settings = settings
        self._groups = groups
        self._appender = appender
        self._store = appender.store

    def bury(self, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        """Stores the copy. Raises StoreError for a message that cannot be read, or a copy that cannot be stored."""
        record = self._store.message(deliveries.queue, delivery.offset)
        name = names.dlq_topic(deliveries.group)
        topic = self._topics.ensure(TopicConfig(name, 1, 1), self._store.end)
        text = _dead(record, reason)
        with self._appender.batch():
            queue = self._store.queue(topic.name, 0)
            times = record.reconsume_times + max(delivery.attempts - 1, 0)
            self._appender.stage_again(record, queue, text.encode(), tag_code(text), reconsume_times=times)
        log.warning(
            "message_given_up",
            group=deliveries.group, topic=record.topic, queue=record.queue_id, offset=record.queue_offset,
            attempts=delivery.attempts, reason=reason,
        )  # fmt: skip

    def are_sent_back(self, name: str) -> bool:
        """Whether messages of a group may be sent back: it keeps no order, and somebody reads its retry topic."""
        settings, group, topic = self._settings.get(name), self._groups.get(name), names.retry_topic(name)
        may_be = settings is not None and not settings.consume_orderly and settings.retry_queues > 0
        return may_be and group is not None and any(topic in item.subscriptions for item in group.members.values())

    def send_back(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        """Stores the copy for members that pull, as if one of them had sent the message back. Raises as `bury` does."""
        record = self._store.message(deliveries.queue, delivery.offset)
        settings = self._settings.get(deliveries.group)
        queues = settings.retry_queues if settings is not None else 1
        topic = self._topics.ensure(TopicConfig(names.retry_topic(deliveries.group), queues, queues), self._store.end)
        text = sent_back(record, "")
        with self._appender.batch():
            queue = self._store.queue(topic.name, delivery.offset % (topic.write_queues or 1))
            times = record.reconsume_times + delivery.attempts
            self._appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def _dead(record: Record, reason: str) -> str:
    """The properties of a dead letter: where it comes from and why, if there is room for that."""
    text = record.properties
    reason = "".join(char if char.isprintable() else " " for char in reason)  # it may hold what a client has sent
    for name in _OF_OTHER_TIMES:
        text = props.without(text, name)
    message_id = props.find(text, props.UNIQUE_KEY) or record.offset_id
    topic = props.find(text, props.RETRY_TOPIC) or record.topic
    for name, value in (
        (props.DLQ_ORIGIN_TOPIC, topic),
        (props.DLQ_ORIGIN_MESSAGE_ID, message_id),
        (props.DLQ_REASON, reason),
    ):
        longer = props.appended(props.without(text, name), name, value)
        if len(longer.encode()) <= MAX_PROPERTY_BYTES:
            text = longer
    return text
