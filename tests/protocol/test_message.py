from __future__ import annotations

import base64
import gzip
import random
import socket
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.broker.pops.requests import Handle, decode_handle, encode_handle
from rocketlet.protocol import message as m
from rocketlet.protocol import properties as props
from rocketlet.protocol.bodies import BodyError, finish
from rocketlet.protocol.checksum import crc32
from rocketlet.protocol.codes import RESPONSE_FLAG, VERSION, Language
from rocketlet.protocol.config import (
    GZIP_MEMBER_BYTES,
    INFLATED_PIECE_BYTES,
    MAX_BATCH_ENTRIES,
    MAX_PROPERTY_BYTES,
    SENT_PROPERTY_BYTES,
)
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, encode, encode_head
from rocketlet.protocol.group_bodies import MAX_BITS, decode_batch_acks
from rocketlet.protocol.headers import PullMessageResult, encode_found_head, encode_sent, write
from rocketlet.protocol.message import (
    BatchEntry,
    Inflater,
    MessageError,
    Records,
    Shared,
    SpentTooMuch,
    begin_of,
    compressed,
    decode_batch,
    decode_record,
    decompressed,
    encode_batch,
    encode_host,
    encode_record,
    encode_records,
    offset_texts,
    reconsume_times_in,
    split,
    with_attempts,
)
from rocketlet.protocol.names import SubscriptionError, java_hash, parse_subscription, tag_code
from rocketlet.protocol.properties import find

