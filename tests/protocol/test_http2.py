"""HTTP/2 without sockets: against the `h2` library, against itself in pieces, and at its limits."""

from __future__ import annotations

import tracemalloc

import h2.config
import h2.connection
import h2.events
import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol import config as limits
from rocketlet.protocol import http2
from rocketlet.protocol.config import HPACK_TABLE_BYTES, MAX_CALL_BYTES, MAX_HEADER_LIST_BYTES, MAX_STATUS_CHARS
from rocketlet.protocol.grpc import (
    CallFault,
    MessageReader,
    Status,
    encode_message,
    is_grpc,
    only_trailers,
    percent_encoded,
    timeout_s,
    trailers,
)
from rocketlet.protocol.hpack import ENTRY_BYTES, Decoder, Field, HeadersTooLarge, HpackError
from rocketlet.protocol.hpack import encode as block_of
from rocketlet.protocol.hpack import encode as encode_hpack
from rocketlet.protocol.http2 import (
    Aborted,
    ErrorCode,
    FrameType,
    Http2,
    MalformedRequest,
    Opened,
    Received,
    Stream,
    StreamEvent,
    check_trailers,
    content_length,
    encode,
    request_fields,
)

FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/s/m"), (":authority", "a:1"), ("te", "trailers")]
BLOCK = block_of(*((name.encode(), value.encode()) for name, value in FIELDS))
HEAD = block_of((b":status", b"200"), (b"content-type", b"application/grpc"))
TRAILERS = block_of((b"grpc-status", b"0"))
HELLO = http2.PREFACE + http2.encode_settings({})


def call(stream_id: int, *, end: bool = False, block: bytes = BLOCK) -> bytes:
    return http2.headers_frames(stream_id, block, end, limits.MAX_HTTP2_FRAME_BYTES)


def begun(data: bytes = b"") -> tuple[Http2, list[StreamEvent]]:
    server = Http2()
    server.receive(HELLO, 0.0)
    server.take()
    return server, server.receive(data, 0.0)


