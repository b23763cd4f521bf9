"""State files of an earlier run, which may have anything in them: they may be older, restored, or edited by hand. Only one
entry is lost by one fault, so that the broker starts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import orjson
import structlog

from ...protocol.bodies import BodyError, shaped
from ..config import MAX_NAMED_CHARS

log = structlog.get_logger("rocketlet.broker")


Entry = TypeVar("Entry")
Shape = TypeVar("Shape")


class Adoption:
    """Adopts the entries of state files at a start. Entries that cannot be adopted are kept in a file and reported, and the
    broker continues without them.

    Attributes:
        keep: saves bytes in a file of this name for inspection. The store sets it.
        faults: what was not adopted, for reports.
    """

    def __init__(self) -> None:
        self.keep: Callable[[str, bytes], object] = lambda name, data: None
        self.faults: list[str] = []

    def each(self, part: str, entries: Iterable[Entry], adopt: Callable[[Entry], object]) -> None:
        """Adopt entries one by one.

        Args:
            part: the name of the state, which begins the name of the file.
            adopt: adopts an entry, or raises an error and changes nothing.
        """
        left: list[Entry] = []
        first: Exception | None = None
        for entry in entries:
            try:
                adopt(entry)
            except MemoryError:
                raise  # the entries are intact, and the broker needs more memory
            except Exception as error:
                first = first or error
                left.append(entry)
        if first is not None:
            content = orjson.dumps(left, default=_shown, option=orjson.OPT_NON_STR_KEYS)
            self.set_aside(part, len(left), content, first)

    def whole(self, part: str, value: object, shape: type[Shape]) -> Shape | None:
        """Return the value of a state file in its type; None without a value, or if the value has another type.

        Args:
            part: the name of the state, which begins the name of the file.
            value: the value; None if there is no state file.
            shape: the type that the value must have.
        """
        if value is None:
            return None
        try:
            return shaped(value, shape)
        except BodyError as error:
            self.set_aside(part, 1, orjson.dumps(value), error)
            return None

    def set_aside(self, part: str, count: int, content: bytes, fault: Exception) -> None:
        """Keep and report entries that were not adopted.

        Args:
            count: the number of entries.
            content: the entries as bytes, by which the file is named.
        """
        file = f"{part.replace(' ', '-')}-{zlib.crc32(content):08x}"
        self.keep(file, content)
        reason = f"{type(fault).__name__}: {fault}"
        log.error(
            "state_not_adopted", part=part, count=count, reason=reason, file=f"damaged/{file}", exc_info=fault,
            hint="the broker continues without these entries; messages may be delivered again",
        )  # fmt: skip
        self.faults.append(f"{count} of {part} ({reason[:MAX_NAMED_CHARS]}), kept in damaged/{file}")


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple | set) else repr(value)
