"""Remoting requests of clients that pop messages (POP, since 5.0), from topics and from lite topics, and reports on lite
topics. A receive is checked in Apache's order.

A client acknowledges a message by its receipt handle, which the broker adds to the returned record as the property
POP_CK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import orjson
import structlog

from ...protocol.admin_bodies import LiteTopicLag
from ...protocol.bodies import SLICE, TopicConfig, Work
from ...protocol.codes import ResponseCode
from ...protocol.frame import Frame
from ...protocol.group_bodies import (
    BatchAck,
    decode_batch_acks,
    decode_lite_subscriptions,
    decode_request_mode,
    encode_request_modes,
)
from ...protocol.headers import (
    FROM_END,
    FROM_FIRST,
    AckMessage,
    ChangedInvisibleTime,
    ChangeInvisibleTime,
    LiteClientOf,
    LiteDispatch,
    LiteGroupOf,
    LiteTopicOf,
    Notification,
    Notified,
    PeekMessage,
    Polling,
    PollingInfo,
    PopLiteMessage,
    PopMessage,
    PopMessageResult,
    TopicName,
    read,
    write,
)
from ...protocol.message import offset_texts, with_attempts
from ...protocol.names import (
    RETRY_PREFIX,
    SQL92,
    TAG,
    Subscription,
    SubscriptionError,
    group_fault,
    is_lite_queue,
    lite_queue,
    parse_subscription,
)
from ..broker import BrokerController
from ..config import (
    LATE_POLL_MS,
    MAX_ATTEMPT_CHARS,
    MAX_INVISIBLE_MS,
    MAX_NAMED_CHARS,
    MAX_POLL_S,
    MAX_POP_MESSAGES,
    MAX_QUERY_ENTRIES,
    MAX_REASON_CHARS,
)
from ..messages.lite import LiteTopic
from ..messages.sending import GIVEN_UP
from ..pops.lite import LitePool
from ..pops.lite_subscriptions import LiteSync
from ..pops.pool import Receive
from ..pops.requests import TOPIC_MARK, AckStatus, PopClient, PopRequest, PopResult, Why, decode_handle, encode_handle
from ..store.index import ConsumeQueue
from .connection import RemotingConnection
from .responses import Buffer, Buffers, ResponseError, answer, answer_pieces, small

log = structlog.get_logger("rocketlet.pops")

_NOTHING = {
    Why.TOO_MANY_WAIT: ResponseCode.POLLING_FULL,
    Why.TOPIC_GONE: ResponseCode.TOPIC_NOT_EXIST,
    Why.GROUP_GONE: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    Why.STOPPED: ResponseCode.SERVICE_NOT_AVAILABLE,
    Why.PULLED: ResponseCode.NO_PERMISSION,
    Why.FAILED: ResponseCode.SYSTEM_ERROR,
    Why.TOO_MANY_UNFINISHED: ResponseCode.SYSTEM_BUSY,
}
# number of the revive queue in the response for lite topics, as at Apache's broker, which has no queue of this number
LITE_REVIVE_QUEUE = 999
_NO_MESSAGES = write(PopMessageResult(0, 0, 0, 0))  # Java's client logs four errors for an answer without these fields


def pop_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """POP_MESSAGE. Without a message, the response follows when there is one, when the poll time is over, or when the receive
    ends otherwise, for example because the topic is deleted."""
    header = read(PopMessage, frame.ext)
    _check_waits(broker, connection, header)
    _check_count(broker, header.max_msg_nums)
    _, group = broker.check_receive(header.topic, header.consumer_group, header.queue_id, orderly=header.order)
    broker.group_configs.check_unbound(group)
    subscription = _subscription(header)
    _check_invisible(header.invisible_time)
    request = PopRequest(
        header.consumer_group,
        header.topic,
        client_of(broker, connection, header.consumer_group),
        max(header.max_msg_nums, 1),
        header.invisible_time,
        _wait_ms(header.poll_time),
        queue_id=header.queue_id if header.queue_id >= 0 else None,
        is_strict=header.queue_id >= 0,
        session=connection,
        in_order=header.order,
        subscription=subscription,
        attempt_id=(header.attempt_id or "")[:MAX_ATTEMPT_CHARS] or None,
        from_first=header.init_mode == FROM_FIRST,
        from_end=header.init_mode == FROM_END,
    )
    return PopReceive(broker, connection, small(frame), request).begin()


def pop_lite_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """POP_LITE_MESSAGE: POP_MESSAGE for the lite topics to which the client of this connection is subscribed."""
    header = read(PopLiteMessage, frame.ext)
    _check_waits(broker, connection, header)
    _check_count(broker, header.max_msg_num)
    broker.check_receive(header.topic, header.consumer_group)
    broker.pops.lite.check_bound(header.consumer_group, header.topic)
    _check_invisible(header.invisible_time)
    request = PopRequest(
        header.consumer_group,
        header.topic,
        _lite_client(broker, connection, header.client_id),
        max(header.max_msg_num, 1),
        header.invisible_time,
        _wait_ms(header.poll_time),
        session=connection,
        attempt_id=(header.attempt_id or "")[:MAX_ATTEMPT_CHARS] or None,
    )
    return PopLiteReceive(broker, connection, small(frame), request).begin()


def _wait_ms(poll_time: int) -> int:
    return min(max(poll_time, 0), int(MAX_POLL_S * 1000))


def sync_lite_subscriptions(
    broker: BrokerController, connection: RemotingConnection, frame: Frame
) -> Buffers | Work[Buffers]:
    """LITE_SUBSCRIPTION_CTL: change the lite topics to which the client of this connection is subscribed. Rocketlet's
    clients repeat all their subscriptions every 30 s. The first piece of work is done immediately. Most requests have no
    further one, so that they do not count against the limit of long requests."""
    work = _syncing(broker, connection, frame)
    try:
        next(work)
    except StopIteration as done:
        found: Buffers = done.value
        return found
    return work


def _syncing(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    for change in decode_lite_subscriptions(frame.body):
        if connection.is_closed:  # closed while an earlier change was made
            break
        if fault := group_fault(change.group):
            raise ResponseError(ResponseCode.INVALID_PARAMETER, fault)
        group = broker.pops.lite.group_of(change.group, change.topic, change.action)
        if group is None:
            continue
        broker.ensure_retry_topic(group, connection)
        connection.on_lost(broker.pops.session_gone)
        client = _lite_client(broker, connection, change.client_id)
        names = dict.fromkeys(change.names).keys()
        yield from broker.pops.lite.sync(
            LiteSync(client, connection, group.name, change.topic, change.action, names, change.offset)
        )
    return answer(frame)


def _lite_client(broker: BrokerController, connection: RemotingConnection, client_id: str) -> PopClient:
    """Return the client of a connection that uses lite topics. A connection has one such client. The client's id is
    used in reports, and with its account to find the client's earlier connections."""
    return PopClient(client_id[:MAX_NAMED_CHARS], session=connection, account=broker.clients.account_of(connection))


