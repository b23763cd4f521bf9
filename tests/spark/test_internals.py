"""What the format reports when the driver's ledger is missing, and when PySpark's internals are not what they were."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
import rocketlet.spark
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from rocketlet.spark import worker
from rocketlet.spark.checkpoint import EMPTY, MicroBatch, to_offset
from rocketlet.spark.driver import PREFIX, Ledger, fork_planner
from rocketlet.spark.format import RocketletDataSource, with_ledger
from rocketlet.spark.listener import RocketletListener
from rocketlet.spark.options import schema_of, stream_options
from rocketlet.spark.planner import Planner
from rocketlet.spark.source import RocketletStreamReader

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


def test_reader_of_a_registered_source_has_the_ledger_of_its_driver(tmp_path: Path) -> None:
    given = {"nameServer": "h:1", "topic": "t", "group": "g"}
    source: Any = pickle.loads(CloudPickleSerializer().dumps(with_ledger(Ledger(tmp_path))))  # type: ignore[no-untyped-call]
    assert (source.name(), source(given).streamReader(StructType()).ledger.folder) == ("rocketlet", tmp_path)
    assert RocketletDataSource.ledger is None


def test_member_of_a_driver_that_was_not_registered_is_reported(address: str, caplog: pytest.LogCaptureFixture) -> None:
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
    planner = Planner(options, EMPTY, ledger=Ledger(tmp_path))
    try:
        for number in range(3):
            fill(address, range(number + 1))
            read_all(planner)
    finally:
        planner.close()
    assert [text.split()[0] for text in caplog.messages if "recorded" in text] == ["batches_not_recorded"]


# The listener, and renamed internals


@pytest.mark.parametrize("text", [None, "no JSON", "5", "{}", '{"$": 5}', '{"$": {"group": "g", "membership": false}}'])
def test_only_offsets_of_members_are_recorded(tmp_path: Path, text: str | None) -> None:
    ledger = Ledger(tmp_path)
    listener: Any = RocketletListener(ledger)
    own = to_offset(MicroBatch(membership=True, group="g"))
    sources = [SimpleNamespace(endOffset=each) for each in (text, json.dumps(own))]
    listener.onQueryProgress(SimpleNamespace(progress=SimpleNamespace(runId="r", sources=sources)))
    assert [path.name for path in tmp_path.iterdir()] == ["g@r-1.json"]
    assert ledger.is_finished("g", own)
    listener.onQueryTerminated(SimpleNamespace(runId="r"))
    ledger.forget("g")
    assert not list(tmp_path.iterdir()), "the run has ended"


def test_ledger_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").symlink_to(tmp_path)
    listener: Any = RocketletListener(Ledger(tmp_path / "folder"))
    for number in range(2):
        own = to_offset(MicroBatch(membership=True, group="g", rewound=number))
        progress = SimpleNamespace(runId="r", sources=[SimpleNamespace(endOffset=json.dumps(own))])
        listener.onQueryProgress(SimpleNamespace(progress=progress))
    assert [text.split()[0] for text in caplog.messages] == ["batch_not_recorded"]


def test_newer_pyspark_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.degraded(None) == []
    monkeypatch.setattr("pyspark.__version__", "4.4.0.dev1")
    (text,) = worker.degraded(None)
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
    (text,) = worker.degraded(None)
    assert effect in text


@pytest.mark.parametrize(
    ("name", "effect"), [("environment", "processes start slowly"), ("pythonExec", "workers with another Python")]
)
def test_renamed_attribute_of_the_context_is_reported_and_register_works(
    name: str, effect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocketlet.spark, "_ledgers", [Ledger(tmp_path)])
    context: Any = SimpleNamespace(environment={}, pythonExec=sys.executable, master="local")
    assert worker.degraded(context) == []
    delattr(context, name)
    session: Any = type("Session", (), {})()
    session.sparkContext = context
    session.streams = SimpleNamespace(addListener=lambda listener: None)
    session.dataSource = SimpleNamespace(register=lambda source: None)
    with pytest.warns(UserWarning, match=effect):
        rocketlet.spark.register(session)


def test_register_warns_of_what_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocketlet.spark, "degraded", lambda context: ["it is slower"])
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="/none/python"))
    with pytest.warns(UserWarning, match="it is slower"), pytest.raises(RuntimeError, match="where it is missing"):
        rocketlet.spark.register(session)


def test_process_of_the_format_that_is_not_recognized_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fork_planner(Ledger(tmp_path))
    assert [text.split()[0] for text in caplog.messages] == ["process_unknown"]


def test_planner_of_sparks_process_has_a_process_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's daemon signals its group when it exits; the planner has to commit first."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec("pyspark.daemon", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "setpgid", lambda *given: calls.append(given))
    fork_planner(None)
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
