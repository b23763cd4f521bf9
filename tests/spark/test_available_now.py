"""Queries that end on their own (`Trigger.AvailableNow`): they read what was there when they began, all of it, and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
import uvloop
from rocketlet.client import AdminClient, ConnectionFailed, RocketletError
from rocketlet.protocol.names import Queue

pytest.importorskip("pyspark")
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable
from rocketlet.spark import source
from rocketlet.spark.checkpoint import EMPTY, MicroBatch
from rocketlet.spark.config import PlanningLimits
from rocketlet.spark.options import schema_of
from rocketlet.spark.planner import Planner
from rocketlet.spark.reading import read_task
from rocketlet.spark.source import RocketletStreamReader
from rocketlet.testing import Broker

from .conftest import StoppableBroker
from .planners import BOTH, delete_topic, member_of, opened, read_all
from .running import QUEUES, fill, rows_of

pytestmark = pytest.mark.timeout(120)

Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], until: str = "nobody") -> Answer:
    """Asks again where no broker answered in time, as on a busy machine, but for an error that names `until`."""
    while True:
        try:
            return ask()
        except ConnectionFailed as error:
            if until in str(error):
                raise


def read_on(planner: Planner, until: str = "nobody") -> Iterator[int]:
    """How many rows each batch has that a query plans until it ends on its own."""
    while (batch := patiently(partial(planner.plan, 100), until)) is not None:
        yield rows_of(batch)
        planner.finish(batch)


@BOTH
@pytest.mark.parametrize("later", [0, 40, 1200])
def test_a_query_that_ends_on_its_own_plans_nothing_behind_the_end_of_a_topic_that_is_recreated(
    address: str, membership: bool, later: int
) -> None:
    fill(address, range(400))
    planned = 0
    with opened(address, membership, failOnDataLoss="false") as planner:
        planner.set_targets()
        batch: MicroBatch | None = planner.plan(100)
        assert batch is not None
        planner.finish(batch)
        delete_topic(address)
        fill(address, range(later))
        while (after := planner.plan(100)) is not None:
            planned += rows_of(after)
            planner.finish(batch := after)
    fill(address, range(40))
    with opened(address, membership, batch, failOnDataLoss="false") as planner:
        rest = planner.plan()
        assert rest is not None
        assert planned + rows_of(rest) == later + 40


@BOTH
def test_a_query_that_ends_on_its_own_does_not_end_while_its_broker_is_away(
    broker: StoppableBroker, membership: bool
) -> None:
    fill(broker.address, range(400))
    with opened(broker.address, membership, pollTimeoutMs="300") as planner:
        patiently(planner.set_targets)
        batch = patiently(partial(planner.plan, 100))
        assert batch is not None
        planner.finish(batch)
        broker.stop()
        with pytest.raises(ConnectionFailed, match="answered for 0 s"):
            planner.plan(100)
        broker.start()
        fill(broker.address, range(40))
        assert sum(read_on(planner)) == 300


def test_a_query_that_ends_on_its_own_reads_what_comes_back_while_it_looks(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is back between two checks: when the batch was planned, and when it is judged whether that was all."""
    fill(address, range(400))
    with opened(address, True) as planner:
        member = member_of(planner)
        planner.set_targets()
        batch = planner.plan(100)
        assert batch is not None
        planner.finish(batch)
        owed, queues = planner._unread, member.queues()
        for queue in queues:
            member.suspend_queue(queue)

        async def owed_when_it_is_back() -> dict[Queue, RocketletError]:
            for queue in queues:
                member.resume_queue(queue)
            return await owed()

        monkeypatch.setattr(planner, "_unread", owed_when_it_is_back)
        assert sum(read_on(planner)) == 300


