"""A client's socket as any door may use it, whichever made it: counted, charged and closed as all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ..sessions.session import Session


class Carrier(Session, Protocol):
    """`active_s` is when it was last read from or written to, `heard_s` when its client was last heard of. `read_bytes` have
    come from the client. `is_held`: its requests wait."""

    active_s: float
    heard_s: float
    read_bytes: int
    is_held: bool

    def on_farewell(self, action: Callable[[], None]) -> None:
        """Calls `action` before the broker closes the socket."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read."""
        ...

    def write(self, buffers: list[bytes | memoryview]) -> None: ...

    def pause_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """The socket's bytes go there from now on."""
        ...

    def go_on(self) -> None:
        """Reads again."""
        ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...
