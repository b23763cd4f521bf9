"""The cost of each path, against the table `bench/cpu.json`; more than 20 % above it is a failure.

`steps` of the interpreter in our own code, by message (`bench.steps`), are exact: the same on each machine, and on a busy
one. `cost` is processor time by message as a multiple of that of a loop that is timed in turn with the path
(`calibration`), each the least of many repetitions. It sees what C functions take, too, but it differs by machine, and on a
busy one. So CI holds the steps (`--exact`). If you change a path, compare both. `--write` makes the figures the table.
Steps differ by version of Python, and with the compiled module: each has its own table, and one without is compared with
nothing."""

from __future__ import annotations

import json
import math
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rocketlet.protocol.fast import MODULE

from simulation.loop import SimLoop, fix_hashes

from . import runner
from .cpu_paths import CodePath, on_virtual_time, paths
from .steps import Meter

TABLE = Path(__file__).with_name("cpu.json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}" + (" compiled" if MODULE == "compiled" else "")
LIMIT = 1.2
REPETITIONS = 40
WARM_UPS = 5
COUNTED = 4
TRIES = 3


class Measured(NamedTuple):
    """By message. `us` is the time behind `cost`; nan where it was not measured."""

    steps: float
    cost: float = math.nan
    us: float = math.nan

    def values(self) -> dict[str, float]:
        return {what: value for what, value in self._asdict().items() if not math.isnan(value)}


Table = Mapping[str, Mapping[str, float]]


def calibration() -> None:
    """A loop of the things that our paths consist of: calls, texts and bytes, small objects, structs."""
    pack = struct.Struct(">IIqh").pack
    found: dict[str, tuple[int, bytes]] = {}
    for number in range(300):
        name = f"name-{number & 31}"
        data = pack(number, 7, number << 20, 3) + name.encode()
        found[name] = (number, data[4:12])
        if len(b"".join((data, data))) < number % 3:
            found.clear()


async def steps(path: CodePath, meter: Meter) -> float:
    for _ in range(WARM_UPS):
        await path.run()
    counts = []
    for _ in range(COUNTED):
        with meter.counting():
            await path.run()
        counts.append(meter.steps)
    return min(counts) / path.messages  # the others wrote an index, or renewed a lease on the way


async def cost(path: CodePath, meter: Meter) -> tuple[float, float]:
    """By message, as a multiple of the calibration and in us."""
    times_s, units_s = [], []
    for _ in range(REPETITIONS):
        began_s = time.thread_time()
        calibration()
        units_s.append(time.thread_time() - began_s)
        meter.start(counts=False)
        await path.run()
        meter.stop()
        times_s.append(meter.thread_s)
    by_message_s = min(times_s) / path.messages
    return by_message_s / min(units_s), by_message_s * 1e6


async def measure(exact: bool, known: Table) -> dict[str, Measured]:
    meter = Meter()
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with paths(Path(folder), meter) as all_paths:
            for path in all_paths:
                counted, costs = await steps(path, meter), list[tuple[float, float]]()
                limit = known.get(path.name, {}).get("cost", 0.0) * LIMIT
                while not exact and len(costs) < TRIES and (not costs or min(costs)[0] > limit):
                    costs.append(await cost(path, meter))
                found[path.name] = Measured(counted, *min(costs, default=()))
    return found


def faults(found: Mapping[str, Measured], known: Table) -> list[str]:
    """The paths that cost too much, and those that the table does not know."""
    said = [
        f"{name}: in one of the two only; run `python -m bench cpu --write`" for name in found.keys() ^ known.keys()
    ]
    for name in found.keys() & known.keys():
        for what in ("steps", "cost"):
            value, before = getattr(found[name], what), known[name][what]
            if value > before * LIMIT:  # never true of nan
                said.append(f"{name}: {value:.4g} {what} a message, {value / before - 1:+.0%} of {before:.4g}")
    return sorted(said)


def read_tables() -> dict[str, Table]:
    """The figures by path, by version of Python and module. Steps are those of `--exact`: a longer log is read otherwise."""
    found: dict[str, Table] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found


def write_table(found: Mapping[str, Measured]) -> None:
    tables = read_tables()
    before = tables.get(VERSION, {})
    tables[VERSION] = {
        name: {
            **before.get(name, {}),
            **{what: round(value, 5) for what, value in item.values().items() if what != "us"},
        }
        for name, item in found.items()
    }
    TABLE.write_text(json.dumps(dict(sorted(tables.items())), indent=2) + "\n")


def run() -> int:
    parser = runner.parser(__doc__, rounds=0)
    parser.add_argument("--exact", action="store_true", help="count steps only")
    parser.add_argument(
        "--write", action="store_true", help=f"make the figures the table {TABLE.name}, with --exact the steps"
    )
    options = parser.parse_args()
    known = {} if options.write else read_tables().get(VERSION, {})
    found = on_virtual_time(SimLoop(1), measure(options.exact, known))
    rows = []
    for name, item in found.items():
        before = known.get(name, {})
        ratios = (getattr(item, what) / before.get(what, math.nan) for what in ("steps", "cost"))
        rows.append([name, *item, *ratios])
    runner.show("By message", ("", "steps", "cost", "us", "steps / table", "cost / table"), rows)
    said = faults(found, known) if known else []
    if options.write:
        write_table(found)
    elif not known:
        runner.console.print(f"{TABLE.name} has no table of Python {VERSION}: nothing is compared")
    for line in said:
        runner.console.print(line)
    runner.finish(options, "cpu", {"faults": said, "paths": {name: item.values() for name, item in found.items()}})
    return 1 if said else 0


if __name__ == "__main__":
    fix_hashes("bench.cpu")
    sys.exit(run())
