"""Running sums of this process's writes to the commit log, by which any part that is read can be checked at once.

The sum at a position is the CRC-32 of everything written up to there. The CRC-32 of a part of the log, begun with the sum
before it, must give the sum behind it. It takes one call for any number of records; to check each one by its own checksums
takes forty steps for each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from ...protocol.checksum import crc32
from ..config import MAX_SUMS, SUMMED_AT_ONCE_BYTES, SUMMED_BYTES


class Written:
    """The sums at some positions from `begin` on, where the log ended when this began."""

    __slots__ = ("_end", "_places", "_sum", "_sums", "begin")

    def __init__(self, end: int) -> None:
        self.begin = self._end = end
        self._sum = 0
        self._places = array("Q", (end,))
        self._sums = array("I", (0,))

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Adds the bytes that were appended to the log."""
        size = len(data)
        if size > SUMMED_AT_ONCE_BYTES:
            data = self._add_large(data, size)
            size = len(data)
        self._sum = crc32(data, self._sum)
        self._end += size
        if self._end - self._places[-1] >= SUMMED_BYTES:
            self._places.append(self._end)
            self._sums.append(self._sum)
            if len(self._places) > MAX_SUMS:
                self._forget(MAX_SUMS // 2)

    def _add_large(self, data: bytes | bytearray | memoryview, size: int) -> memoryview:
        """Adds all but the last piece, which it returns."""
        view = memoryview(data)
        ends = range(SUMMED_AT_ONCE_BYTES, size, SUMMED_AT_ONCE_BYTES)
        self._places.extend([self._end + end for end in ends])
        self._end += ends[-1]
        for end in ends:
            self._sum = crc32(view[end - SUMMED_AT_ONCE_BYTES : end], self._sum)
            self._sums.append(self._sum)
        return view[ends[-1] :]

    def part(self, begin: int, end: int) -> tuple[int, int, int, int]:
        """The smallest part with sums that has everything from `begin`, at or behind this one's, to `end`: its begin and end,
        and the sums there."""
        places, sums = self._places, self._sums
        first, last = bisect_right(places, begin) - 1, bisect_left(places, end)
        if last == len(places):
            return places[first], self._end, sums[first], self._sum
        return places[first], places[last], sums[first], sums[last]

    def forget_before(self, position: int) -> None:
        """The log was cut before a position: forgets the sums there."""
        first = bisect_left(self._places, position)
        if first == len(self._places):  # the log goes on before the next sum
            self._places.append(self._end)
            self._sums.append(self._sum)
        if first:
            self._forget(first)

    def _forget(self, count: int) -> None:
        del self._places[:count], self._sums[:count]
        self.begin = self._places[0]
