"""Runs of the simulation by their seeds.

`python -m simulation 0 10000`: runs the seeds from the first to before the second and prints those that fail;
`python -m simulation 17 --trace` prints what happens in one.
`python -m simulation 0 1000 --all --record FILE`: runs these seeds of every scenario, adds a line for each run to the file,
and prints a table of the file. Runs that the file has are not repeated, so that it may be stopped and continued.

Hashes must not vary from run to run, so that a seed replays exactly: the process starts itself again with PYTHONHASHSEED=0.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import sys
import time
import traceback
from pathlib import Path

import structlog

from .loop import fix_hashes
from .patches import Violation
from .results import Result, add_to, percentile, results_in, table
from .scenarios import SCENARIOS, SHARED, simulate
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--digest", action="store_true", help="print a digest of what happens per seed")
    parser.add_argument("--scenario", choices=["", *SCENARIOS, *SHARED], help="only this one; '' for events by chance")
    parser.add_argument("--stop", action="store_true", help="end after the first seed that fails")
    parser.add_argument("--shared", action="store_true", help="a group whose members share messages, or some do")
    parser.add_argument("--all", action="store_true", help="every scenario, or the named one; print a table")
    parser.add_argument("--record", type=Path, metavar="FILE", help="with --all: the runs, one per line")
    options = parser.parse_args()
    end = options.first + 1 if options.end is None else options.end
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name in ("rocketlet", "asyncio"):  # killed processes leave their tasks unfinished
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gc.freeze()  # imported objects are never garbage: looking at them took a sixth of a seed's time
    return _run_all(options, end) if options.all else _run_seeds(options, end)


def _run_all(options: argparse.Namespace, end: int) -> int:
    """Run the same number of seeds of every scenario, as far as there is time."""
    found = results_in(options.record) if options.record else []
    known = {(item.scenario, item.seed) for item in found}
    scenarios = [("", False), ("", True), *((name, False) for name in SCENARIOS), *((name, True) for name in SHARED)]
    if options.scenario is not None:
        scenarios = [item for item in scenarios if item[0] == options.scenario]
    for seed in range(options.first, end):
        for scenario, shares in scenarios:
            name = scenario or ("chance, shared" if shares else "chance")
            if (name, seed) not in known:
                world, fault = _run(seed, scenario, shares=shares)
                found.append(Result.of(name, seed, world, fault))
                if options.record:
                    add_to(options.record, found[-1])
    print(table(found))
    return 1 if any(item.fault for item in found) else 0


def _run_seeds(options: argparse.Namespace, end: int) -> int:
    began_s = time.perf_counter()
    failed: list[int] = []
    pauses_s: list[float] = []
    for seed in range(options.first, end):
        world, fault = _run(seed, options.scenario, shares=options.shared or options.scenario in SHARED)
        if fault:
            failed.append(seed)
            print(f"seed {seed}: {fault}", flush=True)
            if options.stop:
                break
        if world is None:
            continue
        pauses_s += Result.of("", seed, world, fault).pauses_s
        if options.trace:
            print(world.plan, *world.trace, sep="\n")
        if options.digest:
            print(seed, hashlib.sha256("\n".join(world.trace).encode()).hexdigest()[:16])
    if options.scenario and len(pauses_s) > 1:
        median_s, longest_s = percentile(pauses_s, 50), percentile(pauses_s, 99)
        print(f"the longest pause of a queue with a backlog: median {median_s:.2f} s, 99 % {longest_s:.2f} s")
    print(f"{end - options.first} seeds, {len(failed)} failed, {time.perf_counter() - began_s:.1f} s")
    return 1 if failed else 0


def _run(seed: int, scenario: str | None, *, shares: bool) -> tuple[World | None, str | None]:
    try:
        return simulate(seed, scenario, shares=shares), None
    except Violation as violation:
        return violation.world, str(violation)  # type: ignore[attr-defined]
    except Exception:
        return None, traceback.format_exc()


if __name__ == "__main__":
    fix_hashes("simulation")
    sys.exit(main())
