"""The version of the installed Rocketlet."""

from __future__ import annotations

from functools import cache


@cache
def own_version() -> str:
    """Return the version of the installed Rocketlet; "unknown" if it is not installed as a package."""
    from importlib.metadata import PackageNotFoundError, version  # the import takes as long as that of 5,000 lines

    try:
        return version("rocketlet")
    except PackageNotFoundError:
        return "unknown"
