"""All programs, one after the other: `make bench`. Options go to each of them, and of `--only` what it knows."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import drain, runner, sends, spark, start

PROGRAMS = {"sends": sends.NAMES, "drain": drain.NAMES, "start": start.NAMES, "spark": spark.NAMES}


def main() -> int:
    known = list(dict.fromkeys(name for names in PROGRAMS.values() for name in names))
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", type=runner.among(known), default=",".join(known), help=f"of {', '.join(known)}")
    options, others = parser.parse_known_args()
    worst = 0
    for program, names in PROGRAMS.items():
        asked = [name for name in options.only.split(",") if name in names]
        if not asked:
            print(f"{program} is left out: it measures {', '.join(names)}", flush=True)
            continue
        only = ["--only", ",".join(asked)] if len(asked) < len(names) else []
        worst = max(worst, subprocess.call([sys.executable, "-m", f"bench.{program}", *only, *others]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
