"""Formats numbers, times and names for people. Most functions are filters of the templates."""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import quote, urlencode

from ..protocol.codes import Language

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
# Characters that change how a line is shown, or are invisible. A message may contain them.
_INVISIBLE: Final = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)},
    **{
        code: f"\\u{code:04x}"
        for code in (0xAD, 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
    },
}


def number(value: float | None) -> str:
    """Format a number such as `12,345`, below 10 with one decimal unless it is whole; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or value == int(value) or abs(value) >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}"


def size(value: float | None) -> str:
    """Format a number of bytes, such as `10 KiB`; a dash for None."""
    if value is None:
        return "–"
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{number(round(value, 1))} {unit}"
        value /= 1024
    return f"{number(round(value, 1))} {_UNITS[-1]}"


def local_time(ms: int | None) -> str:
    """Format a time (ms since the epoch) in this machine's time zone, with milliseconds; a dash for None, 0
    and times that this machine cannot represent."""
    if not ms or ms <= 0:
        return "–"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000)) + f".{ms % 1000:03d}"
    except (OverflowError, ValueError, OSError):  # clients and brokers may send any number
        return "–"


def clock_time(ms: int | None) -> str:
    return local_time(ms).partition(" ")[2] or "–"


def duration(ms: float | None) -> str:
    """Format a duration in ms, such as `340 ms`, `12 s`, `5 min`, `3 h` and `2 days`; a dash for None."""
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{max(ms, 0):.0f} ms"
    for limit, unit_ms, unit in ((120, 1000, "s"), (120, 60_000, "min"), (48, 3_600_000, "h")):
        if ms / unit_ms < limit:
            digits = 1 if ms / unit_ms < 10 else 0
            return f"{ms / unit_ms:.{digits}f}".removesuffix(".0") + f" {unit}"
    return f"{ms / 86_400_000:.0f} days"


def age(ms: int | None) -> str:
    """Format the time since `ms`, such as `5 min ago`; `never` for None and 0."""
    return "never" if not ms or ms <= 0 else f"{duration(max(time.time() * 1000 - ms, 0))} ago"


def visible(text: str) -> str:
    """Escape invisible characters, and those that change the direction of text."""
    return text.translate(_INVISIBLE)


def short(name: str) -> str:
    """Return the start and the end of a long client id or host name, because those of members differ there."""
    shown = visible(name)
    return shown if len(shown) <= 30 else f"{shown[:16]}…{shown[-12:]}"


def short_id(message_id: str) -> str:
    """Return the start and the end of a long message id, so that it needs one line of a table."""
    shown = visible(message_id)
    return shown if len(shown) <= 20 else f"{shown[:4]}…{shown[-8:]}"


def part(name: str) -> str:
    """Quote a name for use as one part of a path."""
    return quote(name, safe="")


def own_path(asked: bytes) -> str:
    """Return the requested path as a link. The link leads to no other host, unlike `//host` and `/\\host`."""
    return "/" + quote(asked.decode("latin-1").lstrip("/"), safe="/%")


def query(**values: object) -> str:
    """Return `?name=value&...` with the values that are not empty."""
    given = {name: str(value) for name, value in values.items() if value not in (None, "", False)}
    return f"?{urlencode(given)}" if given else "?"


_LANGUAGES: Final = {language.name: language.name.title() for language in Language} | {"CPP": "C++", "DOTNET": ".NET"}


def client_version(ordinal: int) -> str:
    """Return the version that an ordinal of Apache's MQVersion means: 4.9.0 is 393, and each release of 4.9 is two higher.
    Return other ordinals as `no. N`."""
    micro, is_snapshot = divmod(ordinal - 393, 2)
    return f"4.9.{micro}" if 0 <= micro <= 9 and not is_snapshot else f"no. {ordinal}"


def language(name: str) -> str:
    return _LANGUAGES.get(name, name.title())
