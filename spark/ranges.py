"""Ranges of offsets: a batch's part of each queue, cut to limits and split into tasks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise

from ..protocol.queue import Queue

Range = tuple[int, int]
Ranges = Mapping[Queue, Range]


def shared_out(
    available: Ranges,
    limit: float | None,
    costs: Mapping[Queue, float] | None = None,
    served_last: Queue | None = None,
) -> dict[Queue, Range]:
    """The ranges, cut to a limit: each queue by the same share, and none to nothing while the limit allows.

    costs: the weight of a message of each queue, 1 by default. At least one message is read, whatever it costs. The queue
    behind `served_last` comes first, so that a limit below one message for each queue leaves none unread. The result is in
    the order of serving.
    """
    costs = costs or {}
    total = sum((end - begin) * costs.get(queue, 1) for queue, (begin, end) in available.items())
    if limit is None or total <= limit:
        return {queue: span for queue, span in available.items() if span[0] < span[1]}
    cut: dict[Queue, Range] = {}
    left = limit
    queues = sorted(available)
    first = bisect_right(queues, served_last) if served_last is not None else 0
    for queue in queues[first:] + queues[:first]:
        begin, end = available[queue]
        cost = costs.get(queue, 1)
        if begin < end and (left >= cost or not cut):
            rows = max(min(int((end - begin) * limit / total), int(left / cost)), 1)
            cut[queue] = (begin, begin + rows)
            left -= rows * cost
    return cut


def split(ranges: Ranges, least: int, most_rows: int | None = None) -> list[tuple[Queue, Range]]:
    """The ranges that are not empty. Long ones are split, so that there are about `least` parts of similar size, and none
    has more than `most_rows`."""
    total = sum(end - begin for begin, end in ranges.values())
    parts: list[tuple[Queue, Range]] = []
    for queue, (begin, end) in sorted(ranges.items()):
        count = max(
            math.ceil((end - begin) * least / max(total, 1)), math.ceil((end - begin) / (most_rows or total or 1)), 1
        )
        count = min(count, end - begin)
        bounds = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
        parts += [(queue, span) for span in pairwise(bounds)]
    return parts
