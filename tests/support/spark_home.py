"""Spark as tests start it: as it is installed, but small and quick to start. All of it is in the environment, so that
processes and snippets of their own have it, too.

- Spark's workers import pyspark from `$SPARK_HOME/python/lib/pyspark.zip`, which holds no bytecode: each compiles it again,
  for 0.75 s of the 1.1 s that one takes to start. Spark gives up on a worker after 10 s, which is soon on a busy machine.
  Without the archive, workers import the installed package, whose bytecode is cached.
- A virtual machine loads and checks thousands of classes before a first query. It finds them in an archive (JEP 350), which
  one job makes for all installations of a version. It is only valid for the very same jars, so that these are kept beside
  it, and each SPARK_HOME has a symlink to them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from filelock import FileLock

from bench.peers import CACHE

# The optimizing compiler and parallel collectors cost more than a job of seconds gets back.
JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
# A stateful query has a state store in each of 200 partitions otherwise.
# On a busy machine a Python process takes longer than 15 s to connect to Spark's.
CONNECT_S = 120
SETTINGS = (
    "-Dspark.sql.shuffle.partitions=2",
    "-Dspark.ui.enabled=false",
    f"-Dspark.python.authenticate.socketTimeout={CONNECT_S}s",
)
JOB = Path(__file__).parents[1] / "spark" / "classes_job.py"
JOB_S = 500.0


@cache
def home() -> Path | None:
    """A SPARK_HOME of symlinks, one for each installation of PySpark and of Java. None where one of them is missing, and
    where somebody has set another."""
    found = importlib.util.find_spec("pyspark")
    java = shutil.which("java", path=_java_folder()) or shutil.which("java")
    if found is None or found.origin is None or java is None:
        return None
    installed, machine = Path(found.origin).parent, Path(java).resolve()
    version = (installed / "version.py").read_text()
    key = f"{version} {machine} {machine.stat().st_mtime}"
    folder, shared = (
        CACHE / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        for name, text in (("spark-of", f"{installed} {key}"), ("spark", key))
    )
    if os.environ.get("SPARK_HOME", str(folder)) != str(folder):
        return None
    try:
        _keep_jars(installed / "jars", shared)
        _fill(folder, installed, shared / "jars")
    except OSError:  # nothing can be kept on this machine
        return None
    return folder


def _keep_jars(jars: Path, shared: Path) -> None:
    shared.mkdir(parents=True, exist_ok=True)
    with FileLock(shared / "lock"):
        if not (shared / "jars").exists():
            coming = shared / "coming"
            shutil.rmtree(coming, ignore_errors=True)
            shutil.copytree(jars, coming, copy_function=_link_or_copy)
            coming.rename(shared / "jars")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)


def _fill(folder: Path, installed: Path, jars: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        for entry in installed.iterdir():
            link = folder / entry.name
            if entry.name != "python" and not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(jars if entry.name == "jars" else entry)


def classes() -> Path | None:
    """The archive of classes, which may not exist yet."""
    folder = home()
    return (folder / "jars").resolve().parent / "classes.jsa" if folder else None


def _java_folder() -> str | None:
    """Where Spark looks first."""
    return f"{os.environ['JAVA_HOME']}/bin" if "JAVA_HOME" in os.environ else None


def environment() -> dict[str, str]:
    """The environment that Spark reads. SPARK_CONF_DIR is an empty folder, because archives take no folders with files in
    the class path."""
    folder, archive = home(), classes()
    found = {"SPARK_AUTH_SOCKET_TIMEOUT": str(CONNECT_S)}
    if folder is None or archive is None:
        return found | {"SPARK_SUBMIT_OPTS": _options()}
    shared = ("-Xlog:disable", f"-XX:SharedArchiveFile={archive}")
    return found | {
        "SPARK_HOME": str(folder), "SPARK_CONF_DIR": str(folder / "conf"), "SPARK_SUBMIT_OPTS": _options(*shared)
    }  # fmt: skip


def _options(*more: str) -> str:
    jvm = " ".join((*JVM, *more))
    return f'{jvm} {" ".join(SETTINGS)} -Dspark.executor.extraJavaOptions="{jvm}"'


@cache
def share_classes() -> None:
    """Makes the archive, once on this machine. Where that cannot be, Spark starts as always."""
    archive = classes()
    if archive is None or archive.exists():
        return
    with FileLock(archive.with_suffix(".lock")):
        if archive.exists():
            return
        coming = archive.with_name(f"{os.getpid()}.jsa")
        options = _options("-Xlog:disable", f"-XX:ArchiveClassesAtExit={coming}")
        try:
            subprocess.run(
                [sys.executable, JOB],
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": options},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=JOB_S, check=True,
            )  # fmt: skip
            coming.rename(archive)
        except (OSError, subprocess.SubprocessError):
            coming.unlink(missing_ok=True)
