"""Spark Connect: the session is a client, its driver another process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .running import MARKS, committed, fill, output

pytestmark = [pytest.mark.timeout(400), *MARKS]


def test_reads_streams_and_writes_work_with_spark_connect(address: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pip install grpcio-status, which Spark Connect needs")
    fill(address, range(100))
    program = Path(__file__).parent / "connect_job.py"
    said = output([sys.executable, program, address, str(tmp_path / "c")]).splitlines()
    assert "pyspark.sql.connect.session 100 100 5" in said
    assert any("the option minPartitions is 'x'" in line for line in said)
    assert any(line.startswith("rocketlet.spark.stop cannot stop a query of Spark Connect") for line in said)
    assert committed(address, "g") == 100
