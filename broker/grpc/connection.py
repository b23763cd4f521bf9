"""One client's socket, once it has turned out to speak HTTP/2.

The socket's `Connection` stays: it is counted, charged and closed as every other one. This stands before it as the socket's
protocol, reads calls, and writes through it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import structlog

from ...protocol import grpc
from ...protocol.config import MAX_UNFINISHED_BYTES
from ...protocol.grpc import CallFault, Status
from ...protocol.http2.connection import Aborted, Http2, Opened
from ...protocol.http2.flow import Stream
from ...protocol.http2.frames import ErrorCode
from ...protocol.http2.hpack import encode
from ...protocol.work import Work
from ..config import FIELD_FACTOR, PENDING_BYTES, STREAM_BYTES
from ..listening.carrier import Carrier
from ..sessions.callers import Callers
from .calls import Call, Method

log = structlog.get_logger("rocketlet.grpc")

Ready = deque[tuple[Call, bytes | Work[None] | None]]

_TEXT: Final = b"This port speaks gRPC (RocketMQ 5) and RocketMQ's remoting protocol, and no other kind of HTTP.\n"
_NO_GRPC: Final = encode(
    (b":status", b"415"), (b"content-type", b"text/plain"), (b"content-length", str(len(_TEXT)).encode())
)


class Door(Protocol):
    """Knows the methods, and serves the calls that were read. `callers`: hears of connections and answers."""

    callers: Callers

    def now_s(self) -> float: ...

    def turned_away(self, connection: Carrier, reason: str) -> None: ...

    def method_of(self, stream: Stream) -> Method:
        """Raises CallFault."""
        ...

    def serve(self, ready: Ready) -> None:
        """Serves as many calls as the time of a turn allows."""
        ...


class GrpcConnection(asyncio.Protocol):
    """`ready`: messages that are read and wait for their turn, each with its call, or work on one that has begun. None: the
    client sends no more of them."""

    def __init__(self, door: Door, connection: Carrier) -> None:
        self.door = door
        self.connection = connection
        self.http2 = Http2()
        self.ready: Ready = deque()
        self._unfinished_bytes = 0
        self._charged_bytes = 0
        self._is_serving = self._is_flush_due = False
        connection.on_farewell(self._say_goodbye)
        door.callers.connections += 1

    def data_received(self, data: bytes) -> None:
        connection, now_s = self.connection, self.door.now_s()
        connection.active_s = connection.heard_s = now_s
        connection.read_bytes += len(data)
        self._is_serving = True
        try:
            for event in self.http2.receive(data, now_s):
                if isinstance(event, Opened):
                    self._open(event.stream)
                elif isinstance(event, Aborted):
                    self._abort(event.stream)
                else:
                    self._take(event.stream, event.data, event.is_end)
            self.go_on()
        except Exception:  # a defect of ours: the client that met it connects again, nobody else notices
            log.exception("connection_closed_requests_failed", peer=connection.peer)
            connection.abort()
        finally:
            self._is_serving = False
            self.flush()

    # Calls

    def _open(self, stream: Stream) -> None:
        fields = stream.fields
        if not grpc.is_grpc(fields.get(b"content-type", b"")):
            return  # answered at its end
        try:
            stream.call = call = self._call_of(stream)
        except CallFault as fault:
            self.http2.answers.send_end(stream, grpc.only_trailers(fault.status, str(fault)))
            return
        if call.method.is_open:
            call.begin()

    def _call_of(self, stream: Stream) -> Call:
        """Raises CallFault."""
        method = self.door.method_of(stream)
        left_s = grpc.timeout_s(stream.fields.get(b"grpc-timeout"))
        due_s = None if left_s is None else self.connection.heard_s + left_s
        return Call(self.connection, stream, method, due_s, self.http2.answers, self.flush_soon, self.door.callers)

    def _take(self, stream: Stream, data: bytes, is_end: bool) -> None:
        call = stream.call
        if not isinstance(call, Call):
            if is_end and not stream.is_answer_ended:
                self._refuse_http(stream)
            return
        before = call.reader.waiting_bytes
        try:
            messages = call.reader.feed(data)
            self._unfinished_bytes += call.reader.waiting_bytes - before
            self._check(call, messages, is_end)
        except CallFault as fault:
            call.end(fault.status, str(fault))
            self._forget(call)
            return
        self.ready.extend((call, message) for message in messages)
        if is_end:
            self._unfinished_bytes -= call.reader.waiting_bytes
            if call.method.is_open:
                self.ready.append((call, None))

    def _check(self, call: Call, messages: list[bytes], is_end: bool) -> None:
        if self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            reason = f"calls whose messages are not complete have {MAX_UNFINISHED_BYTES} bytes on this connection"
            raise CallFault(Status.RESOURCE_EXHAUSTED, reason)
        if call.method.is_open:
            return
        if len(messages) > 1 or (messages and call.has_request):
            raise CallFault(Status.INTERNAL, "the call has more than one message")
        if messages:
            call.has_request = True
        elif is_end and not call.has_request:
            raise CallFault(Status.INTERNAL, "the call has no message")

    def _forget(self, call: Call) -> None:
        self._unfinished_bytes -= call.reader.waiting_bytes
        call.reader.clear()

    def _refuse_http(self, stream: Stream) -> None:
        answers = self.http2.answers
        answers.send_headers(stream, _NO_GRPC)
        if stream.fields[b":method"] != b"HEAD":
            answers.send_data(stream, _TEXT)
        answers.send_end(stream, b"")

    def _abort(self, stream: Stream) -> None:
        """The client has given a call up, or it was at fault."""
        call, stream.call = stream.call, None
        if isinstance(call, Call):
            self._forget(call)
            call.abort()

    # Turns

    def go_on(self) -> None:
        """Serves ready calls, as many as the time of a turn allows."""
        connection = self.connection
        if not self.ready or connection.is_paused or connection.is_closed:
            return
        self.door.serve(self.ready)
        if self.ready and not connection.is_held:
            connection.is_held = True
            connection.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self.connection.is_held = False
        self.go_on()
        self.flush()
        if not self.ready:
            self.connection.go_on()

    # Writing

    def flush_soon(self) -> None:
        """Has the added answers written. Those of one turn are one write."""
        if not (self._is_serving or self._is_flush_due):
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self.flush()

    def flush(self) -> None:
        http2, connection = self.http2, self.connection
        data = http2.take()
        if data:
            connection.write([data])
        answers, streams = http2.answers, len(http2.streams)
        held = http2.waiting_bytes + self._unfinished_bytes + streams * STREAM_BYTES
        held += answers.pending_bytes + answers.pending * PENDING_BYTES + answers.field_bytes * FIELD_FACTOR
        if self.ready:
            held += len(self.ready) * STREAM_BYTES + sum(len(item) for _, item in self.ready if isinstance(item, bytes))
        if held != self._charged_bytes:
            connection.charge(held - self._charged_bytes)
            self._charged_bytes = held
        if http2.is_over and not connection.is_closed:
            self._close()

    def _close(self) -> None:
        fault = self.http2.fault
        if fault is not None:
            self.door.turned_away(self.connection, f"it broke a rule of HTTP/2: {fault}")
            if self.connection.is_news("http2_connection_closed"):
                log.warning("http2_connection_closed", peer=self.connection.peer, reason=str(fault))
        self.connection.close()

    def _say_goodbye(self) -> None:
        self.http2.end(ErrorCode.NO_ERROR)
        self.connection.write([self.http2.take()])

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()
        self.go_on()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.door.callers.connections -= 1
        self.ready.clear()
        for stream in self.http2.lost():
            self._abort(stream)
        self.connection.connection_lost(error)
