"""Long work in slices: a generator that yields after each small piece of it, and returns the result.

The caller may do something else at each yield. A piece takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Final, TypeVar

from .config import MAX_TABLE_BYTES
from .schema import BodyError

T = TypeVar("T")

Work = Generator[None, None, T]

SLICE: Final = 64  # items of a list, at about 5 us each, in one piece of work
LOOKS: Final = 1024  # items that are only looked at, at about 0.3 us each


def finish(work: Work[T]) -> T:
    """The result, without doing anything else meanwhile."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def refuse_beyond(size: int) -> None:
    """Raises BodyError for an answer that no client could read."""
    if size > MAX_TABLE_BYTES:
        raise BodyError(f"the answer is larger than {MAX_TABLE_BYTES} bytes; ask for less, such as one group or topic")


def joined(parts: Iterable[bytes]) -> Work[bytes]:
    """The parts in one, with commas between, each made when its turn comes."""
    found: list[bytes] = []
    pieces: list[bytes] = []  # so the last join has few of them, however many parts there are
    for part in parts:
        found.append(part)
        if len(found) == SLICE:
            pieces.append(b",".join(found))
            found.clear()
            yield
    if found:
        pieces.append(b",".join(found))
    content = b",".join(pieces)
    if len(pieces) > 1:  # some MB take ms to copy, and whoever gets them does so again
        yield
    return content


def listed(parts: Iterable[bytes]) -> Work[bytes]:
    """Like `joined`, for an answer. Raises BodyError as soon as it is larger than a client could read."""

    def counted() -> Iterator[bytes]:
        size = 0
        for part in parts:
            size += len(part) + 1
            refuse_beyond(size)
            yield part

    return joined(counted())
