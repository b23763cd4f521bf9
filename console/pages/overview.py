"""The first page: what comes in and goes out, which groups are in trouble, and the brokers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from ...protocol import names
from .. import charts
from ..config import OVERVIEW_ROWS
from ..page import Page, console_of, is_load
from ..samples import GroupSample
from .brokers import rows_of_brokers
from .groups import new_dead

_TROUBLE = {"no members": 0, "consuming": 1, "up to date": 2, "broadcasting": 2, "idle": 3}
"""The worst first; dead letters come between the first and the second."""


@dataclass(frozen=True, slots=True)
class Row:
    sample: GroupSample
    dead: int
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
    rows = [Row(item, dead.get(item.name, 0), charts.spark(tuple(item.lags))) for item in samples]
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
