"""Coordinates of charts, which the templates draw as SVG, without scripts and inline styles: colours are classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..client.admin.admin_client import Ownership
from .config import GAP_INTERVALS, GAP_S
from .text import clock_time, number

Points = Sequence[tuple[int, float]]  # time in ms, value


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Lines:
    """A chart. `line` and `area` are SVG paths of the line and of what is below it, in a box of `width` x `height`."""

    width: int
    height: int
    line: str
    area: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    colour: str
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A picture of owners over time, with one row per queue. `left` is the x position at which the rows start after
    their names."""

    width: int
    height: int
    left: int
    row_height: int
    rows: tuple[Tick, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]


_LAST_LABEL = 8  # distance from the right edge at which the label of a tick fits into the picture


def lines(points: Points, *, width: int = 1100, height: int = 150, what: str = "messages") -> Lines | None:
    """Return a chart; None for fewer than two points."""
    if len(points) < 2:
        return None
    begin, end = points[0][0], points[-1][0]
    top = nice_ceiling(max(value for _, value in points))
    span = max(end - begin, 1)
    line, area = "", ""
    for run in _runs(points):
        drawn = [f"{(ms - begin) / span * width:.1f},{height - value / top * height:.1f}" for ms, value in run]
        line += _path(drawn)
        area += f"M{drawn[0].partition(',')[0]},{height} {' '.join(drawn)} {drawn[-1].partition(',')[0]},{height}Z"
    values = [value for _, value in points]
    summary = (
        f"{number(values[-1])} {what} now, at most {number(max(values))} and at least {number(min(values))} "
        f"since {clock_time(begin)[:8]}"
    )
    x_ticks = tuple(tick for tick in time_ticks(begin, end, 0, width) if tick.at <= width - _LAST_LABEL)
    return Lines(width, height, line, area, x_ticks, _value_ticks(top, height), summary)


def lines_of(points: Points, *, what: str = "messages") -> dict[str, Lines]:
    """Return a chart for each window width; empty for fewer than two points."""
    drawn = {name: lines(points, width=width, what=what) for name, width in WIDTHS.items()}
    return {name: chart for name, chart in drawn.items() if chart is not None}


def spark(points: Points, *, width: int = 120, height: int = 24, top: float = 0) -> str:
    """Return the SVG path of a sparkline; empty for fewer than two points. The value at the upper edge is at least
    `top`."""
    if len(points) < 2:
        return ""
    step = max(len(points) // 60, 1)
    begin, span = points[0][0], max(points[-1][0] - points[0][0], 1)
    limit = max(top, *(value for _, value in points), 1)
    return "".join(
        _path(
            [
                f"{(ms - begin) / span * width:.1f},{height - 1 - value / limit * (height - 2):.1f}"
                for ms, value in run[::-step][::-1]
            ]
        )
        for run in _runs(points)
    )


def _runs(points: Points) -> Iterator[Points]:
    """Split points at the times without samples, so that no line is drawn across them. With very many groups samples are
    rare, so only a pause of several times the usual interval counts."""
    steps = sorted(after[0] - before[0] for before, after in pairwise(points))
    gap_ms = max(GAP_S * 1000, GAP_INTERVALS * steps[(len(steps) - 1) // 2])
    begin = 0
    for at, (before, after) in enumerate(pairwise(points), 1):
        if after[0] - before[0] > gap_ms:
            yield points[begin:at]
            begin = at
    yield points[begin:]


def _path(drawn: Sequence[str]) -> str:
    """Return the SVG path through points; a line of no length, which is a dot, for a single one."""
    return f"M{' '.join(drawn if len(drawn) > 1 else (*drawn, *drawn))}"


def nice_ceiling(value: float) -> float:
    """Return the least of 1, 2 and 5 times powers of ten that is at least 1 and not below `value`."""
    if value <= 1:
        return 1
    power: float = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def timeline(
    spans: Iterable[Ownership],
    queues: Sequence[str],
    colour: Callable[[str], str],
    marks: Sequence[tuple[int, str]],
    *,
    begin_ms: int,
    end_ms: int,
    width: int = 1160,
    left: int = 150,
    row_height: int = 18,
) -> Timeline:
    """Return a picture of the owners of `queues` (`broker:number`) over time. `marks` are times (ms) with a text."""
    index = {queue: row for row, queue in enumerate(queues)}
    scale = (width - left) / max(end_ms - begin_ms, 1)
    bars = []
    for item in spans:
        row = index.get(item.queue)
        if row is None or item.end_ms <= begin_ms or item.begin_ms >= end_ms:
            continue
        x = left + (max(item.begin_ms, begin_ms) - begin_ms) * scale
        right = left + (min(item.end_ms, end_ms) - begin_ms) * scale
        since = f"from {clock_time(item.begin_ms)}" if item.begin_ms else "from before the first known event"
        label = f"{item.queue}: {item.owner} {since} to {clock_time(item.end_ms)}"
        bars.append(Bar(round(x, 1), row * row_height + 1, round(max(right - x, 0.8), 1), colour(item.owner), label))
    height = len(queues) * row_height
    rows = tuple(Tick(row * row_height + row_height * 0.7, queue) for queue, row in index.items())
    found = tuple(
        Mark(round(left + (ms - begin_ms) * scale, 1), text) for ms, text in marks if begin_ms <= ms <= end_ms
    )
    return Timeline(
        width, height, left, row_height, rows, tuple(bars), found, time_ticks(begin_ms, end_ms, left, width)
    )


WIDTHS = {"wide": 1100, "middle": 640, "narrow": 230}
"""The widths of a picture. A page contains all three, and the style sheet shows the one that fits the window."""


def time_ticks(begin_ms: int, end_ms: int, left: int, right: int) -> tuple[Tick, ...]:
    """Return ticks at round times, in steps of at least a sixth of the time span, or more in a narrow picture."""
    span_s, most = max((end_ms - begin_ms) / 1000, 1), max(min((right - left) // 110, 6), 2)
    step_s = next((step for step in (5, 10, 30, 60, 120, 300, 600, 1800) if span_s / step <= most), 0)
    step_s = step_s or math.ceil(span_s / most / 3600) * 3600
    first = -(-begin_ms // (step_s * 1000)) * step_s * 1000
    scale = (right - left) / max(end_ms - begin_ms, 1)
    return tuple(
        Tick(round(left + (ms - begin_ms) * scale, 1), clock_time(ms)[:8])
        for ms in range(int(first), end_ms + 1, step_s * 1000)
    )


def _value_ticks(top: float, height: int) -> tuple[Tick, ...]:
    return tuple(Tick(round(height - height * share, 1), number(top * share)) for share in (0.5, 1))
