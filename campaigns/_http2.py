"""A gRPC client without a socket: frames of calls, and those of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Server
from rocketlet.protocol import http2
from rocketlet.protocol.grpc import MessageReader
from rocketlet.protocol.hpack import encode as block_of

from .frames import Socket

GREETING = http2.PREFACE + http2.encode_settings({})


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def split(written: bytes) -> Iterator[Frame]:
    while len(written) >= http2.HEAD_BYTES:
        size = int.from_bytes(written[:3], "big") + http2.HEAD_BYTES
        stream_id = int.from_bytes(written[5:9], "big")
        yield Frame(written[3], written[4], stream_id, written[http2.HEAD_BYTES : size])
        written = written[size:]


def head_block(method: str, *fields: tuple[bytes, bytes]) -> bytes:
    return block_of(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{schema.SERVICE}/{method}".encode()),
        (b"content-type", b"application/grpc"),
        *fields,
    )


def call_frames(stream_id: int, method: str, data: bytes, *fields: tuple[bytes, bytes]) -> bytes:
    """A call with all of its data."""
    head = http2.headers_frames(stream_id, head_block(method, *fields), False, 16_384)
    return head + http2.encode(http2.DATA, http2.END_STREAM, stream_id, data)


def answers_in(written: bytes, method: str, stream_id: int) -> list[Any]:
    """The messages of an answer."""
    reader = MessageReader()
    data = b"".join(frame.payload for frame in split(written) if frame[0] == http2.DATA and frame[2] == stream_id)
    return [METHODS[method].response.FromString(message) for message in reader.feed(data)]


class Peer:
    """A connection of the broker's, driven without a socket. last_id: the stream of the last call."""

    socket_type = Socket

    def __init__(self, server: Server, port: int) -> None:
        self.socket = self.socket_type(port)
        connection = RemotingConnection(server)
        connection.connection_made(self.socket)
        assert server.grpc_server is not None
        self.protocol = server.grpc_server.protocol(connection)
        self.last_id = -1
        self.send(GREETING)

    def send(self, data: bytes) -> None:
        if not self.socket.is_closed:
            self.protocol.data_received(data)

    def call(self, method: str, data: bytes, client_id: str = "honest", timeout: bytes = b"5S") -> bytes:
        """The frames of a call."""
        self.last_id += 2
        fields = (b"grpc-timeout", timeout), (b"x-mq-client-id", client_id.encode())
        return call_frames(self.last_id, method, data, *fields)

    def take(self) -> bytes:
        """The bytes that the broker wrote."""
        written = b"".join(self.socket.written)
        self.socket.written.clear()
        return written

    def hang_up(self) -> None:
        self.socket.close()
        self.protocol.connection_lost(None)
