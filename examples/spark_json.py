"""JSON bodies as columns, and rows as messages: large orders go from the topic `orders` to the topic `large-orders`.

Needs a broker: `rocketlet start`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import rocketlet.spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

ORDER = "id INT, customer STRING, total DOUBLE, items ARRAY<STRUCT<sku: STRING, count: INT>>"


def send_some(spark: SparkSession, name_server: str) -> None:
    orders = [
        (
            json.dumps({"id": n, "customer": f"c{n % 3}", "total": n * 1.5, "items": [{"sku": "a", "count": n}]}),
            f"order-{n}",
        )
        for n in range(100)
    ]
    rows = spark.createDataFrame(orders, "body STRING, keys STRING")
    rows.write.format("rocketlet").option("nameServer", name_server).option("topic", "orders").mode("append").save()


def large_orders(rows: DataFrame) -> DataFrame:
    """Return the large orders. A body that is not such JSON becomes null columns and is left out."""
    orders = rows.select("messageId", "keys", f.from_json(f.col("body").cast("string"), ORDER).alias("order"))
    return orders.where("order.total > 100").select(
        f.to_json("order").alias("body"),
        f.col("order.customer").alias("queueKey"),  # the orders of one customer stay in order
        f.lit("large").alias("tags"),
        "keys",
        "messageId",  # equal when a batch is repeated, so that consumers recognize it
    )


def main(name_server: str = "127.0.0.1:9876") -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers run what this program runs
    spark = SparkSession.builder.appName("large orders").getOrCreate()
    rocketlet.spark.register(spark)
    send_some(spark, name_server)
    source = spark.readStream.format("rocketlet").option("nameServer", name_server)
    rows = source.option("group", "large-orders").option("topic", "orders").load()
    sink = large_orders(rows).writeStream.format("rocketlet").option("nameServer", name_server)
    with tempfile.TemporaryDirectory() as checkpoint:  # a real job keeps it
        query = sink.option("topic", "large-orders").option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
    sent = spark.read.format("rocketlet").option("nameServer", name_server).option("topic", "large-orders").load()
    print(f"large orders: {sent.select('messageId').distinct().count()}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
