"""Filters that Spark hands to a batch read: what no row can pass is not read, and rows are the same."""

from __future__ import annotations

import pytest

from .running import MARKS, QUEUES, fill

pytestmark = MARKS
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not
from rocketlet.spark.options import batch_options
from rocketlet.spark.pushdown import NarrowedReader
from rocketlet.spark.reading import Task

ALL = [(number, 0, 100) for number in range(QUEUES)]


@pytest.mark.parametrize(
    ("filters", "read", "tags"),
    [
        ([], ALL, "*"),
        ([EqualTo(("queueId",), 2)], [(2, 0, 100)], "*"),
        ([In(("partition",), (1, 3, 9)), LessThan(("offset",), 7)], [(1, 0, 7), (3, 0, 7)], "*"),
        ([EqualTo(("topic",), "u")], [], "*"),
        ([EqualTo(("brokerName",), "broker-a"), EqualTo(("queueOffset",), 99)], [(n, 99, 100) for n in range(4)], "*"),
        (
            [GreaterThan(("queueOffset",), 9), LessThanOrEqual(("queueOffset",), 19)],
            [(n, 10, 20) for n in range(QUEUES)],
            "*",
        ),
        ([GreaterThanOrEqual(("queueOffset",), 100)], [], "*"),
        ([EqualTo(("tags",), "A")], ALL, "A"),
        ([In(("tags",), ("B", "A", "C")), In(("tags",), ("B", "A"))], ALL, "A || B"),
        ([EqualTo(("tags",), "A || B")], ALL, "*"),
        ([EqualTo(("tags",), None)], ALL, "*"),
        ([Not(EqualTo(("queueId",), 2)), EqualTo(("body",), b"x"), EqualTo(("a", "queueId"), 7)], ALL, "*"),
    ],
)
def test_what_no_row_can_pass_is_not_read(
    address: str, filters: list[Filter], read: list[tuple[int, int, int]], tags: str
) -> None:
    fill(address, range(400))
    reader = NarrowedReader(batch_options({"nameServer": address, "topic": "t"}), ("body",))
    assert reader.pushFilters(filters) == filters, "Spark filters all rows again"
    spans = [span for task in reader.partitions() if isinstance(task, Task) for span in task.ranges]
    assert [(span.queue.queue_id, span.begin, span.end) for span in spans] == read
    assert {span.subscription.expression for span in spans} <= {tags}


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_rows_are_the_same_whether_spark_hands_filters_over(spark: SparkSession, address: str, enabled: str) -> None:
    fill(address, range(400))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", enabled)
    try:
        frame = spark.read.format("rocketlet").option("nameServer", address).option("topic", "t").load()
        found = frame.where("tags = 'A' AND queueId IN (0, 1) AND queueOffset < 50").collect()
        assert {row.tags for row in found} == {"A"}
        assert sorted({row.queueId for row in found}) == [0, 1]
        assert len(found) == 50
        assert frame.where("tags IS NULL").count() == 0
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
