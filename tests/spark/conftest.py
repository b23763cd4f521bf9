"""One Spark session for all these tests, a broker for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession
from rocketlet.spark import register
from rocketlet.testing.ports import free_port


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    register(session)
    yield session
    session.stop()


class BrokerProcess:
    """A broker in a process of its own: this one's loop does not run while Spark does."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        command = (sys.executable, "-m", "rocketlet.command.cli", "start", "--host", "127.0.0.1")
        options = ("--port", str(self._port), "--data", str(self._folder), "--log-level", "error")
        self._process = subprocess.Popen((*command, *options), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert b"ready" in self._process.stdout.readline()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path / "data")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return broker.address
