"""Write the figures of one or more runs into README.md of this folder: `python -m bench publish FILE...`.

A file has what `python -m bench NAME --json` printed; other lines are ignored. All rounds that count, of all runs, are taken
together: each figure is their median with the least and the most, and a ratio is taken round by round. A row of README.md is
known by its first cell; rows that README.md does not have are printed, to be put where they belong."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import runner, versions
from .calibration import Calibration

README: Final = Path(__file__).with_name("README.md")
LESS_IS_BETTER: Final = ("_ms", "_us", "_s", "_mib", "_us_per_row", "duplicates", "p50", "p99")
COLUMNS: Final = {"rocketlet": 1, "apache": 2, "jetstream": 3}
OTHERS: Final = 4
NAMES: Final = {
    "apache-5": f"Apache {versions.APACHE_FIVE}",
    "kafka": "Kafka",
    "confluent-kafka-linger-0": "confluent-kafka without linger",
    "confluent-kafka-aio": "AIOProducer of confluent-kafka",
}
"""What a system is called in the column of the others; a system that is not here is called as it is."""

# Regular expressions of a bench's case and key, and the first cell of their row. A case without a row is not published.
TITLES: Final[Sequence[tuple[str, str]]] = (
    (r"sends (\d+) sends_per_s", r"`sends`: 1 KB, \1 in flight, sends/s"),
    (r"sends (\d+) p99_ms", r"p99, \1 in flight, ms"),
    (r"sends (\d+) (client|broker)_us", r"processor time of the \2, \1 in flight, µs"),
    (r"drain raw pulls messages_per_s", r"`drain`: raw pulls, messages/s"),
    (r"drain Consumer, batch handler messages_per_s", r"`drain`: handler of batches, messages/s"),
    (r"drain Consumer, handler per message messages_per_s", r"`drain`: handler of single messages, messages/s"),
    (r"latency 1000 p99_ms", r"`latency`: p99, 1,000 messages/s, ms"),
    (r"latency 30000 p99_ms", r"`latency`: p99, 30,000 messages/s, ms"),
    (r"latency 1000 beside a drain p99_ms", r"`latency`: p99, 1,000/s beside a drain, ms"),
    (r"latency 1000 beside members p99_ms", r"`latency`: p99, 1,000/s while members join and leave, ms"),
    (r"latency (\d+) (p50|p99)_ms", r"\2, \1 messages/s, ms"),
    (r"latency (\d+) p999_ms", r"p99.9, \1 messages/s, ms"),
    (r"latency 1000 beside a drain (p50)_ms", r"\1, 1,000/s beside a drain, ms"),
    (r"latency 1000 beside members (p50)_ms", r"\1, 1,000/s while members join and leave, ms"),
    (r"foreign sends JSON 16 requests_per_s", r"`foreign`: sends of 1 KB, JSON headers, 16 in flight, requests/s"),
    (
        r"foreign pulls of 32 JSON (1|16) requests_per_s",
        r"`foreign`: pulls of 32, JSON headers, \1 in flight, requests/s",
    ),
    (r"foreign sends (\w+) (\d+) requests_per_s", r"sends of 1 KB, \1 headers, \2 in flight, requests/s"),
    (r"foreign pulls of 32 (\w+) (\d+) requests_per_s", r"pulls of 32, \1 headers, \2 in flight, requests/s"),
    (r"spark read_(4|64) rows_per_s", r"`spark`: rows read, \1 queues, rows/s"),
    (r"spark read_(\d+) rows_per_s", r"rows read, \1 queues, rows/s"),
    (r"spark read_(\d+)_with_properties rows_per_s", r"rows read with properties, \1 queues, rows/s"),
    (r"spark write rows_per_s", r"`spark`: rows written, rows/s"),
    (r"spark read_4 broker_cpu_us_per_row", r"processor time of a row read, the broker's, µs"),
    (r"spark write broker_cpu_us_per_row", r"processor time of a row written, the broker's, µs"),
)
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
    return f"{figure(runner.median(values))}, {figure(min(values))} to {figure(max(values))}"


def title(bench: str, case: str, key: str) -> str | None:
    """Return the first cell of a row; None for a value that is not published."""
    for pattern, text in TITLES:
        found = re.fullmatch(pattern, f"{bench} {case} {key}")
        if found:
            return re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", found.expand(text))
    return None


def rows(bench: str, rounds: Rounds, note: str) -> dict[str, str]:
    """Return rows of README.md by their first cell: of the first system, then of each other with the ratio."""
    first, *others = rounds
    made = {}
    for case, measured in rounds[first].items():
        for key in measured[0]:
            text = title(bench, case, key)
            if text is None:
                continue
            mine = [values[key] for values in measured]
            cells = [
                text,
                f"{figure(runner.median(mine))} ({figure(min(mine))} to {figure(max(mine))})",
                "",
                "",
                "",
                note,
            ]
            for other in others:
                its = rounds[other].get(case, [])
                pairs = [(value, found[key]) for value, found in zip(mine, its, strict=False) if key in found]
                ratios = [b / a if is_less_better(key) else a / b for a, b in pairs if a and b]
                if ratios:
                    cell = f"{figure(runner.median([value for _, value in pairs]))} ({spread(ratios)})"
                    if other in COLUMNS:
                        cells[COLUMNS[other]] = cell
                    else:
                        cells[OTHERS] += f"{'; ' if cells[OTHERS] else ''}{NAMES.get(other, other)} {cell}"
            made[text] = "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
    return made


def merge(page: str, made: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the page with the rows that it has replaced, and the rows that it does not have."""
    lines, left = page.split("\n"), dict(made)
    for number, line in enumerate(lines):
        first = line.strip("|").split("|")[0].strip()
        if line.startswith("| ") and line.count("|") == 7 and first in made:
            lines[number] = made[first]
            left.pop(first, None)
    return "\n".join(lines), list(left.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench publish", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--machine", default="quiet", help="the word of README.md for the machine")
    options = parser.parse_args()
    page = README.read_text()
    for bench, runs in read(options.files).items():
        for run in runs:
            machine = [Calibration(**found) for found in run["calibrations"]]
            middle = Calibration(*(runner.median(values) for values in zip(*machine, strict=True)))
            print(f"{bench} {run['date']}: {middle}; {run['rejected_rounds']} rounds rejected")
        made = rows(bench, together(runs), f"{runs[-1]['date'][:10]}, {options.machine}")
        if not made:
            print(f"{bench}: no case has a title; add its cases to TITLES")
        page, left = merge(page, made)
        print("\n".join(left))
    README.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
