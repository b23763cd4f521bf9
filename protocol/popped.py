"""Records as a client that pops gets them, and the texts beside them (Apache's ExtraInfoUtil)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from .codes import SYS_BORNHOST_V6, SYS_STOREHOST_V6
from .config import MAX_PROPERTY_BYTES
from .message import CHECKSUM_BYTES, CHECKSUM_MARK, MessageError, tried
from .names import retry_topic

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
            tried(reconsume_times).to_bytes(4, "big"),
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
    return tried(int.from_bytes(record[at : at + 4], "big", signed=True))


class Receipt(NamedTuple):
    """A client acknowledges a message by its receipt. Its text is these fields, joined by blanks (ExtraInfoUtil). `mark`: 0
    for the topic itself, others for the retry topics of Apache's brokers."""

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_qid: int
    mark: str
    broker_name: str
    queue_id: int
    offset: int

    @property
    def text(self) -> str:
        return " ".join(map(str, self))

    def topic(self, group: str, topic: str) -> str:
        """Where the message lies (ExtraInfoUtil.getRealTopic)."""
        if self.mark == "1":
            return f"{retry_topic(group)}_{topic}"
        return f"{retry_topic(group)}+{topic}" if self.mark == "2" else topic


def receipt_of(text: str) -> Receipt:
    """Raises MessageError."""
    fields = text.split(" ")
    try:
        start, pop_ms, invisible_ms, revive_qid, mark, broker_name, queue_id, offset = fields[:8]
        times = int(pop_ms), int(invisible_ms)
        return Receipt(int(start), *times, int(revive_qid), mark, broker_name, int(queue_id), int(offset))
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no receipt handle") from None


def starts_of(text: str) -> dict[int, int]:
    """The start offsets in startOffsetInfo by queue id, for the topic itself. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {int(queue_id): int(offset) for mark, queue_id, offset in entries if mark == "0"}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no list of start offsets") from None


def tried_in(text: str) -> dict[str, int]:
    """How often messages were tried that Apache's brokers give out in order: by `queue id`, or by `qo<queue id>%<offset>`,
    which counts for more. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {of: int(count) for _, of, count in entries}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no list of tries") from None


def offset_texts(places: Iterable[tuple[int, int, int]]) -> tuple[str, str]:
    """startOffsetInfo and msgOffsetInfo of messages by mark, queue id and offset: an entry for each mark and queue, its
    offsets in the order of the answer's body."""
    offsets: dict[tuple[int, int], list[int]] = {}
    for mark, queue_id, offset in places:
        offsets.setdefault((mark, queue_id), []).append(offset)
    starts = [f"{mark} {queue_id} {min(found)}" for (mark, queue_id), found in offsets.items()]
    lists = [f"{mark} {queue_id} {','.join(map(str, found))}" for (mark, queue_id), found in offsets.items()]
    return ";".join(starts), ";".join(lists)