def client_of(broker: BrokerController, connection: RemotingConnection, group: str) -> PopClient:
    """Return the client that pops, which is identified by its connection. The client id, used in reports, is that of
    the group's member on the connection, or that of the connection's only client; otherwise the peer address and the
    connection's number."""
    found = broker.groups.get(group)
    member = found.members.get(connection) if found else None
    client_id = member.client_id if member is not None else broker.clients.only_id(connection)
    return PopClient(client_id or f"{connection.peer}@{connection.number}", session=connection)


class PopReceive(Receive):
    __slots__ = ("_broker", "_connection", "_frame")

    def __init__(
        self, broker: BrokerController, connection: RemotingConnection, frame: Frame, request: PopRequest
    ) -> None:
        super().__init__(request)
        self._frame = frame
        self._broker = broker
        self._connection = connection
        connection.on_lost(broker.pops.session_gone)

    def begin(self) -> Buffers | None:
        """Pop messages, and return the response; None if it follows later."""
        result = self._broker.pops.receive(self)
        return None if result is None else self.encode(result)

    def respond(self, result: PopResult) -> None:
        connection = self._connection
        # Messages for a client that is gone, or does not read its responses, go to other clients
        if connection.is_closed or connection.is_paused:
            self._broker.pops.put_back(self.request.group, result.messages)
            connection.when_read(lambda: connection.write(self.encode(PopResult(Why.NOTHING_NEW))))
        else:
            connection.write(self.encode(result))

    def encode(self, result: PopResult) -> Buffers:
        frame = self._frame
        if result.why is not Why.FOUND:
            code = _NOTHING.get(result.why, ResponseCode.POLLING_TIMEOUT)
            return answer(frame, code, _NO_MESSAGES, remark=result.fault or result.why.value)
        places, pieces = [], list[Buffer]()
        for item in result.messages:
            places.append((TOPIC_MARK, item.queue_id, item.offset))
            pieces.append(with_attempts(item.record, item.attempt - 1, item.handle))
        starts, offsets = offset_texts(places)
        fields = PopMessageResult(result.pop_ms, result.invisible_ms, 0, result.rest, starts, offsets)
        return answer_pieces(frame, write(fields), pieces, "FOUND")


