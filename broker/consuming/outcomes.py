"""The results of pulls."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Outcome(Enum):
    """The result of a pull at its offset."""

    FOUND = auto()
    """Messages that its subscription takes."""
    NO_MATCH = auto()
    """Messages, but none of them; it goes on behind them."""
    AT_END = auto()
    """The end of the queue, or nothing that is for it now."""
    EMPTY = auto()
    """A queue that never had a message."""
    EMPTIED = auto()
    """A queue without messages, and another offset than 0."""
    BELOW = auto()
    """An offset before the first message that is kept."""
    BEYOND = auto()
    """An offset behind the end."""
    MADE_ANEW = auto()
    """Another topic of that name than the one that the client has read."""


class Pulled(NamedTuple):
    """Where to pull next, and where the queue begins and ends. `pieces` are records as they lie in the log."""

    outcome: Outcome
    next_offset: int
    begin: int
    end: int
    pieces: list[bytes | memoryview] = []
