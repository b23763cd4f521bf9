"""The meaning of SEND and CONSUMER_SEND_MSG_BACK for both protocol servers: checks, topic, queue, retries, dead letters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import GroupConfig, TopicConfig, Work
from ...protocol.codes import SYS_TRANSACTION_MASK
from ...protocol.config import (
    MAX_BODY_BYTES,
    MAX_PROPERTY_BYTES,
    MAX_REQUEST_HEADER_BYTES,
    MAX_RETRY_QUEUES,
    SENT_PROPERTY_BYTES,
)
from ...protocol.fast import EncodedSends
from ...protocol.headers import SendBack, SendMessage
from ...protocol.message import PIECE_BYTES, PIECE_MESSAGES, MessageError, Piece, Record, split, tried
from ...protocol.names import tag_code
from ..config import (
    BATCH_RUN_BYTES,
    BATCH_RUN_MESSAGES,
    BATCH_TURN_BYTES,
    BATCH_TURN_MESSAGES,
    MAX_CHECKED_SENDS,
    MAX_NAMED_CHARS,
    MAX_PRIORITY,
    MAX_REASON_CHARS,
    REGION,
    BrokerConfig,
)
from ..sessions.refusal import Reason, Refusal
from ..store.index import ConsumeQueue
from .appender import Appender, property_bytes, with_real_queue
from .dedup import Deduplication, FirstMessage, key_of
from .delays import Delays
from .lite import LiteTopics, StagedLite
from .recalls import handle_of
from .statistics import Statistics
from .timers import TIME_PREFIX, IllegalTime, Timers, time_asked, waiting_text, without_time
from .topics import Topics
from .transactions import Transactions, half_properties

log = structlog.get_logger("rocketlet.sending")


# ------------------------------------------------------------------------------
# Sends messages: the checks, the topic and queue that a message goes to, and the place where a delayed or half
# message waits.
#
# The messages of consecutive sends of a socket read are staged and stored together, by one append.


_new_tuple = tuple.__new__
_DELAY_PROPERTY: Final = props.DELAY + props.NAME_END
_LATER_MARK: Final = "DEL"  # part of the names of all properties that delay a message
_TAGS_MARK: Final = props.TAGS + props.NAME_END
_WAIT_PROPERTY: Final = props.WAIT + props.NAME_END
_TRANSACTION_MARK: Final = props.TRANSACTION + props.NAME_END
_PRIORITY_PROPERTY: Final = props.PRIORITY + props.NAME_END
_LITE_PROPERTY: Final = props.LITE_TOPIC + props.NAME_END
_LITE_BYTES: Final = _LITE_PROPERTY.encode()


# limits for the compiled module: bytes of a body, bytes of properties, bytes and messages of a batch, bytes and messages of
# a piece of a batch, bytes of a header
_RUN_LIMITS: Final = (
    MAX_BODY_BYTES,
    SENT_PROPERTY_BYTES,
    BATCH_RUN_BYTES,
    BATCH_RUN_MESSAGES,
    PIECE_BYTES,
    PIECE_MESSAGES,
    MAX_REQUEST_HEADER_BYTES,
)
TO_A_TIME: Final = -1  # the delay level of a message that has a delivery time instead


class LongBatch(Exception):
    """A batch is too large to be staged in one piece, because other clients would wait for too long. `storing_batch`
    stores it in pieces."""


class Placed(NamedTuple):
    """The place of a staged message: its position in the commit log, its queue id, and its offset in the queue where it
    is stored. A half message is stored in the half queue, and `half` has its properties. `positions` are those of a
    batch's messages. `recall_handle` is None or empty for a message that cannot be recalled."""

    position: int
    queue_id: int
    queue_offset: int
    positions: list[int] | None = None
    delay_level: int = 0
    half: str = ""
    recall_handle: str | None = None
    lite: StagedLite | None = None


_PLACED_RUN: Final = Placed(-1, -1, -1)  # stands for messages whose places are in `EncodedSends`


