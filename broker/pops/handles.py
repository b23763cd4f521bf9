"""A receipt handle: Apache's text, which gRPC clients take as it is and remoting ones read (ExtraInfoUtil).

    start offset, pop time ms, invisible ms, revive queue, mark, broker name, queue id, offset

joined by blanks. A delivery is known by queue, offset and pop time. Nothing else of it changes while it lives, so a handle
never has to be replaced. mark: 0 for the topic itself, 1 for the group's retry topic.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TOPIC_MARK: Final = 0
RETRY_MARK: Final = 1

_MAX_DIGITS: Final = 19  # a long's


class Handle(NamedTuple):
    queue_id: int
    offset: int
    pop_ms: int
    mark: int
    broker_name: str


def encode_handle(
    broker_name: str, queue_id: int, offset: int, pop_ms: int, invisible_ms: int, mark: int = TOPIC_MARK
) -> str:
    return f"{offset} {pop_ms} {invisible_ms} 0 {mark} {broker_name} {queue_id} {offset}"


def decode_handle(text: str) -> Handle | None:
    """None if the text is no handle. Fields that Apache's brokers append are ignored."""
    fields = text.split(" ", 9)
    if len(fields) < 8:
        return None
    numbers = fields[1], fields[4], fields[6], fields[7]
    # int() would take signs, blanks, underscores and digits of other scripts, too
    if not all(field.isascii() and field.isdigit() and len(field) <= _MAX_DIGITS for field in numbers):
        return None
    pop_ms, mark, queue_id, offset = map(int, numbers)
    return Handle(queue_id, offset, pop_ms, mark, fields[5])