VECTOR = bytes.fromhex(
    "00000064daa320a758932aac000000010000000700000000000000050000000000000100000000000000018bcfe568000a00000100001388"
    "0000018bcfe568010a00000200002a9f00000000000000000000000000000002686901540006544147530141"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HOSTS = st.sampled_from([m.encode_host("10.0.0.1", 5000), m.encode_host("fe80::1", 65535)])


@given(st.binary(max_size=300), st.binary(max_size=5))
def test_checksums_are_those_of_zlib_and_continue_from_a_part(first: bytes, second: bytes) -> None:
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


def record_bytes() -> bytes:
    return m.encode_record(
        1,
        7,
        5,
        256,
        0,
        1_700_000_000_000,
        m.encode_host("10.0.0.1", 5000),
        1_700_000_000_001,
        m.encode_host("10.0.0.2", 10911),
        0,
        0,
        b"hi",
        b"\x01T",
        b"TAGS\x01A",
    )


def test_the_contracts_message_vector() -> None:
    data = bytearray(record_bytes()[: -m.CHECKSUM_BYTES])
    data[3] -= m.CHECKSUM_BYTES  # the record's size, and its properties'
    data[-len(b"TAGS\x01A") - 1] -= m.CHECKSUM_BYTES
    assert data == VECTOR
    record = m.decode_record(VECTOR)
    assert (record.topic, record.body, record.properties) == ("T", b"hi", "TAGS\x01A")
    assert record.offset_id == "0A00000200002A9F0000000000000100"
    assert not m.is_intact(VECTOR, 0, record), "this broker adds a checksum over the whole record"


@given(st.binary(max_size=300), TEXT, HOSTS, HOSTS, st.integers(0, 2**62))
def test_records_come_back_as_they_were(body: bytes, properties: str, born: bytes, store: bytes, offset: int) -> None:
    data = m.encode_record(
        3, 0, offset, offset, m.host_flags(born, store), 1, born, 2, store, 4, 0, body, b"\x03a-b", properties.encode()
    )
    stored = m.decode_record(b"xx" + data, 2)
    assert m.is_intact(b"xx" + data, 2, stored)
    assert props.decode(stored.properties) == props.decode(properties), "clients see no other property"
    record = m.without_checksum(stored)
    assert (record.body, record.properties, record.topic) == (body, properties, "a-b")
    assert (record.queue_offset, record.born_host, record.store_host) == (offset, born, store)
    assert list(m.decode_records(data + data)) == [m.decode_record(data)] * 2


def test_no_flipped_bit_goes_unseen() -> None:
    whole = record_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                record = m.decode_record(bytes(data))
            except m.MessageError:
                continue
            assert not m.is_intact(bytes(data), 0, record), at


@given(st.binary(max_size=300), TEXT, HOSTS, HOSTS, st.integers(0, 2**62), st.data())
def test_a_record_is_known_without_decoding_it(
    body: bytes, properties: str, born: bytes, store: bytes, offset: int, drawn: st.DataObject
) -> None:
    flags = m.host_flags(born, store)
    data = m.encode_record(3, 0, 9, offset, flags, 1, born, 2, store, 4, 0, body, b"\x03a-b", properties.encode())
    place = (b"\x03a-b", 3, 9, offset)
    assert m.is_certainly(data, *place)
    assert not m.is_certainly(data, b"\x03a-c", 3, 9, offset)
    assert not m.is_certainly(data, b"\x03a-b", 3, 8, offset)
    at = drawn.draw(st.integers(0, len(data) - 1))
    damaged = data[:at] + bytes((data[at] ^ drawn.draw(st.integers(1, 255)),)) + data[at + 1 :]
    assert not m.is_certainly(damaged, *place)
    assert not m.is_certainly(data[:at], *place)


def test_properties_that_leave_no_room_go_without_a_checksum() -> None:
    for size, has_room in (
        (MAX_PROPERTY_BYTES - m.CHECKSUM_BYTES, True),
        (MAX_PROPERTY_BYTES - m.CHECKSUM_BYTES + 1, False),
    ):
        host = m.encode_host("10.0.0.1", 1)
        text = b"a\x01" + b"x" * (size - 2)
        data = m.encode_record(0, 0, 0, 0, 0, 0, host, 0, host, 0, 0, b"", b"\x01t", text)
        record = m.decode_record(data)
        assert m.is_intact(data, 0, record)
        assert (m.without_checksum(record) != record) == has_room
        assert m.without_checksum(record).properties.encode() == text


@given(st.integers(0, len(VECTOR) - 1))
def test_a_cut_off_record_is_refused(size: int) -> None:
    with pytest.raises(m.MessageError):
        m.decode_record(VECTOR[:size])


@given(st.lists(st.tuples(st.binary(max_size=50), TEXT, st.integers(0, 2**62)), max_size=5), HOSTS)
def test_records_are_cut_without_decoding_them(values: list[tuple[bytes, str, int]], born: bytes) -> None:
    flags = m.host_flags(born, born)
    records = [
        m.encode_record(0, 0, offset, 0, flags, 0, born, 0, born, 0, 0, body, b"\x01t", text.encode())
        for body, text, offset in values
    ]
    assert m.split_records(b"".join(records)) == records
    assert [m.offset_in(record) for record in records] == [offset for _, _, offset in values]
    assert [m.properties_in(record) for record in records] == [m.decode_record(record).properties for record in records]


@given(st.integers(0, len(VECTOR) - 1))
def test_properties_of_a_cut_off_record_are_refused(size: int) -> None:
    with pytest.raises(m.MessageError):
        m.properties_in(VECTOR[:size])


@pytest.mark.parametrize("data", [VECTOR[:-1], VECTOR + VECTOR[:7], VECTOR + b"x" * 100, bytes(100), b"\xff" * 100])
def test_what_is_no_row_of_records_is_not_cut(data: bytes) -> None:
    with pytest.raises(m.MessageError):
        m.split_records(data)


@pytest.mark.parametrize(
    ("text", "code"),
    [("TagA", 2598919), ("TagB", 2598920), ("*", 42), ("订单", 1129459), ("AverageTagNameWithOverflow", -2128701552)],
)
def test_tags_are_hashed_as_java_hashes_them(text: str, code: int) -> None:
    assert java_hash(text) == code


def test_tag_expressions_are_split_and_trimmed() -> None:
    subscription = parse_subscription("T", " TagA ||TagB|| ")
    assert subscription.tags == {"TagA", "TagB"}
    assert subscription.codes == {2598919, 2598920}
    assert parse_subscription("T", None).takes_all
    assert parse_subscription("T", "").takes_all
    with pytest.raises(SubscriptionError, match="names no tag"):
        parse_subscription("T", " || ")


def test_properties_are_read_by_javas_rules() -> None:
    text = "A\x01B\x02C\x01\x02\x01D\x02E\x01F\x01G\x02HH"
    assert props.decode(text) == {"A": "B", "E": "F\x01G"}
    assert props.find("XTAGS\x01no\x02TAGS\x01yes\x02K\x01v", "TAGS") == "yes"
    assert props.find("TAGS\x01first", "TAGS") == "first"
    assert props.find("XTAGS\x01no", "TAGS") is None
    assert props.without("A\x01B\x02WAIT\x01true\x02C\x01D", "WAIT") == "A\x01B\x02C\x01D"


@given(st.text(st.sampled_from("aAB\x01\x02"), max_size=24), st.sampled_from(["a", "A", "AB", "BA"]))
def test_one_property_is_found_as_all_are_read(text: str, name: str) -> None:
    """Also of a name that occurs twice, or has no value."""
    assert props.find(text, name) == props.decode(text).get(name)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z]{1,8}", fullmatch=True), st.from_regex(r"[^\x01\x02]{1,20}", fullmatch=True), max_size=6
    )
)
def test_properties_come_back_as_they_were(properties: dict[str, str]) -> None:
    text = props.encode(properties)
    assert props.decode(text) == properties
    for name, value in properties.items():
        assert props.find(text, name) == value
        assert name not in props.decode(props.without(text, name))


