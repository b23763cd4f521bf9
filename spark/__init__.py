"""RocketMQ topics as Spark streams and tables. By default, a streaming query is a member of a consumer group.

    import rocketlet.spark
    rocketlet.spark.register(spark)
    rows = spark.readStream.format("rocketlet").option("nameServer", "host:9876").option("group", "g") \
        .option("topic", "t").load()

format       the data source that Spark finds by the name `rocketlet`
options      the options, and the schema of rows
config       limits, intervals and defaults
source       the streaming reader: the methods that Spark calls in the driver
batch        batch reads, and the division of ranges into tasks
pushdown     filter pushdown of batch reads
planner      the planner of batches: a thread of the driver's Python process
queues       what the planner needs of the queues of a query, and the query's progress
member       a query as a member of a group
member_queues  the states of a member's queues
standalone   a query without membership
positions    positions in options
view         topics, queues and brokers
extents      offsets of queues at brokers
data_loss    errors and warnings about lost messages
patience     a timeout for repeated failures
checkpoint   the contents of a batch in Spark's checkpoint
reading      reads of ranges on an executor
columns      message records as Arrow columns
encoding     rows as the entries of message batches
sink         sends of rows
stream_sink  rows of a stream as messages
driver       the ledger of finished batches, the planner's process, lag
listener     reports finished batches to the planner
worker       the start of Spark's Python processes for the format; errors
autoload     lets Spark find the format without `register`
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import pkgutil
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

try:
    import pyspark.sql.datasource  # noqa: F401 (a module that PySpark has since 4.0)
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
except ModuleNotFoundError as missing:
    found = importlib.util.find_spec("pyspark") and f", and this is {importlib.metadata.version('pyspark')}"
    raise ImportError(f"rocketlet.spark needs PySpark 4{found or ''}: pip install '.[spark]'") from missing

from .checkpoint import logged_offset
from .config import HOLD_RENEWAL_S, STOP_POLL_INTERVAL_S, STOP_TIMEOUT_S
from .driver import lag
from .format import RocketletDataSource, lacking, with_ledger
from .worker import degraded

if TYPE_CHECKING:
    from pyspark import SparkContext

    from .driver import Ledger

_listening: WeakSet[SparkSession] = WeakSet()
_ledgers: list[Ledger] = []
"""The ledger of this process, once a session was registered."""

__all__ = ["RocketletDataSource", "lag", "register", "stop"]


def register(spark: SparkSession) -> None:
    """Register `format("rocketlet")` with a session.

    Warn about features that an old PySpark lacks, about a PySpark that is newer than the tested ones, and about what is
    slower or missing because internals of PySpark have changed.

    Raises:
        RuntimeError: the session's workers cannot run the format
    """
    lack, context = lacking(), _context(spark)
    for warning in [lack] if lack else degraded(context):
        warnings.warn(warning, stacklevel=2)
    if context is None:  # Spark Connect: another machine runs the processes
        if not _is_found():
            spark.dataSource.register(RocketletDataSource)
        return
    fault = _worker_fault(context)
    if fault:
        raise RuntimeError(fault)
    if not lack:
        _listen(spark)
    from .worker import fast_start

    with fast_start(context):
        _make_known(spark, with_ledger(_ledgers[0]) if _ledgers else RocketletDataSource)


def stop(query: StreamingQuery, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a query between two batches: let the running batch finish, and start no further one, so that the messages of
    the last batch are not redelivered because of the stop.

    Meanwhile, other queries of the same groups in this driver start no batch. Before the query has finished its first
    batch, no query of this format starts one. A query of another format may have started a further batch when it is
    stopped.

    Args:
        query: the query
        timeout_s: maximum time to wait for the running batch
    Raises:
        TimeoutError: the batch takes longer; the query then continues
        RuntimeError: no session of this driver was registered, or the query belongs to Spark Connect
    """
    if not isinstance(query, StreamingQuery):
        raise RuntimeError(
            "rocketlet.spark.stop cannot stop a query of Spark Connect between two batches, because its driver is elsewhere: "
            "call query.stop(); with membership, other members may handle its last batch again"
        )
    if not _ledgers:
        raise RuntimeError("rocketlet.spark.stop needs rocketlet.spark.register(spark) before the query is started")
    hold = _Hold(_ledgers[0], query)
    end_s = time.monotonic() + timeout_s
    try:
        while query.isActive:
            hold.renew()
            if not query.status["isTriggerActive"] or hold.is_passed:
                break
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"the batch of the query {query.name or query.id} has not ended for {timeout_s:.0f} s"
                )
            time.sleep(STOP_POLL_INTERVAL_S)
        query.stop()
    finally:
        hold.release()


