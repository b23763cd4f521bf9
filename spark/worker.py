"""Spark's Python workers: a fast start, and errors that name what failed."""

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
# How Spark's Python processes for the format start: see `start/sitecustomize.py`.


_FOLDER = str(Path(__file__).with_name("start"))


@contextmanager
def fast_start(context: SparkContext) -> Iterator[None]:
    """Functions that are registered meanwhile run in processes that start fast; those of others stay as they are."""
    with known_within():
        before = context.environment
    path = filter(None, (_FOLDER, before.get("PYTHONPATH")))
    context.environment = {**before, "PYTHONPATH": os.pathsep.join(path)}
    try:
        yield
    finally:
        context.environment = before


# ------------------------------------------------------------------------------
# Errors that begin with our sentence: Spark shows a worker's whole trace before it, 32 lines, unless it is configured not
# to.


class DataLossError(RuntimeError):
    """Messages that the query should read are gone from the broker."""


SAID = (RocketletError, DataLossError, MessageError)
KNOWN: Final = "4.0 to 4.3"  # versions of PySpark whose inner names this package was tested with
_HIDE = "SPARK_HIDE_TRACEBACK"  # read when a worker has failed, which then ends


@contextmanager
def plainly() -> Iterator[None]:
    """Shows an error of ours in Spark's Python workers without a trace."""
    try:
        yield
    except SAID:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            os.environ[_HIDE] = "1"
        raise


@contextmanager
def known_within() -> Iterator[None]:
    """Marks code that uses names which PySpark does not document. Raises RuntimeError if they are gone. It must stand
    around nothing else: a name missing in our own modules is no fault of PySpark's."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if _is_ours(error):
            raise
        raise RuntimeError(
            f"rocketlet.spark knows PySpark {KNOWN} from within, and this is {pyspark.__version__}, where something is "
            f"missing ({error}): install one of those, or a newer rocketlet"
        ) from error


def _is_ours(error: AttributeError | ImportError | TypeError) -> bool:
    """Whether the missing name belongs to this package. A TypeError is PySpark's where the JVM lacks a class: then py4j
    takes its name for a package, which cannot be called."""
    if isinstance(error, TypeError):
        return "JavaPackage" not in str(error)
    if isinstance(error, ImportError):
        owner = error.name or ""
    else:
        owner = error.obj.__name__ if isinstance(error.obj, ModuleType) else type(error.obj).__module__
    return owner.partition(".")[0] == __name__.partition(".")[0]
