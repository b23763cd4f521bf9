"""Committed offsets of groups, their progress, the readers of each queue, and pulls that wait for a foreign reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import orjson
import structlog

from ...protocol.bodies import LOOKS, SLICE, Work, joined, shaped
from ...protocol.names import IllegalName, group_fault
from ..config import GUARD_POLL_S, GUARD_QUIET_S, ORPHAN_S, LimitExceeded
from ..messages.held_pulls import HeldPull, HeldPulls, Until
from ..messages.topics import Topics
from ..runtime.jobs import Job
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from ..store.files import StoreFull, read_state, replace_state
from ..store.index import ConsumeQueue
from ..store.journals import Journal
from .group import (
    ConsumerGroup,
    ConsumerGroups,
    Contest,
    FinishedAhead,
    GroupQueue,
    QueueCounts,
    TopicOffsets,
)
from .leases import Locks
from .members import History, Unread
from .reading import is_guarded
from .stages import QueueKey

log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# Committed offsets: the next message that a group reads of a queue. Saved every 5 s and at the end.
#
# An offset that is committed with an unlock is written with it, and offsets of drained queues 50 ms later: each is a line of
# `offsets.journal` until the file has it. Each line is a list of [topic, group, id of the topic, [[queue id, offset], ...]].
#
# Rewinds are counted, because a Spark query must distinguish whether its group's offset is lower than its checkpoint
# because an administrator reset it, or because the query was killed before it could commit.


_REWINDS = "rewinds"  # key of the state file; keys of offsets contain an @
_IDENTITIES = "identities"
_POPPED = "popped"  # always {}: earlier releases take it for a group's offsets


class _HandedOver(NamedTuple):
    """A line of the journal: queues of a group in a topic that were handed over, with their offsets."""

    topic: str
    group: str
    identity: str
    offsets: list[tuple[int, int]]


class Offsets:
    """The committed offsets of all groups, kept in memory and saved to the disk at intervals. A group has them by topic
    (`TopicOffsets`).

    Attributes:
        is_unsaved: True while offsets are saved, and after a save that failed or was cancelled.
    """

    def __init__(self, runtime: Runtime, path: Path, groups: ConsumerGroups, topics: Topics) -> None:
        self._limits = runtime.limits
        self._adoption = runtime.adoption
        self._path = path
        self._groups = groups
        self._identity_of = topics.identity
        self._journal = Journal(path)
        self._handed_over: list[tuple[ConsumerGroup, str]] = []  # groups and topics with offsets to be written soon
        self.is_unsaved = False
        self._dirty = False
        self._count = 0
        state = self._adoption.whole("offsets", read_state(path), dict[str, object]) or {}
        self._saved_rewinds = self._adoption.whole("rewinds", state.pop(_REWINDS, None), dict[str, int]) or {}
        identities = self._adoption.whole("topics of offsets", state.pop(_IDENTITIES, None), dict[str, str]) or {}
        self._saved_identities = list(identities.items())
        self.has_pops = state.pop(_POPPED, None) is not None  # True if a group has ever popped: its journal exists then
        self._adoption.each("offsets", state.items(), self._adopt)
        self._saved_rewinds = {}

    def _adopt(self, entry: tuple[str, object]) -> None:
        """Adopt the offsets of a group in a topic."""
        key, queues = entry
        topic, _, name = key.partition("@")
        offsets = shaped(queues, dict[int, int])
        rewinds = self._saved_rewinds.get(key, 0)
        item = self._obtain(self._groups.obtain(name), topic)
        item.offsets, item.rewinds = offsets, rewinds
        self._count += len(offsets)

    def _obtain(self, group: ConsumerGroup, topic: str) -> TopicOffsets:
        item = group.offsets.get(topic)
        if item is None:
            item = self._groups.add_offsets(group, topic)
        return item

    def _find(self, name: str, topic: str) -> TopicOffsets | None:
        group = self._groups.get(name)
        return group.offsets.get(topic) if group is not None else None

    def apply_journal(self, deleted: Container[str]) -> None:
        """Delete offsets in topics that were deleted after these were saved, recreated or not, and apply the journal."""
        for topic, saved in self._saved_identities:
            if self._is_former(topic, saved, deleted):
                self.topic_deleted(topic)
        self._saved_identities = []
        lines = self._journal.read()
        entries = chain.from_iterable(line if isinstance(line, list) else (line,) for line in lines)
        self._adoption.each("handed-over offsets", entries, partial(self._apply, deleted))

    def _apply(self, deleted: Container[str], entry: object) -> None:
        """Adopt the offsets of queues that were handed over."""
        found = shaped(entry, _HandedOver)
        if not self._is_former(found.topic, found.identity, deleted):
            for queue_id, offset in found.offsets:
                self.put(found.group, found.topic, queue_id, offset)

    def _is_former(self, topic: str, saved: str, deleted: Container[str]) -> bool:
        identity = self._identity_of(topic)
        return identity != saved and bool(identity or topic in deleted)

    def clamp(self, queues: Mapping[QueueKey, ConsumeQueue]) -> None:
        """Set back offsets beyond the end of their queue: the end was lost, and what will replace it is not read yet."""
        for group, topic, item in self._all():
            for number, offset in item.offsets.items():
                queue = queues.get((topic, number))
                end = queue.next if queue else 0
                if offset > end:
                    log.warning(
                        "offset_set_back", group=group.name, topic=topic, queue=number, offset=offset, end=end,
                        hint="it was beyond the end of the queue",
                    )  # fmt: skip
                    item.offsets[number] = end
                    self._dirty = True

    def _all(self) -> Iterator[tuple[ConsumerGroup, str, TopicOffsets]]:
        return ((group, topic, item) for group in self._groups for topic, item in list(group.offsets.items()))

    def get(self, name: str, topic: str, queue_id: int) -> int | None:
        group = self._groups.get(name)
        return group.offset(topic, queue_id) if group is not None else None

    def knows(self, name: str, topic: str) -> bool:
        """Return True if the group has an offset in any queue of the topic."""
        return self._find(name, topic) is not None

    def put(self, name: str, topic: str, queue_id: int, offset: int, *, by_owner: bool = False) -> None:
        """Commit an offset; see `commit`."""
        group = self._groups.obtain(name)
        try:
            self.commit(group, topic, queue_id, offset, by_owner=by_owner)
        finally:
            self._groups.release(group)

    def commit(self, group: ConsumerGroup, topic: str, queue_id: int, offset: int, *, by_owner: bool = False) -> None:
        """Commit an offset. Raises LimitExceeded, and IllegalName for the first offset of a group.

        Args:
            group: the group.
            topic: the topic.
            queue_id: the queue.
            offset: the next message that the group reads.
            by_owner: True if the commit is fenced by a lease. Until another client has committed, only an owner may commit
                a lower offset.
        """
        item = group.offsets.get(topic)
        if item is None or queue_id not in item.offsets:
            if item is None and (fault := group_fault(group.name)):
                raise IllegalName(fault)
            # A group's first offset takes 1.7 KB, also without settings, of which there are `max_groups`.
            if not group.offsets and self._groups.count > 2 * self._limits.max_groups:
                raise LimitExceeded(
                    f"this broker keeps offsets of {2 * self._limits.max_groups} groups; delete groups that are not needed"
                )
            if self._count >= self._limits.max_offsets:
                raise LimitExceeded(
                    f"this broker keeps {self._limits.max_offsets} offsets; delete groups that are not needed"
                )
            self._count += 1
            item = item or self._groups.add_offsets(group, topic)
        owners = item.of_owners
        if by_owner:
            if owners is None:
                owners = item.of_owners = {}
            owners[queue_id] = offset
        elif owners and owners.get(queue_id) != offset:
            owners.pop(queue_id, None)
        if offset < item.offsets.get(queue_id, 0):
            item.rewinds += 1
            self.take_ahead(group, topic, queue_id, is_ended=True)
        elif item.ahead is not None and queue_id in item.ahead and offset >= item.ahead[queue_id].end:
            self.take_ahead(group, topic, queue_id, is_ended=True)
        item.offsets[queue_id] = offset
        item.encoded = None
        self._dirty = True

    def put_ahead(self, group: ConsumerGroup, topic: str, queue_id: int, ahead: FinishedAhead) -> None:
        """Keep the messages after the committed offset of a queue that are finished, until an offset beyond them, or a lower
        one, is committed."""
        item = group.offsets[topic]
        if item.ahead is None:
            item.ahead = {}
        item.ahead[queue_id] = ahead
        group.version += 1  # checked pulls would return these messages

    def take_ahead(
        self, group: ConsumerGroup, topic: str, queue_id: int, *, is_ended: bool = False
    ) -> FinishedAhead | None:
        """Remove and return the messages after the committed offset of a queue that are finished; None without any. is_ended:
        report that they are not needed any more."""
        item = group.offsets.get(topic)
        ahead = item.ahead.pop(queue_id, None) if item is not None and item.ahead is not None else None
        if ahead is not None and is_ended:
            self._groups.changes.ahead_ended(group, (topic, queue_id))
        return ahead

    def rewinds(self, name: str, topic: str) -> int:
        """Return how often an offset of the group in the topic went back."""
        item = self._find(name, topic)
        return item.rewinds if item is not None else 0

    def fence(self, group: ConsumerGroup, key: QueueKey) -> None:
        """Let the committed offset of a queue count as an owner's, because the next reader continues from it."""
        item = group.offsets.get(key[0])
        if item is not None and key[1] in item.offsets:
            item.of_owners = item.of_owners or {}
            item.of_owners[key[1]] = item.offsets[key[1]]
            self.hand_over(group, [key])
            self._groups.changes.leases_changed()

    def hand_over(self, group: ConsumerGroup, keys: Iterable[QueueKey]) -> None:
        """Record that other members continue in these queues, so that `write_handed_over` writes their offsets."""
        if self._dirty or self.is_unsaved:  # otherwise the saved file has these offsets
            for topic, queue_id in keys:
                item = group.offsets.get(topic)
                if item is not None and queue_id in item.offsets:
                    if item.handed_over is None:
                        item.handed_over = set()
                        self._handed_over.append((group, topic))
                    item.handed_over.add(queue_id)

    def write_handed_over(self) -> None:
        """Write the offsets of queues that were handed over. If the disk is full, they are saved with all others."""
        handed_over, self._handed_over = self._handed_over, []
        line = []
        for group, topic in handed_over:
            item = group.offsets.get(topic)
            if item is not None and item.handed_over is not None:
                queue_ids, item.handed_over = item.handed_over, None
                offsets = [(queue_id, item.offsets[queue_id]) for queue_id in queue_ids & item.offsets.keys()]
                line.append((topic, group.name, self._identity_of(topic), offsets))
        if line:
            self._dirty = True  # make the next save write the file, which shortens the journal
            try:
                self._journal.append(line)
            except StoreFull as error:
                log.error("offsets_not_saved", reason=str(error), hint="they are saved with all others, within 5 s")

    def allow_lower_offset(self, name: str, topic: str, queue_id: int) -> None:
        """Let members commit a lower offset of a queue than its last owner, because an administrator resets it."""
        item = self._find(name, topic)
        if (group := self._groups.get(name)) is not None:
            self.take_ahead(group, topic, queue_id, is_ended=True)
            if (queue := group.queues.get((topic, queue_id))) is not None:
                queue.passed = None
        if item is not None and item.of_owners:
            item.of_owners.pop(queue_id, None)

    def of(self, name: str, topic: str) -> dict[int, int]:
        """Return the group's offsets in a topic, by queue id."""
        item = self._find(name, topic)
        return dict(item.offsets) if item is not None else {}

    def topics_of(self, name: str) -> list[str]:
        group = self._groups.get(name)
        return list(group.offsets) if group is not None else []

    def groups(self) -> set[str]:
        """Return the groups that have an offset."""
        return {group.name for group in self._groups if group.offsets}

    def groups_of(self, topic: str) -> list[str]:
        return [group.name for group in self._groups.of_topic(topic) if topic in group.offsets]

    def encoded(self, rewinds: dict[str, int] | None = None) -> Iterator[bytes]:
        """Yield the content of the state file: entries `"topic@group":{"queue id":offset}`. Adds to `rewinds` by
        topic@group."""
        for group, topic, item in self._all():
            if group.offsets.get(topic) is item:
                if rewinds is not None and item.rewinds:
                    rewinds[f"{topic}@{group.name}"] = item.rewinds
                if item.encoded is None:
                    value = orjson.dumps(item.offsets, option=orjson.OPT_NON_STR_KEYS)
                    item.encoded = b"%b:%b" % (orjson.dumps(f"{topic}@{group.name}"), value)
                yield item.encoded

    def group_deleted(self, name: str) -> None:
        for topic in self.topics_of(name):
            self._delete(name, topic)

    def topic_deleted(self, topic: str) -> None:
        for name in self.groups_of(topic):
            self._delete(name, topic)

    def _delete(self, name: str, topic: str) -> None:
        group = self._groups.get(name)
        if group is not None:
            self._count -= len(group.offsets[topic].offsets)
            for queue_id in list(group.offsets[topic].ahead or ()):
                self.take_ahead(group, topic, queue_id, is_ended=True)
            self._groups.remove_offsets(group, topic)
            self._dirty = True

    def note_pops(self) -> None:
        """Record that the journal of pops exists from now on."""
        if not self.has_pops:
            self.has_pops = self._dirty = True

    def saving(self, is_synced: bool = True) -> Job[None]:
        """Save what has changed. Raises StoreFull; the next call retries."""
        if not (self._dirty or self.is_unsaved):
            return
        self._dirty, self.is_unsaved = False, True  # until it is written, also if this save is cancelled
        saving = self._saving(is_synced)
        yield from self._journal.shortening(saving) if self._journal.lines else saving
        self.is_unsaved = False

    def _saving(self, is_synced: bool) -> Job[None]:
        # First: an offset must not be saved with the identity of a topic that was recreated meanwhile.
        topics = self._groups.topics_with_offsets()
        identities = {topic: identity for topic in topics if (identity := self._identity_of(topic))}
        yield None
        rewinds: dict[str, int] = {}
        entries = yield from joined(self.encoded(rewinds))
        popped: dict[str, object] = {_POPPED: {}} if self.has_pops else {}
        rest = orjson.dumps({_REWINDS: rewinds, _IDENTITIES: identities, **popped})
        content = b"{%b%b%b" % (entries, b"," if entries else b"", rest[1:])
        yield partial(replace_state, self._path, content, sync=is_synced)


