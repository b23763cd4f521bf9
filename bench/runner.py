"""The runner of all benches: options, systems, alternating rounds, medians and ratios, the table, the JSON line.

A round measures each case of each system once. The machine is measured between rounds, and a round in which it changed is
measured again."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console
from rich.table import Table
from rocketlet.client import AdminClient
from rocketlet.command.plumbing import logs
from rocketlet.command.plumbing.numbers import whole
from rocketlet.protocol.fast import MODULE

from . import calibration
from .calibration import Calibration
from .peers import SYSTEMS, Peer

ROUNDS = 5
MOST_ROUNDS = 2  # times the wanted rounds: then the figures come from the rounds that count, however few
BODY_BYTES = 1024
BODY = os.urandom(BODY_BYTES // 2).hex().encode()
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

T = TypeVar("T")
Values = Mapping[str, float]
Measure = Callable[[], Awaitable[Values]]
Cases = Mapping[str, Measure]
Run = Callable[[argparse.Namespace], Coroutine[Any, Any, Mapping[str, Any]]]

# Options


def parser(description: str | None, names: Iterable[str] = (), *, rounds: int = ROUNDS) -> argparse.ArgumentParser:
    """Return a parser of the options that benches share. `--only` chooses from names; `--rounds` is absent if rounds is 0."""
    logs.configure("error")
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if rounds:
        text = f"rounds in which the machine kept its speed; default: {rounds}"
        made.add_argument("--rounds", type=whole(1), default=rounds, help=text)
    if names := tuple(names):
        text = f"what to measure, separated by commas, of {', '.join(names)}; default: all that can run here"
        made.add_argument("--only", type=listed(one_of(names)), metavar="NAMES", help=text)
    return made


def listed(check: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a type of options: values separated by commas, each of which `check` parses."""
    return lambda text: [check(item) for item in text.split(",")]


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    def checked(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return checked


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder; make it first")
    return Path(text)


def main(name: str, options: argparse.ArgumentParser, run: Run) -> None:
    """Run a bench, and print the JSON object with its result if the options want it."""
    chosen = options.parse_args()
    finish(chosen, name, uvloop.run(run(chosen)))


def finish(options: argparse.Namespace, name: str, result: Mapping[str, Any]) -> None:
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "module": MODULE}
        date = datetime.now().astimezone().isoformat(timespec="minutes")
        print(json.dumps({"bench": name, "date": date, "machine": machine, **result}))


# Systems


