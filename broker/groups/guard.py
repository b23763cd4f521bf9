"""The guard of a queue that a foreign member reads: another client's pulls wait until that reader has finished."""

from __future__ import annotations

from ...protocol.names import TOOLS_GROUP
from ..config import GUARD_POLL_S, GUARD_QUIET_S, LimitExceeded
from ..messages.held_pulls import HeldPull, HeldPulls, Until
from ..runtime import Runtime
from ..sessions import Session
from .group import ConsumerGroup, ConsumerGroups, Contest, GroupQueue
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


class ReaderGuard:
    def __init__(
        self,
        runtime: Runtime,
        groups: ConsumerGroups,
        watch: Watch,
        offsets: Offsets,
        held_pulls: HeldPulls,
    ) -> None:
        self._groups = groups
        self._watch = watch
        self._offsets = offsets
        self._held_pulls = held_pulls
        self._clock = runtime.clock
        self._limits = runtime.limits

    def has_to_wait(self, session: Session, queue: GroupQueue) -> bool:
        """Return True if a pull must wait for the queue's reader."""
        reader = queue.reader
        if reader is None or reader is session or not is_guarded(queue, reader):
            return False
        if not _shares_queues(queue.group, session) or queue.is_owned_by(session):
            return False
        now_s = self._clock.monotonic_s()
        contest = queue.contest
        if contest is None or contest.reader is not reader:
            contest = self._begin(queue, reader, now_s)
        contest.wanted_s = now_s
        return True

    def wait(self, queue: GroupQueue, pull: HeldPull) -> None:
        """Release a pull, which is about to be held, once the queue is free. Raises LimitExceeded."""
        contest = queue.contest
        assert contest is not None, "the pull has to wait"
        contest.waiting = self._still_held(contest.waiting)
        if len(contest.waiting) >= self._limits.max_gated:
            topic, queue_id = queue.key
            raise LimitExceeded(
                f"{self._limits.max_gated} pulls wait for the reader of {topic}:{queue_id}; retry later"
            )
        contest.waiting.append(pull)

    def _still_held(self, pulls: list[HeldPull]) -> list[HeldPull]:
        return [pull for pull in pulls if self._held_pulls.is_held(pull)]

    def record_pull(self, session: Session, queue: GroupQueue) -> None:
        """Record that a client pulled the queue."""
        contest = queue.contest
        if contest is not None and contest.reader is session:
            contest.active_s = contest.returned_s = self._clock.monotonic_s()

    def record_commit(self, session: Session, queue: GroupQueue) -> None:
        """Record that the reader committed an offset of the queue by a request of its own."""
        if queue.reader is session and not queue.has_committed:
            queue.has_committed = True
            # invalidate checked pulls, so that from now on the messages that the reader gets are recorded
            self._groups.generation.increment()
        contest = queue.contest
        if contest is not None and contest.reader is session:
            contest.active_s = self._clock.monotonic_s()

    # A contest

    def _begin(self, queue: GroupQueue, reader: Session, now_s: float) -> Contest:
        former = queue.contest
        if former is not None and former.timer is not None:
            former.timer.cancel()
        contest = queue.contest = Contest(reader, now_s, now_s, now_s, now_s)
        if former is not None:
            contest.waiting = former.waiting
        self._groups.generation.increment()  # invalidate checked pulls, so that the reader's next pulls are recorded
        self._return_held(queue, contest)
        self._poll_later(queue, contest)
        return contest

    def _return_held(self, queue: GroupQueue, contest: Contest) -> bool:
        """Return the reader's held pulls of the queue, so that a reader that still has it pulls again. True if it had any."""
        held = [pull for pull in self._held_by(queue, contest.reader) if pull.until is Until.MESSAGE]
        for pull in held:
            self._held_pulls.let_go(pull)
        return bool(held)

    def _held_by(self, queue: GroupQueue, reader: Session) -> list[HeldPull]:
        pulls = self._held_pulls.of(reader, queue.group.name)
        return [pull for pull in pulls if (pull.queue.topic, pull.queue.queue_id) == queue.key]

    def _poll_later(self, queue: GroupQueue, contest: Contest) -> None:
        contest.timer = self._clock.call_later(GUARD_POLL_S, self._poll, queue, contest)

    def _poll(self, queue: GroupQueue, contest: Contest) -> None:
        if queue.contest is not contest:
            return
        now_s = self._clock.monotonic_s()
        contest.waiting = self._still_held(contest.waiting)
        # no other client waits for this queue any more
        if not contest.waiting and contest.wanted_s + GUARD_QUIET_S <= now_s:
            self._end(queue)
            return
        if contest.waiting:
            contest.wanted_s = now_s
        if self._is_over(queue, contest, now_s):
            self._free(queue, contest)
            return
        if contest.returned_s + GUARD_QUIET_S <= now_s and self._return_held(queue, contest):
            contest.returned_s = now_s
        self._poll_later(queue, contest)

    def _is_over(self, queue: GroupQueue, contest: Contest, now_s: float) -> bool:
        """True if nobody has to wait for the reader any longer."""
        reader = contest.reader
        if queue.reader is not reader or not is_guarded(queue, reader):
            return True
        silent_s, max_s = self._limits.guard_silent_s, self._limits.guard_max_s
        if contest.active_s + silent_s <= now_s or contest.began_s + max_s <= now_s:
            return True
        is_quiet = contest.returned_s + GUARD_QUIET_S <= now_s and not self._held_by(queue, reader)
        return is_quiet and (queue.group.offset(*queue.key) or 0) >= queue.given_offset

    def _free(self, queue: GroupQueue, contest: Contest) -> None:
        queue.contest = None
        self._return_held(queue, contest)
        self._watch.release(contest.reader, queue)
        self._offsets.mark(*queue.place)  # the next reader may have loaded its offset before
        self._groups.release_queue(queue)
        for pull in contest.waiting:
            self._held_pulls.let_go(pull)

    def _end(self, queue: GroupQueue) -> None:
        queue.contest = None
        self._groups.release_queue(queue)


def is_guarded(queue: GroupQueue, reader: Session) -> bool:
    """Return True if other clients wait for this reader: for Apache's push consumers, and for other clients that have
    committed offsets of the queue here. A client that keeps its offsets elsewhere would never finish."""
    group = queue.group
    if group.name == TOOLS_GROUP or not _shares_queues(group, reader):
        return False
    return reader in group.foreign or (queue.reader is reader and queue.has_committed)


def _shares_queues(group: ConsumerGroup, session: Session) -> bool:
    """Return False for broadcasting members, which each read all queues, and for Rocketlet members, which lock queues.
    Return True for other members and for clients that are no members."""
    member = group.members.get(session)
    return member is None or (not member.data.strategy and member.data.message_model == "CLUSTERING")
