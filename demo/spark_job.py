"""Two streaming queries. `delays`, by default a group of its own: flights and mean departure delay per carrier and month.
`departures`, on command: a member beside the Python consumers.

Commands come on stdin, a line each: join, leave, stop. Results are files in the output folder, replaced whole.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from array import array
from pathlib import Path

import orjson
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from .. import spark as rocketlet_spark
from ..command.plumbing import logs
from .replay import TOPIC

FLIGHT = "id INT, carrier STRING, month INT, dep_delay INT"
MAX_ROWS_PER_TRIGGER = 40_000
BATCH_TIMEOUT_S = 20.0


def session(master: str) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(master)
        .appName("rocketlet flights")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    rocketlet_spark.register(spark)
    return spark


def flights(spark: SparkSession, name_server: str, group: str) -> DataFrame:
    """The topic as a stream of flights, with the queue and offset of each."""
    rows = (
        spark.readStream.format("rocketlet")
        .option("nameServer", name_server)
        .option("topic", TOPIC)
        .option("group", group)
        .option("startingOffsets", "earliest")
        .option("maxRowsPerTrigger", str(MAX_ROWS_PER_TRIGGER))
        .load()
    )
    flight = F.from_json(rows.body.cast("string"), FLIGHT).alias("flight")
    return rows.select("brokerName", "queueId", "queueOffset", flight).select("*", "flight.*")


def start_delays(spark: SparkSession, name_server: str, group: str, output: Path) -> StreamingQuery:
    """Writes `delays.json` after each batch: per carrier and month flights, delays known, and their sum."""

    def write(table: DataFrame, batch: int) -> None:
        rows = [row.asDict() for row in table.collect()]
        _replace(output / "delays.json", orjson.dumps({"batch": batch, "rows": rows}))
        print(f"batch {batch}: {sum(row['flights'] for row in rows):,} flights so far", flush=True)

    table = (
        flights(spark, name_server, group)
        .groupBy("carrier", "month")
        .agg(
            F.count("*").alias("flights"),
            F.count("dep_delay").alias("known"),
            F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("delay"),
        )
    )
    writer = table.writeStream.outputMode("complete").foreachBatch(write)
    return writer.option("checkpointLocation", str(output / "checkpoint-delays")).start()


class Departures:
    """Writes the numbers of each batch's flights to a file named by the batch, so that a replay replaces it."""

    def __init__(self, spark: SparkSession, name_server: str, output: Path) -> None:
        self._output = output
        self._is_leaving = threading.Event()
        self._is_between = threading.Event()
        writer = flights(spark, name_server, "departures").writeStream.foreachBatch(self._write)
        self._query = writer.option("checkpointLocation", str(output / "checkpoint-departures")).start()

    def _write(self, table: DataFrame, batch: int) -> None:
        if self._is_leaving.is_set():
            self._is_between.set()
            raise RuntimeError("the query leaves: this batch is not written")
        numbers = array("I", [row.id for row in table.select("id").collect()])
        _replace(self._output / f"received-spark-{batch:06d}.ids", numbers.tobytes())

    def leave(self) -> None:
        """Ends between two batches, where all that was written is committed; in the midst of one it would come twice."""
        self._is_leaving.set()
        self._is_between.wait(BATCH_TIMEOUT_S)
        self._query.stop()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Spark over the flights")
    parser.add_argument("--nameserver", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--master", default="local[2]", help="where Spark runs; default: %(default)s")
    parser.add_argument("--group", default="delays", help="the group of the query `delays`; default: %(default)s")
    parser.add_argument("--forever", action="store_true", help="run `delays` until the process is ended")
    options = parser.parse_args()
    logs.configure("warning")
    options.output.mkdir(parents=True, exist_ok=True)
    spark = session(options.master)
    delays = start_delays(spark, options.nameserver, options.group, options.output)
    print("ready", flush=True)
    if options.forever:
        delays.awaitTermination()
        return 0
    departures: Departures | None = None
    for line in sys.stdin:
        command = line.strip()
        if command == "join" and departures is None:
            departures = Departures(spark, options.nameserver, options.output)
        elif command == "leave" and departures is not None:
            departures.leave()
        elif command == "stop":
            break
        print(f"done {command}", flush=True)
    delays.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