def chosen(only: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """Return the wanted systems that can run, and print why others cannot. Exits if none is left."""
    wanted = only or names
    faults = {name: SYSTEMS[name].fault() for name in wanted if name in SYSTEMS}
    for name, fault in faults.items():
        if fault:
            console.print(f"{name} is left out: {fault}")
    left = [name for name in wanted if not faults.get(name)]
    if not left:
        raise SystemExit("nothing is left to measure")
    return left


@asynccontextmanager
async def started(names: Sequence[str]) -> AsyncIterator[dict[str, Peer]]:
    """The systems, running; their data is in a temporary folder (`TMPDIR`)."""
    async with AsyncExitStack() as stack:
        path = temporary_folder(stack)
        yield {name: await stack.enter_async_context(SYSTEMS[name].start(path)) for name in names}


def temporary_folder(stack: AsyncExitStack) -> Path:
    made = tempfile.TemporaryDirectory(prefix="rocketlet-bench-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(made))


async def make_topic(address: str, topic: str, queues: int) -> None:
    """Create a topic, and return when the name server has it."""
    async with AdminClient(address) as admin:
        while not await admin.brokers():
            await asyncio.sleep(0.05)
        await admin.create_topic(topic, queues=queues)
        while topic not in await admin.topics():
            await asyncio.sleep(0.05)


# Measurements


class Stopwatch:
    """Seconds since it was made: of the clock, and of the processor in this process and in a peer's."""

    def __init__(self, peer: Peer | None = None) -> None:
        self._peer = peer
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), self._peer.cpu_s() if self._peer else 0.0

    def read_s(self) -> tuple[float, float, float]:
        clock_s, client_s, peer_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return clock_s, client_s, peer_s


class Figures:
    """Measured values: by system and case, a mapping for each round that counts. All are compared with the first system."""

    def __init__(
        self,
        runs: Mapping[str, Mapping[str, list[Values]]],
        calibrations: Sequence[Calibration] = (),
        rejected: int = 0,
    ) -> None:
        self.runs = runs
        self.calibrations = calibrations
        self.rejected = rejected
        self.medians = {
            system: {
                case: {key: median([run[key] for run in found]) for key in found[0]} for case, found in cases.items()
            }
            for system, cases in runs.items()
        }
        self.first = next(iter(runs))

    def record(self) -> dict[str, Any]:
        """Return what is kept of a run as JSON: the values of each round that counts, and how fast the machine was."""
        return {
            "calibrations": [found._asdict() for found in self.calibrations],
            "rejected_rounds": self.rejected,
            "rounds": self.runs,
        }

    def only_case(self) -> dict[str, dict[str, float]]:
        """Return the medians by system, where there is one case."""
        return {system: next(iter(cases.values())) for system, cases in self.medians.items()}

    def ratios(self, key: str, system: str, case: str, *, less_is_better: bool = False) -> str:
        """Return how many times better the first system is, round by round: the median, then the least and the most."""
        pairs = zip(self.runs[self.first].get(case, []), self.runs[system][case], strict=False)
        values = [(one[key], other[key]) for one, other in pairs]
        found = sorted(other / one if less_is_better else one / other for one, other in values if one and other)
        return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else "-"

    def show(self, title: str, key: str, *, less_is_better: bool = False) -> None:
        """Print a row for each case and system.

        Args:
            title: The title of the table.
            key: The value that is compared.
            less_is_better: True if a lower value is better.
        """
        rows: list[list[object]] = []
        columns: list[str] = []
        for case in dict.fromkeys(itertools.chain(*self.runs.values())):
            for system, cases in self.medians.items():
                if case in cases:
                    ratio = self.ratios(key, system, case, less_is_better=less_is_better)
                    columns = [column.replace("_per_s", "/s").replace("_", " ") for column in cases[case]]
                    rows.append([case, system, *cases[case].values(), ratio])
        show(title, ("", "", *columns, f"{self.first} better by"), rows)
        console.print(f"medians of alternating rounds; by {key}, round by round: median (least to most)")


async def alternate(rounds: int, cases: Mapping[str, Cases], *, warm_ups: int = 0) -> Figures:
    """Measure the cases of all systems in turn, in each round, until the wanted number of rounds count. Warm-ups do not
    count."""
    measured: list[dict[tuple[str, str], Values]] = []
    calibrations: list[Calibration] = []
    counting: list[int] = []
    for number in range(-warm_ups, rounds * MOST_ROUNDS):
        if number >= 0 and not calibrations:
            calibrations.append(calibration.calibrate())
        found = {
            (system, case): await of_system[case]()
            for case in dict.fromkeys(itertools.chain(*cases.values()))
            for system, of_system in cases.items()
            if case in of_system
        }
        if number < 0:
            continue
        measured.append(found)
        calibrations.append(calibration.calibrate())
        counting = calibration.steady(calibrations)
        if len(counting) >= rounds or (len(measured) >= rounds and not counting):
            break
    for at in calibrations:
        console.print(f"machine: {at}", highlight=False)
    rejected = len(measured) - len(counting)
    if rejected:
        console.print(f"{rejected} of {len(measured)} rounds do not count: the machine changed by more than 10 %")
    if not counting:
        console.print("no round counts, so all are shown: compare the range of the ratios", style="red")
        counting = list(range(len(measured)))
    runs = {
        system: {case: [measured[number][system, case] for number in counting] for case in of_system}
        for system, of_system in cases.items()
    }
    return Figures(runs, calibrations, rejected)


async def compare(
    options: argparse.Namespace,
    names: Sequence[str],
    prepare: Callable[[Peer, AsyncExitStack], Awaitable[Cases]],
    *,
    warm_ups: int = 0,
) -> Figures:
    """Start the systems, prepare the cases of each, and measure them in alternating rounds."""
    async with started(chosen(options.only, names)) as peers, AsyncExitStack() as stack:
        cases = {name: await prepare(peer, stack) for name, peer in peers.items()}
        return await alternate(options.rounds, cases, warm_ups=warm_ups)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else float("nan")


# Tables


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
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
