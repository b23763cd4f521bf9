"""`python -m campaigns NAME [--seconds N | --count N] [--seed S] [--first] [--json]`; exits with 1 if it found a fault.

A campaign is a function `(limit, seed, folder) -> Outcome`. With `--json` the last line is an
object with `campaign`, `tried`, `faults` (how many) and whatever the campaign measured.
How far it is, and each new fault, it says on standard error. Brokers and clients in this process log nothing: thousands meet
what they should report.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import structlog

from .common import Limit, Outcome

NAMES = {  # tries by default
    "access": 10_000,
    "calls": 20_000,
    "chaos": 200,
    "cost": 20_000,
    "descriptors": 20,
    "disk": 500,
    "exhaustion": 12,
    "faults": 100,
    "files": 1000,
    "floods": 300,
    "forge": 300,
    "frames": 20_000,
    "incidents": 12,
    "kill": 20,
    "pop": 20,
    "power": 1000,
    "sends": 5000,
    "stalls": 28,
}
IN_MODULE = {  # the others are in a module of their own
    **dict.fromkeys(("disk", "files", "power"), "crash"),
    **dict.fromkeys(("descriptors", "kill", "pop"), "kill"),
}


def main() -> int:
    options = _options()
    module = import_module(f".{IN_MODULE.get(options.name, options.name)}", __package__)
    run = getattr(module, options.name if options.name in IN_MODULE else "run")
    count = options.count if options.count or options.seconds else NAMES[options.name]
    print(f"{options.name}: seed {options.seed}", flush=True)
    logging.disable(logging.CRITICAL)
    structlog.configure(processors=[lambda *_: ""], logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory() as folder:
        limit = Limit(count, options.seconds, options.only, ends_at_fault=options.first)
        outcome: Outcome = run(limit, options.seed, Path(folder))
    for fault, times in sorted(outcome.faults.items(), key=lambda item: -item[1]):
        print(f"{times:8d}  {fault}")
    faults = sum(outcome.faults.values())
    if options.json:
        print(last_line(options.name, options.seed, outcome))
    else:
        print(f"{outcome.tried} tried, {faults} faults; {outcome.figures}")
    return 1 if faults else 0


def last_line(name: str, seed: int, outcome: Outcome) -> str:
    """In ASCII: what a figure quotes of a frame may be a line's end to who reads it."""
    faults = sum(outcome.faults.values())
    found = {"campaign": name, "tried": outcome.tried, "faults": faults, "seed": seed}
    return json.dumps(found | outcome.figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns")
    parser.add_argument("name", choices=sorted(NAMES))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float)
    length.add_argument("--count", type=int)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="what a found fault is found again by"
    )
    parser.add_argument("--only", help="of `faults` one patch, of `exhaustion` one attack")
    parser.add_argument("--first", action="store_true", help="end with the first fault")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
