"""How queries end: stopped, or with the planner killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from rocketlet.client import Message
from rocketlet.sync import Consumer

from .running import MARKS, QUEUES, Sink, committed, fill, report, stream, wait_for

pytestmark = MARKS
import rocketlet.spark
from pyspark.sql import DataFrame, SparkSession
from rocketlet.spark.checkpoint import from_offset
from rocketlet.spark.driver import Ledger


def finished(checkpoint: Path) -> int:
    """How many offsets the batches hold that Spark's commit files say are done."""
    total = 0
    for path in (checkpoint / "commits").glob("[0-9]*"):
        offset = json.loads((checkpoint / "offsets" / path.name).read_text().splitlines()[-1])
        total += sum(end - begin for begin, end in from_offset(offset).ranges.values())
    return total


@pytest.mark.parametrize("moment", range(6))
def test_what_a_stopped_query_has_finished_is_committed_for_the_group(
    spark: SparkSession, address: str, tmp_path: Path, moment: int
) -> None:
    fill(address, range(400))
    sink = Sink()
    writer = (
        stream(spark, address, "g").writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    )
    query = writer.trigger(processingTime="1 hour").start()
    wait_for(lambda: len(sink.numbers) == 400)
    if moment:  # the first time while Spark writes that the batch is done, then about then, at last long after it
        wait_for(lambda: finished(tmp_path / "c") == 400)
    if moment == 5:
        wait_for(lambda: query.lastProgress is not None)
    query.stop()
    wait_for(lambda: not report(address, "g")["members"])
    assert committed(address, "g") == finished(tmp_path / "c")


def test_a_stopped_query_of_two_sources_in_one_group_commits_both(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(200), "t")
    fill(address, range(200, 400), "u")
    sink = Sink()
    both = stream(spark, address, "g").union(stream(spark, address, "g", topic="u"))
    query = (
        both.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(processingTime="1 hour")
        .start()
    )
    wait_for(lambda: len(sink.numbers) == 400)
    wait_for(lambda: any((tmp_path / "c" / "commits").glob("[0-9]*")))
    query.stop()
    wait_for(lambda: not report(address, "g")["members"])
    assert (committed(address, "g"), committed(address, "g", "u")) == (200, 200)


