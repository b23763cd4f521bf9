"""Serves an application at a port: uvicorn, in an event loop that does other things, too.

uvicorn waits without an end for a request that somebody has begun, and for an answer to be read, however many do so. Its
`limit_concurrency` refuses everybody when there are too many. So a connection here ends when its client is silent for 10 s
while it is its turn, and the one that has been so for longest makes room for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import CLIENT_S, MAX_CONNECTIONS


class _Uvicorn(uvicorn.Server):
    """Signals are their owner's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves at a socket that listens, from `start` to `stop`, which closes it. stop_s: how long open requests may take
    then."""

    def __init__(self, application: Any, listening: socket.socket, *, stop_s: int) -> None:
        self._socket = listening
        connections: dict[_Connection, None] = {}
        config = uvicorn.Config(
            application,
            http=cast("type[asyncio.Protocol]", partial(_Connection, connections)),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=stop_s,
        )
        self._server = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="web")

    async def stop(self) -> None:
        self._server.should_exit = True
        try:
            if self._serving is not None:
                await asyncio.gather(self._serving, return_exceptions=True)
        finally:
            self._socket.close()


class _Connection(H11Protocol):
    """`connections` are those that are open at this port, and the one whose client was heard of longest ago comes first."""

    def __init__(self, connections: dict[_Connection, None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._open = connections
        self._silent: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of answers that the client had not read when it was last heard of

    @property
    def _awaits_client(self) -> bool:
        """Whether the client has to write its request or to read the answer before anything goes on."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        if len(self._open) >= MAX_CONNECTIONS:
            waiting = (connection for connection in self._open if connection._awaits_client)
            next(waiting, self)._abort()
        if not transport.is_closing():
            self._heard()

    def data_received(self, data: bytes) -> None:
        self._heard()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._heard()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._heard()

    def on_response_complete(self) -> None:
        self._heard()  # its turn begins
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _heard(self) -> None:
        self._forget()
        self._open[self] = None
        self._unread = self.transport.get_write_buffer_size()
        self._silent = self.loop.call_later(CLIENT_S, self._look)

    def _look(self) -> None:
        """The client has written nothing: while an answer is being made or read, that is as it should be."""
        reads = self.transport.get_write_buffer_size() < self._unread
        if self._awaits_client and not reads:
            self._abort()
        else:
            self._heard()

    def _abort(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._open.pop(self, None)
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None
