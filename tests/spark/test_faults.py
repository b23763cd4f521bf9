"""Faults around a query: brokers and topics away, messages gone or malformed. Each says so, and loses nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BrokerConfig
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.server import Listening, Server
from rocketlet.client import Access, Producer, RocketletError
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import SYS_COMPRESSED, RequestCode
from rocketlet.protocol.names import Queue, parse_subscription

from ..conftest import PATIENCE_S
from ..support.pacing import pass_real_time
from .conftest import StoppableBroker
from .running import MARKS, Sink, fill, run_once, stream, wait_for

pytestmark = MARKS
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rocketlet.spark.reading import QueueRange, Task, read_task
from rocketlet.spark.worker import DataLossError
from rocketlet.testing.ports import free_port


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


def rows_of(span: QueueRange) -> list[int]:
    return [offset for batch in read_task(Task((span,))) for offset in batch.column("queueOffset").to_pylist()]


def test_a_topic_that_does_not_exist_is_named(spark: SparkSession, address: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"the topic t does not exist on {address}: create it"):
        run_once(stream(spark, address, "g"), Sink(), tmp_path / "c")
    with pytest.raises(Exception, match="startingOffsets names t@broker-a:9, which does not exist"):
        fill(address, range(10))
        exact = '{"t": {"broker-a": {"9": 5}}}'
        run_once(stream(spark, address, "g", membership="false", startingOffsets=exact), Sink(), tmp_path / "d")


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
    broker.start()
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
            asyncio.to_thread(rows_of, queue_range(broker.address, 0, 100, patience_s=PATIENCE_S))
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
            await asyncio.to_thread(rows_of, queue_range(address, 0, 3000))
        rows = await asyncio.to_thread(rows_of, queue_range(address, 0, 3000, fail=False))
    assert rows == list(range(rows[0], 3000))
    assert 0 < rows[0] < 3000
