"""Numbers on the command line: a text that is none, or is out of its range, is refused before anything runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 0 to 65535")
    return int(text)


def whole(least: int) -> Callable[[str], int]:
    """A whole number from `least`, which is 0 or more."""

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
