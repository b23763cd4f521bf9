"""How bodies are compressed. The sender chooses, and the sys flag says how; brokers never touch it.

Ours send zlib, as Apache's 4.9. LZ4 and Zstandard come from other senders; their libraries are an extra, loaded when needed.
"""

from __future__ import annotations

import zlib
from typing import Final

from .codes import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZLIB,
    SYS_COMPRESSION_ZSTD,
)
from .config import MAX_DECOMPRESSED_BYTES
from .message import MessageError

ZLIB_LEVEL: Final = 5
ZSTD_WINDOW_BYTES: Final = 8 * 1024 * 1024  # which all decoders take, by the format's own advice (RFC 8878, 3.1.1.1.2)


def compressed(body: bytes) -> tuple[bytes, int]:
    """The body as Apache's producers compress it (zlib), and the sys flag that says so."""
    return zlib.compress(body, ZLIB_LEVEL), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB


def decompressed(body: bytes, sys_flag: int, most: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """The body as the producer had it. Raises MessageError if it cannot be read or has more bytes than `most`."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    plain, ended = _inflated(body, sys_flag, most + 1, is_whole=True)
    if not ended or len(plain) > most:
        raise MessageError(f"the compressed body is cut off, or has more than {most} bytes")
    return plain


def begin_of(body: bytes, sys_flag: int, size: int) -> tuple[bytes, bool]:
    """The first `size` bytes of the body as the producer had it, and whether they are all of it. For those who only show a
    body: a message of 64 KB may inflate to 64 MiB, and no more is inflated than was asked for. Raises MessageError."""
    if not sys_flag & SYS_COMPRESSED:
        return body[:size], len(body) <= size
    plain, _ = _inflated(body, sys_flag, size + 1, is_whole=False)
    return plain[:size], len(plain) <= size


def _inflated(body: bytes, sys_flag: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    """Up to so many bytes, and whether the stream ends with them."""
    try:
        return _inflate(body, sys_flag & SYS_COMPRESSION_MASK, size, is_whole=is_whole)
    except ModuleNotFoundError as missing:
        hint = f"the body is compressed, and {missing.name} is missing: pip install 'rocketlet[compression]'"
        raise MessageError(hint) from None
    except (zlib.error, RuntimeError, ValueError) as error:
        raise MessageError(f"the compressed body cannot be read: {error}") from None


def _inflate(body: bytes, kind: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    if kind == SYS_COMPRESSION_LZ4:
        import lz4.frame

        lz4_frame = lz4.frame.LZ4FrameDecompressor()
        return lz4_frame.decompress(body, size), lz4_frame.eof
    if kind == SYS_COMPRESSION_ZSTD:
        return _from_zstd(body, size) if is_whole else _begin_of_zstd(body, size)
    stream = zlib.decompressobj()
    return stream.decompress(body, size), stream.eof


def _from_zstd(body: bytes, size: int) -> tuple[bytes, bool]:
    import zstandard

    try:
        if zstandard.frame_content_size(body) >= size:
            return b"", False
        return zstandard.ZstdDecompressor().decompress(body, size), True
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _begin_of_zstd(body: bytes, size: int) -> tuple[bytes, bool]:
    import zstandard

    try:
        stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).stream_reader(body)
        plain = stream.read(size)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    return plain, len(plain) < size
