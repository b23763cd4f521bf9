"""What the format reports when the driver's ledger is missing, and when PySpark's internals are not what they were."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
import rocketlet.spark
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from rocketlet.spark import worker
from rocketlet.spark.checkpoint import EMPTY
from rocketlet.spark.driver import PREFIX, Ledger, fork_planner
from rocketlet.spark.listener import RocketletListener
from rocketlet.spark.options import schema_of, stream_options
from rocketlet.spark.source import RocketletStreamReader, make_planner

from .planners import read_all
from .running import MARKS, Sink, committed, fill, report, stream, wait_for

pytestmark = pytest.mark.timeout(600)


# The folder of the ledger


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@MARKS[1]
def test_query_commits_and_stops_after_a_cleaner_has_deleted_the_ledger(
    spark: SparkSession, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(address, range(100))
    sink = Sink()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (ledger,) = rocketlet.spark._ledgers
    writer = stream(spark, address, "g").writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(processingTime="1 hour").start()
    shutil.rmtree(ledger.folder)
    wait_for(lambda: len(sink.numbers) == 100)
    wait_for(lambda: committed(address, "g") == 100)
    shutil.rmtree(ledger.folder)
    rocketlet.spark.stop(query, timeout_s=180)
    assert not query.isActive
    wait_for(lambda: not report(address, "g")["members"])


def test_folders_of_drivers_that_have_ended_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running = Ledger.create()
    of_former = running.folder.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-1")  # another process had this id
    for name in (of_former, f"{PREFIX}999999999-17-x", f"{PREFIX}999999998-17-x", "others"):
        (tmp_path / name).mkdir()
        if "8-17" not in name:  # this driver has written a moment ago, perhaps in another container
            os.utime(tmp_path / name, (1, 1))
    os.utime(running.folder, (1, 1))
    second = Ledger.create()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(ledger.folder.name for ledger in (running, second)),
        f"{PREFIX}999999998-17-x",
        "others",
    }


def test_planner_finds_the_ledger_of_its_driver_by_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context: Any = SimpleNamespace(environment={"A": "1"})
    with worker.fast_start(context, tmp_path):
        registered = context.environment
    assert context.environment == {"A": "1"}
    monkeypatch.setenv(worker.LEDGER_VARIABLE, registered[worker.LEDGER_VARIABLE])
    found = Ledger.find()
    assert found is not None and found.folder == tmp_path
    monkeypatch.delenv(worker.LEDGER_VARIABLE)
    assert Ledger.find() is None


def test_member_of_a_driver_that_was_not_registered_is_reported(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(worker.LEDGER_VARIABLE, raising=False)
    fill(address, range(1))
    given = {"nameServer": address, "topic": "t", "group": "g", "columns": "body"}
    reader = RocketletStreamReader(given, schema_of(["body"]))
    for _ in range(2):
        reader.latestOffset({}, ReadAllAvailable())
    reader.stop()
    assert [text.split()[0] for text in caplog.messages if "registered" in text] == ["driver_not_registered"]


def test_ledger_without_records_is_reported_once(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketlet.spark.planner.LEDGER_SILENCE_S", -1.0)
    fill(address, range(10))
    options = stream_options({"nameServer": address, "topic": "t", "group": "g"})
    planner = make_planner(options, EMPTY, ledger=Ledger(tmp_path))
    try:
        for number in range(3):
            fill(address, range(number + 1))
            read_all(planner)
    finally:
        planner.close()
    assert [text.split()[0] for text in caplog.messages if "recorded" in text] == ["batches_not_recorded"]


# Renamed internals


@pytest.fixture
def context() -> Iterator[Any]:
    streaming = SimpleNamespace(PythonStreamingQueryListenerWrapper=lambda events: events)
    org = SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(sql=SimpleNamespace(streaming=streaming))))
    yield SimpleNamespace(_jvm=SimpleNamespace(org=org))


@pytest.mark.parametrize("text", ["{}", '{"runId": "r", "sources": [{}]}', "no JSON"])
def test_progress_with_other_fields_is_reported_once(
    context: Any, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = RocketletListener(context, Ledger(tmp_path))._jlistener
    progress = SimpleNamespace(json=lambda: text)
    for _ in range(2):
        events.onQueryProgress(SimpleNamespace(progress=lambda: progress))
    assert [entry.split()[0] for entry in caplog.messages] == ["progress_unreadable"]


def test_newer_pyspark_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.degraded() == []
    monkeypatch.setattr("pyspark.__version__", "4.4.0.dev1")
    (text,) = worker.degraded()
    assert text.startswith("PySpark 4.4.0.dev1 is newer than 4.0 to 4.3")


@pytest.mark.parametrize(
    ("name", "renamed", "effect"),
    [
        ("PUSHDOWN", "pyspark.renamed", "batch reads do not skip"),
        ("_HIDE", "RENAMED", "errors begin with a stack trace"),
        ("SimpleReader", object, "tasks read small batches, too"),
    ],
)
def test_renamed_internal_is_reported_with_its_effect(
    name: str, renamed: object, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, name, renamed)
    (text,) = worker.degraded()
    assert effect in text


def test_register_warns_of_what_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocketlet.spark, "degraded", lambda: ["it is slower"])
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="/none/python"))
    with pytest.warns(UserWarning, match="it is slower"), pytest.raises(RuntimeError, match="where it is missing"):
        rocketlet.spark.register(session)


def test_process_of_the_format_that_is_not_recognized_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(worker.LEDGER_VARIABLE, "/none")
    fork_planner()
    assert [text.split()[0] for text in caplog.messages] == ["process_unknown"]


def test_planner_of_sparks_process_has_a_process_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's daemon signals its group when it exits; the planner has to commit first."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec("pyspark.daemon", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "setpgid", lambda *given: calls.append(given))
    fork_planner()
    assert calls == [(0, 0)]


def test_pyspark_from_a_zip_is_reported_where_the_package_was_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context: Any = SimpleNamespace(environment={})
    with worker.fast_start(context):
        monkeypatch.setenv("PYTHONPATH", context.environment["PYTHONPATH"])
    worker.warn_of_slow_start()
    assert not caplog.messages
    monkeypatch.setattr("pyspark.__file__", "/spark/python/lib/pyspark.zip/pyspark/__init__.py")
    worker.warn_of_slow_start()
    assert [text.split()[0] for text in caplog.messages] == ["start_slow"]
    with worker.fast_start(context):
        assert worker._FOLDER not in context.environment["PYTHONPATH"], "a Spark without the package keeps its zip"


def test_time_of_the_folder_is_that_of_the_last_record(tmp_path: Path) -> None:
    """By which a driver in another container is known to run."""
    ledger = Ledger(tmp_path / "folder")
    ledger.record("g", "run", 0, {"t": 1})
    os.utime(ledger.folder, (1, 1))
    ledger.record("g", "run", 0, {"t": 2})
    assert ledger.folder.stat().st_mtime > time.time() - 3600


def test_ledger_is_no_link_and_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner may have deleted the folder, and anybody may create one of its name in the temporary folder."""
    elsewhere, ledger = Ledger(tmp_path / "elsewhere"), Ledger(tmp_path / "folder")
    elsewhere.record("g", "run", 0, {"t": 1})
    elsewhere.hold_all()
    ledger.folder.symlink_to(elsewhere.folder)

    def is_refused(folder: Ledger) -> bool:
        with pytest.raises(PermissionError, match="is no folder of this user; delete it"):
            folder.record("g", "run", 0, {"t": 2})
        return not (folder.has_records("g") or folder.is_held("g"))

    assert is_refused(ledger)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert is_refused(elsewhere)
    monkeypatch.undo()
    assert elsewhere.is_finished("g", {"t": 1}) and elsewhere.is_held("g")
