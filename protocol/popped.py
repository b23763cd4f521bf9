"""Records as a client that pops gets them, and the texts beside them (Apache's ExtraInfoUtil)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .codes import SYS_BORNHOST_V6, SYS_STOREHOST_V6
from .config import MAX_PROPERTY_BYTES
from .message import CHECKSUM_BYTES, CHECKSUM_MARK, MessageError

POP_CK: Final = "POP_CK"

_LONGER: Final = 12  # by which an IPv6 host is longer


def with_attempts(record: bytes, reconsume_times: int, handle: str) -> bytes:
    """A record that says how often it was tried before, and what to acknowledge it with. It has no checksum of its
    properties any more. A record whose properties leave no room for the handle goes without; the client makes it then.

    Raises MessageError if it is no record."""
    try:
        flags = record[39]
        times_at = 72 + (_LONGER if flags & SYS_BORNHOST_V6 else 0) + (_LONGER if flags & SYS_STOREHOST_V6 else 0)
        body_at = times_at + 16
        topic_at = body_at + int.from_bytes(record[body_at - 4 : body_at], "big")
        size_at = topic_at + record[topic_at] + 1
        text = record[size_at + 2 :]
        if size_at + 2 > len(record) or len(text) != int.from_bytes(record[size_at : size_at + 2], "big"):
            raise MessageError("a message record has properties of another size than it says")
    except IndexError:
        raise MessageError("a message record is cut off") from None
    if text[-CHECKSUM_BYTES:].startswith(CHECKSUM_MARK):
        text = text[:-CHECKSUM_BYTES]
    mark = f"{POP_CK}\x01{handle}".encode()
    longer = b"%b\x02%b" % (text.removesuffix(b"\x02"), mark) if text else mark
    if len(longer) <= MAX_PROPERTY_BYTES:
        text = longer
    size = size_at + 2 + len(text)
    return b"".join(
        (
            size.to_bytes(4, "big"),
            record[4:times_at],
            reconsume_times.to_bytes(4, "big"),
            record[times_at + 4 : size_at],
            len(text).to_bytes(2, "big"),
            text,
        )
    )


def reconsume_times_in(record: bytes) -> int:
    """How often a record had been tried before it was stored. Raises MessageError if it is cut off."""
    if len(record) < 76 + 2 * _LONGER:
        raise MessageError("a message record is cut off")
    flags = record[39]
    at = 72 + (_LONGER if flags & SYS_BORNHOST_V6 else 0) + (_LONGER if flags & SYS_STOREHOST_V6 else 0)
    return int.from_bytes(record[at : at + 4], "big", signed=True)


def offset_texts(places: Iterable[tuple[int, int, int]]) -> tuple[str, str]:
    """startOffsetInfo and msgOffsetInfo of messages by mark, queue id and offset: an entry for each mark and queue, its
    offsets in the order of the answer's body."""
    offsets: dict[tuple[int, int], list[int]] = {}
    for mark, queue_id, offset in places:
        offsets.setdefault((mark, queue_id), []).append(offset)
    starts = [f"{mark} {queue_id} {min(found)}" for (mark, queue_id), found in offsets.items()]
    lists = [f"{mark} {queue_id} {','.join(map(str, found))}" for (mark, queue_id), found in offsets.items()]
    return ";".join(starts), ";".join(lists)
