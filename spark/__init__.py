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

import shutil
import sys
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from .source import RocketletDataSource

__all__ = ["RocketletDataSource", "register"]

OLDEST = (4, 2)


def register(spark: SparkSession) -> None:
    """Makes `format("rocketlet")` known to the session. Raises RuntimeError where Spark could not run it."""
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < OLDEST:
        raise RuntimeError(
            f"PySpark {pyspark.__version__} can neither limit nor end a Python stream; install pyspark 4.2 or later"
        )
    fault = _worker_fault(spark)
    if fault:
        raise RuntimeError(fault)
    spark.dataSource.register(RocketletDataSource)


def _worker_fault(spark: SparkSession) -> str | None:
    """Why workers on this machine would not find this package, in words; None if they will, or if nobody can say."""
    try:
        context = spark.sparkContext
    except Exception:  # Spark Connect: the workers are elsewhere
        return None
    worker = shutil.which(context.pythonExec)
    if worker is None or not (context.master or "").startswith("local"):
        return None
    if Path(worker).absolute().parent == Path(sys.executable).absolute().parent:
        return None
    return (
        f"Spark's workers would run {worker}, not {sys.executable}, which has rocketlet: "
        f"set PYSPARK_PYTHON={sys.executable} before the session is made"
    )
