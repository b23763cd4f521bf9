"""RocketMQ topics as Spark streams and tables. A streaming query is a member of the consumer group.

    import rocketlet.spark
    rocketlet.spark.register(spark)
    rows = spark.readStream.format("rocketlet").option("nameServer", "host:9876").option("group", "g") \\
        .option("topic", "t").load()

format      what Spark finds by the name `rocketlet`
options     every option
source      streams: what Spark calls in the driver
batch       one read, and how ranges become tasks
planner     what plans batches: a thread of the driver's Python process
member      the planner as a member of the group
standalone  the planner of all queues, without membership
ranges      what a batch reads, as Spark's checkpoint keeps it
reading     one range on an executor
columns     message records as Arrow columns
sink        rows as messages; stream_sink: those of a stream
autoload    by which Spark finds the format by itself
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

try:
    from pyspark.sql import SparkSession
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.spark needs PySpark: pip install 'rocketlet[spark]'") from missing

from .format import RocketletDataSource, lacking

__all__ = ["RocketletDataSource", "register"]


def register(spark: SparkSession) -> None:
    """Makes `format("rocketlet")` known to the session. Raises RuntimeError where its workers could not run it; warns of what
    an old PySpark lacks."""
    lack = lacking()
    if lack:
        warnings.warn(lack, stacklevel=2)
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
