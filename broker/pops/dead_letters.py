"""Copies of popped messages: in the group's dead-letter topic, or in its retry topic."""

from __future__ import annotations

from typing import Final

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import TopicConfig
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record
from ...protocol.names import tag_code
from ..groups.group import ConsumerGroups
from ..groups.settings import GroupConfigs
from ..messages.appender import Appender, property_bytes
from ..messages.sending import sent_back
from ..messages.topics import Topics
from .deliveries import Delivery
from .pool import QueueDeliveries

log = structlog.get_logger("rocketlet.pops")


_OF_OTHER_TIMES: Final = (props.DELAY, props.WAIT)  # with them, the copy would be delayed again


class DeadLetterWriter:
    def __init__(self, topics: Topics, appender: Appender, settings: GroupConfigs, groups: ConsumerGroups) -> None:
        self._topics = topics
        self._settings = settings
        self._groups = groups
        self._appender = appender
        self._store = appender.store

    def dead_letter(self, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        """Store a copy in the group's dead-letter topic. Raises StoreError if the message cannot be read, or the copy cannot
        be stored; LimitExceeded if the topic cannot be created because there are too many."""
        record = deliveries.messages.message(delivery.offset)
        name = names.dlq_topic(deliveries.group)
        topic = self._topics.ensure(TopicConfig(name, 1, 1), self._store.end)
        text = _dead(record, reason)
        with self._appender.batch():
            queue = self._store.queue(topic.name, 0)
            times = record.reconsume_times + max(delivery.attempts - 1, 0)
            self._appender.stage_again(record, queue, text.encode(), tag_code(text), reconsume_times=times)
        log.warning(
            "message_given_up",
            group=deliveries.group, topic=record.topic, queue=record.queue_id, offset=record.queue_offset,
            attempts=delivery.attempts, reason=reason,
        )  # fmt: skip

    def may_send_back(self, name: str) -> bool:
        """Return True if by its settings the group is not ordered and has retry queues, and a member subscribes to its
        retry topic."""
        settings, group, topic = self._settings.get(name), self._groups.get(name), names.retry_topic(name)
        may_be = settings is not None and not settings.consume_orderly and settings.retry_queues > 0
        return may_be and group is not None and any(topic in item.subscriptions for item in group.members.values())

    def send_back(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        """Store a copy for members that pull, as if one of them had sent the message back. Raises as `dead_letter` does."""
        record = deliveries.messages.message(delivery.offset)
        settings = self._settings.get(deliveries.group)
        queues = settings.retry_queues if settings is not None else 1
        topic = self._topics.ensure(TopicConfig(names.retry_topic(deliveries.group), queues, queues), self._store.end)
        text = sent_back(record, "")
        with self._appender.batch():
            queue = self._store.queue(topic.name, delivery.offset % (topic.write_queues or 1))
            times = record.reconsume_times + delivery.attempts
            self._appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def _dead(record: Record, reason: str) -> str:
    """Return the properties of a dead letter, with its origin and the reason if there is room for them."""
    text = record.properties
    reason = "".join(char if char.isprintable() else " " for char in reason)  # a client may have sent it
    for name in (*_OF_OTHER_TIMES, props.LITE_QUEUE, props.LITE_OFFSET):
        text = props.without(text, name)
    message_id = props.find(text, props.UNIQUE_KEY) or record.offset_id
    topic = props.find(text, props.RETRY_TOPIC) or record.topic
    for name, value in (
        (props.DLQ_ORIGIN_TOPIC, topic),
        (props.DLQ_ORIGIN_MESSAGE_ID, message_id),
        (props.DLQ_REASON, reason),
    ):
        longer = props.appended(props.without(text, name), name, value)
        if len(longer.encode()) <= MAX_PROPERTY_BYTES:
            text = longer
    return text