class _Later(NamedTuple):
    """The queue in which a message waits for its delivery, and the delivery time. `level` is the delay level, or
    TO_A_TIME for a delivery time."""

    queue: ConsumeQueue | None
    due_ms: int
    level: int
    recall_handle: str | None = None


_AT_ONCE: Final = _Later(None, 0, 0)


class SendService:
    """Stores messages. `placed` has the staged messages, which each protocol server commits before it returns to the event
    loop."""

    def __init__(
        self,
        topics: Topics,
        appender: Appender,
        delays: Delays,
        transactions: Transactions,
        retries: Retries,
        timers: Timers,
        lites: LiteTopics,
        dedup: Deduplication,
        config: BrokerConfig,
    ) -> None:
        self._topics = topics
        self._lites = lites
        self._dedup = dedup
        self._store = appender.store
        self._appender = appender
        self._delays = delays
        self._transactions = transactions
        self._retries = retries
        self._timers = timers
        self._broker_name = config.name
        self._cluster = config.cluster
        self._cluster_text = f"{props.CLUSTER}{props.NAME_END}{config.cluster}"
        self._cluster_end = props.PAIR_END + self._cluster_text
        self._checked: set[tuple[str, int]] = set()  # topics and queues that have passed the checks of `_queue_id`
        self._checked_at = -1  # generation at which `_checked` is valid
        # Queues to which an account has sent a plain message, by account, topic and queue id, for the compiled module
        self._passed: dict[bytes, tuple[ConsumeQueue, bytes]] = {}
        host = self._store.store_host
        self._broker_texts = host, host.hex().upper().encode(), self._cluster_text.encode(), REGION.encode()
        self.placed: list[Placed] = []

    def stage(
        self, header: SendMessage, body: bytes, born_host: bytes, pieces: Sequence[Piece] | None = None
    ) -> Placed:
        """Stage a message or a batch, and return its place. Raises Refusal, and LongBatch for a batch that
        `storing_batch` must store in pieces. If this raises, nothing of the message or batch is staged.

        pieces: the pieces of the batch to stage; None for all of it."""
        if not self.placed:
            self._appender.begin()
        kept = self._store.staged
        try:
            placed = self._stage(header, body, born_host, pieces)
        except BaseException:
            self._store.roll_back(kept)  # discard the part of a batch that was staged before the error
            self._lites.restage(item.lite for item in self.placed)
            raise
        self.placed.append(placed)
        return placed

    def stage_run(self, data: bytes, at: int, account: bytes, born_host: bytes) -> EncodedSends | None:
        """Stage the next plain sends with the compiled module, as long as their queues have passed the checks before
        (`pass_queue`).

        Args:
            data: The bytes of a socket.
            at: Where the first send begins.
            account: The access key of the account that sends, empty if everybody may send.
            born_host: The client's address.

        Returns:
            The staged sends. None if the next request is not a complete send, or needs `stage` because of its queue or
            its properties.
        """
        if not self._passed or self._checked_at != self._topics.generation.number:
            return None
        if not self.placed:
            self._appender.begin()
        sends = self._store.stage_sends(data, at, account, self._passed, born_host, self._broker_texts, _RUN_LIMITS)
        if sends is not None:
            self.placed.append(_PLACED_RUN)
        return sends

    def pass_queue(self, account: bytes, header: SendMessage) -> None:
        """Allow `stage_run` to stage the account's next sends to the queue of a send that has just passed every check, until
        the generation changes or too many queues have passed. Queues of retry, dead-letter and lite topics never pass."""
        name, queue_id = key = header.topic, header.queue_id
        queue = self._store.queues.get(key)
        if queue is None or name[0] == "%" or key not in self._checked:
            return
        if len(self._passed) >= MAX_CHECKED_SENDS:
            self._passed.clear()
        self._passed[b"%b\0%b\0%d" % (account, name.encode(), queue_id)] = queue, queue.topic_record

    def storing_batch(self, header: SendMessage, body: bytes, born_host: bytes) -> Work[list[Placed]]:
        """Store a large batch in pieces, and return the place of each piece. The form of all messages is checked before
        any is stored. If a later piece fails, for example because the disk is full or the topic was deleted, or if the broker
        is killed, a part of the batch stays stored. Raises Refusal, StoreFull."""
        if len(body) > MAX_BODY_BYTES:
            raise too_large("batch", body)
        pieces: list[Piece] = []
        try:
            for piece in _pieces_without_lite(body, self._batch_properties(header)):
                pieces.append(piece)
                yield
        except MessageError as error:
            raise Refusal(Reason.ILLEGAL_MESSAGE, str(error)) from None
        stored: list[Placed] = []
        for piece in pieces:
            placed = self.stage(header, body, born_host, (piece,))
            self.commit()
            stored.append(placed)
            # all pieces go to one queue, even if the client has left its choice to the broker
            header = header._replace(queue_id=placed.queue_id)
            yield
        return stored

    def savepoint(self) -> tuple[int, int]:
        """Return how much is staged, for `roll_back`."""
        return self._store.staged if self.placed else 0, len(self.placed)

    def roll_back(self, savepoint: tuple[int, int]) -> None:
        """Discard the messages that were staged after a savepoint."""
        self._store.roll_back(savepoint[0])
        self._dedup.discard(self._store.end)
        del self.placed[savepoint[1] :]
        self._lites.restage(item.lite for item in self.placed)

    def commit(self) -> list[Placed]:
        """Store the staged messages in order, and return their places. If this raises, for example StoreFull, none of
        them is stored."""
        placed, self.placed = self.placed, []
        try:
            self._appender.commit()
        except BaseException:
            self._dedup.discard(self._store.end)
            raise
        # few messages need further work after they are stored
        others = [item for item in placed if item[4] or item[5] or item[7]]
        lites = [(item.lite, item.queue_offset) for item in others if item.lite is not None] if others else ()
        if lites:
            self._lites.append(lites)
        for position, _, queue_offset, _, delay_level, half, _, _ in others:
            if delay_level == TO_A_TIME:
                self._timers.schedule_stored()
            elif delay_level:
                self._delays.expect(delay_level)
            if half:
                self._transactions.expect(queue_offset, position, self._store.now_ms, half)
        return placed

    def _stage(self, header: SendMessage, body: bytes, born_host: bytes, pieces: Sequence[Piece] | None) -> Placed:
        name, queue_id = key = header.topic, header.queue_id
        if self._checked_at != self._topics.generation.number or key not in self._checked:
            queue_id = self._queue_id(header)
            topic = self._topics.get(name)
            if topic is not None and topic.has_dedup:  # the call of `_stage_once` finds the queue checked
                return self._stage_once(topic, header._replace(queue_id=queue_id), body, born_host, pieces)
        if header.batch:
            return self._stage_batch(header, body, born_host, queue_id, pieces)
        if len(body) > MAX_BODY_BYTES:
            raise too_large("message body", body)
        text, half, lite, later = header.properties, "", None, _AT_ONCE
        if name[0] == "%" and name.startswith(names.RETRY_PREFIX):
            name, queue_id, text = self._retries.target_of(header, queue_id, text)
        elif _LITE_PROPERTY in text or _PRIORITY_PROPERTY in text:
            if props.find(text, props.LITE_TOPIC):
                lite = self._lites.prepare(name, text, born_host, is_first=not self.placed)
                queue_id, text = lite.queue_id, lite.text
            elif _PRIORITY_PROPERTY in text:
                queue_id = self._queue_of_priority(name, text)
        is_half = _TRANSACTION_MARK in text and props.find(text, props.TRANSACTION) == "true"
        if _WAIT_PROPERTY in text and _DELAY_PROPERTY not in text and not is_half:
            # Apache's Java client sets WAIT=true in each message. Like Apache's broker (SendMessageProcessor), do not
            # store it, except in delayed and half messages.
            text = props.without(text, props.WAIT)
        text = text + self._cluster_end if text and text[-1] != props.PAIR_END else text + self._cluster_text
        if _LATER_MARK in text:
            later, text = self._later(text, name, queue_id, is_half)
        code = tag_code(text) if _TAGS_MARK in text else 0
        queue = self._store.queues.get((name, queue_id)) or self._store.queue(name, queue_id)
        if later is not _AT_ONCE:
            queue, code = later.queue or queue, later.due_ms
        elif is_half:
            self._refuse_half()
            half = text = half_properties(text, name, queue_id)
            queue = self._transactions.half_queue
        properties = text.encode()
        if len(properties) > SENT_PROPERTY_BYTES:
            properties = property_bytes(text, MAX_PROPERTY_BYTES if name[0] == "%" else SENT_PROPERTY_BYTES)
        position, offset = self._appender.stage(
            queue, body, properties, code, header.flag, header.sys_flag & ~SYS_TRANSACTION_MASK,
            header.born_timestamp, born_host, header.reconsume_times,
        )  # fmt: skip
        return _new_tuple(Placed, (position, queue_id, offset, None, later.level, half, later.recall_handle, lite))

    def _stage_once(
        self, topic: TopicConfig, header: SendMessage, body: bytes, born_host: bytes, pieces: Sequence[Piece] | None
    ) -> Placed:
        """Stage a message or batch of a topic with `dedup`. If its ids are known, stage nothing, and return the place where
        it was stored first. Raises Refusal."""
        if header.batch:
            if pieces is not None or len(body) > BATCH_TURN_BYTES:
                raise _without_dedup(topic, f"batches of more than {BATCH_TURN_BYTES} bytes")
            pieces = _pieces_of_short(body, self._batch_properties(header))
            keys = [key_of(text.decode()) for piece in pieces for text in piece.texts]
        else:
            self._refuse_waiting(topic, header.properties)
            keys = [key_of(header.properties)]
        ids = self._dedup.of(topic)
        known = self._dedup.find(ids, keys, is_first=not self.placed)
        if any(known):
            placed = _repeated(topic, known, header.batch)
            ids.repeated += len(known)
            return placed
        queue_key = header.topic, header.queue_id
        self._add_checked(queue_key)
        try:
            placed = self._stage(header, body, born_host, pieces)
        finally:
            self._checked.discard(queue_key)  # each send must be checked, because of its id
        stored = (
            FirstMessage(position, placed.queue_id, placed.queue_offset + number)
            for number, position in enumerate(placed.positions or (placed.position,))
        )
        self._dedup.add(ids, zip(keys, stored, strict=True))
        return placed

    def _refuse_waiting(self, topic: TopicConfig, text: str) -> None:
        """Raises Refusal for a delayed or transactional message, which is stored in its queue later."""
        is_half = _TRANSACTION_MARK in text and props.find(text, props.TRANSACTION) == "true"
        if is_half:
            raise _without_dedup(topic, "transactional messages")
        if (_DELAY_PROPERTY in text and _delay_level(text, self._delays)) or (
            TIME_PREFIX in text and self._due_ms(text, is_half)
        ):
            raise _without_dedup(topic, "delayed messages")

    def _add_checked(self, key: tuple[str, int]) -> None:
        generation = self._topics.generation.number
        if self._checked_at != generation or len(self._checked) >= MAX_CHECKED_SENDS:
            self._checked.clear()
            self._passed.clear()
            self._checked_at = generation
        self._checked.add(key)

    def _queue_id(self, header: SendMessage) -> int:
        """Return the id of the queue for a message. A queue that the client has chosen then counts as checked, except in a
        parent topic of lite topics. An unknown topic is created if that is allowed. Raises Refusal."""
        name, queue_id = header.topic, header.queue_id
        topic = self._topics.get(name)
        if topic is None or name in names.UNSENDABLE_TOPICS:
            topic = self._topic(header)
        if self._topics.forbids_send(topic):
            raise Refusal(Reason.NOT_PERMITTED, f"the broker[{self._broker_name}] sending message is forbidden")
        # A queue that can be read but not written is accepted, too, as in AbstractSendMessageProcessor.msgCheck.
        if queue_id >= topic.write_queues and queue_id >= topic.read_queues:
            raise Refusal(
                Reason.ILLEGAL,
                f"request queueId[{queue_id}] is illegal, {name} has {topic.write_queues} queues",
            )
        # queues of lite topics are not added to `_checked`, so the compiled module does not stage their messages
        if topic.is_lite:
            self._lites.refuse_other(topic, "" if header.batch else header.properties)
            return max(queue_id, 0)
        if queue_id < 0:
            # A client may leave the choice of the queue to the broker, as in SendMessageProcessor.
            return random.randrange(topic.write_queues or 1)
        if not topic.has_dedup:
            self._add_checked((name, queue_id))
        return queue_id

    def _queue_of_priority(self, name: str, text: str) -> int:
        """Return the queue of a message with a priority, whichever queue its sender chose: each level has a queue, and the
        last queue has all higher levels, as at Apache's broker of 5.4. Raises Refusal."""
        value = props.find(text, props.PRIORITY) or ""
        if not (value.isascii() and value.isdecimal() and int(value[:11]) <= MAX_PRIORITY):
            reason = f"priority: got {value[:40]!r}; expected a number from 0 to {MAX_PRIORITY}"
            raise Refusal(Reason.ILLEGAL_MESSAGE, reason)
        topic = self._topics.get(name)
        return max(min(int(value), (topic.write_queues if topic is not None else 1) - 1), 0)

    def _later(self, text: str, name: str, queue_id: int, is_half: bool) -> tuple[_Later, str]:
        """Return the queue in which a delayed message waits (`_AT_ONCE` for a message without a delay), and the
        message's properties there. Raises Refusal."""
        level = 0
        # A half message is not delayed, as in Apache's CommitLog.putMessage, because its producer decides when it is
        # committed.
        if _DELAY_PROPERTY in text and not is_half:
            level = _delay_level(text, self._delays)
        if level:  # a delay level has precedence over a delivery time, as in HookUtils.checkIfTimerMessage
            queue, text, due_ms = self._delays.prepare(level, name, queue_id, without_time(text))
            return _Later(queue, due_ms, level), text
        due_ms = self._due_ms(text, is_half) if TIME_PREFIX in text else 0
        if not due_ms:
            return _AT_ONCE, text
        handle = handle_of(text, name, self._broker_name, due_ms)
        return _Later(self._timers.queue, due_ms, TO_A_TIME, handle), waiting_text(text, due_ms, name, queue_id)

    def _due_ms(self, text: str, is_half: bool) -> int:
        """Return the delivery time of a message in ms; 0 for immediate delivery. Raises Refusal."""
        try:
            due_ms = time_asked(text, self._store.now_ms)
        except IllegalTime as fault:
            raise Refusal(Reason.ILLEGAL_MESSAGE, str(fault)) from None
        if due_ms and is_half:
            raise Refusal(Reason.ILLEGAL_MESSAGE, "a message cannot be both sent to a time and transactional")
        return due_ms

    def _refuse_half(self) -> None:
        """Raises Refusal if too many half messages wait, not counting those that are staged and not committed."""
        transactions = self._transactions
        if transactions.waiting >= transactions.most:
            raise Refusal(
                Reason.BUSY,
                f"system busy: {transactions.waiting} transactions have no outcome; maximum {transactions.most}",
            )

    def _topic(self, header: SendMessage) -> TopicConfig:
        """Return the topic of a message, created if it does not exist and may be created. Raises Refusal."""
        name = header.topic
        fault = names.topic_fault(name)
        if fault:
            raise Refusal(Reason.ILLEGAL, f"the specified topic is illegal: {fault}")
        if name in names.UNSENDABLE_TOPICS:
            raise Refusal(Reason.NOT_PERMITTED, f"sending to the topic {name} is forbidden")
        self._retries.check_new_topic(name)
        end = self._store.end
        if name.startswith(names.RETRY_PREFIX):
            return self._topics.put(TopicConfig(name, 1, 1), end)
        created = self._topics.auto_create(name, header.default_topic, header.default_topic_queue_nums, end)
        if created is None:
            raise Refusal(
                Reason.NO_TOPIC,
                f"topic[{name}] not exist, create it first, or start the broker with topic creation allowed",
            )
        return created

    def _stage_batch(
        self, header: SendMessage, body: bytes, born_host: bytes, queue_id: int, pieces: Sequence[Piece] | None
    ) -> Placed:
        if len(body) > MAX_BODY_BYTES:
            raise too_large("batch", body)
        if (
            header.sys_flag & SYS_TRANSACTION_MASK
            or _DELAY_PROPERTY in header.properties
            or TIME_PREFIX in header.properties
        ):
            raise Refusal(Reason.ILLEGAL_MESSAGE, "a batch can be neither delayed nor transactional")
        if not body:
            raise Refusal(Reason.ILLEGAL_MESSAGE, "the batch is empty")
        store, key = self._store, (header.topic, queue_id)
        queue = store.queues.get(key) or store.queue(*key)
        try:
            positions, first_offset = self._appender.stage_batch(
                queue,
                _pieces_of_short(body, self._batch_properties(header)) if pieces is None else pieces,
                header.sys_flag,
                header.born_timestamp,
                born_host,
                header.reconsume_times,
            )
        except MessageError as error:
            raise Refusal(Reason.ILLEGAL_MESSAGE, str(error)) from None
        return Placed(positions[0], queue_id, first_offset, positions)

    def _batch_properties(self, header: SendMessage) -> bytes:
        """Return the properties that are appended to each message of a batch."""
        return props.appended(header.properties, props.CLUSTER, self._cluster).encode()


