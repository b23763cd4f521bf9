"""A Spark job in a process of its own: reads a topic to its end and prints the sum of the bodies."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from rocketlet.spark import register

address, topic, group, folder = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
register(spark)
rows = (
    spark.readStream.format("rocketlet")
    .options(nameServer=address, topic=topic, group=group)
    .load()
    .selectExpr("cast(string(body) as long) as number")
)
query = (
    rows.writeStream.format("parquet")
    .option("path", str(Path(folder) / "rows"))
    .option("checkpointLocation", str(Path(folder) / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(spark.read.parquet(str(Path(folder) / "rows")).selectExpr("sum(number)").collect()[0][0])
spark.stop()
