"""A body as text, JSON, MessagePack and hex. A message may hold anything: nothing here trusts it."""

from __future__ import annotations

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
    """One way to show a body; `cut` says how much of it is not shown, empty if nothing."""

    name: str
    text: str
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Body:
    """`forms` has the best one first. `note`: how it was compressed, or why it cannot be read."""

    size_bytes: int
    forms: tuple[BodyForm, ...]
    note: str = ""


def body_of(message: Message) -> Body:
    stored = message.record.body
    flag = message.record.sys_flag
    note = ""
    try:
        plain = message.body
    except MessageError as error:
        return Body(len(stored), (_hex(stored),), str(error))
    if flag & SYS_COMPRESSED:
        method = _METHODS.get(flag & SYS_COMPRESSION_MASK, "zlib")
        note = f"compressed with {method}: {size(len(stored))} stored, {size(len(plain))} when decompressed"
    forms = [form for form in (_json(plain), _message_pack(plain), _text(plain)) if form]
    return Body(len(plain), (*forms, _hex(plain)), note)


def preview(message: Message) -> str:
    """The begin of a body in one line."""
    try:
        data = message.body[: PREVIEW_CHARS * 4]
    except MessageError:
        return "(compressed, cannot be read)"
    text = data.decode(errors="replace")
    if "�" in text[:PREVIEW_CHARS]:
        return "hex " + data[: PREVIEW_CHARS // 4].hex(" ")
    line = visible(text.replace("\n", "⏎").replace("\t", " "))
    return line if len(line) <= PREVIEW_CHARS else line[:PREVIEW_CHARS] + "…"


def _text(body: bytes) -> BodyForm | None:
    try:
        whole = body.decode()
    except ValueError:
        return None
    return _cut("text", whole)


def _json(body: bytes) -> BodyForm | None:
    if body[:1] not in (b"{", b"[") or len(body) > SHOWN_BODY_BYTES:
        return None
    try:
        return _cut("JSON", json.dumps(json.loads(body), indent=2, ensure_ascii=False))
    except (ValueError, RecursionError):
        return None


def _message_pack(body: bytes) -> BodyForm | None:
    """Maps and arrays only: any byte below 128 is a number in MessagePack."""
    if not body or len(body) > SHOWN_BODY_BYTES:
        return None
    try:
        value = msgpack.unpackb(body, strict_map_key=False)
        if not isinstance(value, dict | list):
            return None
        return _cut("MessagePack", json.dumps(_plain(value), indent=2, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None


def _plain(value: Any) -> Any:
    """What JSON can say: bytes as hex, other keys and values as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return f"hex {value.hex(' ')}"
    return value if isinstance(value, str | int | float | None) else repr(value)


def _hex(body: bytes) -> BodyForm:
    lines = []
    for begin in range(0, min(len(body), SHOWN_HEX_BYTES), 16):
        part = body[begin : begin + 16]
        printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{begin:06x}  {part.hex(' '):<47}  {printable}")
    rest = len(body) - SHOWN_HEX_BYTES
    return BodyForm("hex", "\n".join(lines), f"{size(rest)} more" if rest > 0 else "")


def _cut(name: str, whole: str) -> BodyForm:
    rest = len(whole) - SHOWN_BODY_BYTES
    return BodyForm(name, whole[:SHOWN_BODY_BYTES], f"{rest:,} more characters" if rest > 0 else "")