def _pieces_without_lite(body: bytes, shared: bytes) -> Iterator[Piece]:
    """Yield the pieces of a batch (`split`). Raises Refusal for a message of a lite topic, because properties of messages in
    batches are not replaced."""
    may_be_lite = _LITE_BYTES in body or _LITE_BYTES in shared
    for piece in split(body, shared):
        if may_be_lite and any(
            _LITE_BYTES in text and props.find(text.decode(), props.LITE_TOPIC) for text in piece.texts
        ):
            raise Refusal(Reason.ILLEGAL_MESSAGE, "a batch cannot have messages of lite topics; send them one by one")
        yield piece


def _pieces_of_short(body: bytes, shared: bytes) -> list[Piece]:
    """Return the pieces of a small batch. Raises LongBatch for a batch that takes too long, before any record is
    made."""
    if len(body) > BATCH_TURN_BYTES:
        raise LongBatch
    pieces: list[Piece] = []
    messages = 0
    for piece in _pieces_without_lite(body, shared):
        messages += len(piece.flags)
        if messages > BATCH_TURN_MESSAGES:
            raise LongBatch
        pieces.append(piece)
    return pieces


def _repeated(topic: TopicConfig, known: Sequence[FirstMessage | None], batch: bool) -> Placed:
    """Return the place of messages that were stored before. Raises Refusal for a batch of which only some were, or whose
    messages are not next to each other, because a batch has one result."""
    first = known[0]
    if first is None or any(
        message is None or message[1:] != (first.queue_id, first.queue_offset + number)
        for number, message in enumerate(known)
    ):
        reason = f"some messages of the batch are stored in {topic.name} already; send its messages one by one"
        raise Refusal(Reason.ILLEGAL_MESSAGE, reason)
    positions = [message.position for message in known if message is not None] if batch else None
    return Placed(first.position, first.queue_id, first.queue_offset, positions)


