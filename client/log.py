"""The client's logger: the application's structlog if it has configured it, else warnings only, to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

_quiet = structlog.wrap_logger(
    structlog.PrintLogger(sys.stderr),
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "logger", "event"]),
    ],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)


class _Logger:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)
        return getattr(_quiet.bind(logger=self._name), method)


def get_logger(name: str) -> FilteringBoundLogger:
    return cast("FilteringBoundLogger", _Logger(name))
