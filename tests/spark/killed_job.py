"""The job that `test_kills` kills: a query with an idempotent sink, on two executors of their own processes. The run that
reads the rest and ends needs none of its own.

It says `begun N` when the sink gets batch N, and `written N` when the rows are where they stay.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from rocketlet.spark import register


def main(address: str, folder: str, available_now: bool) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]" if available_now else "local-cluster[2,1,600]")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.memory", "600m")
        .config("spark.task.maxFailures", "8")
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    register(spark)

    def write(rows: DataFrame, batch: int) -> None:
        print("begun", batch, flush=True)
        found = [[row.queueId, row.queueOffset, row.body.decode()] for row in rows.collect()]
        path = Path(folder) / "batches" / f"{batch}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.rename(path)
        print("written", batch, flush=True)

    reader = (
        spark.readStream.format("rocketlet").option("nameServer", address).option("topic", "t").option("group", "g")
    )
    frame = reader.option("maxRowsPerTrigger", "300").option("minPartitions", "4").load()
    writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", f"{folder}/checkpoint")
    query = (writer.trigger(availableNow=True) if available_now else writer).start()
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "available-now")
