"""The program that `test_connect` runs: session is Spark Connect's. Prints how many rows it read, streamed and wrote."""

from __future__ import annotations

import os
import sys

import rocketlet.spark
from pyspark.sql import SparkSession


def main(address: str, checkpoint: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.remote("local[1]").getOrCreate()
    rocketlet.spark.register(spark)

    def count(topic: str) -> int:
        return spark.read.format("rocketlet").options(nameServer=address, topic=topic).load().count()

    read = count("t")
    rows = spark.readStream.format("rocketlet").options(nameServer=address, topic="t", group="g").load()
    writer = rows.writeStream.format("memory").queryName("streamed").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    streamed = spark.table("streamed").count()
    progress = query.lastProgress
    assert progress is not None
    assert set(rocketlet.spark.lag(progress).values()) == {0}
    frame = spark.range(5).selectExpr("cast(id AS string) AS body")
    frame.write.format("rocketlet").mode("append").options(nameServer=address, topic="out").save()
    print(type(spark).__module__, read, streamed, count("out"))
    try:
        spark.read.format("rocketlet").options(nameServer=address, topic="t", minPartitions="x").load().count()
    except Exception as error:
        print(str(error).splitlines()[0])
    running = rows.writeStream.format("noop").option("checkpointLocation", f"{checkpoint}2").start()
    try:
        rocketlet.spark.stop(running)
    except RuntimeError as error:
        print(error)
    running.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