@given(st.binary(max_size=2000))
def test_bodies_survive_compression(body: bytes) -> None:
    assert decompressed(*compressed(body)) == body


@pytest.mark.parametrize("flags", [0x1, 0x101, 0x201, 0x301])
def test_a_malformed_compressed_body_is_refused(flags: int) -> None:
    with pytest.raises(m.MessageError):
        decompressed(b"certainly not compressed", flags)


ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def without_size(zstd: Any) -> Callable[[bytes], bytes]:
    """A compressor whose frames do not state the size of their content."""

    def compress(body: bytes) -> bytes:
        return bytes(zstd.compress(body, options={zstd.CompressionParameter.content_size_flag: False}))

    return compress


@pytest.mark.parametrize("flag", [0x101, 0x201])
def test_all_frames_of_a_body_are_decompressed(flag: int) -> None:
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    pack = {0x101: lz4_frame.compress, 0x201: zstd.compress}[flag]
    plain = [bytes(300_000), b"", b"the end"]
    assert finish(Inflater().inflating(b"".join(map(pack, plain)), flag, 1 << 22)) == b"".join(plain)
    with pytest.raises(m.MessageError):
        finish(Inflater().inflating(pack(b"x") + b"no frame", flag, 1 << 22))


def test_a_body_that_inflates_beyond_the_limit_is_refused() -> None:
    bomb = zlib.compress(b"\0" * (65 * 1024 * 1024))
    with pytest.raises(m.MessageError, match="or has more than"):
        decompressed(bomb, 0x301)


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd", "zstd without its size"])
def test_a_body_may_inflate_up_to_the_limit(kind: str) -> None:
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    flag, pack = {
        "zlib": (0x301, zlib.compress),
        "lz4": (0x101, lz4_frame.compress),
        "zstd": (0x201, zstd.compress),
        "zstd without its size": (0x201, without_size(zstd)),
    }[kind]
    for body in (b"x" * 1000, bytes(range(250)) * 4):
        assert decompressed(pack(body), flag, 1000) == body
        with pytest.raises(m.MessageError):
            decompressed(pack(body + b"x"), flag, 1000)


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001])
def test_the_begin_of_a_body_is_inflated_and_no_more(kind: str, size: int) -> None:
    """A message of 64 KB inflates to 63 MiB; 60 of them took 2.7 GB of whoever only showed their first line."""
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    packs: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
        "zlib": (0x301, zlib.compress),
        "lz4": (0x101, lz4_frame.compress),
        "zstd": (0x201, zstd.compress),
    }
    flag, pack = packs[kind]
    body = bytes(range(250)) * 4
    assert begin_of(pack(body), flag, size) == (body[:size], size >= 1000)
    assert begin_of(body, 0, size) == (body[:size], size >= 1000)
    bomb = pack(bytes(32 * 1024 * 1024))
    tracemalloc.start()
    found = begin_of(bomb, flag, size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == (bytes(size), False)
    assert peak < 2 * 1024 * 1024
    with pytest.raises(m.MessageError):
        begin_of(b"certainly not compressed", flag, size)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(0, 20))
def test_all_members_of_a_gzip_body_are_decompressed_as_python_decompresses_them(
    members: list[bytes], padding: int
) -> None:
    body = b"".join(map(gzip.compress, members)) + bytes(padding)
    assert finish(Inflater().inflating_gzip(body, 2000)) == gzip.decompress(body) == b"".join(members)


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(bytes(300_001)),
        gzip.compress(bytes(300_000))[:-8] + bytes(8),
        gzip.compress(bytes(300_000))[:-9],
        gzip.compress(bytes(300_000)) + b"no member",
    ],
    ids=["too large", "wrong checksum", "cut off", "something behind it"],
)
def test_a_body_that_cannot_be_decompressed_costs_what_came_out_of_it(body: bytes) -> None:
    inflater = Inflater()
    with pytest.raises(m.MessageError):
        finish(inflater.inflating_gzip(body, 300_000))
    assert inflater.spent_bytes >= 300_000
    assert inflater.spent_bytes <= 300_000 + 2 * INFLATED_PIECE_BYTES + 2 * GZIP_MEMBER_BYTES


@pytest.mark.parametrize("flag", [0x301, 0x101, 0x201])
def test_damaged_bodies_of_all_kinds_are_counted_and_whole_ones_too(flag: int) -> None:
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    pack = {0x301: zlib.compress, 0x101: lz4_frame.compress, 0x201: zstd.compress}[flag]
    inflater = Inflater()
    assert finish(inflater.inflating(pack(bytes(300_000)), flag, 300_000)) == bytes(300_000)
    assert inflater.spent_bytes == 300_000
    with pytest.raises(m.MessageError):
        finish(inflater.inflating(pack(bytes(300_001)), flag, 300_000))
    assert inflater.spent_bytes >= 600_000


