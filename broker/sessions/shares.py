"""Limits of all clients together, of which each address has a share."""

from __future__ import annotations

from collections import Counter

from ..config import ADDRESS_SHARE
from .session import is_loopback


class Shares:
    """How much of a limit is used, and by which address. One address may use a part of it only, so that it never refuses
    everybody else; the machine's own may use all, because a proxy there speaks for many."""

    __slots__ = ("_of_address", "count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._of_address: Counter[str] = Counter()

    def has_room(self, address: str) -> bool:
        if self.count >= self.most:
            return False
        return self._of_address[address] < self.most * ADDRESS_SHARE or is_loopback(address)

    def take(self, address: str) -> None:
        self.count += 1
        self._of_address[address] += 1

    def give_back(self, address: str) -> None:
        self.count -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]
