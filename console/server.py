"""Starts and stops the console, in a process of its own or in that of a name server."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

from ..client.admin.admin_client import AdminClient
from ..client.producer import Producer
from ..client.wire.connection import Access
from ..web.server import WebServer
from .application import application
from .config import PRODUCER_GROUP, STOP_S
from .console import Console
from .login import Sessions


class ConsoleServer:
    """The console's server: `async with ConsoleServer("127.0.0.1:9876") as server: print(server.url)`

    Args:
        name_server: the name servers of the cluster, as for AdminClient
        access: how to connect to the cluster, as for AdminClient
        host: the address to listen on
        port: the port to listen on; 0 selects a free one
        listening: a listening socket, used instead of `host` and `port`
        hosts: further host names that requests may have
        read_only: True to reject all changes
        sessions: the sessions of the users that have to log in; None if nobody has to
        folder: where the jobs are kept; None to keep them in memory
    Raises:
        OSError: it cannot listen
    """

    def __init__(
        self,
        name_server: str,
        *,
        access: Access | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        listening: socket.socket | None = None,
        hosts: Sequence[str] = (),
        read_only: bool = False,
        sessions: Sessions | None = None,
        folder: Path | None = None,
    ) -> None:
        self._admin = AdminClient(name_server, access=access)
        producer = partial(Producer[bytes], name_server, PRODUCER_GROUP, access=access)
        self._console = Console(self._admin, producer, cluster=name_server, read_only=read_only, folder=folder)
        self._host = host
        self._socket = listening or _listening(host, port)
        app = application(self._console, hosts=(*hosts, host), sessions=sessions)
        self._server = WebServer(app, self._socket, stop_s=int(STOP_S))

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self._console.__aenter__()
        self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._console.__aexit__()  # ends the streams
        await self._server.stop()
        await self._admin.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)
