"""A job with something of all that the tests' jobs do, so that its classes are theirs. Ends when its virtual machine has."""

from __future__ import annotations

import tempfile
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rocketlet.spark import register
from rocketlet.testing import Broker


def main() -> None:
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    machine: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    with Broker() as broker, tempfile.TemporaryDirectory() as folder:
        broker.create_topic("t", 2)
        batches(spark, broker.address, folder)
        streams(spark, broker.address, folder)
    spark.stop()
    machine.stdin.close()  # it ends then, and writes the archive
    machine.wait()


def batches(spark: SparkSession, address: str, folder: str) -> None:
    rows = spark.createDataFrame(
        [(f'{{"id": {number}}}', f"k{number}") for number in range(100)], "body STRING, keys STRING"
    )
    rows.write.format("rocketlet").option("nameServer", address).option("topic", "t").mode("append").save()
    table = spark.read.format("rocketlet").option("nameServer", address).option("topic", "t").load()
    table.createOrReplaceTempView("messages")
    spark.sql("SELECT queueId, count(*) FROM messages GROUP BY queueId ORDER BY queueId").show()
    orders = table.select("messageId", f.from_json(f.col("body").cast("string"), "id INT").alias("order"))
    orders.where("order.id > 10").select(f.to_json("order").alias("body")).write.parquet(f"{folder}/parquet")
    spark.read.parquet(f"{folder}/parquet").distinct().collect()


def streams(spark: SparkSession, address: str, folder: str) -> None:
    def write(batch: DataFrame, number: int) -> None:
        batch.collect()

    reader = spark.readStream.format("rocketlet").option("nameServer", address).option("topic", "t")
    counts = reader.option("group", "g").load().groupBy("topic").count()
    rows = reader.option("group", "h").load()
    for name, writer in {
        "counts": counts.writeStream.format("memory").queryName("counts").outputMode("complete"),
        "rows": rows.writeStream.foreachBatch(write),
        "sent": rows.select("body").writeStream.format("rocketlet").option("nameServer", address).option("topic", "u"),
    }.items():
        query = writer.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True).start()
        query.awaitTermination()


if __name__ == "__main__":
    main()
