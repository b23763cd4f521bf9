"""A client without a socket that asks one thing after the other."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rocketlet.broker.server import Server
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Ext, Frame, encode

from .frames import Peer

ANSWER_S: Final = 60.0


class Client:
    def __init__(self, server: Server) -> None:
        self._peer = Peer(server, 2)
        self._number = 0

    async def ask(self, code: RequestCode, ext: Ext, body: bytes = b"") -> Frame:
        """Raises TimeoutError."""
        self._number += 1
        text = {name: str(value) for name, value in ext.items()}
        self._peer.send(encode(Frame(code, self._number, text, body)))
        async with asyncio.timeout(ANSWER_S):
            while True:
                for frame in self._peer.received():
                    if frame.is_response and frame.opaque == self._number:
                        return frame
                await asyncio.sleep(0)

    async def send(self, body: bytes, code: RequestCode = RequestCode.SEND_MESSAGE_V2, **fields: Any) -> Frame:
        ext = {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", **fields}
        return await self.ask(code, ext, body)

    def hang_up(self) -> None:
        self._peer.hang_up()
