"""Bytes that a client can send and that look like records: right places, right checksums, another topic."""

from __future__ import annotations

from rocketlet.broker.store.store import Store
from rocketlet.protocol.message import encode_record

from ..support.stores import HOST

HEAD_BYTES = 88  # of a record between two IPv4 hosts, before its body


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
