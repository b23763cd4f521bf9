"""PULL_MESSAGE: the checks in Apache's order, the read, and the hold when nothing is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from ....protocol import codes
from ....protocol import properties as props
from ....protocol.admin_bodies import encode_offset_moved
from ....protocol.codes import PERM_READ, Language, ResponseCode
from ....protocol.config import MAX_EXPRESSION_CHARS
from ....protocol.extents import MADE_ANEW
from ....protocol.frame import Frame
from ....protocol.headers import PullMessage, PullMessageResult, read, write
from ....protocol.message import MessageError
from ....protocol.names import OFFSET_MOVED_TOPIC
from ....protocol.queue import Queue
from ....protocol.subscription import ALL, SQL92, TAG, Subscription, SubscriptionError, parse_subscription, tag_code
from ...broker import Broker
from ...config import (
    DRAINING_WAIT_S,
    FILTER_WORD_BYTES,
    FOREIGN_PULL_MESSAGES,
    MAX_HOLD_S,
    OTHERS_QUEUE_WAIT_S,
    SCAN_WORDS,
    SUBSCRIPTION_LOOK_S,
    SUBSCRIPTION_LOOKS,
    TAG_BYTES,
    LimitExceeded,
)
from ...groups.foreign.draining import has_handled_all
from ...messages.held_pulls import HeldPull, Until
from ...messages.sql_filter import Filter
from ...sessions.refusal import Refusal
from ...store.consume_queue import ConsumeQueue
from ...store.files import StoreError, StoreFull
from ..answers import Buffers, Refused, answer, answer_pieces, refused, small
from ..connection import Connection
from .offsets import fence_fault, is_foreign_member, offset_fault, popped_fault, store_offset
from .subscriptions import ask_for_versions

log = structlog.get_logger("rocketlet.pulls")

_PYTHON: Final = int(Language.PYTHON)  # Python 3.11 takes 0.2 us to find a member of an enum


def pull_message(broker: Broker, connection: Connection, frame: Frame) -> Buffers | None:
    return _pull(broker, connection, frame, read(PullMessage, frame.ext))


def _pull(
    broker: Broker, connection: Connection, frame: Frame, header: PullMessage, attempt: int = 1
) -> Buffers | None:
    try:
        # In the order of Apache's PullMessageProcessor: clients react to the code of the first fault.
        _check_group_and_topic(broker, header)
        subscription = _subscription(broker, connection, header)
    except Refused as refusal:
        if refusal.code == ResponseCode.SUBSCRIPTION_NOT_LATEST and attempt < SUBSCRIPTION_LOOKS:
            if attempt == 1:
                ask_for_versions(broker, connection, header.consumer_group)
            look_again = partial(_look_again, broker, connection, small(frame), header, attempt + 1)
            if _hold(broker, connection, header, SUBSCRIPTION_LOOK_S, look_again):
                return None
        raise
    matches = None
    if subscription is not None and subscription.kind == SQL92:
        matches = broker.filters.find(subscription.expression)  # its faults are said before anything is read or held
        if matches is None:
            look_again = partial(_look_again, broker, connection, small(frame), header, attempt)
            broker.filters.when_parsed(connection, subscription.expression, look_again, _text_bytes(header))
            return None
    if not broker.pops.yields(header.consumer_group, header.topic):
        raise Refused(ResponseCode.NO_PERMISSION, popped_fault(header.consumer_group, header.topic))
    # Whatever the read will find, as in PullMessageProcessor.
    if header.sys_flag & codes.PULL_COMMIT_OFFSET:
        _commit(broker, connection, header)
    if header.sys_flag & codes.PULL_SUSPEND:
        if _has_to_wait(broker, connection, small(frame), header, attempt):
            return None
        committed = _overtaken_by(broker, connection, header)
        if committed is not None:
            return _nothing(frame, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", committed, 0, committed)
    broker.watch.pulled(connection, header.consumer_group, header.topic, header.queue_id)
    queue = broker.store.queue(header.topic, header.queue_id)
    end = _set_back_to(broker, connection, header)
    if end is not None:
        _note_moved(broker, header, end)
        return _nothing(frame, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", end, queue.begin, queue.next)
    # Only at the very end. An offset beyond it is wrong: the client is told at once, so that it corrects it.
    wants_hold = header.sys_flag & codes.PULL_SUSPEND and header.suspend_timeout_millis > 0
    if wants_hold and queue.next == header.queue_offset:
        kept = small(frame)
        pull = HeldPull(
            connection,
            header.consumer_group,
            queue,
            subscription,
            header.queue_offset,
            lambda: connection.write(_read_held(broker, connection, kept, header, queue, subscription, matches)),
            size=_held_bytes(header, subscription, matches),
            is_done=has_handled_all(header),
        )
        if broker.held_pulls.hold(pull, min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)):
            return None
    return _read(broker, frame, header, queue, subscription, matches)


def _held_bytes(header: PullMessage, subscription: Subscription | None, matches: Filter | None) -> int:
    tags = len(subscription.tags) if subscription is not None else 0
    words = matches.words if matches is not None else 0
    return _text_bytes(header) + TAG_BYTES * tags + FILTER_WORD_BYTES * words


def _text_bytes(header: PullMessage) -> int:
    """What a pull that waits keeps of its client's texts."""
    texts = header.consumer_group, header.topic, header.subscription, header.expression_type, header.topic_identity
    return sum(map(len, filter(None, texts)))


