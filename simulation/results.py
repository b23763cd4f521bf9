"""The results of runs, in a file with a line for each and as a table of scenarios."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from .world import World


class Result(msgspec.Struct):
    """What a run of a scenario has shown.

    Attributes:
        fault: what did not hold first; empty if everything held. The run ends there, so the rest is not measured.
        twice: how many times members that pull have begun messages that were begun before, also after crashes.
        missing: how many stored messages were not handled to their end when the run ended.
        doubled_s: for how long two members took a queue for their own, summed over queues.
        unread_s: the longest time in which no member took a queue for its own.
        pauses_s: the longest pause of each queue with a backlog.
    """

    scenario: str
    seed: int
    fault: str = ""
    twice: int = 0
    missing: int = 0
    doubled_s: float = 0.0
    unread_s: float = 0.0
    pauses_s: list[float] = []

    @classmethod
    def of(cls, scenario: str, seed: int, world: World | None, fault: str | None) -> Result:
        if world is None:
            return cls(scenario, seed, fault or "")
        found, missing = world.measures, len(world.missing()) if fault is None or fault.startswith("in the end") else 0
        pauses_s = [round(seconds, 2) for seconds in (found.unhandled_s or found.pauses_s).values()]
        doubled_s, unread_s = round(found.doubled_s, 2), round(found.unread_s, 2)
        return cls(scenario, seed, fault or "", found.twice, missing, doubled_s, unread_s, pauses_s)


def results_in(path: Path) -> list[Result]:
    """Return the results of a file; none if there is no file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


def add_to(path: Path, result: Result) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(results: Iterable[Result]) -> str:
    """Return a row for each scenario: sums of its seeds, for times the longest one."""
    of_scenarios: dict[str, list[Result]] = {}
    for result in results:
        of_scenarios.setdefault(result.scenario, []).append(result)
    lines = [
        "| scenario | seeds | failed | twice | missing | two owners (s) | unread (s) | 99 % pause (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in of_scenarios.items():
        pauses_s = [seconds for item in found for seconds in item.pauses_s]
        failed = sum(bool(item.fault) for item in found)
        twice, missing = sum(item.twice for item in found), sum(item.missing for item in found)
        doubled_s, unread_s = sum(item.doubled_s for item in found), max(item.unread_s for item in found)
        lines.append(
            f"| {name} | {len(found)} | {failed} | {twice} | {missing} | {doubled_s:.1f} | {unread_s:.1f} "
            f"| {percentile(pauses_s, 99):.1f} |"
        )
    return "\n".join(lines)
