"""Formats frames for people and programs, for `rocketlet dump`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from ...protocol import message, properties
from ...protocol.codes import ONEWAY_FLAG, SYS_COMPRESSED, RequestCode, code_name, request_name
from ...protocol.frame import Frame
from ...protocol.headers import HeaderError, read_send_v2
from ...protocol.message import begin_of
from ..config import MAX_INFLATED_BYTES, MAX_INFLATED_OF_FRAME

SHOWN_CHARACTERS: Final = 200
MARGIN: Final = "    "
_SENDS_V2: Final = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_PULLS: Final = (
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.QUERY_MESSAGE,
    RequestCode.VIEW_MESSAGE_BY_ID,
)


_USERS: Final = (RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_UPDATE_USER)
_PASSWORD: Final = re.compile(r'("password"\s*:\s*)"(?:[^"\\]|\\.)*"')
_SECRET: Final = "secretKey"  # in UPDATE_AND_CREATE_ACL_CONFIG
_HIDDEN: Final = "***"


def text_of(data: bytes) -> str:
    """Return UTF-8 bytes as text, in JSON quotes if a character is not printable; other bytes as hex digits."""
    try:
        text = data.decode()
    except ValueError:
        return "hex:" + data.hex()
    return text if text.isprintable() else orjson.dumps(text).decode()


def fields(frame: Frame, asked: int | None, inflated_bytes: int = MAX_INFLATED_BYTES) -> dict[str, Any]:
    """Return a frame as values for JSON.

    Args:
        asked: the code of the request to which the frame responds; None if the frame is a request.
        inflated_bytes: the maximum number of decompressed bytes of each message's body.
    """
    found: dict[str, Any] = {
        "request": request_name(frame.code if asked is None else asked).partition(" ")[0],
        "opaque": frame.opaque,
        "header": _header(frame, asked),
    }
    if asked is None:
        found["oneway"] = bool(frame.flag & ONEWAY_FLAG)
    else:
        found |= {"response": frame.code, "remark": frame.remark}
    messages = list(_messages(frame, asked, inflated_bytes))
    if messages:
        found["messages"] = messages
    elif frame.body:
        text = text_of(frame.body)
        found["body"] = _PASSWORD.sub(rf'\1"{_HIDDEN}"', text) if asked is None and frame.code in _USERS else text
    return found


def lines(frame: Frame, asked: int | None) -> Iterator[str]:
    """Return the lines of a frame for people: a summary, then its header, then its body or messages."""
    found = fields(frame, asked, 4 * SHOWN_CHARACTERS)
    header = " ".join(f"{name}={_short(str(value))}" for name, value in found["header"].items())
    if asked is None:
        oneway = " one-way" if found["oneway"] else ""
        yield f"{request_name(frame.code)} #{frame.opaque}{oneway}"
    else:
        remark = f": {_short(frame.remark)}" if frame.remark else ""
        yield f"{found['request']} #{frame.opaque} {code_name(frame.code)}{remark}"
    if header:
        yield MARGIN + header
    for each in found.get("messages", ()):
        texts = {"tag": each["tag"], "keys": " ".join(each["keys"]), "reconsume_times": each["reconsume_times"]}
        said = [f"{name}={_short(str(value))}" for name, value in texts.items() if value]
        place = f"{_short(each['topic'])}:{each['queue']} at {each['offset']}"
        yield MARGIN + " ".join([place, *said, _short(each["body"])])
    if "body" in found:
        yield MARGIN + _short(found["body"])


def _short(text: str) -> str:
    shown = text if text.isprintable() else orjson.dumps(text).decode()
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}... ({len(shown)} characters)"


def _header(frame: Frame, asked: int | None) -> dict[str, Any]:
    """Return the header fields with their full names, because SEND_MESSAGE_V2 has single letters, and without secrets."""
    if asked is None and frame.code in _SENDS_V2:
        try:
            header = read_send_v2(frame.ext)._asdict()
        except HeaderError:
            return dict(frame.ext)
        return header | {"properties": properties.decode(header["properties"])}
    return dict(frame.ext) | ({_SECRET: _HIDDEN} if _SECRET in frame.ext else {})


def _messages(frame: Frame, asked: int | None, inflated_bytes: int) -> Iterator[dict[str, Any]]:
    """Iterate over the messages in the response to a pull or a query; none if its body cannot be decoded."""
    if asked not in _PULLS or frame.code or not frame.body:
        return
    try:
        records = list(message.decode_records(frame.body))
    except message.MessageError:
        return
    room = MAX_INFLATED_OF_FRAME
    for record in records:
        named = properties.decode(record.properties)
        body = body_fields(record, min(inflated_bytes, max(room, 0)))
        room -= len(body["body"]) if record.sys_flag & SYS_COMPRESSED else 0
        yield {
            "topic": record.topic,
            "queue": record.queue_id,
            "offset": record.queue_offset,
            "tag": named.get(properties.TAGS),
            "keys": named.get(properties.KEYS, "").split(),
            "reconsume_times": record.reconsume_times,
            **body,
        }


def body_fields(record: message.Record, inflated_bytes: int = MAX_INFLATED_BYTES) -> dict[str, Any]:
    """Return the body as text. At most `inflated_bytes` of a compressed body are decompressed; `body_is_cut` is True if it
    has more. A body that cannot be decompressed is returned as it is stored."""
    if not record.sys_flag & SYS_COMPRESSED:
        return {"body": text_of(record.body)}
    try:
        plain, is_all = begin_of(record.body, record.sys_flag, inflated_bytes)
    except message.MessageError:
        return {"body": text_of(record.body)}
    return {"body": text_of(plain)} if is_all else {"body": _begin_text(plain), "body_is_cut": True}


def _begin_text(begin: bytes) -> str:
    """Return bytes as `text_of` does. The bytes may end within a character."""
    whole = codecs.getincrementaldecoder("utf-8")()
    try:
        return text_of(whole.decode(begin).encode())
    except ValueError:
        return text_of(begin)
