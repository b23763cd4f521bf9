"""Addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket


def local_address() -> str:
    """Return this machine's IPv4 address on the route to other networks, as RocketMQ's clients use it in their ids;
    127.0.0.1 if there is no such route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, and only selects the local address
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address or host name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
