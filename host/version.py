"""The version of the installed Rocketlet."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    """Return the version of the installed Rocketlet; "unknown" if it is not installed as a package."""
    try:
        return version("rocketlet")
    except PackageNotFoundError:
        return "unknown"
