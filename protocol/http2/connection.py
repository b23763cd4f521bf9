"""One client's connection (RFC 9113), without its socket.

`receive` takes bytes and returns events; `answers` says how to answer; `take` gives the bytes to write. A fault of a
request ends its stream. A fault of the connection ends that: it writes GOAWAY, and `is_over` is set.

    a stream:  HEADERS -> open -> END_STREAM -> the answer's end -> gone
                            RST_STREAM of either side: gone at once

A client decides how much work it makes, so everything that costs it little is counted: frames that carry nothing, calls that
are given up at once (CVE-2023-44487), and CONTINUATION without an end (CVE-2024-27316). Its windows hold back our answers;
they wait in `answers`, and count there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..config import (
    CONNECTION_WINDOW_BYTES,
    CONTROL_SPAN_S,
    HPACK_TABLE_BYTES,
    MAX_CONTROL_FRAMES,
    MAX_HEADER_FRAMES,
    MAX_HEADER_LIST_BYTES,
    MAX_HTTP2_FRAME_BYTES,
    MAX_RESETS,
    MAX_STREAMS,
    STREAM_WINDOW_BYTES,
)
from . import frames
from .fields import MalformedRequest, check_trailers, content_length, request_fields
from .flow import Answers, Stream
from .frames import ACK, END_HEADERS, END_STREAM, PADDED, PRIORITY, ErrorCode, Kind, Setting
from .hpack import Decoder, HeadersTooLarge, HpackError

_REASON_CHARS: Final = 200
_COUNTED_SETTINGS_BYTES: Final = 60  # as many bytes of one SETTINGS count as another frame: ten settings
_COUNTED_STREAMS: Final = 10  # as many whose windows one setting changes count as another frame


class Opened(NamedTuple):
    """A call began."""

    stream: Stream


class Received(NamedTuple):
    """Data of a call. `is_end`: it was the last."""

    stream: Stream
    data: bytes
    is_end: bool


class Aborted(NamedTuple):
    """A call is over before its answer was: by the client, or by a fault."""

    stream: Stream
    code: int


Event = Opened | Received | Aborted


class ConnectionFault(Exception):
    """The client sent something that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _StreamFault(Exception):
    """The client sent something that ends one stream."""

    def __init__(self, stream_id: int, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.stream_id = stream_id
        self.code = code


class Http2:
    """`fault`: why the connection is over, if the client is to blame."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.streams = self.answers.streams
        self._out = self.answers.out
        self._out += (
            frames.encode_settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                    Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                    Setting.MAX_FRAME_SIZE: MAX_HTTP2_FRAME_BYTES,
                    Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
                }
            ),
            frames.encode_window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES),
        )
        self.fault: ConnectionFault | None = None
        self.is_over = False
        self._rest = b""
        self._has_begun = False  # whether the preface is there
        self._has_settings = False
        self._events: list[Event] = []
        self._decoder = Decoder()
        self._last_id = 0
        self._allowed = CONNECTION_WINDOW_BYTES
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._stream_window = frames.DEFAULT_WINDOW_BYTES
        self._max_frame_bytes = frames.MIN_FRAME_BYTES
        self.answers.table_note = b""  # before the next block, once the client's table has become smaller
        self._block: bytearray | None = None  # a block of HEADERS, until CONTINUATION ends it
        self._block_id = self._block_flags = self._block_frames = 0
        self._controls = self._resets = self._updates = 0
        self._since_s = 0.0

    def take(self) -> bytes:
        """Takes the bytes to be written."""
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait for the rest of their frames."""
        return len(self._rest) + (len(self._block) if self._block else 0)

    # Reading

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """The events that the bytes bring, in order. Raises nothing: see `is_over`."""
        if self.is_over:
            return []
        if now_s - self._since_s > CONTROL_SPAN_S:
            self._controls = self._resets = self._updates = self.answers.data_frames = 0
            self._since_s = now_s
        if self._rest:
            data = self._rest + data
        try:
            position = self._begin(data) if not self._has_begun else 0
            position = self._read(data, position)
        except ConnectionFault as fault:
            self.fault = fault
            self.end(fault.code, str(fault))
        else:
            self._rest = data[position:]
        events, self._events = self._events, []
        return events

    def _begin(self, data: bytes) -> int:
        if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
        if len(data) < len(frames.PREFACE):
            return 0
        self._has_begun = True
        return len(frames.PREFACE)

    def _read(self, data: bytes, position: int) -> int:
        """Every frame that is complete; where the rest begins."""
        size = len(data) if self._has_begun else 0
        while size - position >= frames.HEAD_BYTES:
            length = data[position] << 16 | data[position + 1] << 8 | data[position + 2]
            if length > MAX_HTTP2_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame has {length} bytes")
            begin = position + frames.HEAD_BYTES
            end = begin + length
            if end > size:
                break
            kind, flags = data[position + 3], data[position + 4]
            stream_id = int.from_bytes(data[position + 5 : begin], "big") & frames.LAST_STREAM_ID
            position = end
            try:
                self._take(kind, flags, stream_id, data[begin:end])
            except _StreamFault as fault:
                self._count_control()
                self.reset(fault.stream_id, fault.code)
        return position

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "another frame comes amid a header block")
        if not self._has_settings:
            if kind != frames.SETTINGS or flags & ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
            self._has_settings = True
        if kind < len(_TAKERS):
            _TAKERS[kind](self, flags, stream_id, payload)
        else:  # 5.5: unknown kinds are ignored
            self._count_control()

    def _count_control(self, count: int = 1) -> None:
        self._controls += count
        if self._controls > MAX_CONTROL_FRAMES:
            reason = f"more than {MAX_CONTROL_FRAMES} frames without a call's data came in {CONTROL_SPAN_S:g} s"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)

    # Calls

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on the stream {stream_id}, which is no client's")
        if flags & PADDED:
            payload = _unpadded(payload)
        depends_on = -1
        if flags & PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS are too short for their priority")
            depends_on = int.from_bytes(payload[:4], "big") & frames.LAST_STREAM_ID
            payload = payload[5:]
        if flags & END_HEADERS:
            self._complete(flags, stream_id, payload)
        else:
            self._block, self._block_id, self._block_flags = bytearray(payload), stream_id, flags
            self._block_frames = 1
        if depends_on == stream_id:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        self._block += payload
        self._block_frames += 1
        # fields that fit have no longer block: what is encoded is never much longer than what is meant
        if self._block_frames > MAX_HEADER_FRAMES or len(self._block) > MAX_HEADER_LIST_BYTES + HPACK_TABLE_BYTES:
            reason = f"a header block has more than {MAX_HEADER_FRAMES} frames or {MAX_HEADER_LIST_BYTES} bytes"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._complete(self._block_flags, stream_id, block)

    def _complete(self, flags: int, stream_id: int, block: bytes) -> None:
        """A header block begins a call, or ends its request."""
        try:
            fields = self._decoder.decode(block)
        except HpackError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        except HeadersTooLarge as error:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        if stream_id <= self._last_id:
            self._trail(flags, stream_id, fields)
            return
        self._last_id = stream_id
        try:
            found = request_fields(fields)
            length = content_length(found)
        except MalformedRequest:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR) from None
        if len(self.streams) >= MAX_STREAMS:
            self._count_reset()
            raise _StreamFault(stream_id, ErrorCode.REFUSED_STREAM)
        size = self._decoder.list_bytes
        stream = self.streams[stream_id] = Stream(stream_id, found, self.answers.stream_window, length, size)
        self.answers.field_bytes += size
        self._events.append(Opened(stream))
        if flags & END_STREAM:
            self._end_request(stream, b"")

    def _trail(self, flags: int, stream_id: int, fields: list[tuple[bytes, bytes]]) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self.answers.gone:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"the stream {stream_id} comes behind {self._last_id}")
            if self.answers.gone[stream_id]:  # the client has sent it before it knew that the call is over
                return
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS on the stream {stream_id}, which is over")
        if stream.is_request_ended:
            raise _StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        if not flags & END_STREAM:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        try:
            check_trailers(fields)
        except MalformedRequest:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR) from None
        self._end_request(stream, b"")

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._allowed -= size
        if self._allowed < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data came than the connection's window allows")
        if self._allowed < CONNECTION_WINDOW_BYTES // 2:
            self._out.append(frames.encode_window_update(0, CONNECTION_WINDOW_BYTES - self._allowed))
            self._allowed = CONNECTION_WINDOW_BYTES
        if flags & PADDED:
            payload = _unpadded(payload)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._stray(stream_id, "DATA")
            return
        if stream.is_request_ended:
            raise _StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        stream.allowed -= size
        if stream.allowed < 0:
            raise _StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        if stream.content_left >= 0:
            stream.content_left -= len(payload)
            if stream.content_left < 0:
                raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        if flags & END_STREAM:
            self._end_request(stream, payload)
            return
        if not payload:
            self._count_control()
        elif stream.allowed < STREAM_WINDOW_BYTES // 2:
            self._out.append(frames.encode_window_update(stream_id, STREAM_WINDOW_BYTES - stream.allowed))
            stream.allowed = STREAM_WINDOW_BYTES
        self._events.append(Received(stream, payload, False))

    def _end_request(self, stream: Stream, data: bytes) -> None:
        if stream.content_left > 0:
            raise _StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR)
        stream.is_request_ended = True
        self._events.append(Received(stream, data, True))

    def _stray(self, stream_id: int, kind: str) -> None:
        """A frame of a stream that is not open."""
        if stream_id == 0 or stream_id > self._last_id or not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{kind} on the stream {stream_id}, which was not opened")
        self._count_control()
        if not self.answers.gone.get(stream_id):
            raise _StreamFault(stream_id, ErrorCode.STREAM_CLOSED)

    def _rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM has {len(payload)} bytes")
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id == 0 or stream_id > self._last_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on the stream {stream_id}")
            self._count_control()
            return
        self._count_reset()
        self.answers.forget(stream, knows=True)
        self._events.append(Aborted(stream, int.from_bytes(payload, "big")))

    def _count_reset(self) -> None:
        self._resets += 1
        if self._resets > MAX_RESETS:
            reason = f"more than {MAX_RESETS} calls were given up in {CONTROL_SPAN_S:g} s"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)

    # The connection

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control()
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on the stream 0")
        if len(payload) != 5:
            raise _StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        if int.from_bytes(payload[:4], "big") & frames.LAST_STREAM_ID == stream_id:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control(1 + len(payload) // _COUNTED_SETTINGS_BYTES)
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on the stream {stream_id}")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS have {len(payload)} bytes")
        if flags & ACK:
            return
        self._out.append(frames.encode(frames.SETTINGS, ACK, 0))  # before the data that they may let go
        for name, value in frames.decode_settings(payload):
            self._set(name, value)

    def _set(self, name: int, value: int) -> None:
        if name == Setting.INITIAL_WINDOW_SIZE:
            self._count_control(len(self.streams) // _COUNTED_STREAMS)
            if value > frames.MAX_WINDOW_BYTES or not self.answers.resize(value):
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        elif name == Setting.MAX_FRAME_SIZE:
            if not frames.MIN_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
            self.answers.max_frame_bytes = value
        elif name == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
        elif name == Setting.HEADER_TABLE_SIZE and value < HPACK_TABLE_BYTES:
            self.answers.table_note = b"\x20"  # RFC 7541, 4.2: a smaller table is confirmed, by one of no size

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client pushes nothing")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"PING on the stream {stream_id}")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"PING has {len(payload)} bytes")
        if not flags & ACK:
            self._out.append(frames.encode(frames.PING, ACK, 0, payload))

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """The client opens no more streams; it closes when it has its answers."""
        self._count_control()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on the stream {stream_id}")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY has {len(payload)} bytes")

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE has {len(payload)} bytes")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW_BYTES
        fault = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
        self._count_update()
        stream = self.streams.get(stream_id)
        if stream_id == 0:
            if not increment or not self.answers.open(increment):
                raise ConnectionFault(fault, f"WINDOW_UPDATE by {increment} bytes")
        elif stream is not None:
            if not increment or not self.answers.open_stream(stream, increment):
                raise _StreamFault(stream_id, fault)
        elif stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on the stream {stream_id}")

    def _count_update(self) -> None:
        """A client that reads answers each frame of data with two of these at most: its stream's and the connection's."""
        self._updates += 1
        if self._updates > MAX_CONTROL_FRAMES + 2 * self.answers.data_frames:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "many more WINDOW_UPDATE came than data was sent")

    # Ending

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Ends a stream at once. `Aborted` is told of one that was open."""
        stream = self.streams.get(stream_id)
        if stream is None:
            self.answers.remember(stream_id, knows=False)
        else:
            self.answers.forget(stream, knows=False)
            self._events.append(Aborted(stream, code))
        self._out.append(frames.encode_reset(stream_id, code))

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """GOAWAY. Nothing is read any more."""
        if not self.is_over:
            self.is_over = True
            self._rest = b""
            self._out.append(frames.encode_goaway(self._last_id, code, reason[:_REASON_CHARS]))

    def lost(self) -> list[Stream]:
        """The connection is gone; the streams that were open."""
        self.is_over = True
        open_streams = list(self.streams.values())
        for stream in open_streams:
            self.answers.forget(stream, knows=True)
        return open_streams


def _unpadded(payload: bytes) -> bytes:
    """6.1"""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


_Taker = Callable[[Http2, int, int, bytes], None]
_TAKERS: Final[tuple[_Taker, ...]] = tuple(
    {
        Kind.DATA: Http2._data,
        Kind.HEADERS: Http2._headers,
        Kind.PRIORITY: Http2._priority,
        Kind.RST_STREAM: Http2._rst_stream,
        Kind.SETTINGS: Http2._settings,
        Kind.PUSH_PROMISE: Http2._push_promise,
        Kind.PING: Http2._ping,
        Kind.GOAWAY: Http2._goaway,
        Kind.WINDOW_UPDATE: Http2._window_update,
        Kind.CONTINUATION: Http2._continuation,
    }.values()
)
