"""Parsers of numbers and times on the command line."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from datetime import time as clock
from typing import Final

from ...client.errors import ConfigError

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to 65535")
    return int(text)


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least`, which must be 0 or more."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least}")
        return int(text)

    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0")
    return number


def rate(text: str) -> float:
    """Parse a rate such as `20/s`, `100/m` or `0.5/s` to a number per second."""
    number, slash, unit = text.partition("/")
    try:
        found = float(number) / _UNITS_S[unit if slash else "s"]
    except (ValueError, KeyError):
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a rate; use N/s, N/m or N/h, such as 20/s")
    return found


def moment(text: str) -> int:
    """Parse the next time of the day, such as `02:00`, or a local time (ISO 8601), to ms since the epoch."""
    try:
        if "T" in text:
            return int(datetime.fromisoformat(text).timestamp() * 1000)
        now = datetime.now()
        found = datetime.combine(now.date(), clock.fromisoformat(text))
        return int((found if found > now else found + timedelta(days=1)).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a time; use 02:00 or 2026-01-31T02:00") from None


def since(text: str) -> int:
    """Parse a duration before now, such as `10m`, or a local time (ISO 8601), to ms since the epoch. Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    try:
        if unit in _UNITS_S and number.isascii() and number.isdigit():
            return int((time.time() - int(number) * _UNITS_S[unit]) * 1000)
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(f"{text[:40]!r}: use 30s, 10m, 2h, 3d, or a time such as 2026-01-31T12:00:00") from None
