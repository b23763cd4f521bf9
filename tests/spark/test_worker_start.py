"""How Spark's Python processes for the format start. Without Spark; the last test with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
import pyspark
import rocketlet.spark
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from rocketlet.spark.worker import fast_start

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
    """The parts of a session that `register` needs."""

    def __init__(self) -> None:
        self.sparkContext = SimpleNamespace(environment={}, pythonExec=sys.executable, master="local[2]")
        self.streams = SimpleNamespace(addListener=lambda listener: None)
        self.dataSource = SimpleNamespace(register=lambda source: None)


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
    if master.startswith("local"):
        with pytest.raises(RuntimeError, match="set PYSPARK_PYTHON="):
            rocketlet.spark.register(session)  # type: ignore[arg-type]
    else:
        rocketlet.spark.register(session)  # type: ignore[arg-type]


def test_sessions_of_a_driver_have_one_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rocketlet.spark, "_ledgers", [])
    for _ in range(2):
        rocketlet.spark.register(FakeSession())  # type: ignore[arg-type]
    assert len(list(tmp_path.glob(f"rocketlet-spark-{os.getpid()}-*"))) == 1


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
