"""The id of a message, which its sender makes."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from ...host.address import local_address

_TWO_DIGITS: Final = tuple(f"{number:02X}" for number in range(256))


class UniqueKeys:
    """Makes the ids that identify a message from its first send on: address, pid, time, counter, in hex."""

    CHARS: Final = 32

    def __init__(self) -> None:
        prefix = socket.inet_aton(local_address()) + (os.getpid() & 0xFFFF).to_bytes(2, "big") + os.urandom(4)
        self.prefix = prefix.hex().upper()
        self._counter = 0
        month = time.localtime()
        self.month_began_ms = int(time.mktime((month.tm_year, month.tm_mon, 1, 0, 0, 0, 0, 0, -1)) * 1000)
        self._stem = ""
        self.stamped_ms = 0
        self.stamp(int(time.time() * 1000))

    def stamp(self, now_ms: int) -> None:
        """Sets the time in the ids that follow."""
        self.stamped_ms = now_ms
        self._stem = f"{self.prefix}{(now_ms - self.month_began_ms) & 0x7FFFFFFF:08X}"

    def next(self) -> str:
        """Another id."""
        number = self._counter
        if number == 0xFFFF:
            return self.take(1)[0]
        self._counter = number + 1
        return self._stem + _TWO_DIGITS[number >> 8] + _TWO_DIGITS[number & 0xFF]

    def take(self, count: int) -> list[str]:
        """So many ids. With a new time when the counter begins anew, so that no id comes twice."""
        ids: list[str] = []
        while count > 0:
            high, low = self._counter >> 8, self._counter & 0xFF
            stem, ends = self._stem + _TWO_DIGITS[high], _TWO_DIGITS[low : low + count]
            ids += [stem + end for end in ends]
            count -= len(ends)
            self._counter = (self._counter + len(ends)) & 0xFFFF
            if not self._counter:
                self.stamp(int(time.time() * 1000))
        return ids
