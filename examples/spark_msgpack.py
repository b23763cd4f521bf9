"""MessagePack bodies as columns, decoded a whole Arrow batch at a time. Needs a broker: `rocketlet start`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator

import msgpack
import pyarrow as pa
import rocketlet.spark
from pyspark.sql import SparkSession
from rocketlet import Producer

READING = "queueOffset BIGINT, sensor STRING, celsius DOUBLE"
ARROW_READING = pa.schema([("queueOffset", pa.int64()), ("sensor", pa.string()), ("celsius", pa.float64())])


def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """On the workers. A body that is no MessagePack map ends the query; catch the error here to continue without it."""
    for batch in batches:
        readings = [msgpack.unpackb(body) for body in batch.column("body").to_pylist()]
        columns = [
            batch.column("queueOffset"),
            pa.array([reading.get("sensor") for reading in readings], pa.string()),
            pa.array([reading.get("celsius") for reading in readings], pa.float64()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW_READING)


async def send_some(name_server: str) -> None:
    async with Producer(name_server) as producer:
        for number in range(100):
            await producer.send("readings", msgpack.packb({"sensor": f"s{number % 4}", "celsius": 20 + number / 10}))


def main(name_server: str = "127.0.0.1:9876") -> None:
    asyncio.run(send_some(name_server))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers run what this program runs
    spark = SparkSession.builder.appName("readings").getOrCreate()
    rocketlet.spark.register(spark)
    rows = spark.read.format("rocketlet").option("nameServer", name_server).option("topic", "readings").load()
    readings = rows.select("queueOffset", "body").mapInArrow(decode, READING)  # the same with readStream
    readings.groupBy("sensor").avg("celsius").orderBy("sensor").show()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
