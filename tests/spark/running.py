"""The parts that tests of the running source share: a filled broker, queries, and sinks that remember."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rocketlet.client import AdminClient, Outgoing, Producer
from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.headers import CreateTopic, QueueOffset, write

from ..support.pacing import pace

pytest.importorskip("pyspark")
from pyspark.sql import DataFrame, SparkSession
from rocketlet.spark.checkpoint import MicroBatch

MARKS = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("java") is None, reason="Java is missing, which Spark needs"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
QUEUES = 4


def fill(address: str, numbers: range, topic: str = "t") -> None:
    async def run() -> None:
        cluster = ClusterView(address)
        connection = await cluster.connection(address)
        if await cluster.find_route(topic) is None:
            await connection.request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, QUEUES, QUEUES, 6)))
        await cluster.close()
        async with Producer(address) as producer:
            for at in range(numbers.start, numbers.stop, 50):
                batch = [
                    Outgoing(b"%d" % n, tag="A" if n % 2 else "B", keys=["k", str(n)])
                    for n in numbers[at - numbers.start :][:50]
                ]
                await producer.send_batch(topic, batch)

    uvloop.run(run())


def committed(address: str, group: str, topic: str = "t") -> int:
    """The sum of the group's offsets over the topic's queues."""

    async def run() -> int:
        cluster = ClusterView(address)
        connection = await cluster.connection(address)
        total = 0
        for queue in range(QUEUES):
            ext = write(QueueOffset(group, topic, queue))
            total += int((await connection.request(RequestCode.QUERY_CONSUMER_OFFSET, ext)).ext["offset"])
        await cluster.close()
        return total

    return uvloop.run(run())


def report(address: str, group: str) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with AdminClient(address) as admin:
            return (await admin.history(group))[0]

    return uvloop.run(run())


def wait_for(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "not in time"
        uvloop.run(pace(0.05))


def stream(spark: SparkSession, address: str, group: str, **options: str) -> DataFrame:
    reader = (
        spark.readStream.format("rocketlet").option("nameServer", address).option("topic", "t").option("group", group)
    )
    return reader.options(**options).load()


def rows_of(batch: MicroBatch) -> int:
    return sum(end - begin for begin, end in batch.ranges.values())


class Sink:
    """Keeps each batch's rows; a batch that is repeated replaces its first run."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}
        self.fail_on: int | None = None

    def __call__(self, rows: DataFrame, batch: int) -> None:
        self.batches[batch] = rows.collect()
        if batch == self.fail_on:
            raise RuntimeError("the sink failed")

    @property
    def numbers(self) -> Counter[int]:
        batches = list(self.batches.values())  # another thread adds some
        return Counter(int(bytes(row.body)) for rows in batches for row in rows)


def run_once(frame: DataFrame, sink: Sink, checkpoint: Path) -> None:
    query = (
        frame.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def output(command: list[str | Path], **environment: str) -> str:
    variables = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **environment}
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
