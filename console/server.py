"""Listens, and ends with its streams. In a process of its own, or in a broker's."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Self

from ..client.admin.admin_client import AdminClient
from ..client.producer import Producer
from ..client.wire.connection import Access
from ..web.server import WebServer
from .application import application
from .config import PRODUCER_GROUP, STOP_S
from .console import Console


class ConsoleServer:
    """`async with ConsoleServer("127.0.0.1:9876") as server: print(server.url)`

    - `name_server`, `access`: the cluster, as for AdminClient.
    - `host`, `port`: where to listen; 0 takes a free port. `listening`: a socket that does so already.
    - `hosts`: other names that browsers may ask it by.
    - `read_only`: nothing can be changed.

    Raises OSError if it cannot listen.
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
    ) -> None:
        self._admin = AdminClient(name_server, access=access)
        producer = partial(Producer[bytes], name_server, PRODUCER_GROUP, access=access)
        self._console = Console(self._admin, producer, cluster=name_server, read_only=read_only)
        self._host = host
        self._socket = listening or _listening(host, port)
        self._server = WebServer(application(self._console, hosts=(*hosts, host)), self._socket, stop_s=int(STOP_S))

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
