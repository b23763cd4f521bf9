"""Frames of the remoting protocol, and the reader that splits a byte stream into frames.

    int32 total | 1 byte serialize type, 3 bytes header length | header | body

`total` is the number of bytes after itself. The serialize type belongs to the frame, not to the connection: a response
has the type of its request. JSON and ROCKETMQ are Apache's types. MSGPACK is Rocketlet's type: its header is an array
`[code, flag, opaque, language, version, remark, ext]` whose `ext` values keep their types, so that numbers need no
parsing. Values of `ext` are therefore `str | int | bool` in received MSGPACK frames and `str` in the others; `headers.py`
reads both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import Annotated, Any, Final, NamedTuple

import msgpack
import msgspec
import orjson

from .codes import ONEWAY_FLAG, RESPONSE_FLAG, VERSION, Language, SerializeType
from .config import (
    MAX_BINARY_CODE,
    MAX_FRAME_BYTES,
    MAX_KEY_CHARS,
    MAX_LAYOUT_BYTES,
    MAX_LAYOUT_FIELDS,
    MAX_LAYOUTS,
)

JSON: Final = int(SerializeType.JSON)
ROCKETMQ: Final = int(SerializeType.ROCKETMQ)
MSGPACK: Final = int(SerializeType.MSGPACK)
_MSGPACK_MARK: Final = MSGPACK << 24

UNREADABLE: Final = -0x8000_0000  # code of a frame whose fields cannot be read; its remark has the reason

ExtValue = str | int | bool
Ext = Mapping[str, ExtValue]

_PREFIX: Final = Struct(">II")
_BINARY_HEAD: Final = Struct(">hBhiii")
_SHORT: Final = Struct(">h")
_INT: Final = Struct(">i")
_LANGUAGE_NAMES: Final = {language.value: language.name for language in Language}
_LANGUAGE_CODES: Final[dict[object, int]] = {
    **{language.name: language.value for language in Language},
    **{code: code for code in range(0x100)},
}
_PYTHON: Final = int(Language.PYTHON)
_OTHER: Final = int(Language.OTHER)  # constants, because the lookup of an enum member takes 0.2 us in Python 3.11

_prefix_at = _PREFIX.unpack_from
# raises struct.error for numbers out of range, in a third of the time of comparisons
_check_numbers = Struct("iiiBi").pack
_new_tuple = tuple.__new__
_packb = msgpack.Packer(use_bin_type=True).pack
# msgspec decodes and checks the values in less time than msgpack needs to decode them.
_decode_header = msgspec.msgpack.Decoder(tuple[int, int, int, int, int, str | None, dict[str, ExtValue]]).decode


class FrameError(ValueError):
    """The error for bytes that are not a frame, after which the connection must be closed."""


class Frame(NamedTuple):
    """A request or a response. `language` and `version` describe the sender; `ext` and `body` are never None."""

    code: int
    opaque: int = 0
    ext: Ext = {}
    body: bytes = b""
    flag: int = 0
    remark: str | None = None
    language: int = _PYTHON
    version: int = VERSION
    serialize_type: int = JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)


def _encode_json(frame: Frame) -> bytes:
    code, opaque, ext, _, flag, remark, language, version, _ = frame
    header: dict[str, Any] = {
        "code": code,
        "extFields": {key: text_of(value) for key, value in ext.items()},
        "flag": flag,
        "language": _LANGUAGE_NAMES.get(language, "OTHER"),
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": version,
    }
    if remark is not None:
        header["remark"] = remark
    try:
        return orjson.dumps(header)
    except orjson.JSONEncodeError:
        for text in (*header["extFields"], *header["extFields"].values(), remark or ""):
            text.encode()  # raises UnicodeEncodeError, as in the other encodings
        raise


def text_of(value: ExtValue) -> str:
    if type(value) is int:
        return str(value)
    if value is True:
        return "true"
    if value is False:
        return "false"
    return value if isinstance(value, str) else str(value)


def _long_binary_key(key: str) -> bytes:
    name = key.encode()
    return _SHORT.pack(len(name)) + name


_binary_key = lru_cache(MAX_LAYOUTS)(_long_binary_key)


def _encode_binary(frame: Frame) -> bytes:
    remark = (frame.remark or "").encode()
    fields: list[bytes] = []
    for key, value in frame.ext.items():
        text = text_of(value).encode()
        # long keys are not cached; peers choose keys of responses
        name = _binary_key(key) if len(key) <= MAX_KEY_CHARS else _long_binary_key(key)
        fields += name, _INT.pack(len(text)), text
    ext = b"".join(fields)
    head = _BINARY_HEAD.pack(frame.code, frame.language, frame.version, frame.opaque, frame.flag, len(remark))
    return b"".join((head, remark, _INT.pack(len(ext)), ext))


def _encode_msgpack(frame: Frame) -> bytes:
    code, opaque, ext, _, flag, remark, language, version, _ = frame
    packed: bytes = _packb((code, flag, opaque, language, version, remark, ext))
    return packed


_ENCODERS: Final = {JSON: _encode_json, ROCKETMQ: _encode_binary, MSGPACK: _encode_msgpack}


def encode(frame: Frame) -> bytes:
    """Encode a frame by its serialize type. A ROCKETMQ header has only two bytes for the code, so a frame with a larger
    code is encoded as JSON. Raises UnicodeEncodeError for a text that UTF-8 cannot encode."""
    body = frame.body
    prefix, header = _head(frame, len(body))
    return b"".join((prefix, header, body))


def encode_msgpack(code: int, flag: int, opaque: int, language: int, ext: Ext, body: bytes = b"") -> bytes:
    """Return the bytes that `encode` returns for a MessagePack frame without a remark. No Frame is built, because this
    runs once per message."""
    header: bytes = _packb((code, flag, opaque, language, VERSION, None, ext))
    size = len(header)
    return b"".join((_PREFIX.pack(4 + size + len(body), _MSGPACK_MARK | size), header, body))


def encode_msgpack_head(code: int, flag: int, opaque: int, language: int, ext: Ext, body_bytes: int) -> bytes:
    """Return the bytes of the same frame before its body, so that a large body need not be copied."""
    header: bytes = _packb((code, flag, opaque, language, VERSION, None, ext))
    size = len(header)
    return _PREFIX.pack(4 + size + body_bytes, _MSGPACK_MARK | size) + header


def encode_head(frame: Frame, body_bytes: int) -> bytes:
    """Return the bytes of a frame before its body, so that a large body need not be copied."""
    return b"".join(_head(frame, body_bytes))


def _head(frame: Frame, body_bytes: int) -> tuple[bytes, bytes]:
    kind = frame.serialize_type
    if kind == ROCKETMQ and frame.code > MAX_BINARY_CODE:
        kind = JSON
    header = _ENCODERS[kind](frame)
    size = len(header)
    return _PREFIX.pack(4 + size + body_bytes, kind << 24 | size), header


_Int32 = Annotated[int, msgspec.Meta(ge=-0x8000_0000, le=0x7FFF_FFFF)]


class _JsonHeader(msgspec.Struct, rename={"ext": "extFields"}):
    """A header as Apache's clients encode it."""

    code: _Int32
    ext: dict[str, str] | None = None
    flag: _Int32 = 0
    language: str | int = ""
    opaque: _Int32 = 0
    remark: str | None = None
    version: _Int32 = 0