class PopLiteReceive(PopReceive):
    """A POP_LITE_MESSAGE. The response with messages has the number of earlier attempts of each record, and no queue ids and
    offsets, which are in the receipt handles."""

    __slots__ = ()

    def encode(self, result: PopResult) -> Buffers:
        if result.why is not Why.FOUND:
            return super().encode(result)
        pieces: list[Buffer] = [with_attempts(item.record, item.attempt - 1, item.handle) for item in result.messages]
        tried = ";".join(str(item.attempt - 1) for item in result.messages)
        fields = PopMessageResult(
            result.pop_ms, result.invisible_ms, LITE_REVIVE_QUEUE, result.rest, order_count_info=tried
        )
        return answer_pieces(self._frame, write(fields), pieces, "FOUND")


def _check_waits(broker: BrokerController, connection: RemotingConnection, header: PopMessage | PopLiteMessage) -> None:
    """Raises ResponseError for a pop that arrives more than LATE_POLL_MS after the end of its poll time, which is counted
    from the client's own time stamp. A pop without a time stamp or poll time is accepted."""
    if header.born_time <= 0 or header.poll_time <= 0:
        return
    late_ms = broker.clock.time_ms() - header.born_time - header.poll_time
    if late_ms > LATE_POLL_MS:
        if connection.is_news("pop_came_late"):  # such a client retries forever and logs nothing
            hint = "its client does not wait any more, or the clock of the client's machine is behind: set it"
            group = header.consumer_group[:MAX_NAMED_CHARS]  # the group's name is not checked yet, so it may be long
            log.warning("pop_came_late", group=group, peer=connection.peer, late_s=late_ms / 1000, hint=hint)
        remark = f"the broker[{broker.config.name}] pop message is timeout too much"
        raise ResponseError(ResponseCode.POLLING_TIMEOUT, remark, _NO_MESSAGES)


def _check_count(broker: BrokerController, count: int) -> None:
    broker.topics.check_reading()  # before the number, as in Apache's broker
    if count > MAX_POP_MESSAGES:
        remark = f"the broker[{broker.config.name}] pop message's num is greater than {MAX_POP_MESSAGES}"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, remark)


def _check_invisible(invisible_ms: int) -> None:
    if not 0 < invisible_ms <= MAX_INVISIBLE_MS:
        remark = f"the invisible time {invisible_ms} ms is not between 1 and {MAX_INVISIBLE_MS}"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, remark)


def _subscription(header: PopMessage) -> Subscription | None:
    """Return the filter; None if all messages match. Raises ResponseError for an invalid tag expression, and for an
    unknown kind of filter."""
    try:
        found = parse_subscription(header.topic, header.exp, kind=header.exp_type or TAG)
    except SubscriptionError as error:
        remark = f"parse the consumer's subscription failed: {error}"
        raise ResponseError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark) from None
    if found.kind not in (TAG, SQL92):
        remark = f"the broker does not support consumer to filter message by {found.kind}"
        raise ResponseError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark)
    return None if found.takes_all else found


# Outcomes of messages


