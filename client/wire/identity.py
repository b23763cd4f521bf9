"""The name that a client gives itself."""

from __future__ import annotations

import os
import time
from itertools import count

from ...host.address import local_address

_instances = count()


def new_client_id() -> str:
    """`address@pid#number`: unlike every other client's on this host."""
    return f"{local_address()}@{os.getpid()}#{time.time_ns() + next(_instances)}"
