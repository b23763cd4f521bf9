"""A listener that records the finished batches of the driver's queries that are members of groups in the ledger.

PySpark's own listeners fetch about 60 values of each progress from the JVM, one by one, while the next batch runs. The
listener of this module fetches one text.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.listener import JStreamingQueryListener

from ..client.errors import get_logger
from .driver import Ledger
from .worker import UPDATE

log = get_logger("rocketlet.spark")


class RocketletListener:
    """Listener for `addListener`, which reads `_jlistener` once, after the JVM can call this process."""

    def __init__(self, context: SparkContext, ledger: Ledger) -> None:
        self._context = context
        self._ledger = ledger

    @property
    def _jlistener(self) -> Any:
        jvm: Any = self._context._jvm
        return jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(_Events(self._ledger))


class _Events(JStreamingQueryListener):
    """Methods that the JVM calls. Events are objects of the JVM, and each call of their methods is a request to the
    JVM."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # newest finished offset by run id and index of the source
        self._offsets: dict[str, dict[int, dict[str, Any]]] = {}
        self._has_failed = False

    def onQueryStarted(self, jevent: Any) -> None:  # noqa: N802 (Spark's names)
        pass

    def onQueryProgress(self, jevent: Any) -> None:  # noqa: N802
        """Record the ends of the batch. Log the first exception, which Spark would ignore."""
        try:
            self._record(json.loads(jevent.progress().json()))
        except Exception as error:
            if not self._has_failed:
                effect = "finished batches are committed for their groups only at the next trigger"
                log.warning("progress_unreadable", reason=repr(error), effect=effect, hint=UPDATE)
            self._has_failed = True

    def _record(self, progress: dict[str, Any]) -> None:
        run = progress["runId"]
        known = self._offsets.setdefault(run, {})
        for source, reported in enumerate(progress["sources"]):
            offset = member_offset(reported["endOffset"])
            if offset is not None and known.get(source) != offset:
                known[source] = offset
                self._ledger.record(offset["$"]["group"], run, source, offset)

    def onQueryIdle(self, jevent: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, jevent: Any) -> None:  # noqa: N802
        run = jevent.runId().toString()
        known = self._offsets.pop(run, {})
        for source, offset in known.items():
            self._ledger.record(offset["$"]["group"], run, source, offset, has_ended=True)
        if not known:
            self._ledger.record_end()


def member_offset(offset: Any) -> dict[str, Any] | None:
    """Return the offset if it belongs to a query that is a member of a group, otherwise None."""
    about = offset.get("$") if isinstance(offset, dict) else None
    return offset if isinstance(about, dict) and about.get("membership") else None
