"""Rows that become messages."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import uvloop
from rocketlet.client import Consumer, Message, MessageIllegal, RocketletError
from rocketlet.protocol.config import MAX_BODY_BYTES

from ..conftest import PATIENCE_S
from .conftest import StoppableBroker
from .running import MARKS, Sink, fill, run_once, stream

pytestmark = MARKS
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import rocketlet.spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rocketlet.spark.checkpoint import from_offset
from rocketlet.spark.config import SHOWN_BYTES
from rocketlet.spark.driver import Ledger
from rocketlet.spark.encoding import illegal_row
from rocketlet.spark.options import write_options
from rocketlet.spark.sink import send_all
from rocketlet.sync import Consumer as ConsumerStop
from rocketlet.testing.ports import free_port

from .running import MARKS, QUEUES, committed, report, wait_for


def consumed(address: str, count: int, topic: str = "out") -> list[Message]:
    """The messages of a topic, in order within each queue."""

    async def run() -> list[Message]:
        found: list[Message] = []
        async with Consumer(address, "check", topic, start="first") as consumer, asyncio.timeout(PATIENCE_S):
            async for message in consumer:
                found.append(message)
                if len(found) == count:
                    break
        return found

    return uvloop.run(run())


def write(frame: DataFrame, address: str, **options: str) -> None:
    options = {"nameServer": address, "topic": "out"} | options
    frame.write.format("rocketlet").options(**options).mode("append").save()


def test_every_column_arrives(spark: SparkSession, address: str) -> None:
    rows = spark.range(100).select(
        f.format_string("body %d", "id").alias("body"),
        f.array(f.lit("all"), f.col("id").cast("string")).alias("keys"),
        f.when(f.col("id") < 50, "low").alias("tags"),
        f.create_map(f.lit("farbe"), f.lit("grün"), f.lit("UNIQ_KEY"), f.lit("of another")).alias("properties"),
        f.format_string("key-%d", f.col("id") % 3).alias("queueKey"),
        f.format_string("id-%d", "id").alias("messageId"),
    )
    write(rows.repartition(1), address)
    messages = {message.message_id: message for message in consumed(address, 100)}
    assert messages.keys() == {f"id-{number}" for number in range(100)}
    message = messages["id-7"]
    assert (message.body, message.keys, message.tag) == (b"body 7", ["all", "7"], "low")
    assert message.properties["farbe"] == "grün"
    assert messages["id-60"].tag is None
    queues: dict[int, set[int]] = {}
    for item in messages.values():
        queues.setdefault(int(item.body.split()[1]) % 3, set()).add(item.queue.queue_id)
    assert all(len(found) == 1 for found in queues.values()), "one key, one queue"


def test_rows_with_one_key_stay_in_order(spark: SparkSession, address: str) -> None:
    rows = spark.range(3000).select(f.col("id").cast("string").alias("body"), f.lit("k").alias("queueKey"))
    write(rows.repartition(1).sortWithinPartitions(f.col("body").cast("int")), address, batchBytes="5000")
    assert [int(message.body) for message in consumed(address, 3000)] == list(range(3000))


def test_topics_by_row_and_delayed_rows(spark: SparkSession, address: str) -> None:
    rows = spark.range(20).select(
        f.when(f.col("id") % 2 == 0, "even").alias("topic"),
        f.col("id").cast("string").cast("binary").alias("body"),
        f.when(f.col("id") == 3, 1).alias("delayLevel"),
    )
    write(rows, address)
    assert sorted(int(message.body) for message in consumed(address, 10, "even")) == list(range(0, 20, 2))
    odd = consumed(address, 10)
    assert sorted(int(message.body) for message in odd) == list(range(1, 20, 2))
    delayed = next(message for message in odd if message.body == b"3")
    assert delayed.record.store_ms - delayed.record.born_ms >= 900


def test_rows_with_delivery_times_priorities_and_groups_arrive(spark: SparkSession, address: str) -> None:
    rows = spark.range(4).selectExpr(
        "id",
        "IF(id = 0, INTERVAL '1' SECOND, NULL) AS delay",
        "IF(id = 1, timestamp_millis(unix_millis(current_timestamp()) + 2000), NULL) AS deliverAt",
        "IF(id = 2, 5, NULL) AS priority",
        "'order' AS messageGroup",
    )
    write(rows.selectExpr("concat(id, ' ', coalesce(unix_millis(deliverAt), 0)) AS body", "* EXCEPT (id)"), address)
    found = {int(message.body.split()[0]): message for message in consumed(address, 4)}
    assert found[0].store_ms - found[0].born_ms >= 900
    assert found[1].store_ms >= int(found[1].body.split()[1]) - 100
    assert found[2].priority == 5
    assert {message.message_group for message in found.values()} == {"order"}
    assert found[0].queue == found[3].queue, "one group, one queue"


def test_large_bodies_are_compressed_from_the_size_that_the_option_gives(address: str) -> None:
    options = write_options({"nameServer": address, "topic": "out", "compressOverBytes": "100"})
    assert send_all(options, iter([pa.RecordBatch.from_pydict({"body": ["x" * 99, "y" * 100, "z"]})])).messages == 3
    found = {message.body: len(message.record.body) for message in consumed(address, 3)}
    assert found[b"x" * 99] == 99
    assert found[b"y" * 100] < 100


def test_a_stream_from_topic_to_topic(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(300))
    frame = stream(spark, address, "g", maxRowsPerTrigger="100").select(
        "body", "keys", "tags", "properties", "messageId"
    )
    writer = frame.writeStream.format("rocketlet").option("nameServer", address).option("topic", "out")
    writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    copies, sink = consumed(address, 300), Sink()
    run_once(stream(spark, address, "h"), sink, tmp_path / "d")
    originals = {row.messageId: row for rows in sink.batches.values() for row in rows}
    assert Counter(int(message.body) for message in copies) == Counter(range(300))
    for message in copies:
        original: Any = originals[message.message_id]
        assert (message.body, message.tag, message.keys) == (bytes(original.body), original.tags, original["keys"])


def test_a_task_that_is_retried_sends_the_same_ids(spark: SparkSession, address: str, tmp_path: Path) -> None:
    failed = str(tmp_path / "failed")

    def fail_once(batches: Any) -> Any:
        from pathlib import Path

        yield from batches
        if not Path(failed).exists():
            Path(failed).touch()
            raise RuntimeError("a task fails after its rows were sent")

    ids = f.format_string("id-%d", "id")
    rows = spark.range(0, 20_000, numPartitions=1).select(
        f.col("id").cast("string").alias("body"), ids.alias("messageId")
    )
    broken = rows.mapInArrow(fail_once, rows.schema)
    with pytest.raises(Exception, match="a task fails after its rows were sent"):
        write(broken, address)  # this session does not retry
    write(broken, address)
    seen = {message.message_id for message in consumed(address, 20_001)}
    assert len(seen) <= 20_000, "what came twice came with one id"


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        (["id AS body"], {}, "column body is bigint"),
        (["'x' AS value", "int(77) AS partition"], {}, "partition: got 77; expected a queue of out to send to"),
        (
            ["'x' AS body"],
            {"nameServer": "127.0.0.1:1", "deliveryTimeoutMs": "100"},
            "rows could not be sent, tried for 0 s .*no name server can be reached",
        ),
    ],
)
def test_error_of_a_write_begins_with_its_reason(
    spark: SparkSession, address: str, columns: list[str], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(Exception, match=reason):
        write(spark.range(3).selectExpr(*columns), address, **options)


def test_other_columns_and_options_are_refused_before_anything_is_sent(spark: SparkSession) -> None:
    for columns, option, reason in (
        (["cast(id AS string) AS body", "id AS offset"], "batchBytes", "column offset is not a column of a message"),
        (["'x' AS body", "'x' AS value"], "batchBytes", "columns value and body mean the same"),
        (["'x' AS body"], "batchByte", "batchbyte is unknown"),
    ):
        with pytest.raises(Exception, match=reason):
            write(spark.range(3).selectExpr(*columns), "127.0.0.1:1", **{option: "5"})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no body": ({"body": None}, f"body: got null; expected 1 to {MAX_BODY_BYTES} bytes"),
    "empty body": ({"body": b""}, f"body: got b''; expected 1 to {MAX_BODY_BYTES}"),
    "large body": (
        {"body": b"x" * (MAX_BODY_BYTES + 1)},
        f"body: got {MAX_BODY_BYTES + 1} bytes; expected 1 to {MAX_BODY_BYTES}",
    ),
    "blank tag": ({"tags": " "}, "tags: got ' '; expected a text that is not blank"),
    "empty property": ({"properties": [("p", "")]}, "properties: got {'p': ''}; expected names and values"),
    "high level": ({"delayLevel": 99}, "delayLevel: got 99; expected 0 to 18, or null"),
    "low level": ({"delayLevel": -1}, "delayLevel: got -1; expected 0 to 18, or null"),
    "key in bytes": ({"key": b"\xff"}, "key: got b'\\xff'; expected UTF-8"),
}


def test_row_that_cannot_be_sent_is_named_with_its_value_and_the_rule_and_no_other_is_stored(address: str) -> None:
    fields = [("body", pa.binary()), ("tags", pa.string()), ("properties", pa.map_(pa.string(), pa.string()))]
    others = [("key", pa.binary()), ("messageId", pa.string()), ("delayLevel", pa.int32())]
    options = write_options({"nameServer": address, "topic": "out"})
    named = re.escape("; correct or filter such rows, or set illegalRowsTopic (keys ")
    for row, reason in WRONG.values():
        rows = [{"body": b"good"}, {"body": b"x", **row, "messageId": "A1"}]
        batch = pa.RecordBatch.from_pylist(rows, pa.schema(fields + others))
        with pytest.raises(MessageIllegal, match=re.escape(reason) + ".*" + named + "None, messageId A1"):
            send_all(options, iter([batch]))


def test_rows_that_cannot_be_sent_go_to_a_topic_of_their_own(address: str) -> None:
    schema = pa.schema(
        [("body", pa.binary()), ("tags", pa.string()), ("delayLevel", pa.int32()), ("queueId", pa.int32())]
    )
    rows = [
        {"body": b"good", "queueId": 1},
        {"body": None, "tags": "t"},
        {"body": b"late", "delayLevel": 1},
        {"body": b"\xff", "delayLevel": 99},
        {"body": b"x", "queueId": 64},
        {"body": b"y" * (MAX_BODY_BYTES + 1)},
    ]
    options = write_options({"nameServer": address, "topic": "out", "illegalRowsTopic": "illegal"})
    sent = send_all(options, iter([pa.RecordBatch.from_pylist(rows, schema)]))
    assert (sent.messages, sent.illegal) == (6, 4)
    good = consumed(address, 2)
    assert {message.body: message.queue.queue_id for message in good}[b"good"] == 1
    illegal = [
        (message.properties["reason"], json.loads(message.body)["body"]) for message in consumed(address, 4, "illegal")
    ]
    (cut,) = (body for reason, body in illegal if f"got {MAX_BODY_BYTES + 1} bytes" in reason)
    assert cut == "y" * SHOWN_BYTES
    assert sorted((reason, body) for reason, body in illegal if body != cut) == [
        (f"body: got null; expected 1 to {MAX_BODY_BYTES} bytes", None),
        ("delayLevel: got 99; expected 0 to 18, or null", {"base64": "/w=="}),
        ("queueId: got 64; expected a queue of out to send to", "x"),
    ]


STRICT = pa.schema(
    [("body", pa.binary()), ("tags", pa.string()), ("keys", pa.list_(pa.string())), ("delayLevel", pa.int32())]
)
ROWS: dict[str, tuple[dict[str, Any], pa.Schema | None, list[str] | None]] = {
    "keys in one text": ({"body": "x", "keys": "a b"}, None, ["a", "b"]),
    "Kafka's key with a blank": ({"value": b"x", "key": b"a b"}, None, ["a", "b"]),
    "key with a blank": ({"body": b"x", "keys": ["a b"]}, STRICT, None),
    "several tags": ({"body": b"x", "tags": "a||b"}, STRICT, None),
    "delayed": ({"body": b"x", "keys": ["a"], "delayLevel": 1}, STRICT, ["a"]),
    "delayed with a blank tag": ({"body": b"x", "tags": " ", "delayLevel": 1}, STRICT, None),
    "delayed with a null key": ({"body": b"x", "keys": ["a", None], "delayLevel": 1}, STRICT, None),
}


@pytest.mark.parametrize(("row", "schema", "keys"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("count", [1, 2])
def test_row_alone_and_row_beside_another_have_the_same_rules(
    address: str, row: dict[str, Any], schema: pa.Schema | None, keys: list[str] | None, count: int
) -> None:
    options = write_options({"nameServer": address, "topic": "out", "illegalRowsTopic": "illegal"})
    sent = send_all(options, iter([pa.RecordBatch.from_pylist([row] * count, schema)]))
    assert (sent.messages, sent.illegal) == (count, 0 if keys else count)
    found = consumed(address, count, "out" if keys else "illegal")
    assert all(message.keys == (keys or []) for message in found)


def test_illegal_row_has_the_columns_that_were_written(address: str) -> None:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema([("value", pa.binary()), ("key", pa.binary()), ("headers", headers)])
    row = {"value": b"v", "key": b"k", "headers": [{"key": "a", "value": b"\xff"}, {"key": "b", "value": b"c"}]}
    options = write_options({"nameServer": address, "topic": "out", "illegalRowsTopic": "illegal"})
    send_all(options, iter([pa.RecordBatch.from_pylist([row], schema)]))
    (message,) = consumed(address, 1, "illegal")
    shown = [{"key": "a", "value": {"base64": "/w=="}}, {"key": "b", "value": "c"}]
    assert json.loads(message.body) == {"value": "v", "key": "k", "headers": shown}
    assert message.properties["reason"].startswith("headers: got ")


@pytest.mark.parametrize(
    "values",
    [
        {"body": "\x01" * MAX_BODY_BYTES},
        {"body": "\U0001f355" * MAX_BODY_BYTES},
        {"body": b"x", "properties": [(f"name {number}", "y" * 1000) for number in range(6000)]},
    ],
)
def test_an_illegal_row_fits_into_a_message_however_large_it_is(values: dict[str, Any]) -> None:
    body = illegal_row(values, "too large").body
    assert len(body) <= MAX_BODY_BYTES
    assert json.loads(body).keys() == values.keys()


def test_a_job_for_kafka_writes_its_columns(spark: SparkSession, address: str) -> None:
    rows = spark.range(100).selectExpr(
        "CAST(id AS STRING) AS value",
        "CAST(id % 7 AS STRING) AS key",
        "IF(id < 50, array(named_struct('key', 'h', 'value', CAST('w' AS BINARY))), NULL) AS headers",
        "IF(id = 99, 2, NULL) AS partition",
    )
    write(rows.repartition(1), address)
    found = {int(message.body): message for message in consumed(address, 100)}
    assert found.keys() == set(range(100))
    assert all(message.keys == [str(number % 7)] for number, message in found.items())
    assert {number for number, message in found.items() if message.properties.get("h") == "w"} == set(range(50))
    assert found[99].queue.queue_id == 2
    queues = {(number % 7, message.queue.queue_id) for number, message in found.items() if number != 99}
    assert len(queues) == 7, "one key, one queue"


def test_rows_wait_for_a_broker_that_is_away(broker: StoppableBroker) -> None:
    fill(broker.address, range(0), "out")
    options = write_options({"nameServer": broker.address, "topic": "out"})
    columns = {"body": [str(n) for n in range(2000)], "queueKey": ["k" if n % 2 else None for n in range(2000)]}
    rows = pa.RecordBatch.from_pydict(columns, pa.schema([("body", pa.string()), ("queueKey", pa.string())]))

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows.slice(0, 1000)
        broker.stop()
        threading.Timer(2.6, broker.start).start()
        yield rows.slice(1000)

    assert send_all(options, batches()).messages == 2000
    assert {int(message.body) for message in consumed(broker.address, 2000)} == set(range(2000))


def test_a_broker_that_stays_away_is_named_when_the_time_is_over(broker: StoppableBroker) -> None:
    broker.stop()
    options = write_options({"nameServer": broker.address, "topic": "out", "deliveryTimeoutMs": "300"})
    rows = pa.RecordBatch.from_pydict({"body": ["x"]})
    with pytest.raises(RocketletError, match=r"tried for 0 s \(deliveryTimeoutMs\): no name server can be reached"):
        send_all(options, iter([rows]))


def test_a_topic_cannot_be_overwritten(spark: SparkSession) -> None:
    rows = spark.range(1).selectExpr("'x' AS body").write.format("rocketlet")
    with pytest.raises(Exception, match=r"append"):
        rows.options(nameServer=f"127.0.0.1:{free_port()}", topic="out").mode("overwrite").save()


# Reading without membership, and batch reads: where they begin and end.


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


@pytest.mark.parametrize("trigger", [{"once": True}, {"processingTime": "100 milliseconds"}])
def test_every_trigger(spark: SparkSession, address: str, tmp_path: Path, trigger: dict[str, Any]) -> None:
    """Other tests have the default one, and `availableNow`."""
    fill(address, range(200))
    sink = Sink()
    writer = stream(spark, address, "g", maxRowsPerTrigger="150").writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(**trigger).start()
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
    assert seen[0]["metrics"]["queues"] == 4, "without that of the group's retries"
    assert seen[0]["metrics"]["avgOffsetsBehindLatest"] == 75.0
    ends = [end for text in seen[0]["offsets"]["t"]["broker-a"].values() for end in [text.split(":")[1]]]
    assert ends == ["100"] * 4


# How queries end: stopped, or with the planner killed.


def finished(checkpoint: Path) -> int:
    """How many offsets the batches hold that Spark's commit files say are done."""
    total = 0
    for path in (checkpoint / "commits").glob("[0-9]*"):
        offset = json.loads((checkpoint / "offsets" / path.name).read_text().splitlines()[-1])
        total += sum(end - begin for begin, end in from_offset(offset).ranges.values())
    return total


