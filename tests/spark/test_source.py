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
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import Access, RocketletError
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import SYS_COMPRESSED, RequestCode
from rocketlet.protocol.names import parse_subscription
from rocketlet.spark import RocketletDataSource, lag, register
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.member_queues import MemberQueueState
from rocketlet.spark.options import batch_options, stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.pushdown import NarrowedReader
from rocketlet.spark.reading import QueueRange, Task, read_task
from rocketlet.spark.worker import DataLossError
from rocketlet.testing.ports import free_port

from ..support.pacing import pass_real_time
from .conftest import StoppableBroker
from .running import MARKS


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
    member = Planner(stream_options({"nameServer": address, "topic": "t", "group": "g"}), EMPTY)

    async def join(finish: Callable[[], None]) -> None:
        """Joins, sees that the queues stay where they are, lets the batch end, and sees them come."""
        async with Consumer(address, "g", "t", None, start="first") as consumer:

            def mine() -> int:
                return sum(queue.topic == "t" for queue in consumer.assignment())

            table = member_of(member).table
            await eventually(
                lambda: sum(item.state is MemberQueueState.DRAINING for item in table.owned().values()) >= QUEUES // 2
            )
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
    member = Planner(stream_options({"nameServer": address, "topic": "t", "group": "g"}), EMPTY)
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
    assert "body: got ''; expected 1 to" in beginning(rows.options(nameServer=address, topic="t").save)


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
    register(spark)


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


# Faults around a query: brokers and topics away, messages gone or malformed. Each says so, and loses nothing.


@contextmanager
def running(spark: SparkSession, address: str, sink: Any, folder: Path, **options: str) -> Iterator[StreamingQuery]:
    writer = stream(spark, address, "g", **options).writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(folder / "c")).start()
    try:
        yield query
    finally:
        query.stop()


def queue_range(
    address: str, begin: int, end: int, *, fail: bool = True, queue_id: int = 0, patience_s: float = 2.0
) -> QueueRange:
    queue = Queue("t", "broker-a", queue_id)
    everything = parse_subscription("t", "*", version=1)
    return QueueRange(
        queue, begin, end, address, Access(), "g", everything, fail, 1000, patience_s, ("queueOffset", "body")
    )


def rows_of_faults(span: QueueRange) -> list[int]:
    return [offset for batch in read_task(Task((span,))) for offset in batch.column("queueOffset").to_pylist()]


@pytest.mark.parametrize("membership", ["true", "false"])
def test_a_broker_that_is_away_for_long_ends_the_query_which_continues_when_it_is_back(
    spark: SparkSession, broker: StoppableBroker, tmp_path: Path, membership: str
) -> None:
    fill(broker.address, range(100))
    sink = Sink()
    with running(spark, broker.address, sink, tmp_path, membership=membership, pollTimeoutMs="4000") as query:
        wait_for(lambda: len(sink.numbers) == 100)
        broker.stop()
        with pytest.raises(
            Exception, match=r"no broker of .*t has answered for .*the query resumes from its checkpoint"
        ):
            query.awaitTermination(180)
    broker.start(ahead_s=120)  # the leases of the member that could not leave have ended
    fill(broker.address, range(100, 200))
    with running(spark, broker.address, sink, tmp_path, membership=membership):
        wait_for(lambda: len(sink.numbers) == 200)
    assert sink.numbers == Counter(range(200))


def test_a_broker_that_restarts_is_waited_for(spark: SparkSession, broker: StoppableBroker, tmp_path: Path) -> None:
    fill(broker.address, range(100))
    sink = Sink()
    with running(spark, broker.address, sink, tmp_path) as query:
        wait_for(lambda: len(sink.numbers) == 100)
        broker.stop()
        asyncio.run(pass_real_time(1))
        broker.start()
        fill(broker.address, range(100, 200))
        wait_for(lambda: len(sink.numbers) == 200)
        assert query.isActive
    assert sink.numbers == Counter(range(200))


def test_a_task_waits_for_its_broker_for_some_seconds(broker: StoppableBroker) -> None:
    fill(broker.address, range(400))
    batches = read_task(Task((queue_range(broker.address, 0, 100),)))
    broker.stop()
    with pytest.raises(RocketletError, match=r"t@broker-a:0 cannot be read at 0, tried for 2 s: .*cannot connect"):
        next(batches)

    async def restarted() -> list[int]:
        reading = asyncio.create_task(
            asyncio.to_thread(rows_of_faults, queue_range(broker.address, 0, 100, patience_s=PATIENCE_S))
        )
        await pass_real_time(0.7)
        await asyncio.to_thread(broker.start)
        return await reading

    assert asyncio.run(restarted()) == list(range(100))


def test_a_message_that_cannot_be_decoded_is_named_or_comes_without_its_body(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    async def send() -> None:
        cluster = ClusterView(address)
        connection = await cluster.connection(address)
        fields: dict[str, str | int] = {
            "a": "g",
            "b": "t",
            "c": "TBW102",
            "d": 4,
            "e": 0,
            "f": SYS_COMPRESSED,
            "g": 0,
            "h": 0,
            "i": "",
            "j": 0,
        }
        await connection.request(RequestCode.SEND_MESSAGE_V2, fields, b"this is no zlib stream")
        await cluster.close()

    uvloop.run(send())
    with pytest.raises(Exception, match="t@broker-a:0: the message at offset 0 cannot be decoded"):
        run_once(stream(spark, address, "g"), Sink(), tmp_path / "c")
    sink = Sink()
    run_once(stream(spark, address, "g", failOnDataLoss="false"), sink, tmp_path / "c")
    assert [(row.queueOffset, row.body) for rows in sink.batches.values() for row in rows] == [(0, None)]


async def test_a_range_whose_begin_has_expired_fails_or_begins_later(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    config = BrokerConfig(data_dir=tmp_path, address=address, name="broker-a", segment_bytes=1 << 20, retain_hours=0)
    routes = Routes()
    broker = BrokerController(config, routes)
    async with (
        Server(Listening("127.0.0.1", port), broker=broker, routes=routes),
        Producer(address, default_queues=1) as producer,
    ):
        for _ in range(30):
            await producer.send_batch("t", [b"x" * 1000] * 100)
        await pass_real_time(0.01)
        await broker.expire_segments()
        with pytest.raises(
            DataLossError,
            match=r"the offsets 0 to .* are gone from the broker; failOnDataLoss=false continues without them",
        ):
            await asyncio.to_thread(rows_of_faults, queue_range(address, 0, 3000))
        rows = await asyncio.to_thread(rows_of_faults, queue_range(address, 0, 3000, fail=False))
    assert rows == list(range(rows[0], 3000))
    assert 0 < rows[0] < 3000


# Filters that Spark hands to a batch read: what no row can pass is not read, and rows are the same.


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
