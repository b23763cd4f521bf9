from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol import frame as frames_of
from rocketlet.protocol.codes import VERSION
from rocketlet.protocol.config import MAX_FRAME_BYTES, MAX_LAYOUT_FIELDS, MAX_LAYOUTS
from rocketlet.protocol.frame import (
    JSON,
    MSGPACK,
    ROCKETMQ,
    Frame,
    FrameCursor,
    FrameError,
    FrameReader,
    encode,
    encode_head,
    encode_msgpack_head,
)

from ..support.requests import raw_frame

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
FRAMES = st.builds(
    Frame,
    code=st.integers(0, 2**15 - 1),
    opaque=INT32,
    ext=st.dictionaries(TEXT, TEXT, max_size=8),
    body=st.binary(max_size=200),
    flag=st.integers(0, 3),
    remark=st.none() | TEXT,
    language=st.integers(0, 12),
    version=st.integers(0, 500),
    serialize_type=st.sampled_from([JSON, ROCKETMQ, MSGPACK]),
)


@given(st.lists(FRAMES, max_size=5))
def test_frames_survive_the_wire_whole(frames: list[Frame]) -> None:
    assert FrameReader().feed(b"".join(map(encode, frames))) == frames


@given(FRAMES)
def test_a_head_alone_is_what_stands_before_the_body(frame: Frame) -> None:
    whole = encode(frame._replace(remark=None, version=VERSION, serialize_type=MSGPACK))
    head = encode_msgpack_head(frame.code, frame.flag, frame.opaque, frame.language, frame.ext, len(frame.body))
    assert head + frame.body == whole


@given(st.lists(FRAMES, min_size=1, max_size=3), st.data())
def test_frames_survive_the_wire_in_any_pieces(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, read = FrameReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[begin:end])
    assert read == frames


@given(FRAMES)
def test_frames_survive_the_wire_one_byte_at_a_time(frame: Frame) -> None:
    reader, read = FrameReader(), []
    for byte in encode(frame):
        read += reader.feed(bytes((byte,)))
    assert read == [frame]


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_waited_for_but_never_breaks_the_reader(data: bytes) -> None:
    try:
        frames = FrameReader().feed(data)
    except FrameError:
        return
    assert all(isinstance(frame, Frame) for frame in frames)


