"""A list of names with filter, order and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..form import Form
from .paging import Part, part_of


@dataclass(frozen=True, slots=True)
class Listing:
    """The user's query, all names that match, and the page of them that is shown."""

    text: str
    system: str
    sort: str
    names: list[str]
    part: Part[str]


def listing(
    form: Form,
    names: Iterable[str],
    *,
    is_system: Callable[[str], bool],
    figures: dict[str, Callable[[str], float]],
) -> Listing:
    """Return the list for a query. `names` have their order, `figures` are further sort keys, the largest first. Names
    for which `is_system` is True are left out unless the form requests them."""
    text, system, sort = form.text("q"), form.text("system"), form.text("sort", "name")
    found = [name for name in names if text.lower() in name.lower() and (system or not is_system(name))]
    if sort in figures:
        found.sort(key=figures[sort], reverse=True)
    else:
        sort = "name"
    return Listing(text, system, sort, found, part_of(found, form.number("page", 1)))
