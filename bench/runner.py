"""The common part of the programs: options, alternating rounds, medians, tables, JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rocketlet.client import Message
from rocketlet.command.plumbing import logs
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.fast import MODULE

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
    rocketlet_tls,
    rocketlet_tls_signed,
)

BODY_BYTES = 1024
BODY = os.urandom(BODY_BYTES // 2).hex().encode()
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def parser(description: str, names: Iterable[str] = ()) -> argparse.ArgumentParser:
    """names: what `--only` chooses from."""
    logs.configure("error")
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    made.add_argument("--rounds", type=whole(1), default=3)
    if names := tuple(names):
        text = f"what to measure, separated by commas, of {', '.join(names)}; default: all that can run here"
        made.add_argument("--only", type=among(names), metavar="NAMES", help=text)
    return made


def among(names: Sequence[str]) -> Callable[[str], str]:
    """For `--only` and its like: names separated by commas."""

    def checked(text: str) -> str:
        for name in text.split(","):
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return text

    return checked


def counts(text: str) -> list[int]:
    """Whole numbers from 1, separated by commas."""
    return list(map(whole(1), text.split(",")))


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def positives(text: str) -> list[float]:
    """Numbers above 0, separated by commas."""
    return list(map(positive, text.split(",")))


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder; make it first")
    return Path(text)


def chosen(only: str | None, names: Sequence[str]) -> list[str]:
    """The peers that are asked for and can run; says which are left out and why. Exits if none is left."""
    wanted = only.split(",") if only else list(names)
    faults = {name: FAULTS[name]() for name in wanted if name in FAULTS}
    for name, fault in faults.items():
        if fault:
            console.print(f"{name} is left out: {fault}")
    left = [name for name in wanted if not faults.get(name)]
    if not left:
        raise SystemExit("nothing is left to measure")
    return left


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
    "rocketlet-tls": rocketlet_tls,
    "rocketlet-tls-signed": rocketlet_tls_signed,
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
        print(json.dumps({"bench": name, "machine": machine(), **result}))


def machine() -> dict[str, object]:
    """Return what figures depend on besides the processor."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "module": MODULE}


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
