"""The networks that this machine or container is in. They tell clients inside from clients outside.

A container is reached in two ways: by its neighbours at its own address, and through a published port. Clients of a
published port come from the gateway or from another network, and cannot reach the container's own address.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Final

from ..sessions.session import is_loopback

_COLUMNS: Final = 8  # up to the mask; see route_seq_show in Linux's net/ipv4/fib_trie.c


@dataclass(frozen=True, slots=True)
class Networks:
    own: tuple[IPv4Network, ...] = ()
    gateways: frozenset[IPv4Address] = frozenset()

    def is_outside(self, address: str) -> bool:
        """Whether a client at this address (without a port) cannot reach our own. An IPv6 client can: nothing translates
        its address."""
        if is_loopback(address):
            return False
        try:
            client = IPv4Address(address)
        except AddressValueError:
            return False
        return client in self.gateways or not any(client in network for network in self.own)


def parse_networks(text: str) -> Networks:
    """Reads Linux's /proc/net/route, whose numbers are hexadecimal in the machine's byte order. Other lines are skipped."""
    own: list[IPv4Network] = []
    gateways: set[IPv4Address] = set()
    for line in text.splitlines()[1:]:
        parts = line.split()
        if len(parts) < _COLUMNS:
            continue
        try:
            to, gateway, mask = (IPv4Address(int(parts[number], 16).to_bytes(4, "little")) for number in (1, 2, 7))
            network = IPv4Network(f"{to}/{mask}")
        except (ValueError, OverflowError):
            continue
        if int(gateway):
            gateways.add(gateway)
        elif int(mask):
            own.append(network)
    return Networks(tuple(own), frozenset(gateways))
