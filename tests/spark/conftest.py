"""One Spark session for all these tests, a broker for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession
from rocketlet.spark import register
from rocketlet.testing import Broker
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


class StoppableBroker:
    """A broker of the test kit in a thread, because the test's own waits for Spark. It starts again with its data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._running: Broker | None = None
        self.address = f"127.0.0.1:{self._port}"

    def start(self, *, ahead_s: float = 0.0) -> None:
        """ahead_s: how far its clock is ahead, until it stops."""
        self._running = Broker(folder=self._folder, port=self._port).__enter__()
        if ahead_s:
            self._running.clock.advance(seconds=ahead_s)

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__()
            self._running = None


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[StoppableBroker]:
    made = StoppableBroker(tmp_path / "data")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def address(broker: StoppableBroker) -> str:
    return broker.address
