"""gRPC over HTTP/2: messages with a prefix of five bytes, the status of a call in its trailers, and deadlines.

    byte 0: 1 if the message is compressed   1: length (32 bits)   5: message

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from .config import MAX_CALL_BYTES, MAX_STATUS_CHARS
from .hpack import encode

PREFIX_BYTES: Final = 5
CONTENT_TYPE: Final = b"application/grpc"
HEAD: Final = encode((b":status", b"200"), (b"content-type", CONTENT_TYPE))
"""The header block of a response."""

_TIMEOUT_DIGITS: Final = 8
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Status(IntEnum):
    """Status of a finished call."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallFault(Exception):
    """An error that ends a call with a status other than OK."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class MessageReader:
    """Splits the data of a call into messages.

    Incomplete messages are kept in one buffer. A client may send two bytes at a time, and an object for each piece
    would take thirty times as much memory as the piece.
    """

    __slots__ = ("_size", "_waiting")

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._size = 0  # size of the first message including its prefix, once it is known

    @property
    def waiting_bytes(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Drop an incomplete message, whose rest is not needed."""
        self._waiting = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes. Raises CallFault."""
        waiting = self._waiting
        if not waiting and len(data) >= PREFIX_BYTES:  # most messages arrive in one piece
            size = _size_of(data)
            if len(data) == size:
                return [data[PREFIX_BYTES:]]
        waiting += data
        if len(waiting) < PREFIX_BYTES or len(waiting) < self._size:
            return []
        return self._cut()

    def _cut(self) -> list[bytes]:
        found: list[bytes] = []
        begin = 0
        with memoryview(self._waiting) as data:
            while True:
                size = _size_of(data, begin) if len(data) - begin >= PREFIX_BYTES else 0
                if not size or len(data) - begin < size:
                    break
                found.append(bytes(data[begin + PREFIX_BYTES : begin + size]))
                begin += size
            if begin:
                self._waiting = bytearray(data[begin:])
        self._size = size
        return found


def _size_of(data: bytes | memoryview, begin: int = 0) -> int:
    """Return the size of a message including its prefix. Raises CallFault."""
    if data[begin]:
        raise CallFault(
            Status.UNIMPLEMENTED, "compressed gRPC messages are not supported; send them with identity encoding"
        )
    size = int.from_bytes(data[begin + 1 : begin + PREFIX_BYTES], "big")
    if size > MAX_CALL_BYTES:
        raise CallFault(Status.RESOURCE_EXHAUSTED, f"a message has {size} bytes; maximum {MAX_CALL_BYTES}")
    return PREFIX_BYTES + size


def encode_message(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return message_head(len(message)) + message


def message_head(size: int) -> bytes:
    """Return the prefix of a message of this many bytes."""
    return b"\0" + size.to_bytes(4, "big")


def trailers(status: int = Status.OK, reason: str = "") -> bytes:
    """Return the header block that ends a response."""
    return encode(*_status_fields(status, reason)) if status or reason else _OK


def only_trailers(status: int, reason: str) -> bytes:
    """Return the header block of a call that fails without a response."""
    return encode((b":status", b"200"), (b"content-type", CONTENT_TYPE), *_status_fields(status, reason))


def _status_fields(status: int, reason: str) -> list[tuple[bytes, bytes]]:
    found = [(b"grpc-status", str(int(status)).encode())]
    return [*found, (b"grpc-message", percent_encoded(reason[:MAX_STATUS_CHARS]))] if reason else found


_OK: Final = encode((b"grpc-status", b"0"))


def percent_encoded(text: str) -> bytes:
    """Encode a text for `grpc-message`: printable ASCII characters except for the percent sign are not changed."""
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in text.encode("utf-8", "replace")
    )


def timeout_s(text: bytes | None) -> float | None:
    """Return the timeout of the header field `grpc-timeout` in seconds, or None without the field. Raises CallFault."""
    if text is None:
        return None
    digits, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS:
        raise CallFault(
            Status.INVALID_ARGUMENT, "grpc-timeout is invalid; expected 1 to 8 digits and one of H, M, S, m, u, n"
        )
    return int(digits) * unit


def is_grpc(content_type: bytes) -> bool:
    return content_type == CONTENT_TYPE or content_type.startswith((CONTENT_TYPE + b"+proto", CONTENT_TYPE + b";"))
