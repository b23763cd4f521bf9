"""What happens after a crash.

The checkpoint names a commit log position below which every message is in its queue's index file, and how long each
index was. Recovery cuts the indexes back to it and reads the log from there on: whole records are indexed again, the
first that is torn ends the log. If an index is missing or shorter than the checkpoint says (a machine that lost power,
a file removed by hand), all indexes are made anew from the whole log.

Records of a topic that was deleted stay in the log; `since`, the position at which a topic was created, keeps them
from coming back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ...protocol.message import (
    MAX_RECORD_BYTES,
    MessageError,
    Record,
    body_is_intact,
    decode_record,
    record_size,
)
from .consume_queue import ConsumeQueue
from .files import SegmentedFile, StoreError

READ_BYTES: Final = 8 * 1024 * 1024

QueueOf = Callable[[str, int], ConsumeQueue | None]


class Recovered(NamedTuple):
    """What recovery found: records read, bytes of a torn tail cut off, whether all indexes were made anew."""

    records: int
    torn_bytes: int
    rebuilt: bool


def indexes_are_whole(queues: Mapping[tuple[str, int], ConsumeQueue], lengths: Mapping[str, int]) -> bool:
    """Whether every index holds at least what the checkpoint promises (`topic@queue id` to next offset)."""
    for key, length in lengths.items():
        topic, _, queue_id = key.rpartition("@")
        queue = queues.get((topic, int(queue_id)))
        if queue is None or queue.next < length:
            return False
    return True


def replay(
    log: SegmentedFile,
    position: int,
    queue_of: QueueOf,
    tag_code_of: Callable[[Record], int],
    since_of: Callable[[str], int],
) -> Recovered:
    """Indexes the log's records from `position` on and cuts off a torn tail."""
    records = 0
    end = log.end
    while position < log.end:
        data = log.read(position, READ_BYTES)
        at = 0
        while True:
            record = _whole_record(data, at, position + at)
            if record is None:
                break
            if record.physical_offset >= since_of(record.topic):
                _index(record, queue_of, tag_code_of)
            at += record.size
            records += 1
        position += at
        if at == 0:  # no whole record begins here
            if position < log.last_segment:
                raise StoreError(
                    f"the commit log in {log.directory} is damaged at {position}, before its last segment; "
                    "restore it from a copy, or move the earlier segments away to go on without them"
                )
            log.truncate(position)
    return Recovered(records, end - log.end, False)


def _whole_record(data: bytes, at: int, position: int) -> Record | None:
    size = record_size(data, at)
    if not size or at + size > len(data) or size > MAX_RECORD_BYTES:
        return None
    try:
        record = decode_record(data, at)
    except MessageError:
        return None
    intact = record.physical_offset == position and body_is_intact(record)
    return record if intact else None


def _index(record: Record, queue_of: QueueOf, tag_code_of: Callable[[Record], int]) -> None:
    queue = queue_of(record.topic, record.queue_id)
    if queue is None or record.queue_offset < queue.next:
        return
    if record.queue_offset > queue.next:  # the messages before it expired
        queue.restart(record.queue_offset)
    queue.append(record.physical_offset, record.size, tag_code_of(record))
    if queue.tail_is_long:
        queue.flush()