def _look_again(broker: Broker, connection: Connection, frame: Frame, header: PullMessage, attempt: int) -> None:
    """A client pulls before the heartbeat that has its new subscription; refused, a Java client would wait for a second."""
    if connection.is_closed:  # nothing is kept any more for who is gone
        return
    try:
        reply = _pull(broker, connection, frame, header, attempt)
    except Refused as refusal:
        reply = refusal.answer(frame)
    except Refusal as refusal:
        reply = refused(refusal).answer(frame)
    except (StoreError, MessageError, LimitExceeded) as error:  # outside of the dispatch, which would say it
        reply = answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(error))
    if reply is not None:
        connection.write(reply)


def _has_to_wait(broker: Broker, connection: Connection, frame: Frame, header: PullMessage, attempt: int) -> bool:
    """Whether the queue is not this member's to read now. The pull is answered, or looked at again, later."""
    answer_later = partial(_answer_nothing_new, connection, frame, header)
    if broker.draining.holds_back(connection, header):
        return _hold(broker, connection, header, DRAINING_WAIT_S, answer_later) or _is_answered(answer_later)
    group = broker.groups.get(header.consumer_group)
    member = group.members.get(connection) if group else None
    if group is None or member is None or member.data.strategy or member.data.message_model != "CLUSTERING":
        return False
    wait_s = min(header.suspend_timeout_millis / 1000, MAX_HOLD_S)
    if broker.draining.allotment.is_anothers(group.name, connection, header.topic, header.queue_id):
        return _hold(broker, connection, header, wait_s, answer_later, Until.TURN) or _is_answered(answer_later)
    # It would get everything twice: foreign members see changes of the group late.
    if broker.locks.has_lease(group.name, header.topic, header.queue_id, connection):
        return _hold(broker, connection, header, OTHERS_QUEUE_WAIT_S, answer_later) or _is_answered(answer_later)
    if broker.draining.is_gated(connection, header):
        go_on = partial(_go_through, broker, connection, frame, header, attempt)
        pull = _waiting(broker, connection, header, go_on)
        broker.draining.gate(header, partial(broker.held_pulls.let_go, pull))
        return broker.held_pulls.hold(pull, wait_s) or _is_answered(answer_later)
    return False


def _go_through(broker: Broker, connection: Connection, frame: Frame, header: PullMessage, attempt: int) -> None:
    """The earlier reader of a queue is done, or the pull's time is."""
    if broker.draining.is_gated(connection, header):
        _answer_nothing_new(connection, frame, header)
    else:
        _look_again(broker, connection, frame, header, attempt)


def _waiting(
    broker: Broker,
    connection: Connection,
    header: PullMessage,
    action: Callable[[], None],
    until: Until = Until.TIME,
) -> HeldPull:
    """A pull that no message wakes."""
    queue = broker.store.queue(header.topic, header.queue_id)
    size = _text_bytes(header)
    return HeldPull(connection, header.consumer_group, queue, None, header.queue_offset, action, size=size, until=until)


def _hold(
    broker: Broker,
    connection: Connection,
    header: PullMessage,
    wait_s: float,
    action: Callable[[], None],
    until: Until = Until.TIME,
) -> bool:
    """Whether a pull that no message wakes is held; `action` is called when its wait is over."""
    return broker.held_pulls.hold(_waiting(broker, connection, header, action, until), wait_s)


def _is_answered(action: Callable[[], None]) -> bool:
    """What cannot be held is answered at once."""
    action()
    return True


