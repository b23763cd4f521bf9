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


def compressed(body: bytes) -> tuple[bytes, int]:
    """The body as Apache's producers compress it (zlib), and the sys flag that says so."""
    return zlib.compress(body, ZLIB_LEVEL), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB


def decompressed(body: bytes, sys_flag: int) -> bytes:
    """The body as the producer had it. Raises MessageError if it cannot be read or exceeds 64 MiB."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    try:
        plain, ended = _inflate(body, sys_flag & SYS_COMPRESSION_MASK)
    except ModuleNotFoundError as missing:
        hint = f"the body is compressed, and {missing.name} is missing: pip install 'rocketlet[compression]'"
        raise MessageError(hint) from None
    except (zlib.error, RuntimeError, ValueError) as error:
        raise MessageError(f"the compressed body cannot be read: {error}") from None
    if not ended:
        raise MessageError(f"the compressed body is cut off, or has more than {MAX_DECOMPRESSED_BYTES} bytes")
    return plain


def _inflate(body: bytes, kind: int) -> tuple[bytes, bool]:
    if kind == SYS_COMPRESSION_LZ4:
        import lz4.frame

        lz4_frame = lz4.frame.LZ4FrameDecompressor()
        return lz4_frame.decompress(body, MAX_DECOMPRESSED_BYTES), lz4_frame.eof
    if kind == SYS_COMPRESSION_ZSTD:
        return _from_zstd(body)
    stream = zlib.decompressobj()
    return stream.decompress(body, MAX_DECOMPRESSED_BYTES), stream.eof


def _from_zstd(body: bytes) -> tuple[bytes, bool]:
    import zstandard

    try:
        if zstandard.frame_content_size(body) > MAX_DECOMPRESSED_BYTES:
            return b"", False
        return zstandard.ZstdDecompressor().decompress(body, MAX_DECOMPRESSED_BYTES), True
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
