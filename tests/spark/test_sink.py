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
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rocketlet.spark.config import SHOWN_BYTES
from rocketlet.spark.options import write_options
from rocketlet.spark.sink import illegal_row, send_all
from rocketlet.testing.ports import free_port


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
        (["cast(id AS string) AS body", "id AS offset"], {}, "column offset is not a column of a message"),
        (["'x' AS body", "'x' AS value"], {}, "columns value and body mean the same"),
        (["'x' AS value", "int(77) AS partition"], {}, "a row's queueId is 77; out has no such queue to send to"),
        (["'x' AS value", "X'FF' AS key"], {}, "a row's key or one of its headers is not UTF-8"),
        (
            ["cast(null AS string) AS body"],
            {},
            "a row's body is null; correct or filter such rows, or set illegalRowsTopic",
        ),
        (["'' AS body"], {}, "the body is empty"),
        (["'x' AS body", "map('a', '') AS properties"], {}, "neither may be blank"),
        (["'x' AS body"], {"batchByte": "5"}, "batchbyte is unknown"),
        (["'x' AS body", "99 AS delayLevel"], {}, "a row's delayLevel is 99; allowed: 0 to 18"),
        (["'x' AS body", "-1 AS delayLevel"], {}, "a row's delayLevel is -1; allowed: 0 to 18"),
        (
            ["'x' AS body"],
            {"nameServer": "127.0.0.1:1", "deliveryTimeoutMs": "100"},
            "rows could not be sent, tried for 0 s .*no name server can be reached",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(
    spark: SparkSession, address: str, columns: list[str], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(Exception, match=reason):
        write(spark.range(3).selectExpr(*columns), address, **options)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": b""}, "the body is empty"),
        ({"body": b"x" * (MAX_BODY_BYTES + 1)}, f"{MAX_BODY_BYTES} are allowed"),
        ({"body": b"x", "tags": " "}, "the tag ' ' may neither be blank"),
        ({"body": b"x", "properties": [("p", "")]}, "the property 'p' has the value ''"),
    ],
)
def test_a_row_that_cannot_be_sent_is_distinguished_from_others(address: str, row: dict[str, Any], reason: str) -> None:
    fields = [("body", pa.binary()), ("tags", pa.string()), ("properties", pa.map_(pa.string(), pa.string()))]
    schema = pa.schema([*fields, ("keys", pa.list_(pa.string())), ("messageId", pa.string())])
    rows = [{"body": b"good"}, {**row, "keys": ["4711"], "messageId": "A1"}]
    options = write_options({"nameServer": address, "topic": "out"})
    named = re.escape("; correct or filter such rows, or set illegalRowsTopic (keys ['4711'], messageId A1)")
    with pytest.raises(MessageIllegal, match=reason + ".*" + named):
        send_all(options, iter([pa.RecordBatch.from_pylist(rows, schema)]))


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
    (cut,) = (body for reason, body in illegal if f"{MAX_BODY_BYTES} are allowed" in reason)
    assert cut == "y" * SHOWN_BYTES
    assert sorted((reason, body) for reason, body in illegal if body != cut) == [
        ("a row's body is null", None),
        ("a row's delayLevel is 99; allowed: 0 to 18, or null", {"base64": "/w=="}),
        ("a row's queueId is 64; out has no such queue to send to", "x"),
    ]


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