def _overtaken_by(broker: Broker, connection: Connection, header: PullMessage) -> int | None:
    """The committed offset that a foreign member must go on from: another member has read the queue since it loaded its own.
    An answer without messages moves Apache's clients at once, 4.9's Java (PullCallback, NO_NEW_MSG) and Go's alike;
    PULL_OFFSET_MOVED would cost them 10 s."""
    place = (header.consumer_group, header.topic, header.queue_id)
    committed = broker.offsets.get(*place)
    if committed is None or header.queue_offset >= committed:
        return None
    if broker.offsets.is_behind_owner(*place, header.queue_offset):
        return committed if is_foreign_member(broker, connection, header.consumer_group) else None
    return committed if broker.draining.allotment.is_new_reader(place[0], connection, *place[1:]) else None


def _set_back_to(broker: Broker, connection: Connection, header: PullMessage) -> int | None:
    """Where a member goes back to that was ahead when the end of the queue was lost: its offset would be right again as soon
    as others have been stored, and it would never get those. Whatever else is pulled under the lease says that its reader
    knows what this run has: a Spark query, which looks after lost messages itself, pulls without PULL_SUSPEND."""
    place = (header.consumer_group, header.topic, header.queue_id)
    end = broker.locks.former_end(*place)
    if end is None:
        return None
    if header.sys_flag & codes.PULL_SUSPEND:
        if not broker.locks.is_leased_to(*place, connection):
            return None
        if header.queue_offset > end:
            log.warning(
                "position_set_back", group=place[0], topic=place[1], queue=place[2], offset=header.queue_offset, end=end,
                hint="the member read messages that were lost before this start; their offsets are given again",
            )  # fmt: skip
            return end
    broker.locks.forget_former_end(*place)
    return None


def _answer_nothing_new(connection: Connection, frame: Frame, header: PullMessage) -> None:
    connection.write(_nothing_new(frame, header))


def _nothing_new(frame: Frame, header: PullMessage) -> Buffers:
    """The member asks again, and again, until the queue is its own or it has learned that it is not."""
    offset = header.queue_offset
    return _nothing(frame, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, 0, offset)


def _check_group_and_topic(broker: Broker, header: PullMessage) -> None:
    if not broker.config.permission & PERM_READ:
        raise Refused(ResponseCode.NO_PERMISSION, f"the broker[{broker.config.name}] pulling message is forbidden")
    group = broker.group_configs.ensure(header.consumer_group)
    if group is None:
        raise Refused(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [{header.consumer_group}] does not exist",
        )
    if not group.consume_enable:
        raise Refused(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
    topic = broker.topics.get(header.topic)
    if topic is None:
        raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, create it or send to it first")
    if not topic.perm & PERM_READ:
        raise Refused(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden")
    if not 0 <= header.queue_id < topic.read_queues:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] readQueueNums:[{topic.read_queues}]",
        )


def _subscription(broker: Broker, connection: Connection, header: PullMessage) -> Subscription | None:
    """What to filter by; None takes all."""
    if header.sys_flag & codes.PULL_SUBSCRIPTION:
        if header.subscription == ALL and header.expression_type in (TAG, None):  # as most that bring their filter
            return None
        if len(header.subscription or "") > MAX_EXPRESSION_CHARS:
            raise Refused(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"the expression has {len(header.subscription or '')} characters; {MAX_EXPRESSION_CHARS} are allowed",
            )
        try:
            found = parse_subscription(header.topic, header.subscription, kind=header.expression_type)
        except SubscriptionError as error:
            raise Refused(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None
    else:
        found = _registered_subscription(broker, connection, header)
    if found.kind not in (TAG, SQL92):
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"the broker does not support consumer to filter message by {found.kind}"
        )
    return None if found.takes_all else found


def _registered_subscription(broker: Broker, connection: Connection, header: PullMessage) -> Subscription:
    name = header.consumer_group
    group = broker.groups.get(name)
    if group is None:
        raise Refused(
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            f"the consumer's group info not exist, send a heartbeat of {name} first",
        )
    settings = broker.group_configs.ensure(name)
    if group.message_model == "BROADCASTING" and settings and not settings.consume_broadcast_enable:
        raise Refused(ResponseCode.NO_PERMISSION, f"the consumer group[{name}] can not consume by broadcast way")
    found = group.subscription(connection, header.topic)
    if found is None:
        raise Refused(
            ResponseCode.SUBSCRIPTION_NOT_EXIST,
            f"the consumer's subscription not exist, no member of {name} subscribes to {header.topic}",
        )
    if found.version < header.sub_version:
        raise Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
    return found


