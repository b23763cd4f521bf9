"""How commands print: aligned columns for people, a line of JSON per record for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

MARGIN = "  "


class Output:
    """Records, then perhaps a line of text that only people see."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def records(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows with these columns; as JSON with all of their fields. Nothing if there are none."""
        found = list(rows)
        if self.as_json:
            for row in found:
                self.json(row)
        elif found:
            _table(columns, [[_text(row.get(column)) for column in columns] for row in found])

    def json(self, value: Mapping[str, Any]) -> None:
        print(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode(), flush=True)

    def text(self, *lines: str) -> None:
        """Prints lines for people only."""
        if not self.as_json:
            print(*map(printable, lines), sep="\n", flush=True)


def _table(columns: Sequence[str], rows: list[list[str]]) -> None:
    heads = [column.replace("_", " ") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    for cells in (heads, *rows):
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        line = MARGIN.join(parts).rstrip()
        print(f"\x1b[1m{line}\x1b[0m" if cells is heads and sys.stdout.isatty() else line)


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.lstrip("-").isdigit()


def printable(text: str) -> str:
    """Escapes characters that a terminal would obey: anybody may send names, tags and keys."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def complain(error: object) -> None:
    """Says on stderr what went wrong: a broker's remark, too, is what anybody sent."""
    print("rocketlet: " + "\n".join(map(printable, str(error).splitlines())), file=sys.stderr)


def _text(value: Any) -> str:
    return printable(_plain(value))


def _plain(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def local_time(ms: int) -> str:
    """A time in ms since the epoch, in this machine's zone, with its milliseconds; `-` for none."""
    if ms <= 0:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000)) + f".{ms % 1000:03d}"
