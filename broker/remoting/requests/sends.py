"""SEND_MESSAGE, its V2, SEND_BATCH_MESSAGE and CONSUMER_SEND_MSG_BACK: the checks, and where a message goes."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import structlog

from ....protocol import names
from ....protocol import properties as props
from ....protocol.bodies import TopicConfig
from ....protocol.codes import ONEWAY_FLAG, SYS_TRANSACTION_MASK, RequestCode, ResponseCode
from ....protocol.config import MAX_BODY_BYTES, MAX_PROPERTY_BYTES, SENT_PROPERTY_BYTES
from ....protocol.frame import Ext, Frame
from ....protocol.group_config import GroupConfig
from ....protocol.headers import SendBack, SendMessage, read, read_send_v2
from ....protocol.message import MessageError, Record
from ....protocol.sent import encode_sent
from ....protocol.subscription import tag_code
from ...broker import Broker
from ...config import MAX_HALF_MESSAGES, MAX_NAMED_CHARS, MAX_RETRY_QUEUES, REGION
from ...messages.delays import Delays
from ...messages.recalls import handle_of
from ...messages.timers import MARK as TIME_MARK
from ...messages.timers import IllegalTime, time_asked, waiting_text, without_time
from ...messages.transactions import with_real_queue
from ...store.consume_queue import ConsumeQueue
from ...store.store import StoreFull
from ..answers import Buffers, Refused, answer, reply_type
from ..connection import Connection

log = structlog.get_logger("rocketlet.sending")

REGION_EXT: Final[Ext] = {"MSG_REGION": REGION, "TRACE_ON": "true"}

_new_tuple = tuple.__new__
_SEND_MESSAGE: Final = int(RequestCode.SEND_MESSAGE)  # Python 3.11 takes 0.2 us to find a member of an enum
_DELAY_MARK: Final = props.DELAY + props.NAME_END
_TAGS_MARK: Final = props.TAGS + props.NAME_END
_WAIT_MARK: Final = props.WAIT + props.NAME_END
_TRANSACTION_MARK: Final = props.TRANSACTION + props.NAME_END
FULL_REMARK: Final = "service not available now, the broker's disk may be full; free space or send to another broker: "


class Staged(NamedTuple):
    """A send whose message has its place; `message_ids` is several, joined by commas, for a batch. `recall_handle`: of one
    that waits for a time, and perhaps empty."""

    frame: Frame
    position: int
    queue_id: int
    queue_offset: int
    message_ids: str | None
    delay_level: int
    is_half: bool = False
    recall_handle: str | None = None


class Sends:
    """The sends of one socket read: staged one by one, settled together."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._store = broker.store
        self._appender = broker.appender
        self._cluster = broker.config.cluster
        self._cluster_text = f"{props.CLUSTER}{props.NAME_END}{self._cluster}"
        self._cluster_end = props.PAIR_END + self._cluster_text
        self._host_hex = broker.store.store_host.hex().upper()
        self.staged: list[Staged] = []

    def stage(self, connection: Connection, frame: Frame) -> None:
        """Gives the message its place. Whatever this raises, such as Refused, nothing of it is staged."""
        code = frame.code
        header = read(SendMessage, frame.ext) if code == _SEND_MESSAGE else read_send_v2(frame.ext)
        store = self._store
        if not self.staged:
            self._appender.begin()
        kept = store.staged
        try:
            self.staged.append(self._place(connection, frame, header))
        except BaseException:
            store.roll_back(kept)  # half a batch is no batch
            raise

    def settle(self) -> Buffers:
        """Commits everything staged; the answers, in order."""
        staged, self.staged = self.staged, []
        broker = self._broker
        try:
            self._appender.commit()
        except Exception as error:
            if not isinstance(error, StoreFull):
                log.exception("sends_refused_store_failed")
            remark = FULL_REMARK + (str(error) or type(error).__name__)
            return [
                part
                for item in staged
                if not item.frame.flag & ONEWAY_FLAG
                for part in answer(item.frame, ResponseCode.SERVICE_NOT_AVAILABLE, REGION_EXT, remark=remark)
            ]
        out: Buffers = []
        host_hex = self._host_hex
        for frame, position, queue_id, queue_offset, message_ids, delay_level, is_half, recall_handle in staged:
            if recall_handle is not None:
                broker.timers.take()
                if recall_handle and not frame.flag & ONEWAY_FLAG:
                    ids = f"{host_hex}{position:016X}"
                    out += answer(frame, 0, _sent_ext(ids, queue_id, queue_offset, recall_handle))
                    continue
            if delay_level:
                broker.delays.expect(delay_level)
            if is_half:
                broker.transactions.expect(queue_offset, position, broker.store.now_ms)
            if not frame.flag & ONEWAY_FLAG:
                ids = message_ids or f"{host_hex}{position:016X}"
                out.append(encode_sent(reply_type(frame), frame.opaque, ids, queue_id, queue_offset, REGION))
        return out

    def _place(self, connection: Connection, frame: Frame, header: SendMessage) -> Staged:
        name = header.topic
        topic = self._topics.get(name)
        if topic is None or name in names.UNSENDABLE_TOPICS:
            topic = self._topic(header)
        queue_id = header.queue_id
        # AbstractSendMessageProcessor.msgCheck: a queue that may only be read is legal, too.
        if queue_id >= topic.write_queues and queue_id >= topic.read_queues:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"request queueId[{queue_id}] is illegal, {name} has {topic.write_queues} queues",
            )
        if queue_id < 0:
            # As SendMessageProcessor: a client may leave the choice to the broker.
            queue_id = random.randrange(topic.write_queues or 1)
        if header.batch:
            return self._place_batch(connection, frame, header, name, queue_id)
        if len(frame.body) > MAX_BODY_BYTES:
            raise too_large("message body", frame.body)
        text = header.properties
        if name[0] == "%" and name.startswith(names.RETRY_PREFIX):
            name, queue_id, text = self._retried(header, name, queue_id, text)
        is_half = _TRANSACTION_MARK in text and props.find(text, props.TRANSACTION) == "true"
        if _WAIT_MARK in text and _DELAY_MARK not in text and not is_half:
            # Apache's Java client sets WAIT=true in each message, and its broker does not store it either
            # (SendMessageProcessor).
            text = props.without(text, props.WAIT)
        text = text + self._cluster_end if text and text[-1] != props.PAIR_END else text + self._cluster_text
        level = 0
        # A half message is not delayed, as in Apache's CommitLog.putMessage: its producer ends it when it wants.
        if _DELAY_MARK in text and not is_half:
            level = _delay_level(text, self._broker.delays)
        recall_handle = None
        if TIME_MARK in text:
            text, due_ms = self._timed(text, level, is_half)
        else:
            due_ms = 0
        code = tag_code(text) if _TAGS_MARK in text else 0
        store = self._store
        queue = store.queues.get((name, queue_id)) or store.queue(name, queue_id)
        if level:
            queue, text, code = delayed(self._broker, level, name, queue_id, text)
        elif due_ms:
            recall_handle = handle_of(text, name, self._broker.config.name, due_ms)
            queue, text, code = self._broker.timers.queue, waiting_text(text, due_ms, name, queue_id), due_ms
        elif is_half:
            self._refuse_half()
            queue, text = self._broker.transactions.half_queue, with_real_queue(text, name, queue_id)
        position, offset = self._appender.stage(
            queue,
            frame.body,
            property_bytes(text, MAX_PROPERTY_BYTES if name[0] == "%" else SENT_PROPERTY_BYTES),
            code,
            header.flag,
            header.sys_flag & ~SYS_TRANSACTION_MASK,
            header.born_timestamp,
            connection.born_host,
            header.reconsume_times,
        )
        return _new_tuple(Staged, (frame, position, queue_id, offset, None, level, is_half, recall_handle))

    def _timed(self, text: str, level: int, is_half: bool) -> tuple[str, int]:
        """The properties of a message that may be sent to a time, and when it is due, ms; 0 for at once. Raises Refused."""
        if level:  # as HookUtils.checkIfTimerMessage: a level counts before a time
            return without_time(text), 0
        try:
            due_ms = time_asked(text, self._store.now_ms)
        except IllegalTime as fault:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, str(fault)) from None
        if due_ms and is_half:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a message cannot be both sent to a time and transactional")
        return text, due_ms

    def _refuse_half(self) -> None:
        """Raises Refused when too many half messages wait, those of this read aside."""
        transactions = self._broker.transactions
        if transactions.waiting >= MAX_HALF_MESSAGES:
            raise Refused(
                ResponseCode.SYSTEM_BUSY,
                f"system busy: {transactions.waiting} transactions have no outcome; this broker keeps {MAX_HALF_MESSAGES}",
            )

    def _topic(self, header: SendMessage) -> TopicConfig:
        """A topic that is not there, made if it may be. Raises Refused."""
        name = header.topic
        fault = names.topic_fault(name)
        if fault:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the specified topic is illegal: {fault}")
        if name in names.UNSENDABLE_TOPICS:
            raise Refused(ResponseCode.NO_PERMISSION, f"sending to the topic {name} is forbidden")
        end = self._broker.store.end
        if name.startswith(names.RETRY_PREFIX):
            return self._broker.topics.put(TopicConfig(name, 1, 1), end)
        created = self._broker.topics.auto_create(name, header.default_topic, header.default_topic_queue_nums, end)
        if created is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{name}] not exist, create it first, or start the broker with topic creation allowed",
            )
        return created

    def _retried(self, header: SendMessage, name: str, queue_id: int, text: str) -> tuple[str, int, str]:
        """A message that a client publishes to a retry topic itself: to the dead letters if it was tried enough."""
        group = name.removeprefix(names.RETRY_PREFIX)
        settings = self._broker.group_configs.ensure(group)
        if settings is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        # SendMessageProcessor.handleRetryAndDLQ: the client's limit counts before the group's.
        limit = settings.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        if header.reconsume_times < limit:
            return name, queue_id, text
        dead = self._topics.ensure(TopicConfig(names.dlq_topic(group), 1, 1), self._store.end)
        return dead.name, 0, props.without(text, props.DELAY)

    def _place_batch(
        self, connection: Connection, frame: Frame, header: SendMessage, name: str, queue_id: int
    ) -> Staged:
        if len(frame.body) > MAX_BODY_BYTES:
            raise too_large("batch", frame.body)
        if header.sys_flag & SYS_TRANSACTION_MASK or _DELAY_MARK in header.properties or TIME_MARK in header.properties:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a batch can be neither delayed nor transactional")
        if not frame.body:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")
        store = self._store
        queue = store.queues.get((name, queue_id)) or store.queue(name, queue_id)
        try:
            positions, first_offset = self._appender.stage_batch(
                queue,
                frame.body,
                props.appended(header.properties, props.CLUSTER, self._cluster).encode(),
                header.sys_flag,
                header.born_timestamp,
                connection.born_host,
                header.reconsume_times,
            )
        except MessageError as error:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, str(error)) from None
        ids = ",".join([f"{self._host_hex}%016X"] * len(positions)) % tuple(positions)
        return Staged(frame, positions[0], queue_id, first_offset, ids, 0)


