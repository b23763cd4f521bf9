"""The form of a removal."""

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
    """A fix to take out, in words; the campaign that must notice, in how many tries; and its point in the list of
    defects."""

    what: str
    campaign: str
    tries: int
    changes: list[Change]
    point: str
    only: str | None = None
