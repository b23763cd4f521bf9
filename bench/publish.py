"""Print the rows of README.md from the JSON lines of one or more runs: `python -m bench publish FILE...`.

A file has what `python -m bench NAME --json` printed; other lines are ignored. All rounds that count, of all runs, are taken
together: each figure is their median with the least and the most, and a ratio is taken round by round."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import runner
from .calibration import Calibration

LESS_IS_BETTER: Final = ("_ms", "_us", "_s", "_mib", "_us_per_row", "duplicates", "p50", "p99")
Rounds = dict[str, dict[str, list[Mapping[str, float]]]]


def read(paths: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs by bench, in the order of the files."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith('{"bench"'):
                run = json.loads(line)
                found[run["bench"]].append(run)
    return found


def together(runs: Sequence[Mapping[str, Any]]) -> Rounds:
    rounds: Rounds = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for system, cases in run["rounds"].items():
            for case, values in cases.items():
                rounds[system][case].extend(values)
    return rounds


def is_less_better(key: str) -> bool:
    return key.endswith(LESS_IS_BETTER) and not key.endswith("_per_s")


def figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return a median with the least and the most."""
    return f"{figure(runner.median(values))} ({figure(min(values))} to {figure(max(values))})"


def rows(rounds: Rounds, keys: Sequence[str] = ()) -> list[str]:
    """Return a Markdown row for each case and value: of the first system, then of each other with the ratio."""
    first, *others = rounds
    lines = []
    for case, measured in rounds[first].items():
        for key in measured[0]:
            if keys and key not in keys:
                continue
            cells = [f"{case}, {key}".removeprefix(", "), spread([values[key] for values in measured])]
            for other in others:
                its = rounds[other].get(case, [])
                pairs = [(mine[key], value[key]) for mine, value in zip(measured, its, strict=False) if key in value]
                ratios = [
                    value / mine if is_less_better(key) else mine / value for mine, value in pairs if mine and value
                ]
                text = f"{spread([value for _, value in pairs])}, {spread(ratios)} times" if ratios else ""
                cells.append(text)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench publish", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--keys", type=lambda text: text.split(","), default=(), help="values to print; default: all")
    options = parser.parse_args()
    for bench, runs in read(options.files).items():
        print(f"\n### {bench}\n")
        for run in runs:
            machine = [Calibration(**found) for found in run["calibrations"]]
            middle = Calibration(*(runner.median(values) for values in zip(*machine, strict=True)))
            rejected = f"; {run['rejected_rounds']} rounds rejected" if run["rejected_rounds"] else ""
            print(f"{run['date']}: {middle}{rejected}")
        rounds = together(runs)
        print(f"\n| | {' | '.join(rounds)} |\n|{'---|' * (len(rounds) + 1)}")
        print("\n".join(rows(rounds, options.keys)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
