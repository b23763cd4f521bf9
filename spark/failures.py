"""Errors that begin with our sentence: Spark shows a worker's whole trace before it, 32 lines, unless it is told not to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..client.errors import RocketletError
from ..protocol.message import MessageError


class DataLossError(RuntimeError):
    """Messages that the query should read are gone from the broker."""


SAID = (RocketletError, DataLossError, MessageError)
_HIDE = "SPARK_HIDE_TRACEBACK"  # looked at when a worker has failed, which then ends


@contextmanager
def plainly() -> Iterator[None]:
    """In Spark's Python workers, an error of ours comes without a trace."""
    try:
        yield
    except SAID:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            os.environ[_HIDE] = "1"
        raise
