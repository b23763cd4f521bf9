"""Bytes that a client can send and that look like records: right places, right checksums, another topic."""

from __future__ import annotations

from collections.abc import Callable

from rocketlet.broker.store.store import Store
from rocketlet.protocol.message import MAGIC, MAX_RECORD_BYTES, encode_record

from .stores import HOST

HEAD_BYTES = 88  # a record between two IPv4 hosts, before its body


def record(
    position: int, body: bytes, topic: str = "u", queue: int = 0, offset: int = 0, properties: str = ""
) -> bytes:
    """A record that claims a place in the log, with both checksums."""
    name = topic.encode()
    return encode_record(
        queue, 0, offset, position, 0, 1, HOST, 1, HOST, 0, 0, body, bytes((len(name),)) + name, properties.encode()
    )


def body_at(position: int, *contents: bytes, topic: str = "u", offset: int = 0, begin: bytes = b"") -> bytes:
    """A body, whose record begins at a position, that has records in it, one behind the other."""
    body = begin
    for number, content in enumerate(contents):
        body += record(position + HEAD_BYTES + len(body), content, topic, offset=offset + number)
    return body


def next_body(store: Store, *contents: bytes, topic: str = "u", offset: int = 0) -> bytes:
    """The same for the record that is stored next."""
    return body_at(store.end, *contents, topic=topic, offset=offset)


BodyOf = Callable[[int], bytes]
"""A body for a record that begins at a position."""
MAGIC_BYTES = MAGIC.to_bytes(4, "big")


def heads_at(position: int, count: int) -> bytes:
    """Nothing but heads, each of which claims its place and all that follows."""
    at, end = position + HEAD_BYTES, position + HEAD_BYTES + 36 * count
    return b"".join(
        min(end - place, MAX_RECORD_BYTES).to_bytes(4, "big") + MAGIC_BYTES + bytes(20) + place.to_bytes(8, "big")
        for place in range(at, end, 36)
    )
