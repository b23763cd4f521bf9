"""Why a server cannot listen, in one sentence that names the address."""

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
    """Raises OSError, which names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def listening_fault(error: OSError, host: str, port: int) -> str:
    """`host` and `port` are meant where the error does not say what it is about; a server has several ports."""
    number, text = error.errno or 0, error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"cannot listen on {host}:{port}: the host name is not known"
    place = _PLACE(text)  # asyncio and uvloop each have their own words around it
    if place:
        host, port = place[1], int(place[2])
    what = text if not place and text != os.strerror(number) else f"{host}:{port}: {os.strerror(number)}"
    hint = _HINTS.get(number)
    return f"cannot listen on {what}; {hint}" if hint else f"cannot listen on {what}"
