"""Frames (RFC 9113, 4 and 6): 9 bytes of head, then the payload.

0 length (24 bits)  3 kind  4 flags  5 stream (31 bits)
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""A client's first bytes (3.4)."""
HEAD_BYTES: Final = 9
DEFAULT_WINDOW_BYTES: Final = 65_535
MAX_WINDOW_BYTES: Final = 0x7FFF_FFFF
MIN_FRAME_BYTES: Final = 16_384  # every peer takes payloads of this size
MAX_FRAME_BYTES: Final = 0xFF_FFFF
LAST_STREAM_ID: Final = 0x7FFF_FFFF

_HEAD: Final = Struct(">BHBBI")
_SETTING: Final = Struct(">HI")


class Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2  # deprecated, and without effect here
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


DATA: Final = int(Kind.DATA)
HEADERS: Final = int(Kind.HEADERS)
RST_STREAM: Final = int(Kind.RST_STREAM)
SETTINGS: Final = int(Kind.SETTINGS)
PING: Final = int(Kind.PING)
GOAWAY: Final = int(Kind.GOAWAY)
WINDOW_UPDATE: Final = int(Kind.WINDOW_UPDATE)
CONTINUATION: Final = int(Kind.CONTINUATION)

# Flags
END_STREAM: Final = 0x01
ACK: Final = 0x01  # for SETTINGS and PING
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
PRIORITY: Final = 0x20  # HEADERS begin with a priority


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream or a connection ended (7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def encode(kind: int, flags: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def encode_settings(settings: dict[Setting, int]) -> bytes:
    return encode(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in settings.items()))


def decode_settings(payload: bytes) -> list[tuple[int, int]]:
    """`payload`: a multiple of 6 bytes."""
    return list(_SETTING.iter_unpack(payload))


def encode_window_update(stream_id: int, increment: int) -> bytes:
    return encode(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def encode_reset(stream_id: int, code: int) -> bytes:
    return encode(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def encode_goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    return encode(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode())


def headers_frames(stream_id: int, block: bytes, end_stream: bool, limit: int) -> bytes:
    """HEADERS, and CONTINUATION if the peer takes frames of `limit` bytes only."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= limit:
        return encode(HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [encode(HEADERS, flags, stream_id, block[:limit])]
    for begin in range(limit, len(block), limit):
        is_last = begin + limit >= len(block)
        parts.append(encode(CONTINUATION, END_HEADERS if is_last else 0, stream_id, block[begin : begin + limit]))
    return b"".join(parts)
