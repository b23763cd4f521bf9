"""A user installs the package: Spark finds the format on its own, and the examples run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..packaging.conftest import built
from .running import MARKS, committed, fill, output

pytestmark = [pytest.mark.timeout(400), *MARKS]
ROOT = Path(__file__).parents[2]
COUNT = """
import runpy, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()

def rows():
    return spark.read.format("rocketlet").option("nameServer", "{address}").option("topic", "t").load().count()

print("found:", rows())
import rocketlet.spark
rocketlet.spark.register(spark)
print("registered:", rows())
spark.stop()
for command in sys.argv[1:]:
    sys.argv = command.split("\\t")
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

EXAMPLES: tuple[tuple[str, list[str], str], ...] = (
    ("spark_stream.py", ["t"], "|   A|   50|"),
    ("spark_json.py", [], "large orders: 33"),
    ("spark_msgpack.py", [], "24.8|"),
)


def test_installed_package_is_found_by_spark_and_runs_the_examples(
    address: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All are one process, because a virtual machine takes longer to start than an example."""
    fill(address, range(100))
    wheel = built(tmp_path_factory).wheel
    output([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel])
    commands = ["\t".join((str(ROOT / "examples" / name), address, *rest)) for name, rest, _ in EXAMPLES]
    program = COUNT.format(address=address)
    found = output([sys.executable, "-c", program, *commands], PYTHONPATH=str(tmp_path / "site"))
    for expected in ("found: 100", "registered: 100", *(expected for _, _, expected in EXAMPLES)):
        assert expected in found


def test_an_example_without_spark_runs(address: str) -> None:
    assert "hello 9" in output([sys.executable, ROOT / "examples" / "send_and_consume.py", address])


def test_example_with_state_continues_in_its_second_run(address: str) -> None:
    """In a process of its own; it fails in a process that has had a session."""
    found = output([sys.executable, ROOT / "examples" / "spark_stateful.py", address])
    assert "hot: [Row(sensor='s0', readings=12, celsius=33.0)" in found


# Spark Connect: the session is a client, its driver another process.


def test_reads_streams_and_writes_work_with_spark_connect(address: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pip install grpcio-status, which Spark Connect needs")
    fill(address, range(100))
    program = Path(__file__).parent / "connect_job.py"
    said = output([sys.executable, program, address, str(tmp_path / "c")]).splitlines()
    assert "pyspark.sql.connect.session 100 100 5" in said
    assert any("the option minPartitions is 'x'" in line for line in said)
    assert any(line.startswith("rocketlet.spark.stop cannot stop a query of Spark Connect") for line in said)
    assert committed(address, "g") == 100
