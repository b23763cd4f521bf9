"""The Spark source on a real broker: every trap that was measured has its test."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rocketlet.client import ConfigError, Consumer, Message, Producer, RetryLater
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, eventually
from .planners import member_of
from .running import MARKS, QUEUES, Sink, committed, fill, report, rows_of, run_once, stream, wait_for

pytestmark = MARKS
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType
from rocketlet.spark import RocketletDataSource, _worker_fault, lag, register
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.options import stream_options
from rocketlet.spark.source import make_planner
from rocketlet.testing.ports import free_port


def test_available_now_reads_all_rows_once_commits_them_and_ends(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(1000))
    sink = Sink()
    run_once(stream(spark, address, "g", maxRowsPerTrigger="300"), sink, tmp_path / "c")
    assert sink.numbers == Counter(range(1000))
    assert all(len(rows) <= 300 for rows in sink.batches.values())
    assert committed(address, "g") == 1000, "also the last batch, though no further one was built"
    joined = [event for event in report(address, "g")["events"] if event["event"] == "joined"]
    assert len(joined) == 1, "Spark makes several readers, but only one is a member"
    row = next(row for rows in sink.batches.values() for row in rows if int(bytes(row.body)) == 7)
    assert (row.topic, row.brokerName, row.tags, row["keys"]) == ("t", "broker-a", "A", ["k", "7"])
    assert row.properties["TAGS"] == "A"
    assert row.messageId == row.properties["UNIQ_KEY"]
    assert abs(row.storeTime.timestamp() - time.time()) < 600
    assert row.bornTime <= row.storeTime


def test_a_query_resumes_from_its_checkpoint(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(200))
    first, second = Sink(), Sink()
    run_once(stream(spark, address, "g"), first, tmp_path / "c")
    fill(address, range(200, 300))
    run_once(stream(spark, address, "g"), second, tmp_path / "c")
    assert first.numbers == Counter(range(200))
    assert second.numbers == Counter(range(200, 300))


def test_a_batch_that_failed_is_read_again_exactly(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(400))
    sink = Sink()
    sink.fail_on = 1
    frame = stream(spark, address, "g", maxRowsPerTrigger="150")
    with pytest.raises(Exception, match="the sink failed"):
        run_once(frame, sink, tmp_path / "c")
    failed = {(row.queueId, row.queueOffset) for row in sink.batches[1]}
    fill(address, range(400, 500))  # a batch planned again would take other ranges now
    sink.fail_on = None
    run_once(frame, sink, tmp_path / "c")
    assert {(row.queueId, row.queueOffset) for row in sink.batches[1]} == failed
    assert sink.numbers == Counter(range(500))


def test_tags_are_filtered(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(100))
    sink = Sink()
    run_once(stream(spark, address, "g", tags="A"), sink, tmp_path / "c")
    assert sink.numbers == Counter(range(1, 100, 2))
    assert committed(address, "g") == 100


def test_a_query_shares_its_group_with_a_consumer_and_nothing_is_lost(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(100))
    sink = Sink()
    frame = stream(spark, address, "g")
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c")).start()
    seen: Counter[int] = Counter()

    async def consume(until: Callable[[], bool], numbers: range) -> None:
        async def handle(message: Message) -> None:
            seen[int(message.body)] += 1

        async with Consumer(address, "g", "t", handle, start="first") as consumer, Producer(address) as producer:
            await eventually(
                lambda: len([queue for queue in consumer.assignment() if queue.topic == "t"]) >= QUEUES // 2
            )
            for number in numbers:
                await producer.send("t", b"%d" % number)
            await eventually(until)

    def all_there() -> bool:
        return len(seen.keys() | sink.numbers.keys()) == 200

    try:
        wait_for(lambda: len(sink.numbers) == 100)
        uvloop.run(asyncio.wait_for(consume(all_there, range(100, 200)), PATIENCE_S))
        assert seen
        fill(address, range(200, 300))  # the consumer has left: the query has every queue again
        wait_for(lambda: len(seen.keys() | sink.numbers.keys()) == 300)
    finally:
        query.stop()
    assert sink.numbers + seen == Counter(range(300)), "each row once, by one or by the other"
    wait_for(lambda: not report(address, "g")["members"])


def test_what_another_member_failed_to_handle_comes_with_its_first_topic(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(50))
    tried: set[int] = set()

    async def fail_all() -> None:
        async def handle(message: Message) -> RetryLater:
            tried.add(int(message.body))
            return RetryLater(delay_level=1)

        async with Consumer(address, "g", "t", handle, start="first"):
            await eventually(lambda: len(tried) == 50)

    uvloop.run(asyncio.wait_for(fail_all(), PATIENCE_S))
    sink = Sink()
    query = stream(spark, address, "g", tags="A").writeStream.foreachBatch(sink)
    running = query.option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        wait_for(lambda: len(sink.numbers) == 50)
    finally:
        running.stop()
    rows = [row for batch in sink.batches.values() for row in batch]
    assert sink.numbers == Counter(range(50)), (
        "also those whose tag the query does not want: the group failed to handle them"
    )
    assert {(row.topic, row.reconsumeTimes) for row in rows} == {("t", 1)}


def test_a_queue_in_a_running_batch_is_given_up_only_when_the_batch_is_done(address: str) -> None:
    fill(address, range(400))
    member = make_planner(stream_options({"nameServer": address, "topic": "t", "group": "g"}), EMPTY)

    async def join(finish: Callable[[], None]) -> None:
        """Joins, sees that the queues stay where they are, lets the batch end, and sees them come."""
        async with Consumer(address, "g", "t", None, start="first") as consumer:

            def mine() -> int:
                return sum(queue.topic == "t" for queue in consumer.assignment())

            readings = member_of(member)._readings
            await eventually(lambda: sum(reading.leaving for reading in readings.values()) >= QUEUES // 2)
            assert mine() == 0
            await asyncio.get_running_loop().run_in_executor(None, finish)
            await eventually(lambda: mine() >= QUEUES // 2)

    try:
        planned = member.plan(None)
        assert planned is not None
        assert rows_of(planned) == 400
        uvloop.run(asyncio.wait_for(join(lambda: member.finish(planned)), PATIENCE_S))
        assert committed(address, "g") == 400
    finally:
        member.close()


def test_a_queue_lost_and_won_back_continues_from_the_groups_offset(address: str) -> None:
    fill(address, range(400))  # 100 in each queue
    member = make_planner(stream_options({"nameServer": address, "topic": "t", "group": "g"}), EMPTY)
    seen: set[int] = set()
    try:
        planned = member.plan(40)
        assert planned is not None
        member.finish(planned)

        async def consume_some() -> None:
            async def handle(message: Message) -> None:
                seen.add(int(message.body))

            async with Consumer(address, "g", "t", handle, start="first") as consumer:
                await eventually(
                    lambda: (
                        sum(queue.topic == "t" for queue in consumer.assignment()) >= QUEUES // 2 and len(seen) >= 180
                    )
                )

        uvloop.run(asyncio.wait_for(consume_some(), PATIENCE_S))
        before = committed(address, "g")
        assert before == 40 + 180
        wait_for(lambda: len(member_of(member).queues()) == QUEUES + 1)  # and the retries
        rest = member.plan(None)
        assert rest is not None
        assert rows_of(rest) == 400 - before
    finally:
        member.close()


def test_a_range_that_expired_fails_the_query_and_says_what_to_set(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(100))
    sink = Sink()
    run_once(stream(spark, address, "g"), sink, tmp_path / "c")
    offsets = sorted((tmp_path / "c" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    lines = offsets[-1].read_text().splitlines()
    beyond = {"t": {"broker-a": {"0": "100000:100010"}}}
    (tmp_path / "c" / "offsets" / str(int(offsets[-1].name) + 1)).write_text(
        "\n".join([*lines[:2], json.dumps(beyond)])
    )
    with pytest.raises(Exception, match="failOnDataLoss"):
        run_once(stream(spark, address, "g"), sink, tmp_path / "c")


def test_a_wrong_option_stops_the_query_with_its_name(spark: SparkSession, address: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="maxrowspertriger is unknown"):
        run_once(stream(spark, address, "g", maxRowsPerTriger="5"), Sink(), tmp_path / "c")


def test_errors_begin_with_our_sentence(spark: SparkSession, address: str, tmp_path: Path) -> None:
    def beginning(work: Callable[[], object]) -> str:
        with pytest.raises(Exception, match="rocketlet") as caught:
            work()
        return "\n".join(str(caught.value).splitlines()[:2])

    table = spark.read.format("rocketlet").option("nameServer", address).option("topic", "t")
    assert "the option minPartitions is 'x'" in beginning(lambda: table.option("minPartitions", "x").load().count())
    wrong = stream(spark, address, "g", failOnDataLoss="maybe")
    assert "the option failOnDataLoss is 'maybe'" in beginning(lambda: run_once(wrong, Sink(), tmp_path / "a"))
    rows = spark.range(1).selectExpr("'' AS body").write.format("rocketlet").mode("append")
    assert "the body is empty" in beginning(rows.options(nameServer=address, topic="t").save)


def test_each_session_of_a_driver_has_the_format(spark: SparkSession, address: str) -> None:
    fill(address, range(100))
    other = spark.newSession()
    try:
        for session in (other, spark):
            register(session)
            read = session.read.format("rocketlet").option("nameServer", address)
            assert read.option("topic", "t").load().count() == 100
            rows = session.range(10).selectExpr("cast(id AS string) AS body").write.format("rocketlet").mode("append")
            rows.options(nameServer=address, topic="t2").save()
    finally:
        spark.createDataFrame([], "none STRING")  # the active session again


def test_a_view_is_what_sql_reads(spark: SparkSession, address: str) -> None:
    fill(address, range(100))
    options = f"OPTIONS (nameServer '{address}', topic 't')"
    spark.sql(f"CREATE TEMPORARY VIEW orders_view USING rocketlet {options}")
    assert spark.sql("SELECT count(*) FROM orders_view").collect()[0][0] == 100
    spark.sql(f"CREATE TABLE orders_table USING rocketlet {options}")
    try:
        with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW v USING rocketlet OPTIONS"):
            spark.sql("SELECT count(*) FROM orders_table").collect()
    finally:
        spark.sql("DROP TABLE orders_table")
        spark.sql("DROP VIEW orders_view")


def test_a_listener_reads_the_lag_of_each_queue(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(400))
    lags: list[dict[Queue, int]] = []

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None: ...  # noqa: N802 (Spark's names)
        def onQueryTerminated(self, event: Any) -> None: ...  # noqa: N802
        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            lags.append(lag(event.progress))

    listener = Listener()
    spark.streams.addListener(listener)
    try:
        run_once(stream(spark, address, "g", maxRowsPerTrigger="100"), Sink(), tmp_path / "c")
        wait_for(lambda: len(lags) >= 4)
    finally:
        spark.streams.removeListener(listener)
    queues = [Queue("t", "broker-a", queue_id) for queue_id in range(QUEUES)]
    assert [[found[queue] for queue in queues] for found in lags[:4]] == [[left] * QUEUES for left in (75, 50, 25, 0)]


def test_workers_that_would_run_another_python_are_named_immediately(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/bin/sh")
    with pytest.raises(RuntimeError, match="set PYSPARK_PYTHON="):
        register(spark)


def test_the_same_python_spelled_otherwise_is_accepted(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(sys.executable)
    spelled = program.parent / ".." / program.parent.name / program.name
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(spelled))
    assert _worker_fault(spark) is None


def test_what_an_old_pyspark_lacks_is_said_at_start(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.0")
    with pytest.warns(UserWarning, match=r"readStream needs pyspark 4.2 or later .*; read and write work"):
        register(spark)
    options = {"nameServer": "h:1", "topic": "t", "group": "g"}
    refused: Any = RocketletDataSource(options).streamReader(StructType())
    for ask in (refused.initialOffset, refused.latestOffset):
        with pytest.raises(ConfigError, match=r"can neither limit a Python stream nor end it"):
            ask()
    assert RocketletDataSource(options).reader(StructType())
    monkeypatch.setattr("pyspark.__version__", "4.0.0")
    with pytest.raises(ConfigError, match=r"writeStream 4\.1"):
        RocketletDataSource(options).streamWriter(StructType(), False)


def test_a_name_server_that_is_away_is_named(spark: SparkSession, tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    with pytest.raises(Exception, match=f"no name server can be reached.*{gone}"):
        run_once(stream(spark, gone, "g"), Sink(), tmp_path / "c")