@BOTH
def test_a_query_that_ends_on_its_own_reads_what_it_can_and_names_the_broker_that_is_away(membership: bool) -> None:
    with Broker() as first, Broker(name="broker-b", name_server=first.address) as second:
        for each in (first, second):
            each.create_topic("t", queues=QUEUES)
        fill(first.address, range(400))
        held = len(second.messages("t"))
        with opened(first.address, membership, pollTimeoutMs="300") as planner:
            patiently(planner.set_targets)
            second.stop()
            rows = 0
            with pytest.raises(ConnectionFailed, match=r"the broker of t@broker-b:\d has not answered for 0 s"):
                for count in read_on(planner, until="broker-b"):
                    rows += count
            second.start()
            assert 0 < held < 400
            assert rows + sum(read_on(planner)) == 400


def change_queues(address: str, queues: int, topic: str = "t") -> None:
    async def change() -> None:
        async with AdminClient(address) as admin:
            await admin.change_topic(topic, queues=queues, allow_unreadable=True)

    uvloop.run(change())


@BOTH
def test_query_that_ends_on_its_own_names_unread_messages_in_queues_that_its_topic_has_no_more(
    address: str, membership: bool
) -> None:
    fill(address, range(400))
    with opened(address, membership) as planner:
        batch = read_all(planner)
    change_queues(address, 2)
    with opened(address, membership, batch, pollTimeoutMs="300") as planner:
        planner.set_targets()
        assert sum(read_on(planner)) == 0, "nothing is unread"
    change_queues(address, QUEUES)
    fill(address, range(200))
    change_queues(address, 2)
    with opened(address, membership, batch, pollTimeoutMs="300") as planner:
        planner.set_targets()
        rows = 0
        reason = r"t@broker-a:[23]: the topic t has 2 readable queues on broker-a now, and 50 messages in this one are unread"
        with pytest.raises(RocketletError, match=reason):
            for count in read_on(planner):
                rows += count
        assert rows == 100
        batch = planner.done
    with opened(address, membership, batch, failOnDataLoss="false") as planner:
        planner.set_targets()
        assert sum(read_on(planner)) == 0, "it continues without them"
    change_queues(address, QUEUES)
    with opened(address, membership, batch) as planner:
        planner.set_targets()
        assert sum(read_on(planner)) == 100


@BOTH
def test_query_that_ends_on_its_own_names_a_broker_that_left_with_unread_messages(membership: bool) -> None:
    with Broker() as first, Broker(name="broker-b", name_server=first.address) as second:
        for each in (first, second):
            each.create_topic("t", queues=QUEUES)
        fill(first.address, range(400))
        with opened(first.address, membership) as planner:
            batch = read_all(planner)
        fill(first.address, range(400))
        second.stop()
        with (
            opened(first.address, membership, batch, pollTimeoutMs="300") as planner,
            pytest.raises(ConnectionFailed, match=r"the broker of t@broker-b:\d has not answered"),
        ):
            patiently(planner.set_targets)
            for _ in read_on(planner, until="broker-b"):
                pass
        second.start()


@BOTH
def test_query_that_ends_on_its_own_does_not_wait_for_a_topic_that_it_reads_no_more(
    address: str, membership: bool
) -> None:
    fill(address, range(100), "t")
    fill(address, range(100), "u")
    with opened(address, membership, topic="t,u") as planner:
        batch = read_all(planner)
    fill(address, range(40), "t")
    fill(address, range(40), "u")
    with opened(address, membership, batch, pollTimeoutMs="300") as planner:
        planner.set_targets()
        assert sum(read_on(planner)) == 40


def test_a_member_that_ends_on_its_own_waits_for_its_share(address: str) -> None:
    fill(address, range(200))
    with opened(address, True) as first:
        first.set_targets()
        batch = first.plan()
        assert batch is not None
        hasty = PlanningLimits(assignment_timeout_s=0.01, share_timeout_s=0.01)
        with (
            opened(address, True, EMPTY, hasty) as second,
            pytest.raises(RocketletError, match=r"its queues: it owns 0 queues"),
        ):
            second.set_targets()
        with opened(address, True, EMPTY, replace(hasty, share_timeout_s=60.0)) as second:
            fill(address, range(200))
            first.finish(batch)
            second.set_targets()
            assert sum(read_on(second)) == 100


# Rows that travel with a batch's plan, as Spark's loop around a reader takes them. Without Spark, on a real broker.


