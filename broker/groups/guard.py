"""The guard of a queue that a foreign member reads: another client's pulls wait until that reader has finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.names import TOOLS_GROUP
from ..config import GUARD_POLL_S, GUARD_QUIET_S, LimitExceeded
from ..messages.held_pulls import HeldPull, HeldPulls, Until
from ..runtime import Runtime, Timer
from ..sessions import Session
from .group import ConsumerGroups
from .leases import Locks
from .offsets import Offsets, Watch

# ------------------------------------------------------------------------------
# Apache's clients take no lease: each allocates queues by the member list and the route that it knows, so two of them
# read one queue while these differ. A topic that grew, a lost notification, a member without a heartbeat, or another
# strategy is enough. The broker knows which client pulled a queue last, its *reader*. A pull of any other client waits
# until
#
# - the reader has committed all messages that it was given, and did not pull again within 1 s of its last response.
#   A held pull of the reader is returned for this check, because a client that has dropped the queue does not repeat it
# - or the reader has left the group, or its connection is closed
# - or the reader has neither pulled nor committed for `guard_silent_s`: a client that drops a queue never commits what
#   its handlers still have
# - or `guard_max_s` have passed
#
# The queue is then free: the first client that pulls it is the next reader, and continues at the committed offset.


Key = tuple[str, str, int]  # group, topic, queue id


@dataclass(slots=True)
class _Contest:
    """A queue that another client wants to read, too.

    Attributes:
        reader: the client that pulled the queue last.
        began_s: when another client pulled it first.
        active_s: when the reader last pulled or committed.
        returned_s: when the reader last pulled, or its held pull was returned.
        wanted_s: when another client last pulled.
        waiting: the pulls of other clients that wait.
    """

    reader: Session
    began_s: float
    active_s: float
    returned_s: float
    wanted_s: float
    waiting: list[HeldPull] = field(default_factory=list)
    timer: Timer | None = None


class ReaderGuard:
    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        watch: Watch,
        locks: Locks,
        offsets: Offsets,
        held_pulls: HeldPulls,
    ) -> None:
        self._groups = groups
        self._watch = watch
        self._locks = locks
        self._offsets = offsets
        self._held_pulls = held_pulls
        self._clock = runtime.clock
        self._limits = runtime.limits
        self._contests: dict[Key, _Contest] = {}

    def is_contested(self, key: Key) -> bool:
        """True if another client waits for the queue, so that each pull of its reader is recorded."""
        return key in self._contests

    def has_to_wait(self, session: Session, key: Key) -> bool:
        """Return True if a pull must wait for the queue's reader."""
        reader = self._watch.reader(*key)
        if reader is None or reader is session or not self.is_guarded(reader, key):
            return False
        if not self._shares_queues(session, key[0]) or self._locks.is_owner(*key, session):
            return False
        now_s = self._clock.monotonic_s()
        contest = self._contests.get(key)
        if contest is None or contest.reader is not reader:
            contest = self._begin(key, reader, now_s)
        contest.wanted_s = now_s
        return True

    def wait(self, key: Key, pull: HeldPull) -> None:
        """Release a pull, which is about to be held, once the queue is free. Raises LimitExceeded."""
        contest = self._contests[key]
        contest.waiting = self._still_held(contest.waiting)
        if len(contest.waiting) >= self._limits.max_gated:
            raise LimitExceeded(f"{self._limits.max_gated} pulls wait for the reader of {key[1]}:{key[2]}; retry later")
        contest.waiting.append(pull)

    def _still_held(self, pulls: list[HeldPull]) -> list[HeldPull]:
        return [pull for pull in pulls if self._held_pulls.is_held(pull)]

    def record_pull(self, session: Session, key: Key) -> None:
        """Record that a client pulled the queue."""
        contest = self._contests.get(key)
        if contest is not None and contest.reader is session:
            contest.active_s = contest.returned_s = self._clock.monotonic_s()

    def record_commit(self, session: Session, key: Key) -> None:
        """Record that the reader committed an offset of the queue by a request of its own."""
        if self._watch.record_commit(session, key):
            self._groups.generation.increment()  # from now on, what it is given is recorded
        contest = self._contests.get(key)
        if contest is not None and contest.reader is session:
            contest.active_s = self._clock.monotonic_s()

    def is_guarded(self, reader: Session, key: Key) -> bool:
        """Return True if other clients wait for this reader: for Apache's push consumers, and for other clients that have
        committed offsets of the queue here. A client that keeps its offsets elsewhere would never finish."""
        if key[0] == TOOLS_GROUP or not self._shares_queues(reader, key[0]):
            return False
        group = self._groups.get(key[0])
        return (group is not None and reader in group.foreign) or self._watch.commits(reader, key)

    def _shares_queues(self, session: Session, name: str) -> bool:
        """False for broadcasting members, which each read all queues, and for Rocketlet members, which lock queues."""
        group = self._groups.get(name)
        member = group.members.get(session) if group is not None else None
        return member is None or (not member.data.strategy and member.data.message_model == "CLUSTERING")

    # A contest

    def _begin(self, key: Key, reader: Session, now_s: float) -> _Contest:
        former = self._contests.pop(key, None)
        if former is not None and former.timer is not None:
            former.timer.cancel()
        contest = self._contests[key] = _Contest(reader, now_s, now_s, now_s, now_s)
        if former is not None:
            contest.waiting = former.waiting
        self._groups.generation.increment()  # the reader's next pulls are recorded
        self._return_held(key, contest)
        self._poll_later(key, contest)
        return contest

    def _return_held(self, key: Key, contest: _Contest) -> bool:
        """Return the reader's held pulls of the queue, so that a reader that still has it pulls again. True if it had any."""
        held = [
            pull
            for pull in self._held_pulls.of(contest.reader, key[0])
            if pull.until is Until.MESSAGE and (pull.queue.topic, pull.queue.queue_id) == key[1:]
        ]
        for pull in held:
            self._held_pulls.let_go(pull)
        return bool(held)

    def _poll_later(self, key: Key, contest: _Contest) -> None:
        contest.timer = self._clock.call_later(GUARD_POLL_S, self._poll, key, contest)

    def _poll(self, key: Key, contest: _Contest) -> None:
        if self._contests.get(key) is not contest:
            return
        now_s = self._clock.monotonic_s()
        contest.waiting = self._still_held(contest.waiting)
        if not contest.waiting and contest.wanted_s + GUARD_QUIET_S <= now_s:  # nobody else wants it any more
            del self._contests[key]
            return
        if contest.waiting:
            contest.wanted_s = now_s
        if self._is_over(key, contest, now_s):
            self._free(key, contest)
            return
        if contest.returned_s + GUARD_QUIET_S <= now_s and self._return_held(key, contest):
            contest.returned_s = now_s
        self._poll_later(key, contest)

    def _is_over(self, key: Key, contest: _Contest, now_s: float) -> bool:
        """True if nobody has to wait for the reader any longer."""
        reader = contest.reader
        if self._watch.reader(*key) is not reader or not self.is_guarded(reader, key):
            return True
        silent_s, max_s = self._limits.guard_silent_s, self._limits.guard_max_s
        if contest.active_s + silent_s <= now_s or contest.began_s + max_s <= now_s:
            return True
        is_quiet = contest.returned_s + GUARD_QUIET_S <= now_s and not self._is_held(key, contest)
        return is_quiet and (self._offsets.get(*key) or 0) >= self._watch.given(reader, *key)

    def _is_held(self, key: Key, contest: _Contest) -> bool:
        pulls = self._held_pulls.of(contest.reader, key[0])
        return any((pull.queue.topic, pull.queue.queue_id) == key[1:] for pull in pulls)

    def _free(self, key: Key, contest: _Contest) -> None:
        del self._contests[key]
        self._return_held(key, contest)
        self._watch.let_go(contest.reader, *key)
        self._offsets.mark(*key)  # the next reader may have loaded its offset before
        for pull in contest.waiting:
            self._held_pulls.let_go(pull)
