"""A Spark job in a process of its own: a topic goes to another one as a stream, and is read there in a batch.

Prints the sum of the bodies, how many rows lie before and after the time of the start, and how many a filter lets through.
"""

import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from rocketlet.spark import register

address, topic, group, folder = sys.argv[1:5]
access = dict(option.split("=", 1) for option in sys.argv[5:])  # as tls=true
started_ms = str(int(time.time() * 1000))
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
register(spark)
stream = spark.readStream.format("rocketlet").options(nameServer=address, topic=topic, group=group, **access).load()
rows = stream.selectExpr("body", "tags", "properties", "messageId", "cast(queueId as string) as queueKey")
query = (
    rows.writeStream.format("rocketlet")
    .options(nameServer=address, topic=f"{topic}-copy", **access)
    .option("checkpointLocation", str(Path(folder) / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()


def table(**options: str) -> DataFrame:
    return spark.read.format("rocketlet").options(nameServer=address, **access, **options).load()


copied = table(topic=f"{topic}-copy")
total = copied.selectExpr("sum(cast(string(body) as long))").collect()[0][0]
before = table(topicPattern=topic, endingTimestamp=started_ms).count()
after = table(topic=f"{topic}-copy", startingTimestamp=started_ms).count()
filtered = table(topic=f"{topic}-copy", sql="number > 40").count()
print(total, before, after, filtered)
spark.stop()
