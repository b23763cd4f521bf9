"""Counts the messages of a topic by tag, as a member of the group `counts`. Needs a broker: `rocketlet start`.

On a cluster, whose workers have rocketlet too: `spark-submit --master spark://host:7077 spark_stream.py host:9876 orders`
"""

from __future__ import annotations

import os
import sys

import rocketlet.spark
from pyspark.sql import SparkSession


def main(name_server: str = "127.0.0.1:9876", topic: str = "greetings") -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers run what this program runs
    spark = SparkSession.builder.appName("counts").getOrCreate()
    rocketlet.spark.register(spark)
    rows = (
        spark.readStream.format("rocketlet")
        .option("nameServer", name_server)
        .option("topic", topic)
        .option("group", "counts")
        .load()
    )
    counts = rows.groupBy("tags").count()
    query = counts.writeStream.outputMode("complete").format("console").trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
