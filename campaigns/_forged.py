"""Bodies that hold records, heads and marks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from rocketlet.protocol import names
from rocketlet.protocol.message import (
    BEGIN_BYTES,
    BEGIN_MARK,
    CHECKSUM_BYTES,
    MAGIC,
    MAX_RECORD_BYTES,
    encode_record,
)

from ._ledger import HOST

FAR_OFFSET: Final = 1 << 22  # 84 MB of entries for messages that are lost before it
VICTIM: Final = "honest"
FORGED: Final = b"FORGED"
KEY: Final = "k"
FAR: Final = "a record far away"

Contents = Callable[[int], bytes]
"""Makes a body, given the position in the log at which it begins."""


def forged_record(at: int, topic: str, offset: int, text: str = "", body: bytes = FORGED, mark: bytes = b"") -> bytes:
    """`mark`: where an append has it that begins with the record."""
    name = topic.encode()
    text = f"{text}\x02KEYS\x01{KEY}" if text else f"KEYS\x01{KEY}"
    place = (0, 0, offset, at, 0, 1, HOST, int(time.time() * 1000), HOST, 0, 0)
    return encode_record(*place, body, bytes((len(name),)) + name, text.encode() + mark)


def mark_in(record: bytes) -> bytes:
    """The mark that everybody sees who pulls the record; empty if it has none."""
    mark = record[-CHECKSUM_BYTES - BEGIN_BYTES : -CHECKSUM_BYTES]
    return mark if mark.startswith(BEGIN_MARK) else b""


def _row(at: int, count: int, topic: str, offset: int, text: str = "", mark: bytes = b"") -> bytes:
    found = b""
    for number in range(count):
        found += forged_record(at + len(found), topic, offset + number, text, mark=mark)
    return found


def _heads(at: int, count: int) -> bytes:
    end = at + 36 * count
    return b"".join(
        min(end - place + 200, MAX_RECORD_BYTES).to_bytes(4, "big")
        + MAGIC.to_bytes(4, "big")
        + bytes(20)
        + place.to_bytes(8, "big")
        for place in range(at, end, 36)
    )


def contents_of(chance: random.Random, next_offset: int, known_mark: bytes) -> tuple[str, Contents]:
    count = chance.randrange(1, 30)
    half = f"PGROUP\x01p\x02REAL_TOPIC\x01{VICTIM}\x02REAL_QID\x010"
    kinds: dict[str, Contents] = {
        "records that go on": lambda at: _row(at, count, VICTIM, next_offset),
        "records that were": lambda at: _row(at, count, VICTIM, 0),
        FAR: lambda at: _row(at, 1, VICTIM, FAR_OFFSET),
        "records with a known mark": lambda at: _row(at, count, VICTIM, next_offset, mark=known_mark),
        "half messages": lambda at: _row(at, count, names.HALF_TOPIC, 0, half),
        "delayed messages": lambda at: _row(at, count, names.SCHEDULE_TOPIC, 0, half),
        "heads": lambda at: _heads(at, 200 * count),
        "a record of many bytes": lambda at: forged_record(at, VICTIM, next_offset, body=FORGED * 20_000),
        "bare heads": lambda at: (MAX_RECORD_BYTES.to_bytes(4, "big") + MAGIC.to_bytes(4, "big") + b"\0") * 300 * count,
    }
    kind = chance.choice(list(kinds))
    return kind, kinds[kind]