def ack_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """ACK_MESSAGE. The response follows when the acknowledgement is written to the disk. Its code is 0 even if the message is
    not in flight, as with Apache's broker; it is an error if the queue does not have the offset, or if the write fails."""
    header = read(AckMessage, frame.ext)
    topic, queue = _settled_in(broker, header)
    if not (queue is not None and queue.begin <= header.offset <= queue.next):
        return answer(
            frame, ResponseCode.NO_MESSAGE, remark=_outside_text(header.topic, header.queue_id, header.offset)
        )
    answered = partial(_answer_acks, connection, small(frame))
    broker.pops.ack(header.consumer_group, topic, [header.extra_info], answered)
    return None


def _settled_in(
    broker: BrokerController, header: AckMessage | ChangeInvisibleTime
) -> tuple[str, ConsumeQueue | LiteTopic | None]:
    """Return the topic and queue in which a message is settled; None as the queue if it has no messages. For a lite topic,
    these are the name under which its offsets are kept, and the lite topic. A client may leave the lite topic out, because
    the receipt handle has it. Raises ResponseError, Refusal."""
    name = header.lite_topic
    if not name and broker.lites.is_parent(header.topic):
        handle = decode_handle(header.extra_info)
        name = handle.lite_topic if handle is not None else ""
    if not name:
        return header.topic, _checked_queue(broker, header.topic, header.queue_id)
    broker.pops.lite.check_bound(header.consumer_group, header.topic)
    if header.queue_id != 0:
        remark = f"queueId[{header.queue_id}] is illegal: a lite topic has queue 0 only"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, remark)
    return lite_queue(header.topic, name), broker.lites.get(header.topic, name)


def _checked_queue(broker: BrokerController, topic: str, queue_id: int) -> ConsumeQueue | None:
    """Return a queue; None if it never had a message. Raises ResponseError if the topic does not have the queue."""
    config = broker.topics.get(topic)
    if config is None:
        raise ResponseError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
    if not 0 <= queue_id < config.read_queues:
        remark = f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{config.read_queues}]"
        raise ResponseError(ResponseCode.MESSAGE_ILLEGAL, remark)
    return broker.store.queues.get((topic, queue_id))


def _outside_text(topic: str, queue_id: int, offset: int) -> str:
    return f"request offset[{offset}] not exist in {topic}:{queue_id}"


def _answer_acks(connection: RemotingConnection, frame: Frame, outcomes: Sequence[AckStatus]) -> None:
    if AckStatus.NOT_KEPT in outcomes:
        remark = f"the acknowledgement is not stored: {AckStatus.NOT_KEPT.value}"
        connection.write(answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, remark=remark))
    else:
        connection.write(answer(frame))


def _answer_rejection(connection: RemotingConnection, frame: Frame, outcomes: Sequence[AckStatus]) -> None:
    (outcome,) = outcomes
    if outcome.is_done:
        connection.write(answer(frame, ext=write(ChangedInvisibleTime(0, 0, 0, rejected=True))))
    elif outcome is AckStatus.NOT_KEPT:
        _answer_acks(connection, frame, outcomes)
    else:
        connection.write(answer(frame, ResponseCode.NO_MESSAGE, remark=outcome.value))


def batch_ack_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """BATCH_ACK_MESSAGE: acknowledge messages of several pops, none of a lite topic. Acknowledgements of messages that are
    not in flight are ignored."""
    acks = decode_batch_acks(frame.body)
    if not acks:
        return answer(frame, ResponseCode.NO_MESSAGE, remark="batch ack is empty")
    if any(is_lite_queue(ack.topic) for ack in acks):
        remark = "messages of lite topics are acknowledged one by one, with their lite topic"
        return answer(frame, ResponseCode.ILLEGAL_OPERATION, remark=remark)
    count, found = len(acks), list[AckStatus]()

    def answered(outcomes: Sequence[AckStatus]) -> None:
        nonlocal count
        count -= 1
        found.extend(outcomes)
        if count == 0:
            _answer_acks(connection, reply_to, found)

    reply_to = small(frame)
    for ack in acks:
        broker.pops.ack(ack.group, ack.topic, _handles(broker.config.name, ack), answered)
    return None


def _handles(broker_name: str, ack: BatchAck) -> list[str]:
    mark = int(ack.mark) if ack.mark.isdecimal() else TOPIC_MARK
    return [
        encode_handle(broker_name, ack.queue_id, offset, ack.pop_ms, ack.invisible_ms, mark) for offset in ack.offsets
    ]