def too_large(what: str, body: bytes) -> Refused:
    return Refused(ResponseCode.MESSAGE_ILLEGAL, f"the {what} has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")


def property_bytes(text: str, limit: int = MAX_PROPERTY_BYTES) -> bytes:
    """Raises Refused beyond the limit. A message that is sent leaves room for what retries add."""
    data = text.encode()
    if len(data) > limit:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the properties have {len(data)} bytes with the broker's own; {limit} are allowed",
        )
    return data


def _sent_ext(ids: str, queue_id: int, queue_offset: int, recall_handle: str) -> Ext:
    return {**REGION_EXT, "msgId": ids, "queueId": queue_id, "queueOffset": queue_offset, "recallHandle": recall_handle}


def _delay_level(text: str, delays: Delays) -> int:
    """The delay level that a message asks for; 0 for none. Raises Refused if it is not a number."""
    value = props.find(text, props.DELAY)
    if value is None:
        return 0
    try:
        return max(delays.level(int(value)), 0)
    except ValueError:
        raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the delay level {value[:40]!r} is not a number") from None


def delayed(broker: Broker, level: int, name: str, queue_id: int, text: str) -> tuple[ConsumeQueue, str, int]:
    """Where a delayed message waits, its properties there, and when it is due (ms), for the index."""
    text = with_real_queue(text, name, queue_id)
    return broker.delays.queue(level), text, broker.delays.due_ms(level, broker.store.now_ms)