@pytest.mark.parametrize("moment", ["writing its commit", "about then", "later"])
def test_what_a_stopped_query_has_finished_is_committed_for_the_group(
    spark: SparkSession, address: str, tmp_path: Path, moment: str
) -> None:
    fill(address, range(400))
    sink = Sink()
    writer = (
        stream(spark, address, "g").writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    )
    query = writer.trigger(processingTime="1 hour").start()
    wait_for(lambda: len(sink.numbers) == 400)
    if moment != "writing its commit":
        wait_for(lambda: finished(tmp_path / "c") == 400)
    if moment == "later":
        wait_for(lambda: query.lastProgress is not None)
    query.stop()
    wait_for(lambda: not report(address, "g")["members"])
    assert committed(address, "g") == finished(tmp_path / "c")


def test_a_stopped_query_of_two_sources_in_one_group_commits_both(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(200), "t")
    fill(address, range(200, 400), "u")
    sink = Sink()
    both = stream(spark, address, "g").union(stream(spark, address, "g", topic="u"))
    query = (
        both.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(processingTime="1 hour")
        .start()
    )
    wait_for(lambda: len(sink.numbers) == 400)
    wait_for(lambda: any((tmp_path / "c" / "commits").glob("[0-9]*")))
    query.stop()
    wait_for(lambda: not report(address, "g")["members"])
    assert (committed(address, "g"), committed(address, "g", "u")) == (200, 200)


