"""Logs: readable on a terminal, otherwise one JSON object on each line."""

from __future__ import annotations

import asyncio
import logging
import sys
from io import StringIO
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from .output import printable
from .repeats import RepeatedEvents

log = structlog.get_logger("rocketlet")

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_place: dict[str, str] = {}  # fields that are added to each log entry that does not have them


def name_broker(name: str) -> None:
    """Add the broker's name to each log entry that has no broker field."""
    _place["broker"] = name


def configure(level: str = "info") -> None:
    """Write logs to stderr, so that stdout has only the commands' output. Records of the standard `logging`, from the
    client, asyncio and other libraries, get the same format."""
    on_terminal = sys.stderr.isatty()
    repeats = RepeatedEvents()
    context: list[structlog.typing.Processor] = [structlog.contextvars.merge_contextvars, _with_place]
    stamps: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if on_terminal else "iso", utc=not on_terminal),
    ]
    rendering: list[structlog.typing.Processor] = (
        [_printable, structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback)]
        if on_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                *context,
                *stamps,
                structlog.stdlib.add_logger_name,
                _with_fields,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.addFilter(repeats.filter)
    logging.basicConfig(handlers=[handler], level=LEVELS[level], force=True)
    structlog.configure(
        processors=[*context, repeats.process, *stamps, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def report_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what the event loop passes to its exception handler, such as an exception of a callback or a forgotten task."""
    error = context.get("exception")
    log.error("unhandled_error", reason=context.get("message"), action=str(context.get("handle", "")), exc_info=error)


def _with_place(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in _place.items():
        event.setdefault(name, value)
    return event


def _printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Escape control characters in text fields, because clients choose ids, tags and remarks, and a terminal would
    interpret them."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    """Write a traceback without local variables, which structlog would show with rich and which may be secrets."""
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n".join(map(printable, text.getvalue().splitlines())))


def _with_fields(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace the text of a record of the client (rocketlet.client.errors) by its event and fields; leave other records
    unchanged."""
    record = event["_record"]
    fields = getattr(record, "fields", None)
    return {**event, "event": record.event, **fields} if fields is not None else event
