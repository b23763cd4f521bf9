"""Holds a TLS client's records back from OpenSSL.

OpenSSL reads all that it is given in one piece, while the event loop waits, and the client decides what that costs:

1. Its part of a handshake takes a private-key operation, 0.1 to 3 ms. So each part waits for its turn.
2. A record may hold no data: a key update (RFC 8446, 4.6.3) has 27 bytes and takes 27 us, and OpenSSL takes any number of
   them. 1.9 MB stopped a broker for 1.1 s. So few records are decrypted at a time, and a client that sends many without
   data is cut off, as by Go's crypto/tls (maxUselessRecords). Key updates of honest clients lie millions of records apart.
3. Nothing is decrypted while requests of this client wait. It would be decrypted later, in one piece.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from ..config import MAX_EMPTY_RECORDS, RECORD_BYTES, RECORDS_AT_ONCE, TURN_S
from .client import Client

_HEAD_BYTES = 5  # a record's kind, version, and the length of what follows (RFC 8446, 5.1)


class TlsRecords(asyncio.Protocol):
    """A socket's protocol while its client speaks TLS. `tls` is asyncio's, which decrypts; `in_turn` calls when
    there is time; `flooded` ends
    a connection whose client has sent too many records without data."""

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: asyncio.BufferedProtocol,
        connection: Client,
        in_turn: Callable[..., None],
        flooded: Callable[[], None],
    ) -> None:
        self._raw = raw
        self._tls = tls
        self._connection = connection
        self._in_turn = in_turn
        self._flooded = flooded
        self._rest = b""
        self._reach = 0  # bytes until the next record begins
        self._empty = 0.0  # records without data, as far as others have not made up for them
        self._has_paused = self._is_decrypting = False

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be decrypted, and encrypted bytes that the client has not read."""
        return len(self._rest) + self._raw.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self._connection.is_encrypted:
            self.go_on()
        else:
            self._pause()
            self._in_turn(self.go_on)

    def go_on(self) -> None:
        """Has as much decrypted as the time of a turn allows; the rest in the next turns, or when requests no longer wait."""
        if self._is_decrypting:
            return
        self._is_decrypting = True
        try:
            self._decrypt()
        finally:
            self._is_decrypting = False

    def _decrypt(self) -> None:
        if self._has_paused:
            self._has_paused = False
            self._raw.resume_reading()
        end_s = time.perf_counter() + TURN_S
        while self._connection.is_reading and not self._raw.is_closing():
            records, size = self._next()
            if not size:  # all is done, but for the beginning of a record's head
                return
            self._give(records, size)
            if self._empty or time.perf_counter() > end_s:
                break
        if self._raw.is_closing():
            self._rest = b""
        elif self._rest:
            self._pause()
            if self._connection.is_reading:
                asyncio.get_running_loop().call_soon(self.go_on)

    def _pause(self) -> None:
        if self._raw.is_reading():  # otherwise TLS has paused it, and will resume it
            self._raw.pause_reading()
            self._has_paused = True

    def _next(self) -> tuple[int, int]:
        """How many records begin in the next bytes to decrypt, and their size."""
        rest, place, records = self._rest, self._reach, 0
        while records < RECORDS_AT_ONCE and place + _HEAD_BYTES <= len(rest):
            place += _HEAD_BYTES + (rest[place + 3] << 8 | rest[place + 4])
            records += 1
        size = min(place, len(rest))
        self._reach = place - size
        return records, size

    def _give(self, records: int, size: int) -> None:
        data, self._rest = self._rest[:size], self._rest[size:]
        before_bytes = self._connection.read_bytes
        _feed(self._tls, data, self._raw)
        found_bytes = self._connection.read_bytes - before_bytes
        self._empty = max(0.0, self._empty + records - found_bytes / RECORD_BYTES)
        if self._empty > MAX_EMPTY_RECORDS and not self._raw.is_closing():
            self._flooded()

    def eof_received(self) -> bool | None:
        return self._tls.eof_received()

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._rest = b""
        self._tls.connection_lost(error)


def _feed(tls: asyncio.BufferedProtocol, data: bytes, raw: asyncio.Transport) -> None:
    """Gives bytes to TLS as if they had just been read."""
    while data and not raw.is_closing():
        room = cast("memoryview", tls.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        tls.buffer_updated(count)
        data = data[count:]
