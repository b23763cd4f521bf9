"""Limits of HTTP connections to the console and the control port."""

from __future__ import annotations

from typing import Final

MAX_CONNECTIONS: Final = (
    128  # connections of one port; beyond, the one that has waited longest for its client's request ends
)
CLIENT_S: Final = 10.0  # how long a client may write nothing of its request, or read nothing of the answer
