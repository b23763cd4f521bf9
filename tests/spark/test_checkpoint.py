"""The content of Spark's checkpoint, and which checkpoints a query goes on from."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.client import ConfigError
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import EMPTY, Batch, Mark, check_resumed, from_offset, to_offset
from rocketlet.spark.options import StreamOptions, stream_options

from .strategies import RANGES

MARKS = st.dictionaries(
    st.tuples(st.sampled_from("tu"), st.sampled_from(["a", "b:1"])),
    st.builds(Mark, st.text("0123456789abcdef", max_size=16), st.integers(0, 2**45), st.integers(0, 9)),
)
BATCHES = st.builds(Batch, RANGES, MARKS, st.sampled_from([None, True, False]), st.sampled_from(["", "g"]))


@given(BATCHES)
def test_what_spark_logs_is_read_back(batch: Batch) -> None:
    assert from_offset(json.loads(json.dumps(to_offset(batch)))) == batch


def test_a_checkpoint_without_a_batch_and_one_of_an_earlier_release_are_read() -> None:
    assert from_offset({}) == EMPTY
    assert from_offset({"t": {"b": {"0": "5:7"}}}) == Batch({Queue("t", "b", 0): (5, 7)})


@pytest.mark.parametrize("offset", [{"t": {"b": {"0": "5"}}}, {"$": {"topics": {"t": {"b": {"other": 1}}}}}, {"$": 5}])
def test_a_foreign_checkpoint_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no offset of this source"):
        from_offset(offset)


def options(**changed: str) -> StreamOptions:
    return stream_options({"nameServer": "h:1", "topic": "t", "group": "g", **changed})


def test_another_membership_is_refused_and_told_where_to_go_on() -> None:
    ranges = {Queue("t", "b", 0): (5, 7), Queue("t", "b", 1): (9, 9)}
    with pytest.raises(
        ConfigError, match=r"membership is false; the checkpoint was written with true.* group=g and starting"
    ):
        check_resumed(Batch(ranges, membership=True, group="g"), options(membership="false"))
    with pytest.raises(ConfigError, match=r'membership is true.* startingOffsets={"t":{"b":{"0":7,"1":9}}}'):
        check_resumed(Batch(ranges, membership=False), options())
    check_resumed(Batch(ranges, membership=True, group="g"), options())
    check_resumed(Batch(ranges, membership=False), options(membership="false"))
    check_resumed(EMPTY, options())


def test_another_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="the option group is 'g'; the checkpoint belongs to the group 'h'"):
        check_resumed(Batch(membership=True, group="h"), options())
    check_resumed(Batch(membership=False, group="h"), options(membership="false"))
