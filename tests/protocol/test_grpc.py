"""gRPC's messages, status and deadlines."""

from __future__ import annotations

import tracemalloc

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.config import MAX_CALL_BYTES, MAX_STATUS_CHARS
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
    with pytest.raises(CallFault, match=f"{MAX_CALL_BYTES} are allowed") as fault:
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
