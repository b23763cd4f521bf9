"""Records as clients get them that pop, receipt handles, and bit sets."""

from __future__ import annotations

import base64

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.broker.pops.deliveries import Handle, decode_handle, encode_handle
from rocketlet.protocol.bodies import BodyError
from rocketlet.protocol.config import MAX_PROPERTY_BYTES
from rocketlet.protocol.group_bodies import MAX_BITS, decode_batch_acks
from rocketlet.protocol.message import (
    MessageError,
    decode_record,
    encode_host,
    encode_record,
    offset_texts,
    reconsume_times_in,
    with_attempts,
)
from rocketlet.protocol.properties import find

V4, V6 = encode_host("127.0.0.1", 1), encode_host("::1", 1)


def record_of(body: bytes, properties: bytes, times: int, born: bytes, store: bytes) -> bytes:
    flags = (0x10 if len(born) == 20 else 0) | (0x20 if len(store) == 20 else 0)
    return encode_record(3, 7, 5, 99, flags, 1, born, 2, store, times, 0, body, b"\x01t", properties)


hosts = st.sampled_from([V4, V6])


@given(
    st.binary(max_size=50),
    st.sampled_from([b"", b"KEYS\x01k", b"KEYS\x01k\x02"]),
    st.integers(0, 2**31 - 1),
    hosts,
    hosts,
)
def test_a_record_keeps_all_but_its_count_and_gets_its_handle(
    body: bytes, properties: bytes, times: int, born: bytes, store: bytes
) -> None:
    data = record_of(body, properties, 2, born, store)
    assert reconsume_times_in(data) == 2
    before, after = decode_record(data), decode_record(with_attempts(data, times, "a handle"))
    assert (after.reconsume_times, find(after.properties, "POP_CK")) == (times, "a handle")
    assert find(after.properties, "KEYS") == find(before.properties, "KEYS")
    assert after[1:10] == before[1:10]
    assert (after.body, after.topic, after.store_host) == (before.body, before.topic, before.store_host)


@pytest.mark.parametrize("room", [0, 1])
def test_a_record_without_room_goes_without_its_handle(room: int) -> None:
    handle = "h" * 20
    free = len("\x02POP_CK\x01") + len(handle) + room - 1
    text = b"k\x01" + b"v" * (MAX_PROPERTY_BYTES - 2 - free)
    found = decode_record(with_attempts(record_of(b"", text, 0, V4, V4), 1, handle))
    assert (find(found.properties, "POP_CK") == handle) == bool(room)
    assert found.reconsume_times == 1


@given(st.integers(0, 200))
def test_what_is_cut_off_is_refused(size: int) -> None:
    data = record_of(b"body", b"KEYS\x01k", 0, V4, V4)
    if size < len(data):
        with pytest.raises(MessageError):
            with_attempts(data[:size], 1, "h")


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**53),
    st.integers(0, 2**31),
    st.integers(0, 2),
)
def test_a_handle_reads_as_it_was_written(
    queue_id: int, offset: int, pop_ms: int, invisible_ms: int, mark: int
) -> None:
    text = encode_handle("broker-a", queue_id, offset, pop_ms, invisible_ms, mark)
    assert decode_handle(text) == Handle(queue_id, offset, pop_ms, mark, "broker-a")
    assert decode_handle(text + " 4200046") == decode_handle(text)  # Apache's brokers say the place in the log, too


@given(st.text())
def test_no_text_can_make_a_handle_raise(text: str) -> None:
    decode_handle(text)
    decode_handle(f"1 {text} 3 0 0 b 1 1")


def test_places_are_told_by_queue() -> None:
    starts, offsets = offset_texts([(0, 1, 7), (0, 2, 3), (0, 1, 5), (1, 1, 9)])
    assert starts == "0 1 5;0 2 3;1 1 9"
    assert offsets == "0 1 7,5;0 2 3;1 1 9"


@given(st.sets(st.integers(0, 200)))
def test_bits_are_read_as_base64_and_as_numbers_with_signs(numbers: set[int]) -> None:
    data = bytearray(26)
    for number in numbers:
        data[number // 8] |= 1 << number % 8
    signed = [value - 256 if value > 127 else value for value in data]
    for bits in (base64.b64encode(data).decode(), signed):
        entry = {"c": "g", "t": "t", "q": 1, "so": 10, "pt": 5, "it": 6, "b": bits}
        (ack,) = decode_batch_acks(orjson.dumps({"acks": [entry]}))
        assert set(ack.offsets) == {10 + number for number in numbers}


def test_more_than_so_many_are_not_acknowledged_at_once() -> None:
    full = base64.b64encode(b"\xff" * (MAX_BITS // 8)).decode()
    entry = {"c": "g", "t": "t", "q": 1, "so": 0, "pt": 5, "b": full}
    (ack,) = decode_batch_acks(orjson.dumps({"acks": [entry]}))
    assert len(ack.offsets) == MAX_BITS
    with pytest.raises(BodyError, match="4096"):
        decode_batch_acks(orjson.dumps({"acks": [entry, {**entry, "b": "AQ=="}]}))
