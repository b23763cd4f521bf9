"""A part of a long list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..config import PAGE_ROWS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """One page of a list: its `items`, its `number` from 1, and the `total` number of items."""

    items: Sequence[T]
    number: int
    pages: int
    total: int
    first: int

    @property
    def last(self) -> int:
        return self.first + len(self.items) - 1


def part_of(items: Sequence[T], number: int) -> Part[T]:
    """Return the page with a number, or the last one if there are fewer."""
    pages = max(-(-len(items) // PAGE_ROWS), 1)
    at = min(max(number, 1), pages)
    begin = (at - 1) * PAGE_ROWS
    return Part(items[begin : begin + PAGE_ROWS], at, pages, len(items), begin + 1)
