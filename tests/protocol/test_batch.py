"""The body of a batch, and the records that a broker makes of it: the same bytes as one message after the other."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.broker.pops.deliveries import Handle, decode_handle, encode_handle
from rocketlet.protocol import message as m
from rocketlet.protocol.bodies import BodyError
from rocketlet.protocol.codes import RESPONSE_FLAG, VERSION, Language
from rocketlet.protocol.config import MAX_BATCH_ENTRIES, MAX_PROPERTY_BYTES, SENT_PROPERTY_BYTES
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, encode, encode_head
from rocketlet.protocol.group_bodies import MAX_BITS, decode_batch_acks
from rocketlet.protocol.headers import PullMessageResult, encode_found_head, encode_sent, write
from rocketlet.protocol.message import (
    BatchEntry,
    MessageError,
    Records,
    Shared,
    decode_batch,
    decode_record,
    encode_batch,
    encode_host,
    encode_record,
    encode_records,
    offset_texts,
    reconsume_times_in,
    split,
    with_attempts,
)
from rocketlet.protocol.names import tag_code
from rocketlet.protocol.properties import find

VECTOR = bytes.fromhex("00000028000000000000000000000003000000026869001057414954017472756502544147530141")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PROPERTIES = TEXT | st.lists(
    st.sampled_from(["TAGS\x01A", "TAGS\x01\u5355", "K\x01\U0001f600", "", "WAIT\x01true"])
).map("\x02".join)
ENTRIES = st.lists(
    st.builds(BatchEntry, st.integers(-(2**31), 2**31 - 1), st.binary(max_size=50), PROPERTIES), max_size=5
)
HOSTS = st.sampled_from([m.encode_host("10.0.0.1", 5000), m.encode_host("fe80::1", 65535)])
HOST = m.encode_host("10.0.0.1", 5000)
CLUSTER = "CLUSTER\x01c"


def shared(**fields: Any) -> Shared:
    values = Shared(b"\x01t", 3, 0, 1, HOST, 2, HOST, 4)
    return values._replace(**fields)


def together(data: bytes, of_all: Shared, offset: int, position: int, text: str = CLUSTER) -> Records:
    return encode_records(split(data, text.encode()), of_all, offset, position)


def one_by_one(
    entries: list[BatchEntry], of_all: Shared, offset: int, position: int, added: str = CLUSTER
) -> tuple[bytes, list[int], list[int]]:
    """The records, their positions and tag codes, made as those of single messages are."""
    records, positions, codes = b"", [], []
    for number, entry in enumerate(entries):
        text = entry.properties
        text += added if not text or not added or text[-1] == "\x02" else "\x02" + added
        positions.append(position + len(records))
        codes.append(tag_code(text))
        records += m.encode_record(
            of_all.queue_id,
            entry.flag,
            offset + number,
            positions[-1],
            of_all.sys_flag,
            of_all.born_ms,
            of_all.born_host,
            of_all.store_ms,
            of_all.store_host,
            of_all.reconsume_times,
            0,
            entry.body,
            of_all.topic,
            text.encode(),
        )
    return records, positions, codes


def test_the_contracts_vector() -> None:
    entries = [BatchEntry(3, b"hi", "WAIT\x01true\x02TAGS\x01A")]
    assert encode_batch(entries) == VECTOR
    assert decode_batch(VECTOR) == entries


@given(ENTRIES)
def test_batches_come_back_as_they_were(entries: list[BatchEntry]) -> None:
    assert decode_batch(encode_batch(entries)) == entries


@given(ENTRIES, HOSTS, HOSTS, PROPERTIES, st.integers(0, 2**62), st.integers(0, 2**62))
@example([BatchEntry(0, b"", "a\x01" + "x" * size) for size in range(32_240, 32_248)], HOST, HOST, "C\x01c", 0, 0)
def test_the_records_are_those_of_single_messages(
    entries: list[BatchEntry], born: bytes, store: bytes, text: str, offset: int, position: int
) -> None:
    of_all = shared(born_host=born, store_host=store, sys_flag=m.host_flags(born, store))
    found = together(encode_batch(entries), of_all, offset, position, text)
    data, positions, codes = one_by_one(entries, of_all, offset, position, text)
    assert found.data == data
    assert (found.positions, found.tag_codes) == (positions, codes)
    assert [position + sum(found.sizes[:number]) for number in range(len(entries))] == positions


@pytest.mark.parametrize("count", [511, 512, 513, 1024, 1025])
def test_a_batch_of_several_pieces_is_encoded_as_one(count: int) -> None:
    tags = ["", "TAGS\x01A", "K\x01v"]
    entries = [BatchEntry(number, b"b" * (number % 7), tags[number % 3]) for number in range(count)]
    found = together(encode_batch(entries), shared(), 7, 9)
    data, positions, codes = one_by_one(entries, shared(), 7, 9)
    assert (found.data, found.positions, found.tag_codes) == (data, positions, codes)
    assert len(found.sizes) == count


def test_the_message_that_is_malformed_is_named_wherever_it_is() -> None:
    whole = raw(b"") * 600
    with pytest.raises(m.MessageError, match="batch entry 600 is cut off"):
        together(whole + raw(b"")[:10], shared(), 0, 0)
    with pytest.raises(m.MessageError, match="batch entry 600 is malformed"):
        together(whole + raw(b"")[:-1] + b"\1", shared(), 0, 0)


@given(st.binary(max_size=100))
@example(VECTOR + VECTOR[:19])
@example(VECTOR[:-1])
@example(bytes.fromhex("ffffffea000000000000000000000000000000000000"))
def test_garbage_is_no_batch_and_no_crash(data: bytes) -> None:
    try:
        entries = decode_batch(data)
    except m.MessageError:
        with pytest.raises(m.MessageError):
            together(data, shared(), 0, 0)
    else:
        assert len(encode_batch(entries)) == len(data)


@given(ENTRIES.filter(bool), st.data())
def test_a_flipped_byte_is_read_as_both_ways_read_it(entries: list[BatchEntry], drawn: st.DataObject) -> None:
    data = bytearray(encode_batch(entries))
    data[drawn.draw(st.integers(0, len(data) - 1))] ^= drawn.draw(st.integers(1, 255))
    try:
        read = decode_batch(bytes(data))
    except m.MessageError:
        with pytest.raises(m.MessageError):
            together(bytes(data), shared(), 0, 0)
    else:
        assert together(bytes(data), shared(), 7, 9).data == one_by_one(read, shared(), 7, 9)[0]


def raw(properties: bytes) -> bytes:
    """A batch entry with the body x."""
    sizes = (23 + len(properties)).to_bytes(4, "big"), len(properties).to_bytes(2, "big")
    return sizes[0] + bytes(12) + b"\0\0\0\1x" + sizes[1] + properties


def test_a_character_that_two_messages_share_is_none() -> None:
    halves = [bytes((byte,)) for byte in "\u00e9".encode()]
    with pytest.raises(m.MessageError, match="not UTF-8"):
        decode_batch(b"".join(map(raw, halves)))


def test_properties_are_as_long_as_they_may_be() -> None:
    room = SENT_PROPERTY_BYTES - len("\x02CLUSTER\x01c")
    longest = encode_batch([BatchEntry(0, b"x", "y" * room)])
    made = m.decode_record(together(longest, shared(), 0, 0).data)
    assert m.without_checksum(made).properties.endswith("CLUSTER\x01c")
    with pytest.raises(m.MessageError, match="32256 bytes including the broker's own; maximum 32255"):
        together(encode_batch([BatchEntry(0, b"x", "y" * (room + 1))]), shared(), 0, 0)
    with pytest.raises(m.MessageError, match="maximum 32255"):
        together(raw(b"y" * 40_000), shared(), 0, 0)


def test_a_batch_holds_as_many_as_it_may() -> None:
    assert len(decode_batch(raw(b"") * MAX_BATCH_ENTRIES)) == MAX_BATCH_ENTRIES
    with pytest.raises(m.MessageError, match="more than 65536 messages"):
        decode_batch(raw(b"") * (MAX_BATCH_ENTRIES + 1))
    assert len(together(raw(b"") * MAX_BATCH_ENTRIES, shared(), 0, 0).sizes) == MAX_BATCH_ENTRIES
    with pytest.raises(m.MessageError, match="more than 65536 messages"):
        together(raw(b"") * (MAX_BATCH_ENTRIES + 1), shared(), 0, 0)


# The answer to a send is the same as the general encoder makes it.


IDS = st.lists(st.integers(0, 2**63 - 1).map(lambda position: f"7F000001{position:016X}"), min_size=1, max_size=40)
INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.sampled_from([JSON, ROCKETMQ, MSGPACK]), INT32, IDS.map(",".join), INT32, st.integers(0, 2**63 - 1))
def test_the_answer_to_a_send_is_what_the_encoder_makes(
    kind: int, opaque: int, ids: str, queue_id: int, offset: int
) -> None:
    ext: dict[str, ExtValue] = {"msgId": ids, "queueId": queue_id, "queueOffset": offset}
    if kind != MSGPACK:
        ext |= {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    frame = Frame(0, opaque, ext, b"", RESPONSE_FLAG, None, int(Language.JAVA), VERSION, kind)
    assert encode_sent(kind, opaque, ids, queue_id, offset, "DefaultRegion") == encode(frame)


# The head of an answer with messages is the same as the general encoder makes it.


OFFSET = st.integers(0, 2**63 - 1)


@given(st.sampled_from([JSON, ROCKETMQ, MSGPACK]), INT32, st.tuples(OFFSET, OFFSET, OFFSET), st.integers(0, 2**24))
def test_the_head_of_found_messages_is_what_the_encoder_makes(
    kind: int, opaque: int, offsets: tuple[int, int, int], size: int
) -> None:
    ext = write(PullMessageResult(0, *offsets))
    frame = Frame(0, opaque, ext, b"", RESPONSE_FLAG, "FOUND", int(Language.JAVA), VERSION, kind)
    assert encode_found_head(kind, opaque, offsets, size) == encode_head(frame, size)


# Records as clients get them that pop, receipt handles, and bit sets.


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
    lite = encode_handle("broker-a", queue_id, offset, pop_ms, invisible_ms, mark, lite_topic="a1")
    assert decode_handle(lite) == Handle(queue_id, offset, pop_ms, mark, "broker-a", "a1")


@given(st.text())
def test_no_text_can_make_a_handle_raise(text: str) -> None:
    decode_handle(text)
    decode_handle(f"1 {text} 3 0 0 b 1 1")


def test_places_are_distinguished_by_queue() -> None:
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


def test_more_than_this_many_are_not_acknowledged_together() -> None:
    full = base64.b64encode(b"\xff" * (MAX_BITS // 8)).decode()
    entry = {"c": "g", "t": "t", "q": 1, "so": 0, "pt": 5, "b": full}
    (ack,) = decode_batch_acks(orjson.dumps({"acks": [entry]}))
    assert len(ack.offsets) == MAX_BITS
    with pytest.raises(BodyError, match="4096"):
        decode_batch_acks(orjson.dumps({"acks": [entry, {**entry, "b": "AQ=="}]}))
