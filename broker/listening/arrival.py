"""A client's protocol while the modules of its door are loaded in a thread: its bytes wait, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .carrier import Carrier


class Arrival(asyncio.Protocol):
    """door: makes the client's protocol, once `loading` is done."""

    def __init__(
        self, connection: Carrier, loading: asyncio.Future[None], door: Callable[[], asyncio.Protocol]
    ) -> None:
        self._connection = connection
        self._loading = loading
        self._door = door
        self._kept = b""
        loading.add_done_callback(self._loaded)

    def data_received(self, data: bytes) -> None:
        self._kept += data
        self._connection.is_held = True
        self._connection.charge(len(data))
        self._connection.pause_reading()

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        connection, kept = self._connection, self._kept
        connection.charge(-len(kept))
        if loading.cancelled():  # the server stops
            connection.close()
            return
        connection.is_held = False
        protocol = self._door()
        connection.set_protocol(protocol)
        protocol.data_received(kept)
        if not connection.is_held:
            connection.go_on()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._loading.remove_done_callback(self._loaded)
        self._connection.connection_lost(error)