@pytest.mark.parametrize("flag", [0x301, 0x101, 0x201])
@pytest.mark.parametrize("is_random", [False, True])
def test_bodies_of_all_kinds_are_decompressed_in_pieces(flag: int, is_random: bool) -> None:
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    pack = {0x301: zlib.compress, 0x101: lz4_frame.compress, 0x201: zstd.compress}[flag]
    size = 10 * INFLATED_PIECE_BYTES + 17
    plain = random.Random(1).randbytes(size) if is_random else bytes(size)
    inflater, packed = Inflater(), pack(plain)
    sizes, begun = [0], inflater.inflating(packed, flag, size)
    with pytest.raises(StopIteration) as ended:
        while True:
            next(begun)
            sizes.append(inflater.spent_bytes)
    assert ended.value.value == plain
    assert max(after - before for before, after in pairwise(sizes)) <= 2 * INFLATED_PIECE_BYTES
    for cut in (1, 2, 25, len(packed) // 2):
        with pytest.raises(m.MessageError):
            finish(Inflater().inflating(packed[:-cut], flag, size))


def test_a_zstandard_stream_that_does_not_state_its_size_may_not_be_cut_off() -> None:
    zstd = pytest.importorskip(ZSTD)
    plain = random.Random(1).randbytes(300_000)
    packed = without_size(zstd)(plain)
    assert finish(Inflater().inflating(packed, 0x201, 300_000)) == plain
    for cut in (*range(1, 60), 100_000):
        with pytest.raises(m.MessageError):
            finish(Inflater().inflating(packed[:-cut], 0x201, 300_000))


def test_what_becomes_much_is_decompressed_in_pieces() -> None:
    work = Inflater().inflating_gzip(gzip.compress(bytes(10 * INFLATED_PIECE_BYTES)), 1 << 22)
    assert len(list(work)) >= 10


def test_many_empty_members_are_work_too() -> None:
    lz4_frame, zstd = pytest.importorskip("lz4.frame"), pytest.importorskip(ZSTD)
    inflater = Inflater(10 * GZIP_MEMBER_BYTES)
    with pytest.raises(SpentTooMuch):
        finish(inflater.inflating_gzip(gzip.compress(b"") * 11, 1 << 22))
    for flag, frame in ((0x101, lz4_frame.compress(b"")), (0x201, zstd.compress(b""))):
        with pytest.raises(SpentTooMuch):
            finish(Inflater(10 * GZIP_MEMBER_BYTES).inflating(frame * 12, flag, 1 << 22))


@pytest.mark.parametrize(("module", "kind"), [("lz4.frame", 0x101), (ZSTD, 0x201)])
def test_a_compression_whose_library_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, kind: int
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(m.MessageError, match=r"missing: pip install '\.\[compression\]'"):
        decompressed(b"whatever", kind)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "255.255.255.255", "::1", "fe80::1", "2001:db8::8:800:200c:417a", "::ffff:1.2.3.4"]
)
def test_an_address_is_written_as_the_operating_system_writes_it(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    written = m.encode_host(address, 9876)
    assert written[:-4] == socket.inet_pton(family, address)
    assert m.decode_host(written) == (socket.inet_ntop(family, written[:-4]), 9876)


def test_bytes_that_are_no_address_are_refused() -> None:
    for count in (0, 4, 7, 9, 12, 19, 21):
        with pytest.raises(ValueError, match=r"\d"):
            m.decode_host(bytes(count))
    for text in ("", "localhost", "1.2.3", "1.2.3.256", "1:2"):
        with pytest.raises(m.MessageError, match="is not an IP address"):
            m.encode_host(text, 1)


# The body of a batch, and the records that a broker makes of it: the same bytes as one message after the other.


VECTOR_BATCH = bytes.fromhex("00000028000000000000000000000003000000026869001057414954017472756502544147530141")
PROPERTIES = TEXT | st.lists(
    st.sampled_from(["TAGS\x01A", "TAGS\x01\u5355", "K\x01\U0001f600", "", "WAIT\x01true"])
).map("\x02".join)
ENTRIES = st.lists(
    st.builds(BatchEntry, st.integers(-(2**31), 2**31 - 1), st.binary(max_size=50), PROPERTIES), max_size=5
)
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
    assert encode_batch(entries) == VECTOR_BATCH
    assert decode_batch(VECTOR_BATCH) == entries


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
@example(VECTOR_BATCH + VECTOR_BATCH[:19])
@example(VECTOR_BATCH[:-1])
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
