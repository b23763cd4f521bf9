"""One page of a long list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..config import PAGE_ROWS

T = TypeVar("T")
U = TypeVar("U")


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

    def mapped(self, make: Callable[[T], U]) -> Part[U]:
        """Return this page with each item replaced by what `make` returns for it."""
        return Part([make(item) for item in self.items], self.number, self.pages, self.total, self.first)


def part_of(items: Sequence[T], number: int, rows: int = PAGE_ROWS) -> Part[T]:
    """Return the page with a number, or the last one if there are fewer. A page has up to `rows` items."""
    pages = max(-(-len(items) // rows), 1)
    at = min(max(number, 1), pages)
    begin = (at - 1) * rows
    return Part(items[begin : begin + rows], at, pages, len(items), begin + 1)
