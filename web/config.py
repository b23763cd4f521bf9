"""Limits of HTTP connections to the console and the control port."""

from __future__ import annotations

from typing import Final

MAX_CONNECTIONS: Final = (
    128  # connections of one port; with more, the one that has waited longest for its client is closed
)
# time after which a connection is closed whose client sends nothing of its request, or reads nothing of the response
CLIENT_S: Final = 10.0
