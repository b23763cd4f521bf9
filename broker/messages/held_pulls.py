"""Held pulls, which wait for a message (long polling), for the queue to be assigned to their member, or only for a
time.

A held pull is answered when its event occurs, when its time ends, or when another part ends the wait (`release`), for
example because its topic was deleted or the broker stops. Nothing scans held pulls periodically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from struct import iter_unpack
from typing import TypeVar

import structlog

from ...protocol.bodies import SLICE, Work
from ...protocol.names import Subscription
from ..runtime.arrivals import Arrivals
from ..runtime.clock import Timer
from ..runtime.runtime import Runtime
from ..runtime.timeouts import Timeouts
from ..sessions.session import Session
from ..sessions.shares import AddressShares
from ..store.index import ConsumeQueue

log = structlog.get_logger("rocketlet.pulls")

K = TypeVar("K")


class Until(Enum):
    """The event for which a pull waits, at most until its timeout."""

    MESSAGE = auto()
    """A matching message."""
    TURN = auto()
    """The queue is being handed over to the pull's member."""
    TIME = auto()
    """Nothing but the timeout."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """A held pull.

    Attributes:
        answer: reads the queue again, and sends the response
        seen: offset up to which no message matched
        passed: called with `seen` when it has increased while the pull waits
        size: bytes of the pull's texts, which are charged to the session
        is_done: True if the member has handled all messages that it got from the queue
    """

    session: Session
    group: str
    queue: ConsumeQueue
    subscription: Subscription | None
    seen: int
    answer: Callable[[], None]
    timer: Timer | None = None
    size: int = 0
    is_done: bool = False
    until: Until = Until.MESSAGE
    passed: Callable[[int], None] | None = None

    def is_wanted(self) -> bool:
        """Return True if a message that may match has arrived since the last call, or if the queue was recreated."""
        queue = self.queue
        if queue.next <= self.seen:
            # A queue that ends before offsets that the client has seen was recreated, so the client must get a
            # response.
            return self.seen > queue.next
        if self.subscription is None or self.subscription.takes_all:
            return True
        while self.seen < queue.next:
            entries = queue.entries(max(self.seen, queue.begin), 1024)
            # Tag hashes, which may collide; the client compares the tags themselves, as with Apache's broker.
            if any(self.subscription.matches_code(code) for _, _, code in iter_unpack(">QIq", entries)):
                return True
            self.seen += len(entries) // 20
        return False


def _is_wanted(pull: HeldPull) -> bool:
    """Return True if a held pull must be answered. If the check fails, the response contains the error."""
    try:
        return pull.is_wanted()
    except Exception:
        return True


class HeldPulls:
    def __init__(self, runtime: Runtime) -> None:
        limits = runtime.limits
        self._turns = runtime.turns
        self._timeouts = Timeouts(runtime.clock, runtime.turns)
        self._held: dict[ConsumeQueue, dict[HeldPull, None]] = {}
        self._of: dict[Session, dict[HeldPull, None]] = {}
        self._shares = AddressShares(limits.max_held_pulls)
        self._arrivals = Arrivals[ConsumeQueue, ConsumeQueue](runtime, self._waking)
        self._is_stopped = False

    @property
    def count(self) -> int:
        return self._shares.count

    def hold(self, pull: HeldPull, wait_s: float) -> bool:
        """Hold a pull for up to `wait_s`. Return False if too many pulls are held already, of all clients or of the client's
        address, or if the broker stops."""
        address = pull.session.address
        if not self._shares.has_room(address) or self._is_stopped:
            return False
        if pull.until is Until.MESSAGE:
            self._held.setdefault(pull.queue, {})[pull] = None
        self._of.setdefault(pull.session, {})[pull] = None
        pull.session.held_pulls += 1
        pull.session.charge(pull.size)
        self._shares.acquire(address)
        pull.timer = self._timeouts.call_later(wait_s, partial(self.release, pull))
        return True

    def wake(self, queues: list[ConsumeQueue]) -> None:
        """Answer the pulls for which messages have arrived in these queues."""
        held = self._held
        if held and (woken := [(queue, queue) for queue in dict.fromkeys(queues) if queue in held]):
            self._arrivals.add(woken)

    def _waking(self, queue: ConsumeQueue, _: object) -> Work[None]:
        for pull in list(self._held.get(queue, ())):
            before = pull.seen
            if _is_wanted(pull):
                self.release(pull)
            elif pull.passed is not None and pull.seen > before and self.is_held(pull):
                pull.passed(pull.seen)
            yield

    def release(self, pull: HeldPull) -> None:
        """End the wait of a pull with its `answer`, as soon as its client reads. Do nothing for a pull that was answered
        already."""
        if self.is_held(pull):
            self._remove(pull)
            pull.session.when_read(lambda: _answer(pull))

    def is_held(self, pull: HeldPull) -> bool:
        return pull in self._of.get(pull.session, ())

    def _remove(self, pull: HeldPull) -> None:
        if pull.until is Until.MESSAGE:
            _remove_from(self._held, pull.queue, pull)
        _remove_from(self._of, pull.session, pull)
        pull.session.held_pulls -= 1
        pull.session.charge(-pull.size)
        self._shares.release(pull.session.address)
        if pull.timer is not None:
            pull.timer.cancel()

    def drop(self, session: Session) -> None:
        """Drop the pulls of a closed session, without a response."""
        self._turns.do_some(self._dropping(session))

    def _dropping(self, session: Session) -> Work[None]:
        for pull in list(self._of.get(session, ())):
            if self.is_held(pull):
                self._remove(pull)
            yield

    def release_topic(self, topic: str) -> None:
        """Answer the pulls that wait for messages of a deleted topic. They would otherwise miss the messages of a recreated
        topic."""
        self._turns.do_some(self._releasing_topic(topic))

    def _releasing_topic(self, topic: str) -> Work[None]:
        for number, queue in enumerate(list(self._held), 1):
            if queue.topic == topic:
                for pull in list(self._held.get(queue, ())):
                    self.release(pull)
                    yield
            if number % SLICE == 0:
                yield

    def releasing(self, sessions: Iterable[Session]) -> Work[None]:
        """Answer all pulls of these sessions, one pull per piece of work."""
        for session in sessions:
            for pull in self.of(session):
                self.release(pull)
                yield

    def of(self, session: Session, group: str | None = None) -> list[HeldPull]:
        """Return the held pulls of a session, of one group or of all groups."""
        return [pull for pull in self._of.get(session, ()) if group in (None, pull.group)]

    def answer_all(self) -> None:
        """Answer all pulls because the broker stops, and hold no further ones."""
        self._is_stopped = True
        self._turns.do_some(self.releasing(list(self._of)))


def _remove_from(table: dict[K, dict[HeldPull, None]], key: K, pull: HeldPull) -> None:
    pulls = table[key]
    del pulls[pull]
    if not pulls:
        del table[key]


def _answer(pull: HeldPull) -> None:
    try:
        pull.answer()
    except (
        Exception
    ):  # close this client's connection; the error must not affect the sender whose message woke the pull
        log.exception("connection_closed_held_pull_failed", topic=pull.queue.topic, queue=pull.queue.queue_id)
        pull.session.abort()