@contextmanager
def reader(address: str, **given: str) -> Iterator[RocketletStreamReader]:
    where = {"nameServer": address, "topic": "t", "membership": "false", "pollTimeoutMs": "2000"}
    made = RocketletStreamReader({**where, **given}, schema_of(["body"]))
    try:
        yield made
    finally:
        made.stop()


def next_batch(found: RocketletStreamReader, start: dict[str, Any]) -> tuple[dict[str, Any], Any, list[int] | None]:
    """The steps of Spark's loop for a batch: its end, its partitions, and the bodies that came with them."""
    end = found.latestOffset(start, ReadAllAvailable())
    partitions = found.partitions(start, end)
    rows = found.getCache(start, end) if isinstance(found, _SimpleStreamReaderWrapper) else None
    return end, partitions, None if rows is None else bodies(rows)


def bodies(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return sorted(int(body) for batch in batches for body in batch.column("body").to_pylist())


def test_a_small_batch_comes_with_its_plan_and_can_be_read_again(address: str) -> None:
    fill(address, range(40))
    with reader(address) as found:
        end, partitions, rows = next_batch(found, {})
        assert rows == list(range(40))
        (partition,) = partitions
        assert bodies(read_task(partition)) == rows, "an executor that does not get the block"
        assert not isinstance(found, _SimpleStreamReaderWrapper), "Spark asks others only for their progress"
        progress = found.reportLatestOffset()
        assert progress is not None
        assert progress["metrics"]["offsetsBehindLatest"] == 0
        fill(address, range(40, 60))
        assert next_batch(found, end)[2] == list(range(40, 60))


@pytest.mark.parametrize(("given", "comes"), [({"prefetchRows": "40"}, True), ({"prefetchRows": "39"}, False)])
def test_the_limit_of_rows_is_exact(address: str, given: dict[str, str], comes: bool) -> None:
    fill(address, range(40))
    with reader(address, **given) as found:
        _, partitions, rows = next_batch(found, {})
        assert (rows is not None) == comes
        assert len(partitions) == 1


def test_nothing_comes_with_several_tasks_or_without_the_option(address: str) -> None:
    fill(address, range(40))
    for given in ({"minPartitions": "2"}, {"prefetchRows": "0"}):
        with reader(address, **given) as found:
            assert next_batch(found, {})[2] is None


def test_large_rows_are_left_to_tasks_and_fewer_are_tried_then(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PREFETCH_BYTES", 100)
    fill(address, range(40))
    with reader(address) as found:
        end, _, rows = next_batch(found, {})
        assert rows is None
        monkeypatch.undo()
        fill(address, range(40, 80))
        end, _, rows = next_batch(found, end)
        assert rows is None, "as many rows as were too large"
        fill(address, range(80, 100))
        assert next_batch(found, end)[2] == list(range(80, 100))


def test_what_cannot_be_read_immediately_is_left_to_a_task(
    broker: StoppableBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PREFETCH_TIMEOUT_S", 0.01)
    fill(broker.address, range(40))
    with reader(broker.address) as found:
        end = found.latestOffset({}, ReadAllAvailable())
        broker.stop()
        (partition,) = found.partitions({}, end)
        assert not isinstance(found, _SimpleStreamReaderWrapper)
        broker.start()
        assert bodies(read_task(partition)) == list(range(40))


def test_a_pyspark_without_simple_readers_reads_by_tasks(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SimpleReader", object)
    fill(address, range(40))
    with reader(address) as found:
        assert next_batch(found, {})[2] is None


def test_rows_that_spark_does_not_fetch_are_read_by_tasks_from_then_on(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another PySpark looked for rows at another moment."""
    fill(address, range(40))
    with reader(address) as found:
        end = found.latestOffset({}, ReadAllAvailable())
        found.partitions({}, end)
        fill(address, range(40, 60))
        _, (partition,), rows = next_batch(found, end)
        assert rows is None
        assert bodies(read_task(partition)) == list(range(40, 60))
    assert [text.split()[0] for text in caplog.messages if "fetched" in text] == ["rows_not_fetched"]
