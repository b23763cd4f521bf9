"""Every message once in a SQL table, once in Delta and once in Parquet, whatever is killed and however often.

Needs a broker: `rocketlet start`, and `pip install deltalake`. Spark may run a batch again after a crash, with the same
number and exactly the same messages. So each batch is written under its number, and the second time nothing is added:

- SQL: the rows and the number of their batch go into one transaction. A number that is there already has its rows.
- Delta: the number is in the same commit as the rows, as an application's transaction. Delta's log knows the last one.
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
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame, SparkSession

TABLES = """
CREATE TABLE IF NOT EXISTS batches (query TEXT, batch INTEGER, PRIMARY KEY (query, batch));
CREATE TABLE IF NOT EXISTS messages (broker TEXT, queue INTEGER, number INTEGER, body BLOB);
"""


class Sinks:
    """The function for `foreachBatch`. SQLite stands for any database with transactions."""

    def __init__(self, folder: Path, query: str) -> None:
        self._folder = folder
        self._query = query
        with closing(sqlite3.connect(folder / "messages.db")) as database:
            database.executescript(TABLES)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        rows = rows.select("brokerName", "queueId", "queueOffset", "body").persist()
        try:
            rows.write.mode("overwrite").parquet(str(self._folder / "parquet" / self._query / f"batch={batch}"))
            self._to_delta(rows, batch)
            self._to_database(rows, batch)
        finally:
            rows.unpersist()

    def _to_delta(self, rows: DataFrame, batch: int) -> None:
        table = str(self._folder / "delta")
        done = DeltaTable(table).transaction_version(self._query) if DeltaTable.is_deltatable(table) else None
        if done is None or done < batch:
            properties = CommitProperties(app_transactions=[Transaction(self._query, batch)])
            write_deltalake(table, rows.toArrow(), mode="append", commit_properties=properties)

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
    in_delta = DeltaTable(f"{folder}/delta").count()
    in_parquet = spark.read.parquet(f"{folder}/parquet").count()
    print(f"{count} messages in the table, {in_delta} in Delta, {in_parquet} in Parquet")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
