"""What a removal is."""

from __future__ import annotations

from typing import Any, NamedTuple


class Lines(NamedTuple):
    """In a function: these lines become others. Indents count from the function's own."""

    before: str
    after: str


class Change(NamedTuple):
    owner: Any
    attribute: str
    value: Any  # several Lines are a list


class Removal(NamedTuple):
    """What is taken out, in words, the campaign that must find it, in how many tries, and the point of the list of defects
    that it is of."""

    what: str
    campaign: str
    tries: int
    changes: list[Change]
    point: str
    only: str | None = None
