"""Pulls messages: the checks in Apache's order, whether the queue is the member's to read now, the read, and the hold when
nothing is there.

A pull gets its outcome at once, or waits: for a message, for a filter that is parsed, or for its turn in a queue that
changes hands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog

from ...protocol import codes
from ...protocol import properties as props
from ...protocol.admin_bodies import encode_offset_moved
from ...protocol.codes import PERM_READ
from ...protocol.config import MAX_EXPRESSION_CHARS
from ...protocol.headers import PullMessage
from ...protocol.message import MessageError
from ...protocol.names import OFFSET_MOVED_TOPIC
from ...protocol.queue import Queue
from ...protocol.subscription import ALL, SQL92, TAG, Subscription, SubscriptionError, parse_subscription, tag_code
from ..config import (
    DRAINING_WAIT_S,
    FILTER_WORD_BYTES,
    MAX_HOLD_S,
    OTHERS_QUEUE_WAIT_S,
    SCAN_WORDS,
    SUBSCRIPTION_LOOK_S,
    SUBSCRIPTION_LOOKS,
    LimitExceeded,
)
from ..groups.foreign.draining import has_handled_all
from ..groups.member import Member
from ..messages.held_pulls import HeldPull, Until
from ..messages.sql_filter import Filter
from ..sessions.memory import subscription_bytes
from ..sessions.refusal import Reason, Refusal
from ..sessions.session import Session
from ..store.consume_queue import ConsumeQueue
from ..store.files import StoreError, StoreFull
from .checked import CheckedPull, CheckedPulls
from .commits import Commits
from .outcomes import Outcome, Pulled
from .parts import Parts
from .versions import Versions

log = structlog.get_logger("rocketlet.pulls")

_new_tuple = tuple.__new__
_SAID_SOON = (Reason.SUBSCRIPTION_NOT_LATEST, Reason.UNKNOWN_MEMBER)


Fault = Refusal | StoreError | MessageError | LimitExceeded
Answer = Callable[[Pulled | Fault], None]


class Pull(NamedTuple):
    """`limit` is of messages. `later` is called if the pull has to wait; the function that it returns gets the outcome."""

    session: Session
    header: PullMessage
    limit: int
    later: Callable[[], Answer]


class Pulling:
    def __init__(self, parts: Parts, commits: Commits) -> None:
        self._settings = parts.settings
        self._topics = parts.topics
        self._appender = parts.appender
        self._store = parts.appender.store
        self._held_pulls = parts.held_pulls
        self._filters = parts.filters
        self._statistics = parts.statistics
        self._groups = parts.groups
        self._group_configs = parts.group_configs
        self._offsets = parts.offsets
        self._locks = parts.locks
        self._watch = parts.watch
        self._draining = parts.draining
        self._pops = parts.pops
        self._commits = commits
        self._versions = Versions(parts.groups, parts.clients)
        self.checked = CheckedPulls(parts, commits)

    def pull(self, pull: Pull, ask_who: Callable[[], None] | None = None, attempt: int = 1) -> Pulled | None:
        """Returns the outcome, or None if it comes later. `ask_who` asks a client that has sent no heartbeat who it is.
        Raises Refusal, LimitExceeded, and the store's errors for damage."""
        session, header, _, _ = pull
        try:
            # In the order of Apache's PullMessageProcessor: clients react to the first fault.
            self._check_group_and_topic(header)
            self._check_member(session, header)
            subscription = self._subscription(session, header)
        except Refusal as refusal:
            if refusal.reason in _SAID_SOON and attempt < SUBSCRIPTION_LOOKS:
                if refusal.reason is Reason.UNKNOWN_MEMBER and ask_who is not None:
                    ask_who()
                elif attempt == 1:
                    self._versions.ask(session, header.consumer_group)
                if self._hold(pull, SUBSCRIPTION_LOOK_S, partial(self._look_again, attempt=attempt + 1)):
                    return None
            raise
        matches = None
        if subscription is not None and subscription.kind == SQL92:
            matches = self._filters.find(subscription.expression)  # its faults are said before anything is read or held
            if matches is None:
                kept = _kept(pull)
                look_again = partial(self._look_again, kept, kept.later(), attempt)
                self._filters.when_parsed(session, subscription.expression, look_again, text_bytes(header))
                return None
        if self._pops.pools:
            fault = self._pops.pull_fault(session, header.consumer_group, header.topic)
            if fault is not None:
                raise Refusal(Reason.NOT_PERMITTED, fault)
        # The offset is kept even if the read finds nothing, as in PullMessageProcessor.
        if header.sys_flag & codes.PULL_COMMIT_OFFSET:
            self._commits.carried(session, header.consumer_group, (header.topic, header.queue_id), header.commit_offset)
        if header.sys_flag & codes.PULL_SUSPEND:
            if self._has_to_wait(pull, attempt):
                return None
            committed = self._overtaken_by(session, header)
            if committed is not None:
                return Pulled(Outcome.AT_END, committed, 0, committed)
        self._watch.pulled(session, header.consumer_group, header.topic, header.queue_id)
        queue = self._store.queue(header.topic, header.queue_id)
        end = self._set_back_to(session, header)
        if end is not None:
            self._note_moved(header, end)
            return Pulled(Outcome.BEYOND, end, queue.begin, queue.next)
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
        return self._read(pull, queue, subscription, matches)

    def kept(self, pull: Pull, generation: int) -> CheckedPull | None:
        """A pull that has just got messages, to be kept; `generation` was read before. None if the next is checked, too."""
        header = pull.header
        return self.checked.of(pull.session, header, pull.limit, self._subscription(pull.session, header), generation)

    # Waiting

    def _hold(
        self, pull: Pull, wait_s: float, action: Callable[[Pull, Answer], None], until: Until = Until.TIME
    ) -> bool:
        """Whether a pull that no message wakes is held; `action` is called when its wait is over."""
        return self._held_pulls.hold(self._waiting(pull, action, until), wait_s)

    def _waiting(self, pull: Pull, action: Callable[[Pull, Answer], None], until: Until = Until.TIME) -> HeldPull:
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

    def _look_again(self, pull: Pull, answer: Answer, attempt: int) -> None:
        """A client pulls before the heartbeat that has its new subscription; refused, a Java client would wait for a
        second."""
        if pull.session.is_closed:  # nothing is kept for a client that is gone
            return
        outcome: Pulled | Fault | None
        try:
            outcome = self.pull(pull, attempt=attempt)
        except (Refusal, StoreError, MessageError, LimitExceeded) as fault:
            outcome = fault
        if outcome is not None:
            answer(outcome)

    def _has_to_wait(self, pull: Pull, attempt: int) -> bool:
        """Whether the queue is not this member's to read now. The pull is answered, or looked at again, later."""
        session, header = pull.session, pull.header
        if self._draining.holds_back(session, header):
            return self._wait(pull, DRAINING_WAIT_S)
        wait_s = min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)
        if self._draining.allotment.is_anothers(header.consumer_group, session, header.topic, header.queue_id):
            return self._wait(pull, wait_s, Until.TURN)
        if self._is_leased_to_another(session, header):
            return self._wait(pull, OTHERS_QUEUE_WAIT_S)
        if self._draining.is_gated(session, header):
            held = self._waiting(pull, partial(self._go_through, attempt=attempt))
            self._draining.gate(header, partial(self._held_pulls.let_go, held))
            if not self._held_pulls.hold(held, wait_s):
                held.answer()
            return True
        return False

    def _is_leased_to_another(self, session: Session, header: PullMessage) -> bool:
        """True if a Rocketlet member or the pop pool owns the queue, and this client would read it beside the owner. Foreign
        members learn of changes of the group late. A client without a heartbeat may have been such a member before it lost
        its connection. Rocketlet members lock a queue before they pull it, and broadcasting members share no queues."""
        if not self._locks.has_lease(header.consumer_group, header.topic, header.queue_id, session):
            return False
        member = self._member(session, header)
        return member is None or (not member.data.strategy and member.data.message_model == "CLUSTERING")

    def _member(self, session: Session, header: PullMessage) -> Member | None:
        group = self._groups.get(header.consumer_group)
        return group.members.get(session) if group is not None else None

    def _wait(self, pull: Pull, wait_s: float, until: Until = Until.TIME) -> bool:
        """The pull gets nothing, when its wait is over; at once where it cannot be held."""
        if not self._hold(pull, wait_s, _give_nothing, until):
            pull.later()(_nothing_new(pull.header))
        return True

    def _go_through(self, pull: Pull, answer: Answer, attempt: int) -> None:
        """The earlier reader of a queue is done, or the pull's time is. One that has left the group meanwhile must not count
        as the reader."""
        group = self._groups.get(pull.header.consumer_group)
        has_left = group is None or pull.session not in group.members
        if has_left or self._draining.is_gated(pull.session, pull.header):
            answer(_nothing_new(pull.header))
        else:
            self._look_again(pull, answer, attempt)

    def _overtaken_by(self, session: Session, header: PullMessage) -> int | None:
        """The committed offset that a foreign member must go on from: another member has read the queue since it loaded its
        own. An answer without messages moves Apache's clients at once, 4.9's Java (PullCallback, NO_NEW_MSG) and Go's alike;
        PULL_OFFSET_MOVED would cost them 10 s."""
        place = (header.consumer_group, header.topic, header.queue_id)
        committed = self._offsets.get(*place)
        if committed is None or header.queue_offset >= committed:
            return None
        if self._offsets.is_behind_owner(*place, header.queue_offset):
            member = self._member(session, header)
            # Without a heartbeat, only a push consumer pulls without a subscription; others may read from any offset.
            is_push = member.is_foreign if member is not None else not header.sys_flag & codes.PULL_SUBSCRIPTION
            return committed if is_push else None
        return committed if self._draining.allotment.is_new_reader(place[0], session, *place[1:]) else None

    def _set_back_to(self, session: Session, header: PullMessage) -> int | None:
        """Where a member goes back to that was ahead when the end of the queue was lost: its offset would be right again as
        soon as others have been stored, and it would never get those. Whatever else is pulled under the lease says that its
        reader knows what this run has: a Spark query, which looks after lost messages itself, pulls without PULL_SUSPEND."""
        place = (header.consumer_group, header.topic, header.queue_id)
        end = self._locks.former_end(*place)
        if end is None:
            return None
        if header.sys_flag & codes.PULL_SUSPEND:
            if not self._locks.is_leased_to(*place, session):
                return None
            if header.queue_offset > end:
                log.warning(
                    "position_set_back", group=place[0], topic=place[1], queue=place[2], offset=header.queue_offset, end=end,
                    hint="the member read messages that were lost before this start; their offsets are given again",
                )  # fmt: skip
                return end
        self._locks.forget_former_end(*place)
        return None

    # Checks

    def _check_group_and_topic(self, header: PullMessage) -> None:
        if not self._settings.now.permission & PERM_READ:
            raise Refusal(Reason.NOT_PERMITTED, f"the broker[{self._settings.now.name}] pulling message is forbidden")
        group = self._group_configs.ensure(header.consumer_group)
        if group is None:
            raise Refusal(
                Reason.NO_GROUP,
                f"subscription group [{header.consumer_group}] does not exist",
            )
        if not group.consume_enable:
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

    def _check_member(self, session: Session, header: PullMessage) -> None:
        """A push consumer whose heartbeat has not come yet, on a new connection or after a restart of the broker. Apache's
        broker takes the subscription of any member for it (ConsumerManager.findSubscriptionData); here its queue may be
        another's by now."""
        if not header.sys_flag & codes.PULL_SUSPEND or self._member(session, header) is not None:
            return
        place = header[:3]
        self._locks.heard_reader(*place, session)
        if header.sys_flag & codes.PULL_SUBSCRIPTION:
            return  # it waits while the queue is leased (`_has_to_wait`)
        if self._locks.last_reader(*place) is not None or self._locks.has_lease(*place, session):
            raise Refusal(
                Reason.UNKNOWN_MEMBER,
                f"the consumer's subscription not exist, send a heartbeat of {header.consumer_group} first",
            )

    def _subscription(self, session: Session, header: PullMessage) -> Subscription | None:
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
            found = self._registered_subscription(session, header)
        if found.kind not in (TAG, SQL92):
            raise Refusal(Reason.ILLEGAL, f"the broker does not support consumer to filter message by {found.kind}")
        return None if found.takes_all else found

    def _registered_subscription(self, session: Session, header: PullMessage) -> Subscription:
        name = header.consumer_group
        group = self._groups.get(name)
        if group is None:
            raise Refusal(
                Reason.NOT_SUBSCRIBED,
                f"the consumer's group info not exist, send a heartbeat of {name} first",
            )
        settings = self._group_configs.ensure(name)
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
    ) -> Pulled | Fault:
        """Like `_read`, outside of the dispatch, which would otherwise report the store's errors."""
        session, header, _, _ = pull
        place = (header.consumer_group, session, header.topic, header.queue_id)
        if self._draining.holds_back(session, header) or self._draining.allotment.is_anothers(*place):
            return _nothing_new(header)  # it has been drained of the queue since
        if self._is_leased_to_another(session, header):
            return _nothing_new(header)  # another member has locked the queue since
        if self._pops.pools and self._pops.pull_fault(session, header.consumer_group, header.topic) is not None:
            return _nothing_new(header)  # clients have begun to pop; its next pull is told so
        if self._store.queues.get((queue.topic, queue.queue_id)) is not queue:
            return Refusal(Reason.NO_TOPIC, f"topic[{queue.topic}] not exist, it was deleted")
        try:
            return self._read(pull, queue, subscription, matches)
        except (StoreError, MessageError) as error:
            log.error("pull_failed", topic=header.topic, queue=header.queue_id, reason=str(error))
            return error

    def _read(
        self, pull: Pull, queue: ConsumeQueue, subscription: Subscription | None, matches: Filter | None
    ) -> Pulled:
        """The outcome of a pull, whatever the offset finds."""
        header = pull.header
        offset, begin, end = header.queue_offset, queue.begin, queue.next
        if header.topic_identity and self._topics.identity(header.topic) not in ("", header.topic_identity):
            return Pulled(Outcome.MADE_ANEW, begin, begin, end)
        if begin <= offset < end:
            looks = SCAN_WORDS // matches.words if matches is not None else 0
            found = self._store.fetch(queue, offset, pull.limit, subscription, matches, header.max_msg_bytes, looks)
            if found.messages:
                self._statistics.note_got(f"{header.topic}@{header.consumer_group}", found.messages, found.pieces)
                if self._commits.is_foreign_member(pull.session, header.consumer_group):
                    place = (header.consumer_group, header.topic, header.queue_id)
                    self._watch.gave(pull.session, *place, found.next_offset)
                return _new_tuple(Pulled, (Outcome.FOUND, found.next_offset, begin, end, found.pieces))
            return Pulled(Outcome.NO_MATCH, found.next_offset, begin, end)
        if end == 0:
            if offset:
                self._note_moved(header, 0)
            # PullMessageProcessor, NO_MESSAGE_IN_QUEUE: an empty queue is nothing to correct for a reader at 0.
            return Pulled(Outcome.EMPTIED if offset else Outcome.EMPTY, 0, begin, end)
        if offset == end:
            return Pulled(Outcome.AT_END, offset, begin, end)
        if offset < begin:
            self._note_moved(header, begin)
            return Pulled(Outcome.BELOW, begin, begin, end)
        self._note_moved(header, end)
        return Pulled(Outcome.BEYOND, end, begin, end)

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


def _kept(pull: Pull) -> Pull:
    """The pull as it waits, with the way in which it is answered."""
    answer = pull.later()
    return pull._replace(later=lambda: answer)


def _give_nothing(pull: Pull, answer: Answer) -> None:
    answer(_nothing_new(pull.header))


def _nothing_new(header: PullMessage) -> Pulled:
    """The member asks again, and again, until the queue is its own or it has learned that it is not."""
    return Pulled(Outcome.AT_END, header.queue_offset, 0, header.queue_offset)


def _held_bytes(header: PullMessage, subscription: Subscription | None, matches: Filter | None) -> int:
    parsed = subscription_bytes(subscription) if subscription is not None else 0
    words = matches.words if matches is not None else 0
    return text_bytes(header) + parsed + FILTER_WORD_BYTES * words


def text_bytes(header: PullMessage) -> int:
    """The size of the client's texts that a waiting pull keeps."""
    texts = header.consumer_group, header.topic, header.subscription, header.expression_type, header.topic_identity
    return sum(map(len, filter(None, texts)))
