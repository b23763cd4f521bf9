"""Writes the page that people share: who read which queue and when, in one HTML file that needs nothing else.

Times are ms since the page's beginning. The script of `page.html` draws them.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class Span:
    """A member reads a queue. `waited_ms`: how much of its end was spent on giving the queue up; `facts`: lines to show."""

    queue: int
    owner: str
    begin: float
    end: float
    facts: tuple[str, ...] = ()
    waited_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The gap between two owners of a queue."""

    queue: int
    before: str
    after: str
    begin: float
    end: float
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Twice:
    """Messages of a queue that were handled a second time; by whom first and second."""

    queue: int
    begin: float
    end: float
    count: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Moment:
    """Somebody joined, left or was killed."""

    ms: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Strip:
    """A chart below the queues, with the same time axis."""

    name: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    note: str
    queues: Sequence[str]
    spans: Sequence[Span]
    gaps: Sequence[Gap] = ()
    twice: Sequence[Twice] = ()
    marks: Sequence[Moment] = ()
    strips: Sequence[Strip] = ()
    began_ms: float = 0.0  # since 1970, where that is known


def write_page(path: Path, title: str, panels: Sequence[Panel], summary: str) -> None:
    """Raises ValueError for a panel without spans."""
    if not all(panel.spans for panel in panels):
        raise ValueError("no queue was owned by anybody: there is nothing to draw")
    # a script ends at the first "</script", wherever it stands
    data = orjson.dumps({"title": title, "panels": panels}).decode().replace("</", "<\\/")
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = page.replace("__TITLE__", html.escape(title)).replace("__SUMMARY__", html.escape(summary))
    path.write_text(page.replace("__DATA__", data), encoding="utf-8")
