"""Limits equal warnings and errors in the log, for example while a name server is unreachable: they are logged at most
once a minute, with the number of dropped ones if the entry has fields."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from ..config import REPEAT_INTERVAL_S, REPEATS_KNOWN


class RepeatedEvents:
    """Drops warnings and errors that equal one in all fields that was logged less than REPEAT_INTERVAL_S ago."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lines: OrderedDict[Hashable, tuple[float, int]] = (
            OrderedDict()
        )  # time of the last entry; number dropped since

    def left_out(self, event: str, fields: Mapping[str, Any]) -> int | None:
        """Return how many equal entries were dropped since the last one was logged; None if this entry is to be dropped,
        too."""
        error = sys.exc_info()[1] if fields.get("exc_info") else None
        line = (event, repr(error), *(f"{name}={value!r}" for name, value in fields.items()))
        written_s, left_out = self._lines.get(line, (None, 0))
        now_s = self._now_s()
        if written_s is not None and now_s - written_s < REPEAT_INTERVAL_S:
            self._lines[line] = written_s, left_out + 1
            return None
        self._lines[line] = now_s, 0
        self._lines.move_to_end(line)
        if len(self._lines) > REPEATS_KNOWN:
            self._lines.popitem(last=False)
        return left_out

    def process(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Process an entry, as a structlog processor. Raises DropEvent for an entry to be dropped."""
        if method in ("debug", "info"):
            return event
        left_out = self.left_out(str(event.get("event")), event)
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "repeated": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record of `logging`, from the client or another library, that is to be dropped."""
        if record.levelno < logging.WARNING:
            return True
        fields = getattr(record, "fields", None)
        values: Mapping[str, Any] = {"message": record.getMessage()} if fields is None else fields
        left_out = self.left_out(record.name, {**values, "event": getattr(record, "event", "")})
        if left_out and fields is not None:
            fields["repeated"] = left_out
        return left_out is not None
