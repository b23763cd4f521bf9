"""Settles messages that clients are done with: one write for all acknowledgements of a turn of the loop, and the answers
behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from ..clock import Clock
from ..groups.owning.offsets import Offsets
from ..store.files import StoreFull
from ..store.frames import Frames
from .book import Book
from .deliveries import QueueDeliveries
from .states import Delivery, DeliveryState, Event
from .values import AckStatus

log = structlog.get_logger("rocketlet.pops")

Answered = Callable[[Sequence[AckStatus]], object]
When = Callable[[Callable[[], None], Callable[[], None]], None]
Soon = Callable[[Callable[[], object]], object]


def _in_the_loop(action: Callable[[], object]) -> object:
    return asyncio.get_running_loop().call_soon(action)


class Keeping(NamedTuple):
    """How what is said of messages comes to the disk. frames: the file. when_kept: calls the first as soon as the written
    data is kept as well as the broker's settings want, the second if it is not. soon: calls a function when this turn is
    over."""

    frames: Frames
    when_kept: When
    soon: Soon = _in_the_loop


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
