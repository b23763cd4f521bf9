"""Opens listening sockets, and explains why a server cannot listen."""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import Final

_PLACE: Final = re.compile(r"\('([^']*)', (\d+)").search
_HINTS: Final = {
    errno.EADDRINUSE: "stop what listens there, or choose another port",
    errno.EADDRNOTAVAIL: "no network interface of this machine has this address",
    errno.EACCES: "ports below 1024 are for root; choose another one",
}


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def listening_fault(error: OSError, host: str, port: int) -> str:
    """Return one sentence that says why a server cannot listen. A server has several ports: `host` and `port` are named
    only if the error contains no address."""
    number, text = error.errno or 0, error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"cannot listen on {host}:{port}: the host name is not known"
    place = _PLACE(text)  # asyncio and uvloop have different texts around the address
    if place:
        host, port = place[1], int(place[2])
    what = text if not place and text != os.strerror(number) else f"{host}:{port}: {os.strerror(number)}"
    hint = _HINTS.get(number)
    return f"cannot listen on {what}; {hint}" if hint else f"cannot listen on {what}"
