"""Messages that are tried again, or given up: sent back by a consumer, or published to a retry topic."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import TopicConfig
from ...protocol.config import MAX_PROPERTY_BYTES, SENT_PROPERTY_BYTES
from ...protocol.group_config import GroupConfig
from ...protocol.headers import SendBack, SendMessage
from ...protocol.message import Record, tried
from ...protocol.subscription import tag_code
from ..config import MAX_NAMED_CHARS, MAX_REASON_CHARS, MAX_RETRY_QUEUES
from ..sessions.refusal import Reason, Refusal
from .appender import Appender
from .delays import Delays
from .properties import property_bytes, with_real_queue
from .topics import Topics

log = structlog.get_logger("rocketlet.sending")


class Retries:
    """`has_group(name)`: whether the broker knows the group. `ensure_group(name)`: its settings, made if that is allowed;
    None without them."""

    def __init__(
        self,
        topics: Topics,
        appender: Appender,
        delays: Delays,
        has_group: Callable[[str], bool],
        ensure_group: Callable[[str], GroupConfig | None],
        note_sent_back: Callable[[str, str], None],
    ) -> None:
        self._topics = topics
        self._store = appender.store
        self._appender = appender
        self._delays = delays
        self._has_group = has_group
        self._ensure_group = ensure_group
        self._note_sent_back = note_sent_back

    def check_new_topic(self, topic: str) -> None:
        """A client's send may make the topic of a group's retries or dead letters only if there is the group: a mistyped name
        would make a group that nobody reads, too. Raises Refusal."""
        for prefix in (names.RETRY_PREFIX, names.DLQ_PREFIX):
            group = topic.removeprefix(prefix)
            if group != topic and not self._has_group(group):
                raise Refusal(
                    Reason.NO_GROUP,
                    f"the topic {topic} belongs to the group {group}, which this broker does not know; "
                    "check the name, or create the group",
                )

    def place_of(self, header: SendMessage, queue_id: int, text: str) -> tuple[str, int, str]:
        """Topic, queue and properties of a message that a client publishes to a retry topic itself: among the dead letters if
        it was tried enough. Raises Refusal."""
        name = header.topic
        group = name.removeprefix(names.RETRY_PREFIX)
        settings = self._settings(group)
        # SendMessageProcessor.handleRetryAndDLQ: the client's limit counts before the group's.
        limit = settings.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        if header.reconsume_times < limit:
            return name, queue_id, text
        dead = self._topics.ensure(TopicConfig(names.dlq_topic(group), 1, 1), self._store.end)
        return dead.name, 0, props.without(text, props.DELAY)

    def send_back(self, header: SendBack) -> None:
        """A message that a consumer could not handle, to be tried again later or given up. Raises Refusal and StoreFull."""
        settings = self._settings(header.group)
        # A group without retries: Apache's broker says success, too, and the message is gone.
        if settings.retry_queues <= 0:
            return
        record = self._store.record_at(header.offset)
        if record is None or not record.may_be(header.origin_msg_id):
            raise Refusal(Reason.ILLEGAL, f"look message by offset failed, {header.offset}")
        limit = settings.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        given_up = record.reconsume_times >= limit or header.delay_level < 0
        # Each try waits a level longer, from 3 (10 s) on: SendMessageProcessor.asyncConsumerSendMsgBack.
        level = 0 if given_up else self._delays.level(header.delay_level or 3 + tried(record.reconsume_times))
        text = sent_back(record, _reason(header, record, given_up=given_up))
        if level and not _has_room(
            header.group, text, level
        ):  # from an earlier release, or sent to a retry topic by a client
            log.warning("retry_has_no_room", group=header.group, topic=record.topic, hint="it is a dead letter now")
            level = 0
        with self._appender.batch():
            if level:
                self._stage_retry(header.group, record, text, settings, level)
            else:
                self._stage_dead(header.group, record, text)
        self._note_sent_back(record.topic, header.group)
        if level:
            self._delays.expect(level)

    def _settings(self, group: str) -> GroupConfig:
        """Raises Refusal."""
        settings = self._ensure_group(group)
        if settings is None:
            raise Refusal(Reason.NO_GROUP, f"subscription group [{group}] does not exist")
        return settings

    def _stage_retry(self, group: str, record: Record, text: str, settings: GroupConfig, level: int) -> None:
        """A record once more, one try older, delayed for the retry topic."""
        queues = settings.retry_queues
        topic = self._topics.ensure(TopicConfig(names.retry_topic(group), queues, queues), self._store.end)
        text = props.appended(text, props.DELAY, str(level))
        queue_id = random.randrange(topic.write_queues or 1)
        queue, text, code = self._delays.place_of(level, topic.name, queue_id, text)
        times = record.reconsume_times + 1
        self._appender.stage_again(record, queue, property_bytes(text), code, reconsume_times=times)

    def _stage_dead(self, group: str, record: Record, text: str) -> None:
        """A record once more, one try older, among the dead letters. Properties that do not fit are dropped, and named."""
        topic = self._topics.ensure(TopicConfig(names.dlq_topic(group), 1, 1), self._store.end)
        if len(text.encode()) > MAX_PROPERTY_BYTES:
            text, dropped = props.shortened(text, SENT_PROPERTY_BYTES)
            names_dropped = " ".join(dropped)[:MAX_NAMED_CHARS]
            log.warning("dead_letter_shortened", group=group, topic=record.topic, properties=names_dropped)
        queue = self._store.queue(topic.name, 0)
        times = record.reconsume_times + 1
        self._appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def _has_room(group: str, text: str, level: int) -> bool:
    text = props.appended(text, props.DELAY, str(level))
    whole = with_real_queue(text, names.retry_topic(group), MAX_RETRY_QUEUES)
    return len(whole.encode()) <= MAX_PROPERTY_BYTES


def _reason(header: SendBack, record: Record, *, given_up: bool) -> str:
    """Why the message was not handled, as its consumer says. Apache's clients do not say it."""
    shown = (header.reason or "")[:MAX_REASON_CHARS]
    said = "".join(char if char.isprintable() else " " for char in shown)
    if header.delay_level < 0:
        return said or "its consumer gave it up"
    if given_up:
        tried = f"tried {record.reconsume_times + 1} times"
        return f"{tried}; {said}" if said else tried
    return said


def sent_back(record: Record, reason: str) -> str:
    """The properties of a message that was sent back: where it comes from, why if there is room for that, and no delay of
    its own."""
    # A delay of its own has passed; left in, it would be delayed by it again.
    text = props.without(props.without(record.properties, props.DELAY), props.WAIT)
    # The first topic and the first id stay through all retries: by them a message is known again.
    if props.find(text, props.RETRY_TOPIC) is None:
        text = props.appended(text, props.RETRY_TOPIC, record.topic)
    if props.find(text, props.ORIGIN_MESSAGE_ID) is None:
        text = props.appended(text, props.ORIGIN_MESSAGE_ID, record.offset_id)
    text = props.appended(props.without(text, props.DLQ_REASON), props.WAIT, "false")
    longer = props.appended(text, props.DLQ_REASON, reason)
    return longer if reason and len(longer.encode()) <= SENT_PROPERTY_BYTES else text