def sent(server: Http2) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of all frames that are to be written."""
    data, found = server.take(), []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def goaway(server: Http2) -> int:
    """The code with which the connection was ended."""
    assert server.is_over
    (found,) = [payload for kind, _, _, payload in sent(server) if kind == FrameType.GOAWAY]
    return int.from_bytes(found[4:8], "big")


class Peer:
    """A client made of the h2 library."""

    def __init__(self) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.server = Http2()
        self.bodies: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.trailers: dict[int, object] = {}
        self.streams: dict[int, Stream] = {}

    def ask(self, body: bytes) -> int:
        """Begins a call and sends what its windows allow; the rest by `go_on`."""
        stream_id: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, FIELDS)
        self.bodies[stream_id] = body
        return stream_id

    def go_on(self, now_s: float = 0.0) -> None:
        """Exchanges bytes until nobody has any left; the server answers a request with itself."""
        left = dict(self.bodies)
        self.bodies.clear()
        received: dict[int, bytes] = {}
        while True:
            for stream_id, body in list(left.items()):
                size = min(len(body), self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
                if size or not body:
                    self.h2.send_data(stream_id, body[:size], end_stream=size == len(body))
                    left[stream_id] = body[size:]
                    if size == len(body):
                        del left[stream_id]
            data = self.h2.data_to_send()
            if not data:
                break
            for event in self.server.receive(data, now_s):
                if isinstance(event, Received):
                    received[event.stream.id] = received.get(event.stream.id, b"") + event.data
                    if event.is_end:
                        self.server.answers.send_headers(event.stream, HEAD)
                        self.server.answers.send_data(event.stream, received[event.stream.id])
                        self.server.answers.send_end(event.stream, TRAILERS)
            self.hear()

    def hear(self) -> None:
        for event in self.h2.receive_data(self.server.take()):
            if isinstance(event, h2.events.DataReceived):
                self.answers[event.stream_id] = self.answers.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                self.trailers[event.stream_id] = event.headers


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=6))
def test_a_client_of_the_h2_library_gets_back_what_it_sends(sizes: list[int]) -> None:
    peer = Peer()
    asked = {peer.ask(bytes([size % 251]) * size): size for size in sizes}
    peer.go_on()
    assert {stream_id: len(peer.answers.get(stream_id, b"")) for stream_id in asked} == asked
    assert set(peer.trailers) == set(asked)
    assert not peer.server.streams
    assert peer.server.answers.pending_bytes == 0


def test_more_than_all_windows_goes_both_ways() -> None:
    peer = Peer()
    stream_id = peer.ask(b"x" * (limits.CONNECTION_WINDOW_BYTES + 1))
    peer.go_on()
    assert len(peer.answers[stream_id]) == limits.CONNECTION_WINDOW_BYTES + 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(0, 3))
def test_reads_of_any_size_have_the_same_events(sizes: list[int], most: int) -> None:
    data = (
        HELLO
        + call(1)
        + encode(http2.DATA, 1, 1, b"abc")
        + call(3, end=True)
        + encode(FrameType.PING, 0, 0, b"8 bytes!")
    )
    whole = Http2()
    expected = [_shown(event) for event in whole.receive(data, 0.0)]
    pieces, found = Http2(), []
    while data:
        size = sizes.pop(0) if sizes else len(data)
        found += [_shown(event) for event in pieces.receive(data[:size], 0.0, most)]
        data = data[size:]
    while pieces.is_behind:
        found += [_shown(event) for event in pieces.receive(b"", 0.0, max(most, 1))]
    assert found == expected
    assert len(found) == 4
    assert pieces.take() == whole.take()


def _shown(event: StreamEvent) -> tuple[object, ...]:
    return (type(event).__name__, event.stream.id, *event[1:])


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_raise(data: bytes, with_hello: bool) -> None:
    server = Http2()
    server.receive((HELLO if with_hello else b"") + data, 0.0)
    server.take()


FRAME = st.builds(
    encode,
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 9),
    st.binary(max_size=40) | st.just(BLOCK) | st.binary(min_size=4, max_size=4) | st.binary(min_size=6, max_size=8),
)


@given(st.lists(FRAME | st.integers(0, 4).map(lambda number: call(2 * number + 1)), max_size=30))
def test_no_frames_raise_and_nothing_that_was_opened_is_forgotten(some: list[bytes]) -> None:
    """A call is open, or its end was reported: by the end of its data and its answer, or by `Aborted`."""
    server = Http2()
    opened: set[int] = set()
    aborted: set[int] = set()
    for data in (HELLO, *some):
        for event in server.receive(data, 0.0):
            if isinstance(event, Opened):
                assert event.stream.id not in opened
                opened.add(event.stream.id)
            elif isinstance(event, Aborted):
                aborted.add(event.stream.id)
            else:
                assert event.stream.id in opened
                assert event.stream.id not in aborted
    assert opened == aborted | {stream.id for stream in server.lost()}


# Windows


def test_an_answer_waits_for_the_windows_and_counts_meanwhile() -> None:
    server, events = begun(call(1, end=True))
    stream = events[0].stream
    server.answers.send_headers(stream, HEAD)
    server.answers.send_data(stream, b"x" * (http2.DEFAULT_WINDOW_BYTES + 10))
    server.answers.send_end(stream, TRAILERS)
    assert (
        sum(len(payload) for kind, *_, payload in sent(server) if kind == FrameType.DATA) == http2.DEFAULT_WINDOW_BYTES
    )
    assert server.answers.pending_bytes == 10
    server.receive(http2.encode_window_update(0, 100), 0.0)
    assert sent(server) == []
    server.receive(http2.encode_window_update(1, 4), 0.0)
    assert [payload for *_, payload in sent(server)] == [b"x" * 4]
    server.receive(http2.encode_window_update(1, 6), 0.0)
    assert [(kind, flags) for kind, flags, *_ in sent(server)] == [(FrameType.DATA, 0), (FrameType.HEADERS, 5)]
    assert server.answers.pending_bytes == 0


def test_an_answer_that_nobody_takes_is_given_up_with_its_call() -> None:
    server, events = begun(http2.encode_settings({http2.Setting.INITIAL_WINDOW_SIZE: 0}) + call(1, end=True))
    server.answers.send_data(events[0].stream, b"x" * 1000)
    assert server.answers.pending_bytes == 1000
    assert server.receive(http2.encode_reset(1, ErrorCode.CANCEL), 0.0) == [Aborted(events[0].stream, 8)]
    assert server.answers.pending_bytes == 0
    server.answers.send_data(events[0].stream, b"more")
    server.answers.send_end(events[0].stream, TRAILERS)
    assert [kind for kind, *_ in sent(server)] == [FrameType.SETTINGS]


def test_a_client_that_sends_more_than_a_stream_allows_loses_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is never smaller than the broker reads: made smaller than one frame here."""
    monkeypatch.setattr(http2, "STREAM_WINDOW_BYTES", 100)
    server, _ = begun(call(1) + encode(http2.DATA, 0, 1, b"x" * 101))
    assert [payload for kind, *_, payload in sent(server) if kind == FrameType.RST_STREAM] == [b"\0\0\0\x03"]
    assert not server.is_over


