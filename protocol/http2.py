"""HTTP/2 without I/O: frames, streams and flow control."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from struct import Struct
from sys import maxsize
from typing import Final, NamedTuple

from .config import (
    CONNECTION_WINDOW_BYTES,
    CONTROL_SPAN_S,
    HPACK_TABLE_BYTES,
    KEPT_STREAM_IDS,
    MAX_CANCELLED_CALLS,
    MAX_CONTROL_FRAMES,
    MAX_HEADER_FRAMES,
    MAX_HEADER_LIST_BYTES,
    MAX_HTTP2_FRAME_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_LAYOUT_FIELDS,
    MAX_LAYOUTS,
    MAX_RESETS,
    MAX_STREAMS,
    STREAM_WINDOW_BYTES,
)
from .hpack import Decoder, Field, HeadersTooLarge, HpackError

# ------------------------------------------------------------------------------
# Frames (RFC 9113, sections 4 and 6): a head of 9 bytes, then the payload. Numbers such as (6.1) below are sections of
# RFC 9113.
#
# byte 0: length (24 bits)   3: type   4: flags   5: stream id (31 bits)


PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The connection preface: the first bytes from a client (3.4)."""
HEAD_BYTES: Final = 9
DEFAULT_WINDOW_BYTES: Final = 65_535
MAX_WINDOW_BYTES: Final = 0x7FFF_FFFF
MIN_FRAME_BYTES: Final = 16_384  # every peer accepts payloads of this size
MAX_FRAME_BYTES: Final = 0xFF_FFFF
LAST_STREAM_ID: Final = 0x7FFF_FFFF

_HEAD: Final = Struct(">BHBBI")
_SETTING: Final = Struct(">HI")


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2  # deprecated; ignored here
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


DATA: Final = int(FrameType.DATA)
HEADERS: Final = int(FrameType.HEADERS)
RST_STREAM: Final = int(FrameType.RST_STREAM)
SETTINGS: Final = int(FrameType.SETTINGS)
PING: Final = int(FrameType.PING)
GOAWAY: Final = int(FrameType.GOAWAY)
WINDOW_UPDATE: Final = int(FrameType.WINDOW_UPDATE)
CONTINUATION: Final = int(FrameType.CONTINUATION)

