"""Where planners begin, as options, groups and checkpoints say."""

from __future__ import annotations

import json
import re
import time

import pytest
from rocketlet.client import ConfigError

pytest.importorskip("pyspark")
from rocketlet.spark.batch import RocketletReader
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.options import batch_options

from .planners import BOTH, opened, read_all
from .running import fill, rows_of


def test_an_offset_behind_the_end_of_its_queue_is_named(address: str) -> None:
    fill(address, range(400))
    exact = '{"t": {"broker-a": {"0": 500}}}'
    for membership in (True, False):
        with (
            pytest.raises(ConfigError, match="startingOffsets names t@broker-a:0 at 500, which ends at 100"),
            opened(address, membership, startingOffsets=exact),
        ):
            pass


@BOTH
def test_a_starting_time_without_a_message_is_named_where_the_options_say_so(address: str, membership: bool) -> None:
    fill(address, range(400))
    later = {"startingTimestamp": str(int(time.time() * 1000) + 60_000)}
    with (
        pytest.raises(ConfigError, match=r"t@broker-a:0 has no message since \d+ ms, where it is to start"),
        opened(address, membership, EMPTY, **later, startingOffsetsByTimestampStrategy="error"),
    ):
        pass
    with opened(address, membership, EMPTY, **later) as planner:
        batch = read_all(planner)
    with opened(address, membership, batch, **later, startingOffsetsByTimestampStrategy="error"):
        pass  # a query that goes on asks no more where to begin


def test_a_member_that_began_at_the_latest_of_empty_queues_gets_what_comes_while_it_is_away(address: str) -> None:
    fill(address, range(0))
    with opened(address, True, startingOffsets="latest") as planner:
        first = planner.plan()
        assert first is not None
        assert rows_of(first) == 0, "an empty batch: the checkpoint keeps that the query has begun"
        assert planner.plan() is None
    fill(address, range(100))
    with opened(address, True, startingOffsets="latest") as planner:
        batch = planner.plan()
        assert batch is not None
        assert rows_of(batch) == 100


@BOTH
def test_a_topic_made_while_a_query_of_a_pattern_is_stopped_is_read_from_its_first_message(
    address: str, membership: bool
) -> None:
    """Also where no row came before."""
    fill(address, range(0))
    given: dict[str, str | None] = {"topic": None, "topicPattern": "[tu]", "startingOffsets": "latest"}
    with opened(address, membership, EMPTY, **given) as planner:
        begun = planner.plan()
        assert begun is not None
    fill(address, range(100), "u")
    with opened(address, membership, begun, **given) as planner:
        batch = planner.plan()
        assert batch is not None
        assert rows_of(batch) == 100


@BOTH
@pytest.mark.parametrize("queue", ["t@broker-a:9", "t@broker-z:0", "u@broker-a:0"])
@pytest.mark.parametrize("name", ["startingOffsets", "startingOffsetsByTimestamp"])
def test_a_start_of_a_queue_that_is_not_there_is_named(address: str, membership: bool, queue: str, name: str) -> None:
    fill(address, range(400))
    topic, broker_name, queue_id = re.split("[@:]", queue)
    given = {name: json.dumps({topic: {broker_name: {queue_id: 5}}})}
    with (
        pytest.raises(ConfigError, match=f"{name} names {queue}, which does not exist"),
        opened(address, membership, EMPTY, **given),
    ):
        pass
    with opened(address, membership) as planner:
        batch = read_all(planner)
    with opened(address, membership, batch, **given) as planner:
        assert planner.plan() is None, "a query that goes on asks no more where to begin"


def test_a_batch_read_names_a_start_behind_its_end_and_an_end_that_is_not_there(address: str) -> None:
    fill(address, range(400))

    def ranges(**given: str) -> None:
        options = batch_options({"nameServer": address, "topic": "t", **given})
        RocketletReader(options, ("body",)).partitions()

    with pytest.raises(ConfigError, match="t@broker-a:0: the start 50 is behind the end 20"):
        ranges(
            startingOffsets='{"t": {"broker-a": {"0": 50}}}', endingOffsets='{"t": {"broker-a": {"0": 20}}}'
        )  # fmt: skip
    with pytest.raises(ConfigError, match="endingOffsets names t@broker-a:0 at 500, which ends at 100"):
        ranges(endingOffsets='{"t": {"broker-a": {"0": 500}}}')
    with pytest.raises(ConfigError, match="startingOffsets names t@broker-a:0 at 500, which ends at 100"):
        ranges(startingOffsets='{"t": {"broker-a": {"0": 500}}}')


@BOTH
def test_times_are_given_per_queue(address: str, membership: bool) -> None:
    fill(address, range(200))  # 50 in each queue
    later = str(int(time.time() * 1000) + 60_000)
    times = json.dumps({"t": {"broker-a": {"0": int(later), "1": 0}}})
    with opened(address, membership, startingOffsetsByTimestamp=times) as planner:
        batch = read_all(planner)
        assert {queue.queue_id for queue, (begin, end) in batch.ranges.items() if begin < end} == {1, 2, 3}
