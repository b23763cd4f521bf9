"""Run one program, `python -m bench NAME [OPTIONS]`, or without a name those of `make bench`, one after the other. Options
go to each of them, and of `--only` what it knows."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import import_module

from . import runner

USUAL = ("sends", "drain", "start", "spark")
NAMES = (*USUAL, "churn", "cpu", "five", "foreign", "latency", "publish", "restart", "scale", "testkit", "ways")


def main() -> int:
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        if sys.argv[1] not in NAMES:
            raise SystemExit(f"{sys.argv[1]!r} is not one of {', '.join(NAMES)}")
        os.execv(sys.executable, [sys.executable, "-m", f"bench.{sys.argv[1]}", *sys.argv[2:]])
    systems: dict[str, tuple[str, ...]] = {program: import_module(f"bench.{program}").NAMES for program in USUAL}
    known = list(dict.fromkeys(name for names in systems.values() for name in names))
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    only = runner.listed(runner.one_of(known))
    parser.add_argument("--only", type=only, default=known, metavar="NAMES", help=f"of {', '.join(known)}")
    options, others = parser.parse_known_args()
    worst = 0
    for program, names in systems.items():
        if wanted := [name for name in options.only if name in names]:
            chosen = ["--only", ",".join(wanted)] if len(wanted) < len(names) else []
            worst = max(worst, subprocess.call([sys.executable, "-m", f"bench.{program}", *chosen, *others]))
        else:
            print(f"{program} is left out: it measures {', '.join(names)}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
