"""Spark's Python workers: a fast start, and errors without a stack trace."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyspark
import pyspark.util
from pyspark import SparkContext

from ..client.errors import RocketletError, get_logger
from ..protocol.message import MessageError

log = get_logger("rocketlet.spark")

# ------------------------------------------------------------------------------
# Fast start of Spark's Python processes for the format: see `start/sitecustomize.py`.


_FOLDER = str(Path(__file__).with_name("start"))


@contextmanager
def fast_start(context: SparkContext) -> Iterator[None]:
    """Let the processes of functions that are registered within this context start fast. Processes of other functions are
    not affected."""
    if not hasattr(context, "environment"):  # `degraded` reports that
        yield
        return
    before = context.environment
    path = filter(None, ("" if _is_zipped() else _FOLDER, before.get("PYTHONPATH")))
    context.environment = {**before, "PYTHONPATH": os.pathsep.join(path)}
    try:
        yield
    finally:
        context.environment = before


def warn_of_slow_start() -> None:
    """Log a warning if this process reads PySpark's sources from a zip although the driver has the installed package."""
    if _is_zipped() and _FOLDER in os.environ.get("PYTHONPATH", ""):
        log.warning("start_slow", pyspark=pyspark.__file__, effect="Spark's Python processes start slowly", hint=UPDATE)


def _is_zipped() -> bool:
    return ".zip" in pyspark.__file__


def is_sparks_process() -> bool:
    """Return True in a Python process that Spark has started for a source or a task."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


# ------------------------------------------------------------------------------
# Errors that begin with this package's message. By default, Spark shows the worker's whole stack trace (32 lines)
# before the message.


class DataLossError(RuntimeError):
    """With failOnDataLoss: messages in the query's range are deleted or unreadable, their broker has no route, or the topic
    or cluster is not the one in the checkpoint."""


OWN_ERRORS = (RocketletError, DataLossError, MessageError)
KNOWN: Final = "4.0 to 4.3"  # versions of PySpark with which the use of its internals was tested
NEWEST: Final = (4, 3)  # the newest of them
UPDATE: Final = f"install PySpark {KNOWN}, or a newer rocketlet"
_HIDE: Final = "SPARK_HIDE_TRACEBACK"  # Spark reads this variable when a worker has failed; the worker then exits
PUSHDOWN: Final = (
    "pyspark.sql.worker.data_source_pushdown_filters"  # PySpark imports it only where it pushes filters down
)


@contextmanager
def plainly() -> Iterator[None]:
    """Hide the stack trace of this package's errors in Spark's Python workers."""
    try:
        yield
    except OWN_ERRORS:
        if is_sparks_process():
            os.environ[_HIDE] = "1"
        raise


# ------------------------------------------------------------------------------
# PySpark's internals. Without one of them something is slower or missing, which `register` reports.


SimpleReader: Any = object  # the class by which Spark recognizes a reader that has rows; `object` if there is none
with suppress(ImportError):
    from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper

    SimpleReader = _SimpleStreamReaderWrapper


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in pyspark.__version__.split(".")[:2])


def degraded(context: SparkContext | None) -> list[str]:
    """Return what is slower or missing because this PySpark is newer than those that were tested, or has changed.

    Args:
        context: the context of the session; None with Spark Connect
    """
    found = []
    if version() > NEWEST:
        found.append(f"PySpark {pyspark.__version__} is newer than {KNOWN}, which rocketlet was tested with: {UPDATE}")
    if context is not None and not hasattr(context, "environment"):
        found.append(f"this PySpark has no SparkContext.environment: Spark's Python processes start slowly; {UPDATE}")
    if context is not None and not hasattr(context, "pythonExec"):
        found.append(f"this PySpark has no SparkContext.pythonExec: workers with another Python fail later; {UPDATE}")
    if version() >= (4, 1) and not _exists(PUSHDOWN):
        found.append(f"this PySpark has no {PUSHDOWN}: batch reads do not skip what filters exclude; {UPDATE}")
    if version() >= (4, 2) and SimpleReader is object:
        found.append(
            f"this PySpark has no _SimpleStreamReaderWrapper: tasks read small batches, too (prefetchRows); {UPDATE}"
        )
    if not _hides_traces():
        found.append(f"this PySpark does not read {_HIDE}: errors begin with a stack trace; {UPDATE}")
    return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _hides_traces() -> bool:
    """Return True if PySpark's code has the name of the variable that hides stack traces."""
    try:
        return _HIDE in inspect.getsource(pyspark.util)
    except (OSError, TypeError):  # there is no source
        return True
