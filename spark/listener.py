"""A listener that records the finished batches of the driver's queries that are members of groups in the ledger."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from ..client.errors import get_logger
from .checkpoint import logged_offset
from .driver import Ledger

log = get_logger("rocketlet.spark")


class RocketletListener(StreamingQueryListener):
    """Listener of all queries of a session."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # newest finished offset by run id and index of the source
        self._offsets: dict[str, dict[int, dict[str, Any]]] = {}
        self._has_failed = False

    def onQueryStarted(self, event: object) -> None: ...  # noqa: N802 (Spark's names)

    def onQueryIdle(self, event: object) -> None: ...  # noqa: N802

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Record the ends of the batch. Log the first failure, which Spark would ignore."""
        try:
            self._record(event.progress)
        except OSError as error:
            if not self._has_failed:
                effect = "finished batches are committed for their groups only at the next trigger"
                log.warning("batch_not_recorded", reason=str(error), effect=effect)
            self._has_failed = True

    def _record(self, progress: StreamingQueryProgress) -> None:
        run = str(progress.runId)
        known = self._offsets.setdefault(run, {})
        for number, source in enumerate(progress.sources):
            offset = logged_offset(source.endOffset)
            if offset is not None and offset["$"].get("membership") and known.get(number) != offset:
                known[number] = offset
                self._ledger.record(offset["$"]["group"], run, number, offset)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        run = str(event.runId)
        known = self._offsets.pop(run, {})
        for number, offset in known.items():
            self._ledger.record(offset["$"]["group"], run, number, offset, has_ended=True)
        if not known:
            self._ledger.record_end()
