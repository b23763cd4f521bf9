"""`python -m campaigns NAME [--seconds N | --count N] [--seed S] [--first] [--json]`; exits with 1 if it found a fault.

A campaign is a function of a limit, a seed, an empty folder and an outcome. With `--json` the last line is an object with
`campaign`, `tried`, `faults` (their number) and what the campaign measured. Progress and each new fault are printed to
standard error. Brokers and clients in this process do not log, because thousands of attempts cause the events that they
should report; a campaign that counts errors in the log as faults sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import structlog
import uvloop

from .common import Limit, Outcome


class Campaign(NamedTuple):
    """A function of a module, its tries by default, and True if errors in the log are faults."""

    module: str
    tries: int
    watches_log: bool = False


CAMPAIGNS = {
    "calls": Campaign("fuzz", 20_000, watches_log=True),
    "cost": Campaign("cost", 20_000, watches_log=True),
    "descriptors": Campaign("processes", 20),
    "disk": Campaign("crash", 500),
    "exhaustion": Campaign("exhaustion", 20),
    "faults": Campaign("faults", 100),
    "files": Campaign("crash", 1000),
    "forge": Campaign("forge", 300),
    "frames": Campaign("fuzz", 20_000, watches_log=True),
    "incidents": Campaign("incidents", 12),
    "kill": Campaign("processes", 20),
    "pop": Campaign("crash", 1000),
    "power": Campaign("crash", 1000),
}


def main() -> int:
    options = _options()
    campaign, outcome = CAMPAIGNS[options.name], Outcome()
    count = options.count if options.count or options.seconds else campaign.tries
    limit = Limit(outcome, count, options.seconds, options.only, ends_at_fault=options.first)
    print(f"{options.name}: seed {options.seed}", flush=True)
    logging.disable(logging.CRITICAL)
    processor = outcome.log_processor if campaign.watches_log else lambda *_: ""
    structlog.configure(processors=[processor], logger_factory=structlog.ReturnLoggerFactory())
    run = getattr(import_module(f".{campaign.module}", __package__), options.name)
    with tempfile.TemporaryDirectory() as folder:
        work = run(limit, options.seed, Path(folder), outcome)
        if asyncio.iscoroutine(work):
            uvloop.run(work)
    for fault, times in sorted(outcome.faults.items(), key=lambda item: -item[1]):
        print(f"{times:8d}  {fault}")
    faults = sum(outcome.faults.values())
    if options.json:
        print(last_line(options.name, options.seed, outcome))
    else:
        print(f"{outcome.tried} tried, {faults} faults; {outcome.figures}")
    return 1 if faults else 0


def last_line(name: str, seed: int, outcome: Outcome) -> str:
    """Return the result in ASCII, because a frame that is quoted may contain what a reader takes for the end of a line."""
    faults = sum(outcome.faults.values())
    found = {"campaign": name, "tried": outcome.tried, "faults": faults, "seed": seed}
    return json.dumps(found | outcome.figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns")
    parser.add_argument("name", choices=sorted(CAMPAIGNS))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float)
    length.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="seed that finds a fault again")
    parser.add_argument("--only", help="one patch of `faults`, one attack of `exhaustion`, one incident of `incidents`")
    parser.add_argument("--first", action="store_true", help="end at the first fault")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