def test_an_answer_before_the_request_has_ended_ends_the_request() -> None:
    server, events = begun(call(1))
    server.answers.send_end(events[0].stream, TRAILERS)
    assert [(kind, payload) for kind, *_, payload in sent(server)][1] == (FrameType.RST_STREAM, b"\0\0\0\0")
    assert server.receive(encode(http2.DATA, 1, 1, b"late") + call(3), 0.0) == [Opened(server.streams[3])]


def test_a_table_that_the_client_makes_smaller_is_confirmed_once() -> None:
    server, _ = begun(http2.encode_settings({http2.Setting.HEADER_TABLE_SIZE: 0}) + call(1) + call(3))
    for stream in list(server.streams.values()):
        server.answers.send_headers(stream, HEAD)
    assert [payload for kind, *_, payload in sent(server) if kind == FrameType.HEADERS] == [b"\x20" + HEAD, HEAD]


# Limits


def test_as_many_calls_as_allowed_are_open_and_one_more_is_refused() -> None:
    server, events = begun(b"".join(call(2 * number + 1) for number in range(limits.MAX_STREAMS)))
    assert len(events) == limits.MAX_STREAMS
    assert server.receive(call(2 * limits.MAX_STREAMS + 1), 0.0) == []
    assert sent(server) == [(FrameType.RST_STREAM, 0, 2 * limits.MAX_STREAMS + 1, b"\0\0\0\x07")]
    assert not server.is_over


@pytest.mark.parametrize(
    "flood",
    [
        encode(FrameType.PING, 0, 0, b"8 bytes!"),
        http2.encode_settings({}),
        encode(FrameType.PRIORITY, 0, 1, b"\0\0\0\0\0"),
        encode(http2.DATA, 0, 1),
        encode(0x77, 0, 0),
        http2.encode_window_update(0, 1),
    ],
    ids=["ping", "settings", "priority", "empty-data", "unknown", "window-update"],
)
def test_frames_that_carry_nothing_are_counted(flood: bytes) -> None:
    server, _ = begun(call(1))
    left = limits.MAX_CONTROL_FRAMES - (0 if flood[3] == FrameType.WINDOW_UPDATE else 1)  # HELLO has SETTINGS
    server.receive(flood * left, 0.0)
    assert not server.is_over
    server.receive(flood * limits.MAX_CONTROL_FRAMES, limits.CONTROL_SPAN_S + 1)
    assert not server.is_over, "as many again, when the span is over"
    server.take()
    server.receive(flood, limits.CONTROL_SPAN_S + 2)
    assert goaway(server) == ErrorCode.ENHANCE_YOUR_CALM


def test_settings_count_by_how_many_there_are_and_how_many_windows_they_change() -> None:
    def resized(count: int) -> bytes:
        return encode(FrameType.SETTINGS, 0, 0, b"\0\x04\0\0\xff\xff" * count)

    for open_calls, settings in ((0, 10_000), (limits.MAX_STREAMS, 10)):
        begin = b"".join(call(2 * number + 1) for number in range(open_calls))
        each = 1 + settings // 10 + settings * open_calls // 10
        left = (limits.MAX_CONTROL_FRAMES - 1) // each  # HELLO has SETTINGS
        server, _ = begun(begin + resized(settings) * left)
        assert not server.is_over
        server.receive(resized(settings), 0.0)
        assert server.is_over, f"{settings} settings in a frame, {open_calls} calls"


def test_an_answer_behind_its_own_window_waits_for_no_other_one() -> None:
    server, events = begun(http2.encode_settings({http2.Setting.INITIAL_WINDOW_SIZE: 0}) + call(1) + call(3))
    for event in events:
        server.answers.send_data(event.stream, b"answer")
    server.receive(http2.encode_settings({http2.Setting.INITIAL_WINDOW_SIZE: 6}), 0.0)
    assert [payload for kind, *_, payload in sent(server) if kind == FrameType.DATA] == [b"answer", b"answer"]


