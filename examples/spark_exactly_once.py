"""Every message once in a SQL table and once in Parquet, whatever is killed and however often.

Needs a broker: `rocketlet start`. Spark may run a batch again after a crash, with the same number and exactly the same
messages. So each batch is written under its number, and the second time nothing is added:

- SQL: the rows and the number of their batch go into one transaction. A number that is there already has its rows.
- Parquet: each batch has a folder of its own, which the second run overwrites.

The name of the query stands beside the number: a new checkpoint counts from 0 again, and must have a new name.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import rocketlet.spark
from pyspark.sql import DataFrame, SparkSession

TABLES = """
CREATE TABLE IF NOT EXISTS batches (query TEXT, batch INTEGER, PRIMARY KEY (query, batch));
CREATE TABLE IF NOT EXISTS messages (broker TEXT, queue INTEGER, number INTEGER, body BLOB);
"""


class Sinks:
    """What `foreachBatch` calls. SQLite stands for any database with transactions."""

    def __init__(self, folder: Path, query: str) -> None:
        self._folder = folder
        self._query = query
        with closing(sqlite3.connect(folder / "messages.db")) as database:
            database.executescript(TABLES)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        rows = rows.select("brokerName", "queueId", "queueOffset", "body").persist()
        try:
            rows.write.mode("overwrite").parquet(str(self._folder / "parquet" / self._query / f"batch={batch}"))
            self._to_database(rows, batch)
        finally:
            rows.unpersist()

    def _to_database(self, rows: DataFrame, batch: int) -> None:
        with closing(sqlite3.connect(self._folder / "messages.db", timeout=60)) as database, database:
            added = database.execute("INSERT OR IGNORE INTO batches VALUES (?, ?)", (self._query, batch))
            if added.rowcount:
                database.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", map(tuple, rows.toLocalIterator()))


def main(name_server: str = "127.0.0.1:9876", topic: str = "greetings", folder: str = "exactly-once") -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers run what this program runs
    Path(folder).mkdir(parents=True, exist_ok=True)
    spark = SparkSession.builder.appName("exactly once").getOrCreate()
    rocketlet.spark.register(spark)
    options = {"nameServer": name_server, "topic": topic, "group": "exactly-once", "maxRowsPerTrigger": "200"}
    rows = spark.readStream.format("rocketlet").options(**options).load()
    writer = rows.writeStream.foreachBatch(Sinks(Path(folder), "copy-1")).trigger(availableNow=True)
    writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
    with closing(sqlite3.connect(Path(folder) / "messages.db")) as database:
        ((count,),) = database.execute("SELECT count(*) FROM messages")
    print(f"{count} messages in the table, {spark.read.parquet(f'{folder}/parquet').count()} in Parquet")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
