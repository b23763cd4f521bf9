"""`python -m simulation 0 10000`: runs the seeds from the first to before the second and prints those that fail;
`python -m simulation 17 --trace` prints what happens in one. Hashes must not vary from run to run, so that a seed
replays exactly: the process starts itself again with PYTHONHASHSEED=0."""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import statistics
import sys
import time
import traceback

import structlog

from .loop import fix_hashes
from .patches import Violation
from .scenarios import SCENARIOS, SHARED, simulate
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--digest", action="store_true", help="print a digest of what happens per seed")
    parser.add_argument("--scenario", choices=["", *SCENARIOS, *SHARED], help="only this one; '' for events by chance")
    parser.add_argument("--stop", action="store_true", help="end after the first seed that fails")
    parser.add_argument("--shared", action="store_true", help="a group whose members share messages, or some do")
    options = parser.parse_args()
    end = options.first + 1 if options.end is None else options.end
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name in ("rocketlet", "asyncio"):  # killed processes leave their tasks unfinished
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gc.freeze()  # imported objects are never garbage: looking at them took a sixth of a seed's time
    began_s = time.perf_counter()
    failed: list[int] = []
    pauses_s: list[float] = []
    for seed in range(options.first, end):
        world, fault = _run(seed, options.scenario, shares=options.shared)
        if fault:
            failed.append(seed)
            print(f"seed {seed}: {fault}", flush=True)
            if options.stop:
                break
        if world is None:
            continue
        pauses_s += world.unread_s.values()
        if options.trace:
            print(world.plan, *world.trace, sep="\n")
        if options.digest:
            print(seed, hashlib.sha256("\n".join(world.trace).encode()).hexdigest()[:16])
    if options.scenario and len(pauses_s) > 1:
        marks = statistics.quantiles(pauses_s, n=100, method="inclusive")
        print(f"the longest pause of a queue with a backlog: median {marks[49]:.2f} s, 99 % {marks[98]:.2f} s")
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
