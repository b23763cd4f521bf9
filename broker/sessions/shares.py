"""The use of a limit on all clients together, of which each address and account may use a share."""

from __future__ import annotations

from collections import Counter

from ...host.address import is_loopback
from ..config import ADDRESS_SHARE


class AddressShares:
    """The use of a limit by address, which callers check with `has_room`. One address may use only ADDRESS_SHARE of the
    limit, so that it alone cannot lock other addresses out. Loopback may use all of it, because a proxy on this machine may
    serve many clients. If callers name an account, too, all addresses of the account together may use the same share."""

    __slots__ = ("_of_account", "_of_address", "count", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._of_address: Counter[str] = Counter()
        self._of_account: Counter[str] = Counter()

    def has_room(self, address: str, wanted: int = 1, account: str = "") -> bool:
        if self.count + wanted > self.most:
            return False
        used = max(self._of_address[address], self._of_account[account])
        return used + wanted - 1 < self.most * ADDRESS_SHARE or is_loopback(address)

    def acquire(self, address: str, account: str = "", count: int = 1) -> None:
        self.count += count
        self._of_address[address] += count
        if account:
            self._of_account[account] += count

    def release(self, address: str, count: int = 1, account: str = "") -> None:
        self.count -= count
        _reduce(self._of_address, address, count)
        if account:
            _reduce(self._of_account, account, count)


def _reduce(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]