# Flags
END_STREAM: Final = 0x01
ACK: Final = 0x01  # of SETTINGS and PING
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
PRIORITY: Final = 0x20  # the payload of HEADERS starts with a priority


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Reason for the end of a stream or connection (7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def encode(kind: int, flags: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def encode_settings(settings: dict[Setting, int]) -> bytes:
    return encode(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in settings.items()))


def decode_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings in a payload, whose length must be a multiple of 6 bytes."""
    return list(_SETTING.iter_unpack(payload))


def encode_window_update(stream_id: int, increment: int) -> bytes:
    return encode(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def encode_reset(stream_id: int, code: int) -> bytes:
    return encode(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def encode_goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    return encode(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode())


def headers_frames(stream_id: int, block: bytes, end_stream: bool, limit: int) -> bytes:
    """Return a HEADERS frame, followed by CONTINUATION frames if the block exceeds `limit`, the peer's maximum frame
    size in bytes."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= limit:
        return encode(HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [encode(HEADERS, flags, stream_id, block[:limit])]
    for begin in range(limit, len(block), limit):
        is_last = begin + limit >= len(block)
        parts.append(encode(CONTINUATION, END_HEADERS if is_last else 0, stream_id, block[begin : begin + limit]))
    return b"".join(parts)


# ------------------------------------------------------------------------------
# One client's connection (RFC 9113), without its socket.
#
# `receive` accepts bytes and returns events; `answers` sends responses; `take` returns the bytes to write. An error of
# a request ends its stream. An error of the connection writes GOAWAY and sets `is_over`.
#
#     a stream:  HEADERS -> open -> END_STREAM -> end of the response -> closed
#                             RST_STREAM of either side: closed immediately
#
# A client decides how much work it causes, so frames that are cheap for the client are counted: frames without data,
# calls that are cancelled immediately (CVE-2023-44487), and CONTINUATION without an end (CVE-2024-27316). Responses
# wait in `answers` until the client's windows permit to send them, and their bytes are counted there.


_REASON_CHARS: Final = 200
# this many bytes of a SETTINGS frame, which are ten settings, count as a further frame
_COUNTED_SETTINGS_BYTES: Final = 60
_FIELDS_OF_WORK: Final = 5  # this many header fields count as much work as a frame
# this many bytes of a header block, which may be Huffman codes, count as much work as a frame
_BYTES_OF_WORK: Final = 32
_COUNTED_STREAMS: Final = 10  # this many streams whose windows a setting changes count as a further frame


class Opened(NamedTuple):
    """A call was opened."""

    stream: Stream


class Received(NamedTuple):
    """Data of a call arrived. `is_end` is True if the request is complete."""

    stream: Stream
    data: bytes
    is_end: bool


class Aborted(NamedTuple):
    """A call ended before its response was complete: the client has cancelled it, or it was invalid."""

    stream: Stream
    code: int


StreamEvent = Opened | Received | Aborted


class ConnectionFault(Exception):
    """The error for data of the client that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _StreamFault(Exception):
    """The error for data of the client that ends one stream."""

    def __init__(self, stream_id: int, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.stream_id = stream_id
        self.code = code


class Http2:
    """State of one client's HTTP/2 connection.

    Attributes:
        fault: the client's error that has ended the connection, or None
        is_over: True once the connection has ended
        is_behind: True if complete frames may be waiting to be processed
    """

    def __init__(self) -> None:
        self.answers = Answers()
        self.streams = self.answers.streams
        self._out = self.answers.out
        self._out += (
            encode_settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                    Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                    Setting.MAX_FRAME_SIZE: MAX_HTTP2_FRAME_BYTES,
                    Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
                }
            ),
            encode_window_update(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES),
        )
        self.fault: ConnectionFault | None = None
        self.is_over = False
        self._buffer = b""
        self._at = 0  # position up to which the buffer is processed
        self.is_behind = False
        self._work = 0
        self._has_preface = False
        self._has_settings = False
        self._events: list[StreamEvent] = []
        self._decoder = Decoder()
        self._last_id = 0
        self._allowed = CONNECTION_WINDOW_BYTES
        self.answers.table_note = b""
        self._block: bytearray | None = None  # an incomplete header block, until its last CONTINUATION
        self._block_id = self._block_flags = self._block_frames = 0
        self._given_up: list[int] = []
        self._controls = self._resets = self._cancelled = self._updates = 0
        self._since_s = 0.0

    def take(self) -> bytes:
        """Return and remove the bytes to be written."""
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    @property
    def waiting_bytes(self) -> int:
        """Return the number of received bytes of incomplete frames and header blocks."""
        return len(self._buffer) - self._at + (len(self._block) if self._block else 0)

    # Reading

    def receive(self, data: bytes, now_s: float, most: int = maxsize) -> list[StreamEvent]:
        """Process received bytes, and return their events in order. Raises nothing: errors set `is_over`.

        Args:
            data: received bytes
            now_s: monotonic time
            most: maximum work, where a frame counts as about 1. If work is left, `is_behind` is True, and the next call
                continues there.
        """
        if self.is_over:
            return []
        if now_s - self._since_s > CONTROL_SPAN_S:
            self._controls = self._resets = self._cancelled = self._updates = self.answers.data_frames = 0
            self._since_s = now_s
        if data:
            self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
            self._at = 0
        self._work = most
        try:
            position = self._check_preface(self._buffer) if not self._has_preface else self._at
            self._at = self._read(self._buffer, position)
        except ConnectionFault as fault:
            self.fault = fault
            self.end(fault.code, str(fault))
        else:
            if not self.is_behind:
                self._buffer, self._at = self._buffer[self._at :], 0
        events, self._events = self._events, []
        return events

    def _check_preface(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the connection does not start with the HTTP/2 preface")
        if len(data) < len(PREFACE):
            return 0
        self._has_preface = True
        return len(PREFACE)

    def _read(self, data: bytes, position: int) -> int:
        """Process complete frames, and return the position of the rest."""
        size = len(data) if self._has_preface else 0
        while self._work > 0 and size - position >= HEAD_BYTES:
            length = data[position] << 16 | data[position + 1] << 8 | data[position + 2]
            if length > MAX_HTTP2_FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame has {length} bytes; maximum {MAX_HTTP2_FRAME_BYTES}"
                )
            begin = position + HEAD_BYTES
            end = begin + length
            if end > size:
                break
            kind, flags = data[position + 3], data[position + 4]
            stream_id = int.from_bytes(data[position + 5 : begin], "big") & LAST_STREAM_ID
            position = end
            self._work -= 1
            try:
                self._handle(kind, flags, stream_id, data[begin:end])
            except _StreamFault as fault:
                self._count_control()
                self.reset(fault.stream_id, fault.code)
        self.is_behind = self._work <= 0 and size - position >= HEAD_BYTES
        return position

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        if not self._has_settings:
            if kind != SETTINGS or flags & ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
        if kind < len(_HANDLERS):
            _HANDLERS[kind](self, flags, stream_id, payload)
        else:  # unknown types of frames are ignored (5.5)
            self._count_control()

    def _count_control(self, count: int = 1) -> None:
        self._controls += count
        if self._controls > MAX_CONTROL_FRAMES:
            reason = f"more than {MAX_CONTROL_FRAMES} frames without a call's data came in {CONTROL_SPAN_S:g} s"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)

    # Calls

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"HEADERS on the stream {stream_id}; clients must use odd stream ids"
            )
        if flags & PADDED:
            payload = _unpadded(payload)
        depends_on = -1
        if flags & PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS are too short for their priority")
            depends_on = int.from_bytes(payload[:4], "big") & LAST_STREAM_ID
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
        # The encoding of a permitted list of fields is longer than this only if a client lengthens it by Huffman codes.
        if self._block_frames > MAX_HEADER_FRAMES or len(self._block) > MAX_HEADER_LIST_BYTES + HPACK_TABLE_BYTES:
            reason = f"a header block has more than {MAX_HEADER_FRAMES} frames or {MAX_HEADER_LIST_BYTES} bytes"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._complete(self._block_flags, stream_id, block)

    def _complete(self, flags: int, stream_id: int, block: bytes) -> None:
        """Process a complete header block, which opens a call or ends its request."""
        try:
            fields = self._decoder.decode(block)
        except HpackError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        except HeadersTooLarge as error:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        self._work -= len(fields) // _FIELDS_OF_WORK + len(block) // _BYTES_OF_WORK
        if stream_id <= self._last_id:
            self._handle_trailers(flags, stream_id, fields)
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

    def _handle_trailers(self, flags: int, stream_id: int, fields: list[tuple[bytes, bytes]]) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self.answers.gone:
                raise ConnectionFault(
                    ErrorCode.PROTOCOL_ERROR, f"the stream {stream_id} was opened after the stream {self._last_id}"
                )
            if self.answers.gone[stream_id]:  # the client sent it before it received the end of the call
                return
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS on the closed stream {stream_id}")
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
            self._out.append(encode_window_update(0, CONNECTION_WINDOW_BYTES - self._allowed))
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
            self._out.append(encode_window_update(stream_id, STREAM_WINDOW_BYTES - stream.allowed))
            stream.allowed = STREAM_WINDOW_BYTES
        self._events.append(Received(stream, payload, False))

    def _end_request(self, stream: Stream, data: bytes) -> None:
        if stream.content_left > 0:
            raise _StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR)
        stream.is_request_ended = True
        self._events.append(Received(stream, data, True))

    def _stray(self, stream_id: int, kind: str) -> None:
        """Process a frame of a stream that is not open."""
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
            self._given_up.append(stream_id)
            return
        if stream.is_request_ended:
            self._count_cancelled()
        else:
            self._count_reset()
        self.answers.forget(stream, knows=True)
        self._events.append(Aborted(stream, int.from_bytes(payload, "big")))

    def take_given_up(self) -> list[int]:
        """Return the streams that the client has reset since the last call, after their responses were complete. The
        client may not have received these responses."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _count_reset(self) -> None:
        self._resets += 1
        if self._resets > MAX_RESETS:
            reason = f"more than {MAX_RESETS} calls were cancelled early or refused in {CONTROL_SPAN_S:g} s"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)

    def _count_cancelled(self) -> None:
        """Count a cancelled call whose request was complete.

        Such a call costs its client a whole request, and only its stream id is remembered, so the limit is high.
        Apache's proxy has no limit, because a client with more pending receives than streams opens and cancels those
        whose deadline has passed meanwhile.
        """
        self._cancelled += 1
        if self._cancelled > MAX_CANCELLED_CALLS:
            reason = f"more than {MAX_CANCELLED_CALLS} requests were cancelled in {CONTROL_SPAN_S:g} s"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)

    # The connection

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control()
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on the stream 0")
        if len(payload) != 5:
            raise _StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        if int.from_bytes(payload[:4], "big") & LAST_STREAM_ID == stream_id:
            raise _StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control(1 + len(payload) // _COUNTED_SETTINGS_BYTES)
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on the stream {stream_id}")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS have {len(payload)} bytes")
        if flags & ACK:
            return
        self._out.append(encode(SETTINGS, ACK, 0))  # the acknowledgement precedes data that the settings may release
        for name, value in decode_settings(payload):
            self._set(name, value)

    def _set(self, name: int, value: int) -> None:
        if name == Setting.INITIAL_WINDOW_SIZE:
            self._count_control(len(self.streams) // _COUNTED_STREAMS)
            if value > MAX_WINDOW_BYTES or not self.answers.resize(value):
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        elif name == Setting.MAX_FRAME_SIZE:
            if not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
            self.answers.max_frame_bytes = value
        elif name == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
        elif name == Setting.HEADER_TABLE_SIZE and value < HPACK_TABLE_BYTES:
            # RFC 7541, 4.2: a smaller table is confirmed by a size update, here to size 0
            self.answers.table_note = b"\x20"

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_control()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"PING on the stream {stream_id}")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"PING has {len(payload)} bytes")
        if not flags & ACK:
            self._out.append(encode(PING, ACK, 0, payload))

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Process GOAWAY: the client opens no more streams, and closes the connection when it has its responses."""
        self._count_control()
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on the stream {stream_id}")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY has {len(payload)} bytes")

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE has {len(payload)} bytes")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW_BYTES
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
        """Count a WINDOW_UPDATE. A client needs at most two for each DATA frame: for the stream and for the connection."""
        self._updates += 1
        if self._updates > MAX_CONTROL_FRAMES + 2 * self.answers.data_frames:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, "too many WINDOW_UPDATE frames for the data that was sent"
            )

    # Ending

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream immediately. An open stream gets the event `Aborted`."""
        stream = self.streams.get(stream_id)
        if stream is None:
            self.answers.remember(stream_id, knows=False)
        else:
            self.answers.forget(stream, knows=False)
            self._events.append(Aborted(stream, code))
        self._out.append(encode_reset(stream_id, code))

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """End the connection with GOAWAY. Later bytes are ignored."""
        if not self.is_over:
            self.is_over = True
            self.is_behind = False
            self._buffer, self._at = b"", 0
            self._out.append(encode_goaway(self._last_id, code, reason[:_REASON_CHARS]))

    def lost(self) -> list[Stream]:
        """Record that the connection is closed, and return the streams that were open."""
        self.is_over = True
        open_streams = list(self.streams.values())
        for stream in open_streams:
            self.answers.forget(stream, knows=True)
        return open_streams


