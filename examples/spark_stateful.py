"""State per key that outlives batches and restarts: counts the readings of each sensor, and reports the first that is hot.

Uses `transformWithState` of PySpark 4.3 with a state store in RocksDB. Needs a broker: `rocketlet start`, and `protobuf`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import rocketlet.spark
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

READING = "sensor STRING, celsius DOUBLE"
STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class FirstHot(StatefulProcessor):
    """Returns a row for the first reading of a sensor above 30 degrees, with the number of readings up to it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "count INT, isReported BOOLEAN")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        count, is_reported = self._seen.get() or (0, False)
        for row in rows:
            count += 1
            if row.celsius > 30 and not is_reported:
                is_reported = True
                yield Row(sensor=key[0], readings=count, celsius=row.celsius)
        self._seen.update((count, is_reported))

    def close(self) -> None:
        pass


def send_some(spark: SparkSession, name_server: str, numbers: range) -> None:
    readings = [(json.dumps({"sensor": f"s{n % 3}", "celsius": float(n)}), f"s{n % 3}") for n in numbers]
    rows = spark.createDataFrame(readings, "body STRING, messageGroup STRING")
    # one task sends all rows of a sensor, so that they stay in order in the queue of their message group
    in_order = rows.coalesce(1)
    in_order.write.format("rocketlet").options(nameServer=name_server, topic="readings").mode("append").save()


def run_once(spark: SparkSession, name_server: str, checkpoint: str) -> None:
    source = spark.readStream.format("rocketlet").options(nameServer=name_server, topic="readings", group="hot")
    readings = source.load().select(f.from_json(f.col("body").cast("string"), READING).alias("reading"))
    hot = (
        readings.select("reading.*")
        .groupBy("sensor")
        .transformWithState(FirstHot(), "sensor STRING, readings INT, celsius DOUBLE", "Append", "None")
    )
    query = hot.writeStream.foreachBatch(lambda rows, batch: print("hot:", sorted(rows.collect())))
    query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def main(name_server: str = "127.0.0.1:9876") -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers run what this program runs
    spark = SparkSession.builder.appName("hot sensors").getOrCreate()
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", STORE)
    spark.conf.set("spark.sql.shuffle.partitions", 2)  # each has a state store
    rocketlet.spark.register(spark)
    with tempfile.TemporaryDirectory() as checkpoint:  # a real job keeps it
        for numbers in (range(20), range(20, 40)):  # the second run continues with the state of the first
            send_some(spark, name_server, numbers)
            run_once(spark, name_server, checkpoint)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
