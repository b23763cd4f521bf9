"""Free ports that stay free until they are listened on, also beside others that look for one, such as pytest-xdist's workers.

A port that was found by binding and closing may be somebody else's a moment later. These stay bound, but do not listen:
Linux gives a bound port to nobody who asks for any, and lets who asks for this one listen on it, if both sockets have
SO_REUSEADDR, as the servers of asyncio, Java and Go do.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from typing import Final

from ..broker.config import VIP_DISTANCE

HELD: Final = 64  # ports; older ones are listened on by now

_held: deque[tuple[int, ...]] = deque()  # file descriptors


def free_port() -> int:
    """A port of 127.0.0.1 for a broker. The one of its VIP channel, two below, is free as well."""
    while True:
        found = _bound(0)
        port = int(found.getsockname()[1])
        try:
            below = _bound(port - VIP_DISTANCE)
        except OSError:  # somebody has it
            found.close()
            continue
        _hold(found, below)
        return port


def _bound(port: int) -> socket.socket:
    """Raises OSError. SO_REUSEADDR comes after binding, which would take a port that somebody else has bound."""
    probe = socket.socket()
    try:
        probe.bind(("127.0.0.1", port))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        probe.close()
        raise
    return probe


def _hold(*sockets: socket.socket) -> None:
    if sys.platform != "linux":  # elsewhere nobody could listen on a port that is bound
        for each in sockets:
            each.close()
        return
    _held.append(tuple(each.detach() for each in sockets))
    while len(_held) > HELD:
        for descriptor in _held.popleft():
            os.close(descriptor)
