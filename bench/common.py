"""What the programs share: options, alternating rounds, medians, tables, JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rocketlet.client import Message
from rocketlet.command import logs

from .kafka_broker import kafka, kafka_fault
from .peers import (
    Peer,
    apache,
    apache_fault,
    apache_synced,
    java_on_rocketlet,
    jetstream,
    jetstream_fault,
    jetstream_synced,
    jetstream_synced_fault,
    python_on_apache,
    rocketlet,
    rocketlet_signed,
    rocketlet_synced,
)

BODY_BYTES = 1024
BODY = os.urandom(BODY_BYTES // 2).hex().encode()
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def parser(description: str) -> argparse.ArgumentParser:
    logs.configure("error")
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--only", help="the peers to measure, separated by commas; default: all that can run here")
    return made


def chosen(only: str | None, names: Sequence[str]) -> list[str]:
    """The peers that are asked for and can run; says which are left out and why."""
    wanted = only.split(",") if only else list(names)
    faults = {name: FAULTS[name]() for name in wanted if name in FAULTS}
    for name, fault in faults.items():
        if fault:
            console.print(f"{name} is left out: {fault}")
    return [name for name in wanted if not faults.get(name)]


FAULTS: Mapping[str, Callable[[], str | None]] = {
    "apache": apache_fault,
    "apache-synced": apache_fault,
    "java-on-rocketlet": apache_fault,
    "jetstream": jetstream_fault,
    "jetstream-synced": jetstream_synced_fault,
    "kafka": kafka_fault,
}
STARTERS: Mapping[str, Callable[[Path], AbstractAsyncContextManager[Peer]]] = {
    "rocketlet": rocketlet,
    "rocketlet-signed": rocketlet_signed,
    "rocketlet-synced": rocketlet_synced,
    "apache": apache,
    "apache-synced": apache_synced,
    "jetstream": jetstream,
    "jetstream-synced": jetstream_synced,
    "java-on-rocketlet": java_on_rocketlet,
    "kafka": kafka,
    "python-on-apache": python_on_apache,
}


@asynccontextmanager
async def started(names: Sequence[str]) -> AsyncIterator[dict[str, Peer]]:
    """The peers, running; their data in a temporary folder (`TMPDIR`)."""
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with AsyncExitStack() as stack:
            yield {name: await stack.enter_async_context(STARTERS[name](Path(folder))) for name in names}


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else float("nan")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


def finish(options: argparse.Namespace, name: str, result: Mapping[str, Any]) -> None:
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"bench": name, "machine": machine, **result}))


def ratio(ours: float, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


class Arrivals:
    """A batch handler that counts, and says when `count` messages have come."""

    def __init__(self, count: int) -> None:
        self.done = asyncio.Event()
        self.seen = 0
        self._count = count

    async def __call__(self, messages: Sequence[Message]) -> None:
        self.seen += len(messages)
        if self.seen >= self._count:
            self.done.set()
