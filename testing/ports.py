"""Free ports that on Linux stay free until a server listens on them, even if other processes, such as pytest-xdist's
workers, look for free ports concurrently.

A port that was found by binding and closing may be used by another process a moment later. The newest ports of this
module stay bound, but do not listen. Linux never assigns a bound port to a process that requests any free port, but lets
a process listen on this particular port if both sockets have SO_REUSEADDR. Servers of asyncio, Java and Go set it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from typing import Final

from ..broker.config import VIP_DISTANCE

HELD: Final = 64  # maximum number of ports that stay bound; servers should listen on older ones by then

_held: deque[tuple[int, ...]] = deque()  # the sockets' file descriptors


def free_port() -> int:
    """Return a free port of 127.0.0.1 for a broker. The port of its VIP channel, two below, is free as well."""
    while True:
        found = _bound(0)
        port = int(found.getsockname()[1])
        try:
            below = _bound(port - VIP_DISTANCE)
        except OSError:  # another process uses the port
            found.close()
            continue
        _hold(found, below)
        return port


def _bound(port: int) -> socket.socket:
    """Return a socket bound to a port. Raises OSError.

    SO_REUSEADDR is set after binding, because binding with it would succeed for a port that another process has bound.
    """
    probe = socket.socket()
    try:
        probe.bind(("127.0.0.1", port))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        probe.close()
        raise
    return probe


def _hold(*sockets: socket.socket) -> None:
    if sys.platform != "linux":  # other systems may not let a process listen on a bound port
        for each in sockets:
            each.close()
        return
    _held.append(tuple(each.detach() for each in sockets))
    while len(_held) > HELD:
        for descriptor in _held.popleft():
            os.close(descriptor)
