"""A body as text, JSON, MessagePack and hex. Bodies are untrusted input."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from ..client.message import Message
from ..protocol.codes import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZSTD,
)
from ..protocol.message import MessageError
from .config import PREVIEW_CHARS, SHOWN_BODY_BYTES, SHOWN_HEX_BYTES
from .text import size, visible

_METHODS: Final = {SYS_COMPRESSION_LZ4: "LZ4", SYS_COMPRESSION_ZSTD: "Zstandard"}


@dataclass(frozen=True, slots=True)
class BodyForm:
    """A body in one format. `cut` is a text about the part that is not shown; empty if all is shown."""

    name: str
    text: str
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Body:
    """A body for a page. `forms` has the best format first. `size_bytes` is the decompressed size, or the stored size if
    the body is not decompressed to its end. `note` is a text about the compression, or about why the body is unreadable."""

    size_bytes: int
    forms: tuple[BodyForm, ...]
    note: str = ""


def body_of(message: Message) -> Body:
    """Return the part of a body that a page shows, decompressing at most SHOWN_BODY_BYTES of it."""
    stored, flag = message.record.body, message.record.sys_flag
    try:
        plain, is_all = message.body_begin(SHOWN_BODY_BYTES)
    except MessageError as error:
        return Body(len(stored), (_hex(stored, len(stored)),), str(error))
    total: int | None = len(plain) if is_all else len(stored)
    note = ""
    if flag & SYS_COMPRESSED:
        method = _METHODS.get(flag & SYS_COMPRESSION_MASK, "zlib")
        more = "" if is_all else "more than "
        note = f"compressed with {method}: {size(len(stored))} stored, {more}{size(len(plain))} when decompressed"
        total = len(plain) if is_all else None
    structured = (_json(plain), _message_pack(plain)) if is_all else ()
    forms = [form for form in (*structured, _text(plain, total)) if form]
    return Body(len(stored) if total is None else total, (*forms, _hex(plain, total)), note)


def preview(message: Message) -> str:
    """Return the start of a body in one line, as text or as hex digits."""
    try:
        data, _ = message.body_begin(PREVIEW_CHARS * 4)
    except MessageError:
        return "(compressed, cannot be read)"
    text = data.decode(errors="replace")
    if "�" in text[:PREVIEW_CHARS]:
        return "hex " + data[: PREVIEW_CHARS // 4].hex(" ")
    line = visible(text.replace("\n", "⏎").replace("\t", " "))
    return line if len(line) <= PREVIEW_CHARS else line[:PREVIEW_CHARS] + "…"


def _text(begin: bytes, total: int | None) -> BodyForm | None:
    """Return the body as text; None if `begin` is not UTF-8. `total` is the size of the whole body in bytes; None if
    unknown."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(begin, final=total == len(begin))  # otherwise a character may be cut in two
    except ValueError:
        return None
    return BodyForm("text", text, _rest(len(begin), total))


def _json(body: bytes) -> BodyForm | None:
    if body[:1] not in (b"{", b"["):
        return None
    try:
        return _indented("JSON", json.loads(body))
    except (ValueError, RecursionError):
        return None


def _message_pack(body: bytes) -> BodyForm | None:
    """Return the body as MessagePack; None if it is not a map or an array, because bytes below 128 are numbers in it."""
    if not body:
        return None
    try:
        value = msgpack.unpackb(body, strict_map_key=False)
        if not isinstance(value, dict | list):
            return None
        return _indented("MessagePack", _plain(value))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None


def _plain(value: Any) -> Any:
    """Return a value in JSON's types, with bytes as hex, and with `repr` of keys and values of other types."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return f"hex {value.hex(' ')}"
    return value if isinstance(value, str | int | float | None) else repr(value)


def _indented(name: str, value: Any) -> BodyForm:
    """Return the indented text, cut at SHOWN_BODY_BYTES characters, because indentation may be most of a nested value."""
    parts: list[str] = []
    length = 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        length += len(part)
        if length > SHOWN_BODY_BYTES:
            return BodyForm(name, _encodable("".join(parts)[:SHOWN_BODY_BYTES]), "further lines")
    return BodyForm(name, _encodable("".join(parts)))


def _encodable(text: str) -> str:
    """Return a text with lone surrogates, which JSON allows and pages do not, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _hex(begin: bytes, total: int | None) -> BodyForm:
    shown = begin[:SHOWN_HEX_BYTES]
    lines = []
    for at in range(0, len(shown), 16):
        part = shown[at : at + 16]
        printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:06x}  {part.hex(' '):<47}  {printable}")
    return BodyForm("hex", "\n".join(lines), _rest(len(shown), total))


def _rest(shown: int, total: int | None) -> str:
    if total is None:
        return f"bytes beyond {size(shown)}"
    return f"{size(total - shown)} more" if total > shown else ""
