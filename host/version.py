"""Rocketlet's version, as it is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    """Stands beside the version of RocketMQ whose protocol is spoken."""
    try:
        return version("rocketlet")
    except PackageNotFoundError:
        return "unknown"
