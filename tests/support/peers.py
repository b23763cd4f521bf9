"""Peers of a broker in this process, without a socket: of its remoting protocol, and of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.server import Server
from rocketlet.protocol import http2
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.grpc import MessageReader, encode_message
from rocketlet.protocol.hpack import encode as block_of

SEND: dict[str, str | int] = {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}
"""The header of a send, by the short names of its fields."""
GREETING = http2.PREFACE + http2.encode_settings({})
MAX_FRAME_BYTES = 16_384


class BrokerSession:
    """The session of a client that registers brokers at a name server, as far as routes need it."""

    def __init__(self, address: str = "10.0.0.9") -> None:
        self.address = address


class Socket(asyncio.Transport):
    """A connection's socket, in memory. As with a real one, the connection is lost soon after the broker closes it."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__({"peername": (host, port)})
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_lost = False
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, data: Any) -> None:
        self.written.extend(map(bytes, data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.lose)

    abort = close

    def lose(self) -> None:
        """Notify the connection, once."""
        self.is_closed = True
        if not self.is_lost:
            self.is_lost = True
            assert isinstance(self.protocol, asyncio.Protocol)
            self.protocol.connection_lost(None)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Peer:
    """A connection to a broker in this process, without a socket."""

    socket_type = Socket

    def __init__(self, server: Server, port: int, host: str = "127.0.0.1") -> None:
        self.socket = self.socket_type(port, host)
        self.connection = RemotingConnection(server)
        self.socket.protocol = self.connection
        self.connection.connection_made(self.socket)
        self._reader = FrameReader()

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def take(self) -> bytes:
        """Return the bytes that the broker has written since the last call."""
        data, self.socket.written = b"".join(self.socket.written), []
        return data

    def received(self) -> list[Frame]:
        """Raises FrameError for responses that cannot be read."""
        return self._reader.feed(self.take())

    def hang_up(self) -> None:
        self.socket.lose()


def request(code: int, ext: dict[str, Any] | None = None, body: bytes = b"", opaque: int = 1) -> bytes:
    """Return a request in JSON."""
    return encode(Frame(code, opaque, {name: str(value) for name, value in (ext or {}).items()}, body))


# gRPC


class GrpcFrame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def split(written: bytes) -> Iterator[GrpcFrame]:
    while len(written) >= http2.HEAD_BYTES:
        size = int.from_bytes(written[:3], "big") + http2.HEAD_BYTES
        stream_id = int.from_bytes(written[5:9], "big")
        yield GrpcFrame(written[3], written[4], stream_id, written[http2.HEAD_BYTES : size])
        written = written[size:]


def head_block(method: str, *fields: tuple[bytes, bytes]) -> bytes:
    return block_of(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{schema.SERVICE}/{method}".encode()),
        (b"content-type", b"application/grpc"),
        *fields,
    )


def call_frames(stream_id: int, method: str, message: Any, *fields: tuple[bytes, bytes]) -> bytes:
    """Return a call with its whole request."""
    data = encode_message(message.SerializeToString())
    parts = [data[at : at + MAX_FRAME_BYTES] for at in range(0, len(data), MAX_FRAME_BYTES)]
    head = http2.headers_frames(stream_id, head_block(method, *fields), False, MAX_FRAME_BYTES)
    flags = [*[0] * (len(parts) - 1), http2.END_STREAM]
    return head + b"".join(map(http2.encode, [http2.DATA] * len(parts), flags, [stream_id] * len(parts), parts))


def responses_in(written: bytes, method: str, stream_id: int) -> list[Any]:
    """Return the messages of a response."""
    frames = [frame for frame in split(written) if frame.kind == http2.DATA and frame.stream_id == stream_id]
    messages = MessageReader().feed(b"".join(frame.payload for frame in frames))
    return [METHODS[method].response.FromString(message) for message in messages]


class GrpcPeer:
    """A gRPC connection to a broker in this process. last_id: the stream of the last call."""

    def __init__(self, server: Server, port: int) -> None:
        self.socket = Socket(port)
        connection = RemotingConnection(server)
        connection.connection_made(self.socket)
        assert server.grpc_server is not None
        self.protocol = self.socket.protocol = server.grpc_server.protocol(connection)
        self.last_id = -1
        self.send(GREETING)

    def send(self, data: bytes) -> None:
        if not self.socket.is_closed:
            self.protocol.data_received(data)

    def call(self, method: str, message: Any, client_id: str = "honest", timeout: bytes = b"5S") -> bytes:
        """Return the frames of a call."""
        self.last_id += 2
        fields = (b"grpc-timeout", timeout), (b"x-mq-client-id", client_id.encode())
        return call_frames(self.last_id, method, message, *fields)

    def take(self) -> bytes:
        """Return the bytes that the broker has written since the last call."""
        data, self.socket.written = b"".join(self.socket.written), []
        return data

    def hang_up(self) -> None:
        self.socket.lose()
