"""The name that a client gives itself."""

from __future__ import annotations

import os
import secrets
import time
from itertools import count

from ...host.address import local_address

_instances = count()


def new_client_id(name: str | None = None) -> str:
    """`address@pid#number`: unlike every other client's on this host. With a name `name#random`, because two processes may be
    given the same one."""
    if name is not None:
        return f"{name}#{secrets.token_hex(4)}"
    return f"{local_address()}@{os.getpid()}#{time.time_ns() + next(_instances)}"