# ------------------------------------------------------------------------------
# Reports queues that no member reads.


class Watch:
    def __init__(self, runtime: Runtime, groups: ConsumerGroups, history: History, topics: QueueCounts) -> None:
        self._limits = runtime.limits
        self._groups = groups
        self._history = history
        self._queues_of = topics.queues_of
        self._clock = runtime.clock
        self._due_s = float("-inf")

    def reporting_orphans(self) -> Work[None]:
        """Report the queues that no member has read or locked for some seconds, although members subscribe to them; 100
        at a time. After very many queues the next report is delayed."""
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return
        looks = unread_count = reported = 0
        for number, group in enumerate(self._groups, 1):
            if number % LOOKS == 0:  # most groups may have no members
                yield
            is_broadcasting = group.is_broadcasting
            for topic, subscribed in sorted(group.topics.items()):
                # If clients pop the topic and no member pulls it, no queue of it has a reader
                is_read = not is_broadcasting and not group.is_apart(topic, now_s)
                unread: dict[int, Unread] = {}
                orphaned = 0
                for queue_id in range(self._queues_of(topic) if is_read else 0):
                    queue = group.queue(topic, queue_id)
                    is_unread = queue.owner.holder is None and queue.reader not in group.members
                    if is_unread and unread_count < self._limits.max_read_queues:
                        # The value is kept, because the garbage collector examines all new objects each second
                        known = subscribed.unread.get(queue_id) or Unread(now_s, is_named=False)
                        if now_s - known.since_s >= ORPHAN_S:
                            orphaned += 1
                            if not known.is_named and reported < self._limits.max_reported:
                                self._history.report_misread(
                                    "orphaned", group.name, "", f"{topic}:{queue_id} has no reader"
                                )
                                reported, known = reported + 1, Unread(known.since_s, is_named=True)
                        unread[queue_id] = known
                        unread_count += 1
                    looks += 1
                    if looks % SLICE == 0:
                        yield
                subscribed.unread, subscribed.orphaned = unread, orphaned
            looks += bool(group.members)
        self._due_s = now_s + looks / self._limits.watched_per_s

    def orphaned(self) -> Counter[tuple[str, str]]:
        """Return the number of queues without a reader, by group and topic."""
        found = ((group.name, topic, item.orphaned) for group in self._groups for topic, item in group.topics.items())
        return Counter({(group, topic): count for group, topic, count in found if count})


