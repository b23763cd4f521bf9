"""The meaning of PULL_MESSAGE and of offset commits: checks in Apache's order, then messages, or a held pull."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import structlog

from ...protocol import codes
from ...protocol import properties as props
from ...protocol.admin_bodies import decode_running, encode_offset_moved
from ...protocol.bodies import BodyError
from ...protocol.codes import PERM_READ, PULL_COMMIT_OFFSET, PULL_SUSPEND
from ...protocol.config import MAX_EXPRESSION_CHARS
from ...protocol.headers import PullMessage
from ...protocol.message import MessageError
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
from ..messages.topics import Statistics, Topics
from ..pops.pops import Pops
from ..runtime import LiveConfig, Runtime
from ..sessions import Answer, Clients, ForwardedRequest, Reason, Refusal, RunningWanted, Session, subscription_bytes
from ..store.files import StoreError, StoreFull
from ..store.index import ConsumeQueue
from ..store.store import Store
from .drains import Draining, has_handled_all
from .group import NO_QUEUE, ConsumerGroup, ConsumerGroups, GroupQueue
from .guard import ReaderGuard, is_guarded
from .leases import Locks
from .offsets import Offsets, Watch
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
    """Messages that its subscription takes."""
    NO_MATCH = auto()
    """Messages, but none of them; it goes on behind them."""
    AT_END = auto()
    """The end of the queue, or nothing that is for it now."""
    EMPTY = auto()
    """A queue that never had a message."""
    EMPTIED = auto()
    """A queue without messages, and another offset than 0."""
    BELOW = auto()
    """An offset before the first message that is kept."""
    BEYOND = auto()
    """An offset behind the end."""
    MADE_ANEW = auto()
    """Another topic of that name than the one that the client has read."""


class Pulled(NamedTuple):
    """Where to pull next, and where the queue begins and ends. `pieces` are records as they lie in the log."""

    outcome: PullStatus
    next_offset: int
    begin: int
    end: int
    pieces: list[bytes | memoryview] = []


# ------------------------------------------------------------------------------
# Pulls messages: the checks in Apache's order, whether the queue is the member's to read now, the read, and the hold
# when nothing is there.
#
# A pull gets its outcome at once, or waits: for a message, for a filter that is parsed, or for its turn in a queue
# that changes hands.


_new_tuple = tuple.__new__
_SAID_SOON = (Reason.SUBSCRIPTION_NOT_LATEST, Reason.UNKNOWN_MEMBER)


PullFault = Refusal | StoreError | MessageError | LimitExceeded
PullCallback = Callable[[Pulled | PullFault], None]


class Pull(NamedTuple):
    """`limit` is of messages. `later` is called if the pull has to wait; the function that it returns gets the outcome."""

    session: Session
    header: PullMessage
    limit: int
    later: Callable[[], PullCallback]


class Pulling:
    def __init__(
        self,
        runtime: Runtime,
        settings: LiveConfig,
        topics: Topics,
        appender: Appender,
        held_pulls: HeldPulls,
        filters: Filters,
        statistics: Statistics,
        clients: Clients,
        groups: ConsumerGroups,
        group_configs: GroupConfigs,
        offsets: Offsets,
        locks: Locks,
        watch: Watch,
        draining: Draining,
        guard: ReaderGuard,
        pops: Pops,
        commits: Commits,
    ) -> None:
        self._clock = runtime.clock
        self._settings = settings
        self._topics = topics
        self._appender = appender
        self._store = appender.store
        self._held_pulls = held_pulls
        self._filters = filters
        self._statistics = statistics
        self._groups = groups
        self._group_configs = group_configs
        self._offsets = offsets
        self._locks = locks
        self._watch = watch
        self._draining = draining
        self._guard = guard
        self._pops = pops
        self._commits = commits
        self._versions = Versions(groups, clients)
        self.checked = CheckedPulls(self._store, statistics, groups, offsets, draining, pops, commits)

    def pull(self, pull: Pull, ask_who: Callable[[], None] | None = None, attempt: int = 1) -> Pulled | None:
        """Returns the outcome, or None if it comes later. `ask_who` asks a client that has sent no heartbeat who it is.
        Raises Refusal, LimitExceeded, and the store's errors for damage."""
        session, header, _, _ = pull
        try:
            # In the order of Apache's PullMessageProcessor: clients react to the first fault.
            group = self._check_group_and_topic(header)
            if header.sys_flag & codes.PULL_SUSPEND and session not in group.members:
                self._check_stranger(session, header, group)
            subscription = self._subscription(session, header, group)
        except Refusal as refusal:
            if refusal.reason in _SAID_SOON and attempt < SUBSCRIPTION_POLLS:
                if refusal.reason is Reason.UNKNOWN_MEMBER and ask_who is not None:
                    ask_who()
                elif attempt == 1:
                    self._versions.ask(session, header.consumer_group)
                if self._hold(pull, SUBSCRIPTION_POLL_INTERVAL_S, partial(self._look_again, attempt=attempt + 1)):
                    return None
            raise
        matches = None
        if subscription is not None and subscription.kind == SQL92:
            matches = self._filters.find(subscription.expression)  # its faults are said before anything is read or held
            if matches is None:
                kept = _kept(pull)
                look_again = partial(self._look_again, kept, kept.later(), attempt)
                give_nothing = partial(_give_nothing, kept, kept.later())
                self._filters.when_parsed(
                    session, subscription.expression, look_again, text_bytes(header), give_nothing
                )
                return None
        if self._pops.pools:
            fault = self._pops.pull_fault(session, header.consumer_group, header.topic)
            if fault is not None:
                raise Refusal(Reason.NOT_PERMITTED, fault)
        key = header.topic, header.queue_id
        # The offset is kept even if the read finds nothing, as in PullMessageProcessor.
        if header.sys_flag & codes.PULL_COMMIT_OFFSET:
            self._commits.carried(session, group, key, header.commit_offset)
        if header.sys_flag & codes.PULL_SUSPEND:
            if group.queues.get(key, NO_QUEUE).contest is not None:
                self._guard.record_pull(session, group.queues[key])
            if self._has_to_wait(pull, group, attempt):
                return None
            committed = self._overtaken_by(session, header, group)
            if committed is not None:
                return Pulled(PullStatus.AT_END, committed, 0, committed)
        group_queue = self._watch.record_pull(session, group, key)
        if header.sys_flag & codes.PULL_COMMIT_OFFSET and group_queue.reader is session:
            group_queue.has_committed = True
        queue = self._store.queue(header.topic, header.queue_id)
        end = self._set_back_to(session, header, group_queue) if group_queue.lease is not None else None
        if end is not None:
            self._note_moved(header, end)
            return Pulled(PullStatus.BEYOND, end, queue.begin, queue.next)
        # Only at the very end. An offset beyond it is wrong: the client is told at once, so that it corrects it.
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
            )
            if self._held_pulls.hold(held, min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)):
                return None
        return self._read(pull, group_queue, queue, subscription, matches)

    def kept(self, pull: Pull, generation: int) -> CheckedPull | None:
        """A pull that has just got messages, to be kept; `generation` was read before. None if the next is checked, too."""
        session, header = pull.session, pull.header
        group = self._groups.obtain(header.consumer_group)
        subscription = self._subscription(session, header, group)
        return self.checked.of(session, header, group, pull.limit, subscription, generation)

    # Waiting

    def _hold(
        self, pull: Pull, wait_s: float, action: Callable[[Pull, PullCallback], None], until: Until = Until.TIME
    ) -> bool:
        """Whether a pull that no message wakes is held; `action` is called when its wait is over."""
        return self._held_pulls.hold(self._waiting(pull, action, until), wait_s)

    def _waiting(self, pull: Pull, action: Callable[[Pull, PullCallback], None], until: Until = Until.TIME) -> HeldPull:
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

    def _look_again(self, pull: Pull, answer: PullCallback, attempt: int) -> None:
        """A client pulls before the heartbeat that has its new subscription; refused, a Java client would wait for a
        second."""
        if pull.session.is_closed:  # nothing is kept for a client that is gone
            return
        outcome: Pulled | PullFault | None
        try:
            outcome = self.pull(pull, attempt=attempt)
        except (Refusal, StoreError, MessageError, LimitExceeded) as fault:
            outcome = fault
        if outcome is not None:
            answer(outcome)

    def _has_to_wait(self, pull: Pull, group: ConsumerGroup, attempt: int) -> bool:
        """Whether the queue is not this member's to read now. The pull is answered, or looked at again, later."""
        session, header = pull.session, pull.header
        if group.drain is not None and self._draining.holds_back(group, session, header):
            return self._wait(pull, DRAINING_WAIT_S)
        wait_s = min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)
        is_anothers = self._draining.allotment.is_anothers
        if group.has_bound_members and is_anothers(group, session, header.topic, header.queue_id):
            return self._wait(pull, wait_s, Until.TURN)
        key = header.topic, header.queue_id
        group_queue = group.queues.get(key, NO_QUEUE)
        if group_queue.lease is not None and _is_leased_to_another(session, group_queue):
            return self._wait(pull, OTHERS_QUEUE_WAIT_S)
        if group.drain is not None and self._draining.is_gated(group, session, key):
            held = self._waiting(pull, partial(self._go_through, attempt=attempt))
            self._draining.gate(group.drain, key, partial(self._held_pulls.let_go, held))
            if not self._held_pulls.hold(held, wait_s):
                held.answer()
            return True
        if group_queue.reader not in (None, session) and self._guard.has_to_wait(session, group_queue):
            was_member = session in group.members
            held = self._waiting(pull, partial(self._follow, attempt=attempt, was_member=was_member))
            self._guard.wait(group_queue, held)
            if not self._held_pulls.hold(held, wait_s):
                held.answer()
            return True
        return False

    def _wait(self, pull: Pull, wait_s: float, until: Until = Until.TIME) -> bool:
        """The pull gets nothing, when its wait is over; at once where it cannot be held."""
        if not self._hold(pull, wait_s, _give_nothing, until):
            pull.later()(_nothing_new(pull.header))
        return True

    def _go_through(self, pull: Pull, answer: PullCallback, attempt: int) -> None:
        """The earlier reader of a queue is done, or the pull's time is. One that has left the group meanwhile must not count
        as the reader."""
        group, key = self._groups.get(pull.header.consumer_group), (pull.header.topic, pull.header.queue_id)
        has_left = group is None or pull.session not in group.members
        if group is None or has_left or self._draining.is_gated(group, pull.session, key):
            answer(_nothing_new(pull.header))
        else:
            self._look_again(pull, answer, attempt)

    def _follow(self, pull: Pull, answer: PullCallback, attempt: int, *, was_member: bool) -> None:
        """Pull a queue that is free now, or answer with nothing because the suspend time has ended."""
        session, header = pull.session, pull.header
        has_left = was_member and session not in self._groups.members_of(header.consumer_group)
        if has_left or self._guard.has_to_wait(session, self._groups.queue(*header[:3])):
            answer(_nothing_new(pull.header))
        else:
            self._look_again(pull, answer, attempt)

    def _overtaken_by(self, session: Session, header: PullMessage, group: ConsumerGroup) -> int | None:
        """The committed offset that a foreign member must go on from: another member has read the queue since it loaded its
        own. An answer without messages moves Apache's clients at once, 4.9's Java (PullCallback, NO_NEW_MSG) and Go's alike;
        PULL_OFFSET_MOVED would cost them 10 s."""
        place = (header.consumer_group, header.topic, header.queue_id)
        committed = group.offset(header.topic, header.queue_id)
        if committed is None or header.queue_offset >= committed:
            return None
        if self._offsets.is_behind_owner(*place, header.queue_offset):
            member = group.members.get(session)
            # Without a heartbeat, only a push consumer pulls without a subscription; others may read from any offset.
            is_push = member.is_foreign if member is not None else not header.sys_flag & codes.PULL_SUBSCRIPTION
            return committed if is_push else None
        return committed if group.is_new_reader(session, *place[1:], self._clock.monotonic_s()) else None

    def _set_back_to(self, session: Session, header: PullMessage, group_queue: GroupQueue) -> int | None:
        """Where a member goes back to that was ahead when the end of the queue was lost: its offset would be right again as
        soon as others have been stored, and it would never get those. Whatever else is pulled under the lease says that its
        reader knows what this run has: a Spark query, which looks after lost messages itself, pulls without PULL_SUSPEND."""
        end = group_queue.former_end
        if end is None:
            return None
        place = group_queue.place
        if header.sys_flag & codes.PULL_SUSPEND:
            if not group_queue.is_leased_to(session):
                return None
            if header.queue_offset > end:
                log.warning(
                    "position_set_back", group=place[0], topic=place[1], queue=place[2], offset=header.queue_offset, end=end,
                    hint="the member read messages that were lost before this start; their offsets are given again",
                )  # fmt: skip
                return end
        self._locks.clear_former_end(group_queue)
        return None

    # Checks

    def _check_group_and_topic(self, header: PullMessage) -> ConsumerGroup:
        """Return the group, which is created if groups may be."""
        if not self._settings.now.permission & PERM_READ:
            raise Refusal(Reason.NOT_PERMITTED, f"the broker[{self._settings.now.name}] pulling message is forbidden")
        group = self._groups.get(header.consumer_group)
        settings = group.settings if group is not None else None
        if group is None or settings is None:
            settings = self._group_configs.ensure(header.consumer_group)
            if settings is None:
                raise Refusal(Reason.NO_GROUP, f"subscription group [{header.consumer_group}] does not exist")
            group = self._groups.obtain(header.consumer_group)
        if not settings.consume_enable:
            raise Refusal(Reason.NOT_PERMITTED, f"subscription group no permission, {header.consumer_group}")
        topic = self._topics.get(header.topic)
        if topic is None:
            raise Refusal(Reason.NO_TOPIC, f"topic[{header.topic}] not exist, create it or send to it first")
        if not topic.perm & PERM_READ:
            raise Refusal(Reason.NOT_PERMITTED, f"the topic[{header.topic}] pulling message is forbidden")
        if not 0 <= header.queue_id < topic.read_queues:
            raise Refusal(
                Reason.ILLEGAL,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] readQueueNums:[{topic.read_queues}]",
            )
        return group

    def _check_stranger(self, session: Session, header: PullMessage, group: ConsumerGroup) -> None:
        """A push consumer whose heartbeat has not come yet, on a new connection or after a restart of the broker. Apache's
        broker takes the subscription of any member for it (ConsumerManager.findSubscriptionData); here its queue may be
        another's by now."""
        group_queue = group.queue(header.topic, header.queue_id)
        if group_queue.lease is not None:
            self._locks.renew_awaited(group_queue, session)
        if header.sys_flag & codes.PULL_SUBSCRIPTION:
            return  # it waits while the queue is leased (`_has_to_wait`)
        if group_queue.last_reader_id is not None or group_queue.is_leased_to_another(session):
            raise Refusal(
                Reason.UNKNOWN_MEMBER,
                f"the consumer's subscription not exist, send a heartbeat of {header.consumer_group} first",
            )

    def _subscription(self, session: Session, header: PullMessage, group: ConsumerGroup) -> Subscription | None:
        """The filter of a pull; None takes all messages."""
        if header.sys_flag & codes.PULL_SUBSCRIPTION:
            if header.subscription == ALL and header.expression_type in (TAG, None):  # as most that bring their filter
                return None
            if len(header.subscription or "") > MAX_EXPRESSION_CHARS:
                raise Refusal(
                    Reason.BAD_EXPRESSION,
                    f"the expression has {len(header.subscription or '')} characters; {MAX_EXPRESSION_CHARS} are allowed",
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
        """Like `_read`, outside of the dispatch, which would otherwise report the store's errors."""
        session, header, _, _ = pull
        group = self._groups.obtain(header.consumer_group)
        group_queue = group.queue(header.topic, header.queue_id)
        is_anothers = self._draining.allotment.is_anothers
        if self._draining.holds_back(group, session, header) or is_anothers(
            group, session, header.topic, header.queue_id
        ):
            return _nothing_new(header)  # it has been drained of the queue since
        if _is_leased_to_another(session, group_queue) or self._guard.has_to_wait(session, group_queue):
            return _nothing_new(header)  # another member has locked or read the queue since
        if self._pops.pools and self._pops.pull_fault(session, header.consumer_group, header.topic) is not None:
            return _nothing_new(header)  # clients have begun to pop; its next pull is told so
        if self._store.queues.get((queue.topic, queue.queue_id)) is not queue:
            return Refusal(Reason.NO_TOPIC, f"topic[{queue.topic}] not exist, it was deleted")
        try:
            return self._read(pull, group_queue, queue, subscription, matches)
        except (StoreError, MessageError) as error:
            log.error("pull_failed", topic=header.topic, queue=header.queue_id, reason=str(error))
            return error

    def _read(
        self,
        pull: Pull,
        group_queue: GroupQueue,
        queue: ConsumeQueue,
        subscription: Subscription | None,
        matches: Filter | None,
    ) -> Pulled:
        """The outcome of a pull, whatever the offset finds."""
        header = pull.header
        offset, begin, end = header.queue_offset, queue.begin, queue.next
        if header.topic_identity and self._topics.identity(header.topic) not in ("", header.topic_identity):
            return Pulled(PullStatus.MADE_ANEW, begin, begin, end)
        if begin <= offset < end:
            looks = SCAN_WORDS // matches.words if matches is not None else 0
            found = self._store.fetch(queue, offset, pull.limit, subscription, matches, header.max_msg_bytes, looks)
            if found.messages:
                place = header[:3]
                if place[0] != TOOLS_GROUP:  # a look at messages is no consumption
                    self._statistics.note_got(f"{place[1]}@{place[0]}", found.messages, found.pieces)
                if group_queue.reader is pull.session and is_guarded(group_queue, pull.session):
                    group_queue.given_offset = found.next_offset
                return _new_tuple(Pulled, (PullStatus.FOUND, found.next_offset, begin, end, found.pieces))
            return Pulled(PullStatus.NO_MATCH, found.next_offset, begin, end)
        if end == 0:
            if offset:
                self._note_moved(header, 0)
            # PullMessageProcessor, NO_MESSAGE_IN_QUEUE: an empty queue is nothing to correct for a reader at 0.
            return Pulled(PullStatus.EMPTIED if offset else PullStatus.EMPTY, 0, begin, end)
        if offset == end:
            return Pulled(PullStatus.AT_END, offset, begin, end)
        if offset < begin:
            self._note_moved(header, begin)
            return Pulled(PullStatus.BELOW, begin, begin, end)
        self._note_moved(header, end)
        return Pulled(PullStatus.BEYOND, end, begin, end)

    def _note_moved(self, header: PullMessage, offset: int) -> None:
        """An OffsetMovedEvent in OFFSET_MOVED_EVENT, for programs that watch that topic."""
        moved = Queue(header.topic, self._settings.now.name, header.queue_id)
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


def _is_leased_to_another(session: Session, queue: GroupQueue) -> bool:
    """True if a Rocketlet member or the pop pool owns the queue, and this client would read it beside the owner. Foreign
    members learn of changes of the group late. A client without a heartbeat may have been such a member before it lost
    its connection. Rocketlet members lock a queue before they pull it, and broadcasting members share no queues."""
    if not queue.is_leased_to_another(session):
        return False
    member = queue.group.members.get(session)
    return member is None or (not member.data.strategy and member.data.message_model == "CLUSTERING")


def _kept(pull: Pull) -> Pull:
    """The pull as it waits, with the way in which it is answered."""
    answer = pull.later()
    return pull._replace(later=lambda: answer)


def _give_nothing(pull: Pull, answer: PullCallback) -> None:
    answer(_nothing_new(pull.header))


def _nothing_new(header: PullMessage) -> Pulled:
    """The member asks again, and again, until the queue is its own or it has learned that it is not."""
    return Pulled(PullStatus.AT_END, header.queue_offset, 0, header.queue_offset)


def _held_bytes(header: PullMessage, subscription: Subscription | None, matches: Filter | None) -> int:
    parsed = subscription_bytes(subscription) if subscription is not None else 0
    words = matches.words if matches is not None else 0
    return text_bytes(header) + parsed + FILTER_WORD_BYTES * words


def text_bytes(header: PullMessage) -> int:
    """The size of the client's texts that a waiting pull keeps."""
    texts = header.consumer_group, header.topic, header.subscription, header.expression_type, header.topic_identity
    return sum(map(len, filter(None, texts)))


# ------------------------------------------------------------------------------
# Pulls that were checked, and stay so until something changes.
#
# A client sends the same pull again and again, with another offset. `CheckedPulls.of` keeps the result of the checks
#     that
# `Pulling` has made, with the generation from before them, and `CheckedPulls.pull` answers the next pull by it. The
#     committed
# offset, the queue's last reader, and whether there is a message may differ from pull to pull: they are looked at
#     each time.
# Nothing is kept while time decides.


class CheckedPull(NamedTuple):
    """`name`: by which messages are counted. is_recorded: whether it is recorded which messages its reader was given."""

    generation: int
    queue: GroupQueue
    flags: int
    limit: int
    max_bytes: int | None
    subscription: Subscription | None
    name: str
    is_recorded: bool


class CheckedPulls:
    def __init__(
        self,
        store: Store,
        statistics: Statistics,
        groups: ConsumerGroups,
        offsets: Offsets,
        draining: Draining,
        pops: Pops,
        commits: Commits,
    ) -> None:
        self._generation = groups.generation
        self._store = store
        self._statistics = statistics
        self._offsets = offsets
        self._draining = draining
        self._pops = pops
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
        """A pull that has passed every check since the generation was read; None if one of them is made each time: while
        queues of the group move, and for filters that are parsed anew when others need their room."""
        queue = group.queue(header.topic, header.queue_id)
        if self._pops.pools or self._draining.is_moving(group, session) or queue.contest is not None:
            return None
        if queue is NO_QUEUE or group.awaited_readers or queue.former_end is not None:
            return None
        if subscription is not None and subscription.kind == SQL92:
            return None
        name = f"{header.topic}@{group.name}"
        flags, max_bytes = header.sys_flag, header.max_msg_bytes
        return CheckedPull(generation, queue, flags, limit, max_bytes, subscription, name, is_guarded(queue, session))

    def pull(self, session: Session, checked: CheckedPull, offset: int, commit_offset: int) -> Pulled | None:
        """The outcome of a pull that differs in its offsets alone; None if it has to be checked, or may wait. Raises the
        store's errors for damage."""
        generation, group_queue, flags, limit, max_bytes, subscription, name, is_recorded = checked
        if generation != self._generation.number or self._pops.pools or group_queue.reader is not session:
            return None
        key = group_queue.key
        queue = self._store.queues.get(key)
        if queue is None or not queue.begin <= offset < queue.next:
            return None
        group = group_queue.group
        if flags & PULL_SUSPEND:
            committed = group.offset(*key) or 0
            if offset < committed or (offset < commit_offset and flags & PULL_COMMIT_OFFSET):
                return None  # another member may have read the queue since
        if flags & PULL_COMMIT_OFFSET:
            self._commits.carried(session, group, key, commit_offset)
        begin, end = queue.begin, queue.next
        pieces, messages, next_offset = self._store.fetch(queue, offset, limit, subscription, None, max_bytes)
        if not messages:
            return Pulled(PullStatus.NO_MATCH, next_offset, begin, end)
        if group.name != TOOLS_GROUP:
            self._statistics.note_got(name, messages, pieces)
        if is_recorded:
            group_queue.given_offset = next_offset
        return _new_tuple(Pulled, (PullStatus.FOUND, next_offset, begin, end, pieces))


# ------------------------------------------------------------------------------
# Commits: who may say how far a group is in a queue, and the offsets that are kept.


class Commits:
    def __init__(
        self,
        runtime: Runtime,
        topics: Topics,
        store: Store,
        groups: ConsumerGroups,
        offsets: Offsets,
        locks: Locks,
        draining: Draining,
        pops: Pops,
    ) -> None:
        self._clock = runtime.clock
        self._groups = groups
        self._pops = pops
        self._locks = locks
        self._draining = draining
        self._offsets = offsets
        self._store = store
        self._topics = topics

    def fence_fault(
        self,
        session: Session,
        group: ConsumerGroup,
        key: QueueKey,
        offset: int,
        epoch: int | None,
        *,
        may_be_tool: bool = True,
    ) -> str | None:
        """Why this client may not say how far a group is in a queue; None if it may. may_be_tool: an administrator asks like
        that. Members that pull do not: their commits come with pulls, or one-way. They are known by that as long as a
        broker that was started again has no heartbeat of them."""
        topic, queue_id = key
        is_member = session in group.members
        if self._pops.pools and self._pops.is_apart(group.name, topic) and (is_member or not may_be_tool):
            return f"clients of the group {group.name} pop {topic}, and only they say how far it has come"
        queue = group.queues.get(key, NO_QUEUE)
        if not may_be_tool and not is_member and queue.lease is not None:
            self._locks.renew_awaited(queue, session)
        fault = queue.commit_fault(session, key, epoch) if queue.lease is not None or epoch is not None else None
        if fault is None and group.has_bound_members and group.is_bystander(session, *key, self._clock.monotonic_s()):
            return f"{topic}:{queue_id} is another's; this member does not read it"
        goes_back = fault is None and offset < (group.offset(topic, queue_id) or 0)
        if goes_back and (session in group.foreign or not (is_member or may_be_tool)):
            return self._stale_fault(session, group, key, offset)
        return fault

    def store(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int, *, by_owner: bool) -> None:
        topic, queue_id = key
        drain, queue, end = group.drain, group.queues.get(key, NO_QUEUE), offset
        if drain is not None and not drain.is_over and offset > (group.offset(topic, queue_id) or 0):
            self._draining.record_progress(group, session)
        if queue.lease is not None:
            end = self._locks.record_commit(queue, offset)
        if end != offset:
            broker_log.warning(
                "offset_set_back", group=group.name, topic=topic, queue=queue_id, offset=offset, end=end,
                hint="the member read messages that were lost before this start; their offsets are given again",
            )  # fmt: skip
        self._offsets.commit(group, topic, queue_id, end, by_owner=by_owner)
        if self._pops.pools:
            self._pops.offsets_reset(group.name, topic, queue_id)

    def commit(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int, epoch: int) -> str | None:
        """Store an offset of a lease's owner, and return None; or return why it may not be stored."""
        fault = self.fence_fault(session, group, key, offset, epoch) or self.offset_fault(group, key, offset)
        if fault is None:
            self.store(session, group, key, offset, by_owner=True)
        return fault

    def carried(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int) -> None:
        """The commit that a pull carries. One that may not be stored is none."""
        fault = self.fence_fault(session, group, key, offset, None, may_be_tool=False)
        fault = fault or self.offset_fault(group, key, offset)
        if fault is None:
            queue = group.queues.get(key, NO_QUEUE)
            by_owner = queue.lease is not None and queue.is_leased_to(session)
            self.store(session, group, key, offset, by_owner=by_owner)

    def _stale_fault(self, session: Session, group: ConsumerGroup, key: QueueKey, offset: int) -> str | None:
        """Why a foreign member's commit that goes back is refused; None if it is not. Only who reads the queue may go back:
        others have loaded their offset before somebody else came further, and say it when they drop the queue. An
        administrator is no member and may go back."""
        topic, queue_id = key
        if self._offsets.is_behind_owner(group.name, *key, offset):
            return f"{offset} is behind what the last owner of {topic}:{queue_id} has committed"
        if group.queues.get(key, NO_QUEUE).reader is not session:
            committed = f"{group.offset(*key)}, which the group has committed of {topic}:{queue_id}"
            return f"{offset} is behind {committed}; this member does not read it"
        return None

    def is_foreign_member(self, session: Session, group: str) -> bool:
        """Whether Apache's push consumer is at the other end, as a member of the group."""
        found = self._groups.get(group)
        member = found.members.get(session) if found else None
        return member is not None and member.is_foreign

    def offset_fault(self, group: ConsumerGroup, key: QueueKey, offset: int) -> str | None:
        """Why an offset cannot be a group's; None if it can, or is set back. Apache's broker takes any number."""
        lease = group.queues.get(key, NO_QUEUE).lease
        if lease is not None and lease.former_end is not None:
            offset = min(offset, lease.former_end)
        found = self._store.queues.get(key)
        if found is not None:
            begin, end = found.begin, found.next
        else:
            begin = end = 0
            topic = self._topics.get(key[0])
            if topic is None or not 0 <= key[1] < max(topic.read_queues, topic.write_queues):
                return f"there is no queue {key[0]}:{key[1]}"
        if begin <= offset <= end:
            return None
        return f"{offset} is not between the start {begin} and the end {end} of {key[0]}:{key[1]}"


# ------------------------------------------------------------------------------
# Asks a foreign member for its subscriptions, where its heartbeat was lost.
#
# Java's client changes the version of a subscription with each rebalance, and says so in a heartbeat. It gives that
# up if another heartbeat is under way (MQClientInstance.sendHeartbeatToAllBrokerWithLock), as when members join
# within milliseconds. Until its next one, up to 30 s later, its pulls name a version that no broker knows, and are
# refused.


class Versions:
    def __init__(self, groups: ConsumerGroups, clients: Clients) -> None:
        self._groups = groups
        self._clients = clients

    def ask(self, session: Session, group_name: str) -> None:
        """Asks a foreign member for the versions of its subscriptions, unless it is being asked already."""
        group = self._groups.get(group_name)
        member = group.foreign.get(session) if group else None
        if member is not None and not self._clients.is_asked(session):
            question = RunningWanted(ForwardedRequest(group_name, member.client_id, {}))
            with suppress(LimitExceeded):
                self._clients.ask(session, question, partial(self._answered, session, group_name), by=session)

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
            # Another expression has to come by a heartbeat, with all that is checked there.
            if known is not None and known.expression == running.subscriptions[topic]:
                group.take_version(member, topic, version)
                self._groups.generation.increment()
