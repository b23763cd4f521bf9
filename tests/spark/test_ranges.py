from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.bodies import Queue

pytest.importorskip("pyspark")
from rocketlet.client.errors import ConfigError
from rocketlet.spark.options import parse
from rocketlet.spark.ranges import Range, from_offset, shared_out, to_offset

QUEUES = st.builds(Queue, st.sampled_from("tu"), st.sampled_from(["a", "b:1"]), st.integers(0, 9))
RANGES = st.dictionaries(QUEUES, st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda p: (p[0], p[0] + p[1])))
GOOD = {"nameServer": "h:1", "topic": "t", "group": "g"}


@given(RANGES)
def test_what_spark_logs_is_read_back(ranges: dict[Queue, Range]) -> None:
    assert from_offset(to_offset(ranges)) == ranges


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


def test_a_foreign_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="no offset of this source"):
        from_offset({"t": {"b": {"0": "5"}}})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"topic": ""}, "option topic is missing"),
        ({"group": "a b"}, "option group"),
        ({"topic": "a b"}, "option topic"),
        ({"tags": "||"}, "option tags"),
        ({"startingOffsets": "middle"}, "allowed: earliest, latest"),
        ({"maxRowsPerTrigger": "0"}, "allowed: a positive number"),
        ({"failOnDataLoss": "maybe"}, "allowed: true, false"),
        ({"maxRows": "5"}, "option maxRows is unknown.*maxRowsPerTrigger"),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_allowed(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse({**GOOD, **options})


def test_options_are_read_whatever_their_case() -> None:
    options = parse(
        {"NAMESERVER": "h:1", "Topic": "t, u", "group": "g", "startingoffsets": "17", "MaxRowsPerTrigger": "9"}
    )
    assert [item.topic for item in options.subscriptions] == ["t", "u"]
    assert (options.start, options.max_rows) == (17, 9)
