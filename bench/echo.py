"""What a request and its response cost without a broker: a server with uvloop that answers each KB with 100 bytes, and a
client that awaits each answer. `python -m bench.echo PORT` is the server."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Final, cast

import uvloop

from .runner import BODY_BYTES

ANSWER: Final = b"." * 100


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._unanswered_bytes = 0

    def data_received(self, data: bytes) -> None:
        count, self._unanswered_bytes = divmod(self._unanswered_bytes + len(data), BODY_BYTES)
        self._transport.write(ANSWER * count)


class Client(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._read_bytes = 0

    def send(self, body: bytes) -> asyncio.Future[None]:
        future = self._loop.create_future()
        self._waiting.append(future)
        self._transport.write(body)
        return future

    def data_received(self, data: bytes) -> None:
        count, self._read_bytes = divmod(self._read_bytes + len(data), len(ANSWER))
        for _ in range(count):
            self._waiting.popleft().set_result(None)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
