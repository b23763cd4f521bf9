"""The driver of `bench.spark_soak`: writes and reads at once, then takes triggers of few rows. Notes in state.json how far it
is, so that it goes on there. A batch's count and sum are noted by its number: one that runs again counts once."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import rocketlet.spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

BODY_BYTES = 200
PART_ROWS = 1_000_000
TRIGGER_ROWS = 100
ROWS, TRIGGERS = "soak-rows", "soak-triggers"


class State:
    """The job's notes, in a file that is replaced whole."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"
        self._lock = threading.Lock()
        self.noted: dict[str, Any] = {"written": 0, "rows": 0, "sum": 0, "batch": -1, "triggers": 0}
        self.noted |= {"writing": 0, "doubled": 0}
        if self._file.exists():
            self.noted = json.loads(self._file.read_text())

    def note(self, **values: int) -> None:
        with self._lock:
            self.noted |= values
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self.noted))
            new.rename(self._file)

    def begin(self, end: int) -> None:
        """The rows before `end` are being written. Rows that were begun before and not noted as written are there twice
        now."""
        self.note(writing=end, doubled=self.noted["doubled"] + (self.noted["writing"] > self.noted["written"]))


class Job:
    def __init__(self, master: str, address: str, folder: Path, batch_rows: int) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
        builder = builder.config("spark.executor.memory", "1g").config("spark.executor.cores", "1")
        self._spark = builder.config("spark.sql.streaming.minBatchesToRetain", "10").getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        rocketlet.spark.register(self._spark)
        self._address, self._folder, self._batch_rows = address, folder, batch_rows
        self._state = State(folder)

    def rows(self, rows: int) -> None:
        """All rows: this thread writes, a query reads. A part that was being written when the job was stopped is written
        again, and some of its rows are there twice: `doubled` says so."""
        reading = self._query(ROWS, self._take, maxRowsPerTrigger=str(self._batch_rows))
        for begin in range(self._state.noted["written"], rows, PART_ROWS):
            end = min(begin + PART_ROWS, rows)
            self._state.begin(end)
            self._write(ROWS, self._spark.range(begin, end, numPartitions=4))
            self._state.note(written=end)
            if reading.exception() is not None:
                break
        self._until(reading, lambda: self._state.noted["rows"] >= rows and self._is_drained(reading))

    def triggers(self, count: int) -> None:
        """Batches of few rows, as fast as they go."""
        before = self._state.noted["triggers"]

        def take(rows: DataFrame, batch: int) -> None:
            if rows.count():
                self._state.note(triggers=self._state.noted["triggers"] + 1)

        reading = self._query(TRIGGERS, take, maxRowsPerTrigger=str(TRIGGER_ROWS))
        self._write(TRIGGERS, self._spark.range(0, (count - before) * TRIGGER_ROWS, numPartitions=1))
        self._until(reading, lambda: self._state.noted["triggers"] >= count)

    def stop(self) -> None:
        self._spark.stop()

    def _take(self, rows: DataFrame, batch: int) -> None:
        if batch <= self._state.noted["batch"]:
            return
        number = f.rtrim(f.col("body").cast("string"), f.lit("x")).cast("bigint")
        found: Any = rows.select(f.count("*").alias("count"), f.sum(number).alias("sum")).first()
        noted = self._state.noted
        self._state.note(rows=noted["rows"] + found["count"], sum=noted["sum"] + (found["sum"] or 0), batch=batch)

    def _query(self, topic: str, take: Any, **options: str) -> Any:
        where = {"nameServer": self._address, "topic": topic, "group": topic, "membership": "false"}
        reader = self._spark.readStream.format("rocketlet").options(**where, **options)
        writer = reader.load().writeStream.foreachBatch(take)
        return writer.option("checkpointLocation", str(self._folder / topic)).start()

    def _write(self, topic: str, numbers: DataFrame) -> None:
        body = f.rpad(f.col("id").cast("string"), BODY_BYTES, "x").alias("body")
        writer = numbers.select(body).write.format("rocketlet").mode("append")
        writer.options(nameServer=self._address, topic=topic).save()

    def _is_drained(self, query: Any) -> bool:
        """Whether nothing is left: the last trigger found nothing new."""
        return not query.status["isDataAvailable"]

    def _until(self, query: Any, done: Any) -> None:
        while not done():
            if query.awaitTermination(1):
                raise RuntimeError(f"the query ended: {query.exception()}")
        query.stop()


def main(master: str, address: str, folder: str, rows: str, triggers: str, batch_rows: str) -> None:
    job = Job(master, address, Path(folder), int(batch_rows))
    job.rows(int(rows))
    job.triggers(int(triggers))
    job.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
