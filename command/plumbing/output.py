"""The output of commands: aligned columns for people, or a line of JSON per record for programs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

MARGIN = "  "
BY_NAME: Final = frozenset(("header", "properties", "queues", "settings", "subscriptions", "unread"))
"""The fields of records whose keys are not ours: names of topics, clients, brokers, properties, and header fields."""
_NAMES: Final = {"broker_name": "broker", "queue_id": "queue"}
"""The fields that records call otherwise than the wire does."""
_MAY_BE_EMPTY: Final = "body"


class Instant:
    """A time in ms since the epoch; 0 or less for none. People read it in the local time zone, programs in ISO 8601 with an
    offset, or as null."""

    __slots__ = ("ms",)

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def __str__(self) -> str:
        if self.ms <= 0:
            return "-"
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.ms / 1000)) + f".{self.ms % 1000:03d}"

    def iso(self) -> str | None:
        if self.ms <= 0:
            return None
        return datetime.fromtimestamp(self.ms // 1000, UTC).replace(microsecond=self.ms % 1000 * 1000).isoformat()


class Output:
    """Prints records as columns or JSON, and texts unless `as_json`."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def records(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows with these columns, or as JSON with all of their fields. Print nothing without rows."""
        found = list(rows)
        if self.as_json:
            for row in found:
                self.json({**dict.fromkeys(columns), **row})
        elif found:
            _table(columns, [[_text(row.get(column)) for column in columns] for row in found])

    def json(self, value: Mapping[str, Any]) -> None:
        """Print a record: keys in snake case, null for what there is not, times in ISO 8601 or in ms."""
        print(orjson.dumps(_record(value), option=orjson.OPT_NON_STR_KEYS, default=_json_of).decode(), flush=True)

    def text(self, *lines: str) -> None:
        """Print lines; nothing with `as_json`."""
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
    """Escape control characters, because clients choose names, tags and keys, and a terminal would interpret them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def complain(error: object) -> None:
    """Print an error to stderr, with control characters escaped."""
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


def _record(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = {_key(name): item for name, item in value.items()}
        return {
            name: item if name in BY_NAME else None if item == "" and name != _MAY_BE_EMPTY else _record(item)
            for name, item in found.items()
        }
    return list(map(_record, value)) if isinstance(value, list | tuple) else value


def _key(name: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])[A-Z]", lambda found: f"_{found[0]}", name).lower()
    return _NAMES.get(snake, snake)


def number_or(text: str) -> int | float | str:
    """Return the number that a text is; the text if it is none, or would be written otherwise."""
    for kind in (int, float):
        try:
            found = kind(text)
        except ValueError:
            continue
        if str(found) == text and found == found and abs(found) != float("inf"):
            return found
    return text


def _json_of(value: object) -> str | None:
    return value.iso() if isinstance(value, Instant) else str(value)
