"""The properties of a message: their limit, and where a message that waits is meant to go."""

from __future__ import annotations

from ...protocol import properties as props
from ...protocol.config import MAX_PROPERTY_BYTES
from ...protocol.message import Record
from ..sessions.refusal import Reason, Refusal


def property_bytes(text: str, limit: int = MAX_PROPERTY_BYTES) -> bytes:
    """Raises Refusal beyond the limit. A message that is sent leaves room for what retries add."""
    data = text.encode()
    if len(data) > limit:
        raise Refusal(
            Reason.ILLEGAL_MESSAGE,
            f"the properties have {len(data)} bytes with the broker's own; {limit} are allowed",
        )
    return data


def with_real_queue(text: str, topic: str, queue_id: int) -> str:
    """The properties of a delayed or half message: where it is meant to go."""
    text = props.without(props.without(text, props.REAL_TOPIC), props.REAL_QUEUE_ID)
    return props.appended(props.appended(text, props.REAL_TOPIC, topic), props.REAL_QUEUE_ID, str(queue_id))


def real_queue(record: Record) -> tuple[str, int]:
    topic = props.find(record.properties, props.REAL_TOPIC) or ""
    return topic, int(props.find(record.properties, props.REAL_QUEUE_ID) or 0)