def change_invisible_time(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """CHANGE_MESSAGE_INVISIBLETIME. The receipt handle stays valid until the message is redelivered, because the response
    repeats its pop time. If a Rocketlet client rejects the message with this request, the response follows when the dead
    letter and the acknowledgement are written to the disk, or could not be."""
    header = read(ChangeInvisibleTime, frame.ext)
    topic, queue = _settled_in(broker, header)
    if not (queue is not None and queue.begin <= header.offset < queue.next):
        return answer(
            frame, ResponseCode.NO_MESSAGE, remark=_outside_text(header.topic, header.queue_id, header.offset)
        )
    if not 0 <= header.invisible_time <= MAX_INVISIBLE_MS:
        remark = f"the invisible time {header.invisible_time} ms is not between 0 and {MAX_INVISIBLE_MS}"
        return answer(frame, ResponseCode.INVALID_PARAMETER, remark=remark)
    if header.reject is not None:
        answered = partial(_answer_rejection, connection, small(frame))
        reason = header.reject[:MAX_REASON_CHARS] or GIVEN_UP
        broker.pops.to_dead_letters(header.consumer_group, topic, header.extra_info, reason, answered)
        return None
    changed = broker.pops.change(
        header.consumer_group,
        topic,
        header.extra_info,
        header.invisible_time,
        is_counted=not header.suspend,
        is_alone=bool(header.alone),
        renews=header.renews,
    )
    if not changed.outcome.is_done:
        return answer(frame, ResponseCode.NO_MESSAGE, remark=changed.outcome.value)
    return answer(frame, ext=write(ChangedInvisibleTime(changed.pop_ms, changed.invisible_ms, 0)))


# Waiting and reading without popping


def notification(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers | None:
    """NOTIFICATION: like a POP_MESSAGE, but the response only reports whether there is a message to pop."""
    header = read(Notification, frame.ext)
    broker.check_receive(header.topic, header.consumer_group, header.queue_id)
    request = PopRequest(
        header.consumer_group,
        header.topic,
        client_of(broker, connection, header.consumer_group),
        0,
        0,
        _wait_ms(header.poll_time),
        queue_id=header.queue_id if header.queue_id >= 0 else None,
        is_strict=header.queue_id >= 0,
        session=connection,
    )
    return NotificationReceive(broker, connection, small(frame), request).begin()


class NotificationReceive(PopReceive):
    __slots__ = ()

    def encode(self, result: PopResult) -> Buffers:
        if result.why in (Why.FOUND, Why.NOTHING_NEW, Why.TOO_MANY_WAIT):
            notified = Notified(result.why is Why.FOUND, result.why is Why.TOO_MANY_WAIT)
            return answer(self._frame, ext=write(notified))
        return super().encode(result)


def polling_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """POLLING_INFO: return the number of waiting receives of a group in a topic."""
    header = read(PollingInfo, frame.ext)
    broker.topics.readable(header.topic)
    return answer(frame, ext=write(Polling(broker.pops.pools.waits(header.consumer_group, header.topic))))


def peek_message(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """PEEK_MESSAGE: return the next messages that the group has not popped yet, without popping them. Messages that will be
    redelivered and those of lite topics are not returned."""
    header = read(PeekMessage, frame.ext)
    _check_count(broker, header.max_msg_nums)
    broker.check_receive(header.topic, header.consumer_group, header.queue_id)
    queue_id = header.queue_id if header.queue_id >= 0 else None
    now_ms = broker.clock.time_ms()
    found = broker.pops.pools.peek(header.consumer_group, header.topic, queue_id, max(header.max_msg_nums, 1))
    if not found:
        return answer(frame, ResponseCode.PULL_NOT_FOUND, _NO_MESSAGES, remark="there is no message")
    places = [(TOPIC_MARK, item.queue_id, item.offset) for item in found]
    result = PopMessageResult(now_ms, 0, 0, 0, *offset_texts(places))
    return answer_pieces(frame, write(result), [item.record for item in found], "FOUND")


# Modes


def set_request_mode(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """SET_MESSAGE_REQUEST_MODE: set whether QUERY_ASSIGNMENT lets a group's members pull a topic's queues or pop its
    messages."""
    mode = decode_request_mode(frame.body)
    if mode.topic.startswith(RETRY_PREFIX):
        remark = "retry topic is not allowed to set mode"
        return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)
    if broker.topics.get(mode.topic) is None:
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=f"topic[{mode.topic}] not exist, apply first please!")
    broker.group_configs.consuming(mode.group)
    broker.request_modes.put(mode)
    return answer(frame)


def request_modes(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    return answer(frame, body=encode_request_modes(broker.request_modes))


# ------------------------------------------------------------------------------
# Reports on lite topics, for Rocketlet's tools and mqadmin of 5.5.


def broker_lite_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_BROKER_LITE_INFO. The fields for Apache's structures have the nearest number of this broker."""
    ttls = {topic.name: topic.lite_expiration_min for topic in broker.topics if topic.is_lite}
    groups = yield from _lite_groups(broker, ttls)
    pools = broker.pops.pools.lite_pools()
    value = {
        "storeType": "FILE",
        "maxLmqNum": broker.limits.max_lite_topics,
        "currentLmqNum": broker.lites.count,
        "liteSubscriptionCount": broker.pops.lite.count,
        "orderInfoCount": sum(len(pool.queues.deliveries) for pool in pools),
        "cqTableSize": len(broker.store.queues),
        "offsetTableSize": broker.lite_offsets.count,
        "eventMapSize": sum(len(pool.queues.subscribers) for pool in pools),
        "topicMeta": ttls,
        "groupMeta": groups,
    }
    return answer(frame, body=orjson.dumps(value))


def _lite_groups(broker: BrokerController, parents: Iterable[str]) -> Work[dict[str, list[str]]]:
    """Return the names of the groups that are bound to each parent topic."""
    found: dict[str, list[str]] = {parent: [] for parent in parents}
    for number, group in enumerate(list(broker.group_configs), 1):
        if group.lite_topic in found:
            found[group.lite_topic].append(group.name)
        if number % SLICE == 0:
            yield
    return found


def _check_parent(broker: BrokerController, name: str) -> TopicConfig:
    topic = broker.topics.get(name)
    if topic is None:
        raise ResponseError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name[:MAX_NAMED_CHARS]}] not exist")
    if not topic.is_lite:
        raise ResponseError(ResponseCode.INVALID_PARAMETER, f"the topic {name} is not of the type LITE")
    return topic


def _check_lite_group(broker: BrokerController, name: str) -> LitePool:
    if broker.group_configs.get(name) is None:
        remark = f"subscription group [{name[:MAX_NAMED_CHARS]}] not exist"
        raise ResponseError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
    pool = broker.pops.pools.bound_lite_pool(name)
    if pool is None:
        raise ResponseError(
            ResponseCode.INVALID_PARAMETER, f"the group {name} is not bound to a topic of the type LITE"
        )
    return pool


def parent_topic_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    topic = _check_parent(broker, read(TopicName, frame.ext).topic)
    groups = yield from _lite_groups(broker, [topic.name])
    value = {
        "topic": topic.name,
        "ttl": topic.lite_expiration_min,
        "groups": groups[topic.name],
        "lmqNum": broker.lites.count,
        "liteTopicCount": len(broker.lites.of(topic.name)),
    }
    return answer(frame, body=orjson.dumps(value))


def lite_topic_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_LITE_TOPIC_INFO. A lite topic need not exist: clients may subscribe to it before its first message."""
    header = read(LiteTopicOf, frame.ext)
    _check_parent(broker, header.parent_topic)
    subscribers: list[dict[str, str]] = []
    for pool in broker.pops.pools.lite_pools(header.parent_topic):
        for number, item in enumerate(list(pool.queues.subscribers_of(header.lite_topic)), 1):
            subscribers.append({"clientId": item.client.client_id, "group": pool.group})
            if number % SLICE == 0:
                yield
        yield
    lite = broker.lites.get(header.parent_topic, header.lite_topic)
    value = {
        "parentTopic": header.parent_topic,
        "liteTopic": header.lite_topic,
        "subscriber": subscribers,
        "topicOffset": {
            "minOffset": lite.begin if lite is not None else 0,
            "maxOffset": lite.next if lite is not None else 0,
            "lastUpdateTimestamp": broker.lites.last_ms(lite) if lite is not None else 0,
        },
        "shardingToBroker": lite is not None,
    }
    return answer(frame, body=orjson.dumps(value))


def lite_client_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_LITE_CLIENT_INFO: the subscriptions of a client in a group; the count is -1 if the group does not have the
    client."""
    header = read(LiteClientOf, frame.ext)
    _check_parent(broker, header.parent_topic)
    pool = _check_lite_group(broker, header.group)
    found = next((item for item in pool.queues.subscribers.values() if item.client.client_id == header.client_id), None)
    synced_ms = 0
    if found is not None:
        synced_ms = broker.clock.time_ms() - int(1000 * (broker.clock.monotonic_s() - found.synced_s))
    listed = islice(found.names if found is not None else (), min(max(header.max_count, 0), MAX_QUERY_ENTRIES))
    value = {
        "parentTopic": header.parent_topic,
        "group": header.group,
        "clientId": header.client_id,
        "lastAccessTime": synced_ms,
        "lastConsumeTime": 0,
        "liteTopicCount": len(found.names) if found is not None else -1,
        "liteTopicSet": [lite_queue(header.parent_topic, name) for name in listed],
    }
    return answer(frame, body=orjson.dumps(value))


def lite_group_info(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """GET_LITE_GROUP_INFO: the lag of a lite group, in one lite topic or in all."""
    header = read(LiteGroupOf, frame.ext)
    pool = _check_lite_group(broker, header.group)
    value: dict[str, object] = {"group": header.group, "parentTopic": pool.topic, "liteTopic": header.lite_topic}
    if header.lite_topic:
        lite = broker.lites.get(pool.topic, header.lite_topic)
        lag = pool.queues.lag_of(lite) if lite is not None else LiteTopicLag(header.lite_topic, 0, 0, 0, 0)
        value |= {"totalLagCount": lag.messages, "earliestUnconsumedTimestamp": lag.oldest_ms}
        if lite is not None:
            value["liteTopicOffsetWrapper"] = _lite_offsets(broker, pool, lite)
    else:
        backlog = yield from pool.queues.backlog(min(max(header.top_k, 0), MAX_QUERY_ENTRIES))
        value |= {
            "totalLagCount": backlog.messages,
            "earliestUnconsumedTimestamp": backlog.oldest_ms,
            "lagCountTopK": list(map(_lite_lag, backlog.longest)),
            "lagTimestampTopK": list(map(_lite_lag, backlog.oldest)),
            "waitingTopK": list(map(_lite_lag, backlog.stuck)),  # this field and those below are Rocketlet's own
            "unreadTopK": list(map(_lite_lag, backlog.unread)),
            "inFlight": backlog.in_flight,
            "wildcard": pool.queues.is_wildcard,
        }
    return answer(frame, body=orjson.dumps(value))


def _lite_offsets(broker: BrokerController, pool: LitePool, lite: LiteTopic) -> dict[str, int]:
    offset = pool.queues.committed(lite)
    return {
        "brokerOffset": lite.next,
        "consumerOffset": offset,
        "pullOffset": offset,
        "lastTimestamp": broker.lites.stored_ms(lite, offset - 1),
    }


def _lite_lag(lag: LiteTopicLag) -> dict[str, object]:
    """Return the lag of a group in a lite topic. The last two fields are Rocketlet's own: the number of messages in flight,
    and when the first unfinished message that is not in flight was stored, or 0."""
    return {
        "liteTopic": lag.name,
        "lagCount": lag.messages,
        "earliestUnconsumedTimestamp": lag.oldest_ms,
        "inFlight": lag.in_flight,
        "earliestWaitingTimestamp": lag.waiting_ms,
    }


def trigger_lite_dispatch(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """TRIGGER_LITE_DISPATCH: find again which lite topics have messages for the clients of a group, or for one of them, and
    serve the waiting receives of the group."""
    header = read(LiteDispatch, frame.ext)
    yield from broker.pops.lite.offer_all(_check_lite_group(broker, header.group), header.client_id or "")
    return answer(frame)
