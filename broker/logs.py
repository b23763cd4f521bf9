"""Logs: readable on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import structlog

log = structlog.get_logger("rocketlet")

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str = "info") -> None:
    """Logs go to stderr, so that stdout belongs to the commands' own output."""
    on_terminal = sys.stderr.isatty()
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if on_terminal else "iso", utc=not on_terminal),
    ]
    if on_terminal:
        processors.append(structlog.dev.ConsoleRenderer())
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def report_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What escapes from a timer or a callback of the loop is an event of the log like any other."""
    error = context.get("exception")
    log.error("unhandled", reason=context.get("message"), action=str(context.get("handle", "")), exc_info=error)
