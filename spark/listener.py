"""What the driver hears of its queries: which batches are finished, noted in the ledger."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from .ledger import Ledger


class RocketletListener(StreamingQueryListener):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._offsets: dict[Any, dict[str, dict[str, Any]]] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's names)
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        known = self._offsets.setdefault(event.progress.runId, {})
        for source in event.progress.sources:
            offset = _ours(source.endOffset)
            if offset is not None and known.get(group := offset["$"]["group"]) != offset:
                known[group] = offset
                self._ledger.note(group, offset)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        known = self._offsets.pop(event.runId, {})
        for group, offset in known.items():
            self._ledger.note(group, offset, has_ended=True)
        if not known:
            self._ledger.note_end()


def _ours(text: str | None) -> dict[str, Any] | None:
    """The offset of a query that is a member of a group."""
    try:
        offset = json.loads(text or "null")
    except ValueError:
        return None
    about = offset.get("$") if isinstance(offset, dict) else None
    return offset if isinstance(about, dict) and about.get("membership") else None
