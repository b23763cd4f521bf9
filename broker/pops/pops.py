"""POP, ACK and CHANGE_MESSAGE_INVISIBLETIME for both protocol servers: `Pops` is the entry point."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import NamedTuple

import structlog

from ...protocol import names
from ...protocol.bodies import LOOKS, SLICE, TopicConfig, Work
from ...protocol.message import reconsume_times_in, tried
from ...protocol.names import SQL92
from ..config import (
    DEAD_LETTER_RETRY_S,
    MAX_IDLE_LITE,
    MAX_POP_MESSAGES,
    MAX_RENEWED_S,
    POOL_SENT_BACK,
    RENEWAL_STEPS_S,
    LimitExceeded,
)
from ..groups.group import ConsumerGroup, FinishedAhead
from ..groups.rates import Rates, TokenBucket
from ..groups.settings import GroupConfigs
from ..groups.stages import QueueKey
from ..messages.filters import Filters
from ..messages.lite import LiteTopic
from ..messages.sending import is_last_attempt
from ..messages.statistics import Statistics
from ..runtime.adoption import Adoption
from ..runtime.arrivals import Arrivals
from ..runtime.jobs import Job, run
from ..runtime.runtime import Runtime
from ..runtime.timeouts import Timeouts
from ..sessions.refusal import Reason, Refusal
from ..sessions.reports import Recent, Reports
from ..sessions.session import Session
from ..store.files import Damaged, StoreError, StoreFull
from ..store.index import ConsumeQueue
from .dead_letters import DeadLetterWriter
from .deadlines import Deadlines
from .deliveries import Delivery, DeliveryState, KeptQueue, ReadDelivery
from .division import Division
from .journal import Answered, JournalWriter, PopJournal
from .lite import LitePool, is_lite_pool
from .lite_subscriptions import LiteExpiry, LiteSubscriptions
from .pool import Pool, QueueDeliveries, QueuePool, Receive, is_queue_pool
from .pools import Pools
from .requests import AckStatus, Changed, Delivered, PopAttempt, PopClient, PopRequest, PopResult, Why, encode_handle

log = structlog.get_logger("rocketlet.pops")


# ------------------------------------------------------------------------------
# Messages shared among the clients of a group: each message is in flight to one client at a time.
#
# A protocol server passes in a `Receive`, and gets its result immediately, or by `Receive.respond`. One write to the
# journal serves the acknowledgements of an event-loop iteration. Their responses follow once it has ended or failed.


_UNBURIED_HINT = "the messages stay in flight, and the broker retries every second; free disk space, or delete topics"


class Pops:
    """The entry point of POP. Raises StoreError if the state of the last run cannot be read."""

    def __init__(
        self,
        runtime: Runtime,
        filters: Filters,
        settings: GroupConfigs,
        pools: Pools,
        journal: PopJournal,
        dead_letters: DeadLetterWriter,
        division: Division,
        statistics: Statistics,
        rates: Rates,
    ) -> None:
        self._clock = clock = runtime.clock
        self._limits, self._turns = runtime.limits, runtime.turns
        self._filters, self._settings = filters, settings
        self._statistics, self._rates = statistics, rates
        self.unstored_dead_letters, self._reports = Recent(clock), Reports(clock)
        self._timeouts = Timeouts(runtime.clock, runtime.turns)
        self._dead_letters = dead_letters
        self._deadlines = Deadlines(clock, self.expire)
        self._attempts: OrderedDict[PopAttempt, list[GivenDelivery]] = OrderedDict()
        self._journal = journal
        self.begin_saving = journal.begin_saving
        self.pools = pools
        self.lite = LiteSubscriptions(runtime, settings, pools, self)
        self.expiry = LiteExpiry(runtime, pools, self)
        self._writer = JournalWriter(journal, clock, self.finished)
        self.division = division
        division.owner = self
        self._is_stopped = False
        self._served_later: dict[Pool, None] = {}
        self._awaits_token: set[Pool] = set()
        self._arrivals = Arrivals(runtime, self._waking)
        self._lite_arrivals = Arrivals(runtime, self._waking_lites)
        self._adopt(runtime.adoption)

    def _adopt(self, adoption: Adoption) -> None:
        """Continue the deliveries of the last run, with their receipt handles and deadlines.

        The broker extends none of these deliveries any more. The last run may have ended before the response with them
        reached the client, whose heartbeats continue nevertheless."""
        kept = self._journal.read()
        self.pools.source.last_number = self._journal.last_number
        adoption.each("popped messages", kept.values(), self._adopt_queue)
        for pool in self.pools.all:
            pool.queues.make_ready()
        self.division.adopt(adoption)
        self._journal.keep_left(kept)
        try:
            run(self._journal.saving(self.pools.deliveries))
        except StoreFull as error:
            log.error("save_failed", reason=str(error))

    def _adopt_queue(self, kept: KeptQueue) -> None:
        deliveries = self.pools.adopt(kept, self._journal.monotonic_s)
        if deliveries is None:
            return
        for delivery in deliveries.unfinished.values():
            if delivery.state is DeliveryState.IN_FLIGHT:
                self._deadlines.put(deliveries, (delivery,), delivery.deadline_s)

    # Receiving

    def receive(self, receive: Receive) -> PopResult | None:
        """Return the result of a receive, or None if it waits for a message. A receive that waited gets its result by
        `respond`, unless it was cancelled.

        The caller passes messages that do not reach their client to `put_back`.

        Raises:
            Refusal: The filter cannot be parsed, too many are new, or the group receives lite topics and no others.
            StoreError, OSError: The messages cannot be read.
            LimitExceeded: The group has too many offsets.
        """
        request = receive.request
        if self._is_stopped:
            return PopResult(Why.STOPPED)
        subscription = request.subscription
        if subscription is not None and subscription.kind == SQL92 and request.matches is None:
            assert request.session is not None, "a filter is parsed for a session"
            matches = self._filters.find(subscription.expression, request.session.address)
            receive.request = request = replace(request, matches=matches)
        now_s = self._clock.monotonic_s()
        settings = self._settings.get(request.group)
        if settings is not None and settings.lite_topic:
            if not self.pools.is_bound(request.group, request.topic):
                self._settings.check_unbound(settings)
            pool: Pool | None = self.lite_pool(request.group, request.topic)
        else:
            pool = self.pools.find(request.group, request.topic)
        is_used = pool is not None and pool.is_used(now_s)
        if pool is None or (is_queue_pool(pool) and (pool.queues.owned is not None or not is_used)):
            fault = self.division.admit(request, pool, is_used=is_used)
            if fault is not None:
                return PopResult(Why.PULLED, fault=fault)
            pool = self.pools.get_or_make(request)
        if self.pools.clients.record_request(pool, request, now_s) and request.session is not None:
            request.session.on_lost(self._session_lost)
        pool.is_in_order = pool.is_in_order or request.in_order
        result = (self._repeat(request) if request.attempt_id else None) or self._pop(pool, request)
        if result.why is not Why.NOTHING_NEW or request.wait_ms <= 0:
            return result
        if not self.pools.clients.receives.has_room(receive.address):
            return PopResult(Why.TOO_MANY_WAIT)
        pool.hold(receive)
        wait_s, nothing = request.wait_ms / 1000, PopResult(Why.NOTHING_NEW)
        receive.timer = self._timeouts.call_later(wait_s, partial(self._end, receive, nothing))
        if pool.is_partial:
            self._serve_later(pool)
        return None

    def _pop(self, pool: Pool, request: PopRequest) -> PopResult:
        if request.count <= 0:
            return PopResult(Why.FOUND if pool.queues.has_some(request) else Why.NOTHING_NEW)
        now_ms = self._clock.time_ms()
        wanted, room = min(pool.queues.allows(request), MAX_POP_MESSAGES), request.max_bytes
        if wanted <= 0:
            return PopResult(Why.TOO_MANY_UNFINISHED)
        settings = self._settings.get(request.group)
        bucket = self._rates.bucket(settings, request.topic) if settings is not None and settings.has_rate else None
        now_s = self._clock.monotonic_s() if bucket is not None else 0.0
        if bucket is not None:
            wanted = min(wanted, bucket.available(now_s))
            if wanted <= 0:
                self._serve_with_token(pool, bucket, now_s)
                return PopResult(Why.NOTHING_NEW)
        is_in_order = pool.queues.is_in_order
        found: list[Delivered] = []
        given: list[GivenDelivery] = []
        pool.is_partial = False
        for deliveries, part in pool.queues.tried(request):
            self._writer.follow_reset(deliveries)
            if deliveries.is_in_order is not is_in_order:
                deliveries.set_order(is_in_order)
            before = deliveries.next
            allowed = self._limits.max_unfinished_of_group - pool.of.unfinished
            selected = deliveries.select(request, wanted - len(found), room, allowed, part)
            if selected:
                room -= self._deliver(deliveries, selected, request, now_ms, found)
                if request.attempt_id and (is_in_order or deliveries.is_lite):
                    given += [GivenDelivery(deliveries, item.delivery, item.delivery.pop_ms) for item in selected]
            else:
                pool.is_partial = pool.is_partial or before < deliveries.next < deliveries.queue.next
            if deliveries.is_passed or deliveries.fresh_behind:
                self._record_passed(deliveries)
            pool.queues.rotate(deliveries)
            if len(found) >= wanted or room <= 0:
                break
        if not found:
            return PopResult(Why.NOTHING_NEW)
        if given:
            self._record_attempt(request, given)
        if bucket is not None:
            bucket.take(len(found), now_s)
        self._statistics.note_got(f"{request.topic}@{request.group}", len(found), request.max_bytes - room)
        return PopResult(Why.FOUND, tuple(found), found[0].pop_ms, request.invisible_ms, pool.queues.rest())

    def _record_passed(self, deliveries: QueueDeliveries) -> None:
        """Record messages that were read and not delivered."""
        if deliveries.fresh_behind:
            self._journal.kept_behind(deliveries)
        if deliveries.is_passed:
            self._journal.passed(deliveries)
        self._writer.commit_soon(deliveries)

    def _deliver(
        self,
        deliveries: QueueDeliveries,
        selected: list[ReadDelivery],
        request: PopRequest,
        now_ms: int,
        found: list[Delivered],
    ) -> int:
        """Put selected messages in flight, and add them to those found for a client. Returns their size in bytes."""
        now_s = self._clock.monotonic_s()
        delivered = deliveries.deliver(selected, request, now_s, now_ms)
        if request.auto_renew:
            for delivery in delivered:
                self.pools.clients.extend(deliveries, delivery)
        deliveries.pool.queues.delivered(request.client, delivered)
        self._deadlines.put(deliveries, delivered, delivered[0].deadline_s)
        self._journal.popped(deliveries, delivered)
        self._writer.commit_soon(deliveries)
        size = 0
        for delivery, record in selected:
            found.append(self._delivered(deliveries, delivery, record, request.invisible_ms))
            size += len(record)
        return size

    def _delivered(
        self, deliveries: QueueDeliveries, delivery: Delivery, record: bytes, invisible_ms: int
    ) -> Delivered:
        queue = deliveries.queue
        handle = encode_handle(
            self.pools.broker_name,
            queue.queue_id,
            delivery.offset,
            delivery.pop_ms,
            invisible_ms,
            lite_topic=deliveries.messages.lite_topic,
        )
        attempt = tried(delivery.attempts + reconsume_times_in(record))
        return Delivered(record, queue.topic, queue.queue_id, delivery.offset, attempt, handle, delivery.pop_ms)

    # Repeated receives in ordered and lite groups: a client that did not get a result repeats the receive with the same
    # attempt id, and gets those of its messages that are still in flight. Otherwise it would wait until the invisible time
    # of messages that it never received has passed.

    def _record_attempt(self, request: PopRequest, given: list[GivenDelivery]) -> None:
        self._attempts[request.attempt] = given
        if len(self._attempts) > self._limits.max_attempt_ids:
            self._attempts.popitem(last=False)

    def _repeat(self, request: PopRequest) -> PopResult | None:
        """Return the messages of an earlier receive with this attempt id that are still in flight, with a new visibility
        timeout; None without any."""
        given = self._attempts.pop(request.attempt, None)
        still = [item for item in given or () if item.is_in_flight]
        found: list[Delivered] = []
        for deliveries, delivery, _ in still:
            record = deliveries.messages.record(delivery.offset)
            if record is not None:
                self._prolong(deliveries, delivery, self._clock.monotonic_s() + request.invisible_ms / 1000)
                found.append(self._delivered(deliveries, delivery, record, request.invisible_ms))
        if not found:
            return None
        self._record_attempt(request, still)
        return PopResult(Why.FOUND, tuple(found), found[0].pop_ms, request.invisible_ms)

    # Receives that wait

    def appended(self, queues: Iterable[ConsumeQueue]) -> None:
        """Serve the receives that wait for messages of these queues. Lite pools are served by `lite_appended`."""
        self._arrivals.add((queue.topic, queue) for queue in queues if self.pools.of_topic(queue.topic))

    def _waking(self, topic: str, queues: Iterable[ConsumeQueue]) -> Work[None]:
        for queue in queues:
            for number, pool in enumerate(list(self.pools.of_topic(topic)), 1):
                if is_queue_pool(pool) and pool in self.pools.all:
                    pool.queues.offer(queue.queue_id)
                    yield from self._serving(pool)
                if number % SLICE == 0:
                    yield

    def lite_appended(self, lites: Iterable[LiteTopic]) -> None:
        """Serve the receives that wait for messages of these lite topics."""
        self.expiry.appended(lites)
        self._lite_arrivals.add((lite.queue.topic, lite) for lite in lites if self.pools.of_topic(lite.queue.topic))

    def _waking_lites(self, parent: str, lites: Iterable[LiteTopic]) -> Work[None]:
        for index, pool in enumerate(self.pools.lite_pools(parent), 1):
            if index % SLICE == 0:
                yield
            for number, lite in enumerate(lites, 1):
                if pool in self.pools.all and self.pools.lites.get(parent, lite.name) is lite:
                    pool.queues.offer(lite)
                if number % SLICE == 0:
                    yield
            yield from self._serving(pool)

    def serve(self, pool: Pool) -> None:
        """Serve the receives that wait, because the pool may have a message or a further queue."""
        if pool.waiting:
            self._turns.do_some(self._serving(pool))

    def _serving(self, pool: Pool) -> Work[None]:
        """Serve the receives that wait in a pool, one per piece."""
        while pool in self.pools.all and not self._is_stopped and (receive := pool.queues.next_receive()) is not None:
            try:
                result = self._pop(pool, receive.request)
            except LimitExceeded as error:
                if self._reports.is_due(f"{pool.group}:", str(error)):
                    log.error("receive_failed", group=pool.group, topic=pool.topic, reason=str(error))
                result = PopResult(Why.FAILED, fault=str(error))
            except Exception as error:
                log.exception("receive_failed", group=pool.group, topic=pool.topic)
                result = PopResult(Why.FAILED, fault=str(error))
            if result.why is not Why.NOTHING_NEW:
                self._end(receive, result)
            else:
                if pool.is_partial:
                    self._serve_later(pool)
                if not is_lite_pool(pool) or pool.queues.next_receive() is receive:
                    return  # in lite topics others may have something
            yield

    def _serve_with_token(self, pool: Pool, bucket: TokenBucket, now_s: float) -> None:
        """Serve the receives of a pool when there are tokens for one. One timer for each pool."""
        if pool not in self._awaits_token:
            self._awaits_token.add(pool)
            self._clock.call_later(bucket.wait_s(now_s), self._turns.call, self._token_came, pool)

    def _token_came(self, pool: Pool) -> None:
        self._awaits_token.discard(pool)
        self.serve(pool)

    def _serve_later(self, pool: Pool) -> None:
        """Serve the receives of a pool in the next event-loop iteration."""
        if pool.waiting:
            if not self._served_later:
                self._clock.call_soon(self._serve_due)
            self._served_later[pool] = None

    def _serve_due(self) -> None:
        pools, self._served_later = list(self._served_later), {}
        self._turns.do_some(_in_order(map(self._serving, pools)))

    def _end(self, receive: Receive, result: PopResult) -> None:
        """Give a receive its result, unless it has one or was cancelled."""
        if receive.is_over:
            return
        if receive.pool is not None:
            receive.pool.remove(receive)
        receive.is_over = True
        try:
            receive.respond(result)
        except Exception:  # a protocol server that fails must not fail the request that stored the message
            request = receive.request
            log.exception("receive_not_answered", group=request.group, topic=request.topic)
            self.put_back(request.group, result.messages)

    # Outcomes of messages

    def put_back(self, group: str, messages: Iterable[Delivered]) -> None:
        """Make messages of a result visible that did not reach its client, if they are still in flight by its handles. Their
        attempts do not count."""
        for message in messages:
            found = self.pools.delivery(group, message.topic, message.handle)
            if isinstance(found, AckStatus) or found[1].state is not DeliveryState.IN_FLIGHT:
                continue
            deliveries, delivery = found
            deliveries.uncount(delivery)
            self._release(deliveries, delivery)
            # Later: the next receive may be of the same client, which puts its result back, too.
            self._serve_later(deliveries.pool)

    def ack(
        self,
        group: str,
        topic: str,
        handles: Sequence[str],
        answer: Answered,
        *,
        takes_late: bool = True,
        topics: Sequence[str] | None = None,
    ) -> None:
        """Acknowledge messages by their receipt handles. `answer` is called with an outcome for each, once the
        acknowledgements are written to the disk or the write has failed; immediately if no outcome is DONE or LATE.

        Args:
            topics: the topic of each message, if they differ, as those of lite topics do.
            takes_late: True if this finishes messages whose visibility timeout has expired, unless they were redelivered.
        """
        outcomes = []
        for of_topic, handle in zip(topics or repeat(topic, len(handles)), handles, strict=True):
            found = self.pools.delivery(group, of_topic, handle)
            if isinstance(found, AckStatus):
                outcomes.append(found)
            elif not takes_late and found[1].state is DeliveryState.VISIBLE:
                outcomes.append(AckStatus.TOO_LATE)
            else:
                outcomes.append(self._finish(*found))
        self._writer.answer_when_written(outcomes, answer)

    def _finish(self, deliveries: QueueDeliveries, delivery: Delivery) -> AckStatus:
        """Acknowledge a delivery, and return the outcome that it has unless the write fails."""
        outcome = AckStatus.LATE if delivery.state is DeliveryState.VISIBLE else AckStatus.DONE
        if deliveries.acknowledge(delivery):
            self._writer.acknowledge(deliveries, delivery)
        return outcome

    def change(
        self,
        group: str,
        topic: str,
        handle: str,
        invisible_ms: int,
        *,
        is_counted: bool = True,
        is_alone: bool = False,
        renews: bool = False,
        takes_late: bool = True,
    ) -> Changed:
        """Change the invisible time of a message; 0 is a nack, which makes a message in flight visible immediately, or
        dead-letters it after its last attempt. From now on, the broker does not extend the invisible time on its own. A
        finished message stays finished, because another client may have acknowledged it.

        Args:
            is_counted: False if this delivery does not count as an attempt. In a lite topic, the same change is then made to
                the messages in flight that were popped together with this one.
            is_alone: True if these other messages stay as they are.
            renews: True if the client still handles the message.
            takes_late: as for `ack`.
        """
        found = self.pools.delivery(group, topic, handle)
        if isinstance(found, AckStatus):
            return Changed(AckStatus.FINISHED if found is AckStatus.DONE else found, handle)
        deliveries, delivery = found
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            return Changed(AckStatus.DONE, handle, delivery.pop_ms)
        is_late = delivery.state is DeliveryState.VISIBLE
        if is_late and not takes_late:
            return Changed(AckStatus.TOO_LATE, handle)
        if delivery.renewals >= 0:
            self.pools.clients.stop_extending(delivery)
        until_s = self._clock.monotonic_s() + invisible_ms / 1000
        if not is_counted:
            deliveries.uncount(delivery)
            # The client of a lite topic suspends all messages that it has popped together.
            for other in deliveries.popped_with(delivery) if deliveries.is_lite and not is_alone else ():
                deliveries.uncount(other)
                deliveries.change(other, is_delayed=True)
                self._prolong(deliveries, other, until_s)
        if invisible_ms > 0:
            deliveries.change(delivery, is_delayed=not renews)
            self._prolong(deliveries, delivery, until_s)
        elif delivery.state is DeliveryState.IN_FLIGHT:
            self._redeliver(deliveries, delivery, "its last consumer could not handle it")
            self.serve(deliveries.pool)
        until_ms = self._clock.time_ms() + invisible_ms
        outcome = AckStatus.LATE if is_late else AckStatus.DONE
        return Changed(outcome, handle, delivery.pop_ms, until_ms - delivery.pop_ms)

    def to_dead_letters(self, group: str, topic: str, handle: str, reason: str, answer: Answered) -> None:
        """Store a copy in the group's dead-letter topic and acknowledge the message, unless it is acknowledged already.
        Raises the errors of `DeadLetterWriter.dead_letter`."""
        found = self.pools.delivery(group, topic, handle)
        if isinstance(found, AckStatus):
            outcome = found
        else:
            if found[1].state is not DeliveryState.ACKNOWLEDGED:
                self._dead_letters.dead_letter(*found, reason)
            outcome = self._finish(*found)
        self._writer.answer_when_written([outcome], answer)

    # Deadlines

    def expire(self, deliveries: QueueDeliveries, due: list[Delivery]) -> None:
        """Redeliver, dead-letter or extend deliveries of one queue whose deadline has passed."""
        for delivery in due:
            until_s = self._extended_s(delivery) if deliveries.gives_again else None
            if until_s is None:
                self._redeliver(deliveries, delivery, "no client acknowledged it in time")
            else:
                self._prolong(deliveries, delivery, until_s)
        self.serve(deliveries.pool)
        self._hand_over_free_queues(deliveries.pool)

    def _extended_s(self, delivery: Delivery) -> float | None:
        """Return the new deadline of a delivery that the broker extends, and count the extension; None if it does not."""
        if delivery.renewals < 0 or delivery.client is None:
            return None
        client, now_s = self.pools.clients.all.get(delivery.client), self._clock.monotonic_s()
        end_s = delivery.since_s + MAX_RENEWED_S
        if client is None or self.pools.clients.is_silent(client) or now_s >= end_s:
            return None
        step_s = RENEWAL_STEPS_S[min(delivery.renewals, len(RENEWAL_STEPS_S) - 1)]
        delivery.renewals += 1
        return min(now_s + step_s, end_s)

    def _prolong(self, deliveries: QueueDeliveries, delivery: Delivery, until_s: float) -> None:
        delivery.deadline_s = until_s
        self._deadlines.put(deliveries, (delivery,), until_s)
        self._record_changed(deliveries, delivery)

    def _redeliver(self, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        """Make a message visible again, or dead-letter it if it can be read and has had all its attempts. If the dead letter
        cannot be stored, the message stays in flight, and storing is retried after `DEAD_LETTER_RETRY_S`."""
        settings = self._settings.get(deliveries.group)  # messages of a deleted group do not create it
        attempts = delivery.attempts
        if settings is not None and deliveries.queue.topic.startswith(names.RETRY_PREFIX):
            record = deliveries.messages.record(delivery.offset)  # it has the attempts of members that pulled it
            attempts += reconsume_times_in(record) if record is not None else 0
        if settings is None or not is_last_attempt(attempts, settings):
            self._release(deliveries, delivery)
            return
        try:
            self._dead_letters.dead_letter(deliveries, delivery, f"tried {attempts} times; {reason}")
        except Damaged:  # it cannot be read, and the next receive drops it with a log event
            self._release(deliveries, delivery)
        except Exception as error:
            self._report_unstored(deliveries, error)
            self._prolong(deliveries, delivery, self._clock.monotonic_s() + DEAD_LETTER_RETRY_S)
        else:
            self._finish(deliveries, delivery)

    def _report_unstored(self, deliveries: QueueDeliveries, error: Exception) -> None:
        """Report a dead letter that cannot be stored: to `doctor` until REFUSED_S after the last retry, and to the log, each
        StoreError and LimitExceeded at most once in REPORT_AGAIN_S."""
        group, reason = deliveries.group, str(error)
        self.unstored_dead_letters.record((group, reason), f"{group}: {reason}")
        if not isinstance(error, StoreError | LimitExceeded):
            log.error("dead_letter_failed", group=group, reason=reason, exc_info=error)
        elif self._reports.is_due(f"{group}:", reason):
            log.error("dead_letter_failed", group=group, reason=reason, hint=_UNBURIED_HINT)

    def _release(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        deliveries.release(delivery)
        if delivery.deadline_s > self._clock.monotonic_s():  # else the journal has the deadline that has passed
            self._record_changed(deliveries, delivery)
        deliveries.pool.refresh(deliveries)

    def _record_changed(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        self._journal.deadline_changed(deliveries, delivery)
        self._writer.write_soon()

    def finished(self, queues: Iterable[QueueDeliveries]) -> None:
        """Serve waiting receives and hand over leaving queues, because acknowledgements of these queues were written, or were
        refused by the disk."""
        for deliveries in queues:
            pool = deliveries.pool
            if not deliveries.is_ended:
                pool.refresh(deliveries)
                if deliveries.is_lite and is_lite_pool(pool):
                    self._lite_finished(pool, deliveries)
            self.serve(pool)
            self._hand_over_free_queues(pool)

    def _hand_over_free_queues(self, pool: Pool) -> None:
        if is_queue_pool(pool) and pool.queues.leaving:
            self.division.progressed(pool)

    # Lite topics

    def lite_pool(self, group: str, parent: str) -> LitePool:
        """Return the pool of a lite group, created if there is none. A pool of the parent topic's queues, from before the
        group was bound, ends."""
        former = self.pools.find_queues(group, parent)
        if former is not None:
            self.division.pool_deleted(former)
            self.yield_pool(former)
        return self.pools.lite_pool(group, parent)

    def _lite_finished(self, pool: LitePool, deliveries: QueueDeliveries) -> None:
        """Report a lite topic that the group has finished, and end idle deliveries of the pool beyond MAX_IDLE_LITE."""
        lite = deliveries.queue
        if not deliveries.unfinished and isinstance(lite, LiteTopic) and deliveries.next >= lite.next:
            self.expiry.finished(lite)
        while len(pool.queues.idle) > MAX_IDLE_LITE:
            idle, _ = pool.queues.idle.popitem(last=False)
            if not idle.unfinished:
                self._yield_queue(idle)

    def lite_offset_reset(self, pool: LitePool, lite: LiteTopic) -> None:
        """Continue from the offset that was set for a lite topic. Messages popped before can no longer be acknowledged."""
        deliveries, offset, now_ms = (
            pool.queues.deliveries.get(lite),
            pool.queues.offsets.get(lite.name, 0),
            self._clock.time_ms(),
        )
        if deliveries is not None:
            deliveries.restart(offset, now_ms)
            self._journal.restarted(deliveries)
            self._write_now()
        elif self._journal.lite_offset_set(pool.group, lite, offset, now_ms):
            self._write_now()
        pool.queues.offer(lite)
        self.serve(pool)

    def end_lite(self, pool: LitePool, lite: LiteTopic) -> None:
        """End the group's deliveries of a deleted lite topic."""
        had_left = self._journal.lite_deleted(pool.group, lite)
        if (deliveries := pool.queues.deliveries.get(lite)) is not None:
            self._journal.ended(deliveries)
            deliveries.pool.close(deliveries)
        if had_left or deliveries is not None:
            self._write_now()
        pool.queues.lite_deleted(lite)

    # Queues that are handed over (PoolOwner)

    def release_queue(self, pool: QueuePool, queue_id: int, *, is_lost: bool) -> bool:
        """End the deliveries of a queue that members pull from now on, from its lowest unfinished offset. Returns False if
        unfinished messages are sent back to the retry topic first (`_sends_back`); if they may not be, finished messages
        after them are left out of what members get (`FinishedAhead`). is_lost: True if the pool has lost its lease, so that
        no message is sent back."""
        deliveries = pool.queues.deliveries.get(queue_id)
        if deliveries is None:
            return True
        if not is_lost and self._sends_back(deliveries):
            return False
        deliveries.finish([item for item in deliveries.unfinished.values() if item.state is DeliveryState.ACKNOWLEDGED])
        ahead = deliveries.finished_ahead()
        self._yield_queue(deliveries, ahead)
        self.pools.source.hand_over(pool, queue_id, ahead)
        self._write_now()
        return True

    def _sends_back(self, deliveries: QueueDeliveries) -> bool:
        """Send unfinished messages that lie before a finished one to the group's retry topic, some at a time. Return
        True if there are such messages; False if there are none, if they may not be sent back (`may_send_back`), or if
        storing them fails."""
        left = deliveries.before_finished() if self._dead_letters.may_send_back(deliveries.group) else []
        if any(delivery.state is DeliveryState.ACKNOWLEDGED for delivery in left):
            return True  # wait until the acknowledgements of these deliveries are written to the disk
        try:
            for delivery in left[:POOL_SENT_BACK]:
                self._dead_letters.send_back(deliveries, delivery)
                self._finish(deliveries, delivery)
        except (StoreError, LimitExceeded) as error:
            log.error("send_back_failed", group=deliveries.group, reason=str(error))
            return False
        return bool(left)

    def yield_pool(self, pool: Pool) -> None:
        """End a pool with its deliveries. The group continues from its offsets."""
        for deliveries in list(pool.queues.opened()):
            self._yield_queue(deliveries)
        self.pools.remove(pool)
        self._write_now()

    def _yield_queue(self, deliveries: QueueDeliveries, ahead: FinishedAhead | None = None) -> None:
        """Take a queue out of its pool. The group continues from its lowest unfinished offset."""
        self._writer.commit(deliveries)
        self._journal.yielded(deliveries, deliveries.committed, ahead)
        deliveries.pool.close(deliveries)

    # Clients that are gone

    def expire_clients(self) -> None:
        """End clients without contact whose messages the broker extends, and remove unused clients, pools and lite topics."""
        self.lite.expire()
        self.expiry.check_kept()
        self._turns.do_some(self._losing_silent())
        self.pools.clients.remove_idle_clients()
        self._remove_unused()
        self.division.check()

    def _remove_unused(self) -> None:
        """Remove pools that are not popped any more, except queues with unfinished messages."""
        is_changed = False
        for pool in self.pools.clients.unused(self._clock.monotonic_s()):
            is_changed = True
            for deliveries in [item for item in pool.queues.opened() if not item.unfinished]:
                self._yield_queue(deliveries)
            if not pool.queues.opened():
                self.pools.remove(pool)
        if is_changed:
            self._write_now()

    def _session_lost(self, session: Session) -> None:
        """Remove the clients of a session, which may be very many, some at a time."""
        self._turns.do_later(self._removing_clients(session))

    def _removing_clients(self, session: Session) -> Work[None]:
        for _ in self.pools.clients.session_lost(session):
            if self._is_stopped:
                return
            if self.pools.clients.is_crowded:
                self._remove_unused()
            yield

    def releasing(self, has_changed: Callable[[Session], bool]) -> Work[None]:
        """End the waiting receives of sessions whose accounts have changed, some at a time."""
        for number, receive in enumerate(self._waiting(), 1):
            session = receive.request.session
            if session is not None and has_changed(session):
                self._end(receive, PopResult(Why.NOTHING_NEW))
            if number % SLICE == 0:
                yield

    def connection_lost(self, client: PopClient, heard_s: float) -> None:
        """Handle the loss of a connection whose last data arrived at `heard_s`. Messages popped since then may not have
        reached the client, so the broker does not extend them again."""
        found = self.pools.clients.all.get(client)
        if found is not None:
            self._turns.do(_end_extensions(list(found.extended), heard_s, self._clock.monotonic_s()))

    def response_lost(self, client: PopClient, times_ms: Collection[int]) -> None:
        """Handle a client that cancelled a receive after its response was written. The client may not have got the messages
        popped at these times, so the broker does not extend them again."""
        found = self.pools.clients.all.get(client)
        for delivery in reversed(found.extended) if found is not None else ():
            if delivery.pop_ms < min(times_ms):
                break
            if delivery.pop_ms in times_ms:
                # The maximum extension counts as used up, so the broker does not extend this delivery again
                delivery.since_s = float("-inf")

    def client_gone(self, client: PopClient) -> None:
        """Handle a client that terminated or lost contact: end its receives, and redeliver the messages that the broker
        extends for it, or dead-letter them after their last attempt. Messages with a visibility timeout of their own
        stay in flight until that expires. Do nothing once the broker is stopped."""
        self._turns.do_some(self._losing_client(client))

    def _losing_silent(self) -> Work[None]:
        for client in self.pools.clients.silent_clients():
            yield from self._losing_client(client)

    def _losing_client(self, client: PopClient) -> Work[None]:
        if self._is_stopped:  # the next broker writes the journal, perhaps in this process
            return
        found = self.pools.clients.all.get(client)
        self.pools.clients.remove_client(client)
        touched: dict[Pool, None] = {}
        if found is not None:
            # Take all that is the client's before the first yield: it may return, and subscribe again, before the last one.
            extended, receives = list(found.extended.items()), list(found.receives)
            self.lite.client_gone(client)
            yield from self._ending(receives, Why.CLIENT_GONE)
            for delivery, deliveries in extended:
                if self._is_stopped:
                    return
                if delivery.state is DeliveryState.IN_FLIGHT and delivery.client == client:
                    self._redeliver(deliveries, delivery, "its last consumer has gone")
                    touched[deliveries.pool] = None
                yield
        yield from _in_order(map(self._serving, touched))
        self.division.clients_gone()

    def _ending(self, receives: Iterable[Receive], why: Why) -> Work[None]:
        """End receives that wait, one per piece."""
        for receive in receives:
            self._end(receive, PopResult(why))
            yield

    def session_gone(self, session: Session) -> None:
        """Handle a remoting client that is gone, like `client_gone`."""
        self.client_gone(PopClient("", session=session))

    # Groups and topics that change

    def ahead_ended(self, group: ConsumerGroup, key: QueueKey) -> None:
        """Handle finished messages after a queue's committed offset that need not be kept any more."""
        self._journal.ahead_ended(group.name, *key)
        self._writer.write_soon()

    def offsets_reset(self, group: str, topic: str, queue_id: int | None = None) -> None:
        """Continue from the group's offsets in a topic after a reset. Messages popped before from a queue whose offset has
        changed can no longer be acknowledged."""
        pool = self.pools.find(group, topic)
        if pool is None or (queue_id is not None and is_queue_pool(pool) and not pool.queues.serves(queue_id)):
            return
        for deliveries in list(pool.queues.opened()):
            self._writer.follow_reset(deliveries)
        pool.queues.make_ready()
        self._write_now()
        self.serve(pool)

    def group_deleted(self, group: str) -> None:
        self._journal.group_deleted(group)
        self._delete(self.pools.of_group(group), Why.GROUP_GONE)
        self.pools.group_deleted(group)
        self.pools.lite_offsets.group_deleted(group)

    def check_unbinding(self, group: str, parent: str) -> None:
        """Raises Refusal if a lite group that is to receive no more lite topics of a parent topic has messages in flight."""
        pool = self.pools.find_lite(group, parent)
        if pool is not None and pool.unfinished:
            reason = f"clients of the group {group} have unfinished messages of lite topics of {parent}"
            raise Refusal(Reason.ILLEGAL, f"{reason}; stop them, and retry when the visibility timeouts have expired")

    def lite_group_unbound(self, group: str, parent: str) -> None:
        """End the pool of a group that receives no more lite topics of a parent topic. Its offsets there stay."""
        pool = self.pools.find_lite(group, parent)
        if pool is not None:
            self._delete([pool], Why.GROUP_GONE)

    def end_receives(self, group: str) -> None:
        """End the waiting receives of a deleted group whose offsets and messages in flight stay."""
        for pool in self.pools.of_group(group):
            self._turns.do_some(self._ending(list(pool.waiting), Why.GROUP_GONE))

    def topic_deleted(self, topic: str) -> None:
        """End the pools of a deleted topic, and delete the offsets in its lite topics."""
        self._delete(list(self.pools.of_topic(topic)), Why.TOPIC_GONE)
        self.pools.lite_offsets.topic_deleted(topic)
        self.expiry.topic_deleted(topic)

    def topic_changed(self, topic: TopicConfig) -> None:
        """End the lite pools of a topic that is no longer the parent of lite topics. The offsets there stay."""
        self.expiry.settings_changed(topic)
        if not topic.is_lite and (pools := self.pools.lite_pools(topic.name)):
            self._delete(pools, Why.GROUP_GONE)

    def _delete(self, pools: Iterable[Pool], why: Why) -> None:
        ended: list[Work[None]] = []
        for pool in pools:
            ended.append(self._ending(list(pool.waiting), why))
            for deliveries in list(pool.queues.opened()):
                self._journal.ended(deliveries)
                deliveries.pool.close(deliveries)
            if is_queue_pool(pool):
                self.division.pool_deleted(pool)
            elif is_lite_pool(pool):
                self.lite.pool_deleted(pool)
            self.pools.remove(pool)
        self._write_now()
        self._turns.do_some(_in_order(ended))

    def _write_now(self) -> None:
        """Write the journal. After StoreFull, `saving` rewrites the whole file."""
        try:
            self._journal.write()
        except StoreFull as error:
            log.error("save_failed", reason=str(error))

    def saving(self) -> Job[None]:
        """Save the journal (`PopJournal.saving`) after the offsets. Raises StoreFull; the next call retries."""
        yield from self._journal.saving(self.pools.deliveries, are_offsets_saved=not self.pools.has_unsaved_offsets)

    def stop(self) -> None:
        """End all receives that wait, and close the journal. Messages in flight stay in flight over a restart."""
        self._is_stopped = True
        self._deadlines.stop()
        self.division.stop()
        self.expiry.stop()
        self._turns.do_some(self._ending(self._waiting(), Why.STOPPED))
        self._writer.write()
        self._journal.frames.close()

    def _waiting(self) -> Iterator[Receive]:
        for pool in list(self.pools.all):
            yield from list(pool.waiting)

    @property
    def waiting(self) -> int:
        return self.pools.clients.receives.count

    def is_popped(self, group: str, topic: str) -> bool:
        """Return True if the group has a pool of the topic that is used (`Pool.is_used`)."""
        pool = self.pools.find(group, topic)
        return pool is not None and pool.is_used(self._clock.monotonic_s())


def _end_extensions(deliveries: Iterable[Delivery], from_s: float, until_s: float) -> Work[None]:
    """Extend deliveries that were popped in a time no more."""
    for number, delivery in enumerate(deliveries, 1):
        if from_s <= delivery.since_s <= until_s:
            # The maximum extension counts as used up, so the broker does not extend this delivery again
            delivery.since_s = float("-inf")
        if number % LOOKS == 0:
            yield


def _in_order(works: Iterable[Work[None]]) -> Work[None]:
    for work in works:
        yield from work


class GivenDelivery(NamedTuple):
    """A delivery in the result of a receive with an attempt id."""

    deliveries: QueueDeliveries
    delivery: Delivery
    pop_ms: int

    @property
    def is_in_flight(self) -> bool:
        return self.delivery.state is DeliveryState.IN_FLIGHT and self.delivery.pop_ms == self.pop_ms
