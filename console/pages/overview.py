"""The first page: message rates, groups with findings, and the brokers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from ...client.admin.findings import Harm
from ...protocol import names
from .. import charts
from ..config import OVERVIEW_FINDINGS, OVERVIEW_ROWS
from ..page import Page, console_of, is_load
from ..samples import GroupSample
from .brokers import rows_of_brokers


@dataclass(frozen=True, slots=True)
class OverviewRow:
    sample: GroupSample
    spark: str


async def shown(request: Request) -> Page:
    console, now = console_of(request), is_load(request)
    listed, _, brokers = await asyncio.gather(
        console.groups.list(now=now), console.topics.list(now=now), rows_of_brokers(console)
    )
    users = [name for name in listed if not names.is_system_group(name)]
    await console.groups.show(users[:OVERVIEW_ROWS], now=now)
    samples = [console.groups.found[name] for name in users if name in console.groups.found]
    rows = [OverviewRow(item, charts.spark(tuple(item.lags))) for item in samples]
    rows.sort(key=_trouble)
    wrong = [finding for finding in console.findings() if finding.harm < Harm.RISK]
    return Page(
        "overview.html",
        {
            "wrong": wrong[:OVERVIEW_FINDINGS],
            "more_wrong": len(wrong[OVERVIEW_FINDINGS:]),
            "brokers": sorted(brokers, key=lambda row: (row.state == "up", row.broker.name)),
            "sent": charts.lines_of(console.throughput(sent=True), what="messages/s"),
            "read": charts.lines_of(console.throughput(sent=False), what="messages/s"),
            "rows": rows[:OVERVIEW_ROWS],
            "left_out": max(len(users) - OVERVIEW_ROWS, 0),
            "put_rate": sum(row.put_rate for row in brokers),
            "get_rate": sum(row.get_rate for row in brokers),
            "written": console.written_per_s(),
            "lag": sum(item.lag for item in samples),
            "abandoned": sum(not item.members and item.lag > 0 for item in samples),
            "dead": sum(item.dead for item in samples),
            "away": sum(row.state != "up" for row in brokers),
        },
    )


def _trouble(row: OverviewRow) -> tuple[int, int, str]:
    """Return the sort key of a row: the worst finding first, then the largest lag."""
    worst = row.sample.worst
    return (Harm.RISK if worst is None else worst.harm, -row.sample.lag, row.sample.name)
