"""Rows that travel with a batch's plan, as Spark's loop around a reader takes them. Without Spark, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("pyspark")
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable
from rocketlet.spark import source
from rocketlet.spark.options import schema_of
from rocketlet.spark.reading import read_task
from rocketlet.spark.source import RocketletStreamReader

from .conftest import StoppableBroker
from .running import fill

pytestmark = pytest.mark.timeout(120)


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
    monkeypatch.setattr(source, "SimpleReader", DataSourceStreamReader)
    fill(address, range(40))
    with reader(address) as found:
        assert next_batch(found, {})[2] is None
