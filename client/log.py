"""The client's loggers: structlog in front, the standard `logging` behind, so that an application sees and filters them as
its own. A record's message has the fields as text; `record.event` is the text without them, `record.fields` has their
values, for formatters that keep structure.

structlog is loaded with the first line that is logged. That takes 0.1 s of processor time where rich is installed, which
structlog then loads, too; short commands and Spark's processes mostly log nothing."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, WrappedLogger

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_CALLER: int = 4  # the frames between who logs and logging.Logger


def _for_logging(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of a method of logging.Logger. The fields go into one attribute: a record allows none that is called
    `message` or `name`."""
    options = {"exc_info": event.pop("exc_info", None), "stacklevel": _CALLER}
    text = str(event.pop("event"))
    fields = dict(event)
    message = " ".join((text, *(f"{name}={value!r}" for name, value in fields.items())))
    return (message,), {**options, "extra": {"event": text, "fields": fields}}


class _Late:
    """A BoundLogger that is made when it is needed."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __getattr__(self, name: str) -> Any:
        is_enabled = self._logger.isEnabledFor(_LEVELS.get(name, logging.ERROR))
        return getattr(self._bound, name) if is_enabled else _ignore

    @cached_property
    def _bound(self) -> BoundLogger:
        from structlog.stdlib import BoundLogger

        return BoundLogger(self._logger, [_for_logging], {})


def _ignore(event: str, **fields: Any) -> None: ...


def get_logger(name: str) -> BoundLogger:
    return cast("BoundLogger", _Late(name))
