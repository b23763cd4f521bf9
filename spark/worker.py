"""Spark's Python workers: a fast start, and errors without a stack trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

import pyspark
from pyspark import SparkContext

from ..client.errors import RocketletError
from ..protocol.message import MessageError

# ------------------------------------------------------------------------------
# Fast start of Spark's Python processes for the format: see `start/sitecustomize.py`.


_FOLDER = str(Path(__file__).with_name("start"))


@contextmanager
def fast_start(context: SparkContext) -> Iterator[None]:
    """Let the processes of functions that are registered within this context start fast. Processes of other functions
    are not affected."""
    with uses_internals():
        before = context.environment
    path = filter(None, (_FOLDER, before.get("PYTHONPATH")))
    context.environment = {**before, "PYTHONPATH": os.pathsep.join(path)}
    try:
        yield
    finally:
        context.environment = before


# ------------------------------------------------------------------------------
# Errors that begin with this package's message. By default, Spark shows the worker's whole stack trace (32 lines)
# before the message.


class DataLossError(RuntimeError):
    """With failOnDataLoss: messages in the query's range are deleted or unreadable, their broker has no route, or the topic
    or cluster is not the one in the checkpoint."""


OWN_ERRORS = (RocketletError, DataLossError, MessageError)
KNOWN: Final = "4.0 to 4.3"  # versions of PySpark with which the use of its internals was tested
_HIDE = "SPARK_HIDE_TRACEBACK"  # Spark reads this variable when a worker has failed; the worker then exits


@contextmanager
def plainly() -> Iterator[None]:
    """Hide the stack trace of this package's errors in Spark's Python workers."""
    try:
        yield
    except OWN_ERRORS:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            os.environ[_HIDE] = "1"
        raise


@contextmanager
def uses_internals() -> Iterator[None]:
    """Wrap code that uses internals of PySpark, and translate their absence into a RuntimeError.

    The context manager must wrap nothing else, because a name that is missing in this package is not PySpark's fault.
    """
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if _is_ours(error):
            raise
        raise RuntimeError(
            f"rocketlet.spark uses internals of PySpark {KNOWN}, and this is {pyspark.__version__}, where something is "
            f"missing ({error}): install one of those, or a newer rocketlet"
        ) from error


def _is_ours(error: AttributeError | ImportError | TypeError) -> bool:
    """Return True if the missing name belongs to this package, or if a TypeError is not about a missing class of the JVM, for
    which py4j returns a package, which is not callable."""
    if isinstance(error, TypeError):
        return "JavaPackage" not in str(error)
    if isinstance(error, ImportError):
        owner = error.name or ""
    else:
        owner = error.obj.__name__ if isinstance(error.obj, ModuleType) else type(error.obj).__module__
    return owner.partition(".")[0] == __name__.partition(".")[0]
