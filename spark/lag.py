"""How far a query is behind, per queue, from what Spark tells a StreamingQueryListener."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..protocol.queue import Queue
from .checkpoint import from_offset

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress


def lag(progress: StreamingQueryProgress) -> dict[Queue, int]:
    """How many messages of each queue were not planned yet; empty for a query of other sources. `progress` is a listener's
    `event.progress`. Spark gives a Python source no place for metrics of its own but the text `latestOffset`."""
    found: dict[Queue, int] = {}
    for source in progress.sources:
        try:
            told = json.loads(source.latestOffset or "null")
            ranges = from_offset(told["offsets"]).ranges
        except (KeyError, TypeError, ValueError):
            continue  # from another source
        found |= {queue: end - planned for queue, (planned, end) in ranges.items()}
    return found