def test_a_query_that_is_stopped_within_a_batch_ends_behind_it(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    """As `rocketlet.spark.stop` does it: nothing is handed out again, and no further batch begins."""
    fill(address, range(400))
    begun, may_end = threading.Event(), threading.Event()
    batches: list[int] = []

    def sink(rows: DataFrame, batch: int) -> None:
        if rows.count():
            batches.append(batch)
            begun.set()
            assert may_end.wait(180)

    writer = stream(spark, address, "g", maxRowsPerTrigger="100").writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with ThreadPoolExecutor(1) as operator:
        stopped = operator.submit(rocketlet.spark.stop, query)
        may_end.set()
        stopped.result(180)
    wait_for(lambda: not report(address, "g")["members"])
    assert committed(address, "g") == finished(tmp_path / "c") == 100 * len(batches)


def test_a_stop_that_takes_too_long_lets_the_query_continue(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(100))
    sink, begun, may_end = Sink(), threading.Event(), threading.Event()

    def slow(rows: DataFrame, batch: int) -> None:
        begun.set()
        assert may_end.wait(180)
        sink(rows, batch)

    writer = stream(spark, address, "g").writeStream.foreachBatch(slow)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with pytest.raises(TimeoutError, match="has not ended for -1 s"):
        rocketlet.spark.stop(query, timeout_s=-1)
    may_end.set()
    fill(address, range(100, 200))
    wait_for(lambda: len(sink.numbers) == 200)
    query.stop()


@pytest.mark.parametrize("kind", ["standalone", "rate"])
def test_query_that_is_no_member_is_stopped_after_its_batch(
    spark: SparkSession, address: str, tmp_path: Path, kind: str
) -> None:
    fill(address, range(400))
    begun, may_end = threading.Event(), threading.Event()
    batches: list[int] = []

    def sink(rows: DataFrame, batch: int) -> None:
        if rows.count():
            batches.append(batch)
            begun.set()
            assert may_end.wait(180)

    frame = (
        stream(spark, address, "", membership="false", maxRowsPerTrigger="100")
        if kind == "standalone"
        else spark.readStream.format("rate").option("rowsPerSecond", "1000").load()
    )
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c")).start()
    assert begun.wait(180)
    with ThreadPoolExecutor(1) as operator:
        stopped = operator.submit(rocketlet.spark.stop, query)
        may_end.set()
        stopped.result(180)
    assert not query.isActive
    assert kind == "rate" or finished(tmp_path / "c") == 100 * len(batches)


def test_query_that_has_begun_nothing_is_stopped(spark: SparkSession, address: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    frame = spark.readStream.format("text").load(str(tmp_path / "in"))
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    rocketlet.spark.stop(query, timeout_s=180)
    assert not query.isActive


def test_finished_batch_is_committed_and_handed_over_long_before_the_next_trigger(
    spark: SparkSession, address: str, tmp_path: Path
) -> None:
    fill(address, range(400))
    sink = Sink()
    frame = stream(spark, address, "g", releaseTimeoutMs="600000")
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(processingTime="10 hours").start()
    try:
        wait_for(lambda: len(sink.numbers) == 400)
        wait_for(lambda: committed(address, "g") == 400)
        with Consumer(address, "g", "t", lambda message: service.append(message)) as consumer:
            service: list[Message] = []
            wait_for(lambda: sum(queue.topic == "t" for queue in consumer.assignment()) == QUEUES // 2)
            fill(address, range(400, 600))  # a batch of 50 for each queue: fewer batches may miss the consumer's queues
            wait_for(lambda: len(service) == 100)
    finally:
        query.stop()
    assert not {int(message.body) for message in service} & set(range(400)), "rows of the batch came again"


def planner_pid(address: str, group: str) -> int:
    """The pid of a group's one member, which its client id names."""
    (member,) = report(address, group)["members"]
    return int(member["clientId"].partition("@")[2].partition("#")[0])


def test_a_planner_that_is_killed_is_named(spark: SparkSession, address: str, tmp_path: Path) -> None:
    fill(address, range(100))
    sink = Sink()
    writer = (
        stream(spark, address, "g").writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    )
    query = writer.start()
    wait_for(lambda: len(sink.numbers) == 100)
    os.kill(planner_pid(address, "g"), signal.SIGKILL)
    with pytest.raises(Exception, match=r"the process \d+, which plans the query's batches, was ended by SIGKILL"):
        query.awaitTermination(60)


def test_the_ledger_says_what_was_finished_and_when_nothing_more_comes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    one, two, three = {"t": 1}, {"t": 2}, {"t": 3}
    ledger.record("g/%", "run", 0, one)
    assert ledger.wait_finished("g/%", one, {}, 5)
    assert not ledger.wait_finished("g/%", two, one, 0)
    ledger.record("g/%", "run", 0, one, has_ended=True)
    assert not ledger.wait_finished("g/%", two, one, 60)
    assert not ledger.wait_finished("g", one, {}, 0), "another group"
    ledger.forget("g/%")
    assert not ledger.wait_finished("g/%", one, {}, 0)
    ledger.record("g/%", "run", 0, two)
    ledger.forget("g/%")
    assert ledger.wait_finished("g/%", two, one, 5), "of a query that runs"
    ledger.record("g/%", "other run", 0, three, has_ended=True)
    assert ledger.wait_finished("g/%", two, one, 5), "another query of the group does not write over it"
    ledger.record("g/%", "run", 1, one)
    assert ledger.wait_finished("g/%", two, one, 5), "nor does another source of this query"
    assert ledger.wait_finished("g/%", one, {}, 5)
    ledger.remove()
    assert not ledger.wait_finished("g/%", one, {}, 60), "the driver has ended"


def test_ledger_of_a_former_process_with_the_same_id_is_not_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container that is started again with its /tmp: the JVM has the same id."""
    monkeypatch.setattr("os.getppid", lambda: 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as former:
        former.setattr("rocketlet.spark.driver._started", lambda process: "17")
        Ledger.create(1).hold("g")
    assert Ledger.find() is None
    Ledger.create(1)
    found = Ledger.find()
    assert found is not None
    assert not found.is_held("g")


def test_hold_ends_when_its_driver_does_not_renew_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    for hold, release in (
        (ledger.hold_all, ledger.release_all),
        (partial(ledger.hold, "g"), partial(ledger.release, "g")),
    ):
        hold()
        assert ledger.is_held("g")
        release()
        assert not ledger.is_held("g")
        hold()
        with monkeypatch.context() as later:
            later.setattr("rocketlet.spark.driver.HOLD_S", -1.0)
            assert not ledger.is_held("g")
        assert not ledger.is_held("g"), "it is gone"
        assert len([text for text in caplog.messages if text.startswith("hold_expired")]) == 1
        caplog.clear()
    ledger.hold("h")
    assert not ledger.is_held("g")


def test_the_ledger_of_a_driver_that_is_process_1_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in `docker run ... spark-submit`, where the JVM has no other process above it."""
    monkeypatch.setattr("os.getppid", lambda: 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Ledger.find() is None
    Ledger.create(1).record("g", "run", 0, {"t": 1})
    found = Ledger.find()
    assert found is not None
    assert found.wait_finished("g", {"t": 1}, {}, 5)


def test_the_end_of_another_query_is_not_taken_for_that_of_this_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.record("g", "run", 0, {"t": 1})

    def others() -> None:
        ledger.record("g", "other run", 0, {"t": 8}, has_ended=True)
        ledger.record_end()
        ledger.record("g", "run", 0, {"t": 2})

    with ThreadPoolExecutor(1) as driver:
        driver.submit(others)
        assert ledger.wait_finished("g", {"t": 2}, {"t": 1}, 60)