def _unpadded(payload: bytes) -> bytes:
    """Return the payload of a padded frame (6.1)."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


_Handler = Callable[[Http2, int, int, bytes], None]
_HANDLERS: Final[tuple[_Handler, ...]] = tuple(
    {
        FrameType.DATA: Http2._data,
        FrameType.HEADERS: Http2._headers,
        FrameType.PRIORITY: Http2._priority,
        FrameType.RST_STREAM: Http2._rst_stream,
        FrameType.SETTINGS: Http2._settings,
        FrameType.PUSH_PROMISE: Http2._push_promise,
        FrameType.PING: Http2._ping,
        FrameType.GOAWAY: Http2._goaway,
        FrameType.WINDOW_UPDATE: Http2._window_update,
        FrameType.CONTINUATION: Http2._continuation,
    }.values()
)


# ------------------------------------------------------------------------------
# Streams and flow control (RFC 9113, section 5.2): a sender may send only as many bytes as the receiver's windows
# permit.
#
# Each call is a stream. The response to a call waits in its stream until the stream's window and the connection's
# window are open.


class Trailers:
    """The end of a response: a header block, or an empty block if the response ends with its data."""

    __slots__ = ("block",)

    def __init__(self, block: bytes) -> None:
        self.block = block


class Stream:
    """State of one stream.

    Attributes:
        call: any object of the server
        allowed: bytes that the client may still send
        window: bytes that the client accepts
        content_left: bytes that are missing from the announced content-length; -1 without content-length
        field_bytes: size of the header fields, as RFC 9113 counts
        pending: data and trailers that wait for a window
    """

    __slots__ = (
        "allowed",
        "call",
        "content_left",
        "field_bytes",
        "fields",
        "id",
        "is_answer_ended",
        "is_request_ended",
        "pending",
        "pending_bytes",
        "window",
    )

    def __init__(self, stream_id: int, fields: Fields, window: int, content_left: int, field_bytes: int = 0) -> None:
        self.id = stream_id
        self.field_bytes = field_bytes
        self.fields = fields
        self.window = window
        self.allowed = STREAM_WINDOW_BYTES
        self.content_left = content_left
        self.call: object = None
        self.is_request_ended = self.is_answer_ended = False
        self.pending: deque[memoryview | Trailers] = deque()
        self.pending_bytes = 0


class Answers:
    """Streams of a connection, and the responses that are sent on them.

    Attributes:
        out: frames to be written
        streams: open streams by id
        gone: ended streams; the value is True if the client may still send frames on the stream because it does not
            know of the end yet
        pending: number of pieces that wait for the client's windows
        pending_bytes: bytes of these pieces
        field_bytes: header fields of all open streams
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self.gone: dict[int, bool] = {}
        self.pending_bytes = self.pending = self.field_bytes = 0
        self.data_frames = 0
        self.max_frame_bytes = MIN_FRAME_BYTES
        self.stream_window = DEFAULT_WINDOW_BYTES
        self.table_note = b""  # HPACK size update that precedes the next header block
        self._window = DEFAULT_WINDOW_BYTES
        self._waiting: dict[Stream, None] = {}  # streams that wait for the connection's window

    def send_headers(self, stream: Stream, block: bytes) -> None:
        """Send the header block that starts a response."""
        if not stream.is_answer_ended:
            self.out.append(self._header_frames(stream.id, block, False))

    def send_data(self, stream: Stream, data: bytes) -> None:
        """Send data now, or later when the client's windows permit it. Do nothing after the end of the stream."""
        size = len(data)
        if stream.is_answer_ended or not size:
            return
        if not stream.pending and size <= self.max_frame_bytes and size <= stream.window and size <= self._window:
            stream.window -= size
            self._window -= size
            self.data_frames += 1
            self.out.append(encode(DATA, 0, stream.id, data))
            return
        stream.pending.append(memoryview(data))
        stream.pending_bytes += size
        self.pending_bytes += size
        self.pending += 1
        self._flush_stream(stream)

    def send_end(self, stream: Stream, block: bytes) -> None:
        """Send the end of a response: a block of trailers, or of headers if nothing was sent before, or an empty block
        to end the data."""
        if not stream.is_answer_ended:
            stream.pending.append(Trailers(block))
            self.pending += 1
            self._flush_stream(stream)

    def open(self, increment: int) -> bool:
        """Increase the connection's window. Return False if the increment is invalid."""
        self._window += increment
        is_legal = self._window <= MAX_WINDOW_BYTES
        if is_legal:
            self.flush()
        return is_legal

    def open_stream(self, stream: Stream, increment: int) -> bool:
        """Increase a stream's window. Return False if the increment is invalid."""
        stream.window += increment
        is_legal = stream.window <= MAX_WINDOW_BYTES
        if is_legal and stream.pending:
            self._flush_stream(stream)
        return is_legal

    def resize(self, window: int) -> bool:
        """Change the initial window of streams (6.9.2). Return False if a window becomes too large.

        Bytes that were sent before count, so a window may become negative.
        """
        difference, self.stream_window = window - self.stream_window, window
        for stream in self.streams.values():
            stream.window += difference
            if stream.window > MAX_WINDOW_BYTES:
                return False
        for stream in [stream for stream in self.streams.values() if stream.pending]:
            self._flush_stream(stream)
        return True

    def flush(self) -> None:
        """Send data that waits for the connection's window."""
        for stream in list(self._waiting):
            if self._window <= 0:
                return
            self._flush_stream(stream)

    def forget(self, stream: Stream, *, knows: bool) -> None:
        """Remove an ended stream.

        Args:
            stream: the stream
            knows: True if the client cannot send any further frames on it
        """
        del self.streams[stream.id]
        self.field_bytes -= stream.field_bytes
        self.pending -= len(stream.pending)
        self._waiting.pop(stream, None)
        self.pending_bytes -= stream.pending_bytes
        stream.is_answer_ended = True
        self.remember(stream.id, knows=knows)

    def remember(self, stream_id: int, *, knows: bool) -> None:
        """Remember the end of a stream, so that late frames of the client are recognized. `knows` is True if the client
        cannot send any further frames on the stream."""
        self.gone[stream_id] = not knows
        if len(self.gone) > KEPT_STREAM_IDS:
            del self.gone[next(iter(self.gone))]

    def _header_frames(self, stream_id: int, block: bytes, end_stream: bool) -> bytes:
        if self.table_note:
            block, self.table_note = self.table_note + block, b""
        return headers_frames(stream_id, block, end_stream, self.max_frame_bytes)

    def _flush_stream(self, stream: Stream) -> None:
        """Send as much of the stream's pending data as the windows permit."""
        pending = stream.pending
        while pending:
            data = pending[0]
            if isinstance(data, Trailers):
                pending.popleft()
                self.pending -= 1
                self._finish(stream, data.block)
                return
            size = min(len(data), stream.window, self._window, self.max_frame_bytes)
            if size <= 0:
                if stream.window > 0:  # if its own window is closed, an update of the connection's window cannot help
                    self._waiting[stream] = None
                else:
                    self._waiting.pop(stream, None)
                return
            stream.window -= size
            self._window -= size
            stream.pending_bytes -= size
            self.pending_bytes -= size
            self.data_frames += 1
            self.out.append(encode(DATA, 0, stream.id, data[:size]))
            if size == len(data):
                pending.popleft()
                self.pending -= 1
            else:
                pending[0] = data[size:]
        self._waiting.pop(stream, None)

    def _finish(self, stream: Stream, block: bytes) -> None:
        if block:
            self.out.append(self._header_frames(stream.id, block, True))
        else:
            self.out.append(encode(DATA, END_STREAM, stream.id))
        if not stream.is_request_ended:  # the rest of the request will not be read (8.1)
            self.out.append(encode_reset(stream.id, ErrorCode.NO_ERROR))
        self.forget(stream, knows=stream.is_request_ended)