def test_calls_that_are_cancelled_immediately_are_counted() -> None:
    """CVE-2023-44487."""
    server, _ = begun()
    pairs = [call(2 * number + 1) + http2.encode_reset(2 * number + 1, 8) for number in range(limits.MAX_RESETS + 1)]
    server.receive(b"".join(pairs[:-1]), 0.0)
    assert not server.is_over
    server.take()
    server.receive(pairs[-1], 0.0)
    assert goaway(server) == ErrorCode.ENHANCE_YOUR_CALM


def test_requests_cancelled_after_they_were_complete_have_a_limit_of_their_own() -> None:
    server, _ = begun()
    ids = range(1, 2 * limits.MAX_CANCELLED_CALLS + 2, 2)
    pairs = [
        call(item) + encode(http2.DATA, http2.END_STREAM, item, b"request") + http2.encode_reset(item, 8)
        for item in ids
    ]
    server.receive(b"".join(pairs[:-1]), 0.0)
    assert not server.is_over
    server.take()
    server.receive(pairs[-1], 0.0)
    assert goaway(server) == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("count", [limits.MAX_HEADER_FRAMES, limits.MAX_HEADER_FRAMES + 1])
def test_a_header_block_has_this_many_frames(count: int) -> None:
    """CVE-2024-27316."""
    parts = [encode(http2.HEADERS, 0, 1, BLOCK), *[encode(http2.CONTINUATION, 0, 1)] * (count - 2)]
    server, events = begun(b"".join(parts) + encode(http2.CONTINUATION, http2.END_HEADERS, 1))
    assert server.is_over is (count > limits.MAX_HEADER_FRAMES)
    assert len(events) == (count <= limits.MAX_HEADER_FRAMES)


def test_header_fields_that_are_too_long_end_the_connection() -> None:
    server, _ = begun(call(1, block=BLOCK + block_of((b"x", b"y" * limits.MAX_HEADER_LIST_BYTES))))
    assert goaway(server) == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [limits.MAX_HTTP2_FRAME_BYTES, limits.MAX_HTTP2_FRAME_BYTES + 1])
def test_the_largest_frame(size: int) -> None:
    server, _ = begun(call(1) + encode(http2.DATA, 0, 1, b"x" * size))
    assert server.is_over is (size > limits.MAX_HTTP2_FRAME_BYTES)


def test_what_is_no_http2_gets_an_error() -> None:
    server = Http2()
    server.receive(b"PRI * HTTP/2.1\r\n\r\n", 0.0)
    assert goaway(server) == ErrorCode.PROTOCOL_ERROR
    assert "preface" in str(server.fault)


def test_late_frames_of_calls_that_are_over_are_known_for_a_while() -> None:
    server, _ = begun()
    for number in range(limits.KEPT_STREAM_IDS + 5):
        server.receive(call(2 * number + 1, end=True), 0.0)
        server.answers.send_end(server.streams[2 * number + 1], TRAILERS)
    assert len(server.answers.gone) == limits.KEPT_STREAM_IDS


def test_after_goaway_nothing_is_read() -> None:
    server, _ = begun()
    server.end()
    assert server.receive(call(1), 0.0) == []


# Which header fields a request may have. Fields are checked once only, so everything is tried twice.


PSEUDO: list[Field] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/")]


def test_fields_are_found_by_name_and_repeated_ones_are_joined() -> None:
    for _ in range(2):
        found = request_fields([*PSEUDO, (b":authority", b"a"), (b"te", b"trailers"), (b"a", b"1"), (b"a", b"2")])
        assert found[b"a"] == b"1, 2"
        assert request_fields([*PSEUDO, (b"a", b"1")])[b"a"] == b"1"


