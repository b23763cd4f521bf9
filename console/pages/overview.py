"""The first page: what comes in and goes out, which groups are in trouble, and the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ...protocol import names
from .. import charts
from ..config import CATCH_UP_S, OVERVIEW_ROWS
from ..page import Page, console_of, is_load
from ..samples import GroupSample
from ..text import duration
from .brokers import rows_of_brokers
from .groups import new_dead

_TROUBLE = {"no members": 0, "consuming": 1, "up to date": 2, "idle": 3}
"""The worst first; dead letters come between the first and the second."""


@dataclass(frozen=True, slots=True)
class Row:
    sample: GroupSample
    dead: int
    caught_up: str
    spark: str


async def shown(request: Request) -> Page:
    console, now = console_of(request), is_load(request)
    listed, _, brokers = await asyncio.gather(
        console.groups.list(now=now), console.topics.list(now=now), rows_of_brokers(console)
    )
    users = [name for name in listed if not names.is_system_group(name)]
    await console.groups.show(users[:OVERVIEW_ROWS], now=now)
    samples = [console.groups.found[name] for name in users if name in console.groups.found]
    dead_topics = {names.dlq_topic(name) for name in users} & set(console.topics.names)
    await console.topics.show(sorted(dead_topics)[:OVERVIEW_ROWS], now=now)
    dead = await new_dead(console, users[:OVERVIEW_ROWS])
    rows = [
        Row(item, dead.get(item.name, 0), caught_up(tuple(item.lags), item.lag), charts.spark(tuple(item.lags)))
        for item in samples
    ]
    rows.sort(key=_trouble)
    return Page(
        "overview.html",
        {
            "brokers": brokers,
            "rows": rows[:OVERVIEW_ROWS],
            "left_out": max(len(users) - OVERVIEW_ROWS, 0),
            "put_rate": sum(row.put_rate for row in brokers),
            "get_rate": sum(row.get_rate for row in brokers),
            "lag": sum(item.lag for item in samples),
            "standing": sum(item.state == "no members" for item in samples),
            "dead": sum(dead.values()),
            "away": sum(row.state != "up" for row in brokers),
        },
    )


def _trouble(row: Row) -> tuple[float, int, str]:
    state = _TROUBLE.get(row.sample.state, 1)
    return (min(state, 0.5) if row.dead else state, -row.sample.lag, row.sample.name)


def caught_up(lags: Sequence[tuple[int, int]], lag: int) -> str:
    """When a group will have no lag if it goes on as in the last minutes."""
    if not lag:
        return "now"
    recent = [point for point in lags if point[0] >= lags[-1][0] - CATCH_UP_S * 1000]
    if len(recent) < 2:
        return "–"
    took_ms, shrunk = recent[-1][0] - recent[0][0], recent[0][1] - recent[-1][1]
    if shrunk <= 0 or took_ms <= 0:
        return "not at this rate"
    return f"in {duration(int(lag / shrunk * took_ms))}"


__all__ = ["caught_up", "shown"]