class _Hold:
    """Keeps the sources of a query from starting a batch. Spark reports a query's sources with its first finished
    batch."""

    def __init__(self, ledger: Ledger, query: StreamingQuery) -> None:
        self._ledger = ledger
        self._query = query
        self._groups: set[str] = set()
        self._renewed_s = float("-inf")
        self._begun = query.lastProgress
        self.is_passed = False
        """True if the query also reads a source of another format, which cannot be held, and has finished a batch since the
        hold began."""

    def renew(self) -> None:
        progress: Any = self._query.lastProgress
        reported = [logged_offset(source.endOffset) for source in progress.sources] if progress else []
        groups = {offset["$"]["group"] for offset in reported if offset is not None}
        self.is_passed = None in reported and progress.batchId != getattr(self._begun, "batchId", None)
        now_s = time.monotonic()
        if groups == self._groups and now_s < self._renewed_s + HOLD_RENEWAL_S:
            return
        self._renewed_s = now_s
        self._groups |= groups
        for group in self._groups:
            self._ledger.hold(group)
        if reported:
            self._ledger.release_all()
        else:
            self._ledger.hold_all()

    def release(self) -> None:
        self._ledger.release_all()
        for group in self._groups:
            self._ledger.release(group)


def _make_known(spark: SparkSession, source: type[RocketletDataSource]) -> None:
    """Register the format. Spark checks in the thread's active session whether the name is taken, and this may be
    another session."""
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        spark.createDataFrame([], "none STRING")  # makes this session the thread's active one
        spark.dataSource.register(source)


def _is_found() -> bool:
    """Return True if Spark finds the format without `register`. Spark searches for it in the same way."""
    return any(module.name == "pyspark_rocketlet" for module in pkgutil.iter_modules())


def _context(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session; None with Spark Connect, whose driver runs elsewhere."""
    try:
        return spark.sparkContext
    except Exception:
        return None


def _listen(spark: SparkSession) -> None:
    """Record finished batches for the planners of this driver."""
    if spark in _listening:
        return
    from .driver import Ledger
    from .listener import RocketletListener

    if not _ledgers:
        _ledgers.append(Ledger.create())
        atexit.register(_ledgers[0].remove)
    spark.streams.addListener(RocketletListener(_ledgers[0]))
    _listening.add(spark)


def _worker_fault(context: SparkContext) -> str | None:
    """Return the reason why this machine's workers would not find this package: their Python is missing, or is in another
    folder than this process's; otherwise None, as for workers of other machines whose Python is here, too."""
    program = getattr(context, "pythonExec", sys.executable)
    worker = shutil.which(program)
    if worker is None:
        return (
            f"Spark would run {program} in the driver, too, where it is missing: the path of its Python is the "
            "same everywhere. If an archive has it, unpack the archive in the folder of the job: tar xzf environment.tar.gz "
            "-C environment"
        )
    if not (context.master or "").startswith("local"):
        return None
    if _folder(worker) == _folder(sys.executable):
        return None
    return (
        f"Spark's workers would run {worker}, not {sys.executable}, which has rocketlet: "
        f"set PYSPARK_PYTHON={sys.executable} before the session is made"
    )


def _folder(program: str) -> Path:
    """Return the resolved folder of a program. Links to the program itself are kept, because a virtual environment's
    Python is a link."""
    return Path(program).parent.resolve()
