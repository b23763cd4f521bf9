"""Streams and their windows (RFC 9113, 5.2): a sender sends as many bytes as the receiver has allowed, and no more.

Each call is a stream. Its answer waits in it until both windows, its own and the connection's, are open.
"""

from __future__ import annotations

from collections import deque

from ..config import KEPT_STREAM_IDS, STREAM_WINDOW_BYTES
from . import frames
from .fields import Fields
from .frames import ErrorCode


class Trailers:
    """The end of an answer: a header block, or an empty one if the data ends it."""

    __slots__ = ("block",)

    def __init__(self, block: bytes) -> None:
        self.block = block


class Stream:
    """`call` is the owner's. `allowed`: bytes that the client may still send; `window`: that it takes; `content_left`: of
    what content-length has promised, or -1. `field_bytes`: the size of its header fields."""

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
    """The streams of a connection, and what goes out on them. `gone`: streams that are over, and whether the client may not
    know yet. `pending_bytes` wait for the client's windows, in `pending` pieces. `field_bytes`: the header fields of all
    streams."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self.gone: dict[int, bool] = {}
        self.pending_bytes = self.pending = self.field_bytes = 0
        self.data_frames = 0
        self.max_frame_bytes = frames.MIN_FRAME_BYTES
        self.stream_window = frames.DEFAULT_WINDOW_BYTES
        self.table_note = b""  # before the next block, once the client's table has become smaller
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._waiting: dict[Stream, None] = {}  # for the connection's window

    def send_headers(self, stream: Stream, block: bytes) -> None:
        """The beginning of an answer."""
        if not stream.is_answer_ended:
            self.out.append(self._header_frames(stream.id, block, False))

    def send_data(self, stream: Stream, data: bytes) -> None:
        """Now, or as soon as the client's windows allow. Nothing once the stream is over."""
        size = len(data)
        if stream.is_answer_ended or not size:
            return
        if not stream.pending and size <= self.max_frame_bytes and size <= stream.window and size <= self._window:
            stream.window -= size
            self._window -= size
            self.data_frames += 1
            self.out.append(frames.encode(frames.DATA, 0, stream.id, data))
            return
        stream.pending.append(memoryview(data))
        stream.pending_bytes += size
        self.pending_bytes += size
        self.pending += 1
        self._flush_stream(stream)

    def send_end(self, stream: Stream, block: bytes) -> None:
        """The end of an answer: a block of trailers, or of headers if nothing was sent before; an empty one ends the data."""
        if not stream.is_answer_ended:
            stream.pending.append(Trailers(block))
            self.pending += 1
            self._flush_stream(stream)

    def open(self, increment: int) -> bool:
        """The connection's window grows. Whether it may."""
        self._window += increment
        is_legal = self._window <= frames.MAX_WINDOW_BYTES
        if is_legal:
            self.flush()
        return is_legal

    def open_stream(self, stream: Stream, increment: int) -> bool:
        stream.window += increment
        is_legal = stream.window <= frames.MAX_WINDOW_BYTES
        if is_legal and stream.pending:
            self._flush_stream(stream)
        return is_legal

    def resize(self, window: int) -> bool:
        """Another first window of streams (6.9.2): what was sent already is counted on, and a window may become negative."""
        difference, self.stream_window = window - self.stream_window, window
        for stream in self.streams.values():
            stream.window += difference
            if stream.window > frames.MAX_WINDOW_BYTES:
                return False
        for stream in [stream for stream in self.streams.values() if stream.pending]:
            self._flush_stream(stream)
        return True

    def flush(self) -> None:
        for stream in list(self._waiting):
            if self._window <= 0:
                return
            self._flush_stream(stream)

    def forget(self, stream: Stream, *, knows: bool) -> None:
        """A stream is over. knows: the client cannot send anything on it that it has not sent already."""
        del self.streams[stream.id]
        self.field_bytes -= stream.field_bytes
        self.pending -= len(stream.pending)
        self._waiting.pop(stream, None)
        self.pending_bytes -= stream.pending_bytes
        stream.is_answer_ended = True
        self.remember(stream.id, knows=knows)

    def remember(self, stream_id: int, *, knows: bool) -> None:
        self.gone[stream_id] = not knows
        if len(self.gone) > KEPT_STREAM_IDS:
            del self.gone[next(iter(self.gone))]

    def _header_frames(self, stream_id: int, block: bytes, end_stream: bool) -> bytes:
        if self.table_note:
            block, self.table_note = self.table_note + block, b""
        return frames.headers_frames(stream_id, block, end_stream, self.max_frame_bytes)

    def _flush_stream(self, stream: Stream) -> None:
        """Writes as much as the windows allow."""
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
                if stream.window > 0:  # else the connection's window changes nothing for it
                    self._waiting[stream] = None
                else:
                    self._waiting.pop(stream, None)
                return
            stream.window -= size
            self._window -= size
            stream.pending_bytes -= size
            self.pending_bytes -= size
            self.data_frames += 1
            self.out.append(frames.encode(frames.DATA, 0, stream.id, data[:size]))
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
            self.out.append(frames.encode(frames.DATA, frames.END_STREAM, stream.id))
        if not stream.is_request_ended:  # 8.1: nobody reads the rest of the request
            self.out.append(frames.encode_reset(stream.id, ErrorCode.NO_ERROR))
        self.forget(stream, knows=stream.is_request_ended)