# ------------------------------------------------------------------------------
# Apache's clients take no lease: each allocates queues by the member list and the route that it knows, so two of them
# read one queue while these differ. A topic that grew, a lost notification, a member without a heartbeat, or another
# strategy is enough. The broker knows which client pulled a queue last, its *reader*. If that is a foreign member or has
# committed here, a pull of another client waits, unless that is a Rocketlet member or a broadcasting one, until
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
        locks: Locks,
        offsets: Offsets,
        held_pulls: HeldPulls,
    ) -> None:
        self._groups = groups
        self._locks = locks
        self._offsets = offsets
        self._held_pulls = held_pulls
        self._clock = runtime.clock
        self._limits = runtime.limits

    def wait(self, queue: GroupQueue, pull: HeldPull) -> None:
        """Release a pull, which is about to be held, once the queue is free from its reader. Raises LimitExceeded."""
        reader, contest, now_s = queue.reader, queue.contest, self._clock.monotonic_s()
        assert reader is not None, "the pull waits for a reader"
        if contest is None or contest.reader is not reader:
            contest = self._begin(queue, reader, now_s)
        contest.wanted_s = now_s
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
            queue.version += 1
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
        queue.version += 1  # invalidate checked pulls, so that the reader's next pulls are recorded
        self._return_held(queue, contest)
        self._poll_later(queue, contest)
        return contest

    def _return_held(self, queue: GroupQueue, contest: Contest) -> bool:
        """Return the reader's held pulls of the queue, so that a reader that still has it pulls again. True if it had any."""
        held = [pull for pull in self._held_by(queue, contest.reader) if pull.until is Until.MESSAGE]
        for pull in held:
            self._held_pulls.release(pull)
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
        """Return True if pulls need not wait for the reader any longer."""
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
        self._locks.release(contest.reader, queue)
        self._offsets.fence(queue.group, queue.key)  # the next reader may have loaded its offset before
        self._groups.release_queue(queue)
        for pull in contest.waiting:
            self._held_pulls.release(pull)

    def _end(self, queue: GroupQueue) -> None:
        queue.contest = None
        self._groups.release_queue(queue)
