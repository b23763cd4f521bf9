"""A client's socket, as far as TLS deals with it. Each door has its own kind."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Protocol


class Decryption(Protocol):
    """Stands between a client's socket and its TLS."""

    @property
    def held_bytes(self) -> int: ...

    def go_on(self) -> None: ...


class Client(asyncio.Protocol):
    """`read_bytes` have come from the client, of TLS those that were decrypted; `records` has them decrypted."""

    __slots__ = ("is_encrypted", "peer", "read_bytes", "records")

    peer: str
    is_encrypted: bool
    read_bytes: int
    records: Decryption | None

    @property
    @abstractmethod
    def address(self) -> str:
        """The client's, without the port."""

    @property
    @abstractmethod
    def is_reading(self) -> bool:
        """Whether requests are read; otherwise those that were read wait."""

    @abstractmethod
    def encrypted(self, transport: asyncio.Transport) -> None:
        """The client has set up TLS; from now on everything goes through there."""

    @abstractmethod
    def plain_refusal(self, data: bytes, remark: str) -> bytes:
        """A refusal in the client's own protocol, for plain data at a port that takes TLS only; empty if it has asked
        nothing yet."""