def send_back(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CONSUMER_SEND_MSG_BACK: a message that a consumer could not handle, to be tried again later or given up."""
    header = read(SendBack, frame.ext)
    settings = broker.group_configs.ensure(header.group)
    if settings is None:
        remark = f"subscription group [{header.group}] does not exist"
        return answer(frame, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
    # A group without retries: Apache's broker says success, too, and the message is gone.
    if settings.retry_queues <= 0:
        return answer(frame)
    record = broker.store.record_at(header.offset)
    if record is None or not record.may_be(header.origin_msg_id):
        remark = f"look message by offset failed, {header.offset}"
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    limit = settings.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
    given_up = record.reconsume_times >= limit or header.delay_level < 0
    # Each try waits a level longer, from 3 (10 s) on: SendMessageProcessor.asyncConsumerSendMsgBack.
    level = 0 if given_up else broker.delays.level(header.delay_level or 3 + record.reconsume_times)
    text = _sent_back(record, header)
    if level and not _has_room(header, text, level):  # of an earlier release, or sent to a retry topic by a client
        log.warning("retry_has_no_room", group=header.group, topic=record.topic, hint="it is a dead letter now")
        level = 0
    with broker.appender.batch():
        if level:
            _stage_retry(broker, header, record, text, settings, level)
        else:
            _stage_dead(broker, header, record, text)
    if level:
        broker.delays.expect(level)
    return answer(frame)


def _has_room(header: SendBack, text: str, level: int) -> bool:
    text = props.appended(text, props.DELAY, str(level))
    whole = with_real_queue(text, names.retry_topic(header.group), MAX_RETRY_QUEUES)
    return len(whole.encode()) <= MAX_PROPERTY_BYTES


def _stage_retry(
    broker: Broker, header: SendBack, record: Record, text: str, settings: GroupConfig, level: int
) -> None:
    """A record once more, one try older, delayed for the retry topic."""
    queues = settings.retry_queues
    topic = broker.topics.ensure(TopicConfig(names.retry_topic(header.group), queues, queues), broker.store.end)
    text = props.appended(text, props.DELAY, str(level))
    queue_id = random.randrange(topic.write_queues or 1)
    queue, text, code = delayed(broker, level, topic.name, queue_id, text)
    broker.appender.stage_again(record, queue, property_bytes(text), code, reconsume_times=record.reconsume_times + 1)


def _stage_dead(broker: Broker, header: SendBack, record: Record, text: str) -> None:
    """A record once more, one try older, among the dead letters. Properties that do not fit are dropped, and named."""
    topic = broker.topics.ensure(TopicConfig(names.dlq_topic(header.group), 1, 1), broker.store.end)
    if len(text.encode()) > MAX_PROPERTY_BYTES:
        text, dropped = props.shortened(text, SENT_PROPERTY_BYTES)
        names_dropped = " ".join(dropped)[:MAX_NAMED_CHARS]
        log.warning("dead_letter_shortened", group=header.group, topic=record.topic, properties=names_dropped)
    queue = broker.store.queue(topic.name, 0)
    times = record.reconsume_times + 1
    broker.appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def _sent_back(record: Record, header: SendBack) -> str:
    """The properties of a message that was sent back: where it comes from, and no delay of its own."""
    # A delay of its own has passed; left in, it would be delayed by it again.
    text = props.without(props.without(record.properties, props.DELAY), props.WAIT)
    # The first topic and the first id stay through all retries: by them a message is known again.
    if props.find(text, props.RETRY_TOPIC) is None:
        text = props.appended(text, props.RETRY_TOPIC, record.topic)
    if props.find(text, props.ORIGIN_MESSAGE_ID) is None:
        text = props.appended(text, props.ORIGIN_MESSAGE_ID, record.offset_id)
    return props.appended(text, props.WAIT, "false")