@pytest.mark.parametrize(
    "fields",
    [
        PSEUDO[1:],
        [*PSEUDO, (b":path", b"/")],
        [(b"a", b"1"), *PSEUDO],
        [*PSEUDO, (b":status", b"200")],
        [*PSEUDO, (b":other", b"1")],
        [*PSEUDO, (b"A", b"1")],
        [*PSEUDO, (b"", b"1")],
        [*PSEUDO, (b"connection", b"close")],
        [*PSEUDO, (b"transfer-encoding", b"chunked")],
        [*PSEUDO, (b"te", b"gzip")],
        [*PSEUDO, (b"x-mq-client-id", b"a"), (b"x-mq-client-id", b"b")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
    ],
)
def test_malformed_requests(fields: list[Field]) -> None:
    request_fields([*PSEUDO, (b"te", b"trailers")])  # the same names, all well
    for _ in range(2):
        with pytest.raises(MalformedRequest):
            request_fields(fields)


@pytest.mark.parametrize("field", [(b":path", b"/"), (b"A", b"1"), (b"te", b"gzip")])
def test_malformed_trailers(field: Field) -> None:
    check_trailers([(b"grpc-status", b"0")])
    with pytest.raises(MalformedRequest):
        check_trailers([field])


def test_a_length_is_a_number() -> None:
    assert content_length({}) == -1
    assert content_length({b"content-length": b"12"}) == 12
    for text in (b"", b"-1", b"1.5", b"9" * 16):
        with pytest.raises(MalformedRequest):
            content_length({b"content-length": text})


# gRPC's messages, status and deadlines.


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 30), max_size=60))
def test_messages_come_whole_however_their_data_is_cut(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(map(encode_message, messages))
    reader, found = MessageReader(), []
    while data:
        size = sizes.pop() if sizes else len(data)
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == messages
    assert reader.waiting_bytes == 0


def test_a_message_that_comes_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    reader, count = MessageReader(), 200_000
    tracemalloc.start()
    try:
        reader.feed(b"\0" + (2 * count + 1).to_bytes(4, "big"))
        for number in range(count):
            reader.feed(number.to_bytes(2, "big", signed=False) if number < 65_536 else bytes((number & 0xFF, 1)))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.waiting_bytes == 2 * count + 5
    assert kept_bytes < 1.25 * reader.waiting_bytes


def test_the_largest_message_is_taken_and_a_larger_one_is_refused_by_its_prefix() -> None:
    reader = MessageReader()
    assert reader.feed(b"\0" + MAX_CALL_BYTES.to_bytes(4, "big")) == []
    assert len(reader.feed(b"x" * MAX_CALL_BYTES)[0]) == MAX_CALL_BYTES
    with pytest.raises(CallFault, match=f"maximum {MAX_CALL_BYTES}") as fault:
        reader.feed(b"\0" + (MAX_CALL_BYTES + 1).to_bytes(4, "big"))
    assert fault.value.status is Status.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_refused() -> None:
    with pytest.raises(CallFault, match="identity") as fault:
        MessageReader().feed(b"\1\0\0\0\1x")
    assert fault.value.status is Status.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("text", "seconds"), [(b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9)]
)
def test_deadlines(text: bytes, seconds: float) -> None:
    assert timeout_s(text) == pytest.approx(seconds)
    assert timeout_s(b"9" * 8 + text[-1:]) is not None
    for wrong in (text[-1:], b"123456789" + text[-1:], text[:-1], b"-1" + text[-1:], b"1.5S", b""):
        with pytest.raises(CallFault, match="grpc-timeout"):
            timeout_s(wrong)


def test_without_a_deadline_there_is_none() -> None:
    assert timeout_s(None) is None


def test_a_status_says_why() -> None:
    assert _decoded(trailers()) == {"grpc-status": "0"}
    found = _decoded(trailers(Status.NOT_FOUND, "100 % größer\n"))
    assert found == {"grpc-status": "5", "grpc-message": "100 %25 gr%C3%B6%C3%9Fer%0A"}
    found = _decoded(only_trailers(Status.INTERNAL, "x" * (MAX_STATUS_CHARS + 1)))
    assert found["grpc-message"] == "x" * MAX_STATUS_CHARS


def _decoded(block: bytes) -> dict[str, str]:
    return {str(name): str(value) for name, value in hpack.Decoder().decode(block)}


def test_text_that_no_utf8_can_hold_is_shown_all_the_same() -> None:
    assert percent_encoded("\ud800") == b"?"


