"""Writes bench/README.md and the figures of README.md from `bench/results/*.json`, one file for each program.

A file has `measured`, a list of runs: `date`, `machine` (a key of MACHINES) and `rows`. A row has

    path      what was measured, in words
    unit      of its figures
    better    "more" or "less"
    ours      Rocketlet's figure, or null if only the ratio was noted
    peers     each peer's figure, or null
    ratios    how many times better Rocketlet is: the median of the rounds' ratios, then the least and the most.
              Without it the ratio is that of the two figures.
    aim       the ratio to reach by peer, or `least` or `most` for our own figure
    missed    why the aim is missed, and what it would take
    first     true: the row is in the first table
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
MACHINES: Final = {
    "quiet": "2 cores, nothing else runs",
    "slow": "the same, each core half as fast",
    "busy": "2 cores shared with other work: compare, do not count",
}
ALONE = ("least", "most")
ORDER = ("sends", "drain", "latency", "foreign", "start", "churn", "spark", "testkit")
COLUMNS = ("Apache", "JetStream")
PAGE = FOLDER / "README.md"
README = ROOT / "README.md"
FRONT = (  # program, path, what README.md calls it, beside whom; rows of the quiet machine only
    ("sends", "1 KB, 1 in flight", "acknowledged sends of 1 KB, one in flight", "Apache"),
    ("sends", "1 KB, 128 in flight", "acknowledged sends of 1 KB, 128 in flight", "Apache"),
    ("drain", "raw pulls", "a backlog of 1 KB messages, pulled", "Apache"),
    ("latency", "p99, 1,000 messages/s", "p99 latency from `send` to the handler, at 1,000 messages/s", "Apache"),
    ("spark", "rows read, 4 queues", "Spark reads 4 queues", "Kafka"),
    ("spark", "rows read, 64 queues", "Spark reads 64 queues", "Kafka"),
)

INTRO = """# Measurements

Written by `python -m bench.readme`. In brackets: how many times better Rocketlet is, as the median of alternating rounds.

{first}

{machines}

Apache RocketMQ is 4.9.7 and its proxy 5.3.3 (1 GiB heaps), JetStream nats-server 2.11 with nats-py, Kafka 4.1.1, all with
their defaults; Python 3.11.7, Java 17, PySpark 4.3 (4.0 for Kafka's connector). Client and broker are a process each. On
Apache's broker the client is ours, unless the row names another.

## Aims that are missed

{missed}

## Measure it yourself

`make bench` runs `sends`, `drain`, `start` and `spark`; start the other programs by name. Each starts the systems
that it compares, measures them in turn and prints medians. It skips a system that is missing, and says so. `--help` says what
a program takes, `--json` adds one JSON object as the last line, and `--only rocketlet,apache` chooses systems. Put figures
that are to stay into `bench/results/`; `bench/readme.py` says in which form.
"""


@dataclass(frozen=True, slots=True)
class Row:
    program: str
    date: str
    machine: str
    path: str
    unit: str
    better: Literal["more", "less"]
    ours: float | None = None
    peers: Mapping[str, float | None] = field(default_factory=dict)
    ratios: Mapping[str, list[float]] = field(default_factory=dict)
    aim: Mapping[str, float] = field(default_factory=dict)
    missed: str = ""
    first: bool = False

    def ratio(self, peer: str) -> float | None:
        """How many times better ours is; None where a figure is 0."""
        if peer in self.ratios:
            return self.ratios[peer][0]
        theirs = self.peers.get(peer)
        if not self.ours or not theirs:
            return None
        return self.ours / theirs if self.better == "more" else theirs / self.ours

    def compared(self) -> float:
        """The figure that an aim is about: ours, or how it compares."""
        peer = next((name for name in self.aim if name not in ALONE), None)
        return (self.ratio(peer) if peer else self.ours) or 0.0

    def missed_aims(self) -> list[str]:
        """Each aim that is not reached, in words."""
        missed = []
        for name, aim in self.aim.items():
            ours = (self.ours if name in ALONE else self.ratio(name)) or 0.0
            if ours > aim if name == "most" else ours < aim:
                missed.append(
                    f"at {name} {number(aim)} {self.unit}" if name in ALONE else f"{number(aim)} times {name}'s"
                )
        return missed


def rows() -> list[Row]:
    return [
        Row(path.stem, run["date"], run["machine"], **row)
        for path in sorted((FOLDER / "results").glob("*.json"))
        for run in json.loads(path.read_text())["measured"]
        for row in run["rows"]
    ]


def renew(program: str, machine: str, date: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Puts figures into a program's file, for the rows that it has, and writes both pages. Rows that were not measured stay.

    found: by path, the figures by name; `ours` is Rocketlet's. Returns the missed aims whose reason is still to be given, and
    the reasons that were given for other figures: what they say has to be read again. Raises KeyError for a path that has
    no row."""
    file = FOLDER / "results" / f"{program}.json"
    measured: list[dict[str, Any]] = json.loads(file.read_text())["measured"]
    known = {row["path"]: row for run in measured for row in run["rows"]}
    renewed, reasons = [], []
    for path, figures in found.items():
        row = known[path]
        row["ours"], row["peers"] = figures["ours"], {peer: figures[peer] for peer in row.get("peers", {})}
        row.pop("ratios", None)
        is_missed = bool(Row(program, date, machine, **row).missed_aims())
        if not is_missed:
            row.pop("missed", None)
        elif row.setdefault("missed", ""):
            reasons.append(f"{path}: {row['missed']}")
        else:
            reasons.append(f"{path}: why is its aim missed?")
        renewed.append(row)
    kept = [{**run, "rows": [row for row in run["rows"] if row not in renewed]} for run in measured]
    runs = [{"date": date, "machine": machine, "rows": renewed}, *(run for run in kept if run["rows"])]
    file.write_text(_layout(runs))
    main()
    return reasons


def _layout(runs: list[dict[str, Any]]) -> str:
    """A file of results with a line for each row."""
    texts = []
    for run in runs:
        lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in run["rows"])
        texts.append(f'  {{"date": "{run["date"]}", "machine": "{run["machine"]}", "rows": [\n{lines}\n  ]}}')
    return '{"measured": [\n' + ",\n".join(texts) + "\n]}\n"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _cell(row: Row, peer: str) -> str:
    ratio = row.ratio(peer)
    return f"{number(row.peers[peer])} ({_times(ratio)})".strip() if ratio else number(row.peers[peer])


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"


