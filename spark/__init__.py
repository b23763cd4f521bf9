"""RocketMQ topics as Spark streams. The query is a member of the consumer group.

    import rocketlet.spark
    rocketlet.spark.register(spark)
    rows = spark.readStream.format("rocketlet").option("nameServer", "host:9876").option("group", "g") \\
        .option("topic", "t").load()

source   the format: schema, reader, what Spark calls in the driver
member   the query's membership in the group, in a thread of the driver's Python process
ranges   what a batch reads, as Spark's checkpoint keeps it
reading  one range on an executor, in Arrow batches
options  every option
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from .source import RocketletDataSource

__all__ = ["RocketletDataSource", "register"]


def register(spark: SparkSession) -> None:
    """Makes `format("rocketlet")` known to the session. Raises RuntimeError where Spark could not run it."""
    _check_versions()
    spark.dataSource.register(RocketletDataSource)


def _check_versions() -> None:
    import os
    import sys

    import pyspark

    release = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if release < (4, 2):
        raise RuntimeError(
            f"PySpark {pyspark.__version__} cannot limit or end a Python stream; install pyspark 4.2 or later"
        )
    worker = os.environ.get("PYSPARK_PYTHON")
    if worker is None and "VIRTUAL_ENV" not in os.environ and sys.prefix != sys.base_prefix:
        raise RuntimeError(
            f"Spark's workers would not run this Python: set PYSPARK_PYTHON={sys.executable} before the session starts"
        )
