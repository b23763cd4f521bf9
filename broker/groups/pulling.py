"""The meaning of PULL_MESSAGE and of offset commits: checks in Apache's order, then messages, or a held pull."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import structlog

from ...protocol import codes
from ...protocol import properties as props
from ...protocol.admin_bodies import decode_running, encode_offset_moved
from ...protocol.bodies import BodyError
from ...protocol.codes import PULL_COMMIT_OFFSET, PULL_SUSPEND
from ...protocol.config import MAX_EXPRESSION_CHARS
from ...protocol.fast import Answered, Buffer, PullSource, ServedPulls
from ...protocol.headers import PullMessage
from ...protocol.message import MessageError, offset_in, split_records
from ...protocol.names import (
    ALL,
    OFFSET_MOVED_TOPIC,
    SQL92,
    TAG,
    TOOLS_GROUP,
    Queue,
    Subscription,
    SubscriptionError,
    parse_subscription,
    tag_code,
)
from ..config import (
    DRAINING_WAIT_S,
    FILTER_WORD_BYTES,
    MAX_HOLD_S,
    MAX_RUNNING_INFO_BYTES,
    OTHERS_QUEUE_WAIT_S,
    SCAN_WORDS,
    SUBSCRIPTION_POLL_INTERVAL_S,
    SUBSCRIPTION_POLLS,
    LimitExceeded,
)
from ..messages.appender import Appender
from ..messages.filters import Filter, Filters
from ..messages.held_pulls import HeldPull, HeldPulls, Until
from ..messages.statistics import Statistics
from ..messages.topics import Topics
from ..pops.pops import Pops
from ..runtime.generation import Generation
from ..runtime.runtime import Runtime
from ..sessions.events import Answer, ForwardedRequest, RunningWanted
from ..sessions.refusal import Reason, Refusal
from ..sessions.requests import ClientRequests
from ..sessions.session import Session
from ..store.files import StoreError, StoreFull
from ..store.index import ConsumeQueue, Fetched, pull_limits
from ..store.store import Store
from .drains import Draining, has_handled_all
from .group import NO_QUEUE, ConsumerGroup, ConsumerGroups, FinishedAhead, GroupQueue
from .leases import Locks
from .members import subscription_bytes
from .offsets import Offsets, ReaderGuard
from .rates import Rates, TokenBucket
from .reading import ALLOWED, MoveTo, Read, ReadKind, Refuse, Wait, WaitReason, is_guarded, is_lasting, may_read
from .settings import GroupConfigs
from .stages import QueueKey

log = structlog.get_logger("rocketlet.pulls")
broker_log = structlog.get_logger("rocketlet.broker")
groups_log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# The results of pulls.


class PullStatus(Enum):
    """The result of a pull at its offset."""

    FOUND = auto()
    """Messages that match the subscription."""
    NO_MATCH = auto()
    """Messages, none of which match the subscription; the reader continues after them."""
    AT_END = auto()
    """The end of the queue, or no message that the client may get now."""
    EMPTY = auto()
    """A queue that never had a message."""
    EMPTIED = auto()
    """A queue whose messages were all deleted, and an offset other than 0."""
    BELOW = auto()
    """An offset before the first stored message."""
    BEYOND = auto()
    """An offset beyond the end of the queue."""
    RECREATED = auto()
    """The topic was deleted and recreated since the client read it."""


class Pulled(NamedTuple):
    """The result of a pull: the next offset, the first and end offset of the queue, and `pieces`, which are records as
    stored."""

    outcome: PullStatus
    next_offset: int
    begin: int
    end: int
    pieces: list[Buffer] = []


EncodePull = Callable[[int, int, Pulled], list[Buffer]]
"""Makes the response to a pull from its encoding, its number and its result."""


# ------------------------------------------------------------------------------
# A pull: the checks in Apache's order, the check whether the member may read the queue now, the read, and the hold without
# messages.
#
# A pull returns immediately, or waits for a message, for a token of its group's rate, for a heartbeat with its subscription,
# for the previous reader of a queue that moves, or until its member owns the queue.


_new_tuple = tuple.__new__
_RETRIED_REASONS = (Reason.SUBSCRIPTION_NOT_LATEST, Reason.UNKNOWN_MEMBER)


PullFault = Refusal | StoreError | MessageError | LimitExceeded
PullCallback = Callable[[Pulled | PullFault], None]


class Pull(NamedTuple):
    """A pull request. `limit` is the maximum number of messages. `later` is called if the pull must wait, and returns the
    function that later gets the result."""

    session: Session
    header: PullMessage
    limit: int
    later: Callable[[], PullCallback]


class Pulling:
    def __init__(
        self,
        runtime: Runtime,
        topics: Topics,
        appender: Appender,
        held_pulls: HeldPulls,
        filters: Filters,
        statistics: Statistics,
        requests: ClientRequests,
        groups: ConsumerGroups,
        group_configs: GroupConfigs,
        locks: Locks,
        draining: Draining,
        guard: ReaderGuard,
        pops: Pops,
        commits: Commits,
        rates: Rates,
    ) -> None:
        self._clock = runtime.clock
        self._rates = rates
        self._topics = topics
        self._appender = appender
        self._store = appender.store
        self._held_pulls = held_pulls
        self._filters = filters
        self._statistics = statistics
        self._groups = groups
        self._group_configs = group_configs
        self._locks = locks
        self._draining = draining
        self._guard = guard
        self._pops = pops
        self._commits = commits
        self._probe = SubscriptionProbe(groups, requests)
        self.checked = CheckedPulls(self._store, statistics, groups.generation, commits)

    def pull(self, pull: Pull, request_membership: Callable[[], None] | None = None, attempt: int = 1) -> Pulled | None:
        """Return the result, or None if it comes later.

        `request_membership` is called for a client that has sent no heartbeat, to request its running info. Raises Refusal,
        LimitExceeded, and the store's errors for damaged records.
        """
        session, header, _, _ = pull
        key = header.topic, header.queue_id
        try:
            # In the order of Apache's PullMessageProcessor, because clients react to the first error
            group = self._check_group_and_topic(header)
            bucket = self._bucket(group, header)
            read = Read(session, group, key, ReadKind.PULL, header.sys_flag, header.queue_offset, bucket=bucket)
            if header.sys_flag & codes.PULL_SUSPEND and session not in group.members:
                self._check_without_heartbeat(read)
            subscription = self._subscription(session, header, group)
        except Refusal as refusal:
            if refusal.reason in _RETRIED_REASONS and attempt < SUBSCRIPTION_POLLS:
                if refusal.reason is Reason.UNKNOWN_MEMBER and request_membership is not None:
                    request_membership()
                elif attempt == 1:
                    self._probe.request(session, header.consumer_group)
                held = self._waiting(pull, partial(self._retry, attempt=attempt + 1))
                if self._held_pulls.hold(held, SUBSCRIPTION_POLL_INTERVAL_S):
                    return None
            raise
        matches = None
        if subscription is not None and subscription.kind == SQL92:
            # A syntax error is reported before anything is read or held
            matches = self._filters.find(subscription.expression, session.address)
        if group.pools:
            self._pops.division.observe_pull(session, group, header.topic)
            if isinstance(verdict := may_read(read, self._clock.monotonic_s()), Refuse):
                raise Refusal(Reason.NOT_PERMITTED, verdict.reason)
        # The offset is committed even if the read finds nothing, as in PullMessageProcessor
        if header.sys_flag & codes.PULL_COMMIT_OFFSET:
            self._commits.carried(session, group, key, header.commit_offset)
        if header.sys_flag & codes.PULL_SUSPEND:
            self._observe(read, header)
            verdict = may_read(read, self._clock.monotonic_s())
            if isinstance(verdict, Wait):
                self._hold_until(verdict.until, pull, group, attempt)
                return None
            if isinstance(verdict, MoveTo):
                return self._moved(header, verdict)
        group_queue = self._locks.record_pull(session, group, key)
        if header.sys_flag & codes.PULL_COMMIT_OFFSET and group_queue.reader is session:
            group_queue.has_committed = True
        if group_queue.former_end is not None and self._shows_the_end(read, group_queue):
            self._locks.clear_former_end(group_queue)
        queue = self._store.queue(header.topic, header.queue_id)
        # Held only at the exact end. An offset beyond the end is an error, which the client gets immediately
        wants_hold = header.sys_flag & codes.PULL_SUSPEND and header.suspend_timeout_millis > 0
        if wants_hold and queue.next == header.queue_offset:
            answer = pull.later()
            held = HeldPull(
                session,
                header.consumer_group,
                queue,
                subscription,
                header.queue_offset,
                lambda: answer(self._read_held(pull, queue, subscription, matches)),
                size=_held_bytes(header, subscription, matches),
                is_done=has_handled_all(header),
                passed=partial(self._commits.passed, session, group.name, key, header.queue_offset),
            )
            if self._held_pulls.hold(held, min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)):
                return None
        return self._read(pull, read, group_queue, queue, subscription, matches)

    def kept(self, pull: Pull, generation: int) -> CheckedPull | None:
        """Return a pull that just got messages, to be cached; `generation` was read before it. Return None if the pull
        must be checked again."""
        session, header = pull.session, pull.header
        group = self._groups.get(header.consumer_group)
        if group is None:
            return None
        subscription = self._subscription(session, header, group)
        return self.checked.of(session, header, group, pull.limit, subscription, generation)

    # Waiting

    def _waiting(self, pull: Pull, action: Callable[[Pull, PullCallback], None], until: Until = Until.TIME) -> HeldPull:
        """Return a pull that waits for something other than messages. `action` is called at its end."""
        session, header = pull.session, pull.header
        queue = self._store.queue(header.topic, header.queue_id)
        kept = _kept(pull)
        return HeldPull(
            session,
            header.consumer_group,
            queue,
            None,
            header.queue_offset,
            lambda: action(kept, kept.later()),
            size=text_bytes(header),
            until=until,
        )

    def _retry(self, pull: Pull, answer: PullCallback, attempt: int) -> None:
        """Retry a pull that waited for the queue, or for the heartbeat with its new subscription, because a Java client
        would wait a second after a refusal. Do nothing if the connection is closed."""
        if pull.session.is_closed:  # do not keep the pull of a client whose connection is closed
            return
        outcome: Pulled | PullFault | None
        try:
            outcome = self.pull(pull, attempt=attempt)
        except (Refusal, StoreError, MessageError, LimitExceeded) as fault:
            outcome = fault
        if outcome is not None:
            answer(outcome)

    def _observe(self, read: Read, header: PullMessage) -> None:
        """Record what a pull shows: the progress of its member, and a claim of a queue without an owner."""
        session, group, key = read.session, read.group, read.key
        if group.drain is not None:
            self._draining.observe_pull(group, session, header)
        if group.has_bound_members:
            self._draining.allotment.observe_claim(group, session, *key)
        if read.kind is ReadKind.PULL and group.queues.get(key, NO_QUEUE).contest is not None:
            self._guard.record_pull(session, group.queues[key])

    def _hold_until(self, until: WaitReason, pull: Pull, group: ConsumerGroup, attempt: int) -> None:
        """Hold a pull whose member may not read the queue now, until it is retried or returns without messages."""
        session, header = pull.session, pull.header
        key = header.topic, header.queue_id
        wait_s = min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)
        until_s, was_member = self._clock.monotonic_s() + wait_s, session in group.members
        retry = partial(self._retry_allowed, attempt=attempt, was_member=was_member, until_s=until_s)
        if until is WaitReason.RATE:
            self._hold_for_token(pull, group, retry, wait_s)
        elif until is WaitReason.OWN_DRAIN:
            self._hold(self._waiting(pull, _respond_empty), DRAINING_WAIT_S)
        elif until is WaitReason.OWNER:
            self._hold(self._waiting(pull, _respond_empty, Until.TURN), wait_s)
        elif until in (WaitReason.LEASE, WaitReason.HEARTBEAT):
            self._hold(self._waiting(pull, _respond_empty), OTHERS_QUEUE_WAIT_S)
        else:
            held = self._waiting(pull, retry)
            if until is WaitReason.DRAIN:
                self._draining.gate(group, key, partial(self._held_pulls.release, held))
            else:
                self._guard.wait(group.queues[key], held)
            self._hold(held, wait_s)

    def _bucket(self, group: ConsumerGroup, header: PullMessage) -> TokenBucket | None:
        """Return the tokens for a pull; None for a group without a rate, and for pulls of tools."""
        settings = group.settings
        if settings is None or not settings.has_rate or not header.sys_flag & codes.PULL_SUSPEND:
            return None
        return self._rates.bucket(settings, header.topic)

    def _hold_for_token(
        self, pull: Pull, group: ConsumerGroup, retry: Callable[[Pull, PullCallback], None], wait_s: float
    ) -> None:
        """Hold a pull until there is a token for it, at most until its suspend time has ended. Pulls get tokens in the order
        in which they were held, so that no pull is woken in vain."""
        bucket = self._bucket(group, pull.header)
        if bucket is not None:
            wait_s = bucket.wait_s(self._clock.monotonic_s(), wait_s)
        self._hold(self._waiting(pull, retry), wait_s)

    def _hold(self, held: HeldPull, wait_s: float) -> None:
        """Hold a pull; if no more pulls can be held, answer it immediately."""
        if not self._held_pulls.hold(held, wait_s):
            held.answer()

    def _retry_allowed(
        self, pull: Pull, answer: PullCallback, attempt: int, *, was_member: bool, until_s: float
    ) -> None:
        """Retry a pull because the earlier reader is done, or there is a token. Hold it longer if there is none. Return no
        messages if its suspend time has ended, if it must wait for something else, or if its member has left the group
        meanwhile, and so must not become the reader."""
        session, header = pull.session, pull.header
        group = self._groups.get(header.consumer_group)
        if group is None or session.is_closed or (was_member and session not in group.members):
            answer(_nothing_new(header))
            return
        key, now_s = (header.topic, header.queue_id), self._clock.monotonic_s()
        bucket = self._bucket(group, header)
        read = Read(session, group, key, ReadKind.PULL, header.sys_flag, header.queue_offset, bucket=bucket)
        verdict = may_read(read, now_s)
        if not isinstance(verdict, Wait):
            self._retry(pull, answer, attempt)
        elif verdict.until is WaitReason.RATE and now_s < until_s:
            retry = partial(self._retry_allowed, attempt=attempt, was_member=was_member, until_s=until_s)
            self._hold_for_token(pull, group, retry, until_s - now_s)
        else:
            answer(_nothing_new(header))

    def _moved(self, header: PullMessage, verdict: MoveTo) -> Pulled:
        """Return the result for a reader that must continue at another offset.

        A response without messages moves Apache's clients to it immediately (PullCallback, NO_NEW_MSG, in 4.9's Java and in
        Go); PULL_OFFSET_MOVED would delay them by 10 s.
        """
        offset = verdict.offset
        if not verdict.is_lost:
            return Pulled(PullStatus.AT_END, offset, 0, offset)
        log.warning(
            "position_set_back", group=header.consumer_group, topic=header.topic, queue=header.queue_id,
            offset=header.queue_offset, end=offset,
            hint="the member read messages that were lost before this start; their offsets are used again",
        )  # fmt: skip
        self._note_moved(header, offset)
        queue = self._store.queue(header.topic, header.queue_id)
        return Pulled(PullStatus.BEYOND, offset, queue.begin, queue.next)

    @staticmethod
    def _shows_the_end(read: Read, queue: GroupQueue) -> bool:
        """Return True if a pull shows that its reader knows the end of the queue: the owner's pull, or one without
        PULL_SUSPEND, as a Spark query makes it, which handles lost messages itself."""
        return not read.flags & codes.PULL_SUSPEND or queue.owner.is_leased_to(read.session)

    # Checks

    def _check_group_and_topic(self, header: PullMessage) -> ConsumerGroup:
        """Return the group; create it if groups are created automatically."""
        self._topics.check_reading()
        settings = self._group_configs.consuming(header.consumer_group)
        group = self._groups.obtain(header.consumer_group)
        self._group_configs.check_unbound(settings)
        topic = self._topics.readable(header.topic)
        if not 0 <= header.queue_id < topic.read_queues:
            raise Refusal(
                Reason.ILLEGAL,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] readQueueNums:[{topic.read_queues}]",
            )
        return group

    def _check_without_heartbeat(self, read: Read) -> None:
        """Check a client without a heartbeat, on a new connection or after a restart of the broker. Raises Refusal."""
        queue = read.group.queue(*read.key)
        self._locks.renew_awaited(queue, read.session)
        if may_read(read, self._clock.monotonic_s()) == Wait(WaitReason.HEARTBEAT):
            raise Refusal(
                Reason.UNKNOWN_MEMBER,
                f"the consumer's subscription not exist, send a heartbeat of {read.group.name} first",
            )

    def _subscription(self, session: Session, header: PullMessage, group: ConsumerGroup) -> Subscription | None:
        """Return the filter of a pull; None for all messages. Raises Refusal if the filter is invalid, or if the
        member's subscription is missing or older than that of the pull."""
        if header.sys_flag & codes.PULL_SUBSCRIPTION:
            if header.subscription == ALL and header.expression_type in (TAG, None):  # the most frequent case
                return None
            if len(header.subscription or "") > MAX_EXPRESSION_CHARS:
                raise Refusal(
                    Reason.BAD_EXPRESSION,
                    f"the expression has {len(header.subscription or '')} characters; maximum {MAX_EXPRESSION_CHARS}",
                )
            try:
                found = parse_subscription(header.topic, header.subscription, kind=header.expression_type)
            except SubscriptionError as error:
                raise Refusal(Reason.BAD_EXPRESSION, f"parse the consumer's subscription failed: {error}") from None
        else:
            found = self._registered_subscription(session, header, group)
        if found.kind not in (TAG, SQL92):
            raise Refusal(Reason.ILLEGAL, f"the broker does not support consumer to filter message by {found.kind}")
        return None if found.takes_all else found

    def _registered_subscription(self, session: Session, header: PullMessage, group: ConsumerGroup) -> Subscription:
        name = group.name
        if not group.members:
            raise Refusal(
                Reason.NOT_SUBSCRIBED,
                f"the consumer's group info not exist, send a heartbeat of {name} first",
            )
        settings = group.settings
        if group.message_model == "BROADCASTING" and settings and not settings.consume_broadcast_enable:
            raise Refusal(Reason.NOT_PERMITTED, f"the consumer group[{name}] can not consume by broadcast way")
        found = group.subscription(session, header.topic)
        if found is None:
            raise Refusal(
                Reason.NOT_SUBSCRIBED,
                f"the consumer's subscription not exist, no member of {name} subscribes to {header.topic}",
            )
        if found.version < header.sub_version:
            raise Refusal(Reason.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        return found

    # Reading

    def _read_held(
        self, pull: Pull, queue: ConsumeQueue, subscription: Subscription | None, matches: Filter | None
    ) -> Pulled | PullFault:
        """Like `_read`, but return the store's errors, because no dispatch is there to report them. Return no messages
        if the member may not read the queue any more."""
        session, header, _, _ = pull
        group, key = self._groups.obtain(header.consumer_group), (header.topic, header.queue_id)
        bucket = self._bucket(group, header)
        read = Read(session, group, key, ReadKind.HELD, header.sys_flag, header.queue_offset, bucket=bucket)
        if group.pools:
            self._pops.division.observe_pull(session, group, header.topic)
        self._observe(read, header)
        verdict = may_read(read, self._clock.monotonic_s())
        if isinstance(verdict, MoveTo):
            return self._moved(header, verdict)
        if verdict is not ALLOWED:  # since the pull was held; the member's next pull waits or is refused
            return _nothing_new(header)
        group_queue = group.queue(*key)
        if self._store.queues.get((queue.topic, queue.queue_id)) is not queue:
            return Refusal(Reason.NO_TOPIC, f"topic[{queue.topic}] not exist, it was deleted")
        try:
            return self._read(pull, read, group_queue, queue, subscription, matches)
        except (StoreError, MessageError) as error:
            log.error("pull_failed", topic=header.topic, queue=header.queue_id, reason=str(error))
            return error

    def _read(
        self,
        pull: Pull,
        read: Read,
        group_queue: GroupQueue,
        queue: ConsumeQueue,
        subscription: Subscription | None,
        matches: Filter | None,
    ) -> Pulled:
        """Read at the offset and return the result."""
        header = pull.header
        offset, begin, end = header.queue_offset, queue.begin, queue.next
        if header.topic_identity and self._topics.identity(header.topic) not in ("", header.topic_identity):
            return Pulled(PullStatus.RECREATED, begin, begin, end)
        if begin <= offset < end:
            looks = SCAN_WORDS // matches.words if matches is not None else 0
            bucket = read.bucket
            now_s = self._clock.monotonic_s() if bucket is not None else 0.0
            limit = pull.limit if bucket is None else min(pull.limit, max(bucket.available(now_s), 1))
            found = self._store.fetch(queue, offset, limit, subscription, matches, header.max_msg_bytes, looks)
            ahead = read.group.finished_ahead(*read.key)
            if ahead is not None and found.messages and offset < ahead.end:
                found = _without(found, ahead)
            if found.messages:
                if bucket is not None:
                    bucket.take(found.messages, now_s)
                name = header.consumer_group
                if name != TOOLS_GROUP:  # messages that tools inspect do not count as consumed
                    self._statistics.note_got(f"{header.topic}@{name}", found.messages, sum(map(len, found.pieces)))
                if group_queue.reader is pull.session and is_guarded(group_queue, pull.session):
                    group_queue.given_offset = found.next_offset
                return _new_tuple(Pulled, (PullStatus.FOUND, found.next_offset, begin, end, found.pieces))
            return Pulled(PullStatus.NO_MATCH, found.next_offset, begin, end)
        if end == 0:
            if offset:
                self._note_moved(header, 0)
            # PullMessageProcessor, NO_MESSAGE_IN_QUEUE: a reader at offset 0 of an empty queue has nothing to correct
            return Pulled(PullStatus.EMPTIED if offset else PullStatus.EMPTY, 0, begin, end)
        if offset == end:
            return Pulled(PullStatus.AT_END, offset, begin, end)
        if offset < begin:
            self._note_moved(header, begin)
            return Pulled(PullStatus.BELOW, begin, begin, end)
        self._note_moved(header, end)
        return Pulled(PullStatus.BEYOND, end, begin, end)

    def _note_moved(self, header: PullMessage, offset: int) -> None:
        """Store an OffsetMovedEvent in the topic OFFSET_MOVED_EVENT, for programs that watch it."""
        moved = Queue(header.topic, self._groups.broker_name, header.queue_id)
        body = encode_offset_moved(header.consumer_group, moved, header.queue_offset, offset)
        text = f"{props.TAGS}{props.NAME_END}{header.consumer_group}{props.PAIR_END}{props.KEYS}{props.NAME_END}"
        text += header.consumer_group
        store = self._store
        queue = store.queue(OFFSET_MOVED_TOPIC, 0)
        try:
            with self._appender.batch() as now_ms:
                self._appender.stage(queue, body, text.encode(), tag_code(text), 0, 0, now_ms, store.store_host)
        except StoreFull as error:
            log.warning("offset_moved_not_noted", group=header.consumer_group, reason=str(error))


def _without(found: Fetched, ahead: FinishedAhead) -> Fetched:
    """Return a read without the messages that clients which popped have finished."""
    records = split_records(b"".join(found.pieces))
    left: list[bytes | memoryview] = [record for record in records if not ahead.has(offset_in(record))]
    return found._replace(pieces=left, messages=len(left))


def _kept(pull: Pull) -> Pull:
    """Return the pull as it waits, with its function for the result."""
    answer = pull.later()
    return pull._replace(later=lambda: answer)


def _respond_empty(pull: Pull, answer: PullCallback) -> None:
    answer(_nothing_new(pull.header))


def _nothing_new(header: PullMessage) -> Pulled:
    """Return a result without messages, after which the member pulls again until it owns the queue or was notified."""
    return Pulled(PullStatus.AT_END, header.queue_offset, 0, header.queue_offset)


def _held_bytes(header: PullMessage, subscription: Subscription | None, matches: Filter | None) -> int:
    parsed = subscription_bytes(subscription) if subscription is not None else 0
    words = matches.words if matches is not None else 0
    return text_bytes(header) + parsed + FILTER_WORD_BYTES * words


def text_bytes(header: PullMessage) -> int:
    """Return the size of the client's texts in a waiting pull, in bytes."""
    texts = header.consumer_group, header.topic, header.subscription, header.expression_type, header.topic_identity
    return sum(map(len, filter(None, texts)))


# ------------------------------------------------------------------------------
# The cache of checked pulls.
#
# Clients repeat a pull with other offsets. `CheckedPulls.of` caches the result of the checks that `Pulling` made, with the
# generation from before them and the versions of group and queue, and `CheckedPulls.repeat` serves the next pulls by it while
# these are the same. So a change of one group's owners does not concern the pulls of others. The committed offset, the
# queue's last reader and whether there is a message may differ from pull to pull, and are checked each time. Results that
# depend on the current time are not cached.


class CheckedPull(NamedTuple):
    """A pull that passed all checks.

    Attributes:
        generation: the generation of settings, topics and accounts at the check.
        version: the sum of the versions of its group and of its queue in the group, which only increase.
        name: The topic under which its messages are counted.
        is_recorded: True if the end offset of the messages that its reader gets is recorded.
    """

    generation: int
    version: int
    queue: GroupQueue
    flags: int
    limit: int
    max_bytes: int | None
    subscription: Subscription | None
    name: str
    is_recorded: bool

    @property
    def is_unfiltered(self) -> bool:
        return self.subscription is None or self.subscription.expression == ALL


class CheckedPulls:
    def __init__(
        self,
        store: Store,
        statistics: Statistics,
        generation: Generation,
        commits: Commits,
    ) -> None:
        self._generation = generation
        self._store = store
        self._statistics = statistics
        self._commits = commits

    def of(
        self,
        session: Session,
        header: PullMessage,
        group: ConsumerGroup,
        limit: int,
        subscription: Subscription | None,
        generation: int,
    ) -> CheckedPull | None:
        """Return a cached pull for one that passed every check since the generation was read. None if it must be checked each
        time (`is_lasting`), and with SQL filters, whose parsed form may be evicted."""
        key = header.topic, header.queue_id
        read = Read(session, group, key, ReadKind.REPEATED, header.sys_flag, header.queue_offset)
        if not is_lasting(read):
            return None
        queue = group.queue(*key)
        if subscription is not None and subscription.kind == SQL92:
            return None
        name = f"{header.topic}@{group.name}"
        flags, max_bytes = header.sys_flag, header.max_msg_bytes
        version, is_recorded = queue.version + group.version, is_guarded(queue, session)
        return CheckedPull(generation, version, queue, flags, limit, max_bytes, subscription, name, is_recorded)

    def repeat(
        self,
        session: Session,
        data: bytes,
        at: int,
        pulls: Mapping[bytes, CheckedPull],
        max_bytes: int,
        encode: EncodePull,
    ) -> ServedPulls | None:
        """Serve up to 64 pulls from a position of the data on that repeat checked ones, with the compiled module, until
        their responses have more than `max_bytes`, or until one has a filter, whose response `encode` makes. None if it
        declines the first one."""
        served = self._store.take_pulls(data, at, pulls, partial(self._source, session, encode), max_bytes)
        if served is not None:
            for checked, messages, size, next_offset in served.pulls:
                self._record(checked, messages, size, next_offset)
        return served

    def _source(
        self,
        session: Session,
        encode: EncodePull,
        checked: CheckedPull,
        offset: int,
        commit_offset: int,
    ) -> PullSource | None:
        """Return what a pull may read; None if it must be checked or may have to wait."""
        queue = self._admit(session, checked, offset, commit_offset)
        if queue is None:
            return None
        group_queue, flags = checked.queue, checked.flags
        first = queue.begin
        if flags & PULL_SUSPEND:
            first = max(first, group_queue.group.offset(*group_queue.key) or 0)
        limit, room = pull_limits(checked.limit, checked.max_bytes)
        is_admitted = not flags & PULL_COMMIT_OFFSET
        entries = partial(self._store.entries_ahead, queue)
        answer = None if checked.is_unfiltered else partial(self._answer, encode, checked, queue)
        return _new_tuple(PullSource, (entries, answer, queue.begin, queue.next, first, room, limit, is_admitted))

    def _answer(
        self,
        encode: EncodePull,
        checked: CheckedPull,
        queue: ConsumeQueue,
        kind: int,
        opaque: int,
        offset: int,
    ) -> Answered:
        """Return the response to a pull with a filter. Raises the store's errors for damaged records."""
        found = self._store.fetch(queue, offset, checked.limit, checked.subscription, None, checked.max_bytes)
        status = PullStatus.FOUND if found.messages else PullStatus.NO_MATCH
        response = encode(kind, opaque, Pulled(status, found.next_offset, queue.begin, queue.next, found.pieces))
        size, messages_bytes = sum(map(len, response)), sum(map(len, found.pieces))
        return response, size, found.messages, messages_bytes, found.next_offset

    def _admit(self, session: Session, checked: CheckedPull, offset: int, commit_offset: int) -> ConsumeQueue | None:
        """Commit the offset that a pull carries, and return its queue; None if the pull must be checked or may have to
        wait."""
        group_queue, flags = checked.queue, checked.flags
        key, group = group_queue.key, group_queue.group
        if checked.generation != self._generation.number or checked.version != group_queue.version + group.version:
            return None
        if group_queue.reader is not session:
            return None
        queue = self._store.queues.get(key)
        if queue is None or not queue.begin <= offset < queue.next:
            return None
        if flags & PULL_SUSPEND:
            committed = group.offset(*key) or 0
            if offset < committed or (offset < commit_offset and flags & PULL_COMMIT_OFFSET):
                return None  # decline to use the checked pull, because another member may have read the queue since
        if flags & PULL_COMMIT_OFFSET:
            self._commits.carried(session, group, key, commit_offset)
        return queue

    def _record(self, checked: CheckedPull, messages: int, size: int, next_offset: int) -> None:
        """Count the messages of served pulls, and record the end offset of the last one."""
        if checked.queue.group.name != TOOLS_GROUP:
            self._statistics.note_got(checked.name, messages, size)
        if checked.is_recorded:
            checked.queue.given_offset = next_offset


# ------------------------------------------------------------------------------
# Commits: who may commit a group's offset of a queue, and which offsets are valid.


class Commits:
    def __init__(
        self,
        runtime: Runtime,
        topics: Topics,
        store: Store,
        offsets: Offsets,
        groups: ConsumerGroups,
        locks: Locks,
        draining: Draining,
        pops: Pops,
    ) -> None:
        self._clock = runtime.clock
        self._pops = pops
        self._groups = groups
        self._locks = locks
        self._draining = draining
        self._offsets = offsets
        self._store = store
        self._topics = topics

    def fault(
        self,
        session: Session,
        group: ConsumerGroup,
        key: QueueKey,
        offset: int,
        epoch: int | None,
        *,
        may_be_tool: bool = True,
    ) -> str | None:
        """Return why this client may not commit an offset of the queue; None if it may. may_be_tool: True if the request may
        come from an administration tool."""
        if not may_be_tool and session not in group.members:
            queue = group.queues.get(key, NO_QUEUE)
            self._locks.renew_awaited(queue, session)
        kind = ReadKind.COMMIT if may_be_tool else ReadKind.MEMBER_COMMIT
        verdict = may_read(Read(session, group, key, kind, 0, offset, epoch), self._clock.monotonic_s())
        return verdict.reason if isinstance(verdict, Refuse) else None

    def store(
        self, session: Session, group: ConsumerGroup, queue: GroupQueue, key: QueueKey, offset: int, *, by_owner: bool
    ) -> None:
        topic, queue_id = key
        if queue.passed is not None and queue.reader is session and queue.passed[0] <= offset < queue.passed[1]:
            offset = queue.passed[1]  # the client does not know yet that it continues there
        drain, end = group.drain, offset
        if drain is not None and not drain.is_over and offset > (group.offset(topic, queue_id) or 0):
            self._draining.record_progress(group, session)
        if queue.owner.holder is not None:
            end = self._locks.record_commit(queue, offset)
        if end != offset:
            broker_log.warning(
                "offset_set_back", group=group.name, topic=topic, queue=queue_id, offset=offset, end=end,
                hint="the member read messages that were lost before this start; their offsets are used again",
            )  # fmt: skip
        self._offsets.commit(group, topic, queue_id, end, by_owner=by_owner)
        if group.pools:
            self._pops.offsets_reset(group.name, topic, queue_id)

    def commit(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int, epoch: int) -> str | None:
        """Commit an offset for the owner of a lease and return None; or return why it is refused."""
        queue = group.queues.get(key, NO_QUEUE)
        fault = self.fault(session, group, key, offset, epoch) or self.offset_fault(queue, key, offset)
        if fault is None:
            self.store(session, group, queue, key, offset, by_owner=True)
        return fault

    def carried(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int) -> None:
        """Commit the offset that a pull carries; ignored if the client may not commit it or the queue does not have
        it."""
        queue = group.queues.get(key, NO_QUEUE)
        fault = self.fault(session, group, key, offset, None, may_be_tool=False)
        fault = fault or self.offset_fault(queue, key, offset)
        if fault is None:
            by_owner = queue.owner.is_leased_to(session)
            self.store(session, group, queue, key, offset, by_owner=by_owner)

    def passed(self, session: Session, name: str, key: QueueKey, begin: int, end: int) -> None:
        """Count messages as finished that matched no subscription while a pull was held. The client gets their end offset
        with the response, which may come much later, and may commit lower offsets until then. If messages before `begin` are
        not committed yet, the commit of the last one counts as that of `end`.

        Args:
            begin: the offset of the pull.
            end: the offset after the last of the messages.
        """
        group = self._groups.get(name)
        queue = group.queues.get(key) if group is not None else None
        if group is None or queue is None or queue.reader is not session:
            return
        queue.passed = (begin, end)
        committed = group.offset(*key)
        if committed is not None and begin <= committed < end:
            self.carried(session, group, key, end)

    def offset_fault(self, queue: GroupQueue, key: QueueKey, offset: int) -> str | None:
        """Return why a queue does not have an offset; None if the offset is between the start and the end of the queue.
        While the queue has a `former_end`, a higher offset is accepted, too, because the messages may have been lost.
        Apache's broker accepts any number."""
        if queue.former_end is not None:
            offset = min(offset, queue.former_end)
        found = self._store.queues.get(key)
        if found is not None and found.begin <= offset <= found.next:
            return None
        if found is None:
            topic = self._topics.get(key[0])
            if topic is None or not 0 <= key[1] < max(topic.read_queues, topic.write_queues):
                return f"there is no queue {key[0]}:{key[1]}"
            if offset == 0:  # the start and end of a queue without messages
                return None
        begin, end = (found.begin, found.next) if found is not None else (0, 0)
        return f"{offset} is not between the start {begin} and the end {end} of {key[0]}:{key[1]}"


# ------------------------------------------------------------------------------
# Requests for the subscriptions of a foreign member whose heartbeat is missing.
#
# Java's client changes the version of a subscription with each rebalance, and reports it in a heartbeat. The client
# skips that heartbeat if another one is in progress (MQClientInstance.sendHeartbeatToAllBrokerWithLock), for example
# when members join within milliseconds. Until its next one, up to 30 s later, its pulls have a version that no broker
# knows, and are refused.


class SubscriptionProbe:
    def __init__(self, groups: ConsumerGroups, requests: ClientRequests) -> None:
        self._groups = groups
        self._requests = requests

    def request(self, session: Session, group_name: str) -> None:
        """Request the versions of a foreign member's subscriptions, unless a request is open."""
        group = self._groups.get(group_name)
        member = group.foreign.get(session) if group else None
        if member is not None and not self._requests.has_open(session):
            wanted = RunningWanted(ForwardedRequest(group_name, member.client_id, {}))
            with suppress(LimitExceeded):
                self._requests.send(session, wanted, partial(self._answered, session, group_name), by=session)

    def _answered(self, session: Session, group_name: str, reply: Answer | None) -> None:
        group = self._groups.get(group_name)
        member = group.foreign.get(session) if group else None
        if group is None or member is None or reply is None or not reply.is_ok:
            return
        if len(reply.body) > MAX_RUNNING_INFO_BYTES:
            return
        try:
            running = decode_running(reply.body)
        except BodyError as error:
            if session.is_news("member_unreadable"):
                groups_log.info("member_unreadable", group=group_name, client=member.client_id, reason=str(error))
            return
        for topic, version in running.versions.items():
            known = member.subscriptions.get(topic)
            # A changed expression must come by a heartbeat, which checks it
            if known is not None and known.expression == running.subscriptions[topic]:
                group.record_version(member, topic, version)
                group.version += 1