def table(rows: Iterable[Row], *, with_program: bool = False) -> str:
    lines = ["| | Rocketlet | Apache | JetStream | others | date, machine |", "|---|---|---|---|---|---|"]
    for row in rows:
        path = f"`{row.program}`: {row.path}" if with_program else row.path
        others = "; ".join(f"{peer} {_cell(row, peer)}" for peer in row.peers if peer not in COLUMNS)
        peers = [_cell(row, peer) if peer in row.peers else "" for peer in COLUMNS]
        lines.append(_line(f"{path}, {row.unit}", number(row.ours), *peers, others, f"{row.date}, {row.machine}"))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _missed(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each aim that is missed; rows that miss the same one for the same reason share it."""
    yield "| path | figure and aim | why, and what it would take |"
    yield "|---|---|---|"
    alike: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for aim in row.missed_aims():
            alike.setdefault((row.program, aim, row.missed), []).append(row)
    for (program, aim, why), found in alike.items():
        figures = sorted(row.compared() for row in found)
        span = dict.fromkeys(map(number, (figures[0], figures[-1])))
        more = f"; {len(found) - 1} more" if len(found) > 1 else ""
        yield _line(f"`{program}`: {found[0].path}{more}", f"{' to '.join(span)}; aim: {aim}", why)


def _section(program: str, measured: list[Row]) -> str:
    text = ast.get_docstring(ast.parse((FOLDER / f"{program}.py").read_text())) or ""
    left = [row for row in measured if not row.first]
    parts = [f"### `python -m bench.{program}`", text.split("\n\n")[0]]
    return "\n\n".join([*parts, table(left)] if left else parts)


def rank(program: str) -> int:
    return ORDER.index(program) if program in ORDER else len(ORDER)


def page() -> str:
    """bench/README.md."""
    known = rows()
    machines = "\n".join(f"- *{name}*: {text}" for name, text in MACHINES.items())
    programs = sorted({row.program for row in known}, key=lambda name: (rank(name), name))
    first = table((row for name in programs for row in known if row.first and row.program == name), with_program=True)
    head = INTRO.format(first=first, machines=machines, missed="\n".join(_missed(known)))
    return (
        "\n\n".join([head.rstrip(), *(_section(name, [r for r in known if r.program == name]) for name in programs)])
        + "\n"
    )


def front() -> str:
    """README.md, with the figures of today's files."""
    known = {(row.program, row.path): row for row in reversed(rows())}
    lines = ["| | Rocketlet | beside | times better |", "|---|---|---|---|"]
    for program, path, text, peer in FRONT:
        row = known[program, path]
        ours, theirs = (
            f"{number(value)} {row.unit}" if value is not None else "" for value in (row.ours, row.peers[peer])
        )
        ratio = replace(row, ratios={}).ratio(peer)  # of the figures that stand beside it
        lines.append(_line(text, ours, f"{peer} {theirs}".strip(), _times(ratio) if ratio else ""))
    table = "\n".join(lines)
    between = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", README.read_text())


def main() -> None:
    PAGE.write_text(page())
    README.write_text(front())


if __name__ == "__main__":
    main()
