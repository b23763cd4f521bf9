"""A user installs the package: Spark finds the format on its own, and the examples run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..packaging.conftest import built
from .running import MARKS, fill, output

pytestmark = [pytest.mark.timeout(400), *MARKS]
ROOT = Path(__file__).parents[2]
COUNT = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()

def rows():
    return spark.read.format("rocketlet").option("nameServer", "{address}").option("topic", "t").load().count()

print("found:", rows())
import rocketlet.spark
rocketlet.spark.register(spark)
print("registered:", rows())
"""


def test_spark_finds_the_format_of_an_installed_package(
    address: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fill(address, range(100))
    wheel = built(tmp_path_factory).wheel
    output([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel])
    found = output([sys.executable, "-c", COUNT.format(address=address)], PYTHONPATH=str(tmp_path / "site"))
    assert "found: 100" in found
    assert "registered: 100" in found
    assert "replaced a statically registered" not in found, "Spark's warning, which does not help a user"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("send_and_consume.py", [], "hello 9"),
        ("spark_stream.py", ["t"], "|   A|   50|"),
        ("spark_json.py", [], "large orders: 33"),
        ("spark_msgpack.py", [], "24.8|"),
    ],
)
def test_examples_run(address: str, name: str, arguments: list[str], expected: str) -> None:
    fill(address, range(100))
    assert expected in output([sys.executable, ROOT / "examples" / name, address, *arguments])