def _without_dedup(topic: TopicConfig, what: str) -> Refusal:
    reason = f"the topic {topic.name} has the attribute dedup, which does not support {what}; use another topic"
    return Refusal(Reason.ILLEGAL_MESSAGE, reason)


def too_large(what: str, body: bytes) -> Refusal:
    return Refusal(Reason.ILLEGAL_MESSAGE, f"the {what} has {len(body)} bytes; maximum {MAX_BODY_BYTES}")


def _delay_level(text: str, delays: Delays) -> int:
    """Return the delay level in a message's properties, at most the highest one; 0 for none. Raises Refusal if it is not a
    number."""
    value = props.find(text, props.DELAY)
    if value is None:
        return 0
    try:
        return max(delays.level(int(value)), 0)
    except ValueError:
        raise Refusal(Reason.ILLEGAL_MESSAGE, f"the delay level {value[:40]!r} is not a number") from None


# ------------------------------------------------------------------------------
# Messages that are retried or dead-lettered: sent back by a consumer, or published to a retry topic.


class Groups(Protocol):
    """The settings of consumer groups."""

    def __contains__(self, name: str) -> bool:
        """Return True if the broker has settings of the group."""
        ...

    def ensure(self, name: str) -> GroupConfig | None:
        """Return the group's settings, created if that is allowed; None if there are none."""
        ...


