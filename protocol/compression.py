"""How bodies are compressed. The sender chooses, and the sys flag says how; brokers never touch it."""

from __future__ import annotations

import zlib
from typing import Final

import lz4.frame
import zstandard

from .codes import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZLIB,
    SYS_COMPRESSION_ZSTD,
)
from .message import MessageError

MAX_DECOMPRESSED_BYTES: Final = 64 * 1024 * 1024
ZLIB_LEVEL: Final = 5


def compressed(body: bytes) -> tuple[bytes, int]:
    """The body as Apache's producers compress it (zlib), and the sys flag that says so."""
    return zlib.compress(body, ZLIB_LEVEL), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB


def decompressed(body: bytes, sys_flag: int) -> bytes:
    """The body as the producer had it. Raises MessageError if it cannot be read or exceeds 64 MiB."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    try:
        plain, ended = _inflate(body, sys_flag & SYS_COMPRESSION_MASK)
    except (zlib.error, RuntimeError, zstandard.ZstdError) as error:
        raise MessageError(f"the compressed body cannot be read: {error}") from None
    if not ended:
        raise MessageError(f"the compressed body is cut off, or has more than {MAX_DECOMPRESSED_BYTES} bytes")
    return plain


def _inflate(body: bytes, kind: int) -> tuple[bytes, bool]:
    if kind == SYS_COMPRESSION_LZ4:
        lz4_frame = lz4.frame.LZ4FrameDecompressor()
        return lz4_frame.decompress(body, MAX_DECOMPRESSED_BYTES), lz4_frame.eof
    if kind == SYS_COMPRESSION_ZSTD:
        size = zstandard.frame_content_size(body)
        if size > MAX_DECOMPRESSED_BYTES:
            return b"", False
        return zstandard.ZstdDecompressor().decompress(body, MAX_DECOMPRESSED_BYTES), True
    stream = zlib.decompressobj()
    return stream.decompress(body, MAX_DECOMPRESSED_BYTES), stream.eof