@pytest.mark.parametrize("text", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_content_types_of_grpc(text: bytes) -> None:
    assert is_grpc(text)
    assert not is_grpc(text.replace(b"grpc", b"json"))
    assert not is_grpc(b"application/grpc-web")


# Header blocks, against the `hpack` library.


NAMES = st.sampled_from([b":path", b":method", b":authority", b"te", b"x-mq-client-id", b"x-mq-request-id", b"cookie"])
VALUES = st.binary(max_size=200) | st.sampled_from([b"", b"POST", b"/", b"trailers", b"x" * 3000])
FIELDS_HPACK = st.lists(st.tuples(NAMES | st.binary(min_size=1, max_size=20), VALUES), max_size=12)
MALFORMED = (HpackError, HeadersTooLarge)


def _blocks(encoder: hpack.Encoder, lists: list[list[tuple[bytes, bytes]]], huffman: bool) -> list[bytes]:
    return [encoder.encode(fields, huffman=huffman) for fields in lists]


@given(st.lists(FIELDS_HPACK, max_size=6), st.booleans())
def test_blocks_of_the_library_are_decoded(lists: list[list[tuple[bytes, bytes]]], huffman: bool) -> None:
    lists = [fields for fields in lists if sum(len(n) + len(v) + 32 for n, v in fields) <= MAX_HEADER_LIST_BYTES]
    decoder = Decoder()
    for fields, block in zip(lists, _blocks(hpack.Encoder(), lists, huffman), strict=True):
        assert decoder.decode(block) == fields


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_no_block_does_anything_but_what_the_library_makes_of_it(blocks: list[bytes]) -> None:
    """The library's integers have no limit, and so a number that it takes may be too large for us; it then names an entry
    that is not there, or a length beyond the block."""
    ours, theirs = Decoder(), hpack.Decoder()
    theirs.max_header_list_size = MAX_HEADER_LIST_BYTES
    theirs.max_allowed_table_size = HPACK_TABLE_BYTES
    for block in blocks:
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except hpack.HPACKError:
            with pytest.raises(MALFORMED):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


@given(st.binary(max_size=300))
def test_huffman_codes_of_the_library_are_decoded(text: bytes) -> None:
    code = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)
    rest = len(code) - 0x7F
    length = bytes((0x80 | len(code),)) if rest < 0 else bytes((0xFF, rest & 0x7F | 0x80, rest >> 7))
    assert Decoder().decode(b"\x00\x01a" + length + code) == [(b"a", text)]


@given(FIELDS_HPACK)
def test_the_library_decodes_what_is_encoded(fields: list[tuple[bytes, bytes]]) -> None:
    found = [
        (bytes(name), bytes(value)) for name, value in hpack.Decoder(2**20).decode(encode_hpack(*fields), raw=True)
    ]
    assert found == fields


@pytest.mark.parametrize("size", [MAX_HEADER_LIST_BYTES - ENTRY_BYTES - 1, MAX_HEADER_LIST_BYTES - ENTRY_BYTES])
def test_a_list_of_the_largest_size_is_decoded(size: int) -> None:
    block = encode_hpack((b"a", b"x" * (size - 1)))
    assert Decoder().decode(block) == [(b"a", b"x" * (size - 1))]


def test_a_longer_list_is_refused_though_its_block_is_short() -> None:
    """An entry of 4 KB that is named again and again: a block of few bytes with very many fields."""
    decoder = Decoder()
    encoder = hpack.Encoder()
    large = (b"x", b"y" * (HPACK_TABLE_BYTES - ENTRY_BYTES - 1))
    decoder.decode(encoder.encode([large]))
    assert decoder.decode(b"\xbe" * 4) == [large] * 4
    with pytest.raises(HeadersTooLarge, match="longer than 16384 bytes"):
        decoder.decode(b"\xbe" * 5)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\x80", "entry 0"),
        (b"\xbe", "entry 62"),
        (b"\x7f\x00", "entry 63"),
        (b"\x00\x01a", "cut off"),
        (b"\x00\x05ab", "cut off"),
        (b"\xff\xff\xff\xff\xff\x0f", "too large"),
        (b"\x82\x20", "within a header block"),
        (b"\x3f\xe2\x1f", "maximum 4096"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "end symbol"),
        (b"\x00\x01a\x81\xfe", "cut off"),
        (b"\x00\x01a\x82\x1f\xff", "cut off"),
    ],
)
def test_a_malformed_block_is_refused_with_a_reason(block: bytes, reason: str) -> None:
    with pytest.raises(HpackError, match=reason):
        Decoder().decode(block)


def test_a_table_of_the_largest_size_may_be_asked_for_again() -> None:
    assert Decoder().decode(b"\x20\x3f\xe1\x1f\x82") == [(b":method", b"GET")]
