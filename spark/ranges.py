"""What a batch reads: a range of offsets per queue, kept whole in the offset that Spark logs.

    {"flights": {"broker-a": {"0": "100:250", "1": "90:260"}}}

Begin and end both stand there, because queues come and go between batches: the end of one batch says nothing of where
the next one begins, and a replay must read what was read before, whoever owns the queue by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol.bodies import Queue

Range = tuple[int, int]
Ranges = Mapping[Queue, Range]


def to_offset(ranges: Ranges) -> dict[str, Any]:
    """The offset that Spark logs for a batch."""
    offset: dict[str, Any] = {}
    for queue, (begin, end) in sorted(ranges.items()):
        brokers = offset.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = f"{begin}:{end}"
    return offset


def from_offset(offset: Mapping[str, Any]) -> dict[Queue, Range]:
    """The ranges of a logged offset. Raises ValueError if it is not one of ours."""
    try:
        return {
            Queue(topic, broker_name, int(queue_id)): _range(text)
            for topic, brokers in offset.items()
            for broker_name, queues in brokers.items()
            for queue_id, text in queues.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint holds no offset of this source: {offset!r} ({error})") from None


def _range(text: str) -> Range:
    begin, end = text.split(":")
    return int(begin), int(end)


def shared_out(available: Ranges, max_rows: int | None) -> dict[Queue, Range]:
    """The ranges cut to a number of rows in all, each queue by the same part, and none of them to nothing."""
    total = sum(end - begin for begin, end in available.values())
    if max_rows is None or total <= max_rows:
        return {queue: span for queue, span in available.items() if span[0] < span[1]}
    cut: dict[Queue, Range] = {}
    left = max_rows
    for queue, (begin, end) in sorted(available.items()):
        if begin < end and left > 0:
            rows = min(max((end - begin) * max_rows // total, 1), left)
            cut[queue] = (begin, begin + rows)
            left -= rows
    return cut
