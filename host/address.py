"""The address at which other machines reach this machine."""

from __future__ import annotations

import socket


def local_address() -> str:
    """Return this machine's IPv4 address, as RocketMQ's clients use it in their ids. Return 127.0.0.1 only if there is
    no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, and only selects the local address
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
