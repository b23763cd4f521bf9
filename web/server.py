"""Serves an application at a port with uvicorn, in an event loop that has other tasks, too.

uvicorn has no timeout for clients that do not finish their request or do not read the response, and its
`limit_concurrency` rejects all new clients when there are too many. Therefore, a connection here is closed when the
server has waited 10 s for its client. If there are too many connections, a new one replaces the connection whose client
has been waited for longest, or is closed if no connection waits for its client.
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
    """A uvicorn server that does not handle signals, because the program that runs it does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves an application at a listening socket from `start` to `stop`, which closes the socket.

    Args:
        stop_s: the maximum time in seconds for which `stop` waits for running requests.
    """

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
    """A connection with timeouts for its client.

    Args:
        connections: the open connections of the port, ordered by their clients' last activity, the oldest first.
    """

    def __init__(self, connections: dict[_Connection, None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._open = connections
        self._silent: asyncio.TimerHandle | None = None
        self._unread = 0  # the unwritten bytes of responses at the client's last activity

    @property
    def _awaits_client(self) -> bool:
        """True if the connection waits for its client to send the request or to read the response."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        if len(self._open) >= MAX_CONNECTIONS:
            waiting = (connection for connection in self._open if connection._awaits_client)
            next(waiting, self)._abort()
        if not transport.is_closing():
            self._record_activity()

    def data_received(self, data: bytes) -> None:
        self._record_activity()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._record_activity()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._record_activity()

    def on_response_complete(self) -> None:
        self._record_activity()  # from now on, the connection waits for the client
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _record_activity(self) -> None:
        self._forget()
        self._open[self] = None
        self._unread = self.transport.get_write_buffer_size()
        self._silent = self.loop.call_later(CLIENT_S, self._check_silence)

    def _check_silence(self) -> None:
        """Close the connection if it waits for its client. While the response is being computed or read, keep it."""
        reads = self.transport.get_write_buffer_size() < self._unread
        if self._awaits_client and not reads:
            self._abort()
        else:
            self._record_activity()

    def _abort(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._open.pop(self, None)
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None
