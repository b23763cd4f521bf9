"""Accounts for every flight: sent, received by each group, how often, and in Spark's table."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.table import Table

from .flights import Flight

Key = tuple[str, int]  # carrier, month
DIFFERENCES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """One carrier's figures for a month: flights, those with a known departure delay, and the sum of those delays (min)."""

    flights: int = 0
    known: int = 0
    delay: int = 0

    @property
    def mean(self) -> float | None:
        return self.delay / self.known if self.known else None


@dataclass(frozen=True, slots=True)
class Account:
    """One group's: `received` counts distinct flights; `after_kill` the duplicates that the killed member had received."""

    group: str
    sent: int
    received: int
    duplicates: int
    missing: int
    after_kill: int = 0


def figures_of(flights: Iterable[Flight]) -> dict[Key, Figures]:
    """The figures straight from the file."""
    table: dict[Key, Figures] = {}
    for flight in flights:
        old = table.get((flight.carrier, flight.month), Figures())
        known = flight.delay is not None
        table[flight.carrier, flight.month] = Figures(
            old.flights + 1, old.known + known, old.delay + (flight.delay or 0)
        )
    return table


def figures_of_spark(folder: Path) -> dict[Key, Figures]:
    """The last result of the query `delays`; empty before its first batch."""
    try:
        rows = orjson.loads((folder / "delays.json").read_bytes())["rows"]
    except FileNotFoundError:
        return {}
    return {(row["carrier"], row["month"]): Figures(row["flights"], row["known"], row["delay"]) for row in rows}


def received_count(folder: Path) -> int:
    """How many flights the members have written down, duplicates included; cheap enough to be asked often."""
    return sum(path.stat().st_size for path in folder.glob("received-*.ids")) // 4


def account(group: str, sent: int, folder: Path, killed: str = "") -> Account:
    """Counts the flights that the members of `departures` have written down."""
    counts: Counter[int] = Counter()
    for path in sorted(folder.glob("received-*.ids")):
        counts.update(_numbers(path))
    twice = {number for number, times in counts.items() if times > 1}
    of_killed = twice.intersection(_numbers(folder / f"received-{killed}.ids")) if killed else set[int]()
    duplicates = sum(counts.values()) - len(counts)
    missing = sent - len(counts.keys() & set(range(sent)))
    return Account(group, sent, len(counts), duplicates, missing, len(of_killed))


def _numbers(path: Path) -> array[int]:
    data = path.read_bytes() if path.exists() else b""
    numbers = array("I")
    numbers.frombytes(data[: len(data) // 4 * 4])
    return numbers


def accounts_table(accounts: Iterable[Account]) -> Table:
    table = Table(title="Every flight accounted for", title_justify="left")
    table.add_column("group")
    for name in ("sent", "received", "duplicates", "missing"):
        table.add_column(name, justify="right")
    for item in accounts:
        table.add_row(item.group, f"{item.sent:,}", f"{item.received:,}", f"{item.duplicates:,}", f"{item.missing:,}")
    return table


def delays_table(file: Mapping[Key, Figures], spark: Mapping[Key, Figures]) -> Table:
    """Per carrier, over all months; the comparison itself is by carrier and month."""
    table = Table(title="Flights and mean departure delay (minutes) per carrier", title_justify="left")
    table.add_column("carrier")
    for name in ("flights, file", "flights, Spark", "delay, file", "delay, Spark", "months equal"):
        table.add_column(name, justify="right")
    for carrier in sorted({key[0] for key in file.keys() | spark.keys()}):
        months = {key for key in file.keys() | spark.keys() if key[0] == carrier}
        equal = sum(file.get(key) == spark.get(key) for key in months)
        left, right = _total(file, carrier), _total(spark, carrier)
        table.add_row(
            carrier,
            f"{left.flights:,}",
            f"{right.flights:,}",
            _minutes(left),
            _minutes(right),
            f"{equal} of {len(months)}",
        )
    return table


def _total(table: Mapping[Key, Figures], carrier: str) -> Figures:
    mine = [figures for key, figures in table.items() if key[0] == carrier]
    return Figures(
        sum(item.flights for item in mine), sum(item.known for item in mine), sum(item.delay for item in mine)
    )


def _minutes(figures: Figures) -> str:
    return "-" if figures.mean is None else f"{figures.mean:.4f}"


def differences(file: Mapping[Key, Figures], spark: Mapping[Key, Figures]) -> list[str]:
    """The differences between Spark's table and the file's."""
    return [
        f"{carrier} month {month}: file {file.get((carrier, month))}, Spark {spark.get((carrier, month))}"
        for carrier, month in sorted(file.keys() | spark.keys())
        if file.get((carrier, month)) != spark.get((carrier, month))
    ]
