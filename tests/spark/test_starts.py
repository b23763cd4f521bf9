"""Where queues start that a query has no offset of: later topics, added queues, clocks, and deleted groups."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import uvloop
from rocketlet.client import AdminClient, ConfigError
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, write
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.planner import Planner

from .planners import BOTH, opened, planner_options, read_all, request
from .running import QUEUES, committed, fill, rows_of

pytestmark = pytest.mark.timeout(120)
HOUR_S = 3600.0


def grow(address: str, queues: int) -> None:
    request(address, RequestCode.UPDATE_AND_CREATE_TOPIC, dict(write(CreateTopic("t", queues, queues, 6))))


def set_drivers_clock(patches: pytest.MonkeyPatch, ahead_s: float) -> None:
    """The clock of the driver's code alone: the broker of the test, which runs in this process, keeps its own."""
    clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + ahead_s})
    for name, module in list(sys.modules.items()):
        if name.startswith("rocketlet.spark.") and hasattr(module, "time"):
            patches.setattr(module, "time", clock)


@BOTH
@pytest.mark.parametrize("group", ["g", None])
def test_topic_created_after_a_start_at_latest_without_any_topic_is_read_from_its_start(
    address: str, membership: bool, group: str | None
) -> None:
    if membership and group is None:
        pytest.skip("a member has a group")
    given: dict[str, str | None] = {"topic": None, "topicPattern": "t.*", "startingOffsets": "latest", "group": group}
    with opened(address, membership, EMPTY, **given) as planner:
        batch = read_all(planner)
        assert rows_of(batch) == 0
    fill(address, range(100))
    with opened(address, membership, batch, **given) as planner:
        assert rows_of(read_all(planner)) == 100


@BOTH
@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_messages_of_added_queues_are_read_whatever_the_clock_of_the_driver(
    address: str, membership: bool, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues grow while the query is stopped; its clock is wrong at the first start, and right or wrong later."""
    fill(address, range(40))  # the history
    with monkeypatch.context() as patches:
        set_drivers_clock(patches, ahead_s)
        with opened(address, membership, startingOffsets="latest") as planner:
            batch = read_all(planner)
            assert rows_of(batch) == 0
        grow(address, 2 * QUEUES)
        fill(address, range(400))
        with opened(address, membership, batch, startingOffsets="latest") as planner:
            batch = read_all(planner)
            assert rows_of(batch) == 400
    grow(address, 3 * QUEUES)
    fill(address, range(600))
    with opened(address, membership, batch, startingOffsets="latest") as planner:
        assert rows_of(read_all(planner)) == 600


def test_topic_that_was_taken_out_of_a_standalone_query_continues_when_it_is_back(address: str) -> None:
    fill(address, range(100))
    fill(address, range(50), "u")
    with opened(address, False, topic="t,u") as planner:
        batch = read_all(planner)
        assert rows_of(batch) == 150
    fill(address, range(10))
    with opened(address, False, batch, topic="t") as planner:
        batch = read_all(planner)
        assert rows_of(batch) == 10
    fill(address, range(7), "u")
    with opened(address, False, batch, topic="t,u") as planner:
        assert rows_of(read_all(planner)) == 7


def test_group_that_was_deleted_continues_at_the_checkpoint_with_a_warning(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(address, range(100))
    with opened(address, True) as planner:
        first = read_all(planner)
        fill(address, range(4))
        batch = planner.plan(1)  # the last batch has one of the queues
        assert batch is not None and rows_of(first) == 100
        planner.finish(batch)

    async def delete_group() -> None:
        async with AdminClient(address) as admin:
            await admin.delete_group("g")

    uvloop.run(delete_group())
    with opened(address, True, batch) as planner:
        assert rows_of(read_all(planner)) == 3
        assert committed(address, "g") == 104
    assert "group_offsets_missing group='g'" in caplog.text


def test_interrupted_batch_with_retries_is_run_again_without_them_when_the_group_was_deleted(address: str) -> None:
    """The retry topic is deleted with the group; that is no loss of the query's data."""

    async def add_retries() -> None:
        async with AdminClient(address) as admin:
            for _ in range(3):
                await admin.store(Queue("%RETRY%g", "broker-a", 0), b"x")

    async def delete_group() -> None:
        async with AdminClient(address) as admin:
            await admin.delete_group("g")

    fill(address, range(5))
    with opened(address, True) as planner:
        read_all(planner)
        uvloop.run(add_retries())
        fill(address, range(5))
        while (batch := planner.plan()) is None or not any(queue.topic == "%RETRY%g" for queue in batch.ranges):
            pass
    uvloop.run(delete_group())
    resumed = Planner(planner_options(address, True), batch, is_unfinished=True)
    try:
        assert {queue.topic for queue in resumed.readable(batch)} == {"t"}
    finally:
        resumed.close()


@BOTH
def test_topic_that_can_only_be_written_to_is_named(address: str, membership: bool) -> None:
    request(address, RequestCode.UPDATE_AND_CREATE_TOPIC, dict(write(CreateTopic("t", 4, 4, 2))))
    with (
        pytest.raises(ConfigError, match="the option topic: no queue of t can be read; make some readable"),
        opened(address, membership),
    ):
        pass