class Retries:
    def __init__(
        self, topics: Topics, appender: Appender, delays: Delays, groups: Groups, statistics: Statistics
    ) -> None:
        self._topics = topics
        self._store = appender.store
        self._appender = appender
        self._delays = delays
        self._groups = groups
        self._statistics = statistics

    def check_new_topic(self, topic: str) -> None:
        """Raises Refusal for the retry or dead-letter topic of an unknown group, because a send with a mistyped name would
        create a topic that no member reads."""
        for prefix in (names.RETRY_PREFIX, names.DLQ_PREFIX):
            group = topic.removeprefix(prefix)
            if group != topic and group not in self._groups:
                raise Refusal(
                    Reason.NO_GROUP,
                    f"the topic {topic} belongs to the group {group}, which this broker does not know; "
                    "check the name, or create the group",
                )

    def target_of(self, header: SendMessage, queue_id: int, text: str) -> tuple[str, int, str]:
        """Return topic, queue id and properties for a message that a client sends to a retry topic: those of the
        dead-letter topic if the message has no attempts left. Raises Refusal."""
        name = header.topic
        group = name.removeprefix(names.RETRY_PREFIX)
        settings = self._settings(group)
        if not is_last_attempt(header.reconsume_times + 1, settings, header.max_reconsume_times):
            return name, queue_id, text
        dead = self._topics.ensure(TopicConfig(names.dlq_topic(group), 1, 1), self._store.end)
        return dead.name, 0, props.without(text, props.DELAY)

    def send_back(self, header: SendBack) -> None:
        """Retry a message that a consumer could not handle, or dead-letter it; drop it in a group without retries. Raises
        Refusal, StoreFull."""
        settings = self._settings(header.group)
        # In a group without retries, the message is dropped and the client gets success, as with Apache's broker.
        if settings.retry_queues <= 0:
            return
        record = self._store.record_at(header.offset)
        if record is None or not record.may_be(header.origin_msg_id):
            raise Refusal(Reason.ILLEGAL, f"look message by offset failed, {header.offset}")
        is_last = is_last_attempt(record.reconsume_times + 1, settings, header.max_reconsume_times)
        given_up = is_last or header.delay_level < 0
        # Unless the client names a level, each retry has a longer one, from 3 (10 s) to the highest, as in
        # SendMessageProcessor.asyncConsumerSendMsgBack.
        level = 0 if given_up else self._delays.level(header.delay_level or 3 + tried(record.reconsume_times))
        text = sent_back(record, _reason(header, record, given_up=given_up))
        if level and not _has_room(header.group, text, level):  # a client has sent the message to a retry topic
            log.warning("retry_has_no_room", group=header.group, topic=record.topic, hint="it is a dead letter now")
            level = 0
        with self._appender.batch():
            if level:
                self._stage_retry(header.group, record, text, settings, level)
            else:
                self._stage_dead(header.group, record, text)
        self._statistics.note_sent_back(record.topic, header.group)
        if level:
            self._delays.expect(level)

    def _settings(self, group: str) -> GroupConfig:
        """Return the settings of a group, created if that is allowed. Raises Refusal if there are none."""
        settings = self._groups.ensure(group)
        if settings is None:
            raise Refusal(Reason.NO_GROUP, f"subscription group [{group}] does not exist")
        return settings

    def _stage_retry(self, group: str, record: Record, text: str, settings: GroupConfig, level: int) -> None:
        """Stage a copy of a record for the retry topic, delayed and with one more attempt."""
        queues = settings.retry_queues
        topic = self._topics.ensure(TopicConfig(names.retry_topic(group), queues, queues), self._store.end)
        text = props.appended(text, props.DELAY, str(level))
        queue_id = random.randrange(topic.write_queues or 1)
        queue, text, code = self._delays.prepare(level, topic.name, queue_id, text)
        times = record.reconsume_times + 1
        self._appender.stage_again(record, queue, property_bytes(text), code, reconsume_times=times)

    def _stage_dead(self, group: str, record: Record, text: str) -> None:
        """Stage a copy of a record as a dead letter. If the properties together exceed
        MAX_PROPERTY_BYTES, the longest are dropped, those of users first, and their names are logged."""
        topic = self._topics.ensure(TopicConfig(names.dlq_topic(group), 1, 1), self._store.end)
        if len(text.encode()) > MAX_PROPERTY_BYTES:
            text, dropped = props.shortened(text, SENT_PROPERTY_BYTES)
            names_dropped = " ".join(dropped)[:MAX_NAMED_CHARS]
            log.warning("dead_letter_shortened", group=group, topic=record.topic, properties=names_dropped)
        queue = self._store.queue(topic.name, 0)
        times = record.reconsume_times + 1
        self._appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def max_attempts(settings: GroupConfig, own_retries: int | None = None) -> int:
    """Return how many attempts a message has, including the first one. `is_last_attempt` compares with this number,
    which gRPC clients get in their retry policy.

    Args:
        settings: the settings of the consumer group.
        own_retries: the client's own number of retries, which counts before the group's
            (SendMessageProcessor.handleRetryAndDLQ).
    """
    return (settings.retry_max_times if own_retries is None else own_retries) + 1


