"""Reading without membership, and batch reads: where they begin and end."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .running import MARKS, QUEUES, Sink, committed, fill, report, run_once, stream, wait_for

pytestmark = MARKS
from pyspark.sql import DataFrame, SparkSession


def table(spark: SparkSession, address: str, **options: str) -> DataFrame:
    options = {"topic": "t"} | options if "topicPattern" not in options else options
    return spark.read.format("rocketlet").option("nameServer", address).options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def exact(**offsets: int) -> str:
    return json.dumps({"t": {"broker-a": {name[1:]: offset for name, offset in offsets.items()}}})


def test_a_query_without_membership_reads_every_queue_and_leaves_the_group_alone(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(400))
    member = stream(spark, address, "g")
    query = member.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "m")).start()
    try:
        wait_for(lambda: committed(address, "g") == 400)
        first, second = Sink(), Sink()
        alone = stream(spark, address, "g", membership="false", maxRowsPerTrigger="150")
        run_once(alone, first, tmp_path / "c")
        assert first.numbers == Counter(range(400))
        assert all(len(rows) <= 150 for rows in first.batches.values())
        assert len(report(address, "g")["members"]) == 1, "the member"
        fill(address, range(400, 500))
        run_once(alone, second, tmp_path / "c")
        assert second.numbers == Counter(range(400, 500)), "it continues from its checkpoint"
    finally:
        query.stop()


def test_latest_is_kept_by_the_checkpoint_before_anything_was_read(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(100))
    frame = stream(spark, address, "", membership="false", startingOffsets="latest")
    nothing, later = Sink(), Sink()
    run_once(frame, nothing, tmp_path / "c")
    assert not nothing.numbers
    fill(address, range(100, 150))
    run_once(frame, later, tmp_path / "c")
    assert later.numbers == Counter(range(100, 150)), "not the latest of the second start"


def test_a_group_without_offsets_begins_where_the_options_say(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(400))  # 100 in each queue
    sink = Sink()
    run_once(stream(spark, address, "g", startingOffsets=exact(q0=90, q1=-1)), sink, tmp_path / "c")
    rows = Counter(row.queueId for batch in sink.batches.values() for row in batch)
    assert rows == {0: 10, 2: 100, 3: 100}
    late = Sink()
    run_once(stream(spark, address, "h", startingTimestamp=str(int(time.time() * 1000) + 60_000)), late, tmp_path / "d")
    assert not late.numbers


@pytest.mark.parametrize("membership", ["true", "false"])
def test_a_topic_that_comes_later_is_found_by_its_pattern(
    spark: SparkSession, address: str, tmp_path: Path, membership: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(address, range(100), "orders-1")
    fill(address, range(1000, 1100), "other")
    sink = Sink()
    reader = spark.readStream.format("rocketlet").option("nameServer", address).option("group", "g")
    frame = reader.option("topicPattern", "orders-.*").option("membership", membership).load()
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        wait_for(lambda: len(sink.numbers) == 100)
        fill(address, range(100, 200), "orders-2")
        wait_for(lambda: len(sink.numbers) == 200)
    finally:
        query.stop()
    assert sink.numbers == Counter(range(200))


def test_a_batch_reads_between_two_positions(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(200))
    filled_ms = int(time.time() * 1000)
    wait_for(lambda: time.time() * 1000 >= filled_ms + 1)
    noon_ms = int(time.time() * 1000)
    fill(address, range(200, 400))
    assert numbers(table(spark, address)) == list(range(400))
    assert table(spark, address, startingOffsets="latest").count() == 0
    assert numbers(table(spark, address, startingTimestamp=str(noon_ms))) == list(range(200, 400))
    assert numbers(table(spark, address, endingTimestamp=str(noon_ms))) == list(range(200))
    between = table(spark, address, startingOffsets=exact(q0=10, q1=95, q2=-1, q3=-1), endingOffsets=exact(q0=20))
    assert Counter(row.queueId for row in between.collect()) == {0: 10, 1: 5}
    run_once(stream(spark, address, "g", maxRowsPerTrigger="400"), Sink(), tmp_path / "c")
    fill(address, range(400, 440))
    assert numbers(table(spark, address, group="g", startingOffsets="committed")) == list(range(400, 440))
    assert numbers(table(spark, address, group="g", endingOffsets="committed")) == list(range(400))
    assert committed(address, "g") == 400, "a batch commits nothing"


def test_long_ranges_are_split_over_tasks(spark: SparkSession, address: str) -> None:
    fill(address, range(400))
    assert table(spark, address).rdd.getNumPartitions() == 1, "short ranges share a task"
    assert table(spark, address, arrowBatchSize="100").rdd.getNumPartitions() == QUEUES
    split = table(spark, address, minPartitions="10", arrowBatchSize="7", includeProperties="false")
    assert "properties" not in split.columns
    assert split.rdd.getNumPartitions() >= 10
    assert numbers(split) == list(range(400))


def test_only_the_columns_that_are_asked_for_are_made(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(200))
    reader = spark.read.format("rocketlet").option("nameServer", address).option("topic", "t")
    assert reader.schema("tags STRING, body BINARY").load().where("tags = 'A'").count() == 100
    lower = reader.schema("TAGS STRING, queueid INT").load().where("Tags = 'A'")
    assert (lower.columns, lower.count()) == (["TAGS", "queueid"], 100)
    kafkas = table(spark, address, columns="kafka", includeProperties="true")
    assert kafkas.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    rows = kafkas.select("key", "value", "headers", "partition").collect()
    assert {bytes(row.key) for row in rows} == {b"k %d" % n for n in range(200)}
    assert ({row.headers for row in rows}, {row.partition for row in rows}) == ({None}, set(range(QUEUES)))
    named = spark.readStream.format("rocketlet").option("nameServer", address).option("topic", "t")
    sink = Sink()
    run_once(named.option("membership", "false").schema("body BINARY, queueId INT").load(), sink, tmp_path / "c")
    assert sink.numbers == Counter(range(200))
    with pytest.raises(Exception, match=r"column body is string; rows have binary") as caught:
        reader.schema("body STRING").load().count()
    assert "Traceback" not in str(caught.value)


def test_filters_of_tags_and_of_properties(spark: SparkSession, address: str) -> None:
    fill(address, range(100))
    assert numbers(table(spark, address, tags="A")) == list(range(1, 100, 2))
    assert numbers(table(spark, address, sql="TAGS = 'B'")) == list(range(0, 100, 2))
    with pytest.raises(Exception, match="the option sql: the filter"):
        table(spark, address, sql="TAGS = ").count()


def test_bytes_per_trigger_limit_a_batch(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(400))
    sizes: list[int] = []

    def take(rows: DataFrame, batch: int) -> None:
        sizes.append(rows.count())

    frame = stream(spark, address, "g", maxBytesPerTrigger="20000")
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "c"))
    query.trigger(availableNow=True).start().awaitTermination()
    record_bytes = 91 + 1 + 3 + 60  # at least: a record's frame, topic, body, properties
    assert sum(sizes) == 400
    assert max(sizes) <= 20_000 / record_bytes


@pytest.mark.parametrize("trigger", [{"once": True}, {"processingTime": "1 second"}, {}])
def test_every_trigger(spark: SparkSession, address: str, tmp_path: Path, trigger: dict[str, Any]) -> None:
    fill(address, range(200))
    sink = Sink()
    writer = stream(spark, address, "g", maxRowsPerTrigger="150").writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(tmp_path / "c"))
    query = (writer.trigger(**trigger) if trigger else writer).start()
    wait_for(lambda: len(sink.numbers) == 200)
    if trigger.get("once"):
        query.awaitTermination()
        assert len(sink.batches) == 1, "once is one batch, whatever the limit"
    query.stop()


def test_progress_shows_the_lag(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(400))
    frame = stream(spark, address, "g", maxRowsPerTrigger="100")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    done = query.trigger(availableNow=True).start()
    done.awaitTermination()
    seen = [json.loads(progress["sources"][0]["latestOffset"]) for progress in done.recentProgress]
    assert [item["metrics"]["offsetsBehindLatest"] for item in seen[:4]] == [300, 200, 100, 0]
    assert seen[0]["metrics"]["queues"] == 5, "four of the topic, one of the group's retries"
    ends = [end for text in seen[0]["offsets"]["t"]["broker-a"].values() for end in [text.split(":")[1]]]
    assert ends == ["100"] * 4
