"""How Spark's Python processes for the format start. Without Spark; the last test with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
import pyspark
import rocketlet.spark
from py4j.java_gateway import JavaPackage  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from rocketlet.spark.driver import Ledger
from rocketlet.spark.worker import fast_start, uses_internals

from ..support import spark_home
from .running import MARKS

START = Path(rocketlet.spark.__file__).with_name("start")
LIB = Path(pyspark.__file__).parent / "python" / "lib"


def path_of(*entries: Path, show: str = "sys.path") -> list[str]:
    """The path of a Python that starts with these entries before its own."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, entries))}
    command = [sys.executable, "-c", f"import sys; print(*{show}, sep='\\n')"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_zips_inside_of_the_package_come_last() -> None:
    zips = [LIB / "pyspark.zip", LIB / "py4j-0.10.9.9-src.zip"]
    found = path_of(*zips, START)
    assert found[-2:] == [str(entry) for entry in zips]
    assert str(LIB.parents[2]) in found
    assert str(START) not in found


def test_the_zip_of_a_spark_elsewhere_stays_first(tmp_path: Path) -> None:
    elsewhere = tmp_path / "spark" / "python" / "lib" / "pyspark.zip"
    assert path_of(elsewhere, START)[1] == str(elsewhere)


def test_the_sitecustomize_of_others_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.ran = [__file__, __name__]\n")
    assert path_of(START, tmp_path, show="sys.ran") == [str(tmp_path / "sitecustomize.py"), "sitecustomize"]


@pytest.mark.parametrize(("set_to", "threads"), [(None, "1"), ("2", "2")])
def test_openblas_starts_one_thread_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, threads: str
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", set_to)
    assert path_of(START, show="[__import__('os').environ['OPENBLAS_NUM_THREADS']]") == [threads]


class FakeSession:
    """The session of a PySpark whose JVM holds the given parts."""

    def __init__(self, **held: Any) -> None:
        jvm = SimpleNamespace(**held)
        self.sparkContext = SimpleNamespace(_jvm=jvm, pythonExec=sys.executable, master="local[2]")
        self.streams = SimpleNamespace(addListener=lambda listener: listener._jlistener)


@pytest.mark.parametrize("master", ["spark://host:7077", "local[2]"])
def test_python_that_is_missing_in_the_driver_is_named_by_register(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, master: str
) -> None:
    """As with an archive that Spark unpacks for the workers only."""
    monkeypatch.chdir(tmp_path)
    session = FakeSession()
    session.sparkContext.pythonExec, session.sparkContext.master = "./environment/bin/python", master
    with pytest.raises(RuntimeError, match=r"would run ./environment/bin/python in the driver, too.*tar xzf"):
        rocketlet.spark.register(session)  # type: ignore[arg-type]
    (tmp_path / "environment" / "bin").mkdir(parents=True)
    (tmp_path / "environment" / "bin" / "python").symlink_to(sys.executable)
    fault = (
        "set PYSPARK_PYTHON=" if master.startswith("local") else UNKNOWN
    )  # the latter comes after the check of Python
    with pytest.raises(RuntimeError, match=fault):
        rocketlet.spark.register(session)  # type: ignore[arg-type]


UNKNOWN = rf"uses internals of PySpark 4.0 to 4.3, and this is {pyspark.__version__}, where something is missing .*"


def test_a_pyspark_that_has_changed_within_is_named() -> None:
    with pytest.raises(RuntimeError, match=UNKNOWN + "environment"), fast_start(FakeSession().sparkContext):  # type: ignore[arg-type]
        pass
    session = FakeSession()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=UNKNOWN + "org"):
            rocketlet.spark.register(session)  # type: ignore[arg-type]


def test_the_sessions_of_a_driver_have_one_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rocketlet.spark, "_ledgers", [])
    streaming = SimpleNamespace(PythonStreamingQueryListenerWrapper=lambda events: events)
    org = SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(sql=SimpleNamespace(streaming=streaming))))
    sessions = [FakeSession(org=org) for _ in range(2)]
    for session in sessions:
        with pytest.raises(RuntimeError, match=UNKNOWN + "environment"):  # the session has no more than a ledger needs
            rocketlet.spark.register(session)  # type: ignore[arg-type]
    assert len(list(tmp_path.glob(f"rocketlet-spark-{os.getpid()}-*"))) == 1


def test_a_pyspark_without_its_own_listeners_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pyspark.sql.streaming.listener.JStreamingQueryListener")
    monkeypatch.delitem(sys.modules, "rocketlet.spark.listener", raising=False)
    with pytest.raises(RuntimeError, match=UNKNOWN + "JStreamingQueryListener"):
        rocketlet.spark.register(FakeSession())  # type: ignore[arg-type]


def test_what_is_missing_in_our_own_modules_is_not_pysparks_fault() -> None:
    ledger = Ledger(Path("none"))
    ours: list[Callable[[], object]] = [
        lambda: getattr(ledger, "gone"),  # noqa: B009 (mypy)
        lambda: getattr(rocketlet.spark, "gone"),  # noqa: B009
        lambda: ledger.record("too", "few"),  # type: ignore[call-arg]
        lambda: import_module("rocketlet.spark.gone"),
    ]
    for fault in ours:
        with pytest.raises((AttributeError, ImportError, TypeError)), uses_internals():
            fault()
    theirs: list[Callable[[], object]] = [
        lambda: getattr(pyspark, "gone"),  # noqa: B009
        lambda: import_module("pyspark.gone"),
        lambda: JavaPackage("org.gone", None)(),
    ]
    for fault in theirs:
        with pytest.raises(RuntimeError, match=UNKNOWN), uses_internals():
            fault()


def told() -> type[DataSource]:
    """A source with one row: where its process has PySpark from. Made here, because the processes do not find this module."""

    class Reader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
            import pyspark

            yield (pyspark.__file__,)

    class Told(DataSource):
        @classmethod
        def name(cls) -> str:
            return "told"

        def schema(self) -> str:
            return "file STRING"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    return Told


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@MARKS[1]
def test_processes_of_the_format_have_pyspark_from_the_package(spark: SparkSession) -> None:
    before = dict(spark.sparkContext.environment)
    with fast_start(spark.sparkContext):
        spark.dataSource.register(told())
    assert spark.sparkContext.environment == before
    assert [row.file for row in spark.read.format("told").load().collect()] == [pyspark.__file__]


def test_job_exists_by_which_spark_archives_its_classes() -> None:
    """Without the archive, each job takes a third more of the processor, and no other test would fail."""
    assert Path(spark_home.JOB).is_file()