def test_a_query_that_is_stopped_within_a_batch_ends_behind_it(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    """As `rocketlet.spark.stop` does it: nothing is handed out again, and no further batch begins."""
    fill(address, range(400))
    begun, may_end = threading.Event(), threading.Event()
    batches: list[int] = []

    def sink(rows: DataFrame, batch: int) -> None:
        if rows.count():
            batches.append(batch)
            begun.set()
            assert may_end.wait(180)

    writer = stream(spark, address, "g", maxRowsPerTrigger="100").writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with ThreadPoolExecutor(1) as operator:
        stopped = operator.submit(rocketlet.spark.stop, query)
        may_end.set()
        stopped.result(180)
    wait_for(lambda: not report(address, "g")["members"])
    assert committed(address, "g") == finished(tmp_path / "c") == 100 * len(batches)


def test_a_stop_that_takes_too_long_lets_the_query_continue(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(100))
    sink, begun, may_end = Sink(), threading.Event(), threading.Event()

    def slow(rows: DataFrame, batch: int) -> None:
        begun.set()
        assert may_end.wait(180)
        sink(rows, batch)

    writer = stream(spark, address, "g").writeStream.foreachBatch(slow)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with pytest.raises(TimeoutError, match="has not ended for -1 s"):
        rocketlet.spark.stop(query, timeout_s=-1)
    may_end.set()
    fill(address, range(100, 200))
    wait_for(lambda: len(sink.numbers) == 200)
    query.stop()


@pytest.mark.parametrize("kind", ["standalone", "rate"])
def test_query_that_is_no_member_is_stopped_after_its_batch(
    spark: SparkSession, address: str, tmp_path: Path, kind: str
) -> None:
    fill(address, range(400))
    begun, may_end = threading.Event(), threading.Event()
    batches: list[int] = []

    def sink(rows: DataFrame, batch: int) -> None:
        if rows.count():
            batches.append(batch)
            begun.set()
            assert may_end.wait(180)

    frame = (
        stream(spark, address, "", membership="false", maxRowsPerTrigger="100")
        if kind == "standalone"
        else spark.readStream.format("rate").option("rowsPerSecond", "1000").load()
    )
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with ThreadPoolExecutor(1) as operator:
        stopped = operator.submit(rocketlet.spark.stop, query)
        may_end.set()
        stopped.result(180)
    assert not query.isActive
    assert kind == "rate" or finished(tmp_path / "c") == 100 * len(batches)


def test_query_that_has_begun_nothing_is_stopped(spark: SparkSession, address: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    frame = spark.readStream.format("text").load(str(tmp_path / "in"))
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    rocketlet.spark.stop(query, timeout_s=180)
    assert not query.isActive


def test_finished_batch_is_committed_and_handed_over_long_before_the_next_trigger(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(400))
    sink = Sink()
    frame = stream(spark, address, "g", releaseTimeoutMs="600000")
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(processingTime="10 hours").start()
    try:
        wait_for(lambda: len(sink.numbers) == 400)
        wait_for(lambda: committed(address, "g") == 400)
        with ConsumerStop(address, "g", "t", lambda message: service.append(message)) as consumer:
            service: list[Message] = []
            wait_for(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES // 2)
            fill(address, range(400, 600))  # a batch of 50 for each queue: fewer batches may miss the consumer's queues
            wait_for(lambda: len(service) == 100)
    finally:
        query.stop()
    assert not {int(message.body) for message in service} & set(range(400)), "rows of the batch came again"


def planner_pid(address: str, group: str) -> int:
    """The pid of a group's one member, which its client id names."""
    (member,) = report(address, group)["members"]
    return int(member["clientId"].partition("@")[2].partition("#")[0])


def test_a_planner_that_is_killed_is_named(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(100))
    sink = Sink()
    writer = (
        stream(spark, address, "g").writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    )
    query = writer.start()
    wait_for(lambda: len(sink.numbers) == 100)
    os.kill(planner_pid(address, "g"), signal.SIGKILL)
    with pytest.raises(Exception, match=r"the process \d+, which plans the query's batches, was ended by SIGKILL"):
        query.awaitTermination(60)


def test_the_ledger_says_what_was_finished_and_when_nothing_more_comes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    one, two, three = {"t": 1}, {"t": 2}, {"t": 3}
    ledger.record("g/%", "run", 0, one)
    assert ledger.wait_finished("g/%", one, {}, 5)
    assert not ledger.wait_finished("g/%", two, one, 0)
    ledger.record("g/%", "run", 0, one, has_ended=True)
    assert not ledger.wait_finished("g/%", two, one, 60)
    assert not ledger.wait_finished("g", one, {}, 0), "another group"
    ledger.forget("g/%")
    assert not ledger.wait_finished("g/%", one, {}, 0)
    ledger.record("g/%", "run", 0, two)
    ledger.forget("g/%")
    assert ledger.wait_finished("g/%", two, one, 5), "of a query that runs"
    ledger.record("g/%", "other run", 0, three, has_ended=True)
    assert ledger.wait_finished("g/%", two, one, 5), "another query of the group does not write over it"
    ledger.record("g/%", "run", 1, one)
    assert ledger.wait_finished("g/%", two, one, 5), "nor does another source of this query"
    assert ledger.wait_finished("g/%", one, {}, 5)
    ledger.remove()
    assert not ledger.wait_finished("g/%", one, {}, 60), "the driver has ended"


def test_hold_ends_when_its_driver_does_not_renew_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    for hold, release in (
        (ledger.hold_all, ledger.release_all),
        (partial(ledger.hold, "g"), partial(ledger.release, "g")),
    ):
        hold()
        assert ledger.is_held("g")
        release()
        assert not ledger.is_held("g")
        hold()
        with monkeypatch.context() as later:
            later.setattr("rocketlet.spark.driver.HOLD_S", -1.0)
            assert not ledger.is_held("g")
        assert not ledger.is_held("g"), "it is gone"
        assert len([text for text in caplog.messages if text.startswith("hold_expired")]) == 1
        caplog.clear()
    ledger.hold("h")
    assert not ledger.is_held("g")


def test_the_end_of_another_query_is_not_taken_for_that_of_this_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.record("g", "run", 0, {"t": 1})

    def others() -> None:
        ledger.record("g", "other run", 0, {"t": 8}, has_ended=True)
        ledger.record_end()
        ledger.record("g", "run", 0, {"t": 2})

    with ThreadPoolExecutor(1) as driver:
        driver.submit(others)
        assert ledger.wait_finished("g", {"t": 2}, {"t": 1}, 60)
