"""How bodies are compressed. The sender chooses, and the sys flag says how; brokers never touch it.

Ours send zlib, as Apache's 4.9. LZ4 and Zstandard come from other senders; their libraries are an extra, loaded when needed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator
from typing import Final

from .codes import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZLIB,
    SYS_COMPRESSION_ZSTD,
)
from .config import GZIP_MEMBER_BYTES, INFLATED_PIECE_BYTES, MAX_DECOMPRESSED_BYTES
from .message import MessageError
from .work import Work

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


class SpentTooMuch(Exception):
    """The bodies of one request need more work than it may cause."""


class Inflater:
    """Decompresses the bodies of one request, a piece at a time.

    `spent_bytes` counts the bytes that came out, even if their body then turns out to be damaged or too large, and
    `GZIP_MEMBER_BYTES` for each gzip member. So a body costs its request the same whether it can be read or not.
    """

    def __init__(self, most_spent: float = math.inf) -> None:
        self._most_spent = most_spent
        self.spent_bytes = 0

    def inflating(self, body: bytes, sys_flag: int, most: int) -> Work[bytes]:
        """Return the body as the producer had it.

        Raises:
            MessageError: The body cannot be read, or has more than `most` bytes.
            SpentTooMuch: The work for all bodies is more than `most_spent`.
        """
        if sys_flag & SYS_COMPRESSION_MASK not in (SYS_COMPRESSION_LZ4, SYS_COMPRESSION_ZSTD):
            return self._all(_stream(body, 0, zlib.MAX_WBITS), most)
        return self._all(self._at_once(body, sys_flag, most), most)

    def inflating_gzip(self, body: bytes, most: int) -> Work[bytes]:
        """Like `inflating`, for gzip, which may consist of several members."""
        return self._all(self._members(body), most)

    def _all(self, pieces: Iterator[bytes], most: int) -> Work[bytes]:
        found: list[bytes] = []
        size = 0
        try:
            for piece in pieces:
                found.append(piece)
                size += len(piece)
                self._spend(len(piece))
                if size > most:
                    raise MessageError(f"the compressed body has more than {most} bytes")
                yield
        except (zlib.error, EOFError) as error:
            self._spend(INFLATED_PIECE_BYTES)  # nobody knows how much of the last piece was done
            raise MessageError(f"the compressed body cannot be read: {error}") from None
        return b"".join(found)

    def _spend(self, size: int) -> None:
        self.spent_bytes += size
        if self.spent_bytes > self._most_spent:
            raise SpentTooMuch

    def _members(self, body: bytes) -> Iterator[bytes]:
        position = 0
        while position < len(body) or not position:
            if position and not body[position] and not body[position:].strip(b"\0"):
                return  # padding, which RFC 1952 does not mention and all tools take
            self._spend(GZIP_MEMBER_BYTES)
            position = yield from _stream(body, position, zlib.MAX_WBITS + 16)

    def _at_once(self, body: bytes, sys_flag: int, most: int) -> Iterator[bytes]:
        """LZ4 and Zstandard are fast enough for one piece. If they fail, nobody knows how far they came."""
        try:
            yield decompressed(body, sys_flag, most)
        except MessageError:
            self._spend(most)
            raise


def _stream(body: bytes, position: int, wbits: int) -> Generator[bytes, None, int]:
    """The pieces of a stream of zlib or gzip, which begins at `position`; returns its end. Neither much data that becomes
    little nor little that becomes much takes long in one piece."""
    stream = zlib.decompressobj(wbits)
    data = piece = b""
    while not stream.eof:
        if not data and len(piece) < INFLATED_PIECE_BYTES:
            data = body[position : position + INFLATED_PIECE_BYTES]
            position += len(data)
            if not data:
                raise EOFError("it is cut off")
        piece = stream.decompress(data, INFLATED_PIECE_BYTES)
        data = stream.unconsumed_tail
        yield piece
    return position - len(stream.unused_data)