@given(FRAMES, st.data())
def test_a_frame_with_a_changed_byte_is_a_frame_or_refused(frame: Frame, data: st.DataObject) -> None:
    stream = bytearray(encode(frame))
    stream[data.draw(st.integers(8, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = FrameReader().feed(bytes(stream))
    except FrameError:
        return
    assert len(read) == 1


def test_the_contracts_binary_vector() -> None:
    data = bytes.fromhex("000000250100002100690001990000000900000000000000000000000c0005746f7069630000000154")
    (frame,) = FrameReader().feed(data)
    assert (frame.code, frame.opaque, frame.version, frame.ext) == (105, 9, 409, {"topic": "T"})
    assert encode(frame) == data


def test_the_contracts_json_vector_is_read() -> None:
    header = (
        b'{"code":105,"extFields":{"topic":"T"},"flag":0,"language":"JAVA","opaque":9,'
        b'"serializeTypeCurrentRPC":"JSON","version":409}'
    )
    (frame,) = FrameReader().feed(bytes.fromhex("0000007f0000007b") + header)
    assert (frame.code, frame.opaque, frame.language, frame.ext) == (105, 9, 0, {"topic": "T"})


@pytest.mark.parametrize(("code", "kind"), [(2**15 - 1, ROCKETMQ), (2**15, JSON), (77_002, JSON)])
def test_a_code_that_a_binary_header_cannot_hold_goes_as_json(code: int, kind: int) -> None:
    frame = Frame(code, 9, {"topic": "T"}, b"body", serialize_type=ROCKETMQ)
    for data in (encode(frame), encode_head(frame, len(frame.body)) + frame.body):
        assert FrameReader().feed(data) == [frame._replace(serialize_type=kind)]


@pytest.mark.parametrize(
    ("header", "ext"),
    [
        (b'{"code":30,"opaque":1,"extFields":{"queueId":3,"order":true,"x":null}}', {"queueId": "3", "order": "true"}),
        (b'{"code":"30","opaque":1,"language":"KLINGON","extFields":{}}', {}),
        (b'{"code":30,"opaque":1,"language":9,"remark":"","unknown":[1]}', {}),
    ],
)
def test_json_headers_are_read_as_leniently_as_java_does(header: bytes, ext: dict[str, Any]) -> None:
    size = len(header)
    (frame,) = FrameReader().feed((size + 4).to_bytes(4, "big") + size.to_bytes(4, "big") + header)
    assert (frame.code, frame.ext) == (30, ext)


@pytest.mark.parametrize(
    "data",
    [
        (0).to_bytes(4, "big"),
        (3).to_bytes(4, "big"),
        (-1 & 0xFFFFFFFF).to_bytes(4, "big"),
        (MAX_FRAME_BYTES - 3).to_bytes(4, "big"),
        bytes.fromhex("0000000400000001"),  # a header longer than the frame
        bytes.fromhex("0000000605000002") + b"{}",  # an unknown serialize type
        bytes.fromhex("0000000600000002") + b"{}",  # no code
        bytes.fromhex("000000054d000001") + b"\xc0",  # MessagePack, but nil
    ],
)
def test_what_cannot_be_a_frame_is_refused_immediately(data: bytes) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(data)


_INFINITY = float("inf")
_VALUES: list[Any] = [None, 1.5, _INFINITY, [1], {"a": 1}, b"x"]
_EXTS: list[Any] = [None, [], "x", {1: "x"}, {None: "x"}, {b"x": "x"}, *({"queueId": value} for value in _VALUES)]
_REMARKS: list[Any] = [1, False, b"x", ["x"]]
_CODES: list[Any] = [None, True, 11.0, "11", 2**31]


@pytest.mark.parametrize(
    "header",
    [
        *([11, 0, 1, 12, 401, None, ext] for ext in _EXTS),
        *([11, 0, 1, 12, 401, remark, {}] for remark in _REMARKS),
        *([code, 0, 1, 12, 401, None, {}] for code in _CODES),
        [11, 0, 1, 12, 401, None],
        [11, 0, 1, 12, 401, None, {}, 0],
    ],
    ids=repr,
)
def test_a_value_that_no_header_has_is_refused_where_it_is_decoded(header: list[Any]) -> None:
    """MessagePack has more types than a header. Nobody behind the decoder expects them: int(inf) is an OverflowError."""
    data = msgpack.packb(header)
    with pytest.raises(FrameError):
        FrameReader().feed(struct.pack(">II", 4 + len(data), MSGPACK << 24 | len(data)) + data)


@pytest.mark.parametrize("cut", [3, 7, 9, 30])
@pytest.mark.parametrize("header", [0x09_00_0008, 0x02_00_0080, 0x02_00_0010])
def test_a_header_that_cannot_be_is_refused_also_if_it_comes_in_two_pieces(header: int, cut: int) -> None:
    reader = FrameReader(max_header_bytes=15)
    data = struct.pack(">II", 60, header) + bytes(56)
    with pytest.raises(FrameError, match="serialize type"):
        reader.feed(data[:cut])
        reader.feed(data[cut:])


def test_the_largest_frame_is_read() -> None:
    frame = Frame(10, body=b"x" * 100)
    overhead = len(encode(frame)) - 100
    largest = frame._replace(body=b"x" * (MAX_FRAME_BYTES - overhead))
    assert FrameReader().feed(encode(largest)) == [largest]
    with pytest.raises(FrameError):
        FrameReader().feed(encode(largest._replace(body=largest.body + b"x")))


# One after the other, each decoded when its turn comes


def taken(cursor: FrameCursor) -> list[Frame]:
    frames = []
    while (frame := cursor.next()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(FRAMES, min_size=1, max_size=3), st.booleans(), st.data())
def test_cursor_returns_the_frames_of_any_pieces(frames: list[Frame], is_kept: bool, data: st.DataObject) -> None:
    stream = b"".join(map(encode, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    cursor, read = FrameCursor(1000), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        assert cursor.feed(stream[begin:end]) == cursor.has_frame
        if not is_kept:  # otherwise all are taken at the end
            read += taken(cursor)
            assert not cursor.has_frame
    assert read + taken(cursor) == frames
    assert cursor.held_bytes == 0


@pytest.mark.parametrize("cut", [3, 7, 9, 30])
@pytest.mark.parametrize("garbage", [struct.pack(">II", 60, 0x09_00_0008) + bytes(56), b"\xff" * 40, bytes(40)])
def test_cursor_returns_the_frames_before_bytes_that_are_no_frame(garbage: bytes, cut: int) -> None:
    frame, cursor = Frame(10, body=b"x"), FrameCursor(1000)
    cursor.feed(encode(frame) + garbage[:cut])
    assert cursor.next() == frame
    with pytest.raises(FrameError):
        cursor.next()
        cursor.feed(garbage[cut:])
        cursor.next()


def test_cursor_knows_bytes_after_the_next_frame_and_puts_frames_back() -> None:
    first, second = (encode(Frame(10, number)) for number in (1, 2))
    cursor = FrameCursor(1000)
    cursor.feed(first + second)
    assert cursor.has_several
    assert [cursor.next(), cursor.has_several] == [Frame(10, 1), False]
    cursor.put_back(first)
    assert [frame.opaque for frame in taken(cursor)] == [1, 2]


# Layouts of binary headers


def binary_fields(ext: dict[str, str]) -> bytes:
    """The part of a header that holds the fields."""
    parts = []
    for key, value in ext.items():
        name, text = key.encode(), value.encode()
        parts += [len(name).to_bytes(2, "big"), name, len(text).to_bytes(4, "big"), text]
    return b"".join(parts)


def layouts() -> dict[int, Any]:
    """The layouts that later headers may have."""
    return frames_of._layouts


def decoded(block: bytes) -> Frame:
    """A frame whose header has these bytes as its fields."""
    header = struct.pack(">hBhiiii", 1, 0, VERSION, 7, 0, 0, len(block)) + block
    (frame,) = FrameReader().feed(raw_frame(header, serialize_type=ROCKETMQ))
    return frame


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=4), max_size=6), st.data())
def test_binary_header_with_a_known_layout_is_decoded_like_one_without(
    ext: dict[str, str], data: st.DataObject
) -> None:
    """This holds for other values, other sizes, other keys and garbage."""
    block = binary_fields(ext)
    other = bytearray(block)
    for _ in range(data.draw(st.integers(0, 3)) if block else 0):
        other[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    layouts().clear()
    scanned = decoded(block)
    layouts().clear()
    other_scanned = decoded(bytes(other))
    layouts().clear()
    decoded(block)
    assert decoded(block) == scanned
    assert decoded(bytes(other)) == other_scanned


def test_first_layout_of_a_size_is_kept() -> None:
    layouts().clear()
    for ext in (
        {"a": "xy", "b": "z"}, {"a": "vw", "b": "u"}, {"a": "x", "b": "yz"}, {"a": "xy", "c": "z"}, {"bc": "x", "a": "y"}
    ):  # fmt: skip
        assert decoded(binary_fields(ext)).ext == ext
        assert len(layouts()) == 1


def test_layouts_are_limited() -> None:
    layouts().clear()
    fields = {f"k{number:02}": "v" for number in range(MAX_LAYOUT_FIELDS + 1)}
    decoded(binary_fields(fields))
    assert not layouts()
    fields.popitem()
    decoded(binary_fields(fields))
    assert len(layouts()) == 1
    for size in range(1, 2 * MAX_LAYOUTS):
        decoded(binary_fields({"a": "x" * size}))
        assert len(layouts()) <= MAX_LAYOUTS


def test_layouts_with_long_names_are_not_kept() -> None:
    layouts().clear()
    for size in (10, 1024, 1025, 30_000):
        ext = {"k" * size: "v"}
        assert decoded(binary_fields(ext)).ext == ext
    assert len(layouts()) == 2
