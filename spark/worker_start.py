"""How Spark's Python processes for the format start: see `start/sitecustomize.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext

from .failures import known_within

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
