"""The address under which others reach this machine."""

from __future__ import annotations

import socket


def local_address() -> str:
    """IPv4, as RocketMQ's clients name themselves; not loopback if there is another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only asks which address would be used
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
