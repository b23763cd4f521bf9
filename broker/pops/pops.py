"""Messages shared among the clients of a group: each is in the hands of one at a time, until it is done with it.

A door hands in the client's wish, in values, and a function for the answer, which comes at once or later, and once.
Acknowledgements are answered when they are on the disk, all those of one turn of the loop behind one write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from ...protocol.message import tried
from ...protocol.popped import reconsume_times_in
from ...protocol.work import Work
from ..clock import Clock
from ..config import (
    DEAD_LETTER_RETRY_S,
    LIMITS,
    MAX_POP_MESSAGES,
    POOL_SENT_BACK,
    POP_CLIENT_SILENT_S,
    LimitExceeded,
    Limits,
)
from ..running.jobs import Job, run
from ..sessions.recent import Recent
from ..sessions.reports import Reports
from ..sessions.session import Session
from ..store.consume_queue import ConsumeQueue
from ..store.files import Damaged, StoreError, StoreFull
from .batches import PopBatches
from .book import Book
from .deadlines import Deadlines
from .deliveries import QueueDeliveries, TakenDelivery
from .division import Division, OtherReaders
from .handles import encode_handle
from .hands import Hands
from .letters import Letters
from .pool import Pool, Wait
from .pools import Pools, PopSource
from .settling import Acknowledging, Answered, Keeping
from .states import Delivery, DeliveryState, Event
from .values import AckStatus, Changed, Delivered, PopClient, PopRequest, PopResult, Why
from .waits import Waits

log = structlog.get_logger("rocketlet.pops")

_UNBURIED_HINT = "the messages stay in flight, and are tried again every second; free disk space, or delete topics"

Answer = Callable[[PopResult], object]

_OVER: Final = object()


class Pops:
    """Raises StoreError if the state of the last run cannot be read."""

    def __init__(
        self,
        broker_name: str,
        source: PopSource,
        keeping: Keeping,
        members: OtherReaders,
        clock: Clock,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._broker_name = broker_name
        topics, appender, self._offsets, self._settings = source
        self._clock = clock
        self._soon = keeping.soon
        self._hands = Hands(clock)
        self._unburied, self._reports = Recent(clock.monotonic_s), Reports(clock.monotonic_s)
        self.unburied = self._unburied.texts
        self._letters = Letters(topics, appender, self._settings, members.groups)
        self._deadlines = Deadlines(clock, self._expire)
        self._batches = PopBatches(limits)
        self._book = Book(keeping.frames, topics.identity, clock)
        self._pools = Pools(source, self._book.next_number, limits)
        self.pools = self._pools.all  # empty as long as nobody pops: others then pay one look
        self.clients = self._pools.clients
        self.unfinished, self.redelivered = self._pools.unfinished, self._pools.redelivered
        self.topics_of = self._pools.topics_of
        self.serves = self._pools.serves
        self.waits = self._pools.waits
        self.peek = self._pools.peek
        self.popped = self._pools.popped
        self.numbers, self.full = self._pools.numbers, self._pools.full
        self._settling = Acknowledging(self._book, self._offsets, clock, keeping.when_kept, self._soon, self._freed)
        self._waits = Waits(clock, self.put_back, limits.max_waiting_receives)
        self._division = Division(broker_name, members, self._pools, self._let_go, self._gained, self._yield, limits)
        self.changed = self._division.changed
        self.pull_fault = self._division.pull_fault
        self._is_stopped = False
        self._losing: deque[Work[None]] = deque()
        self._take_over()

    def _take_over(self) -> None:
        """Take over from the last run: handles stay valid, and deadlines stay as they are.

        The broker extends none of these deliveries any more. It may have ended before their response reached the client,
        which then knows nothing of them although its heartbeats go on."""
        for deliveries in self._pools.adopt(self._book.read(), self._book.monotonic_s):
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
        settings = self._settings.ensure(group)
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
        self._settling.note(deliveries)
        return [self._delivered(deliveries, item, request.invisible_ms) for item in taken]

    def _delivered(self, deliveries: QueueDeliveries, taken: TakenDelivery, invisible_ms: int) -> Delivered:
        delivery, record = taken
        queue = deliveries.queue
        handle = encode_handle(self._broker_name, queue.queue_id, delivery.offset, delivery.pop_ms, invisible_ms)
        attempt = max(tried(delivery.attempts + reconsume_times_in(record)), 1)
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

    def ack(self, group: str, topic: str, handles: Sequence[str], answer: Answered) -> None:
        """The client is done with these messages. `answer` gets an outcome for each, when that is on the disk."""
        self._settling.settle([self._done(self._find(group, topic, handle)) for handle in handles], answer)

    def _done(self, found: tuple[QueueDeliveries, Delivery] | AckStatus) -> AckStatus:
        if isinstance(found, AckStatus):
            return found
        if found[1].renewals >= 0:
            self._hands.take(found[1])
        return self._settling.acknowledge(*found)

    def change(self, group: str, topic: str, handle: str, invisible_ms: int, *, is_counted: bool = True) -> Changed:
        """The message comes again after that time; 0: at once, a nack. It is not prolonged any more. is_counted: whether
        this was a try. A finished message stays finished."""
        found = self._find(group, topic, handle)
        if isinstance(found, AckStatus):
            return Changed(found, handle)
        deliveries, delivery = found
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            return Changed(AckStatus.DONE, handle, delivery.pop_ms)
        outcome = AckStatus.LATE if delivery.state is DeliveryState.VISIBLE else AckStatus.DONE
        if delivery.renewals >= 0:
            self._hands.take(delivery)
        if not is_counted:
            delivery.attempts = max(delivery.attempts - 1, 0)
        if invisible_ms > 0:
            delivery.turn(Event.CHANGE)
            delivery.is_delayed = True
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
        settings = self._settings.ensure(deliveries.group)
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


def _answered(wait: Wait, received: PopResult) -> Wait:
    wait.end()
    wait.answer(received)
    return wait
