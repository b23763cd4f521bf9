from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.names import Queue

from .strategies import RANGES

pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import Range, shared_out, split


@given(RANGES, st.integers(1, 300))
def test_a_limit_is_kept_and_rows_are_taken_from_the_front(ranges: dict[Queue, Range], limit: int) -> None:
    cut = shared_out(ranges, limit)
    assert sum(end - begin for begin, end in cut.values()) <= limit
    total = sum(end - begin for begin, end in ranges.values())
    assert (not cut) == (total == 0)
    for queue, (begin, end) in cut.items():
        assert begin == ranges[queue][0]
        assert begin < end <= ranges[queue][1]
    if total <= limit:
        assert cut == {queue: span for queue, span in ranges.items() if span[0] < span[1]}


@given(RANGES, st.integers(1, 5000), st.data())
def test_a_limit_in_bytes_is_passed_by_one_message_at_most(
    ranges: dict[Queue, Range], limit: int, data: st.DataObject
) -> None:
    costs = {queue: data.draw(st.floats(1, 1000)) for queue in ranges}
    cut = shared_out(ranges, limit, costs)
    spent = sum((end - begin) * costs[queue] for queue, (begin, end) in cut.items())
    assert spent <= limit * 1.000001 or [end - begin for begin, end in cut.values()] == [1]
    assert bool(cut) == any(begin < end for begin, end in ranges.values())


@given(st.integers(1, 64), st.integers(1, 12), st.booleans())
def test_no_queue_starves_under_a_limit_below_one_message_for_each(queues: int, limit: int, in_bytes: bool) -> None:
    """However fast the queues fill up: each is served before any other is served twice as often as all of them need."""
    every = [Queue("t", "b", number) for number in range(queues)]
    ends = dict.fromkeys(every, 0)
    served_last: Queue | None = None
    seen: set[Queue] = set()
    costs = dict.fromkeys(every, 1.0) if in_bytes else None
    for _ in range(-(-queues // limit)):
        cut = shared_out({queue: (ends[queue], ends[queue] + 1000) for queue in every}, limit, costs, served_last)
        for queue, (_, end) in cut.items():
            ends[queue] = end
            served_last = queue
        seen |= cut.keys()
    assert seen == set(every)


@given(RANGES, st.integers(1, 50), st.integers(1, 500))
def test_no_part_has_more_rows_than_a_task_may_have(ranges: dict[Queue, Range], least: int, most: int) -> None:
    parts = split(ranges, least, most)
    assert all(end - begin <= most for _, (begin, end) in parts)
    assert sum(end - begin for _, (begin, end) in parts) == sum(end - begin for begin, end in ranges.values())


@given(RANGES, st.integers(1, 50))
def test_ranges_are_split_into_parts_of_like_size(ranges: dict[Queue, Range], least: int) -> None:
    parts = split(ranges, least)
    total = sum(end - begin for begin, end in ranges.values())
    assert len(parts) >= min(least, total)
    for queue, (begin, end) in ranges.items():
        mine = [span for other, span in parts if other == queue]
        assert [number for first, last in mine for number in range(first, last)] == list(range(begin, end))
        sizes = {last - first for first, last in mine}
        assert not mine or max(sizes) - min(sizes) <= 1