def _commit(broker: Broker, connection: Connection, header: PullMessage) -> None:
    group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
    queue, offset = (topic, queue_id), header.commit_offset
    fault = fence_fault(broker, connection, group, queue, offset, None) or offset_fault(broker, group, queue, offset)
    if fault is None:
        by_owner = broker.locks.is_leased_to(group, topic, queue_id, connection)
        store_offset(broker, group, queue, offset, by_owner=by_owner)


def _read_held(
    broker: Broker,
    connection: Connection,
    frame: Frame,
    header: PullMessage,
    queue: ConsumeQueue,
    subscription: Subscription | None,
    matches: Filter | None,
) -> Buffers:
    """As `_read`, outside of the dispatch, which would say what the store cannot read."""
    place = (header.consumer_group, connection, header.topic, header.queue_id)
    if broker.draining.holds_back(connection, header) or broker.draining.allotment.is_anothers(*place):
        return _nothing_new(frame, header)  # it has been drained of the queue since
    if broker.store.queues.get((queue.topic, queue.queue_id)) is not queue:
        remark = f"topic[{queue.topic}] not exist, it was deleted"
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=remark)
    try:
        return _read(broker, frame, header, queue, subscription, matches)
    except (StoreError, MessageError) as error:
        log.error("pull_failed", topic=header.topic, queue=header.queue_id, reason=str(error))
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=str(error))


def _read(
    broker: Broker,
    frame: Frame,
    header: PullMessage,
    queue: ConsumeQueue,
    subscription: Subscription | None,
    matches: Filter | None,
) -> Buffers:
    """The answer of a pull, whatever the offset finds."""
    offset, begin, end = header.queue_offset, queue.begin, queue.next
    if header.topic_identity and broker.topics.identity(header.topic) not in ("", header.topic_identity):
        return _nothing(frame, ResponseCode.PULL_OFFSET_MOVED, MADE_ANEW, begin, begin, end)
    if begin <= offset < end:
        # Apache's broker gives 32 at most, whatever is asked (maxTransferCountOnMessageInMemory)
        limit = header.max_msg_nums if frame.language == _PYTHON else min(header.max_msg_nums, FOREIGN_PULL_MESSAGES)
        looks = SCAN_WORDS // matches.words if matches is not None else 0
        found = broker.store.fetch(queue, offset, limit, subscription, matches, header.max_msg_bytes, looks)
        if found.messages:
            broker.statistics.got[f"{header.topic}@{header.consumer_group}"] += found.messages
            ext = write(PullMessageResult(0, found.next_offset, begin, end))
            return answer_pieces(frame, ext, found.pieces, "FOUND")
        return _nothing(frame, ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", found.next_offset, begin, end)
    if end == 0:
        if offset:
            _note_moved(broker, header, 0)
        # PullMessageProcessor, NO_MESSAGE_IN_QUEUE: an empty queue is nothing to correct for who begins at 0.
        code = ResponseCode.PULL_OFFSET_MOVED if offset else ResponseCode.PULL_NOT_FOUND
        return _nothing(frame, code, "NO_MESSAGE_IN_QUEUE", 0, begin, end)
    if offset == end:
        return _nothing(frame, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, begin, end)
    if offset < begin:
        _note_moved(broker, header, begin)
        return _nothing(frame, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", begin, begin, end)
    _note_moved(broker, header, end)
    return _nothing(frame, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", end, begin, end)


def _note_moved(broker: Broker, header: PullMessage, offset: int) -> None:
    """An OffsetMovedEvent in OFFSET_MOVED_EVENT, for whoever watches that topic."""
    moved = Queue(header.topic, broker.config.name, header.queue_id)
    body = encode_offset_moved(header.consumer_group, moved, header.queue_offset, offset)
    text = f"{props.TAGS}{props.NAME_END}{header.consumer_group}{props.PAIR_END}{props.KEYS}{props.NAME_END}"
    text += header.consumer_group
    store = broker.store
    queue = store.queue(OFFSET_MOVED_TOPIC, 0)
    try:
        with broker.appender.batch() as now_ms:
            broker.appender.stage(queue, body, text.encode(), tag_code(text), 0, 0, now_ms, store.store_host)
    except StoreFull as error:
        log.warning("offset_moved_not_noted", group=header.consumer_group, reason=str(error))


def _nothing(frame: Frame, code: int, remark: str, next_offset: int, begin: int, end: int) -> Buffers:
    return answer(frame, code, write(PullMessageResult(0, next_offset, begin, end)), remark=remark)