_decode_usual_json = msgspec.json.Decoder(_JsonHeader).decode


def _decode_json(header: bytes, body: bytes) -> Frame:
    try:
        found = _decode_usual_json(header)
    except (ValueError, RecursionError):  # msgspec raises subclasses of ValueError
        return _decode_any_json(header, body)
    language = _LANGUAGE_CODES.get(found.language, _OTHER)
    code, opaque, flag, remark, version = found.code, found.opaque, found.flag, found.remark, found.version
    return _new_tuple(Frame, (code, opaque, found.ext or {}, body, flag, remark, language, version, JSON))


def _decode_any_json(header: bytes, body: bytes) -> Frame:
    """Decode a JSON header that deviates from the usual types, as Apache's broker does (RemotingSerializable).

    Texts and numbers are converted, null stands for a missing field, and bytes that are not UTF-8 become U+FFFD.
    """
    try:
        fields, fault = _loads(header)
        find = fields.get
        numbers = fields["code"], find("opaque", 0), find("flag", 0), find("version", 0)
        code, opaque, flag, version = map(_as_int32, numbers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FrameError(f"JSON header cannot be read: {error!r}") from None
    language = find("language")
    language = _LANGUAGE_CODES.get(language, _OTHER) if isinstance(language, str | int) else _OTHER
    ext: Ext = {}
    try:
        remark = None if find("remark") is None else _clean(find("remark"))
        ext = {_clean(key): _clean(value) for key, value in (find("extFields") or {}).items() if value is not None}
    except (AttributeError, RecursionError) as error:
        fault = repr(error)
    if fault:
        code, remark = UNREADABLE, f"the fields of the header cannot be read: {fault}"
    return _new_tuple(Frame, (code, opaque, ext, body, flag, remark, language, version, JSON))


_NUMBERS: Final = re.compile(rb'"(code|opaque|flag)"\s{0,9}:\s{0,9}(-?\d{1,10})(?=\s{0,9}[,}])')


def _loads(header: bytes) -> tuple[dict[str, Any], str]:
    """Return the fields of a header and an empty text. If the header is not valid JSON, return only the fields that
    identify the request, and the reason.

    Raises ValueError if these fields cannot be found either.
    """
    try:
        return orjson.loads(header), ""
    except ValueError:
        pass
    try:
        return json.loads(header.decode(errors="replace"), strict=False), ""
    except (ValueError, RecursionError) as error:
        fields = {name.decode(): number.decode() for name, number in _NUMBERS.findall(header)}
        if "opaque" not in fields:
            raise ValueError(str(error)) from None
        return fields, str(error)


def _clean(value: Any) -> str:
    """Return a text as Java encodes it: lone surrogates become question marks."""
    text = text_of(value)
    return text if text.isascii() else text.encode(errors="replace").decode()


def _as_int32(value: object) -> int:
    """Return a number of a header, which is a Java int. Raises ValueError for a larger one, which would not fit into
    the response."""
    number = value if type(value) is int else int(value) if isinstance(value, int | str) else None
    if number is None or not -0x8000_0000 <= number <= 0x7FFF_FFFF:
        raise ValueError(f"{str(value)[:40]!r} is not a number of 32 bits")
    return number


def _decode_binary(header: bytes, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_HEAD.unpack_from(header)
    except StructError as error:
        raise FrameError(f"ROCKETMQ header cannot be read: {error}") from None
    ext: Ext = {}
    try:
        position = _BINARY_HEAD.size
        remark = _text(_slice(header, position, remark_size)) if remark_size else None
        position += remark_size
        (ext_size,) = _INT.unpack_from(header, position)
        ext = _decode_binary_ext(_slice(header, position + 4, ext_size)) if ext_size else {}
    except (ValueError, StructError) as error:
        code, remark = UNREADABLE, f"the fields of the header cannot be read: {error}"
    return _new_tuple(Frame, (code, opaque, ext, body, flag, remark, language, version, ROCKETMQ))


def _slice(data: bytes, position: int, size: int) -> bytes:
    if size < 0 or position + size > len(data):
        raise ValueError(f"length {size} at byte {position} exceeds the header")
    return data[position : position + size]


def _text(data: bytes) -> str:
    """Decode a text as Apache's broker does (RocketMQSerializable): bytes that are not UTF-8 become U+FFFD."""
    return data.decode(errors="replace")


def _decode_binary_ext(block: bytes) -> dict[str, ExtValue]:
    """Decode the extension fields of a ROCKETMQ header.

    Requests of one client mostly differ only in the values of their fields, so a block with a known layout is split in
    one step.
    """
    layout = _layouts.get(len(block))
    if layout is not None:
        cut, marks, keys = layout
        parts = cut(block)
        if parts[::2] == marks:
            try:
                return dict(zip(keys, map(bytes.decode, parts[1::2]), strict=True))
            except UnicodeDecodeError:
                return dict(zip(keys, map(_text, parts[1::2]), strict=True))
    ext, ends = _scan_ext(block)
    if layout is None and 0 < len(ends) <= MAX_LAYOUT_FIELDS and len(ext) == len(ends):
        if sum(map(len, ext)) > MAX_LAYOUT_BYTES:
            return ext
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        _layouts[len(block)] = _layout_of(block, list(ext), ends)
    return ext


_Layout = tuple[Callable[[bytes], tuple[bytes, ...]], tuple[bytes, ...], list[str]]
_layouts: Final[dict[int, _Layout]] = {}  # layouts by the size of the block


def _layout_of(block: bytes, keys: list[str], ends: list[tuple[int, int]]) -> _Layout:
    """Return the layout of a block: a function that splits it into alternating marks and values, the marks, and the
    keys. A mark consists of the sizes and the key of one field."""
    begins = [0, *(after for _, after in ends)]
    sizes = (f"{begin - mark_at}s{after - begin}s" for mark_at, (begin, after) in zip(begins, ends, strict=False))
    cut = Struct("".join(sizes)).unpack
    return cut, cut(block)[::2], keys


def _scan_ext(block: bytes) -> tuple[dict[str, ExtValue], list[tuple[int, int]]]:
    """Return the fields, and the start and end of each value. Raises ValueError, StructError."""
    ext: dict[str, ExtValue] = {}
    ends: list[tuple[int, int]] = []
    position, end = 0, len(block)
    while position < end:
        (size,) = _SHORT.unpack_from(block, position)
        key = _slice(block, position + 2, size)
        begin = position + 6 + size
        (value_size,) = _INT.unpack_from(block, begin - 4)
        position = begin + value_size
        if value_size < 0 or position > end:
            raise ValueError(f"length {value_size} at byte {begin} exceeds the header")
        if key and value_size:  # a Java decoder reads an empty key or value as null, and ignores the field
            ext[_text(key)] = _text(block[begin:position])
        ends.append((begin, position))
    return ext, ends


def _decode_msgpack(header: bytes, body: bytes) -> Frame:
    try:
        code, flag, opaque, language, version, remark, ext = _decode_header(header)
        _check_numbers(code, flag, opaque, language, version)
    except (ValueError, StructError) as error:  # msgspec raises subclasses of ValueError
        raise FrameError(f"MessagePack header cannot be read: {error!r}") from None
    return _new_tuple(Frame, (code, opaque, ext, body, flag, remark, language, version, MSGPACK))


_DECODERS: Final = {JSON: _decode_json, ROCKETMQ: _decode_binary, MSGPACK: _decode_msgpack}


class FrameReader:
    """Splits the bytes of a socket into frames. The reader keeps at most one incomplete frame (up to 16 MiB)."""

    __slots__ = ("_max_header_bytes", "_needed", "waiting")

    def __init__(self, max_header_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_header_bytes = max_header_bytes
        self.waiting = bytearray()  # start of an incomplete frame
        self._needed = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes, in order. Raises FrameError; the reader must not be used after that."""
        frames: list[Frame] = []
        position, end = 0, len(data)
        if self.waiting:
            missing = self._needed - len(self.waiting)
            if end < missing:
                self.waiting += data
                return frames
            if self._has_header:
                frames.append(self._completed(memoryview(data)[:missing]))
                position = missing
            else:
                data = b"".join((self.waiting, data))
                end = len(data)
                self.waiting = bytearray()
        while end - position >= 8:
            total, mark = _prefix_at(data, position)
            if total < 4 or total > MAX_FRAME_BYTES - 4:
                raise _bad_size(total + 4)
            begin = position + 8
            after = position + 4 + total
            if after > end:
                self._needed = total + 4
                break
            body_at = begin + (mark & 0xFFFFFF)
            decode = _DECODERS.get(mark >> 24)
            if decode is None or body_at > after or body_at - begin > self._max_header_bytes:
                raise _bad_header(mark, total + 4, self._max_header_bytes)
            frames.append(decode(data[begin:body_at], data[body_at:after]))
            position = after
        else:
            if position == end:
                return frames
            self._needed = 8
            if end - position >= 4:  # reject an invalid size before waiting for more bytes
                self._needed = int.from_bytes(data[position : position + 4], "big") + 4
                if self._needed < 8 or self._needed > MAX_FRAME_BYTES:
                    raise _bad_size(self._needed)
        self.waiting += memoryview(data)[position:] if position else data
        return frames

    @property
    def _has_header(self) -> bool:
        """True if the incomplete frame has its whole header."""
        return len(self.waiting) >= 8 and len(self.waiting) >= 8 + (_prefix_at(self.waiting)[1] & 0xFFFFFF)

    def _completed(self, rest: memoryview) -> Frame:
        """Return the incomplete frame, now that the rest of it has arrived.

        Only the body is joined, and bytes after the frame are not copied. Joining everything and splitting it again
        takes up to three times as long for large bodies.
        """
        waiting, self.waiting = self.waiting, bytearray()
        total, mark = _prefix_at(waiting)
        body_at = 8 + (mark & 0xFFFFFF)
        decode = _DECODERS.get(mark >> 24)
        if decode is None or body_at > total + 4 or body_at - 8 > self._max_header_bytes:
            raise _bad_header(mark, total + 4, self._max_header_bytes)
        return decode(bytes(waiting[8:body_at]), b"".join((memoryview(waiting)[body_at:], rest)))


class FrameCursor:
    """Received bytes of a socket and a position in them. Each frame is decoded only when it is processed.

    `at` is the position of the next frame in `data`, which is empty when all frames were processed. At most one incomplete
    frame (up to 16 MiB) is kept, in `waiting`.

    Args:
        max_header_bytes: maximum header size
    """

    __slots__ = ("_max_header_bytes", "_needed", "at", "data", "waiting")

    def __init__(self, max_header_bytes: int) -> None:
        self._max_header_bytes = max_header_bytes
        self.clear()

    def clear(self) -> None:
        """Drop all bytes."""
        self.data = b""
        self.at = self._needed = 0
        self.waiting = bytearray()  # an incomplete frame, when `data` has no other bytes

    def feed(self, data: bytes) -> bool:
        """Append bytes of the socket. Return `has_frame`."""
        if self.waiting:
            self.waiting += data
            if len(self.waiting) < self._needed:
                return self.has_frame
            data, self.waiting = bytes(self.waiting), bytearray()
        if self.data:
            data = b"".join((memoryview(self.data)[self.at :], data))
        self.data, self.at = data, 0
        if self.has_frame:
            return True
        self._needed = max(self._size, 8) if len(data) >= 4 else 8
        self.data, self.waiting = b"", bytearray(data)
        return False

    def put_back(self, data: bytes) -> None:
        """Put bytes in front of the next frame."""
        self.data, self.at = data + self.data[self.at :], 0

    @property
    def has_frame(self) -> bool:
        """True if the bytes contain a whole frame, or cannot be the start of a frame."""
        rest = len(self.data) - self.at
        if rest < 4:
            return False
        size = int.from_bytes(self.data[self.at : self.at + 4], "big") + 4
        return size <= rest or not 8 <= size <= MAX_FRAME_BYTES

    @property
    def has_several(self) -> bool:
        """True if bytes follow the next frame."""
        return len(self.data) - self.at > self._size

    @property
    def _size(self) -> int:
        """The size of the next frame, of which at least four bytes were received."""
        return int.from_bytes(self.data[self.at : self.at + 4], "big") + 4

    @property
    def held_bytes(self) -> int:
        return len(self.data) + len(self.waiting)

    def skip_to(self, at: int) -> None:
        """Continue at a position of the data, because the frames before it were processed."""
        self.data, self.at = (self.data, at) if at < len(self.data) else (b"", 0)

    def next(self) -> Frame | None:
        """Return the next frame; None if there is no whole one. Raises FrameError for bytes that are not a frame."""
        data, at = self.data, self.at
        rest = len(data) - at
        if rest >= 8:
            total, mark = _prefix_at(data, at)
            if not 4 <= total <= MAX_FRAME_BYTES - 4:
                raise _bad_size(total + 4)
            if total <= rest - 4:
                body_at, after = at + 8 + (mark & 0xFFFFFF), at + 4 + total
                decode = _DECODERS.get(mark >> 24)
                if decode is None or body_at > after or body_at - at - 8 > self._max_header_bytes:
                    raise _bad_header(mark, total + 4, self._max_header_bytes)
                if total == rest - 4:
                    self.data, self.at = b"", 0
                else:
                    self.at = after
                return decode(data[at + 8 : body_at], data[body_at:after])
        elif rest and self.has_frame:
            raise _bad_size(self._size)
        self.data, self.at = data[at:], 0  # drop the bytes of earlier frames
        return None


def _bad_header(mark: int, size: int, max_header_bytes: int) -> FrameError:
    return FrameError(
        f"serialize type {mark >> 24}, header of {mark & 0xFFFFFF} bytes in a frame of {size} bytes; expected type 0, 1 "
        f"or {MSGPACK}, and a header of up to {max_header_bytes} bytes"
    )


def _bad_size(needed: int) -> FrameError:
    return FrameError(f"frame of {needed} bytes; expected 8 to {MAX_FRAME_BYTES}")
