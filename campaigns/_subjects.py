"""The subjects that `cost` measures: each takes bytes of an attacker, and does with them what a broker, console or command
does."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rocketlet.broker.messages.filters import FilterError, parse_filter
from rocketlet.client.message import Message
from rocketlet.command.tools.frames import body_fields
from rocketlet.console.message_text import body_of, preview
from rocketlet.protocol import bodies, group_bodies, properties
from rocketlet.protocol.bodies import BodyError, decode_registration, finish
from rocketlet.protocol.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB
from rocketlet.protocol.frame import FrameError, FrameReader
from rocketlet.protocol.message import (
    MessageError,
    Record,
    Shared,
    begin_of,
    decode_batch,
    decode_record,
    decode_records,
    encode_record,
    encode_records,
    split,
)
from rocketlet.protocol.names import IllegalName, Queue, SubscriptionError, parse_subscription

REFUSALS: Final = (FilterError, FrameError, MessageError, BodyError, SubscriptionError, IllegalName, UnicodeError)
"""How bytes that mean nothing are refused. Anything else that leaves a subject is a fault."""
MAX_TEXT_BYTES: Final = 32_000  # for properties and for expressions
MAX_BODY_BYTES: Final = 64_000

PIECES: Final = [  # that mean something to some parser
    b"(",
    b")",
    b"STRUCT(",
    b"NOT ",
    b"NOT (",
    b"CASE WHEN ",
    b"a = 1 OR ",
    b"a = 1 AND ",
    b"'x', ",
    b"a IN (",
    b"'",
    b"''",
    b'"',
    b"--",
    b"/*",
    b"a",
    b" ",
    b"\t",
    b"1",
    b"9",
    b"0x",
    b"0xf",
    b"0x1p",
    b".",
    b"1.",
    b"e1",
    b"-",
    b"+",
    b"||",
    b"A || ",
    b"*",
    b"$",
    b"_",
    b"\x01",
    b"\x02",
    b"a\x01b\x02",
    b"\x02\x03",
    b"KEYS\x01k",
    b"k",
    b"k ",
    b"TAGS\x01",
    b"DELAY\x01",
    b"UNIQ_KEY\x01k\x02",
    b"[",
    b"]",
    b"{",
    b"}",
    b'{"a":',
    b'"a":1,',
    b'"a",',
    b"{1:",
    b"x:",
    b",",
    b"\\",
    b"\\u00e9",
    b"null,",
    b"[1],",
    b"1e9,",
    b'{"groupName":"g"},',
    b'{"consumerDataSet":[',
    b'{"clientID":"c","consumerDataSet":[',
    b'{"mqSet":[',
    b'{"queueId":1},',
    b"\xda\xa3\x20\xa7",
    b"\0\0\1\0\xda\xa3\x20\xa7",
    b"\0",
    b"\xff",
    b"\x81",
    b"\x91",
    b"\xdc\xff\xff",
    b"\0\0\0\x17" + bytes(12),
    b"\0\0\0\x16" + bytes(18),
    "\u00e9".encode(),
    "\u0130".encode(),
    b"\n",
    b"\r\n",
    b"%",
    b"/",
    b":",
    b"=",
    b"<",
    b">",
]

_HOST = bytes(8)
_SHARED = Shared(b"\x01t", 0, 0, 0, _HOST, 0, _HOST, 0)
_FILTERS = [
    parse_filter(text) for text in ("a > 1.5", "a > 1", "a = TRUE", "a = 2.5", "a IN ('x', 'y')", "a BETWEEN 1 AND 2")
]
_INFLATED = 16 << 20


@dataclass(frozen=True, slots=True)
class Subject:
    """`run` takes the bytes, `most` of them. `pieces`: what means something to this one. `known`: begin, unit and
    end of inputs that were too much once."""

    run: Callable[[bytes], object]
    most: int
    pieces: Sequence[bytes] = ()
    known: Sequence[tuple[bytes, bytes, bytes]] = ()


_NUMBERS: Final = (b"1", b"9", b"0", b"0x", b"0x1p", b"0xf", b".", b"e1", b"-", b"+", b" ", b"\t", b"a", b"d", b"NaN")
_FILTER: Final = (
    b"(",
    b"NOT (",
    b"a = 1 OR ",
    b"a = 1 AND ",
    b"'x', ",
    b"a IN (",
    b"'",
    b"--",
    b"/*",
    b"1",
    b"1.",
    b"a",
    b" ",
    b"e",
)
_HARD_NUMBERS: Final = ((b"0x1p", b"9", b""), (b"", b"1", b"!"), (b"0x", b"f", b"!"))
_HARD_FILTERS: Final = ((b"", b"STRUCT(", b""), (b"a > ", b"1", b"a"), (b"", b"a = 1 OR ", b"a = 1"))
_PAIRS: Final = (b"a", b"\x01", b"\x02", b"a\x01b\x02", b"KEYS\x01", b"TAGS\x01", b"UNIQ_KEY\x01", b"\x02\x03")
_JSON: Final = (
    b"[",
    b"{",
    b"{1:",
    b'"',
    b'"a":',
    b",",
    b"1",
    b"-",
    b"x:",
    b"\\",
    b"null",
    b'{"clientID":"c","consumerDataSet":[',
)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _frame(kind: int, data: bytes) -> object:
    head = (kind << 24 | len(data)).to_bytes(4, "big") + data
    return FrameReader().feed(len(head).to_bytes(4, "big") + head)


def _values(data: bytes) -> object:
    text = "a\x01" + _text(data).replace("\x02", " ")
    return [found(text) for found in _FILTERS]


def _names(data: bytes) -> object:
    text = _text(data)
    return [properties.find(text, name) for name in (properties.KEYS, properties.TAGS, properties.UNIQUE_KEY)]


def _record(data: bytes, *, is_packed: bool) -> Record:
    body, flag = data, 0
    if is_packed:
        body, flag = zlib.compress(data.ljust(_INFLATED, b"\0"), 1), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
    record = encode_record(0, 0, 0, 0, flag, 0, _HOST, 0, _HOST, 0, 0, body, b"\x01t", b"")
    return decode_record(record)


_BOMB = _record(b"bomb", is_packed=True)


def _shown(record: Record) -> object:
    message = Message(record, Queue("t", "b", 0), "t")
    return body_of(message), preview(message), body_fields(message.record, 800)


PARSERS: Final[dict[str, Subject]] = {
    "filter": Subject(lambda data: parse_filter(_text(data)), MAX_TEXT_BYTES, _FILTER, _HARD_FILTERS),
    "value that a filter compares": Subject(_values, MAX_TEXT_BYTES, _NUMBERS, _HARD_NUMBERS),
    "tag expression": Subject(lambda data: parse_subscription("t", _text(data)), MAX_TEXT_BYTES),
    "properties": Subject(lambda data: properties.decode(_text(data)), MAX_TEXT_BYTES, _PAIRS),
    "names of properties": Subject(_names, MAX_TEXT_BYTES),
    "properties without one": Subject(lambda data: properties.without(_text(data), "a"), MAX_TEXT_BYTES, _PAIRS),
    "properties of a dead letter": Subject(
        lambda data: properties.shortened(_text(data), 1000), MAX_TEXT_BYTES, _PAIRS
    ),
    "JSON header": Subject(lambda data: _frame(0, data), MAX_BODY_BYTES),
    "binary header": Subject(lambda data: _frame(1, data), MAX_BODY_BYTES),
    "MessagePack header": Subject(lambda data: _frame(77, data), MAX_BODY_BYTES),
    "frames": Subject(lambda data: FrameReader().feed(data), MAX_BODY_BYTES),
    "heartbeat": Subject(bodies.decode_heartbeat, MAX_BODY_BYTES, _JSON),
    "locks": Subject(group_bodies.decode_lock_request, MAX_BODY_BYTES, _JSON),
    "client check": Subject(group_bodies.decode_client_check, MAX_BODY_BYTES, _JSON),
    "registration": Subject(lambda data: finish(decode_registration(data)), MAX_BODY_BYTES, _JSON),
    "batch": Subject(decode_batch, MAX_BODY_BYTES),
    "records of a batch": Subject(
        lambda data: encode_records(split(data, b"CLUSTER\x01c"), _SHARED, 0, 0), MAX_BODY_BYTES
    ),
    "records of an answer": Subject(lambda data: list(decode_records(data)), MAX_BODY_BYTES),
    "body that is shown": Subject(lambda data: _shown(_record(data, is_packed=False)), MAX_BODY_BYTES),
    "compressed body that is shown": Subject(lambda data: _shown(_BOMB), MAX_TEXT_BYTES),
    "garbled zlib": Subject(lambda data: begin_of(data, SYS_COMPRESSED | SYS_COMPRESSION_ZLIB, 1000), MAX_BODY_BYTES),
}
