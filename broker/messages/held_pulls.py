"""Pulls that wait: for a message (long polling), for their turn, or for a moment.

A held pull is answered when a message of its subscription arrives, or when its time is up; never by a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from struct import iter_unpack
from typing import TypeVar

import structlog

from ...protocol.bodies import Work
from ...protocol.names import Subscription
from ..runtime import Runtime, Timer
from ..sessions import AddressShares, Session
from ..store.index import ConsumeQueue

log = structlog.get_logger("rocketlet.pulls")

K = TypeVar("K")


class Until(Enum):
    """The event that ends a pull's wait, besides the end of its time and of the broker."""

    MESSAGE = auto()
    """A message that matches."""
    TURN = auto()
    """The queue is another member's now, and becomes its own."""
    TIME = auto()
    """Only time ends it."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """`answer` reads again and writes the messages; `seen` is the offset up to which nothing matched; `size` is that of
    its texts, in bytes; `is_done` says that its member has handled all messages that it got from the queue."""

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

    def is_wanted(self) -> bool:
        """Whether a message that may match has arrived since the last look."""
        queue = self.queue
        if queue.next <= self.seen:
            # A queue that ends before messages that the client has seen was recreated: the client must get a response.
            return self.seen > queue.next
        if self.subscription is None or self.subscription.takes_all:
            return True
        while self.seen < queue.next:
            entries = queue.entries(max(self.seen, queue.begin), 1024)
            # Hashes of tags; two tags may share one. The client compares the tags themselves, as with Apache's
            # broker.
            if any(self.subscription.matches_code(code) for _, _, code in iter_unpack(">QIq", entries)):
                return True
            self.seen += len(entries) // 20
        return False


def _is_wanted(pull: HeldPull) -> bool:
    """Answers a held pull; one that fails is answered with the fault."""
    try:
        return pull.is_wanted()
    except Exception:
        return True


class HeldPulls:
    def __init__(self, runtime: Runtime) -> None:
        limits = self._limits = runtime.limits
        self._clock = runtime.clock
        self._turns = runtime.turns
        self._held: dict[ConsumeQueue, dict[HeldPull, None]] = {}
        self._of: dict[Session, dict[HeldPull, None]] = {}
        self._shares = AddressShares(limits.max_held_pulls)
        self._is_stopped = False

    @property
    def count(self) -> int:
        """How many pulls are held."""
        return self._shares.count

    def hold(self, pull: HeldPull, wait_s: float) -> bool:
        """Holds a pull; False if too many are held already, and when the broker stops."""
        address = pull.session.address
        if not self._shares.has_room(address) or self._is_stopped:
            return False
        if pull.until is Until.MESSAGE:
            self._held.setdefault(pull.queue, {})[pull] = None
        self._of.setdefault(pull.session, {})[pull] = None
        pull.session.held_pulls += 1
        pull.session.charge(pull.size)
        self._shares.take(address)
        pull.timer = self._clock.call_later(wait_s, self._turns.call, self.let_go, pull)
        return True

    def wake(self, queues: list[ConsumeQueue]) -> None:
        """Answers the pulls whose messages have arrived in these queues."""
        held = self._held
        if not held:
            return
        for queue in dict.fromkeys(queues):
            waiting = held.get(queue)
            if waiting is None:
                continue
            if len(waiting) <= self._limits.woken_at_once:
                for pull in [pull for pull in waiting if _is_wanted(pull)]:
                    self.let_go(pull)
            else:
                self._turns.do(self._wake_many(list(waiting)))

    def _wake_many(self, waiting: list[HeldPull]) -> Work[None]:
        for pull in waiting:
            if _is_wanted(pull):
                self.let_go(pull)
            yield

    def let_go(self, pull: HeldPull) -> None:
        """Answers a pull with what there is, as soon as its client reads. One that is not held any more was answered."""
        if pull not in self._of.get(pull.session, ()):
            return
        self._release(pull)
        pull.session.when_read(lambda: _answer(pull))

    def is_held(self, pull: HeldPull) -> bool:
        """True if the pull still waits."""
        return pull in self._of.get(pull.session, ())

    def _release(self, pull: HeldPull) -> None:
        if pull.until is Until.MESSAGE:
            _take_out(self._held, pull.queue, pull)
        _take_out(self._of, pull.session, pull)
        pull.session.held_pulls -= 1
        pull.session.charge(-pull.size)
        self._shares.give_back(pull.session.address)
        if pull.timer is not None:
            pull.timer.cancel()

    def drop(self, session: Session) -> None:
        """The session is gone."""
        for pull in self.of(session):
            self._release(pull)

    def let_topic_go(self, topic: str) -> None:
        """The topic is deleted: its pulls would miss the messages of a recreated topic."""
        for queue in [queue for queue in self._held if queue.topic == topic]:
            self._turns.do(self._let_all_go(list(self._held[queue])))

    def _let_all_go(self, waiting: list[HeldPull]) -> Work[None]:
        for pull in waiting:
            self.let_go(pull)
            yield

    def letting_go(self, sessions: Iterable[Session]) -> Work[None]:
        """Answers all pulls of these sessions, a pull a piece."""
        for session in sessions:
            for pull in self.of(session):
                self.let_go(pull)
                yield

    def of(self, session: Session, group: str | None = None) -> list[HeldPull]:
        """The pulls of a session, in one group or in all."""
        return [pull for pull in self._of.get(session, ()) if group in (None, pull.group)]

    def answer_all(self) -> None:
        """Answers all pulls before the broker closes: clients learn immediately that nothing came. Holds no more."""
        self._is_stopped = True
        for waiting in list(self._of.values()):
            for pull in list(waiting):
                self.let_go(pull)


def _take_out(table: dict[K, dict[HeldPull, None]], key: K, pull: HeldPull) -> None:
    pulls = table[key]
    del pulls[pull]
    if not pulls:
        del table[key]


def _answer(pull: HeldPull) -> None:
    try:
        pull.answer()
    except Exception:  # whose message woke it must not suffer
        log.exception("connection_closed_held_pull_failed", topic=pull.queue.topic, queue=pull.queue.queue_id)
        pull.session.abort()
