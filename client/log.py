"""The client's loggers: structlog in front, the standard `logging` behind, so that an application sees and filters them as
its own. A record's message has the fields as text; `record.event` is the text without them, `record.fields` has their
values, for formatters that keep structure."""

from __future__ import annotations

import logging
from typing import Any

from structlog.stdlib import BoundLogger, filter_by_level
from structlog.typing import EventDict, WrappedLogger

_CALLER: int = 4  # the frames between who logs and logging.Logger


def _for_logging(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of a method of logging.Logger. The fields go into one attribute: a record allows none that is called
    `message` or `name`."""
    options = {"exc_info": event.pop("exc_info", None), "stacklevel": _CALLER}
    text = str(event.pop("event"))
    fields = dict(event)
    message = " ".join((text, *(f"{name}={value!r}" for name, value in fields.items())))
    return (message,), {**options, "extra": {"event": text, "fields": fields}}


def get_logger(name: str) -> BoundLogger:
    return BoundLogger(logging.getLogger(name), [filter_by_level, _for_logging], {})
