"""Copies of messages that nobody could handle: among the group's dead letters, or in its retry topic."""

from __future__ import annotations

from typing import Final

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import TopicConfig
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record
from ...protocol.subscription import tag_code
from ..groups.members import ConsumerGroups
from ..groups.settings import GroupConfigs
from ..messages.appender import Appender
from ..messages.properties import property_bytes
from ..messages.retries import sent_back
from ..messages.topics import Topics
from .deliveries import QueueDeliveries
from .states import Delivery

log = structlog.get_logger("rocketlet.pops")

_OF_OTHER_TIMES: Final = (props.DELAY, props.WAIT)  # left in, it would be delayed once more


class Letters:
    def __init__(self, topics: Topics, appender: Appender, settings: GroupConfigs, groups: ConsumerGroups) -> None:
        self._topics = topics
        self._settings = settings
        self._groups = groups
        self._appender = appender
        self._store = appender.store

    def bury(self, deliveries: QueueDeliveries, delivery: Delivery, reason: str) -> None:
        """Stores the copy. Raises StoreError for a message that cannot be read, or a copy that cannot be stored."""
        record = self._store.message(deliveries.queue, delivery.offset)
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

    def are_sent_back(self, name: str) -> bool:
        """Whether messages of a group may be sent back: it keeps no order, and somebody reads its retry topic."""
        settings, group, topic = self._settings.ensure(name), self._groups.get(name), names.retry_topic(name)
        may_be = settings is not None and not settings.consume_orderly and settings.retry_queues > 0
        return may_be and group is not None and any(topic in item.subscriptions for item in group.members.values())

    def send_back(self, deliveries: QueueDeliveries, delivery: Delivery) -> None:
        """Stores the copy for members that pull, as if one of them had sent the message back. Raises as `bury` does."""
        record = self._store.message(deliveries.queue, delivery.offset)
        settings = self._settings.ensure(deliveries.group)
        queues = settings.retry_queues if settings is not None else 1
        topic = self._topics.ensure(TopicConfig(names.retry_topic(deliveries.group), queues, queues), self._store.end)
        text = sent_back(record, "")
        with self._appender.batch():
            queue = self._store.queue(topic.name, delivery.offset % (topic.write_queues or 1))
            times = record.reconsume_times + delivery.attempts
            self._appender.stage_again(record, queue, property_bytes(text), tag_code(text), reconsume_times=times)


def _dead(record: Record, reason: str) -> str:
    """The properties of a dead letter: where it comes from and why, if there is room for that."""
    text = record.properties
    for name in _OF_OTHER_TIMES:
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
