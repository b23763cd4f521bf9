"""What a batch reads: a range of offsets per queue, kept whole in the offset that Spark logs.

    {"flights": {"broker-a": {"0": "100:250", "1": "90:260"}}}

Begin and end both stand there, because queues come and go between batches: the end of one batch says nothing of where
the next one begins, and a replay must read what was read before, whoever owns the queue by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
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


def shared_out(
    available: Ranges, limit: float | None, costs: Mapping[Queue, float] | None = None
) -> dict[Queue, Range]:
    """The ranges cut to a limit in all, each queue by the same part, and none of them to nothing while the limit lasts.

    costs: what a message of each queue counts, 1 by default. At least one message is read, whatever it costs.
    """
    costs = costs or {}
    total = sum((end - begin) * costs.get(queue, 1) for queue, (begin, end) in available.items())
    if limit is None or total <= limit:
        return {queue: span for queue, span in available.items() if span[0] < span[1]}
    cut: dict[Queue, Range] = {}
    left = limit
    for queue, (begin, end) in sorted(available.items()):
        cost = costs.get(queue, 1)
        if begin < end and (left >= cost or not cut):
            rows = max(min(int((end - begin) * limit / total), int(left / cost)), 1)
            cut[queue] = (begin, begin + rows)
            left -= rows * cost
    return cut


def split(ranges: Ranges, least: int) -> list[tuple[Queue, Range]]:
    """The ranges that are not empty, the long ones in parts so that there are about `least` of them, all of like size."""
    total = sum(end - begin for begin, end in ranges.values())
    parts: list[tuple[Queue, Range]] = []
    for queue, (begin, end) in sorted(ranges.items()):
        count = min(max(math.ceil((end - begin) * least / max(total, 1)), 1), end - begin)
        bounds = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
        parts += [(queue, span) for span in pairwise(bounds)]
    return parts
