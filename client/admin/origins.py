"""Where the original of a copy lies: a property that only copies to another cluster have.

Brokers keep a message's properties when they put it into a group's retry topic or among its dead letters. So each kind of
topic has a property of its own: a dead letter whose message was a copy is no copy of a dead letter.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ...protocol import names
from ...protocol import properties as props
from ..message import Message
from ..sending.outgoing import PROPERTY_BYTES

ORIGIN: Final = "MIRRORED_FROM"
"""A copy's property: `broker:queue:offset` of its original."""
_DEAD: Final = f"{ORIGIN}_DLQ"
_RETRY: Final = f"{ORIGIN}_RETRY"
ORIGINS: Final = frozenset((ORIGIN, _DEAD, _RETRY))

_TEXT: Final = re.compile(r"(.+):([0-9]{1,10}):([0-9]{1,19})", re.DOTALL)  # Java's int and long


class Origin(NamedTuple):
    broker_name: str
    queue_id: int
    offset: int


def property_of(topic: str) -> str:
    """The name of the property in messages of a topic."""
    if topic.startswith(names.DLQ_PREFIX):
        return _DEAD
    return _RETRY if topic.startswith(names.RETRY_PREFIX) else ORIGIN


def origin_of(message: Message) -> Origin | None:
    """None for a message that is no copy."""
    found = _TEXT.fullmatch(message.properties.get(property_of(message.record.topic), ""))
    return None if found is None else Origin(found[1], int(found[2]), int(found[3]))


def marked(text: str, message: Message) -> tuple[str, list[str]]:
    """A copy's properties with its origin, and the names of properties for which there was no room."""
    name = property_of(message.record.topic)
    value = f"{message.queue.broker_name}:{message.queue_id}:{message.queue_offset}"
    room = PROPERTY_BYTES - len(name) - len(value.encode()) - 2
    dropped: list[str] = []
    if len(text.encode()) > room:
        text, dropped = props.shortened(text, room)
    return props.appended(text, name, value), dropped
