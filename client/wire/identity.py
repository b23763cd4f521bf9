"""The name that a client gives itself."""

from __future__ import annotations

import os
import socket
import time
from itertools import count


def local_address() -> str:
    """This host's address as RocketMQ clients name themselves: IPv4, not loopback if there is another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only asks which address would be used
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


_instances = count()


def new_client_id() -> str:
    """`address@pid#number`: unlike every other client's on this host."""
    return f"{local_address()}@{os.getpid()}#{time.time_ns() + next(_instances)}"
