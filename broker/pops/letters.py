"""Dead letters: the copy of a message that nobody could handle, in the group's topic for such."""

from __future__ import annotations

from typing import Final

import structlog

from ...protocol import names
from ...protocol import properties as props
from ...protocol.bodies import TopicConfig
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record
from ...protocol.subscription import tag_code
from ..messages.appender import Appender
from ..messages.topics import Topics
from .deliveries import Deliveries
from .states import Delivery

log = structlog.get_logger("rocketlet.pops")

_OF_OTHER_TIMES: Final = (props.DELAY, props.WAIT)  # left in, it would be delayed once more


class Letters:
    def __init__(self, topics: Topics, appender: Appender) -> None:
        self._topics = topics
        self._appender = appender
        self._store = appender.store

    def bury(self, deliveries: Deliveries, delivery: Delivery, reason: str) -> None:
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