def is_last_attempt(attempts: int, settings: GroupConfig, own_retries: int | None = None) -> bool:
    """Return True if a message becomes a dead letter, because it was not handled in this many attempts."""
    return attempts >= max_attempts(settings, own_retries)


def _has_room(group: str, text: str, level: int) -> bool:
    text = props.appended(text, props.DELAY, str(level))
    whole = with_real_queue(text, names.retry_topic(group), MAX_RETRY_QUEUES)
    return len(whole.encode()) <= MAX_PROPERTY_BYTES


GIVEN_UP: Final = "its consumer gave it up"  # the reason of a dead letter for which the consumer has given none


def _reason(header: SendBack, record: Record, *, given_up: bool) -> str:
    """Return the reason why a message was not handled: for a dead letter, that it was given up or how many times it was
    tried, and the consumer's own text if it sent one, which Apache's clients do not. Empty for a retry without a text."""
    shown = (header.reason or "")[:MAX_REASON_CHARS]
    said = "".join(char if char.isprintable() else " " for char in shown)
    if header.delay_level < 0:
        return said or GIVEN_UP
    if given_up:
        tried = f"tried {record.reconsume_times + 1} times"
        return f"{tried}; {said}" if said else tried
    return said


def sent_back(record: Record, reason: str) -> str:
    """Return the properties of a message that was sent back: with its original topic and id, with the reason if there
    is room for it, and without its delay level."""
    # The message's own delay has passed, and must not apply to the retry.
    text = props.without(props.without(record.properties, props.DELAY), props.WAIT)
    # The original topic and id stay unchanged through all retries, so that the message can be recognized.
    if props.find(text, props.RETRY_TOPIC) is None:
        text = props.appended(text, props.RETRY_TOPIC, record.topic)
    if props.find(text, props.ORIGIN_MESSAGE_ID) is None:
        text = props.appended(text, props.ORIGIN_MESSAGE_ID, record.offset_id)
    text = props.appended(props.without(text, props.DLQ_REASON), props.WAIT, "false")
    longer = props.appended(text, props.DLQ_REASON, reason)
    return longer if reason and len(longer.encode()) <= SENT_PROPERTY_BYTES else text