# ------------------------------------------------------------------------------
# Checks of a request's header fields (RFC 9113, sections 8.2 and 8.3).


Fields = Mapping[bytes, bytes]
"""Header fields of a request by name; repeated values are joined by `, `."""

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b":status")
)
_SINGLE: Final = frozenset((b"authorization", b"grpc-timeout", b"x-mq-client-id", b"x-mq-date-time"))
"""Fields that must occur at most once, because they identify a client or a deadline."""
_MAX_DIGITS: Final = 15
_TRAILERS: Final = b"trailers"


class MalformedRequest(ValueError):
    """The error for an invalid request, after which the connection continues."""


_known_names: Final[set[tuple[bytes, ...]]] = set()
"""Sequences of names that were checked already, because a client sends the same names in each call."""


def request_fields(fields: list[Field]) -> Fields:
    """Return the header fields of a request by name. Raises MalformedRequest."""
    names = tuple([name for name, _ in fields])
    if names not in _known_names:
        found = _checked(fields)
        if len(found) == len(names) <= MAX_LAYOUT_FIELDS and sum(map(len, names)) <= MAX_LAYOUT_BYTES:
            if len(_known_names) >= MAX_LAYOUTS:
                _known_names.clear()
            _known_names.add(names)
    else:
        found = dict(fields)
        _check_te(found.get(b"te", _TRAILERS))
    if not (found.get(b":method") and found.get(b":scheme") and found.get(b":path")):
        raise MalformedRequest("a request needs :method, :scheme and :path")
    return found


def _checked(fields: list[Field]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    is_after_pseudo = False
    for name, value in fields:
        if name[:1] == b":":
            if is_after_pseudo or name not in _PSEUDO or name in found:
                raise MalformedRequest(f"the pseudo-header field {_shown(name)} is not allowed here, or repeated")
        else:
            is_after_pseudo = True
            _check(name, value)
            if name in found:
                if name in _SINGLE:
                    raise MalformedRequest(f"the header field {_shown(name)} is repeated")
                value = found[name] + b", " + value
        found[name] = value
    return found


def check_trailers(fields: list[Field]) -> None:
    """Check the header fields after a request's data. Raises MalformedRequest."""
    for name, value in fields:
        if name[:1] == b":":
            raise MalformedRequest("trailers have no pseudo-header fields")
        _check(name, value)


def _check(name: bytes, value: bytes) -> None:
    if not name.islower() and (not name or name != name.lower()):
        raise MalformedRequest(f"the header field {_shown(name)} is not in lower case")
    if name in _OF_CONNECTIONS:
        raise MalformedRequest(f"the header field {_shown(name)} is not allowed in HTTP/2")
    if name == b"te":
        _check_te(value)


def _check_te(value: bytes) -> None:
    if value != _TRAILERS:
        raise MalformedRequest("the header field te must be trailers")


def content_length(fields: Fields) -> int:
    """Return the content-length, or -1 without one. Raises MalformedRequest."""
    text = fields.get(b"content-length")
    if text is None:
        return -1
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise MalformedRequest("content-length is not a number")
    return int(text)


def _shown(name: bytes) -> str:
    return repr(name[:40])[1:]
